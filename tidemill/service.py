"""What tenants share: service, counted in units and divided by the tenant's weight.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), in whose words a unit is
a prompt token, w_p = 1 and w_q = 2. The rules that follow from it are in `lua/_service.lua`.

A job is charged for what it gets, not for what that took: its prompt once, whether it was computed,
found in the cache, computed again by the next worker, or shared by `n` generations; and every
token of every generation once. So the same answer costs the same wherever and however often it was
tried, a worker's death costs the tenant nothing, and a repeated report cannot charge twice.

A prompt that a worker has begun counts in full even if the job ends before its first token, at its
deadline or by a cancellation: else a tenant of nothing but long prompts and short deadlines would be
served least for ever, and everybody else starve. A job that a worker answers without having begun it,
such as one that it refuses, counts one unit, for the same reason.
"""

from __future__ import annotations

UNITS_PER_PROMPT_TOKEN = 1
UNITS_PER_GENERATED_TOKEN = 2
"""The paper's, which took them from prices: a prompt is computed many tokens a step, an answer one by one."""

MIN_WEIGHT = 0.01
MAX_WEIGHT = 100.0
"""Between these a unit stays exact: up to the largest number that a double counts to, 2^53, a queue that
serves a million units a second counts for almost three years without falling idle, even if all its
tenants have the least weight."""


def check_weight(weight: float) -> None:
    """Refuse a weight under which service could not be counted.

    Raises:
        ValueError: naming the limits.
    """
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, got {weight}")
