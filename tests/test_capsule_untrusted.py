"""A capsule may come from anywhere: what is damaged or hostile is refused in one line, and nothing of it is run."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import _capsule_programs as programs
from nan_detector._capsule import layout
from nan_detector._capsule.again import again
from nan_detector._capsule.functions import function_named, functions, name_of
from nan_detector._capsule.plain import decoded, encoded
from nan_detector._capsule.read import open_capsule
from nan_detector._capsule.tensors import Reader, Writer, device_or_cpu
from nan_detector._cli.app import main
from nan_detector._errors import CapsuleError

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule with nothing wrong; tests take copies."""
    det = programs.train_watched("classifier", capsule=True, log_dir=tmp_path_factory.mktemp("good"))
    return Path(det.event.capsule)


@pytest.fixture
def capsule(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "capsule"))


def changed(capsule: Path, change: Callable[[Any], None], name: str = layout.STEP) -> None:
    data = json.loads((capsule / name).read_text())
    change(data)
    (capsule / name).write_text(json.dumps(data))


def refusal(capsule: Path) -> str:
    with pytest.raises(CapsuleError) as refused:
        again(open_capsule(capsule), programs.classifier)
    message = str(refused.value)
    assert "\n" not in message
    return message


# -- files that are not what they should be ---------------------------------------------------------------------------


def test_no_folder(tmp_path: Path):
    where = tmp_path / "nowhere"
    assert refusal(where) == (
        f"{where} is not there: name the folder that an event has as its capsule, such as "
        "capsules/step-000094-1f0c22aa."
    )


def test_a_folder_that_is_none(tmp_path: Path):
    assert refusal(tmp_path) == (
        f"{tmp_path} is no capsule: it has no step.json. Name the folder that an event has as its capsule."
    )


@pytest.mark.parametrize("name", [layout.STEP, layout.EVENT, layout.GRADIENTS])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"format": 1}', b"\x80\x04cos\nsystem\n."]
)
def test_json_that_is_none(capsule: Path, name: str, content: bytes):
    (capsule / name).write_bytes(content)
    if name == layout.GRADIENTS:  # read only where the loss is not in the capsule
        if content == b"[]":
            return
        with pytest.raises(CapsuleError):
            open_capsule(capsule).gradients()
        return
    assert refusal(capsule)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the pipes of Unix")
@pytest.mark.parametrize("name", [layout.EVENT, layout.STEP_TENSORS, layout.STATE_TENSORS, layout.GRADIENTS])
def test_a_pipe_is_not_waited_for(capsule: Path, name: str):
    (capsule / name).unlink(missing_ok=True)
    os.mkfifo(capsule / name)
    if name == layout.GRADIENTS:
        with pytest.raises(CapsuleError, match=f"{name} is no file: the capsule is damaged"):
            open_capsule(capsule).gradients()
        return
    assert refusal(capsule) == f"{capsule / name} is no file: the capsule is damaged."


@pytest.mark.parametrize("name", [layout.STEP_TENSORS, layout.STATE_TENSORS])
def test_tensors_cut_off(capsule: Path, name: str):
    whole = (capsule / name).read_bytes()
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        (capsule / name).write_bytes(whole[:length])
        assert "is no whole safetensors file" in refusal(capsule)
    (capsule / name).unlink()
    assert refusal(capsule).endswith("is not there: the capsule is not whole.")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**60]},
        {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
    ],
)
def test_tensors_that_claim_to_be_huge(capsule: Path, entry: Any):
    header = json.dumps({"t0": entry}).encode()
    (capsule / layout.STEP_TENSORS).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    assert "is no whole safetensors file" in refusal(capsule)


def test_a_header_without_end(capsule: Path):
    (capsule / layout.STEP_TENSORS).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "is no whole safetensors file" in refusal(capsule)


def test_a_number_beyond_every_number_in_the_history(capsule: Path):
    changed(capsule, lambda d: d["history"].update(loss=[1.5, 10**400, 2]))
    assert open_capsule(capsule).history["loss"] == (1.5, 2.0)


