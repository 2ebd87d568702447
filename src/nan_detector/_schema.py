"""The JSON schema of the log, made from the records themselves, and the check that a record keeps to it.

``python -m nan_detector._schema FILE`` writes the schema; a test compares the committed one with it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nan_detector._record import SCHEMA_VERSION, Record
from nan_detector._records import RECORDS

_NON_FINITE = ["nan", "inf", "-inf"]

#: Resolving the annotations of a record takes far longer than checking one, and a log has a row a step.
_HINTS: dict[type[Record], dict[str, Any]] = {}


#: No count, step or size is this large; JSON's integers have no bound, and beyond a float's they stop what draws them.
LARGEST = 2**64


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of one line of the log.

    Unknown keys are allowed: a later release with the same `schema_version` may add some. Required is what
    `from_dict` cannot do without.
    """
    definitions: dict[str, Any] = {
        "non_finite": {"description": "A float that JSON has no number for.", "enum": _NON_FINITE}
    }
    for kind in RECORDS.values():
        _define(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One line of a nan-detector event log",
        "oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in RECORDS.values()],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


def schema_text() -> str:
    """`schema` as the text of its file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def mismatch(record: Record) -> str | None:
    """The first field of `record`, or of a record in it, whose value is not of its type; None where all are.

    A field with a closed list of words takes any word: a later release may know more of them.
    """
    return _mismatch(record, "")


def main(argv: list[str]) -> int:
    """Write the schema to the file that `argv` names."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m nan_detector._schema FILE\n")
        return 2
    Path(argv[0]).write_text(schema_text(), encoding="utf-8")
    return 0


def _define(kind: type[Record], definitions: dict[str, Any]) -> None:
    if kind.__name__ in definitions:
        return
    definitions[kind.__name__] = {}  # so that a record that holds its own kind would end here
    properties: dict[str, Any] = {}
    required = []
    if kind.record:
        properties["schema_version"] = {"const": SCHEMA_VERSION}
        properties["record"] = {"const": kind.record}
        required += ["schema_version", "record"]
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]  # every subclass is a dataclass
        properties[f.name] = _described(_hints(kind)[f.name], definitions, f.metadata.get("kind") is float)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    for name in kind.derived:
        getter = getattr(kind, name).fget
        properties[name] = {
            "description": getter.__doc__,
            "readOnly": True,
            **_described(get_type_hints(getter)["return"], definitions, may_be_non_finite=True),
        }
    definitions[kind.__name__] = {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").partition("\n\n")[0].split()),
        "properties": properties,
        "required": required,
    }


def _described(hint: Any, definitions: dict[str, Any], may_be_non_finite: bool) -> dict[str, Any]:
    """The schema of a field's type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        parts = [_described(a, definitions, may_be_non_finite) for a in args]
        return {"anyOf": [piece for part in parts for piece in part.get("anyOf", [part])]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _described(args[0], definitions, may_be_non_finite)}
    if origin is dict:
        values = {} if args[1] is Any else {"additionalProperties": _described(args[1], definitions, may_be_non_finite)}
        return {"type": "object", **values}
    if isinstance(hint, type) and issubclass(hint, Record):
        _define(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if hint is float and may_be_non_finite:
        return {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/non_finite"}]}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}[hint]}


def _mismatch(record: Record, path: str) -> str | None:
    for name, hint in _hints(type(record)).items():
        value = getattr(record, name)
        if not _fits(value, hint):
            return f"{path}{name}={_shown(value)} is not {_worded(hint)}"
        for nested in value if isinstance(value, tuple) else (value,):
            if isinstance(nested, Record) and (wrong := _mismatch(nested, f"{path}{name}.")):
                return wrong
    return None


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, a) for a in args)
    if origin is Literal:
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, args[0]) for v in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, float) or (_is_int(value) and abs(value) < LARGEST)
    if hint is int:
        return _is_int(value) and abs(value) < LARGEST
    return isinstance(value, hint)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _worded(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_worded(a) for a in args)
    if origin is tuple:
        return f"a list, each {_worded(args[0])}"
    words = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    if origin is Literal:
        return words[str]
    return words.get(hint, "an object")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hints(kind: type[Record]) -> dict[str, Any]:
    known = _HINTS.get(kind)
    if known is None:
        hints = get_type_hints(kind)
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # every subclass is a dataclass
        known = _HINTS[kind] = {f.name: hints[f.name] for f in fields}
    return known


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
