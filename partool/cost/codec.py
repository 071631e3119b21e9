"""Converts a layout to a row of single numbers plus a record of the fields that are not numbers, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from partool.cost.case import (
    EXCHANGES,
    INSIDES,
    ORDERS,
    OVERLAPS,
    PADDED,
    RECOMPUTE,
    SCHEDULES,
    SEQUENCE_METHODS,
    Layouts,
)
from partool.layout.sequence import Order
from partool.plan.layout import (
    DataLayout,
    Derived,
    Layout,
    OffloadLayout,
    PipelineLayout,
    SequenceLayout,
    TensorLayout,
    TilesLayout,
)
from partool.spec.parallel import ExpertExchange, Inside, Recompute, Style, TensorOverlap, TensorPattern, ZeroStage
from partool.spec.training import Fused
from partool.strategies.schedules import WITH_WAVES


@dataclass(frozen=True)
class LayoutLists:
    """Parts of a layout that columns do not hold: lists, names, texts, and settings common to a search's layouts."""

    recompute: tuple[Recompute, ...]
    """One policy per layer; columns hold one policy and the share of the layers that follow this policy."""
    layers: tuple[int, ...]
    """Number of layers of each pipeline stage."""
    gathers: DataLayout
    """Settings of all-gathers, except the ZeRO stage and the number of shards, which are columns."""
    offload: OffloadLayout
    """Places where offloaded state is kept; the shares of state that leave the device are columns."""
    patterns: dict[str, Style | TensorPattern]
    schedule_text: str = ""
    schedule_hash: str = ""
    fused: tuple[Fused, ...] = ()
    expert_rank_capacity: float | None = None
    """Rows of padded exchanges relative to an even share, as asked; None: as many as there can be."""


def encode(layout: Layout, policy: Recompute | None = None) -> Layouts:
    """Return a layout as columns of single numbers, as if all layers had the same recompute policy.

    If ``policy`` is None, the columns have the policy that saves most memory among the layout's policies, and
    ``recompute_share`` is the share of the layers that recompute anything.
    """
    data, tensor, pipeline, sequence = layout.data, layout.tensor, layout.pipeline, layout.sequence
    some = [chosen for chosen in layout.recompute if chosen != "none"]
    share = 1.0 if policy or not some else len(some) / len(layout.recompute)
    policy = policy or max(some, key=RECOMPUTE.index, default="none")
    return Layouts(
        pp=pipeline.stages,
        replicas=layout.derived.replicas,
        shards=data.shard,
        cp=sequence.degree,
        tp=tensor.degree,
        ep=layout.expert,
        etp=layout.expert_tensor,
        expert_exchange=EXCHANGES.index(layout.expert_exchange),
        zero=data.zero,
        micro_batch=layout.micro_batch,
        accumulation=layout.derived.accumulation,
        recompute=RECOMPUTE.index(policy),
        recompute_share=share,
        schedule=SCHEDULES.index(pipeline.schedule),
        chunks=pipeline.chunks,
        in_flight=pipeline.in_flight,
        sequence_method=SEQUENCE_METHODS.index(sequence.method),
        sequence_order=ORDERS.index(sequence.order),
        sequence_inner=sequence.ulysses,
        sequence_teams=sequence.teams,
        sequence_inside=INSIDES.index(sequence.inside),
        mlp_tile_tokens=layout.tiles.mlp,
        loss_tile_tokens=layout.tiles.loss,
        gpu_fraction=layout.offload.gpu_fraction,
        offload_parameters=int(layout.offload.parameters != "none"),
        offload_activations=int(layout.offload.activations == "cpu"),
        compiled=int(layout.compile == "block"),
        tensor_inner=tensor.inner,
        sequence_norms=int(tensor.sequence_norms),
        tensor_overlap=OVERLAPS.index(tensor.overlap),
        tensor_chunks=tensor.chunks,
    )


def lists_of(layout: Layout) -> LayoutLists:
    """Return the parts of a layout that :func:`encode` leaves out."""
    derived = layout.derived
    return LayoutLists(
        layout.recompute,
        layout.pipeline.layers,
        layout.data,
        layout.offload,
        layout.tensor.patterns,
        derived.schedule_text,
        derived.schedule_hash,
        derived.fused,
        layout.expert_rank_capacity,
    )


def decode(row: Layouts, rest: LayoutLists) -> Layout:
    """Return the layout that ``row`` and ``rest`` were made from: ``decode(encode(x), lists_of(x)) == x``."""
    tp, inner = int(row.tp), int(row.tensor_inner)
    compile: Literal["block", "none"] = "block" if row.compiled else "none"
    return Layout(
        data=rest.gathers.model_copy(update={"zero": cast("ZeroStage", int(row.zero)), "shard": int(row.shards)}),
        tensor=TensorLayout(
            degree=tp,
            shape=(tp // inner, inner),
            sequence_norms=bool(row.sequence_norms),
            overlap=cast("TensorOverlap", OVERLAPS[int(row.tensor_overlap)]),
            chunks=int(row.tensor_chunks),
            patterns=rest.patterns,
        ),
        pipeline=_pipeline(row, rest),
        sequence=SequenceLayout(
            method=SEQUENCE_METHODS[int(row.sequence_method)],
            degree=int(row.cp),
            ulysses=int(row.sequence_inner),
            teams=int(row.sequence_teams),
            inside=cast("Inside", INSIDES[int(row.sequence_inside)]),
            order=cast("Order", ORDERS[int(row.sequence_order)]),
        ),
        tiles=TilesLayout(mlp=int(row.mlp_tile_tokens), loss=int(row.loss_tile_tokens)),
        expert=int(row.ep),
        expert_tensor=int(row.etp),
        expert_exchange=cast("ExpertExchange", EXCHANGES[int(row.expert_exchange)]),
        expert_rank_capacity=_rank_capacity(row, rest),
        offload=rest.offload.model_copy(update=_offload_fields(row, rest.offload)),
        recompute=rest.recompute,
        compile=compile,
        micro_batch=int(row.micro_batch),
        derived=Derived(
            replicas=int(row.replicas),
            accumulation=int(row.accumulation),
            schedule_text=rest.schedule_text,
            schedule_hash=rest.schedule_hash,
            fused=rest.fused,
        ),
    )


def _rank_capacity(row: Layouts, rest: LayoutLists) -> float | None:
    """Return the rows of padded exchanges relative to an even share; None with other exchanges."""
    if row.expert_exchange != PADDED:
        return None
    ranks = float(row.expert_ranks)
    return ranks if rest.expert_rank_capacity is None else min(rest.expert_rank_capacity, ranks)


def _pipeline(row: Layouts, rest: LayoutLists) -> PipelineLayout:
    schedule, chunks = SCHEDULES[int(row.schedule)], int(row.chunks)
    return PipelineLayout(
        stages=int(row.pp),
        schedule=schedule,
        chunks=chunks,
        waves=chunks // 2 if schedule in WITH_WAVES else 0,
        in_flight=int(row.in_flight),
        layers=rest.layers,
    )


def _offload_fields(row: Layouts, offload: OffloadLayout) -> dict[str, object]:
    """Return the offload fields that follow from ``row``, by name; ``offload`` says where offloaded state is kept."""
    stays = float(row.gpu_fraction)
    return {
        "optimizer": offload.optimizer if stays < 1.0 else "none",
        "gpu_fraction": stays,
        "parameters": offload.parameters if row.offload_parameters else "none",
        "activations": "cpu" if row.offload_activations else "none",
    }
