import pytest

from tests.scheduler.factories import make_config, make_sequence


@pytest.mark.parametrize(
    "field",
    [
        "num_blocks",
        "max_model_len",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_prefill_chunk",
        "ageing_steps",
        "max_overtakes",
    ],
)
def test_a_size_below_one_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0, must be at least 1"):
        make_config(**{field: 0})


def test_a_step_must_have_room_for_every_decode() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 7, must be at least 8"):
        make_config(max_num_seqs=8, max_num_batched_tokens=7)
    make_config(max_num_seqs=8, max_num_batched_tokens=8)


def test_without_chunks_a_step_must_have_room_for_a_whole_prompt_too() -> None:
    sizes = {"max_model_len": 100, "max_num_seqs": 8, "enable_chunked_prefill": False}
    with pytest.raises(ValueError, match="must be at least 108"):
        make_config(**sizes, max_num_batched_tokens=107)
    make_config(**sizes, max_num_batched_tokens=108)


def test_the_largest_sequence_is_bounded_by_context_and_memory() -> None:
    assert make_config(num_blocks=10, block_size=4, max_model_len=30).max_total_tokens == 30
    assert make_config(num_blocks=10, block_size=4, max_model_len=100).max_total_tokens == 41


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prompt_tokens is 0"):
        make_sequence(prompt=0)


def test_a_sequence_with_nothing_left_to_generate_is_refused() -> None:
    with pytest.raises(ValueError, match="max_total_tokens is 8, must exceed len\\(token_ids\\), 8"):
        make_sequence(prompt=8, new=0)
