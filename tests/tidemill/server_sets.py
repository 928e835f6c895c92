"""Servers of which one at a time is the primary: a set watched by a sentinel, and a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from redis.crc import key_slot

from tests.tidemill.servers import Server, free_port, running, valkey_binary
from tidemill.keys import QueueKeys

SERVICE = "the-queue"
SLOTS = 16384
PRIMARIES = 3
AT_ONCE = ("--repl-diskless-sync-delay", "0")
"""A replica is given its first copy without waiting for others to come."""
PATIENCE = 20.0
"""Seconds until a set that does not come together fails the test."""


class SentinelServer(Server):
    """A sentinel; its configuration is a file, which it keeps up to date by itself."""

    def command(self, folder: Path) -> list[str]:
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join([f"port {self.port}", "bind 127.0.0.1", *self.options]))
        return [self.binary, str(configuration), "--sentinel"]


@dataclass
class SentinelSet:
    """Three servers, one of them the primary, and a sentinel that promotes another when it is gone."""

    servers: list[Server]
    sentinel: Server

    @property
    def url(self) -> str:
        """Names a sentinel that does not exist as well."""
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}/{SERVICE}"

    @property
    def primary(self) -> Server:
        """Whom the sentinel names."""
        with self.sentinel.client() as client:
            _, port = client.execute_command("SENTINEL", "get-master-addr-by-name", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def fail_over(self) -> None:
        """Have another one promoted; the primary lives on, and is told some ten seconds later."""
        with self.sentinel.client() as client:
            client.execute_command("SENTINEL", "FAILOVER", SERVICE)

    def knows_replicas(self) -> bool:
        """Whether the sentinel has heard of all of them lately, and that they have the primary's data."""
        with self.sentinel.client() as client:
            replicas = client.execute_command("SENTINEL", "REPLICAS", SERVICE)
        facts = [dict(zip(one[::2], one[1::2], strict=True)) for one in replicas]
        up = [one for one in facts if (one[b"flags"], one[b"master-link-status"]) == (b"slave", b"ok")]
        return len(up) == len(self.servers) - 1


def link_is_up(server: Server) -> bool:
    """Whether a replica has its primary's data."""
    with server.client() as client:
        link: bool = client.info("replication").get("master_link_status") == "up"
        return link


def await_that(condition: Callable[[], bool]) -> None:
    """Return when it is so; it must become so by itself."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.02)


@contextmanager
def running_sentinel_set(binary: str) -> Iterator[SentinelSet]:
    """A primary that takes no writes without a replica, two replicas, and a sentinel."""
    options = (*AT_ONCE, "--min-replicas-to-write", "1", "--min-replicas-max-lag", "2")
    with ExitStack() as stack:
        primary = stack.enter_context(running(binary, *options))
        of_primary = ("--replicaof", "127.0.0.1", str(primary.port))
        replicas = [stack.enter_context(running(binary, *options, *of_primary)) for _ in range(2)]
        for replica in replicas:
            await_that(partial(link_is_up, replica))
        made = SentinelSet([primary, *replicas], stack.enter_context(running_sentinel(binary, primary)))
        await_that(made.knows_replicas)
        yield made


@contextmanager
def running_sentinel(binary: str, primary: Server, *options: str) -> Iterator[Server]:
    """A sentinel that notices a death within half a second, and decides alone."""
    watch = f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1"
    after = f"sentinel down-after-milliseconds {SERVICE} 500"
    sentinel = SentinelServer(binary, (watch, after, f"sentinel failover-timeout {SERVICE} 3000", *options))
    try:
        sentinel.start()
        yield sentinel
    finally:
        sentinel.close()


@dataclass
class Cluster:
    """Primaries that share the slots, and a replica of the first one."""

    nodes: list[Server]

    @property
    def url(self) -> str:
        """Names two of the nodes, and one that does not exist."""
        ports = (free_port(), self.nodes[0].port, self.nodes[1].port)
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def ask(self, node: int, *command: str | int) -> Any:
        with self.nodes[node].client() as client:
            return client.execute_command(*command)

    def identity(self, node: int) -> str:
        name: bytes = self.ask(node, "CLUSTER", "MYID")
        return name.decode()

    @staticmethod
    def owner(queue: str) -> int:
        """The node that held the queue's slot in the beginning."""
        return slot_of(queue) * PRIMARIES // SLOTS

    def is_primary(self, node: int) -> bool:
        """Whether it says so itself."""
        role: bytes = self.ask(node, "ROLE")[0]
        return role == b"master"

    def settle(self) -> None:
        """Return when every node knows of all, and all slots are served."""
        for node in range(len(self.nodes)):
            await_that(partial(self._is_settled, node))

    def _is_settled(self, node: int) -> bool:
        facts: bytes = self.ask(node, "CLUSTER", "INFO")
        return b"cluster_state:ok" in facts and b"cluster_known_nodes:%d" % len(self.nodes) in facts

    def move(self, queue: str, target: int) -> Iterator[str]:
        """Move a queue's slot by hand, key by key; yields before each step."""
        slot, source = slot_of(queue), self.owner(queue)
        to = self.nodes[target].port
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.identity(source))
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.identity(target))
        yield "begun"
        while keys := self.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            for key in keys:
                self.ask(source, "MIGRATE", "127.0.0.1", to, key, 0, 5000)
                yield "a key has moved"
        for node in (target, source, *range(PRIMARIES)):
            self.ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self.identity(target))


def slot_of(queue: str) -> int:
    slot: int = key_slot(QueueKeys(queue).prefix.encode())
    return slot


@contextmanager
def running_cluster_of_three() -> Iterator[Cluster]:
    """Three primaries with a third of the slots each, and a replica of the first."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *AT_ONCE)
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(valkey_binary(), *options)) for _ in range(PRIMARIES + 1)]
        cluster = Cluster(nodes)
        bounds = [-(-SLOTS * node // PRIMARIES) for node in range(PRIMARIES + 1)]
        for node, (first, end) in enumerate(pairwise(bounds)):
            cluster.ask(node, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            cluster.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", node + 1)
        for other in nodes[1:]:
            cluster.ask(0, "CLUSTER", "MEET", "127.0.0.1", other.port)
        cluster.settle()
        cluster.ask(PRIMARIES, "CLUSTER", "REPLICATE", cluster.identity(0))
        await_that(partial(link_is_up, nodes[PRIMARIES]))
        yield cluster
