"""What the runtime says of a model that transformers builds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PrivateAttr

from partool.layout.tensor import Decided, decide
from partool.layout.tensor.patterns import Patterns
from partool.layout.tensor.structure import Structure
from partool.strategies.sequence import WHOLE_SEQUENCES


class Description(BaseModel):
    """The description of a model by ``partool_runtime.hf.structure``."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    structure: Structure
    head_problem: str
    """Why the loss cannot be computed from the hidden state and the output matrix; empty: it can."""
    pipeline_problem: str
    """Why pipeline stages cannot be cut; empty: they can."""
    draws: bool
    """Whether training draws random numbers."""
    tiles_problem: str = ""
    """Why its networks cannot work on tiles of a sequence; empty: they can."""
    auxiliary_loss: bool
    """Whether its configuration asks for a loss that balances experts."""
    attention_problem: str = ""
    """Why its attention cannot go through partool's seam; empty: it can."""
    code_hash: str = ""
    """Hash of the folder's own code, which builds the model; empty: transformers builds it without."""
    attention_dropout: float = 0.0
    """Share of attention weights that training drops."""
    _decided: dict[tuple[int, str], Decided] = PrivateAttr(default_factory=dict)

    def decided(self, ranks: int, patterns: Patterns) -> Decided:
        """Return how so many tensor ranks share the parameters; a second call with the same costs nothing."""
        key = (ranks, repr(patterns))
        if key not in self._decided:
            self._decided[key] = decide(self.structure, ranks, patterns)
        return self._decided[key]

    def method_problem(self, method: str) -> str | None:
        """Return what keeps a method of sequence parallelism from the model; None: nothing does."""
        if self.attention_problem:
            return self.attention_problem
        if self.attention_dropout > 0.0 and method not in WHOLE_SEQUENCES:
            return f"{method} adds up attention over parts of the keys, whose weights cannot be dropped part by part"
        return None
