"""An evaluation by tasks, in place of the loss over the data."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from partool.plan.task_results import task_figures, tasks_as_text
from partool.plan.types import Plan
from partool_runtime.errors import EXIT_DONE, EXIT_PREEMPTED
from partool_runtime.jobs.evaluate.model import frozen_model
from partool_runtime.jobs.tasks import TaskRunner
from partool_runtime.mesh import Ranks
from partool_runtime.pulse import Pulse
from partool_runtime.stop import StopRequest
from partool_runtime.telemetry import Recorder


def judge(plan: Plan, run_dir: Path, ranks: Ranks, *, recorder: Recorder, stop: StopRequest, pulse: Pulse) -> bool:
    """Run the plan's tasks; return False if a stop request ended them, after which they begin anew.

    Rank 0 prints the results and writes them into the run's folder. Raises ConfigurationError on all ranks.
    """
    prepared = frozen_model(plan, ranks, recorder, pulse)

    def stopping() -> bool:
        return stop.agree(0)

    attempt = int(os.environ.get("PARTOOL_ATTEMPT", "1"))
    recorder.event("start", attempt=attempt, world_size=ranks.world_size, plan_hash=plan.hash, resumed_from=0)
    with closing(TaskRunner(plan, run_dir, ranks, prepared.scoring, pulse)) as runner:
        pulse.enter("validating")
        results = runner.evaluate(0, stopping)
    pulse.enter("ending")
    prepared.passes.close()
    prepared.memory.close()
    if results:
        recorder.event("evaluation", step=0, tasks=task_figures(results))
        print(f"{tasks_as_text(results)}; {runner.requests:,} requests")
    ended = results is not None
    recorder.close(EXIT_DONE if ended else EXIT_PREEMPTED, "all tasks done" if ended else stop.reason)
    return ended
