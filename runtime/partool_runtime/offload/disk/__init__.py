"""Keeps masters, moments and parameters in files on local disks (ZeRO-Infinity, arXiv 2104.07857)."""

from partool_runtime.offload.disk.file import IO_BYTES, Calls
from partool_runtime.offload.disk.store import DiskStore

__all__ = ["IO_BYTES", "Calls", "DiskStore"]
