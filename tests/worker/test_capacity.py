"""`tidemill plan`: what it says is what a worker then has, and what a worker refuses it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.worker.factories import make_tokenizer
from tests.worker.model.architectures import ARCHITECTURES
from tests.worker.model.factories import make_tiny_llama
from tests.worker.model.well_known import LLAMA_3_1_8B
from tidemill.__main__ import main
from tidemill.errors import ConfigurationError
from tidemill.exit_codes import ExitCode
from tidemill_worker.app import build_model
from tidemill_worker.capacity import Capacity, plan_capacity, report
from tidemill_worker.settings import load_settings


def make_llama_8b(folder: Path) -> Path:
    """Its configuration, and nothing else."""
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return folder


def plan(
    model: Path, *, gpu_memory: float | None = None, mean_length: int | None = None, **flags: object
) -> Capacity:
    settings = load_settings({"model": str(model), "served_model_name": "m", **flags})
    return plan_capacity(settings, gpu_memory=gpu_memory, mean_length=mean_length)


@pytest.mark.parametrize("name", ["llama", "gpt_bigcode", "gemma2", "deepseek_v3", "diffllama"])
def test_a_worker_has_what_was_planned(name: str, tmp_path: Path) -> None:
    """Given a configuration alone, when a worker then loads the model, it has the planned sizes."""
    folder = ARCHITECTURES[name].make(tmp_path)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    flags = {"kv_cache_memory": 0.003, "swap_space": 0.001, "block_size": 8}
    outlined = tmp_path / "outline"
    outlined.mkdir()
    (outlined / "config.json").write_bytes((folder / "config.json").read_bytes())

    planned = plan(outlined, **flags)

    settings = {"model": str(folder), "served_model_name": "m", "device": "cpu", **flags}
    assert build_model(load_settings(settings)).sizing == planned.sizing


def test_llama_8b_on_a_gpu_of_24_gib(tmp_path: Path) -> None:
    """By hand: 0.9 of 24 GiB less 14.958 GiB of weights, in blocks of 16 tokens of 128 KiB."""
    figures = plan(make_llama_8b(tmp_path), gpu_memory=24, mean_length=1024).figures
    assert figures["dtype"] == "bfloat16"
    assert figures["kv_bytes_per_token"] == 131_072
    assert figures["kv_cache_blocks"] == (int(0.9 * 24 * 2**30) - figures["weight_bytes"]) // 2**21
    assert figures["kv_cache_tokens"] == 54_400
    assert figures["sequences_of_mean_length"] == 3400 // 64
    assert figures["swap_tokens"] == 2**32 // 131_072
    assert figures["longest_sequence"] == 54_401
    chosen = {name: choice["value"] for name, choice in figures["settings"].items()}
    assert chosen == {
        "max_model_len": 54_401,
        "max_num_seqs": 53,
        "max_num_batched_tokens": 2048,
        "swap_space": 4.0,
    }


def test_what_was_planned_is_accepted_as_settings(tmp_path: Path) -> None:
    folder = make_llama_8b(tmp_path)
    first = plan(folder, gpu_memory=24)
    flags = {name: choice.value for name, choice in first.choices.items()}
    again = plan(folder, gpu_memory=24, **flags)
    assert {name: choice.value for name, choice in again.choices.items()} == flags


def test_numbers_are_written_in_full(tmp_path: Path) -> None:
    """Given a large number, then what is printed is what was set, and a worker takes it."""
    flags = {"max_num_batched_tokens": 1_010_000, "swap_space": 0.1234567}
    words = [line.split()[:2] for line in report(plan(make_llama_8b(tmp_path), gpu_memory=24, **flags))]
    assert ["--max-num-batched-tokens", "1010000"] in words
    assert ["--swap-space", "0.1234567"] in words


def test_memory_that_is_set_takes_the_place_of_the_share(tmp_path: Path) -> None:
    assert plan(make_llama_8b(tmp_path), gpu_memory=24, kv_cache_memory=2).sizing.num_blocks == 2**31 // 2**21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "8"], "model: its weights take 15.0 GiB, but only 8.0 GiB of 8.0 GiB are free"),
        (
            ["--gpu-memory", "16"],
            "gpu_memory_utilization=0.9: that is 14.4 GiB of 16.0 GiB, and the model's weights alone take 15",
        ),
        (
            ["--gpu-memory", "24", "--kv-cache-memory", "10"],
            "kv_cache_memory=10: the weights leave 9.042 GiB of the GPU's 24 GiB",
        ),
        (["--gpu-memory", "24", "--max-model-len", "200000"], "max_model_len=200000: the model's context is"),
        (
            ["--dtype", "bfloat16"],
            "dtype=bfloat16: on CPU the model runs in float32; give --gpu-memory for a GPU",
        ),
        (
            ["--gpu-memory-utilization", "0.9"],
            "gpu_memory_utilization=0.9: a worker on CPU has no share of a GPU; give --gpu-memory for a GPU",
        ),
        (["--gpu-memory", "inf"], "gpu_memory=inf: give a finite number of GiB"),
        (["--gpu-memory", "1e300"], "gpu_memory=1e+300: give a finite number of GiB"),
        (
            ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "512"],
            "max_num_batched_tokens is 512, must be at least 131073: without chunked prefill a whole",
        ),
        (
            ["--preemption-mode", "recompute", "--swap-space", "4"],
            "swap_space=4: preemption_mode=recompute has no use for it",
        ),
        (["--mean-length", "200000"], "mean_length=200000: a sequence has at most 131072 tokens"),
        (
            ["--kv-cache-memory", "0.001"],
            "kv_cache_memory: not even one block of 16 tokens (4 MiB) fits in 1.02",
        ),
    ],
)
def test_what_does_not_fit_is_a_usage_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(make_llama_8b(tmp_path)), *arguments]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tidemill: {message}")
    assert captured.err.count("\n") == 1


def test_memory_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^gpu_memory=nan: give a finite number of GiB$"):
        plan(make_llama_8b(tmp_path), gpu_memory=math.nan)


def test_what_is_not_served_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {**LLAMA_3_1_8B, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert main(["plan", "--model", str(tmp_path)]) == ExitCode.FAILED
    assert "model: architecture 'mamba' cannot be served: " in capsys.readouterr().err


def test_programs_get_what_people_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capacity = plan(make_llama_8b(tmp_path), gpu_memory=24)
    arguments = ["--model", str(tmp_path / "config.json"), "--served-model-name", "m", "--gpu-memory", "24"]
    assert main(["plan", *arguments, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == capacity.figures
    assert main(["plan", *arguments]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines() == list(report(capacity))


def test_people_read_sizes_in_units_and_the_settings_with_their_reasons(tmp_path: Path) -> None:
    lines = list(report(plan(make_llama_8b(tmp_path), gpu_memory=24)))
    assert [" ".join(line.split()) for line in lines] == [
        "model m, 8,030,261,248 parameters, bfloat16",
        "weights 14.96 GiB",
        "GPU memory 24 GiB",
        "KV cache 6.641 GiB",
        "a token takes 128 KiB",
        "room for 54,400 tokens, in 3,400 blocks of 16",
        "212 sequences of 256 tokens",
        "1 sequence of 54,401 tokens",
        "swap space 4 GiB",
        "room for 32,768 tokens, in 2,048 blocks of 16",
        "",
        "--max-model-len 54401 the KV cache has no room for the 131072 tokens that the model could take",
        "--max-num-seqs 212 the KV cache has room for 212 sequences of 256 tokens",
        "--max-num-batched-tokens 2048 the default on a GPU",
        "--swap-space 4 the default on a GPU, which copies KV blocks sooner than it computes them again",
    ]


def test_people_are_told_that_the_worker_is_one_on_cpu(tmp_path: Path) -> None:
    lines = [" ".join(line.split()) for line in report(plan(make_llama_8b(tmp_path)))]
    assert "device CPU (give --gpu-memory for a GPU)" in lines
    assert not any(line.startswith("GPU memory") for line in lines)


def test_weights_are_neither_read_nor_needed(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors").write_bytes(b"cut")
    assert plan(folder).sizing.spec.bytes_per_token == 3 * 2 * 2 * 16 * 4
