"""Non-finite values that the library makes and masks on purpose, and births inside its functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

from _programs import assert_born, assert_quiet, train

BAD = 1
INF = float("inf")


def data(n: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=g) for _ in range(n)]


class Net(nn.Module):
    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.lin = nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


# -- silent ------------------------------------------------------------------------------------------------------------


def logdet(out: Tensor) -> Tensor:
    return torch.logdet(out[:, :3].T @ out[:, :3] + torch.eye(3))


def slogdet(out: Tensor) -> Tensor:
    return torch.linalg.slogdet(out[:, :3].T @ out[:, :3] + torch.eye(3)).logabsdet


def ctc(out: Tensor) -> Tensor:
    logp = F.log_softmax(out[:, None].expand(4, 2, 6), -1)
    targets = torch.tensor([[1, 2], [3, 3]])
    return F.ctc_loss(logp, targets, torch.tensor([4, 4]), torch.tensor([2, 2]))


def ctc_impossible_but_zeroed(out: Tensor) -> Tensor:
    logp = F.log_softmax(out[:, None].expand(4, 2, 6), -1)
    targets = torch.tensor([[1, 2, 2, 2], [3, 3, 3, 3]])
    lengths = torch.tensor([4, 4])
    return F.ctc_loss(logp, targets, lengths, torch.tensor([4, 1]), zero_infinity=True)


def norms(out: Tensor) -> Tensor:
    zeros = out * 0
    return zeros.norm(dim=-1).sum() + zeros.norm() + out.norm(p=1) + out.norm(p=INF) + out.norm(p=-INF) + out.norm(p=3)


def distances(out: Tensor) -> Tensor:
    return torch.cdist(out, out).mean() + F.pairwise_distance(out, out).mean() + torch.pdist(out).mean()


def scratch(out: Tensor) -> Tensor:
    buffer = torch.empty(4, 12)
    buffer[:, :6] = out
    buffer[:, 6:] = out.detach()
    fresh = out.new_empty(out.shape)
    torch.mul(out.detach(), 2.0, out=fresh)
    return buffer.pow(2).mean() + fresh.mean()


def gumbel(out: Tensor) -> Tensor:
    return F.gumbel_softmax(out, tau=0.5, hard=True).mul(out).sum()


def normalised(out: Tensor) -> Tensor:
    zeros = out * 0
    return F.normalize(zeros, dim=-1).sum() + F.cosine_similarity(zeros, out).sum() + F.normalize(out).pow(2).sum()


def constants_in_layer_norm(out: Tensor) -> Tensor:
    return F.layer_norm(out * 0 + 3, (6,)).sum() + F.group_norm(out * 0, 2).sum() + F.rms_norm(out * 0, (6,)).sum()


def binary_at_the_ends(out: Tensor) -> Tensor:
    p = (out > 0).float() * (1 + 0 * out)
    return F.binary_cross_entropy(p, 1 - p.detach()) * 1e-3 + F.binary_cross_entropy(out.sigmoid(), p.detach())


def divergence_of_zero_targets(out: Tensor) -> Tensor:
    target = F.one_hot(torch.zeros(4, dtype=torch.long), 6).float()
    return nn.KLDivLoss(reduction="batchmean")(F.log_softmax(out, -1), target) + torch.xlogy(target, 0.5 + target).sum()


def pooling(out: Tensor) -> Tensor:
    image = out.reshape(1, 1, 4, 6)
    return F.max_pool2d(image, 3, 2, padding=1).sum() + F.adaptive_max_pool2d(image, 2).sum()


def selections(out: Tensor) -> Tensor:
    masked = out.masked_fill(out.detach() < out.detach().median(), -INF)
    top = masked.topk(1, -1).values.clamp(min=-10).sum()
    return top + masked.sort(-1, descending=True).values[:, 0].clamp(min=-10).sum() + out.cummax(-1).values.sum()


def categorical_with_zeros(out: Tensor) -> Tensor:
    p = out.softmax(-1) * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    chosen = D.Categorical(probs=p, validate_args=True)
    return -chosen.log_prob(torch.zeros(4, dtype=torch.long)).mean() + 0.01 * chosen.entropy().mean()


def distributions(out: Tensor) -> Tensor:
    rate = F.softplus(out) + 0.1
    normal, beta, gamma = D.Normal(out, rate), D.Beta(rate, rate), D.Gamma(rate, rate)
    x = normal.rsample()
    total = normal.log_prob(x).mean() + beta.log_prob(beta.rsample().clamp(0.01, 0.99)).mean() + gamma.entropy().mean()
    total = total + D.kl_divergence(normal, D.Normal(0.0, 1.0)).mean() + D.Dirichlet(rate).rsample().sum()
    bounded = D.TransformedDistribution(normal, [D.TanhTransform(cache_size=1)])
    return total + bounded.log_prob(bounded.rsample()).clamp(-5, 5).mean()


def bernoulli_of_sure_things(out: Tensor) -> Tensor:
    sure = D.Bernoulli(probs=(out > 0).float())
    return sure.log_prob((out > 0).float()).mean() + out.mean()


def half_infinite_integrals(out: Tensor) -> Tensor:
    return (
        torch.special.erfinv(out.tanh() * 0.9).sum()
        + torch.special.log_ndtr(out).sum()
        + F.logsigmoid(out * 1e3).mean()
    )


def losses(out: Tensor) -> Tensor:
    target = out.detach().abs()
    total = F.poisson_nll_loss(out, target, full=True) + F.gaussian_nll_loss(out, target, target * 0)
    total = total * 1e-6 + F.huber_loss(out, target) + F.multi_margin_loss(out, torch.zeros(4, dtype=torch.long))
    return total + F.triplet_margin_loss(out, out, out.flip(0)) + F.soft_margin_loss(out, target.sign())


QUIET = [
    logdet, slogdet, ctc, ctc_impossible_but_zeroed, norms, distances, scratch, gumbel, normalised,
    constants_in_layer_norm, binary_at_the_ends, divergence_of_zero_targets, pooling, selections,
    categorical_with_zeros, distributions, bernoulli_of_sure_things, half_infinite_integrals, losses,
]  # fmt: skip


@pytest.mark.parametrize("loss", QUIET, ids=lambda f: f.__name__)
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_what_the_library_does_on_purpose_is_silent(loss: Any, watch: str) -> None:
    torch.manual_seed(0)
    assert_quiet(train(Net(), data(), lambda m, x: loss(m(x)), watch=watch))


@pytest.fixture
def filled_memory() -> Any:
    """Deterministic algorithms: uninitialised memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loss", [scratch, norms, ctc, losses, gumbel, selections], ids=lambda f: f.__name__)
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_memory_filled_with_nan_is_silent(filled_memory: None, loss: Any, watch: str) -> None:
    torch.manual_seed(0)
    assert_quiet(train(Net(), data(), lambda m, x: loss(m(x)), watch=watch))


