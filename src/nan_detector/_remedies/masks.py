"""Masks that leave nothing: rows without a score, states that cannot be reached, labels that are masked."""

from __future__ import annotations

from typing import Any

import torch

from nan_detector._remedies.call import Call, Repaired, Words, number
from nan_detector._remedies.guards import softmax_rows
from nan_detector._remedies.registry import Remedy, remedy
from nan_detector._remedies.span import BIG

Tensor = torch.Tensor


def rows_with_scores(call: Call) -> Repaired:
    """Softmax of the rows that have a score; 0 for the others."""
    x, dim = call.tensor(0), call.argument(1, "dim")
    if not isinstance(dim, int):
        call.unfit()
    scores, dead = softmax_rows(x, dim)
    value = call.again({0: scores}).masked_fill(dead, 0.0)
    filled = f"{{}}.masked_fill(({{}} == -torch.inf).all({dim}, keepdim=True), 0.0)"
    return Repaired(value, Words(operands={0: filled}, after="and 0 as the result of such rows"))


def attention_rows(call: Call) -> Repaired:
    """Attention that lets a query without a key look at all of them, and drops what it sees."""
    bound = call.bound() if call.name != "scaled_dot_product_attention" else _attention_arguments(call)
    mask = bound.get("attn_mask")
    if not isinstance(mask, Tensor):
        call.unfit()
    if mask.dtype is torch.bool:
        dead = ~mask.any(-1, keepdim=True)
        open_mask = mask | dead
    else:
        open_mask, dead = softmax_rows(mask, -1)
    bound.update(attn_mask=open_mask)
    value = call.func(**bound)
    value = value.masked_fill(dead.expand(*value.shape[:-1], 1), 0.0)
    return Repaired(value, Words(keywords={"attn_mask": "mask | ~mask.any(-1, keepdim=True)"}, after="0 for such rows"))


def _attention_arguments(call: Call) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def multi_head_rows(call: Call) -> Repaired:
    """Multi-head attention in which a query without a key looks at all of them."""
    bound = call.bound()
    query, key, heads = bound["query"], bound["key"], bound["num_heads"]
    batched = query.dim() == 3
    batch, length, size = query.shape[1] if batched else 1, query.shape[0], key.shape[0]
    mask = torch.zeros(batch, heads, length, size, dtype=query.dtype, device=query.device)
    attention, padding = bound["attn_mask"], bound["key_padding_mask"]
    if attention is not None:
        mask = mask + _additive(attention, query).reshape(-1, 1 if attention.dim() == 2 else heads, length, size)
    if padding is not None:
        mask = mask + _additive(padding, query).reshape(batch, 1, 1, size)
    rows, dead = softmax_rows(mask, -1)
    if not bool(dead.any()):
        call.unfit()
    bound.update(attn_mask=rows.reshape(batch * heads, length, size), key_padding_mask=None, is_causal=False)
    value = call.func(**bound)
    written = "mask & ~mask.all(-1, keepdim=True)"
    return Repaired(value, Words(keywords={"key_padding_mask" if padding is not None else "attn_mask": written}))


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


def reachable(call: Call) -> Repaired:
    """The logarithm of a sum: of nothing, -inf without a slope."""
    if call.name == "logsumexp":
        x, dim = call.tensor(0), call.argument(1, "dim")
        keepdim = bool(call.argument(2, "keepdim", False))
        dead = x == -torch.inf
        for d in sorted(d % x.dim() for d in (dim if isinstance(dim, (list, tuple)) else (dim,))):
            dead = dead.all(d, keepdim=True)
        value = call.again({0: x.masked_fill(dead, 0.0)})
        out = dead if keepdim else dead.reshape(value.shape)
        where = f"({{}} == -torch.inf).all({dim}, keepdim=True)"
        return Repaired(
            value.masked_fill(out, -torch.inf),
            Words(operands={0: f"{{}}.masked_fill({where}, 0.0)"}, after="and -inf as the result of such rows"),
        )
    if call.name in ("logaddexp", "logaddexp2"):
        a, b = call.tensor(0), call.tensor(1)
        dead = (a == -torch.inf) & (b == -torch.inf)
        zero = a.new_zeros(())
        value = call.again({0: torch.where(dead, zero, a), 1: torch.where(dead, zero, b)})
        return Repaired(
            value.masked_fill(dead, -torch.inf),
            Words(whole="torch.where(dead, -torch.inf, torch.logaddexp(torch.where(dead, 0.0, {0}), {1}))"),
        )
    call.unfit()


