"""The moments at which a rank that only computes losses may hold most memory."""

from __future__ import annotations

from partool.cost.training.moments import Moment
from partool.cost.training.pass_bytes import PassBytes
from partool.cost.training.states import States


def forward_moments(state: States, passes: PassBytes) -> list[Moment]:
    """Return the moments of a rank on an accelerator: the largest layer, and the loss; nothing is saved for later."""
    buffers = state.buffers + passes.exchanged + passes.received
    return [
        Moment(
            "layer",
            gathered=state.gathered,
            activations=passes.stream + passes.of_layer + passes.tables,
            communication=buffers,
        ),
        Moment(
            "loss",
            gathered=state.gathered,
            activations=passes.stream + passes.tables,
            loss=passes.loss,
            communication=buffers,
        ),
    ]


def all_phases(state: States, passes: PassBytes) -> Moment:
    """Return the sum of both moments, as blocks of a CPU's memory stay resident after they are freed."""
    return Moment(
        "all phases",
        gathered=state.gathered,
        activations=passes.stream + passes.of_layer,
        loss=passes.loss,
        communication=state.buffers + passes.exchanged,
    )
