"""Parts of a step that kernels of partool can compute, ``kernels.fused``, one record each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KernelPart:
    """Facts about a part."""

    words: str
    """The part in the plural or with its article, as explanations list it."""
    place: Literal["block", "loss", "update"]
    """Its place in a step. A compiler fuses parts of compiled blocks by itself; the part of an update has the name of
    the optimizer that it is for."""
    needs: Literal["nothing", "gate", "rotation"] = "nothing"
    """The part of a model that it needs."""
    test: str = "tests/unit/test_fused_model.py::test_a_fused_model_computes_the_same"
    """The test that compares it with torch's operators."""
    whole_width: bool = False
    """No kernel computes it where tensor ranks share the width of the hidden state."""


PARTS: dict[str, KernelPart] = {
    "norm": KernelPart("norms", "block", whole_width=True),
    "glu": KernelPart("gates", "block", "gate"),
    "rope": KernelPart("rotations", "block", "rotation"),
    "loss": KernelPart("the loss", "loss"),
    "adamw": KernelPart(
        "the update", "update", test="tests/unit/test_optimizer_groups.py::test_steps_are_those_of_torch_by_group"
    ),
}
"""By the name that specs use, in the order in which plans list them."""

IN_BLOCKS = tuple(name for name, part in PARTS.items() if part.place == "block")
UPDATES = tuple(name for name, part in PARTS.items() if part.place == "update")
WHOLE_WIDTH = tuple(name for name, part in PARTS.items() if part.whole_width)
