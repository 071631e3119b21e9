"""Specs are planned and rendered on systems that lack what only POSIX systems have."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from partool.cli.main import run
from partool.launch.local.target import LocalTarget
from partool.launch.target import LaunchError
from partool.plan import posix
from partool.plan.terminal import say
from partool.verify.execute import DryRunError, execute
from partool.version import __version__

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline")
"""Modules that Windows lacks; all of ``runtime`` may use them."""
SIGNALS = (
    "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGTSTP", "SIGCONT",
    "SIGSTOP", "SIGWINCH", "pthread_sigmask", "pthread_kill", "sigwait", "setitimer", "alarm", "SIG_BLOCK",
    "SIG_UNBLOCK", "SIG_SETMASK",
)  # fmt: skip
CALLS = (
    "getuid", "geteuid", "getgid", "getegid", "fork", "forkpty", "killpg", "getpgid", "getpgrp", "setsid", "setpgid",
    "getsid", "sysconf", "getloadavg", "mkfifo", "openpty", "fchmod", "fchown", "chown", "pread", "pwrite", "wait",
    "posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity", "memfd_create", "register_at_fork",
    "O_NOFOLLOW", "O_DIRECTORY", "O_DIRECT", "O_CLOEXEC", "O_NONBLOCK", "O_SYNC", "nice", "getpriority",
)  # fmt: skip
# The standard library looks at some of these names as it is imported on Linux, so that comes first.
HIDE = f"""
import asyncio, json, multiprocessing, os, pathlib, shutil, signal, socket, subprocess, sys, tempfile
for name in {MODULES}:
    sys.modules[name] = None
for module, names in ((signal, {SIGNALS}), (os, {CALLS})):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
from partool.cli.main import run
for words in json.loads(sys.argv[1]):
    try:
        run(words)
    except SystemExit as ended:
        print("ended", words[0], ended.code, flush=True)
"""
SPEC = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: h100-sxm, per_node: 8}
training: {sequence_length: 64, global_batch: 16, steps: 10}
parallel: {tensor: 2, pipeline: 1, data: {shard: 4}, micro_batch: 2, recompute: none}
data: python-stdlib
launch: {slurm: {time: "01:00:00"}, k8s: {storage: "pvc:runs"}}
"""


def test_without_posix_specs_are_planned_explained_and_rendered(tmp_path: Path) -> None:
    spec, script = tmp_path / "small.yaml", tmp_path / "train.sh"
    spec.write_text(SPEC)
    script.write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --micro-batch-size 1\n")
    commands = [
        ["plan", str(spec), "--out", str(tmp_path / "plan.json")],
        ["explain", "PT203"],
        ["render", str(tmp_path / "plan.json"), "--target", "slurm", "--out", str(tmp_path / "slurm")],
        ["render", str(spec), "--target", "k8s", "--set", "launch.image=a.b/c:1", "--out", str(tmp_path / "k8s")],
        ["render", str(tmp_path / "plan.json"), "--target", "torchrun", "--out", str(tmp_path / "torchrun")],
        ["render", str(tmp_path / "plan.json"), "--target", "local"],
        ["import", str(script)],
        ["launch", str(tmp_path / "plan.json"), "--target", "local"],
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", HIDE, json.dumps(commands)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100 * PATIENCE,
        env={**os.environ, "PARTOOL_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    ended = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == [*([words[0], "0"] for words in commands[:6]), ["import", "1"], ["launch", "3"]], done.stderr
    assert "error[PT519]: ranks run on Linux; this operating system has no fork" in done.stderr
    assert "has no attribute" not in done.stderr
    assert "#SBATCH --nodes=1" in (tmp_path / "slurm" / "job.sbatch").read_text()
    assert "kind: " in (tmp_path / "k8s" / "manifest.yaml").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["devices"]["per_node"] == 8


def test_narrow_encodings_show_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_by_name = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, stream in bytes_by_name.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding="cp1252", newline="\r\n"))
    with pytest.raises(SystemExit):
        run(["--version"])
    say("± 5% (≥ 90%)")
    assert bytes_by_name["stdout"].getvalue() == f"partool {__version__}\n± 5% (? 90%)\n".encode("cp1252")


def test_what_needs_posix_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert posix.no_ranks() == ""
    with (tmp_path / "lock").open("a") as one, (tmp_path / "lock").open("a") as other:
        assert posix.lock(one)
        assert not posix.lock(other)
        monkeypatch.setitem(sys.modules, "fcntl", None)
        with pytest.raises(OSError, match="no flock"):
            posix.lock(one)
    number = posix.user_id()
    assert number == str(os.getuid())
    monkeypatch.setitem(sys.modules, "pwd", None)
    monkeypatch.setattr("getpass.getuser", lambda: "somebody")
    assert posix.user_name() == "somebody"
    for name in ("getuid", "fork"):
        monkeypatch.delattr(os, name)
    assert posix.user_id() == "somebody"
    with pytest.raises(LaunchError, match="has no fork"):
        LocalTarget().check()
    with pytest.raises(DryRunError, match="has no fork"):
        execute(None, [0])  # type: ignore[arg-type]
