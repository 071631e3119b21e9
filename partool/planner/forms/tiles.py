"""Tiles of sequences, which save memory per token: sizes from the spec or from the planner, checks, and explanations.

By default feed-forward networks and the loss process a whole micro-batch at once. Where layouts exceed the memory by
little, the search is repeated with tiles; blocks are then not compiled, as a compiler would merge the tiles' tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partool.cost.case import Column, Layouts
from partool.diagnostics.record import Diagnostic
from partool.plan.layout import Layout
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.spec.numbers import MIB
from partool.strategies.schedules import MOVING_WEIGHTS

_TILES = ("parallel", "tiles")
LOGITS_AT_ONCE = 2**26
"""Maximum number of logits that the runtime computes at once by default."""


def in_tiles(problem: Problem) -> Problem | None:
    """Return the problem with tiles and with the all-gathers that need least memory; None if tiles change nothing."""
    tiled = problem.relax("tiles", "gathers") if problem.world_size > 1 else problem.relax("tiles")
    return tiled if (tiled.mlp_tile, tiled.loss_tile) != (problem.mlp_tile, problem.loss_tile) else None


def sizes(problem: Problem, layouts: Layouts) -> tuple[Column, Column]:
    """Return the tokens per tile of feed-forward networks and of the loss; 0 if a rank's share fits in one tile.

    If the tile of the loss is 0, the runtime computes up to ``LOGITS_AT_ONCE`` logits at once. The tile of the loss is
    therefore not set to 0 if a rank's share has more logits, even if the share fits in one tile.
    """
    share = _largest_share(problem, layouts.cp)
    network = np.where(problem.mlp_tile < share, problem.mlp_tile, 0)
    tokens = share * layouts.micro_batch
    loss = np.minimum(problem.loss_tile, tokens)
    by_itself = tokens * problem.model.vocab <= LOGITS_AT_ONCE
    return network, np.where((loss == tokens) & by_itself, 0, loss)


def _largest_share(problem: Problem, ranks: Column) -> Column:
    """Return the largest number of a sequence's tokens on a rank; for a grid, the larger number of both axes' cuts."""
    if problem.model.grid is None:
        return -(-problem.spec.training.sequence_length // np.asarray(ranks))
    rows, columns = problem.model.grid
    return np.asarray(np.maximum(-(-rows // np.asarray(ranks)) * columns, -(-columns // np.asarray(ranks)) * rows))


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Find tiles that the spec sets although other settings rule tiles out."""
    parallel = problem.spec.parallel
    tiles, tensor, schedule = parallel.tiles, parallel.tensor, parallel.pipeline.schedule
    for name, tokens in (("mlp", tiles.mlp), ("loss", tiles.loss)):
        if tokens not in ("auto", 0) and schedule in MOVING_WEIGHTS:
            message = f"tiles.{name}: {tokens}, but with schedule: {schedule} stages are recomputed as a whole"
            yield Diagnostic(
                "PT482", message, path=(*_TILES, name), help=f"drop tiles.{name}, or take another schedule"
            )
    if not problem.mlp_tile or tiles.mlp == "auto":
        return
    path = (*_TILES, "mlp")
    if parallel.compile == "block":
        message = f"tiles.mlp: {tiles.mlp}, but compile: block would merge the tiles of a layer again"
        yield Diagnostic("PT479", message, path=path, help="use compile: none or auto, or drop tiles.mlp")
    if problem.tiles_problem:
        message = f"tiles.mlp: {tiles.mlp}, but {problem.tiles_problem}"
        yield Diagnostic("PT480", message, path=path, help="drop tiles.mlp; recompute: full saves most of what it does")
    if tensor.sequence_norms is True or (tensor.shape != "auto" and tensor.shape[1] > 1):
        what = "sequence_norms: true" if tensor.sequence_norms is True else f"shape: {tensor.shape}"
        message = f"tiles.mlp: {tiles.mlp} takes tokens that a rank holds whole, and with tensor.{what} it does not"
        help = "use sequence_norms: false and shape: auto, or drop tiles.mlp"
        yield Diagnostic("PT481", message, path=path, help=help)


def sentences(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield sentences on the tiles of a layout, and on the reason for the tiles."""
    model, tiles = problem.model, problem.spec.parallel.tiles
    size = cost_job(problem).compute_bytes * layout.micro_batch
    short = "the best layout without does not fit, is less sure to fit or slower"
    if layout.tiles.mlp:
        why = short if tiles.mlp == "auto" else "the spec asks for it"
        rank_tokens = problem.spec.training.sequence_length / layout.mesh.cp
        less = size * model.ffn_hidden * max(0.0, rank_tokens - layout.tiles.mlp) / layout.mesh.tp
        yield (
            f"Networks in tiles of {layout.tiles.mlp:,} tokens: {why}; {less / MIB:,.0f} MiB less for each "
            "tensor of the inner width, which the backward pass computes a second time."
        )
    elif tiles.mlp not in ("auto", 0):
        yield f"Networks are not tiled: a rank holds no more of a sequence than tiles.mlp: {tiles.mlp}."
    if layout.tiles.loss:
        why = short if tiles.loss == "auto" else "the spec asks for it"
        yield f"Loss in tiles of {layout.tiles.loss:,} tokens: {why}."
    elif tiles.loss not in ("auto", 0):
        yield f"All logits of a micro-batch exist at once: it has no more than tiles.loss: {tiles.loss} tokens."
