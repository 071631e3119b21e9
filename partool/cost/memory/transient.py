"""Bytes of logits and of buffers of tensor, sequence and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts, Mask
from partool.cost.kinds import places_of
from partool.cost.memory.activations import early_loss, micro_batch_tokens, widths
from partool.cost.memory.rank_parameters import DENSE, MOE
from partool.cost.memory.sequence import buffer_bytes
from partool.cost.memory.stacks import MemoryStack
from partool.cost.repeats import distinct
from partool.spec.model import ModelConfig
from partool.work.base import Workload
from partool_kernels.registry.chunking import WIDE_ABOVE, chunk_rows


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the head's and the loss's tensors on the rank that holds them; each field is a column."""

    forward: Column
    """At the fullest moment of the forward pass."""
    backward: Column
    """At the fullest moment of the loss's backward pass."""
    beside_layers: Column
    """While the layers' backward passes run."""
    per_micro_batch: Column
    """Part of ``forward`` and ``backward`` that each further micro-batch in flight adds."""
    within: Column
    """Part of ``forward`` that exists only inside of a kernel."""
    freed: Column
    """Logits in the compute type that are freed before the fullest moment. The allocator keeps their block of memory,
    as the next tensor is twice as large and does not fit into it."""


def loss_bytes(job: Workload, layouts: Layouts, stack: MemoryStack, in_flight: Column) -> LossBytes:
    """Return the bytes of logits and of gradients of the head and the loss.

    ``in_flight`` is the number of micro-batches that are between the last stage's forward and backward passes.
    """
    if stack.traced:
        early, deferred = _early_loss(job, layouts), _deferred_loss(job, layouts, stack, in_flight)
        first = early_loss(job, layouts)
        both = (np.where(first, *each) for each in zip(early, deferred, strict=True))
        return _with_predictions(job, layouts, LossBytes(*both), first)
    spike, freed = _spike(job, layouts, stack)
    return LossBytes(spike, 0.0, 0.0, 0.0, 0.0, freed)


_TAUGHT_COPIES = 8
"""Arrays of a chunk's logits, of student and teacher, that their divergence holds at its fullest moment."""


def taught_loss_bytes(job: Workload, teacher: ModelConfig, layouts: Layouts, stack: MemoryStack) -> LossBytes:
    """Return the bytes of a loss with a teacher's divergence (``model/distillation.py`` of the runtime).

    It computes gradients in the forward pass: it holds those of the hidden state, those of the head in a wide type, and
    the teacher's hidden state. A quarter as many positions as in a plain loss have logits at once.
    """
    small, wide, tokens = job.compute_bytes, max(job.compute_bytes, 4), micro_batch_tokens(job, layouts)
    vocab, logits, _ = _logits(job, layouts, stack)
    tile = np.asarray(layouts.loss_tile_tokens)
    limit = 2.0 * stack.logit_limit / _TAUGHT_COPIES if stack.logit_limit else logits
    chunk = np.where(tile > 0, np.minimum(logits, tile * vocab), np.minimum(logits, limit))
    head, state = job.trains_head * vocab * job.model.hidden, tokens * job.model.hidden * small
    kept = state + head * wide
    forward = kept + tokens * teacher.hidden * small + _TAUGHT_COPIES * wide * chunk
    return LossBytes(forward, kept + state + head * small, head * small, 0.0 * head, 0.0 * head, 0.0 * head)


_JOINED = 6
"""Tensors of the residual stream's size that a module for a further token keeps beside its block: the embedding, the
pair of normalised inputs, the normalised hidden state and the inputs of its last norm and of the head."""


def _with_predictions(job: Workload, layouts: Layouts, loss: LossBytes, early: Mask) -> LossBytes:
    """Return the bytes with those of modules that predict further tokens, which last from loss to loss.

    Logits, or the gradients that a fused loss keeps in their place, exist once per module.
    """
    count = job.model.predictions if job.backward else 0
    if not count:
        return loss
    state = micro_batch_tokens(job, layouts) * job.model.hidden * job.compute_bytes
    joined = _JOINED * state / tensor_shares.stream(job, layouts)
    kept = np.where(early, loss.forward - loss.within, loss.per_micro_batch) + joined
    return replace(loss, forward=loss.forward + count * kept, backward=loss.backward + count * kept)


def _logits(job: Workload, layouts: Layouts, stack: MemoryStack) -> tuple[Column, Column, Column]:
    """Return the rank's part of the vocabulary, the number of all logits, and of those that exist at once."""
    vocab = tensor_shares.width(job.padded_vocab or job.model.vocab, layouts.tp if job.stack.vocab_parallel else 1)
    logits = micro_batch_tokens(job, layouts) * vocab
    at_once = logits / stack.logit_chunks
    if stack.logit_limit:
        at_once = np.minimum(at_once, stack.logit_limit)
    tile = np.asarray(layouts.loss_tile_tokens)
    return vocab, logits, np.where(tile > 0, np.minimum(logits, tile * vocab), at_once)


