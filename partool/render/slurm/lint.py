"""Lint rules for mistakes in batch scripts, partool's or the user's, that Slurm accepts.

Sources: sbatch(1) and srun(1) of Slurm 22.05 (https://slurm.schedmd.com/sbatch.html) and trials with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from partool.diagnostics.record import Diagnostic, Severity, Span
from partool.render.slurm.script import Command, Option, Script, options_of, parse, words_of

LintRule = Callable[[Script], Iterator[Diagnostic]]

_LAUNCHER = re.compile(
    r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b|\bpartool_runtime\.agent\b|\baccelerate\s+launch\b"
)
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.run\b")
_SRUN = re.compile(r"(?<![\w.-])srun\b(?!=)")
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(\w+)\+?=((?:[^\s\"'(]|\"[^\"]*\"|'[^']*'|\([^)]*\))*)\s*$")
_NAME = re.compile(r"\$(?:\{(\w+)(?:\[@\])?\}|(\w+))")
_PER_TASK = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID))\b")
_GPU_COUNTS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def lint(text: str, file: str = "job.sbatch") -> list[Diagnostic]:
    """Return the findings about a batch script, in the order of its lines; ``file`` is the name that findings show."""
    script = parse(text)
    findings = [finding for rule in RULES for finding in rule(script)]
    findings.sort(key=lambda finding: (finding.span.line if finding.span else 0, finding.code))
    return [_placed(finding, script, file) for finding in findings]


def _placed(finding: Diagnostic, script: Script, file: str) -> Diagnostic:
    line = finding.span.line if finding.span else 1
    width = len(script.lines[line - 1]) + 1
    span = Span(file, line, 1, line, max(width, 2))
    return Diagnostic(finding.code, finding.message, finding.severity, span=span, help=finding.help)


def _at(line: int, code: str, message: str, help: str, severity: Severity = "error") -> Diagnostic:
    return Diagnostic(code, message, severity, span=Span("", line, 1, line, 2), help=help)


def _is_gpu(option: Option) -> bool:
    return option.name in _GPU_COUNTS or (option.name.startswith(("gres", "tres-per")) and "gpu" in option.value)


def _number(text: str | None) -> int | None:
    match = re.search(r"(?:^|:)(\d+)$", text or "")
    return int(match[1]) if match else None


def _launchers(script: Script) -> list[Command]:
    """Return the commands that start ranks; variables that hold parts of a command are replaced by their values."""
    parts: dict[str, str] = {}
    launchers: list[Command] = []
    for command in script.commands:
        text = _NAME.sub(lambda match: parts.get(match[1] or match[2], match[0]), command.text)
        assignment = _ASSIGNMENT.match(text)
        if assignment:
            parts[assignment[1]] = assignment[2].strip("\"'() ")
        elif _LAUNCHER.search(text):
            launchers.append(Command(command.line, text, command.expanded))
    return launchers


def _step_options(command: Command) -> list[Option]:
    """Return the options of the srun in a command."""
    match = _SRUN.search(command.text)
    if match is None:
        return []
    return options_of(words_of(command.text[match.end() :].lstrip("\"'")), command.line)


def gpu_styles(script: Script) -> Iterator[Diagnostic]:
    """Find scripts that request devices in two ways: Slurm accepts this, but the result depends on its version."""
    asked = [option for option in script.options if _is_gpu(option)]
    names = {option.name for option in asked}
    if len(names) < 2 or (names == {"gpus", "gpus-per-task"}):
        return
    total, per_node = _number(script.value("gpus")), _number(script.value("gpus-per-node"))
    if names == {"gpus", "gpus-per-node"} and total and per_node and total == per_node * script.most_nodes:
        return
    shown = " and ".join(f"--{option.name}={option.value}" for option in asked)
    yield _at(asked[-1].line, "PT541", f"{shown} ask for devices in two ways", "keep one, best --gpus-per-node")


def gpus_per_task(script: Script) -> Iterator[Diagnostic]:
    """Find --gpus-per-task without a number of tasks, which sbatch refuses."""
    given = script.find("gpus-per-task")
    if given and not script.find("ntasks", "gpus"):
        message = "--gpus-per-task needs --ntasks or --gpus: sbatch refuses it alone"
        yield _at(given[0].line, "PT541", message, "use --gpus-per-node")


def hidden_gpus(script: Script) -> Iterator[Diagnostic]:
    """Find bindings of devices to tasks: they hide devices from the ranks that a single task starts."""
    for command in _launchers(script):
        for option in [*script.options, *_step_options(command)]:
            if option.name in ("gpus-per-task", "gpu-bind"):
                message = f"--{option.name} leaves a task its own devices only, and one task starts all ranks of a node"
                yield _at(option.line, "PT541", message, "use --gpus-per-node, and no binding of the task")


def memory_styles(script: Script) -> Iterator[Diagnostic]:
    """Find memory options that exclude each other."""
    given = {option.name: option for option in script.find("mem", "mem-per-cpu", "mem-per-gpu")}
    if len(given) > 1:
        shown = " and ".join(f"--{name}" for name in given)
        line = max(option.line for option in given.values())
        yield _at(line, "PT542", f"{shown} exclude each other", "keep one; --mem=0 is all of a node's")


def late_header(script: Script) -> Iterator[Diagnostic]:
    """Find options after the first command, or not at the beginning of a line: Slurm reads them as comments."""
    for number, line in enumerate(script.lines, 1):
        if number > script.header_end and line.startswith("#SBATCH") and number not in script.inner:
            message = (
                f"{line.strip()!r} stands after the first command (line {script.header_end + 1}): Slurm ignores it"
            )
            yield _at(number, "PT543", message, "move it to the top")
        elif number <= script.header_end and re.match(r"\s+#SBATCH|#\s+SBATCH\b|#sbatch\b", line):
            message = f"{line.strip()!r} is a comment to Slurm: it reads lines that begin with #SBATCH"
            yield _at(number, "PT543", message, "write #SBATCH at the beginning of the line", "warning")


def header_variables(script: Script) -> Iterator[Diagnostic]:
    """Find variables in the header, where neither the shell nor Slurm expands them."""
    for number, line in enumerate(script.lines[: script.header_end], 1):
        if line.startswith("#SBATCH") and re.search(r"\$[A-Za-z_{(]|`", line):
            message = f"{line.strip()!r}: the shell does not expand variables in a comment, and neither does Slurm"
            yield _at(number, "PT543", message, "write the value, or give it to sbatch on its command line")


def given_twice(script: Script) -> Iterator[Diagnostic]:
    """Find options that a script sets twice: Slurm uses the last value."""
    seen: dict[str, Option] = {}
    for option in script.options:
        if option.name in seen:
            message = f"--{option.name} is given on line {seen[option.name].line} already; the last one counts"
            yield _at(option.line, "PT543", message, "keep one", "warning")
        seen[option.name] = option


def pyxis_header(script: Script) -> Iterator[Diagnostic]:
    """Find container options in the header, which move the batch script itself into the container (pyxis issue 107)."""
    for option in script.options:
        if option.name.startswith(("container-", "no-container-")):
            message = (
                f"--{option.name} in the header starts the batch script itself in the container: no srun from there"
            )
            yield _at(option.line, "PT543", message, "give it to srun")


def line_ends(script: Script) -> Iterator[Diagnostic]:
    """Find DOS line ends, which sbatch refuses."""
    if script.crlf:
        yield _at(script.crlf, "PT544", "line ends are CR LF, which sbatch refuses", "save it with LF (dos2unix)")


def shebang(script: Script) -> Iterator[Diagnostic]:
    """Find a script that does not name its interpreter, which sbatch refuses."""
    if not script.lines[0].startswith("#!"):
        yield _at(1, "PT544", "the first line names no interpreter, and sbatch refuses that", "begin with #!/bin/bash")


def fewer_nodes(script: Script) -> Iterator[Diagnostic]:
    """Find jobs with fewer tasks than nodes: Slurm silently reduces the number of nodes to the number of tasks."""
    tasks = _number(script.value("ntasks"))
    if tasks is not None and tasks < script.most_nodes:
        line = script.find("ntasks")[-1].line
        message = f"--ntasks={tasks} with --nodes={script.value('nodes')}: the job gets {tasks} node(s) in silence"
        yield _at(line, "PT545", message, "use --ntasks-per-node=1")
    if "-" in (script.value("nodes") or "") and script.find("ntasks-per-node"):
        line = script.find("ntasks-per-node")[-1].line
        message = f"--ntasks-per-node with --nodes={script.value('nodes')}: the job gets the smaller number of nodes"
        yield _at(line, "PT545", message, "give --ntasks-per-node to srun")


def one_launcher(script: Script) -> Iterator[Diagnostic]:
    """Find scripts that start several launchers on a node: one launcher already starts all ranks of the node."""
    for command in _launchers(script):
        options = [*script.find("ntasks-per-node"), *_step_options(command)]
        tasks = [option for option in options if option.name == "ntasks-per-node"]
        per_node = _number(tasks[-1].value) if tasks else None
        if per_node is None or per_node < 2 or not _SRUN.search(command.text):
            continue
        if re.search(r"--nproc[-_]per[-_]node[= ]1\b", command.text):
            continue
        message = f"--ntasks-per-node={per_node}: srun starts the launcher {per_node} times on each node"
        yield _at(tasks[-1].line, "PT545", message, "use --ntasks-per-node=1; the launcher starts the ranks")


def no_srun(script: Script) -> Iterator[Diagnostic]:
    """Find launchers that the batch script starts without srun, so that they run on the first node only."""
    for command in _launchers(script):
        wraps = re.search(r"\b(mpirun|mpiexec|pdsh|ssh|clush)\b", command.text)
        if script.most_nodes > 1 and not _SRUN.search(command.text) and not wraps:
            message = "the launcher runs on the first node only: the batch script is not started on the others"
            yield _at(command.line, "PT545", message, "put srun before it")


def signal_usr1(script: Script) -> Iterator[Diagnostic]:
    """Find scripts whose warning signal is USR1: NCCL may catch it; torchrun dies of it and leaves its ranks behind."""
    for option in script.find("signal"):
        if re.search(r"(^|:)(SIG)?(USR1|10)(@|$)", option.value):
            message = f"--signal={option.value}: NCCL may catch USR1, and torchrun dies of it, leaving its ranks behind"
            yield _at(option.line, "PT546", message, "use USR2, as in --signal=B:USR2@300", "warning")


def traps(script: Script) -> Iterator[Diagnostic]:
    """Find traps that abort the shell, or that kill processes instead of warning them."""
    waits_for_srun = any(
        _SRUN.search(command.text) and re.search(r"&\s*$", command.text) for command in script.commands
    )
    for command in script.commands:
        if not re.match(r"\s*trap\s", command.text):
            continue
        if re.search(r"\$\((?!\()|`", command.text):
            message = "a command substitution in a trap aborts bash 5.2 where two signals come together"
            yield _at(command.line, "PT546", message, "compute the value before, and use the variable")
        if waits_for_srun and re.search(r"\bkill\s+(-s\s*)?-?(SIG)?(TERM|15)\b|\bkill\s+[\\\"$%]", command.text):
            message = "srun kills its tasks on TERM, before they have written a checkpoint"
            yield _at(command.line, "PT546", message, "send srun USR2, which it passes on", "warning")


def rendezvous(script: Script) -> Iterator[Diagnostic]:
    """Find commands that make each node train alone, or wait for a peer at a wrong address."""
    for command in script.commands:
        if re.search(r"\|\|\s*echo\s+[\"']?(localhost|127\.0\.0\.1)", command.text):
            message = "where the command before it fails, every node connects to its own localhost and trains alone"
            yield _at(command.line, "PT547", message, "end the job instead: || exit 78")
        if re.search(r"\bhostname\s+(--ip-addresse?s?|--all-ip-addresses|-[iI])\b", command.text):
            message = "hostname may print several addresses, and those of networks that others cannot reach"
            help = 'use the name: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1'
            yield _at(command.line, "PT547", message, help)
        if "SLURM_LAUNCH_NODE_IPADDR" in command.expanded and script.most_nodes > 1:
            message = "SLURM_LAUNCH_NODE_IPADDR may be the host that submitted the job"
            yield _at(command.line, "PT547", message, 'use scontrol show hostnames "$SLURM_JOB_NODELIST"')


def early_rank(script: Script) -> Iterator[Diagnostic]:
    """Find variables such as a task's rank that the batch script's shell expands: all tasks get the shell's values."""
    if script.most_nodes < 2:
        return
    for command in script.commands:
        for match in _PER_TASK.finditer(command.expanded):
            line = command.line + command.text[: match.start()].count("\n")
            message = f"${match[1]} is expanded on the first node, before srun: every node acts as number 0"
            yield _at(line, "PT547", message, "expand it in the task: srun bash -c '...', in single quotes")


