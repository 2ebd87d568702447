"""``python -m nan_detector``: the same as the ``nan-detector`` command."""

import sys

from nan_detector._cli.app import main

if __name__ == "__main__":
    sys.exit(main())
