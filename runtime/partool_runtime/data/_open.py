"""Construction of a rank's batches from a plan."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from partool.plan.data_files import SourceFile
from partool.plan.packing import drawn
from partool.plan.token_cache import TOKENISED, cache_of, stretches
from partool.plan.token_files import HEADER_BYTES, read_index
from partool.plan.types import Plan
from partool.spec.data import DataSpec
from partool_runtime.data._order import Epochs, Mixture, SampleOrder
from partool_runtime.data._split import DataDivision, Joined, OneDocument, Samples, split, validation_samples
from partool_runtime.data.batches import Batches, SampleDeal
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.cache import TokenCache
from partool_runtime.tokens.opening import files_of, source_of
from partool_runtime.tokens.shards import (
    Corpus,
    Shard,
    as_configuration,
    check_offsets,
    checksum,
    map_array,
    open_tokens,
)


def open_megatron(path: Path) -> Shard:
    """Open a ``.bin`` file by its ``.idx`` file; raises ConfigurationError PT602 if they are malformed or disagree."""
    index = path.with_suffix(".idx")
    header = as_configuration(read_index, index)
    dtype, sequences, at = np.dtype(header.dtype).newbyteorder("<"), header.sequences, HEADER_BYTES
    lengths = map_array(index, np.dtype("<i4"), at, sequences)
    pointers = map_array(index, np.dtype("<i8"), at + 4 * sequences, sequences)
    documents = map_array(index, np.dtype("<i8"), at + 12 * sequences, header.boundaries, exact=True)
    check_offsets(documents, sequences, index)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    if (lengths < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise ConfigurationError("PT602", f"{index}: sequences do not follow each other without gaps")
    tokens = map_array(path, dtype, 0, int(starts[-1]), exact=True)
    return Shard(tokens, starts[np.asarray(documents)], path)


def open_data(
    plan: Plan, *, dp_rank: int, dp_size: int, barrier: Callable[[], None], builder: bool | None = None
) -> Batches:
    """Return this rank's batches; tokenises the text if no earlier run did.

    Every rank calls this and enters ``barrier`` exactly once, also on errors. One rank per node builds the token
    cache (``builder``; default: the rank with ``LOCAL_RANK`` 0 or, without that variable, ``dp_rank`` 0) while the
    other ranks wait for the cache's file lock, not in a collective, which may time out. A failed build fails all ranks.

    Raises ConfigurationError: PT601 no files, PT602 malformed files, PT603 tokenizer, PT604 too little data, PT605 a
    token outside the model's vocabulary, PT613 the cache cannot be written.
    """
    if builder is None:
        builder = int(os.environ.get("LOCAL_RANK", dp_rank)) == 0
    data, training = plan.data, plan.training
    parts = data.every_part
    opened, vocab = _open_shards(plan, parts, barrier, builder)
    corpora = [Corpus(shards, plan.model.vocab) for shards in opened]
    length, unnamed = training.sequence_length, len(parts) - len(data.named)
    divisions = [split(corpus, length, part) for part, corpus in zip(parts[:unnamed], corpora, strict=False)]
    sets = {
        name: validation_samples(corpus, length, part, name)
        for (name, part), corpus in zip(data.named.items(), corpora[unnamed:], strict=True)
    }
    notes = [note for shards in opened for shard in shards if (note := _left_out(shard))]
    notes += [note for division in divisions for note in division.notes]
    notes += [f"{note} (set {name})" for name, division in sets.items() for note in division.notes]
    notes += [f"PT606: {note}" for shards in opened for shard in shards for note in shard.notes]
    counts = [sum(len(shard.documents) - 1 for shard in shards) for shards in opened]
    train, validation, order = _joined(divisions, counts[:unnamed], plan)
    deal = SampleDeal(
        global_batch=training.global_batch,
        micro_batch=plan.layout.micro_batch,
        dp_rank=dp_rank,
        dp_size=dp_size,
        sequence_length=training.sequence_length,
        seed=training.seed,
        steps=training.steps,
        validation_samples=training.validation.samples,
        documents=data.separates,
        pairs=data.is_preference and plan.training.objective.prefers,
        pinned=plan.devices.backend != "cpu",
    )
    return Batches(
        train,
        validation,
        deal,
        vocab=vocab,
        sets=_named(sets, counts[:unnamed], counts[unnamed:], data),
        fingerprint=_fingerprint(plan, opened[:unnamed]),
        sets_fingerprint=_sets_fingerprint(data, opened[unnamed:]),
        notes=tuple(notes),
        order=order,
        documents=sum(counts),
    )


def _named(
    divisions: Mapping[str, DataDivision], before: Sequence[int], documents: Sequence[int], data: DataSpec
) -> dict[str, Samples]:
    """Return the samples of each named set, whose documents are numbered after the others, set after set."""
    named, first = dict[str, Samples](), sum(before)
    for (name, division), count in zip(divisions.items(), documents, strict=True):
        samples: Samples = Joined([division.validation], [first])
        # Sets that attend apart where the run does not have a document per sequence (DataSpec.named).
        apart = data.named[name].separates
        named[name] = samples if apart or not data.separates else OneDocument(samples)
        first += count
    return named


def _joined(
    divisions: list[DataDivision], documents: Sequence[int], plan: Plan
) -> tuple[Samples, Samples, SampleOrder]:
    """Return the samples of training and validation of all sources, and the order of the former.

    ``documents`` are the numbers of documents of the sources, of which files for validation alone are the last.
    """
    data, seed = plan.data, plan.training.seed
    first = [sum(documents[:number]) for number in range(len(documents))]
    held_out = Joined([divisions.pop().train], first[-1:]) if data.held_out is not None else None
    trains = [division.train for division in divisions]
    train = trains[0] if len(trains) == 1 else Joined(trains, first)
    validations = [division.validation for division in divisions]
    validation = held_out or (validations[0] if len(validations) == 1 else Joined(validations, first))
    if not data.mix:
        return train, validation, Epochs(train.count, seed)
    sizes = [each.count for each in trains]
    return train, validation, Mixture(sizes, drawn(sizes, data.mix), seed)


def _left_out(shard: Shard) -> str:
    """Return a message about the shard's documents without tokens; empty if every document has tokens."""
    if not shard.left_out:
        return ""
    what = "1 document holds" if shard.left_out == 1 else f"{shard.left_out:,} documents hold"
    where = f"; the first is {shard.first_left_out}" if shard.first_left_out else ""
    return f"PT693: {what} no text, and nothing is trained on there{where}"


