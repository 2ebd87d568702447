"""A cancelled step never happened: parameters, state and gradients are those of a run without it, bit for bit."""

from __future__ import annotations

import copy
import gc
import math
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nan_detector._skip import cancelled, closure_of, is_stand_in, judged, stand_in, was_cancelled

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Snapshot = dict[str, Any]

# torch wraps a class's `step` when its first instance is made, for good: not something that a test leaves behind.
torch.optim.LBFGS([torch.zeros(1)])


# ------------------------------------------------------------------------------------------------------- apparatus


@contextmanager
def pre_hook(hook: Callable[..., Any]) -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def cancelling(when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Every step is cancelled while `when()`, as the detector's gate does it."""

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if is_stand_in(optimizer) or not when() else cancelled(optimizer, args, kwargs)

    with pre_hook(hook):
        yield


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3, 2), (5, 5))]


def set_gradients(params: list[torch.nn.Parameter], batch: int, bad: bool = False, sparse: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + batch)
    for p in params:
        grad = torch.randn(p.shape, generator=generator)
        if bad:
            grad.view(-1)[0] = math.nan
        p.grad = grad.to_sparse(1) if sparse else grad


def everything(optimizer: torch.optim.Optimizer) -> Snapshot:
    """All that a step could change: parameters, gradients, state, groups, the optimizer's other attributes."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    hidden = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "step", "_opt_called")}
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in params],
            "gradients": [p.grad for p in params],
            "state": optimizer.state_dict(),
            "attributes": {k: v for k, v in hidden.items() if not k.startswith("_optimizer_") and not callable(v)},
        }
    )


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit, NaN included."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), where
        dense_a, dense_b = (t.to_dense() if t.is_sparse else t for t in (a, b))
        assert dense_a.detach().numpy().tobytes() == dense_b.detach().numpy().tobytes(), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, float):
        assert a == b or (a != a and b != b), where
    elif isinstance(a, (int, str, bool, type(None))):
        assert a == b, where


def train(make: Make, batches: list[int], bad: int | None = None, sparse: bool = False) -> torch.optim.Optimizer:
    """One step a batch; the step of batch `bad`, whose gradients hold NaN, is cancelled."""
    params = parameters()
    optimizer = make(params)
    now = -1
    with cancelling(lambda: now == bad):
        for now in batches:
            set_gradients(params, now, bad=now == bad, sparse=sparse)
            before = everything(optimizer) if now == bad else None
            optimizer.step()
            if before is not None:
                assert_same(before, everything(optimizer))
    return optimizer


def assert_never_happened(make: Make, sparse: bool = False) -> None:
    for bad in (0, 2):  # before the state exists, and after
        batches = [0, 1, 2, 3, 4]
        with_it = train(make, batches, bad=bad, sparse=sparse)
        without = train(make, [b for b in batches if b != bad], sparse=sparse)
        assert_same(everything(without), everything(with_it))
        assert all(torch.isfinite(p).all() for group in with_it.param_groups for p in group["params"])


# ------------------------------------------------------------------------------------------------ torch's optimizers

_FORMS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adamax": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "ASGD": [{"t0": 2}],
    "Adadelta": [{}],
    "Rprop": [{}],
    "Adafactor": [{}],
    "Muon": [{}],
}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_NOT_FOREACH = ("Muon",)


def _cases() -> list[Any]:
    cases = []
    for name, forms in _FORMS.items():
        for form in forms:
            kernels: list[dict[str, Any]] = [{}]
            if name not in _NOT_FOREACH:
                kernels += [{"foreach": False}, {"foreach": True}]
            kernels += [{"fused": True}] if name in _FUSED else []
            for kernel in kernels:
                options = {**form, **kernel}
                said = ",".join(f"{k}={v}" for k, v in options.items())
                cases.append(pytest.param(name, options, id=f"{name}({said})"))
    return cases


@pytest.mark.parametrize(("name", "options"), _cases())
def test_every_torch_optimizer(name: str, options: dict[str, Any]) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    assert_never_happened(lambda params: getattr(torch.optim, name)(params, lr=0.01, **options))


def test_the_table_of_torchs_optimizers_is_complete() -> None:
    known = {*_FORMS, "SparseAdam", "LBFGS", "Optimizer"}
    here = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert here <= known


def test_sparse_adam() -> None:
    assert_never_happened(lambda params: torch.optim.SparseAdam(params, lr=0.01), sparse=True)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_tensor_learning_rate(name: str) -> None:
    options: dict[str, Any] = {"foreach": False} if name != "Adagrad" else {}
    assert_never_happened(lambda params: getattr(torch.optim, name)(params, lr=torch.tensor(0.01), **options))


def test_several_groups_and_parameters_without_gradient() -> None:
    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        unused = torch.nn.Parameter(torch.ones(2))
        groups = [{"params": params[:1], "lr": 0.1}, {"params": [*params[1:], unused], "betas": (0.5, 0.9)}]
        return torch.optim.Adam(groups, lr=0.01)

    assert_never_happened(make)


def test_differentiable() -> None:
    params = [p.clone() for p in parameters()]  # not leaves: what `differentiable` is for
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, differentiable=True)
    for p in params:
        p.retain_grad()
    sum((p * p).sum() for p in params).backward()
    before = everything(optimizer)
    with cancelling():
        optimizer.step()
    assert_same(before, everything(optimizer))


def test_complex_and_half_parameters() -> None:
    p, q = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)), torch.nn.Parameter(torch.ones(3).half())
    p.grad, q.grad = torch.full_like(p, math.nan), torch.full_like(q, math.inf)
    optimizer = torch.optim.Adam([p, q])
    before = everything(optimizer)
    with cancelling():
        optimizer.step()
    assert_same(before, everything(optimizer))


def test_no_clones_for_torchs_own_nor_for_a_subclass_that_steps_like_them() -> None:
    class Named(torch.optim.Adam):
        def __init__(self, params: Any, name: str) -> None:
            super().__init__(params)
            self.name = name

    for optimizer in (torch.optim.Adam(parameters()), Named(parameters(), "x")):
        assert [g["params"] for g in stand_in(optimizer).param_groups] == [[]]


# ------------------------------------------------------------------------------------------------- users' optimizers


class Foreign(torch.optim.Optimizer):
    """Base of the optimizers below; `lr` is all their groups hold."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


