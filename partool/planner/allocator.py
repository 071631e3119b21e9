"""The setting of torch's allocator on accelerators: expandable segments, which leave fewer unusable gaps."""

from __future__ import annotations

from partool.plan.types import Variable
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec

NAME, VALUE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
"""Variable that torch reads after the names of one vendor, so that a vendor's variable of the user has priority
(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)."""
OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of one vendor, the only ones that torch before 2.9 reads."""
_NAMES = (*OLDER, NAME)
"""Variables that torch reads, the first one that is set counts."""


def variable(launch: LaunchSpec, devices: Devices) -> Variable | None:
    """Return the variable that the plan sets; None on a CPU, on ROCm, or where ``launch`` sets one of torch's.

    Builds for ROCm do not all have expandable segments.
    """
    if devices.backend != "cuda" or _user_value(launch) is not None:
        return None
    why = "partool: freed memory of any size can be used again; the predicted memory counts on it"
    return Variable(name=NAME, value=VALUE, origin=why)


def expandable(launch: LaunchSpec, devices: Devices) -> bool:
    """Return True if the ranks' allocator has expandable segments."""
    user_value = _user_value(launch)
    if user_value is None:
        return devices.backend == "cuda"
    return VALUE.lower() in user_value.replace(" ", "").lower()


def _user_value(launch: LaunchSpec) -> str | None:
    """Return the user's value of the variable that counts; a secret's value is not known."""
    for name in _NAMES:
        if name in launch.env:
            return launch.env[name]
        if name in launch.secrets:
            return ""
    return None
