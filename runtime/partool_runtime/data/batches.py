"""Batches: the samples of every step, cut into micro-batches and distributed over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType

import numpy as np
import numpy.typing as npt
import torch

from partool_runtime import threads
from partool_runtime.data._order import Epochs, SampleOrder
from partool_runtime.data._split import PADDING, Samples

IGNORED_LABEL = -100

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AnswerPairs:
    """The pairs of answers in a micro-batch: its documents 2j (chosen) and 2j + 1 (rejected), row after row."""

    numbers_D: I64  # noqa: N815
    """Number in the corpus of each document."""
    first_B: torch.Tensor  # noqa: N815
    """Place among the micro-batch's documents of the first document of each row (int64)."""
    lengths_D: torch.Tensor  # noqa: N815
    """Number of labels of each document, on all ranks that share its sequence."""
    reference_D: torch.Tensor | None = None  # noqa: N815
    """Sum of the log-probabilities (float64) of each document's labels, by the model that training started from; None
    until they are known."""
    index_S: torch.Tensor | None = None  # noqa: N815
    """Positions in the sequence of this rank's tokens; None if the rank has whole sequences."""

    @property
    def count(self) -> int:
        """Number of pairs."""
        return len(self.numbers_D) // 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one forward pass; ``labels_BS[b, s]`` is the token after ``tokens_BS[b, s]``, or −100 (ignored)."""

    tokens_BS: torch.Tensor  # noqa: N815
    labels_BS: torch.Tensor  # noqa: N815
    documents_BL: torch.Tensor | None = None  # noqa: N815
    """Document number (int32) of each token of the whole sequences, even if the rank holds only a part of each
    sequence; None if each sequence counts as one document."""
    first: int = 0
    """Number of the first sequence in the run's order, in which every step follows the one before; the same number in
    any layout. Later sequences of the micro-batch have the next numbers."""
    pairs: AnswerPairs | None = None
    """The pairs of answers in the sequences; None where each token counts by itself."""
    ahead: tuple[torch.Tensor, torch.Tensor] | None = None
    """Later tokens and labels ``[D, B, S]`` for predictions of further tokens, where the rank holds only a part of each
    sequence and the model has such predictions; else None."""


