"""Names of the predicted and measured terms: the one vocabulary of cost model, report and telemetry."""

from __future__ import annotations

MEMORY_TERMS: dict[str, str] = {
    "parameters": "master copy and, where kept, low-precision copy of the weights this rank holds",
    "gathered": "parameters gathered from other ranks for the forward and backward pass, at the peak",
    "gradients": "gradients this rank holds at the peak",
    "optimizer": "AdamW moments this rank holds",
    "activations": "tensors saved for the backward pass, at the peak",
    "loss": "logits and their gradient",
    "communication": "buffers of collectives",
    "framework": "interpreter, libraries, device context",
    "fragmentation": "allocator overhead",
}
"""Memory terms in bytes per rank, in the order of the reports."""

TIME_TERMS: dict[str, str] = {
    "data": "waiting for the next batch",
    "forward": "forward pass over all micro-batches",
    "backward": "backward pass over all micro-batches, recomputation included",
    "gradient_sync": "exposed time of gradient reduction",
    "parameter_gather": "exposed time of parameter gathers",
    "optimizer": "gradient norm, clipping and parameter update",
    "pipeline_bubble": "idle time of pipeline stages",
    "overhead": "trainer's own work between steps: logging, checks",
}
"""Time terms in seconds per optimizer step, in the order of the reports."""

TRAFFIC_TERMS: dict[str, str] = {
    "gradient_sync": "bytes this rank sends to reduce gradients",
    "parameter_gather": "bytes this rank sends to gather parameters",
}
"""Traffic terms in bytes per rank and optimizer step."""
