"""The summands of a loss: found as they are written, with values that add up to it."""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nan_detector import LossTerm, NaNDetector, NaNEvent
from nan_detector._loss_terms import MAX_TERMS, Sums
from nan_detector._summary_loss import term_lines

Step = Callable[[nn.Module, Tensor], Tensor]


def kl_of(mu: Tensor, logvar: Tensor) -> Tensor:
    return -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def event_of(loss_of: Step, model: nn.Module | None = None) -> NaNEvent:
    """The event of one step of a plain loop whose loss is `loss_of(model, x)`."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    with NaNDetector(model, verbose=False) as det:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        assert det.triggered
    assert det.event is not None
    return det.event


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    recon = F.mse_loss(out, x)
    kl = kl_of(out, out * 1000)
    return recon + 0.1 * kl


def subtracted(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    entropy = (out * 0).mean().log()
    return F.mse_loss(out, x) - 0.5 * entropy


def running_total(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    loss = F.mse_loss(out, x)
    loss += 0.01 * (out * 0).mean().log()
    return loss


def loop(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    total = torch.zeros(())
    for weight, column in zip((1.0, 0.5, 0.25, 2.0), (out * torch.tensor([1.0, 1.0, 0.0, 1.0])).unbind(1), strict=True):
        total = total + weight * column.abs().mean().log()
    return total / 4


def summed_list(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    losses = {"a": F.mse_loss(out, x), "b": (out * 0).mean().log()}
    return sum([losses["a"], losses["b"]]) / 2


def stacked(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    a, b = F.mse_loss(out, x), (out * 0).mean().log()
    return torch.stack([a, b]).mean()


def stacked_with_weights(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    a, b = F.mse_loss(out, x), (out * 0).mean().log()
    return (torch.stack([a, b]) * torch.tensor([1.0, 0.25])).sum()


def per_sample(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    recon = (out - x).abs().mean(-1)
    prior = (out.sum(-1) * 0).log()
    return (recon + 2 * prior).mean()


def setting(model: nn.Module, x: Tensor) -> Tensor:
    out, beta = model(x), 0.3
    kl = kl_of(out, out * 1000)
    return F.mse_loss(out, x) + beta * kl


def alpha(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    recon, prior = F.mse_loss(out, x), (out * 0).mean().log()
    return torch.add(recon, prior, alpha=0.1)


def learned_weight(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    s = out.mean()
    return torch.exp(-s) * (out * 0).mean().log() + s


CASES: dict[Step, list[tuple[str, float, bool]]] = {
    weighted: [("recon", 1.0, True), ("kl", 0.1, False)],
    subtracted: [("F.mse_loss(out, x)", 1.0, True), ("entropy", -0.5, False)],
    running_total: [("F.mse_loss(out, x)", 1.0, True), ("(out * 0).mean().log()", 0.01, False)],
    loop: [
        ("column.abs().mean().log() #1", 1.0, True),
        ("column.abs().mean().log() #2", 0.5, True),
        ("column.abs().mean().log() #3", 0.25, False),
        ("column.abs().mean().log() #4", 2.0, True),
    ],
    summed_list: [("losses['a']", 1.0, True), ("losses['b']", 1.0, False)],
    stacked: [("a", 1.0, True), ("b", 1.0, False)],
    stacked_with_weights: [("a", 1.0, True), ("b", 0.25, False)],
    per_sample: [("recon", 1.0, True), ("prior", 2.0, False)],
    setting: [("F.mse_loss(out, x)", 1.0, True), ("beta * kl", 1.0, False)],
    alpha: [("recon", 1.0, True), ("prior", 0.1, False)],
    learned_weight: [("torch.exp(-s) * (out * 0).mean().log()", 1.0, False), ("s", 1.0, True)],
}


@pytest.mark.parametrize("loss_of", CASES, ids=lambda f: f.__name__)
def test_each_summand_is_named_weighed_and_judged(loss_of: Step):
    found = event_of(loss_of).loss_terms
    assert [(t.text, t.weight, t.finite) for t in found] == CASES[loss_of]
    assert all(t.location is not None and t.location.file == __file__ for t in found)
    assert all(math.isfinite(t.value) == t.finite for t in found)


def test_a_term_has_the_line_that_made_it():
    terms = event_of(weighted).loss_terms
    assert [t.location.source_line for t in terms if t.location] == [
        "recon = F.mse_loss(out, x)",
        "return -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())",
    ]


def test_the_report_shows_them_in_one_line():
    said = str(event_of(stacked))
    assert "   terms   a 1.62 + b -Inf   (" in said


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        ce = F.mse_loss(out, x)
        aux = (out - out).mean().log()
        return {"loss": ce + 0.2 * aux}


def test_a_sum_within_the_model_is_seen():
    terms = event_of(lambda model, x: model(x)["loss"], WithLoss()).loss_terms
    assert [(t.text, t.weight, t.finite) for t in terms] == [("ce", 1.0, True), ("aux", 0.2, False)]


def test_a_step_function_is_seen():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        weighted(model, x).backward()
        optimizer.step()

    with NaNDetector(model, verbose=False) as det:
        det.run_step(step, torch.randn(8, 4))
        assert det.event is not None
    assert [t.text for t in det.event.loss_terms] == ["recon", "kl"]


def test_a_loss_scale_is_no_weight():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with NaNDetector(model, verbose=False) as det:
        scaler.scale(weighted(model, torch.randn(8, 4)) / 4).backward()
        scaler.step(optimizer)
        scaler.update()
        assert det.event is not None
    assert [(t.text, t.weight) for t in det.event.loss_terms] == [("recon", 1.0), ("kl", 0.1)]


def test_of_two_backwards_the_bad_one_speaks():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    with NaNDetector(model, verbose=False) as det:
        (model(x).mean() + model(x).square().mean()).backward()
        weighted(model, x).backward()
        optimizer.step()
        assert det.event is not None
    assert [t.text for t in det.event.loss_terms] == ["recon", "kl"]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x: (model(x) * 0).mean().log(),  # no sum
        lambda model, x: 1 - 2 * (model(x) * 0).mean().log(),  # one summand and a number
        lambda model, x: torch.relu(0.1 + (model(x) * 0).log()).mean() * math.inf,  # a sum within what is none
        lambda model, x: torch.zeros(()) + (model(x) * 0).mean().log(),
    ],
)
def test_where_the_loss_is_no_sum_nothing_is_said(loss_of: Step):
    event = event_of(loss_of)
    assert event.loss_terms == ()
    assert "\n   terms " not in str(event)


# -- the sums alone ---------------------------------------------------------------------------------------------------


class Following(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums(None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.sums.follow(func, args, kwargs or {}, None, lambda: func(*args, **(kwargs or {})))


_serial = itertools.count()


def run(source: str, **names: Any) -> tuple[Tensor, tuple[LossTerm, ...]]:
    """The loss that `source` computes, and its terms."""
    file = f"<ipython-input-terms-{next(_serial)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        with Following() as mode:
            exec(compile(source, file, "exec"), names)
        return names["loss"], mode.sums.terms_of(names["loss"])
    finally:
        del linecache.cache[file]


LEAVES = {
    name: torch.tensor(v, dtype=torch.float64) for name, v in zip("abcde", (0.5, -3.0, 7.25, 1e-3, 40.0), strict=True)
}
FACTORS = st.sampled_from(["2", "0.5", "-3", "1.5"])
EXPRESSIONS = st.recursive(
    st.sampled_from([f"{name}.exp()" for name in LEAVES]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(FACTORS, inner).map(lambda p: f"({p[0]} * {p[1]})"),
        st.tuples(inner, FACTORS).map(lambda p: f"({p[0]} / {p[1]})"),
        inner.map(lambda e: f"(-{e})"),
        st.lists(inner, min_size=1, max_size=3).map(lambda es: f"sum([{', '.join(es)}])"),
        st.lists(inner, min_size=1, max_size=3).map(lambda es: f"torch.stack([{', '.join(es)}]).sum()"),
        st.lists(inner, min_size=1, max_size=3).map(lambda es: f"torch.stack([{', '.join(es)}]).mean()"),
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, st.sampled_from("+-"))
def test_weights_times_values_add_up_to_the_sum(left: str, right: str, sign: str):
    loss, terms = run(f"loss = {left} {sign} {right}\n", torch=torch, **LEAVES)
    assert len(terms) >= 2
    total, size = math.fsum(t.weight * t.value for t in terms), math.fsum(abs(t.weight * t.value) for t in terms)
    assert total == pytest.approx(loss.item(), rel=1e-9, abs=1e-9 * size)
    written = [t.text.split(" #")[0] for t in terms]
    # Of more than one text, `made` or written, each is part of the source.
    assert all(text in f"{left} {sign} {right}" for text in written)


@given(
    st.lists(st.sampled_from(["a", "2 * b", "c", "d / 4"]), min_size=2, max_size=4, unique=True),
    st.sampled_from(["mean", "sum"]),
)
@settings(max_examples=50, deadline=None)
def test_a_sum_of_vectors_is_that_of_its_reduced_terms(parts: list[str], how: str):
    vectors = {name: torch.rand(6, dtype=torch.float64) for name in "abcd"}
    loss, terms = run(f"loss = ({' + '.join(parts)}).{how}()\n", **vectors)
    assert math.fsum(t.weight * t.value for t in terms) == pytest.approx(loss.item())
    assert [t.text for t in terms] == [p.strip("2/ *4") for p in parts]


def test_many_terms_are_cut_and_the_bad_ones_kept():
    losses = [torch.tensor(float(i), requires_grad=True) for i in range(100)]
    losses[90] = torch.tensor(math.nan, requires_grad=True)
    _, terms = run("loss = sum(losses)\n", losses=losses)
    assert len(terms) == MAX_TERMS
    assert [t.finite for t in terms].count(False) == 1
    assert [t.value for t in terms[:3]] == [0.0, 1.0, 2.0]


def test_what_is_overwritten_later_keeps_its_value():
    loss, terms = run("loss = a.exp()\nloss += b\nloss *= 2\nb.zero_()\n", a=torch.tensor(0.0), b=torch.tensor(5.0))
    assert [(t.text, t.value) for t in terms] == [("a.exp()", 1.0), ("b", 5.0)]
    assert loss.item() == 12.0


def test_values_reach_beyond_the_range_of_half_precision():
    _, terms = run("loss = (a + b).sum()\n", a=torch.full((4,), 6e4).half(), b=torch.zeros(4).half())
    assert [t.value for t in terms] == [240000.0, 0.0]


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("loss = sum([a, b], c)\n", ["c", "a", "b"]),
        ("loss = torch.stack((a, b)).sum()\n", ["a", "b"]),
        ("loss = torch.mean(torch.cat([a.view(1), b.view(1)]))\n", ["a.view(1)", "b.view(1)"]),
        ("x = 3 * a\nloss = x + b\n", ["x", "b"]),
        ("x = a + b\nloss = x + c\n", ["a", "b", "c"]),
        ("loss = (a + b).float().squeeze()\n", ["a", "b"]),
        ("loss = a.add(b)\n", ["a", "b"]),
        ("loss = -(a - b)\n", ["a", "b"]),
        ("loss = a\nfor x in (b, c):\n    loss = loss + x\n", ["term 1", "x #1", "x #2"]),
        ("loss = a + float('inf')\n", ["a", "float('inf')"]),
    ],
)
def test_texts(source: str, texts: list[str]):
    _, terms = run(source, torch=torch, a=torch.tensor(1.0), b=torch.tensor(2.0), c=torch.tensor(3.0))
    assert [t.text for t in terms] == texts


def test_a_single_term_makes_no_row():
    assert term_lines([LossTerm("a", 1.0)], str) == []


def test_a_sum_with_a_place_of_its_own_for_each():
    terms = [LossTerm("a", 1.0), LossTerm("b + c", math.nan, False, -2.0)]
    assert term_lines(terms, str) == ["a 1 - 2*(b + c) NaN"]
    assert term_lines(terms[::-1], str) == ["-2*(b + c) NaN + a 1"]
