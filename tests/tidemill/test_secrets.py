"""No password is ever shown: not by an error or what led to it, not by a command, not in a log."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidemill.factories import make_job
from tests.tidemill.servers import Server, free_port, running, valkey_binary
from tidemill.__main__ import main
from tidemill.client import Client, ClientSettings
from tidemill.connection import blocking_twin, connect
from tidemill.discovery import queue_names
from tidemill.errors import ConfigurationError, QueueUnavailable
from tidemill.exit_codes import ExitCode
from tidemill.jobs import JobId
from tidemill.server_url import ServerURL
from tidemill_worker.doctor import Verdict, examine
from tidemill_worker.settings import load_settings

SECRET = "hunter2"

AWAY = {
    "outage": "redis://user:{secret}@127.0.0.1:{port}/0",
    "tls": "rediss://:{secret}@127.0.0.1:{port}/0?ssl_cert_reqs=none",
    "sentinel": "redis+sentinel://user:{secret}@127.0.0.1:{port}/service?sentinel_password={secret}",
    "cluster": "redis+cluster://user:{secret}@127.0.0.1:{port},127.0.0.1:{port}",
    "socket": "unix://user:{secret}@/nowhere.sock?password={secret}",
}
WRONG = {
    "fragment": "redis://:{secret}#1@host/0",
    "path": "redis://:{secret}/1@host:x",
    "port": "redis://host:{secret}/0",
    "scheme": "http://:{secret}@host",
    "no scheme": ":{secret}@host:6379",
    "option": "redis://:123?{secret}=1@host",
    "option beside a port": "redis://user:123?{secret}=ret@host",
    "path beside a port": "redis://user:123/{secret}@host",
    "no path": "redis://host/{secret}",
    "service": "redis+sentinel://user:{secret}@host",
    "database": "redis+cluster://user:{secret}@host/1",
    "database of a service": "redis+sentinel://host/service/{secret}",
    "topology": "redis+{secret}://host",
    "bracket": "redis://[{secret}@host",
    "unknown option": "redis://:{secret}@host/0?password={secret}&nonsense=1",
}
COMMANDS = (
    *(["queue"], ["status", "a"], ["submit", "--queue", "q", "text"], ["cancel", "--queue", "q", "a"]),
    *(["workers"], ["dead", "list", "--queue", "q"], ["worker", "--queue", "q", "--metrics-port", "0"]),
)


def all_of(error: BaseException | None) -> str:
    """Everything that an error carries along, shown or not."""
    if error is None:
        return ""
    told = [str(error), repr(error), *map(repr, error.args), *traceback.format_exception(error)]
    return "\n".join([*told, all_of(error.__cause__), all_of(error.__context__)])


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every log line of a test is looked at, those for debugging too."""
    caplog.set_level(logging.DEBUG)
    yield
    assert SECRET not in caplog.text


@pytest.fixture(params=[*AWAY, "password"])
def unusable(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL with the secret in it, of a server that cannot be used."""
    if request.param == "password":
        with running(valkey_binary(), "--requirepass", "another") as server:
            yield f"redis://:{SECRET}@127.0.0.1:{server.port}/0"
    else:
        yield AWAY[request.param].format(secret=SECRET, port=free_port())


async def test_errors_of_a_client_show_none(unusable: str) -> None:
    async with Client(unusable, queue="q", settings=ClientSettings(patience=0.0)) as client:
        for call in (client.ping(), client.submit(make_job("a")), client.result(JobId("a")), client.depth()):
            with pytest.raises(QueueUnavailable) as caught:
                await call
            assert SECRET not in all_of(caught.value)
    with pytest.raises(QueueUnavailable) as caught:
        await queue_names(unusable)
    assert SECRET not in all_of(caught.value)


async def test_representations_show_none(unusable: str) -> None:
    async with connect(unusable, queue="q") as redis, blocking_twin(redis) as twin:
        pool = redis.connection_pool
        shown = (redis, twin, pool, pool.connection_class, pool.connection_kwargs.get("topology"))
        assert SECRET not in "\n".join(map(repr, (*shown, ServerURL.parse(unusable))))
    settings = load_settings({"redis_url": unusable})
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump_json()}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_show_none(
    unusable: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", unusable)
    monkeypatch.setenv("TIDEMILL_QUEUE", "q")

    assert main(command) != ExitCode.OK

    said = "".join(capfd.readouterr())
    assert "Redis at" in said
    assert SECRET not in said


@pytest.mark.parametrize("url", WRONG.values(), ids=WRONG)
def test_a_wrong_url_is_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url = url.format(secret=SECRET)
    for use in (lambda: Client(url, queue="q"), lambda: connect(url), lambda: load_and_connect(url)):
        with pytest.raises(ConfigurationError, match="Redis URL") as caught:
            use()
        assert SECRET not in all_of(caught.value)
    for command in COMMANDS:
        assert main([*command, "--redis-url", url]) != ExitCode.OK
    monkeypatch.setenv("REDIS_URL", url)
    assert main(["queue"]) != ExitCode.OK
    assert SECRET not in "".join(capfd.readouterr())


def load_and_connect(url: str) -> None:
    """As a worker does it."""
    connect(load_settings({"redis_url": url}).redis_url.get_secret_value())


def test_the_doctor_shows_none(valkey: Server, tmp_path: Path) -> None:
    url = f"redis://nobody:{SECRET}@127.0.0.1:{valkey.port}/0"
    checks = examine(load_settings({"redis_url": url, "model": "someone/tiny", "cache_dir": tmp_path}))
    assert checks[0].verdict is Verdict.FAILED
    assert "refuses the credentials" in checks[0].message
    assert SECRET not in repr(checks)
