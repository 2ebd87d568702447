"""Trials on real steps: what each of them answers yes and no to, what it costs, and that nothing of it stays."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _sacred  # noqa: F401  # makes PyTorch wrap its optimizers before a test is held against how they were
from nan_detector import NaNDetector, NaNEvent, Trial, _trial_lab, _trials
from nan_detector._again import Again
from nan_detector._change import Change
from nan_detector._eventlog import read_log
from nan_detector._hit import investigate
from nan_detector._run_step import Call
from nan_detector._session import session
from nan_detector._trial_changes import Unscaled

Batch = tuple[Tensor, Tensor]
Root = Callable[[Tensor], Tensor]


def data(n: int = 5, bad: int = 4, rows: tuple[int, ...] = (3,), size: int = 16, value: float = -1.0) -> list[Batch]:
    """Batches of positive numbers; in batch `bad`, samples `rows` are `value`."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        x = torch.rand(size, 4, generator=generator) + 0.5
        if i == bad:
            x[list(rows)] = value
        out.append((x, torch.rand(size, 1, generator=generator)))
    return out


class Net(nn.Module):
    """Two layers around `inner`."""

    def __init__(self, inner: Root = torch.sqrt) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = inner
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.inner(x))))


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def train(
    model: nn.Module,
    batches: list[Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor] = squared,
    *,
    whole: bool = False,
    **options: Any,
) -> NaNEvent:
    """Train until the event; `whole`: each step through `run_step`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    with NaNDetector(model, verbose=False, **options) as det:
        for batch in batches:
            if whole:
                det.run_step(step, model, batch)
            else:
                step(model, batch)
            if det.triggered:
                break
    assert det.event is not None
    return det.event


def tried(event: NaNEvent, name: str) -> Trial:
    found = [t for t in event.trials if t.name == name]
    assert len(found) == 1, (event.trials, event.notes)
    return found[0]


BOTH = pytest.mark.parametrize("whole", [False, True], ids=["loop", "run_step"])


# -- the same again ----------------------------------------------------------------------------------------------------


@BOTH
def test_the_same_again(whole: bool):
    event = train(Net(), data(), whole=whole)
    assert tried(event, "again") == Trial(
        "again", "Does the same step do the same again, twice?", False, "twice the same, bit for bit"
    )
    assert event.verdict == "formula"


def test_a_step_that_draws_random_numbers_is_the_same_again():
    event = train(Net(lambda x: torch.sqrt(F.dropout(x))), data())
    assert tried(event, "again").detail == "twice the same, bit for bit"


def test_a_step_that_is_never_the_same_is_found_out():
    count = iter(range(10**6))
    model = Net(torch.exp)
    model.last.bias.register_hook(lambda g: g + next(count))

    def steep(model: nn.Module, batch: Batch) -> Tensor:
        return squared(model, batch) + torch.sqrt((0.0 * model.first.weight).sum())

    event = train(model, data(bad=-1), steep)
    assert event.reproduced == "yes"  # the loss was the same
    again = tried(event, "again")
    assert (again.finite, again.detail) == (False, "twice, with different numbers: not deterministic")


def test_a_bad_value_that_comes_and_goes_is_not_reproducible():
    calls = iter([0.0, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0, 0.0, *[0.0] * 100])
    event = train(Net(lambda x: torch.sqrt(x + 9.0 * next(calls))), data(bad=-1))
    again = tried(event, "again")
    assert (again.finite, again.detail) == (True, "one of two runs was finite: it does not always happen")
    assert event.verdict == "not_reproducible"
    assert tried(event, "float64").detail == "without a replay that does what the step did, it would show nothing"


# -- dtypes ------------------------------------------------------------------------------------------------------------


def under_autocast(dtype: torch.dtype, inside: bool) -> Callable[[nn.Module, Batch], Tensor]:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            out = model(batch[0])
            if inside:
                return F.mse_loss(out.float(), batch[1])
        return F.mse_loss(out.float(), batch[1])

    return loss_of


class Product(Net):
    """Its second matrix product is beyond float16 for large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.tanh(h @ h.T @ h))


@BOTH
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_left_out(whole: bool, inside: bool):
    event = train(Product(), data(value=500.0), under_autocast(torch.float16, inside), whole=whole)
    assert (event.op, event.verdict) == ("mm", "precision")
    assert tried(event, "float32").finite is True
    assert tried(event, "float32").detail.startswith("loss ")
    assert "precision: a wider number format keeps the step finite (tried in float32)" in str(event)
    assert "float64" not in [t.name for t in event.trials]


