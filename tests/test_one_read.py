"""One read a step: a watched step waits for the device once, in the gate, and nowhere else.

Two ways to see it without a GPU. On the `meta` device tensors have no values, and whoever asks for one gets an error:
there the hot path runs as it is. On the CPU a dispatch mode refuses each operation that would wait for a GPU; it is let
see our own operations too, which are hidden from a user's modes else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import nan_detector._quiet
from nan_detector import NaNDetector
from nan_detector._judge import Judge
from nan_detector._rounds import EVERY_IF_SMALL

SOURCE = Path(nan_detector.__file__).parent
#: Beyond the calls that are looked at closely, slices of the state, and looks for parameters without gradients.
STEPS, DEAD_AFTER = 40, 15

aten = torch.ops.aten
#: Operations whose result, or its shape, is a value: a GPU has to be waited for.
_READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.unique_consecutive,
    aten.unique_dim,
    aten._unique,
    aten._unique2,
    aten.bincount,
    aten.repeat_interleave,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}


class Refused(AssertionError):
    """A value was read. Not a RuntimeError: nobody who expects one of those may swallow it."""


class NoReads(TorchDispatchMode):
    """Refuses each operation that reads a value of a tensor on `device`, or brings one there from the host and waits.

    Args:
        device: Type of the device.
        free: Whether a tensor may be read all the same.
    """

    def __init__(self, device: str, free: Callable[[Tensor], bool] = lambda t: False) -> None:
        super().__init__()
        self.device, self.free = device, free
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        kwargs = kwargs or {}
        name = func.overloadpacket
        on_device = [a for a in args if isinstance(a, Tensor) and a.device.type == self.device and not self.free(a)]
        if name in _READS and on_device:
            raise Refused(f"{func} reads a value")
        if name in _INDEXING and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and i.device.type == self.device
            for i in args[1]
        ):
            raise Refused(f"{func} with a mask has to know how many elements it selects")
        out = func(*args, **kwargs)
        if on_device and isinstance(out, Tensor) and out.device.type != self.device:
            raise Refused(f"{func} copies a {self.device} tensor to the {out.device}")
        if name in (aten.copy_, aten._foreach_copy_) and isinstance(args[0], Tensor):
            source = args[1]
            if source.device.type == self.device and args[0].device.type != self.device:
                raise Refused(f"{func} copies a {self.device} tensor to the {args[0].device}")
        self._refuse_upload(func, args, kwargs, out)
        return out

    def _refuse_upload(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Memory of the host that is not pinned is copied while the host waits."""
        name = func.overloadpacket
        if name is aten._to_copy:
            source, target, waits = args[0], out, not kwargs.get("non_blocking")
        elif name is aten.copy_ and isinstance(args[1], Tensor):
            source, target, waits = args[1], args[0], not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            return
        if waits and source.device.type == "cpu" != target.device.type == self.device:
            raise Refused(f"{func} copies a tensor of the host to the {target.device}, and waits for that")


