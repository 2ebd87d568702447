"""Non-finite numbers that belong to a program: alignments with infinite borders, repaired degrees, retried steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _programs import assert_quiet, train

INF = float("inf")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def soft_alignment(z: Tensor) -> Tensor:
    """Soft DTW of a sequence with itself reversed: the border of its table is infinite."""
    cost = torch.cdist(z, z.flip(0))
    table = {(0, 0): torch.zeros(())}
    n = len(z)
    for i in range(1, n + 1):
        table[i, 0] = table[0, i] = torch.tensor(INF)
    for i in range(1, n + 1):
        for j in range(1, n + 1):
            before = torch.stack([table[i - 1, j], table[i, j - 1], table[i - 1, j - 1]])
            table[i, j] = cost[i - 1, j - 1] - torch.logsumexp(-before, 0)
    return table[n, n]


def repaired_degree(z: Tensor) -> Tensor:
    """D^-1/2 A D^-1/2 with a node that has no edge, put right by hand."""
    a = torch.ones(len(z), len(z)).tril()
    a[0] = 0
    d = a.sum(1).pow(-0.5)
    d[d == INF] = 0
    return (d[:, None] * a * d[None] @ z).square().mean()


def signal_to_noise_bounded(z: Tensor) -> Tensor:
    """A weight that is infinite at the clean end of a schedule, bounded by a minimum; no gradient goes through it."""
    a = torch.tensor([1.0, 0.5, 0.25, 0.0])
    w = torch.minimum(a / (1 - a), torch.full_like(a, 5.0))
    return (w * z[:4].square().mean(1)).mean()


def hardest_pairs(z: Tensor) -> Tensor:
    same = torch.arange(len(z))[:, None] % 2 == torch.arange(len(z))[None] % 2
    d = torch.cdist(z, z)
    far = d.masked_fill(~same, -INF).amax(1)
    near = d.masked_fill(same, INF).amin(1)
    return F.relu(far - near + 1).mean()


def root_of_relu(z: Tensor) -> Tensor:
    """The slope of the root is infinite where relu is off, and relu's own derivative drops it."""
    return torch.sqrt(F.relu(z - 1e3) + F.relu(z.detach())).mean() + torch.sqrt(F.relu(z)).sum() * 0.1


def balanced_classes(z: Tensor) -> Tensor:
    """Weights 1 / count, infinite for a class that is absent, replaced before they are used."""
    y = torch.zeros(len(z), dtype=torch.long)
    w = 1.0 / torch.bincount(y, minlength=z.shape[1]).float()
    return F.cross_entropy(z, y, weight=torch.where(w.isinf(), torch.zeros(()), w))


def nothing_left_guarded(z: Tensor) -> Tensor:
    """A row that is masked whole is filled with zeros before the softmax, and multiplied away after it."""
    pad = torch.zeros(len(z), len(z), dtype=torch.bool)
    pad[2] = True
    dead = pad.all(1, keepdim=True)
    scores = (z @ z.T).masked_fill(pad, -INF)
    p = torch.where(dead, torch.zeros(()), scores).softmax(-1) * ~dead
    return (p @ z).square().mean()


def first_value_of_an_average(z: Tensor) -> Tensor:
    """An average that is NaN until there is one."""
    mean = torch.full((z.shape[1],), float("nan"))
    mean = torch.where(mean.isnan(), z.detach().mean(0), mean)
    return (z - mean).square().mean()


LOSSES: list[Callable[[Tensor], Tensor]] = [
    *(soft_alignment, repaired_degree, signal_to_noise_bounded, hardest_pairs, root_of_relu, balanced_classes),
    *(nothing_left_guarded, first_value_of_an_average),
]


class Inside(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.lin(x))


def batches() -> list[Tensor]:
    return [torch.randn(5, 4) for _ in range(3)]


@pytest.mark.parametrize("loss", LOSSES)
def test_in_the_loop(loss: Callable[[Tensor], Tensor]) -> None:
    assert_quiet(train(nn.Linear(4, 3), batches(), lambda m, x: loss(m(x))))


@pytest.mark.parametrize("watch", ["layers", "step"])
@pytest.mark.parametrize("loss", LOSSES)
def test_in_the_model(loss: Callable[[Tensor], Tensor], watch: str) -> None:
    assert_quiet(train(Inside(loss), batches(), lambda m, x: m(x), watch=watch))


def test_a_gradient_that_the_user_repairs() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.weight.register_hook(torch.nan_to_num)
    x = torch.randn(5, 4)
    x[0] = 0
    assert_quiet(train(model, [x] * 3, lambda m, b: (m(b).square().sum(1).sqrt() - 1).square().mean()))


def test_labels_of_nan_are_the_users_way_of_saying_unknown() -> None:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        z, y = model(batch["x"]), batch["y"]
        known = ~y.isnan()
        return F.mse_loss(z[known], y[known])

    data = []
    for _ in range(3):
        y = torch.randn(6, 3)
        y[torch.rand(6, 3) < 0.4] = float("nan")
        data.append({"x": torch.randn(6, 4), "y": y})
    assert_quiet(train(nn.Linear(4, 3), data, loss_of))
