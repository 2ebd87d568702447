"""Several optimizers after one backward: one step, whose story is told wherever among their gates it is found."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _steps import assert_born, assert_nothing_shown
from nan_detector import NaNDetector, NonFiniteError
from nan_detector._capsule.again import again
from nan_detector._capsule.read import open_capsule
from nan_detector._records import NaNEvent
from nan_detector._shared_step import Kept

SGD, Adam = torch.optim.SGD, torch.optim.Adam

# The first one of a process has PyTorch wrap its class's `step` for good, which is nothing that a test left behind.
for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, SGD, Adam):
    kind([torch.zeros(1, requires_grad=True)])


class Coder(nn.Module):
    """Only the encoder's gradients go bad: the decoder's do not pass through the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(4, 6), nn.Linear(6, 1)
        self.bad = False

    def encode(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return h + torch.sqrt(h * 0) if self.bad else h  # <-- birth

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encode(x)))


class Looked(nn.Module):
    """The same with an embedding in the encoder's place, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 1)
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x[:, 0].mul(9).long())
        h = h + torch.sqrt(h * 0) if self.bad else h  # <-- birth
        return self.decoder(torch.tanh(h))


def optimizers_of(model: Any, first: Any = SGD, second: Any = Adam) -> list[Any]:
    """Of the decoder, whose gradients stay sound, and of the encoder."""
    return [first(model.decoder.parameters(), lr=0.05), second(model.encoder.parameters(), lr=0.05)]


def run(
    model: Any,
    optimizers: list[Any],
    bad: tuple[int, ...] = (),
    steps: int = 5,
    *,
    between: Callable[[Any], None] | None = None,
    **options: Any,
) -> NaNDetector:
    """One backward and a step of each optimizer, `between` which something may happen."""
    generator = torch.Generator().manual_seed(1)
    with NaNDetector(model, verbose=False, **options) as det:
        for i in range(steps):
            model.bad = i in bad
            for o in optimizers:
                o.zero_grad()
            F.mse_loss(model(torch.rand(3, 4, generator=generator)), torch.rand(3, 1, generator=generator)).backward()
            optimizers[0].step()
            if between is not None:
                between(model)
            for o in optimizers[1:]:
                o.step()
            if det.triggered:
                break
    return det


def taken(*names: str) -> str:
    return f"the step of {' and '.join(names)} on the same backward was taken before"


# -- the place -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 4])  # nobody knows yet of a second optimizer; learning; all as usual
@pytest.mark.parametrize("kinds", [(SGD, Adam), (Adam, SGD), (Adam, torch.optim.AdamW)])
def test_the_second_gate_names_the_place(bad: int, kinds: tuple[Any, Any]) -> None:
    model = Coder()
    det = run(model, optimizers_of(model, *kinds), (bad,))
    event = det.event
    assert_born(event, Coder.encode, step=bad, phase="backward", op="sqrt", layer_name="root", weights="clean")
    assert isinstance(event, NaNEvent)
    assert event.cause is not None and event.cause.code == "sqrt_gradient_at_zero"
    assert taken(kinds[0].__name__) in event.notes
    assert event.symptom == "non-finite gradients of encoder.weight, encoder.bias"
    assert [(t.name, t.finite) for t in event.trials[:2]] == [("again", False), ("fix", True)]


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_at_every_level(watch: str) -> None:
    model = Coder()
    assert_born(run(model, optimizers_of(model), (3,), watch=watch).event, Coder.encode, step=3)


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("dense_first", [True, False])
def test_a_dense_and_a_sparse_optimizer(bad: int, dense_first: bool) -> None:
    model = Looked()
    optimizers = optimizers_of(model, Adam, torch.optim.SparseAdam)
    event = run(model, optimizers if dense_first else optimizers[::-1], (bad,)).event
    assert_born(event, Looked.forward, step=bad, op="sqrt")


def test_two_models_with_an_optimizer_each() -> None:
    model = Coder()
    optimizers = optimizers_of(model)
    with NaNDetector({"enc": model.encoder, "dec": model.decoder}, verbose=False) as det:
        for i in range(5):
            for o in optimizers:
                o.zero_grad()
            h = model.encoder(torch.rand(3, 4))
            h = h + torch.sqrt(h * 0) if i == 3 else h  # <-- birth
            model.decoder(torch.tanh(h)).square().mean().backward()
            for o in optimizers:
                o.step()
            if det.triggered:
                break
    assert_born(det.event, test_two_models_with_an_optimizer_each, step=3, op="sqrt", layer_name=None)


class Deep(nn.Sequential):
    """Four layers; the two that come before the root have bad gradients."""

    def __init__(self, width: int = 4) -> None:
        torch.manual_seed(0)
        sizes = (4, 4, 4, width, 4)
        super().__init__(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        h = self[1](self[0](x))
        h = h + torch.sqrt(h * 0) if self.bad else h  # <-- birth
        return self[3](torch.tanh(self[2](h))).mean(1, keepdim=True)


def test_an_optimizer_for_each_layer() -> None:
    """Two steps were taken before the first bad one: the weights of both are those of the forward in the replay."""
    model = Deep()
    optimizers = [SGD(model[i].parameters(), lr=0.1) for i in (3, 2, 1, 0)]
    det = run(model, optimizers, (3,), on_nan="skip", stop_on_first=False)
    assert_born(det.event, Deep.forward, step=3, op="sqrt")
    assert det.event is not None and taken("SGD") in det.event.notes
    assert [e.step for e in det.all_events] == [3]  # the other bad one has no event of its own
    assert det.skipped_steps == 1


def test_the_limit_is_for_all_weights_of_a_step_together() -> None:
    """Of the two layers that step before the bad one each would be allowed by itself."""
    for limit, kept in ((40_000, False), (80_000, True)):
        model = Deep(2000)
        optimizers = [SGD(model[i].parameters(), lr=1e-4) for i in (3, 2, 1, 0)]
        event = run(model, optimizers, (3,), max_hold_bytes=limit).event
        assert event is not None and event.reproduced == ("yes" if kept else "no"), event.notes


class InBackward:
    """Each parameter is stepped as soon as its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = {p: SGD([p], lr=0.05) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.step)

    def step(self, p: Tensor) -> None:
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()


