"""Births from half precision, on the CPU: overflows in float16 and bfloat16, autocast, and the GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _data_programs import born, train
from nan_detector import NaNDetector, NonFiniteError

Tensor = torch.Tensor
HALF, BF16 = torch.float16, torch.bfloat16


def rows(seed: int, n: int = 6, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.inp(x))  # <-- first layer

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x))


def mse(model: torch.nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def pairs(n: int = 4, big: int | None = None, by: float = 1e5, dtype: torch.dtype = torch.float32) -> list[Any]:
    out = [(rows(i), rows(i + 50, width=1)) for i in range(n)]
    return [((x * (by if i == big else 1.0)).to(dtype), y) for i, (x, y) in enumerate(out)]


# -- half models and autocast ---


def test_a_matmul_of_a_float16_model_overflows() -> None:
    class Wide(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.hidden(x)
            return self.out(h @ h.T @ h)  # <-- half matmul

    model = Wide().half()
    event = born(train(model, pairs(big=2, by=200.0, dtype=HALF), mse), step=2, phase="forward", mark="half matmul")
    assert event.op == "mm" and event.verdict == "precision"
    assert event.output is not None and event.output.dtype == "torch.float16"


def test_a_square_in_float16_overflows() -> None:
    class Squares(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.hidden(x)
            return self.out((h**2).mean(-1, keepdim=True) / (h + 1))  # <-- half square

    event = born(
        train(Squares().half(), pairs(big=1, by=5000.0, dtype=HALF), mse), step=1, phase="forward", mark="half square"
    )
    assert event.op == "pow" and event.layer_name == "root"


def test_a_sum_in_float16_overflows() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        errors = (model(x) - y.half()).square()
        return errors.sum() / len(x)  # <-- half sum

    model = Net().half()
    batches = [(x.half(), torch.full((6, 1), 150.0 if i == 2 else 0.0)) for i, (x, _) in enumerate(pairs())]
    event = born(train(model, batches, step), step=2, phase="loss", mark="half sum", op="sum")
    assert event.verdict == "precision"


@pytest.mark.parametrize("cast", ["half", "to"])
def test_a_cast_to_float16_overflows(cast: str) -> None:
    class Casts(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.hidden(x) * 3e4
            h = h.half() if cast == "half" else h.to(HALF)  # <-- cast
            return self.out(h.float() / 3e4)

    event = born(train(Casts(), pairs(big=3, by=60.0), mse), step=3, phase="forward", mark="cast", layer_name="root")
    assert event.op == "to_copy"


def test_bfloat16_overflows_where_float32_would_hardly() -> None:
    class Grows(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.hidden(x)
            return self.out(h.exp())  # <-- bf16 exp

    born(
        train(Grows().to(BF16), pairs(big=1, by=600.0, dtype=BF16), mse),
        step=1,
        phase="forward",
        mark="bf16 exp",
        op="exp",
    )


class Deep(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x) * x.abs().amax(-1, keepdim=True))  # <-- product


@pytest.mark.parametrize(
    ("dtype", "by", "mark", "layer", "op"),
    [
        (HALF, 1e6, "first layer", "inp", "to_copy"),  # the input itself does not fit: the cast that autocast makes
        (BF16, 1e20, "product", "root", "mul"),
    ],
)
def test_autocast_overflows(dtype: torch.dtype, by: float, mark: str, layer: str, op: str) -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        return F.mse_loss(out.float(), y)

    det = train(Deep(), pairs(big=2, by=by), step)
    born(det, step=2, phase="forward", mark=mark, layer_name=layer, op=op)


def test_half_gradients_overflow() -> None:
    """Finite loss, finite weights: the derivative of a scaled loss does not fit into float16."""

    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        return (out.float() * y).mean() * (4e6 if y.max() > 90 else 1.0)

    class Thin(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.hidden(x))

    batches = [(x.half(), torch.full((6, 1), 100.0 if i == 2 else 1.0)) for i, (x, _) in enumerate(pairs())]
    event = train(Thin().half(), batches, step).event
    assert event is not None
    assert (event.step, event.phase, event.reproduced, event.weights) == (2, "backward", "yes", "clean"), event
    assert event.op in ("to_copy", "_to_copy"), event


def test_a_float16_loss_that_overflows_by_itself() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss = (model(x) - y.half()).abs().mean()
        return loss * 3000.0  # <-- half loss

    batches = [(x.half(), torch.full((6, 1), 60.0 if i == 1 else 0.0)) for i, (x, _) in enumerate(pairs())]
    born(train(Net().half(), batches, step), step=1, phase="loss", mark="half loss", op="mul")


# -- GradScaler ---


def scaled(
    model: torch.nn.Module,
    batches: list[Any],
    loss_of: Callable[[torch.nn.Module, Any], Tensor],
    *,
    init_scale: float = 2.0**16,
    optimizer: Any = None,
    unscale: bool = False,
    **options: Any,
) -> tuple[NaNDetector, list[float]]:
    """The loop of PyTorch's AMP tutorial, on the CPU."""
    opt = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    scales = []
    with NaNDetector(model, verbose=False, **options) as det:
        for i, batch in enumerate(batches):
            det.set_batch(i)
            opt.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            det.check_grad_norms()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
            if det.triggered:
                break
    return det, scales


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_the_warm_up_of_a_scaler_is_quiet(unscale: bool, fused: bool, watch: str) -> None:
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
    det, scales = scaled(model, pairs(12), mse, init_scale=2.0**24, optimizer=opt, unscale=unscale, watch=watch)
    assert scales[-1] < 2.0**20, "no overflow: this test tests nothing"
    assert det.event is None, det.event
    assert det.grad_events == [], "norms are judged before they are unscaled"


