"""Layouts in words: one line for tables, and what to write into a spec to get one."""

from __future__ import annotations

from itertools import groupby

from partool.plan.types import Layout
from partool.planner.price import Priced

GIB = 2**30
TIE = 1e-3
"""Layouts whose step times differ by less than this are equally fast; the simpler one is taken."""


def summary(layout: Layout) -> str:
    """Return a layout in one line."""
    mesh = layout.mesh
    # Ranks of one sequence share the state like those of several.
    sharing = mesh.dp if layout.zero == 0 else mesh.dp_shard * mesh.cp
    parts = [f"ZeRO-{layout.zero} over {sharing} rank{'s' * (sharing > 1)}"]
    if mesh.dp_replicate > 1 and layout.zero:
        parts[0] = f"ZeRO-{layout.zero} over {sharing}, {mesh.dp_replicate} replicas"
    if mesh.tp > 1:
        parts.append(f"tensor {mesh.tp}{_tensor_form(layout)}")
    if mesh.pp > 1:
        parts.append(f"pipeline {mesh.pp} ({schedule(layout)})")
    if mesh.cp > 1:
        parts.append(f"sequence {mesh.cp} ({layout.sequence_form})")
    if layout.expert > 1:
        parts.append(f"expert {layout.expert}")
    parts.append(f"micro-batch {layout.micro_batch} × {layout.accumulation}")
    parts.append(f"recompute {recompute(layout)}")
    parts += [f"{what} in tiles of {tokens}" for what, tokens in _tiles(layout)]
    parts += [f"offload {what}" for what in _offloaded(layout)]
    return ", ".join(parts)


def _tensor_form(layout: Layout) -> str:
    """Return in brackets what distinguishes forms of tensor parallelism: d1 × d2, or norms on shares."""
    inner = layout.tensor_inner
    parts = [f"{layout.mesh.tp // inner} × {inner}"] * (inner > 1) + ["sequence norms"] * layout.sequence_norms
    return f" ({', '.join(parts)})" if parts else ""


def schedule(layout: Layout) -> str:
    """Return the schedule with its chunks per rank or its waves, and the bound of what is in flight."""
    if layout.schedule == "hanayo":
        waves = layout.chunks // 2
        text = f"hanayo, {waves} wave{'s' * (waves > 1)}"
    else:
        named = "own lists" if layout.schedule == "file" else layout.schedule
        text = named + (f" × {layout.chunks}" if layout.chunks > 1 and layout.schedule != "zb-v" else "")
    return text + (f", {layout.in_flight} in flight" if layout.in_flight else "")


def recompute(layout: Layout) -> str:
    """Return the policies with their number of layers, or the one that all layers follow."""
    counts = {policy: layout.recompute.count(policy) for policy in dict.fromkeys(layout.recompute)}
    if len(counts) == 1:
        return layout.recompute[0]
    return " + ".join(f"{policy} × {count}" for policy, count in counts.items())


def _tiles(layout: Layout) -> list[tuple[str, int]]:
    """Return what passes a micro-batch in tiles, and their tokens."""
    tiles = (("networks", layout.mlp_tile_tokens), ("loss", layout.loss_tile_tokens))
    return [(what, tokens) for what, tokens in tiles if tokens]


def _offloaded(layout: Layout) -> list[str]:
    found = []
    if layout.offload_optimizer != "none":
        share = f" {1.0 - layout.gpu_fraction:.0%}" if layout.gpu_fraction else ""
        found.append(f"optimizer{share}{_to_disks(layout.offload_optimizer)}")
    if layout.offload_parameters != "none":
        found.append(f"parameters{_to_disks(layout.offload_parameters)}")
    if layout.offload_activations == "cpu":
        found.append("activations")
    return found


def _to_disks(tier: str) -> str:
    return " to disks" if tier == "nvme" else ""