class NoNoneCheck(Foreign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["steps"], state["mean"] = 0, torch.zeros_like(p)
                state["steps"] += 1
                state["mean"].mul_(0.9).add_(p.grad.mul_(2.0))  # writes to the gradient, too
                p -= group["lr"] * state["mean"]


class ReadsTheFirst(Foreign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        scale = torch.ones((), device=first.device, dtype=first.dtype)
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [p.grad * scale for p in group["params"]], alpha=-group["lr"])


Pair = namedtuple("Pair", ["fast", "slow"])


class BuffersByPosition(Foreign):
    """State in attributes of its own: a list, a tensor counter, a tuple, a numpy array."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.everyone = [p for g in self.param_groups for p in g["params"]]
        self.buffers = [torch.zeros_like(p) for p in self.everyone]
        self.count = torch.zeros(())
        self.pair = Pair(torch.zeros(1), torch.zeros(1))
        self.log = np.zeros(1)
        self.names: dict[str, list[int]] = {"steps": [0]}
        self.update = self._update  # a bound method: of the real one, if one is not careful

    def _update(self) -> None:
        self.count += 1
        self.names["steps"][0] += 1
        self.log += 1
        self.pair.fast.add_(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.update()
        for i, p in enumerate(self.everyone):
            self.buffers[i].mul_(0.9).add_(p.grad)
            p.data.add_(self.buffers[i], alpha=-0.1)


class NeedsFiniteGradients(Foreign):
    """A decomposition refuses NaN: the stand-in's gradients must be something it can live with."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.reshape(p.shape[0], -1)
                values, vectors = torch.linalg.eigh(grad @ grad.T + torch.eye(len(grad)))
                p.sub_(group["lr"] * (vectors @ torch.diag(values.rsqrt()) @ vectors.T @ grad).reshape(p.shape))


class CallsSuper(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        first.data.clamp_(-5, 5)
        return super().step(closure)


class HoldsSlots(Foreign):
    __slots__ = ("momenta",)

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.momenta = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a stand-in is not unpickled")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, m in zip(self.param_groups[0]["params"], self.momenta, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.sub_(m, alpha=self.param_groups[0]["lr"])


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, shares its groups, and steps it from its own step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


@pytest.mark.parametrize(
    "make",
    [
        NoNoneCheck,
        ReadsTheFirst,
        BuffersByPosition,
        NeedsFiniteGradients,
        CallsSuper,
        HoldsSlots,
        lambda params: Lookahead(torch.optim.Adam(params)),
        lambda params: Lookahead(Lookahead(BuffersByPosition(params))),
        lambda params: NoNoneCheck([{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]),
    ],
)
def test_users_optimizers(make: Make) -> None:
    assert_never_happened(make)


def test_attributes_of_a_users_optimizer_are_untouched() -> None:
    optimizer = BuffersByPosition(parameters())
    set_gradients(optimizer.everyone, 0, bad=True)
    with cancelling():
        optimizer.step()
    assert (optimizer.count.item(), optimizer.names, optimizer.log[0]) == (0.0, {"steps": [0]}, 0.0)
    assert optimizer.pair.fast.item() == 0.0
    assert all(not b.any() for b in optimizer.buffers)
    assert optimizer.everyone[0] is optimizer.param_groups[0]["params"][0]
    assert optimizer.update.__self__ is optimizer


def test_slots_are_isolated() -> None:
    params = parameters()
    optimizer = HoldsSlots(params)
    set_gradients(params, 0, bad=True)
    with cancelling():
        optimizer.step()
    assert all(not m.any() for m in optimizer.momenta)


def test_the_inner_optimizer_of_a_wrapper_is_not_stepped_even_when_only_the_outer_is_cancelled() -> None:
    params = parameters()
    inner = torch.optim.Adam(params)
    lr_scheduler.StepLR(inner, 1)  # puts a `step` on the instance that is tied to the real one
    outer = Lookahead(inner)
    set_gradients(params, 0)
    before = everything(inner)
    seen = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        seen.append((type(optimizer).__name__, is_stand_in(optimizer)))
        return cancelled(optimizer, args, kwargs) if optimizer is outer else None

    with pre_hook(hook):
        outer.step()
    assert seen == [("Lookahead", False), ("Adam", True)]
    assert_same(before, everything(inner))


def test_a_subclass_that_calls_super_fires_the_hooks_again_with_the_stand_in() -> None:
    params = parameters()
    torch.optim.Adam(params)  # Adam.step is hooked once an Adam exists
    optimizer = CallsSuper(params)
    set_gradients(params, 0, bad=True)
    seen = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        seen.append(is_stand_in(optimizer))
        return None if is_stand_in(optimizer) else cancelled(optimizer, args, kwargs)

    with pre_hook(hook):
        optimizer.step()
    assert seen == [False, True]


def test_a_module_in_an_attribute_is_isolated_with_the_stand_ins_own_parameters() -> None:
    class WalksTheModel(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module) -> None:
            self.model = model
            self.visits = {m: torch.zeros(1) for m in model.modules()}
            super().__init__(model.parameters(), {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            ours = [p for g in self.param_groups for p in g["params"]]
            for mine, p in zip(ours, self.model.parameters(), strict=True):
                assert mine is p
                p.grad.mul_(3.0)
                p.sub_(p.grad)
            for module in self.model.modules():
                self.visits[module] += 1

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = WalksTheModel(model)
    set_gradients(list(model.parameters()), 0, bad=True)
    before = copy.deepcopy([(p, p.grad) for p in model.parameters()])
    with cancelling():
        optimizer.step()
    assert_same(before, [(p, p.grad) for p in model.parameters()])
    assert optimizer.model is model
    assert not any(v.any() for v in optimizer.visits.values())


def test_python_attributes_of_parameters_reach_the_stand_in_as_copies() -> None:
    class MainGradients(Foreign):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.main_grad.mul_(0.5)
                p.sub_(p.main_grad, alpha=p.rate)

    params = parameters()
    for p in params:
        p.main_grad, p.rate = torch.ones_like(p), 0.1
    before = copy.deepcopy(params)
    with cancelling():
        MainGradients(params).step()
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)
        assert p.main_grad.eq(1).all()


def test_a_parameter_that_cannot_be_cloned_leaves_empty_groups() -> None:
    class Stubborn(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.detach:
                raise RuntimeError("out of memory, say")
            return super().__torch_function__(func, types, args, kwargs or {})

    class KeepsAList(Foreign):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.everyone = [p for g in self.param_groups for p in g["params"]]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.everyone:
                p.fill_(7.0)

    p = torch.ones(3).as_subclass(Stubborn).requires_grad_()
    optimizer = KeepsAList([p])
    twin = stand_in(optimizer)
    assert twin.param_groups[0]["params"] == []
    twin.step()
    assert p.tolist() == [1.0, 1.0, 1.0]


def test_a_finalizer_of_the_users_class_does_not_run_for_the_stand_in() -> None:
    released = []

    class Releases(NoNoneCheck):
        def __del__(self) -> None:
            released.append(1)

    params = parameters()
    optimizer = Releases(params)
    set_gradients(params, 0, bad=True)
    with cancelling():
        optimizer.step()
    gc.collect()
    assert released == []
    assert type(optimizer) is Releases
    del optimizer
    gc.collect()
    assert released == [1]


def test_a_class_with_equality_but_no_hash() -> None:
    class Unhashable(NoNoneCheck):
        def __eq__(self, other: object) -> bool:
            return True

    assert is_stand_in(stand_in(Unhashable(parameters())))


def test_the_zero_redundancy_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(batches: list[int], bad: int | None, **options: Any) -> Snapshot:
        params = parameters()
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.01, **options)
        now = -1
        with cancelling(lambda: now == bad):
            for now in batches:
                set_gradients(params, now, bad=now == bad)
                optimizer.step()
        return everything(optimizer.optim)

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group replaces it, for good
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for options in ({}, {"parameters_as_bucket_view": True}):
            assert_same(run([0, 2, 3], None, **options), run([0, 1, 2, 3], 1, **options))
    finally:
        torch.distributed.destroy_process_group()


# -------------------------------------------------------------------------------------------------------- the call


@pytest.mark.parametrize("cls", [torch.optim.Adam, NoNoneCheck])
def test_when_step_raises_nothing_is_left_over(cls: Any) -> None:
    params = parameters()
    optimizer = cls(params)
    for batch in range(2):
        set_gradients(params, batch)
        optimizer.step()
    before = everything(optimizer)

    def raising() -> float:
        raise ValueError("in the closure")

    def later(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        raise ValueError("in a hook of the user's")

    with cancelling():
        if cls is torch.optim.Adam:
            with pytest.raises(ValueError, match="in the closure"):
                optimizer.step(raising)
        handle = optimizer.register_step_pre_hook(later)
        with pytest.raises(ValueError, match="in a hook"):
            optimizer.step()
        handle.remove()
    assert_same(before, everything(optimizer))


def test_hooks_of_the_users_still_run_with_the_real_optimizer() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params)
    set_gradients(params, 0, bad=True)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append((o is optimizer, args[0] is optimizer)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((o is optimizer, was_cancelled(o, args))))
    with cancelling():
        optimizer.step()
    optimizer.step()
    assert seen == [(True, False), (True, True), (True, True), (True, False)]


def test_a_later_hook_that_puts_the_real_one_back_is_noticed() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    set_gradients(params, 0)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, *args[1:]), kwargs))
    seen = []
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(was_cancelled(o, args)))
    try:
        with cancelling():
            optimizer.step()
    finally:
        handle.remove()
    assert seen == [False]


