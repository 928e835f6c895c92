"""Where the Celery tasks find their queue: the Celery configuration, then the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.client import DEFAULT_URL
from tidemill.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class CelerySettings:
    """What the tasks need to know."""

    redis_url: str
    """`tidemill_redis_url`, or REDIS_URL. Celery's own broker may be somewhere else altogether."""
    queue: str
    """`tidemill_queue`, or TIDEMILL_QUEUE; usually the name of a model."""
    wait: float
    """`tidemill_wait`: seconds that `tidemill.summarize` waits for a worker to appear; 60."""


def celery_settings(conf: Mapping[str, Any], *, queue: str | None = None) -> CelerySettings:
    """Read the settings from a Celery application's `conf`; `queue` overrides its own.

    Raises:
        ConfigurationError: no queue is named anywhere.
    """
    queue = queue or conf.get("tidemill_queue") or os.environ.get("TIDEMILL_QUEUE")
    if not queue:
        raise ConfigurationError("tidemill_queue is not set, in the Celery configuration or TIDEMILL_QUEUE")
    redis_url = conf.get("tidemill_redis_url") or os.environ.get("REDIS_URL") or DEFAULT_URL
    return CelerySettings(redis_url, queue, float(conf.get("tidemill_wait", 60.0)))
