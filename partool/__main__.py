"""``python -m partool``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder: what lies beside a spec is not to be imported

from partool.cli.main import run

run()
