"""Actions that succeed on all ranks or raise the error of the failed rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from partool_runtime.checkpoint._messages import decode, encode
from partool_runtime.errors import CheckpointError, ConfigurationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that is sent between ranks."""

    rank: int
    code: str
    message: str
    help: str

    @classmethod
    def of(cls, error: Exception, rank: int) -> _Failure:
        if isinstance(error, ConfigurationError):
            return cls(rank, error.code, error.message, error.help)
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return cls(rank, "", text, "")

    def to_error(self) -> Exception:
        if self.code:
            return ConfigurationError(self.code, self.message, self.help)
        return CheckpointError(f"rank {self.rank}: {self.message}")


class SavingRanks:
    """The ranks that save and load together, with a separate gloo group, which a background thread may use.

    Collectives of one group must be issued in the same order everywhere, so only one thread may use it at a time.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank, in rank order; raises CheckpointError if a peer is gone.

        Values must be of types that :mod:`._messages` encodes; torch's object collectives would unpickle other ranks'
        data.
        """
        if self._group is None:
            return [value]
        try:
            return [cast(T, decode(message)) for message in self._gathered(encode(value), self._group)]
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"lost another rank: {error}") from error

    def _gathered(self, message: bytes, group: dist.ProcessGroup) -> list[bytes]:
        """Return the message of every rank as bytes; the messages may have different lengths."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return [part.numpy()[: int(size)].tobytes() for part, size in zip(parts, sizes, strict=True)]

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank and return all results; if it fails on one rank, raise its error on all."""
        value: T | None = None
        local_error: Exception | None = None
        try:
            value = action()
        except Exception as error:  # sent to all ranks
            local_error = error
        outcomes = self.gather((value, None if local_error is None else astuple(_Failure.of(local_error, self.rank))))
        failures = [_Failure(*failure) for _, failure in outcomes if failure is not None]
        if failures:
            worst = next((failure for failure in failures if failure.code), failures[0])
            raise worst.to_error() from local_error
        return [cast(T, result) for result, _ in outcomes]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 and return its result, or raise its error, on all ranks."""
        return cast(T, self.agree(action if self.rank == 0 else _nothing)[0])

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _nothing() -> Any:
    return None
