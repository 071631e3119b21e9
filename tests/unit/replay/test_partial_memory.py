"""Figures of memory that are no peak of everything are not compared with one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from partool.replay.audit import audit
from partool.replay.cells import Cells
from partool.replay.measured import partial_peak, peak_bytes

ROW = {
    "source": "test", "model": "Llama-3-8B", "seq_len": "4096", "gpu": "H100-80GB", "n_gpus": "8", "dp": "8",
    "global_batch": "8", "zero_or_fsdp": "FSDP2", "recompute": "full", "peak_mem_value": "30", "notes": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ("+ 4 bytes per parameter", ""), ("plus 2 bytes/parameter for gradients", ""), ("bars show activations", ""),
        ("activations only", ""), ("", "activation memory per GPU"), ("the y axis is activations", ""),
        ("model states only", ""), ("excluding the weights; peak of the step", ""), ("only the activations", ""),
    ],
)  # fmt: skip
def test_parts_are_no_peak(notes: str, kind: str) -> None:
    cells = Cells({**ROW, "notes": notes, "reading_kind": kind})
    assert partial_peak(cells)
    assert peak_bytes(cells) is None


@pytest.mark.parametrize(
    "notes",
    [
        "", "full activation recompute", "activation offloading", "peak ACTIVE memory", "8 bytes per parameter in all",
        "without activation checkpointing", "memory = max over ranks", "weights in bf16, activations in fp8",
    ],
)  # fmt: skip
def test_other_notes_leave_the_peak(notes: str) -> None:
    assert peak_bytes(Cells({**ROW, "notes": notes})) == 30 * 2**30


def test_the_audit_says_why(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*ROW])
        writer.writeheader()
        writer.writerows([ROW, {**ROW, "notes": "bar of activations only"}])
    found = audit(path)
    assert [row.line for row in found.of("memory")] == [2]
    assert found.unread[0].reason == "nothing was measured: its memory is no peak: it is of activations alone"