def test_a_later_format(capsule: Path):
    changed(capsule, lambda d: d.update(format=99))
    assert refusal(capsule) == (
        "the capsule has format 99 and this release reads 1: use the release of nan-detector that wrote it."
    )


# -- a step that would do something else ------------------------------------------------------------------------------


def calls(data: Any) -> list[Any]:
    found: list[Any] = data["step"]["entries"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        *(
            "os.system",
            "builtins.eval",
            "torch.load",
            "torch.save",
            "torch.hub.load",
            "torch.from_file",
            "torch.compile",
        ),
        *("torch.ops.load_library", "torch.Tensor.__reduce_ex__", "torch.Tensor.numpy", "torch.Tensor.register_hook"),
        *("torch.Tensor.untyped_storage", "torch.Tensor.resize_", "torch.Tensor.apply_", "torch.Tensor.__class__", ""),
        *("torch.nn.functional.torch", "torch.Tensor.data.__get__.__globals__", "../../etc/passwd", None, 3, ["a"]),
    ],
)
def test_only_tensor_functions_can_be_named(capsule: Path, name: Any):
    assert function_named(name) is None
    changed(capsule, lambda d: calls(d)[-1].update(kind="call", func={"torch": name}))
    assert refusal(capsule).endswith("which a capsule may not call.")


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "change",
    [
        lambda d: calls(d)[0].update(args={"$": "tuple", "v": [deep(500)]}),
        lambda d: calls(d)[0].update(args={"$": "pickle", "v": "gASV"}),
        lambda d: calls(d)[0].update(args={"$": "made", "v": [10**9, 0]}),
        lambda d: calls(d)[0].update(args={"$": "tuple", "v": [{"$": "made", "v": [0, 0]}]}),  # itself
        lambda d: calls(d)[0].update(args={"$": "tuple", "v": [{"$": "outside", "v": -1}]}),
        lambda d: calls(d)[0].update(args={"$": "tuple", "v": [{"$": "tensor", "v": {"key": "../../x"}}]}),
        lambda d: calls(d)[0].update(args={"$": "tuple", "v": [{"$": "dtype", "v": "load"}]}),
        lambda d: calls(d)[0].update(args={"$": "tuple", "v": [{"$": "size", "v": [-1]}]}),
        lambda d: calls(d)[0].update(args=None, kwargs=None),
        lambda d: calls(d)[0].update(kind="exec"),
        lambda d: calls(d)[0].update(made=2**60),
        lambda d: calls(d)[0].update(kind="root", func={"module": "__class__"}),
        lambda d: calls(d)[0].update(mark={"file": 1, "line": -(2**70), "function": 0, "source_line": ""}),
        lambda d: calls(d)[0].update(mark={"file": {}, "line": 1, "function": "f", "source_line": "x"}),
        lambda d: calls(d)[0].update(autocast=[1, 2]),
        lambda d: d["step"].update(entries={"a": 1}),
        lambda d: d["step"].update(entries=[3]),
        lambda d: d["step"].update(outside=["x"]),
        lambda d: d["step"].update(outside=[{"parameter": "nobody"}]),
        lambda d: d.update(state={"parameters": [], "buffers": {}}),
        lambda d: d["state"]["parameters"].update({"0.weight": {"tensor": {"key": 7}}}),
        lambda d: d["environment"].update(default_dtype="int64"),
    ],
)
def test_json_that_is_no_step(capsule: Path, change: Callable[[Any], None]):
    changed(capsule, change)
    assert refusal(capsule)


def numpy_state(keys: list[int], position: int) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        root = next(e for e in calls(data) if e["kind"] == "root")
        root["moment"]["numpy_rng"] = ["MT19937", keys, position, 0, 0.0]

    return change


