"""Output under memory starvation equals output with endless memory, wherever it is preempted.

`MiniEngine` compares each finished sequence with what the fake model generates undisturbed.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import MiniEngine, make_sequence, make_tokens
from tidemill_scheduler import SequenceId

BLOCK_SIZE = 4


def make_crowd(engine: MiniEngine, random: Random, count: int) -> None:
    """Sequences of which some share a beginning, that all fit the pool alone."""
    limit = engine.scheduler.config.max_total_tokens
    for number in range(count):
        new = random.randint(1, 12)
        prompt = make_tokens(random.randint(1, min(30, limit - new)), first=1000 * random.randint(0, 1))
        engine.add(make_sequence(number, prompt=prompt, new=new, priority=random.randint(0, 2)))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
def test_preempted_at_every_step(prompt: int, caching: bool, in_flight: int) -> None:
    steps = 0
    for preempted_after in range(30):
        engine = MiniEngine(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            in_flight=in_flight,
            max_num_batched_tokens=5,
            max_num_seqs=3,
            max_prefill_chunk=3,
        )
        engine.add(make_sequence(0, prompt=make_tokens(prompt), new=2 * BLOCK_SIZE + 1))
        engine.add(make_sequence(1, prompt=[*make_tokens(prompt), 7], new=3))
        while engine.scheduler.has_unfinished:
            if len(engine.history) == preempted_after and SequenceId(0) not in engine.finished:
                engine.scheduler.preempt(SequenceId(0))
            engine.step()
        steps = max(steps, len(engine.history))
    assert steps < 30, "some step was never preempted at"


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("period", [2, 3, 5])
def test_preempted_again_and_again(period: int, in_flight: int) -> None:
    engine = MiniEngine(block_size=BLOCK_SIZE, in_flight=in_flight)
    engine.add(make_sequence(0, prompt=11, new=20), make_sequence(1, prompt=make_tokens(11, first=1000)))
    for step in range(200):
        if step % period == period - 1 and SequenceId(0) in engine.unfinished():
            engine.scheduler.preempt(SequenceId(0))
        engine.step()
    assert sorted(engine.finished) == [0, 1]
    assert engine.sequences[SequenceId(0)].num_preemptions >= 20 // period - 1


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 12),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 6),
    room=st.integers(0, 20),
    chunk=st.integers(1, 20),
    caching=st.booleans(),
    chunked=st.booleans(),
    in_flight=st.integers(1, 3),
)
def test_starved_equals_endless(
    *,
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    room: int,
    chunk: int,
    caching: bool,
    chunked: bool,
    in_flight: int,
) -> None:
    random = Random(seed)
    max_model_len = max(16, num_blocks * block_size)
    engine = MiniEngine(
        in_flight=in_flight,
        eos=3,
        num_blocks=max(num_blocks, -(-15 // block_size)),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + room + (0 if chunked else max_model_len),
        max_prefill_chunk=chunk,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        ageing_steps=20,
        max_overtakes=2,
    )
    make_crowd(engine, random, count=8)
    while engine.scheduler.has_unfinished or engine.plans:
        if random.random() < 0.1 and len(engine.history) < 100:
            candidates = sorted(engine.unfinished())
            if candidates:
                engine.scheduler.preempt(random.choice(candidates))
        engine.step()
    assert len(engine.finished) == 8
    assert engine.scheduler.kv_usage == 0
    assert engine.scheduler._pool.num_free == engine.scheduler.config.num_blocks


@pytest.mark.parametrize("in_flight", [1, 2])
def test_starvation_is_real(in_flight: int) -> None:
    """The crowd that the property runs does preempt, recompute and hit the cache."""
    engine = MiniEngine(in_flight=in_flight, num_blocks=12, block_size=4, ageing_steps=20)
    make_crowd(engine, Random(5), count=30)
    engine.run()
    assert engine.scheduler.num_preemptions > 3
    assert engine.scheduler.num_recomputed_tokens > 10
    assert engine.scheduler.num_prefix_hit_tokens > 30
