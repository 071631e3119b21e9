"""One GPU: the longest sequence that an 8B model trains on, with and without partool's methods for long sequences.

Weights and gradients in bf16, an optimizer without state, one sequence per step: the rest of the device is for
activations. Each run is a separate process, since running out of memory leaves a process fragmented. For each
method, lengths are doubled until one does not fit; then bisected, to an eighth. Reference: 500,000 tokens of
Llama 3 8B on one H100 with 80 GB (Arctic Long Sequence Training, arXiv 2506.13996, with the optimizer in host memory).
Without a GPU the script says so and exits with code 2.

    python tests/bench/long_context_gpu.py [--quick] [--model llama3.2-1b]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _record import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from partool.catalog.models import resolve_model
from partool.planner.problem import LEAST_TOKENS, loss_tile
from partool.spec.model import ModelSpec
from partool_runtime.model import Decoder
from partool_runtime.offload import Activations
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_loss, tile_networks

FIRST, STEPS = 8192, 3
MOST = 2**22
DOES_NOT_FIT = 3
"""Exit code of a run that ran out of memory."""
TIMEOUT_S = 1800
WAYS = {
    "FSDP2 and SDPA": {},
    "with layers computed again": {"plain": True},
    "recompute full, tiles": {"policy": "full", "tiles": True},
    "recompute keep_attention, tiles": {"policy": "keep_attention", "tiles": True},
    "recompute full, tiles, activations in host memory": {"policy": "full", "tiles": True, "host": True},
}
"""Methods; the first two as one would write them by hand. All of them use FSDP2 and SDPA."""


def step_s(model_name: str, way: dict[str, Any], length: int) -> dict[str, float]:
    """Train a few steps; return the fastest one's seconds and the peak of device memory."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = _model(model_name, way, length, device)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(STEPS):
        tokens_BS = torch.randint(model.config.vocab, (1, length + 1), device=device)
        start_s = time.perf_counter()
        total = model(tokens_BS[:, :-1], tokens_BS[:, 1:]) / length
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bool(torch.isfinite(total))  # also waits for the device
        seconds.append(time.perf_counter() - start_s)
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"step_s": min(seconds), "peak_bytes": peak_bytes, "loss": float(total.detach())}


def _model(name: str, way: dict[str, Any], length: int, device: torch.device) -> Decoder:
    config = resolve_model(ModelSpec(preset=name), Path()).config
    assert config is not None
    config = config.model_copy(update={"max_position": length})
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    if way.get("plain"):
        for layer in model.layers:
            setattr(layer, "forward", partial(checkpoint, layer.forward, use_reentrant=False))  # noqa: B010
    if way.get("tiles"):
        # A fixed size, so that shorter sequences are also measured in tiles.
        tile_networks(model.layers, max(LEAST_TOKENS, config.hidden))
        tile_loss(model, loss_tile(config, length))
    if "policy" in way:
        recompute(model.layers, [way["policy"]] * config.layers, tiled=bool(way.get("tiles")))
    if way.get("host"):
        Activations(device).put(dict(enumerate(model.layers)), last=config.layers - 1)
    return model


def child(model_name: str, way: str, length: int) -> None:
    """Run one length; exits with ``DOES_NOT_FIT`` if memory runs out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        print(json.dumps(step_s(model_name, WAYS[way], length)))
    except torch.OutOfMemoryError:
        sys.stdout.flush()
        os._exit(DOES_NOT_FIT)
    dist.destroy_process_group()


def run(model_name: str, way: str, length: int) -> dict[str, float] | None:
    """Run one length in a process of its own; None if it does not fit."""
    command = [sys.executable, __file__, "--model", model_name, "--child", way, "--length", str(length)]
    settings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=TIMEOUT_S)
    if done.returncode == DOES_NOT_FIT:
        return None
    if done.returncode:
        sys.exit(f"{way}, {length} tokens:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def longest(model_name: str, way: str, *, quick: bool) -> dict[str, Any]:
    """Return the result of every length tried, and the longest that fits."""
    tried: dict[int, dict[str, float] | None] = {}

    def fits(length: int) -> bool:
        with suppress(subprocess.TimeoutExpired):
            tried[length] = run(model_name, way, length)
        found = tried.get(length)
        text = "does not fit, or takes too long" if found is None else f"{found['step_s']:.2f} s per step"
        print(f"{way}, {length:,} tokens: {text}", flush=True)
        return found is not None

    fine, step = 0, FIRST
    while step <= MOST and fits(step):
        fine, step = step, 2 * step
    while not quick and fine and step - fine > fine // 8:
        middle = (fine + step) // 2
        fine, step = (middle, step) if fits(middle) else (fine, middle)
    return {"longest_tokens": fine, "tried": {str(length): tried.get(length) for length in sorted(tried)}}


def main() -> None:
    """Measure all methods and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--quick", action="store_true", help="double lengths only")
    parser.add_argument("--child")
    parser.add_argument("--length", type=int)
    options = parser.parse_args()
    if options.child:
        child(options.model, options.child, options.length)
        return
    if not torch.cuda.is_available():
        print("tests/bench/long_context_gpu.py needs a GPU that torch can use; there is none here", file=sys.stderr)
        sys.exit(2)
    found = {way: longest(options.model, way, quick=options.quick) for way in WAYS}
    plain = max(1, found["FSDP2 and SDPA"]["longest_tokens"])
    result = {
        "gpu": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "model": options.model,
        "ways": found,
        "times_as_long": {way: one["longest_tokens"] / plain for way, one in found.items()},
    }
    write("long_context_gpu", result, "torch")


if __name__ == "__main__":
    main()
