"""A log in short, as JSON values: what `nan-detector show --json` prints."""

from __future__ import annotations

from typing import Any

from nan_detector._digest import Digest, GradGroup, RunDigest, WarningGroup
from nan_detector._record import SCHEMA_VERSION, encode


def digest_dict(digest: Digest) -> dict[str, Any]:
    """The log as a dictionary of JSON values; non-finite floats are the strings "nan", "inf", "-inf"."""
    return {
        "schema_version": SCHEMA_VERSION,
        "files": [str(f) for f in digest.files],
        "runs": [_run(r) for r in digest.runs],
        "problems": [{"file": str(p.file), "line": p.line, "message": p.message} for p in digest.problems],
        "problems_left_out": digest.problems_left_out,
    }


def _run(run: RunDigest) -> dict[str, Any]:
    return {
        "rank": run.rank,
        "run": encode(run.run),
        "events": [e.to_dict() for e in run.events],
        "events_left_out": run.events_left_out,
        "warnings": [_warning(g) for g in run.warnings],
        "grads": [_grad(g) for g in run.grads],
        "steps": {
            "count": run.step_count,
            "first": encode(run.steps[0]) if run.steps else None,
            "last": encode(run.steps[-1]) if run.steps else None,
        },
    }


def _warning(group: WarningGroup) -> dict[str, Any]:
    return {"count": group.count, "first_step": group.first_step, "last": group.last.to_dict()}


def _grad(group: GradGroup) -> dict[str, Any]:
    return {
        "count": group.count,
        "first_step": group.first_step,
        "last_step": group.last_step,
        "largest": group.largest.to_dict(),
    }
