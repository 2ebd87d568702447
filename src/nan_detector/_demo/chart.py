"""A bar chart in text."""

from __future__ import annotations

from collections.abc import Mapping

_EIGHTHS = " ▏▎▍▌▋▊▉"
_BLOCK = "█"


def bars(values: Mapping[str, float], *, unit: str, width: int) -> list[str]:
    """One line per value: its name, a bar in proportion to it, and the number.

    Args:
        values: Numbers of at least 0, by name.
        unit: Unit of the numbers.
        width: Columns to fill; a bar has at least one column, however little is left beside the words.

    Returns:
        Lines of at most `width` columns, where names and numbers leave room for it.
    """
    if not values:
        return []
    names = max(map(len, values))
    numbers = {name: f"{value:.3f} {unit}" for name, value in values.items()}
    room = max(1, width - names - max(map(len, numbers.values())) - 3)
    longest = max(values.values()) or 1.0
    return [f"{name.ljust(names)}  {_bar(value / longest, room)} {numbers[name]}" for name, value in values.items()]


def _bar(part: float, room: int) -> str:
    eighths = round(part * room * 8)
    whole, rest = divmod(eighths, 8)
    return (_BLOCK * whole + (_EIGHTHS[rest] if rest else "")).ljust(1)
