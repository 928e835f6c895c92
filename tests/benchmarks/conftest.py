"""A server for what is measured through the queue: the worker's tests have one."""

from tests.worker.conftest import place, valkey

__all__ = ["place", "valkey"]
