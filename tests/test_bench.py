"""The benchmark: its arithmetic, its clock, what it measures, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nan_detector._bench import growth, measure, output
from nan_detector._bench.answer import answer_of
from nan_detector._bench.baselines import EveryOutput, NonFinite, one_read, plain_hooks
from nan_detector._bench.figures import Slope, Spread, differences, excess, fitted, ratios, spread
from nan_detector._bench.memory import living_bytes, memory_of
from nan_detector._bench.results import BARE, BARE_AGAIN, READ, Cell, Report, Row, Target, Trend
from nan_detector._bench.tables import markdown, readme_table, trend_lines
from nan_detector._bench.timing import Contestant, Step, in_turns, threads
from nan_detector._bench.variants import STEP, VARIANTS, variant
from nan_detector._bench.workloads import WORKLOADS, Residual, Task, made, named
from nan_detector._cli.app import main
from nan_detector._render.ratios import ratio_bars

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def program(name: str) -> ModuleType:
    """One of the programs in benchmarks/."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_spread_is_the_median_between_its_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    assert str(spread([1.0, 2.0])) == "1.500 (1.250 to 1.750)"
    with pytest.raises(ValueError, match="at least one round"):
        spread([])


def test_rounds_are_compared_each_with_its_own() -> None:
    """A machine that gets ten times slower half-way changes nothing."""
    bare, watched = [1.0, 1.0, 10.0, 10.0], [1.1, None, 11.0, 11.0]
    assert ratios(watched, bare) == pytest.approx([1.1, 1.1, 1.1])
    assert differences(watched, bare) == pytest.approx([0.1, 1.0, 1.0])
    assert ratios([1.0, 2.0], [None, 2.0]) == [1.0]
    assert excess([1.1, 1.2, None, 12.0], [1.05, None, 1.0, 10.0], [1.0, 1.0, 1.0, 10.0]) == pytest.approx([0.05, 0.2])


def test_a_line_is_found_with_its_band() -> None:
    exact = fitted([1, 2, 3, 4], [3, 5, 7, 9])
    assert (exact.slope, exact.intercept, exact.count) == (pytest.approx(2), pytest.approx(1), 4)
    assert exact.low == pytest.approx(2) and exact.high == pytest.approx(2) and not exact.is_flat
    # By hand: residuals 1/3, -2/3, 1/3 of y = 4/3; one degree of freedom, t = 12.71.
    noisy = fitted([0, 1, 2], [1, 0, 1])
    assert noisy.slope == pytest.approx(0) and noisy.is_flat
    assert noisy.high == pytest.approx(12.71 * (2 / 3 / 2) ** 0.5, rel=1e-3)
    for xs in ([1, 2], [1, 1, 1]):
        with pytest.raises(ValueError, match="have no slope"):
            fitted(xs, xs)


def test_the_band_holds_the_truth_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(300):
        noise = torch.randn(8, generator=generator).tolist()
        line = fitted(range(8), [0.5 * x + n for x, n in enumerate(noise)])
        hits += line.low <= 0.5 <= line.high
    assert 0.92 < hits / 300 < 0.98


# -- the clock --------------------------------------------------------------------------------------------------------


def contestant(name: str, log: list[str], every: int = 1, seconds: float = 0.0) -> Contestant:
    def step() -> float:
        log.append(name)
        moment = time.perf_counter() + seconds
        while time.perf_counter() < moment:
            pass
        return moment

    @contextmanager
    def watch() -> Iterator[Step]:
        log.append(f"{name} on")
        yield step
        log.append(f"{name} off")

    return Contestant(name, watch, steps=2, warm=1, every=every)


def test_contestants_take_turns_and_are_switched_off_in_between() -> None:
    log: list[str] = []
    blocks = in_turns([contestant("a", log), contestant("b", log)], rounds=2, budget_s=60.0)
    a, b = ["a on", "a", "a", "a", "a off"], ["b on", "b", "b", "b", "b off"]
    assert log == [*a, *b, *b, *a]  # everyone gets every place
    assert [len(found) for found in blocks.values()] == [2, 2]
    assert all(block is not None and len(block.steps) == 2 for found in blocks.values() for block in found)


