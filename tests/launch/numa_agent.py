"""The agent of ``dummy_agent``, on a machine whose sysfs lies in the folder ``PARTOOL_TEST_ROOT`` names."""

import functools
import os
import sys
from pathlib import Path

from partool_runtime import _numa
from partool_runtime._options import parse
from partool_runtime.agent import run_agent

if __name__ == "__main__":
    root = Path(os.environ.pop("PARTOOL_TEST_ROOT"))
    _numa.bindings = functools.partial(_numa.bindings, root=root)
    sys.exit(run_agent(parse(sys.argv[1:]), worker="dummy_job"))
