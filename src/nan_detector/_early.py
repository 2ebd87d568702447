"""Early warnings: what a run shows before anything in it is NaN or infinite.

Fed once a step with numbers that are on the host anyway. A warning that comes often is read by nobody, so each kind
has a warm-up, asks for a change that stands clear of the run's own noise, and is told once in `AGAIN_AFTER` steps
unless it gets much worse. The kinds are explained in `docs/warnings.md`; methods and thresholds in `_early_spikes`,
`_early_rates`, `_early_scale` and `_early_layers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nan_detector._before import number
from nan_detector._early_layers import Forecast, Headroom, dtype_named, newly_dead
from nan_detector._early_rates import Rates
from nan_detector._early_scale import SKIP_WINDOW, LossScale, ScaleState
from nan_detector._early_spikes import CLEAR_LOSS, CLEAR_NORM, Chart, Spike
from nan_detector._records import WarningRecord

#: Every `kind` of record that is made here.
KINDS = (
    "loss_spike",
    "grad_norm_spike",
    "headroom",
    "dead_parameter",
    "lr_jump",
    "lr_negative",
    "loss_scale_falling",
    "loss_scale_floor",
    "scaler_skipping",
)
#: Steps between two warnings of a kind: about two lookbacks of the averages, so that the second is about something new.
AGAIN_AFTER = 200
#: Times worse that something must be to be told earlier.
WORSE = 10.0
#: Parameters named in one warning.
_NAMED = 3

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class EarlyWarnings:
    """Watches one optimizer's steps. Where several alternate, as in a GAN, each needs its own.

    Args:
        rank: Put into the records.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._count = 0
        self._loss, self._norm = Chart(CLEAR_LOSS), Chart(CLEAR_NORM)
        self._rates = Rates()
        self._lr: float | None = None
        self._scale: LossScale | None = None
        self._headroom: Headroom | None = None
        self._dead: set[str] = set()
        self._told: dict[str, tuple[int, float]] = {}

    def feed(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        lr: float | None,
        loss_scale: float | None = None,
        scaler_skipped: bool = False,
        layer_abs_max: Mapping[str, float] = _NOTHING,
        layer_dtype_max: Mapping[str, float] = _NOTHING,
        zero_streaks: Mapping[str, int] = _NOTHING,
        lr_ceiling: float | None = None,
    ) -> list[WarningRecord]:
        """Take one step's numbers; about 2 µs where nothing is wrong. Numbers that are not finite are passed over.

        Args:
            step: The step's number, for the records.
            loss: Loss, unscaled; None where there was none.
            grad_norm: L2 norm of all gradients together, unscaled; None where there was none.
            lr: Learning rate; None where there is none.
            loss_scale: Loss scale of mixed precision; None without a scaler.
            scaler_skipped: True when the scaler did not take this step. Its gradients are then not looked at.
            layer_abs_max: Largest magnitude of each layer's output. Kept for some steps: give a new mapping each time.
            layer_dtype_max: Largest finite value of each layer's dtype; best the same mapping each time.
            zero_streaks: Steps in a row in which each parameter's gradient was exactly 0. It may be given in some steps
                only, and only with those that have one (see `_early_layers.zero_streaks`).
            lr_ceiling: The largest rate that the schedule says it will use: the greater of "initial_lr" and "max_lr"
                that torch's schedulers write into a parameter group. Without it only rates seen before are known.

        Returns:
            The warnings, mostly none.
        """
        self._count += 1
        found: list[WarningRecord] = []
        if lr is not None and lr != self._lr:
            self._lr = lr
            found += self._rate(step, lr, lr_ceiling)
        if loss is not None and (spike := self._loss.feed(loss)) is not None:
            found += self._spike("loss_spike", "loss", step, spike)
        if grad_norm is not None and not scaler_skipped and (spike := self._norm.feed(grad_norm)) is not None:
            found += self._spike("grad_norm_spike", "gradient norm", step, spike)
        if loss_scale is not None:
            found += self._scaler(step, loss_scale, scaler_skipped)
        if layer_abs_max:
            found += self.feed_layers(step, layer_abs_max, layer_dtype_max)
        if zero_streaks and loss != 0.0:  # at a loss of exactly 0 there is nothing left to learn
            found += self._zeros(step, zero_streaks)
        return found

    @property
    def unremarkable(self) -> tuple[float, float]:
        """Loss and gradient norm between 0 and these may wait for some steps before they are fed."""
        return self._loss.unremarkable, self._norm.unremarkable

    def _rate(self, step: int, lr: float, ceiling: float | None) -> Sequence[WarningRecord]:
        change = self._rates.feed(lr, ceiling, self._count)
        if change.regime:
            self._loss.restart()
            self._norm.restart()
        if change.negative:
            return self._tell(
                "lr_negative", step, f"the learning rate is {number(lr)}, below 0: each step goes uphill", 1.0, lr
            )
        if change.jump is None:
            return ()
        text = (
            f"the learning rate jumped {number(change.jump)} → {number(lr)} ({number(lr / change.jump, 2)}x), "
            "above every rate used before"
        )
        return self._tell("lr_jump", step, text, lr, lr)

    def _spike(self, kind: str, what: str, step: int, spike: Spike) -> Sequence[WarningRecord]:
        if spike.signed:
            times, of = "far from", ""
        else:
            times, of = f"{number(spike.value / spike.level, 2)} times", " of its logarithm"
        text = (
            f"the {what} is {number(spike.value)}, {times} its recent average of {number(spike.level)} "
            f"({spike.score:.0f} standard deviations{of})"
        )
        return self._tell(kind, step, text, abs(spike.value), spike.value)

    def _scaler(self, step: int, scale: float, skipped: bool) -> Sequence[WarningRecord]:
        if self._scale is None:
            self._scale = LossScale()
        state = self._scale.feed(scale, skipped)
        found: list[WarningRecord] = []
        if state.fell_from is not None:
            text = (
                f"the loss scale fell {number(state.fell_from)} → {number(scale)} within {state.steps} "
                f"step{'s' if state.steps > 1 else ''} and has not grown in between: gradients are growing, or a step "
                "is non-finite at any scale"
            )
            found += self._tell("loss_scale_falling", step, text, _inverse(scale), scale)
        if state.floor:
            text = (
                f"the loss scale is down to {number(scale)}: gradients overflow half precision even unscaled, "
                "and small ones are lost"
            )
            found += self._tell("loss_scale_floor", step, text, _inverse(scale), scale)
        if state.skipped:
            found += self._skipping(step, state)
        return found

    def _skipping(self, step: int, state: ScaleState) -> Sequence[WarningRecord]:
        text = f"the GradScaler skipped {state.skipped} of the last {SKIP_WINDOW} steps: they trained nothing"
        return self._tell("scaler_skipping", step, text, float(state.skipped), float(state.skipped))

    def feed_layers(
        self, step: int, abs_max: Mapping[str, float], limits: Mapping[str, float]
    ) -> Sequence[WarningRecord]:
        """The part of `feed` that is about layers."""
        if self._headroom is None:
            self._headroom = Headroom()
        first = self._headroom.feed(abs_max, limits)
        if first is None:
            return ()
        return self._tell("headroom", step, _headroom_text(first), first.value, first.value, first.layer)

    def _zeros(self, step: int, zero_streaks: Mapping[str, int]) -> Sequence[WarningRecord]:
        names = newly_dead(zero_streaks, self._dead)
        if not names:
            return ()
        self._dead.update(names)
        steps = max(zero_streaks[n] for n in names)
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        text = f"the gradient of {shown} has been exactly 0 for {steps} steps: nothing is learnt there"
        layer = names[0].rpartition(".")[0] or None
        # Once per parameter is rule enough: the next ones to die are news.
        return [WarningRecord("dead_parameter", step, f"step {step}: {text}", layer, float(steps), rank=self._rank)]

    def _tell(
        self, kind: str, step: int, text: str, badness: float, value: float, layer: str | None = None
    ) -> Sequence[WarningRecord]:
        last = self._told.get(kind)
        if last is not None and self._count - last[0] < AGAIN_AFTER and badness < WORSE * last[1]:
            return ()
        self._told[kind] = (self._count, badness)
        return [WarningRecord(kind, step, f"step {step}: {text}", layer, value, rank=self._rank)]


def _inverse(scale: float) -> float:
    return 1.0 / scale if scale > 0.0 else math.inf


def _headroom_text(first: Forecast) -> str:
    factor = math.exp(min(first.rate, 80.0))
    pace = f"grows {number(factor, 2)}x per step" if factor >= 1.8 else f"doubles every {_doubling(first.rate)} steps"
    when = f"in about {max(1, round(first.steps))} step{'s' if first.steps >= 1.5 else ''}"
    return (
        f"the output of {first.layer} has reached {number(first.value)} and {pace}: it overflows "
        f"{dtype_named(first.limit)} ({number(first.limit)}) {when}"
    )


def _doubling(rate: float) -> str:
    steps = math.log(2) / rate
    return f"{steps:.1f}" if steps < 1.75 else f"{steps:.0f}"