def test_what_is_slow_sits_out_most_rounds() -> None:
    log: list[str] = []
    blocks = in_turns([contestant("a", log), contestant("slow", log, every=3)], rounds=4, budget_s=60.0)
    assert [b is not None for b in blocks["slow"]] == [True, False, False, True]
    assert all(b is not None for b in blocks["a"])


def test_the_time_is_that_of_the_steps() -> None:
    block = in_turns([contestant("a", [], seconds=0.01)], rounds=1, budget_s=60.0)["a"][0]
    assert block is not None
    assert 0.01 <= block.mean_s < 0.05 and 0.0099 <= block.forward_s <= block.mean_s


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        (1.0, 6),  # a block has three steps: the sixth round ends at 18
        (2.5, 3),  # the third ends at 22.5
        (9.0, 3),  # the second ends at 54, and 64 s are waited for at most
        (11.0, 2),  # the second ends at 66
        (30.0, 1),
    ],
)
def test_no_round_begins_after_the_budget_but_the_least_if_they_are_not_too_long(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("nan_detector._bench.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step() -> float:
        now[0] += seconds
        return now[0]

    done: list[tuple[int, int]] = []
    in_turns(
        [Contestant("a", lambda: nullcontext(step), steps=2, warm=1)],
        rounds=9,
        budget_s=16.0,
        least=3,
        on_round=lambda number, of: done.append((number, of)),
    )
    assert done == [(i, 9) for i in range(1, rounds + 1)]


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(2):
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == before


# -- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["W1", "W3-25", "W5"])
def test_a_workload_trains_and_is_the_same_each_time(name: str) -> None:
    state = torch.get_rng_state()
    first, second = made(named(name)), made(named(name))
    assert torch.equal(torch.get_rng_state(), state)
    for task in (first, second):
        before = task.loss().item()
        for _ in range(20):
            task.step()
        assert task.loss().item() < before
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_workloads_are_those_of_the_targets() -> None:
    assert [w.name for w in WORKLOADS] == ["W1", "W2", "W3-25", "W3-50", "W3-100", "W3-200", "W4", "W5"]
    sizes = {"W1": 85_002, "W2": 10_023_400, "W4": 11_181_642}
    for name, size in sizes.items():
        assert sum(p.numel() for p in made(named(name)).model.parameters()) == size
    assert len(list(made(named("W3-200")).model.parameters())) == 2 * 201
    with pytest.raises(ValueError, match=r"^workload='W9' is not one of W1, W2, W3-25, .*W5\.$"):
        named("W9")


def small() -> Task:
    torch.manual_seed(0)
    return Task(Residual(2, 16), torch.randn(4, 16), torch.randint(0, 10, (4,)))


AVAILABLE = [v for v in VARIANTS if v.missing is None]


@pytest.mark.parametrize("which", AVAILABLE, ids=lambda v: v.name)
def test_a_variant_trains_the_same_and_leaves_nothing(which: Any) -> None:
    bare, watched = small(), small()
    with which.watch(watched) as step:
        for _ in range(3):
            step()
    for _ in range(3):
        bare.step()
    assert all(torch.equal(a, b) for a, b in zip(bare.model.parameters(), watched.model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.model.modules())
    assert not any(p._backward_hooks for p in watched.model.parameters())


def test_every_variant_is_here_or_says_why_not() -> None:
    names = [v.name for v in VARIANTS]
    assert names[0] == BARE and {BARE_AGAIN, READ} < set(names) and len(set(names)) == len(names)
    assert not variant(READ).slow, "the floor is measured in every round, like ours"
    assert [v.level for v in VARIANTS if v.level] == ["step", "layers", "ops"]
    absent = replace(variant(BARE), needs="no_such_package_here")
    assert absent.missing == "no_such_package_here is not installed"
    assert replace(absent, needs="torch.utils.no_such_module").missing == "not in this torch"


def test_ours_refuses_to_time_a_step_that_was_bad() -> None:
    task = small()
    with pytest.raises(RuntimeError, match="was not finite, and is worth nothing"), variant(STEP).watch(task):
        task.bad_step()


def test_the_plain_detectors_do_their_work() -> None:
    """What ours is compared with finds bad values, too."""
    task = small()
    with plain_hooks(task.model), pytest.raises(NonFinite, match=r"^layers\.0$"):
        task.model(torch.full((4, 16), float("nan")))
    with plain_hooks(task.model), pytest.raises(NonFinite, match=r"^head\.bias$"):
        (task.model(task.x) * float("inf")).sum().backward()
    with EveryOutput(), pytest.raises(NonFinite, match="log"):
        torch.log(torch.zeros(2))
    with EveryOutput():
        torch.empty(1000).fill_(1.0)


def test_one_read_reads_every_gradient_once_and_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small()
    fetched: list[list[float]] = []
    fetch = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: fetched.append(fetch(t)) or fetched[-1])
    task.model.head.bias.requires_grad_(False)
    with one_read(task.optimizer):
        for done in (1, 2):
            task.step()
            norms = [p.grad.norm().item() for p in task.model.parameters() if p.grad is not None]
            assert len(fetched) == done and fetched[-1] == pytest.approx(norms) and len(norms) == 5
        task.optimizer.zero_grad()
        task.optimizer.step()  # nothing to read
    task.step()
    assert len(fetched) == 2


def test_memory_is_what_was_allocated() -> None:
    size = 1 << 20

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 10))

        def forward(self, x: Tensor) -> Tensor:
            extra = torch.ones(size // 4)
            return x @ self.weight + extra[0]

    task = Task(Big(), torch.randn(4, 16), torch.randint(0, 10, (4,)))
    found = memory_of(variant(BARE).watch, task)
    # While it is there the gradients of the step before are gone.
    assert size - 1000 < found.peak - found.steady < size + 20_000
    keep = torch.ones(3 * size // 4)
    more = memory_of(variant(BARE).watch, task)
    assert more.steady - found.steady == keep.nbytes
    before = living_bytes()
    other = keep[5:]
    assert living_bytes() == before and other.numel()


def test_memory_sees_what_a_detector_holds() -> None:
    found = memory_of(variant(BARE).watch, small()), memory_of(variant(STEP).watch, small())
    ring = 1000 * 4 * (1 + 6)  # rows of float32: the loss and six norms
    assert ring <= found[1].steady - found[0].steady < ring + 30_000  # and a state of the generator


def test_the_answer_is_timed_and_right() -> None:
    answer = answer_of("step", small, repeats=1)
    assert answer.location and answer.located_s > 0.0 and answer.trials_s > 0.0


def test_growth_is_fitted_over_all_rounds() -> None:
    axis = growth.AXES[0]
    found = growth.grown(axis, budget_s=60.0, sizes=(1, 2, 4), rounds=2)
    assert found.sizes == (1, 2, 4) and len(found.ratios) == len(found.added_us) == 3
    assert found.cost.count == found.share.count == 6
    assert found.added_us[0].median > 0.0


@pytest.mark.parametrize("size", [1e6, 2e6])
def test_parameters_are_as_many_as_is_said(size: float) -> None:
    task = growth.AXES[1].make(size)
    assert sum(p.numel() for p in task.model.parameters()) == pytest.approx(size, rel=0.002)


# -- what is written --------------------------------------------------------------------------------------------------


def row(name: str, ratio: float, level: str | None = None, **more: Any) -> Row:
    at = Spread(ratio, ratio - 0.01, ratio + 0.01, 9)
    ms = Spread(2 * ratio, 2 * ratio, 2 * ratio, 9)
    more.setdefault("above_read", None if name in (BARE, BARE_AGAIN, READ) else ratio - 1.05)
    return Row(name, level, ms, ms, at, at, ratio - 0.002, ratio - 0.002, **more)


CELL = Cell(
    "W1",
    "a small net",
    1,
    (
        row(BARE, 1.0, peak_bytes=2**20, steady_bytes=2**19),
        row(READ, 1.05),
        row(STEP, 1.08, "step", peak_bytes=2**20 + 2**18, steady_bytes=2**19, answer_steps=4.25, trials_steps=12.0),
        row(BARE_AGAIN, 1.002),
        row("torch.autograd.set_detect_anomaly", 2.1),
    ),
    {"step": 1.07},
)
TREND = Trend(
    "layers",
    "100 layers",
    (25, 50),
    (Spread(1.02, 1, 1, 5), Spread(1.021, 1, 1, 5)),
    (Spread(90, 1, 1, 5), Spread(180, 1, 1, 5)),
    Slope(360.0, 350.0, 370.0, 0.0, 10),
    Slope(0.001, -0.002, 0.004, 1.0, 10),
)
MACHINE = {"torch": "2.9", "python": "3.11", "platform": "Linux-6", "processors": "2", "device": "cpu"}
REPORT = Report(MACHINE, (CELL, replace(CELL, threads=2)), (TREND,), {"torchlens": "torchlens is not installed"}, 61.0)


def test_the_report_as_markdown() -> None:
    assert markdown(replace(REPORT, cells=(CELL,))) == (ROOT / "tests" / "golden" / "bench.md").read_text(
        encoding="utf-8"
    )


def test_each_target_is_told_with_what_became_of_it() -> None:
    first, second = REPORT.targets()
    assert (first.threads, second.threads, first.found, first.read) == (1, 2, pytest.approx(1.078), 1.048)
    assert first.above_read == pytest.approx(0.03) and not first.holds and first.noise == pytest.approx(0.01)
    assert (
        "| W1, 2 threads | step | ≤ 1.07 | 1.078 | 1.048 | +0.030 | ± 0.010 | does not hold, within the noise |"
        in markdown(REPORT)
    )
    # A level that was not measured has none.
    (fine,) = replace(REPORT, cells=(replace(CELL, limits={"step": 1.08, "layers": 1.0}),)).targets()
    assert fine.holds and fine.verdict == "holds, within the noise"
    assert "Targets" not in markdown(replace(REPORT, cells=(replace(CELL, limits={}),)))


@pytest.mark.parametrize(
    ("found", "read", "noise", "verdict"),
    [
        (1.015, 1.01, 0.001, "holds"),
        (1.019, 1.01, 0.002, "holds, within the noise"),
        (1.021, None, 0.002, "does not hold, within the noise"),
        (1.04, 1.03, 0.001, "does not hold; one read is above it by itself"),
        (1.06, 1.06, 0.03, "does not hold; one read is above it by itself"),
        (1.03, 1.03, 0.05, "does not hold, within the noise"),
    ],
)
def test_a_verdict_says_what_it_is_worth(found: float, read: float | None, noise: float, verdict: str) -> None:
    assert Target("W2", 1, "step", 1.02, found, read, 0.01, noise).verdict == verdict


def test_noise_is_how_far_bare_runs_lie_apart_and_how_much_they_vary() -> None:
    assert CELL.apart == pytest.approx(0.002) and CELL.noise == pytest.approx(0.01)
    off = replace(CELL, rows=(row(BARE, 1.0), row(BARE_AGAIN, 0.9)))
    assert off.noise == pytest.approx(0.1) and replace(CELL, rows=()).noise == 0.0


def test_a_busy_machine_is_told() -> None:
    busy = replace(CELL, processor=0.45)
    said = "This machine was busy with other things: at worst this process had a processor for 45% of the time."
    assert said in markdown(replace(REPORT, cells=(CELL, busy)))
    for other in (replace(REPORT, cells=(CELL, replace(busy, threads=2))), REPORT):
        assert "busy" not in markdown(other)
    on_a_gpu = replace(REPORT, cells=(busy,), machine={**MACHINE, "device": "NVIDIA X"})
    assert "busy" not in markdown(on_a_gpu)


def test_growth_that_is_seen_is_not_called_flat() -> None:
    (flat,) = trend_lines([TREND])
    (grows,) = trend_lines([replace(TREND, share=Slope(0.01, 0.005, 0.015, 1.0, 10))])
    assert ": flat)" in flat and ": not flat)" in grows


def test_files_are_written(tmp_path: Path) -> None:
    paths = output.write(REPORT, tmp_path / "new" / "folder")
    assert [p.name for p in paths] == list(output.FILES)
    told = json.loads(paths[0].read_text(encoding="utf-8"))
    assert told["cells"][0]["rows"][2]["ratio"]["median"] == 1.08 and told["trends"][0]["cost"]["slope"] == 360.0
    assert paths[2].read_bytes().startswith(b"\x89PNG") and paths[2].stat().st_size > 10_000


def test_a_report_that_is_not_finished_says_so(tmp_path: Path) -> None:
    early = replace(REPORT, unfinished=("W2, 1 thread", "growth with layers"))
    paths = output.write_text(early, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths), "no draft is left"
    assert json.loads(paths[0].read_text(encoding="utf-8"))["unfinished"] == ["W2, 1 thread", "growth with layers"]
    assert "Not finished; still to be measured: W2, 1 thread; growth with layers." in paths[1].read_text(
        encoding="utf-8"
    )
    assert "Not finished" not in markdown(REPORT)


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert [p.name for p in output.write(REPORT, tmp_path)] == ["bench.json", "bench.md"]


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    for groups in ({}, {"W1": {"a": float("nan")}}, {"W1": {"a": 0.0}}):
        with pytest.raises(ValueError, match="must hold at least one training"):
            ratio_bars(groups, tmp_path / "x.png", ours=["a"])
    with pytest.raises(ValueError, match="the same variants"):
        ratio_bars({"W1": {"a": 1.0}, "W2": {"b": 1.0}}, tmp_path / "x.png", ours=["a"])


def test_the_machine_is_named() -> None:
    assert measure.machine("cpu")["torch"] == torch.__version__


# -- the commands -----------------------------------------------------------------------------------------------------


TINY = measure.Plan(("W1",), cell_s=0.0, growth_s=0.0, least=1, memory_s=0.0, answers=("step",), repeats=1)


def test_the_command_measures_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "QUICK", TINY)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "--out", str(tmp_path / "bench"), "--workload", "W1"]) == 0
    out, err = capfd.readouterr()
    assert "W1: MLP 64-256-256-10, batch 64; 1 thread" in out and 'nan-detector, watch="step"' in out
    assert "born" not in err, "the bad steps that it takes are not news"
    told = json.loads((tmp_path / "bench" / "bench.json").read_text(encoding="utf-8"))
    (cell,) = told["cells"]
    by_name = {r["variant"]: r for r in cell["rows"]}
    assert set(by_name) == {v.name for v in AVAILABLE}
    assert by_name[BARE]["ratio"]["median"] == 1.0
    assert by_name[STEP]["answer_steps"] > 0 and by_name[STEP]["peak_bytes"] > by_name[BARE]["peak_bytes"] > 300_000
    assert {v.name for v in VARIANTS} == set(by_name) | set(told["missing"])
    assert by_name[READ]["above_read"] is None and by_name[STEP]["above_read"] > -0.5
    assert [t["level"] for t in told["targets"]] == ["step", "layers"] and "Targets" in out
    assert 0.0 < cell["processor"] <= 1.0
    assert told["unfinished"] == [] and 0.0 < cell["seconds"] <= told["seconds"]


