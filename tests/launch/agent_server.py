"""Agents with dummy ranks as copies of one process: an agent loads torch, which takes two seconds of a processor.

A copy has the environment, the session, the output and the command line that it would have as a process of its own.
What a fresh process does while it loads torch is left to tests that start one.
"""

from __future__ import annotations

import array
import ctypes
import gc
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

COMMAND_BYTES = 4096
"""Room for the command line of a copy."""


class Copy:
    """An agent that is a copy of the server, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket, arguments: list[str], environment: dict[str, str]) -> None:
        self._outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # communicate closes them
        self._ended, ended = os.pipe()
        self.returncode: int | None = None
        try:
            files = [*(file.fileno() for file in self._outputs), ended]
            connection.sendmsg([b"a"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        finally:
            os.close(ended)
        order = pickle.dumps((arguments, environment))
        connection.sendall(len(order).to_bytes(8, "big") + order)
        self.pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
        assert self.pid, "the server of agents has ended"

    def poll(self) -> int | None:
        """Return the exit code, negative for signals; None as long as the agent runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was written to standard output and error."""
        self.wait(timeout)
        texts = []
        for file in self._outputs:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal unless the agent has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ended, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return None
            said = os.read(self._ended, 16)
            os.close(self._ended)
            assert said, "the server of agents has ended"
            self.returncode = int(said)
        return self.returncode


class Server:
    """The process that agents are copies of, started for the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self, arguments: list[str], environment: dict[str, str]) -> Copy:
        """Return an agent with these arguments and this environment, in a session of its own."""
        from processes import lasting  # the server's own process does not find that module

        if self._connection is None:
            self._connection, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno()), "x" * COMMAND_BYTES]
                alone = lasting(environment) | {"OMP_NUM_THREADS": "1"}  # a process with threads cannot be copied
                self._process = subprocess.Popen(command, env=alone, pass_fds=[theirs.fileno()], start_new_session=True)
        return Copy(self._connection, arguments, environment)

    def close(self) -> None:
        """End the server."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait(30)
            self._connection = self._process = None


SERVER = Server()


def _serve(connection: socket.socket) -> None:
    """Start copies until the connection is closed, and tell of each one's end."""
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            if selector.select(0.01 if running else None):
                message, rights, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(3 * 4))
                if not message:
                    return
                files = array.array("i", rights[0][2]).tolist()
                size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
                arguments, environment = pickle.loads(connection.recv(size, socket.MSG_WAITALL))
                if not (pid := os.fork()):
                    selector.close()
                    connection.close()
                    for other in running.values():
                        os.close(other)
                    _be_an_agent(arguments, environment, files)
                for file in files[:2]:
                    os.close(file)
                running[pid] = files[2]
                connection.sendall(pid.to_bytes(8, "big"))
            for pid in list(running):
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    file = running.pop(pid)
                    os.write(file, str(os.waitstatus_to_exitcode(ended[1])).encode())
                    os.close(file)


def _be_an_agent(arguments: list[str], environment: dict[str, str], files: list[int]) -> None:
    """Go on as a fresh process would with these arguments."""
    code = 1
    try:
        os.setsid()
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        for file in files:
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        _show([sys.executable, *arguments])
        sys.argv = arguments
        code = dummy_agent.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show(command: list[str]) -> None:
    """Put a command line where others see this process' own one."""
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    assert len(text) <= end - start, text
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as the agent has it while it loads torch, which reads it only then
    import dummy_agent

    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        _serve(orders)
