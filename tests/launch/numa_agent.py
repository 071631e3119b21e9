"""The agent of ``dummy_agent``, on a machine whose sysfs is read from the folder named by ``PARTOOL_TEST_ROOT``."""

import functools
import os
import sys
from pathlib import Path

from partool_runtime.agent import numa
from partool_runtime.agent.options import parse
from partool_runtime.agent.run import run_agent

if __name__ == "__main__":
    root = Path(os.environ.pop("PARTOOL_TEST_ROOT"))
    numa.bindings = functools.partial(numa.bindings, root=root)
    sys.exit(run_agent(parse(sys.argv[1:]), worker="dummy_job"))
