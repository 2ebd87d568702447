"""A recorded step made again from a capsule's JSON: entries on a tape, as if it had just been recorded.

Everything here comes from a file that may come from anywhere: each value is checked before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from nan_detector._calls import kind_of
from nan_detector._capsule.functions import function_named
from nan_detector._capsule.plain import decoded
from nan_detector._capsule.rebuilt import NOBODY, BatchNames, Rebuilt
from nan_detector._capsule.state import modules_by_path
from nan_detector._capsule.tensors import Reader, device_or_cpu
from nan_detector._entries import AUTOCAST_KEYS, Entry, Made, Outside
from nan_detector._errors import CapsuleError
from nan_detector._moment import Moment
from nan_detector._records import Location
from nan_detector._schema import mismatch
from nan_detector._source import Mark
from nan_detector._tape import Tape

Tensor = torch.Tensor

#: Tensors that one call may have given.
MAX_MADE = 100_000
_KINDS = ("call", "root", "backward", "scale")


class Rebuilder:
    """Makes the tape.

    Args:
        step: The "step" of a capsule's JSON.
        models: Models that have been given the capsule's state.
        reader: Its tensors.
    """

    def __init__(self, step: Mapping[str, Any], models: dict[str, torch.nn.Module], reader: Reader) -> None:
        self.step = step
        self.reader = reader
        self.modules = modules_by_path(models)
        self.out = Rebuilt(Tape(), BatchNames(models))
        self.parameters = dict(self.out.names.parameters())
        self._entries: list[Entry] = []
        self._tokens: list[Outside] = []
        self._generators: list[torch.Generator] = []

    def rebuild(self) -> Rebuilt:
        """The step.

        Raises:
            CapsuleError: The JSON is not what a capsule has.
        """
        try:
            return self._rebuilt()
        except OverflowError:
            raise CapsuleError("step.json holds a number that is too large: the capsule is damaged.") from None

    def _rebuilt(self) -> Rebuilt:
        tape = self.out.tape
        self._generators = [self._generator(g) for g in _listed(self.step, "generators")]
        self._tokens = [self._outside(o) for o in _listed(self.step, "outside")]
        for number, data in enumerate(_listed(self.step, "entries")):
            if not isinstance(data, dict):
                raise CapsuleError(f"step.json: entry {number} is no object.")
            entry = self._entry(data)
            entry.number = number
            self._entries.append(entry)
            tape.entries.append(entry)
        tape.outside = {t.ident: t for t in self._tokens if not t.gone}
        return self.out

    # -- calls -------------------------------------------------------------------------------------------------------

    def _entry(self, data: Mapping[str, Any]) -> Entry:
        kind = data.get("kind")
        if kind not in _KINDS:
            raise CapsuleError(f"step.json: {str(kind)[:40]!r} is no kind of call.")
        func, owner = self._function(data.get("func"), kind)
        args, kwargs = self._value(data.get("args")), self._value(data.get("kwargs"))
        if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(isinstance(k, str) for k in kwargs):
            raise CapsuleError("step.json: a call has no arguments that a call can have.")
        entry = Entry(func, args, kwargs, self._mark(data), bool(data.get("grad")), self._autocast(data), kind=kind)
        entry.writes, entry.raised = bool(data.get("writes")), bool(data.get("raised"))
        entry.rewrites = bool(data.get("rewrites"))
        if kind == "root" or "owner" in data:
            entry.owner = owner if kind == "root" else self._module(data["owner"])
        entry.made = [NOBODY] * _small(data.get("made"))
        if "rng" in data:
            entry.rng = self._tensors(data["rng"])
        entry.generators = self._states(data.get("generators", []))
        if data.get("scalar") is not None:
            entry.scalar = float(str(data["scalar"]))
        self.out.losses[entry] = self._tensors(data.get("losses", []))
        if kind == "root":
            entry.extra = self._moment(owner, data.get("moment"))
        return entry

    def _function(self, func: object, kind: str) -> tuple[Any, Any]:
        if isinstance(func, dict) and isinstance(func.get("unknown"), str):
            name = func["unknown"][:80]
            self.out.unknown.append(name)
            return _Unknown(name), None
        if kind == "root" and isinstance(func, dict):
            module = self._module(func.get("module"))
            return module, module
        found = function_named(func.get("torch")) if isinstance(func, dict) else None
        if found is None:
            name = func.get("torch") if isinstance(func, dict) else func
            raise CapsuleError(f"step.json names the function {ascii(name)[:80]}, which a capsule may not call.")
        kind_of(found)
        return found, None

    def _module(self, path: object) -> torch.nn.Module:
        module = self.modules.get(path) if isinstance(path, str) else None
        if module is None:
            raise CapsuleError(f"the model of --model has no module {ascii(path)[:80]}, which the step called.")
        return module

    def _mark(self, data: Mapping[str, Any]) -> Mark | None:
        mark = data.get("mark")
        if not isinstance(mark, dict):
            return None
        try:
            where = Location.from_dict(mark)
            if (wrong := mismatch(where)) is not None:
                raise ValueError(wrong)
            code = _somewhere.__code__.replace(
                co_filename=str(where.file),
                co_name=str(mark.get("name", "")),
                co_firstlineno=int(where.line),
            )
            if sys.version_info >= (3, 11):
                code = code.replace(co_qualname=str(where.function))
        except (ValueError, TypeError, OverflowError):
            raise CapsuleError("step.json: the line of a call is none.") from None
        call = mark.get("call")
        func = data.get("func")
        name = str(func.get("torch", "")).rpartition(".")[2] if isinstance(func, dict) else ""
        known = self.out.places.setdefault((where.file, where.line), [])
        known.append((where, name, call if isinstance(call, str) else None))
        return Mark(code, 0)

    def _autocast(self, data: Mapping[str, Any]) -> tuple[Any, ...] | None:
        found = self._value(data.get("autocast"))
        if found is None:
            return None
        try:
            *regions, cache = found
            kept = {str(d): (bool(on), dtype) for d, on, dtype in regions}
        except (TypeError, ValueError):
            raise CapsuleError("step.json: the autocast of a call is none.") from None
        if not torch.cuda.is_available() and kept.get("cuda", (False, None))[0]:
            kept["cpu"], kept["cuda"] = kept["cuda"], (False, None)
        return (*((d, *kept[d]) for d in AUTOCAST_KEYS if d in kept), bool(cache))

    # -- values ------------------------------------------------------------------------------------------------------

    def _value(self, value: object) -> Any:
        return decoded(value, self._reference)

    def _reference(self, kind: str, v: Any) -> Any:
        if kind == "tensor":
            return self.reader.take(v)
        if kind == "outside" and _is_index(v, self._tokens):
            return self._tokens[v]
        if kind == "generator" and _is_index(v, self._generators):
            return self._generators[v]
        if kind == "made" and isinstance(v, list) and len(v) == 2 and _is_index(v[0], self._entries):
            return Made(self._entries[v[0]], int(v[1]))
        if kind == "missing":
            self.out.lost.append(f"an argument of type {str(v)[:80]}")
            return _gone(str(v)[:80])
        raise CapsuleError(f"step.json: {kind[:40]!r} of {ascii(v)[:60]} is no argument of a call.")

    def _tensors(self, specs: object) -> tuple[Tensor, ...]:
        if not isinstance(specs, list):
            raise CapsuleError("step.json: a list of tensors is none.")
        return tuple(self.reader.take(s) for s in specs)

    def _states(self, pairs: object) -> tuple[tuple[torch.Generator, Tensor], ...]:
        if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
            raise CapsuleError("step.json: the states of generators are none.")
        return tuple((self._reference("generator", g), self.reader.take(state)) for g, state in pairs)

    def _generator(self, data: object) -> torch.Generator:
        if not isinstance(data, dict):
            raise CapsuleError("step.json: a generator is none.")
        if "module" in data:
            found = vars(self._module(data["module"])).get(str(data.get("attribute")))
            if isinstance(found, torch.Generator):
                return found
        return torch.Generator(device_or_cpu(data.get("device")))

    def _outside(self, data: object) -> Outside:
        if not isinstance(data, dict):
            raise CapsuleError("step.json: a tensor from outside the step is none.")
        name = data.get("name")
        if "parameter" in data:
            p = self.parameters.get(str(data["parameter"]))
            if p is None:
                raise CapsuleError(f"the model of --model has no parameter {ascii(data['parameter'])[:80]}.")
            token = Outside(p)
            token.parameter = True
            return token
        if data.get("tensor") is None:
            self.out.lost.append(str(name or "a tensor")[:80])
            return _gone(name if isinstance(name, str) else None)
        t = self.reader.take(data["tensor"])
        if data.get("opaque") or data.get("requires_grad"):
            t = t.requires_grad_()
        if data.get("opaque"):
            t = t.view_as(t)
        self.out.keep.append(t)
        token = Outside(t)
        if isinstance(name, str):
            token.name = name
            self.out.batch.setdefault(name, token.tensor)
        return token

    def _moment(self, module: Any, data: object) -> Moment:
        if not isinstance(data, dict):
            raise CapsuleError("step.json: a call of the model lacks its beginning.")
        try:
            buffers = tuple((self._module(p), str(n), self.reader.take(t)) for p, n, t in data["buffers"])
            attributes = tuple((self._module(p), str(n), self._value(v)) for p, n, v in data["attributes"])
            numpy = data.get("numpy_rng")
            moment = Moment(module, self._tensors(data["rng"])[: 1 + torch.cuda.device_count()])
            moment.python_rng = self._value(data.get("python_rng"))
            moment.numpy_rng = _numpy_state(numpy) if numpy is not None else None
            moment.buffers = buffers
            moment.attributes = tuple((m, n, v) for m, n, v in attributes if _settable(m, n))
            moment.generators = self._states(data.get("generators", []))
            return moment
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CapsuleError):
                raise
            raise CapsuleError("step.json: a call of the model lacks its beginning.") from None


class _Unknown:
    """Stands for a function that a capsule cannot hold."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise CapsuleError(f"{self.__name__} is no function of PyTorch, and is not in the capsule: give --loss.")