def _open_shards(
    plan: Plan, parts: Sequence[DataSpec], barrier: Callable[[], None], builder: bool
) -> tuple[list[list[Shard]], int]:
    """Return the shards of each part and the size of their largest vocabulary; enters the barrier exactly once."""
    entered = False
    try:
        files = [files_of(part) for part in parts]
        # Token files are checked before text is tokenised, which takes time.
        every = [file for each in files for file in each]
        ready = {f.path: _open_ready(f, plan.model.vocab) for f in every if f.format not in TOKENISED}
        vocabs = [shard.vocab or plan.model.vocab for shard in ready.values()]
        # Text between token files has a separate cache, so that all sources keep their order.
        groups = [stretches(each) for each in files]
        caches = [
            TokenCache(cache_of(group, part), source_of(group, part))
            for part, of_part in zip(parts, groups, strict=True)
            for group in of_part
            if group[0].format in TOKENISED
        ]
        texts: list[Shard] = []
        if caches:
            vocabs.append(_fitting(caches, plan))
            entered = True
            texts = _tokenised(caches, barrier, builder)
    finally:
        if not entered:
            barrier()
    cached = iter(texts)

    def shards_of(group: list[SourceFile]) -> list[Shard]:
        return [next(cached)] if group[0].format in TOKENISED else [ready[file.path] for file in group]

    return [[shard for group in of_part for shard in shards_of(group)] for of_part in groups], max(vocabs)


def _tokenised(caches: Sequence[TokenCache], barrier: Callable[[], None], builder: bool) -> list[Shard]:
    """Return the shards of ``caches``; builders build missing caches, and enter the barrier after trying the locks.

    A builder enters the barrier with the locks that it got, so a rank that only waits cannot get these locks first. If
    another job or node on a shared file system holds a lock, the builder waits for the lock, then checks the cache.
    """
    if not builder:
        barrier()
        return [_waited_for(cache) for cache in caches]
    entered = False
    try:
        with ExitStack() as locks:
            locked = [locks.enter_context(cache.lock(wait=False)) for cache in caches]
            entered = True
            barrier()
            for cache, mine in zip(caches, locked, strict=True):
                if mine:
                    cache.ensure()
    finally:
        if not entered:
            barrier()
    for cache, mine in zip(caches, locked, strict=True):
        if not mine:
            with cache.lock(wait=True):
                cache.ensure()
    return [cache.open() for cache in caches]


def _waited_for(cache: TokenCache) -> Shard:
    with cache.lock(wait=True, share=True):
        return cache.built()


def _open_ready(file: SourceFile, vocab: int) -> Shard:
    shard = open_megatron(file.path) if file.format == "megatron" else open_tokens(file.path)
    if shard.vocab is not None and shard.vocab > vocab:
        _refuse_vocab(f"{file.path} has tokens of a vocabulary of {shard.vocab}", vocab, shard.vocab)
    return shard


def _fitting(caches: Sequence[TokenCache], plan: Plan) -> int:
    """Return the size of the tokenizer's vocabulary; raises ConfigurationError PT605 if the model's is smaller."""
    vocab = caches[0].vocab
    if vocab > plan.model.vocab:
        what = f"data.tokenizer: {plan.data.tokenizer} has {vocab} tokens"
        _refuse_vocab(what, plan.model.vocab, vocab)
    return vocab


def _refuse_vocab(what: str, vocab: int, need: int) -> None:
    raise ConfigurationError("PT605", f"{what}, the model's vocabulary is {vocab}", f"set model.vocab to {need}")


def _fingerprint(plan: Plan, parts: list[list[Shard]]) -> str:
    """Return a hash of the tokens and everything that decides their order, but not of paths, which may change."""
    content: list[Any] = [[_content(shard) for shard in shards] for shards in parts]
    training, data = plan.training, plan.data
    content = content[0] if len(parts) == 1 else [content, [[each.weight, each.epochs] for each in data.mix]]
    order: list[Any] = [training.sequence_length, training.global_batch, training.seed, data.pack, data.validation]
    if not data.is_text:
        order += [data.records, data.truncate]
    if data.separates:
        order.append(data.attend)
    return hashlib.sha256(json.dumps([content, order]).encode()).hexdigest()


def _sets_fingerprint(data: DataSpec, parts: list[list[Shard]]) -> str:
    """Return a hash of the named sets' tokens and of all that decides their order; empty without such sets."""
    if not data.validation_sets:
        return ""
    how = [[name, part.pack, part.records, part.truncate, part.attend] for name, part in data.named.items()]
    content = [[_content(shard) for shard in shards] for shards in parts]
    return hashlib.sha256(json.dumps([how, content]).encode()).hexdigest()


def _content(shard: Shard) -> list[int]:
    content = [len(shard.tokens), len(shard.documents) - 1, checksum(shard.path) if len(shard.tokens) else 0]
    if shard.loss is not None:
        content.append(checksum(shard.path.with_name("tokens.loss.bin")))
    return content
