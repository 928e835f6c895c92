"""What min_p, top_k and top_p leave of a row of logits, found without sorting the vocabulary.

Each of them sets the logits that it drops to -inf, so that the next one starts from what is left.
top_k and top_p are one question: the smallest set of likeliest tokens whose masses together reach
a target. A token's mass is 1 for top_k, its softmax weight for top_p. The answer is searched digit
by digit of the place in the order, as a radix sort would, but following one digit only (radix
select). Masses are integers, so the sums are exact. Of equally likely tokens those with the lower
ids are taken first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tidemill_kernels.exact_logits import INFINITE, order, order_bounds, value, weight
from tidemill_kernels.jit import part

DIGITS = 256
"""Masses that the search counts at a time; it needs room for so many."""

_STRETCH = 64  # tokens of which only the greatest is looked at first
_NEAR, _FARTHER, _FAR = 2.0, 4.0, 8.0  # gaps to the peak within which most smallest sets end


@part
def keep_min_p(x: Any, count: int, peak: float, min_p: float) -> None:
    """Drop what is less than `min_p` times as likely as the logit `peak`, the greatest."""
    floor = np.float32(math.log(min_p))
    for i in range(count):
        x[i] = x[i] if np.float32(x[i] - peak) >= floor else np.float32(-np.inf)


@part
def keep_top_k(x: Any, count: int, peak: float, top_k: int, held: Any, masses: Any, digits: Any) -> None:
    """Drop all but the `top_k` likeliest; 0 < top_k < count."""
    floor = _floor_of_top_k(x, count, peak, top_k, held, masses, digits)
    found = _collect(x, count, floor, held)
    if found < top_k:
        return
    for i in range(found):
        masses[i] = 1
    _keep_smallest_set(x, count, peak, found, top_k, held, masses, digits)


@part
def keep_top_p(x: Any, count: int, peak: float, top_p: float, held: Any, masses: Any, digits: Any) -> None:
    """Drop all but the smallest set that has `top_p` of the probability; 0 < top_p < 1."""
    target, floor = _target_of_top_p(x, count, peak, top_p)
    found = _collect(x, count, floor, held)
    for i in range(found):
        masses[i] = weight(np.float32(held[i] - peak))
    _keep_smallest_set(x, count, peak, found, target, held, masses, digits)


@part
def _floor_of_top_k(x: Any, count: int, peak: float, top_k: int, held: Any, masses: Any, digits: Any) -> int:
    """An order below which none of the `top_k` likeliest is; above that of -inf.

    Of the greatest tokens of all stretches, `top_k` are at least as likely as the last of them.
    """
    found = 0
    for start in range(0, count, _STRETCH):
        _, greatest = order_bounds(x, start, min(start + _STRETCH, count))
        held[found] = value(greatest)
        masses[found] = 1
        found += greatest > -INFINITE
    if top_k > found:
        return -INFINITE + 1
    lowest, _, _ = _smallest_set(held, masses, found, peak, top_k, digits)
    return lowest


@part
def _target_of_top_p(x: Any, count: int, peak: float, top_p: float) -> tuple[int, int]:
    """The mass that has `top_p` of the probability; and an order, above that of -inf, below which no
    token of the smallest set with this mass is.
    """
    total = near = farther = far = 0
    for i in range(count):
        gap = np.float32(x[i] - peak)
        mass = weight(gap)
        total += mass
        near += mass if gap >= np.float32(-_NEAR) else 0
        farther += mass if gap >= np.float32(-_FARTHER) else 0
        far += mass if gap >= np.float32(-_FAR) else 0
    target = min(max(math.ceil(top_p * float(total)), 1), total)
    reach = np.inf
    if near >= target:
        reach = _NEAR
    elif farther >= target:
        reach = _FARTHER
    elif far >= target:
        reach = _FAR
    # A logit that rounds to the peak less the reach may be one step of the order below it.
    return target, max(order(np.float32(peak - reach)) - 1, -INFINITE + 1)


@part
def _keep_smallest_set(
    x: Any, count: int, peak: float, found: int, target: int, held: Any, masses: Any, digits: Any
) -> None:
    """Drop all logits that are not in the smallest set; see `_smallest_set`."""
    lowest, kept, equal = _smallest_set(held, masses, found, peak, target, digits)
    for i in range(count):
        x[i] = x[i] if order(x[i]) >= lowest else np.float32(-np.inf)
    if kept < equal:
        seen = 0
        for i in range(count):
            if order(x[i]) == lowest:
                seen += 1
                if seen > kept:
                    x[i] = np.float32(-np.inf)


@part
def _collect(x: Any, count: int, floor: int, held: Any) -> int:
    """Copy the logits whose order is at least `floor`; return how many there are."""
    found = 0
    for start in range(0, count, _STRETCH):
        stop = min(start + _STRETCH, count)
        _, greatest = order_bounds(x, start, stop)
        if greatest >= floor:
            for i in range(start, stop):
                held[found] = x[i]
                found += order(x[i]) >= floor
    return found


@part
def _smallest_set(
    held: Any, masses: Any, count: int, peak: float, target: int, digits: Any
) -> tuple[int, int, int]:
    """Find the smallest set of greatest logits whose masses reach `target`.

    Uses up `held` and `masses`; the masses are together at least `target` > 0, and equal ones for
    equal logits, of which none is above `peak` or infinite.

    Returns:
        The order of the least in the set, how many of this order are in it, and how many there are.
    """
    count, target = _narrow(held, masses, count, peak, target, digits)
    least, greatest = order_bounds(held, 0, count)
    shift = 0
    while (greatest - least) >> shift >= DIGITS:
        shift += 8
    while shift >= 0:
        for digit in range(DIGITS):
            digits[digit] = 0
        for i in range(count):
            digits[((greatest - order(held[i])) >> shift) & (DIGITS - 1)] += masses[i]
        chosen, before = _digit_of_target(digits, target)
        target -= before
        found = 0
        for i in range(count):
            held[found], masses[found] = held[i], masses[i]
            found += ((greatest - order(held[i])) >> shift) & (DIGITS - 1) == chosen
        count = found
        shift -= 8
    return order(held[0]), (target + masses[0] - 1) // masses[0], count


@part
def _narrow(held: Any, masses: Any, count: int, peak: float, target: int, digits: Any) -> tuple[int, int]:
    """Keep only the logits in that one of `DIGITS` equal intervals in which `target` is reached.

    Returns how many these are, and the target less the masses of greater logits.
    """
    least, _ = order_bounds(held, 0, count)
    spread = min(max(np.float32(peak - value(least)), np.float32(1e-30)), np.float32(1e38))
    scale = np.float32(np.float32(DIGITS - 1) / spread)
    for digit in range(DIGITS):
        digits[digit] = 0
    for i in range(count):
        digits[_interval(held[i], peak, scale)] += masses[i]
    chosen, before = _digit_of_target(digits, target)
    found = 0
    for i in range(count):
        digit = _interval(held[i], peak, scale)
        held[found], masses[found] = held[i], masses[i]
        found += digit == chosen
    return found, target - before


@part
def _interval(logit: Any, peak: Any, scale: Any) -> int:
    return int(min(np.float32(np.float32(peak - logit) * scale), np.float32(DIGITS - 1)))


@part
def _digit_of_target(digits: Any, target: int) -> tuple[int, int]:
    """The first digit up to which the masses reach `target`, and the mass of those before it."""
    digit = before = 0
    while before + digits[digit] < target:
        before += digits[digit]
        digit += 1
    return digit, before