def test_a_loss_that_the_scale_alone_carries_beyond_float32_is_quiet() -> None:
    det, scales = scaled(Net(), pairs(8), lambda m, b: mse(m, b) + 1e33, init_scale=2.0**24)
    assert scales[0] < 2.0**24, "no overflow: this test tests nothing"
    assert det.event is None, det.event


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_of_the_forward_behind_a_scaler_is_an_event(unscale: bool, fused: bool) -> None:
    class Logs(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.hidden(x)) + torch.log(x.amax(-1, keepdim=True))  # <-- log behind a scaler

    batches = [(x.abs() + 0.1, y) for x, y in pairs(6)]
    batches[3][0][2] = -1.0
    model = Logs()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    det, _ = scaled(model, batches, mse, optimizer=opt, unscale=unscale, init_scale=64.0)
    born(det, step=3, phase="forward", mark="log behind a scaler", op="log", layer_name="root")


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_derivative_that_is_bad_at_any_scale_is_an_event_although_the_scaler_only_skips(
    unscale: bool, fused: bool
) -> None:
    class Roots(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.hidden(x)).float().abs().mul(x.sum(1, keepdim=True).ne(0)).sqrt()  # <-- root of zero

    batches = pairs(6)
    batches[2][0][1] = 0.0
    model = Roots()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    det, _ = scaled(model, batches, mse, optimizer=opt, unscale=unscale, init_scale=64.0)
    event = born(det, step=2, phase="backward", mark="root of zero", op="sqrt", layer_name="root")
    assert "any loss scale" in event.symptom


def test_skipped_steps_and_the_training_after_them_are_those_of_a_run_without_a_detector() -> None:
    def run(watched: bool) -> dict[str, Tensor]:
        model = Net()
        opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        det = NaNDetector(model, verbose=False)
        if watched:
            det.attach()
        for batch in pairs(14):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = mse(model, batch)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        det.detach()
        return {**model.state_dict(), "scale": torch.tensor(scaler.get_scale())}

    bare, ours = run(False), run(True)
    assert all(torch.equal(bare[k], ours[k]) for k in bare)


def test_several_losses_are_scaled_in_one_call() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with NaNDetector(model, verbose=False) as det:
        for x, y in pairs(4):
            opt.zero_grad()
            out = model(x)
            losses = scaler.scale([F.mse_loss(out, y), out.square().mean()])
            torch.autograd.backward(losses)
            scaler.step(opt)
            scaler.update()
    assert det.event is None
    # The recorder keeps the training's own losses.
    assert det.history.values["loss"][-1] < 8.0


def test_a_disabled_scaler_changes_nothing() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = pairs(4)
    batches[2][1][0] = float("nan")
    with NaNDetector(model, verbose=False, on_nan="raise") as det, pytest.raises(NonFiniteError):
        for i, batch in enumerate(batches):
            det.set_batch(i)
            opt.zero_grad()
            scaler.scale(mse(model, batch)).backward()
            scaler.step(opt)
            scaler.update()
    born(det, step=2, phase="data", tensor_name="y", sample_index=(0,))


# -- near misses ---


def test_ordinary_autocast_training_is_quiet() -> None:
    for dtype in (HALF, BF16):

        def step(model: torch.nn.Module, batch: Any, dtype: torch.dtype = dtype) -> Tensor:
            x, y = batch
            with torch.autocast("cpu", dtype=dtype):
                return F.mse_loss(model(x), y)

        for watch in ("step", "layers", "ops"):
            assert train(Net(), pairs(6), step, watch=watch).event is None


def test_a_value_that_a_clamp_keeps_in_range_before_the_cast_is_quiet() -> None:
    class Clamps(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.hidden(x) * 1e5).clamp(max=6e4).half().float() / 1e5)

    assert train(Clamps(), pairs(4, big=2, by=1e6), mse, watch="ops").event is None
