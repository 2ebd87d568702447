"""Infinities that are meant: silent while a softmax or a mask takes them, an event where they do harm."""

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
CONSTANT = torch.tensor([0.0, 0.0, 0.0, -INF])
SEQUENCE = 4


def data(bad: bool = True, n: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Sequences [3, 4, 8] and what is padding [3, 4]; in step `BAD` sample 1 is padding only."""
    g = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        pad = torch.zeros(3, SEQUENCE, dtype=torch.bool)
        pad[:, -1] = True
        if bad and i == BAD:
            pad[1] = True
        out.append((torch.randn(3, SEQUENCE, 8, generator=g), pad))
    return out


def mean_of(model: Any, batch: Any) -> Tensor:
    return model(*batch).pow(2).mean()


# -- ways to make a mask -----------------------------------------------------------------------------------------------


def by_masked_fill(scores: Tensor, pad: Tensor) -> Tensor:
    return scores.masked_fill(pad[:, None], -INF)


def by_masked_fill_in_place(scores: Tensor, pad: Tensor) -> Tensor:
    return (scores + 0).masked_fill_(pad[:, None], -INF)


def by_where(scores: Tensor, pad: Tensor) -> Tensor:
    return torch.where(pad[:, None], torch.full_like(scores, -INF), scores)


def by_where_with_a_number(scores: Tensor, pad: Tensor) -> Tensor:
    return torch.where(pad[:, None], -INF, scores)


def by_index(scores: Tensor, pad: Tensor) -> Tensor:
    scores = scores.clone()
    scores[pad[:, None].expand_as(scores)] = -INF
    return scores


def by_sum(scores: Tensor, pad: Tensor) -> Tensor:
    bias = torch.zeros(pad.shape).masked_fill(pad, -INF)
    return scores + bias[:, None]


def by_new_full(scores: Tensor, pad: Tensor) -> Tensor:
    bias = scores.new_full(pad.shape, -INF)
    bias[~pad] = 0.0
    return scores + bias[:, None]


def by_tensor(scores: Tensor, pad: Tensor) -> Tensor:
    return scores + torch.tensor([[0.0 if not p else -INF for p in row] for row in pad.tolist()])[:, None]


def by_log(scores: Tensor, pad: Tensor) -> Tensor:
    return scores + (~pad).float().log()[:, None]


def by_float_conversion(scores: Tensor, pad: Tensor) -> Tensor:
    return scores + torch.where(pad, float("-inf"), 0.0)[:, None]


WAYS: list[Callable[[Tensor, Tensor], Tensor]] = [
    by_masked_fill, by_masked_fill_in_place, by_where, by_where_with_a_number, by_index, by_sum, by_new_full, by_tensor,
    by_log, by_float_conversion,
]  # fmt: skip


class Attention(nn.Module):
    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.way = way

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        scores = self.way(self.q(x) @ self.k(x).mT, pad)
        return F.softmax(scores, dim=-1) @ self.v(x)  # <-- birth


class Net(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.head(self.attention(x, pad))


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_mask_is_silent_and_a_fully_masked_row_is_not(way: Any, watch: str) -> None:
    assert_quiet(train(Net(Attention(way)), data(bad=False), mean_of, watch=watch))
    run = train(Net(Attention(way)), data(), mean_of, watch=watch)
    if way is by_log:  # here the infinity was made by arithmetic that nobody called a mask
        assert run.event.op in ("softmax", "log")
        assert run.event.layer_name == "attention"
        return
    assert_born(run, Attention, step=BAD, phase="forward", layer="attention", op="softmax")


class WithBuffer(Attention):
    """The causal mask is a buffer; the batch's padding comes on top."""

    def __init__(self, where: str) -> None:
        super().__init__(by_masked_fill)
        mask = torch.full((SEQUENCE, SEQUENCE), -INF).triu(1)
        self.where = where
        if where == "buffer":
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT + self.mask
        scores = scores.masked_fill(pad[:, None], -INF)
        return scores.softmax(-1) @ self.v(x)  # <-- birth


@pytest.mark.parametrize("where", ["buffer", "attribute"])
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_mask_that_the_module_holds(where: str, watch: str) -> None:
    assert_quiet(train(Net(WithBuffer(where)), data(bad=False), mean_of, watch=watch))
    run = train(Net(WithBuffer(where)), data(), mean_of, watch=watch)
    assert_born(run, WithBuffer, step=BAD, phase="forward", layer="attention", op="softmax")


class FromOutside(Attention):
    """The additive mask comes with the call."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).mT + bias, dim=-1)  # <-- birth
        return weights @ self.v(x)


@pytest.mark.parametrize("watch", ["step", "ops"])
def test_mask_as_an_input(watch: str) -> None:
    def additive(bad: bool) -> list[tuple[Tensor, Tensor]]:
        return [(x, torch.zeros(pad.shape).masked_fill(pad, -INF)[:, None]) for x, pad in data(bad)]

    assert_quiet(train(Net(FromOutside(by_sum)), additive(False), mean_of, watch=watch))
    run = train(Net(FromOutside(by_sum)), additive(True), mean_of, watch=watch)
    assert_born(run, FromOutside, step=BAD, phase="forward", layer="attention", op="softmax")


class Constant(Attention):
    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT + CONSTANT
        if pad.all(-1).any():
            scores = scores + F.pad(scores.new_zeros(0), (0, SEQUENCE), value=-INF)
        return F.softmax(scores, -1) @ self.v(x)  # <-- birth


def test_mask_as_a_constant_of_the_file_and_by_padding() -> None:
    assert_quiet(train(Net(Constant(by_sum)), data(bad=False), mean_of))
    run = train(Net(Constant(by_sum)), data(), mean_of)
    assert_born(run, Constant, step=BAD, phase="forward", layer="attention", op="softmax")


# -- the library's attention -------------------------------------------------------------------------------------------


class Sdpa(nn.Module):
    def __init__(self, additive: bool) -> None:
        super().__init__()
        self.additive = additive
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        q = self.lin(x)
        mask = ~pad[:, None]
        if self.additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -INF)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  # <-- birth


@pytest.mark.parametrize("additive", [False, True])
def test_scaled_dot_product_attention(additive: bool) -> None:
    assert_quiet(train(Net(Sdpa(additive)), data(bad=False), mean_of))
    run = train(Net(Sdpa(additive)), data(), mean_of)
    if not run.events:  # this kernel gives zeros for a fully masked row
        assert run.finite
        return
    event = assert_born(run, Sdpa, step=BAD, phase=run.event.phase, layer="attention", op=run.event.op or "")
    assert event.phase in ("forward", "backward")
    assert "softmax" in (event.op or "") or "attention" in (event.op or "")


class Mha(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.mha(x, x, x, key_padding_mask=pad, need_weights=self.weights)[0]  # <-- birth


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_multihead_attention(weights: bool, watch: str) -> None:
    assert_quiet(train(Net(Mha(weights)), data(bad=False), mean_of, watch=watch))
    run = train(Net(Mha(weights)), data(), mean_of, watch=watch)
    if not run.events:
        assert not weights
        return
    op = {"softmax", "safe_softmax", "scaled_dot_product_attention", "scaled_dot_product_flash_attention_for_cpu"}
    assert_born(run, Mha, step=BAD, phase="forward", layer="attention.mha", op=op)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=pad)


def test_transformer_encoder() -> None:
    assert_quiet(train(Net(Encoder()), data(bad=False), mean_of))
    run = train(Net(Encoder()), data(), mean_of)
    if run.events:
        assert run.event.layer_name == "attention.encoder.layers.0.self_attn"
        assert run.event.reproduced == "yes"
        assert run.finite


def frozen_encoder(model: Any, batch: Any) -> Tensor:
    """The encoder in evaluation mode without gradients: its fast path makes nested tensors."""
    model.attention.eval()
    with torch.no_grad():
        h = model.attention(*batch)
    return model.head(h).pow(2).mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_fast_path() -> None:
    model = Net(Encoder())
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-3)
    assert_quiet(train(model, data(bad=False), frozen_encoder, optimizer=optimizer))
    run = train(
        model,
        [(x * (INF if i == BAD else 1), p) for i, (x, p) in enumerate(data(bad=False))],
        frozen_encoder,
        optimizer=optimizer,
    )
    assert run.event.step == BAD
    assert run.finite


# -- where a mask value does harm --------------------------------------------------------------------------------------


class Policy(nn.Module):
    """Logits of actions, those not allowed at -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.lin(x[:, 0]).masked_fill(pad, -INF)


def entropy(logits: Tensor) -> Tensor:
    logp = F.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum(-1).mean()  # <-- birth


def safe_entropy(logits: Tensor) -> Tensor:
    logp = F.log_softmax(logits, -1)
    return -(logp.exp() * logp.masked_fill(logp == -INF, 0.0)).sum(-1).mean()


def smoothing(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), label_smoothing=0.1)  # <-- birth


