"""Settings of a rank's process that every job has."""

from __future__ import annotations

import os

import torch

from partool.plan.types import Plan
from partool_kernels import isa
from partool_kernels.device import use_tables
from partool_kernels.registry.tables import TableError
from partool_runtime.allocator import return_large_blocks
from partool_runtime.errors import ConfigurationError
from partool_runtime.pulse import Pulse


def configure_process(plan: Plan) -> None:
    """Set threads, seed, determinism, the allocator of a CPU and the kernels' tables as the plan states.

    Raises ConfigurationError PT511 if partool's kernels are missing, PT492 if a table cannot be read.
    """
    if plan.kernels.mode == "native" and plan.devices.backend == "cpu" and isa() is None:
        raise ConfigurationError(
            "PT511",
            "kernels.mode is native, but the compiled library is missing",
            "install partool where there is a C++ compiler, or write mode: auto",
        )
    try:
        use_tables(plan.kernels.tuned)
    except TableError as error:
        help = "ranks read the files themselves: they have to be on all machines, at the same place"
        raise ConfigurationError("PT492", f"kernels.tuned: {error}", help) from None
    if plan.devices.threads_per_rank and "OMP_NUM_THREADS" not in os.environ:  # torch has read it
        torch.set_num_threads(plan.devices.threads_per_rank)
    if plan.devices.backend == "cpu":
        return_large_blocks()
    torch.manual_seed(plan.training.seed)
    if plan.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def watch_compiler(plan: Plan, pulse: Pulse) -> None:
    """Tell ``pulse`` while the compiler works, if the plan compiles blocks."""
    if plan.layout.compile == "none":
        return
    # Imported late: the compiler takes a second and 100 MiB in each rank, also where nothing is compiled.
    from partool_runtime.torch_internals.compiling import watch_compilation

    watch_compilation(pulse)
