"""Trainings under `nan-detector run`: the same numbers as without it, and a planted NaN told at its line, status 3."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nan_detector import NaNEvent
from nan_detector._eventlog import read_log

SRC, SCRIPTS = Path(__file__).parent.parent / "src", Path(__file__).parent / "scripts"
RUN = ("-m", "nan_detector", "run")


def python(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {k: v for k, v in os.environ.items() if k not in ("NAN_DETECTOR_STRICT", "OMP_NUM_THREADS")}
    paths = os.pathsep.join(filter(None, (str(SRC), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env={**known, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NAN_DETECTOR_STRICT": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )


def line_of(script: Path, text: str) -> int:
    lines = [i for i, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, lines
    return lines[0]


def final_events(folder: Path) -> list[NaNEvent]:
    return [r for r in read_log(folder) if isinstance(r, NaNEvent) and r.status == "final"]


# -- three scripts, as other people write them ------------------------------------------------------------------------

#: Script, its flag for the weights' file, what plants a NaN; the guilty line, operation and module.
TRAININGS = {
    "digits": ("digits.py", "--save-model={}", ("--plant", "40"), "x = (x - mean) / spread", "div", "root"),
    "digits_spawn": (
        "digits.py",
        "--save-model={}",
        ("--start-method", "spawn", "--plant", "40"),
        "x = (x - mean) / spread",
        "div",
        "root",
    ),
    "tiny_gpt": (
        "tiny_gpt.py",
        "--out={}",
        ("--plant=5",),
        "att = F.softmax(att, dim=-1)",
        "softmax",
        "transformer.h.1.attn",
    ),
    "tiny_gpt_compiled": (
        "tiny_gpt.py",
        "--out={}",
        ("--compile=True", "--plant=5"),
        "att = F.softmax(att, dim=-1)",
        "softmax",
        "transformer.h.1.attn",
    ),
    "hf_trainer": ("hf_trainer.py", "--out={}", ("--plant", "20"), "pooled = (hidden * weights)", "div", "root"),
}
TIMES = re.compile(r".*(_runtime|_per_second).*\n")


#: Compiling, and starting workers anew, takes long.
SLOW = ("digits_spawn", "tiny_gpt_compiled")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n in SLOW)) for n in TRAININGS])
def test_a_training_script(name: str, tmp_path: Path):
    file, out_flag, plant, text, op, module = TRAININGS[name]
    if file == "hf_trainer.py" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers and accelerate, 180 MB that CI does without: pip install transformers[torch]")
    script = SCRIPTS / file
    settings = [a for a in plant if "plant" not in a and not a.isdecimal()]

    bare = python(tmp_path, str(script), out_flag.format("bare.pt"), *settings)
    assert bare.returncode == 0, bare.stderr
    watched = python(tmp_path, *RUN, "--log", "well", str(script), out_flag.format("watched.pt"), *settings)
    assert watched.returncode == 0, watched.stderr
    assert "nan-detector" not in watched.stderr
    assert TIMES.sub("", watched.stdout) == TIMES.sub("", bare.stdout)
    expected, found = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("bare", "watched"))
    assert list(expected) == list(found) and all(torch.equal(expected[k], found[k]) for k in expected)
    assert final_events(tmp_path / "well") == []

    stopped = python(tmp_path, *RUN, str(script), out_flag.format("never.pt"), *plant)
    assert stopped.returncode == 3, stopped.stderr
    assert not (tmp_path / "never.pt").exists()
    line = line_of(script, text)
    assert f"{file}:{line}" in stopped.stderr and "Traceback" not in stopped.stderr
    assert stopped.stderr.count("NaN born at step") == 1
    *_, last_but_one, last = stopped.stderr.rstrip("\n").splitlines()
    assert last_but_one.startswith("nan-detector: 1 event, the script was stopped at step ")
    (folder,) = (tmp_path / "nan-detector-runs").iterdir()
    assert last == f"  log      nan-detector-runs/{folder.name}"
    (event,) = final_events(folder)
    assert event.location is not None
    assert (event.location.line, event.op, event.layer_name, event.weights) == (line, op, module, "clean")
    assert event.reproduced == "yes" and event.location.file == str(script)


# -- policies and their exit statuses ---------------------------------------------------------------------------------

LOOP = """\
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step(number):
    out = model(torch.ones(3, 4))
    loss = torch.sqrt(out - 50).mean() if number in (2, 5) else out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for number in range(8):
    step(number)
print("to the end", model.weight.isfinite().all().item())
sys.exit(4)
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    (folder / "train.py").write_text(LOOP)
    return folder


@pytest.mark.parametrize(
    ("policy", "status", "stdout", "last"),
    [
        ("stop", 3, "", "nan-detector: 1 event, the script was stopped at step 2."),
        ("skip", 4, "to the end True\n", "nan-detector: 2 events, 2 steps not taken."),
        ("rollback", 4, "to the end True\n", "nan-detector: 2 events, 2 steps not taken."),
        ("warn", 4, "to the end False\n", "nan-detector: 1 event."),
    ],
)
def test_a_policy_and_its_exit_status(policy: str, status: int, stdout: str, last: str, loop: Path):
    done = python(loop, *RUN, "--on-nan", policy, "--log", policy, "train.py")
    assert (done.returncode, done.stdout) == (status, stdout), done.stderr
    assert done.stderr.startswith(" NaN born at step 2, in the loss\n")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-2:] == [last, f"  log      {policy}"]


