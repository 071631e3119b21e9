"""Script of test_runtime_weights_memory.py: fills one of four tensor ranks' part of a model and writes the peak."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from _tensor_parts import localise

from partool.layout.tensor import own_partition
from partool.spec.model import ModelConfig, Weights
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.model import Decoder
from partool_runtime.weights import build, fill, materialise

LARGE = ModelConfig(layers=2, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=16, head_dim=64, vocab=8001)
SMALL = LARGE.model_copy(update={"hidden": 64, "ffn_hidden": 64, "heads": 4, "kv_heads": 4, "vocab": 77})


def save(config: ModelConfig, folder: Path) -> None:
    model = build(config)
    materialise(model, "cpu", torch.bfloat16)
    fill(model, Weights(), seed=3)
    checkpointer = Checkpointer(folder, keep=1, mode="sync", rank=0, world_size=1)
    checkpointer.save(1, {f"model.{name}": p.detach() for name, p in model.named_parameters()}, {})
    checkpointer.close()


def filled(config: ModelConfig, source: str, folder: Path) -> Decoder:
    model = build(config)
    localise(model, own_partition(config, 4), 1, 4)
    materialise(model, "cpu", torch.float32)
    fill(model, Weights(source=source, path=str(folder)), seed=3)
    return model


def peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(source: str, folder: Path) -> None:
    for name, config in (("small", SMALL), ("large", LARGE)):
        if source == "checkpoint" and not (folder / name).exists():
            save(config, folder / name)
            if config is LARGE:
                return
    filled(SMALL, source, folder / "small")  # loads all code before the measurement
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_bytes = peak_bytes()
    model = filled(LARGE, source, folder / "large")
    used = {
        "used": peak_bytes() - before_bytes,
        "part": sum(p.nbytes for p in model.parameters()),
        "largest": max(4 * math.prod(shape) for shape in model.whole_shapes().values()),
    }
    (folder / f"{source}.json").write_text(json.dumps(used))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
