"""How long tests wait for processes, as a multiple of the time that they get alone on a machine."""

from __future__ import annotations

import os

_SHARED = 3.0
"""Tests run side by side, or beside another user of the cores."""
_LOAD = os.getloadavg()[0] / (os.cpu_count() or 1)
"""Processes that want a core, for each core, as the tests begin."""

PATIENCE = max(_SHARED, 1.0 + _LOAD)
"""Factor of all limits. Only tests that fail wait so long."""
