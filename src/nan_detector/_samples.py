"""Names of the samples of a batch, where the batch itself carries them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._entries import Entry, Made, Outside, Packed, tokens_in
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._trace import Birth

#: Last word of a key under which a data set puts what tells its samples apart.
_WORDS = frozenset(
    "id ids idx idxs index indices indexes path paths uid uids guid guids uuid uuids file files filename filenames "
    "filepath filepaths".split()
)
#: First words of keys that end like these and mean something else.
_OTHER = frozenset("input inputs position token tokens decoder encoder class label labels category cache group".split())
#: Longest name that is shown.
MAX_NAME = 120


def as_it_came(birth: Birth, entries: Iterable[Entry]) -> Birth:
    """`birth` of a tensor of the batch, with the shape and places that the user knows it by.

    A recurrent layer with ``batch_first`` turns its input before it looks at a value, and so does a ``permute``: the
    first operation that met the bad values saw them with time where the samples stand.
    """
    if birth.output is None:
        return birth
    for token in (t for e in entries for t in tokens_in((e.args, e.kwargs)) if isinstance(t, Outside)):
        if token.name != birth.tensor_name or token.gone or token.changed:
            continue
        stats = _finite.stats(token.tensor)
        turned = stats.shape != birth.output.shape and (stats.numel, stats.bad_count) == (
            birth.output.numel,
            birth.output.bad_count,
        )
        if turned and stats.bad_count:
            first, rows = _finite.first_bad_index(token.tensor), _finite.bad_rows(token.tensor)
            return replace(birth, output=stats, first_bad_index=first, sample_index=rows, guilty_rows=rows)
    return birth


def sample_ids(names: Names, entries: Iterable[Entry], rows: tuple[int, ...], size: int, near: str) -> tuple[str, ...]:
    """Names of samples `rows` of a batch of `size`, from the arguments of the watched models' calls; () where none.

    Args:
        names: Names of the watched models.
        entries: The calls of the step.
        rows: Positions of the samples in the batch.
        size: How many samples the bad tensor holds.
        near: Path of the bad tensor: a container that holds both is asked first.
    """
    if not rows:
        return ()
    found = [c for e in entries if e.kind == "root" for c in _columns(names.named_arguments(e), size)]
    if not found:
        return ()
    _, column = max(found, key=lambda c: _shared(c[0], near))
    return tuple(str(column[r])[:MAX_NAME] for r in rows if r < len(column))


def _shared(path: str, near: str) -> int:
    """Length of the common beginning of two paths."""
    return next((i for i, (a, b) in enumerate(zip(path, near, strict=False)) if a != b), min(len(path), len(near)))


def _columns(arguments: Iterable[tuple[str, Any]], size: int) -> Iterator[tuple[str, list[Any]]]:
    for path, value in arguments:
        if _is_key(path) and (column := _column(value, size)) is not None:
            yield path, column
        yield from _in_containers(value, path, size, 6)


def _in_containers(value: Any, path: str, size: int, depth: int) -> Iterator[tuple[str, list[Any]]]:
    if depth == 0:
        return
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, Packed):
        pairs = value.items
    elif isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            if isinstance(v, (Packed, Mapping, list, tuple)):
                yield from _in_containers(v, f"{path}[{i}]", size, depth - 1)
        return
    else:
        return
    for key, v in pairs:
        inner = f"{path}.{key}" if not isinstance(value, Mapping) else f'{path}["{key}"]'
        if isinstance(key, str) and _is_key(key) and (column := _column(v, size)) is not None:
            yield inner, column
        else:
            yield from _in_containers(v, inner, size, depth - 1)


def _is_key(key: str) -> bool:
    words = key.lower().replace("-", "_").split("_")
    return words[-1] in _WORDS and words[0] not in _OTHER


def _column(value: Any, size: int) -> list[Any] | None:
    """`value` as one name per sample, if it is that."""
    if isinstance(value, (Made, Outside)):
        t = value.tensor if isinstance(value, Outside) else value.entry.made[value.position]()
        if t is None or t.dim() != 1 or len(t) != size or t.is_floating_point() or t.is_complex():
            return None
        with quiet():
            return list(t.tolist()) if t.dtype is not torch.bool else None
    if isinstance(value, (list, tuple)) and len(value) == size and not isinstance(value, str):
        plain = all((isinstance(v, (str, int)) and not isinstance(v, bool)) or hasattr(v, "__fspath__") for v in value)
        return list(value) if plain else None
    return None
