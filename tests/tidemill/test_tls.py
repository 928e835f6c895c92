"""TLS, as the URL asks for it, to every kind of server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.tidemill.certificates import Certificate, make_authority, make_certificate
from tests.tidemill.echo_worker import open_queue, work
from tests.tidemill.factories import make_job
from tests.tidemill.server_sets import SERVICE, SLOTS, await_that, running_sentinel
from tests.tidemill.servers import Server, free_port, redis_binary, running
from tidemill.client import Client
from tidemill.connection import connect
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.jobs import JobId


@dataclass(frozen=True)
class Papers:
    """What a server and its clients show each other."""

    authority: Certificate
    another_authority: Certificate
    own: Certificate

    def options(self, port: int) -> tuple[str, ...]:
        """Of a server that also speaks TLS, on this port."""
        files = {"cert": self.own.certificate, "key": self.own.key, "ca-cert": self.authority.certificate}
        named = [item for name, path in files.items() for item in (f"--tls-{name}-file", str(path))]
        return ("--tls-port", str(port), "--tls-auth-clients", "no", *named)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    authority = make_authority(folder, "authority")
    return Papers(authority, make_authority(folder, "another"), make_certificate(folder, authority))


@contextmanager
def running_tls(papers: Papers, *options: str) -> Iterator[tuple[Server, int]]:
    """A server, and its port for TLS."""
    port = free_port()
    with running(redis_binary(), *papers.options(port), *options) as server:
        yield server, port


async def live_a_job(url: str) -> None:
    """Put one job through its life over this connection."""
    async with Client(url, queue="q") as client, open_queue(url, "q") as queue:
        await client.submit(make_job("a", prompt="echo"))
        await work(queue)
        assert (await client.result(JobId("a"), timeout=10)).text == "echo"


async def refusal(url: str) -> str:
    async with Client(url, queue="q") as client:
        with pytest.raises(QueueUnavailable) as caught:
            await client.ping()
    return str(caught.value)


async def test_a_server_is_believed_if_the_authority_vouches_for_it(papers: Papers) -> None:
    with running_tls(papers) as (_, port):
        url = f"rediss://127.0.0.1:{port}/0"
        known = f"ssl_ca_certs={papers.authority.certificate}"
        await live_a_job(f"{url}?{known}")

        stranger = f"{url}?ssl_ca_certs={papers.another_authority.certificate}"
        for unknown in (url, stranger):
            message = await refusal(unknown)
            assert f"Redis at 127.0.0.1:{port} cannot be reached" in message
            assert "certificate verify failed" in message
        async with connect(f"{stranger}&ssl_cert_reqs=none") as redis:
            assert await redis.ping()

        by_name = f"rediss://localhost:{port}/0?{known}"
        assert "Hostname mismatch" in await refusal(by_name)
        async with connect(f"{by_name}&ssl_check_hostname=false") as redis:
            assert await redis.ping()
        assert "cannot be reached" in await refusal(f"redis://127.0.0.1:{port}/0")


async def test_a_client_shows_its_certificate_where_one_is_demanded(papers: Papers) -> None:
    with running_tls(papers, "--tls-auth-clients", "yes") as (_, port):
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={papers.authority.certificate}"
        assert "cannot be reached" in await refusal(url)
        await live_a_job(f"{url}&ssl_certfile={papers.own.certificate}&ssl_keyfile={papers.own.key}")


async def test_sentinels_and_the_primary_they_name_are_both_asked_by_tls(papers: Papers) -> None:
    with running_tls(papers) as (_, port):
        primary, seed = Server(redis_binary(), port=port), free_port()
        options = [option.removeprefix("--") for option in papers.options(seed)]
        lines = [f"{name} {value}" for name, value in zip(options[::2], options[1::2], strict=True)]
        with running_sentinel(redis_binary(), primary, "tls-replication yes", *lines):
            url = f"rediss+sentinel://127.0.0.1:{seed}/{SERVICE}"
            await live_a_job(f"{url}?ssl_ca_certs={papers.authority.certificate}")
            assert "certificate verify failed" in await refusal(url)


async def test_a_cluster_tells_its_ports_for_tls(papers: Papers) -> None:
    with running_tls(papers, "--cluster-enabled", "yes", "--tls-cluster", "yes") as (server, port):
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
            await_that(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        url = f"rediss+cluster://127.0.0.1:{port}"
        await live_a_job(f"{url}?ssl_ca_certs={papers.authority.certificate}")
        assert "certificate verify failed" in await refusal(url)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("ssl_cert_reqs=perhaps", "perhaps"),
        ("ssl_ca_certs=/not/here.pem", "No such file"),
        ("ssl_ca_cert=/misspelt.pem", "ssl_ca_cert"),
        ("ssl_check_hostname=maybe&db=x", "not a Redis URL"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(option: str, reason: str) -> None:
    for scheme in ("rediss://host", "rediss+sentinel://host/service", "rediss+cluster://host"):
        with pytest.raises(ConfigurationError, match=reason):
            connect(f"{scheme}?{option}")
