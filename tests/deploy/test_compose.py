"""The deployment files agree with the code they start; nothing else would notice before a user does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from packaging.requirements import Requirement

from tests.tidemill.servers import running, valkey_binary
from tidemill_worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
WORKERS = ["worker", "worker-gpu"]


def seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration.removesuffix("s"))


def settings_named_in(text: str) -> set[str]:
    return {name.lower() for name in re.findall(r"TIDEMILL_([A-Z_]+)", text)}


def server_command() -> tuple[list[str], dict[str, str]]:
    """What starts the server, and its options."""
    words: list[str] = COMPOSE["services"]["valkey"]["command"]
    options = words.index("valkey-server") + 1
    return words[:options], dict(zip(words[options::2], words[options + 1 :: 2], strict=True))


def test_the_server_keeps_every_job() -> None:
    _, options = server_command()
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "queue:/data" in COMPOSE["services"]["valkey"]["volumes"]


def test_the_server_is_reachable_from_this_host_only() -> None:
    (port,) = COMPOSE["services"]["valkey"]["ports"]
    assert port.startswith("127.0.0.1:")


def test_the_password_stands_in_no_command() -> None:
    for service in COMPOSE["services"].values():
        assert "${VALKEY_PASSWORD" not in str(service.get("command", ""))


@pytest.mark.parametrize("password", ["", "a-b_C9"])
def test_the_server_takes_the_password_from_its_environment(password: str, tmp_path: Path) -> None:
    with running(server_of_the_image(tmp_path, password)) as server:
        with redis.Redis(port=server.port, password=password or None) as client:
            assert client.ping()
        if password:
            assert password not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
            with server.client() as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()


def server_of_the_image(folder: Path, password: str) -> Path:
    """What the container runs, with this machine's Valkey and an entry point that only passes on."""
    (folder / "valkey-server").symlink_to(valkey_binary())
    write_script(folder / "docker-entrypoint.sh", 'exec "$@"')
    command, _ = server_command()
    quoted = shlex.join(word.replace("$$", "$") for word in command)
    variables = f'PATH="{folder}:$PATH" VALKEYCLI_AUTH="{password}"'
    return write_script(folder / "server", f'{variables} exec {quoted} "$@"')


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_waits_for_a_server_that_is_ready(name: str) -> None:
    assert COMPOSE["services"][name]["depends_on"] == {"valkey": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_given_longer_to_stop_than_it_gives_its_jobs(name: str) -> None:
    grace_period = WorkerSettings.model_fields["grace_period"].default
    assert seconds(COMPOSE["services"][name]["stop_grace_period"]) > grace_period
    assert COMPOSE["services"][name]["init"] is True


@pytest.mark.parametrize("name", WORKERS)
def test_workers_can_be_scaled_on_one_host(name: str) -> None:
    metrics_port = WorkerSettings.model_fields["metrics_port"].default
    assert COMPOSE["services"][name]["ports"] == [f"127.0.0.1::{metrics_port}"]
    assert "container_name" not in COMPOSE["services"][name]


def test_only_the_profile_gpu_asks_for_a_gpu() -> None:
    assert COMPOSE["services"]["worker-gpu"]["profiles"] == ["gpu"]
    (device,) = COMPOSE["services"]["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "deploy" not in COMPOSE["services"]["worker"]


def test_the_gpu_worker_never_computes_on_the_cpu() -> None:
    """It differs from the other one in this alone, and in what only a GPU has."""
    cpu, gpu = (COMPOSE["services"][name]["environment"] for name in WORKERS)
    assert gpu["TIDEMILL_DEVICE"] == "cuda"
    assert gpu.keys() - cpu.keys() == {"TIDEMILL_DEVICE", "TIDEMILL_GPU_MEMORY_UTILIZATION"}
    assert cpu.items() <= gpu.items()


@pytest.mark.parametrize("name", ["compose.yaml", "Dockerfile", "deploy/env.example", "deploy/README.md"])
def test_every_variable_is_a_setting_of_the_worker(name: str) -> None:
    """A worker refuses to start with a variable it does not know."""
    named = settings_named_in((ROOT / name).read_text(encoding="utf-8"))
    assert named
    assert named <= set(WorkerSettings.model_fields)


def test_the_health_check_asks_the_port_that_the_worker_listens_on() -> None:
    port = WorkerSettings.model_fields["metrics_port"].default
    assert f"http://127.0.0.1:{port}/health" in DOCKERFILE
    assert f"EXPOSE {port}" in DOCKERFILE


def test_signals_reach_the_worker() -> None:
    """The shell form would put a shell that forwards nothing in between."""
    assert 'ENTRYPOINT ["tidemill"]' in DOCKERFILE
    assert 'CMD ["worker"]' in DOCKERFILE
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE


def test_the_worker_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (.+)$", DOCKERFILE, flags=re.MULTILINE)
    assert users == ["tidemill"]


def test_constraints_are_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert pins
    loose = [str(pin) for pin in pins if not re.fullmatch(r"==[\w.]+", str(pin.specifier))]
    assert loose == []
