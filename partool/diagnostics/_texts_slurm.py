"""Rules of Slurm jobs (541-560)."""

from __future__ import annotations

from partool.diagnostics._rule import Rule


def _rule(code: str, title: str, reason: str, bad: str, good: str) -> Rule:
    return Rule(code, title, reason, bad, good, "command")


RULES: tuple[Rule, ...] = (
    _rule(
        "PT550",
        "Slurm cannot be asked",
        "Its commands are missing here, or its controller does not answer; whatever runs goes on.",
        "partool launch mine.yaml --target slurm   # on a laptop",
        "partool launch mine.yaml --target slurm   # on a login node; partool render works everywhere",
    ),
    _rule(
        "PT551",
        "Slurm refuses the job",
        "sbatch, or sbatch --test-only, says what it does not have or does not allow.",
        "partool launch mine.yaml --target slurm --set launch.slurm.partition=nope",
        "sinfo -s; partool launch mine.yaml --target slurm --set launch.slurm.partition=main",
    ),
    _rule(
        "PT552",
        "Whether a job was submitted is not known",
        "sbatch gave no answer and Slurm cannot be asked for a job of the run's name; it may start training yet.",
        "launch again at once",
        "once Slurm answers: scancel --name=<the run's id>, then launch again",
    ),
    _rule(
        "PT553",
        "Slurm does not cancel the job",
        "scancel refuses, most often because the job is another user's.",
        "partool cancel mine-1a2b3c4d   # submitted by somebody else",
        "ask its owner, or an administrator",
    ),
    _rule(
        "PT554",
        "Other nodes hardly see the run's folder",
        "Plan, status, logs and checkpoints lie in the run's folder; /tmp is another one on every node.",
        "PARTOOL_HOME=/tmp/partool partool launch mine.yaml --target slurm",
        "PARTOOL_HOME=/shared/me/partool partool launch mine.yaml --target slurm",
    ),
)
