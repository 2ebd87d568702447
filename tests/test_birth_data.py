"""Births that the batch brought: inputs, labels, samples, empty batches; and bad values that the program handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from _data_programs import born, train
from nan_detector import NaNDetector

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")


def rows(seed: int, n: int = 6, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


class Regressor(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.body(features)


def mse(model: torch.nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def pairs(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(rows(i), rows(i + 50, width=1)) for i in range(n)]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_feature_is_named_by_the_parameter_of_forward_and_by_its_sample(value: float) -> None:
    batches = pairs()
    batches[2][0][4, 1] = value
    event = born(
        train(Regressor(), batches, mse),
        step=2,
        phase="data",
        tensor_name="features",
        sample_index=(4,),
        layer_name=None,
    )
    assert event.verdict == "data"
    assert event.output is not None and event.output.bad_count == 1


def test_a_feature_that_is_bad_in_several_samples_is_named_by_its_column() -> None:
    batches = pairs()
    batches[2][0][[1, 4], 3] = NAN
    event = train(Regressor(), batches, mse).event
    assert event is not None and event.cause is not None and event.first_use is not None
    assert event.cause.evidence == ("features: of 24 values (float32) 2 NaN, first at [1, 3], all in column 3.",)
    assert event.first_use.source_line == "return self.body(features)"


def test_sample_ids_that_were_told_are_reported_for_the_bad_samples_only() -> None:
    batches = pairs()
    batches[1][0][0, 0] = NAN
    batches[1][0][5, 2] = NAN
    det = train(Regressor(), batches, mse, ids=lambda i: [f"img{i}_{k}.png" for k in range(6)])
    born(det, step=1, phase="data", sample_index=(0, 5), sample_id=("img1_0.png", "img1_5.png"))


class FromDict(Regressor):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.body(batch["pixel_values"])


@pytest.mark.parametrize(
    ("key", "names", "expected"),
    [
        ("id", [f"s{k}" for k in range(6)], ("s2",)),
        ("sample_idx", torch.arange(100, 106), ("102",)),
        ("index", list(range(6)), ("2",)),
        ("image_path", [f"/data/{k}.png" for k in range(6)], ("/data/2.png",)),
    ],
)
def test_a_batch_that_carries_the_names_of_its_samples(key: str, names: Any, expected: tuple[str, ...]) -> None:
    def batch(i: int) -> dict[str, Any]:
        x = rows(i)
        if i == 1:
            x[2, 3] = INF
        return {"pixel_values": x, "y": rows(i + 50, width=1), key: names}

    det = train(FromDict(), [batch(i) for i in range(3)], lambda m, b: F.mse_loss(m(b), b["y"]))
    born(det, step=1, phase="data", tensor_name='batch["pixel_values"]', sample_index=(2,), sample_id=expected)


def test_what_only_looks_like_names_of_samples_is_not_shown() -> None:
    def batch(i: int) -> dict[str, Any]:
        x = rows(i)
        if i == 1:
            x[2, 3] = INF
        return {
            "pixel_values": x,
            "y": rows(i + 50, width=1),
            "input_ids": torch.zeros(6, 7),
            "grid": [1] * 6,
            "id": "run7",
        }

    det = train(FromDict(), [batch(i) for i in range(3)], lambda m, b: F.mse_loss(m(b), b["y"]))
    born(det, step=1, phase="data", sample_index=(2,), sample_id=())


@dataclass
class Item:
    feats: Tensor
    idx: Tensor


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x: Any, *, scale: Any = None) -> Tensor:
        out = self.a(x[0].feats) + self.b(x[1].feats)
        return out if scale is None else out * scale["by"][0]


def test_a_bad_tensor_inside_a_list_of_dataclasses() -> None:
    def batch(i: int) -> list[Item]:
        items = [Item(rows(i), torch.arange(6)), Item(rows(i + 9), torch.arange(10, 16))]
        if i == 2:
            items[1].feats[3] = NAN
        return items

    det = train(Two(), [batch(i) for i in range(4)], lambda m, b: m(b).square().mean())
    born(det, step=2, phase="data", tensor_name="x[1].feats", sample_index=(3,), sample_id=("13",))


def test_a_bad_tensor_in_a_keyword_argument() -> None:
    scales = [torch.ones(6, 1) for _ in range(3)]
    scales[1][2] = NAN
    items = [[Item(rows(i), torch.arange(6)), Item(rows(i + 9), torch.arange(6))] for i in range(3)]

    def step(model: torch.nn.Module, i: int) -> Tensor:
        return model(items[i], scale={"by": [scales[i]]}).square().mean()

    born(train(Two(), range(3), step), step=1, phase="data", tensor_name='scale["by"][0]', sample_index=(2,))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class OnPair(Regressor):
    def forward(self, pair: Pair) -> Tensor:
        return self.body(pair.left) + self.body(pair.right)


def test_a_bad_field_of_a_named_tuple() -> None:
    batches = [Pair(rows(i), rows(i + 9)) for i in range(3)]
    batches[1].right[0, 0] = NAN
    det = train(OnPair(), batches, lambda m, b: m(b).square().mean())
    born(det, step=1, phase="data", tensor_name="pair.right", sample_index=(0,))


def test_a_batch_that_the_step_itself_spoils_is_blamed_on_the_line_that_did() -> None:
    def step(model: torch.nn.Module, i: int) -> Tensor:
        x = torch.ones(6, 4)
        if i == 1:
            x[2, 1:3] = NAN  # <-- spoiled
        return model(x).square().mean()

    born(train(Regressor(), range(3), step), step=1, phase="loss", mark="spoiled")


@pytest.mark.parametrize("late", [False, True])
def test_a_write_through_a_view_made_before_the_model_call(late: bool) -> None:
    """The replay needs the write although nothing holds its result."""
    outside = [rows(i) for i in range(4)]

    def step(model: torch.nn.Module, i: int) -> Tensor:
        x = outside[i] if late else outside[i] * 2.0
        row = x[3]
        if i == 2:
            row.div_(torch.zeros(4))  # <-- through a view
        return model(x).square().mean()

    born(train(Regressor(), range(4), step), step=2, phase="loss", mark="through a view", op="div")


# -- labels ---


def test_a_bad_label_is_named_as_in_the_call_of_the_loss() -> None:
    batches = pairs()
    batches[3][1][2, 0] = NAN
    born(train(Regressor(), batches, mse), step=3, phase="data", tensor_name="y", sample_index=(2,))


def test_a_bad_label_in_a_dictionary_and_a_loss_module() -> None:
    criterion = torch.nn.SmoothL1Loss()

    def step(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return criterion(model(batch["x"]), batch["target"])

    batches = [{"x": rows(i), "target": rows(i + 50, width=1)} for i in range(3)]
    batches[1]["target"][5] = -INF
    born(train(Regressor(), batches, step), step=1, phase="data", tensor_name='batch["target"]', sample_index=(5,))


def test_a_bad_label_used_by_an_operator_of_a_hand_written_loss() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        return ((out - y) ** 2).mean()

    batches = pairs()
    batches[1][1][1, 0] = INF
    born(train(Regressor(), batches, step), step=1, phase="data", tensor_name="y", sample_index=(1,))


def test_bad_sample_weights() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y, weights = batch
        return (F.mse_loss(model(x), y, reduction="none").squeeze(1) * weights).mean()

    batches = [(*p, torch.rand(6)) for p in pairs()]
    batches[2][2][3] = NAN
    born(train(Regressor(), batches, step), step=2, phase="data", tensor_name="weights", sample_index=(3,))


def test_an_input_that_the_loop_prepares_is_blamed_on_the_line_that_broke_it() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = (x - x.mean(0)) / x.std(0)  # <-- whitening
        return F.mse_loss(model(x), y)

    batches = pairs()
    batches[2][0][:, 1] = 3.0
    born(train(Regressor(), batches, step), step=2, phase="loss", mark="whitening", op="div")


@pytest.mark.parametrize("convert", [torch.tensor, torch.as_tensor, torch.from_numpy])
def test_a_numpy_batch_that_the_loop_makes_tensors_of_is_data(convert: Any) -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, target = convert(batch["x"]), convert(batch["y"])
        return F.mse_loss(model(x), target)

    for key, name in (("x", "features"), ("y", "target")):
        batches = [{"x": x.numpy().copy(), "y": y.numpy().copy()} for x, y in pairs()]
        batches[2][key][4, 0] = NAN
        born(train(Regressor(), batches, step), step=2, phase="data", tensor_name=name, sample_index=(4,))


def test_a_list_of_numbers_that_the_loop_makes_a_tensor_of_is_data() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        target = torch.tensor(batch[1])
        return F.mse_loss(model(batch[0]), target)

    batches = [(x, y.tolist()) for x, y in pairs()]
    batches[1][1][3][0] = NAN
    born(train(Regressor(), batches, step), step=1, phase="data", tensor_name="target", sample_index=(3,))


@pytest.mark.parametrize("bad", ["x", "y"])
@pytest.mark.parametrize("inline", [False, True])
def test_a_batch_that_is_moved_first_is_named_as_if_it_were_not(bad: str, inline: bool) -> None:
    def step(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if inline:
            x, y = batch["x"], batch["y"]
            return F.mse_loss(model(x.to("cpu").float()), y.to("cpu", torch.float32))
        moved = {k: v.to("cpu", torch.float32) for k, v in batch.items()}
        return F.mse_loss(model(moved["x"]), moved["y"])

    batches = [{"x": x.double(), "y": y.double()} for x, y in pairs()]
    batches[2][bad][3] = NAN
    event = born(train(Regressor(), batches, step), step=2, phase="data", sample_index=(3,))
    assert event.tensor_name == ("features" if bad == "x" else "y" if inline else 'moved["y"]')
    assert event.cause is not None and event.cause.code == ("input_non_finite" if bad == "x" else "label_non_finite")


def test_an_input_that_the_loop_normalises_is_still_an_input() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = (x - 0.5) / 0.25
        return F.mse_loss(model(x), y)

    batches = pairs()
    batches[1][0][2] = NAN
    event = born(train(Regressor(), batches, step), step=1, phase="data", tensor_name="x", sample_index=(2,))
    assert event.cause is not None and event.cause.code == "input_non_finite"


def test_an_integer_made_of_nan_is_no_event_but_a_target_out_of_range_raises_as_ever() -> None:
    """NaN becomes some integer in a cast: nothing is non-finite any more."""

    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        bucket = torch.full((6,), NAN).to(torch.int64).clamp(0, 0)
        return F.mse_loss(model(x), y) + bucket.float().mean() * 0.0

    assert train(Regressor(), pairs(), step).event is None


# -- empty batches ---


def test_the_mean_over_an_empty_batch() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        return (out - y).square().mean()  # <-- empty mean

    batches = pairs()
    batches[2] = (torch.empty(0, 4), torch.empty(0, 1))
    born(train(Regressor(), batches, step), step=2, phase="loss", mark="empty mean", op="mean")


def test_an_empty_batch_in_a_loss_of_the_library() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)  # <-- empty entropy

    model = torch.nn.Linear(4, 3)
    batches = [(rows(i), torch.zeros(6, dtype=torch.long)) for i in range(3)]
    batches[1] = (torch.empty(0, 4), torch.empty(0, dtype=torch.long))
    event = born(train(model, batches, step), step=1, phase="loss", mark="empty entropy", reproduced="yes")
    assert event.op in ("nll_loss_forward", "nll_loss", "cross_entropy")


def test_all_labels_ignored_is_a_mean_of_nothing() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, ignore_index=-100)  # <-- ignored

    model = torch.nn.Linear(4, 3)
    batches = [(rows(i), torch.zeros(6, dtype=torch.long)) for i in range(3)]
    batches[2][1].fill_(-100)
    event = born(train(model, batches, step), step=2, phase="loss", mark="ignored")
    assert event.op in ("nll_loss_forward", "nll_loss", "cross_entropy")


def test_a_selection_without_members() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        error = (model(x) - y).abs()
        return error[y > 0].mean()  # <-- nothing selected

    batches = pairs()
    batches[1][1].abs_().neg_()
    born(train(Regressor(), batches, step), step=1, phase="loss", mark="nothing selected", op="mean")


def test_a_batch_changed_in_place_after_the_model_saw_it_is_still_judged_by_what_the_model_saw() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss = (model(x) - y).abs().mean()
        y.fill_(0.0)
        return loss

    batches = pairs()
    batches[1][1][4] = NAN
    born(train(Regressor(), batches, step), step=1, phase="data", tensor_name="y", sample_index=(4,))


def test_the_detector_without_set_batch_counts_the_steps_itself() -> None:
    model, batches = Regressor(), pairs()
    batches[3][0][0, 0] = NAN
    opt = torch.optim.Adam(model.parameters())
    with NaNDetector(model, verbose=False) as det:
        for batch in batches:
            opt.zero_grad()
            mse(model, batch).backward()
            opt.step()
            if det.triggered:
                break
    born(det, step=3, phase="data", tensor_name="features", sample_index=(0,))
