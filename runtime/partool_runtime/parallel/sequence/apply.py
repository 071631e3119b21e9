"""Applies sequence parallelism to a rank's layers: attention over sequences whose tokens are spread over ranks."""

from __future__ import annotations

from typing import Any, cast

from partool.plan.layout import Layout
from partool.plan.types import Plan
from partool.strategies.sequence import BY_GRAPH, IN_GROUPS, ON_GRIDS
from partool_runtime.hf.attention import HfBlock, take
from partool_runtime.hf.model import HfDecoder, HfPart
from partool_runtime.mesh import Ranks
from partool_runtime.model import StagedDecoder
from partool_runtime.model.attention import attention_layout
from partool_runtime.model.decoder import Block, Contexts
from partool_runtime.parallel.comm import SEQUENCE
from partool_runtime.parallel.sequence.compiled import share_graph
from partool_runtime.parallel.sequence.dsp import row_positions, turns_with_tensor_ranks
from partool_runtime.parallel.sequence.types import SequenceTeam, method_named
from partool_runtime.parallel.tensor.sharding import no_heads


def take_attention(model: HfPart, plan: Plan) -> list[HfBlock]:
    """Replace attention in a rank's layers of transformers by partool's attention, in place; record the rank's tokens.

    Returns the layers' wrappers in the order of the layers. Call it after tensor parallelism is applied.
    """
    config = plan.model
    layers = dict(model.blocks())
    stages = [cast(Any, stage) for stage in model.stages.values()]
    windows = {number: attention_layout(config, number).window for number in layers}
    wrappers = take([stage.base for stage in stages], layers, windows)
    for stage in stages:
        stage.contexts = Contexts(config)
    return [wrappers[number] for number in layers]


def apply_sequence(model: StagedDecoder, plan: Plan, ranks: Ranks) -> SequenceTeam | None:
    """Make a rank's layers attend to the tokens of all team ranks, in place; a collective of all ranks of the world.

    Call this after tensor parallelism, which cuts the heads, and before recomputation, which may wrap the exchange.
    Layers without heads exchange nothing. Returns the team; None if the plan has no sequence parallelism.
    """
    if isinstance(model, HfPart):
        return _to_transformers(model, plan, ranks)
    if ranks.cp.size == 1:
        return None
    team, put = open_team(plan, ranks), method_named(plan.layout.sequence.method)
    blocks = [cast(Block, block) for _, block in model.blocks()]
    for stage in model.stages.values():
        cast(Any, stage).contexts.share = (team.length, tuple(team.index(team.rank)))
        if plan.layout.sequence.method in ON_GRIDS and plan.model.grid is not None:
            cast(Any, stage).contexts.row_positions = row_positions(team, plan.model.grid)
    without = [block for block in blocks if block.attention.core is no_heads]
    put(blocks, team, plan.layout)
    for block in without:
        block.attention.core = no_heads
    return team


def _to_transformers(model: HfPart, plan: Plan, ranks: Ranks) -> SequenceTeam | None:
    """Apply sequence parallelism to a model of transformers; also replace its attention if documents restrict it."""
    if ranks.cp.size == 1 and plan.data.attend == "sequence":
        return None
    if ranks.cp.size > 1 and plan.layout.sequence.method in BY_GRAPH:
        team = open_team(plan, ranks)
        share_graph(cast(HfDecoder, model), plan, team, ranks.device)
        return team
    blocks = take_attention(model, plan)
    if ranks.cp.size == 1:
        return None
    team, put = open_team(plan, ranks), method_named(plan.layout.sequence.method)
    for stage in model.stages.values():
        cast(Any, stage).contexts.share = (team.length, tuple(team.index(team.rank)))
    put(cast(list[Block], blocks), team, plan.layout)
    return team


def open_team(plan: Plan, ranks: Ranks) -> SequenceTeam:
    """Return the team of ranks that share this rank's sequences; a collective of all ranks.

    The team gets a separate group even if another group has the same ranks, to count the team's traffic separately.
    """
    everyone = ranks.cp.parts
    opened = None if splits_teams(plan.layout) else ranks.groups.of(everyone, SEQUENCE)
    return SequenceTeam(opened, ranks.cp.place, plan.shares, everyone, ranks.groups)


def splits_teams(layout: Layout) -> bool:
    """Return whether a method exchanges nothing among exactly the ranks of a team, but in groups that it opens."""
    return layout.sequence.method in IN_GROUPS or turns_with_tensor_ranks(layout)
