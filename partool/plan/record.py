"""Base class of all parts of a plan and of the records of a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable part of a plan; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)
