"""Mean over ranks with one bit per element and error feedback on both sides.

Each rank sends the signs of its values plus its own error; each rank averages a share of the chunks, adds the error of
its share, and sends the signs of the result to all ranks: Tang et al., arXiv 2102.02888, section 3. An error is what
compression has lost, so that the values sent plus the errors kept are the values given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from partool.layout.one_bit import CHUNK, ROW_BYTES, MessageBucket
from partool_kernels.onebit import op
from partool_runtime.torch_internals.collectives import gather_into


class BucketPart(NamedTuple):
    """A part of a tensor of a bucket that begins with a chunk."""

    tensor: int
    """Number of the tensor in the bucket."""
    at: int
    """First element of the part among the bucket's elements."""
    within: int
    """First element of the part in the tensor."""
    size: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    work: dist.Work | None
    rows: torch.Tensor
    sent: torch.Tensor
    """Kept until the exchange has ended."""

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.rows


class OneBitMean:
    """Averages buckets of flat tensors over a group's ranks; None is the group of one rank, where nothing is lost.

    All ranks get the same bits.
    """

    def __init__(
        self,
        buckets: Sequence[MessageBucket],
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernels: str = "auto",
    ) -> None:
        self._buckets, self._group, self._kernels, self._dtype = buckets, group, kernels, dtype
        self.ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self._row_bytes = ROW_BYTES + dtype.itemsize
        self.worker_errors = [torch.zeros(self.elements(b), dtype=dtype, device=device) for b in buckets]
        """What compression has lost of this rank's own values, by bucket."""
        self.server_errors = [
            torch.zeros(bucket.share(self.ranks) * CHUNK, dtype=dtype, device=device) for bucket in buckets
        ]
        """What compression has lost of the means that this rank computes, by bucket."""

    def elements(self, bucket: MessageBucket) -> int:
        """Return the number of elements of a bucket, those that fill up chunks and shares included."""
        return bucket.share(self.ranks) * self.ranks * CHUNK

    def segments(self, bucket: MessageBucket) -> list[BucketPart]:
        """Return the parts of tensors that this rank averages; ``at`` counts from the rank's first element."""
        length = bucket.share(self.ranks) * CHUNK
        first = self.rank * length
        parts = []
        for number, (at, size) in enumerate(bucket.places()):
            start, stop = max(at, first), min(at + size, first + length)
            if start < stop:
                parts.append(BucketPart(number, start - first, start - at, stop - start))
        return parts

    @torch.no_grad()
    def means(self, values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the mean of each bucket's values, flat and in the places of the bucket.

        Each of ``values`` is a flat tensor of :meth:`elements` elements, and is not needed once the next one is taken.
        Elements that fill up chunks are undefined in the results. All messages are in flight at once.
        """
        if self._group is None:
            yield from self._alone(values)
            return
        away = [self._scatter(*each) for each in zip(self._buckets, values, self.worker_errors, strict=True)]
        back = [self._gather(*each) for each in zip(self._buckets, away, self.server_errors, strict=True)]
        for bucket, arriving in zip(self._buckets, back, strict=True):
            yield op.unpack(self._opened(arriving.wait()), self.elements(bucket), self._dtype, self._kernels)

    def _alone(self, values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for value, *errors in zip(values, self.worker_errors, self.server_errors, strict=True):
            yield value + errors[0] + errors[1]
            for error in errors:
                error.zero_()

    def _scatter(self, bucket: MessageBucket, values: torch.Tensor, errors: torch.Tensor) -> _InFlight:
        rows = self._closed(values, errors, list(bucket.places()))
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self._group, async_op=True)
        return _InFlight(work, received, rows)

    def _gather(self, bucket: MessageBucket, away: _InFlight, errors: torch.Tensor) -> _InFlight:
        rows = away.wait().view(self.ranks, bucket.share(self.ranks), self._row_bytes)
        mean = op.unpack(self._opened(rows), len(errors), self._dtype, self._kernels)
        mine = self._closed(mean, errors, [(each.at, each.size) for each in self.segments(bucket)])
        gathered = mine.new_empty(self.ranks * len(mine), self._row_bytes)
        assert self._group is not None
        return _InFlight(gather_into(gathered, mine, self._group, asynchronous=True), gathered, mine)

    def _closed(self, values: torch.Tensor, errors: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return a row of signs and scale per chunk; ``errors`` become what the rows lack of ``values + errors``."""
        rows = torch.zeros(len(values) // CHUNK, self._row_bytes, dtype=torch.uint8, device=values.device)
        for at, size in places:
            part = slice(at, at + size)
            packed = op.pack(values[part], errors[part], CHUNK, "l1", self._kernels)
            part_rows = rows[at // CHUNK : -(-(at + size) // CHUNK)]
            part_rows[:, :ROW_BYTES] = packed.bits
            part_rows[:, ROW_BYTES:] = packed.scales.view(torch.uint8).view(len(part_rows), -1)
        return rows

    def _opened(self, rows: torch.Tensor) -> op.OneBitTensor:
        """Return the signs and scales of rows ``[..., chunks, row bytes]``."""
        scales = rows[..., ROW_BYTES:].contiguous().view(self._dtype)
        return op.OneBitTensor(rows[..., :ROW_BYTES].contiguous(), scales.squeeze(-1))
