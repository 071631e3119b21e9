"""Kinds of objects in the Kubernetes API, and the kinds' URL paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Resource(NamedTuple):
    """Kind of objects in the API, with its URL path."""

    group_version: str
    """API group and version, such as ``batch/v1``, or only the version, such as ``v1``."""
    plural: str
    namespaced: bool = True

    @property
    def full_name(self) -> str:
        """Name of the kind in messages and in RBAC, such as ``jobs.batch`` or ``pods``."""
        group = self.group_version.rpartition("/")[0]
        return f"{self.plural}.{group}" if group else self.plural

    def path(self, namespace: str | None, name: str = "", sub: str = "") -> str:
        """Return the URL path of the collection, of the object ``name``, or of the object's subresource ``sub``."""
        root = "/apis" if "/" in self.group_version else "/api"
        within = f"/namespaces/{namespace}" if namespace is not None and self.namespaced else ""
        return f"{root}/{self.group_version}{within}/{self.plural}" + "".join(
            f"/{part}" for part in (name, sub) if part
        )


RESOURCES = {
    ("v1", "ConfigMap"): Resource("v1", "configmaps"),
    ("v1", "Service"): Resource("v1", "services"),
    ("v1", "Secret"): Resource("v1", "secrets"),
    ("networking.k8s.io/v1", "NetworkPolicy"): Resource("networking.k8s.io/v1", "networkpolicies"),
    ("batch/v1", "Job"): Resource("batch/v1", "jobs"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): Resource("jobset.x-k8s.io/v1alpha2", "jobsets"),
    ("kubeflow.org/v1", "PyTorchJob"): Resource("kubeflow.org/v1", "pytorchjobs"),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): Resource("trainer.kubeflow.org/v1alpha1", "trainjobs"),
    ("batch.volcano.sh/v1alpha1", "Job"): Resource("batch.volcano.sh/v1alpha1", "jobs"),
}
"""(apiVersion, kind) → resource, for every kind of object that partool creates."""
PODS = Resource("v1", "pods")
EVENTS = Resource("v1", "events")
CONFIG_MAPS = RESOURCES["v1", "ConfigMap"]
SECRETS = RESOURCES["v1", "Secret"]


def resource_of(document: Mapping[str, Any]) -> Resource:
    """Return the resource of a rendered document; raises KeyError for a kind that is never rendered."""
    return RESOURCES[document["apiVersion"], document["kind"]]
