"""The demo as its user sees it: the three trainings in order, in words, tables and pictures."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nan_detector._before import GRAD_NORM_OF
from nan_detector._bench.results import BARE_AGAIN
from nan_detector._demo import training
from nan_detector._demo.chart import bars
from nan_detector._demo.cost import Costs, measure
from nan_detector._demo.data import digits
from nan_detector._demo.explosion import LEARNING_RATE, Explosion, explode
from nan_detector._demo.training import Outcome, train_digits
from nan_detector._render.plots import cost_bars, grad_norm_heatmap, grad_norm_timeline, loss_curve
from nan_detector._render.terminal import print_report
from nan_detector._summary_title import headline

#: The detector's default `grad_norm_warn`, for the picture.
_THRESHOLD = 100.0
#: What the folder holds afterwards.
FILES = ("events-rank0.jsonl", "loss.png", "grad_norms.png", "grad_heatmap.png", "cost.png")
_TOLD_AT_THE_END = 3  # steps before the bad one that the table shows

_Tick = Callable[[int, int, str], None]


def tell(
    out: Path,
    *,
    seed: int,
    cost_budget_s: float = 12.0,
    console: Console | None = None,
    progress: Console | None = None,
) -> None:
    """Run the demo: about half a minute.

    Args:
        out: Folder for the event log and the pictures; it exists.
        seed: Seed of weights and data order.
        cost_budget_s: Seconds for measuring the cost.
        console: Where the story goes; standard output by default.
        progress: Where the progress bars go; standard error by default.
    """
    console = Console() if console is None else console
    progress = Console(stderr=True) if progress is None else progress
    began = time.perf_counter()
    images, labels = digits()
    with _quiet_logger(), _one_thread():
        _birth(console, progress, images, labels, out, seed)
        _explosion(console, images, labels, seed)
        _cost(console, progress, images, labels, out, seed, cost_budget_s)
    _files(console, out, time.perf_counter() - began)


def _birth(console: Console, progress: Console, images: Tensor, labels: Tensor, out: Path, seed: int) -> None:
    _heading(console, "1  A network learns to read digits, until it does not")
    _say(
        console,
        "A small convolutional network, a normalisation layer written by hand, and a learning rate that is multiplied "
        f"by {training.FACTOR:g} at step {training.MILESTONE}, where 0.1 was meant. Nothing is planted: what goes "
        "wrong goes wrong by itself.",
    )
    with _bar(progress, "training") as tick:
        outcome = train_digits(
            images,
            labels,
            seed=seed,
            log_dir=out,
            on_step=lambda p: tick(p.step + 1, training.STEPS, f"loss {p.loss:.3g}, accuracy {p.accuracy:.0%}"),
        )
    console.print(_steps_table(outcome))
    _draw(outcome, out)
    if outcome.event is None:
        _say(
            console,
            f"With --seed {seed} all {len(outcome.progress)} steps stayed finite: float32's rounding fell on the good "
            "side. It does so for about one seed in a hundred; try another one.",
        )
        return
    console.print()
    print_report(outcome.event, file=cast(TextIO, console.file))
    console.print()
    last = outcome.progress[-1].step
    state = "every weight is finite" if outcome.weights_finite else "there are weights that are NOT finite"
    _say(console, f"The loop stopped at step {last}. Checked again with torch.isfinite: {state}.")
    if outcome.first_warning is not None and outcome.first_warning < last:
        _say(console, f"Gradients beyond {_THRESHOLD:g} had been warned of since step {outcome.first_warning}.")


def _explosion(console: Console, images: Tensor, labels: Tensor, seed: int) -> None:
    _heading(console, "2  A gradient explosion is seen before anything overflows")
    _say(console, f"Three linear layers, the labels regressed at a learning rate of {LEARNING_RATE:g}.")
    _say(console, *explosion_lines(explode(images, labels, seed=seed)))


def explosion_lines(explosion: Explosion) -> list[str]:
    """What happened in the second training, a line each."""
    warning, event = explosion.warning, explosion.event
    lines = []
    if warning is not None:
        name = f"{warning.layer_name}.{warning.param_name}".lstrip(".")
        lines.append(
            f"Warning at step {warning.batch_idx}: the gradient of {name} has norm {warning.grad_norm:.3g}, "
            f"beyond {warning.threshold:g}."
        )
    else:
        lines.append(f"No gradient went beyond {_THRESHOLD:g} in {len(explosion.losses)} steps.")
    if event is not None:
        lines.append(f"{headline(event)}.")
    else:
        lines.append(f"Nothing overflowed in {len(explosion.losses)} steps.")
    if warning is not None and event is not None and (ahead := event.batch_idx - warning.batch_idx) > 0:
        lines.append(f"The warning came {ahead} {'step' if ahead == 1 else 'steps'} ahead.")
    lines.append("Every weight is finite." if explosion.weights_finite else "There are weights that are NOT finite.")
    return lines


def _cost(
    console: Console, progress: Console, images: Tensor, labels: Tensor, out: Path, seed: int, budget_s: float
) -> None:
    _heading(console, "3  What watching costs, measured here and now")
    _say(console, "The first network, trained bare and under each watch in turns, on one thread.")
    with _bar(progress, "measuring") as tick:
        costs = measure(images, labels, seed=seed, budget_s=budget_s, on_round=lambda done, of: tick(done, of, ""))
    console.print(cost_table(costs))
    for line in bars(costs.median_ms, unit="ms", width=max(20, min(console.width, 80) - 2)):
        console.print(Text(line), soft_wrap=True)
    console.print()
    apart = abs(costs.ratio(BARE_AGAIN) - 1)
    _say(console, f"The two bare runs lie {apart:.1%} apart: a difference below that means nothing.")
    cost_bars(costs.median_ms, out / "cost.png")


def cost_table(costs: Costs) -> Table:
    """Milliseconds and ratio per variant."""
    table = Table(title=f"A training step, median of {costs.steps}", title_justify="left")
    table.add_column("variant")
    table.add_column("median", justify="right")
    table.add_column("ratio", justify="right")
    for name, ms in costs.median_ms.items():
        table.add_row(Text(name), f"{ms:.3f} ms", f"{costs.ratio(name):.3f}")
    return table


def _steps_table(outcome: Outcome) -> Table:
    table = Table(title="The training", title_justify="left")
    for name in ("step", "learning rate", "loss", "accuracy"):
        table.add_column(name, justify="right")
    previous = -1
    for at in told_steps(len(outcome.progress)):
        row = outcome.progress[at]
        if at > previous + 1:
            table.add_row("…", "", "", "")
        previous = at
        table.add_row(str(row.step), f"{row.learning_rate:.3g}", f"{row.loss:.4g}", f"{row.accuracy:.0%}")
    return table


def told_steps(count: int) -> Sequence[int]:
    """Which of `count` steps the table shows: the start, the plateau, the mistake, and the end."""
    chosen = {0, training.WARMUP, training.MILESTONE // 2, training.MILESTONE - 1}
    chosen |= {training.MILESTONE + later for later in (0, 1, 2, 5)}
    chosen |= set(range(count - 1 - _TOLD_AT_THE_END, count))
    return sorted(s for s in chosen if 0 <= s < count)


def _draw(outcome: Outcome, out: Path) -> None:
    at = None if outcome.event is None else outcome.event.batch_idx
    loss_curve([p.step for p in outcome.progress], [p.loss for p in outcome.progress], at, out / "loss.png")
    history = outcome.history
    norms = {
        name.removeprefix(GRAD_NORM_OF): history.values[name].tolist()
        for name in history.columns
        if name.startswith(GRAD_NORM_OF)
    }
    grad_norm_timeline(history.steps.tolist(), norms, _THRESHOLD, at, out / "grad_norms.png")
    grad_norm_heatmap(history.steps.tolist(), norms, at, out / "grad_heatmap.png")


def _files(console: Console, out: Path, seconds: float) -> None:
    _heading(console, f"Done in {seconds:.0f} s")
    for path in (out / name for name in FILES if (out / name).exists()):
        console.print(Text(f"  {path}"), soft_wrap=True)
    console.print()
    console.print(Text(f"The log once more: nan-detector show {shlex.quote(str(out))}"), soft_wrap=True)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Rule(Text(text, style="bold"), align="left"))
    console.print()


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(line))
    console.print()


@contextmanager
def _bar(console: Console, what: str) -> Iterator[_Tick]:
    """A progress bar that is gone afterwards; nothing at all where standard error is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda done, of, note: bar.update(task, completed=done, total=of, note=note)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The numbers then do not depend on how many cores there are, and times do not on who else uses them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet_logger() -> Iterator[None]:
    """Without a handler of its own the detector's log would go to standard error, and tell the story twice."""
    logger, handler = logging.getLogger("nan_detector"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