@dataclass
class Reads:
    """The reads that are meant: sizes of the vectors that were fetched whole."""

    sizes: list[int] = field(default_factory=list)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens once in 200 steps comes earlier."""
    monkeypatch.setattr("nan_detector._forewarn.DEAD_AFTER", DEAD_AFTER)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts what is fetched, and puts numbers in the place of those that a meta tensor lacks."""
    found = Reads()
    fetch = Tensor.tolist

    def tolist(t: Tensor) -> Any:
        found.sizes.append(t.numel())
        if t.is_meta:
            assert t.dim() == 1
            return [0.5] * t.numel()
        with _disable_current_modes():
            return fetch(t)

    def no_array(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Refused("a tensor was turned into an array")

    monkeypatch.setattr(Tensor, "tolist", tolist)
    monkeypatch.setattr(Tensor, "numpy", no_array)
    monkeypatch.setattr(Tensor, "__array__", no_array)
    return found


class Net(nn.Module):
    """Buffers that change, dropout, a module that is called twice, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.shared = nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.norm(self.first(x)))
        h = self.shared(torch.tanh(self.shared(h)))
        return self.head(self.drop(h)), h


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    device = next(model.parameters()).device
    x, y = torch.randn(6, 8, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    for i in range(steps):
        optimizer.zero_grad()
        out, hidden = model(x)
        loss = F.cross_entropy(out, y) + 1e-3 * hidden.square().mean()
        loss.backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each gate that did not go the short way."""
    found: list[int] = []
    judge = Judge.judge

    def counted(self: Judge, *args: Any, **kwargs: Any) -> bool:
        found.append(self.run.groups)
        return judge(self, *args, **kwargs)

    monkeypatch.setattr(Judge, "judge", counted)
    return found


LEVELS = pytest.mark.parametrize("watch", ["step", "layers"])
EACH = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@LEVELS
@EACH
def test_the_hot_path_reads_once_where_nothing_can_be_read(
    watch: str, optimizer: str, reads: Reads, long_ways: list[int]
) -> None:
    with torch.device("meta"):
        model = Net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    with NaNDetector(model, watch=watch, verbose=False) as det:
        train(model, opt, STEPS)
        assert len(reads.sizes) == STEPS
        # Slices of what has no memory are zeros of the host, which do not go the short way together with the rest.
        slices = list(range(EVERY_IF_SMALL - 1, STEPS, EVERY_IF_SMALL))
        assert long_ways == [0, *slices], "all others are ordinary steps, on the way that matters"
        assert det.event is None and det.warnings == [] and det.grad_events == []
    assert len(reads.sizes) <= STEPS + 32  # at the end all the state is looked at once more


@contextlib.contextmanager
def seen_by_modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In here a dispatch mode sees what we do, too."""
    with monkeypatch.context() as patch:
        patch.setattr(nan_detector._quiet, "_disable_current_modes", contextlib.nullcontext)
        yield


@LEVELS
@EACH
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_no_operation_of_a_step_reads(
    device: str,
    watch: str,
    optimizer: str,
    reads: Reads,
    long_ways: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = Net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    # PyTorch's own optimizers read their step counters, which are kept on the host for that.
    mode = NoReads(device, free=lambda t: any(t is s.get("step") for s in opt.state.values()))
    with NaNDetector(model, watch=watch, verbose=False) as det:
        train(model, opt, 1)  # an eps is rounded to the parameters' dtype, on the host, when an optimizer is met
        with seen_by_modes(monkeypatch), mode:
            train(model, opt, STEPS)
        assert len(reads.sizes) == STEPS + 1, reads.sizes
        assert det.event is None and det.warnings == []
        if device == "cpu":  # meta tensors have nothing to be looked at
            assert long_ways == [0]
            assert len(set(reads.sizes)) > 1, "a slice of the state is read along every few gates"
    assert mode.calls > STEPS * 20


def test_what_an_evaluation_gave_is_read_along(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net()
    opt = OPTIMIZERS["sgd"](model.parameters())
    with NaNDetector(model, verbose=False) as det:
        with seen_by_modes(monkeypatch), NoReads("cpu"):
            for _ in range(3):
                train(model, opt, 4)
                with torch.no_grad():
                    model(torch.randn(6, 8))
            train(model, opt, 1)
        assert len(reads.sizes) == 13
        assert det.event is None
    assert max(reads.sizes) > EVERY_IF_SMALL // 4


@pytest.mark.parametrize(("most", "numbers"), [(4096, 1 + 100), (64, 3)])
def test_many_gradients_are_read_in_one_piece_and_very_many_as_a_few_numbers(
    most: int, numbers: int, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nan_detector._glance.MOST", most)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)])
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False):
        with seen_by_modes(monkeypatch), NoReads("cpu"):
            for _ in range(STEPS):
                opt.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                opt.step()
        assert len(reads.sizes) == STEPS
        # The loss with each norm, or with their total and the largest of them.
        assert sorted(reads.sizes)[STEPS // 2] == numbers


# -- the tests themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t[0].item(),
        lambda t: bool(t[0] > 0),
        lambda t: float(t[0]),
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: t[t > 0],
        lambda t: t.index_put_((t > 0,), torch.ones((), device=t.device)),
        lambda t: t.masked_select(t > 0),
        lambda t: t.numpy(),
        lambda t: t.unique(),
    ],
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_read_is_refused(device: str, read: Callable[[Tensor], Any], reads: Reads) -> None:
    t = torch.ones(3, device=device)
    with NoReads(device), pytest.raises(Refused):
        read(t)


@pytest.mark.parametrize("upload", [lambda t: t.to("meta"), lambda t: torch.empty(3, device="meta").copy_(t)])
def test_a_copy_from_the_host_is_refused(upload: Callable[[Tensor], Any]) -> None:
    with NoReads("meta"), pytest.raises(Refused, match="a tensor of the host"):
        upload(torch.ones(3))
    with NoReads("meta"):
        torch.ones(3).to("meta", non_blocking=True)


def test_a_copy_to_the_host_is_refused() -> None:
    t = torch.ones(3, device="meta")
    with NoReads("meta"), pytest.raises((Refused, NotImplementedError)):
        t.to("cpu")
    with NoReads("meta"), pytest.raises((Refused, NotImplementedError)):
        torch.empty(3).copy_(t)


def test_a_detector_that_reads_is_found(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees into the gate: a second read there is refused."""
    import nan_detector._glance as glance

    def reading(grad: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert grad.sum().item() is not None
        return torch.linalg.vector_norm(grad, *args, **kwargs)

    monkeypatch.setattr(glance, "_vector_norm", reading)
    model = Net()
    opt = OPTIMIZERS["sgd"](model.parameters())
    with NaNDetector(model, verbose=False), seen_by_modes(monkeypatch), NoReads("cpu"), pytest.raises(Refused):
        train(model, opt, 3)


def test_the_source_knows_nothing_of_the_device_that_this_is_tested_on() -> None:
    """A branch for meta tensors would make all of this a show."""
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"""is_meta|["']meta["']""", line)
    ]
    assert found == []