def plain_cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def zero_times(logits: Tensor) -> Tensor:
    target = F.one_hot(torch.zeros(len(logits), dtype=torch.long), 4).float()
    return -(target * F.log_softmax(logits, -1)).sum(-1).mean()  # <-- birth


def divergence(logits: Tensor) -> Tensor:
    teacher = torch.full_like(logits, 0.25)
    return F.kl_div(F.log_softmax(logits, -1), teacher, reduction="batchmean")  # <-- birth


def safe_divergence(logits: Tensor) -> Tensor:
    teacher = F.one_hot(torch.zeros(len(logits), dtype=torch.long), 4).float()
    logp = F.log_softmax(logits, -1).clamp(min=-1e4)
    return F.kl_div(logp, teacher, reduction="batchmean")


def all_of_one(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits[:, -1:], -1).mean()  # <-- birth


def some(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1).mean() + logits.topk(2).values.sum() + logits.sort(-1).values[:, -1].mean()


HARM = {entropy: "mul", smoothing: "cross_entropy", zero_times: "mul", divergence: "kl_div", all_of_one: "logsumexp"}


@pytest.mark.parametrize("loss", HARM, ids=lambda f: f.__name__)
def test_mask_value_meets_what_cannot_take_it(loss: Any) -> None:
    run = train(Policy(), data(bad=False), lambda m, b: loss(m(*b)))
    event = run.event
    assert event.phase in ("loss", "backward")
    ops = {HARM[loss], *(("sum", "mean", "neg") if loss in (smoothing, divergence) else ())}
    assert event.op in ops or event.call in ops, (event.op, event.call)
    assert_born(run, loss, step=0, phase=event.phase, layer=None, op=event.op or "")


@pytest.mark.parametrize("loss", [safe_entropy, plain_cross_entropy, safe_divergence, some], ids=lambda f: f.__name__)
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_mask_value_is_taken_as_meant(loss: Any, watch: str) -> None:
    assert_quiet(train(Policy(), data(bad=False), lambda m, b: loss(m(*b)), watch=watch))


def test_most_negative_number_overflows_in_half() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 4)
            nn.init.constant_(self.lin.bias, -100.0)

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            scores = self.lin(x[:, 0]).half()
            bias = torch.zeros(pad.shape, dtype=torch.half).masked_fill(pad, torch.finfo(torch.half).min)
            scores = scores + bias  # <-- birth
            return scores.float().softmax(-1)

    run = train(Half(), data(), lambda m, b: m(*b).pow(2).mean())
    assert_born(run, Half, step=BAD, phase="forward", layer="root", op="add")
    assert_quiet(train(Half(), data(bad=False), lambda m, b: m(*b).pow(2).mean()))
