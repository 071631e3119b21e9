"""Rules about environment variables in the ``launch`` section: secrets, contradictions, and partool's own variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from partool.diagnostics.record import Diagnostic
from partool.diagnostics.secrets import in_variable
from partool.spec.launch import LaunchSpec
from partool.strategies.targets import TARGETS

_Place = tuple[str | int, ...]
_OWNED_PREFIXES = ("PARTOOL_", "TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PET_")
_OWNED = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
_ELSEWHERE = "launch.secrets gives variables whose values stay in a file or a Kubernetes Secret; take it out of here"
_BEARER_ADDRESS = re.compile(
    r"https?://(hooks\.slack\.com/|([\w-]+\.)?discord(app)?\.com/api/webhooks/|[\w.-]+\.webhook\.office\.com/"
    r"|[\w.-]+\.logic\.azure\.com[:/]|chat\.googleapis\.com/)",
    re.IGNORECASE,
)
"""Webhooks that ask for nothing but their address."""
_MASKS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def owned(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield an error for each variable in the section that partool itself sets for every rank."""
    for section in ("env", "secrets"):
        for name in getattr(launch, section):
            if name in _OWNED or name.startswith(_OWNED_PREFIXES):
                message = f"{name} is set by partool for every rank"
                help = "drop it; ranks are numbered from hardware.nodes and hardware.per_node"
                yield Diagnostic("PT222", message, path=("launch", section, name), help=help)


def secret_values(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield an error for each secret value in the section; messages do not repeat the value."""
    for finding in secrets_in(launch, ("launch",)):
        if finding.path[1] == "env" and len(finding.path) > 2:
            yield replace(finding, help=_reference(launch, str(finding.path[2])))
        else:
            yield finding


def secrets_in(value: object, path: _Place) -> Iterator[Diagnostic]:
    """Yield a finding for each key, value or list item within ``value`` that looks like a secret."""
    for place, name, text in _texts(value, path):
        if what := in_variable(name, text):
            where = f"`{'.'.join(map(str, place))}`" if place[:2] != ("launch", "env") else name
            message = f"{where} has {what}; written here, it would end up in plans, manifests and the run's folder"
            yield Diagnostic("PT520", message, path=place, help=_ELSEWHERE)


def _texts(value: object, path: _Place, name: str = "") -> Iterator[tuple[_Place, str, str]]:
    """Yield (path, name, text) of every text within ``value`` that the user wrote.

    ``name`` is the key of the text if the user chose this key, else empty.
    """
    if isinstance(value, str):
        yield path, name, value
    elif isinstance(value, BaseModel):
        for field in value.model_fields_set:
            yield from _texts(getattr(value, field), (*path, field))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key), "", str(key)
            yield from _texts(inner, (*path, key), str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index), name)


def _reference(launch: LaunchSpec, name: str) -> str:
    if not TARGETS[launch.target].sees_files:
        return f"launch: {{secrets: {{{name}: {{secret: NAME, key: KEY}}}}}} takes it from a Kubernetes Secret"
    return f"launch: {{secrets: {{{name}: {{file: /path/on/the/nodes}}}}}} reads it as the ranks start"


def secret_references(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield an error for each secret whose source (file or Kubernetes Secret) the target cannot read."""
    for name, secret in launch.secrets.items():
        path = ("launch", "secrets", name)
        in_cluster = secret.secret is not None or secret.key is not None
        if (secret.file is None) != in_cluster:
            what = "both a file and a Kubernetes Secret" if in_cluster else "neither a file nor a Kubernetes Secret"
            yield Diagnostic("PT521", f"{name} names {what}", path=path, help=_reference(launch, name))
        elif not TARGETS[launch.target].sees_files and secret.file is not None:
            message = f"{name} is read from a file, but a pod sees no files of its node"
            yield Diagnostic("PT521", message, path=(*path, "file"), help=_reference(launch, name))
        elif TARGETS[launch.target].sees_files and in_cluster:
            message = f"{name} is read from a Kubernetes Secret, which the target {launch.target} does not have"
            yield Diagnostic("PT521", message, path=path, help=_reference(launch, name))
        elif in_cluster and (secret.secret is None or secret.key is None):
            missing = "secret" if secret.secret is None else "key"
            yield Diagnostic("PT521", f"{name} lacks `{missing}`", path=path, help=_reference(launch, name))


def notified(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield an error for a notification with no receiver or several, and for an address that is itself a key."""
    notify = launch.notify
    if notify is None:
        return
    receivers = [name for name in ("command", "webhook", "webhook_env") if getattr(notify, name) is not None]
    if len(receivers) != 1:
        message = f"notify names {' and '.join(receivers)}" if receivers else "notify names nobody to tell"
        help = "write one of command: [PROGRAM, ...], webhook: https://..., webhook_env: VARIABLE"
        yield Diagnostic("PT249", message, path=("launch", "notify"), help=help)
    if notify.webhook is not None and _BEARER_ADDRESS.match(notify.webhook):
        message = "the path of this webhook is its key; written here, it would end up in plans and the run's folder"
        help = "put it into an environment variable, and write webhook_env: VARIABLE"
        yield Diagnostic("PT520", message, path=("launch", "notify", "webhook"), help=help)


def contradictions(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield errors for a variable that is set twice, and for both device masks of ROCm in one section."""
    for name in launch.env:
        if name in launch.secrets:
            message = f"{name} is set in `launch.env` and in `launch.secrets`"
            yield Diagnostic("PT522", message, path=("launch", "env", name), help="keep one of the two")
    if all(name in launch.env for name in _MASKS):
        message = "HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES leaves: with both, devices are missing"
        path = ("launch", "env", _MASKS[1])
        yield Diagnostic("PT522", message, path=path, help="keep HIP_VISIBLE_DEVICES, or neither")


def doubtful(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield warnings about variables that users rarely set on purpose."""
    name = "HSA_OVERRIDE_GFX_VERSION"
    if name in launch.env:
        message = f"{name} makes ROCm run kernels of another device, which fail or compute wrongly on Instinct"
        help = "drop it; it is for consumer cards that ROCm does not list"
        yield Diagnostic("PT522", message, severity="warning", path=("launch", "env", name), help=help)