def test_the_policy_that_raises(loop: Path):
    done = python(loop, *RUN, "--on-nan", "raise", "--log", "raise", "train.py")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("NaN born at step 2") == 2 and done.stderr.count("  why  ") == 1
    assert done.stderr[done.stderr.index("Traceback") :] == (
        "Traceback (most recent call last):\n"
        f'  File "{loop}/train.py", line 18, in <module>\n'
        "    step(number)\n"
        f'  File "{loop}/train.py", line 14, in step\n'
        "    optimizer.step()\n"
        "NonFiniteError: NaN born at step 2, in the loss: torch.sqrt  ·  train.py:11 "
        "(square root of a negative number)\n"
        "nan-detector: 1 event, the script was stopped at step 2.\n"
        "  log      raise\n"
    )


def test_an_error_that_the_script_itself_makes_of_it(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        LOOP.replace(
            "    step(number)\n", "    try:\n        step(number)\n    except ArithmeticError:\n        pass\n"
        )
    )
    done = python(tmp_path, *RUN, "--on-nan", "raise", "train.py")
    assert (done.returncode, done.stdout) == (4, "to the end True\n")
    assert done.stderr.splitlines()[-2] == "nan-detector: 2 events."


def test_switched_off(loop: Path):
    done = python(loop, *RUN, "--log", "off", "train.py", NAN_DETECTOR="off")
    assert (done.returncode, done.stdout, done.stderr) == (4, "to the end False\n", "")
    assert not (loop / "off").exists()


FORKS = """
import multiprocessing as mp
import torch

def train(bad):
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        opt.zero_grad()
        model(torch.full((4, 2), float("nan") if bad and i == 1 else 1.0)).mean().backward()
        opt.step()

if __name__ == "__main__":
    children = [mp.get_context("fork").Process(target=train, args=(bad,)) for bad in (False, True)]
    for child in children:
        child.start()
        child.join()
    print([child.exitcode for child in children])
"""


def test_forked_children_have_a_log_each(tmp_path: Path):
    (tmp_path / "sweep.py").write_text(FORKS)
    done = python(tmp_path, *RUN, "--log", "log", "sweep.py")
    assert (done.returncode, done.stdout) == (0, "[0, 3]\n"), done.stderr
    folders = sorted((tmp_path / "log").iterdir())
    assert len(folders) == 2 and sorted(len(final_events(f)) for f in folders) == [0, 1]
    logs = "".join(f"\n  log      log/{f.name}" for f in folders)
    line = f"nan-detector: this process trained nothing; what its forked children trained was watched.{logs}\n"
    assert done.stderr.endswith(line)
    again = python(tmp_path, *RUN, "--log", "log", "sweep.py")
    assert again.stderr.count("\n  log      log/child-") == 2, "not those of the run before"


def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path):
    (tmp_path / "infer.py").write_text(
        "import torch\nwith torch.no_grad():\n    torch.nn.Linear(2, 1)(torch.ones(2))\n"
    )
    done = python(tmp_path, *RUN, "infer.py")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "nan-detector: nothing was watched: no module of this process was trained.\n"
    assert not (tmp_path / "nan-detector-runs").exists()


def test_the_script_decides_when_torch_is_loaded_and_after_what(tmp_path: Path):
    (tmp_path / "early.py").write_text(
        "import os, sys\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\nimport torch, importlib.util\n"
        "print(torch.get_num_threads(), type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)\n"
        "torch.nn.Linear(2, 1)(torch.ones(2)).backward()\n"
    )
    bare, watched = python(tmp_path, "early.py"), python(tmp_path, *RUN, "early.py")
    assert bare.stdout == watched.stdout == "2 SourceFileLoader SourceFileLoader\n", watched.stderr
    assert watched.returncode == 0


def test_a_progress_bar_does_not_run_into_the_report(tmp_path: Path):
    pytest.importorskip("tqdm", reason="the bar is tqdm's")
    script = LOOP.replace("range(8):", "tqdm.tqdm(range(8), mininterval=0):").replace("import sys", "import sys, tqdm")
    (tmp_path / "train.py").write_text(script)
    done = python(tmp_path, *RUN, "train.py")
    assert done.returncode == 3
    lines = re.split("[\r\n]", done.stderr)
    assert " NaN born at step 2, in the loss" in lines
    assert lines[-3].startswith("nan-detector: 1 event") and lines[-1] == ""
    assert any("2/8" in line for line in lines[:-3])


# -- many processes ---------------------------------------------------------------------------------------------------

RANKS = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    out = model(torch.ones(3, 4))
    loss = torch.sqrt(out - 50).mean() if step == int(sys.argv[1]) else out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(rank, "to the end", model.module.weight.sum().item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("bad", [pytest.param(-1, marks=pytest.mark.campaign), 2])
def test_torchrun(bad: int, tmp_path: Path):
    (tmp_path / "train.py").write_text(RANKS)
    launch = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone")
    done = python(tmp_path, *launch, *RUN, "train.py", str(bad))
    (folder,) = (tmp_path / "nan-detector-runs").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["events-rank0.jsonl", "events-rank1.jsonl"]
    if bad < 0:
        assert done.returncode == 0, done.stderr
        assert sorted(line.split()[0] for line in done.stdout.splitlines()) == ["0", "1"]
        assert final_events(folder) == []
    else:
        assert done.returncode != 0 and "to the end" not in done.stdout
        assert "train.py:12" in done.stderr and "exitcode  : 3" in done.stderr
        assert {e.rank for e in final_events(folder)} <= {0, 1} and final_events(folder)
