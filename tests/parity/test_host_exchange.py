"""What CPUs send of gradients and parameters, and when it is there."""

from __future__ import annotations

from pathlib import Path

import _host_exchange_worker as worker
from _ranks import run_ranks


def test_three_ranks_send_every_part_once_and_wait_as_late_as_they_may() -> None:
    run_ranks(Path(worker.__file__), 3)
