"""One rank of the first contact: every case of the job, its groups, first steps, memory and host waits."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.process import configure_process
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks, open_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.plan_file import load_plan
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.weights import fill, post_load

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _groups import open_groups

STEPS = 3
"""Steps of a case where the job does not say."""
GRACE_S = 4.0
"""Seconds from the stacks of a rank that hangs to its end by SIGALRM."""
WIRES = ("pipeline", "weipipe")
"""First words of the descriptions of groups that only send from rank to rank."""


def main(job: Path, out: Path) -> None:
    """Run the job's cases one after the other; the result is written after each of them, in case the next one hangs."""
    asked = json.loads(job.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"process": os.getpid()}
    first: Ranks | None = None
    stacks = out.with_suffix(".stack").open("w")
    for name, path in asked["plans"].items():
        # The first case also starts NCCL and loads libraries. A rank ends after all ranks have shown their stacks.
        limit_s = asked["hang_s"] * (1 if first else 2)
        faulthandler.dump_traceback_later(limit_s, file=stacks)
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
        plan = load_plan(Path(path))
        configure_process(plan)
        started, first = first is None, open_ranks(plan) if first is None else first
        found[name] = case(plan, first.device, asked.get("steps", STEPS))
        if first.rank == 0 and (started or name == list(asked["plans"])[-1]):
            found["contexts"] = contexts(first.device)
        keep(found, out)
        dist.barrier()
    os._exit(0)  # ending the groups in order takes longer than what was measured


def keep(found: dict[str, Any], out: Path) -> None:
    """Write the results at once, so that nobody reads half of them."""
    unfinished = out.with_suffix(".part")
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    unfinished.replace(out)


def case(plan: Plan, device: torch.device, count: int) -> dict[str, Any]:
    """Run a plan's first ``count`` steps and an evaluation; return what was seen, and close the plan's groups."""
    torch.compiler.reset()  # type: ignore[no-untyped-call]  # torch compiles one function for a few models only
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
    before_bytes = outside_bytes(device)
    held_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    ranks = build_ranks(plan, device)
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    for group in open_groups():  # communicators take most of their memory when they are first used
        if dist.get_backend(group) == dist.get_backend() and not group.group_desc.startswith(WIRES):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    groups_bytes = outside_bytes(device)
    stepper = made(plan, prepared, ranks)
    batch = micro_batches(plan, ranks.dp.place)
    steps = [timed(stepper, number, batch) for number in range(count)]
    of_steps = allocator(device)
    stepper.validate(iter(batch[:1]))
    result = {
        "losses": [loss for loss, _ in steps],
        "seconds": [seconds for _, seconds in steps],
        "groups": groups(),
        "host_waits": host_waits(stepper, batch, device, count),
        "outside_bytes": {"before": before_bytes, "groups": groups_bytes, "steps": outside_bytes(device)},
        "held_before_bytes": held_bytes,
        "allocator_of_steps": of_steps,
        "allocator": allocator(device),
        "predicted_bytes": plan.prediction.memory.total_bytes,
    }
    stepper.optimizer.close()
    prepared.passes.close()
    if prepared.shards is not None:
        prepared.shards.close()
    prepared.memory.close()
    dist.barrier()
    ranks.groups.close()
    return result


def made(plan: Plan, prepared: Prepared, ranks: Ranks) -> Stepper:
    """Return the stepper of a prepared model with random weights."""
    optimizer = open_optimizer(plan, prepared, ranks)
    fill(prepared.model, plan.weights, seed=plan.training.seed, masters=optimizer.masters())
    optimizer.loaded()
    post_load(prepared.model)
    return Stepper(
        prepared.passes,
        optimizer,
        LossScaler(enabled=False),
        ranks=ranks,
        training=plan.training,
        spec=plan.optimizer,
        kernels=plan.kernels.mode,
    )


def micro_batches(plan: Plan, place: int) -> list[MicroBatch]:
    """Return the micro-batches of a data-parallel rank; all plans of one world share the tokens of a step."""
    layout, length = plan.layout, plan.training.sequence_length
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(plan.model.vocab, (plan.training.global_batch, length + 1), generator=draw)
    mine = tokens.chunk(layout.mesh.dp)[place]
    return [MicroBatch(each[:, :-1].clone(), each[:, 1:].clone(), None) for each in mine.split(layout.micro_batch)]


def timed(stepper: Stepper, number: int, batch: list[MicroBatch]) -> tuple[float, float]:
    """Do a step; return its loss and its seconds. A step ends with the host waiting for its result."""
    started_s = time.perf_counter()
    loss = stepper.step(number, batch, lambda term: nullcontext()).loss
    return loss, time.perf_counter() - started_s


def groups() -> dict[str, int]:
    """Return how many groups of several ranks are open on the device, by kind."""
    held = [group for group in open_groups() if group.size() > 1 and dist.get_backend(group) == dist.get_backend()]
    return dict(Counter("wires" if group.group_desc.partition(" ")[0] in WIRES else "collective" for group in held))


def host_waits(stepper: Stepper, batch: list[MicroBatch], device: torch.device, number: int) -> int | None:
    """Return how often the host waits for the device in one more step, by torch's own count; None on a CPU."""
    if device.type == "cpu":
        stepper.step(number, batch, lambda term: nullcontext())
        return None
    torch.cuda.set_sync_debug_mode("default")  # the first call itself warns, that the mode is a prototype
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        stepper.step(number, batch, lambda term: nullcontext())
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in seen)


def outside_bytes(device: torch.device) -> int | None:
    """Return the bytes of the device that are in use but not reserved by torch's allocator; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def allocator(device: torch.device) -> dict[str, int]:
    """Return the allocator's statistics that show fragmentation and retries."""
    if device.type == "cpu":
        return {}
    found = torch.cuda.memory_stats(device)
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "inactive_split_bytes.all.peak")
    return {name: int(found.get(name, 0)) for name in (*names, "num_alloc_retries", "num_ooms", "num_device_free")}


def contexts(device: torch.device) -> list[str] | None:
    """Return a line per context on a device (process, device, MiB) while all ranks live; None where nobody tells."""
    tool = shutil.which("nvidia-smi")
    if device.type == "cpu" or tool is None:
        return None
    query = ["--query-compute-apps=pid,gpu_uuid,used_gpu_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=20)
    return done.stdout.splitlines() if done.returncode == 0 else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
