"""What the process of the tasks and rank 0 tell each other, in frames: JSON, then arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What the process needs to load tasks and to turn their texts into tokens."""

    tasks: tuple[str, ...]
    include_path: str | None
    limit: int | None
    num_fewshot: int | None
    tokenizer: str
    """``bytes``, or a folder of transformers'."""
    special_tokens: tuple[str, ...]
    sequence_length: int

    def to_json(self) -> bytes:
        """Return the settings as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TaskSettings:
        """Return what :meth:`to_json` was called on."""
        fields = json.loads(data)
        return cls(**fields | {name: tuple(fields[name]) for name in ("tasks", "special_tokens")})


class Windows(NamedTuple):
    """Rows of tokens of which the last ones are to be scored, the longest row first."""

    lengths_R2: I64  # noqa: N815
    """Tokens of each row, and how many of them are scored."""
    tokens: I64
    """Tokens of all rows, one row after the other."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], scored: Sequence[int]) -> Windows:
        """Return rows with the number of tokens that are scored of each."""
        lengths = [(len(row), count) for row, count in zip(rows, scored, strict=True)]
        return cls(
            np.array(lengths, np.int64).reshape(-1, 2), np.fromiter((token for row in rows for token in row), np.int64)
        )

    def parts(self) -> list[bytes]:
        """Return the rows as parts of a frame."""
        return [json.dumps({"kind": "score"}).encode(), self.lengths_R2.tobytes(), self.tokens.tobytes()]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Windows:
        """Return what :meth:`parts` was called on."""
        return cls(np.frombuffer(parts[1], np.int64).reshape(-1, 2), np.frombuffer(parts[2], np.int64))


class Scores(NamedTuple):
    """Of each row the log-probability of its scored tokens, and whether each of them is the model's first choice."""

    log_likelihoods: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.bool_]

    def parts(self) -> list[bytes]:
        """Return the scores as parts of a frame."""
        return [json.dumps({"kind": "scores"}).encode(), self.log_likelihoods.tobytes(), self.greedy.tobytes()]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Scores:
        """Return what :meth:`parts` was called on."""
        return cls(np.frombuffer(parts[1], np.float64), np.frombuffer(parts[2], np.bool_))


def message(kind: str, **fields: Any) -> bytes:
    """Return a message without arrays."""
    return json.dumps({"kind": kind, **fields}).encode()


def head_of(parts: Sequence[bytes]) -> Mapping[str, Any]:
    """Return the first part of a frame: ``kind``, and what belongs to it."""
    head: Mapping[str, Any] = json.loads(parts[0])
    return head