def test_parts_come_in_order_and_what_the_detector_says_meanwhile_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def cell(workload: Any, variants: Any, plan: Any, count: int) -> Cell:
        logging.getLogger("nan_detector").warning("the gradient norm of head.weight is 594")
        return replace(CELL, workload=workload.name, threads=count)

    monkeypatch.setattr(measure, "_cell", cell)
    monkeypatch.setattr(measure, "_trend", lambda *args: TREND)
    told: list[str] = []
    reports: list[Report] = []
    plan = measure.Plan(("W1", "W4"), threads=(1, 2), growth_s=1.0)
    report = measure.run(plan, told.append, reports.append)
    assert [t.partition(" (")[0] for t in told] == [
        *("W1, 1 thread", "W4, 1 thread", "growth with layers", "growth with parameters", "growth with batch"),
        *("W1, 2 threads", "W4, 2 threads"),
    ]
    assert [r.unfinished for r in reports] == [tuple(told[i:]) for i in range(1, len(told) + 1)]
    assert reports[-1] is report and len(report.cells) == 4 and len(report.trends) == 3
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["bench", "--workload", "W9"],
            "nan-detector: --workload='W9' is not one of W1, W2, W3-25, W3-50, W3-100, W3-200, W4, W5.\n",
        ),
        (
            ["bench", "--out", "README.md/x"],
            "nan-detector: --out='README.md/x' cannot be made a folder (Not a directory): name another one.\n",
        ),
    ],
)
def test_the_command_refuses(
    argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(argv) == 2
    assert capsys.readouterr() == ("", line)


def test_the_command_with_the_detector_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NAN_DETECTOR", "off")
    assert main(["bench"]) == 2
    assert "its cost would be none: unset it." in capsys.readouterr().err


def test_the_gpu_check_refuses_a_machine_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    check = program("gpu_check")
    assert check.main([]) == 2
    assert capsys.readouterr().err == (
        "gpu_check: PyTorch sees no CUDA device here. Run it where torch.cuda.is_available() is True; the same is "
        "tested without one by tests/test_one_read.py.\n"
    )


def test_the_gpu_check_reads_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    check = program("gpu_check")
    options = check.parsed(["--seconds", "3", "--out", "x"])
    assert (options.seconds, options.out) == (3.0, Path("x"))
    for wrong in ("0", "601", "nan"):
        with pytest.raises(SystemExit):
            check.parsed(["--seconds", wrong])
        assert "must be above 0, and at most 600" in capsys.readouterr().err
    # All workloads, with their checks, in less than four minutes.
    assert len(check.WORKLOADS) * check.parsed([]).seconds <= 120


def test_the_gpu_check_counts_reads_of_the_device_alone() -> None:
    check = program("gpu_check")
    before = dict(vars(Tensor))
    with check.reads() as found:
        assert torch.ones(2).tolist() == [1.0, 1.0]
    with check.reads("cpu") as meant:
        assert torch.ones(2).tolist() == [1.0, 1.0]
    assert (found.count, meant.count) == (0, 1) and dict(vars(Tensor)) == before


@pytest.mark.parametrize("level", ["step", "layers"])
def test_the_gpu_check_finds_one_read_a_step_and_a_second_one(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but what only a CUDA device can tell."""
    check = program("gpu_check")
    assert check.waits_of_its_own("W1", "cpu") == [] and check.waits("W1", level, "cpu") == []

    @contextmanager
    def reads_twice(task: Task) -> Iterator[Step]:
        with variant(STEP).watch(task) as step, one_read(task.optimizer):
            yield step

    monkeypatch.setattr(check, "ours", lambda level: reads_twice)
    said = f"W1, watch={level!r}: 80 reads in 40 steps, and one in each is meant"
    assert check.waits("W1", level, "cpu") == [said, said]


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_the_gpu_check_tells_each_wait_by_its_place(mode: str) -> None:
    """In PyTorch's words, and beside what it says of the mode that looks for them."""
    check = program("gpu_check")
    task = small()

    def step() -> float:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
                      "operations", stacklevel=1)  # fmt: skip
        if mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:7.)", stacklevel=1)
        return 0.0

    (said,) = check._under(mode, step, task)
    assert re.fullmatch(r".*test_bench\.py:\d+: called a synchronizing CUDA operation", said)
    with pytest.raises(RuntimeError, match="something else"):
        check._under(mode, lambda: exec('raise RuntimeError("something else")'), task)


