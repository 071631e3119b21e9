"""Best published model FLOPs utilization by accelerator and precision (``partool/catalog/published_mfu.json``).

FLOPs are counted as plans count them, whatever the source counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from partool.cost.training.predict import model_flops
from partool.replay.predicted import Result

_UNSURE = frozenset({"model", "sequence_length"})
"""Settings without which the FLOPs of a step are not known."""


def table(results: Iterable[Result]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the best run by accelerator and precision, with its source and the number of runs that it is the best of.

    Addresses are ``github:owner/name@commit/path``, from cells that have a space before the path.

    Rows of fine-tuning that print only tokens per second do not count: it is not known which tokens they count.
    """
    best: dict[tuple[str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str], int] = {}
    for one in results:
        peak = one.job.devices.peak_flops
        if not one.measured or not peak or _UNSURE & set(one.case.open) or _unclear(one):
            continue
        key = one.job.devices.accelerator, one.job.precision
        runs[key] = runs.get(key, 0) + 1
        mfu = model_flops(one.job) / (one.measured * peak * one.layout.mesh.world_size)
        if mfu > best.get(key, {"mfu": 0.0})["mfu"]:
            cells = one.case.cells
            best[key] = {
                "mfu": round(mfu, 4),
                "model": cells.text("model"),
                "devices": one.layout.mesh.world_size,
                "source": one.case.source,
                "url": cells.text("url_or_repo_path").replace(" ", "/", 1),
            }
    by_device: dict[str, dict[str, dict[str, Any]]] = {}
    for (accelerator, precision), row in sorted(best.items()):
        by_device.setdefault(accelerator, {})[precision] = row | {"runs": runs[accelerator, precision]}
    return by_device


def _unclear(one: Result) -> bool:
    cells = one.case.cells
    printed = any(cells.number(name) is not None for name in ("step_time_s", "tflops_per_gpu", "mfu_pct"))
    text = cells.lower("source", "model", "notes")
    return not printed and ("finetune" in text or "fine-tun" in text)
