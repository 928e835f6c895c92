"""Ports for servers and workers of our own."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

PORTS = range(20_000, 22_500)
"""Below those that Linux, left as it is, gives to outgoing connections: such a one might take the port of a
server that restarts, or of a worker that has yet to listen. So are a cluster's bus ports, 10,000 above."""


def free_port() -> int:
    """A port of `PORTS` that nobody listens on, and that nobody else who asks here is given for a minute.

    That long a connection which was closed leaves it in TIME_WAIT: taken for a bind like the one below, but
    not for servers, which bind with SO_REUSEADDR.
    """
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was accepted inherits it
            probe.listen()
            with socket.create_connection(("127.0.0.1", port)):
                probe.accept()[0].close()  # whoever closes first has to wait
            return port
