"""Kind of the exchange among data-parallel ranks in the current step, for optimizers that do not average every step."""

from __future__ import annotations

from partool.layout.one_bit import ExchangeKind, ExchangeSchedule, exchange_schedule
from partool.plan.types import Plan
from partool.strategies.optimizers import OPTIMIZERS


class Exchanges:
    """What data-parallel ranks exchange in the current step; :meth:`begin` sets the step."""

    def __init__(self, schedule: ExchangeSchedule) -> None:
        self.schedule = schedule
        self.kind: ExchangeKind = "full"

    @classmethod
    def of(cls, plan: Plan) -> Exchanges | None:
        """Return the exchanges of a plan; None if its optimizer averages gradients in every step."""
        if not OPTIMIZERS[plan.optimizer.name].whole_steps:
            return None
        return cls(exchange_schedule(plan.optimizer, plan.training, plan.checkpoint, plan.data.validates))

    def begin(self, step: int) -> None:
        """Set the current step, counted from 0."""
        self.kind = self.schedule.kind(step)

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over data-parallel ranks in this step."""
        return self.kind == "full"
