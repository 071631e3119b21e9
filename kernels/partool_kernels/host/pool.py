"""The threads that optimizer passes run on."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

from partool_kernels import _native
from partool_kernels.host.types import HostKernelError


class Pool:
    """Threads on which the compiled library runs optimizer passes; if cores are given, there is a thread per core.

    Results do not depend on the number of threads. Any thread may start passes on a pool; the passes run one after the
    other. A pool of one thread without a given core runs passes in the caller's thread. Raises
    :class:`HostKernelError` for cores that this process may not use.
    """

    def __init__(self, threads: int = 1, cores: Sequence[int] = ()) -> None:
        if threads < 1:
            raise HostKernelError(f"a pool needs a thread, not {threads}")
        if any(core < 0 for core in cores):
            raise HostKernelError(f"cores are counted from 0: {list(cores)}")
        self.threads, self.cores = threads, tuple(cores)
        self._handle: int | None = None
        lib = _native.library()
        if lib is None or (threads == 1 and not cores):
            return
        named, error = (ctypes.c_int32 * len(cores))(*cores), ctypes.c_int32()
        self._handle = lib.partool_pool_open(threads, named, len(cores), ctypes.byref(error))
        if self._handle is None:
            why = os.strerror(error.value)
            raise HostKernelError(f"cannot start {threads} threads on cores {list(cores) or 'of any number'}: {why}")
        self._end = weakref.finalize(self, lib.partool_pool_close, self._handle)
        # The pool stays open at exit, as a daemon thread may still run passes; its threads end with the process.
        self._end.atexit = False

    @property
    def idle(self) -> bool:
        """Whether passes on the pool touch no memory; see :class:`IdlePool`."""
        return False

    @property
    def handle(self) -> int | None:
        """The library's handle of the threads; None means that passes run in the caller's thread."""
        return self._handle

    def close(self) -> None:
        """End the threads; later passes on the pool run in the caller's thread."""
        if self._handle is not None:
            self._handle = None
            self._end()


class IdlePool(Pool):
    """A pool on which passes read and write nothing: for dry runs, whose tensors have shapes but no memory.

    Sums on this pool are zero and finite. Types and addresses of arguments are not checked, numbers of tensors are.
    """

    def __init__(self, threads: int = 1) -> None:
        super().__init__()
        self.threads = threads

    @property
    def idle(self) -> bool:
        """See :class:`Pool`."""
        return True