@BOTH
def test_autocast_within_the_model_is_left_out(whole: bool):
    class Within(Product):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return super().forward(x).float()

    event = train(Within(), data(value=500.0), whole=whole)
    assert tried(event, "float32").finite is True and event.verdict == "precision"


@BOTH
def test_a_half_model_is_widened_with_all_it_is_given(whole: bool):
    batches = [(x.half(), y.half()) for x, y in data(value=300.0)]
    event = train(Product().half(), batches, whole=whole)
    assert tried(event, "float32").finite is True and event.verdict == "precision"


def test_casts_and_constants_of_a_half_model_are_widened():
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)
            self.shift = torch.ones(4, dtype=torch.float16)  # no buffer: nobody knows of it

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x).half() + self.shift
            h = h * torch.full((4,), 300.0, dtype=torch.float16)
            return (h * h).to(torch.float16).float().sum(1, keepdim=True)

    event = train(Casts(), data(value=100.0))
    assert event.op == "mul" and tried(event, "float32").finite is True


def spread_of(x: Tensor) -> Tensor:
    return torch.sqrt((x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2).expand(-1, 4)


def far_away() -> list[Batch]:
    batches = data(bad=-1)
    batches[4] = (batches[4][0] + 3e4, batches[4][1])
    return batches


@BOTH
def test_digits_lost_in_float32_are_there_in_float64(whole: bool):
    event = train(Net(spread_of), far_away(), whole=whole)
    assert event.op == "sqrt"
    assert tried(event, "float64").finite is True
    assert event.verdict == "formula"  # a fix in the same format says more
    assert tried(event, "fix").finite is True


def test_what_is_negative_stays_so_in_float64():
    event = train(Net(), data())
    assert tried(event, "float64") == Trial("float64", "Is the step finite in float64?", False, "the loss is not")


def test_recurrent_layers_are_widened():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm(spread_of(x).unsqueeze(1))
            return self.last(out[:, -1])

    event = train(Recurrent(), far_away())
    assert tried(event, "float64").finite is True


def test_a_hook_that_does_it_does_it_in_float64_as_well():
    model = Net(torch.exp)
    model.last.weight.register_hook(lambda g: torch.log(g - 1e3))
    event = train(model, data(bad=-1))
    assert tried(event, "float64").finite is False and event.verdict == "formula"


# -- samples -----------------------------------------------------------------------------------------------------------


@BOTH
def test_the_sample_that_an_operation_meets(whole: bool):
    event = train(Net(), data(rows=(3,)), whole=whole)
    assert (event.phase, event.sample_index) == ("forward", (3,))
    assert tried(event, "samples") == Trial(
        "samples", "Which samples of the batch do it?", True, "without sample 3 the step is finite"
    )


def logsum_of_shares(model: nn.Module, batch: Batch) -> Tensor:
    # One number: nothing about the operation tells whose it is.
    return (torch.log(batch[0].min()) - model(batch[0]).mean()) ** 2


@BOTH
def test_the_sample_behind_a_number_made_of_all_is_found_by_halves(whole: bool):
    event = train(Net(torch.exp), data(rows=(11,)), logsum_of_shares, whole=whole)
    assert event.op == "log" and event.sample_index == (11,)
    assert tried(event, "samples").detail == "without sample 11 the step is finite"


def test_where_every_sample_does_it_none_is_blamed():
    event = train(Net(), data(rows=tuple(range(16))))
    assert event.sample_index == ()
    assert tried(event, "samples").detail == "each quarter of the batch does it"


@BOTH
def test_the_samples_that_the_batch_brings_bad(whole: bool):
    event = train(Net(torch.exp), data(rows=(2, 5), value=float("nan")), whole=whole)
    assert (event.phase, event.verdict, event.sample_index) == ("data", "data", (2, 5))
    assert tried(event, "samples").detail == "without samples 2 and 5 the step is finite"
    assert [t.name for t in event.trials] == ["again", "samples"]


@BOTH
def test_a_batch_that_is_all_bad_is_tried_with_finite_values(whole: bool):
    event = train(Net(torch.exp), data(rows=tuple(range(16)), value=float("nan")), whole=whole)
    assert event.verdict == "data"
    assert tried(event, "finite_data").finite is True


def test_names_of_samples_that_were_found_by_halves():
    model, optimizer = Net(torch.exp), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i, batch in enumerate(data(rows=(11,))):
            det.set_batch(i, sample_ids=[f"file{i}-{k}" for k in range(16)])
            optimizer.zero_grad()
            logsum_of_shares(model, batch).backward()
            optimizer.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.sample_id == ("file4-11",)


def test_a_batch_that_is_prepared_in_the_loop_is_cut_behind_its_preparation():
    generator = torch.Generator().manual_seed(0)

    def prepared(model: nn.Module, batch: Batch) -> Tensor:
        x = torch.rand(16, 4, generator=generator) + 0.5
        weight = torch.arange(16.0).view(16, 1)  # knows the number of samples
        x[9] = x[9] - (2.0 if batch[0].min() < 0 else 0.0)
        return (weight * (model(x) - x.sum(1, keepdim=True)) ** 2).mean()

    event = train(Net(), data(), prepared)
    assert event.sample_index == (9,)


def test_only_the_guilty_micro_batch_is_cut():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = data(n=6, bad=4, rows=(7,))
    with NaNDetector(model, verbose=False) as det:
        for i, batch in enumerate(batches):
            (squared(model, batch) / 3).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    event = det.event
    assert event is not None and (event.step, event.micro_step) == (1, 1)
    assert event.sample_index == (7,)
    assert tried(event, "samples").finite is True


def test_a_step_that_knows_its_batch_size_cannot_be_cut():
    class Fixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(16, 4))

    event = train(Fixed(), data())
    trial = tried(event, "samples")
    assert trial.finite is None
    assert trial.detail.startswith("on part of the batch the step raised RuntimeError: shape '[16, 4]' is invalid")
    assert event.sample_index == ()


