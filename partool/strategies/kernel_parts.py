"""Parts of a training step that partool's fused kernels can compute (``kernels.fused``), one record each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KernelPart:
    """Facts about a part of the training step that a fused kernel can compute."""

    words: str
    """Text that names the part in explanations, in the plural or with an article."""
    place: Literal["block", "loss", "update"]
    """Place of the part in a training step. torch.compile itself fuses parts of a ``block``; a part of the ``update``
    has the name of its optimizer."""
    needs: Literal["nothing", "gate", "rotation"] = "nothing"
    """Feature that the model must have for the part: an activation of :data:`FUSED_GATES`, RoPE, or nothing."""
    test: str = "tests/unit/runtime/fused/test_fused_model.py::test_a_fused_model_computes_the_same"
    """Test that compares the kernel with torch's operators."""
    whole_width: bool = False
    """True: no kernel computes the part if tensor ranks share the width of the hidden state."""


PARTS: dict[str, KernelPart] = {
    "norm": KernelPart("norms", "block", whole_width=True),
    "glu": KernelPart("gates", "block", "gate"),
    "rope": KernelPart("rotations", "block", "rotation"),
    "loss": KernelPart("the loss", "loss"),
    "adamw": KernelPart(
        "the update",
        "update",
        test="tests/unit/runtime/optim/test_optimizer_groups.py::test_steps_are_those_of_torch_by_group",
    ),
}
"""Name of a part in ``kernels.fused`` → facts about the part; plans list the parts in this order."""

FUSED_GATES = ("swiglu", "geglu")
"""Activations that the kernel of gates computes. The runtime computes the clamped gate by torch's operators, and saves
no more than a kernel would."""
IN_BLOCKS = tuple(name for name, part in PARTS.items() if part.place == "block")
UPDATES = tuple(name for name, part in PARTS.items() if part.place == "update")
WHOLE_WIDTH = tuple(name for name, part in PARTS.items() if part.whole_width)
