"""The ``training.distill`` section: a teacher whose predictions a student learns beside the labels."""

from __future__ import annotations

from math import ceil
from typing import Annotated

from pydantic import Field

from partool.spec._base import Section
from partool.spec.numbers import Factor, Steps
from partool.spec.patterns import FilePath

PartOfSteps = Annotated[float, Field(gt=0.0, lt=1.0)]


class DistillSpec(Section):
    """A frozen teacher: β · T² · KL(teacher ‖ student) is added to each token's loss (docs/guide/experts.md)."""

    teacher: FilePath
    """Folder of the teacher: of Hugging Face's or of ``partool export``, with a config.json that partool builds its
    own decoder from and safetensors; or a run's folder, or one of its step-… folders."""
    weight: Factor = 1.0
    """β, the weight of the divergence beside the cross entropy (DeepSpeed-MoE, arXiv 2201.05596, section 4.2: 1)."""
    temperature: Factor = 1.0
    """T, which divides the logits of both models before their softmaxes (Hinton et al., arXiv 1503.02531)."""
    until: Steps | PartOfSteps | None = None
    """Optimizer steps with the teacher, as a number or as a share of all steps below 1; later steps have the cross
    entropy alone, and the teacher's memory is free. Default: all steps."""

    def taught_steps(self, steps: int) -> int:
        """Return how many of ``steps`` optimizer steps have the teacher."""
        if self.until is None:
            return steps
        return min(steps, self.until if isinstance(self.until, int) else ceil(self.until * steps))

    def share(self, steps: int) -> float:
        """Return the share of ``steps`` optimizer steps that have the teacher."""
        return self.taught_steps(steps) / steps
