"""Error answers of the Kubernetes API, translated to messages.

The form of a ``Status``: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from partool.launch.target import LaunchError

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)
_RBAC = re.compile(r"cannot \w+ resource|^Unauthorized$|^Forbidden$|cannot \w+ path")
_SHOWN = 5
_LONGEST = 600


class ApiError(LaunchError):
    """The API server refused a request."""

    def __init__(
        self, code: str, message: str, help: str, exit_code: int, *, status: int, reason: str, retried: bool
    ) -> None:
        super().__init__(code, message, help, exit_code)
        self.status = status
        """HTTP status."""
        self.reason = reason
        """Reason as the server gives it: ``AlreadyExists``, ``NotFound``..."""
        self.retried = retried
        """True if an earlier try of the same request may have succeeded."""
        self.unknown_kind = False
        """True if the server does not know the kind; False if only the object is missing."""


def of_answer(verb: str, path: str, status: int, content: bytes, *, retried: bool) -> ApiError:
    """Return the error that a server's answer reports; its message also names the request and gives a hint."""
    answer = _status(content)
    reason = str(answer.get("reason") or "")
    code, message, help, exit_code = _words(verb, path, status, answer)
    error = ApiError(code, message, help, exit_code, status=status, reason=reason, retried=retried)
    error.unknown_kind = status == 404 and _is_unknown_kind(answer)
    return error


def _words(verb: str, path: str, status: int, answer: dict[str, Any]) -> tuple[str, str, str, int]:
    text = str(answer.get("message") or f"HTTP status {status}")[:_LONGEST]
    what, where, group = _place(path)
    if status == 401:
        return "PT577", f"the cluster does not accept your login: {text}", "log in again (kubectl get pods)", 3
    if status == 403 and _RBAC.search(text):
        message = f"you may not {verb} {what}{where}"
        return "PT577", message, f"ask for a role with {verb} on {what}{where}; partool doctor --target k8s", 3
    if status == 404 and _is_unknown_kind(answer):
        message = f"the cluster does not know {what}: what serves them is not installed"
        other = "" if group in ("", "batch") else ", or use --set launch.k8s.kind=job, which every cluster has"
        return "PT579", message, f"install it{other}", 4
    if status == 404:
        return "PT578", text, "kubectl get namespaces" if "namespaces" in text else "", 4
    if status in (400, 403, 413, 415, 422):
        return "PT578", f"the cluster refuses to {verb} {what}{where}: {_causes(answer) or text}", "", 4
    if status == 409 and answer.get("reason") == "AlreadyExists":
        return "PT575", text, "", 4
    if status == 409:
        return "PT578", f"the cluster refuses to {verb} {what}{where}: {text}", "try again", 4
    return "PT576", f"the cluster cannot {verb} {what}{where} (HTTP status {status}): {text}", "try again later", 3


def _place(path: str) -> tuple[str, str, str]:
    """Return, for a URL path, the resource as RBAC names it, the namespace in words, and the API group."""
    match = _PATH.match(path)
    if match is None:
        return path, "", ""
    what = (
        match["plural"]
        + (f"/{match['sub']}" if match["sub"] else "")
        + (f".{match['group']}" if match["group"] else "")
    )
    where = f" in namespace {match['namespace']}" if match["namespace"] else ""
    return what, where, match["group"] or ""


def _is_unknown_kind(answer: dict[str, Any]) -> bool:
    # ``details`` names a missing object; for a path that no API serves, the answer is plain text
    return not (answer.get("details") or {}).get("name")


def _causes(answer: dict[str, Any]) -> str:
    """Return a text of the fields that a ``Status`` reports as wrong, each field with its error."""
    causes = (answer.get("details") or {}).get("causes") or []
    lines = [
        f"{cause['field']}: {cause.get('message', '')}" if cause.get("field") else str(cause.get("message", ""))
        for cause in causes
    ]
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def _status(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        return {"message": content.decode("utf-8", errors="replace").strip()}
    return answer if isinstance(answer, dict) else {}


def unreachable(host: str, error: BaseException) -> LaunchError:
    """Return the error that reports that the API server ``host`` cannot be reached."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why, help = "its certificate is not the one of the kubeconfig", "get a new kubeconfig"
    elif "timed out" in text or "Timeout" in type(error).__name__:
        why, help = "no answer in time", "is a VPN needed? kubectl get --raw /version"
    elif "NameResolution" in type(error).__name__ or "resolve" in text:
        why, help = "its name is not known here", "is a VPN needed? kubectl get --raw /version"
    elif "refused" in text:
        why, help = "the connection is refused", "is the cluster up? kubectl get --raw /version"
    else:
        why, help = "the connection breaks off", "try again; kubectl get --raw /version"
    return LaunchError("PT576", f"the cluster at {host} cannot be reached: {why}", help, exit_code=3)


def is_final(error: BaseException) -> bool:
    """Return True if a retry cannot succeed, for example after an unknown host name or a wrong certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error) or "NameResolution" in type(error).__name__


def warnings_of(headers: Sequence[str]) -> list[str]:
    """Return the texts of ``Warning`` headers, which read ``299 - "text"``."""
    return [match[1] for header in headers for match in re.finditer(r'\d+ \S+ "((?:[^"\\]|\\.)*)"', header)]
