"""What was bad before any operation of the step."""

from __future__ import annotations

import pytest
import torch

from _births import born, came, traced
from nan_detector._diagnosis import diagnose
from nan_detector._trace import Birth, Trace

INF, NAN = torch.inf, torch.nan


def source(kind: str, name: str, *values: float, dtype: torch.dtype = torch.float32, **fields: object) -> Trace:
    return traced(came(kind, torch.tensor(values, dtype=dtype), name, **fields))


def empty(note: str = "uninitialised memory") -> Trace:
    return traced(
        Birth(number=1, kind="operation", op="empty_like", aten="aten.empty_like.default", phase="forward", note=note)
    )


def literal(**fields: object) -> Trace:
    given = {
        "kind": "constant",
        "op": "full",
        "aten": "aten.full.default",
        "phase": "forward",
        "args": ("fill_value=nan",),
    }
    return traced(Birth(number=1, **{**given, **fields}))


def noted(note: str) -> Trace:
    x = torch.tensor([0.0, 1.0])
    return traced(born("log", [x], x.log(), note=note))


FIRES = [
    (
        "parameter_non_finite",
        lambda: source("parameter", "head.bias", NAN, -INF, 0.0, 1.0, first_bad_index=(0,)),
        "head.bias: of 4 values (float32) 1 NaN and 1 -inf, first at [0].",
    ),
    (
        "uninitialised_memory",
        lambda: source("parameter", "head.weight", NAN, 3e35, 1e-40),
        "head.weight: of 3 values (float32) 1 NaN. The others reach 3.00e+35 in magnitude, which no training makes.",
    ),
    ("uninitialised_memory", empty, None),
    ("uninitialised_memory", lambda: empty(""), None),
    (
        "buffer_non_finite",
        lambda: source("buffer", "bn.running_var", INF, 1.0),
        "bn.running_var: of 2 values (float32) 1 +inf.",
    ),
    ("ema_non_finite", lambda: source("buffer", "ema.bn.running_var", INF, 1.0), None),
    ("ema_non_finite", lambda: source("parameter", "ema_model.head.weight", NAN), None),
    ("ema_non_finite", lambda: source("parameter", "module.fc.weight", NAN, module_type="AveragedModel"), None),
    (
        "input_non_finite",
        lambda: source("input", 'x["pixels"]', NAN, 1.0, phase="data", sample_index=(3, 7)),
        'x["pixels"]: of 2 values (float32) 1 NaN.',
    ),
    (
        "label_non_finite",
        lambda: source("label", "y", -INF, NAN, phase="data"),
        "y: of 2 values (float32) 1 NaN and 1 -inf.",
    ),
    (
        "opaque_kernel",
        lambda: source("opaque", "out", NAN, phase="forward", call="my_ext.fused_norm"),
        "my_ext.fused_norm made or first used the tensor; no operation that PyTorch saw wrote its values.",
    ),
    ("literal_nan", literal, None),
    (
        "literal_nan",
        lambda: literal(op="add", args=(), note="the number inf", call="x + float('inf')"),
        "It stands in x + float('inf') (the number inf).",
    ),
    ("literal_nan", lambda: literal(op="fill_", in_library=True, args=("value=nan",)), None),
    ("gradient_from_outside", lambda: source("gradient", "loss", NAN, phase="backward"), None),
    ("half_gradient_overflow", lambda: source("gradient", "loss", INF, dtype=torch.float16, phase="backward"), None),
    ("compiler", lambda: noted("compiled_only"), "The step went non-finite at torch.log in net.head."),
    ("not_reproducible", lambda: noted("not_reproduced"), None),
]

NEAR = [
    ("opaque_kernel", lambda: source("input", "x", NAN), "input_non_finite"),
    ("parameter_non_finite", lambda: source("buffer", "b", NAN), "buffer_non_finite"),
    ("uninitialised_memory", lambda: source("parameter", "head.weight", NAN, 0.3), "parameter_non_finite"),
    ("uninitialised_memory", lambda: source("parameter", "head.weight", INF, 3e35), "parameter_non_finite"),
    (
        "uninitialised_memory",
        lambda: source("buffer", "table", NAN, 0.3, note="first used at uninitialised.py:3"),
        "buffer_non_finite",
    ),
    ("ema_non_finite", lambda: source("parameter", "stemma.weight", NAN), "parameter_non_finite"),
    ("ema_non_finite", lambda: source("buffer", "schema.table", NAN), "buffer_non_finite"),
    ("input_non_finite", lambda: source("label", "y", NAN), "label_non_finite"),
    ("label_non_finite", lambda: source("input", "x", NAN), "input_non_finite"),
    ("buffer_non_finite", lambda: source("parameter", "w", NAN), "parameter_non_finite"),
    ("literal_nan", lambda: literal(op="logdet", in_library=True), "determinant_not_positive"),
    ("literal_nan", lambda: literal(op="some_library_function", in_library=True), "unknown"),
    ("gradient_from_outside", lambda: source("gradient", "loss", INF, dtype=torch.float16), "half_gradient_overflow"),
    ("compiler", lambda: noted(""), "log_of_zero"),
    ("not_reproducible", lambda: noted("first used at not_reproduced.py:1"), "log_of_zero"),
]


def ids(table: list[tuple]) -> list[str]:
    return [f"{row[0]}-{i}" for i, row in enumerate(table)]


@pytest.mark.parametrize(("code", "build", "evidence"), FIRES, ids=ids(FIRES))
def test_the_cause_is_named(code: str, build, evidence: str | None):
    best, _ = diagnose(build())
    assert best is not None and best.code == code
    assert best.evidence and best.fix
    if evidence is not None:
        assert evidence in best.evidence


@pytest.mark.parametrize(("code", "build", "instead"), NEAR, ids=ids(NEAR))
def test_a_near_miss_is_something_else(code: str, build, instead: str):
    best, others = diagnose(build())
    assert best is not None and best.code == instead
    assert code not in [c.code for c in others]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "input", "label", "opaque", "gradient"])
def test_the_operation_that_met_a_source_is_not_judged(kind: str):
    # The first operation to read the bad values is named in `op`; it did nothing wrong.
    best, others = diagnose(source(kind, "t", 0.0, NAN, op="log", aten="aten.log.default"))
    assert best is not None and best.code.split("_")[0] == kind and others == ()


def test_one_bad_column_is_a_constant_feature():
    best, _ = diagnose(source("input", "x", NAN, NAN, 1.0, first_bad_index=(0, 7), bad_column=7))
    assert best is not None
    assert best.evidence == ("x: of 3 values (float32) 2 NaN, first at [0, 7], all in column 7.",)


@pytest.mark.parametrize(("values", "said"), [((-INF, 1.0), True), ((-INF, NAN), False), ((INF, 1.0), False)])
def test_minus_infinity_alone_is_the_logarithm_of_zero(values: tuple[float, float], said: bool):
    best, _ = diagnose(source("parameter", "head.bias", *values))
    assert best is not None and ("-inf is what log(0) gives" in best.evidence[0]) is said


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [("bn.running_var", "BatchNorm2d", "reset_running_stats"), ("vq.codes", "VQ", 'watch="ops"')],
)
def test_only_running_statistics_are_reset_as_such(name: str, module: str, said: str):
    best, _ = diagnose(source("buffer", name, NAN, 1.0, module_type=module))
    assert best is not None and best.code == "buffer_non_finite"
    assert said in (best.fix or "")
