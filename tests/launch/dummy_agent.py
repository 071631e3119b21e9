"""The real agent, with ranks of ``dummy_job`` and with timeouts from ``PARTOOL_TEST_TIMING``."""

import json
import os
import sys

from partool_runtime.agent.node_messages import WaitTimes
from partool_runtime.agent.options import parse
from partool_runtime.agent.run import run_agent


def main() -> int:
    """Run the agent and return its exit code."""
    timing = WaitTimes(**json.loads(os.environ.pop("PARTOOL_TEST_TIMING", "{}")))
    return run_agent(parse(sys.argv[1:]), worker="dummy_job", timing=timing)


if __name__ == "__main__":
    sys.exit(main())
