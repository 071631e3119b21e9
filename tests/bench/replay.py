"""Predict published runs row by row: ``python tests/bench/replay.py RUNS.csv [--memory MEMORY.csv] [--output json]``.

Takes any file with the columns of ``tests/data/measured_runs.csv`` (``measured_memory.csv``). Rows that a spec cannot
express, or that lack necessary values, are skipped with a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _record import write
from replaying import bars, best_mfu
from replaying.evidence import paired
from replaying.score import Tally, overall, summary

from partool.cost.evidence import mechanism_excess, shipped
from partool.replay.cases import RunCase, SkipError, case_of
from partool.replay.predicted import Result, memory_result, time_result
from partool.replay.table import read_table

_EVIDENCE = Path(__file__).parents[2] / "partool" / "cost" / "evidence.json"
_MFU = _EVIDENCE.parents[1] / "catalog" / "published_mfu.json"
_OWN = Path(__file__).parent / "results" / "gpu_steps.json"
"""Steps of partool's own runtime, measured on one H100."""
_COLUMNS = (
    "rows",
    "skipped",
    "stated",
    "bias",
    "median",
    "median_stated",
    "p90",
    "median_scaled",
    "regret_mean",
    "kendall",
    "null_median",
)
_OF_SWEEPS = ("regret_mean", "kendall", "null_median")
"""Columns of step times alone."""


def replay(path: Path, predict: Callable[[RunCase], Result | None], only: str = "") -> dict[str, Tally]:
    """Return every row of a file, predicted or skipped, by source."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for line in read_table(path).lines:
        cells = line.cells
        source = cells.text("source") or "(no source)"
        if only and only.lower() not in source.lower():
            continue
        if line.fault:
            tallies[source].skipped[line.fault] += 1
            continue
        try:
            result = predict(case_of(cells))
        except SkipError as reason:
            tallies[source].skipped[str(reason)] += 1
            continue
        if result is None:
            tallies[source].skipped["nothing was measured"] += 1
        else:
            tallies[source].results.append(result)
    return tallies


def main() -> None:
    """Read the arguments and print the table, the rows or the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--output", choices=["text", "json"], default="text")
    parser.add_argument("--source", default="", help="only sources with this in their name")
    parser.add_argument("--record", action="store_true", help="write replay.json and bars.json in tests/bench/results")
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument(
        "--evidence",
        action="store_true",
        help="write partool/cost/evidence.json, the errors of plans, and partool/catalog/published_mfu.json",
    )
    parser.add_argument("--judge", action="store_true", help="print how the errors hold on sources that are left out")
    arguments = parser.parse_args()
    tallies: list[tuple[str, dict[str, Tally]]] = [("step_time", replay(arguments.runs, time_result, arguments.source))]
    if arguments.memory:
        tallies.append(("memory", replay(arguments.memory, memory_result, arguments.source)))
    summaries = [summary(source, metric, tally) for metric, by in tallies for source, tally in by.items()]
    if arguments.evidence:
        _EVIDENCE.write_text(json.dumps(evidence_of(tallies), indent=1) + "\n", encoding="utf-8")
        if arguments.memory:
            # How many green runs fitted follows from the errors that have just been written.
            shipped.cache_clear()
            mechanism_excess.cache_clear()
            tallies[1] = ("memory", replay(arguments.memory, memory_result, arguments.source))
            _EVIDENCE.write_text(json.dumps(evidence_of(tallies), indent=1) + "\n", encoding="utf-8")
        results = [result for tally in tallies[0][1].values() for result in tally.results]
        _MFU.write_text(json.dumps(best_mfu.table(results), indent=1) + "\n", encoding="utf-8")
    if arguments.judge:
        print("\n".join(judge_rows(judge_of(tallies))))
    if arguments.evidence or arguments.judge:
        if arguments.record:
            write("bars", judge_of(tallies))
        return
    files = [path.name for path in (arguments.runs, arguments.memory) if path]
    totals = {metric: overall(one for one in summaries if one["metric"] == metric) for metric, _ in tallies}
    data = {"files": files, "overall": totals, "sources": summaries}
    if arguments.record:
        write("replay", data)
        write("bars", judge_of(tallies))
        return
    if arguments.output == "json":
        print(json.dumps(data, indent=1))
        return
    for metric, by_source in tallies:
        if arguments.rows:
            for tally in by_source.values():
                for result in tally.results:
                    print(line(result, metric))
        table([one for one in summaries if one["metric"] == metric], metric)


