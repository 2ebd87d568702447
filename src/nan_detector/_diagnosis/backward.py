"""Derivatives that are infinite where the function is not, and forward values that come back."""

from __future__ import annotations

from nan_detector._causes import cause
from nan_detector._diagnosis import matrices
from nan_detector._diagnosis.division import zero_denominator
from nan_detector._diagnosis.dtypes import plain, safe_eps
from nan_detector._diagnosis.facts import (
    Rule,
    base_op,
    by_operation,
    has_inf,
    is_custom,
    is_derivative,
    made_nan,
    only_gradients,
    op_of,
    operand,
    operands,
)
from nan_detector._diagnosis.numbers import number, share
from nan_detector._diagnosis.reach import argument_limit, exp_overflows, power
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import Birth, BirthKind, Trace

#: Square roots under another name.
_ROOTS = (
    "sqrt",
    "norm",
    "cdist",
    "dist",
    "pairwise_distance",
    "hypot",
    "std",
    "std_mean",
    "var",
    "var_mean",
    "abs",
    "weight_norm_interface",
)
#: Finite at the edge (or infinite there), with an infinite slope.
_EDGES: dict[str, tuple[float, ...]] = {
    "acos": (-1.0, 1.0), "asin": (-1.0, 1.0), "acosh": (1.0,), "atanh": (-1.0, 1.0), "erfinv": (-1.0, 1.0),
    "logit": (0.0, 1.0), "ndtri": (0.0, 1.0),
}  # fmt: skip
_EDGE_FIX = {
    "acos": "torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6)), or torch.atan2(sin, cos)",
    "asin": "torch.asin(x.clamp(-1 + 1e-6, 1 - 1e-6)), or torch.atan2(sin, cos)",
    "acosh": "torch.acosh(x.clamp_min(1 + 1e-6))",
    "logit": "torch.logit(x, eps=1e-6)",
}
#: Infinite forward at 0: (where the argument stands among the forward's inputs).
_FORWARD_POLES = {"div": -1, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0, "log10": 0, "xlogy": -1, "addcdiv": -1}
_EXPS = ("exp", "expm1", "exp2", "sinh", "cosh")


def pole(birth: Birth) -> bool | None:
    """Whether the derivative divides by 0 (or raises 0 to a negative power); None where that cannot be seen."""
    op = op_of(birth)
    if op in ("div", "reciprocal", "rsqrt", "addcdiv"):
        return zero_denominator(birth) if birth.inputs else None
    if op == "pow":
        base, _, exponent = power(birth)
        if base is None:
            return None
        return base.zero_count > 0 and (not isinstance(exponent, float) or exponent < 0)
    return None


def custom_backward(birth: Birth, trace: Trace) -> Cause | None:
    """The value was made in the backward method of a user's autograd.Function."""
    if not by_operation(birth) or not is_custom(birth):
        return None
    name = f"{birth.derivative_of}.backward" if birth.derivative_of else "the backward of a custom Function"
    values = [
        number(s.min) if s.min == s.max else f"{number(s.min)} ... {number(s.max)}"
        for s in operands(birth)
        if s.min is not None and s.max is not None
    ]
    non_finite = (
        "a non-finite value" if birth.guilty_count == 1 else f"{birth.guilty_count or 'some'} non-finite values"
    )
    inputs = f", where its inputs are {' and '.join(values[:2])}" if values else ""
    return cause("custom_backward", f"{birth.op} in {name} made {non_finite}{inputs}.")


