"""The ``training.objective`` section: what the passes minimise."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Section
from partool.spec.numbers import Coefficient, Factor

ObjectiveKind = Literal["sft", "dpo", "orpo", "simpo"]
READS: dict[ObjectiveKind, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("beta", "form", "smoothing", "reference"),
    "orpo": ("weight",),
    "simpo": ("beta", "gamma", "smoothing"),
}
"""Settings that each kind reads."""
Reference = Literal["kept", "adapter_off", "copy"]
_BETA: dict[ObjectiveKind, float] = {"sft": 1.0, "dpo": 0.1, "orpo": 1.0, "simpo": 2.0}
"""Default of ``beta``: that of DPO's paper (section 6) and of SimPO's (appendix B)."""


class ObjectiveSpec(Section):
    """The loss of a pair of answers; docs/guide/preferences.md has the formulas."""

    kind: ObjectiveKind = "sft"
    """sft: the mean loss of tokens; dpo: Rafailov et al., arXiv 2305.18290; orpo: Hong et al., arXiv 2403.07691;
    simpo: Meng et al., arXiv 2405.14734. The last three train on ``preference`` records."""
    beta: Factor | None = None
    """Scale of the log-probabilities that are compared; default: 0.1 for dpo, 2 for simpo."""
    form: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """dpo: function of the margin; ipo: the square of Azar et al., arXiv 2310.12036; hinge: that of SLiC, arXiv
    2305.10425."""
    smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of pairs whose answers are taken to be swapped (conservative DPO), for dpo's sigmoid and for simpo."""
    reference: Reference = "kept"
    """dpo: what computes the reference's log-probabilities. kept: the starting weights, in one pass before the first
    step, whose results are kept; adapter_off: in every step the model without its adapter; copy: in every step a frozen
    copy of the starting weights."""
    gamma: Coefficient = 1.0
    """simpo: margin between the answers' rewards, as TRL's ``simpo_gamma``; the authors' ``gamma_beta_ratio`` is
    gamma / beta."""
    weight: Coefficient = 0.1
    """orpo: weight of the odds ratio beside the loss of the chosen answer (the paper's lambda)."""

    @property
    def prefers(self) -> bool:
        """Whether the objective compares two answers."""
        return self.kind != "sft"

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares the model with the one that it started from."""
        return self.kind == "dpo"

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference's log-probabilities are computed before the first step, and kept."""
        return self.has_reference and self.reference == "kept"

    @property
    def refers_in_steps(self) -> bool:
        """Whether every pass over micro-batches follows one of the reference over the same micro-batches."""
        return self.has_reference and self.reference != "kept"

    @property
    def figures(self) -> tuple[str, ...]:
        """Means over pairs that training and validations report beside the loss."""
        if not self.prefers:
            return ()
        more = {"dpo": ("kl",), "orpo": ("log_odds",)}.get(self.kind, ())
        return ("chosen", "rejected", "accuracy", "logps_chosen", "logps_rejected", "margin", *more)

    @property
    def scale(self) -> float:
        """``beta``, or its default."""
        return _BETA[self.kind] if self.beta is None else self.beta
