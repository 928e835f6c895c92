"""The worker's HTTP endpoint: `/metrics` for Prometheus, `/health` for whoever restarts workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog

from tidemill.errors import ConfigurationError

POLL_INTERVAL = 0.1
"""Seconds until the endpoint notices that it is to close."""
REQUEST_TIMEOUT = 10.0
"""Seconds that a client may take to send its request; each has a thread meanwhile."""


@dataclass(frozen=True)
class Health:
    """Whether the worker should be left running, and why not."""

    ok: bool
    details: Mapping[str, object]


class Endpoint:
    """Serves both paths from a thread of its own until closed.

    Args:
        host, port: address to listen on; port 0 takes any free one.
        metrics: the exposition in Prometheus's text format.
        health: looked at for each request; unhealthy answers 503.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """

    def __init__(
        self, host: str, port: int, *, metrics: Callable[[], bytes], health: Callable[[], Health]
    ) -> None:
        handler = partial(_Handler, metrics, health)
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise ConfigurationError(
                f"metrics_port: cannot listen on {host}:{port}: {error.strerror};"
                " choose another port, or 0 for no endpoint"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(POLL_INTERVAL,),
            name="tidemill-endpoint",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, or a fault of ours: one line of the log, not a bare traceback."""
        structlog.get_logger().warning("endpoint_failed", client=client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT

    def __init__(
        self,
        metrics: Callable[[], bytes],
        health: Callable[[], Health],
        *arguments: object,
    ) -> None:
        self._metrics = metrics
        self._health = health
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._reply(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self._metrics())
        elif path == "/health":
            health = self._health()
            status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
            self._reply(status, "application/json", json.dumps({"ok": health.ok, **health.details}).encode())
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"try /metrics or /health\n")

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not logged: they come every few seconds and say nothing."""

    def _reply(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
