"""Ranks share the sequences of a model through the graph of its forward pass (AutoSP, arXiv 2604.27089).

The graph is captured on tensors without memory, before parameters are sharded. Its attention nodes exchange tokens for
heads as in Ulysses. The graph is cut at the modules whose parameters FSDP2 gathers, and each of them gets its part as
its forward pass. So recomputation, offload and sharding wrap the parts as they wrap other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError
from partool_runtime.graph.attention import AttentionNode, attend_with
from partool_runtime.graph.capture import Captured, CaptureError
from partool_runtime.graph.cut import cut
from partool_runtime.graph.masks import rule_of
from partool_runtime.graph.share import Shared, Sharing, share
from partool_runtime.graph.tokenwise import check_tokenwise
from partool_runtime.hf.attention import attend_whole, keep_attention
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.hf.patches import Patch, patch_forward
from partool_runtime.model.attention import AttentionLayout, Tokens
from partool_runtime.model.decoder import Contexts
from partool_runtime.parallel.sequence.exchange import HeadExchange
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.precision import COMPUTE_DTYPE
from partool_runtime.torch_internals.tensors import without_modes
from partool_runtime.usermodel.model import ModuleDecoder


def share_graph(model: HfDecoder | ModuleDecoder, plan: Plan, team: SequenceTeam, device: torch.device) -> None:
    """Make a model compute this rank's share of the tokens, in place; raises ConfigurationError PT448.

    Call it before parameters are sharded, and before layers are recomputed. Models with dropout get two graphs, one
    for training and one for evaluation.
    """
    graphs = {}
    try:
        with without_modes():
            for training in (True, False) if model.draws else (True,):
                captured = model.capture(
                    dtype=COMPUTE_DTYPE[plan.training.precision],
                    length=team.length,
                    training=training,
                    documents=plan.data.attend == "document",
                    batch=plan.layout.micro_batch,
                )
                check_tokenwise(captured)
                graphs[training] = _Rank(model, captured, plan, team).share(device)
        _put(model, graphs, team, plan)
    except CaptureError as error:
        name = type(model.base).__name__
        help = "parallel.sequence: 1, with zero: 3 or tensor; partool plan --verify lists the attention that it found"
        raise ConfigurationError("PT448", f"{name} cannot be sharded as a graph: {error}", help) from error


class _Rank:
    """What one rank puts in place of the attention and of the experts of a captured graph."""

    def __init__(self, model: HfDecoder | ModuleDecoder, captured: Captured, plan: Plan, team: SequenceTeam) -> None:
        self.base, self.captured = model.base, captured
        self.documents = plan.data.attend == "document"
        self.team, self.batch = team, plan.layout.micro_batch
        self.exchange = HeadExchange(team.group.group_name, team.rank, team.shares)
        self.buffers = dict(model.base.named_buffers())
        self.rules: dict[fx.Node, int | str | None] = {}
        """Rules of masks; layers have masks in common."""

    def share(self, device: torch.device) -> Shared:
        """Return the graph of this rank's share."""
        mine = self.team.shares[self.team.rank]
        (span,) = mine  # whole sequences are exchanged, so each rank holds one stretch of tokens
        sizes = self.batch, self.team.length
        return share(self.captured, Sharing(*sizes, span, self._attention, self._experts, device))

    def _attention(self, node: AttentionNode) -> tuple[GraphAttention, bool]:
        rule: int | str | None = "it has none" if node.mask is None and not node.causal else None
        if node.mask is not None:
            if node.mask not in self.rules:
                self.rules[node.mask] = rule_of(node.mask, self.captured, self.buffers, self.team.length)
            rule = self.rules[node.mask]
        by_layout = not isinstance(rule, str) and node.softcap is None and node.sinks is None
        if self.documents and not by_layout:
            raise CaptureError(f"documents need causal attention, and its mask is another ({rule})")
        layout = AttentionLayout(cast("int | None", rule), scale=node.scale) if by_layout else None
        return GraphAttention(node, layout, self.exchange), not by_layout

    def _experts(self, name: str) -> Any:
        return partial(_call, self.base.get_submodule(name))


