"""One layout as columns of single numbers."""

from __future__ import annotations

from partool.cost.case import INSIDES, ORDERS, OVERLAPS, RECOMPUTE, SCHEDULES, SEQUENCE_METHODS, Layouts
from partool.plan.types import Layout
from partool.spec.parallel import Recompute


def columns(layout: Layout, policy: Recompute | None = None) -> Layouts:
    """Return a layout as columns of single numbers, as if all layers had one recompute policy.

    Without one, the share of the layers that recompute follows the most frugal of their policies.
    """
    mesh = layout.mesh
    some = [chosen for chosen in layout.recompute if chosen != "none"]
    share = 1.0 if policy or not some else len(some) / len(layout.recompute)
    policy = policy or max(some, key=RECOMPUTE.index, default="none")
    return Layouts(
        pp=mesh.pp,
        replicas=mesh.dp_replicate,
        shards=mesh.dp_shard,
        cp=mesh.cp,
        tp=mesh.tp,
        ep=layout.expert,
        zero=layout.zero,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        recompute=RECOMPUTE.index(policy),
        recompute_share=share,
        schedule=SCHEDULES.index(layout.schedule),
        chunks=layout.chunks,
        in_flight=layout.in_flight,
        sequence_method=SEQUENCE_METHODS.index(layout.sequence_method),
        sequence_order=ORDERS.index(layout.sequence_order),
        sequence_inner=layout.sequence_inner,
        sequence_teams=layout.sequence_teams,
        sequence_inside=INSIDES.index(layout.sequence_inside),
        mlp_tile_tokens=layout.mlp_tile_tokens,
        loss_tile_tokens=layout.loss_tile_tokens,
        host_optimizer=1.0 - layout.gpu_fraction if layout.offload_optimizer != "none" else 0.0,
        host_parameters=int(layout.offload_parameters != "none"),
        host_activations=int(layout.offload_activations == "cpu"),
        compiled=int(layout.compile == "block"),
        tensor_inner=layout.tensor_inner,
        sequence_norms=int(layout.sequence_norms),
        tensor_overlap=OVERLAPS.index(layout.tensor_overlap),
        tensor_chunks=layout.tensor_chunks,
    )
