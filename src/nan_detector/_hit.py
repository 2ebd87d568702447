"""A step is replayed, and the harm in it traced to its birth."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._again import Again
from nan_detector._at_the_loss import AtTheLoss
from nan_detector._bad_weights import overwritten, poisoned_buffers, weights_lost
from nan_detector._births import birth_of
from nan_detector._entries import Entry
from nan_detector._errors import ReplayRefused
from nan_detector._finding import Finding, concluded
from nan_detector._naming import Names
from nan_detector._origin import silent_births
from nan_detector._records import LossTerm
from nan_detector._repair import site_of
from nan_detector._replay import Step
from nan_detector._replayed import Replayed
from nan_detector._run_step import Call
from nan_detector._samples import as_it_came, sample_ids
from nan_detector._state import logger, strict
from nan_detector._tape import Tape
from nan_detector._trace import BirthKind, Trace

#: What a replay changes for the process (the stance of compiled code, `Module.__call__`) is put back in order.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def one_at_a_time(budget_s: float) -> Iterator[None]:
    """Wait for the replays of other threads.

    Raises:
        ReplayRefused: They took longer than `budget_s` seconds.
    """
    if not _one_at_a_time.acquire(timeout=min(budget_s, threading.TIMEOUT_MAX)):
        raise ReplayRefused("another thread was replaying all the time (replay_budget_s)")
    try:
        yield
    finally:
        _one_at_a_time.release()


def relevant_entries(tape: Tape) -> list[Entry]:
    """The entries since the last gate, those they depend on, and the program's own writes into the weights they use."""
    recent = [e for e in tape.entries if e.number >= tape.boundary and not e.judged]
    wanted = tape.needed(recent)
    rewrites = tape.rewrites(wanted)
    for e in rewrites:
        e.rewrites = True
    wanted |= rewrites
    return [e for e in tape.entries if e in wanted]


def investigate(
    tape: Tape,
    models: dict[str, torch.nn.Module],
    budget_s: float,
    *,
    silent: bool = False,
    unscaled: bool = False,
    call: Call | None = None,
    conclude: Callable[[Replayed, list[str]], Finding] | None = None,
    evidence: Any = None,
    names: Names | None = None,
    only: Entry | None = None,
    tell: Callable[[Finding], None] | None = None,
) -> Finding:
    """Replay the step on `tape` and trace the harm to its birth. Never raises on the training's account.

    Args:
        tape: What was recorded of the step.
        models: The watched models.
        budget_s: Seconds that the replay may take.
        silent: Look for overflows that did no harm instead.
        call: Replay this call of a step function instead of what is on the tape.
        unscaled: Replay with every loss scale at 1: what is bad then is not the scaler's doing.
        only: Replay this call and what it depends on, instead of all since the last gate.
        conclude: What to make of the replay; None for the birth that the step's harm goes back to.
        evidence: Keeps what shows the guilty operation alone, for a capsule.
        names: Names of the models and of the batch, where they are known from elsewhere.
        tell: Told where a bad loss comes from as soon as that is known; the backward is still to be made then.
    """
    notes = [f"dropped: {d}" for d in tape.dropped]
    wanted = tape.needed([only]) if only is not None else frozenset()
    entries = relevant_entries(tape) if only is None else [e for e in tape.entries if e in wanted]
    if not entries and call is None:
        return Finding(notes=(*notes, "nothing of this step was recorded, so it cannot be replayed"))
    names = Names(models) if names is None else names
    if weights_lost(entries, names, tape.outside):
        return Finding(
            notes=(
                *notes,
                "not replayed: when it was found, the weights had been overwritten with non-finite values by code that "
                "no gate sees (an update by hand, a compiled optimizer step)",
            )
        )
    if not _one_at_a_time.acquire(timeout=min(budget_s, threading.TIMEOUT_MAX)):
        return Finding(notes=(*notes, "not replayed: another thread was replaying all the time (replay_budget_s)"))
    try:
        try:
            again = Again(entries, list(tape.outside.values()), models, names, call, unscaled)
            step = again.step(time.perf_counter() + budget_s)
            if evidence is not None:
                evidence.start()
                step.tracer.evidence = evidence
            if tell is not None:
                known = tuple(notes)

                def so_far(trace: Trace, micro_step: int) -> None:
                    tell(_with_samples(Finding(trace, "yes", known, micro_step), names, entries))

                step.at_the_loss = AtTheLoss(so_far)
            replayed = step.run()
        finally:
            if evidence is not None:
                evidence.finish()
            _one_at_a_time.release()
        if tape.moved and not any(e.losses for e in entries):
            replayed.same = False  # made of other weights, and there is no loss to compare
    except ReplayRefused as refusal:
        return Finding(notes=(*notes, f"not replayed: {refusal}"))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Finding(notes=(*notes, f"not replayed: out of memory ({type(error).__name__})"))
    except Exception as error:
        if strict():
            raise
        logger.exception("the replay failed; the event keeps what the gate saw")
        return Finding(notes=(*notes, f"the replay failed: {type(error).__name__}: {error}"))
    if silent:
        births = tuple(birth_of(g) for g in silent_births(replayed.tracer))
        return Finding(reproduced="yes", notes=tuple(notes), silent=births)
    if conclude is not None:
        return conclude(replayed, notes)
    finding = _with_samples(concluded(replayed, notes), names, entries)
    if finding.reproduced == "yes":
        finding = replace(finding, loss_terms=_loss_terms(step, replayed, finding.micro_step))
    if evidence is not None and finding.trace is not None and finding.trace.birth is not None:
        evidence.blamed = finding.trace.birth.number
    birth = finding.trace.birth if finding.trace is not None else None
    if birth is not None:
        finding = replace(finding, bad_buffers=poisoned_buffers(replayed, names, birth))
    again = replace(
        again,
        raised=type(replayed.raised) if replayed.raised is not None else None,
        changed=tuple(o.name or "a tensor" for o in replayed.changed),
        opaque=tuple(replayed.opaque),
        overwritten=overwritten(replayed, birth),
        site=site_of(replayed.tracer, birth) if birth is not None else None,
    )
    return replace(finding, again=again)


def _loss_terms(step: Step, replayed: Replayed, micro_step: int) -> tuple[LossTerm, ...]:
    """The summands of the loss that the birth belongs to: the first bad one, else that of its backward."""
    losses = replayed.losses or [t for t in replayed.results_last if t.numel() == 1]
    bad = next((t for t in losses if _finite.checkable(t) and not _finite.is_finite(t)), None)
    if bad is None and not losses:
        return ()
    return step.sums.terms_of(losses[min(micro_step, len(losses) - 1)] if bad is None else bad)


def _with_samples(finding: Finding, names: Names, entries: list[Entry]) -> Finding:
    """`finding` with its samples as the batch counts them, and their names where the batch carries them."""
    birth = finding.trace.birth if finding.trace is not None else None
    if birth is not None and birth.kind in (BirthKind.INPUT.value, BirthKind.LABEL.value):
        birth = as_it_came(birth, entries)
        finding = replace(finding, trace=replace(finding.trace, birth=birth))  # type: ignore[type-var]  # it has a birth
    if birth is None or not birth.sample_index or birth.output is None or not birth.output.shape:
        return finding
    ids = sample_ids(names, entries, birth.sample_index, birth.output.shape[0], birth.tensor_name or "")
    return replace(finding, sample_id=ids)
