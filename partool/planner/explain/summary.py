"""Text about layouts: a one-line summary for tables, and the reason why a layout was not taken."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.codec import encode
from partool.cost.evidence import WORDS, fit_limit
from partool.plan.layout import Layout
from partool.planner.search.price import Priced
from partool.planner.search.score import charged
from partool.spec.numbers import GIB

_MORE_SURE = 0.005
"""Difference of the probabilities of fitting from which texts name it."""


def summary(layout: Layout) -> str:
    """Return a summary of a layout in one line."""
    mesh = layout.mesh
    # The state is sharded over sequence-parallel ranks too.
    sharing = mesh.dp if layout.data.zero == 0 else mesh.dp_shard * mesh.cp
    parts = [f"ZeRO-{layout.data.zero} over {sharing} rank{'s' * (sharing > 1)}"]
    if mesh.dp_replicate > 1 and layout.data.zero:
        parts[0] = f"ZeRO-{layout.data.zero} over {sharing}, {mesh.dp_replicate} replicas"
    if mesh.tp > 1:
        parts.append(f"tensor {mesh.tp}{_tensor_form(layout)}")
    if mesh.pp > 1:
        parts.append(f"pipeline {mesh.pp} ({layout.pipeline.form})")
    if mesh.cp > 1:
        parts.append(f"sequence {mesh.cp} ({layout.sequence.form})")
    if layout.expert > 1:
        cut = f" × {layout.expert_tensor} parts" if layout.expert_tensor > 1 else ""
        parts.append(f"expert {layout.expert}{cut}")
    parts.append(f"micro-batch {layout.micro_batch} × {layout.derived.accumulation}")
    parts.append(f"recompute {recompute(layout)}")
    parts += [f"{what} in tiles of {tokens}" for what, tokens in _tiles(layout)]
    parts += [f"offload {what}" for what in _offloaded(layout)]
    return ", ".join(parts)


def _tensor_form(layout: Layout) -> str:
    """Return text in brackets on the form of tensor parallelism: d1 × d2, or norms on shares of the sequence."""
    inner = layout.tensor.inner
    parts = [f"{layout.mesh.tp // inner} × {inner}"] * (inner > 1) + ["sequence norms"] * layout.tensor.sequence_norms
    return f" ({', '.join(parts)})" if parts else ""


def brief(layout: Layout, beside: Layout | None = None) -> str:
    """Return the kinds of parallelism and offload of a layout; where ``beside`` has the same, also other settings."""
    mesh = layout.mesh
    degrees = (("tensor", mesh.tp), ("pipeline", mesh.pp), ("sequence", mesh.cp), ("expert", layout.expert))
    parts = [f"ZeRO-{layout.data.zero}", *(f"{name} {degree}" for name, degree in degrees if degree > 1)]
    if moved := _offloaded(layout):
        parts.append(f"offload {listed([part.partition(' ')[0] for part in moved])}")
    text = ", ".join(parts)
    if beside is None or brief(beside) != text:
        return text
    if (layout.micro_batch, mesh.dp) != (beside.micro_batch, beside.mesh.dp):
        text += f", micro-batch {layout.micro_batch} × {layout.derived.accumulation}"
    if layout.recompute != beside.recompute:
        text += f", recompute {recompute(layout)}"
    elif mesh.pp > 1 and layout.pipeline.form != beside.pipeline.form:
        text += f", {layout.pipeline.form}"
    return text


def recompute(layout: Layout) -> str:
    """Return text with each recomputation policy and its number of layers; if there is one policy, only its name."""
    counts = {policy: layout.recompute.count(policy) for policy in dict.fromkeys(layout.recompute)}
    if len(counts) == 1:
        return layout.recompute[0]
    return " + ".join(f"{policy} × {count}" for policy, count in counts.items())


def _tiles(layout: Layout) -> list[tuple[str, int]]:
    """Return the name of each part that processes a micro-batch in tiles, with the number of tokens per tile."""
    tiles = (("networks", layout.tiles.mlp), ("loss", layout.tiles.loss))
    return [(what, tokens) for what, tokens in tiles if tokens]


def _offloaded(layout: Layout) -> list[str]:
    parts = []
    if layout.offload.optimizer != "none":
        share = f" {1.0 - layout.offload.gpu_fraction:.0%}" if layout.offload.gpu_fraction else ""
        parts.append(f"optimizer{share}{_to_disks(layout.offload.optimizer)}")
    if layout.offload.parameters != "none":
        parts.append(f"parameters{_to_disks(layout.offload.parameters)}")
    if layout.offload.activations == "cpu":
        parts.append("activations")
    return parts


def _to_disks(tier: str) -> str:
    return " to disks" if tier == "nvme" else ""


def why_lost(best: Priced, other: Priced) -> str:
    """Return why a layout was not taken: too large, slower (with the term at fault), not sure to fit, or no better."""
    if not other.fits:
        if other.memory.total_bytes <= other.memory.capacity_bytes:
            return f"{other.host_bytes / GIB:.1f} GiB of host memory are more than there is"
        return f"{(other.memory.total_bytes - other.memory.capacity_bytes) / GIB:.1f} GiB too large"
    ratio = other.step_time_s / best.step_time_s
    if ratio > 1.0005:
        text = f"{(ratio - 1.0) * 100:.1f} % slower"
        name, more = _most(best, other)
        return text + (f": {name} + {short_time(more)}" if more > 0 else "")
    if ratio < 0.9995:
        gain = f"{(1.0 - ratio) * 100:.1f} % faster"
        # A layout with a better score was left out because it cannot run, or because it uses other devices.
        return gain if other.score_s < best.score_s else f"{gain} on paper, but {but(best, other)}"
    if other.unfit > best.unfit + _MORE_SURE:
        return f"as fast; fits with a probability of {_sure(other)} only"
    more = other.memory.total_bytes - best.memory.total_bytes
    if abs(more) < GIB / 100:
        return "as fast, and no simpler"
    return f"as fast, with {abs(more) / GIB:.2f} GiB {'more' if more > 0 else 'less'} memory"


def but(best: Priced, other: Priced) -> str:
    """Return why ``best`` was taken although ``other`` is predicted to be as fast or faster."""
    parts = []
    if other.risk > best.risk:
        here = f", those of this plan by {best.risk:.0%}" if best.risk else ""
        parts.append(f"predictions for {listed(risks(other))} err by {other.risk:.0%}{here}")
    if other.unfit > best.unfit and _sure(other) != _sure(best):
        parts.append(f"it fits with {_sure(other)} where this one does with {_sure(best)}")
    shares = f"{other.factor - 1.0:.2%}, those of this plan {best.factor - 1.0:.2%}"
    return listed(parts) or f"its memory and settings are charged {shares}"


def _sure(priced: Priced) -> str:
    """Return the probability that a layout fits, as text, no larger than runs support."""
    return f"{min(1.0 - priced.unfit, fit_limit()[0]):.0%}"


def risks(one: Priced) -> list[str]:
    """Return the words for the mechanisms whose errors count against a layout."""
    return [WORDS[name] for name in charged(one.problem, encode(one.layout))]


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence."""
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), *words[-1:]])


def _most(best: Priced, other: Priced) -> tuple[str, float]:
    """Return the name of the step-time term by which ``other`` exceeds ``best`` most, and the difference in seconds."""
    mine, theirs = best.terms_s, other.terms_s
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in dict.fromkeys([*mine, *theirs])}
    name = max(more, key=lambda key: more[key])
    return name, more[name]


def times(other: Priced, best: Priced) -> str:
    """Return the step times of a layout and of the plan's, with as many digits as tell them apart."""
    one, here = other.step_time_s, best.step_time_s
    factor, unit = (1e3, "ms") if min(one, here) < 1.0 else (1.0, "s")
    if (texts := (short_time(one), short_time(here)))[0] == texts[1]:
        digits = next((n for n in range(4, 8) if f"{one * factor:.{n}g}" != f"{here * factor:.{n}g}"), 3)
        texts = (f"{one * factor:.{digits}g} {unit}", f"{here * factor:.{digits}g} {unit}")
    return f"{texts[0]} (here {texts[1]})"


def short_time(value_s: float) -> str:
    """Return a time of a step with its unit: ``14.3 s``, ``208 ms``."""
    return f"{value_s * 1e3:.3g} ms" if value_s < 1.0 else f"{value_s:.3g} s"
