"""A folder in which rendered scripts are run, with fake srun and scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path, PurePosixPath

from partool.render.job import Rendered

SRUN = """\
#!/bin/bash
printf '%s\\0' "$@" > "$STAGE/srun-arguments"
while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=${NODE:-0} exec "$@"
"""
SCONTROL = """\
#!/bin/bash
echo "$*" >> "$STAGE/scontrol-calls"
case "$1 $2" in
  "show hostnames") [ -e "$STAGE/slow" ] && sleep 0.6; [ -e "$STAGE/no-hosts" ] && exit 1; printf 'first\\nsecond\\n' ;;
  "show job") echo "JobId=41000 JobState=$(cat "$STAGE/state" 2> /dev/null || echo RUNNING) Reason=None" ;;
  requeue*) [ ! -e "$STAGE/no-requeue" ] ;;
esac
"""
AGENT = """\
#!/bin/bash
trap 'printf x >> "$STAGE/told"' USR2
printf '%s\\0' "$@" > "$STAGE/agent-arguments"
env -0 > "$STAGE/agent-environment"
touch "$STAGE/started"
while [ -e "$STAGE/wait" ]; do sleep 0.02; done
[ ! -e "$STAGE/cancelled" ] || touch "$STAGE/run/cancel"
exit "$(cat "$STAGE/code" 2> /dev/null || echo 0)"
"""
CONTAINER = """\
#!/bin/bash
printf '%s\\0' "$@" > "$STAGE/container-arguments"
while [ "$1" != -P ]; do last=$1; shift; done
exec "$STAGE/bin/agent" "$last" "$@"
"""


class Stage:
    """Folder of one job; its files record the calls of the fake commands, and set their behaviour."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        (self.run / "logs").mkdir(parents=True)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in (
            ("srun", SRUN),
            ("scontrol", SCONTROL),
            ("agent", AGENT),
            ("python", AGENT),
            ("apptainer", CONTAINER),
        ):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)

    @property
    def run_dir(self) -> PurePosixPath:
        """Run folder of the rendered job."""
        return PurePosixPath(self.run)

    @property
    def python(self) -> str:
        """Stand-in for the nodes' Python interpreter."""
        return str(self.folder / "bin" / "agent")

    def put(self, rendered: Rendered) -> None:
        """Write the job's folder, as a launcher does."""
        for name, text in rendered.files.items():
            (self.run / name).parent.mkdir(exist_ok=True)
            (self.run / name).write_bytes(text.encode())

    def set(self, **files: str) -> None:
        """Set the behaviour of the fake commands; underscores in the files' names become dashes."""
        for name, text in files.items():
            (self.folder / name.replace("_", "-")).write_text(text)

    def start(self, script: str = "job.sbatch", *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start a script as slurmd does for a job of two nodes."""
        environment = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "STAGE": str(self.folder),
            "SLURM_JOB_ID": "41000",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_CPUS_PER_NODE": "16(x2)",
        }
        return subprocess.Popen(
            ["/bin/bash", str(self.run / script), *arguments],
            env=environment | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            start_new_session=True,
        )

    def play(self, script: str = "job.sbatch", *arguments: str, **variables: str) -> tuple[int, str]:
        """Run a script to its end; return its exit code and its output."""
        process = self.start(script, *arguments, **variables)
        try:
            output, errors = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output + errors

    def signalled(self, signals: list[signal.Signals]) -> tuple[int, str]:
        """Run the job, send the batch script signals while its step runs, then let the step end."""
        self.set(wait="")
        process = self.start()
        try:
            self.wait_for("started")
            for count, number in enumerate(signals, 1):
                process.send_signal(number)
                self.wait_for("told", count)
            (self.folder / "wait").unlink()
            output, errors = process.communicate(timeout=30)
        finally:
            (self.folder / "wait").unlink(missing_ok=True)
        return process.returncode, output + errors

    def wait_for(self, name: str, size: int = 0) -> None:
        """Wait until a file exists and has at least so many bytes."""
        end = time.monotonic() + 20
        while not (self.folder / name).exists() or (self.folder / name).stat().st_size < size:
            assert time.monotonic() < end, f"waited for {name}"
            time.sleep(0.01)

    def words(self, name: str) -> list[str]:
        """Return the arguments that a fake command was given."""
        return (self.folder / name).read_bytes().decode().split("\0")[:-1]

    def environment(self) -> dict[str, str]:
        """Return the environment that the agent was given."""
        entries = (self.folder / "agent-environment").read_bytes().split(b"\0")[:-1]
        return dict(os.fsdecode(entry).split("=", 1) for entry in entries)

    def calls(self, verb: str) -> list[str]:
        """Return the calls of scontrol that begin with the given words."""
        file = self.folder / "scontrol-calls"
        return [line for line in file.read_text().splitlines() if line.startswith(verb)] if file.exists() else []
