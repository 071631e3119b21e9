"""Partition of partool's own decoder over tensor-parallel ranks.

One-dimensional cuts follow Megatron-LM (arXiv 1909.08053, section 3). Norms on shares of the sequence follow arXiv
2205.05198, section 4.2.2. Two-dimensional cuts (d1 × d2) follow the column-first order of ATP (arXiv 2301.08658): the
first matrices of a layer have outputs cut over d1 and inputs cut over d2, the second matrices have outputs cut over d2
and inputs cut over d1. The hidden size is therefore cut over d2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from partool.diagnostics.record import Diagnostic
from partool.layout.adapters import A, is_adapter
from partool.layout.parameters import SINKS, ParameterInfo, layer_parameters, parameters
from partool.layout.tensor.cutting import HeadRanges, along, collapse, collapsed_name, cut, even, head_ranges
from partool.layout.tensor.patterns import PATH, Patterns, matching, unmatched
from partool.layout.tensor.types import Cut, Gradients, Partition, Range, Style, chunks
from partool.spec.model import ModelConfig
from partool.spec.parallel import TensorPattern


def apply_patterns(
    config: ModelConfig, rows: Iterable[Partition], patterns: Patterns
) -> tuple[tuple[Partition, ...], tuple[Diagnostic, ...]]:
    """Apply the user's ``patterns`` to the ``rows`` of :func:`own_partition`; return the rows and the findings.

    A pattern that agrees with a row becomes the row's rule. A pattern that contradicts a row becomes a finding.
    """
    rows = tuple(rows)
    if not patterns:
        return rows, ()
    infos = parameters(config)
    findings = {finding.message: finding for finding in unmatched(patterns, [info.name for info in infos])}
    one = {collapsed_name(info.name): info.name for info in infos} | {info.name: info.name for info in infos}
    applied = []
    for row in rows:
        pattern = matching(patterns, one[row.name])
        biased = row.name.endswith(".bias") and not row.name.endswith("norm.bias")
        if pattern is None or biased:
            # The partition of a bias follows from its matrix.
            applied.append(row)
            continue
        if patterns[pattern] in (row.style, TensorPattern(style=row.style)):
            applied.append(row.model_copy(update={"rule": f"pattern {pattern!r}"}))
            continue
        applied.append(row)
        message = f"pattern {pattern!r} gives {row.name} another style than {row.style}, its only one"
        help = "drop the pattern; models that transformers builds (model.hf) can be cut in other ways"
        findings.setdefault(message, Diagnostic("PT443", message, path=(*PATH, pattern), help=help))
    return tuple(applied), tuple(findings.values())


_RULE = "preset partool"


@dataclass(frozen=True, slots=True)
class _Decision:
    style: Style
    cuts: tuple[Cut, ...] = ()
    gradients: Gradients = "whole"
    why: str = ""
    summed_outputs: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The tensor ranks as d1 × d2; if ``inner`` (d2) is 1, all tensor ranks are on the first axis."""

    config: ModelConfig
    size: int
    inner: int
    sequence_norms: bool
    expert: int = 1
    """Number of ranks that share the experts of a layer."""

    @property
    def outer(self) -> int:
        """Return the number of ranks on the first axis (d1)."""
        return self.size // self.inner

    def over_outer(self, ranges: list[Range] | tuple[Range, ...]) -> tuple[Range, ...]:
        """Return each rank's range from ``ranges``, which has one range per index on the first axis."""
        return along([rank // self.inner for rank in range(self.size)], ranges)

    def hidden(self, dim: int) -> tuple[Cut, ...]:
        """Return the cut of ``dim``, the hidden dimension, over d2 ranks; empty if every rank has all of ``dim``."""
        if self.inner == 1:
            return ()
        ranges = chunks(self.config.hidden, self.inner)
        return (cut(dim, along([rank % self.inner for rank in range(self.size)], ranges)),)

    def heads(self) -> HeadRanges:
        """Return the ranges of query and key/value heads for each index on the first axis."""
        config = self.config
        return head_ranges(config.heads, config.heads if config.mla else config.kv_heads, self.outer)

    @property
    def summed(self) -> Gradients:
        """Return how ranks hold gradients of replicated parameters.

        Returns ``summed`` if norms work on shares of the sequence, otherwise ``whole``.
        """
        return "summed" if self.sequence_norms else "whole"


def own_partition(
    config: ModelConfig, tensor: int, inner: int = 1, sequence_norms: bool = False, expert: int = 1
) -> tuple[Partition, ...]:
    """Return the partition of each parameter over ``tensor`` ranks, collapsed over layers; empty for one rank.

    ``expert`` is the number of ranks that share the experts of a layer; these have places of their own.
    ``inner`` is d2 of two-dimensional tensor parallelism and divides ``tensor``. The tensor rank with index i0 on the
    first axis and index i1 on the second axis has the number i0 · d2 + i1.
    """
    if tensor == 1:
        return ()
    ranks = _Ranks(config, tensor, inner, sequence_norms, expert)
    # Layers with the same parameters have the same partition; where shapes differ by layer, each has rows of its own.
    infos = parameters(config)
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for info in infos:
        shapes.setdefault(collapsed_name(info.name), set()).add(info.shape)
    names = [name if len(shapes[name := collapsed_name(info.name)]) == 1 else info.name for info in infos]
    counts = Counter(names)
    different = dict(zip(names, infos, strict=True))
    return collapse(
        _row(info, _decide(info, ranks)).model_copy(update={"count": counts[name]}) for name, info in different.items()
    )


def _row(info: ParameterInfo, decision: _Decision) -> Partition:
    # A cut over an axis of one rank cuts nothing.
    cuts = tuple(one for one in decision.cuts if any(ranges != ((0, info.shape[one.dim]),) for ranges in one.ranges))
    return Partition(
        name=info.name, shape=info.shape, style=decision.style, cuts=cuts, gradients=decision.gradients, rule=_RULE,
        why=decision.why, summed_outputs=decision.summed_outputs,
    )  # fmt: skip


def _decide(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    """Return the decision about one parameter."""
    if is_adapter(info.name):
        return _adapter(info, ranks)
    if info.kind == "attention" and info.name.split(".")[-2] not in ("q_a", "kv_a"):
        return _attention(info, ranks)
    return _BY_KIND[info.kind](info, ranks)


def _adapter(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    """Return the decision for a part of an adapter: A is cut as the inputs of its matrix W are, others as its outputs.

    With rows of W on each rank, A x is the same on all ranks, and each has a part of A's gradient from its rows of B.
    With columns of W, each rank has a term of the result, hence of the gradients of B and of DoRA's norms.
    """
    projection, _, ending = info.name.rpartition(".")
    of_matrix = _decide(replace(info, name=f"{projection}.weight", shape=_shape_of_matrix(info, ranks.config)), ranks)
    dim = 1 if ending == A else 0
    cuts = tuple(one for one in of_matrix.cuts if one.dim == dim)
    if cuts:
        return _Decision(of_matrix.style, cuts, of_matrix.gradients, "as its matrix")
    if not of_matrix.cuts:
        return _Decision("replicated", (), of_matrix.gradients, of_matrix.why)
    return _Decision("replicated", (), "summed", "each rank has a part of its gradient, from its part of the matrix")


def _shape_of_matrix(info: ParameterInfo, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of the matrix beside which A or B of an adapter lies."""
    projection = info.name.rpartition(".")[0]
    assert info.layer is not None, "an adapter outside of the layers"
    infos = layer_parameters(config, info.layer)
    return next(each.shape for each in infos if each.name == f"{projection}.weight")


def _embedding(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    if ranks.inner == 1:
        return _Decision("vocabulary", (even(0, info.shape[0], ranks.size),), why="tokens over all ranks")
    if ranks.config.tied_embeddings:
        # A tied matrix is cut as the head is, which needs whole rows.
        return _Decision("vocabulary", (even(0, info.shape[0], ranks.size),), why="tied to the head: tokens over d1·d2")
    rows = ranks.over_outer(chunks(info.shape[0], ranks.outer))
    return _Decision("vocabulary", (cut(0, rows), *ranks.hidden(1)), why="tokens over d1, hidden size over d2")


def _head(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    return _Decision("vocabulary", (even(0, info.shape[0], ranks.size),), why="tokens over all ranks")


def _position(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    return _Decision("replicated", ranks.hidden(1), ranks.summed, _why_replicated(ranks))


def _norm(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    if info.name.split(".")[-2] in ("q_norm", "k_norm"):
        return _Decision("replicated", (), "summed", "each rank applies it to its own heads")
    if info.name.split(".")[-2] in ("q_a_norm", "kv_a_norm"):
        return _Decision("replicated", (), ranks.summed, "of the latent, which every rank has")
    return _Decision("replicated", ranks.hidden(0), ranks.summed, _why_replicated(ranks))


def _why_replicated(ranks: _Ranks) -> str:
    if ranks.sequence_norms:
        return "each rank applies it to its share of the sequence"
    return "hidden size over d2" if ranks.inner > 1 else "of the hidden state, which every rank has"


def _attention(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    """Return the decision for a projection of an attention, whose output or input consists of heads."""
    config, heads = ranks.config, ranks.heads()
    *_, name, ending = info.name.split(".")
    if ending == SINKS:
        # In two dimensions the inner ranks divide the heads of a line among themselves.
        of_queries = (
            head_ranges(config.heads, config.kv_heads, ranks.size).queries if ranks.inner > 1 else heads.queries
        )
        return _Decision("column", (cut(0, of_queries),), why="whole heads")
    if name == "o":
        width = config.mla.v_head_dim if config.mla else config.head_dim
        return _row_parallel(ending, ranks, cut(1, ranks.over_outer(heads.queries), width))
    keys = name in ("k", "v")
    unit = info.shape[0] // (config.kv_heads if keys else config.heads)
    if ending == "bias" and ranks.inner > 1:
        # The bias is added after heads are divided over d2 too, so the bias is cut in the same way.
        all_heads = head_ranges(config.heads, config.kv_heads, ranks.size)
        chosen = all_heads.keys if keys else all_heads.queries
        return _Decision("column", (cut(0, chosen, unit),), why="whole heads over d1·d2")
    rows = cut(0, ranks.over_outer(heads.keys if keys else heads.queries), unit)
    shared = keys and heads.shared
    why = "whole heads, shared by the ranks of their query heads" if shared else "whole heads"
    return _Decision("column", (rows, *_columns(ending, ranks)), "summed" if shared else "whole", why)


def _columns(ending: str, ranks: _Ranks) -> tuple[Cut, ...]:
    return ranks.hidden(1) if ending == "weight" else ()


def _prediction(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    del info
    return _Decision("replicated", (), ranks.summed, _why_replicated(ranks))


def _row_parallel(ending: str, ranks: _Ranks, columns: Cut) -> _Decision:
    """Return the decision for the second matrix of a pair, or for its bias, which is added after outputs are summed."""
    if ending == "bias":
        return _Decision("replicated", ranks.hidden(0), ranks.summed, "added to the sum")
    return _Decision("row", (columns, *ranks.hidden(0)), why="input widths as the layer before it leaves them")


def _network(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    """Return the decision for a feed-forward network, whose widths are cut by ``torch.chunk`` sizes."""
    *_, name, ending = info.name.split(".")
    if name == "down":
        widths = chunks(info.shape[-1], ranks.outer)
        return _row_parallel(ending, ranks, cut(1, ranks.over_outer(widths)))
    rows = cut(0, ranks.over_outer(chunks(info.shape[0], ranks.outer)))
    return _Decision("column", (rows, *_columns(ending, ranks)), why="inner widths")


def _expert(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    """Return the decision for stacked experts, each of which is cut as a feed-forward network is.

    If ranks share experts (expert parallelism), tensor ranks do not cut them.
    """
    if ranks.expert > 1:
        return _Decision("replicated", why=f"experts, which are divided over {ranks.expert} ranks")
    assert info.layer is not None, "experts outside of the layers"
    moe = ranks.config.of_layer(info.layer).moe
    assert moe is not None, "experts of a model without experts"
    why, width = "inner widths of every expert", moe.ffn_hidden
    *_, name, ending = info.name.split(".")
    if name == "down" and ending == "bias":
        why, width = "hidden width, as the ranks' results are summed", ranks.config.hidden
    elif name == "down":
        return _Decision("row", (cut(1, ranks.over_outer(chunks(moe.ffn_hidden, ranks.outer))),), why=why)
    widths = ranks.over_outer(chunks(width, ranks.outer))
    starts = range(0, info.shape[0], width)
    rows = tuple(tuple((at + start, at + stop) for at in starts if stop > start) for start, stop in widths)
    return _Decision("column", (Cut(dim=0, ranges=rows),), why=why)


def _router(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    del info
    why = "each rank computes a part of its gradient, from its parts of the experts or its share of the tokens"
    return _Decision("replicated", (), "summed", why)


def _latent(info: ParameterInfo, ranks: _Ranks) -> _Decision:
    why, mla = "low rank, which every head reads", ranks.config.mla
    summed_outputs: tuple[Range, ...] = ()
    if info.name.split(".")[-2] == "kv_a" and mla is not None:
        why += "; the gradient of its rotary part is summed over the ranks' heads"
        summed_outputs = ((mla.kv_rank, mla.kv_rank + mla.rope_head_dim),)
    return _Decision("replicated", (), ranks.summed, why, summed_outputs)


_BY_KIND: dict[str, Callable[[ParameterInfo, _Ranks], _Decision]] = {
    "embedding": _embedding,
    "position": _position,
    "norm": _norm,
    "attention": _latent,
    "ffn": _network,
    "router": _router,
    "expert": _expert,
    "head": _head,
    "prediction": _prediction,
}
