"""Environment variables of the container, and the origin of each variable."""

from __future__ import annotations

from partool.plan.types import Plan, Variable
from partool.render.k8s.manifest import Fields
from partool.render.shell import variables
from partool.spec.targets.k8s.rules import POD_SCRATCH

_HOME = Variable(name="HOME", value=POD_SCRATCH, origin="partool: where a pod can write, whatever its user and image")
_USER = (
    Variable(name="USER", value="partool", origin="partool: torch names its caches by it"),
    Variable(name="LOGNAME", value="partool", origin="partool: torch names its caches by it"),
)


def literal(text: str) -> str:
    """Return ``text``, escaped so that a command or variable in a manifest gives the container the original text.

    In both places Kubernetes replaces ``$(NAME)``, reads ``$$`` as ``$``, and garbles a ``$`` before a non-ASCII letter
    (kubernetes/third_party/forked/golang/expansion). So every ``$`` is doubled.
    """
    return text.replace("$", "$$")


def environment(plan: Plan) -> list[Fields]:
    """Return the container's variables: first variables with literal values, then references to Secrets."""
    variables: list[Fields] = [{"name": each.name, "value": literal(each.value)} for each in _written(plan)]
    for name, secret in sorted(plan.launch.secrets.items()):
        reference = {"name": secret.secret, "key": secret.key}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return variables


def origins(plan: Plan) -> dict[str, str]:
    """Return the origin of each variable, by name."""
    sources = {each.name: each.origin for each in _written(plan)}
    for name, secret in sorted(plan.launch.secrets.items()):
        sources[name] = f"launch.secrets: Secret {secret.secret}, key {secret.key}"
    return sources


def _written(plan: Plan) -> list[Variable]:
    planned = variables(plan)
    set_already = {each.name for each in planned} | set(plan.launch.secrets)
    k8s = plan.launch.k8s
    more = (_HOME, *_USER) if k8s.user else () if k8s.writable_root else (_HOME,)  # the image has a home for root
    added = [each for each in more if each.name not in set_already]
    return added + [each for each in planned if each.name not in plan.launch.secrets]
