"""Helpers of the tests of ``partool_runtime.data``: a small plan, and one call to open it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from partool.plan.types import Plan
from partool.spec.data import DataSpec
from partool.spec.training import TrainingSpec, Validation
from partool_runtime.data import Batches, open_data


def plan(data: DataSpec, *, vocab: int = 256, micro_batch: int = 1, validation: int = 5, **training: Any) -> Plan:
    settings: dict[str, Any] = {"sequence_length": 7, "global_batch": 6, "steps": 20, **training}
    spec = TrainingSpec(**settings, validation=Validation(samples=validation))
    parts = {"vocab": vocab}
    return cast(
        Plan,
        SimpleNamespace(
            training=spec,
            data=data,
            model=SimpleNamespace(**parts),
            layout=SimpleNamespace(micro_batch=micro_batch),
            devices=SimpleNamespace(backend="cpu"),
        ),
    )


def open_one(data: DataSpec, *, dp_rank: int = 0, dp_size: int = 1, **settings: Any) -> Batches:
    return open_data(plan(data, **settings), dp_rank=dp_rank, dp_size=dp_size, barrier=lambda: None, builder=True)


def stream(batches: Batches) -> list[int]:
    """Return the packed training tokens that samples cover, in the order of the corpus."""
    rows = [batches._train.row(index).tolist() for index in range(batches._train.count)]
    return [token for row in rows for token in row[:-1]] + rows[-1][-1:]


def write_tokens(path: Path, tokens: list[int], *, dtype: str = "uint16", vocab: int = 1000, **sidecar: Any) -> Path:
    np.array(tokens, dtype=dtype).tofile(path)
    meta = {"dtype": dtype, "count": len(tokens), "vocab": vocab, **sidecar}
    path.with_suffix(".json").write_text(json.dumps(meta))
    return path


def write_megatron(
    path: Path, documents: list[list[list[int]]], *, code: int = 8, dtype: str = "<u2", version: int = 1
) -> Path:
    """Write documents of sequences of tokens the way Megatron-LM does, byte by byte."""
    sequences = [sequence for document in documents for sequence in document]
    path.write_bytes(b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences))
    size = np.dtype(dtype).itemsize
    lengths = [len(sequence) for sequence in sequences]
    pointers = [size * sum(lengths[:index]) for index in range(len(lengths))]
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(sequences), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    path.with_suffix(".idx").write_bytes(index)
    return path