def change(layout: Layout, file: str = "") -> str:
    """Return the ``parallel`` section that leaves this layout and no other; ``file`` holds the user's own schedule."""
    mesh = layout.mesh
    shard = f", shard: {mesh.dp_shard}" if layout.zero and mesh.dp > 1 else ""
    pipeline = str(mesh.pp)
    if mesh.pp > 1:
        name = f"{{file: {file}}}" if layout.schedule == "file" else layout.schedule
        sizes = f", chunks: {layout.chunks}" if layout.schedule == "interleaved" else ""
        sizes += f", waves: {layout.chunks // 2}" if layout.schedule == "hanayo" else ""
        sizes += f", in_flight: {layout.in_flight}" if layout.in_flight else ""
        pipeline = f"{{stages: {mesh.pp}, schedule: {name}{sizes}}}"
    fraction = f", gpu_fraction: {layout.gpu_fraction:g}" if layout.offload_optimizer != "none" else ""
    folder = f", dir: {layout.host.folder}" if layout.host.folder else ""
    offload = (
        f"{{optimizer: {layout.offload_optimizer}{fraction}, parameters: {layout.offload_parameters}, "
        f"activations: {layout.offload_activations}{folder}}}"
    )
    tiles = f"tiles: {{mlp: {layout.mlp_tile_tokens}, loss: {layout.loss_tile_tokens}}}, " if _tiles(layout) else ""
    policies = [(policy, len(list(group))) for policy, group in groupby(layout.recompute)]
    policy = policies[0][0] if len(policies) == 1 else f"[{', '.join(layout.recompute)}]"
    return (
        f"parallel: {{data: {{zero: {layout.zero}{shard}}}, tensor: {_tensor(layout)}, pipeline: {pipeline}, "
        f"sequence: {_sequence(layout)}, {tiles}expert: {layout.expert}, offload: {offload}, recompute: {policy}, "
        f"micro_batch: {layout.micro_batch}}}"
    )


def _tensor(layout: Layout) -> str:
    """Return the ``tensor`` section that leaves this form and no other."""
    ranks, inner = layout.mesh.tp, layout.tensor_inner
    if ranks == 1:
        return "1"
    norms = "true" if layout.sequence_norms else "false"
    return (
        f"{{degree: {ranks}, shape: [{ranks // inner}, {inner}], sequence_norms: {norms}, "
        f"overlap: {layout.tensor_overlap}, chunks: {layout.tensor_chunks}}}"
    )


def _sequence(layout: Layout) -> str:
    """Return the ``sequence`` section that leaves this form and no other."""
    ranks, method = layout.mesh.cp, layout.sequence_method
    if ranks == 1:
        return "1"
    sizes = f", ulysses: {layout.sequence_inner}" if method == "usp" else ""
    if method == "startrail":
        sizes = f", teams: {layout.sequence_teams}, inside: {layout.sequence_inside}"
    order = "" if layout.sequence_order == "grid" else f", order: {layout.sequence_order}"
    return f"{{method: {method}, degree: {ranks}{sizes}{order}}}"


def why_lost(best: Priced, other: Priced) -> str:
    """Return why a layout was not taken: too large, slower and by which term, unsure to fit, or no better."""
    if not other.fits:
        if other.memory.total_bytes <= other.memory.capacity_bytes:
            return f"{other.host_bytes / GIB:.1f} GiB of host memory are more than there is"
        return f"{(other.memory.total_bytes - other.memory.capacity_bytes) / GIB:.1f} GiB too large"
    ratio = other.time.step_time_s / best.time.step_time_s
    likely = f"fits with a probability of {other.memory.fit_probability:.0%} only"
    if ratio > 1.0005:
        text = f"{(ratio - 1.0) * 100:.1f} % slower"
        name, more = _most(best, other)
        return text + (f": {name} + {_short(more)}" if more > 0 else "")
    if not other.safe and best.safe:
        return likely
    if ratio < 0.9995:
        gain = f"{(1.0 - ratio) * 100:.1f} % faster"
        return f"{gain}: too little, the simpler one is taken" if ratio * (1.0 + TIE) >= 1.0 - 1e-9 else gain
    more = other.memory.total_bytes - best.memory.total_bytes
    if abs(more) < GIB / 100:
        return "as fast, and no simpler"
    return f"as fast, with {abs(more) / GIB:.2f} GiB {'more' if more > 0 else 'less'} memory"


def _most(best: Priced, other: Priced) -> tuple[str, float]:
    """Return the term that a layout loses most by."""
    mine, theirs = best.time.terms_s, other.time.terms_s
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in dict.fromkeys([*mine, *theirs])}
    name = max(more, key=lambda key: more[key])
    return name, more[name]


def _short(value_s: float) -> str:
    return f"{value_s * 1e3:.3g} ms" if value_s < 1.0 else f"{value_s:.3g} s"
