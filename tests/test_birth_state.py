"""Births that were there before the step: parameters and buffers of a checkpoint, and statistics that went bad."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _data_programs import born, train
from nan_detector import NaNDetector

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")


def rows(seed: int, n: int = 6, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(4, 8)
        self.bn = torch.nn.BatchNorm1d(8)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.bn(self.inp(x))))


def mse(model: torch.nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def pairs(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(rows(i), rows(i + 50, width=1)) for i in range(n)]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_a_checkpoint_with_a_bad_parameter(value: float, watch: str) -> None:
    model = Net()
    state = model.state_dict()
    state["bn.weight"][3] = value
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    event = born(
        train(model, pairs(), mse, watch=watch), step=0, phase="state", tensor_name="bn.weight", layer_name="bn",
        weights="damaged since step 0",
    )  # fmt: skip
    assert event.verdict == "state"


def test_a_parameter_that_nobody_filled() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.empty(4))
            with torch.no_grad():
                self.gain.copy_(torch.tensor([0.0, NAN, 1e-38, INF]))  # what memory happened to hold

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scale(), torch.nn.Linear(4, 1))
    born(
        train(model, pairs(), mse),
        step=0,
        phase="state",
        tensor_name="1.gain",
        layer_name="1",
        weights="damaged since step 0",
    )


def test_a_parameter_whose_garbage_is_finite_but_huge_overflows_where_it_is_used() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.empty(4).fill_(3e38))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain * 4.0  # <-- huge

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scale(), torch.nn.Linear(4, 1))
    born(train(model, pairs(), mse), step=0, phase="forward", mark="huge", layer_name="1", op="mul")


def test_a_frozen_bad_parameter_is_named_too() -> None:
    model = Net()
    model.inp.weight.requires_grad_(False)[2, 1] = NAN
    born(train(model, pairs(), mse), step=0, phase="state", tensor_name="inp.weight", weights="damaged since step 0")


def test_a_bad_buffer() -> None:
    class Normal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("std", torch.tensor([1.0, NAN, 1.0, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.mean) / self.std

    model = torch.nn.Sequential(Normal(), torch.nn.Linear(4, 1))
    born(train(model, pairs(), mse), step=0, phase="state", tensor_name="0.std", layer_name="0")


class Tracked(torch.nn.Module):
    """A normaliser whose statistics are updated by a call of the loop, outside the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.1)
        spread = x.var(0)  # <-- birth
        self.var += (spread - self.var) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.var + 1e-5).sqrt()


