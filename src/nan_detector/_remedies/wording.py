"""A repaired call in the words of the user's line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nan_detector._call_site import CallSite
from nan_detector._calls import public_name
from nan_detector._remedies.call import Call, Words, name_of
from nan_detector._rewriting import is_bracketed, rewritten

_NAMESPACES = {"linalg_": "torch.linalg.", "special_": "torch.special."}
_NAMES = ("x", "y", "z")
_SYMBOLS = {"div": "/", "mul": "*", "add": "+", "sub": "-", "pow": "**", "matmul": "@"}


def written(site: CallSite, call: Call, words: Words) -> str:
    """What would be written at `site` for the repaired `call`: the user's own expression where that is certain."""
    count = len(call.args)
    public = public_name(call.func)
    names = frozenset((name_of(call.func), public, *(public.removeprefix(p) for p in _NAMESPACES)))
    direct = site.caller.code is site.mark.code
    text = None
    if direct and (words.whole or not words.general):
        text = rewritten(
            site.mark,
            operands=words.operands,
            keywords=words.keywords,
            whole=words.whole,
            count=count,
            reflected=call.reflected,
            name=names,
        )
    if text is None and words.general:
        return words.general
    if text is None:
        text = _in_general(call, words)
    after = words.after
    for i, general in enumerate(_NAMES):
        place = f"{{{i}}}"
        if place in after:
            own = rewritten(site.mark, whole=place, count=count, name=names) if direct else None
            after = after.replace(place, own or general)
    if not after:
        return text
    if after.startswith("."):
        return f"({text}){after}"
    return f"{text} {after}" if after.startswith(("/", "in ", "where ", "with ")) else f"{text}, {after}"


def with_origin(words: Words, site: CallSite) -> Words:
    """`words` with the user's text for the operand of the guilty call at `site`, where they ask for it."""
    if words.of is None:
        return words
    names = frozenset((words.of.name, public_name(words.of.func)))
    own = rewritten(site.mark, whole="{0}", count=len(words.of.args), name=names)
    if own is None or "{" in own:  # it would be taken for a place of an operand
        return replace(words, whole="", of=None)
    own = own[1:-1] if is_bracketed(own) else own
    return replace(words, whole=words.whole.replace("{of}", own), of=None)


def _in_general(call: Call, words: Words) -> str:
    """The same with x, y and z for the operands."""
    if words.whole:
        text = words.whole
        for i, name in enumerate(_NAMES):
            text = text.replace(f"{{{i}}}", name)
        return text
    symbol = _SYMBOLS.get(call.name)
    count = 2 if symbol is not None else max(1, min(len(_NAMES), sum(_is_operand(a) for a in call.args)))
    names = [words.operands.get(i, "{}").replace("{}", _NAMES[i]) for i in range(count)]
    if symbol is not None and not words.keywords:
        return f" {symbol} ".join(names)
    names = [n[1:-1] if is_bracketed(n) else n for n in names]
    keywords = [f"{k}={v}" for k, v in words.keywords.items()]
    more = ["..."] if words.keywords and not words.operands else names
    return f"{_full_name(call)}({', '.join([*more, *keywords])})"


def _is_operand(value: Any) -> bool:
    return hasattr(value, "is_floating_point")


def _full_name(call: Call) -> str:
    public = public_name(call.func)
    for prefix, namespace in _NAMESPACES.items():
        if public.startswith(prefix):
            return namespace + public.removeprefix(prefix)
    module = getattr(call.func, "__module__", None) or ""
    functional = module.startswith("torch.nn.functional") or not hasattr(torch, public)
    return f"{'F' if functional and hasattr(torch.nn.functional, public) else 'torch'}.{public}"