def test_a_step_function_that_takes_its_batch_from_elsewhere():
    current: list[Batch] = []

    def elsewhere(model: nn.Module, batch: Any) -> Tensor:
        return squared(model, current[0])

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        elsewhere(model, None).backward()
        optimizer.step()

    with NaNDetector(model, verbose=False) as det:
        for batch in data():
            current[:] = [batch]
            det.run_step(step)
    assert det.event is not None
    trial = tried(det.event, "samples")
    assert (trial.finite, trial.detail) == (
        None,
        "the step function takes its batch from elsewhere than its arguments",
    )


def test_batch_normalisation_is_mentioned():
    class Normal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.norm(x).sum(1, keepdim=True)

    event = train(Normal(), data())
    assert tried(event, "samples").detail == (
        "without sample 3 the step is finite; BatchNorm's statistics change with the batch"
    )


# -- state -------------------------------------------------------------------------------------------------------------


def poisoned(model: nn.Module, name: str) -> Callable[[nn.Module, Batch], Tensor]:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return squared(model, batch)

    with torch.no_grad():
        dict([*model.named_parameters(), *model.named_buffers()])[name].view(-1)[0] = float("nan")
    return loss_of


@BOTH
def test_a_bad_parameter_is_replaced(whole: bool):
    model = Net(torch.exp)
    event = train(model, data(bad=-1), poisoned(model, "last.weight"), whole=whole)
    assert (event.phase, event.verdict, event.tensor_name) == ("state", "state", "last.weight")
    trial = tried(event, "finite_state")
    assert trial.finite is True and trial.detail.startswith("loss ")
    assert trial.question == "Is the step finite with finite values in place of the bad ones in last.weight?"
    assert model.last.weight.isnan().sum() == 1  # the model's own is as it was


def test_a_bad_buffer_is_replaced():
    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__(torch.exp)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.shift)

    model = Shifted()
    event = train(model, data(bad=-1), poisoned(model, "shift"))
    assert event.verdict == "state" and tried(event, "finite_state").finite is True


def test_a_bad_weight_that_a_recurrent_layer_keeps_in_its_list():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.last = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.rnn(x.unsqueeze(1))[0][:, -1])

    model = Recurrent()
    event = train(model, data(bad=-1), poisoned(model, "rnn.weight_hh_l0"))
    assert event.verdict == "state" and tried(event, "finite_state").finite is True


def test_finite_state_does_not_mend_a_formula():
    model = Net(lambda x: torch.sqrt(x - 10.0))
    event = train(model, data(bad=-1), poisoned(model, "last.weight"))
    assert tried(event, "finite_state") == Trial(
        "finite_state",
        "Is the step finite with finite values in place of the bad ones in last.weight?",
        False,
        "the loss is not",
    )


