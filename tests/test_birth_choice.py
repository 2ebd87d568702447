"""Several births in one step: the one whose values reach the loss is blamed, and the line where it was born."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _programs import assert_born, assert_quiet, train

BAD = 1
INF = float("inf")


def data(n: int = 3) -> list[tuple[Tensor, bool]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.rand(5, 4, generator=g) + 0.5, i == BAD) for i in range(n)]


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor, bad: bool) -> Tensor:
        h = F.softplus(self.lin(x)) + 0.1
        return self.body(h, bad)


def run_of(body: Any, inside: bool, watch: str = "step") -> Any:
    if inside:
        return train(Net(body), data(), lambda m, b: m(*b).mean(), watch=watch)
    return train(Net(lambda h, bad: h), data(), lambda m, b: body(m(*b), b[1]).mean(), watch=watch)


# -- what the forward drops and the backward brings back: one story, at the forward line -------------------------------


def zeros_in_one(h: Tensor, bad: bool) -> Tensor:
    return h * torch.tensor([1.0, 1.0, 1.0, 0.0 if bad else 1.0])


def dropped_by_where(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    inverse = 1.0 / h  # <-- birth
    return torch.where(h > 0, inverse, torch.zeros_like(h))


def dropped_by_masked_fill(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    logs = torch.log(h)  # <-- birth
    return logs.masked_fill(h == 0, 0.0)


def dropped_by_clamp(h: Tensor, bad: bool) -> Tensor:
    h = h * (1e4 if bad else 1.0)
    grown = torch.exp(h)  # <-- birth
    return grown.clamp(max=10.0)


def dropped_by_nan_to_num(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    ratio = h / h  # <-- birth
    return torch.nan_to_num(ratio)


def dropped_by_index(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    ratio = h / h.detach() / h  # <-- birth
    return ratio[h > 0]


def dropped_by_masked_select(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    root = (h - 0.5 * bad * (h == 0)).sqrt()  # <-- birth
    return root.masked_select(h > 0)


def dropped_by_product(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    logs = torch.log(h)  # <-- birth
    return (logs * (h > 0)).nan_to_num()


def dropped_by_nansum(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    ratio = (h / h) ** 2  # <-- birth
    return ratio.nansum(-1)


DROPPED = [
    dropped_by_where, dropped_by_masked_fill, dropped_by_clamp, dropped_by_nan_to_num, dropped_by_index,
    dropped_by_masked_select, dropped_by_product, dropped_by_nansum,
]  # fmt: skip


@pytest.mark.parametrize("body", DROPPED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["loss", "module"])
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_what_comes_back_is_told_at_the_forward_line(body: Any, inside: bool, watch: str) -> None:
    run = run_of(body, inside, watch)
    if not run.events:  # where this derivative is zero rather than 0 * inf, nothing came back
        assert run.finite
        assert body in (dropped_by_index, dropped_by_masked_select, dropped_by_nansum, dropped_by_clamp)
        return
    event = run.event
    assert event.phase in ("forward", "loss", "backward")
    layer = "root" if inside else None
    assert_born(run, body, step=BAD, phase=event.phase, layer=layer, op={"reciprocal", "div", "log", "exp", "sqrt"})


# -- several births ----------------------------------------------------------------------------------------------------


def earlier_one_is_dropped(h: Tensor, bad: bool) -> Tensor:
    metric = (h.detach() * 0 / 0).nan_to_num().mean()
    shown = torch.log(h.detach() * 0).max()
    assert not torch.isfinite(shown)
    safe = torch.where(h.detach() > 0, h, h.detach() / 0)
    scaled = safe / (0.0 if bad else 1.0)  # <-- birth
    return scaled + metric


def a_later_one_does_not_reach_the_loss(h: Tensor, bad: bool) -> Tensor:
    h = h / (0.0 if bad else 1.0)  # <-- birth
    log = torch.log(h.detach() * 0)
    assert bool((log < 0).any()) or bad
    return h


def both_reach(h: Tensor, bad: bool) -> Tensor:
    left = torch.log(h - (1e3 if bad else 0.0))  # <-- birth
    right = torch.sqrt(h - (1e3 if bad else 0.0))
    return right + left


def second_operand_is_the_culprit(h: Tensor, bad: bool) -> Tensor:
    dropped = torch.log(h * 0.0).clamp(min=-1.0)
    root = torch.sqrt(h.detach() - (1e3 if bad else 0.0))  # <-- birth
    return dropped.detach() + root * h


def one_element_is_masked_away(h: Tensor, bad: bool) -> Tensor:
    x = h.detach().clone()
    x[0] = 0.0
    logs = torch.log(x)
    if bad:
        x[1] = -1.0
    roots = x.sqrt()  # <-- birth
    both = logs + roots
    return torch.cat([both[1:], both[:1].clamp(min=-5.0)]) * h


def same_tensor_two_births(h: Tensor, bad: bool) -> Tensor:
    x = torch.cat([torch.log(h.detach()[:1] * 0), h[1:]])
    x = x / torch.tensor([1.0, 1.0, 1.0, 0.0 if bad else 1.0])  # <-- birth
    return x[1:]


def padding_rows_through_a_layer(h: Tensor, bad: bool) -> Tensor:
    x = h.detach().clone()
    x[0] = 0.0
    ratio = x / x.sum(-1, keepdim=True)
    if bad:
        x[3] = -x[3]
    logs = ratio * x.log()  # <-- birth
    weights = F.softmax(F.linear(logs, torch.ones(4, 4)), -1)
    rows = (weights @ torch.ones(4, 2)).mean(-1)
    return rows[1:] * h[1:, 0]


def a_batch_of_sequences(h: Tensor, bad: bool) -> Tensor:
    one, other = h.detach()[:2], h.detach()[2:]
    empty = (one * 0).mean(-1) / (one * 0).sum(-1)
    guilty = other.mean(-1) / (0.0 if bad else 1.0)  # <-- birth
    both = torch.stack([empty, guilty[:2]]).repeat(1, 2).flatten()
    padding = torch.tensor([True, True, True, True, False, False, False, False])
    return both.masked_fill(padding, 0.0).exp() * h.sum()


def written_in_place(h: Tensor, bad: bool) -> Tensor:
    x = torch.zeros_like(h)
    x[:] = 1.0 / torch.zeros(4)
    x.copy_(h)
    x[2:] = h[2:] / (0.0 if bad else 1.0)  # <-- birth
    return x


CHOICES = {
    earlier_one_is_dropped: "div", a_later_one_does_not_reach_the_loss: "div", both_reach: "log",
    second_operand_is_the_culprit: "sqrt", one_element_is_masked_away: "sqrt", same_tensor_two_births: "div",
    written_in_place: "div", padding_rows_through_a_layer: "log", a_batch_of_sequences: "div",
}  # fmt: skip


@pytest.mark.parametrize("body", CHOICES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["loss", "module"])
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_the_birth_that_reaches_the_loss_is_blamed(body: Any, inside: bool, watch: str) -> None:
    run = run_of(body, inside, watch)
    phase, layer = ("forward", "root") if inside else ("loss", None)
    assert_born(run, body, step=BAD, phase=phase, layer=layer, op=CHOICES[body])


# -- near misses -------------------------------------------------------------------------------------------------------


def safe_where(h: Tensor, bad: bool) -> Tensor:
    h = zeros_in_one(h, bad)
    inverse = 1.0 / torch.where(h > 0, h, torch.ones_like(h))
    return torch.where(h > 0, inverse, torch.zeros_like(h))


def metric_only(h: Tensor, bad: bool) -> Tensor:
    with torch.no_grad():
        accuracy = (h > 1e9).sum() / (h > 1e9).sum()
        assert not torch.isfinite(accuracy)
    return h


def best_so_far(h: Tensor, bad: bool) -> Tensor:
    best = torch.full((4,), INF)
    best = torch.minimum(best, h.detach().amin(0))
    worst = h.new_full((), -INF)
    for row in h:
        worst = torch.maximum(worst, row.max())
    return h * best + worst


def nan_marks_what_is_missing(h: Tensor, bad: bool) -> Tensor:
    target = torch.full((5, 4), float("nan"))
    target[:3] = 1.0
    known = ~target.isnan()
    return (h[known] - target[known]) ** 2 + (h - target).nan_to_num()[known] * 0


def infinite_distance_to_itself(h: Tensor, bad: bool) -> Tensor:
    d = torch.cdist(h, h.detach() + 1)
    d = d + torch.diag(torch.full((5,), INF))
    return d.min(-1).values + h.mean()


def infinite_distance_in_place(h: Tensor, bad: bool) -> Tensor:
    d = torch.cdist(h, h.detach() + 1) * 1.0
    d.fill_diagonal_(INF)
    return (-d).softmax(-1) @ h


@pytest.mark.parametrize(
    "body",
    [
        safe_where, metric_only, best_so_far, nan_marks_what_is_missing, infinite_distance_to_itself,
        infinite_distance_in_place,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True], ids=["loss", "module"])
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_what_never_reaches_the_loss_is_silent(body: Any, inside: bool, watch: str) -> None:
    assert_quiet(run_of(body, inside, watch))
