"""Derivatives that are infinite, or 0 times infinity: the line of the forward operation is the birthplace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from _backward_programs import Net, Scale, born, finite_weights, marked_line, plain_step, quiet, train, two
from nan_detector import NonFiniteError, detect_nan

Tensor = torch.Tensor


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # <-- birth


def root_method(x: Tensor) -> Tensor:
    y = x * 2
    return y.sqrt()  # <-- birth


def half_power(x: Tensor) -> Tensor:
    return x**0.5  # <-- birth


def pow_function(x: Tensor) -> Tensor:
    return torch.pow(x, 0.25)  # <-- birth


def hand_norm(x: Tensor) -> Tensor:
    squares = (x * x).sum(-1)
    return squares.sqrt()  # <-- birth


def hand_std(x: Tensor) -> Tensor:
    return x.var(-1).sqrt()  # <-- birth


def masked_root(x: Tensor) -> Tensor:
    safe = torch.sqrt(x)  # <-- birth
    return torch.where(x > 0, safe, torch.zeros_like(safe))


def arc_cosine(x: Tensor) -> Tensor:
    return torch.acos(1 - x)  # <-- birth


def arc_sine(x: Tensor) -> Tensor:
    return torch.asin(1 - x)  # <-- birth


def arc_cosh(x: Tensor) -> Tensor:
    return torch.acosh(1 + x)  # <-- birth


def hypotenuse(x: Tensor) -> Tensor:
    return torch.hypot(x, x)  # <-- birth


def entropy_term(x: Tensor) -> Tensor:
    return torch.xlogy(x, x)  # <-- birth


def tiny_log(x: Tensor) -> Tensor:
    y = x + 1e-40  # denormal: 1 / y is beyond float32
    return y.log()  # <-- birth


def zero_times_infinity(x: Tensor) -> Tensor:
    y = x * 2  # not clamped at 0: PyTorch 2.14 lets no gradient through at the bound
    return (y.sqrt() * 0).sum(-1)  # <-- birth


def in_place_root(x: Tensor) -> Tensor:
    y = x + 0
    y.sqrt_()  # <-- birth
    return y


INFINITE: list[tuple[Callable[[Tensor], Tensor], str | tuple[str, ...]]] = [
    (root, "sqrt"),
    (root_method, "sqrt"),
    (half_power, "pow"),
    (pow_function, "pow"),
    (hand_norm, "sqrt"),
    (hand_std, "sqrt"),
    (masked_root, "sqrt"),
    (arc_cosine, "acos"),
    (arc_sine, "asin"),
    (arc_cosh, "acosh"),
    (hypotenuse, "hypot"),
    (entropy_term, "xlogy"),
    (tiny_log, "log"),
    (zero_times_infinity, "sqrt"),
    (in_place_root, "sqrt"),
]

HEALTHY, ZEROS = torch.linspace(0.1, 0.4, 8).reshape(2, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(("formula", "op"), INFINITE, ids=lambda v: getattr(v, "__name__", None))
def test_in_a_module(formula: Callable[[Tensor], Tensor], op: str) -> None:
    model = Net(formula)
    det = train(model, two(HEALTHY, ZEROS))
    born(det, formula, op=op, layer="part")
    assert finite_weights(model)


@pytest.mark.parametrize(("formula", "op"), INFINITE, ids=lambda v: getattr(v, "__name__", None))
def test_between_root_and_loss(formula: Callable[[Tensor], Tensor], op: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        hidden = model(batch)
        loss = formula(hidden).mean()
        loss.backward()
        optimizer.step()

    model = Scale()
    det = train(model, two(HEALTHY, ZEROS), step)
    born(det, formula, op=op, layer=None)
    assert finite_weights(model)


class Criterion(nn.Module):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        error = ((out - target) ** 2).mean()
        return error.sqrt()  # <-- birth


def test_rmse_criterion_at_a_perfect_fit() -> None:
    criterion = Criterion()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        loss = criterion(model(batch), torch.zeros_like(batch))
        loss.backward()
        optimizer.step()

    det = train(Scale(), two(HEALTHY, ZEROS), step)
    born(det, Criterion, op="sqrt", layer=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = Net(root).to(dtype)
    det = train(model, two(HEALTHY.to(dtype), ZEROS.to(dtype)))
    event = born(det, root, op="sqrt", layer="part")
    assert event.inputs[0].dtype == str(dtype)


@pytest.mark.parametrize("watch", ["layers", "ops"])
def test_at_every_level(watch: str) -> None:
    det = train(Net(masked_root), two(HEALTHY, ZEROS), watch=watch, check_backward=True)
    born(det, masked_root, op="sqrt", layer="part")


@pytest.mark.parametrize("formula", [root, masked_root, in_place_root])
def test_detect_nan(formula: Callable[[Tensor], Tensor]) -> None:
    model = Net(formula)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(NonFiniteError) as raised, detect_nan():
        plain_step(model, optimizer, HEALTHY)
        plain_step(model, optimizer, ZEROS)
    event = raised.value.event
    assert event is not None
    assert event.location is not None
    assert (event.phase, event.op, event.layer_name) == ("backward", "sqrt", "part")
    assert (event.location.file, event.location.line) == marked_line(formula)
    assert finite_weights(model)


# -- decompositions ----------------------------------------------------------------------------------------------------


def eigen(x: Tensor) -> Tensor:
    m = torch.diag_embed(x) + x.mean() * torch.ones(4, 4)
    values, vectors = torch.linalg.eigh(m)  # <-- birth
    return values.sum(-1) + (vectors * torch.arange(16.0).reshape(4, 4)).sum((-2, -1))


def singular(x: Tensor) -> Tensor:
    m = torch.diag_embed(x)
    u, s, v = torch.linalg.svd(m)  # <-- birth
    return (u * torch.arange(16.0).reshape(4, 4)).sum((-2, -1)) + s.sum(-1) + v.sum((-2, -1))


def orthogonal(x: Tensor) -> Tensor:
    m = torch.diag_embed(x)
    q, r = torch.linalg.qr(m)  # <-- birth
    return (q * torch.arange(16.0).reshape(4, 4)).sum((-2, -1)) + r.sum((-2, -1))


DECOMPOSED = [
    (eigen, ("linalg_eigh",)),
    (singular, ("linalg_svd",)),
    (orthogonal, ("linalg_qr",)),
]
DISTINCT = torch.tensor([[0.1, 0.2, 0.3, 0.4]])


@pytest.mark.parametrize(("formula", "op"), DECOMPOSED, ids=lambda v: getattr(v, "__name__", None))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_decompositions(formula: Callable[[Tensor], Tensor], op: tuple[str, ...]) -> None:
    det = train(Net(formula), two(DISTINCT, torch.zeros(1, 4)))
    born(det, formula, op=op, layer="part")


# -- near misses -------------------------------------------------------------------------------------------------------


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(torch.diag_embed(x)).sum(-1)


def eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(torch.diag_embed(x)).sum(-1)


FINE: list[Any] = [
    lambda x: x.abs(),
    lambda x: x.norm(dim=-1),
    lambda x: torch.linalg.norm(x, dim=-1),
    lambda x: torch.linalg.vector_norm(x, 3, -1),
    lambda x: x.std(-1),
    lambda x: x.var(-1),
    lambda x: F.pairwise_distance(x, torch.zeros_like(x)),
    lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
    lambda x: torch.cdist(x, x),
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.sqrt(x + 1e-8),
    lambda x: torch.sqrt(x.clamp(min=1e-12)),
    lambda x: torch.where(x > 0, torch.where(x > 0, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x)),
    lambda x: torch.log(x + 1e-6),
    lambda x: torch.prod(x, -1),
    pytest.param(
        lambda x: torch.atan2(x, x),
        marks=pytest.mark.skipif(
            not torch.func.grad(lambda x: torch.atan2(x, x))(torch.tensor(0.0)).isfinite(),
            reason="this PyTorch gives atan2 a derivative of NaN at (0, 0)",
        ),
    ),
    lambda x: x**1.5,
    lambda x: torch.sqrt(x[x > 0]).sum() + x.sum(),
    lambda x: torch.acos((1 - x).clamp(-1 + 1e-6, 1 - 1e-6)),
    lambda x: torch.sqrt(x).detach() + x,
    singular_values,
    eigenvalues,
]


@pytest.mark.parametrize("formula", FINE)
def test_near_misses_in_a_module(formula: Callable[[Tensor], Tensor]) -> None:
    model = Net(formula)
    quiet(train(model, [HEALTHY, ZEROS, HEALTHY]))
    assert finite_weights(model)


def test_a_dropped_part_of_the_graph_is_nobodys_error() -> None:
    # sqrt's derivative would be infinite, but nothing that is trained depends on it.
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        out = model(batch)
        shown = torch.sqrt(out).mean()
        assert torch.isfinite(shown)
        (out.mean()).backward()
        optimizer.step()

    quiet(train(Scale(), [HEALTHY, ZEROS, HEALTHY], step))


def test_the_plain_step_is_what_the_tests_say() -> None:
    model = Net(root)
    before = model.scale.weight.detach().clone()
    plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1), ZEROS)
    assert not torch.equal(before, model.scale.weight)
    assert not finite_weights(model)


class PassesOn(TorchFunctionMode):
    """A mode of the user's, as for logging."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("formula", [root, hand_norm])
def test_under_a_mode_of_the_users(formula: Callable[[Tensor], Tensor]) -> None:
    with PassesOn():
        born(train(Net(formula), two(HEALTHY, ZEROS)), formula, op="sqrt", layer="part")


class Tagged(torch.Tensor):
    """A subclass whose every call passes through a method of the user's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_with_a_tensor_subclass() -> None:
    det = train(Net(root), [HEALTHY.as_subclass(Tagged), ZEROS.as_subclass(Tagged)])
    born(det, root, op="sqrt", layer="part")
