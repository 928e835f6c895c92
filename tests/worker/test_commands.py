"""The worker's commands as a user meets them: options, exit statuses, one line that says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import tomllib
from pathlib import Path

import pytest
import redis
import structlog
from huggingface_hub import constants
from packaging.requirements import Requirement

from tests.tidemill.servers import Server, running, valkey_binary
from tidemill.__main__ import main
from tidemill.errors import ConfigurationError
from tidemill.exit_codes import ExitCode
from tidemill_worker.demo import package_descriptions
from tidemill_worker.doctor import PACKAGES, Verdict, examine
from tidemill_worker.embedded import embedded_valkey
from tidemill_worker.logs import configure_logs
from tidemill_worker.settings import WorkerSettings, load_settings


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    for name in WorkerSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "TIDEMILL_MAX_NUM_SEQS" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--block-size", "0"], "block_size='0'"),
        (["--kv-cache-memory", "lots"], "kv_cache_memory='lots'"),
        (["--redis-url", "http://here"], "redis_url"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["worker", *arguments]) == ExitCode.USAGE
    assert named in error_of(capsys)


def test_a_misspelt_variable_stops_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_MAX_MODEL_LENGTH", "8")
    assert main(["worker"]) == ExitCode.USAGE
    assert "TIDEMILL_MAX_MODEL_LENGTH" in error_of(capsys)


def test_no_redis_at_the_start_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    port = closed_port()
    assert main(["worker", "--redis-url", f"redis://127.0.0.1:{port}/0"]) == ExitCode.UNAVAILABLE
    assert f"127.0.0.1:{port} cannot be reached" in error_of(capsys)


def test_a_wrong_password_is_one_clear_line_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    with running(valkey_binary(), "--requirepass", "correct") as server:
        url = f"redis://:hunter2@127.0.0.1:{server.port}/0"
        assert main(["worker", "--redis-url", url]) == ExitCode.UNAVAILABLE
    message = error_of(capsys)
    assert "refuses the credentials" in message
    assert "hunter2" not in message


def test_a_port_in_use_stops_the_start(capsys: pytest.CaptureFixture[str], valkey: Server) -> None:
    arguments = ["worker", "--redis-url", valkey.url, "--metrics-port", str(valkey.port)]
    assert main(arguments) == ExitCode.USAGE
    assert f"metrics_port: cannot listen on 127.0.0.1:{valkey.port}" in error_of(capsys)


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str], valkey: Server) -> None:
    arguments = ["--redis-url", valkey.url, "--model", "/nowhere/model", "--metrics-port", "0"]
    assert main(["worker", *arguments]) == ExitCode.FAILED
    assert "/nowhere/model" in error_of(capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cuda"], "device=cuda: torch"),
        (["--device", "cpu", "--dtype", "bfloat16"], "dtype=bfloat16: on CPU the model runs in float32"),
        (["--device", "tpu"], "device='tpu': Input should be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_a_device_that_cannot_be_had_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    valkey: Server,
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    common = ["--redis-url", valkey.url, "--model", "/nowhere/model", "--metrics-port", "0"]
    assert main(["worker", *common, *arguments]) == ExitCode.USAGE
    assert named in error_of(capsys)


def test_the_doctor_finds_a_good_installation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--appendonly", "yes", "--maxmemory-policy", "noeviction"]
    with running(valkey_binary(), *options) as server:
        arguments = ["doctor", "--json", "--redis-url", server.url, "--cache-dir", str(tmp_path / "cache")]
        assert main(arguments) == ExitCode.OK
    checks = {check["name"]: check for check in map(json.loads, capsys.readouterr().out.splitlines())}
    assert checks["redis"]["message"].startswith("Valkey 9.")
    verdicts = {name: check["verdict"] for name, check in checks.items()}
    assert {*verdicts.values()} == {"ok"}, verdicts
    assert {*verdicts} == {
        *(
            "redis",
            "redis memory",
            "redis persistence",
            "packages",
            "device",
            "kernels",
            "threads",
            "cache_dir",
            "model",
        )
    }


def test_the_doctor_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with running(valkey_binary(), "--maxmemory-policy", "allkeys-lru") as server:
        settings = load_settings(
            {
                "redis_url": server.url,
                "cache_dir": tmp_path / "file" / "cache",
                "model": "absent",
                "threads": 1000,
                "dtype": "float16",
                "device": "cpu",
            }
        )
        checks = {check.name: check for check in examine(settings)}
    verdicts = {name: check.verdict for name, check in checks.items()}
    assert verdicts["redis memory"] is Verdict.FAILED
    assert "noeviction" in checks["redis memory"].message
    assert verdicts["redis persistence"] is Verdict.WARNING
    assert verdicts["cache_dir"] is Verdict.FAILED
    assert verdicts["model"] is Verdict.FAILED
    assert verdicts["threads"] is Verdict.WARNING
    assert checks["device"].message == "dtype=float16: on CPU the model runs in float32"


def test_the_doctor_knows_every_package_of_a_worker() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["cli"], *extras["worker"]]
    assert {Requirement(line).name for line in asked} - {"tidemill"} == set(PACKAGES)


def test_the_doctor_tells_a_cached_hub_id_from_one_to_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    settings = load_settings({"redis_url": f"redis://127.0.0.1:{closed_port()}/0", "model": "someone/tiny"})
    absent = examine(settings)[-1]
    assert (absent.name, absent.verdict) == ("model", Verdict.WARNING)
    assert "someone/tiny is not here; it will be fetched" in absent.message
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    present = examine(settings)[-1]
    assert (present.verdict, present.message.split(" is in ")[0]) == (Verdict.OK, "someone/tiny")


def test_the_doctor_fails_without_redis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{closed_port()}/0"
    assert main(["doctor", "--redis-url", url, "--cache-dir", str(tmp_path)]) == ExitCode.FAILED
    assert "FAIL  redis: " in capsys.readouterr().out


def test_the_embedded_queue_keeps_its_data_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    with embedded_valkey(folder) as url, redis.Redis.from_url(url, protocol=2) as client:
        client.set("kept", "1")
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        with (
            pytest.raises(ConfigurationError, match="another demo's queue is running"),
            embedded_valkey(folder),
        ):
            pass
    with embedded_valkey(folder) as url, redis.Redis.from_url(url, protocol=2) as client:
        assert client.get("kept") == b"1"
    with (
        embedded_valkey(folder, fresh=True) as url,
        redis.Redis.from_url(url, protocol=2) as client,
    ):
        assert client.get("kept") is None
        pid = int(client.info("server")["process_id"])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupt_does_not_reach_the_embedded_queue(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal; the queue must live until the worker has let go."""
    with embedded_valkey(tmp_path) as url, redis.Redis.from_url(url, protocol=2) as client:
        os.kill(int(client.info("server")["process_id"]), signal.SIGINT)
        assert client.ping() is True


def test_the_demo_has_documents_that_others_wrote() -> None:
    descriptions = package_descriptions(12)
    assert len(descriptions) == 12
    assert "tidemill" not in descriptions
    assert descriptions == package_descriptions(12)
    assert all(len(text) > 1000 for text in descriptions.values())


@pytest.mark.parametrize(
    ("style", "expected"), [("console", "event=claimed jobs=3"), ("json", '"jobs": 3, "event": "claimed"')]
)
def test_logs_are_one_line_an_event(capsys: pytest.CaptureFixture[str], style: str, expected: str) -> None:
    configure_logs("info", style)  # type: ignore[arg-type]
    structlog.get_logger().debug("hidden")
    structlog.get_logger().info("claimed", jobs=3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.count("\n") == 1
