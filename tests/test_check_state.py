"""`check_state()`: is what is about to be saved finite?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, StateProblem

Tensor = torch.Tensor
torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])  # PyTorch wraps the step of a class with its first instance


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.body(x)))


def detector(model: Any, **options: Any) -> NaNDetector:
    return NaNDetector(model, verbose=False, **options)


def step(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    model(torch.rand(4, 3)).square().mean().backward()
    opt.step()


def spoil(t: Tensor, value: float = float("nan")) -> None:
    t.data.view(-1)[0] = value


def problem(det: NaNDetector) -> StateProblem:
    found = det.check_state()
    assert found is not None
    assert StateProblem.from_dict(found.to_dict()).to_dict() == found.to_dict()
    return found


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_a_healthy_training_has_no_problem(optimizer: Any) -> None:
    model = Net()
    opt = optimizer(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    det = detector(model)
    assert det.check_state() is None
    with det:
        for _ in range(3):
            opt.step(closure) if optimizer is torch.optim.LBFGS else step(model, opt)
            assert det.check_state() is None
    assert det.check_state() is None


def test_a_parameter_by_name_attached_or_not() -> None:
    model = Net()
    det = detector(model)
    spoil(model.head.weight)
    found = problem(det)
    assert (found.kind, found.tensor_name, found.layer_name) == ("parameter", "head.weight", "head")
    assert found.value is not None and found.value.nan_count == 1
    assert str(found) == "head.weight is not finite: 1 NaN of 4 values"
    with det:
        assert problem(det).tensor_name == "head.weight"
    assert problem(det).tensor_name == "head.weight"


def test_parameters_come_before_buffers_and_buffers_before_moments() -> None:
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    with detector(model) as det:
        step(model, opt)
        spoil(opt.state[model.head.weight]["exp_avg"])
        assert problem(det).tensor_name == "optimizer.state[head.weight]['exp_avg']"
        assert problem(det).layer_name == "head"
        spoil(model.bn.running_var, float("inf"))
        assert (problem(det).kind, problem(det).tensor_name) == ("buffer", "bn.running_var")
        spoil(model.head.bias)
        assert problem(det).tensor_name == "head.bias"


def test_the_optimizers_are_known_after_the_watch_and_not_kept_alive() -> None:
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    det = detector(model)
    with det:
        step(model, opt)
    spoil(opt.state[model.body.bias]["exp_avg_sq"], float("inf"))
    assert problem(det).tensor_name == "optimizer.state[body.bias]['exp_avg_sq']"
    del opt
    assert det.check_state() is None


def test_moments_in_lists_and_a_bad_learning_rate() -> None:
    model = Net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(torch.ones(4, 3) * torch.arange(4.0)[:, None]).square().mean()
        loss.backward()
        return loss

    with detector(model) as det:
        for _ in range(2):
            opt.step(closure)
        state = opt.state[model.body.weight]
        spoil(state["old_dirs"][0])
        assert problem(det).tensor_name == "optimizer.state[body.weight]['old_dirs'][0]"
        state["old_dirs"][0].zero_()
        opt.param_groups[0]["lr"] = float("nan")
        found = problem(det)
        assert (found.kind, found.tensor_name, found.value) == ("optimizer", "optimizer.param_groups[0]['lr']", None)
        assert str(found) == "optimizer.param_groups[0]['lr'] is nan"
        opt.param_groups[0]["lr"] = 0.1


def test_the_mask_of_a_model_is_no_problem_but_running_statistics_of_minus_inf_are() -> None:
    model = Net()
    det = detector(model)
    assert det.check_state() is None
    spoil(model.bn.running_mean, float("-inf"))
    assert problem(det).tensor_name == "bn.running_mean"
    spoil(model.bn.running_mean, 0.0)
    spoil(model.mask)
    assert problem(det).tensor_name == "mask"


def test_keys_of_several_models_and_of_further_ones() -> None:
    first, second, ema = Net(), Net(), Net()
    det = detector({"gen": first, "disc": second}, also_watch={"ema": ema})
    spoil(ema.bn.running_var)
    assert (problem(det).tensor_name, problem(det).layer_name) == ("ema.bn.running_var", "ema.bn")
    spoil(second.head.weight)
    assert problem(det).tensor_name == "disc.head.weight"


def rows(value: float) -> Tensor:
    return torch.sparse_coo_tensor([[1]], [value], (3,), check_invariants=True)


def test_half_sparse_and_integer_state() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.Parameter(torch.full((70_000,), 60_000.0).half())
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("rows", rows(2.0))

    model = Mixed()
    det = detector(model)
    assert det.check_state() is None, "a sum that overflows is no problem"
    model.rows = rows(float("nan"))
    assert problem(det).tensor_name == "rows"


def test_nothing_is_written_and_no_step_is_disturbed() -> None:
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    with detector(model) as det:
        loss = model(torch.rand(4, 3)).square().mean()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        versions = [p._version for p in model.parameters()]
        assert det.check_state() is None
        loss.backward()
        assert det.check_state() is None
        assert versions == [p._version for p in model.parameters()]
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        opt.step()
    assert det.event is None
