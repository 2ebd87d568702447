"""Which cell of a notebook a file name stands for.

IPython compiles each cell under a name of its own: ``<ipython-input-3-…>`` in older releases, a path such as
``/tmp/ipykernel_123/456.py``, where no file is, in newer ones. Neither is what its reader sees.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from nan_detector._source_text import clean

_NUMBERED = re.compile(r"<ipython-input-(\d+)-")
_KERNEL_FILE = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$")


def cell_of(filename: str) -> str | None:
    """The cell that was compiled under this name, as the notebook shows it ("In[3]"); None where it is no cell.

    Asks the IPython that runs here, which alone knows the numbers of newer names.
    """
    if numbered := _NUMBERED.match(filename):
        return f"In[{numbered[1]}]"
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return None
    try:
        # Its tracebacks ask the same: ("Cell", "In[3]"), or None for what is no cell.
        named = ipython.get_ipython().compile.format_code_name(filename)
    except Exception:  # no shell runs, or one of another make
        return None
    if isinstance(named, tuple) and len(named) == 2 and named[0] == "Cell" and isinstance(named[1], str):
        return clean(named[1])
    return None


def is_cell(filename: str) -> bool:
    """True for the name of a cell whose number is not known: one of another process."""
    return bool(_KERNEL_FILE.search(filename))
