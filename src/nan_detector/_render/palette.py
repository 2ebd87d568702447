"""The colours of the HTML report, light and dark; a test holds their contrast.

Text has at least 7:1 on each ground (WCAG 2.2, AAA), lines and edges at least 3:1. No colour says anything alone.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Grounds that text stands on.
GROUNDS = ("ground", "card", "code", "mark")
#: Colours of text.
TEXTS = ("ink", "soft", "link", "bad", "warn", "good")
#: Colours of lines and edges.
LINES = ("edge", "event", "line1", "line2", "line3", "line4", "line5", "line6", "others")

LIGHT: Mapping[str, str] = {
    "ground": "#f4f5f7",
    "card": "#ffffff",
    "code": "#f0f2f5",
    "mark": "#ffe9e3",
    "ink": "#16191d",
    "soft": "#41474f",
    "link": "#0a4a85",
    "bad": "#8c1a0b",
    "warn": "#693f00",
    "good": "#0b5127",
    "edge": "#7d858f",
    "grid": "#dfe2e6",
    "event": "#c2410c",
    "line1": "#0068a8",
    "line2": "#9a3d8f",
    "line3": "#00785a",
    "line4": "#8a5a00",
    "line5": "#4a55c8",
    "line6": "#3c4148",
    "others": "#868d96",
}
DARK: Mapping[str, str] = {
    "ground": "#101317",
    "card": "#181c22",
    "code": "#20262e",
    "mark": "#43221c",
    "ink": "#eef1f4",
    "soft": "#c2c9d1",
    "link": "#8fc7ff",
    "bad": "#ffb3a6",
    "warn": "#f3c669",
    "good": "#8fdda8",
    "edge": "#7c8692",
    "grid": "#2e353e",
    "event": "#ff8f5a",
    "line1": "#5db6f2",
    "line2": "#e093d3",
    "line3": "#3fcb9d",
    "line4": "#e2b84f",
    "line5": "#a9b1ff",
    "line6": "#d5dae0",
    "others": "#7f8893",
}


def variables(colors: Mapping[str, str]) -> str:
    """The colours as CSS custom properties."""
    return " ".join(f"--{name}: {value};" for name, value in colors.items())


def contrast(one: str, other: str) -> float:
    """Contrast of two colours given as #rrggbb, from 1 to 21, as WCAG 2.2 defines it."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