def alone(script: Script) -> Iterator[Diagnostic]:
    """Find torchrun without --nnodes, or with --standalone, in jobs of several nodes: each node would train alone."""
    for command in _launchers(script):
        if script.most_nodes < 2 or not _TORCHRUN.search(command.text):
            continue
        if "--standalone" in command.text or not re.search(r"--nnodes\b", command.text):
            message = (
                f"torchrun without --nnodes, or with --standalone, trains on each of {script.most_nodes} nodes alone"
            )
            yield _at(command.line, "PT547", message, 'add --nnodes="$SLURM_JOB_NUM_NODES" and an endpoint')


def step_cores(script: Script) -> Iterator[Diagnostic]:
    """Find srun steps that rely on the job's --cpus-per-task: since Slurm 22.05, srun does not inherit this option."""
    if not script.find("cpus-per-task") or any("SRUN_CPUS_PER_TASK" in command.text for command in script.commands):
        return
    for command in _launchers(script):
        names = {option.name for option in _step_options(command)}
        if _SRUN.search(command.text) and "cpus-per-task" not in names:
            message = "since Slurm 22.05 a step gets one core per task unless it asks for more"
            help = 'add --cpus-per-task="$SLURM_CPUS_PER_TASK" to srun'
            yield _at(command.line, "PT548", message, help, "warning")


RULES: tuple[LintRule, ...] = (
    gpu_styles, gpus_per_task, hidden_gpus, memory_styles, late_header, header_variables, given_twice, pyxis_header,
    line_ends, shebang, fewer_nodes, one_launcher, no_srun, signal_usr1, traps, rendezvous, early_rank, alone,
    step_cores,
)  # fmt: skip
"""All lint rules."""