@pytest.mark.parametrize("bad", [-1, 3])
def test_steps_inside_the_backward_are_one_and_what_cannot_be_had_is_said(bad: int) -> None:
    model = Coder()
    InBackward(model)
    with NaNDetector(model, verbose=False) as det:
        for i in range(5):
            model.bad = i == bad
            model(torch.rand(3, 4)).square().mean().backward()
            if det.triggered:
                break
        counted = det.cost().steps
    assert counted == (5 if bad < 0 else 4)
    if bad < 0:
        assert det.event is None
        return
    assert_nothing_shown(det.event)
    assert det.event is not None and det.event.step == bad
    assert f"{taken('SGD')}, and the weights as they were before it were not kept" in det.event.notes
    assert any(n.startswith("in the replay, not in the step itself, sqrt made it at ") for n in det.event.notes)


class Wide(Coder):
    """Its decoder's weight, of 12,000 bytes, is more than is always kept."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3000), nn.Linear(3000, 1)


def test_weights_beyond_the_limit_are_not_kept_and_that_is_said() -> None:
    model = Wide()
    event = run(model, optimizers_of(model), (3,), max_hold_bytes=8000).event
    assert_nothing_shown(event)
    assert event is not None
    assert f"{taken('SGD')}, and the weights as they were before it were not kept" in event.notes
    model = Wide()
    assert_born(run(model, optimizers_of(model), (3,), max_hold_bytes=16_000).event, Coder.encode)


@pytest.mark.parametrize("keep", [True, False])
def test_without_a_loss_to_compare_other_weights_are_no_proof(keep: bool) -> None:
    model = Wide()
    optimizers = optimizers_of(model)
    with NaNDetector(model, verbose=False, max_hold_bytes=16_000 if keep else 8000) as det:
        for i in range(4):
            model.bad = i == 3
            for o in optimizers:
                o.zero_grad()
            out = model(torch.rand(3, 4))
            out.backward(torch.ones_like(out))
            for o in optimizers:
                o.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.step == 3
    if keep:
        assert_born(det.event, Coder.encode)
    else:
        assert_nothing_shown(det.event)


def test_a_trained_tensor_of_no_module_is_what_it_was() -> None:
    """The weight of a loss, which the first optimizer steps: it stands on the tape by itself."""
    model = Coder()
    weight = nn.Parameter(torch.zeros(()))
    optimizers = [SGD([*model.decoder.parameters(), weight], lr=0.05), SGD(model.encoder.parameters(), lr=0.05)]
    with NaNDetector(model, verbose=False) as det:
        for i in range(5):
            model.bad = i == 3
            for o in optimizers:
                o.zero_grad()
            loss = model(torch.rand(3, 4)).square().mean()
            (torch.exp(-weight) * loss + weight).backward()
            for o in optimizers:
                o.step()
            if det.triggered:
                break
    assert_born(det.event, Coder.encode, step=3)


def test_what_is_done_to_gradients_between_the_two_steps_is_told_as_seen() -> None:
    """They were sound at the first gate, so no weights were kept: a note, and not a finding."""
    model = Coder()
    steps: list[int] = []

    def rescale(m: Any) -> None:
        steps.append(1)
        for p in m.encoder.parameters():
            p.grad.div_(p.grad.norm() * float(len(steps) != 4))  # <-- rescale

    event = run(model, optimizers_of(model, SGD, SGD), (), 5, between=rescale).event
    assert_nothing_shown(event)
    assert event is not None and event.step == 3
    line = inspect.getsourcelines(rescale)[1] + 3
    said = [n for n in event.notes if n.startswith("in the replay, not in the step itself, div made it at ")]
    assert len(said) == 1 and said[0].endswith(f"test_shared_step.py:{line}")


def test_a_scaler_that_would_skip_the_second_one_for_ever() -> None:
    model = Coder()
    optimizers = optimizers_of(model, SGD, SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with NaNDetector(model, verbose=False) as det:
        for i in range(12):
            model.bad = i >= 3
            for o in optimizers:
                o.zero_grad()
            scaler.scale(model(torch.rand(3, 4)).square().mean()).backward()
            for o in optimizers:
                scaler.step(o)
            scaler.update()
            if det.triggered:
                break
    assert det.event is not None and det.event.step >= 3
    assert_born(det.event, Coder.encode, op="sqrt")


def test_in_a_step_function() -> None:
    model = Coder()
    optimizers = optimizers_of(model)

    def step(x: Tensor) -> None:
        for o in optimizers:
            o.zero_grad()
        model(x).square().mean().backward()
        for o in optimizers:
            o.step()

    with NaNDetector(model, verbose=False) as det:
        for i in range(5):
            model.bad = i == 3
            det.run_step(step, torch.rand(3, 4))
            if det.triggered:
                break
    assert_born(det.event, Coder.encode, step=3)


def test_a_capsule_has_the_weights_of_the_forward(tmp_path: Path) -> None:
    model = Coder()
    det = run(model, optimizers_of(model), (3,), capsule=True, log_dir=tmp_path)
    assert det.event is not None and det.event.capsule is not None

    def bad_coder() -> Coder:
        other = Coder()
        other.bad = True
        return other

    result = again(open_capsule(Path(det.event.capsule)), bad_coder, None)
    assert result.same, result.differences
    assert result.event.location == det.event.location


# -- what must stay quiet, and as it was ------------------------------------------------------------------------------


def nan_to_num(model: Any) -> None:
    for p in model.encoder.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


def dropped(model: Any) -> None:
    model.encoder.zero_grad()


@pytest.mark.parametrize("mend", [nan_to_num, dropped])
@pytest.mark.parametrize("bad", [0, 3])
def test_gradients_that_are_mended_before_their_step_are_no_event(mend: Callable[[Any], None], bad: int) -> None:
    model = Coder()
    det = run(model, optimizers_of(model, Adam, Adam), (bad,), between=mend)
    assert det.event is None and det.all_events == []
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_generator_that_the_critics_backward_spoils_is_its_own_business() -> None:
    """Nothing detached: the critic's loss leaves gradients in the generator that nobody steps with."""
    model = Coder()
    critic, generator = optimizers_of(model, Adam, Adam)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(6):
            critic.zero_grad()
            model.bad = True
            model(torch.rand(3, 4)).square().mean().backward()
            critic.step()
            generator.zero_grad()
            model.bad = False
            (-model(torch.rand(3, 4)).mean()).backward()
            generator.step()
        assert det.cost().steps == 12
    assert det.event is None


