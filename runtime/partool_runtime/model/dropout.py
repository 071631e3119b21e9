"""Dropout whose masks do not depend on the layout: a mask is a hash of what an element is, not a state of a generator.

An element's fate follows from the run's seed, the number of its sequence in the run's order, its position in the
sequence, the projection's name and its column. So every rank that holds an element drops the same ones, recomputation
and tiles repeat them, and a resumed run goes on with the masks of the run that it continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from partool_runtime.hashing import mixed, signed


class Masks:
    """The keys of the tokens that the projections of a layer multiply; the layer and all of them share this object."""

    def __init__(self) -> None:
        self.keys_BS: torch.Tensor | None = None
        """Key of each token of the current pass; None in passes without dropout."""

    @contextmanager
    def of(self, keys_BS: torch.Tensor | None) -> Iterator[None]:
        """Within this context the tokens have other keys, such as those of a tile."""
        before, self.keys_BS = self.keys_BS, keys_BS
        try:
            yield
        finally:
            self.keys_BS = before


def token_keys(seed: int, first: int, batch: int, positions_S: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[B, S]`` (int32) of tokens at ``positions_S`` of sequences ``first`` and the next ones."""
    device = positions_S.device
    salt = signed(crc32(seed.to_bytes(16, "little", signed=True)))
    numbers = [[signed(number)] for number in range(first, first + batch)]
    sequences_B1 = mixed(torch.tensor(numbers, dtype=torch.int32, device=device) ^ salt)
    return mixed(sequences_B1 + mixed(positions_S.to(torch.int32, copy=True)))


def column_hashes(name: str, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the hashes (int32, on the CPU) of the columns of a projection's matrix in ranges, in this order."""
    columns = [torch.arange(*span, dtype=torch.int32, device="cpu") for span in spans]
    every = torch.cat(columns) if columns else torch.empty(0, dtype=torch.int32, device="cpu")
    return mixed(every ^ signed(crc32(name.encode())))


def dropped(x_BSI: torch.Tensor, keys_BS: torch.Tensor, hashes_I: torch.Tensor, rate: float) -> torch.Tensor:
    """Return what dropout leaves of ``x_BSI``, scaled so that the mean stays."""
    bits_BSI = mixed(keys_BS[..., None] + hashes_I).bitwise_and_(2**31 - 1)
    return torch.where(bits_BSI >= int(rate * 2**31), x_BSI * (1.0 / (1.0 - rate)), 0.0)
