"""A picture of matplotlib's as SVG that belongs into a page: named, described, in the page's colours and font.

The page's security policy allows no style attributes, so each style becomes a presentation attribute, and a colour of
the light palette a class, which the page's style sheet colours by the reader's scheme.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from nan_detector._render.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {color: name for name, color in LIGHT.items()}
_LEFT_OUT = ("metadata", "style")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT_SIZE = re.compile(r"([\d.]+)px")


def settings() -> dict[str, str]:
    """What matplotlib must be told before the picture is drawn: text as text, and names that stay the same."""
    return {"svg.fonttype": "none", "svg.hashsalt": "nan-detector"}


def to_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an SVG element for a page.

    Args:
        figure: What was drawn under `settings`, in colours of the light palette.
        name: Short and unique in the page; made part of every id.
        title: What a screen reader calls the picture.
        description: What is to be seen in it, in words.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(out, metadata={"Date": None})
    # Our own picture's SVG: matplotlib has escaped what came from the log.
    root = ElementTree.fromstring(out.getvalue())
    used = _references(root)
    _rewrite(root, name, used)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib.update({"role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    texts = []
    for tag, text in (("title", title), ("desc", description)):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        texts.append(element)
    root[:0] = texts
    return ElementTree.tostring(root, encoding="unicode")


def _references(root: ElementTree.Element) -> set[str]:
    used = set()
    for element in root.iter():
        for key, value in element.attrib.items():
            used.update(_REFERENCE.findall(value))
            if key.endswith("href") and value.startswith("#"):
                used.add(value[1:])
    return used


def _rewrite(element: ElementTree.Element, name: str, used: set[str]) -> None:
    element.tag = _bare(element.tag)
    attributes = {_bare(k): v for k, v in element.attrib.items()}
    style = attributes.pop("style", "")
    if attributes.get("id", "") not in used:
        attributes.pop("id", None)
    for key, value in attributes.items():
        if key == "id":
            attributes[key] = f"{name}-{value}"
        elif key == "href":
            attributes[key] = f"#{name}-{value[1:]}"
        else:
            attributes[key] = _REFERENCE.sub(rf"url(#{name}-\1)", value)
    classes = []
    for part in filter(None, (p.strip() for p in style.split(";"))):
        key, _, value = (p.strip() for p in part.partition(":"))
        if key in ("fill", "stroke") and value in _NAMES:
            classes.append(f"{key}-{_NAMES[value]}")
        if key == "font":  # a shorthand, which is no attribute; the page has a font of its own
            size = _FONT_SIZE.search(value)
            key, value = "font-size", size[1] if size else "10"
            if "bold" in part or "700" in part:
                attributes["font-weight"] = "bold"
        attributes[key] = value
    if classes:
        attributes["class"] = " ".join(classes)
    element.attrib.clear()
    element.attrib.update(attributes)
    element.tail = None if (element.tail or "").isspace() else element.tail
    if element.tag != "text" and element.tag != "tspan" and (element.text or "").isspace():
        element.text = None
    for child in list(element):
        if _bare(child.tag) in _LEFT_OUT:
            element.remove(child)
        else:
            _rewrite(child, name, used)


def _bare(name: str) -> str:
    return name.rpartition("}")[2]
