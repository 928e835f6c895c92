"""After the warm-up, nothing is compiled any more."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from numba.core import compiler

from tests.kernels.factories import Model, make_batch, make_tokens
from tidemill_kernels.activations import silu
from tidemill_kernels.choose_tokens import ROW, choose_tokens, scratch_bytes
from tidemill_kernels.kv_write import kv_write
from tidemill_kernels.paged_attention import paged_attention
from tidemill_kernels.rank_tokens import rank_tokens
from tidemill_kernels.warm_up import warm_up


def test_serving_never_waits_for_a_compiler() -> None:
    warm_up(9, 3, 64, 16)
    model = Model()
    tokens = make_tokens(40, model)
    batch = make_batch([(tokens, 3, 40)], model)
    with patch.object(compiler, "compile_extra", side_effect=AssertionError("compiled")):
        paged_attention(*batch.tensors, scale=batch.scale)
        kv_write(tokens.key, tokens.value, batch.kv_cache, 0, batch.context_lens.new_zeros(40).long())
        silu(tokens.key)
        row = np.zeros(1, ROW)
        row["logits"], row["temperature"], row["top_p"] = tokens.key.data_ptr(), 0.5, 0.5
        scratch = np.empty(scratch_bytes(5) // 8 * torch.get_num_threads(), np.int64)
        choose_tokens(row, 5, scratch)
        rank_tokens(row["logits"].copy(), np.zeros(1, np.int64), vocabulary=5, num_top=2)
