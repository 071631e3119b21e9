"""The real agent, with ranks of ``dummy_job``."""

import sys
from pathlib import Path

from partool_runtime.agent import run_agent

if __name__ == "__main__":
    plan, run_dir, *flags = sys.argv[1:]
    sys.exit(run_agent(Path(plan), Path(run_dir), resume="--resume" in flags, worker="dummy_job"))
