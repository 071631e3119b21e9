"""Encrypted connections: the cluster's certificate is checked, and a client certificate identifies the user."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from k8s_http import Handler
from k8s_server import Cluster

from partool.launch.k8s.client import Client
from partool.launch.k8s.resources import CONFIG_MAPS
from partool.launch.target import LaunchError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificates, is not there"),
]


def certificate(folder: Path, name: str, subject: str) -> tuple[Path, Path]:
    """Make a self-signed certificate; returns it and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", subject, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(cert)], check=True, capture_output=True, timeout=30)
    return cert, key


def test_both_sides_show_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_cert, server_key = certificate(tmp_path, "server", "/CN=127.0.0.1")
    user_cert, user_key = certificate(tmp_path, "user", "/CN=somebody")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_cert, server_key)
    context.load_verify_locations(user_cert)
    context.verify_mode = ssl.CERT_REQUIRED
    cluster = Cluster(custom=False)
    cluster.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = cluster.kubeconfig(tmp_path / "kubeconfig", f"https://127.0.0.1:{server.server_port}")
    config = yaml.safe_load(file.read_text())
    config["users"][0]["user"] = {"client-certificate": str(user_cert), "client-key": str(user_key)}
    monkeypatch.setenv("KUBECONFIG", str(file))
    try:
        file.write_text(yaml.safe_dump(config))
        with pytest.raises(LaunchError, match="its certificate is not the one of the kubeconfig"):
            Client().get(CONFIG_MAPS, "a")
        config["clusters"][0]["cluster"]["certificate-authority"] = str(server_cert)
        file.write_text(yaml.safe_dump(config))
        assert Client().get(CONFIG_MAPS, "a") is not None
    finally:
        server.shutdown()
        server.server_close()
