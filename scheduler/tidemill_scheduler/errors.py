"""Every way the scheduler says no.

SchedulerError
├── NeverFits          the sequence exceeds a limit even with all memory to itself
├── DuplicateSequence  a sequence with this id is here already
└── IntegrityError     the scheduler's own books do not balance: a bug, here or in the caller
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of what the scheduler raises on purpose."""


class NeverFits(SchedulerError):
    """The sequence could not be finished even alone: it needs `needed` of `limit` tokens of `field`.

    `field` is `max_model_len` or `kv_cache_tokens`.
    """

    def __init__(self, field: str, *, needed: int, limit: int) -> None:
        super().__init__(f"{field}: the sequence needs up to {needed} tokens, the limit is {limit}")
        self.field = field
        self.needed = needed
        self.limit = limit


class DuplicateSequence(SchedulerError):
    """A sequence with this id has not ended yet; the one that is here goes on undisturbed."""


class IntegrityError(SchedulerError):
    """Blocks, reference counts and tables contradict each other."""
