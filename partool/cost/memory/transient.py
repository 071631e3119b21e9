"""Bytes of logits and of buffers of tensor, sequence and expert parallelism."""

from __future__ import annotations

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts, TrainingJob
from partool.cost.memory.activations import micro_batch_tokens, widths
from partool.cost.memory.rank_parameters import DENSE, MOE
from partool.cost.memory.sequence import buffer_bytes
from partool.cost.memory.stacks import MemoryStack
from partool.cost.repeats import distinct
from partool_kernels.registry.chunking import WIDE_ABOVE, chunk_rows


def loss_bytes(job: TrainingJob, layouts: Layouts, stack: MemoryStack) -> tuple[Column, Column]:
    """Return the bytes of logits and their gradients, and the bytes of logits that are freed before the loss's peak.

    The freed logits are in the compute type. The allocator keeps their block of memory, as the next tensor is twice as
    large and does not fit into it.
    """
    if "loss" in job.stack.fused:
        return _fused_loss_bytes(job, layouts), 0.0
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    vocab = tensor_shares.width(job.padded_vocab or job.model.vocab, layouts.tp if job.stack.vocab_parallel else 1)
    logits = micro_batch_tokens(job, layouts) * vocab
    at_once = logits / stack.logit_chunks
    if stack.logit_limit:
        at_once = np.minimum(at_once, stack.logit_limit)
    at_once = np.where(
        np.asarray(layouts.loss_tile_tokens) > 0, np.minimum(logits, layouts.loss_tile_tokens * vocab), at_once
    )
    narrow = small if small != wide else 0
    in_parts = at_once < logits
    tensors = np.where(layouts.tp > 1, stack.logit_wide_parallel or stack.logit_wide, stack.logit_wide)
    spike = at_once * tensors * wide
    if stack.logits_kept:
        # The logits of all parts and their gradients exist at once when the parts' gradients are concatenated.
        spike = spike + np.where(in_parts, 2 * small * logits, 0.0)
    else:
        # Each part's gradient in the compute type exists together with the gradient of the part before; the head's
        # gradient is summed over the parts in a wide type, then cast.
        spike = spike + np.where(in_parts, at_once * (small + narrow) + vocab * job.model.hidden * (wide + small), 0.0)
    outputs = np.where(layouts.pp > 1, stack.kept_outputs * layouts.accumulation, 0)
    return spike + outputs * small * logits, np.where(in_parts, 0.0, narrow * at_once)


def _fused_loss_bytes(job: TrainingJob, layouts: Layouts) -> Column:
    """Return the bytes of a fused loss, whose gradients overwrite the logits of the rows that are being processed.

    The gradients of the hidden state and of the head are included; the head's gradient is summed in float32 if there
    are many chunks, and then cast.
    """
    small, tokens = job.compute_bytes, micro_batch_tokens(job, layouts)
    vocab = tensor_shares.width(job.padded_vocab or job.model.vocab, layouts.tp)
    tile = np.asarray(layouts.loss_tile_tokens)
    rows = np.where(tile > 0, np.minimum(tile, tokens), _chunk_rows(tokens, vocab, small))
    head = vocab * job.model.hidden
    many = (small == 2) & (np.ceil(tokens / rows) > WIDE_ABOVE)
    return rows * vocab * small + tokens * job.model.hidden * small + head * (small + np.where(many, 4, 0))


def _chunk_rows(tokens: Column, vocab: Column, item_bytes: int) -> Column:
    sizes = np.broadcast_arrays(np.ceil(tokens), np.ceil(vocab))
    if not sizes[0].ndim:
        return float(chunk_rows(int(sizes[0]), int(sizes[1]), item_bytes))
    # Both numbers are below 2^31: tokens of a micro-batch, and words of a vocabulary.
    pairs = sizes[0].astype(np.int64) << 32 | sizes[1].astype(np.int64)
    first, places = distinct(pairs.reshape(-1))
    rows = [float(chunk_rows(pair >> 32, pair & 0xFFFFFFFF, item_bytes)) for pair in pairs.reshape(-1)[first].tolist()]
    return np.array(rows)[places].reshape(pairs.shape)


def exchange_bytes(job: TrainingJob, layouts: Layouts) -> Column:
    """Return the bytes of buffers of tensor, sequence and expert parallelism."""
    small, m = job.compute_bytes, job.model
    # Sharded residual streams are all-gathered for each pair of matrices, forward and backward.
    whole = (layouts.tp > 1) & (tensor_shares.stream(job, layouts) > 1)
    tensor = np.where(whole, 2.0 * m.hidden, 0.0)
    sizes = widths(job, layouts, MOE if m.moe else DENSE)
    tokens = micro_batch_tokens(job, layouts)
    expert = np.where(layouts.ep > 1, sizes.routed, 0.0)
    return small * tokens * (tensor + expert) + buffer_bytes(job, layouts)
