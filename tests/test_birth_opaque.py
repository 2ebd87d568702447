"""Births that the dispatcher does not see: C++ kernels, and numpy writing into a tensor's memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from _data_programs import born, train

Tensor = torch.Tensor
NAN = float("nan")

SOURCE = """
#include <torch/extension.h>
#include <cmath>

// Writes through the raw pointer, as a kernel does: no operation of the dispatcher computes a value here.
torch::Tensor inverse(torch::Tensor x) {
  auto in = x.detach().contiguous();
  auto out = torch::zeros_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); i++) b[i] = a[i] > 50.f ? NAN : a[i] * 0.5f;
  return out;
}

void inverse_(torch::Tensor x) {
  float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i++) if (a[i] > 50.f) a[i] = INFINITY;
}
"""


def rows(seed: int, n: int = 6, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def pairs(n: int = 4, big: int | None = None) -> list[Any]:
    out = [(rows(i), rows(i + 50, width=1)) for i in range(n)]
    if big is not None:
        out[big][0][3, 0] = 60.0
    return out


def mse(model: torch.nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.inp(x)))


# -- numpy ---


class NumpyNorm(Net):
    """Standardises with numpy, in the memory of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * 1.0
        with np.errstate(all="ignore"):
            scaled.numpy()[:] = np.where(x.numpy() > 50, np.nan, x.numpy())
        return super().forward(scaled)


def test_numpy_writes_into_a_tensor_inside_the_model() -> None:
    event = train(NumpyNorm(), pairs(big=2), mse).event
    assert event is not None
    assert (event.step, event.phase, event.reproduced, event.weights) == (2, "forward", "yes", "clean"), event
    assert event.cause is not None and event.cause.code == "opaque_kernel", event
    # The call that first used the tensor.
    assert event.layer_name == "inp" and event.location is not None
    assert event.location.source_line == "return self.out(torch.relu(self.inp(x)))", event


class FromNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        array = x.numpy().copy()
        array[array > 50] = np.nan
        return super().forward(torch.from_numpy(array) * 2.0)  # <-- from numpy


def test_a_tensor_made_by_numpy_inside_the_model() -> None:
    event = born(train(FromNumpy(), pairs(big=2), mse), step=2, phase="forward", mark="from numpy", layer_name="root")
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_a_tensor_made_by_numpy_in_the_loss() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        weights = 1.0 / np.where(x.numpy()[:, :1] > 50, np.nan, 1.0)
        out = (model(x) - y).square()
        return (out * torch.from_numpy(weights).float()).mean()  # <-- numpy in the loss

    event = born(train(Net(), pairs(big=1), step), step=1, phase="loss", mark="numpy in the loss")
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_numpy_writes_into_a_tensor_of_the_loss_part() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        weights = torch.ones(6, 1)
        view = weights.numpy()
        view[x.numpy()[:, :1] > 50] = np.nan
        return ((model(x) - y).square() * weights).mean()

    event = train(Net(), pairs(big=1), step).event
    assert event is not None
    assert (event.step, event.weights) == (1, "clean"), event
    # Either the replay saw it (then it is a kernel's), or it says honestly that it did not.
    if event.reproduced == "yes":
        assert event.cause is not None and event.cause.code == "opaque_kernel", event
    else:
        assert event.location is None and event.op is None, event


def test_numpy_without_bad_values_is_quiet() -> None:
    for model in (NumpyNorm(), FromNumpy()):
        for watch in ("step", "ops"):
            assert train(model, pairs(), mse, watch=watch).event is None


@pytest.mark.parametrize("watch", ["step", "ops"])
def test_memory_from_numpy_that_numpy_cleans_before_use_is_quiet(watch: str) -> None:
    class Cleans(Net):
        def forward(self, x: Tensor) -> Tensor:
            raw = torch.full((6, 4), NAN)
            raw.numpy()[:] = x.numpy()
            return super().forward(raw)

    assert train(Cleans(), pairs(), mse, watch=watch).event is None


# -- a C++ extension ---


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which building an extension needs")
    if shutil.which("ninja") is None:
        pytest.skip("no ninja, with which torch builds extensions")
    from torch.utils.cpp_extension import load_inline

    # Outside the test run's own folder, so that the next run finds it built.
    folder = (
        Path(tmp_path_factory.getbasetemp()).parent / f"nan_detector_opaque-{torch.__version__}"
    )  # a kernel of another PyTorch does not load
    folder.mkdir(exist_ok=True)
    return load_inline("nan_detector_opaque", SOURCE, functions=["inverse", "inverse_"], build_directory=str(folder))


def test_a_kernel_that_makes_a_tensor_inside_the_model(kernels: Any) -> None:
    class Kernel(Net):
        def forward(self, x: Tensor) -> Tensor:
            halved = kernels.inverse(x)
            return super().forward(halved + 1.0)  # <-- used first

    event = born(train(Kernel(), pairs(big=2), mse), step=2, phase="forward", mark="used first", layer_name="root")
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_a_kernel_that_writes_into_a_tensor_inside_the_model(kernels: Any) -> None:
    class Kernel(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            kernels.inverse_(x)
            return super().forward(x - 1.0)  # <-- written, then used

    event = born(
        train(Kernel(), pairs(big=2), mse), step=2, phase="forward", mark="written, then used", layer_name="root"
    )
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_a_kernel_in_an_autograd_function_names_the_call_of_the_function(kernels: Any) -> None:
    class Halve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return kernels.inverse(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    class Kernel(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = Halve.apply(self.inp(x) * 1.0)
            return self.out(torch.relu(h))  # <-- the function's result

    batches = pairs()
    batches[2][0][3] *= 1000.0
    event = born(
        train(Kernel(), batches, mse), step=2, phase="forward", mark="the function's result", layer_name="root"
    )
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_a_kernel_in_the_backward(kernels: Any) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return kernels.inverse(grad) * 2.0  # <-- in the backward

    class Kernel(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(Scale.apply(self.inp(x))))

    batches = pairs()
    batches[1][1][:] = -1e4
    event = born(train(Kernel(), batches, mse), step=1, phase="backward", mark="in the backward")
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_a_kernel_in_the_loss(kernels: Any) -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return ((model(x) - y).square() * kernels.inverse(x[:, :1])).mean()  # <-- kernel in the loss

    event = born(train(Net(), pairs(big=1), step), step=1, phase="loss", mark="kernel in the loss")
    assert event.cause is not None and event.cause.code == "opaque_kernel", event


def test_a_kernel_that_gives_finite_values_is_quiet(kernels: Any) -> None:
    class Kernel(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(kernels.inverse(x) + 1.0)

    for watch in ("step", "ops"):
        assert train(Kernel(), pairs(), mse, watch=watch).event is None
