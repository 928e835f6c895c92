"""Logging: one event a line to stderr, as key=value or JSON; quiet unless something happens."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor


def configure_logs(level: str, style: Literal["console", "json"]) -> None:
    """Set up this process's logging. Settings are never logged whole: they hold a password."""
    renderers: dict[str, Processor] = {
        "console": structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        "json": structlog.processors.JSONRenderer(),
    }
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderers[style],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, format="level=%(levelname)s logger=%(name)s event=%(message)r")
