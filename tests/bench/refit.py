"""Fit constants of code bases to published step times, and judge each on sources that it was not fitted to.

    python tests/bench/refit.py tests/data/measured_runs.csv
    python tests/bench/refit.py RUNS.csv --constant fsdp2,fsdp2-compiled.overlap_gathers=0:1 --constant fsdp2.derate=1:2

A constant is a number of `partool/work/stacks.py`, written STACK[,STACK...].FIELD=LOW:HIGH; stacks that are named
together share it, and must have the same value today. Without --constant, those of DEFAULTS below are fitted. The loss
is the mean over sources of the median error, so that sources count alike whatever their number of rows. Then each
source is left out in turn, the constants are fitted to the others, and the source is predicted with them. Nothing is
written to stacks.py.

Time grows with rows and constants: three constants on six rows of each source take ten seconds of a CPU, the defaults
on 16 rows of each source many minutes. Name the constants of one code base, or give --most 10 --rounds 1, for a first
look.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _record import write
from replaying.fit import Constant, Prices, Refit, Search, constant_of, refit, timed_rows

from partool.replay.table import RunTableError

DEFAULTS = (
    "megatron.overlap_tensor=0:1", "megatron.derate=1:1.3", "megatron.overlap_gradients=0:1",
    "megatron-2021.host_slowdown=1:8", "megatron-2021.elementwise=1:2.4",
    "deepspeed.derate=1:1.6", "deepspeed.overlap_gathers=0:1", "deepspeed.host_share=0.05:0.6",
    "deepspeed-pipeline.derate=1:1.6", "deepspeed-pipeline.host_slowdown=1:8",
    "deepspeed-2021.derate=1:1.6", "deepspeed-2021.overlap_gathers=0:1", "deepspeed-2021.host_share=0.05:1",
    "fsdp1.derate=1:1.6", "fsdp1.overlap_gathers=0:1",
    "fsdp2.tensor_copies=0:8", "fsdp2-compiled.tensor_copies=0:8", "fsdp2.derate=1:1.6", "fsdp2.elementwise=1:2.6",
    "fsdp2.host_slowdown=1:6", "fsdp2-compiled.derate=1:1.6", "fsdp2,fsdp2-compiled.overlap_gathers=0:1",
)  # fmt: skip
"""Constants that are fitted unless the command names others."""


def main() -> None:
    """Read the arguments, fit, and print or record the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="table of runs, such as tests/data/measured_runs.csv")
    parser.add_argument(
        "--constant", action="append", default=[], metavar="STACK[,STACK].FIELD=LOW:HIGH",
        help="fit this constant within this range; may be given several times (default: DEFAULTS of this file)",
    )  # fmt: skip
    parser.add_argument("--most", type=int, default=40, help="rows of a source, drawn by --seed (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="seed of that draw (default: 1)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="searches per constant, each in half the range (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=7, help="values tried in each search (default: 7)")
    parser.add_argument(
        "--gain", type=float, default=0.001, help="least gain for a change of a constant (default: 0.001)"
    )
    parser.add_argument("--output", choices=["text", "json"], default="text")
    parser.add_argument("--record", action="store_true", help="write tests/bench/results/refit.json as well")
    arguments = parser.parse_args()
    try:
        constants = [constant_of(text) for text in arguments.constant or DEFAULTS]
    except ValueError as error:
        parser.error(str(error))
    try:
        prices = Prices(timed_rows(arguments.runs, arguments.most, arguments.seed))
    except RunTableError as error:
        parser.error(str(error))
    outcome = refit(prices, constants, Search(arguments.rounds, arguments.steps, arguments.gain))
    data = data_of(outcome, prices)
    if arguments.record:
        write("refit", {"file": arguments.runs.name, "seed": arguments.seed, "most": arguments.most, **data})
    print(json.dumps(data, indent=1) if arguments.output == "json" else text_of(outcome, data))


def data_of(outcome: Refit, prices: Prices) -> dict[str, Any]:
    """Return the outcome as numbers and names."""
    kinds = ("shipped", "all_sources", "left_out")
    sources = [
        {"source": one.source, "rows": one.rows, "stacks": one.stacks}
        | {kind: dict(zip(("bias", "median"), getattr(one, kind), strict=True)) for kind in kinds}
        for one in outcome.sources
    ]
    return {
        "constants": [_constant(one, outcome, prices) for one in outcome.values],
        "sources": sources,
        "median_of_medians": {kind: median(one[kind]["median"] for one in sources) for kind in kinds},
        "mean_of_medians": {kind: fmean(one[kind]["median"] for one in sources) for kind in kinds},
        "prices": len(prices.known),
    }


def _constant(one: Constant, outcome: Refit, prices: Prices) -> dict[str, Any]:
    sources = prices.sources(one)
    others = [outcome.without[source][one] for source in sources] or [one.shipped]
    return {
        "name": one.name, "sources": len(sources), "shipped": one.shipped, "fitted": outcome.values[one],
        "least_left_out": min(others), "most_left_out": max(others),
    }  # fmt: skip


def text_of(outcome: Refit, data: dict[str, Any]) -> str:
    """Return two tables: constants with their range over left-out sources, and sources with their errors."""
    lines = [f"{'constant':46}{'sources':>9}{'shipped':>9}{'fitted':>9}   with a source left out"]
    for one in data["constants"]:
        span = f"{one['least_left_out']:.3g} to {one['most_left_out']:.3g}"
        lines.append(f"{one['name']:46}{one['sources']:9}{one['shipped']:9.3g}{one['fitted']:9.3g}   {span}")
    lines += [
        "",
        f"{'median error (bias) by source':46}{'rows':>6}{'shipped':>18}{'fitted to all':>18}{'left out':>18}",
    ]
    for judged in outcome.sources:
        each = [
            f"{100 * size:.1f} ({100 * bias:+.1f}) %"
            for bias, size in (judged.shipped, judged.all_sources, judged.left_out)
        ]
        lines.append(f"{judged.source:46.45}{judged.rows:6}" + "".join(f"{text:>18}" for text in each))
    for name in ("median_of_medians", "mean_of_medians"):
        each = [f"{100 * value:.1f} %" for value in data[name].values()]
        lines.append(f"{name.replace('_', ' '):46}{'':6}" + "".join(f"{text:>18}" for text in each))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
