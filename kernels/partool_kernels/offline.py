"""``python -m partool_kernels.offline``: prove kernels without a GPU, print the findings as JSON, exit 1 on a fault.

The resources that a kernel needs depend on Triton's version, so run this once with each supported version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice

from partool_kernels.device import triton_version
from partool_kernels.proof import Proof, ProofJob, jobs, prove_all
from partool_kernels.registry import ARCHITECTURES, KERNELS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    asked = _parser().parse_args(arguments)
    if asked.write:
        return _write(asked)
    start_s = time.monotonic()
    work = [
        job
        for kernel in asked.kernels or KERNELS
        for architecture in asked.architectures or ARCHITECTURES
        for job in islice(jobs(kernel, architecture, all_types=asked.all), None if asked.all else asked.most)
    ]
    proofs = []
    for proof in prove_all(work, asked.processes):
        proofs.append(proof)
        for fault in proof.faults:
            print(f"{_named(proof.job)}: {fault}", file=sys.stderr, flush=True)
    record = {
        "triton": triton_version(),
        "programs": len(proofs),
        "faults": sum(len(proof.faults) for proof in proofs),
        "seconds": round(time.monotonic() - start_s, 1),
        "results": [_result(proof) for proof in proofs],
    }
    print(json.dumps(record, indent=None if asked.short_output else 1))
    return 1 if record["faults"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m partool_kernels.offline", description=__doc__)
    parser.add_argument("kernels", nargs="*", choices=[[], *KERNELS], metavar="KERNEL", help="all unless named")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, metavar="NAME", help="all unless named")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most", type=int, default=1, help="programs per kernel and architecture (default: 1)")
    parser.add_argument("--all", action="store_true", help="all programs, in float16 and float32 too")
    parser.add_argument("--write", action="store_true", help="write modelled entries of typical requests into tables")
    parser.add_argument("--short-output", action="store_true", help="JSON in one line")
    return parser


def _write(asked: argparse.Namespace) -> int:
    from partool_kernels.modelled import NothingRunsError, model

    try:
        for kernel, architecture, entries in model(
            asked.kernels or KERNELS, asked.architectures or ARCHITECTURES, asked.processes
        ):
            print(f"{kernel} {architecture}: {entries} modelled")
    except NothingRunsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _named(job: ProofJob) -> str:
    request = job.request
    words = (request.kernel, request.architecture, *request.dtypes, *request.flags)
    return " ".join((*words, *(f"{name}={value}" for name, value in (*request.shape, *job.config.blocks))))


def _result(proof: Proof) -> dict[str, object]:
    request, config = proof.job.request, proof.job.config
    return {
        "kernel": request.kernel,
        "architecture": request.architecture,
        "dtypes": request.dtypes,
        "shape": request.width,
        "rows": request.rows,
        "flags": request.flags,
        "config": {**config.constants, "num_warps": config.num_warps, "num_stages": config.num_stages},
        "needs": None if proof.compiled is None else asdict(proof.compiled),
        "faults": proof.faults,
    }


if __name__ == "__main__":
    sys.exit(main())