def test_the_copies_are_gone_when_the_next_step_begins() -> None:
    """The gradients of the bad step are mended, so that the run goes on."""
    model = Coder()
    optimizers = optimizers_of(model, SGD, SGD)
    held: list[int] = []
    copies: list[Any] = []
    with NaNDetector(model, verbose=False) as det:
        for i in range(5):
            model.bad = i == 2
            backward(model)
            if i == 3:
                gc.collect()  # gradients of 0 were looked into, which leaves cycles behind
                assert len(copies) == 2 and all(r() is None for r in copies)
            held.append(det.cost().tape_bytes)
            optimizers[0].step()
            held.append(det.cost().tape_bytes)
            last = det._engine.hazards.last if det._engine is not None else None
            if isinstance(last, Kept):
                copies += [weakref.ref(o.snapshot) for o in last.weights.values() if o.snapshot is not None]
            del last
            nan_to_num(model)
            optimizers[1].step()
            for o in optimizers:
                o.zero_grad()
    size = sum(p.numel() * p.element_size() for p in model.decoder.parameters())
    assert [after - before for before, after in zip(held[::2], held[1::2], strict=True)] == [0, 0, size, 0, 0]
    assert held[6] == held[4]


def test_the_batch_is_let_go_when_the_next_step_begins() -> None:
    model = Coder()
    optimizers = optimizers_of(model)
    held: list[Any] = []
    batches = [torch.rand(3, 4) for _ in range(8)]  # made within the watch it would be made again
    with NaNDetector(model, verbose=False):
        while batches:
            x = batches.pop()
            held.append(weakref.ref(x))
            for o in optimizers:
                o.zero_grad()
            model(x).square().mean().backward()
            for o in optimizers:
                o.step()
            del x
        gc.collect()
        assert [r() is None for r in held] == [True] * 7 + [False]


