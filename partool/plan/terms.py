"""Names of the predicted and measured terms, shared by cost model, report and telemetry."""

from __future__ import annotations

MEMORY_TERMS: dict[str, str] = {
    "parameters": "master copy and, where kept, low-precision copy of the weights this rank holds",
    "gathered": "parameters as passes read them, gathered from other ranks where they are sharded, at the peak",
    "gradients": "gradients this rank holds at the peak",
    "optimizer": "moments of the optimizer this rank holds",
    "average": "moving average of the weights this rank trains",
    "activations": "tensors saved for the backward pass, at the peak",
    "loss": "logits and their gradient",
    "communication": "buffers of collectives",
    "framework": "interpreter, libraries, device context",
    "fragmentation": "allocator overhead",
}
"""Memory terms in bytes per rank, in the order of the reports."""

HOST_TERMS: dict[str, str] = {
    "masters": "master copies of the weights; of those kept in files, the part in memory",
    "moments": "moments of the optimizer; of those kept in files, the part in memory",
    "gradients": "buffers of gradients in transfer, which also keep a step's until their norm is known",
    "totals": "sums of the gradients of several micro-batches",
    "weights": "buffers of new weights in transfer",
    "copies": "masters and moments as they were before a step that may have to be undone",
    "parameters": "shards of the parameters",
    "activations": "tensors saved for the backward pass",
}
"""Terms of host memory in bytes per rank, in the order of the reports."""

TIME_TERMS: dict[str, str] = {
    "data": "waiting for the next batch",
    "forward": "forward pass over all micro-batches",
    "backward": "backward pass over all micro-batches, recomputation included",
    "gradient_sync": "exposed time of gradient reduction",
    "parameter_gather": "exposed time of parameter gathers",
    "tensor_parallel": "exposed time of tensor parallelism's collectives",
    "sequence_parallel": "exposed time of sequence parallelism's collectives",
    "expert_parallel": "exposed time of dispatching tokens to experts and back",
    "offload": "exposed time of moving state between device and host, and of the host's optimizer",
    "optimizer": "gradient norm, clipping and parameter update",
    "pipeline_bubble": "idle time of the pipeline rank that computes longest; the others idle for longer",
    "overhead": "trainer's own work between steps: logging, checks",
}
"""Time terms in seconds per optimizer step, in the order of the reports."""

TRAFFIC_TERMS: dict[str, str] = {
    "gradient_sync": "bytes this rank sends to reduce gradients",
    "parameter_gather": "bytes this rank sends to gather parameters",
    "tensor": "bytes this rank sends to the ranks that share its matrices",
    "sequence": "bytes this rank sends to the ranks that share its sequences",
    "expert": "bytes this rank sends to the ranks that share its experts, if tokens are spread evenly",
    "optimizer": "bytes this rank sends to update matrices as wholes: parts of them and of results, or sums for norms",
    "pipeline": "bytes this rank sends to other ranks of its pipeline: activations, or weights where these travel",
}
"""Traffic terms in bytes per rank and optimizer step."""

TIME_PARTS: dict[str, str] = {
    "matmul_forward": "matrix products, forward",
    "matmul_backward": "matrix products, backward",
    "attention_forward": "attention scores and values, forward",
    "attention_backward": "attention scores and values, backward",
    "elementwise_forward": "norms, activations, residuals and other memory-bound operators, forward",
    "elementwise_backward": "norms, activations, residuals and other memory-bound operators, backward",
    "head": "language-model head and loss, both passes",
    "recompute": "layers run again in the backward pass",
    "launch": "device waiting for the host to start operators",
    "tensor_parallel": "collectives of tensor parallelism, hidden or not",
    "sequence_parallel": "collectives of sequence parallelism, hidden or not",
    "expert_parallel": "dispatch and return of tokens, hidden or not",
    "gradient_sync": "gradient reduction, hidden or not",
    "parameter_gather": "parameter gathers, hidden or not",
    "pipeline_transfer": "activations and gradients between stages, hidden or not",
    "host_transfer": "traffic over the host link, hidden or not",
    "host_optimizer": "the host's optimizer step, hidden or not",
    "disk": "reads and writes of optimizer state on disks, hidden or not",
}
"""Finer parts of the time terms, in seconds per optimizer step of the slowest rank."""

REPORT_TERMS: dict[str, str] = {
    "total": "sum of the terms above it; if measured, the whole, to which the terms need not add up",
    "idle_streams": "memory that the allocator holds for idle streams where there is room, and returns before it fails",
    "step": "one optimizer step of all ranks: sum of the time terms, with its expected error (±)",
    "training": "all steps of the run, without checkpoints and validation, and devices times hours; of dpo with the "
    "pass of the reference before them",
    "all_else": "sum of the time terms below one percent of the step",
    "host": "host memory that all ranks of a node take, and the pinned part of it",
    "mfu": "model FLOPs utilization: operations that the model needs per second, over the peak of the devices",
    "predicted": "value from the plan, before the run",
    "measured": "measured after warm-up; memory and time are those of the rank that had most",
    "ratio": "measured over predicted",
    "compute": "time of a pipeline rank in forward and backward passes",
    "waiting": "time in which a pipeline rank waits for messages of other ranks",
    "between": "time of a pipeline rank between its actions that is neither compute nor waiting",
    "idle": "share of the time from first to last action in which a pipeline rank does not compute",
}
"""Other words that reports print next to the terms."""

_GLOSSARY = (
    ("memory per rank, bytes", "", MEMORY_TERMS),
    ("host memory per rank, bytes", "host_", HOST_TERMS),
    ("time per step, seconds", "", TIME_TERMS),
    ("part of a step, seconds", "", TIME_PARTS),
    ("sent per step, bytes", "", TRAFFIC_TERMS),
    ("reports", "", REPORT_TERMS),
)


def glossary(name: str) -> list[tuple[str, str]]:
    """Return the meanings of a term of plans and reports, with the places where it appears; there may be several."""
    wanted = name.strip().lower().replace(" ", "_").replace("-", "_")
    return [
        (where, terms[key])
        for where, prefix, terms in _GLOSSARY
        for key in dict.fromkeys((wanted, wanted.removeprefix(prefix)))
        if key in terms
    ]


def term_names() -> list[str]:
    """Return the name of every term that the glossary knows."""
    return list(dict.fromkeys(key for _, _, terms in _GLOSSARY for key in terms))
