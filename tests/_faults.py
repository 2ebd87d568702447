"""Small losses that go wrong, one for each form of a fault. Each is trained in the plain loop by the tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Three numbers in, four out, every weight 0.1: what it gives is easily told."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4, dtype=dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def ones(rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(rows, 3, dtype=dtype)


# -- domain ------------------------------------------------------------------------------------------------------------


def log_zero(model: nn.Module, x: Tensor) -> Tensor:
    p = torch.relu(model(x) - 1.0)
    return torch.log(p).mean()


def entropy_of_targets(model: nn.Module, x: Tensor) -> Tensor:
    t = torch.relu(x - 1.0)
    return (t * torch.log(t)).sum() + model(x).mean()


def weighted_log(model: nn.Module, x: Tensor) -> Tensor:
    weight, q = x - 1.0, torch.relu(x - 1.0)
    logs = q.log()
    return (logs * (2.0 * weight)).sum() + model(x).mean()


def masked_log1p(model: nn.Module, x: Tensor) -> Tensor:
    seen = x < 0
    return torch.mul(seen, torch.log1p(x - 2.0)).sum() + model(x).mean()


def log_without_weight(model: nn.Module, x: Tensor) -> Tensor:
    return (0.0 * torch.log(x - 1.0)).sum() + model(x).mean()


def entropy_of_outputs(model: nn.Module, x: Tensor) -> Tensor:
    p = torch.relu(model(x) - 1.0)
    return -(p * torch.log(p)).sum()


def log_with_a_weight(model: nn.Module, x: Tensor) -> Tensor:
    t = torch.relu(x - 1.0)
    return ((t + 1.0) * torch.log(t)).sum() + model(x).mean()


def weighted_log_of_negative(model: nn.Module, x: Tensor) -> Tensor:
    t = x - 1.0
    return (t * torch.log(t - 0.5)).sum() + model(x).mean()


def log_used_twice(model: nn.Module, x: Tensor) -> Tensor:
    t = torch.relu(x - 1.0)
    logs = torch.log(t)
    return (t * logs).sum() + logs.mean() + model(x).mean()


def log_softmax(model: nn.Module, x: Tensor) -> Tensor:
    p = torch.softmax(model(x) * torch.tensor([1.0, 1.0, 1.0, -1e4]), dim=1)
    return -torch.log(p)[:, 3].mean()


def log_sigmoid(model: nn.Module, x: Tensor) -> Tensor:
    p = torch.sigmoid(model(x) * -1e4)
    return -p.log().mean()


def log_rest_of_sigmoid(model: nn.Module, x: Tensor) -> Tensor:
    p = torch.sigmoid(model(x) * 1e4)
    return -torch.log(1 - p).mean()


def log_negative(model: nn.Module, x: Tensor) -> Tensor:
    return torch.log(model(x) - 1.0).mean()


def log1p_below(model: nn.Module, x: Tensor) -> Tensor:
    return torch.log1p(model(x) - 3.0).mean()


def logit_of_one(model: nn.Module, x: Tensor) -> Tensor:
    return torch.logit((model(x) + 5.0).clamp(max=1.0)).mean()


def sqrt_negative(model: nn.Module, x: Tensor) -> Tensor:
    return torch.sqrt(model(x) - 1.0).mean()


def cancelled_variance(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x) * torch.tensor([1.0, 1.5, 0.5, 0.2]) + 5000.0
    var = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
    return ((h - h.mean(-1, keepdim=True)) / torch.sqrt(var + 1e-5)).pow(2).mean()


def pow_negative(model: nn.Module, x: Tensor) -> Tensor:
    return ((model(x) - 1.0) ** 0.4).mean()


def pow_zero(model: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(model(x) - 1.0).pow(-0.5).mean()


def acos_beyond(model: nn.Module, x: Tensor) -> Tensor:
    return torch.acos(model(x) + 0.7).mean()


def atanh_at_one(model: nn.Module, x: Tensor) -> Tensor:
    return torch.atanh((model(x) + 5.0).clamp(max=1.0)).mean()


def lgamma_at_zero(model: nn.Module, x: Tensor) -> Tensor:
    return torch.lgamma(torch.relu(model(x) - 1.0)).mean()


# -- division ----------------------------------------------------------------------------------------------------------


def no_count(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[0], 1)
    return ((model(x) * mask).sum() / mask.sum()).mean()


def count_is_number(model: nn.Module, x: Tensor) -> Tensor:
    kept = [float(v) for v in x[:, 0] if v > 2]
    return model(x).sum() / torch.tensor(float(len(kept)))


def zero_row(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.relu(model(x) - 1.0)
    return (h / h.sum(1, keepdim=True)).mean()


def rsqrt_zero(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.relu(model(x) - 1.0)
    return torch.rsqrt(h.pow(2).sum(1)).mean()


def underflowed(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.exp(-model(x) * torch.tensor([250.0, 260.0, 300.0, 255.0]))
    return (model(x) / h).mean()


def mean_of_nothing(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return h[h > 5].mean()


def labels_all_ignored(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.full((x.shape[0],), -100)
    return F.cross_entropy(model(x), y)


def deviation_of_one(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)[:1]
    return (h - h.mean(0)).div(h.std(0) + 1e-5).mean()


# -- matrices ----------------------------------------------------------------------------------------------------------


def logdet_negative(model: nn.Module, x: Tensor) -> Tensor:
    a = torch.diag(torch.tensor([1.0, -1.0, 2.0, 3.0])) * model(x)[0]
    return torch.logdet(a)


def log_of_det(model: nn.Module, x: Tensor) -> Tensor:
    a = torch.diag(torch.tensor([1.0, -1.0, 2.0, 3.0])) * model(x)[0]
    return torch.log(torch.linalg.det(a))


def singular(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return torch.linalg.inv_ex(h.T @ h)[0].sum()


def equal_values(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.eye(4) * model(x)[0]
    return torch.linalg.svd(h)[0].sum()


# -- range -------------------------------------------------------------------------------------------------------------


def exp_large(model: nn.Module, x: Tensor) -> Tensor:
    return torch.exp(model(x) * 500.0).mean()


def softmax_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    e = torch.exp(model(x) * torch.tensor([500.0, 501.0, 502.0, 500.0]))
    return (e / e.sum(-1, keepdim=True)).pow(2).mean()


def two_to_the(model: nn.Module, x: Tensor) -> Tensor:
    return (2.0 ** (model(x) * 500.0)).mean()


def half_square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * 1000.0).pow(2).mean().float() / 1e6


def half_product(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x) * 400.0
    scores = h @ h.T
    return torch.softmax(scores * 0.01, -1).float().mean()


def half_eps(model: nn.Module, x: Tensor) -> Tensor:
    return F.normalize(torch.relu(model(x) - 1.0), dim=1).float().mean()


def product_overflows(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x) * 1e30
    return (h * h).mean()


# -- masks -------------------------------------------------------------------------------------------------------------


def all_masked(model: nn.Module, x: Tensor) -> Tensor:
    scores = model(x).masked_fill(torch.ones(x.shape[0], 4, dtype=torch.bool), -math.inf)
    return torch.softmax(scores, -1).sum() + model(x).mean()


def unreachable(model: nn.Module, x: Tensor) -> Tensor:
    scores = model(x) + torch.full((x.shape[0], 4), -math.inf)
    return torch.logaddexp(torch.logsumexp(scores, 1), model(x)[:, 0]).mean()


def room_below(model: nn.Module, x: Tensor) -> Tensor:
    low = torch.finfo(torch.float32).min
    scores = model(x) * -1e34 + torch.full((x.shape[0], 4), low)
    return torch.softmax(scores, -1).pow(2).mean() + model(x).mean()


def smoothed_mask(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.tensor([False, False, False, True])
    logits = model(x).masked_fill(mask, -math.inf)
    return F.cross_entropy(logits, torch.zeros(x.shape[0], dtype=torch.long), label_smoothing=0.1)


def masked_entropy(model: nn.Module, x: Tensor) -> Tensor:
    logp = model(x).masked_fill(torch.tensor([False, False, False, True]), -math.inf).log_softmax(-1)
    return -(logp.exp() * logp).sum(1).mean()


def infinite_costs(model: nn.Module, x: Tensor) -> Tensor:
    cost = torch.zeros(4).masked_fill(torch.tensor([True, False, False, False]), math.inf)
    total = model(x) + cost
    return (total - cost).mean()


def no_alignment(model: nn.Module, x: Tensor) -> Tensor:
    logp = model(x)[:2, None].log_softmax(-1)
    target = torch.tensor([[1, 1, 1]])
    return F.ctc_loss(logp, target, torch.tensor([2]), torch.tensor([3]))


# -- slopes ------------------------------------------------------------------------------------------------------------


def sqrt_slope(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x) * 0.0
    return (h * h).sum(1).sqrt().mean()


def distance_to_itself(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    g = torch.autograd.grad(
        torch.linalg.vector_norm(h - h.detach(), dim=1).sum(), model.parameters(), create_graph=True
    )
    return sum((v.pow(2).sum() for v in g), h.mean())


def pow_slope(model: nn.Module, x: Tensor) -> Tensor:
    return ((model(x) * 0.0) ** 0.5).mean()


def acos_slope(model: nn.Module, x: Tensor) -> Tensor:
    return torch.acos(model(x) * 0.0 + 1.0).mean()


def dropped_quotient(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.relu(model(x) - torch.tensor([1.0, 0.0, 0.0, 0.0]))
    q = model(x) / h
    return torch.where(h > 0, q, torch.zeros(())).mean()


class Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g / x


def own_backward(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = Inverse.apply(model(x) * 0.0)
    return out.mean()


def hand_scaled(model: nn.Module, x: Tensor) -> Tensor:
    scale = torch.zeros(())
    return (model(x) * scale).sum() * (1.0 / scale)
