"""The closed list: complete, used, documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from _causes_page import page_text
from nan_detector import _causes
from nan_detector._causes import CAUSES, FAMILIES, as_markdown, cause, explain

ROOT = Path(__file__).parent.parent
RULES = ROOT / "src" / "nan_detector" / "_diagnosis"

#: Released codes: other programs read them. A code may be added here, never taken away or renamed.
CONTRACT = [
    "log_of_zero",
    "log_of_negative",
    "sqrt_of_negative",
    "pow_of_negative",
    "pow_of_zero",
    "outside_domain",
    "boundary_of_domain",
    "division_by_zero",
    "determinant_not_positive",
    "singular_matrix",
    "reduction_of_empty",
    "std_of_one",
    "zero_times_inf",
    "inf_minus_inf",
    "exp_overflow",
    "half_overflow",
    "overflow",
    "half_gradient_overflow",
    "underflow_to_zero",
    "eps_underflow",
    "softmax_fully_masked",
    "logsumexp_fully_masked",
    "mask_value_overflow",
    "masked_logit_in_loss",
    "ctc_no_alignment",
    "sqrt_gradient_at_zero",
    "pow_gradient_at_zero",
    "gradient_at_domain_boundary",
    "unselected_branch",
    "degenerate_decomposition",
    "custom_backward",
    "learning_rate_non_finite",
    "learning_rate_too_high",
    "gradient_explosion",
    "gradients_accumulated",
    "clip_norm_overflow",
    "clip_spreads_nan",
    "loss_scale_zero",
    "optimizer_state_non_finite",
    "optimizer_state_overflow",
    "hyperparameter_non_finite",
    "parameter_non_finite",
    "uninitialised_memory",
    "buffer_non_finite",
    "ema_non_finite",
    "input_non_finite",
    "label_non_finite",
    "gradient_from_outside",
    "literal_nan",
    "opaque_kernel",
    "compiler",
    "not_reproducible",
    "unknown",
]


def codes_in_rules() -> set[str]:
    """The first argument of every `cause(...)` in the rules; a code that is not a literal is an error here."""
    found = set()
    for path in sorted(RULES.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cause":
                first = node.args[0]
                assert isinstance(first, ast.Constant), f"{path.name}:{node.lineno}: the code must be a literal"
                found.add(first.value)
    return found


def test_the_list_is_the_contract():
    assert set(CAUSES) == set(CONTRACT)


def test_codes_are_distinct():
    entries = [info.code for _, infos in FAMILIES for info in infos]
    assert len(entries) == len(set(entries))


def test_every_code_is_used_by_a_rule_and_no_rule_uses_another():
    assert codes_in_rules() == set(CAUSES)


@pytest.mark.parametrize("info", CAUSES.values(), ids=CAUSES)
def test_an_entry_says_everything(info: _causes.CauseInfo):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", info.code)
    assert info.title and not info.title.endswith(".") and len(info.title) <= 80
    assert info.explanation.endswith(".") and len(info.explanation) <= 130
    assert info.fix.strip()
    assert len(re.findall(r"\.(?=\s|$)", info.docs)) >= 3, "three sentences"
    assert info.docs.endswith(".")


def test_the_documentation_is_the_list():
    page = ROOT / "docs" / "causes.md"
    assert page.read_text(encoding="utf-8") == page_text(), (
        "docs/causes.md is not what the list and the programs say: run `make docs`"
    )


@pytest.mark.parametrize("code", CONTRACT)
def test_the_documentation_has_a_heading_for(code: str):
    assert f"\n### `{code}`\n" in as_markdown()


def test_explain_gives_the_entry():
    assert explain("log_of_zero").title == "logarithm of zero"


def test_explain_names_the_value_and_the_way_out():
    with pytest.raises(ValueError, match=r"code='log_zero' is not a cause\. Known causes: log_of_zero, .*unknown\."):
        explain("log_zero")


def test_the_list_cannot_be_changed():
    with pytest.raises(TypeError):
        CAUSES["mine"] = CAUSES["unknown"]


def test_cause_takes_texts_from_the_list_and_evidence_from_the_rule():
    made = cause("log_of_zero", "22 of 32 inputs are exactly 0.", "")
    assert (made.title, made.explanation) == (CAUSES["log_of_zero"].title, CAUSES["log_of_zero"].explanation)
    assert made.evidence == ("22 of 32 inputs are exactly 0.",)
    assert made.fix == CAUSES["log_of_zero"].fix


def test_a_closer_fix_replaces_the_general_one():
    assert cause("log_of_zero", fix="torch.logit(x, eps=1e-6)").fix == "torch.logit(x, eps=1e-6)"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("the argument is 90.", "The argument is 90."),
        ("a count is 0.", "A count is 0."),
        ("err.mean got nothing.", "err.mean got nothing."),
    ],
)
def test_a_sentence_begins_with_a_capital_unless_it_names_something(said: str, shown: str):
    assert cause("unknown", said).evidence == (shown,)


def test_cause_refuses_other_codes():
    with pytest.raises(ValueError, match="code='made_up' is not a cause"):
        cause("made_up")
