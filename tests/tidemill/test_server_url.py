"""URLs: what is wrong in one is refused, and shown only where it cannot be a part of a password."""

from __future__ import annotations

import pytest

from tidemill.connection import connect
from tidemill.errors import ConfigurationError
from tidemill.server_url import Kind, ServerURL


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.org", "nonsense", "", "redis://host:port/0", "redis://", "redis:///1"),
        *("redis://host/abc", "redis://host/1/2", "redis://host/-1", "redis://host/1?db=2", "redis://a,b"),
        *("redis://host#1", "redis://host/0@host", "unix://tmp/socket", "unix://"),
        *("redis+cluster://host/1", "redis+cluster://host?db=1", "redis+cluster://a,,b", "redis+cluster://"),
        *("redis+sentinel://host", "redis+sentinel://host/service/zero", "redis+sentinel://host/service/1/2"),
        *("redis+sentinel://host:port/service", "redis+elsewhere://host", "unix+cluster:///socket"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^not a Redis URL; expected .* percent-encoded$") as caught:
        connect(url)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "url",
    [
        *("redis://user:123?sec=ret@host", "redis://user:123?sec@host/0", "redis://user:123/sec@host/0"),
        *("redis://user:123#sec@host", "redis+cluster://user:123?sec=ret@a,b", "unix://user:pa?sec@/socket"),
        *(
            "redis+sentinel://user:1/sec?ret@host/service",
            "redis://:pass?sec=ret",
            "redis://u:a@1?sec=ret@host",
        ),
    ],
)
def test_no_part_of_a_password_that_is_not_encoded_is_taken_for_something_else(url: str) -> None:
    """It would be told as a host that cannot be reached, or as an option that is not known."""
    with pytest.raises(ConfigurationError, match="not a Redis URL"):
        connect(url)


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("redis://host?colour=1", "client_name, db, password, username"),
        ("unix:///socket?colour", "client_name, db, password, username"),
        (
            "redis+sentinel://host/service?colour=1",
            "db, password, sentinel_password",
        ),
        ("rediss+cluster://host?ssl_cert_reqs=none&colour=1", "db, password, ssl_ca_certs, ssl_ca_data"),
    ],
)
def test_an_option_that_is_not_known_is_named_with_those_that_are(url: str, known: str) -> None:
    with pytest.raises(ConfigurationError, match=r"options of the Redis URL: 'colour'") as caught:
        connect(url)
    assert known in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        *("protocol=3", "decode_responses=True", "socket_timeout=1", "max_connections=1"),
        *("credential_provider=x", "ssl_cert_reqs=none", "sentinel_password=x"),
    ],
)
def test_nor_are_those_that_would_not_be_heard(option: str) -> None:
    """An option that is accepted has its effect: TLS without `rediss://` would have none."""
    with pytest.raises(ConfigurationError, match=option.partition("=")[0]):
        connect(f"redis://host?{option}")


def test_what_stands_behind_a_password_is_not_named() -> None:
    """Given `&` in a password that is an option, its end looks like one more option."""
    for url in ("rediss://host?password=a&secret=1", "rediss://host?ssl_password=a&ssl_cert_reqs=secret"):
        with pytest.raises(ConfigurationError, match="options of the Redis URL") as caught:
            connect(url)
        assert "secret" not in str(caught.value)


def test_a_password_may_have_any_character_that_is_encoded_or_harmless() -> None:
    for password, said in (("p%40ss%3F%2F%23", "p@ss?/#"), ("p@ss", "p@ss"), ("a,b:c", "a,b:c")):
        for url in (f"redis://u:{password}@host", f"redis+cluster://u:{password}@host,other"):
            assert ServerURL.parse(url).options["password"] == said


@pytest.mark.parametrize(
    ("url", "kind", "seeds", "database"),
    [
        ("redis://host", Kind.SINGLE, "host:6379", 0),
        ("rediss://host:7/2", Kind.SINGLE, "host:7", 2),
        ("redis://host?db=3", Kind.SINGLE, "host:6379", 3),
        ("redis://host/?client_name=me", Kind.SINGLE, "host:6379", 0),
        ("unix:///run/socket?db=4", Kind.SINGLE, "", 4),
        ("redis+sentinel://a,[::1]:7/service/5", Kind.SENTINEL, "a:26379 [::1]:7", 5),
        ("redis+cluster://a,b:7/0", Kind.CLUSTER, "a:6379 b:7", 0),
    ],
)
def test_servers_and_database_are_found(url: str, kind: Kind, seeds: str, database: int) -> None:
    parsed = ServerURL.parse(url)
    assert (parsed.kind, " ".join(map(str, parsed.seeds))) == (kind, seeds)
    assert parsed.options.get("db", 0) == database
