"""Files with which another training system trains a plan: its configuration, and a script that each node runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from partool.engines.accelerate_files import OF
from partool.engines.write import terms_of
from partool.engines.written import EngineTerm, nested
from partool.plan.types import Plan, Variable
from partool.planner import allocator
from partool.render.job import EngineProgram
from partool.render.shell import quote, template, variables
from partool.strategies.engines import ENGINES

SCRIPT = "train.sh"
_OWN_SCRIPT = ("accelerate", "deepspeed")
"""Engines that have no script that trains: the user has."""
PORT = 29500
"""Port on the first node to which the other nodes connect, unless MASTER_PORT says another."""


def program(plan: Plan) -> EngineProgram:
    """Return the files for a plan whose terms have no errors (:func:`partool.engines.write.terms_of`)."""
    terms = terms_of(plan)
    name, configuration, arguments = _WRITTEN[plan.engine](terms.terms)
    text = template(f"{plan.engine}.sh.jinja").render(
        plan=plan,
        devices=plan.devices,
        title=ENGINES[plan.engine].title,
        arguments=arguments,
        configuration=name,
        port=PORT,
        variables=_variables(plan),
        untold=terms.untold,
    )
    needs = ("SCRIPT",) if plan.engine in _OWN_SCRIPT else ()
    return EngineProgram(SCRIPT, {SCRIPT: text} | ({name: configuration} if name else {}), needs)


def _variables(plan: Plan) -> list[Variable]:
    """Return the variables of :func:`variables`; what torch's allocator is told has its older name, too."""
    by_name = {each.name: each for each in variables(plan)}
    if allocator.NAME in by_name and not by_name.keys() & allocator.OLDER:
        older = allocator.OLDER[0]
        origin = f"{allocator.NAME}, as torch before 2.9 calls it"
        by_name[older] = Variable(name=older, value=by_name[allocator.NAME].value, origin=origin)
    return list(by_name.values())


Arguments = list[tuple[str, list[str]]]
"""Arrays of a script, and in each the arguments that are its lines."""
_SECTIONS = (("MODEL", ("model",)), ("PARALLEL", ("parallel",)), ("TRAINING", ("training", "optimizer")))
"""Arrays of Megatron-LM's script, and the sections of the spec whose arguments they hold."""


def _megatron(terms: list[EngineTerm]) -> tuple[str, str, Arguments]:
    sections = [(name, [_argument(term) for term in terms if term.path.split(".")[0] in of]) for name, of in _SECTIONS]
    return "", "", sections


def _deepspeed(terms: list[EngineTerm]) -> tuple[str, str, Arguments]:
    values = nested({term.name: term.value for term in terms})
    return "ds_config.json", json.dumps(values, indent=2) + "\n", []


def _torchtitan(terms: list[EngineTerm]) -> tuple[str, str, Arguments]:
    sections: dict[str, dict[str, Any]] = nested({term.name: term.value for term in terms})
    return "job.toml", "\n".join(_section(name, values) for name, values in sections.items()), []


def _accelerate(terms: list[EngineTerm]) -> tuple[str, str, Arguments]:
    configuration = nested({term.name.removeprefix(OF): term.value for term in terms if term.name.startswith(OF)})
    rest = [_argument(term, word="true") for term in terms if not term.name.startswith(OF)]
    return "accelerate.yaml", yaml.safe_dump(configuration, sort_keys=False), [("ARGUMENTS", rest)]


_WRITTEN: Mapping[str, Callable[[list[EngineTerm]], tuple[str, str, Arguments]]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
}
"""Engine → function that returns the configuration's name and text, if it has one, and the script's arguments."""


def _section(name: str, values: Mapping[str, Any]) -> str:
    """Return a table of TOML; its values are texts, numbers, truth values and lists, which JSON writes alike."""
    return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def _argument(term: EngineTerm, word: str = "") -> str:
    """Return an argument as words of a shell; ``word`` stands for the value of a flag that is on."""
    if term.value is True:
        return f"--{term.name} {word}".rstrip()
    values = term.value if isinstance(term.value, (list, tuple)) else [term.value]
    return " ".join([f"--{term.name}", *(quote(value) for value in values)])
