"""Free ports for tests that run side by side."""

from __future__ import annotations

import os
import random
import socket

LOWEST, PORTS = 16_000, 4_000
"""First port, and ports of each process of pytest: below those that Linux gives to sockets which ask for any."""


def free_port() -> int:
    """Return a port of this machine that is free now and that no other process of the same tests will choose.

    Between its choice and its use nothing holds it, so that a port that Linux chooses could be given to another socket.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    chance = random.SystemRandom()
    while True:
        port = LOWEST + worker * PORTS + chance.randrange(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