def sqrt_gradient_at_zero(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of a root, norm, distance or deviation at 0."""
    made_by = base_op(birth.derivative_of)
    if not is_derivative(birth) or made_by not in _ROOTS or not _at(birth, made_by, (0.0,)):
        return None
    said = _forward_zeros(birth, birth.derivative_of or made_by)
    return cause("sqrt_gradient_at_zero", said, _upstream(birth), fix=_root_fix(birth, made_by))


def sqrt_tangent_at_zero(birth: Birth, trace: Trace) -> Cause | None:
    """The same in forward mode (`torch.func.jvp`): a division runs within a call of sqrt, which has none of its own."""
    called = base_op((birth.call or "").rpartition(".")[2])
    if called != "sqrt" or op_of(birth) != "div" or not by_operation(birth) or not zero_denominator(birth):
        return None
    below = operand(birth, 1)
    zeros = f"{share(below.zero_count, below.numel, 'roots')} exactly 0" if below is not None else "some roots are 0"
    said = f"{zeros}, and its derivative, which is worked out along with the forward, divides by twice the root."
    return cause("sqrt_gradient_at_zero", said, fix=_root_fix(birth, "sqrt"))


def pow_gradient_at_zero(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of x ** p at 0 for p between 0 and 1."""
    if not is_derivative(birth) or base_op(birth.derivative_of) != "pow":
        return None
    exponent = _forward_exponent(birth)
    if exponent is not None and not 0 < exponent < 1:
        return None
    if not _at(birth, "pow", (0.0,)):
        return None
    p = f"{exponent:g}" if exponent is not None else "p"
    said = _forward_zeros(birth, f"x ** {p}")
    return cause("pow_gradient_at_zero", said, _upstream(birth), fix=f"x.clamp_min({safe_eps(_dtype(birth))}).pow({p})")


def _forward_exponent(birth: Birth) -> float | None:
    """The p of x ** p, from the x ** (p - 1) that its derivative takes."""
    if op_of(birth) != "pow":
        return None
    exponent = power(birth)[2]
    return round(exponent + 1.0, 9) if isinstance(exponent, float) else None


def gradient_at_domain_boundary(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of acos and its like at an edge; of any other function, a derivative that divides by 0."""
    made_by = base_op(birth.derivative_of)
    if not is_derivative(birth):
        return None
    if made_by in _EDGES:
        if not _at(birth, made_by, _EDGES[made_by]):
            return None
        inputs = birth.forward_inputs[0] if birth.forward_inputs else None
        edges = [e for e in _EDGES[made_by] if inputs is not None and e in (inputs.min, inputs.max)]
        where = f"exactly {' or '.join(f'{e:g}' for e in edges)}" if edges else "at an edge of its domain"
        count = (
            f"{birth.guilty_count} inputs of {made_by} are" if birth.guilty_count > 1 else f"an input of {made_by} is"
        )
        fix = _EDGE_FIX.get(
            made_by, f"torch.{made_by}(x.clamp({_EDGES[made_by][0]:g} + 1e-6, {_EDGES[made_by][-1]:g} - 1e-6))"
        )
        return cause("gradient_at_domain_boundary", f"{count} {where}.", _upstream(birth), fix=fix)
    known = (*_ROOTS, *_FORWARD_POLES, *matrices.EXPLAINED, *_EXPS, "pow")
    if made_by in known or not pole(birth):
        return None
    return cause(
        "gradient_at_domain_boundary",
        f"The derivative of {made_by} divides by 0 at {birth.guilty_count or 'some'} elements.",
        fix=f"keep the input of {made_by} away from where its slope is infinite",
    )


def exp_came_back(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of an exponential that had overflowed in the forward."""
    made_by = base_op(birth.derivative_of)
    if not is_derivative(birth) or made_by not in _EXPS or not birth.forward_inputs:
        return None
    inputs = birth.forward_inputs[0]
    if inputs.max is None or not exp_overflows(made_by, inputs.max, inputs.dtype):
        return None
    limit = argument_limit(made_by, inputs.dtype)
    return cause(
        "exp_overflow",
        f"{made_by} overflows above {limit:.4g} in {plain(inputs.dtype)}, and its input reached {number(inputs.max)}.",
        "Nobody saw the inf in the forward; the backward multiplies a gradient with it.",
        fix=f"x.clamp(max={int(limit) - 1}).{made_by}(), or the stable form (sigmoid, softplus, log_softmax)",
    )


def unselected_derivative(birth: Birth, trace: Trace) -> Cause | None:
    """A derivative whose forward value was itself non-finite: it had been dropped, and comes back."""
    made_by = base_op(birth.derivative_of)
    if not is_derivative(birth):
        return None
    infinite = any(has_inf(s) for s in (*operands(birth), *birth.forward_inputs))
    met = op_of(birth) == "mul" and made_nan(birth) and (infinite or birth.kind == BirthKind.INTENDED_MET.value)
    said = ""
    if made_by in _FORWARD_POLES and birth.forward_inputs:
        argument = birth.forward_inputs[_FORWARD_POLES[made_by]]
        if argument.zero_count and pole(birth) is not False:
            noun = "denominators" if made_by == "div" else "inputs"
            said = (
                f"In the forward {share(argument.zero_count, argument.numel, noun)} exactly 0, so {made_by} was "
                "non-finite there."
            )
    elif made_by == "pow" and pole(birth) and (_forward_exponent(birth) or 0) < 0:
        said = f"In the forward x ** {_forward_exponent(birth):g} was infinite at 0."
    elif met or (made_by in _EXPS and exp_came_back(birth, trace) is not None):
        said = f"{birth.derivative_of} had an infinite value in the forward."
    return cause("unselected_branch", said, _upstream(birth), fix=_double_where(made_by)) if said else None


def unselected_branch(birth: Birth, trace: Trace) -> Cause | None:
    """A forward value that left the loss finite and reached nothing but gradients."""
    if not only_gradients(trace) or not by_operation(birth):
        return None
    what = "its result was non-finite"
    if birth.output is not None and birth.output.bad_count:
        what = f"{share(birth.output.bad_count, birth.output.numel, 'results', 'was were')} non-finite"
    return cause(
        "unselected_branch",
        f"In the forward {what} and the loss was not: something behind {birth.call or birth.op} dropped them.",
        "In the backward they get a gradient of 0, and 0 · inf = NaN.",
        fix=_double_where(base_op(birth.op)),
    )


def _double_where(op: str) -> str:
    if op in ("div", "reciprocal", "rsqrt", "fmod", "remainder"):
        return "ok = n != 0; y = torch.where(ok, x / torch.where(ok, n, 1.0), 0.0)"
    if op in ("log", "log2", "log10", "sqrt"):
        return f"ok = x > 0; y = torch.where(ok, torch.{op}(torch.where(ok, x, 1.0)), 0.0)"
    if op == "pow":
        return "ok = x > 0; y = torch.where(ok, torch.where(ok, x, 1.0).pow(p), 0.0)"
    if op in _EXPS:
        return "clamp the argument before the exponential, not the result after it"
    if op in ("mul",):
        return "logp = torch.where(mask, logp, 0.0) before the product, then p * logp"
    return "y = f(torch.where(ok, x, 1.0)) with an input that is safe, then torch.where(ok, y, 0.0)"


def _at(birth: Birth, made_by: str, edges: tuple[float, ...]) -> bool:
    """Is the derivative taken at one of `edges`? By the operation that divides there, else by the forward's inputs."""
    seen = pole(birth)
    if seen is not None:
        return seen
    if not birth.forward_inputs:
        return True
    return any(_holds(s, e, made_by) for s in birth.forward_inputs for e in edges)


def _holds(stats: TensorStats, edge: float, made_by: str) -> bool:
    if edge == 0:
        flat = made_by in ("std", "std_mean", "var", "var_mean") and stats.min == stats.max
        return stats.zero_count > 0 or flat or made_by == "cdist"
    return edge in (stats.min, stats.max)


def _forward_zeros(birth: Birth, name: str) -> str:
    """A sentence, "1 of 10 inputs of sqrt is exactly 0", in the wording that the numbers allow."""
    inputs = birth.forward_inputs[0] if birth.forward_inputs else None
    if inputs is not None and inputs.zero_count:
        return f"{share(inputs.zero_count, inputs.numel, f'inputs of {name}')} exactly 0."
    return f"{name} is exactly 0 at {birth.guilty_count or 'some'} elements."


def _upstream(birth: Birth) -> str:
    """What the infinite slope met: a gradient of 0 makes NaN, any other an infinity."""
    if birth.output is None:
        return ""
    gradient = operand(birth, 0) if len(birth.inputs) > 1 else None
    if birth.output.nan_count and gradient is not None and gradient.zero_count:
        return "The gradient that arrives there is 0: 0 · inf = NaN."
    return ""


def _root_fix(birth: Birth, made_by: str) -> str:
    eps = safe_eps(_dtype(birth))
    if made_by == "sqrt":
        return f"(x + {eps}).sqrt(): the eps inside the root; or torch.linalg.vector_norm when it is a norm"
    if made_by in ("std", "std_mean", "var", "var_mean"):
        return f"(x.var(...) + {eps}).sqrt()"
    return f"((a - b).pow(2).sum(-1) + {eps}).sqrt()"


def _dtype(birth: Birth) -> str:
    return birth.forward_inputs[0].dtype if birth.forward_inputs else ""


#: In order of specificity.
RULES: tuple[Rule, ...] = (
    custom_backward,
    exp_came_back,
    sqrt_gradient_at_zero,
    sqrt_tangent_at_zero,
    pow_gradient_at_zero,
    *matrices.BACKWARD,
    unselected_derivative,
    gradient_at_domain_boundary,
)
