"""``python -m partool_runtime.agent``: see :mod:`partool_runtime.agent.run`."""

from __future__ import annotations

import sys

from partool_runtime.agent.run import main

if __name__ == "__main__":
    sys.exit(main())
