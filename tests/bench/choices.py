"""Plan every spec of a folder and compare with an earlier record.

``python tests/bench/choices.py FOLDER NEW.json`` plans each ``*.yaml`` of the folder and writes layout, step time,
score, memory and CPU seconds of each. ``python tests/bench/choices.py --table OLD.json NEW.json`` prints both as a
Markdown table. Records of versions without a score have none.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from typing import Any

from partool.planner.explain.summary import summary
from partool.planner.resolve import resolve
from partool.planner.search.solve import solve
from partool.spec import load_text
from partool.spec.numbers import GIB


def cpu_s() -> float:
    """Return the CPU seconds of this process so far, those of the system included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def record_of(file: Path) -> dict[str, Any]:
    """Plan one spec; return the chosen layout with its prices."""
    spec = load_text(file.read_text(encoding="utf-8")).spec
    problem = None if spec is None else resolve(spec, file.parent).problem
    if problem is None:
        return {"layout": "refused"}
    start_s = cpu_s()
    best = solve(problem).chosen
    taken_s = cpu_s() - start_s
    if best is None:
        return {"layout": "does not fit", "cpu_s": taken_s}
    return {
        "layout": summary(best.layout),
        "step_s": best.step_time_s,
        "score_s": best.score_s,
        "risk": best.risk,
        "fit_probability": best.memory.fit_probability,
        "gib": best.memory.total_bytes / GIB,
        "device_gib": problem.devices.memory_bytes / GIB,
        "mfu": best.time.mfu,
        "cpu_s": taken_s,
    }


def table(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return two records as a table in Markdown."""
    lines = ["| spec | before | s, GiB | now | s (score) | GiB | fits | CPU s |", "|---|---|---|---|---|---|---|---|"]
    for name, now in new.items():
        was = old.get(name, {})
        before = f"{was['step_s']:.4g}, {was['gib']:.0f}" if "step_s" in was else ""
        seconds = f"{now['step_s']:.4g} ({now['score_s']:.4g})" if "step_s" in now else ""
        gib = f"{now['gib']:.0f} of {now['device_gib']:.0f}" if "gib" in now else ""
        chance = f"{now['fit_probability']:.1%}" if "fit_probability" in now else ""
        cpu = f"{was.get('cpu_s', was.get('cpu', 0.0)):.1f} → {now.get('cpu_s', 0.0):.1f}"
        title = name.removesuffix(".yaml")
        cells = (title, was.get("layout", ""), before, now["layout"], seconds, gib, chance, cpu)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Plan the specs of a folder, or print a table of two records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print two records as a table")
    parser.add_argument("first", type=Path, help="folder of specs; with --table the earlier record")
    parser.add_argument("second", type=Path, help="record to write; with --table the later record")
    arguments = parser.parse_args()
    if arguments.table:
        if missing := [file for file in (arguments.first, arguments.second) if not file.is_file()]:
            parser.error(f"{missing[0]} is no file: name two records")
        print(table(*(json.loads(file.read_text(encoding="utf-8")) for file in (arguments.first, arguments.second))))
        return
    specs = sorted(arguments.first.glob("*.yaml"))
    if not specs:
        parser.error(f"{arguments.first} has no *.yaml: name a folder of specs")
    records = {file.name: record_of(file) for file in specs}
    arguments.second.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
