"""Log-probabilities of answers by the model that training starts from, computed once and kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from partool.plan.types import Plan
from partool_runtime.data import Batches
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.passes import Passes
from partool_runtime.parallel.preferences import PreferenceLoss
from partool_runtime.preparation import Prepared
from partool_runtime.pulse import Pulse

FILE = "reference.npz"
"""Name of the file in the run's folder: the sum of each document's log-probabilities, and the key of what gave them."""

F64 = npt.NDArray[np.float64]


def give_reference(
    plan: Plan,
    run_dir: Path,
    ranks: Ranks,
    *,
    prepared: Prepared,
    data: Batches,
    start: Callable[[], None],
    pulse: Pulse,
) -> bool:
    """Give the data the reference's log-probabilities if the objective keeps them; return whether they were computed.

    They are read from ``run_dir`` if a run of the same weights and data wrote them there; else ``start`` must give the
    model the weights that training starts from, and one pass over the data without gradients computes them. A
    collective of all ranks.
    """
    preferences = prepared.preferences
    if preferences is None or not plan.training.objective.keeps_reference:
        return False
    file, key = run_dir / FILE, _key(plan, data)
    kept = _read(file, key, data) if ranks.rank == 0 else None
    sums = _from_first(kept, data.documents, ranks)
    computed = sums is None
    if sums is None:
        start()
        sums = _computed(prepared.passes, preferences, data, pulse)
        if ranks.rank == 0:
            _write(file, key, sums)
    data.use_reference(sums)
    return computed


def _computed(passes: Passes, preferences: PreferenceLoss, data: Batches, pulse: Pulse) -> F64:
    """Return the sums of all documents that the run reads, NaN for others."""

    def beating() -> bool:
        pulse.beat()
        return False

    preferences.record()
    passes.evaluate(data.reference_pass(), beating)
    return preferences.recorded(data.documents)


def _key(plan: Plan, data: Batches) -> str:
    """Return a hash of all that decides the log-probabilities: data, model, and the weights by their files."""
    weights = plan.weights
    folder = Path(weights.path) if weights.path else None
    files = sorted(folder.rglob("*")) if folder is not None and folder.is_dir() else [folder] if folder else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    model, source = (part.model_dump(mode="json") for part in (plan.model, weights))
    parts = (data.full_fingerprint, model, source, stats, plan.training.seed, plan.training.precision)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read(file: Path, key: str, data: Batches) -> F64 | None:
    """Return the sums of a file; None if it is missing, damaged, of other weights, or lacks documents of this run."""
    try:
        with np.load(file) as content:
            sums: F64 = content["sums"]
            if str(content["key"]) != key or sums.shape != (data.documents,):
                return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return sums if np.isfinite(sums[data.read_documents]).all() else None


def _write(file: Path, key: str, sums: F64) -> None:
    partial = file.with_suffix(".tmp")
    with partial.open("wb") as out:
        np.savez(out, key=np.array(key), sums=sums)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def _from_first(sums: F64 | None, documents: int, ranks: Ranks) -> F64 | None:
    """Return rank 0's sums on every rank; None if it has none."""
    shared = torch.zeros(documents + 1, dtype=torch.float64)
    if sums is not None:
        shared[0] = 1.0
        shared[1:] = torch.from_numpy(sums)
    received = sum_over(shared.to(ranks.device), ranks.world).cpu()
    return received[1:].numpy() if received[0] else None
