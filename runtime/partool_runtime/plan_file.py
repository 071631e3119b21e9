"""Reads the plan that agents and ranks run."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from partool.plan.outline import other_version
from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError


def load_plan(path: Path) -> Plan:
    """Read a plan; raises ConfigurationError if the plan cannot be read or cannot be run."""
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        if refusal := other_version(path):
            raise ConfigurationError("PT503", *refusal) from None
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        fix = "make it again: partool plan SPEC --out FILE"
        raise ConfigurationError("PT503", f"{path} is no plan of this version: {reason}", fix) from None
    if not plan.runnable:
        codes = ", ".join(plan.not_runnable)
        raise ConfigurationError("PT505", f"the runtime cannot run this plan ({codes})", f"see partool explain {codes}")
    return plan