def evidence_of(tallies: list[tuple[str, dict[str, Tally]]]) -> dict[str, Any]:
    """Return the table of evidence: errors by mechanism, first runs, ratios, and how often green runs fitted."""
    results = {metric: [result for tally in by.values() for result in tally.results] for metric, by in tallies}
    green = [result.fits for result in results.get("memory", []) if result.verdict == "green"]
    steps = json.loads(_OWN.read_text(encoding="utf-8"))["rows"]
    own = {"h100-sxm": sum("predicted_s" in row for row in steps)}
    timed = bars.runs_of(results["step_time"])
    return {
        "step_time": bars.step_bars(timed),
        "memory": bars.memory_bars(bars.runs_of(results.get("memory", []))),
        "first_runs": bars.first_runs(timed),
        "paired": paired(results["step_time"]),
        "fit": {"green": len(green), "fitted": sum(green)},
        "own": own,
    }


def judge_of(tallies: list[tuple[str, dict[str, Tally]]]) -> dict[str, Any]:
    """Return, by metric and group, how the errors that other sources give hold on each source."""
    judged = {}
    for metric, by in tallies:
        memory = metric == "memory"
        runs = bars.runs_of(result for tally in by.values() for result in tally.results)
        judged[metric] = bars.judge(bars.held_out(runs, memory=memory), memory=memory)
    return judged


def judge_rows(judged: dict[str, Any]) -> list[str]:
    """Return how the errors hold on left-out sources, as rows of the table of ``docs/results/predictions.md``."""
    rows = []
    for metric in ("step_time", "memory"):
        for name, one in judged.get(metric, {}).items():
            keys = ("inside_one", "inside_two", "half_width")
            shares = " | ".join(f"{100 * one[key]:.0f} %" if key in one else "–" for key in keys)
            cells = (metric.replace("_", " "), name, one["sources"], f"{one['runs']:,}", shares, one["verdict"])
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def table(summaries: list[dict[str, Any]], metric: str) -> None:
    """Print the figures of all sources in percent, and why rows were skipped."""
    extra = () if metric == "step_time" else ("fitting", "green", "false_rejects", "false_fits")
    names = (
        *(name for name in _COLUMNS if metric == "step_time" or name not in _OF_SWEEPS),
        *extra,
    )
    print(f"{metric:44.44}" + "".join(f"{name:>14}" for name in names))
    for one in sorted(summaries, key=lambda one: -one["rows"]):
        print(f"{one['source']:44.44}" + "".join(f"{_shown(name, one[name]):>14}" for name in names))
    total = overall(summaries)
    words = [f"{name.replace('_', ' ')} {_shown(name, value)}" for name, value in total.items() if value is not None]
    print("all sources: " + ", ".join(words))
    for one in summaries:
        if one["open"]:
            print(f"  open     {one['source'][:40]}: " + ", ".join(f"{name} {n}" for name, n in one["open"].items()))
        for reason, times in one["skip_reasons"].items():
            print(f"  skipped {times:4}  {one['source'][:40]}: {reason}")
    print()


def line(result: Result, metric: str) -> str:
    """Return one row as text: the prediction, the measurement, and the interpretation of the row."""
    scale, unit = (1.0, "s") if metric == "step_time" else (2**30, "GiB")
    error = f"{100 * (result.predicted / result.measured - 1):+6.1f} %" if result.measured else "   OOM  "
    truth = f"{result.measured / scale:9.3f}" if result.measured else "        -"
    layout, job = result.layout, result.job
    mesh = layout.mesh
    how = (
        f"{job.devices.accelerator} x{mesh.world_size} {job.precision} s{job.sequence_length} dp{mesh.dp} tp{mesh.tp} "
        f"pp{mesh.pp} cp{mesh.cp} ep{layout.expert} z{layout.data.zero} mb{layout.micro_batch} "
        f"x{layout.derived.accumulation} {layout.recompute[0]} {layout.pipeline.schedule} "
        f"v{layout.pipeline.chunks} {job.stack.name}"
    )
    name = result.case.cells.text("model")[:22]
    what = f"{result.case.source[:24]:24} {name:22} {result.predicted / scale:9.3f} {truth} {unit}"
    left = f"  open: {', '.join(result.case.open)}" if result.case.open else ""
    return f"{what} {error} {result.verdict:5} {how}{left}"


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "kendall":
        return f"{value:.2f}"
    return str(value) if isinstance(value, int) else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
