"""The gate's measurement: one vector of norms and the loss, of which three numbers are read to the host."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from nan_detector import _finite
from nan_detector._before import GRAD_NORM, GRAD_NORM_OF, LOSS, MAX_GRAD_NORM
from nan_detector._norms import in_two_factors, norms
from nan_detector._quiet import quiet

Tensor = torch.Tensor


class Reading(NamedTuple):  # made in every step: a frozen dataclass costs as much as a kernel
    """What one gate measured.

    Attributes:
        row: Vector on the device: loss (where there is one), for many gradients their total and largest norm, each
            norm.
        width: Its length.
        gradients: How many there are; their norms stand last in it.
        loss: Mean of the losses since the last gate; None where there was none.
        total: L2 norm of all gradients together; None where there is no gradient.
        largest: Largest norm of one gradient.
        each: The norm of each gradient, where all of them were read to the host.
    """

    row: Tensor
    width: int
    gradients: int
    loss: float | None
    total: float | None
    largest: float | None
    each: Sequence[float] | None = None

    @property
    def norms(self) -> Tensor:
        """The norm of each gradient."""
        return self.row[self.width - self.gradients :]

    @property
    def suspicious(self) -> bool:
        """True when something is not finite, or so large that its norm is not."""
        return not math.isfinite((self.loss or 0.0) + (self.total or 0.0) + (self.largest or 0.0))


def without_scale(reading: Reading, factor: Tensor, value: float) -> Reading:
    """`reading` of gradients that a GradScaler multiplied by `factor`, in the units of the loss itself."""
    inverse = 1.0 / value if value else math.inf
    total, largest = (None if v is None else v * inverse for v in (reading.total, reading.largest))
    with quiet():
        row = reading.row.clone()
        first = 0 if reading.loss is None else 1
        row[first:] /= factor.to(row)
    each = None if reading.each is None else [v * inverse for v in reading.each]
    return reading._replace(row=row, total=total, largest=largest, each=each)


def in_full(reading: Reading, grads: Sequence[Tensor], scale: float | None = None) -> Reading:
    """`reading` with the norms of finite gradients whose squares left the accumulator's range; else as it is.

    Nothing else would tell of a step whose gradients are that large: its weights are finite, its second moments may
    not be. Exact, with a few reads to the host.

    Args:
        reading: What the gate measured.
        grads: The gradients.
        scale: What they are still multiplied by.
    """
    if reading.total is None or math.isfinite(reading.total) or not len(grads):
        return reading
    inverse = 1.0 if scale is None else 1.0 / scale if scale else math.inf
    with quiet():
        seen = _finite.read(norms(grads))
        beyond = [i for i, n in enumerate(seen) if not math.isfinite(n)]
        if not all(_finite.is_finite(grads[i]) for i in beyond):
            return reading
        parts = _finite.read(torch.cat([in_two_factors(grads[i]) for i in beyond])) if beyond else []
    for at, i in enumerate(beyond):
        seen[i] = parts[2 * at] * parts[2 * at + 1]
    each = [n * inverse for n in seen]
    total, largest = math.hypot(*each), max(each)
    head = reading.width - reading.gradients
    totals = [total, largest][: head - (reading.loss is not None)]
    with quiet():
        row = reading.row.clone()
        row[head - len(totals) :] = torch.tensor([*totals, *each], dtype=torch.float64).to(row)
    return reading._replace(row=row, total=total, largest=largest, each=each)


#: Up to this many gradients all norms are read; the rest is arithmetic on the host, cheaper than three more kernels.
FEW = 64


def take(grads: Sequence[Tensor], losses: Sequence[Tensor], extra: Tensor | None = None) -> tuple[Reading, list[float]]:
    """Measure gradients and losses with one read to the host.

    Args:
        grads: Gradients of the parameters about to be stepped.
        losses: One-element tensors.
        extra: Further numbers on the device to be read along (per-layer extremes).

    Returns:
        The reading, and the values of `extra`.
    """
    with quiet():
        return measure(grads, losses, extra)


def measure(
    grads: Sequence[Tensor], losses: Sequence[Tensor], extra: Tensor | None = None, *, whole: bool = False
) -> tuple[Reading, list[float]]:
    """`take`, for a caller that is `quiet` already: entering it once more costs as much as a kernel.

    `whole` reads the norm of each gradient along, however many there are: somebody is about to ask for them.
    """
    if extra is None and len(losses) == 1 and 0 < len(grads) <= FEW and not losses[0].dim():
        with contextlib.suppress(RuntimeError):  # a mixture of layouts, dtypes or devices
            if not losses[0].is_complex():
                return _take_few(grads, losses[0]), []
    return _take_many(norms(grads), grads, losses, extra, whole)


def _take_few(grads: Sequence[Tensor], loss: Tensor) -> Reading:
    row = torch.stack([loss, *torch._foreach_norm(list(grads), 2, dtype=torch.float32)])
    values: list[float] = row.tolist()
    first, norm_values = values[0], values[1:]
    if math.isfinite(sum(values)):
        count = len(norm_values)
        return Reading(row, count + 1, count, first, math.hypot(*norm_values), max(norm_values), norm_values)
    bad = any(not math.isfinite(v) for v in norm_values)
    largest = math.nan if bad else max(norm_values)
    total = largest if bad else math.hypot(*norm_values)
    return Reading(row, len(values), len(norm_values), first, total, largest)


def _take_many(
    each: Tensor, grads: Sequence[Tensor], losses: Sequence[Tensor], extra: Tensor | None, whole: bool
) -> tuple[Reading, list[float]]:
    head: list[Tensor] = []
    if losses:
        device, dtype = each.device if len(grads) else losses[0].device, each.dtype
        flat = [_as_number(loss, device, dtype) for loss in losses]
        head.append(flat[0] if len(flat) == 1 else torch.cat(flat).mean().reshape(1))
    if len(grads):
        head.append(torch.linalg.vector_norm(each).reshape(1))
        head.append(each.max().reshape(1))
    row = torch.cat([*head, each]) if head else each
    wanted = row if whole else row[: len(head)]
    values = _finite.read(wanted if extra is None else torch.cat([wanted, beside(extra.reshape(-1), wanted)]))
    numbers = iter(values)
    loss = next(numbers) if losses else None
    total, largest = (next(numbers), next(numbers)) if len(grads) else (None, None)
    read = list(islice(numbers, len(grads))) if whole else None
    return Reading(row, len(head) + len(grads), len(grads), loss, total, largest, read), list(numbers)


def beside(values: Tensor, other: Tensor) -> Tensor:
    """`values` on the device and with the dtype of `other`. What comes from the host is not waited for."""
    return values.to(other, non_blocking=values.device.type == "cpu")


def _as_number(loss: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (loss.abs() if loss.is_complex() else loss).reshape(1).to(device=device, dtype=dtype)


def column_names(parameters: Sequence[str], has_loss: bool, width: int) -> tuple[str, ...]:
    """Names of the `width` entries of `Reading.row`; the totals may be left out, to be worked out when asked for."""
    head = [LOSS] if has_loss else []
    if parameters and width > len(head) + len(parameters):
        head += [GRAD_NORM, MAX_GRAD_NORM]
    return (*head, *(f"{GRAD_NORM_OF}{p}" for p in parameters))


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What an exact check confirmed to be bad.

    Attributes:
        losses: Positions of bad losses among those judged.
        gradients: Names of parameters whose gradient is bad.
        loss: Value of the first bad loss, or of the last one.
        hyper: A hyperparameter that would damage the weights.
        note: What else made it suspicious.
        erased: Gradients of 0 are all that is wrong: the step damages nothing.
    """

    losses: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    loss: float | None = None
    hyper: Any = None
    note: str = ""
    erased: bool = False

    def __bool__(self) -> bool:
        return bool(self.losses or self.gradients or self.hyper or self.erased)

    def symptom(self) -> str:
        """What was seen, for a person."""
        parts = []
        if self.losses:
            parts.append(f"the loss is {_number(self.loss)}")
        if self.gradients:
            shown = ", ".join(self.gradients[:3]) + (
                f" and {len(self.gradients) - 3} more" if len(self.gradients) > 3 else ""
            )
            parts.append(f"non-finite gradients of {shown}")
        if self.hyper is not None:
            parts.append(self.hyper.message)
        if self.note:
            parts.append(self.note)
        return "; ".join(parts)


def confirm(names: Sequence[str], grads: Sequence[Tensor], losses: Sequence[Tensor]) -> Suspicion:
    """The exact check after a trip of the screen: element by element, so that it never alarms falsely."""
    bad_losses = tuple(i for i, loss in enumerate(losses) if not _finite.is_finite(loss))
    bad_grads = tuple(n for n, g in zip(names, grads, strict=True) if not _finite.is_finite(g))
    shown = losses[bad_losses[0]] if bad_losses else losses[-1] if losses else None
    return Suspicion(bad_losses, bad_grads, _finite.scalar(shown) if shown is not None else None)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value}"
