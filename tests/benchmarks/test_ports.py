"""Ports for our own servers: nobody is given the same one, and servers can listen on it."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from ports import PORTS, free_port

AT_ONCE = 200


def test_no_two_who_ask_at_once_are_given_the_same() -> None:
    with ThreadPoolExecutor(8) as threads:
        ports = list(threads.map(lambda _: free_port(), range(AT_ONCE)))
    assert len(set(ports)) == AT_ONCE
    assert set(ports) <= set(PORTS)


def test_a_server_can_listen_on_it() -> None:
    address = ("127.0.0.1", free_port())
    with socket.create_server(address), socket.create_connection(address):  # with SO_REUSEADDR, as servers do
        pass
