"""Files with which another training system trains a plan: its configuration, and a script that each node runs."""

from __future__ import annotations

import json

from partool.engines.write import terms_of
from partool.engines.written import EngineTerm, nested
from partool.plan.types import Plan
from partool.render.job import EngineProgram
from partool.render.shell import quote, template, variables
from partool.strategies.engines import ENGINES

SCRIPT = "train.sh"
PORT = 29500
"""Port on the first node to which the other nodes connect, unless MASTER_PORT says another."""
_CONFIGURATION = "ds_config.json"
_SECTIONS = (
    ("MODEL", ("model",)),
    ("PARALLEL", ("parallel",)),
    ("TRAINING", ("training", "optimizer")),
)
"""Arrays of the script, and the sections of the spec whose arguments they hold."""


def program(plan: Plan) -> EngineProgram:
    """Return the files for a plan whose terms have no errors (:func:`partool.engines.write.terms_of`)."""
    terms = terms_of(plan)
    configured = plan.engine == "deepspeed"
    arguments = [] if configured else [(name, _lines(terms.terms, of)) for name, of in _SECTIONS]
    text = template(f"{plan.engine}.sh.jinja").render(
        plan=plan,
        devices=plan.devices,
        title=ENGINES[plan.engine].title,
        arguments=arguments,
        configuration=_CONFIGURATION,
        port=PORT,
        variables=variables(plan),
        untold=terms.untold,
    )
    files = {SCRIPT: text}
    if configured:
        values = {term.name: term.value for term in terms.terms}
        files[_CONFIGURATION] = json.dumps(nested(values), indent=2) + "\n"
    return EngineProgram(SCRIPT, files)


def _lines(terms: list[EngineTerm], sections: tuple[str, ...]) -> list[str]:
    """Return the arguments of some sections, one per line, as words of a shell."""
    return [_argument(term) for term in terms if term.path.split(".")[0] in sections]


def _argument(term: EngineTerm) -> str:
    if term.value is True:
        return f"--{term.name}"
    values = term.value if isinstance(term.value, (list, tuple)) else [term.value]
    return " ".join([f"--{term.name}", *(quote(value) for value in values)])
