"""What the scheduler has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Everything counted from the scheduler's beginning; each number only rises."""

    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    """Preemptions whose blocks were kept for the swap space; after the others they are computed again."""
    num_recomputed_tokens: int = 0
    """Tokens computed once more because a preemption lost them."""
    num_blocks_swapped_out: int = 0
    """Blocks copied to the swap space."""
    num_blocks_swapped_in: int = 0
    """Blocks copied back to the device."""
    num_prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache, each sequence once, at its first admission. Neither those
    that fork nor those that compute their prompt ask."""
    num_prefix_hit_tokens: int = 0
    """Those of them that were found."""
    num_swap_hit_tokens: int = 0
    """Those of these that were found in the swap space."""
