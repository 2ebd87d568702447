"""Intended infinities: what made NaN of them, and which loss counted them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from _births import born, born_backward, traced
from nan_detector._diagnosis import diagnose
from nan_detector._trace import THROUGH_LOG_SOFTMAX, Trace

INF = torch.inf


def softmax(scores: torch.Tensor, op: str = "softmax", kind: str = "intended_met", **fields: object) -> Trace:
    out = torch.softmax(scores, -1) if op == "softmax" else torch.log_softmax(scores, -1)
    return traced(born(op, [scores], out, kind=kind, args=("dim=-1", "half_to_float=False"), **fields))


def padded_rows() -> torch.Tensor:
    scores = torch.randn(3, 4)
    scores[1] = -INF
    return scores


def attention(**fields: object) -> Trace:
    q = torch.randn(1, 2, 3, 4)
    mask = torch.full((3, 3), -INF)
    out = torch.softmax(q @ q.transpose(-1, -2) + mask, -1) @ q
    fields = {"kind": "intended_met", "elementwise": False, **fields}
    return traced(born("scaled_dot_product_flash_attention_for_cpu", [q, q, q, mask], out, **fields))


def logsumexp_gradient(rows: torch.Tensor, forward: str = "logsumexp") -> Trace:
    out = torch.logsumexp(rows, 0)
    fields = {"kind": "intended_met"}
    return traced(
        born_backward(forward, [rows], "sub", [rows, out.expand(rows.shape)], rows - out, **fields), ("gradient",)
    )


def additive_mask(dtype: torch.dtype, score: float) -> Trace:
    scores = torch.tensor([[1.0, score]], dtype=dtype)
    mask = torch.full((1, 2), torch.finfo(dtype).min, dtype=dtype)
    return traced(born("add", [scores, mask], scores + mask, call="scores + mask"))


def two_masks() -> Trace:
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min])
    return traced(born("add", [mask, mask], mask + mask, call="padding + causal"))


def mask_constant() -> Trace:
    scores = torch.tensor([-1e32, 1.0])
    lowest = torch.finfo(torch.float32).min
    return traced(born("add", [scores], scores + lowest, args=(f"other={lowest!r}",), call="scores + lowest"))


def smoothing() -> Trace:
    z, y = torch.tensor([[0.0, -INF]]), torch.tensor([0])
    out = F.cross_entropy(z, y, label_smoothing=0.1)
    line = "loss = F.cross_entropy(z, y, label_smoothing=0.1)"
    return traced(born("cross_entropy", [], out, kind="intended_reached", line=line, call="F.cross_entropy"), ("loss",))


def masked_target(kind: str = "intended_reached") -> Trace:
    logp, y = torch.log_softmax(torch.tensor([[0.0, -INF]]), 1), torch.tensor([1])
    fields = {"kind": kind, "elementwise": False, "call": "F.nll_loss"}
    return traced(born("nll_loss_forward", [logp], F.nll_loss(logp, y), **fields), ("loss",))


def ctc(lengths: bool = False) -> Trace:
    logp = torch.randn(4, 2, 5).log_softmax(-1)
    target, frames, symbols = torch.tensor([[1, 2, 3, 4, 1, 2], [1, 1, 1, 2, 3, 4]]), (4, 4), (3, 6)
    out = F.ctc_loss(logp, target, frames, symbols, reduction="none")
    args = ("input_lengths=(4, 4)", "target_lengths=(3, 6)") if lengths else ()
    return traced(born("ctc_loss", [logp], out, elementwise=False, args=args, call="F.ctc_loss"))


def entropy() -> Trace:
    logp = torch.log_softmax(torch.tensor([[1.0, 2.0, -INF], [0.0, 0.0, 0.0]]), 1)
    p = logp.exp()
    return traced(born("mul", [p, logp], p * logp, kind="intended_met", call="logp.exp() * logp"))


def masked_product() -> Trace:
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [-INF]])
    return traced(born("mm", [a, b], a @ b, kind="intended_met", elementwise=False))


def times_number_zero() -> Trace:
    x = torch.tensor([INF, 1.0])
    return traced(born("mul", [x], x * 0.0, kind="intended_met", args=("other=0.0",)))


def infinite_ratio() -> Trace:
    x = torch.tensor([INF, 1.0])
    return traced(born("div", [x, x], x / x, kind="intended_met", call="x / x"))


def difference(op: str = "sub") -> Trace:
    a, b = torch.tensor([-INF, 1.0]), torch.tensor([-INF, 0.0])
    out = a - b if op == "sub" else a + -b
    return traced(born(op, [a, b if op == "sub" else -b], out, kind="intended_met", call="cost - best"))


def nothing_was_pooled() -> Trace:
    pooled, weight = torch.full((1, 2), -INF), torch.tensor([[0.3], [-0.3]])
    out = torch.addmm(torch.zeros(1), pooled, weight)
    return traced(born("addmm", [torch.zeros(1), pooled, weight], out, kind="intended_met", elementwise=False))


def smoothed_by_hand(note: str) -> Trace:
    lp = torch.log_softmax(torch.tensor([[0.0, -INF]]), 1)
    return traced(born("sum", [], (0.5 * lp).sum(), kind="intended_reached", call="(q * lp).sum", note=note), ("loss",))


def mean_of_both() -> Trace:
    x = torch.tensor([INF, -INF, 1.0])
    return traced(born("mean", [x], x.mean(), kind="intended_met", elementwise=False))


def positive_logits() -> Trace:
    x = torch.tensor([[INF, 1.0]])
    return softmax(x)


FIRES = [
    (
        "softmax_fully_masked",
        lambda: softmax(padded_rows(), call="self.cross"),
        "1 of 3 rows is (of length 4): all 4 logits at the NaN results are -inf.",
    ),
    ("softmax_fully_masked", lambda: softmax(padded_rows(), "log_softmax"), None),
    ("softmax_fully_masked", lambda: softmax(padded_rows(), kind="operation"), None),
    ("softmax_fully_masked", attention, None),
    (
        "logsumexp_fully_masked",
        lambda: logsumexp_gradient(torch.full((3, 2), -INF)),
        "6 of 6 inputs of logsumexp are -inf, and in some rows all are.",
    ),
    ("logsumexp_fully_masked", lambda: logsumexp_gradient(torch.full((3, 2), -INF), "logaddexp"), None),
    (
        "mask_value_overflow",
        lambda: additive_mask(torch.float32, -1e32),
        "The mask value -3.40e+38, the lowest number of float32, was added to values down to -1.00e+32.",
    ),
    (
        "mask_value_overflow",
        lambda: additive_mask(torch.float16, -40.0),
        "The mask value -6.55e+04, the lowest number of float16, was added to values down to -40.0.",
    ),
    ("mask_value_overflow", two_masks, None),
    ("mask_value_overflow", mask_constant, None),
    ("masked_logit_in_loss", smoothing, "Label smoothing puts weight on every class, the masked ones too."),
    ("masked_logit_in_loss", masked_target, "1 of 2 values that F.nll_loss gets is -inf."),
    ("masked_logit_in_loss", lambda: masked_target("operation"), None),
    (
        "masked_logit_in_loss",
        lambda: smoothed_by_hand(f"written at a.py:3 {THROUGH_LOG_SOFTMAX}"),
        "The log-probability of a masked class is -inf, and (q * lp).sum counts it with a weight above 0.",
    ),
    ("literal_nan", lambda: smoothed_by_hand("written at a.py:3"), None),
    ("ctc_no_alignment", ctc, "1 of 2 samples has no alignment."),
    ("ctc_no_alignment", lambda: ctc(lengths=True), "Inputs have at most 4 frames and targets up to 6 symbols."),
    ("zero_times_inf", entropy, "1 of 6 products is -inf · 0."),
    ("zero_times_inf", masked_product, None),
    ("zero_times_inf", times_number_zero, None),
    ("zero_times_inf", infinite_ratio, "Numerator and denominator are both infinite: inf / inf = inf · 0."),
    ("inf_minus_inf", difference, "1 of 2 differences is -inf - -inf."),
    (
        "inf_minus_inf",
        nothing_was_pooled,
        "At the NaN results addmm met 0 values of +inf and 2 of -inf. Weights of both signs make +inf and -inf of "
        "them, which meet in the sum.",
    ),
    ("inf_minus_inf", lambda: difference("add"), None),
    ("inf_minus_inf", mean_of_both, None),
    ("inf_minus_inf", positive_logits, "1 of 2 logits is +inf: the softmax subtracts the maximum, inf - inf."),
]

NEAR = [
    ("ctc_no_alignment", masked_target, "masked_logit_in_loss"),
    ("softmax_fully_masked", positive_logits, "inf_minus_inf"),
    ("logsumexp_fully_masked", lambda: softmax(padded_rows()), "softmax_fully_masked"),
    ("mask_value_overflow", lambda: traced(born("add", [torch.tensor([-3e38])] * 2, torch.tensor([-INF]))), "overflow"),
    ("mask_value_overflow", lambda: traced(born("add", [torch.tensor([3.4e38])] * 2, torch.tensor([INF]))), "overflow"),
    ("masked_logit_in_loss", entropy, "zero_times_inf"),
    ("zero_times_inf", difference, "inf_minus_inf"),
    ("inf_minus_inf", entropy, "zero_times_inf"),
]


def ids(table: list[tuple]) -> list[str]:
    return [f"{row[0]}-{i}" for i, row in enumerate(table)]


@pytest.mark.parametrize(("code", "build", "evidence"), FIRES, ids=ids(FIRES))
def test_the_cause_is_named(code: str, build, evidence: str | None):
    best, _ = diagnose(build())
    assert best is not None and best.code == code
    assert best.fix
    if evidence is not None:
        assert evidence in best.evidence


@pytest.mark.parametrize(("code", "build", "instead"), NEAR, ids=ids(NEAR))
def test_a_near_miss_is_something_else(code: str, build, instead: str):
    best, others = diagnose(build())
    assert best is not None and best.code == instead
    assert code not in [c.code for c in others]


def test_a_derivative_of_logsumexp_without_masked_rows_is_not_one_of_them():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    birth = born_backward("logsumexp", [rows], "mul", [rows], torch.full((2, 2), torch.nan))
    best, others = diagnose(traced(birth, ("gradient",)))
    assert "logsumexp_fully_masked" not in [c.code for c in (best, *others) if c is not None]


def test_float16_addition_only_overflows_with_room_below():
    # -65504 - 10 rounds back to -65504: torch makes no infinity, so no birth arises that the rule could explain.
    lowest = torch.tensor(-65504.0, dtype=torch.float16)
    assert torch.isfinite(lowest - 10) and torch.isinf(lowest - 40)


def test_padding_in_attention_gets_its_own_fix():
    best, _ = diagnose(attention())
    assert best is not None and best.fix is not None and "mask[mask.all(-1)] = False" in best.fix


def test_a_finite_loss_with_nan_gradient_behind_a_masked_softmax_names_the_dropping_second():
    trace = traced(softmax(padded_rows()).birth, ("gradient",))
    best, others = diagnose(trace)
    assert best is not None
    assert (best.code, [c.code for c in others]) == ("softmax_fully_masked", ["unselected_branch"])
