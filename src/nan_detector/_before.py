"""What had been changing in the steps before the event, as sentences.

Method. A column is looked at on a log scale, over its last run of finite values of one sign (at most `WINDOW` rows).
*Growth* is what `_trend` fits. *Jump*: one row that leaves the level of the rows before it and never comes back. Both
must stand clear of the column's own noise. Gradient norms of a layer's parameters are taken together. Where growth
begins within the error of its start from a leap of the learning rate, or else from a change of the loss scale, the two
are one sentence: a cause does not come after what it did, so the step is that of the leap.

Thresholds. They are ours, set so that 60,000 simulated ordinary runs (noise of up to 0.35 in the logarithm, heavy
tails, correlated noise, spikes of up to 20x, slow decays; `tests/test_before.py` repeats a part) give no sentence, and
14 of 60,000 with twice that noise: a wrong sentence sends its reader the wrong way, a missing one costs a look at a
plot.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nan_detector._trend import LEAST_NOISE, LEAST_ROWS, RISE_IN_NOISE, fit_growth

#: Names of the columns; a parameter's gradient norm and a layer's abs-max carry the name behind a prefix.
LOSS, GRAD_NORM, MAX_GRAD_NORM, LEARNING_RATE, LOSS_SCALE = "loss", "grad_norm", "max_grad_norm", "lr", "loss_scale"
GRAD_NORM_OF, ABS_MAX_OF = "grad_norm:", "abs_max:"

WINDOW = 200  # rows looked at; a longer fit would see the run's ordinary history
RECENT = 50  # rows in which a sudden change still counts as "before"
MOST_SENTENCES = 3
_LEAST_JUMP = math.log(100)
_LEAST_SINGLE_STEP = math.log(30)
_START_EARLY, _START_LATE = 5, 2  # rows by which the fitted start of a trend may be off
_LR_JUMP = 3.0  # warm-up and one-cycle schedules stay below it once they are under way
_SCALE_FALL = 2.0**8  # a GradScaler that starts at 65536 may well halve five times before it settles


@dataclass(frozen=True)
class _Change:
    """`text` is a sentence; `kind` says which of several alike it stands for; greater `strength` is worse."""

    text: str
    kind: str
    column: str
    strength: float = 0.0
    row: int | None = None
    when: str = ""  # of a growth that began with a leap of another column: what leapt


def before_sentences(
    columns: Mapping[str, Sequence[float]], steps: Sequence[int], *, layer: str | None
) -> tuple[str, ...]:
    """What changed before the event, most relevant first; nothing when nothing did.

    Args:
        columns: Values per column, oldest first, one per entry of `steps`; NaN where a row has none.
        steps: Step of each row.
        layer: Path of the guilty module, whose columns are told first; None where it is not known.

    Returns:
        At most `MOST_SENTENCES` sentences without a full stop.

    Raises:
        ValueError: A column has another length than `steps`.
    """
    for name, values in columns.items():
        if len(values) != len(steps):
            raise ValueError(f"columns[{name!r}] has {len(values)} values for {len(steps)} steps; give one per step.")
    leaps = _leaps(columns)
    changes = [c for name, values in _by_layer(columns).items() for c in _changes(name, values, steps, leaps)]
    by_kind: dict[str, _Change] = {}
    for change in sorted(changes, key=lambda c: (_belongs(c.column, layer), c.column == GRAD_NORM, c.strength)):
        by_kind[change.kind] = change  # one sentence per kind: the layer's own, else the total, else the strongest
    ranked = sorted(by_kind.values(), key=lambda c: (_rank(c, layer), -c.strength))
    return tuple(_said(ranked)[:MOST_SENTENCES])


def _said(ranked: Sequence[_Change]) -> list[str]:
    """The sentences, a leap and the first growth that began with it in one."""
    leader = next((c for c in ranked if c.when), None)
    if leader is None:
        return [c.text for c in ranked]
    told = [c for c in ranked if c is not leader and not (c.kind == LEARNING_RATE and "learning rate" in leader.when)]
    return [f"{leader.text}, when the {leader.when}", *(c.text for c in told)]


@dataclass(frozen=True)
class _Leap:
    """A row at which the learning rate or the loss scale changed."""

    row: int
    text: str


def _leaps(columns: Mapping[str, Sequence[float]]) -> list[_Leap]:
    """What growth may begin with, the likelier cause first."""
    rates, scales = columns.get(LEARNING_RATE, ()), columns.get(LOSS_SCALE, ())
    found = [
        _Leap(i, f"learning rate went from {number(rates[i - 1])} to {number(rates[i])}") for i in _rate_leaps(rates)
    ]
    for i in range(len(scales) - 1, max(0, len(scales) - WINDOW), -1):
        before, now = scales[i - 1], scales[i]
        if 0 < before < math.inf and 0 < now < math.inf and before != now:
            found.append(_Leap(i, f"loss scale went from {number(before)} to {number(now)}"))
    return found


def _by_layer(columns: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """The columns, with one gradient norm for all parameters of a layer."""
    out: dict[str, Sequence[float]] = {}
    together: dict[str, list[Sequence[float]]] = {}
    for name, values in columns.items():
        layer, dot, _ = name.rpartition(".")
        if name.startswith(GRAD_NORM_OF) and dot:
            together.setdefault(layer, []).append(values)
        else:
            out[name] = values
    for layer, parts in together.items():
        out[layer] = parts[0] if len(parts) == 1 else [_norm(row) for row in zip(*parts, strict=True)]
    return out


def _norm(norms: Sequence[float]) -> float:
    """Of the parameters that a row has: one that was frozen on the way is NaN there."""
    norm = math.hypot(*norms)
    if norm == norm:  # an infinity makes one, whatever stands beside it
        return norm
    known = [n for n in norms if not math.isnan(n)]
    return math.hypot(*known) if known else math.nan


def _belongs(column: str, layer: str | None) -> bool:
    name = column.partition(":")[2]
    return bool(layer) and (name == layer or name.startswith(f"{layer}."))


def _rank(change: _Change, layer: str | None) -> int:
    if change.kind == LEARNING_RATE:
        return 0
    if _belongs(change.column, layer):
        return 1
    return {LOSS_SCALE: 2, LOSS: 3, GRAD_NORM: 4, ABS_MAX_OF: 5}.get(change.kind, 6)


def _changes(name: str, values: Sequence[float], steps: Sequence[int], leaps: Sequence[_Leap]) -> Iterator[_Change]:
    if name == LEARNING_RATE:
        yield from _learning_rate(values, steps)
    elif name == LOSS_SCALE:
        yield from _loss_scale(values, steps)
    else:
        run = _last_run(values)
        change = _jump(name, values, steps, run) or _growth(name, values, steps, run, leaps)
        if change is not None:
            yield change


def _kind_and_subject(name: str, negative: bool) -> tuple[str, str]:
    prefix, _, rest = name.partition(":")
    if rest and prefix + ":" == GRAD_NORM_OF:
        return GRAD_NORM, f"gradient norm of {rest}"
    if rest and prefix + ":" == ABS_MAX_OF:
        return ABS_MAX_OF, f"|activations| of {rest}"
    subject = {GRAD_NORM: "gradient norm", MAX_GRAD_NORM: "largest gradient norm"}.get(name, name)
    return (GRAD_NORM if name == MAX_GRAD_NORM else name), f"|{subject}|" if negative else subject


def _last_run(values: Sequence[float]) -> range:
    """The last rows whose values are finite, non-zero and of one sign, behind which only non-finite ones come."""
    end = len(values)
    while end and not math.isfinite(values[end - 1]):
        end -= 1
    start = end
    while start and end - start < WINDOW and _same_sign(values[start - 1], values[end - 1]):
        start -= 1
    return range(start, end)


def _same_sign(a: float, b: float) -> bool:
    return math.isfinite(a) and ((a > 0 and b > 0) or (a < 0 and b < 0))


def _jump(name: str, values: Sequence[float], steps: Sequence[int], run: range) -> _Change | None:
    logs = [math.log(abs(values[i])) for i in run]
    for i in range(max(LEAST_ROWS, len(logs) - RECENT), len(logs)):
        if logs[i] - logs[i - 1] < _LEAST_SINGLE_STEP:
            continue
        earlier = logs[max(0, i - 20) : i]
        level = statistics.median(earlier)
        noise = max(LEAST_NOISE, 1.4826 * statistics.median(abs(y - level) for y in earlier))
        least = max(_LEAST_JUMP, RISE_IN_NOISE * noise)
        stays = min(logs[i:])
        if stays - level >= least and stays > max(logs[:i]):
            kind, subject = _kind_and_subject(name, values[run[i]] < 0)
            text = f"{subject} {number(values[run[i - 1]])} → {number(values[run[i]])} at step {steps[run[i]]}"
            return _Change(text, kind, name, logs[i] - level)
    return None


def _growth(
    name: str, values: Sequence[float], steps: Sequence[int], run: range, leaps: Sequence[_Leap]
) -> _Change | None:
    logs = [math.log(abs(values[i])) for i in run]
    trend = fit_growth(logs)
    if trend is None:
        return None
    start, rate = trend
    kind, subject = _kind_and_subject(name, bool(values[run[start]] < 0))
    factor = math.exp(min(rate, 80.0))
    pace = f"grew {number(factor, 2)}x per step" if factor >= 1.8 else f"doubled every {_doubling(rate)} steps"
    cut = start == 0 and len(run) == WINDOW
    row = run[start]
    # The fit places a start no better than this, and growth does not come before what caused it.
    leap = next((p for p in leaps if row - _START_LATE <= p.row <= row + _START_EARLY), None) if not cut else None
    since = f"over the last {WINDOW} steps" if cut else f"since step {steps[row if leap is None else leap.row]}"
    return _Change(f"{subject} {pace} {since}", kind, name, rate, row, "" if leap is None else leap.text)


def _doubling(rate: float) -> str:
    steps = math.log(2) / rate
    return f"{steps:.1f}" if steps < 1.75 else f"{steps:.0f}"


def _learning_rate(values: Sequence[float], steps: Sequence[int]) -> Iterator[_Change]:
    for i in range(len(values) - 1, max(1, len(values) - RECENT) - 1, -1):
        broke = math.isfinite(values[i - 1]) and not math.isfinite(values[i])
        if broke or _leapt(values, i):
            text = f"learning rate {number(values[i - 1])} → {number(values[i])} at step {steps[i]}"
            yield _Change(text, LEARNING_RATE, LEARNING_RATE, row=i)
            return


def _rate_leaps(values: Sequence[float]) -> Iterator[int]:
    """Rows at which the learning rate leapt, the last one first; as far back as growth is looked for."""
    return (i for i in range(len(values) - 1, max(1, len(values) - WINDOW) - 1, -1) if _leapt(values, i))


def _leapt(values: Sequence[float], i: int) -> bool:
    now, last = values[i], values[i - 1]
    return math.isfinite(now) and now > 0 and last >= 0 and now >= _LR_JUMP * last and not _is_ramp(values, i)


def _is_ramp(values: Sequence[float], i: int) -> bool:
    """True where the rise at row `i` goes on at much the same pace: the first rows of a warm-up."""
    rise = values[i] - values[i - 1]
    after = [values[j] - values[j - 1] for j in range(i + 1, min(i + 4, len(values)))]
    earlier = [values[j] - values[j - 1] for j in range(max(1, i - 3), i)]
    if values[i - 1] == 0 and not after:
        return True  # cannot be told from a warm-up yet
    return any(d > 0.2 * rise for d in after + earlier)


def _loss_scale(values: Sequence[float], steps: Sequence[int]) -> Iterator[_Change]:
    if not values or not 0 <= values[-1] < math.inf:
        return
    first = max(0, len(values) - RECENT)
    recent = values[first:]
    top = max(range(len(recent)), key=lambda i: (recent[i] if math.isfinite(recent[i]) else -1.0, i))
    if recent[top] > values[-1] and (recent[top] >= _SCALE_FALL * values[-1] or values[-1] < 1):
        text = f"loss scale {number(recent[top])} → {number(values[-1])} since step {steps[first + top]}"
        yield _Change(text, LOSS_SCALE, LOSS_SCALE)


def number(x: float, digits: int = 3) -> str:
    """`x` to `digits` significant digits, as a person writes it: 3e-4, 0.03, 65536, 5e12."""
    if not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Inf" if x > 0 else "-Inf"
    if x == 0 or (x == int(x) and abs(x) < 1e6 and digits >= 3):
        return str(int(x))
    if 1e-3 <= abs(x) < 1e4:
        return f"{x:.{digits}g}" if abs(x) < 10**digits else f"{x:.0f}"
    mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"
