"""Rules of the ``launch`` section and of jobs in general (520-539, 580-599)."""

from __future__ import annotations

from partool.diagnostics._rule import Rule


def _rule(code: str, title: str, reason: str, bad: str, good: str) -> Rule:
    return Rule(code, title, reason, bad, good, "command")


RULES: tuple[Rule, ...] = (
    _rule(
        "PT585",
        "The same plan is under way already",
        "A submission that is tried again, after a lost connection say, must not train the same thing twice.",
        "partool launch mine.yaml --target slurm   # while the first one waits in the queue",
        "partool status; partool launch mine.yaml --target slurm --again",
    ),
    _rule(
        "PT586",
        "The record of a submission cannot be read",
        "submission.json in the run's folder says how the scheduler knows the run; without it nobody can be asked.",
        "edit .partool/runs/mine-1a2b3c4d/submission.json",
        "restore the file, or look the job up by its name, which is the run's id",
    ),
    _rule(
        "PT587",
        "These plans cannot be the tasks of one array",
        "All tasks of a Slurm array ask for the same machines; only Slurm has arrays.",
        "partool launch mine.yaml --target slurm --array hardware.nodes=1,2",
        "partool launch mine.yaml --target slurm --array training.seed=1,2",
    ),
    _rule(
        "PT588",
        "The nodes are started by hand",
        "For the target torchrun partool prints one command per node; there is nobody to submit them to.",
        "partool launch mine.yaml --set launch.target=torchrun",
        "partool render mine.yaml --target torchrun",
    ),
    _rule(
        "PT589",
        "Checkpoints on the cluster cannot be put aside from here",
        "--step renames the checkpoints after that step; a Kubernetes volume is not mounted on this machine.",
        "partool launch --resume mine-1a2b3c4d --step 500   # a run on Kubernetes",
        "rename the later checkpoint folders in the volume, then launch --resume without --step",
    ),
)
