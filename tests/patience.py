"""How long tests wait for processes, as a multiple of the time that they get alone on a machine."""

from __future__ import annotations

import os

PATIENCE = 3.0 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 1.0
"""Factor of all limits: tests that run side by side share the cores."""
