"""The application of a user, as a worker process imports it: `celery -A tests.producer.celery_app`."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery


def make_app(url: str, queue: str) -> Celery:
    """Broker and results on databases of their own, named after `queue`, beside that of Tidemill."""
    host = url.rpartition("/")[0]
    app = Celery("shop", include=["tidemill_producer.celery_tasks"], set_as_current=False)
    app.conf.update(
        broker_url=f"{host}/1",
        result_backend=f"{host}/2",
        broker_transport_options={"visibility_timeout": 2},
        broker_connection_retry_on_startup=True,
        task_default_queue=queue,
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=1,
        tidemill_redis_url=url,
        tidemill_queue=queue,
        tidemill_wait=5,
    )
    return app


@contextmanager
def user_app(url: str, queue: str) -> Iterator[Celery]:
    """An application that is gone afterwards.

    Celery leaves the sockets of each thread's result backend to the garbage collector, which would
    otherwise come upon them, and complain, in the middle of some later test.
    """
    app = make_app(url, queue)
    try:
        yield app
    finally:
        app.close()
        del app
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


if "CELERY_TEST_URL" in os.environ:
    app = make_app(os.environ["CELERY_TEST_URL"], os.environ["CELERY_TEST_QUEUE"])