def finite_floor(call: Call) -> Repaired:
    """-inf among the first argument replaced by a large negative number."""
    x = call.tensor(0)
    if not bool((x.detach() == -torch.inf).any()):
        call.unfit()
    floored = torch.where(x == -torch.inf, torch.full_like(x, -BIG), x)
    return Repaired(call.again({0: floored}), Words(operands={0: f"{{}}.nan_to_num(neginf=-{number(BIG)})"}))


def without_masked(call: Call) -> Repaired:
    """A sum or mean over the terms that no mask has made -inf."""
    x = call.tensor(0)
    dropped = x.detach() == -torch.inf
    if not bool(dropped.any()) or bool(dropped.all()):
        call.unfit()
    value = call.again({0: x.masked_fill(dropped, 0.0)})
    return Repaired(value, Words(operands={0: "{0}.masked_fill({0} == -torch.inf, 0.0)".replace("{0}", "{}")}))


def finite_floors(call: Call) -> Repaired:
    """-inf in either operand replaced by a large negative number."""
    floored = {
        i: torch.where(x == -torch.inf, torch.full_like(x, -BIG), x)
        for i in (0, 1)
        if isinstance(x := call.operand(i), Tensor) and bool((x.detach() == -torch.inf).any())
    }
    if not floored:
        call.unfit()
    written = f"{{}}.nan_to_num(neginf=-{number(BIG)})"
    return Repaired(call.again(floored), Words(operands=dict.fromkeys(floored, written)))


def room_below(call: Call) -> Repaired:
    """A mask value with room below it."""
    changed: dict[int, Tensor] = {}
    for i in (0, 1):
        value = call.operand(i)
        if isinstance(value, Tensor) and value.is_floating_point():
            low = torch.finfo(value.dtype).min / 2
            if bool((value.detach() < low).any()):
                changed[i] = value.clamp_min(low)
    if not changed:
        call.unfit()
    written = "{}.clamp_min(torch.finfo({}.dtype).min / 2)"
    return Repaired(call.again(changed), Words(operands=dict.fromkeys(changed, written)))


def zero_infinity(call: Call) -> Repaired:
    """CTC that counts impossible alignments as 0."""
    return Repaired(call.again(zero_infinity=True), Words(keywords={"zero_infinity": "True"}))


_CLASSES = (
    "cross_entropy nll_loss kl_div binary_cross_entropy_with_logits multi_margin_loss softmax log_softmax logsumexp "
    "logcumsumexp mean sum gather"
)

REMEDIES: tuple[Remedy, ...] = (
    remedy("softmax_fully_masked", "softmax", rows_with_scores),
    remedy("softmax_fully_masked", "log_softmax softmax", finite_floor),
    remedy("softmax_fully_masked inf_minus_inf", "scaled_dot_product_attention", attention_rows),
    remedy("softmax_fully_masked inf_minus_inf", "multi_head_attention_forward", multi_head_rows),
    remedy("logsumexp_fully_masked", "logsumexp logaddexp logaddexp2", reachable),
    remedy("logsumexp_fully_masked masked_logit_in_loss", "logsumexp logcumsumexp", finite_floor),
    remedy("logsumexp_fully_masked masked_logit_in_loss", "logaddexp logaddexp2", finite_floors),
    remedy("masked_logit_in_loss", "sum mean", without_masked),
    remedy("masked_logit_in_loss zero_times_inf inf_minus_inf", _CLASSES, finite_floor),
    remedy("masked_logit_in_loss", "mul add sub", finite_floors),
    remedy("mask_value_overflow half_overflow overflow", "add sub baddbmm", room_below),
    remedy("ctc_no_alignment", "ctc_loss", zero_infinity),
)
