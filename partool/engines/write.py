"""Writes plans as settings of other training systems, one module per system."""

from __future__ import annotations

from collections.abc import Callable

from partool.diagnostics.record import Diagnostic
from partool.engines import accelerate_terms, deepspeed_terms, megatron_terms, torchtitan_terms
from partool.engines.written import EngineTerms
from partool.plan.types import Plan
from partool.planner.forms.runnable import beyond
from partool.strategies.engines import ENGINES

_WRITERS: dict[str, Callable[[Plan], EngineTerms]] = {
    "accelerate": accelerate_terms.terms,
    "deepspeed": deepspeed_terms.terms,
    "megatron": megatron_terms.terms,
    "torchtitan": torchtitan_terms.terms,
}
WRITABLE = tuple(_WRITERS)
"""Engines that plans can be written for."""


def terms_of(plan: Plan) -> EngineTerms:
    """Return a plan in the words of its engine, which is one of :data:`WRITABLE`.

    The findings name every part of the plan that the engine cannot do; a plan with errors must not be written.
    """
    engine_terms, engine = _WRITERS[plan.engine](plan), ENGINES[plan.engine]
    lacks = [
        Diagnostic("PT828", f"{engine.title} has no {aspect}", help="plan it for this engine, or for partool")
        for aspect in beyond(engine, plan.layout)
    ]
    engine_terms.findings[:0] = lacks
    return engine_terms
