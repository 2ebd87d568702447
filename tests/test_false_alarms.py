"""Ordinary trainings, watched at every level: nothing is told, whatever ordinary training does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _sacred import LEVELS
from nan_detector import NaNDetector

Training = tuple[Any, Callable[[], Iterator[float]]]
"""The watched models, and one epoch, which gives the losses."""


def digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits images come with scikit-learn")
    x, y = datasets.load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0, torch.tensor(y)


def batches(x: Tensor, *more: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    for rows in torch.randperm(len(x)).split(size):
        yield (x[rows], *(m[rows] for m in more))


def cnn(n: int = 256) -> Training:
    x, y = (t[:n] for t in digits())
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def epoch() -> Iterator[float]:
        model.train()
        for images, labels in batches(x, y, size=32):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            yield loss.item()
        model.eval()
        with torch.no_grad():
            assert model(x[:64]).isfinite().all()

    return model, epoch


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(c // 2)).masked_fill(~mask, float("-inf"))
        x = x + self.out((F.dropout(scores.softmax(-1), 0.1, self.training) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Gpt(nn.Module):
    """Two blocks: one with its mask written out, one of PyTorch's own with padding as well."""

    def __init__(self, vocabulary: int = 24, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(64, width)
        self.block = Block(width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.block(self.tokens(ids) + self.places(torch.arange(t)), causal)
        mask = torch.zeros(t, t).masked_fill(~causal, float("-inf"))
        padding = torch.zeros(ids.shape).masked_fill(ids == 0, float("-inf"))
        return self.head(self.layer(x, src_mask=mask, src_key_padding_mask=padding, is_causal=True))


def gpt(n: int = 64) -> Training:
    text = torch.arange(n * 13).remainder(23).add(1).view(n, 13).clone()
    text[::3, 10:] = 0  # padding, on the right
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 10))  # warm-up

    def epoch() -> Iterator[float]:
        for (ids,) in batches(text, size=16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            yield loss.item()

    return model, epoch


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 12, 2, dropout=0.2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(24, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])
        return self.head(out)


def lstm(n: int = 64) -> Training:
    g = torch.Generator().manual_seed(0)
    ids, lengths = torch.randint(1, 20, (n, 9), generator=g), torch.randint(3, 10, (n,), generator=g)
    model = Tagger()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)

    def epoch() -> Iterator[float]:
        for tokens, size in batches(ids, lengths, size=16):
            optimizer.zero_grad()
            keep = torch.arange(9)[None] < size[:, None]
            each = F.cross_entropy(model(tokens, size).transpose(1, 2), tokens % 5, reduction="none")
            loss = (each * keep).sum() / keep.sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            yield loss.item()

    return model, epoch


class Gan(nn.Module):
    """Never called itself, only its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 64), nn.Sigmoid())
        self.critic = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(64, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1)
        )


def gan(n: int = 128) -> Training:
    x = digits()[0][:n].flatten(1)
    model = Gan()
    makes = torch.optim.Adam(model.maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    judges = torch.optim.Adam(model.critic.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def epoch() -> Iterator[float]:
        for (real,) in batches(x, size=32):
            fake = model.maker(torch.randn(len(real), 4))
            judges.zero_grad()
            loss = F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(real)).mean()
            loss.backward()
            judges.step()
            makes.zero_grad()
            other = F.softplus(-model.critic(fake)).mean()
            other.backward()
            makes.step()
            yield loss.item() + other.item()

    return model, epoch


def amp(n: int = 256) -> Training:
    x, y = (t[:n] for t in digits())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10)

    def epoch() -> Iterator[float]:
        for images, labels in batches(x, y, size=32):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            yield loss.item()

    return model, epoch


TRAININGS = [cnn, gpt, lstm, gan, amp]


def run(make: Callable[..., Training], watch: str, epochs: int, **options: Any) -> None:
    torch.manual_seed(1)
    model, epoch = make()
    with NaNDetector(model, watch=watch, on_nan="raise", grad_norm_warn=1e6, verbose=False, **options) as det:
        means = []
        for _ in range(epochs):
            losses = list(epoch())
            assert all(math.isfinite(v) for v in losses)
            means.append(sum(losses) / len(losses))
            assert det.all_events == [], str(det.event)
            assert det.warnings == [] and det.grad_events == []
    assert det.all_events == [] and det.warnings == []
    if make is not gan:
        assert means[-1] < means[0], "it was meant to train"


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
def test_quiet(make: Callable[..., Training], watch: str) -> None:
    run(make, watch, 3)


@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
def test_quiet_with_every_look_of_the_layers(make: Callable[..., Training]) -> None:
    run(make, "layers", 2, check_inputs=True, check_backward=True)


@pytest.mark.parametrize("watch", ["step", "layers"])
@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
def test_quiet_beyond_every_warm_up(make: Callable[..., Training], watch: str) -> None:
    """Long enough for every kind of warning to be awake: more than 200 steps of each optimizer."""
    run(make, watch, {cnn: 30, gpt: 60, lstm: 60, gan: 60, amp: 30}[make])


@pytest.mark.campaign
@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
def test_quiet_for_twenty_epochs(make: Callable[..., Training], watch: str) -> None:
    run(make, watch, 20)
