"""A plan as one HTML page, which loads nothing from the network and is readable without JavaScript."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partool.plan.as_spec import own_yaml
from partool.plan.terms import MEMORY_TERMS, TIME_PARTS, TIME_TERMS
from partool.plan.types import CandidateRow, Plan, RankMemory
from partool.render.shell import asset
from partool.report.html_charts import axis_rows, memory_over_time, node_pictures, pareto
from partool.report.html_svg import bar
from partool.report.html_timeline import timeline_view
from partool.report.plan import next_commands
from partool.report.tables import plan_summary
from partool.report.units import amount, gib, in_order, probability, seconds
from partool.report.units import bars as error_bars
from partool.report.verification import correction, summary, terms
from partool.spec.numbers import duration
from partool.strategies.jobs import JOBS

_RANKS = 20
"""Maximum number of pipeline ranks with a bar; if there are more, only the first, the fullest and the last have one."""
_TINY = 1e-6
"""Parts of the step time below this share of the step time get no line."""
_ONE_LINE = 100_000
"""Width that no command takes: a page shows the next command in one line."""
_VERDICTS = {"green": "should fit", "amber": "may not fit", "red": "does not fit"}


@dataclass(frozen=True)
class TermFigure:
    """A term of memory or time with its colour, its formatted value, and its share."""

    name: str
    class_: str
    value: str
    share: str
    words: str
    bar: str = ""


@dataclass(frozen=True)
class RankBar:
    """Memory of one pipeline rank."""

    name: str
    svg: str
    total: str
    share: str


def render_html(plan: Plan, source: Sequence[str] | None = None) -> str:
    """Return the page; ``source`` are the words that name the plan for ``partool launch``, see ``render_plan``."""
    return page("report.html.jinja", plan=plan, job=JOBS[plan.job].title, **_content(plan, source))


def page(template: str, *, has_curves: bool = False, **content: Any) -> str:
    """Return the HTML page that a template of partool makes from ``content``; style and script are inside the page.

    ``has_curves`` adds style and script of :mod:`partool.report.html_curves`.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        gib=gib,
        seconds=seconds,
        amount=amount,
        duration=duration,
        markup=Markup,
        error_bars=error_bars,
        sentence=_sentence,
    )
    names = ("report", "curves") if has_curves else ("report",)
    css, js = (Markup("".join(asset(f"{name}.{kind}") for name in names)) for kind in ("css", "js"))
    return environment.from_string(asset(template)).render(css=css, js=js, **content)


def _sentence(words: str) -> str:
    """Return words as the begin of a sentence; names such as GiB stay as they are."""
    return words[:1].upper() + words[1:]


def _content(plan: Plan, source: Sequence[str] | None) -> dict[str, Any]:
    pictures, left_out = node_pictures(plan)
    return {
        "summary": _summary(plan),
        "parameters": _parameters(plan),
        "verdict": _VERDICTS[plan.prediction.memory.verdict],
        "probability": probability(plan.prediction.memory.fit_probability, counted=True),
        "command": " ".join(next_commands(plan, source, _ONE_LINE)) if plan.runnable else "",
        "layout": _layout(plan),
        "own_yaml": own_yaml(plan),
        "axes": axis_rows(plan),
        "nodes": pictures,
        "nodes_left_out": left_out,
        "rank_bars": _rank_bars(plan),
        "memory_terms": _memory_terms(plan),
        "time_bar": _time_bar(plan),
        "time_terms": _time_terms(plan),
        "time_parts": _time_parts(plan),
        "timeline": timeline_view(plan),
        "candidates": [_candidate(row) for row in plan.candidates],
        "pareto": pareto(plan),
        "spec": json.dumps(plan.spec, indent=2, ensure_ascii=False, default=str),
        "hosted": any(row.host_bytes for row in plan.candidates),
        **_verification(plan),
    }


def _verification(plan: Plan) -> dict[str, Any]:
    verification = plan.verification
    if verification is None:
        return {}
    return {
        "verification_summary": summary(plan, verification),
        "verification_correction": correction(plan, verification),
        "verification_terms": terms(verification),
        "verification_memory": memory_over_time(verification),
    }


def _summary(plan: Plan) -> str:
    """Return the layout in one line: the planner's summary, or ZeRO stage and micro-batches if there is none."""
    layout = plan.layout
    sizes = f"ZeRO-{layout.data.zero}, micro-batch {layout.micro_batch} × {layout.derived.accumulation}"
    return plan_summary(plan) or sizes


def _parameters(plan: Plan) -> str:
    from partool.layout.parameters import count, parameters

    return amount(count(parameters(plan.model)))


