"""Sampling by the Gumbel-max trick, with noise that is a pure function of the job.

The token chosen is `argmax(logits[v] + G[v])`, which is a draw from `softmax(logits)`. The noise
`G[v]` comes from the counter-based generator Philox4x32-10 (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC'11), keyed by the seed and counted by (token, index in the
generation, choice): it depends on nothing that a batch, a preemption or another worker could
change.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tidemill_kernels.jit import Floats, compiled

MAX_GUMBEL = 22.9
"""Above -log(-log(u)) for the largest u below, 1 - 2^-33: a logit this far behind cannot win."""


@compiled
def philox4x32(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Ten rounds of Philox4x32: four 32-bit words from a 128-bit counter and a 64-bit key.

    Arguments and results are words below 2^32.
    """
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@compiled
def gumbel(token: int, index: int, choice: int, seed: np.uint64) -> float:
    """Standard Gumbel noise of one token, the `index`-th of a generation."""
    counter = np.uint64(token)
    words = philox4x32(
        counter >> np.uint64(2),
        np.uint64(index),
        np.uint64(choice),
        np.uint64(0),
        np.uint64(seed) & np.uint64(0xFFFFFFFF),
        np.uint64(seed) >> np.uint64(32),
    )
    lane = counter & np.uint64(3)
    word = words[0]
    if lane == 1:
        word = words[1]
    elif lane == 2:
        word = words[2]
    elif lane == 3:
        word = words[3]
    uniform = (float(word) + 0.5) / 4294967296.0
    return -math.log(-math.log(uniform))


@compiled
def gumbel_argmax(logits: Floats, tokens: NDArray[np.int64], seed: np.uint64, choice: int, index: int) -> int:
    """Draw one of `tokens` with probability `softmax(logits)`.

    Args:
        logits: float32 `[n]`, already divided by the temperature; finite.
        tokens: int64 `[n]`, the token each logit stands for, in any order.
        seed: below 2^63.
        choice: which of several generations of one job.
        index: position of the drawn token in its generation.
    """
    start = np.argmax(logits)
    best_token = tokens[start]
    best = float(logits[start]) + gumbel(best_token, index, choice, seed)
    for i in range(logits.size):
        logit = float(logits[i])
        if logit + MAX_GUMBEL < best:
            continue
        perturbed = logit + gumbel(tokens[i], index, choice, seed)
        if perturbed > best or (perturbed == best and tokens[i] < best_token):
            best, best_token = perturbed, tokens[i]
    return int(best_token)
