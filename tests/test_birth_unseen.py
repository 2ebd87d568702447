"""Programs of kinds that nothing else here has: loss weights from gradients, own optimizers, solvers, renderers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _programs import assert_born, assert_quiet, marked_line, train
from nan_detector import NaNDetector
from nan_detector._records import NaNEvent

BAD = 1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def xs(*shape: int, bad: Callable[[Tensor], Tensor], n: int = 3) -> list[Tensor]:
    """Batches, of which number `BAD` is ``bad`` of an ordinary one."""
    batches = [torch.randn(*shape) for _ in range(n)]
    batches[BAD] = bad(batches[BAD])
    return batches


def zero_row(x: Tensor) -> Tensor:
    return torch.cat([x[:-1], torch.zeros_like(x[-1:])])


def code_of(event: NaNEvent) -> str | None:
    return event.cause.code if event.cause is not None else None


# -- gradients as numbers: asked for before the backward they weigh a loss, after it they are edited ------------------


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x)))


def balance(model: Decoder, rec: Tensor, adv: Tensor, eps: float) -> Tensor:
    (a,) = torch.autograd.grad(rec, model.last.weight, retain_graph=True)
    (b,) = torch.autograd.grad(adv, model.last.weight, retain_graph=True)
    return a.norm() / (b.norm() + eps)  # <-- birth


def balanced_loss(eps: float) -> Callable[[Any, Tensor], Tensor]:
    def loss_of(model: Decoder, x: Tensor) -> Tensor:
        y = model(x)
        rec = F.mse_loss(y, x + 1)
        hinge = F.relu(y.square().mean() - (1e3 if x.abs().max() > 50 else -1.0))  # all dead in the bad batch
        return rec + balance(model, rec, hinge, eps) * hinge

    return loss_of


def test_a_weight_from_gradient_norms_is_part_of_the_loss() -> None:
    run = train(Decoder(), xs(5, 4, bad=lambda x: x * 100), balanced_loss(0.0))
    event = assert_born(run, balance, step=BAD, phase="loss", layer=None, op="div")
    assert code_of(event) == "division_by_zero"


def test_the_same_with_an_epsilon_is_quiet() -> None:
    assert_quiet(train(Decoder(), xs(5, 4, bad=lambda x: x * 100), balanced_loss(1e-4)))


def clip_each(parameters: Iterator[Tensor]) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.mul_(0.5 / p.grad.norm())  # <-- birth


def test_what_is_done_to_gradients_after_the_backward_is_of_the_backward() -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        for i, x in enumerate(xs(5, 4, bad=lambda x: x)):
            det.set_batch(i)
            optimizer.zero_grad()
            (model(x).square().mean() * (0.0 if i == BAD else 1.0)).backward()
            clip_each(model.parameters())
            optimizer.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and event.location is not None
    assert (event.step, event.phase, event.layer_name) == (BAD, "backward", None)
    assert (event.location.file, event.location.line) == marked_line(clip_each)
    assert code_of(event) == "division_by_zero" and event.weights == "clean"


# -- an optimizer of the user's own: its line, not the one that called it ---------------------------------------------


def trust(p: Tensor, g: Tensor, eps: float) -> Tensor:
    return p.norm() / (g.norm() + eps)  # <-- birth


class Layerwise(torch.optim.Optimizer):
    """A step scaled by |w| / |g| for each tensor; the ratio is worked out in a helper."""

    def __init__(self, params: Any, eps: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.01, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * trust(p, p.grad, group["eps"]), alpha=-group["lr"])


class Rooted(torch.optim.SGD):
    """One of torch's with a line of the user's behind its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_((p.grad.norm() - 1e-12).sqrt().clamp(max=1.0))  # <-- birth
        return out