@pytest.mark.parametrize("watch", ["step", "layers"])
def test_weights_and_state_are_bit_equal_to_those_of_the_bare_loop(watch: str) -> None:
    """With a bad step that is mended between the two optimizers, whose weights were copied."""
    ends = []
    for watched in (False, True):
        model = Coder()
        optimizers = optimizers_of(model, Adam, Adam)
        generator = torch.Generator().manual_seed(1)
        det = NaNDetector(model, verbose=False, watch=watch) if watched else None
        if det is not None:
            det.attach()
        for i in range(6):
            model.bad = i in (0, 4)
            for o in optimizers:
                o.zero_grad()
            model(torch.rand(3, 4, generator=generator)).square().mean().backward()
            optimizers[0].step()
            nan_to_num(model)
            optimizers[1].step()
        if det is not None:
            det.detach()
        ends.append([*model.parameters(), *(t for o in optimizers for s in o.state.values() for t in s.values())])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# -- one step, one event ----------------------------------------------------------------------------------------------


class Both(Coder):
    """Everything's gradients go bad."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.decoder(torch.tanh(self.encoder(x)))
        return out + torch.sqrt(out * 0) if self.bad else out  # <-- birth


@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
@pytest.mark.parametrize("named", [True, False])
def test_a_step_that_is_bad_for_both_has_one_event(on_nan: str, named: bool) -> None:
    model = Both()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizers = optimizers_of(model, SGD, SGD)
    with NaNDetector(model, verbose=False, on_nan=on_nan, stop_on_first=False) as det:
        for i in range(4):
            model.bad = i != 1
            if named:
                det.set_batch(i)
            for o in optimizers:
                o.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            for o in optimizers:
                o.step()
            if i == 0:
                assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert [e.step for e in det.all_events] == [0, 2, 3]
    assert det.skipped_steps == 3
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert_born(det.event, Both.forward)


def test_a_step_that_is_bad_for_the_other_one_only_is_news() -> None:
    """The step before was bad for both."""
    model = Both()
    optimizers = optimizers_of(model, SGD, SGD)
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        for i in range(6):
            for o in optimizers:
                o.zero_grad()
            model.bad = i == 3
            out = model(torch.ones(3, 4))
            if i == 4:
                out = out + torch.sqrt(model.encoder(torch.ones(3, 4)) * 0).sum(1, keepdim=True)
            out.square().mean().backward()
            for o in optimizers:
                o.step()
    assert [e.step for e in det.all_events] == [3, 4]
    assert taken("SGD") in det.all_events[1].notes


def test_optimizers_that_the_loop_gives_to_different_batches_are_told_each() -> None:
    model = Both()
    model.bad = True
    optimizers = optimizers_of(model, SGD, SGD)
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        det.set_batch(0)
        backward(model)
        for i, o in enumerate(optimizers):
            det.set_batch(i)
            o.step()
    assert [e.step for e in det.all_events] == [0, 1]


def test_a_bad_learning_rate_beside_bad_gradients_is_told_too() -> None:
    model = Both()
    model.bad = True
    optimizers = optimizers_of(model, SGD, SGD)
    optimizers[1].param_groups[0]["lr"] = float("nan")
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        backward(model)
        for o in optimizers:
            o.step()
    first, second = det.all_events
    assert "lr=nan" not in first.symptom and "lr=nan" in second.symptom


@pytest.mark.parametrize("sound", [0, 3])
def test_after_raise_the_other_one_raises_the_same(sound: int) -> None:
    model = Both()
    optimizers = optimizers_of(model)
    caught = []
    with NaNDetector(model, verbose=False, on_nan="raise", stop_on_first=False) as det:
        for i in range(sound):
            one_backward(model, optimizers, i)
        model.bad = True
        model(torch.ones(3, 4)).square().mean().backward()
        for o in optimizers:
            try:
                o.step()
            except NonFiniteError as error:
                caught.append(error.event)
    assert len(caught) == 2 and caught[0] is caught[1] is det.event


def test_warn_lets_both_through_with_one_event() -> None:
    model = Both()
    det = run(model, optimizers_of(model, SGD, SGD), (2,), 3, on_nan="warn", stop_on_first=False)
    assert [(e.step, e.action) for e in det.all_events] == [(2, "warn")]
    assert not any(bool(p.isfinite().all()) for p in model.parameters())


def test_a_learning_rate_that_only_the_second_one_has_is_told_by_itself() -> None:
    """It has nothing to do with what the step computed."""
    model = Both()
    optimizers = optimizers_of(model, SGD, SGD)
    optimizers[1].param_groups[0]["lr"] = float("nan")
    det = run(model, optimizers, (), 2)
    assert det.event is not None and (det.event.step, det.event.phase) == (0, "optimizer")


# -- counting -------------------------------------------------------------------------------------------------------


def count(step: Callable[[Any, list[Any], int], None], optimizers: int = 2, steps: int = 4) -> tuple[int, list[int]]:
    """How many steps a loop is said to have had, and the numbers of its rows in the history."""
    model = Coder()
    made = optimizers_of(model, SGD, SGD) if optimizers == 2 else [SGD(model.parameters(), lr=0.01)]
    with NaNDetector(model, verbose=False) as det:
        for i in range(steps):
            step(model, made, i)
        counted = det.cost().steps
    assert det.event is None
    assert det.cost().steps == counted  # after the end as well
    return counted, det.history.steps.tolist()


def backward(model: Any) -> None:
    model(torch.rand(3, 4)).square().mean().backward()


def one_backward(model: Any, optimizers: list[Any], i: int) -> None:
    for o in optimizers:
        o.zero_grad()
    backward(model)
    for o in optimizers:
        o.step()


def in_another_order(model: Any, optimizers: list[Any], i: int) -> None:
    one_backward(model, optimizers[:: (-1) ** i], i)


def zeroed_between(model: Any, optimizers: list[Any], i: int) -> None:
    backward(model)
    for o in optimizers:
        o.step()
        o.zero_grad()


def evaluated_between(model: Any, optimizers: list[Any], i: int) -> None:
    backward(model)
    optimizers[0].step()
    with torch.no_grad():
        model(torch.rand(3, 4))
    optimizers[1].step()


def accumulated(model: Any, optimizers: list[Any], i: int) -> None:
    for _ in range(3):
        backward(model)
    for o in optimizers:
        o.step()


def two_backwards(model: Any, optimizers: list[Any], i: int) -> None:
    """A GAN's."""
    for o in optimizers:
        o.zero_grad()
        backward(model)
        o.step()


