"""The ``nan-detector`` command.

`app` reads the command line and turns errors into exit statuses. A subcommand is a file ``<name>_command.py``, whose
docstring is its help, with a function ``command`` that takes the options and returns the `Action` to do: nothing is
done before the whole command line has been read, and nothing of the parser stands around what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What a subcommand does once its options are read; gives the exit status.
Action = Callable[[], int]


class CommandError(Exception):
    """What a command cannot do, in one line for its user: the option, its value and the way out.

    Attributes:
        status: Exit status of the process.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """`value`, if it is allowed.

    Raises:
        CommandError: It is not; the message names what is.
    """
    if value not in allowed:
        raise CommandError(f"{option}={value!r} is not one of {', '.join(map(repr, allowed))}.")
    return value


def whole_number(option: str, value: str) -> int:
    """`value` as a whole number from 0.

    Raises:
        CommandError: It is none.
    """
    # Not `isdecimal` alone: torch takes seeds of 64 bits.
    if not (value.isascii() and value.isdecimal() and int(value) < 2**63):
        raise CommandError(f"{option}={value!r} must be a whole number from 0, such as 3.")
    return int(value)
