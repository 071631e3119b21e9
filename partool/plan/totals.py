"""Figures of a whole training: tokens, epochs, size of a checkpoint, cost."""

from __future__ import annotations

from partool.plan.record import Record
from partool.spec.numbers import Predicted, Rate


class Totals(Record):
    """Figures of a whole training that follow from the spec, its data and the predicted step time."""

    trained_tokens: Predicted
    """Tokens that pass through the model: steps × sequences per step × tokens per sequence."""
    data_tokens: Predicted | None = None
    """Tokens in the data, without those held out for validation; None where they cannot be counted while planning."""
    data_unknown: str = ""
    """Why the tokens in the data are not known, and what would tell; empty if they are known."""
    data_rows: Predicted | None = None
    """Sequences of one pass over the data; None where they are not counted while planning."""
    data_samples: Predicted = 0
    """Conversations, or prompts with completions, of one pass; 0 for texts."""
    epochs: Rate | None = None
    """Number of times that the training reads its data; None if the tokens are not known, or not all of them count."""
    reference_s: Rate | None = None
    """Seconds of the reference's pass over the data before the first step, a part of the time of the training; None
    where the objective keeps no reference."""
    reference_bytes: Predicted | None = None
    """Bytes of the file with the reference's log-probabilities; None also where documents are not counted."""
    validation_s: Rate | None = None
    """Seconds of one validation of all sets, at most, which is in no step; None where nothing is validated."""
    checkpoint_bytes: Predicted
    """Bytes of one checkpoint, over all ranks."""
    price_per_device_hour: Rate | None = None
    """Price of one device for an hour, as in ``hardware``, in the user's currency; None if the spec gives none."""
    cost: Rate | None = None
    """``price_per_device_hour`` × predicted device-hours; None without a price."""

    def priced(self, device_hours: float) -> Totals:
        """Return these figures with the cost of ``device_hours``."""
        price = self.price_per_device_hour
        return self.model_copy(update={"cost": None if price is None else price * device_hours})
