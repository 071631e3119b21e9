"""The tests' Kubernetes API server over HTTP."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import k8s_schemas
import yaml
from k8s_discovery import static
from k8s_server import (
    WITHOUT_NAMESPACE,
    Cluster,
    Document,
    Key,
    Log,
    Trouble,
    clone,
    field_matcher,
    matcher,
    merge,
    status_of,
    with_defaults,
)

_FROM_SERVER = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "deletionTimestamp")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class FailureError(Exception):
    """An error answer."""

    def __init__(self, status: Document) -> None:
        super().__init__(status["message"])
        self.status = status


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """Serve a cluster on a free port of this machine; yields the URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        with cluster.changed:
            cluster.stopping = True
            cluster.changed.notify_all()
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    cluster: Cluster
    cut_after: int | None = None
    """Number of lines of a stream after which the connection breaks off."""

    def log_message(self, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def answer_any(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        yaml_body = "yaml" in self.headers.get("Content-Type", "")
        body = None if not raw else yaml.safe_load(raw) if yaml_body else json.loads(raw)
        with self.cluster.changed:
            self.cluster.requests.append((self.command, self.path, clone(body)))
            trouble = self._trouble()
        self.cut_after = int(trouble.amount) if trouble and trouble.act == "cut" else None
        if trouble is not None and self._early(trouble):
            return
        try:
            if self.cluster.token and self.headers.get("Authorization") != f"Bearer {self.cluster.token}":
                raise FailureError(status_of(401, "Unauthorized", "Unauthorized"))
            answer = static(self.cluster, url.path) or self._object(url.path, query, body)
        except FailureError as failure:
            answer = (failure.status["code"], failure.status)
        if trouble is not None and trouble.act == "lost":
            self.close_connection = True
        elif answer is not None:
            self._send(*answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer_any  # noqa: N815

    def _trouble(self) -> Trouble | None:
        for trouble in self.cluster.troubles:
            if trouble.times and trouble.verb == self.command and re.search(trouble.path, self.path):
                trouble.times -= 1
                return trouble
        return None

    def _early(self, trouble: Trouble) -> bool:
        """Apply a trouble before the request is handled; returns True if the request ends with it."""
        if trouble.act == "slow":
            time.sleep(trouble.amount)
        elif trouble.act == "drop":
            self.close_connection = True
            return True
        elif trouble.act.isdigit():
            self._send(int(trouble.act), trouble.status or status_of(int(trouble.act), "", "trouble"))
            return True
        return False

    def _send(self, code: int, document: Any, kind: str = "application/json", warning: str = "") -> None:
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if warning:
            self.send_header("Warning", f'299 - "{warning}"')
        self.end_headers()
        self.wfile.write(content)

    def _object(self, path: str, query: dict[str, str], body: Document | None) -> tuple[Any, ...] | None:
        if path.endswith("/selfsubjectaccessreviews"):
            return 201, self._review(body or {})
        group_version, plural, namespace, name, sub = _parts(path)
        if plural not in self.cluster.kinds.get(group_version, {}):
            if group_version not in self.cluster.kinds:
                return 404, b"404 page not found\n", "text/plain"
            raise FailureError(status_of(404, "NotFound", "the server could not find the requested resource"))
        key = (group_version, plural, namespace, name)
        self._admit(key, sub, query)
        if self.command == "GET":
            return self._get(key, sub, query)
        if self.command == "DELETE":
            return self._delete(key, query, body or {})
        return self._write(key, sub, query, body or {})

    def _admit(self, key: Key, sub: str, query: dict[str, str]) -> None:
        group_version, plural, namespace, name = key
        verb = _VERBS.get(self.command) or ("get" if name else "list")
        if self.command == "DELETE":
            verb = "delete" if name else "deletecollection"
        elif verb == "list" and query.get("watch"):
            verb = "watch"
        what = plural + (f"/{sub}" if sub else "")
        if (verb, what) in self.cluster.forbidden:
            full = _full(group_version, plural)
            group = group_version.rpartition("/")[0]
            text = f'{full} is forbidden: User "somebody" cannot {verb} resource "{what}" in API group "{group}"'
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            raise FailureError(status_of(403, "Forbidden", text + where, kind=plural, name=name))

    def _get(self, key: Key, sub: str, query: dict[str, str]) -> tuple[Any, ...] | None:
        group_version, plural, namespace, name = key
        if name:
            with self.cluster.changed:
                document = clone(self._existing(key))
            if "PartialObjectMetadata" in self.headers.get("Accept", ""):
                document = {"kind": "PartialObjectMetadata", "metadata": document["metadata"]}
            return self._log(name, document, query) if sub == "log" else (200, document)
        by_label, by_field = matcher(query.get("labelSelector", "")), field_matcher(query.get("fieldSelector", ""))

        def chosen(other: Key, document: Document) -> bool:
            here = other[:2] == (group_version, plural) and namespace in ("", other[2])
            return here and by_label(document) and by_field(document)

        if query.get("watch"):
            self._watch(chosen, query)
            return None
        with self.cluster.changed:
            items = [clone(document) for other, document in self.cluster.objects.items() if chosen(other, document)]
            version = str(self.cluster.resource_version)
        begin, size = int(query.get("continue") or 0), min(self.cluster.page, int(query.get("limit") or 1 << 30))
        meta = {"resourceVersion": version} | ({"continue": str(begin + size)} if begin + size < len(items) else {})
        kind = self.cluster.kinds[group_version][plural] + "List"
        page = items[begin : begin + size]
        return 200, {"kind": kind, "apiVersion": group_version, "metadata": meta, "items": page}

    def _existing(self, key: Key) -> Document:
        if key not in self.cluster.objects:
            full = _full(key[0], key[1])
            text = f'{full} "{key[3]}" not found'
            raise FailureError(status_of(404, "NotFound", text, name=key[3], kind=key[1]))
        return self.cluster.objects[key]

    def _delete(self, key: Key, query: dict[str, str], options: Document) -> tuple[Any, ...]:
        with self.cluster.changed:
            if not key[3]:
                chosen = matcher(query.get("labelSelector", ""))
                for other, document in list(self.cluster.objects.items()):
                    if other[:3] == key[:3] and chosen(document):
                        self.cluster.remove(other)
                return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []}
            document = self._existing(key)
            wanted = (options.get("preconditions") or {}).get("uid", document["metadata"]["uid"])
            if wanted != document["metadata"]["uid"]:
                text = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: other"
                raise FailureError(status_of(409, "Conflict", text, name=key[3], kind=key[1]))
            if query.get("dryRun") != "All" and options.get("dryRun") != ["All"]:
                self.cluster.remove(key)
            details = {"name": key[3], "kind": key[1], "uid": document["metadata"]["uid"]}
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _write(self, key: Key, sub: str, query: dict[str, str], body: Document) -> tuple[Any, ...]:
        group_version, plural, namespace, name = key
        with self.cluster.changed:
            if namespace and ("v1", "namespaces", "", namespace) not in self.cluster.objects:
                text = f'namespaces "{namespace}" not found'
                raise FailureError(status_of(404, "NotFound", text, name=namespace, kind="namespaces"))
            applies = "apply-patch" in self.headers.get("Content-Type", "")
            if self.command == "POST":
                document = with_defaults(clone(body))
                name = document.get("metadata", {}).get("name", "")
                key = (group_version, plural, namespace, name)
            elif self.command == "PATCH" and not (applies and key not in self.cluster.objects):
                document = merge(self._existing(key), {"status": body.get("status")} if sub else body)
            else:
                document = clone(body)
            warning = self._judge(document, key, query)
            if self.command == "POST" and key in self.cluster.objects:
                text = f'{_full(group_version, plural)} "{name}" already exists'
                raise FailureError(status_of(409, "AlreadyExists", text, name=name, kind=plural))
            if plural not in WITHOUT_NAMESPACE:
                document["metadata"].setdefault("namespace", namespace)
            code = 200 if key in self.cluster.objects else 201
            if query.get("dryRun") != "All":
                document = self.cluster.store(key, document, query.get("fieldManager", "unknown"))
            return code, clone(document), "application/json", warning

    def _judge(self, document: Document, key: Key, query: dict[str, str]) -> str:
        """Reject an invalid object as a real server does; returns a warning."""
        kind = self.cluster.kinds[key[0]][key[1]]
        if document.get("kind") != kind or document.get("apiVersion") != key[0]:
            text = f"the object provided is unrecognized: {document.get('apiVersion')}, Kind={document.get('kind')}"
            raise FailureError(status_of(400, "BadRequest", text))
        plain = {name: value for name, value in document.items() if name != "status"}
        plain["metadata"] = {name: value for name, value in document["metadata"].items() if name not in _FROM_SERVER}
        found = k8s_schemas.faults(plain, self.cluster.schemas.get((key[0], kind)))
        unknown = [f'unknown field "{fault.field}"' for fault in found if fault.unknown]
        if unknown and query.get("fieldValidation") == "Strict":
            text = f'{kind} in version "{key[0].rpartition("/")[2]}" cannot be handled as a {kind}: '
            raise FailureError(status_of(400, "BadRequest", text + "strict decoding error: " + ", ".join(unknown)))
        causes = [
            {"reason": "FieldValueInvalid", "message": fault.message, "field": fault.field}
            for fault in found
            if not fault.unknown
        ]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", key[3]):
            causes.append({"reason": "FieldValueInvalid", "message": "Invalid value", "field": "metadata.name"})
        if causes:
            text = f'{kind} "{key[3]}" is invalid: ' + "; ".join(f"{c['field']}: {c['message']}" for c in causes)
            raise FailureError(status_of(422, "Invalid", text, name=key[3], kind=kind, causes=causes))
        return ", ".join(unknown).replace('"', "'")

    def _review(self, review: Document) -> Document:
        asked = review["spec"]["resourceAttributes"]
        what = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        return {**review, "status": {"allowed": (asked["verb"], what) not in self.cluster.forbidden}}

    def _begin_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def _chunk(self, content: bytes) -> bool:
        """Send a piece of a stream; returns False if the connection must break off, in the middle of the next line."""
        if self.cut_after is not None:
            if self.cut_after <= 0:
                content = content[: max(1, len(content) // 2)]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
                self.wfile.flush()
                self.close_connection = True
                return False
            self.cut_after -= 1
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()
        return True

    def _watch(self, chosen: Any, query: dict[str, str]) -> None:
        version, end = (
            int(query.get("resourceVersion") or 0),
            time.monotonic() + float(query.get("timeoutSeconds") or 60),
        )
        gone = status_of(410, "Expired", f"too old resource version: {version} ({self.cluster.oldest})")
        if version < self.cluster.oldest:
            raise FailureError(gone)
        self._begin_stream("application/json")
        while time.monotonic() < end and not self.cluster.stopping:
            with self.cluster.changed:
                if not any(event[0] > version for event in self.cluster.events) and version >= self.cluster.oldest:
                    self.cluster.changed.wait(min(0.5, max(0.0, end - time.monotonic())))
                events = [event for event in self.cluster.events if event[0] > version]
                expired = version < self.cluster.oldest
                at = self.cluster.resource_version
            wires = [{"type": kind, "object": document} for _, kind, key, document in events if chosen(key, document)]
            if expired:
                wires = [{"type": "ERROR", "object": gone}]
            elif query.get("allowWatchBookmarks") and not wires:
                wires = [{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(at)}}}]
            version = at
            if not all(self._chunk(json.dumps(wire).encode() + b"\n") for wire in wires):
                return
            if expired:
                break
        self.wfile.write(b"0\r\n\r\n")

    def _log(self, pod: str, document: Document, query: dict[str, str]) -> tuple[Any, ...] | None:
        container = query.get("container") or document["spec"]["containers"][0]["name"]
        previous = query.get("previous") == "true"
        log = self.cluster.logs.get((pod, container, previous))
        if log is None:
            text = f'container "{container}" in pod "{pod}" is waiting to start: ContainerCreating'
            if previous:
                text = f'previous terminated container "{container}" in pod "{pod}" not found'
            raise FailureError(status_of(400, "BadRequest", text))
        self._begin_stream("text/plain")
        if self._log_lines(pod, log, query):
            self.wfile.write(b"0\r\n\r\n")
        return None

    def _log_lines(self, pod: str, log: Log, query: dict[str, str]) -> bool:
        sent = max(0, len(log.lines) - int(query.get("tailLines", len(log.lines))))
        while True:
            with self.cluster.changed:
                if sent == len(log.lines) and query.get("follow") == "true" and not log.ended:
                    if pod not in self.cluster.names("pods") or self.cluster.stopping:
                        return True
                    self.cluster.changed.wait(0.5)
                lines, sent = log.lines[sent:], len(log.lines)
                last = query.get("follow") != "true" or log.ended
            for stamp, line in lines:
                # whole seconds only, as on a real server
                if stamp[:19] < query.get("sinceTime", "")[:19]:
                    continue
                front = stamp.encode() + b" " if query.get("timestamps") == "true" else b""
                if not self._chunk(front + line + b"\n"):
                    return False
            if last and sent == len(log.lines):
                return True


def _parts(path: str) -> tuple[str, str, str, str, str]:
    """Return group and version, plural, namespace, name and subresource."""
    parts = path.strip("/").split("/")
    group_version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, sub = [*rest, "", "", ""][:3]
    return group_version, plural, namespace, name, sub


def _full(group_version: str, plural: str) -> str:
    group = group_version.rpartition("/")[0]
    return f"{plural}.{group}" if group else plural