def on_device(documents_BL: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return a tuple of further arguments for a model: ``documents_BL`` on ``device``, or nothing if it is None."""
    return () if documents_BL is None else (documents_BL.to(device, non_blocking=True),)


@dataclass(frozen=True, slots=True)
class SampleDeal:
    """Settings for the distribution of a step's samples over ranks."""

    global_batch: int
    micro_batch: int
    dp_rank: int
    dp_size: int
    sequence_length: int
    seed: int
    steps: int
    """Number of steps of the run; no later step is prefetched."""
    validation_samples: int
    documents: bool = False
    """Whether tokens attend only within their document; the last token of a document then has no label."""
    pairs: bool = False
    """Whether the documents of each sequence are pairs of answers."""
    pinned: bool = False
    """Whether a step's batches are in pinned memory, from which a GPU copies asynchronously."""

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank {self.dp_rank} is not below dp_size {self.dp_size}")
        if self.global_batch % (self.dp_size * self.micro_batch):
            raise ValueError(
                f"global_batch {self.global_batch} is no multiple of {self.dp_size} ranks x {self.micro_batch}"
            )


class Batches:
    """Batches of one rank.

    Step s (from 0) trains on positions ``s·global_batch … (s+1)·global_batch`` of an endless order in which every
    epoch is a permutation of the samples by (seed, epoch), or of a mixture's draws. Rank r takes the r-th of
    ``dp_size`` equal parts of these positions, so all ranks together take the same samples for any number of ranks.
    The next step is prefetched in the background.

    Pinned memory is taken once, for two steps, as taking it waits for the device. The batches of a step are therefore
    overwritten after the next step has been asked for; by then the device must have read them.
    """

    def __init__(
        self,
        train: Samples,
        validation: Samples,
        deal: SampleDeal,
        *,
        vocab: int,
        fingerprint: str,
        notes: tuple[str, ...] = (),
        order: SampleOrder | None = None,
        documents: int = 0,
        sets: Mapping[str, Samples] = MappingProxyType({}),
        sets_fingerprint: str = "",
    ) -> None:
        self.documents = documents
        """Number of documents of the corpus."""
        self._train = train
        self._order = order or Epochs(train.count, deal.seed)
        self._validation = validation
        self._sets = sets
        self.sets = tuple(sets)
        """Names of the named sets for validation, in order."""
        self._deal = deal
        self.vocab = vocab
        """Number of tokens in the tokenizer's vocabulary."""
        self.fingerprint = fingerprint
        """SHA-256 of everything that decides the samples of a step; equal on every rank and for any number of ranks."""
        self.full_fingerprint = fingerprint + sets_fingerprint
        """The same, and of everything that decides the samples of the named sets."""
        self.notes = notes
        """Notes for the run's log."""
        self.train_tokens = train.tokens
        self.validation_tokens = validation.tokens
        self.samples_per_epoch = self._order.epoch
        self._reference: npt.NDArray[np.float64] | None = None
        self._reader = threads.executor("partool-data")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None
        self._room = (_room(deal), _room(deal)) if deal.pinned else ()
        """Pinned memory for the batches of steps with even and with odd numbers."""

    def step(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of step ``step``, counted from 0; raises an error that prefetching met."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != step:
            wait([ahead[1]])  # it may still write to this step's memory
        batch = ahead[1].result() if ahead is not None and ahead[0] == step else self._assemble(step)
        if step + 1 < self._deal.steps:
            self._ahead = (step + 1, self._reader.submit(self._assemble, step + 1))
        return batch

    def sample_ids(self, step: int) -> I64:
        """Return the numbers of the samples that this rank trains on in a step, in order."""
        deal = self._deal
        mine = deal.global_batch // deal.dp_size
        first = step * deal.global_batch + deal.dp_rank * mine
        return self._order.ids(first, mine)

    def validation(self, name: str = "") -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of held-out data, with the same samples at every call.

        ``name`` is that of a named set; empty: the data without a name. All ranks together use ``validation_samples``
        evenly spaced samples, or all samples if there are fewer. Every rank gets the same number of micro-batches;
        missing samples are replaced by rows of ignored labels, so a micro-batch may have only ignored labels.
        """
        samples = self._sets[name] if name else self._validation
        yield from self._dealt(samples, self._validation_ids(samples))

    @property
    def _trained_ids(self) -> I64:
        """Numbers of the samples that the steps read, each once."""
        deal, available = self._deal, self._train.count
        taken = deal.steps * deal.global_batch
        if taken >= self._order.epoch and self._order.every_sample:
            return np.arange(available)
        return np.unique(self._order.ids(0, taken))

    def _validation_ids(self, samples: Samples) -> list[int]:
        available = samples.count
        wanted = min(self._deal.validation_samples, available)
        return [place * available // wanted for place in range(wanted)]

    @property
    def read_documents(self) -> I64:
        """Numbers in the corpus of the documents that the steps and the validations of all ranks read."""
        trained = [self._train.numbers(int(number)) for number in self._trained_ids]
        every = (self._validation, *self._sets.values())
        held_out = [samples.numbers(number) for samples in every for number in self._validation_ids(samples)]
        return np.concatenate([np.empty(0, np.int64), *trained, *held_out])

    def reference_pass(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of all samples that the steps and the validations read, each once.

        Every rank gets the same number of micro-batches, as in :meth:`validation`.
        """
        yield from self._dealt(self._train, self._trained_ids)
        for name in ("", *self._sets):
            yield from self.validation(name)

    def _dealt(self, samples: Samples, ids: Sequence[int] | I64) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of some samples, with empty rows after the last."""
        deal = self._deal
        per_round = deal.micro_batch * deal.dp_size
        for first in range(deal.dp_rank * deal.micro_batch, _round_up(len(ids), per_round), per_round):
            places = range(first, first + deal.micro_batch)
            yield self._micro_batch(samples, [int(ids[at]) if at < len(ids) else None for at in places])

    def use_reference(self, sums: npt.NDArray[np.float64]) -> None:
        """Give later micro-batches the reference's log-probabilities, one sum per document of the corpus."""
        self._reference = sums

    @property
    def evaluated(self) -> dict[str, int]:
        """Number of sequences of each set that :meth:`evaluation` goes through, each once, by the set's name.

        The data without a name come first, under an empty name. Of each set, at most as many as the run's steps take.
        """
        most = self._deal.steps * self._deal.global_batch
        return {name: min(most, samples.count) for name, samples in self._evaluated.items()}

    def evaluation(self, name: str, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of step ``step`` (from 0) of one pass through a set of :attr:`evaluated`.

        If there are more samples than the steps take, evenly spaced ones are taken. After the last sample there are
        rows of ignored labels.
        """
        deal, samples, wanted = self._deal, self._evaluated[name], self.evaluated[name]
        mine = deal.global_batch // deal.dp_size
        first = step * deal.global_batch + deal.dp_rank * mine
        ids = [place * samples.count // wanted if place < wanted else None for place in range(first, first + mine)]
        return [
            self._micro_batch(samples, ids[start : start + deal.micro_batch])
            for start in range(0, mine, deal.micro_batch)
        ]

    @property
    def _evaluated(self) -> dict[str, Samples]:
        """The held-out samples by their set's name; if none are held out, all of the training's."""
        unnamed = self._validation if self._validation.count else self._train
        return {**({} if self._sets and unnamed is self._train else {"": unnamed}), **self._sets}

    def close(self) -> None:
        """Stop prefetching; further calls do nothing."""
        self._ahead = None
        self._reader.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _assemble(self, step: int) -> list[MicroBatch]:
        ids = [int(number) for number in self.sample_ids(step)]
        size = self._deal.micro_batch
        mine = step * self._deal.global_batch + self._deal.dp_rank * len(ids)
        micro_batches = [
            replace(self._micro_batch(self._train, ids[first : first + size]), first=mine + first)
            for first in range(0, len(ids), size)
        ]
        return (
            [_moved(*pair) for pair in zip(micro_batches, self._room[step % 2], strict=True)]
            if self._room
            else micro_batches
        )

    def _micro_batch(self, samples: Samples, ids: Sequence[int | None]) -> MicroBatch:
        rows = np.full((len(ids), self._deal.sequence_length + 1), PADDING, dtype=np.int64)
        documents = np.zeros(rows.shape, dtype=np.int32) if self._deal.documents else None
        ignored = np.zeros(rows.shape, dtype=bool)
        for place, number in enumerate(ids):
            if number is not None:
                rows[place] = samples.row(number)
                if samples.masks:
                    ignored[place] = samples.loss(number) == 0
                if documents is not None:
                    documents[place] = samples.documents(number)
        tokens, labels = rows[:, :-1], rows[:, 1:]
        tokens_BS = torch.from_numpy(np.where(tokens == PADDING, 0, tokens))
        labels_BS = torch.from_numpy(np.where((labels == PADDING) | ignored[:, 1:], IGNORED_LABEL, labels))
        documents_BL = None
        if documents is not None:
            labels_BS[torch.from_numpy(documents[:, 1:] != documents[:, :-1])] = IGNORED_LABEL
            documents_BL = torch.from_numpy(documents[:, :-1].copy())
        pairs = self._pairs(samples, ids, documents, labels_BS) if self._deal.pairs and documents is not None else None
        return MicroBatch(tokens_BS, labels_BS, documents_BL, pairs=pairs)

    def _pairs(
        self,
        samples: Samples,
        ids: Sequence[int | None],
        documents: npt.NDArray[np.int32],
        labels_BS: torch.Tensor,
    ) -> AnswerPairs:
        """Return the pairs in the rows ``ids``; ``documents`` numbers each row's documents from 0."""
        numbers = [np.empty(0, np.int64) if number is None else samples.numbers(number) for number in ids]
        first = np.cumsum([0, *map(len, numbers[:-1])])
        numbers_D = np.concatenate(numbers)
        labelled = (labels_BS != IGNORED_LABEL).numpy()
        lengths = np.bincount((documents[:, :-1] + first[:, None])[labelled], minlength=len(numbers_D))
        reference = None if self._reference is None else torch.from_numpy(self._reference[numbers_D])
        return AnswerPairs(numbers_D, torch.from_numpy(first), torch.from_numpy(lengths[: len(numbers_D)]), reference)


def _room(deal: SampleDeal) -> list[MicroBatch]:
    """Return pinned memory for the micro-batches of one step."""
    shape, count = (deal.micro_batch, deal.sequence_length), deal.global_batch // deal.dp_size // deal.micro_batch

    def pinned(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    return [
        MicroBatch(pinned(torch.int64), pinned(torch.int64), pinned(torch.int32) if deal.documents else None)
        for _ in range(count)
    ]


def _moved(micro: MicroBatch, room: MicroBatch) -> MicroBatch:
    """Copy a micro-batch into memory of the same shape, and return it there."""
    room.tokens_BS.copy_(micro.tokens_BS)
    room.labels_BS.copy_(micro.labels_BS)
    if room.documents_BL is not None and micro.documents_BL is not None:
        room.documents_BL.copy_(micro.documents_BL)
    return replace(room, first=micro.first, pairs=micro.pairs)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