@pytest.mark.parametrize(
    ("make", "where", "op", "code"),
    [
        (Layerwise, trust, "div", "division_by_zero"),
        (lambda p: Rooted(p, lr=1e-3), inspect.unwrap(Rooted.step), "sqrt", "sqrt_of_negative"),
    ],
)
def test_the_line_within_the_users_own_optimizer(make: Any, where: Any, op: str, code: str) -> None:
    model = Decoder()
    batches = [(x, 0.0 if i == BAD else 1.0) for i, x in enumerate(xs(5, 4, bad=lambda x: x))]
    run = train(model, batches, lambda m, b: m(b[0]).square().mean() * b[1], optimizer=make(model.parameters()))
    event = run.event
    assert (event.step, event.phase, event.op, code_of(event)) == (BAD, "optimizer", op, code)
    assert event.location is not None
    assert (event.location.file, event.location.line) == marked_line(where)
    assert (event.tensor_name or "").endswith(("weight", "bias"))


def test_the_same_optimizer_with_an_epsilon_is_quiet() -> None:
    model = Decoder()
    batches = [(x, 0.0 if i == BAD else 1.0) for i, x in enumerate(xs(5, 4, bad=lambda x: x))]
    optimizer = Layerwise(model.parameters(), eps=1e-6)
    assert_quiet(train(model, batches, lambda m, b: m(b[0]).square().mean() * b[1], optimizer=optimizer))


# -- a matrix without an inverse --------------------------------------------------------------------------------------


class Ridge(nn.Module):
    """A closed-form head: solves for its weights from a support set."""

    def __init__(self, how: str, ridge: float) -> None:
        super().__init__()
        self.enc = nn.Linear(4, 6)
        self.how, self.ridge = how, ridge

    def forward(self, x: Tensor) -> Tensor:
        z = self.enc(x)
        gram = z @ z.T + self.ridge * torch.eye(len(z))
        if self.how == "inverse":
            return torch.linalg.inv_ex(gram)[0] @ z  # <-- birth
        low = gram.tril() * (x.abs().sum(1) > 0)  # the diagonal loses the entry of an empty sample
        return torch.linalg.solve_triangular(low + self.ridge * torch.eye(len(z)), z, upper=False)  # <-- solve


@pytest.mark.parametrize(
    ("how", "bad", "op", "mark"),
    [
        ("inverse", lambda x: torch.cat([x[:1], x[:1], x[2:]]), "linalg_inv_ex", "# <-- birth"),
        ("solve", zero_row, "linalg_solve_triangular", "# <-- solve"),
    ],
)
def test_a_singular_matrix(how: str, bad: Any, op: str, mark: str) -> None:
    model = Ridge(how, 0.0)
    run = train(model, xs(3, 4, bad=bad), lambda m, x: m(x).square().mean())
    event = assert_born(run, Ridge, step=BAD, phase="forward", layer="root", op=op, mark=mark)
    assert code_of(event) == "singular_matrix"


@pytest.mark.parametrize("how", ["inverse", "solve"])
def test_a_ridge_makes_it_regular(how: str) -> None:
    bad = zero_row if how == "solve" else lambda x: torch.cat([x[:1], x[:1], x[2:]])
    assert_quiet(train(Ridge(how, 1.0), xs(3, 4, bad=bad), lambda m, x: m(x).square().mean()))


# -- others that went right at first sight, kept so -------------------------------------------------------------------


