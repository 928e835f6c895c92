"""What it costs to bring a preempted sequence back: by computing again, or by copying."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """What becomes of the blocks of a preempted sequence."""

    AUTO = "auto"
    """They go to the swap space where copying them both ways costs less than computing them again."""
    SWAP = "swap"
    """They go to the swap space, as far as it has room."""
    RECOMPUTE = "recompute"
    """They are left to the prefix cache of the device, and computed again once it has forgotten them."""


@dataclass(frozen=True, slots=True)
class RestoreCosts:
    """Measured by whoever executes the plans; the scheduler itself has no clock."""

    seconds_per_token: float = 1e-3
    """To compute one token of a prompt: the reciprocal of the prefill speed."""
    seconds_per_block: float = 1e-4
    """To copy one block between the device and the swap space, one way."""
