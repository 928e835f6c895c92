"""Factories for the sizes of a worker."""

from __future__ import annotations

import torch

from tidemill_worker.model.kv_cache import KVCacheSpec
from tidemill_worker.settings import WorkerSettings, load_settings
from tidemill_worker.sizing import MEAN_LENGTH, ON_CPU, Defaults, Sizing, size

SMOLLM2 = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
"""45 KiB a token."""


def make_sizing(
    settings: WorkerSettings | None = None,
    *,
    num_blocks: int = 1456,
    context: int = 2048,
    defaults: Defaults = ON_CPU,
    mean_length: int = MEAN_LENGTH,
) -> Sizing:
    """Of a worker with so many blocks; 1456 are 1 GiB."""
    return size(
        settings or load_settings(),
        SMOLLM2,
        context=context,
        kv_cache_memory=num_blocks * SMOLLM2.bytes_per_block,
        defaults=defaults,
        mean_length=mean_length,
    )
