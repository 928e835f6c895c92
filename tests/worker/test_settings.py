"""Settings: flags over variables over defaults; what is wrong stops the start and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.errors import ConfigurationError
from tidemill_scheduler import PreemptionMode
from tidemill_worker.settings import WorkerSettings, load_settings


def test_defaults_serve_the_embedded_model() -> None:
    settings = load_settings()
    assert settings.queue_name == settings.model_name == "SmolLM2-135M-Instruct"
    assert settings.renewal_interval == settings.lease / 3


def test_a_flag_beats_a_variable_beats_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("TIDEMILL_LEASE", "60")
    settings = load_settings({"max_num_seqs": "9", "lease": None})
    assert (settings.max_num_seqs, settings.lease, settings.block_size) == (9, 60.0, 16)


def test_redis_url_is_read_from_the_usual_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://a:1/0")
    assert load_settings().redis_url.get_secret_value() == "redis://a:1/0"
    monkeypatch.setenv("TIDEMILL_REDIS_URL", "redis://b:1/0")
    assert load_settings().redis_url.get_secret_value() == "redis://b:1/0"
    assert load_settings({"redis_url": "redis://c:1/0"}).redis_url.get_secret_value() == "redis://c:1/0"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("block_size", "0", "greater than or equal to 1"),
        ("max_num_seqs", "many", "valid integer"),
        ("dtype", "int3", "'float32'"),
        ("max_model_len", "1", "greater than or equal to 2"),
        ("gpu_memory_utilization", "1.5", "less than or equal to 1"),
        ("kv_cache_memory", "nan", "finite"),
        ("metrics_port", "70000", "less than or equal to 65535"),
        ("enable_prefix_caching", "perhaps", "boolean"),
        ("queue", "two words", "match pattern"),
        ("log_level", "loud", "'debug'"),
        ("swap_space", "-1", "greater than or equal to 0"),
        ("preemption_mode", "drop", "'auto', 'swap' or 'recompute'"),
        ("stall_timeout", "0", "greater than 0"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "variable"])
def test_a_wrong_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str, source: str
) -> None:
    flags = {}
    if source == "flag":
        flags[name] = value
    else:
        monkeypatch.setenv(f"TIDEMILL_{name.upper()}", value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(flags)
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}: ")
    assert reason in message
    assert "\n" not in message


def test_an_unknown_variable_is_a_misspelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_MAX_NUM_SEQ", "3")
    with pytest.raises(ConfigurationError, match="did you mean TIDEMILL_MAX_NUM_SEQS"):
        load_settings()


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="swap_spice"):
        load_settings({"swap_spice": 1})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"renewal": 20, "lease": 30}, "renewal"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"model": "a model"}, "served_model_name"),
    ],
)
def test_values_that_do_not_go_together_are_refused(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}: "):
        load_settings(flags)


@pytest.mark.parametrize("url", ["http://:hunter2@redis:6379", "hunter2"])
def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    with pytest.raises(ConfigurationError, match="redis://") as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("REDIS_URL", "redis://:hunter2@redis:6379/0")
    assert "hunter2" not in repr(load_settings())


def test_an_unknown_variable_does_not_show_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_PASSWORD", "hunter2")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://a:1/0", "rediss://a:1/0", "unix:///run/redis.sock", "redis+sentinel://a,b/mymaster"),
        *("rediss+sentinel://a/mymaster", "redis+cluster://a:1,b:2", "rediss+cluster://a"),
    ],
)
def test_every_kind_of_url_is_a_redis_url(url: str) -> None:
    assert load_settings({"redis_url": url}).redis_url.get_secret_value() == url


def test_a_folder_serves_under_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert load_settings({"model": str(folder)}).queue_name == "my-model"
    assert load_settings({"model": str(tmp_path / "tiny.Q4.gguf")}).model_name == "tiny.Q4"


def test_sizes_are_left_open_unless_they_are_set() -> None:
    settings = load_settings()
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.swap_space) == (None, None, None)
    assert settings.preemption_mode is PreemptionMode.AUTO
    assert load_settings({"preemption_mode": "swap"}).preemption_mode is PreemptionMode.SWAP


def test_settings_are_frozen_and_all_described() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().lease = 3.0
    undescribed = [name for name, field in WorkerSettings.model_fields.items() if not field.description]
    assert undescribed == []


@pytest.mark.parametrize("field", ["kv_cache_memory", "swap_space"])
def test_memory_beyond_any_machine_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{field}=1e\+300: .*1000000"):
        load_settings({field: 1e300})
