"""Hypothesis strategies for every record, made from the records' own annotations: a new field is covered at once."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from nan_detector._record import Record

FINITE = st.floats(allow_nan=False, allow_infinity=False)

#: Text as it comes from a user's source, lone surrogates (undecodable file names) included.
TEXT = st.text(alphabet=st.characters(codec=None), max_size=12)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@cache
def records_of(kind: type[Record]) -> st.SearchStrategy[Any]:
    """Records of `kind`; fields that may be NaN or infinite are so, often."""
    hints = get_type_hints(kind)
    return st.builds(
        kind,
        **{
            f.name: _values(hints[f.name], may_be_non_finite=f.metadata.get("kind") is float)
            for f in dataclasses.fields(kind)  # type: ignore[arg-type]  # every subclass is a dataclass
        },
    )


def _values(hint: Any, may_be_non_finite: bool) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(_values(args[0], may_be_non_finite), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, JSON_VALUES, max_size=3)
    if args:  # a union
        return st.one_of([_values(a, may_be_non_finite) for a in args])
    if isinstance(hint, type) and issubclass(hint, Record):
        return st.deferred(lambda: records_of(hint))
    if hint is float:
        return FINITE | st.sampled_from([math.nan, math.inf, -math.inf]) if may_be_non_finite else FINITE
    return {str: TEXT, int: st.integers(-(2**63), 2**63), bool: st.booleans(), type(None): st.none()}[hint]


def same(a: object, b: object) -> bool:
    """Equality of records in which NaN equals NaN, and 1 is not 1.0 nor True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Record):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b
