"""Client for the part of the Kubernetes API that a launcher needs; the ``kubernetes`` package makes the connections.

Requests and answers hold plain dictionaries: all kinds of objects, also custom types, are handled alike, and rendered
documents are sent unchanged. Paths and answers: https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from partool.launch.k8s import errors as k8s_errors
from partool.launch.k8s.config import Connection, connect
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import PODS, Resource, resource_of
from partool.launch.target import LaunchError

Document = dict[str, Any]
"""JSON object of the API."""

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 30.0
_PATIENCE_S = 20.0
"""Maximum seconds during which a failed call is retried."""
_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_PAGE = 500
_WATCH_S = 240
"""Seconds after which the client ends a watch; servers end a watch after 5 to 10 minutes anyway."""


class BrokenOffError(LaunchError):
    """A connection ended before the answer was complete."""

    def __init__(self, host: str, error: BaseException) -> None:
        unreachable = k8s_errors.unreachable(host, error)
        super().__init__(unreachable.code, unreachable.message, unreachable.help, unreachable.exit_code)


class Client:
    """Connection to a cluster, with a default namespace."""

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        self._connection: Connection = connect(context)
        self.namespace = namespace or self._connection.namespace
        self.context = self._connection.context
        """Name of the kubeconfig's context; empty if this process runs in a pod of the cluster."""
        self.warnings: list[str] = []
        """Texts of the server's ``Warning`` headers (RFC 7234), for example about outdated API versions."""

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Document | None:
        """Return the object with the name ``name``; None if it does not exist."""
        try:
            return self._json("get", resource, name, namespace=namespace)
        except ApiError as error:
            if error.status == 404 and not error.unknown_kind:
                return None
            raise

    def exists(self, resource: Resource, name: str) -> bool:
        """Return whether an object with this name exists; its content, which may be secret, is not requested."""
        path = resource.path(self.namespace, name)
        accept = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        try:
            self._send("get", path, {}, accept=accept)
        except ApiError as error:
            if error.status == 404 and not error.unknown_kind:
                return False
            raise
        return True

    def create(self, document: Document, *, manager: str = "partool", dry_run: bool = False) -> Document:
        """Create an object and return it as the server stores it; the server refuses unknown fields.

        Raises ApiError; if its ``retried`` is set, an earlier try whose answer was lost may have created the object.
        """
        query = {"fieldManager": manager, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._json("create", resource_of(document), query=query, body=document)

    def patch(self, resource: Resource, name: str, change: Document, *, namespace: str | None = None) -> Document:
        """Merge a change into an object (RFC 7386) and return it."""
        return self._json("patch", resource, name, namespace=namespace, body=change)

    def delete(self, resource: Resource, name: str, *, uid: str | None = None, namespace: str | None = None) -> bool:
        """Delete an object's dependents, then the object; returns False if no object has this name and ``uid``."""
        options: Document = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._json("delete", resource, name, namespace=namespace, body=options)
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and uid is not None):
                return False
            raise
        return True

    def kill_pods(self, selector: str, *, namespace: str | None = None) -> None:
        """Delete pods without a grace period."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        query = {"labelSelector": selector}
        self._json("deletecollection", PODS, namespace=namespace, query=query, body=options)

    def select(self, resource: Resource, *, namespace: str | None = None, **selectors: str) -> list[Document]:
        """Return the objects that match ``labelSelector`` and ``fieldSelector``."""
        return self.select_with_version(resource, namespace=namespace, **selectors)[0]

    def select_with_version(
        self, resource: Resource, *, namespace: str | None = None, **selectors: str
    ) -> tuple[list[Document], str]:
        """Return the matching objects, and the list's version, from which a watch can continue.

        If the token of a page of the list expires, the whole list is requested again.
        """
        while True:
            items: list[Document] = []
            query = {"limit": str(_PAGE), **selectors}
            try:
                while True:
                    page = self._json("list", resource, namespace=namespace, query=query)
                    items += page.get("items") or []
                    query["continue"] = page["metadata"].get("continue", "")
                    if not query["continue"]:
                        return items, page["metadata"].get("resourceVersion", "")
            except ApiError as error:
                if error.status != 410 or not query.get("continue"):
                    raise

    def watch(
        self, resource: Resource, *, namespace: str | None = None, seconds: int = _WATCH_S, **selectors: str
    ) -> Iterator[tuple[str, Document]]:
        """Yield each existing object as ``ADDED``, then every change during about ``seconds`` seconds.

        If the server no longer has the version at which the watch continues (410 Gone), all objects are yielded again.
        """
        end, version = time.monotonic() + seconds, ""
        while (remaining_s := end - time.monotonic()) > 0:
            if not version:
                items, version = self.select_with_version(resource, namespace=namespace, **selectors)
                yield from (("ADDED", item) for item in items)
            began = time.monotonic()
            for kind, item in self._events(resource, namespace, version, max(1, int(remaining_s)), selectors):
                version = item.get("metadata", {}).get("resourceVersion", "")
                if kind == "ERROR":
                    break
                if kind != "BOOKMARK":
                    yield kind, item
            time.sleep(max(0.0, min(_PAUSES_S[0], _PAUSES_S[0] - (time.monotonic() - began))))

    def _events(
        self, resource: Resource, namespace: str | None, version: str, seconds: int, selectors: dict[str, str]
    ) -> Iterator[tuple[str, Document]]:
        """Yield the events of one watch until the watch ends or breaks off.

        If the last event is ``ERROR``, the caller must list the objects again.
        """
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true", **selectors}
        query["timeoutSeconds"] = str(seconds)
        path = resource.path(namespace or self.namespace)
        try:
            with closing(self.stream("watch", path, query, read_timeout_s=seconds + _READ_TIMEOUT_S)) as lines:
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"] if event["type"] != "ERROR" else {}
        except BrokenOffError:
            return
        except ApiError as error:
            if error.status != 410:
                raise
            yield "ERROR", {}

    def stream(
        self, verb: str, path: str, query: Mapping[str, str], *, read_timeout_s: float = 300.0
    ) -> Generator[bytes, None, None]:
        """Yield the lines of an answer as they arrive; only the last line may lack a line end.

        Raises ApiError if the answer is an error, BrokenOffError if the connection ends before the answer is complete.
        """
        import urllib3

        answer = self._send(verb, path, query, None, read_timeout_s, streamed=True)
        part = b""
        try:
            for chunk in answer.stream(1 << 16, decode_content=True):
                *complete, part = (part + chunk).split(b"\n")
                yield from (line + b"\n" for line in complete)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise BrokenOffError(self._connection.host, error) from None
        finally:
            answer.close()
        if part:
            yield part

    def read(self, path: str) -> Document:
        """Return the document at a path without a namespace (``/version``, ``/apis``)."""
        answer: Document = json.loads(self._send("get", path, {}).data)
        return answer

    def version(self) -> str:
        """Return the server's version as reported, such as ``v1.34.2``."""
        return str(self.read("/version")["gitVersion"])

    @property
    def host(self) -> str:
        """URL of the API server."""
        return self._connection.host

    def may(self, verb: str, resource: Resource, sub: str = "", *, namespace: str | None = None) -> bool:
        """Return True if the server allows the user to apply ``verb`` to ``resource`` (SelfSubjectAccessReview)."""
        group = resource.group_version.rpartition("/")[0]
        attributes = {"namespace": namespace or self.namespace, "verb": verb, "group": group}
        attributes |= {"resource": resource.plural, "subresource": sub}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = json.loads(self._send("create", path, {}, review).data)
        return bool(answer["status"]["allowed"])

    def _json(
        self,
        verb: str,
        resource: Resource,
        name: str = "",
        *,
        namespace: str | None = None,
        query: Mapping[str, str] | None = None,
        body: Document | None = None,
    ) -> Document:
        where = (body or {}).get("metadata", {}).get("namespace") if verb == "create" else None
        path = resource.path(namespace or where or self.namespace, name)
        answer: Document = json.loads(self._send(verb, path, query or {}, body).data)
        return answer

    def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Document | None = None,
        read_timeout_s: float | None = None,
        *,
        streamed: bool = False,
        accept: str = "application/json, */*",
    ) -> Any:
        """Send a request, retry it after transient errors, and return the answer; raises ApiError or LaunchError."""
        import urllib3

        timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=read_timeout_s or _READ_TIMEOUT_S)
        began, lost = time.monotonic(), False
        for pause_s in (*_PAUSES_S, None):
            over = pause_s is None or time.monotonic() - began > _PATIENCE_S
            try:
                answer = self._connection.request(
                    verb, path, query, body, accept=accept, timeout=timeout, preload_content=not streamed
                )
                content = answer.data if answer.status >= 400 else b""
            except (urllib3.exceptions.HTTPError, OSError) as error:
                if over or k8s_errors.is_final(error):
                    raise k8s_errors.unreachable(self._connection.host, error) from None
                lost, wait_s = True, pause_s or 0.0
            else:
                if answer.status < 400:
                    self.warnings += k8s_errors.warnings_of(answer.headers.getlist("Warning"))
                    return answer
                # a patch that conflicted with another patch succeeds on the second try
                passing = answer.status in _TRANSIENT or (answer.status == 409 and verb == "patch")
                if over or not passing:
                    raise k8s_errors.of_answer(verb, path, answer.status, content, retried=lost)
                # the server may have carried out the request before it reported an internal error
                lost = lost or answer.status >= 500
                wait_s = max(pause_s or 0.0, min(_retry_after_s(answer.headers), _PATIENCE_S))
            time.sleep(wait_s)
        raise LaunchError("PT576", "the cluster does not answer", exit_code=3)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0