def twice_by_the_same(model: Any, optimizers: list[Any], i: int) -> None:
    backward(model)
    optimizers[0].step()
    optimizers[0].step()


def two_passes(model: Any, optimizers: list[Any], i: int) -> None:
    """As SAM does: the weights are moved for a second backward, whose gradients are stepped with."""
    backward(model)
    with torch.no_grad():
        moved = [p.grad * 0.01 for p in model.parameters()]
        for p, d in zip(model.parameters(), moved, strict=True):
            p.add_(d)
    for o in optimizers:
        o.zero_grad()
    backward(model)
    with torch.no_grad():
        for p, d in zip(model.parameters(), moved, strict=True):
            p.sub_(d)
    for o in optimizers:
        o.step()
        o.zero_grad()


def second_one_now_and_then(model: Any, optimizers: list[Any], i: int) -> None:
    for o in optimizers:
        o.zero_grad()
    backward(model)
    optimizers[0].step()
    if i % 2:
        optimizers[1].step()


def gradients_by_hand(model: Any, optimizers: list[Any], i: int) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p) * 0.01
    for o in optimizers:
        o.step()


def alternately(model: Any, optimizers: list[Any], i: int) -> None:
    optimizers[i % 2].zero_grad()
    backward(model)
    optimizers[i % 2].step()