def _spike(job: Workload, layouts: Layouts, stack: MemoryStack) -> tuple[Column, Column]:
    """Return the peak bytes of logits and their gradients, and the bytes of logits that are freed before, elsewhere."""
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    vocab, logits, at_once = _logits(job, layouts, stack)
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


def _early_loss(job: Workload, layouts: Layouts) -> tuple[Column, ...]:
    """Return the fields of :class:`LossBytes` for a fused loss that computes its gradients in the forward pass.

    The gradients overwrite the logits of the rows that are being processed. The forward pass keeps the gradients of the
    hidden state and of the head, the latter summed in float32 if there are many chunks; the backward pass scales both
    into new tensors. The head's gradient lasts until its parameters are reduced, after the layers' backward passes.
    """
    small, tokens = job.compute_bytes, micro_batch_tokens(job, layouts)
    vocab = tensor_shares.width(job.padded_vocab or job.model.vocab, layouts.tp)
    tile = np.asarray(layouts.loss_tile_tokens)
    rows = np.where(tile > 0, np.minimum(tile, tokens), _chunk_rows(tokens, vocab, small))
    # A frozen head has no gradient.
    head, state = job.trains_head * vocab * job.model.hidden, tokens * job.model.hidden * small
    many = (small == 2) & (np.ceil(tokens / rows) > WIDE_ABOVE)
    kept = job.backward * (state + head * np.where(many | (job.precision == "fp16"), 4, small))
    logits = rows * vocab * small
    within = np.where(layouts.tp > 1, 0.0, logits)  # tensor ranks exchange sums between the parts of the kernel
    return kept + logits, kept + state + head * small, head * small, 0.0 * head, within, 0.0 * head


def _deferred_loss(job: Workload, layouts: Layouts, stack: MemoryStack, in_flight: Column) -> tuple[Column, ...]:
    """Return the fields of :class:`LossBytes` for a loss whose backward pass computes its gradients.

    Logits that are held whole last until their backward pass, with a fused kernel in the compute type: the gradient
    overwrites them, and is scaled into a new tensor. Otherwise the log-softmax lasts, and two gradients of its size
    exist with it at once. In parts, the backward pass computes the logits again: the gradient of a part exists together
    with that of the part before, or the part's share of the head's gradient exists together with the sum of these
    shares in a wide type.
    """
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    vocab, logits, at_once = _logits(job, layouts, stack)
    head = job.trains_head * vocab * job.model.hidden
    state = micro_batch_tokens(job, layouts) * job.model.hidden * small
    in_parts = at_once < logits
    fused = "loss" in job.stack.fused
    each, more = (small, 1.0) if fused else (wide, stack.logit_wide - 1.0)
    narrow = small if small != wide else 0
    kept = in_flight * each * logits
    one = at_once * (each * (1.0 if fused else stack.logit_wide) + small) + head * wide + state
    last = np.maximum(one, at_once * small + head * (wide + small) + state)
    forward = np.where(in_parts, at_once * each * (1.0 if fused else 2.0), kept + (0.0 if fused else each * logits))
    backward = np.where(in_parts, last, kept + more * each * logits)
    freed = np.where(in_parts | fused, 0.0, narrow * at_once)
    return forward, backward, head * small, np.where(in_parts, 0.0, each * logits), 0.0 * head, freed


def _chunk_rows(tokens: Column, vocab: Column, item_bytes: int) -> Column:
    sizes = np.broadcast_arrays(np.ceil(tokens), np.ceil(vocab))
    if not sizes[0].ndim:
        return float(chunk_rows(int(sizes[0]), int(sizes[1]), item_bytes))
    # Both numbers are below 2^31: tokens of a micro-batch, and words of a vocabulary.
    pairs = sizes[0].astype(np.int64) << 32 | sizes[1].astype(np.int64)
    first, places = distinct(pairs.reshape(-1))
    rows = [float(chunk_rows(pair >> 32, pair & 0xFFFFFFFF, item_bytes)) for pair in pairs.reshape(-1)[first].tolist()]
    return np.array(rows)[places].reshape(pairs.shape)


def exchange_bytes(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes of buffers of tensor, sequence and expert parallelism."""
    kinds = places_of(job.model)[MOE:] or (DENSE,)
    routed = np.maximum.reduce(np.broadcast_arrays(*(widths(job, layouts, kind).routed for kind in kinds)))
    expert = np.where(layouts.ep > 1, routed, 0.0)
    return job.compute_bytes * micro_batch_tokens(job, layouts) * expert + attention_exchange_bytes(job, layouts)


def attention_exchange_bytes(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes of buffers of tensor and sequence parallelism, which attention's backward pass has."""
    # Sharded residual streams are all-gathered for each pair of matrices, forward and backward.
    gathers_stream = (layouts.tp > 1) & (tensor_shares.stream(job, layouts) > 1)
    tensor = np.where(gathers_stream, 2.0 * job.model.hidden, 0.0)
    return job.compute_bytes * micro_batch_tokens(job, layouts) * tensor + buffer_bytes(job, layouts)
