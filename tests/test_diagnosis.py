"""The diagnosis as a whole: pure, total, ordered, and complete."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import test_diagnosis_backward
import test_diagnosis_domain
import test_diagnosis_loop
import test_diagnosis_masks
import test_diagnosis_range
import test_diagnosis_state
from _births import born, traced
from nan_detector._causes import CAUSES
from nan_detector._diagnosis import diagnose
from nan_detector._diagnosis.numbers import against, number, share, short, whole
from nan_detector._records import Location, TensorStats
from nan_detector._trace import Birth, BirthKind, GuiltyInput, Trace

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")

FAMILIES = (
    test_diagnosis_domain,
    test_diagnosis_range,
    test_diagnosis_masks,
    test_diagnosis_backward,
    test_diagnosis_loop,
    test_diagnosis_state,
)
EVERY_BIRTH = [row[1] for family in FAMILIES for row in (*family.FIRES, *family.NEAR)]
#: Only a place is known: the near miss of every rule at once.
UNKNOWN = {"unknown"}


def strange() -> Trace:
    x = torch.tensor([0.5, 1.0])
    return traced(born("fused_thing", [x], torch.tensor([torch.nan, 1.0]), call="my.fused_thing"))


def test_every_code_fires_somewhere():
    fired = {row[0] for family in FAMILIES for row in family.FIRES}
    assert fired | UNKNOWN == set(CAUSES)


def test_every_code_has_a_near_miss():
    assert {row[0] for family in FAMILIES for row in family.NEAR} | UNKNOWN == set(CAUSES)


def test_no_birth_no_cause():
    assert diagnose(Trace()) == (None, ())


def test_what_no_rule_explains_is_unknown_with_its_numbers():
    best, others = diagnose(strange())
    assert best is not None and best.code == "unknown" and others == ()
    assert best.evidence == ("my.fused_thing made 1 of 2 results non-finite from inputs in 0.500 ... 0.500.",)


def test_what_is_unknown_but_was_dropped_is_known_for_that():
    best, _ = diagnose(dataclasses.replace(strange(), reached=("gradient",)))
    assert best is not None and best.code == "unselected_branch"


@pytest.mark.parametrize("build", EVERY_BIRTH)
def test_a_diagnosis_survives_the_log(build):
    """A trace read back from a log gives the same answer: nothing but its plain data is used."""
    trace = build()
    assert diagnose(Trace.from_dict(trace.to_dict())) == diagnose(trace)


@pytest.mark.parametrize("build", EVERY_BIRTH)
def test_an_answer_is_well_formed(build):
    best, others = diagnose(build())
    codes = [c.code for c in (best, *others) if c is not None]
    assert len(codes) == len(set(codes)) <= 3
    for c in (best, *others):
        assert c is not None and c.title == CAUSES[c.code].title
        for sentence in c.evidence:
            assert sentence.endswith(".") and "None" not in sentence and "  " not in sentence, sentence


@pytest.mark.parametrize("build", EVERY_BIRTH)
def test_a_birth_without_statistics_is_still_answered(build):
    """After `replay="off"`, or for a birth beyond the described ones, only the place is known."""
    birth = build().birth
    assert birth is not None
    bare = dataclasses.replace(
        birth, inputs=(), output=None, guilty_count=0, forward_inputs=(), args=(), location=None, call=None
    )
    best, _ = diagnose(traced(bare))
    assert best is not None and best.code in CAUSES


# -- any birth at all --------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(min_value=0, max_value=5)
tensor_stats = st.builds(
    TensorStats,
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(
        [
            "torch.float16",
            "torch.bfloat16",
            "torch.float32",
            "torch.float64",
            "torch.int64",
            "torch.complex64",
            "torch.float8_e4m3fn",
        ]
    ),
    device=st.just("cpu"),
    min=st.none() | finite,
    max=st.none() | finite,
    mean=st.none() | finite,
    min_nonzero=st.none() | st.floats(min_value=1e-45, max_value=1e308),
    nan_count=counts,
    posinf_count=counts,
    neginf_count=counts,
    zero_count=counts,
    negative_count=counts,
)
operations = st.sampled_from(
    [
        "log",
        "log1p",
        "logit",
        "xlogy",
        "sqrt",
        "rsqrt",
        "pow",
        "acos",
        "atanh",
        "acosh",
        "erfinv",
        "lgamma",
        "div",
        "reciprocal",
        "addcdiv",
        "exp",
        "exp2",
        "cosh",
        "mm",
        "addmm",
        "bmm",
        "mul",
        "add",
        "sub",
        "sum",
        "mean",
        "std",
        "var",
        "softmax",
        "logsumexp",
        "nll_loss_forward",
        "ctc_loss",
        "to_copy",
        "linalg_svd",
        "logdet",
        "where",
        "clip_grad_norm",
        "foreach_norm",
        "addcmul",
        "empty",
        "weight_norm_interface",
        "scaled_dot_product_attention",
        "native_batch_norm",
        "cos",
        "lr",
        "loss_scale",
        "prod",
    ]
)
arguments = st.sampled_from(
    [
        "dim=-1",
        "exponent=0.5",
        "exponent=-2",
        "other=0",
        "self=2.0",
        "eps=1e-12",
        "correction=1",
        "value=nan",
        "1=x",
        "odd",
    ]
)
births = st.builds(
    Birth,
    number=st.just(1),
    kind=st.sampled_from([k.value for k in BirthKind]),
    op=operations,
    aten=operations.map(lambda op: f"aten.{op}.default"),
    phase=st.sampled_from(["data", "forward", "loss", "backward", "optimizer", "state"]),
    call=st.none() | st.sampled_from(["torch.log", "x / n", "F.normalize", "optimizer.step"]),
    location=st.none()
    | st.builds(
        Location,
        st.just("a.py"),
        st.just(1),
        st.sampled_from(["Net.forward", "F.backward", "train"]),
        st.sampled_from(["x / (s + 1e-8)", "1 / scale", ""]),
    ),
    tensor_name=st.none() | st.sampled_from(["w", "ema.w", "exp_avg_sq", "param_groups[0]['lr']"]),
    inputs=st.lists(
        st.builds(GuiltyInput, position=st.integers(0, 3), whole=tensor_stats, at_guilty=st.none() | tensor_stats),
        max_size=3,
    ).map(tuple),
    output=st.none() | tensor_stats,
    guilty_count=counts,
    args=st.lists(arguments, max_size=3).map(tuple),
    derivative_of=st.none() | operations,
    forward_inputs=st.lists(tensor_stats, max_size=2).map(tuple),
    in_library=st.booleans(),
    note=st.sampled_from(["", "custom_function", "uninitialised memory", "gradients_accumulated", "the number inf"]),
)
histories = st.lists(st.floats(), max_size=12).map(tuple)


@settings(max_examples=600)
@given(births, st.sampled_from([("gradient",), ("loss",), ("loss", "gradient"), ()]), histories, histories, histories)
def test_any_birth_gets_an_answer(birth: Birth, reached: tuple[str, ...], losses, norms, rates):
    trace = Trace(birth=birth, reached=reached, losses=losses, grad_norms=norms, learning_rates=rates)
    best, others = diagnose(trace)
    assert best is not None and best.code in CAUSES
    assert best.code not in [c.code for c in others] and len(others) <= 2
    assert (best, others) == diagnose(trace)


# -- how numbers are written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-10.0, "-10.0"),
        (0.0, "0"),
        (0.25, "0.250"),
        (1234.6, "1235"),
        (99.96, "100"),
        (5000.0, "5000"),
        (12345.0, "1.23e+04"),
        (1e-12, "1.00e-12"),
        (0.00099999, "0.00100"),
        (3.4028235e38, "3.40e+38"),
        (-65504.0, "-6.55e+04"),
        (torch.inf, "inf"),
        (-torch.inf, "-inf"),
        (torch.nan, "nan"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str):
    assert number(value) == text


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_a_written_number_is_the_number_to_three_digits(value: float):
    assert float(number(value)) == pytest.approx(value, rel=5e-3)
    assert len(number(value)) <= len("-1.23e-100")


@pytest.mark.parametrize(("value", "text"), [(0.2, "0.2"), (3e-4, "0.0003"), (1e-5, "1e-05"), (torch.nan, "nan")])
def test_what_a_person_typed_is_written_as_typed(value: float, text: str):
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(65504.0, "65504"), (65520.5, "6.55e+04"), (3.9e6, "3.90e+06"), (torch.inf, "inf")]
)
def test_moderate_whole_numbers_keep_their_digits(value: float, text: str):
    assert whole(value) == text


@pytest.mark.parametrize(
    ("value", "edge", "text"),
    [
        (1 + 2.0**-23, 1.0, "1 + 1.19e-07"),
        (1 - 2.0**-24, 1.0, "1 - 5.96e-08"),
        (1.0, 1.0, "1"),
        (1.5, 1.0, "1.50"),
        (-0.5, 0.0, "-0.500"),
    ],
)
def test_a_value_next_to_an_edge_shows_its_side(value: float, edge: float, text: str):
    assert against(value, edge) == text


@pytest.mark.parametrize(
    ("part", "total", "text"),
    [
        (22, 64, "22 of 64 inputs are"),
        (1, 64, "1 of 64 inputs is"),
        (1, 1, "the input is"),
        (64, 64, "64 of 64 inputs are"),
    ],
)
def test_a_share_agrees_with_its_verb(part: int, total: int, text: str):
    assert share(part, total, "inputs") == text
