"""After the warm-up, nothing is compiled any more."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from numba.core import compiler

from tests.kernels.factories import Model, make_batch, make_tokens
from tidemill_kernels.gumbel_argmax import gumbel_argmax
from tidemill_kernels.kv_write import kv_write
from tidemill_kernels.paged_attention import paged_attention
from tidemill_kernels.silu import silu
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
        gumbel_argmax(torch.zeros(5).numpy(), torch.arange(5).numpy(), np.uint64(1), choice=0, index=3)
