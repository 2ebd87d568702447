"""A capsule opened: plain data and tensors, checked. Nothing of it is run or unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nan_detector._capsule import layout
from nan_detector._capsule.tensors import Reader
from nan_detector._errors import CapsuleError
from nan_detector._record import _decode
from nan_detector._records import NaNEvent, record_from_dict
from nan_detector._schema import LARGEST, mismatch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Capsule:
    """What a capsule holds; tensors are read when they are needed.

    Attributes:
        path: Its folder.
        event: What was found when it was written.
        data: Its `step.json`.
    """

    path: Path
    event: NaNEvent
    data: Mapping[str, Any]

    @property
    def step(self) -> Mapping[str, Any]:
        """The recorded calls."""
        return _object(self.data, "step")

    @property
    def state(self) -> Mapping[str, Any]:
        """Names of parameters, buffers and modules."""
        return _object(self.data, "state")

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions and settings."""
        return _object(self.data, "environment")

    @property
    def history(self) -> dict[str, tuple[float, ...]]:
        """The flight recorder's last rows, by column."""
        found = _decode(_object(self.data, "history"), "float_map")
        out: dict[str, tuple[float, ...]] = {}
        for name, values in found.items():
            if isinstance(values, tuple):
                numbers = [_decode(v, float) for v in values]
                out[str(name)] = tuple(
                    float(v)
                    for v in numbers
                    if isinstance(v, (int, float)) and (isinstance(v, float) or abs(v) < LARGEST)
                )
        return out

    def step_tensors(self) -> Reader:
        """The batch, random states and what else the calls used."""
        return Reader(self.path / layout.STEP_TENSORS)

    def state_tensors(self) -> Reader | None:
        """Parameters and buffers; None where they were too large."""
        return Reader(self.path / layout.STATE_TENSORS) if self.state.get("kept") else None

    def gradients(self) -> dict[tuple[int, int], Tensor]:
        """What arrived at the outputs of the models: by entry, and position among its outputs."""
        if not (self.path / layout.GRADIENTS).exists():
            return {}
        data = _json(self.path / layout.GRADIENTS)
        reader = Reader(self.path / layout.GRADIENT_TENSORS)
        try:
            return {(int(number), int(position)): reader.take(spec) for number, position, spec in data}
        except (TypeError, ValueError) as error:
            if isinstance(error, CapsuleError):
                raise
            raise CapsuleError(f"{layout.GRADIENTS} is no list of gradients: the capsule is damaged.") from None


def open_capsule(path: Path) -> Capsule:
    """The capsule in folder `path`.

    Raises:
        CapsuleError: It is none, is damaged, or was written by a later release.
    """
    if why := layout.why_no_capsule(path):
        raise CapsuleError(f"{path} {why}")
    data = _json(path / layout.STEP)
    if not isinstance(data, dict):
        raise CapsuleError(f"{layout.STEP} is no object: the capsule is damaged.")
    version = data.get("format")
    if version != layout.FORMAT:
        raise CapsuleError(
            f"the capsule has format {ascii(version)[:20]} and this release reads {layout.FORMAT}: use the release of "
            "nan-detector that wrote it."
        )
    capsule = Capsule(path, _event(path / layout.EVENT), data)
    for part in (capsule.step, capsule.state, capsule.environment, capsule.history):
        assert part is not None
    return capsule


def _event(path: Path) -> NaNEvent:
    data = _json(path)
    try:
        record = record_from_dict(data)
        wrong = mismatch(record)
    except (ValueError, TypeError, AttributeError, RecursionError):
        record, wrong = None, "a value does not have the shape that its field needs"
    if isinstance(record, NaNEvent) and wrong is None:
        return record
    raise CapsuleError(f"{layout.EVENT} is no event ({wrong or 'another record'}): the capsule is damaged.")


def _json(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: reading it might never end
            raise CapsuleError(f"{path} is no file: the capsule is damaged.")
        if path.stat().st_size > layout.MAX_JSON_BYTES:
            raise CapsuleError(f"{path.name} has more than {layout.MAX_JSON_BYTES >> 20} MiB, which no capsule has.")
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise CapsuleError(f"{path} cannot be read ({error.strerror}).") from None
    except RecursionError:
        raise CapsuleError(f"{path.name} is nested too deeply.") from None
    except ValueError as error:
        if isinstance(error, CapsuleError):
            raise
        raise CapsuleError(f"{path.name} is no JSON ({str(error)[:80]}): the capsule is damaged.") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    if not isinstance(found, dict):
        raise CapsuleError(f"{layout.STEP} has no {name!r}: the capsule is damaged.")
    return found
