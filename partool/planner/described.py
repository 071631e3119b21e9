"""The runtime's description of a model that transformers builds."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, PrivateAttr

from partool.layout.tensor import Decided, decide
from partool.layout.tensor.adapters import with_adapters
from partool.layout.tensor.patterns import Patterns
from partool.layout.tensor.structure import Structure
from partool.spec.adapter import LowRank
from partool.strategies.sequence import BY_GRAPH, WHOLE_SEQUENCES


class FoundAttention(BaseModel):
    """An attention node in the graph of a model's forward pass."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    module: str
    line: str
    """Line of the model's code, with its file."""
    heads: int
    key_heads: int
    head_dim: int
    sees: str
    """Which tokens a token attends to."""


class Description(BaseModel):
    """The description that ``partool_runtime.hf.structure`` makes of a model."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    structure: Structure
    head_problem: str
    """Reason why the loss cannot be computed from the hidden state and the output matrix; empty if it can."""
    pipeline_problem: str
    """Reason why the model cannot be cut into pipeline stages; empty if it can."""
    draws: bool
    """True if training draws random numbers."""
    tiles_problem: str = ""
    """Reason why the model's feed-forward networks cannot process a sequence in tiles; empty if they can."""
    auxiliary_loss: bool
    """True if the model's configuration enables a load-balancing loss for experts."""
    attention_problem: str = ""
    """Reason why the model's attention cannot be replaced by partool's attention; empty if it can."""
    graph_problem: str | None = None
    """Reason why the graph of the model's forward pass cannot be shared by ranks; empty if it can, None if nobody has
    looked."""
    graph_attention: tuple[FoundAttention, ...] = ()
    """Attention that was found in the graph."""
    code_hash: str = ""
    """Hash of the modelling code in the model's folder; empty if the folder has none (transformers' code is used)."""
    code_files: dict[str, str] = {}
    """Hash of each file of the user's code that describing a module of the user's own has loaded, by its name."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights in training."""

    @property
    def is_module(self) -> bool:
        """Whether the model is a module of the user's own."""
        return self.structure.model_type == "module"

    _decided: dict[tuple[int, str, str], Decided] = PrivateAttr(default_factory=dict)

    def decided(self, ranks: int, patterns: Patterns, adapter: LowRank | None = None) -> Decided:
        """Return how ``ranks`` tensor ranks share the parameters, those of an adapter included; results are cached."""
        key = (ranks, repr(patterns), repr(adapter))
        if key not in self._decided:
            decided = decide(self.structure, ranks, patterns)
            if adapter is not None and ranks > 1:
                decided = replace(decided, rows=with_adapters(self.structure, adapter, decided.rows))
            self._decided[key] = decided
        return self._decided[key]

    def method_problem(self, method: str) -> str | None:
        """Return why the model cannot use a method of sequence parallelism; None if it can."""
        if method in BY_GRAPH:
            return self.graph_problem
        if self.attention_problem:
            return self.attention_problem
        if self.attention_dropout > 0.0 and method not in WHOLE_SEQUENCES:
            return f"{method} adds up attention over parts of the keys, whose weights cannot be dropped part by part"
        return None
