"""Evaluation: the batches of a training of which only the forward passes run, and of which nothing is trained."""

from __future__ import annotations

from dataclasses import replace

from partool.work.training import TrainingWork


def forward_only(work: TrainingWork) -> TrainingWork:
    """Return the work without backward passes, gradients, moments and updates."""
    return replace(
        work,
        backward=False,
        frozen=("*",),
        moments=0,
        matrices=None,
        one_bit=None,
        adapt=None,
        perturbed=0.0,
        reference_passes=0,
        reference_copy=False,
        teacher=None,
        taught=0.0,
    )
