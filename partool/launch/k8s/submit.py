"""Creates all objects of a job on a cluster or, after a failure, none of them."""

from __future__ import annotations

import getpass
import hashlib
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import Resource, resource_of
from partool.launch.k8s.status import KINDS, progress
from partool.launch.store import Run
from partool.launch.target import LaunchError
from partool.render.k8s.objects import HASH_ANNOTATION, RUN_LABEL

_POLL_S = 0.5
_SPARE_S = 60.0
"""Seconds that a deleted job may still exist after the grace period of its pods."""


def manager_of(run: Run) -> str:
    """Return the name under which a launcher of this run's folder writes objects to a cluster.

    The API stores the name in each object (``managedFields``). So a submission whose answer was lost recognises the
    object that it created, and does not mistake another user's job with the same plan for this object.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        user = ""
    return "partool-" + hashlib.sha256(f"{user}@{socket.gethostname()}:{run.path}".encode()).hexdigest()[:16]


def remove(client: Client, resource: Resource, name: str, uid: str, stopping_s: float) -> None:
    """Delete an object and its dependents, and wait until all are gone; ``stopping_s`` is the pods' grace period.

    Raises LaunchError PT575 if the object stays.
    """
    if not client.delete(resource, name, uid=uid):
        return
    end = time.monotonic() + stopping_s + _SPARE_S
    while (existing := client.get(resource, name)) is not None and existing["metadata"]["uid"] == uid:
        if time.monotonic() > end:
            raise LaunchError("PT575", f"{name} is still stopping on the cluster", "try again later")
        time.sleep(_POLL_S)


class Transaction:
    """One attempt to create the documents of a manifest on a cluster."""

    def __init__(self, client: Client, run: Run, documents: Sequence[Document], kind: str) -> None:
        self._client = client
        self._run = run
        self._documents = documents
        self._kind = kind
        self._main = next(each for each in documents if (each["apiVersion"], each["kind"]) == KINDS[kind])
        self._manager = manager_of(run)
        self._tried: list[Document] = []

    def submit(self, stopping_s: float) -> Document:
        """Create all objects and return the job as stored; if one fails, deletes all of them and raises LaunchError.

        ``stopping_s`` is the grace period of the pods of an earlier start of the run.
        """
        existing = self._client.get(resource_of(self._main), self._name(self._main))
        if existing is not None and self._is_done_already(existing, stopping_s):
            self._give_all(existing)  # the job's creator may have been interrupted before this step
            return existing
        try:
            created = {id(document): self._create(document) for document in self._documents}
            job = created[id(self._main)]
            self._give_all(job)
        except BaseException as error:
            unchecked = self._take_back()
            if unchecked and isinstance(error, LaunchError):
                error.help = "; ".join(filter(None, [error.help, f"this may be left behind: {', '.join(unchecked)}"]))
            raise
        return job

    def _is_done_already(self, existing: Document, stopping_s: float) -> bool:
        """Return True if ``existing`` is the job to create and is active; if the job has ended, delete it."""
        if not self._ours(existing):
            raise self._taken(existing)
        ended = progress(self._kind, existing).phase in ("done", "failed")
        if not ended and not existing["metadata"].get("deletionTimestamp"):
            if self._same(existing, self._main):
                return True
            raise self._taken(existing)
        remove(self._client, resource_of(existing), self._name(existing), existing["metadata"]["uid"], stopping_s)
        return False

    def _create(self, document: Document) -> Document:
        self._tried.append(document)
        try:
            return self._client.create(document, manager=self._manager)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            existing = self._client.get(resource_of(document), self._name(document))
            if existing is not None and not self._ours(existing):
                raise self._taken(existing) from None
            if existing is not None and error.retried and self._same(existing, document):
                return existing  # the answer to the first try was lost
            if document is self._main and existing is not None:
                raise self._taken(existing) from None
        # the object is left over from an earlier start of this run, whose objects may still be being deleted
        if existing is not None:
            remove(self._client, resource_of(document), self._name(document), existing["metadata"]["uid"], 0.0)
        return self._client.create(document, manager=self._manager)

    def _give_all(self, job: Document) -> None:
        for document in self._documents:
            if document is not self._main:
                self._give_to(document, job)

    def _give_to(self, document: Document, job: Document) -> None:
        """Make ``job`` the owner of the object ``document``, so that the object is deleted together with the job."""
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": self._name(job)}
        owners = [owner | {"uid": job["metadata"]["uid"], "controller": False, "blockOwnerDeletion": False}]
        change = {"metadata": {"ownerReferences": owners}}
        namespace = document["metadata"].get("namespace")
        self._client.patch(resource_of(document), self._name(document), change, namespace=namespace)

    def _take_back(self) -> list[str]:
        """Delete the objects that this submission may have created; returns the objects that could not be checked."""
        unchecked = []
        for document in reversed(self._tried):
            resource, name = resource_of(document), self._name(document)
            try:
                existing = self._client.get(resource, name)
                if existing is not None and self._ours(existing):
                    self._client.delete(resource, name, uid=existing["metadata"]["uid"])
            except LaunchError:
                unchecked.append(f"{resource.full_name} {name}")
        return unchecked

    def _ours(self, existing: Document) -> bool:
        """Return True if the object ``existing`` was created from this run's folder."""
        labels = existing["metadata"].get("labels") or {}
        managers = [each.get("manager") for each in existing["metadata"].get("managedFields") or []]
        submission = None
        with suppress(ValueError):
            submission = self._run.submission()
        ours = self._manager in managers or (
            submission is not None and submission.details.get("uid") == existing["metadata"]["uid"]
        )
        return labels.get(RUN_LABEL) == self._run.id and ours

    @staticmethod
    def _same(existing: Document, document: Document) -> bool:
        """Return True if the object ``existing`` has the same plan as the rendered ``document``."""

        def mark(of: Document) -> Any:
            return (of["metadata"].get("annotations") or {}).get(HASH_ANNOTATION), of.get("data")

        return bool(mark(existing) == mark(document))

    def _taken(self, existing: Document) -> LaunchError:
        resource, name, namespace = resource_of(existing), self._name(existing), existing["metadata"]["namespace"]
        whose = "this run, with another plan," if self._ours(existing) else "a launch from another place"
        if RUN_LABEL not in (existing["metadata"].get("labels") or {}):
            whose = "something other than partool"
        message = f"the name {name} is taken in namespace {namespace}: there is a {existing['kind']} made by {whose}"
        help = f"give the spec another name, or: kubectl -n {namespace} delete {resource.full_name} {name}"
        return LaunchError("PT575", message, help)

    @staticmethod
    def _name(document: Document) -> str:
        return str(document["metadata"]["name"])