def _layout(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, text) of each decision of the plan."""
    layout, mesh = plan.layout, plan.layout.mesh
    rows = [
        ("ZeRO stage", str(layout.data.zero)),
        ("micro-batch", f"{layout.micro_batch} × {layout.derived.accumulation} per step"),
    ]
    if mesh.pp > 1:
        lengths = sorted({stop - start for start, stop in layout.pipeline.bounds})
        each = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else str(lengths[0])
        chunks = f", {layout.pipeline.chunks} chunks per rank" if layout.pipeline.chunks > 1 else ""
        rows.append(("schedule", f"{layout.pipeline.schedule}{chunks}"))
        rows.append(("stages", f"{len(layout.pipeline.bounds)} of {each} layers"))
    if mesh.cp > 1:
        rows.append(("sequences", f"over {mesh.cp} ranks by {layout.sequence.form}, {layout.sequence.order}"))
    if layout.expert > 1:
        parts = f", {layout.expert_tensor} of which hold parts of the same experts" if layout.expert_tensor > 1 else ""
        rows.append(("experts", f"over {layout.expert_ranks} ranks{parts}"))
    kinds = list(dict.fromkeys(layout.recompute))
    recompute = kinds[0] if len(kinds) == 1 else ", ".join(f"{k} in {layout.recompute.count(k)} layers" for k in kinds)
    rows += [("recompute", recompute), ("compile", layout.compile)]
    tiles = (("networks", layout.tiles.mlp), ("loss", layout.tiles.loss))
    rows += [(what, f"in tiles of {tokens:,} tokens") for what, tokens in tiles if tokens]
    where_is = {"cpu": "in host memory", "nvme": "in files"}
    if layout.offload.optimizer != "none":
        rows.append(("optimizer", f"{1.0 - layout.offload.gpu_fraction:.0%} {where_is[layout.offload.optimizer]}"))
    rows += [
        (name, where_is[where])
        for name, where in (("parameters", layout.offload.parameters), ("activations", layout.offload.activations))
        if where != "none"
    ]
    return rows


def _classes(names: list[str]) -> dict[str, str]:
    return {name: f"c{index}" for index, name in enumerate(names)}


def _rank_bars(plan: Plan) -> list[RankBar]:
    memory, device = plan.prediction.memory, plan.devices.memory_bytes
    ranks = list(memory.ranks) or [
        RankMemory(pipeline_rank=0, terms_bytes=memory.terms_bytes, total_bytes=memory.total_bytes)
    ]
    if len(ranks) > _RANKS:
        fullest = max(ranks, key=lambda rank: rank.total_bytes)
        half = _RANKS // 2
        chosen = {rank.pipeline_rank: rank for rank in (*ranks[:half], fullest, *ranks[-half:])}
        ranks = [chosen[index] for index in sorted(chosen)]
    full_width = max(device, *(rank.total_bytes for rank in ranks)) * 1.02
    colours = _classes(list(MEMORY_TERMS))
    bars = []
    for rank in ranks:
        parts = [
            (colours.get(name, "c0"), size, f"{name} {gib(size)} GiB")
            for name, size in in_order(dict(rank.terms_bytes), MEMORY_TERMS)
        ]
        name = f"pipeline rank {rank.pipeline_rank}" if plan.layout.mesh.pp > 1 else "every rank"
        lines = [(float(memory.capacity_bytes), "headroom"), (float(device), "device")]
        svg = bar(f"memory-{rank.pipeline_rank}", f"Memory of {name}", parts, full_width, lines)
        bars.append(RankBar(name, svg, gib(rank.total_bytes), f"{rank.total_bytes / device:.0%}"))
    return bars


def _memory_terms(plan: Plan) -> list[TermFigure]:
    memory = plan.prediction.memory
    colours = _classes(list(MEMORY_TERMS))
    total = max(memory.total_bytes, 1)
    return [
        TermFigure(name, colours.get(name, "c0"), gib(size), f"{size / total:.1%}", MEMORY_TERMS.get(name, ""))
        for name, size in in_order(dict(memory.terms_bytes), MEMORY_TERMS)
    ]


def _time_bar(plan: Plan) -> str:
    time = plan.prediction.time
    colours = _classes(list(TIME_TERMS))
    parts = [
        (colours.get(name, "c0"), value, f"{name} {seconds(value)}")
        for name, value in in_order(time.terms_s, TIME_TERMS)
    ]
    return bar("time-terms", "Time of a step by term", parts, time.step_time_s, [])


def _time_terms(plan: Plan) -> list[TermFigure]:
    time = plan.prediction.time
    colours = _classes(list(TIME_TERMS))
    return [
        TermFigure(
            name,
            colours.get(name, "c0"),
            seconds(value),
            f"{value / time.step_time_s:.1%}",
            TIME_TERMS.get(name, ""),
        )
        for name, value in in_order(time.terms_s, TIME_TERMS)
    ]


def _time_parts(plan: Plan) -> list[TermFigure]:
    time = plan.prediction.time
    parts = {name: value for name, value in time.breakdown_s.items() if value > _TINY * time.step_time_s}
    full_width = max([time.step_time_s, *parts.values()])
    ordered = [name for name in TIME_PARTS if name in parts]
    return [
        TermFigure(
            name,
            "part",
            seconds(parts[name]),
            f"{parts[name] / time.step_time_s:.1%}",
            TIME_PARTS[name],
            bar(f"part-{name}", name, [("part", parts[name], f"{name} {seconds(parts[name])}")], full_width, []),
        )
        for name in ordered
    ]


def _candidate(row: CandidateRow) -> dict[str, Any]:
    return {
        "row": row,
        "own": not row.why_not,
        "probability": probability(row.fit_probability),
    }
