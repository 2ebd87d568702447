"""Names, version and limits of a capsule's files."""

from __future__ import annotations

from pathlib import Path

#: Version of `step.json`; a reader refuses a later one.
FORMAT = 1

EVENT = "event.json"
STEP = "step.json"
STEP_TENSORS = "step.safetensors"
STATE_TENSORS = "state.safetensors"
GRADIENTS = "gradients.json"
GRADIENT_TENSORS = "gradients.safetensors"
REPRO = "repro.py"
REPRO_TENSORS = "repro.safetensors"

#: Folder of the capsules within a log's folder.
FOLDER = "capsules"
#: Capsules kept in one such folder; what comes after them is not written, and said once.
MAX_CAPSULES = 8
#: Bytes of the guilty operation's inputs; of an element-wise operation beyond that, the guilty elements alone.
MAX_REPRO_BYTES = 32 * 2**20
#: Bytes of a capsule's JSON that a reader takes.
MAX_JSON_BYTES = 64 * 2**20
#: Elements that a tensor may claim to have by being expanded: a file of some bytes must not ask for all the memory.
MAX_EXPANDED = 2**31
#: Depth of nested arguments.
MAX_DEPTH = 24


def why_no_capsule(path: Path) -> str:
    """What is wrong with the folder of a capsule, as the end of a sentence; "" where nothing is at first sight."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "is not there"
        return f"{what}: name the folder that an event has as its capsule, such as {FOLDER}/step-000094-1f0c22aa."
    if not (path / STEP).is_file():
        return f"is no capsule: it has no {STEP}. Name the folder that an event has as its capsule."
    return ""