# -- the README's table -----------------------------------------------------------------------------------------------


def table() -> str:
    run = program("run")
    return README[README.index(run.BEGIN) + len(run.BEGIN) : README.index(run.END)]


def test_the_readme_names_the_command_that_made_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^`([^`]+)` made this", table(), re.MULTILINE)
    made_by, *arguments = shlex.split(command)
    if made_by == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        (line,) = re.findall(rf"^{arguments[0]}:.*\n\t\$\(BIN\)/(python .*)$", makefile, re.MULTILINE)
        made_by, *arguments = shlex.split(line)
    assert (made_by, arguments[0]) == ("python", "benchmarks/run.py")
    ran: list[measure.Plan] = []
    run = program("run")
    monkeypatch.setattr(run.measure, "run", lambda plan, tell, done: ran.append(plan) or REPORT)
    monkeypatch.setattr(run, "README", tmp_path / "README.md")
    run.README.write_text(README, encoding="utf-8")
    assert run.main([*arguments[1:], "--out", str(tmp_path / "out")]) == 0
    assert ran[0].workloads == tuple(w.name for w in WORKLOADS) and 1 in ran[0].threads
    assert f"`{command}` made this" in run.README.read_text(encoding="utf-8")


def test_the_readme_has_every_workload_and_sound_numbers() -> None:
    lines = [line for line in table().splitlines() if line.startswith("| W")]
    assert [line.split(":")[0] for line in lines] == [f"| {w.name}" for w in WORKLOADS]
    for line in lines:
        bare, *others = [cell.strip() for cell in line.strip("|").split("|")][1:]
        assert bare.endswith(" ms") and float(bare.split()[0]) > 0
        assert all(0.5 < float(ratio) < 50 for ratio in others[:-1]) and others[-1].endswith(" steps")


def test_the_table_is_written_anew_and_nothing_else() -> None:
    run = program("run")
    other = run.with_costs(README, "something\n")
    assert "something\n" in other and run.with_costs(other, table()) == README
    block = run.costs(REPORT, "make bench")
    assert block.startswith(readme_table(REPORT, run.OTHERS))
    assert "| W1: a small net | 2.00 ms | 1.05 | 1.08 |  |  | 2.10 | 4.2 steps |\n" in block
    assert "| a bare step | one read |" in block and "no check that looks at all gradients costs less" in block
    assert block.count("| W1") == 1, "of the runs with one thread alone"


def interrupted(plan: measure.Plan, tell: Any, done: Any) -> Report:
    done(replace(REPORT, unfinished=("W2, 1 thread",)))
    raise KeyboardInterrupt


def test_an_interrupted_run_leaves_what_was_measured_and_the_readme_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = program("run")
    monkeypatch.setattr(run.measure, "run", interrupted)
    monkeypatch.setattr(run, "README", tmp_path / "README.md")
    assert run.main(["--readme", "--out", str(tmp_path / "out")]) == 130
    assert "still to be measured: W2, 1 thread." in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == set(output.FILES) and not run.README.exists()


def test_an_interrupted_command_leaves_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "run", interrupted)
    assert main(["bench", "--out", str(tmp_path)]) == 130
    assert f"interrupted. What was measured until then is in {tmp_path}." in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"bench.json", "bench.md"}


def test_the_readme_is_not_written_from_a_quick_look(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program("run").main(["--quick", "--readme"])
    assert "--readme needs all workloads" in capsys.readouterr().err