class Renderer(nn.Module):
    """Transmittance as exp of a cumulative log: an opaque sample makes -inf, which exp turns into a good 0."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Linear(3, 1)

    def forward(self, rays: Tensor, delta: Tensor) -> Tensor:
        alpha = 1 - torch.exp(-F.softplus(self.field(rays)).squeeze(-1) * delta)
        logs = torch.log(1 - alpha)  # <-- birth
        through = torch.exp(torch.cumsum(F.pad(logs, (1, 0))[:, :-1], -1))
        return (through * alpha).sum(1)


def test_an_infinity_that_exp_turned_into_zero_and_the_backward_brought_back() -> None:
    far = torch.full((4, 6), 0.1)
    far[2, 3] = 1e6
    batches = [(torch.randn(4, 6, 3), far if i == BAD else torch.full((4, 6), 0.1)) for i in range(3)]
    run = train(Renderer(), batches, lambda m, b: (m(*b) - 0.5).square().mean())
    event = assert_born(run, Renderer, step=BAD, phase="forward", layer="root", op="log")  # where it was made
    assert event.loss is not None and math.isfinite(event.loss)
    assert code_of(event) in ("log_of_zero", "unselected_branch")


class Magnitude(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        f = torch.fft.rfft(z)
        return torch.hypot(f.real, f.imag)  # <-- birth


def test_the_slope_of_a_magnitude_at_silence() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Magnitude())
    run = train(model, xs(3, 8, bad=zero_row), lambda m, x: (m(x) - 1).square().mean())
    event = assert_born(run, Magnitude, step=BAD, phase="backward", layer="1", op="hypot")
    assert code_of(event) == "sqrt_gradient_at_zero"


class TwoMasks(nn.Module):
    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.rows = rows

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        low = torch.finfo(x.dtype).min
        over = (1 - keep)[:, :, None] * low if self.rows else torch.triu(torch.full((3, 3), low), 1)
        bias = (1 - keep)[:, None, :] * low + over  # <-- birth
        return (self.q(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x


def padded(all_of_it: bool) -> list[tuple[Tensor, Tensor]]:
    keep = torch.tensor([[0.0, 0.0, 0.0] if all_of_it else [0.0, 0.0, 1.0]])
    return [(torch.randn(1, 3, 4), keep if i == BAD else torch.ones(1, 3)) for i in range(3)]


def test_two_least_numbers_added_along_a_whole_row() -> None:
    run = train(TwoMasks(rows=True), padded(all_of_it=True), lambda m, b: m(*b).square().mean())
    event = assert_born(run, TwoMasks, step=BAD, phase="forward", layer="root", op="add")
    assert code_of(event) == "mask_value_overflow"


def test_two_least_numbers_added_where_the_row_keeps_one() -> None:
    assert_quiet(train(TwoMasks(rows=False), padded(all_of_it=False), lambda m, b: m(*b).square().mean()))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 3)

    def forward(self, x: Tensor, legal: Tensor) -> Any:
        p = self.f(x).softmax(-1) * legal
        return torch.distributions.Categorical(p / p.sum(-1, keepdim=True), validate_args=True)  # <-- birth


def test_the_librarys_own_check_raises_before_there_is_a_loss() -> None:
    none_legal = torch.ones(5, 3)
    none_legal[2] = 0
    batches = [(torch.randn(5, 4), none_legal if i == BAD else torch.ones(5, 3)) for i in range(3)]
    model = Policy()
    det = NaNDetector(model, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Expected parameter probs"), det:
        for i, batch in enumerate(batches):
            det.set_batch(i)
            optimizer.zero_grad()
            (-model(*batch).entropy().mean()).backward()
            optimizer.step()
    event = det.event
    assert event is not None and event.location is not None
    assert (event.step, event.phase, event.op, code_of(event)) == (BAD, "forward", "div", "division_by_zero")
    assert (event.location.file, event.location.line) == marked_line(Policy)


# -- a model called within a transform of torch.func: what it was given does not outlive the transform ----------------


def per_sample_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row,)).square().sum().sqrt()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)
    for name, p in model.named_parameters():
        p.grad = gradients[name].mean(0)
    optimizer.step()


def mapped_model_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    torch.vmap(lambda row: model(row).square().sum().sqrt())(x).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("step", [per_sample_step, mapped_model_step])
def test_a_model_within_a_transform_is_admitted_and_found_by_run_step(step: Callable[..., None], whole: bool) -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        for i, x in enumerate(xs(5, 4, bad=zero_row)):
            det.set_batch(i)
            if whole:
                det.run_step(step, model, optimizer, x)
            else:
                step(model, optimizer, x)
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.phase, event.weights) == (BAD, "backward", "clean")
    if whole:
        assert (event.op, code_of(event), event.reproduced) == ("sqrt", "sqrt_gradient_at_zero", "yes")
    else:
        assert (event.location, event.reproduced) == (None, "no")
        assert len(event.notes) == 1 and "det.run_step" in event.notes[0]  # and not that the step raised, or was finite
