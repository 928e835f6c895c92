"""Where the model runs and how much memory its KV cache gets, for machines of every kind."""

from __future__ import annotations

import pytest
import torch

from tidemill.errors import ConfigurationError
from tidemill_worker.model.device import (
    check_room,
    choose_device,
    choose_dtype,
    gpu_obstacle,
    kv_cache_share,
    place,
)

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NO_GPU = "torch sees no GPU"


@pytest.mark.parametrize(
    ("device", "dtype", "obstacle", "expected"),
    [
        ("auto", "auto", None, CUDA),
        ("auto", "auto", NO_GPU, CPU),
        ("cpu", "auto", None, CPU),
        ("cpu", "float32", NO_GPU, CPU),
        ("cuda", "float16", None, CUDA),
        ("auto", "bfloat16", None, CUDA),
    ],
)
def test_auto_takes_a_gpu_where_there_is_one(
    device: str, dtype: str, obstacle: str | None, expected: torch.device
) -> None:
    assert choose_device(device, dtype, obstacle=obstacle) == expected


@pytest.mark.parametrize(
    ("device", "dtype", "obstacle", "message"),
    [
        ("cuda", "auto", NO_GPU, "device=cuda: torch sees no GPU"),
        ("cpu", "bfloat16", None, "dtype=bfloat16: on CPU the model runs in float32"),
        ("auto", "float16", NO_GPU, "dtype=float16: on CPU the model runs in float32"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(
    device: str, dtype: str, obstacle: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        choose_device(device, dtype, obstacle=obstacle)
    assert str(refused.value) == message


def test_a_build_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_obstacle() == f"torch {torch.__version__} is a build without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert str(gpu_obstacle()).startswith("torch sees no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_obstacle() is None


@pytest.mark.parametrize(
    ("dtype", "device", "stored", "expected"),
    [
        ("auto", CPU, torch.bfloat16, torch.float32),
        ("auto", CUDA, torch.bfloat16, torch.bfloat16),
        ("auto", CUDA, torch.float16, torch.float16),
        ("auto", CUDA, None, torch.float32),
        ("auto", CUDA, torch.float64, torch.float32),
        ("float16", CUDA, torch.bfloat16, torch.float16),
        ("float32", CPU, torch.bfloat16, torch.float32),
    ],
)
def test_the_type_asked_for_or_the_checkpoints_own(
    dtype: str, device: torch.device, stored: torch.dtype | None, expected: torch.dtype
) -> None:
    assert choose_dtype(dtype, device, stored=stored) is expected


def test_weights_and_kv_cache_share_what_the_setting_allows() -> None:
    """Given 80 GiB, of which 0.9 are ours and the weights take 16, then 56 remain for the cache."""
    share = kv_cache_share(utilization=0.9, total=80 * GIB, free=63 * GIB, weights=16 * GIB)
    assert share == 72 * GIB - 16 * GIB


@pytest.mark.parametrize(
    ("utilization", "free", "weights", "message"),
    [
        (0.2, 63, 16, "that is 16.0 GiB of 80.0 GiB, and the model's weights alone take 16.0 GiB"),
        (0.9, 55, 16, "leaves 56.0 GiB for the KV cache, but only 55.0 GiB of 80.0 GiB are free"),
    ],
)
def test_a_share_that_cannot_be_had_is_refused(
    utilization: float, free: int, weights: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"^gpu_memory_utilization=") as refused:
        kv_cache_share(utilization=utilization, total=80 * GIB, free=free * GIB, weights=weights * GIB)
    assert message in str(refused.value)


def test_weights_larger_than_the_room_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, 8 * GIB))
    check_room(7 * GIB, CUDA)
    with pytest.raises(ConfigurationError) as refused:
        check_room(15 * GIB, CUDA)
    told = "model: its weights take 15.0 GiB, but only 7.0 GiB of 8.0 GiB are free on the GPU"
    assert str(refused.value) == told
    check_room(15 * GIB, CPU)


def test_a_gpu_is_named_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, 8 * GIB))
    assert place(CUDA) == "cuda:0, where 7.0 GiB of 8.0 GiB are free"
    assert place(CPU) == "cpu"
