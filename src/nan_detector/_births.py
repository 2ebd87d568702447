"""Births, and the operations that they passed, as plain data: what a trace holds, without a tensor."""

from __future__ import annotations

import torch

from nan_detector import _finite
from nan_detector._lineage import Gen, OpRecord
from nan_detector._quiet import quiet
from nan_detector._records import Location, Site, TensorStats
from nan_detector._source import call_expression, location_of
from nan_detector._trace import Birth, BirthKind

Tensor = torch.Tensor

#: Sites named in a trace.
MAX_SITES = 24

#: Calls by which a program writes a number that it names itself; of any other, the library chose the constant.
_WRITE_LITERALS = (
    *(
        "full",
        "full_like",
        "new_full",
        "tensor",
        "new_tensor",
        "as_tensor",
        "scalar_tensor",
        "where",
        "fill",
        "index_fill",
    ),
    *("masked_fill", "index_put", "scatter", "constant", "pad", "clamp", "nan_to_num"),
)
_SOURCES = (BirthKind.PARAMETER, BirthKind.BUFFER, BirthKind.INPUT, BirthKind.LABEL)


def birth_of(gen: Gen) -> Birth:
    """A birth as plain data."""
    record = gen.record
    forward = record.forward if record.phase == "backward" and not record.own_frame else None
    source = gen.kind in _SOURCES
    op = forward.info.op if forward is not None else record.info.op
    library = False
    if gen.kind is BirthKind.CONSTANT and record.api and record.api not in (op, *_WRITE_LITERALS):
        op, library = record.api, True
    if gen.kind is BirthKind.GRADIENT:
        op = "backward"
    kind = BirthKind.OPERATION if library else gen.kind
    layer = layer_of(record)
    if source and gen.name and gen.kind in (BirthKind.PARAMETER, BirthKind.BUFFER):
        layer = gen.name.rpartition(".")[0] or "root"
    return Birth(
        number=record.index,
        kind=kind.value,
        op=op,
        aten=record.info.aten,
        phase={
            BirthKind.PARAMETER: "state",
            BirthKind.BUFFER: "state",
            BirthKind.INPUT: "data",
            BirthKind.LABEL: "data",
        }.get(gen.kind, record.phase),
        call=None if source else call_of(record),
        layer_name=None if gen.kind in (BirthKind.INPUT, BirthKind.LABEL) else layer,
        module_type=None if source else module_type_of(record),
        location=None if source else place_of(record),
        tensor_name=gen.name,
        inputs=gen.inputs,
        output=gen.output,
        guilty_count=gen.guilty,
        args=record.args,
        derivative_of=forward.info.op if forward is not None else None,
        forward_inputs=_forward_inputs(forward),
        in_library=library,
        first_bad_index=gen.first_bad,
        sample_index=gen.rows if gen.kind in (BirthKind.INPUT, BirthKind.LABEL) else (),
        guilty_rows=gen.rows,
        bad_column=gen.column,
        first_use=place_of(record) if source else None,
        note=gen.note,
    )


def _forward_inputs(forward: OpRecord | None) -> tuple[TensorStats, ...]:
    if forward is None:
        return ()
    tensors = (t if isinstance(t, Tensor) else t() for t in forward.inputs)
    with quiet():
        return tuple(_finite.stats(t) for t in tensors if t is not None)


def sites(gen: Gen) -> tuple[Site, ...]:
    """The places a birth passed, neighbours at one place folded into one."""
    out: list[Site] = []
    for record in [gen.record, *gen.passed]:
        layer = layer_of(record)
        if out and out[-1].layer_name == layer and out[-1].phase == record.phase and layer is not None:
            continue
        op = record.forward.info.op if record.forward is not None and not record.own_frame else record.info.op
        site = Site(
            op=op, phase=record.phase, layer_name=layer, module_type=module_type_of(record), location=place_of(record)
        )
        if not out or (out[-1].location, out[-1].phase) != (site.location, site.phase):
            out.append(site)
    return tuple(out[:MAX_SITES])


def place_of(record: OpRecord) -> Location | None:
    """The line of the user's source; None where none is known."""
    return location_of(record.mark) if record.mark is not None else None


def call_of(record: OpRecord) -> str | None:
    """What the user called there, as it is written, or its name."""
    return (call_expression(record.mark) if record.mark is not None else None) or record.api


def layer_of(record: OpRecord) -> str | None:
    """Path of the module it ran in; None outside of all."""
    return record.module[0] if record.module is not None else None


def module_type_of(record: OpRecord) -> str | None:
    """Class of the module it ran in; None outside of all."""
    return record.module[1] if record.module is not None else None


def name_of_op(record: OpRecord) -> str:
    """Plain name of an operation; of one in the backward, with the forward operation whose derivative it is."""
    forward = record.forward if not record.own_frame else None
    return record.info.op if forward is None else f"{record.info.op} (backward of {forward.info.op})"


def location_text(record: OpRecord) -> str:
    """File and line of an operation, as far as they are known."""
    location = place_of(record)
    return f"{location.file}:{location.line}" if location is not None else record.info.op