# -- loss scale --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_without_a_loss_scale(scale: float, whole: bool):
    model = Net(torch.exp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    (batch,) = data(n=1, bad=-1)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        scaler.scale(1e3 * squared(model, batch)).backward()

    with NaNDetector(model, verbose=False, on_nan="warn"):
        current = session()
        call = Call(step, (batch,), {}, {"": model}, {}, current) if whole else None
        step(batch)
        with current.off():
            again = investigate(current.tape, {"": model}, 60.0, call=call).again
            assert again is not None
            assert again.run(Change(), float("inf")).finite is (scale == 1.0)
            assert again.run(Unscaled(), float("inf")).finite is True
        current.tape.clear()


def test_the_loss_that_a_trial_tells_is_the_one_before_the_scale():
    model = Net(torch.exp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (batch,) = data(n=1, bad=-1)
    with NaNDetector(model, verbose=False):
        loss = squared(model, batch)
        scaler.scale(loss).backward()
        current = session()
        with current.off():
            again = investigate(current.tape, {"": model}, 60.0).again
            assert again is not None
            assert again.run(Change(), float("inf")).loss == again.run(Unscaled(), float("inf")).loss == loss.item()
        current.tape.clear()


# -- eager -------------------------------------------------------------------------------------------------------------


def broken(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A compiler with a bug: NaN where the input is large."""

    def run(*args: Tensor) -> Any:
        x = next(a for a in args if a.shape == (16, 4))
        return [o + torch.where(x.max() > 4.0, float("nan"), 0.0) for o in graph(*args)]

    return run


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapper watched", "model watched"])
def test_what_only_compiled_code_does(wrapped: bool):
    model = Net(torch.exp)
    compiled: Any = torch.compile(model, backend=broken)
    watched = compiled if wrapped else model
    event = train(watched, data(value=5.0), lambda _, batch: squared(compiled, batch))
    assert event.verdict == "compiler", (event.trials, event.notes)
    assert tried(event, "eager").finite is True
    assert "compiler: run eagerly, the step is finite" in str(event)


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_not_blamed_for_other_random_numbers():
    compiled: Any = torch.compile(Net(lambda x: F.dropout(x, 0.1)), backend=broken)
    event = train(compiled, data(value=5.0))
    assert event.verdict == "not_reproducible"
    assert tried(event, "eager").detail == (
        "the step draws random numbers, and compiled code draws others than eager code"
    )


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_not_blamed_for_what_eager_code_does_too():
    compiled: Any = torch.compile(Net(), backend="eager")
    event = train(compiled, data())
    assert event.verdict == "formula"
    assert tried(event, "eager") == Trial(
        "eager",
        "Is the step finite when nothing is compiled?",
        False,
        "every replay is eager, and does the same",
    )


# -- budget, order, failures -------------------------------------------------------------------------------------------


def test_what_the_budget_does_not_allow_is_said(monkeypatch: pytest.MonkeyPatch):
    class Clock:
        """A clock on which every run of the step takes one second."""

        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    run = Again.run

    def timed(self: Again, *args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        outcome = run(self, Change() if not args else args[0], float("inf"), **kwargs)
        clock.now += 1.0
        return replace(outcome, seconds=1.0)

    monkeypatch.setattr(_trial_lab, "time", clock)
    monkeypatch.setattr(Again, "run", timed)
    monkeypatch.setattr(_trial_lab, "MAX_RUNS", 6)
    event = train(Net(torch.exp), data(rows=(11,)), logsum_of_shares)
    assert clock.now == 6.0
    assert [t.name for t in event.trials][-1] == "samples"
    trial = tried(event, "samples")
    assert (trial.finite, trial.detail) == (None, "the budget of 6 bare steps was spent on 6 runs of the step")
    assert tried(event, "again").finite is False
    assert event.sample_index == ()


def test_no_replay_no_trials():
    event = train(Net(), data(), replay="off")
    assert event.trials == () and event.verdict == "undecided"


def test_the_located_event_is_in_the_log_before_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before: list[NaNEvent] = []
    original = _trials._tried

    def looked_at(*args: Any) -> NaNEvent:
        (file,) = tmp_path.glob("*.jsonl")
        before.extend(r for r in read_log(file) if isinstance(r, NaNEvent))
        return original(*args)

    monkeypatch.setattr(_trials, "_tried", looked_at)
    event = train(Net(), data(), log_dir=str(tmp_path))
    assert before and before[-1].status == "provisional"
    assert before[-1].event_id == event.event_id and before[-1].location == event.location is not None
    assert before[-1].cause == event.cause and before[-1].trials == ()
    assert event.status == "final" and event.trials


def test_a_bug_in_a_trial_costs_the_trials_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    def fails(lab: Any, planned: Any) -> Trial:
        raise RuntimeError("a bug")

    monkeypatch.setenv("NAN_DETECTOR_STRICT", "0")
    monkeypatch.setattr(_trials, "RUNNERS", {**_trials.RUNNERS, "float64": fails})
    event = train(Net(), data())
    assert (event.op, event.weights, event.trials) == ("sqrt", "clean", ())
    assert "the trials failed: RuntimeError: a bug" in event.notes


def test_the_same_story_is_tried_three_times_in_a_run():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        for batch in data(bad=2) * 5:
            optimizer.zero_grad()
            squared(model, batch).backward()
            optimizer.step()
    assert [bool(e.trials) for e in det.all_events] == [True] * 3 + [False] * 2
    assert "not tried: the same was tried 3 times in this run" in det.all_events[-1].notes


# -- nothing of it stays -----------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Batch norm, dropout, a recurrent layer, a counter, a cached tensor, and a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.rnn, self.last = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)
        self.calls = 0
        self.cache: Tensor | None = None
        self.last.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(torch.sqrt(x)))
        self.cache = h.detach()
        return self.last(self.rnn(h.unsqueeze(1))[0][:, -1])


def weights_after(watched: bool, autocast: bool, whole: bool) -> tuple[list[Tensor], Tensor, NaNEvent | None]:
    """Train on six batches of which the fourth is bad and never taken."""
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: Batch, taken: bool) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = model(batch[0])
        ((out.float() - batch[1]) ** 2).mean().backward()
        if taken:
            optimizer.step()

    torch.manual_seed(1)
    det = NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False)
    if watched:
        det.attach()
    try:
        for i, batch in enumerate(data(n=6, bad=3)):
            taken = watched or i != 3
            if whole and watched:
                det.run_step(step, batch, taken)
            else:
                step(batch, taken)
    finally:
        det.detach()
    state = [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    assert model.calls == 6 and model.cache is not None
    return [*state, model.cache], torch.get_rng_state(), det.event


@BOTH
@pytest.mark.parametrize("autocast", [False, True])
def test_after_the_trials_the_training_goes_on_bit_for_bit(autocast: bool, whole: bool):
    expected, rng, _ = weights_after(False, autocast, whole)
    got, rng_now, event = weights_after(True, autocast, whole)
    assert event is not None and len(event.trials) >= 3, event
    assert all(t.finite is not None for t in event.trials), event.trials
    assert torch.equal(rng, rng_now)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


def test_gradients_of_tensors_that_are_not_the_models_are_left_alone():
    outside = torch.full((4,), 0.5, requires_grad=True)
    outside.grad = torch.ones(4)
    model = Net(lambda x: torch.sqrt(x) * outside)
    grads = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for batch in data():
            optimizer.zero_grad()
            squared(model, batch).backward()
            grads.append(outside.grad.clone())
            optimizer.step()
            if det.triggered:
                break
    assert tried(det.event, "float64").finite is False
    assert torch.equal(outside.grad.nan_to_num(1.0), grads[-1].nan_to_num(1.0))


def test_what_the_step_prints_is_printed_by_the_step_alone(capsys: pytest.CaptureFixture[str]):
    def loud(x: Tensor) -> Tensor:
        print("called")
        return torch.sqrt(x)

    event = train(Net(loud), data())
    assert len(event.trials) >= 3
    assert capsys.readouterr().out.split() == ["called"] * 6  # five steps and the replay


def test_other_threads_print_during_a_trial(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)

    def from_elsewhere(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: print("elsewhere"))
        thread.start()
        thread.join()
        return torch.sqrt(x)

    event = train(Net(from_elsewhere), data())
    assert len(event.trials) >= 3
    assert out.getvalue().count("elsewhere") > 6
    assert sys.stdout is out


def test_a_trial_runs_close_to_the_speed_of_the_step():
    """Counted, not timed: a bare run reads no value but those that it judges."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Reads.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = Net(torch.exp)
    (batch,) = data(n=1, bad=-1)
    with NaNDetector(model, verbose=False):
        squared(model, batch).backward()
        current = session()
        with current.off():
            again = investigate(current.tape, {"": model}, 60.0).again
            assert again is not None
            step = again.step(float("inf"), Change())
            with Reads():
                step.run()
        current.tape.clear()
    assert Reads.count == 0