def test_two_watchers_cancel_the_same_step() -> None:
    params = parameters()
    optimizer = NoNoneCheck(params)
    set_gradients(params, 0, bad=True)
    before = everything(optimizer)
    with cancelling(), cancelling():
        optimizer.step()
    assert_same(before, everything(optimizer))
    args, kwargs = cancelled(optimizer, (optimizer,), {"a": 1})
    assert cancelled(optimizer, args, kwargs) == (args, kwargs)


def test_arguments_are_passed_on() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    args, kwargs = cancelled(optimizer, (optimizer, 1, 2), {"three": 3})
    assert is_stand_in(args[0]) and not is_stand_in(optimizer)
    assert args[1:] == (1, 2) and kwargs == {"three": 3}


@pytest.mark.parametrize("make", [torch.optim.Adam, NoNoneCheck])
def test_a_stand_in_does_not_outlive_its_step(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    set_gradients(params, 0)
    gc.collect()
    objects = sum(issubclass(type(o), torch.optim.Optimizer) for o in gc.get_objects())
    with cancelling():
        optimizer.step()
    gc.collect()
    assert sum(issubclass(type(o), torch.optim.Optimizer) for o in gc.get_objects()) == objects


# -------------------------------------------------------------------------------------------- schedulers and scalers


def test_a_scheduler_does_not_complain_after_a_cancelled_first_step() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    set_gradients(params, 0, bad=True)
    with warnings.catch_warnings(), cancelling():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    # The schedule goes by calls of scheduler.step(), which are the user's: the cancelled step counts in it.
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_and_a_patched_step_keep_their_ties_to_the_real_optimizer() -> None:
    params = parameters()
    optimizer = NoNoneCheck(params)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    set_gradients(params, 0, bad=True)
    with warnings.catch_warnings(), cancelling():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    set_gradients(params, 1)
    optimizer.step()
    assert {s["steps"] for s in optimizer.state.values()} == {1}


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_grad_scaler(name: str, options: dict[str, Any]) -> None:
    def run(batches: list[int], cancel: int | None) -> Snapshot:
        params = parameters()
        optimizer = getattr(torch.optim, name)(params, lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        now = -1
        with cancelling(lambda: now == cancel):
            for now in batches:
                set_gradients(params, now)
                scaler.scale(torch.ones(()))  # the scaler makes its scale on first use
                for p in params:
                    p.grad = p.grad * 8.0
                scaler.step(optimizer)
                scaler.update()
                if now == cancel:
                    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        assert scaler.get_scale() == 8.0
        return everything(optimizer)

    assert_same(run([0, 2, 3], None), run([0, 1, 2, 3], 1))


def test_an_optimizer_that_takes_the_grad_scaler_itself() -> None:
    class Unscales(Foreign):
        _step_supports_amp_scaling = True

        @torch.no_grad()
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            grad_scaler.unscale_(self)
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad)

    params = parameters()
    optimizer = Unscales(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    scaler.scale(torch.ones(()))
    set_gradients(params, 0)
    before = everything(optimizer)
    with cancelling(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer)
        scaler.update()
    assert_same(before, everything(optimizer))


# -------------------------------------------------------------------------------------------------------- closures


class Regression:
    """A least-squares fit whose closure counts its calls and goes bad when told."""

    def __init__(self, make: Make) -> None:
        self.w = torch.nn.Parameter(torch.tensor([[0.3], [-0.2], [0.5]]))
        self.optimizer = make([self.w])
        self.calls = 0
        self.bad_call: int | None = None  # counted within a step

    def closure(self, batch: int) -> Callable[[], torch.Tensor]:
        generator = torch.Generator().manual_seed(batch)
        x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
        first = self.calls

        def evaluate() -> torch.Tensor:
            assert torch.is_grad_enabled()
            self.calls += 1
            self.optimizer.zero_grad()
            loss = ((x @ self.w - y) ** 2).mean()
            if self.bad_call is not None and self.calls - first > self.bad_call:
                loss = loss * math.nan
            loss.backward()
            return loss

        return evaluate


def refuse_bad(loss: Any, can_cancel: bool) -> bool:
    assert can_cancel
    return not loss.isfinite()


@contextmanager
def judging(refuse: Callable[[Any, bool], bool] = refuse_bad) -> Iterator[None]:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if is_stand_in(optimizer) else judged(optimizer, args, kwargs, refuse)

    with pre_hook(hook):
        yield


_CLOSURE_OPTIMIZERS = [
    *(
        pytest.param(lambda params, name=name: getattr(torch.optim, name)(params, lr=0.05), id=name)
        for name in _FORMS
        if hasattr(torch.optim, name)
    ),
    pytest.param(lambda params: torch.optim.Adam(params, fused=True), id="fused"),
    pytest.param(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4), id="LBFGS"),
    pytest.param(lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe", max_iter=4), id="wolfe"),
]


@pytest.mark.parametrize("make", _CLOSURE_OPTIMIZERS)
def test_a_cancelled_step_evaluates_its_closure_once_and_returns_the_loss(make: Make) -> None:
    fit = Regression(make)
    fit.optimizer.step(fit.closure(0))
    before, calls = everything(fit.optimizer), fit.calls
    with cancelling():
        loss = fit.optimizer.step(fit.closure(1))
    assert isinstance(loss, torch.Tensor) and loss.isfinite()
    assert fit.calls == calls + 1
    after = everything(fit.optimizer)
    for snapshot in (before, after):
        snapshot.pop("gradients")  # the closure's own, of its batch
    assert_same(before, after)


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("make", _CLOSURE_OPTIMIZERS)
def test_judged_a_bad_closure_never_happened_and_a_good_one_is_the_optimizers_own(make: Make, keyword: bool) -> None:
    def run(batches: list[int], watch: bool, bad: int | None = None) -> Snapshot:
        fit = Regression(make)
        for batch in batches:
            fit.bad_call = 0 if batch == bad else None
            calls = fit.calls
            closure = fit.closure(batch)
            if watch:
                with judging():
                    loss = fit.optimizer.step(closure=closure) if keyword else fit.optimizer.step(closure)
            else:
                loss = fit.optimizer.step(closure)
            if batch == bad:
                assert loss.isnan() and fit.calls == calls + 1
                assert fit.w.grad is not None and fit.w.grad.isnan().all()
        return everything(fit.optimizer)

    plain = run([0, 1, 3, 4], watch=False)
    assert_same(plain, run([0, 1, 3, 4], watch=True))
    assert_same(plain, run([0, 1, 2, 3, 4], watch=True, bad=2))
    assert_same(run([1], watch=False), run([0, 1], watch=True, bad=0))  # before any state exists


@pytest.mark.parametrize("bad_call", [1, 2, 3])
def test_lbfgs_that_goes_bad_on_the_way_is_put_back_to_where_the_step_began(bad_call: int) -> None:
    def run(batches: list[int], bad: int | None = None) -> Snapshot:
        fit = Regression(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=6, history_size=3))
        for batch in batches:
            fit.bad_call = bad_call if batch == bad else None
            calls = fit.calls
            with judging():
                fit.optimizer.step(fit.closure(batch))
            if batch == bad:
                assert fit.calls == calls + bad_call + 1  # no further evaluation after the verdict
        return everything(fit.optimizer)

    assert_same(run([0, 1, 3]), run([0, 1, 2, 3], bad=2))
    assert_same(run([1]), run([0, 1], bad=0))


def test_lbfgs_with_a_line_search_is_judged_at_its_first_evaluation_only() -> None:
    fit = Regression(lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe"))
    verdicts = []

    def refuse(loss: Any, can_cancel: bool) -> bool:
        verdicts.append(loss.item())
        return False

    with judging(refuse):
        fit.optimizer.step(fit.closure(0))
    assert len(verdicts) == 1 < fit.calls


class ClosureFirst(Foreign):
    """What nearly every first-order optimizer of a user's looks like, with a counter on itself."""

    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign_(), alpha=group["lr"])
        return loss


def test_judged_users_optimizer() -> None:
    def run(batches: list[int], watch: bool, bad: int | None = None) -> tuple[Snapshot, int]:
        fit = Regression(ClosureFirst)
        for batch in batches:
            fit.bad_call = 0 if batch == bad else None
            with judging() if watch else pre_hook(lambda *a: None):
                fit.optimizer.step(fit.closure(batch))
            if batch == bad:
                assert fit.w.grad is not None and fit.w.grad.isnan().all()
        return everything(fit.optimizer), fit.optimizer.taken

    plain, taken = run([0, 2], watch=False)
    for batches, bad in (([0, 2], None), ([0, 1, 2], 1)):
        snapshot, seen = run(batches, watch=True, bad=bad)
        assert_same(plain, snapshot)
        assert seen == taken == 2


def test_after_the_verdict_the_closure_is_not_evaluated_again() -> None:
    class Twice(ClosureFirst):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                return closure(), closure()

    fit = Regression(Twice)
    with judging():
        first, second = fit.optimizer.step(fit.closure(0))
        assert fit.calls == 2 and first is not second
        fit.bad_call = 0
        first, second = fit.optimizer.step(fit.closure(1))
    assert fit.calls == 3 and first is second


class SharpnessAware(Foreign):
    """Moves its parameters, then evaluates the closure, then moves them back and steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(0.1)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1).sub_(p.grad, alpha=0.1)


def test_an_optimizer_that_has_moved_already_cannot_be_cancelled_and_says_so() -> None:
    def run(watch: bool) -> tuple[Snapshot, list[bool]]:
        fit = Regression(SharpnessAware)
        asked = []

        def refuse(loss: Any, can_cancel: bool) -> bool:
            asked.append(can_cancel)
            return True

        with judging(refuse) if watch else pre_hook(lambda *a: None):
            fit.optimizer.step(fit.closure(0))
        return everything(fit.optimizer), asked

    plain, _ = run(watch=False)
    watched, asked = run(watch=True)
    assert asked == [False]
    assert_same(plain, watched)  # half of a step would be worse than all of it


@pytest.mark.parametrize(
    ("make", "bad_call"),
    [
        (torch.optim.Adam, 0),
        (ClosureFirst, 0),
        (lambda params: torch.optim.LBFGS(params, lr=0.1), 0),
        (lambda params: torch.optim.LBFGS(params, lr=0.1), 2),
        (lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe"), 0),
    ],
)
def test_what_the_verdict_raises_leaves_the_optimizer_as_it_was(make: Make, bad_call: int) -> None:
    fit = Regression(make)
    fit.optimizer.step(fit.closure(0))
    before = everything(fit.optimizer)
    fit.bad_call = bad_call

    def refuse(loss: Any, can_cancel: bool) -> bool:
        if not loss.isfinite():
            raise FloatingPointError("born")
        return False

    with judging(refuse), pytest.raises(FloatingPointError, match="born"):
        fit.optimizer.step(fit.closure(1))
    after = everything(fit.optimizer)
    for snapshot in (before, after):
        snapshot.pop("gradients")
    assert_same(before, after)


def test_an_optimizer_with_slots_is_left_alone() -> None:
    optimizer = HoldsSlots(parameters())
    assert judged(optimizer, (optimizer, float), {}, refuse_bad) is None


def test_without_a_closure_there_is_nothing_to_wait_for() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    assert judged(optimizer, (optimizer,), {}, refuse_bad) is None
    assert judged(optimizer, (optimizer, None), {}, refuse_bad) is None
    args, kwargs = cancelled(optimizer, (optimizer, float), {})
    assert judged(optimizer, args, kwargs, refuse_bad) is None
    assert closure_of((optimizer, float), {}) is float
    assert closure_of((optimizer,), {"closure": float}) is float
    assert closure_of((optimizer,), {"closure": None}) is None


def test_a_judged_step_is_cancelled_in_a_post_hooks_eyes_only_when_it_was() -> None:
    fit = Regression(torch.optim.Adam)
    seen = []
    fit.optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(was_cancelled(o, args)))
    with judging():
        for bad in (None, 0, None):
            fit.bad_call = bad
            fit.optimizer.step(fit.closure(0))
    assert seen == [False, True, False]