def _gone(name: str | None) -> Outside:
    """Stands for an argument that the capsule does not have."""
    token = Outside(torch.empty(0), weak=True)
    token.name = name
    return token


def _small(count: object) -> int:
    if type(count) is int and 0 <= count <= MAX_MADE:
        return count
    raise CapsuleError(f"step.json: a call cannot have given {ascii(count)[:40]} tensors.")


def _settable(module: torch.nn.Module, name: str) -> bool:
    """True for a plain attribute that the model has already: a capsule adds none, and replaces no method."""
    found = vars(module).get(name, _somewhere)
    return not callable(found) and name not in ("training", "forward") and not name.startswith("__")


def _numpy_state(data: Any) -> Any:
    import numpy

    name, keys, position, has_gauss, cached = data
    if name != "MT19937" or len(keys) != 624 or not 0 <= int(position) <= 624:  # NumPy reads from there, wherever it is
        raise ValueError(name)
    return (name, numpy.array(keys, dtype=numpy.uint32), int(position), int(has_gauss), float(cached))


def _listed(step: Mapping[str, Any], name: str) -> list[Any]:
    found = step.get(name)
    if not isinstance(found, list):
        raise CapsuleError(f"step.json has no list of {name}: the capsule is damaged.")
    return found


def _is_index(value: object, of: list[Any]) -> bool:
    return type(value) is int and 0 <= value < len(of)


def _somewhere() -> None:  # its code is given the file and line of a recorded call
    return None