def second_loss(model: Any, optimizers: list[Any], i: int) -> None:
    """No call of the model stands between the two."""
    backward(model)
    optimizers[0].step()
    model.encoder.weight.square().mean().backward()
    optimizers[1].step()


def second_loss_given_up(model: Any, optimizers: list[Any], i: int) -> None:
    backward(model)
    optimizers[0].step()
    model.decoder.weight.square().mean().backward()
    optimizers[0].zero_grad()
    optimizers[1].step()


@pytest.mark.parametrize(
    ("loop", "per_iteration"),
    [
        (one_backward, [0, 0]),
        (zeroed_between, [0, 0]),
        (evaluated_between, [0, 0]),
        (accumulated, [0, 0]),
        (gradients_by_hand, [0, 0]),
        (two_backwards, [0, 1]),
        (second_loss, [0, 1]),
        (second_loss_given_up, [0, 1]),
        (alternately, [0]),
        (twice_by_the_same, [0, 1]),
    ],
)
def test_one_step_for_each_group_of_calls(loop: Callable[..., None], per_iteration: list[int]) -> None:
    counted, rows = count(loop)
    each = per_iteration[-1] + 1
    assert counted == 4 * each
    assert rows == [each * i + n for i in range(4) for n in per_iteration]


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("loop", [in_another_order, two_passes])
def test_what_leaves_other_rows(loop: Callable[..., None], optimizers: int) -> None:
    assert count(loop, optimizers)[0] == 4


def test_a_second_one_that_steps_now_and_then() -> None:
    assert count(second_one_now_and_then) == (4, [0, 1, 1, 2, 3, 3])


def test_one_optimizer_counts_each_of_its_steps() -> None:
    def loop(model: Any, optimizers: list[Any], i: int) -> None:
        backward(model)
        optimizers[0].step()

    assert count(loop, optimizers=1) == (4, [0, 1, 2, 3])


def test_steps_that_the_loop_names_are_called_so() -> None:
    model = Coder()
    optimizers = optimizers_of(model)
    with NaNDetector(model, verbose=False) as det:
        for i in (10, 20, 30):
            det.set_batch(i)
            one_backward(model, optimizers, i)
    assert det.history.steps.tolist() == [10, 10, 20, 20, 30, 30]


def test_an_optimizer_around_another_one_is_one_step_with_it() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    def loop(model: Any, optimizers: list[Any], i: int) -> None:
        if not around:
            around.extend(Around(o) for o in optimizers)
        one_backward(model, around, i)

    around: list[Any] = []
    assert count(loop)[0] == 4


def test_the_time_of_a_step_is_that_of_all_its_gates() -> None:
    model = Coder()
    det = run(model, optimizers_of(model), (), 6)
    assert len(det._overheads) == 6


def test_a_stop_that_nobody_looks_at_is_not_overlooked() -> None:
    model = Coder()
    optimizers = optimizers_of(model)
    with pytest.raises(NonFiniteError, match="went on"), NaNDetector(model, verbose=False):
        for i in range(8):
            assert i <= 5  # a GAN's generator may still have to follow
            model.bad = i == 3
            one_backward(model, optimizers, i)
