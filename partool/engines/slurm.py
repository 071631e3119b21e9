"""Reads the directives of Slurm in a batch script (https://slurm.schedmd.com/sbatch.html)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from partool.diagnostics.record import Span
from partool.engines.machines import Stated

_COUNTED = ("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres")
_SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus"}
_OPTION = re.compile(
    rf"(?<!\S)(?:--({'|'.join(_COUNTED)})(?:=|\s+)|(-[NnG])\s*)(?:gpu:)?(?:[A-Za-z][\w.-]*:)?([0-9]{{1,6}})(?![\w:-])"
)
"""A number of machines, tasks or devices; ranges such as 2-4 leave the number open."""
_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}


def _directives(text: str) -> dict[str, tuple[int, int]]:
    """Return number and line by the name of an option; of two, the later one counts, as for sbatch."""
    directives = {}
    for line, content in enumerate(text.splitlines(), 1):
        if content.startswith("#SBATCH"):
            for match in _OPTION.finditer(content.partition(" #")[0]):
                directives[match[1] or _SHORT[match[2]]] = (int(match[3]), line)
    return directives


def _divides(directives: Mapping[str, tuple[int, int]], name: str, nodes: int) -> bool:
    """Return whether a number of the whole job gives each node the same number, of several."""
    number = directives.get(name, (0, 0))[0]
    return number > nodes and number % nodes == 0


def variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a batch script, as far as its directives say them."""
    return {each: str(number) for name, (number, _) in _directives(text).items() for each in _VARIABLES.get(name, ())}


def machines(path: Path, text: str) -> dict[str, Stated]:
    """Return what a batch script asks Slurm for: nodes, and devices of a node, as far as its directives say them.

    Where there are several tasks on a node, each of them is a rank.
    """
    directives, stated = _directives(text), dict[str, Stated]()

    def state(field: str, name: str, number: int) -> None:
        line = directives[name][1]
        stated[field] = Stated(number, f"#SBATCH --{name}", Span(str(path), line, 1, line, 1))

    if "nodes" in directives:
        state("nodes", "nodes", directives["nodes"][0])
    nodes = directives.get("nodes", (0, 0))[0]
    tasks, _ = directives.get("ntasks-per-node", (0, 0))
    if tasks > 1:
        state("per_node", "ntasks-per-node", tasks)
    elif name := next((each for each in ("gpus-per-node", "gres") if each in directives), ""):
        state("per_node", name, directives[name][0])
    elif name := next((each for each in ("gpus", "ntasks") if nodes and _divides(directives, each, nodes)), ""):
        state("per_node", name, directives[name][0] // nodes)
    return stated