@pytest.mark.parametrize(
    "change",
    [
        numpy_state([1] * 624, 10**6),  # beyond its numbers: memory of others
        numpy_state([1] * 624, -5),
        numpy_state([2**64] * 624, 0),
        lambda d: calls(d)[-1].update(args={"$": "tuple", "v": [{"$": "made", "v": [0, float(2**1023) * 2]}]}),
    ],
)
def test_numbers_out_of_their_range(capsule: Path, change: Callable[[Any], None]):
    changed(capsule, change)
    (capsule / layout.STEP).write_text((capsule / layout.STEP).read_text().replace("Infinity", "1e999"))
    assert refusal(capsule)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"expand": [2**40, 2**30]}, "it claims to be larger than any step's"),
        ({"expand": [-1]}, "is no list of sizes"),
        ({"stride": [2**50]}, "its strides do not fit its shape"),
        ({"stride": "x"}, "is no list of sizes"),
        ({"complex": True}, "cannot be made"),
    ],
)
def test_tensors_are_made_only_as_large_as_their_file(capsule: Path, more: dict[str, Any], said: str):
    changed(capsule, lambda d: d["step"]["outside"][0].update(tensor={"key": "t0", **more}))
    assert said in refusal(capsule)


def test_a_factory_makes_no_tensor_larger_than_any_steps():
    made = function_named("torch.zeros")
    assert made is not None and made(3, 2).shape == (3, 2)
    with pytest.raises(CapsuleError, match="larger than any step's"):
        made((2**20, 2**20))


@pytest.mark.parametrize("name", ["torch.Tensor.repeat", "torch.tile", "torch.repeat_interleave"])
def test_a_tensor_is_not_repeated_beyond_any_steps(name: str):
    repeated = function_named(name)
    t = torch.ones(2, 3)
    assert repeated is not None and repeated(t, *([2] if "interleave" in name else [(2, 2)])).numel() in (12, 24)
    with pytest.raises(CapsuleError, match="larger than any step's"):
        repeated(t, *([2**30] if "interleave" in name else [(2**15, 2**15)]))


def test_attributes_of_the_model_that_hold_code_are_not_replaced(capsule: Path):
    def add(data: Any) -> None:
        moment = next(e for e in calls(data) if e["kind"] == "root")["moment"]
        moment["attributes"] += [["1", "forward", "x"], ["1", "__class__", 3], ["1", "invented", 3]]

    changed(capsule, add)
    assert again(open_capsule(capsule), programs.classifier).same


def test_the_program_in_it_is_not_run(capsule: Path, tmp_path: Path):
    (capsule / layout.REPRO).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert again(open_capsule(capsule), programs.classifier).same
    assert not (tmp_path / "ran").exists()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("programs", "--model='programs' must be a module and a function, such as my_package.train:make_model."),
        (
            "no_such:f",
            "--model='no_such:f': No module named 'no_such'; run this where python -c 'import no_such' works.",
        ),
        ("_capsule_programs:nobody", "--model='_capsule_programs:nobody': _capsule_programs has no function nobody."),
    ],
)
def test_a_model_that_cannot_be_made(good: Path, model: str, line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(good), "--model", model]) == 2
    assert capsys.readouterr() == ("", f"nan-detector: {line}\n")