class InForward(nn.Module):
    """All of it inside a module, whose output stays finite."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.lin(x))


@pytest.mark.parametrize("loss", QUIET, ids=lambda f: f.__name__)
@pytest.mark.parametrize("watch", ["layers", "ops"])
def test_the_same_inside_a_module(loss: Any, watch: str) -> None:
    torch.manual_seed(0)
    assert_quiet(train(InForward(loss), data(), lambda m, x: m(x), watch=watch))


# -- events ------------------------------------------------------------------------------------------------------------


def negative_determinant(out: Tensor, bad: bool) -> Tensor:
    matrix = torch.diag(torch.tensor([1.0, 1.0, -1.0 if bad else 1.0])) + 0 * out[:3, :3]
    return torch.logdet(matrix)  # <-- birth


def singular(out: Tensor, bad: bool) -> Tensor:
    matrix = torch.eye(3) * (0.0 if bad else 1.0) + 0 * out[:3, :3]
    return torch.linalg.slogdet(matrix)[1]  # <-- birth


def impossible_alignment(out: Tensor, bad: bool) -> Tensor:
    logp = F.log_softmax(out[:, None].expand(4, 2, 6), -1)
    targets = torch.tensor([[1, 2, 2, 2], [3, 4, 5, 1]])
    lengths = torch.tensor([4 if bad else 1, 1])
    return F.ctc_loss(logp, targets, torch.tensor([4, 4]), lengths)  # <-- birth


def closed_set_entropy(out: Tensor, bad: bool) -> Tensor:
    p = torch.zeros_like(out) if bad else out.softmax(-1)
    return D.Categorical(probs=p * out.exp(), validate_args=False).entropy().mean()  # <-- birth


def negative_scale(out: Tensor, bad: bool) -> Tensor:
    scale = out.abs() + 0.1 - (100 if bad else 0)
    return D.Normal(out, scale, validate_args=False).log_prob(out).mean()  # <-- birth


def beyond_tanh(out: Tensor, bad: bool) -> Tensor:
    action = torch.tanh(out * (1e4 if bad else 0.1))
    squash = D.TransformedDistribution(D.Normal(out, 1.0), [D.TanhTransform()])
    return squash.log_prob(action).mean()  # <-- birth


def zero_exponent(out: Tensor, bad: bool) -> Tensor:
    x = out.abs() * (0 if bad else 1) + 0
    return D.Gamma(0.5, 1.0, validate_args=False).log_prob(x).mean()  # <-- birth


def one_sample(out: Tensor, bad: bool) -> Tensor:
    rows = out[:1] if bad else out
    return rows.std(0).sum() + rows.sum()  # <-- birth


def normal_likelihood(out: Tensor, bad: bool) -> Tensor:
    variance = out.abs() * (0 if bad else 1) + (0 if bad else 1)
    return nn.GaussianNLLLoss(eps=0.0)(out, out.detach() + 1, variance)  # <-- birth


def surprise(out: Tensor, bad: bool) -> Tensor:
    target = torch.full_like(out, -0.1 if bad else 0.1)
    return F.kl_div(F.log_softmax(out, -1), target)  # <-- birth


def no_elements(out: Tensor, bad: bool) -> Tensor:
    keep = torch.zeros(4, dtype=torch.bool) if bad else torch.ones(4, dtype=torch.bool)
    return F.l1_loss(out[keep], out[keep] * 0)  # <-- birth


def without_eps(out: Tensor, bad: bool) -> Tensor:
    rows = out * (0 if bad else 1)
    return (F.normalize(rows, dim=-1, eps=0.0) * torch.arange(6)).sum()  # <-- birth


EVENTS = {
    negative_determinant: {"logdet"}, singular: {"slogdet", "linalg_slogdet", "log"},
    impossible_alignment: {"ctc_loss"},
    closed_set_entropy: {"div"}, negative_scale: {"log"}, beyond_tanh: {"atanh", "log", "log1p"},
    zero_exponent: {"xlogy", "log", "mul", "pow"}, one_sample: {"std"},
    normal_likelihood: {"log", "div", "gaussian_nll_loss"},
    surprise: {"xlogy", "log", "kl_div"}, no_elements: {"mean", "l1_loss"}, without_eps: {"div", "normalize"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", EVENTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["loss", "module"])
def test_birth_inside_a_function_of_the_library_is_the_users_line(loss: Any, inside: bool) -> None:
    torch.manual_seed(0)
    marks = [False, True, False]
    if inside:
        module = InForward(lambda out: loss(out, module.bad))

        def loss_of(m: Any, batch: Any) -> Tensor:
            m.bad = batch[1]
            return m(batch[0])
    else:
        module = Net()

        def loss_of(m: Any, batch: Any) -> Tensor:
            return loss(m(batch[0]), batch[1])

    run = train(module, list(zip(data(), marks, strict=True)), loss_of)
    event = run.event
    assert event.op in EVENTS[loss] or event.call in EVENTS[loss], (event.op, event.call)
    phase, layer = ("forward", "root") if inside else ("loss", None)
    assert_born(run, loss, step=BAD, phase=phase, layer=layer, op=event.op or "")


class OneSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).mean((2, 3)))


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_batch_norm_of_one_sample_is_silent(watch: str) -> None:
    images = [torch.randn(1, 2, 2, 2) for _ in range(3)]
    assert_quiet(train(OneSample(), images, lambda m, x: m(x).pow(2).sum(), watch=watch))
