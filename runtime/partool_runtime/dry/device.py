"""The Python half of the device that stands in for CUDA: functions of ``torch.cuda`` that ask the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from partool_runtime.dry import shim
from partool_runtime.torch_internals.tensors import skip_first_allocation

_CUDA = 1
"""Number of the device type CUDA in torch's ``c10::DeviceType``."""
_current_stream = torch.accelerator.current_stream


class DryStream(torch.Stream):
    """A stream of the device; work on it is complete at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **rest: Any) -> DryStream:
        """Return a new stream of ``device``, by default the current one; ``stream_id`` names an existing stream."""
        if "stream_id" in rest:
            return super().__new__(cls, **rest)
        return super().__new__(cls, device="cuda" if device is None else device)

    @classmethod
    def current(cls) -> DryStream:
        """Return this thread's current stream."""
        now = _current_stream()
        return cls(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that is complete."""
        return event or DryEvent()

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    @property
    def cuda_stream(self) -> int:
        """The native handle; there is none."""
        return 0


class DryEvent:
    """An event that is always complete."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Accept what ``torch.cuda.Event`` and ``torch.Event`` accept."""

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, other: Any) -> float:
        """Return 0 milliseconds."""
        return 0.0


_OPERATORS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_ONE_KERNEL = ("silu_backward", "mish_backward")
"""Operators that are one kernel on CUDA. Where torch has no kernels for CUDA, autograd would run them as several
operators, whose results a real device does not hold."""


@cache
def _as_one_kernel() -> None:
    """Let autograd pass on what is one kernel; torch takes this only once in a process."""
    for operator in _ONE_KERNEL:
        _OPERATORS.impl(operator, torch.library.fallthrough_kernel, "AutogradCUDA")  # type: ignore[no-untyped-call]


def install(name: str, capability: tuple[int, int], memory_bytes: int, devices: int) -> None:
    """Make ``torch.cuda`` describe ``devices`` devices of a kind; for the rest of the process.

    Kernels are not chosen by measuring: a device that captures a graph cannot measure, so this device always does.
    """
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=memory_bytes,
        multi_processor_count=1,
        gcnArchName="",
        warp_size=32,
    )

    @contextmanager
    def stream(entered: torch.Stream | None) -> Iterator[None]:
        before = _current_stream()
        torch.accelerator.set_stream(entered or before)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: DryStream.current(),
        "default_stream": lambda device=None: DryStream(stream_id=0, device_index=0, device_type=_CUDA),
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "Stream": DryStream,
        "Event": DryEvent,
        "mem_get_info": lambda device=None: (memory_bytes, memory_bytes),
        "memory_stats": lambda device=None: {},
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for function, answer in answers.items():
        setattr(torch.cuda, function, answer)
    torch.Event = DryEvent  # type: ignore[misc,assignment]
    # FSDP2 asks here for the stream that waits for gathers which no pass has used.
    setattr(torch.accelerator, "current_stream", lambda device=None: DryStream.current())  # noqa: B010 - a function
    # Asking a real cuDNN would ask the driver.
    torch.backends.cudnn.version = lambda: None
    torch.backends.cudnn.is_available = lambda: False
    shim.guard_devices()
    skip_first_allocation()
    if torch.version.cuda is None and torch.version.hip is None:
        _as_one_kernel()
