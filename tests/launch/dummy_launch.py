"""``LocalTarget.launch`` with the agent of ``dummy_agent``: ``RUN_DIR [--detach]``."""

import sys
from pathlib import Path

from partool.launch.local import target as local
from partool.launch.store import Run
from partool.plan.types import Plan


def dummy_agent(python: None, plan_file: Path, run_dir: Path, *, resume: bool) -> list[str]:
    """Stand in for ``agent_command``."""
    agent = [sys.executable, str(Path(__file__).with_name("dummy_agent.py")), str(plan_file)]
    return [*agent, "--run-dir", str(run_dir)] + ["--resume"] * resume


if __name__ == "__main__":
    local.agent_command = dummy_agent
    run = Run(Path(sys.argv[1]))
    plan = Plan.from_json(run.plan_file.read_text())
    with local.stops_held_back() as stops:
        code = local.LocalTarget().launch(run, plan, stops, resume=False, detach="--detach" in sys.argv)
    sys.exit(code if code is None or code >= 0 else 100)
