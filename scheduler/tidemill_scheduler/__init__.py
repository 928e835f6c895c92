"""Continuous-batching scheduler: paged KV blocks, prefix reuse, chunked prefill, preemption.

Standard library only: no tensors, no clock, no randomness.
"""

from tidemill_scheduler.config import SchedulerConfig
from tidemill_scheduler.costs import PreemptionMode, RestoreCosts
from tidemill_scheduler.errors import DuplicateSequence, IntegrityError, NeverFits, SchedulerError
from tidemill_scheduler.plan import BlockCopy, Row, StepPlan
from tidemill_scheduler.scheduler import Scheduler
from tidemill_scheduler.sequence import BlockId, Sequence, SequenceId

__all__ = [
    "BlockCopy",
    "BlockId",
    "DuplicateSequence",
    "IntegrityError",
    "NeverFits",
    "PreemptionMode",
    "RestoreCosts",
    "Row",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "Sequence",
    "SequenceId",
    "StepPlan",
]
