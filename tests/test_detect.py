"""`detect_nan`: every operation of a block checked, without a model, an optimizer or a detector."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import nan_detector
from _data_programs import line_of
from nan_detector import NonFiniteError, detect_nan, is_replaying

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")


def check(error: NonFiniteError, mark: str, **fields: Any) -> None:
    """The error's event, compared with the truth."""
    event = error.event
    assert event is not None and event.location is not None, event
    assert event.location.file == __file__
    assert event.location.line == line_of_here(mark), event
    for name, value in {"status": "final", "reproduced": "yes", **fields}.items():
        assert getattr(event, name) == value, f"{name}: {getattr(event, name)!r}, not {value!r}\n{event}"
    assert str(error) == str(event)


def line_of_here(mark: str) -> int:
    return line_of(mark)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.norm = torch.nn.Sequential(torch.nn.Identity(), Log())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.inp(x))) + self.norm(x).sum(1, keepdim=True)


class Log(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()  # <-- log


def test_no_model_at_all() -> None:
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        torch.sqrt(x).sum().backward()  # <-- plain sqrt
    check(caught.value, "plain sqrt", op="sqrt", layer_name=None)
    assert caught.value.event.cause.code == "sqrt_of_negative"


def test_in_training_with_a_model_and_an_optimizer_the_weights_are_not_touched() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        loss = F.mse_loss(model(-torch.ones(3, 4)), torch.zeros(3, 1))
        loss.backward()
        opt.step()
    check(caught.value, "log", op="log", layer_name="norm.1", module_type="Log", phase="forward")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_bad_derivative() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        y = torch.sqrt(x)  # <-- derivative
        y.sum().backward()
    check(caught.value, "derivative", op="sqrt", phase="backward")


def test_autograd_grad() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        torch.autograd.grad(x.norm() + x.pow(0.5).sum(), x)  # <-- grad
    check(caught.value, "grad", phase="backward")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_of_a_model_counts(mode: Any) -> None:
    model = Net().eval()
    with pytest.raises(NonFiniteError) as caught, detect_nan(), mode():
        model(-torch.ones(3, 4))
    check(caught.value, "log", op="log", layer_name="norm.1")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outside_any_model_the_end_of_the_block_counts(mode: Any) -> None:
    with pytest.raises(NonFiniteError) as caught, mode(), detect_nan():
        kept = torch.zeros(2) / torch.zeros(2)  # <-- zero by zero
        assert kept.shape == (2,)
    check(caught.value, "zero by zero", op="div")


def test_a_value_read_to_the_host() -> None:
    with pytest.raises(NonFiniteError) as caught, detect_nan(), torch.no_grad():
        value = torch.tensor(-1.0).log()  # <-- read
        value.item()
    check(caught.value, "read", op="log")


def test_as_a_decorator_each_call_has_a_trace_of_its_own() -> None:
    calls = []

    @detect_nan()
    def step(x: Tensor) -> Tensor:
        """What it does."""
        calls.append(1)
        loss = torch.log(x).sum()  # <-- decorated
        loss.backward()
        return loss

    assert step.__doc__ == "What it does."
    assert step(torch.ones(2, requires_grad=True)).item() == 0.0
    for _ in range(2):
        with pytest.raises(NonFiniteError) as caught:
            step(-torch.ones(2, requires_grad=True))
        check(caught.value, "decorated", op="log")
    assert step(torch.ones(2, requires_grad=True)).item() == 0.0
    assert len(calls) == 4


def test_a_recursive_decorated_function() -> None:
    @detect_nan()
    def deep(x: Tensor, n: int) -> Tensor:
        return deep(x * 0.5, n - 1) if n else torch.log(x - 2.0).sum()  # <-- deep

    with pytest.raises(NonFiniteError) as caught:
        deep(torch.ones(2, requires_grad=True), 3).backward()
    check(caught.value, "deep", op="log")


def test_nested_blocks() -> None:
    x = torch.tensor([-1.0], requires_grad=True)
    with detect_nan():
        with pytest.raises(NonFiniteError) as caught, detect_nan():
            torch.sqrt(x).sum().backward()  # <-- inner
        y = x * 2
        y.sum().backward()
    check(caught.value, "inner", op="sqrt")


def test_an_error_that_the_block_itself_catches_is_told_once() -> None:
    x = torch.tensor([-1.0], requires_grad=True)
    with detect_nan():
        kept = torch.sqrt(x)
        with pytest.raises(NonFiniteError):
            kept.sum().backward()
    assert kept.isnan().all()


def test_numpy_in_the_block_is_an_opaque_kernel() -> None:
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        x = torch.ones(3, requires_grad=True)
        weights = torch.ones(3)
        weights.numpy()[1] = NAN
        (x * weights).sum().backward()  # <-- numpy
    check(caught.value, "numpy", op="mul")
    assert caught.value.event.cause.code == "opaque_kernel"


def test_opening_one_twice_says_what_to_do() -> None:
    block = detect_nan()
    with block, pytest.raises(RuntimeError, match="another one"):
        block.__enter__()
    with block:  # one after the other is fine
        torch.ones(2).sum()


def test_inside_a_loop_over_a_dataloader() -> None:
    x = torch.ones(8, 4)
    x[5] = -1.0
    model = Net()
    opt = torch.optim.Adam(model.parameters())
    seen = 0
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        for (batch,) in DataLoader(TensorDataset(x), batch_size=2):
            opt.zero_grad()
            model(batch).mean().backward()
            opt.step()
            seen += 1
    assert seen == 2
    check(caught.value, "log", op="log", layer_name="norm.1")


def test_in_another_thread_only_that_thread_is_watched() -> None:
    found: list[NonFiniteError] = []

    def work() -> None:
        try:
            with detect_nan():
                torch.log(-torch.ones(2, requires_grad=True)).sum().backward()  # <-- thread
        except NonFiniteError as error:
            found.append(error)

    with detect_nan():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.ones(2, requires_grad=True).log().sum().backward()
    check(found[0], "thread", op="log")


def test_under_autocast() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(NonFiniteError) as caught, detect_nan(), torch.autocast("cpu", dtype=torch.float16):
        h = model(torch.ones(2, 4))
        (h.abs() + 300).square().mean().backward()  # <-- squared in half
    check(caught.value, "squared in half", op="pow")


def test_a_bad_input_and_a_bad_parameter_are_not_operations_births() -> None:
    model = torch.nn.Linear(4, 1)
    x = torch.ones(3, 4)
    x[1, 2] = NAN
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        model(x).sum().backward()
    event = caught.value.event
    assert (event.phase, event.tensor_name, event.sample_index, event.location) == ("data", "x", (1,), None), event
    assert "test_detect.py" in str(event), "where it was first used"

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    torch.nn.init.constant_(model[1].bias, NAN)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        model(torch.ones(3, 4)).sum().backward()
    event = caught.value.event
    assert (event.phase, event.tensor_name, event.layer_name) == ("state", "1.bias", "1"), event


def test_the_code_raises_because_of_the_value_itself() -> None:
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        a = torch.eye(3) * torch.log(torch.tensor(-1.0))  # <-- matrix
        torch.linalg.cholesky(a)
    check(caught.value, "matrix", op="log")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_assertion_about_the_loss() -> None:
    with pytest.raises((NonFiniteError, AssertionError)) as caught, detect_nan():
        loss = torch.log(-torch.ones(2, requires_grad=True)).sum()  # <-- asserted
        assert torch.isfinite(loss), "diverged"
    assert isinstance(caught.value, NonFiniteError)
    check(caught.value, "asserted", op="log")
    assert isinstance(caught.value.__cause__, AssertionError)


def test_other_exceptions_pass_as_they_are() -> None:
    with pytest.raises(KeyError), detect_nan():
        torch.ones(2, requires_grad=True).log().sum().backward()
        {}["missing"]


# -- near misses ---


def softmax_with_a_mask() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    mask = torch.ones(4, 4).triu(1).bool()
    x.masked_fill(mask, -INF).softmax(-1).square().sum().backward()


def nanmean() -> None:
    x = torch.tensor([1.0, NAN, 3.0])
    assert torch.nanmean(x).item() == 2.0


def filled_in() -> None:
    x = torch.tensor([1.0, NAN, INF], requires_grad=True)
    torch.nan_to_num(x.detach()).sum().item()
    (x.detach().nan_to_num() * torch.ones(3, requires_grad=True)).sum().backward()


def dropped_by_where() -> None:
    x = torch.tensor([0.0, 4.0])
    with torch.no_grad():
        assert torch.where(x > 0, 1 / x, torch.zeros(())).sum().item() == 0.25


def best_so_far() -> None:
    best = torch.tensor(INF)
    for loss in (3.0, 2.0):
        best = torch.minimum(best, torch.tensor(loss))
    assert best.item() == 2.0


def infinite_on_purpose() -> None:
    best = float("inf")
    if torch.ones(()).item() < best:
        torch.full((3,), -INF)


def checked_with_isnan() -> None:
    x = torch.tensor([1.0, -1.0]).log()
    assert torch.isnan(x).any()
    x[torch.isnan(x)] = 0.0
    assert x.sum().item() == 0.0


def attention() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def uninitialised() -> None:
    out = torch.empty(3).fill_(1.0)
    torch.empty(3, requires_grad=True)
    assert out.sum().item() == 3.0


def training() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    )
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()


