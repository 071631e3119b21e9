"""A real Slurm cluster on this machine for as long as a test takes; root, no systemd, no cgroups, no network.

Controller and clients live in a network namespace of their own (the hub), each slurmd in another with a host name,
an ``/etc/hosts`` and process ids of its own, so that jobs see several machines. Nothing listens outside of them; munge
has its own key and socket. All processes are children of this one and end with it.

    python tests/launch/slurm/slurm_cluster.py     starts one and a shell in it
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from patience import PATIENCE

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "iproute2")
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")
CLIENTS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr")
INSTALL = "PARTOOL_TEST_INSTALL"
_HERE = Path(__file__).parent
_NET = "10.77.0"
_START_TIMEOUT_S = 40.0 * PATIENCE


def unavailable() -> str:
    """Return why no cluster can be started here, after installing what is missing if that is allowed; else nothing."""
    if os.getuid() != 0:
        return "a Slurm cluster of its own needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing and os.environ.get(INSTALL) == "1" and shutil.which("apt-get"):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=quiet, check=True)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        subprocess.run(command, env=quiet, check=True, stdout=subprocess.DEVNULL)
        missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; make test-slurm installs them, and so does {INSTALL}=1"
    probe = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    answer = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    return "" if answer.returncode == 0 else f"no namespaces here: {answer.stderr.strip()}"


def without_accounting() -> str:
    """Return why there can be no accounting here; else nothing. :func:`unavailable` comes first."""
    missing = [name for name in ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db") if shutil.which(name) is None]
    return f"no accounting: {', '.join(missing)} not installed" if missing else ""


class Cluster:
    """``nodes`` machines with ``cpus`` cores and ``gpus`` pretended GPUs each; ``with`` starts and stops it.

    ``signal_at_preemption``: jobs that are preempted get the signal they asked for, not only SIGTERM. ``accounting``:
    there is a database with accounts and limits, which are enforced (see :func:`without_accounting`).
    """

    _count = 0

    def __init__(
        self,
        nodes: int = 3,
        cpus: int = 4,
        gpus: int = 8,
        signal_at_preemption: bool = True,
        accounting: bool = False,
    ) -> None:
        self.names = [f"node{index}" for index in range(1, nodes + 1)]
        self._prefix = f"pt{os.getpid()}-{Cluster._count}"
        Cluster._count += 1
        self._preemption = "preempt_send_user_signal" if signal_at_preemption else "(null)"
        self._cpus, self._gpus, self._accounting = cpus, gpus, accounting
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = Path()
        self.bin = Path()

    def __enter__(self) -> Cluster:
        # Not pytest's own folder: munge insists on a socket that every user could reach.
        self.folder = Path(tempfile.mkdtemp(prefix=f"partool-slurm-{os.getpid()}-"))
        self.bin = self.folder / "bin"
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """This process' environment with the cluster's commands in front of ``PATH``."""
        return os.environ | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *command: str, check: bool = True) -> str:
        """Run one of Slurm's commands; return what it says on standard output."""
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60 * PATIENCE)
        assert answer.returncode == 0 or not check, f"{command}: {answer.returncode}: {answer.stderr}"
        return answer.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the ids of all jobs that have not ended."""
        return self.run("squeue", "--noheader", "--states=pending,running,completing", "-o", "%A").split()

    def start_node(self, name: str) -> None:
        """Switch a node on."""
        self._spawn(f"slurmd-{name}", name, ["slurmd", "-D", "-N", name, "-f", str(self.folder / "etc/slurm.conf")])

    def stop_node(self, name: str) -> None:
        """Switch a node off: all its processes vanish at once."""
        self._end(self._processes.pop(f"slurmd-{name}"))

    def stop(self) -> None:
        """End everything that was started, and only that."""
        for name in list(self._processes):
            self._end(self._processes.pop(name))
        for namespace in ("hub", *self.names):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}-{namespace}"], capture_output=True, check=False)
        if self.folder.name.startswith("partool-slurm-"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("bin", "etc", "munge", "log", "state", "gpus", *(f"spool/{node}" for node in self.names)):
            (self.folder / name).mkdir(parents=True)
        self._write_configuration()
        self._write_clients()
        self._connect()
        self._start_munge()
        if self._accounting:
            self._start_accounting()
        configuration = str(self.folder / "etc/slurm.conf")
        self._spawn("slurmctld", "hub", ["slurmctld", "-D", "-f", configuration])
        for name in self.names:
            self.start_node(name)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every node takes jobs."""
        end = time.monotonic() + _START_TIMEOUT_S
        while len(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split()) < len(self.names):
            if time.monotonic() > end:
                logs = "\n".join(file.read_text(errors="replace")[-2000:] for file in self.folder.glob("log/*"))
                raise TimeoutError(f"the cluster is not ready after {_START_TIMEOUT_S:g} s:\n{logs}")
            time.sleep(0.1)

    def _write_configuration(self) -> None:
        nodes = "\n".join(f"NodeName={name} NodeAddr={_NET}.{i}" for i, name in enumerate(self.names, 1))
        words = {"DIR": str(self.folder), "NET": _NET, "NODES": nodes, "CPUS": str(self._cpus)}
        words |= {"GPUS": str(self._gpus), "FILES": f"[0-{self._gpus - 1}]"}
        words["PREEMPTION"] = self._preemption
        words["ACCOUNTING"] = "none"
        if self._accounting:
            lines = (f"Host={_NET}.254", f"Pass={self.folder}/munge/munge.sock", "TRES=gres/gpu", "Enforce=limits,qos")
            words["ACCOUNTING"] = "\n".join(["slurmdbd", *(f"AccountingStorage{line}" for line in lines)])
        for name in ("slurm.conf", "gres.conf"):
            text = (_HERE / f"{name}.in").read_text(encoding="utf-8")
            for word, value in words.items():
                text = text.replace(f"@{word}@", value)
            (self.folder / "etc" / name).write_text(text, encoding="utf-8")
        for index in range(self._gpus):
            (self.folder / f"gpus/{index}").touch()
        (self.folder / "etc/cgroup.conf").touch()
        hosts = ["127.0.0.1 localhost", f"{_NET}.254 hub"]
        # also as sockets of both families see them, or looking them up would go to a name server
        hosts += [f"{form}{_NET}.{i} {name}" for i, name in enumerate(self.names, 1) for form in ("", "::ffff:")]
        (self.folder / "etc/hosts").write_text("\n".join(hosts) + "\n", encoding="utf-8")

    def _write_clients(self) -> None:
        """Commands that act on this cluster; jobs inherit a ``PATH`` without them."""
        for name in CLIENTS:
            script = f"""#!/bin/bash
export SLURM_CONF={self.folder}/etc/slurm.conf PATH="${{PATH//{str(self.bin).replace("/", chr(92) + "/")}:/}}"
exec nsenter --net=/run/netns/{self._prefix}-hub -- {shutil.which(name)} "$@"
"""
            file = self.bin / name
            file.write_text(script, encoding="utf-8")
            file.chmod(0o755)

    def _connect(self) -> None:
        _drop_stale()
        hub = f"{self._prefix}-hub"
        commands = [f"netns add {hub}", f"-n {hub} link set lo up", f"-n {hub} link add br0 type bridge"]
        commands += [f"-n {hub} addr add {_NET}.254/24 dev br0", f"-n {hub} link set br0 up"]
        for i, name in enumerate(self.names, 1):
            node = f"{self._prefix}-{name}"
            commands += [f"netns add {node}", f"-n {node} link set lo up"]
            commands += [f"link add v{i} netns {hub} type veth peer name eth0 netns {node}"]
            commands += [f"-n {hub} link set v{i} master br0 up", f"-n {node} addr add {_NET}.{i}/24 dev eth0"]
            commands += [f"-n {node} link set eth0 up"]
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)

    def _start_munge(self) -> None:
        key = self.folder / "munge/munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        folder = self.folder / "munge"
        options = [f"--key-file={key}", f"--socket={folder}/munge.sock", f"--pid-file={folder}/munged.pid"]
        options += [f"--log-file={self.folder}/log/munged.log", f"--seed-file={folder}/munge.seed"]
        self._processes["munged"] = self._popen(["munged", "--foreground", *options], "munged")
        end = time.monotonic() + _START_TIMEOUT_S
        while not (folder / "munge.sock").exists():
            assert time.monotonic() < end, (self.folder / "log/munged.out").read_text()
            time.sleep(0.02)

    def _start_accounting(self) -> None:
        """Start a database without a network, and the daemon that keeps accounts in it."""
        folder, data = self.folder / "db", self.folder / "db/data"
        folder.mkdir()
        quiet = {"check": True, "capture_output": True, "timeout": 60 * PATIENCE}
        subprocess.run(["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db",
                        "--auth-root-authentication-method=normal"], **quiet)  # type: ignore[call-overload]  # fmt: skip
        small = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"]
        self._processes["mariadbd"] = self._popen(
            ["mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={folder}/my.sock", "--skip-networking",
             f"--pid-file={folder}/my.pid", "--user=root", *small], "mariadbd",
        )  # fmt: skip
        self._until("mariadb", "--no-defaults", "-S", f"{folder}/my.sock", "-e", "create database slurm_acct_db")
        settings = {
            "AuthType": "auth/munge", "AuthInfo": f"socket={self.folder}/munge/munge.sock", "DbdHost": "hub",
            "DbdAddr": f"{_NET}.254", "SlurmUser": "root", "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost", "StorageUser": "root", "StorageLoc": "slurm_acct_db",
            "LogFile": f"{self.folder}/log/slurmdbd.log", "PidFile": f"{self.folder}/state/slurmdbd.pid",
        }  # fmt: skip
        file = self.folder / "etc/slurmdbd.conf"
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
        file.chmod(0o600)
        self._spawn("slurmdbd", "hub", ["env", f"MYSQL_UNIX_PORT={folder}/my.sock", "slurmdbd", "-D"])
        self._until(str(self.bin / "sacctmgr"), "-i", "add", "cluster", "partool")

    def _until(self, *command: str) -> None:
        """Repeat a command until it succeeds."""
        end = time.monotonic() + _START_TIMEOUT_S
        while (done := subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S)).returncode:
            assert time.monotonic() < end, f"{command}: {done.stdout} {done.stderr}"
            time.sleep(0.2)

    def _spawn(self, name: str, namespace: str, command: list[str]) -> None:
        """Start a daemon as the first process of a machine of its own: all others there end with it."""
        enter = ["nsenter", f"--net=/run/netns/{self._prefix}-{namespace}", "--"]
        enter += ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        prepare = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        inside = ["bash", "-c", prepare, "_", namespace, str(self.folder / "etc/hosts"), *command]
        self._processes[name] = self._popen([*enter, *inside], name)

    def _popen(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        with (self.folder / f"log/{name}.out").open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # also where this process is killed
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()


def _drop_stale() -> None:
    """Remove the network namespaces and folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("partool-slurm-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        match = re.match(r"pt(\d+)-", line)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "netns", "del", line.split()[0]], capture_output=True, check=False)


if __name__ == "__main__":
    if reason := unavailable():
        sys.exit(reason)
    with Cluster() as cluster:
        print(f"Slurm with {len(cluster.names)} nodes; leave the shell to stop it.")
        subprocess.run([os.environ.get("SHELL", "bash")], env=cluster.environment, check=False)
