"""Discovery answers of the tests' Kubernetes API server: version, kinds, parameters."""

from __future__ import annotations

import re
from typing import Any

from k8s_server import WITHOUT_NAMESPACE, Cluster, Document


def static(cluster: Cluster, path: str) -> tuple[Any, ...] | None:
    """Answer requests that concern no object: version, available kinds, access reviews."""
    kinds = cluster.kinds
    if path == "/version":
        minor = cluster.version.split(".")[1]
        return 200, {"major": "1", "minor": minor, "gitVersion": f"v{cluster.version}.0"}
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(_groups(kinds).values())}
    if match := re.fullmatch(r"/apis/([^/]+)", path):
        if match[1] not in _groups(kinds):
            return 404, b"404 page not found\n", "text/plain"
        return 200, {"kind": "APIGroup", "apiVersion": "v1", **_groups(kinds)[match[1]]}
    if match := re.fullmatch(r"/api/(v1)|/apis/([^/]+/[^/]+)", path):
        group_version = match[1] or match[2]
        if group_version not in kinds:
            return 404, b"404 page not found\n", "text/plain"
        return 200, _resources(group_version, kinds[group_version])
    if path == "/openapi/v3":
        paths = {root(gv).strip("/"): {"serverRelativeURL": f"/openapi/v3{root(gv)}"} for gv in kinds}
        return 200, {"paths": paths}
    if match := re.fullmatch(r"/openapi/v3/(?:api|apis)/(.+)", path):
        return 200, _openapi(match[1], kinds[match[1]])
    return None


def root(group_version: str) -> str:
    """Return the path below which a group's version is served."""
    return f"/{'apis' if '/' in group_version else 'api'}/{group_version}"


def _groups(kinds: dict[str, Any]) -> dict[str, Document]:
    groups: dict[str, Document] = {}
    for group_version in kinds:
        group, _, version = group_version.rpartition("/")
        if group:
            entry = {"groupVersion": group_version, "version": version}
            found = groups.setdefault(group, {"name": group, "versions": [], "preferredVersion": entry})
            found["versions"].append(entry)
    return groups


def _resources(group_version: str, kinds: dict[str, str]) -> Document:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    found = []
    for plural, kind in kinds.items():
        within = {"namespaced": plural not in WITHOUT_NAMESPACE, "kind": kind}
        found.append({"name": plural, "singularName": kind.lower(), "verbs": verbs, **within})
        if plural == "pods":
            found.append({"name": "pods/log", "singularName": "", "verbs": ["get"], **within})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": found}


def _openapi(group_version: str, kinds: dict[str, str]) -> Document:
    """Return the OpenAPI part that kubectl reads before a dry run: the server supports the dry-run parameters."""
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")]
    group, _, version = group_version.rpartition("/")
    paths = {}
    for plural, kind in kinds.items():
        kind_of = {"group": group, "version": version, "kind": kind}
        patch = {"parameters": parameters, "responses": {}, "x-kubernetes-group-version-kind": kind_of}
        paths[f"{root(group_version)}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "t", "version": "1"}, "paths": paths, "components": {"schemas": {}}}
