"""Tiles of sequences for what needs much memory per token: what is pinned, what memory asks for, what is said of it.

Where layouts fit, networks and losses see a micro-batch whole. Only where none is sure to fit the search is done again
with tiles, in which blocks are not compiled: a compiler would merge the tiles' tensors again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Layout
from partool.planner.problem import Problem
from partool.spec.pipeline_checks import WEIPIPE

_TILES = ("parallel", "tiles")
MIB = 2**20


def in_tiles(problem: Problem) -> Problem | None:
    """Return the problem with networks and losses in tiles, and all else that saves memory; None if there are none."""
    tiled = replace(problem, tiled=True, pressed=problem.world_size > 1)
    return tiled if (tiled.mlp_tile, tiled.loss_tile) != (problem.mlp_tile, problem.loss_tile) else None


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Find tiles that are pinned where they cannot be."""
    parallel = problem.spec.parallel
    tiles, tensor, schedule = parallel.tiles, parallel.tensor, parallel.pipeline.schedule
    for name, tokens in (("mlp", tiles.mlp), ("loss", tiles.loss)):
        if tokens not in ("auto", 0) and schedule in WEIPIPE:
            message = f"tiles.{name}: {tokens}, but with schedule: {schedule} stages are computed again as a whole"
            yield Diagnostic(
                "PT482", message, path=(*_TILES, name), help=f"drop tiles.{name}, or take another schedule"
            )
    if tiles.mlp in ("auto", 0):
        return
    path = (*_TILES, "mlp")
    if parallel.compile == "block":
        message = f"tiles.mlp: {tiles.mlp}, and compile: block makes one program of a layer, tiles and all"
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
    """Say which tiles there are, and why."""
    model, tiles = problem.model, problem.spec.parallel.tiles
    size = problem.job.compute_bytes * layout.micro_batch
    short = "no layout is sure to fit without"
    if layout.mlp_tile_tokens:
        why = short if tiles.mlp == "auto" else "the spec asks for it"
        whole = problem.spec.training.sequence_length / layout.mesh.cp
        less = size * model.ffn_hidden * max(0.0, whole - layout.mlp_tile_tokens) / layout.mesh.tp
        yield (
            f"Networks in tiles of {layout.mlp_tile_tokens:,} tokens: {why}; {less / MIB:,.0f} MiB less for each "
            "tensor of the inner width, which the backward pass computes a second time."
        )
    if layout.loss_tile_tokens:
        why = short if tiles.loss == "auto" else "the spec asks for it"
        yield f"Loss in tiles of {layout.loss_tile_tokens:,} tokens: {why}."