class GraphAttention:
    """What replaces an attention node: ranks exchange tokens for heads around attention of whole sequences."""

    def __init__(self, node: AttentionNode, layout: AttentionLayout | None, exchange: HeadExchange) -> None:
        """``layout`` is the rule that the node's mask follows; None if the mask itself is needed, or if all attend."""
        self._node, self._layout = node, layout
        self.exchange = exchange
        """Exchanges tokens for heads."""
        self.core: Callable[..., torch.Tensor] = self.attend_sequences
        """Attention of whole sequences, which recomputation wraps."""

    def __call__(
        self,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        sinks_N: torch.Tensor | None,
        documents_BL: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of this rank's tokens, ``[B, N, S, D]``; masks and documents are of all tokens."""
        queries, keys = heads[0].shape[1], heads[1].shape[1]
        first, stop = self.exchange.ranges(queries, keys)[0][self.exchange.rank]
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == queries:
            mask = mask[..., first:stop, :, :]
        mine_n = None if sinks_N is None else sinks_N[first:stop]

        def of_mine(q_BnLD: torch.Tensor, k_BmLD: torch.Tensor, v_BmLD: torch.Tensor) -> torch.Tensor:
            return self.core(q_BnLD, k_BmLD, v_BmLD, mask, mine_n, documents_BL)

        return self.exchange(*heads, core=of_mine)

    def attend_sequences(  # noqa: PLR0917 - all tensors by position, as recomputation passes them
        self,
        q_BnLD: torch.Tensor,
        k_BmLD: torch.Tensor,
        v_BmLD: torch.Tensor,
        mask: torch.Tensor | None,
        sinks_n: torch.Tensor | None,
        documents_BL: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of whole sequences, ``[B, n, L, D]``."""
        node = self._node
        if node.softcap is not None or sinks_n is not None:
            out: torch.Tensor = attend_with(
                q_BnLD, k_BmLD, v_BmLD, mask, node.dropout, node.causal, node.scale, node.softcap, sinks_n
            )
            return out
        if self._layout is not None:
            tokens = Tokens(q_BnLD.shape[2], None, documents_BL)
            return attend_whole(q_BnLD, k_BmLD, v_BmLD, self._layout, tokens, node.dropout)
        return F.scaled_dot_product_attention(
            q_BnLD, k_BmLD, v_BmLD, mask, node.dropout, node.causal, scale=node.scale, enable_gqa=True
        )


def _call(module: nn.Module, *tensors: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, module(*tensors))


def _put(model: HfDecoder | ModuleDecoder, graphs: dict[bool, Shared], team: SequenceTeam, plan: Plan) -> None:
    base = model.base
    names = {module: name for name, module in base.named_modules()}
    units = [names[module] for group in model.groups()[:-1] for module in group]
    if hooked := [unit for unit in units if (one := base.get_submodule(unit))._forward_hooks or one._forward_pre_hooks]:
        raise CaptureError(f"{hooked[0]} has hooks, which would run within the graph and around it")
    functions = {training: cut(graph.graph, base, units) for training, graph in graphs.items()}
    for unit in units:
        module = base.get_submodule(unit)
        parts = {training: forwards[1][unit] for training, forwards in functions.items()}
        patch_forward(module, Patch.GRAPH, _by_mode(module, parts))
        stay_wide(module)
    patch_forward(
        base, Patch.GRAPH, _by_mode(base, {training: forwards[0] for training, forwards in functions.items()})
    )
    stay_wide(base)
    for layer in model.layers:
        keep_attention(layer, graphs[True].within(names[layer]))
    model.contexts = Contexts(plan.model)
    model.contexts.share = (team.length, tuple(team.index(team.rank)))
    model.captured = True


def _by_mode(module: nn.Module, forwards: dict[bool, Any]) -> Any:
    """Return a forward pass that chooses between training and evaluation, if both differ."""
    if len(forwards) == 1:
        return forwards[True]

    def forward(*args: Any) -> Any:
        return forwards[module.training](*args)

    return forward
