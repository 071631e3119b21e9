"""The context that every part of the kernel benchmark receives, and helpers to report its results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _kernels_clock import ROUNDS, Calls, Clock, Times, TooLateError, in_turn


@dataclass
class Run:
    """A running part of the benchmark."""

    clock: Clock
    architecture: str
    dry: bool
    """Whether to run on a host at tiny sizes, to try the benchmark itself."""
    until_s: float
    """Time by which the part must end, by the monotonic clock."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Measurements that were left out, with the reason."""

    @property
    def device(self) -> torch.device:
        """Device that calls run on."""
        return self.clock.device

    def late(self) -> bool:
        """Return True if the part's time is over."""
        return time.monotonic() > self.until_s

    def size(self, real: int, dry: int) -> int:
        """Return a size, or the dry run's size."""
        return dry if self.dry else real

    def times(self, calls: Calls, rounds: int = ROUNDS) -> Times:
        """Time calls in turn."""
        return in_turn(self.clock, calls, 2 if self.dry else rounds, self.until_s)

    def attempt(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run one measurement; if it fails or time is short, note the reason and return None so the rest goes on."""
        if self.late():
            self.left_out[name] = "no time left"
            return None
        try:
            return measure()
        except TooLateError as error:
            self.left_out[name] = str(error)
        except torch.OutOfMemoryError:
            self.left_out[name] = "out of memory"
        except (ImportError, NotImplementedError, AttributeError, RuntimeError, ValueError, SystemExit) as error:
            # The last line of a failed run gives the reason.
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            self.left_out[name] = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return None


def copy_calls(run: Run, moved_bytes: float) -> Calls:
    """Return a copy that moves as many bytes of device memory: the upper bound for memory-bound kernels."""
    half = max(int(moved_bytes) // 2, 1)
    source = torch.zeros(half, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source)}


def product_calls(run: Run) -> tuple[Calls, float]:
    """Return a large square product in bfloat16, and its operations: the upper bound for matrix products."""
    size = run.size(8192, 32)
    a, b = (torch.randn(size, size, device=run.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return {"product": lambda: torch.mm(a, b, out=out)}, 2.0 * size**3


def judged(name: str, ratio: float, goal: float) -> dict[str, Any]:
    """Return a ratio next to its goal."""
    return {"ratio": ratio, "of": name, "goal": goal, "met": ratio >= goal}