@pytest.mark.parametrize(
    "work",
    [
        softmax_with_a_mask, nanmean, filled_in, dropped_by_where, best_so_far, infinite_on_purpose, checked_with_isnan,
        attention, uninitialised, training,
    ],
)  # fmt: skip
def test_values_that_are_meant_or_handled_raise_nothing(work: Any) -> None:
    with detect_nan():
        work()


def test_training_is_the_same_bit_for_bit() -> None:
    def weights(watched: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
        opt = torch.optim.Adam(model.parameters())

        def run() -> None:
            for _ in range(4):
                opt.zero_grad()
                F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
                opt.step()

        (detect_nan()(run) if watched else run)()
        return model.state_dict() | {"rng": torch.get_rng_state()}

    bare, ours = weights(False), weights(True)
    assert all(torch.equal(bare[k], ours[k]) for k in bare)


def test_switched_off_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAN_DETECTOR", "off")
    with detect_nan():
        torch.log(-torch.ones(2, requires_grad=True)).sum().backward()
    assert not is_replaying()


def test_a_small_script(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import torch, nan_detector\n"
        "with nan_detector.detect_nan():\n"
        "    x = torch.zeros(3, requires_grad=True)\n"
        "    (x / x).sum().backward()\n"
    )
    # The package that is tested, whether it is installed or only on this process's path.
    env = {**os.environ, "PYTHONPATH": str(Path(nan_detector.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "probe"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "NonFiniteError" in done.stderr
    assert "probe.py:4" in done.stderr
    assert "x / x" in done.stderr


# -- what is said ------------------------------------------------------------------------------------------------------


def test_nothing_is_said_of_steps_and_weights() -> None:
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        torch.sqrt(torch.tensor(-1.0, requires_grad=True)).backward()
    text = str(caught.value)
    assert text.startswith(" NaN born in the loss\n")
    assert text.endswith("and what follows (an optimizer step, say) is not run.        reproduced: yes")
    assert "step" not in text.splitlines()[0] and "weights" not in text
    assert (caught.value.event.step, caught.value.event.weights) == (0, "")


def test_backward_passes_are_counted() -> None:
    w = torch.tensor(4.0, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        for value in (4.0, 1.0, -1.0):
            torch.sqrt(w * value).backward()
    assert str(caught.value).startswith(" NaN born after 2 backward passes, in the loss\n")
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        for value in (4.0, -1.0):
            torch.sqrt(w * value).backward()
    assert str(caught.value).startswith(" NaN born after 1 backward pass, in the loss\n")


def test_a_late_birth_is_described_like_the_first() -> None:
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        for step in range(60):
            roots = torch.sqrt(x.detach())  # left out below: nobody's error
            (x[1:] * roots[1:] if step < 59 else x * roots).sum().backward()
    event = caught.value.event
    assert event.op == "sqrt" and event.inputs and event.inputs[0].negative_count == 1
    assert event.cause is not None and event.cause.code == "sqrt_of_negative" and event.step == 59


def test_code_executed_from_a_string_is_named_by_its_own_line() -> None:
    space: dict[str, Any] = {"torch": torch}
    exec("def loss(x):\n    y = x * 2\n    return torch.log(y).sum()\n", space)
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        space["loss"](torch.tensor([-1.0], requires_grad=True)).backward()
    location = caught.value.event.location
    assert location is not None and (location.file, location.line, location.function) == ("<string>", 3, "loss")
