"""The way of the bad values through the module tree, as nested data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nan_detector._records import NaNEvent, Site

#: Places that are shown, and levels of nesting: a log may name a module with any number of dots.
MOST_SITES, MOST_LEVELS = 60, 8


@dataclass(slots=True)
class Node:
    """A module on the way, or one that holds such modules.

    Attributes:
        name: The last part of its path.
        stops: What happened there: the place on the way, from 1, and the operation and phase.
        born: The bad value was born there.
        children: Modules in it.
    """

    name: str
    stops: list[tuple[int, str]] = field(default_factory=list)
    born: bool = False
    children: list[Node] = field(default_factory=list)


def tree(event: NaNEvent) -> list[Node]:
    """The modules that the event's values passed, nested as in the model; [] where no way is known."""
    top: list[Node] = []
    sites = way(event)
    for i, site in enumerate(sites):
        node = _node(top, _path(site))
        node.stops.append((i + 1, f"{site.op}, {site.phase}"))
        node.born = node.born or i == 0
    return top if len(sites) > 1 else []


def way(event: NaNEvent) -> Sequence[Site]:
    """The places passed, the birthplace first."""
    sites = event.spread[:MOST_SITES]
    birth = Site(event.op or event.call or "?", event.phase, event.layer_name, event.module_type, event.location)
    begins = bool(sites) and (sites[0].layer_name, sites[0].op) == (event.layer_name, birth.op)
    return sites if begins or not sites else (birth, *sites)


def _path(site: Site) -> list[str]:
    if not site.layer_name:
        return [f"outside any module ({site.phase})"]
    parts = site.layer_name.split(".")
    return [*parts[: MOST_LEVELS - 1], ".".join(parts[MOST_LEVELS - 1 :])] if len(parts) > MOST_LEVELS else parts


def _node(level: list[Node], path: Sequence[str]) -> Node:
    node = None
    for name in path:
        node = next((n for n in level if n.name == name), None)
        if node is None:
            node = Node(name)
            level.append(node)
        level = node.children
    assert node is not None  # a path has at least one part
    return node