def tracked(norm: Tracked, batches: list[tuple[Tensor, Tensor]]) -> NaNDetector:
    model = torch.nn.Sequential(norm, torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for x, y in batches:
            norm.update(x)
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
            if det.triggered:
                break
    return det


@pytest.mark.filterwarnings("ignore:var")  # torch says so itself
def test_a_buffer_that_the_loop_spoils_within_the_step_is_traced_to_the_operation() -> None:
    batches = pairs()
    batches[2] = (batches[2][0][:1], batches[2][1][:1])
    event = tracked(Tracked(), batches).event
    assert event is not None
    assert (event.step, event.phase, event.op, event.layer_name) == (2, "forward", "var", "0")
    assert event.location is not None and event.location.source_line.endswith("# <-- birth")
    assert event.cause is not None and event.cause.code == "std_of_one"
    assert event.bad_buffers == ("0.var",) and event.weights == "clean"
    fix = next(t for t in event.trials if t.name == "fix")
    assert (fix.finite, fix.detail) == (
        None,
        "the step has written what is bad into 0.var, and what was there before is gone, so a repaired step would "
        "still begin with it",
    )
    assert "reproduced: yes" in str(event) and "cannot be run again" not in str(event)
    [state] = [line for line in str(event).splitlines() if line.startswith("   state")]
    assert state.startswith("   state   the parameters are clean, a buffer is not: the step was not taken")


def test_a_buffer_that_was_bad_before_the_loop_updates_it_is_the_state() -> None:
    norm = Tracked()
    norm.var[1] = NAN
    event = born(tracked(norm, pairs()), step=0, phase="state", tensor_name="0.var")
    assert event.bad_buffers == ("0.var",) and event.first_use is not None


def test_a_parameter_of_minus_infinity_is_mended_for_its_trial() -> None:
    """Elsewhere -inf is taken for a mask and left alone; in the parameter that is to blame it is the fault."""
    model = Net()
    with torch.no_grad():
        model.out.bias[0] = -INF
    det = train(model, pairs(), lambda m, b: -F.logsigmoid(m(b[0])).mean())
    event = born(det, step=0, phase="state", tensor_name="out.bias", weights="damaged since step 0")
    trial = next(t for t in event.trials if t.name == "finite_state")
    assert trial.finite is True, trial


def test_an_embedding_row_that_is_used_only_later() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(20, 4)
            self.head = torch.nn.Linear(4, 3)
            with torch.no_grad():
                self.embed.weight[17] = NAN

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).mean(1))

    batches = [(torch.tensor([[1, 2, i], [4, 5, 6]]), torch.tensor([0, 1])) for i in (3, 9, 17, 8)]
    det = train(Words(), batches, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    born(det, step=2, phase="state", tensor_name="embed.weight", layer_name="embed", weights="damaged since step 0")


def test_statistics_that_an_earlier_evaluation_in_training_mode_spoiled() -> None:
    model, batches = Net(), pairs(6)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i, batch in enumerate(batches):
            det.set_batch(i)
            if i == 2:  # a forgotten model.eval(): running statistics take the NaN in, nothing is trained on it
                with torch.no_grad():
                    model(torch.full((6, 4), NAN))
            if i == 4:
                model.eval()
            opt.zero_grad()
            mse(model, batch).backward()
            opt.step()
            if det.triggered:
                break
    event = born(det, step=4, phase="state", layer_name="bn")
    assert event.tensor_name in ("bn.running_mean", "bn.running_var")


def test_a_bad_batch_that_poisons_running_statistics_is_to_blame_and_the_statistics_are_mentioned() -> None:
    batches = pairs()
    batches[2][0][1, 1] = NAN
    model = Net()
    event = born(train(model, batches, mse), step=2, phase="data", tensor_name="x", sample_index=(1,))
    assert not model.bn.running_mean.isfinite().all()
    assert event.bad_buffers == ("bn.running_mean", "bn.running_var")
    assert "buffers bn.running_mean, bn.running_var are not finite" in str(event)


def test_a_bad_batch_without_statistics_says_nothing_of_them() -> None:
    batches = pairs()
    batches[2][1][1] = NAN
    event = born(train(Net(), batches, mse), step=2, phase="data", tensor_name="y", sample_index=(1,))
    assert event.bad_buffers == () and "buffer" not in str(event)


def test_an_attribute_that_carries_a_hidden_state_from_step_to_step() -> None:
    class Memory(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell = torch.nn.Linear(8, 4)
            self.h = torch.zeros(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.cell(torch.cat([x, self.h], 1)))
            self.h = h.detach() / (1.0 - x[:, :1].gt(50).float())
            return h.mean(1, keepdim=True)

    batches = pairs(6)
    batches[3][0][2, 0] = 60.0  # h / 0 in the step before; the loss of that step does not see it
    det = train(Memory(), batches, mse)
    event = det.event
    assert event is not None
    assert event.step == 4
    # What the model kept in an attribute was bad before the step; it is neither a parameter nor of the batch.
    assert event.cause is None or event.cause.code != "input_non_finite"


# -- near misses ---


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_bad_state_in_a_part_that_is_not_used_is_quiet(watch: str) -> None:
    class Parts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Linear(4, 4)
            torch.nn.init.constant_(self.spare.weight, NAN)
            self.register_buffer("unused", torch.full((3,), NAN))

    model = Parts()
    det = train(model, pairs(), mse, watch=watch)
    assert det.event is None


def test_an_additive_mask_in_a_buffer_is_quiet() -> None:
    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((6, 6), -INF).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).T + self.mask).softmax(-1).sum(1, keepdim=True) * x[:, :1]

    assert train(Causal(), pairs(), mse).event is None


def test_a_frozen_reference_of_the_best_loss_so_far_is_quiet() -> None:
    class Best(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("best", torch.tensor(INF))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.training:
                self.best.copy_(torch.minimum(self.best, out.detach().abs().mean()))
            return out

    for watch in ("step", "layers", "ops"):
        assert train(Best(), pairs(), mse, watch=watch).event is None, watch
