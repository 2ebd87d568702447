"""What every record is made of: fields that turn into JSON and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, TypeVar

SCHEMA_VERSION = 1

R = TypeVar("R", bound="Record")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Record:
    """Base of all records: conversion to and from JSON-safe dictionaries."""

    __slots__ = ()  # without it the slots of every record would be in vain

    #: Value of the "record" key of a log line; empty for records that only live inside others.
    record: ClassVar[str] = ""
    #: Properties that readers of the log expect beside the fields.
    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values: tuples become lists, non-finite floats the strings "nan", "inf", "-inf"."""
        out: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "record": self.record} if self.record else {}
        for f in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            out[f.name] = encode(getattr(self, f.name))
        for name in self.derived:
            out[name] = encode(getattr(self, name))
        return out

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record that `to_dict` gave. Unknown keys (a newer version's) are ignored.

        Raises:
            ValueError: A key that this record cannot do without is missing; the message names it.
        """
        kwargs: dict[str, Any] = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
            if f.name not in data:
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                    raise ValueError(f"{cls.__name__} needs the key {f.name!r}, which this record does not have.")
                continue
            kwargs[f.name] = _decode(data[f.name], f.metadata.get("kind"))
        return cls(**kwargs)


def encode(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    return str(value)


def _decode(value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if kind == "float_map" and isinstance(value, Mapping):
        return {k: _decode(v, float) for k, v in value.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        if isinstance(value, list):
            return tuple(kind.from_dict(v) for v in value)
        return None if value is None else kind.from_dict(value)
    return tuple(_decode(v, kind) for v in value) if isinstance(value, list) else value


def float_field(default: Any = dataclasses.MISSING) -> Any:
    """A field that holds a float, which JSON may give as "nan", "inf" or "-inf"."""
    return (
        field(metadata={"kind": float})
        if default is dataclasses.MISSING
        else field(default=default, metadata={"kind": float})
    )


def nested_field(kind: type[Record], default: Any = dataclasses.MISSING) -> Any:
    """A field that holds a record of type `kind`, or a tuple of them."""
    return (
        field(metadata={"kind": kind})
        if default is dataclasses.MISSING
        else field(default=default, metadata={"kind": kind})
    )
