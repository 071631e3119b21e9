"""Checks whether a Kubernetes cluster accepts jobs from this machine, in particular the job of a plan."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

from partool.launch.k8s import doctor_plan as doctor_k8s_plan
from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import CONFIG_MAPS, EVENTS, PODS, RESOURCES, SECRETS, Resource
from partool.launch.k8s.status import KINDS
from partool.launch.k8s.validate import store_crds, validate_offline
from partool.launch.k8s.validate.crd_cache import definitions
from partool.launch.k8s.waiting import kueue_version
from partool.launch.store import RunStore
from partool.launch.submit import job_of
from partool.launch.target import Check, DoctorFiles, LaunchError
from partool.plan.types import Plan
from partool.render.render import render

_NAMESPACES = Resource("v1", "namespaces", namespaced=False)
_CRDS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
_SERVICES = RESOURCES["v1", "Service"]
_POLICIES = RESOURCES["networking.k8s.io/v1", "NetworkPolicy"]
_TRAIN_SHAPES = ("runtimePatches", "podTemplateOverrides", "podSpecOverrides")
"""Names of the field with which a TrainJob (v1alpha1) changes its pods: in Trainer 2.2 or later, in 2.1, in 2.0."""
_EARLIEST = (1, 27)
"""Oldest minor version of Kubernetes with strict field validation on by default (KEP-2885, stable in 1.27)."""


def checks(plan: Plan | None, files: DoctorFiles) -> Iterator[Check]:
    """Yield checks of the cluster and, if ``plan`` is given, checks whether the cluster accepts the plan's job.

    The cluster's definitions of job types are stored for later validation offline. If ``files.crds``
    names a folder, the definitions are read from there and nothing is stored. A plan's manifest is validated against
    the definitions even if no cluster answers. Raises nothing: a failed request gives a failed or skipped check.
    """
    crds = files.crds
    version = yield from _cluster(plan, crds)
    if plan is not None:
        yield from _guarded("validation", lambda: _validation(plan, crds, version))


def _cluster(plan: Plan | None, crds: Path | None) -> Generator[Check, None, str | None]:
    """Yield checks of the cluster; returns the cluster's version, or None if the cluster does not answer."""
    spec = plan.launch.k8s if plan else None
    try:
        client = Client(spec.context if spec else None, spec.namespace if spec else None)
    except LaunchError as error:
        name = "client" if error.code == "PT574" else "kubeconfig"
        yield Check(name, "failed", error.message, error.help)
        return None
    yield Check("client", "ok", f"kubernetes {importlib.metadata.version('kubernetes')}")
    yield Check("kubeconfig", "ok", f"context {client.context or '(of this pod)'}, namespace {client.namespace}")
    try:
        version = client.version()
        yield _server(client, version)
    except LaunchError as error:
        yield Check("server", "failed", error.message, error.help)
        return None
    yield from _guarded("namespace", lambda: _namespace(client))
    yield from _guarded("permissions", lambda: _permissions(client, plan))
    yield from _guarded("job types", lambda: _types(client, plan, crds))
    if plan is not None:
        yield from _guarded("plan", lambda: doctor_k8s_plan.checks(client, plan))
    return version


def _validation(plan: Plan, crds: Path | None, version: str | None) -> Iterator[Check]:
    """Validate the plan's manifest offline for Kubernetes ``version``, and yield the results."""
    run = RunStore().next_submitted(plan.name, plan.hash)
    text = render("k8s", job_of(plan, run, (), {}, None)).text
    levels = validate_offline(text, crds=crds, context=plan.launch.k8s.context, core_version=version)
    for level in levels:
        errors = [finding for finding in level.findings if finding.severity == "error"]
        said = f"{errors[0].code}: {errors[0].message}" if errors else level.note
        more = f"; and {len(errors) - 1} more: partool launch --dry-run" if len(errors) > 1 else ""
        verdict: Literal["ok", "failed", "skipped"] = "failed" if errors else "ok" if level.ran else "skipped"
        yield Check(f"validation: {level.name}", verdict, said + more, errors[0].help if errors else "")


def _guarded(name: str, look: Any) -> Iterator[Check]:
    """Yield the checks that ``look`` yields, and a failed check if the cluster refuses a request."""
    try:
        yield from look()
    except LaunchError as error:
        yield Check(name, "failed", error.message, error.help)
    except OSError as error:
        yield Check(name, "failed", str(error), "")


def _server(client: Client, version: str) -> Check:
    text = f"Kubernetes {version} at {client.host}"
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if number < _EARLIEST:
        wanted = ".".join(map(str, _EARLIEST))
        return Check("server", "warning", text, f"older than {wanted}: misspelt fields may be dropped in silence")
    return Check("server", "ok", text)


def _namespace(client: Client) -> Iterator[Check]:
    name = client.namespace
    try:
        if client.exists(_NAMESPACES, name):
            yield Check("namespace", "ok", name)
        else:
            help = "set launch.k8s.namespace, or: kubectl create namespace"
            yield Check("namespace", "failed", f"there is no namespace {name}", help)
    except ApiError as error:
        if error.status != 403:
            raise
        yield Check("namespace", "skipped", f"{name}; whether there is one may not be asked here")