@pytest.mark.parametrize("program", ["raise SystemExit(0)", "import sys\ndef make(): sys.exit()"])
def test_a_program_that_exits_is_no_replay_that_went_well(
    good: Path, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    name = f"exits_{len(program)}"
    (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["replay", str(good), "--model", f"{name}:make"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "raised SystemExit" in err


def test_a_factory_that_needs_arguments(good: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(good), "--model", "_capsule_programs:Block"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("nan-detector: --model='_capsule_programs:Block' raised TypeError: ")
    assert err.endswith("name a function that needs no arguments.\n")


def test_a_damaged_capsule_is_one_line(capsule: Path, capsys: pytest.CaptureFixture[str]):
    (capsule / layout.EVENT).write_text("{}")
    assert main(["replay", str(capsule), "--model", "_capsule_programs:classifier"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "event.json is no event" in err


def test_the_report_on_standard_output(good: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(good), "--model", "_capsule_programs:classifier", "--ops"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].split() == ["operation", "where", "inputs", "output"]
    assert sum(line.startswith(">  sqrt ") for line in lines) == 1
    assert " NaN born at step 0, in the forward pass" in lines
    assert lines[-1] == "the same event as in the capsule: operation, place and cause"


def test_another_event_has_status_1(capsule: Path, capsys: pytest.CaptureFixture[str]):
    changed(capsule, lambda d: d.update(op="log"), layout.EVENT)
    assert main(["replay", str(capsule), "--model", "_capsule_programs:classifier"]) == 1
    out = capsys.readouterr().out
    assert out.endswith("not the event in the capsule:\n  the operation is sqrt, and was log\n")


# -- the parts --------------------------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.Size([2, 3]), ..., torch.channels_last])
    | st.builds(slice, st.integers() | st.none(), st.integers() | st.none()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_goes_there_and_back(value: Any):
    missing: list[str] = []
    text = json.dumps(encoded(value, lambda v: None, missing), allow_nan=False)
    assert not missing
    back = decoded(json.loads(text), lambda kind, v: pytest.fail(f"{kind} is not plain"))
    assert repr(back) == repr(value)


def test_what_is_not_plain_is_named():
    missing: list[str] = []
    form = encoded((1, {"f": os.getcwd, "s": {1, 2}}), lambda v: None, missing)
    assert missing == ["builtin_function_or_method", "set"]
    assert form["v"][1]["v"][0] == ["f", {"$": "missing", "v": "builtin_function_or_method"}]


@pytest.mark.parametrize(
    "t",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.tensor([1.0, 2.0]).expand(5, 2),
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, complex("nan")]),
        torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
        torch.tensor([torch.nan, torch.inf, -0.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([2**62, -1]),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}-{'x'.join(map(str, t.shape))}",
)
def test_tensors_go_there_and_back_with_their_layout(t: Tensor, tmp_path: Path):
    from safetensors.torch import save_file

    writer = Writer(10_000)
    spec = json.loads(json.dumps(writer.add(t)))
    save_file(writer.tensors, tmp_path / "t.safetensors")
    back = Reader(tmp_path / "t.safetensors").take(spec)
    assert back.dtype == t.dtype and back.shape == t.shape
    assert torch.equal(back.isnan(), t.isnan()) if t.is_floating_point() or t.is_complex() else torch.equal(back, t)
    same = (back == t) | (back != back)
    assert bool(same.all())
    if t.is_contiguous(memory_format=torch.channels_last) if t.dim() == 4 else 0 in t.stride():
        assert back.stride() == t.stride()


@pytest.mark.parametrize("name", ["cuda:99", "privateuseone", "meta", "nowhere", "", None, 3])
def test_a_device_that_is_not_here_is_the_cpu(name: Any):
    assert device_or_cpu(name) == torch.device("cpu")


def test_what_a_writer_does_not_take():
    writer = Writer(16)
    assert writer.add(torch.zeros(5)) is None
    assert writer.add(torch.zeros(4)) is not None and writer.add(torch.zeros(1)) is None
    assert writer.add(torch.zeros(100), always=True) is not None
    assert Writer(1000).add(torch.eye(2).to_sparse()) is None
    assert Writer(1000).add(torch.empty(2, device="meta")) is None


@pytest.mark.parametrize(
    "name",
    [
        *("torch.nn.functional.cross_entropy", "torch.Tensor.__getitem__", "torch.Tensor.__rsub__", "torch.exp"),
        *("torch.linalg.norm", "torch.fft.fft", "torch.special.expit", "torch.Tensor.grad.__get__", "torch.einsum"),
        *("torch.Tensor.backward", "torch.autograd.grad", "torch._foreach_norm", "torch.Tensor.mul_", "torch.where"),
        *("torch.zeros", "torch.Tensor.repeat", "torch.tile"),
    ],
)
def test_functions_have_their_names(name: str):
    found = function_named(name)
    assert found is not None
    known = name_of(found)
    assert known is not None and function_named(known) == found  # some are the same function under two names


def test_no_function_of_the_list_takes_code_or_files():
    for name in functions():
        assert name.startswith(("torch.", "nan_detector.scale")), name
        assert not any(
            w in name for w in ("load", "save", "hook", "storage", "pickle", "reduce_ex", "numpy", "file")
        ), name
