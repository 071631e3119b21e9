"""Attacks: seeded cases, drawn until a budget of seconds is spent.

Case ``i`` of an attack depends only on (seed, name, i), so a failure is repeated by its number alone:

    PARTOOL_FUZZ_CASE=specs:1234 pytest tests/fuzz -k specs
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SEED = int(os.environ.get("PARTOOL_FUZZ_SEED", "18"))
_IN_CI_S = 2.0
SECONDS = float(os.environ.get("PARTOOL_FUZZ_SECONDS", _IN_CI_S))
"""Seconds that each attack may take: a few in CI, minutes in ``make test-long``."""
_ONE = os.environ.get("PARTOOL_FUZZ_CASE", "")


@dataclass
class Attack:
    """One attack: its name, the failures it has found, and the number of cases it has tried.

    ``least`` cases are tried however slow the machine is, and in CI no more than ``most`` however fast it is: a faster
    machine must not fail a change for a defect in code that the change does not touch.
    """

    name: str
    least: int = 20
    most: int = 1000
    seconds: float = SECONDS
    tried: int = 0
    found: list[str] = field(default_factory=list)

    def cases(self) -> Iterator[tuple[int, random.Random]]:
        """Yield the number of each case and its own random generator, until the budget is spent."""
        if _ONE:
            name, _, number = _ONE.partition(":")
            if name == self.name:
                yield from self._one(int(number))
            return
        until_s = time.monotonic() + self.seconds
        most = self.most if self.seconds <= _IN_CI_S else math.inf
        while self.tried < self.least or (time.monotonic() < until_s and self.tried < most):
            yield from self._one(self.tried)

    def _one(self, number: int) -> Iterator[tuple[int, random.Random]]:
        self.tried += 1
        yield number, random.Random(f"{SEED}:{self.name}:{number}")

    @contextmanager
    def case(self, number: int, text: Callable[[], str]) -> Iterator[None]:
        """Record an exception of a case instead of ending the attack; ``text`` describes the case."""
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self.found.append(f"{self.name}:{number}: {said[:300]}\n{text()[:2000]}")

    def judge(self) -> None:
        """Fail with all findings, if there are any; state how many cases were tried."""
        print(f"attack {self.name}: {self.tried} cases, {len(self.found)} findings (seed {SEED})")
        assert not self.found, f"{len(self.found)} of {self.tried} cases:\n" + "\n\n".join(self.found[:10])