def _permissions(client: Client, plan: Plan | None) -> Iterator[Check]:
    """Yield checks of the RBAC permissions to launch a run, to read its status and logs, and to cancel it."""
    kinds = [plan.launch.k8s.kind] if plan else ["jobset"]
    jobs = [RESOURCES[KINDS[kind]] for kind in kinds]
    wanted = [(verb, resource, "") for resource in jobs for verb in ("create", "get", "list", "delete")]
    policy = plan is not None and plan.launch.k8s.network_policy
    others = [CONFIG_MAPS, *([_SERVICES] if kinds == ["job"] else []), *([_POLICIES] if policy else [])]
    others += [SECRETS] if plan is None or plan.devices.nodes > 1 else []
    wanted += [(verb, resource, "") for resource in others for verb in ("create", "get", "patch", "delete")]
    wanted += [(verb, PODS, "") for verb in ("get", "list")] + [("get", PODS, "log")]
    useful = [("watch", PODS, ""), ("deletecollection", PODS, ""), ("list", EVENTS, "")]
    if plan is not None and plan.launch.k8s.queue is not None and (version := kueue_version(client)):
        useful.append(("list", Resource(version, "workloads"), ""))
    lacking = [_right(*each) for each in wanted if not client.may(*each)]
    missed = [_right(*each) for each in useful if not client.may(*each)]
    help = f"ask for a role in namespace {client.namespace} with these"
    if lacking:
        yield Check("permissions", "failed", f"you may not {', '.join(lacking + missed)}", help)
    elif missed:
        text = f"you may launch, but not {', '.join(missed)}: fewer reasons in status, no cancel --now"
        yield Check("permissions", "warning", text, help)
    else:
        yield Check("permissions", "ok", f"everything that {kinds[0]} runs take, in namespace {client.namespace}")


def _right(verb: str, resource: Resource, sub: str) -> str:
    return f"{verb} {resource.full_name}" + (f"/{sub}" if sub else "")


def _types(client: Client, plan: Plan | None, crds: Path | None) -> Iterator[Check]:
    """Yield checks of the job types that are installed on the cluster, of their versions and of their fields."""
    if crds is None:
        crds_by_name, origin = _installed(client), "installed"
        if crds_by_name:
            yield Check(
                "definitions", "ok", f"stored for validation: {store_crds(client.context, crds_by_name.values())}"
            )
    else:
        crds_by_name, origin = {}, f"in {crds}"
        yield from _folder(crds)
    wanted = plan.launch.k8s.kind if plan else None
    for kind, (api_version, name) in KINDS.items():
        if kind == "job":
            continue
        resource = RESOURCES[api_version, name]
        served = _served(client, resource)
        if served:
            yield Check(kind, "ok", f"{api_version} is installed")
        elif kind == wanted:
            help = "install what serves it, or use --set launch.k8s.kind=job"
            yield Check(kind, "failed", f"{resource.full_name} in {api_version} is not installed", help)
        else:
            yield Check(kind, "skipped", "not installed")
        if kind == "trainjob" and served and resource.full_name in crds_by_name:
            yield _train_shape(crds_by_name[resource.full_name], needed=wanted == "trainjob", origin=origin)
    version = kueue_version(client)
    yield Check("kueue", "ok", f"{version} is installed") if version else Check("kueue", "skipped", "not installed")


def _installed(client: Client) -> dict[str, Document]:
    """Return the cluster's definitions of job types by name; empty if the user may not read definitions."""
    crds_by_name = {}
    for kind, key in KINDS.items():
        if kind == "job":
            continue
        name = RESOURCES[key].full_name
        try:
            document = client.get(_CRDS, name)
        except ApiError as error:
            if error.status != 403:
                raise
            return {}
        if document is not None:
            document["metadata"].pop("managedFields", None)
            crds_by_name[name] = document
    return crds_by_name


def _served(client: Client, resource: Resource) -> bool:
    try:
        answer = client.read(f"/apis/{resource.group_version}")
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return any(each["name"] == resource.plural for each in answer.get("resources") or [])


def _folder(crds: Path) -> Iterator[Check]:
    try:
        names = sorted({f"{each.kind} {each.api_version}" for each in definitions(crds)})
    except ValueError as error:
        yield Check("definitions", "failed", str(error))
        return
    if names:
        yield Check("definitions", "ok", f"{crds} has {', '.join(names)}")
    else:
        yield Check("definitions", "failed", f"{crds} has no definitions of types", "kubectl get crd -o yaml > FILE")


def _train_shape(definition: Document, *, needed: bool, origin: str) -> Check:
    """Check that the cluster's TrainJobs have the fields that partool renders; v1alpha1 changed them twice."""
    schema = definition["spec"]["versions"][0].get("schema", {}).get("openAPIV3Schema", {})
    fields = schema.get("properties", {}).get("spec", {}).get("properties", {})
    shape = next((name for name in _TRAIN_SHAPES if name in fields), "none")
    if shape == _TRAIN_SHAPES[0]:
        return Check("trainjob shape", "ok", f"{shape} ({origin})")
    text = f"the TrainJob that is {origin} has {shape}; {_TRAIN_SHAPES[0]} (Kubeflow Trainer 2.2) is rendered"
    help = "update Kubeflow Trainer, or use --set launch.k8s.kind=jobset"
    return Check("trainjob shape", "failed" if needed else "warning", text, help)
