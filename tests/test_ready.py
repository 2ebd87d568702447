"""What the first hit of a process would wait for is done when the watch begins, and no earlier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from nan_detector import _opinfo, _ready

SRC = Path(_ready.__file__).parent.parent

FIRST_HIT = """
import json, sys, tempfile
import torch
import torch.nn.functional as F
from nan_detector import NaNDetector, _opinfo
from nan_detector._book import Book

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
optimizer.step()
before, found = len(_opinfo._infos), []

def state():
    return {"modules": set(sys.modules), "operations": set(map(str, _opinfo._infos))}

def located(book, event, write=Book.located):
    write(book, event)
    found.append(state())

Book.located = located
with NaNDetector(model, verbose=False, on_nan="warn") as det:
    for bad in (False, True):
        loss = F.cross_entropy(model(x), y)
        loss = loss - torch.log(0.0 * loss) if bad else loss
        loss.backward()
        found[:] = [state()] if bad else []
        optimizer.step()
        optimizer.zero_grad()
new = {name: sorted(found[1][name] - found[0][name]) for name in found[0]}
print(json.dumps({"before": before, "event": det.event.op, **new}))
"""


def test_the_first_hit_imports_nothing_and_knows_the_usual_operations() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_HIT],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"before": 0, "event": "log", "modules": [], "operations": []}


def test_each_usual_operation_is_one_of_pytorch() -> None:
    _ready.make_ready()
    known = set(map(str, _opinfo._infos))
    names = {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _ready._USUAL}
    assert names <= known
    assert isinstance(torch.ops.aten.addmm.default, torch._ops.OpOverload)
