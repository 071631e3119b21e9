"""Chooses cluster, user and namespace from the kubeconfig, or from the service account of the surrounding pod."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.launch.target import LaunchError

_METHODS = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "patch": "PATCH"}
_METHODS |= {"delete": "DELETE", "deletecollection": "DELETE"}
_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Connection:
    """Connection to an API server."""

    host: str
    """URL of the API server."""
    namespace: str
    context: str
    """Name of the kubeconfig's context; empty if this process runs in a pod of the cluster."""
    pool: Any
    """``urllib3.PoolManager`` with the cluster's certificates."""
    configuration: Any
    """``kubernetes.client.Configuration``, which renews tokens when they expire."""

    def request(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        *,
        accept: str,
        **options: Any,
    ) -> Any:
        """Send one request without retries and return the answer; raises urllib3's errors.

        ``options`` are urllib3's ``timeout`` and ``preload_content``.
        """
        from urllib.parse import urlencode

        headers = {"Accept": accept, "User-Agent": "partool"}
        if authorization := self.configuration.auth_settings().get("BearerToken", {}).get("value"):
            headers["Authorization"] = authorization
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json" if verb == "patch" else "application/json"
        url = self.host + path + (f"?{urlencode(query)}" if query else "")
        content = None if body is None else json.dumps(body).encode()
        return self.pool.request(
            _METHODS[verb],
            url,
            body=content,
            headers=headers,
            retries=False,
            redirect=False,
            **options,
        )


def connect(context: str | None) -> Connection:
    """Return a connection for ``context`` (None: the current context); sends no request.

    Raises LaunchError PT574 if the ``kubernetes`` package is missing, and PT576 if no configuration can be used.
    """
    if importlib.util.find_spec("kubernetes") is None:
        message = "Kubernetes needs the API's Python client, which is not installed"
        raise LaunchError("PT574", message, "pip install 'partool[k8s]'", exit_code=3)
    # The types differ between versions of the package.
    client: Any = importlib.import_module("kubernetes.client")
    config: Any = importlib.import_module("kubernetes.config")
    configuration = client.Configuration()
    try:
        name, namespace = _load(context, configuration)
    except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        place = os.environ.get("KUBECONFIG") or "~/.kube/config"
        message = f"there is no usable Kubernetes configuration in {place}: {_first_line(error)}"
        raise LaunchError("PT576", message, "set KUBECONFIG; kubectl config get-contexts", exit_code=3) from None
    _quiet(configuration)
    pool = client.ApiClient(configuration).rest_client.pool_manager
    return Connection(configuration.host.rstrip("/"), namespace, name, pool, configuration)


def _quiet(configuration: Any) -> None:
    """Keep urllib3's warnings about dropped connections and about the user's settings out of the logs."""
    import urllib3

    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    if not configuration.verify_ssl:  # insecure-skip-tls-verify in the kubeconfig
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)


def _load(context: str | None, configuration: Any) -> tuple[str, str]:
    """Fill ``configuration``; returns the context's name and the namespace."""
    config: Any = importlib.import_module("kubernetes.config")
    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    config_exists = any(Path(file).expanduser().is_file() for file in files.split(os.pathsep) if file)
    if context is None and not config_exists and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=configuration)
        pod_namespace = _ACCOUNT_NAMESPACE.read_text("utf-8").strip() if _ACCOUNT_NAMESPACE.exists() else ""
        return "", pod_namespace or "default"
    if not config_exists:
        raise FileNotFoundError("no such file")
    contexts, current = config.list_kube_config_contexts(files)
    by_name = {each["name"]: each for each in contexts}
    chosen = by_name.get(context) if context is not None else current
    if chosen is None:
        raise KeyError(f"no context {context!r}; there are {', '.join(sorted(by_name)) or 'none'}")
    config.load_kube_config(files, context=chosen["name"], client_configuration=configuration)
    return chosen["name"], chosen.get("context", {}).get("namespace") or "default"


def _first_line(error: Exception) -> str:
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
