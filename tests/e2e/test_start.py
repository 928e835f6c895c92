"""A worker that cannot start says why in one line, with an exit status that means something."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.processes import command_line, run_command
from tests.tidemill.servers import Server, free_port, running, valkey_binary
from tidemill.exit_codes import ExitCode

MOST_BLOCKS = 100_000
"""Of 512 or 1024 bytes, as the shell has it: some tens of MB, a fraction of the model."""
pytestmark = pytest.mark.timeout(120)


def assert_refused(ended: subprocess.CompletedProcess[bytes], code: ExitCode, *says: str) -> None:
    """One line, on standard error, and no traceback."""
    message = ended.stderr.decode()
    assert (ended.returncode, ended.stdout, message.count("\n")) == (code, b"", 1), message
    assert message.startswith("tidemill: ")
    for words in says:
        assert words in message


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--max-num-seqs", "0"], {}, ["max_num_seqs='0'", "greater than or equal to 1"]),
        (["--dtype", "int3"], {}, ["dtype='int3'"]),
        (["--lease", "nan"], {}, ["lease='nan'", "finite number"]),
        ([], {"TIDEMILL_MAX_NUM_SEQ": "4"}, ["TIDEMILL_MAX_NUM_SEQ:", "TIDEMILL_MAX_NUM_SEQS?"]),
        ([], {"TIDEMILL_BLOCK_SIZE": "many"}, ["block_size='many'"]),
        ([], {"REDIS_URL": "localhost:6379"}, ["redis_url: not a Redis URL"]),
    ],
)
def test_a_wrong_setting_is_named(
    arguments: list[str], environment: Mapping[str, str], says: list[str]
) -> None:
    assert_refused(run_command("worker", *arguments, environment=environment), ExitCode.USAGE, *says)


def test_an_unknown_flag_is_named() -> None:
    ended = run_command("worker", "--max-num-sequences", "4")
    assert ended.returncode == ExitCode.USAGE
    assert b"No such option: --max-num-sequences" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_server_that_is_down_is_named() -> None:
    port = free_port()
    ended = run_command("worker", environment={"REDIS_URL": f"redis://127.0.0.1:{port}/0"})
    assert_refused(ended, ExitCode.UNAVAILABLE, f"127.0.0.1:{port} cannot be reached")


def test_a_wrong_password_is_named_but_not_shown() -> None:
    with running(valkey_binary(), "--requirepass", "right") as guarded:
        url = f"redis://:hunter2@127.0.0.1:{guarded.port}/0"
        ended = run_command("worker", environment={"REDIS_URL": url})
        assert_refused(ended, ExitCode.UNAVAILABLE, "refuses the credentials")
        assert b"hunter2" not in ended.stderr
        nobody = run_command("worker", "--redis-url", f"redis://127.0.0.1:{guarded.port}/0")
        assert_refused(nobody, ExitCode.UNAVAILABLE, "Authentication required")


def test_a_port_in_use_is_named(server: Server) -> None:
    ended = run_command("worker", "--redis-url", server.url, "--metrics-port", str(server.port))
    assert_refused(ended, ExitCode.USAGE, f"metrics_port: cannot listen on 127.0.0.1:{server.port}")


def test_a_model_that_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    ended = run_command(
        "worker", "--redis-url", server.url, "--metrics-port", "0", "--model", "gone", folder=tmp_path
    )
    assert_refused(ended, ExitCode.FAILED, "model: 'gone' is neither")


def test_a_full_disk_is_named_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """A limit on the size of files fails the same writes as a full disk, for every user, root too."""
    cache = tmp_path / "cache"
    worker = command_line(
        "worker", "--redis-url", server.url, "--metrics-port", "0", "--cache-dir", str(cache)
    )
    limited = ["sh", "-c", f'ulimit -f {MOST_BLOCKS} && exec "$@"', "sh", *worker]
    ended = subprocess.run(limited, capture_output=True, timeout=100, check=False)
    assert_refused(ended, ExitCode.USAGE, f"cache_dir: cannot store the converted model in {cache}")
    assert list(cache.iterdir()) == []
