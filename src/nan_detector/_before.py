"""What had been changing in the steps before the event, as sentences.

Method. A column is looked at on a log scale, over its last run of finite values of one sign (at most `WINDOW` rows).
*Growth*: single spikes are removed by a running median of three (Tukey's rule at the ends), then a broken stick,
`y = a + c·t + b·max(0, t - s)`, is fitted by least squares for every start `s`, and the best one kept (or a plain line,
unless the break pays by BIC): its slope after the break is the growth rate, so a loss that first fell as it should does
not hide that it rose later. *Jump*: one row that leaves the level of the rows before it and never comes back. Both must
stand clear of the column's own noise.

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

#: Names of the columns; a parameter's gradient norm and a layer's abs-max carry the name behind a prefix.
LOSS, GRAD_NORM, MAX_GRAD_NORM, LEARNING_RATE, LOSS_SCALE = "loss", "grad_norm", "max_grad_norm", "lr", "loss_scale"
GRAD_NORM_OF, ABS_MAX_OF = "grad_norm:", "abs_max:"

WINDOW = 200  # rows looked at; a longer fit would see the run's ordinary history
RECENT = 50  # rows in which a sudden change still counts as "before"
MOST_SENTENCES = 3
_LEAST_ROWS = 5
_LEAST_TREND = 3  # rises, that is, four points
_LEAST_RISE = math.log(4)
_LEAST_SLOW_RISE = math.log(10)  # of growth that doubles in more than `_SLOW` rows
_SLOW = 25
_LEAST_NOISE = 0.1  # relative; five points can lie on a line by chance
_RISE_IN_NOISE = 8.0
_SLOPE_IN_ERRORS = 7.0
_LEAST_JUMP = math.log(100)
_LEAST_SINGLE_STEP = math.log(30)
_START_ERROR = 5  # rows by which the fitted start of a trend may be early
_LR_JUMP = 3.0  # warm-up and one-cycle schedules stay below it once they are under way
_SCALE_FALL = 2.0**8  # a GradScaler that starts at 65536 may well halve five times before it settles


@dataclass(frozen=True)
class _Change:
    """`text` is a sentence; `kind` says which of several alike it stands for; greater `strength` is worse."""

    text: str
    kind: str
    column: str
    strength: float = 0.0
    step: int | None = None


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
    rates = columns.get(LEARNING_RATE, ())
    jump = next((c.step for c in _learning_rate(rates, steps)), None)
    changes = [c for name, values in columns.items() for c in _changes(name, values, steps, jump)]
    by_kind: dict[str, _Change] = {}
    for change in sorted(changes, key=lambda c: (_belongs(c.column, layer), c.column == GRAD_NORM, c.strength)):
        by_kind[change.kind] = change  # one sentence per kind: the layer's own, else the total, else the strongest
    ranked = sorted(by_kind.values(), key=lambda c: (_rank(c, layer), -c.strength))
    return tuple(c.text for c in ranked[:MOST_SENTENCES])


def _belongs(column: str, layer: str | None) -> bool:
    name = column.partition(":")[2]
    return bool(layer) and (name == layer or name.startswith(f"{layer}."))


def _rank(change: _Change, layer: str | None) -> int:
    if change.kind == LEARNING_RATE:
        return 0
    if _belongs(change.column, layer):
        return 1
    return {LOSS_SCALE: 2, LOSS: 3, GRAD_NORM: 4, ABS_MAX_OF: 5}.get(change.kind, 6)


def _changes(name: str, values: Sequence[float], steps: Sequence[int], jump: int | None) -> Iterator[_Change]:
    if name == LEARNING_RATE:
        yield from _learning_rate(values, steps)
    elif name == LOSS_SCALE:
        yield from _loss_scale(values, steps)
    else:
        run = _last_run(values)
        change = _jump(name, values, steps, run) or _growth(name, values, steps, run, jump)
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
    for i in range(max(_LEAST_ROWS, len(logs) - RECENT), len(logs)):
        if logs[i] - logs[i - 1] < _LEAST_SINGLE_STEP:
            continue
        earlier = logs[max(0, i - 20) : i]
        level = statistics.median(earlier)
        noise = max(_LEAST_NOISE, 1.4826 * statistics.median(abs(y - level) for y in earlier))
        least = max(_LEAST_JUMP, _RISE_IN_NOISE * noise)
        stays = min(logs[i:])
        if stays - level >= least and stays > max(logs[:i]):
            kind, subject = _kind_and_subject(name, values[run[i]] < 0)
            text = f"{subject} {number(values[run[i - 1]])} → {number(values[run[i]])} at step {steps[run[i]]}"
            return _Change(text, kind, name, logs[i] - level)
    return None


def _growth(name: str, values: Sequence[float], steps: Sequence[int], run: range, jump: int | None) -> _Change | None:
    logs = [math.log(abs(values[i])) for i in run]
    trend = fit_growth(logs)
    if trend is None:
        return None
    start, rate = trend
    kind, subject = _kind_and_subject(name, bool(values[run[start]] < 0))
    factor = math.exp(min(rate, 80.0))
    pace = f"grew {number(factor, 2)}x per step" if factor >= 1.8 else f"doubled every {_doubling(rate)} steps"
    cut = start == 0 and len(run) == WINDOW
    first = steps[run[start]]
    if jump is not None and first < jump <= steps[run[min(start + _START_ERROR, len(run) - 1)]]:
        first = jump  # the fit places a start no better than this, and growth does not come before what caused it
    since = f"over the last {WINDOW} steps" if cut else f"since step {first}"
    return _Change(f"{subject} {pace} {since}", kind, name, rate)


def _doubling(rate: float) -> str:
    steps = math.log(2) / rate
    return f"{steps:.1f}" if steps < 1.75 else f"{steps:.0f}"


def fit_growth(logs: Sequence[float]) -> tuple[int, float] | None:
    """Start and rate (per row) of the exponential growth that `logs` ends in; None where there is none.

    Args:
        logs: Natural logarithms of a column's magnitudes, oldest first, all finite.
    """
    n = len(logs)
    if n < _LEAST_ROWS or max(logs[-3:]) - min(logs) < _LEAST_RISE:
        return None
    start, intercept, slope, bend = _broken_stick(_median_of_three(logs))
    rises = n - 1 - start
    rate = slope + bend
    rise = rate * rises
    fitted = [intercept + slope * t + bend * max(0, t - start) for t in range(n)]
    errors = [y - f for y, f in zip(logs, fitted, strict=True)]
    noise = max(_LEAST_NOISE, math.sqrt(sum(e * e for e in errors) / max(1, n - 3)))
    slope_error = noise * math.sqrt(12.0 / (rises * (rises + 1) * (rises + 2)))
    least_rise = _LEAST_RISE if rate * _SLOW > math.log(2) else _LEAST_SLOW_RISE
    if rate <= 0 or rise < max(least_rise, _RISE_IN_NOISE * noise) or rate < _SLOPE_IN_ERRORS * slope_error:
        return None
    # Slow waves of ordinary noise also end in a rise now and then, but within the range that they had before.
    earlier = logs[max(0, start - max(20, 3 * rises)) : start]
    if earlier and min(logs[-2:]) < max(earlier) + math.log(2):
        return None
    return start, rate


def _median_of_three(y: Sequence[float]) -> list[float]:
    middle = [statistics.median(y[i - 1 : i + 2]) for i in range(1, len(y) - 1)]
    first = statistics.median((y[0], middle[0], 3 * middle[0] - 2 * middle[1]))
    last = statistics.median((y[-1], middle[-1], 3 * middle[-1] - 2 * middle[-2]))
    return [first, *middle, last]


def _broken_stick(y: Sequence[float]) -> tuple[int, float, float, float]:
    """Start, intercept, slope and added slope of the best `a + c·t + b·max(0, t - s)`; a plain line where s is 0."""
    n = len(y)
    mean_t, mean_y = (n - 1) / 2, math.fsum(y) / n
    s_tt = n * (n * n - 1) / 12
    s_ty = math.fsum((t - mean_t) * v for t, v in enumerate(y))
    best = (s_ty * s_ty / s_tt, 0, 0.0)  # explained sum of squares, start, added slope
    tail, h_y = 0.0, 0.0  # sums over t > s of y and of (t - s)·y
    for s in range(n - 2, 0, -1):
        tail += y[s + 1]
        h_y += tail
        m = n - 1 - s
        if m < _LEAST_TREND:
            continue
        h = m * (m + 1) / 2
        h_h = m * (m + 1) * (2 * m + 1) / 6
        s_hh = h_h - h * h / n
        s_th = h_h + s * h - mean_t * h
        s_hy = h_y - h * mean_y
        det = s_tt * s_hh - s_th * s_th
        bend = (s_tt * s_hy - s_th * s_ty) / det
        slope = (s_ty - bend * s_th) / s_tt
        explained = slope * s_ty + bend * s_hy
        if explained > best[0]:
            best = (explained, s, bend)
    total = math.fsum((v - mean_y) ** 2 for v in y)
    line_error, stick_error = (max(total - part, 1e-9) for part in (s_ty * s_ty / s_tt, best[0]))
    if n * math.log(line_error / stick_error) < 3 * math.log(n):  # BIC: the break and its place are two more parameters
        best = (0.0, 0, 0.0)
    _, s, bend = best
    m = n - 1 - s
    h = m * (m + 1) / 2
    s_th = m * (m + 1) * (2 * m + 1) / 6 + s * h - mean_t * h
    slope = (s_ty - bend * s_th) / s_tt
    return s, mean_y - slope * mean_t - bend * h / n, slope, bend


def _learning_rate(values: Sequence[float], steps: Sequence[int]) -> Iterator[_Change]:
    for i in range(len(values) - 1, max(1, len(values) - RECENT) - 1, -1):
        now, last = values[i], values[i - 1]
        broke = math.isfinite(last) and not math.isfinite(now)
        jumped = math.isfinite(now) and now > 0 and last >= 0 and now >= _LR_JUMP * last and not _is_ramp(values, i)
        if broke or jumped:
            text = f"learning rate {number(last)} → {number(now)} at step {steps[i]}"
            yield _Change(text, LEARNING_RATE, LEARNING_RATE, step=steps[i])
            return


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
