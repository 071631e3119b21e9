"""DeepSpeed's ZeRO-Offload around the same model, with its compiled optimizer for processors.

https://www.deepspeed.ai/tutorials/zero-offload/; DeepSpeed is needed for this measurement only, and found in a folder
that the job names. Its optimizer is compiled here from its own sources with its own flags; its own
builder for machines with a GPU requires a CUDA compiler, which the file does not need.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _offload_reference import device_of, loss_sum, whole_model

from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.process import configure_process
from partool_runtime.precision import COMPUTE_DTYPE


def compiled(folder: Path, built: Path) -> Any:
    """Return DeepSpeed's compiled optimizer as a module, built in ``built`` if it is not there yet (a minute)."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last on the path: packages shared with partool keep partool's versions
    import deepspeed
    from torch.utils import cpp_extension

    builder = importlib.import_module("deepspeed.ops.op_builder.cpu.cpu_adam").CPUAdamBuilder()
    sources = Path(deepspeed.__file__).parent / "ops"
    built.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # folder of ninja
    return cpp_extension.load(
        "cpu_adam",
        [str(sources / source) for source in builder.sources()],
        extra_cflags=builder.cxx_args(),
        extra_ldflags=["-fopenmp"],
        extra_include_paths=[str(sources / path) for path in builder.include_paths()],
        build_directory=str(built),
    )


class DeepSpeed:
    """See the module; a ``Side``."""

    def __init__(self, plan: Plan, folder: Path, built: Path) -> None:
        self.device = device_of(plan)
        configure_process(plan)
        if self.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
            # One process with several threads, as partool has; DeepSpeed reads the cores from this.
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        operators = compiled(folder, built)
        import deepspeed
        from deepspeed.ops.adam import cpu_adam

        cpu_adam.CPUAdamBuilder = type("Built", (), {"load": staticmethod(lambda: operators)})
        # One rank exchanges nothing, so the shared-memory collectives need no compiling.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(backend)
        model = whole_model(plan, COMPUTE_DTYPE[plan.training.precision], self.device)
        spec = plan.optimizer
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = cpu_adam.DeepSpeedCPUAdam(groups, lr=spec.lr, betas=tuple(spec.betas), eps=spec.eps)
        self._config = {
            "train_micro_batch_size_per_gpu": plan.layout.micro_batch,
            "gradient_accumulation_steps": plan.layout.derived.accumulation,
            "gradient_clipping": spec.clip,
            plan.training.precision: {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "offload_optimizer": {"device": "cpu", "pin_memory": self.device.type == "cuda"},
            },
            "steps_per_print": 10**9,
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._config)

    def step(self, number: int, batch: Sequence[MicroBatch], clip: float) -> tuple[float, float]:
        """See ``Side``."""
        engine = self._engine
        engine.optimizer.clip_grad = clip
        if engine.gradient_accumulation_steps() != len(batch):
            engine.set_gradient_accumulation_steps(len(batch))
        losses = []
        for micro in batch:
            # The engine divides by the number of micro-batches, which all have the same number of tokens.
            loss = loss_sum(engine, micro, self.device) / micro.labels_BS.numel()
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        return float(sum(losses)) / len(losses), float(engine.get_global_grad_norm() or 0.0)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``Side``."""
        return {f"weight.{name}": p.detach() for name, p in self._engine.module.named_parameters()}

    def figures(self) -> dict[str, Any]:
        """See ``Side``."""
        return {}

    def held_bytes(self) -> dict[str, int]:
        """See ``Side``."""
        return {}
