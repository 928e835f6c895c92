"""Output under memory starvation equals output with endless memory, wherever it is preempted.

`MiniEngine` compares each finished sequence with what the fake model generates undisturbed.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.factories import MiniEngine, make_fork, make_sequence, make_tokens
from tidemill_scheduler import PreemptionMode, RestoreCosts, Sequence, SequenceId

BLOCK_SIZE = 4
SWAP_SPACES = st.sampled_from([0, 1, 2, 5, 60])
MODES = st.sampled_from(PreemptionMode)
SECONDS_PER_BLOCK = st.sampled_from([1e-6, 1e-3, 1.0])
"""A token of a prompt costs 1e-3: copying is cheaper than computing, depends on the blocks, is dearer."""


def make_crowd(engine: MiniEngine, random: Random, count: int) -> None:
    """Sequences of which some share a beginning or a whole prompt, that all fit the pool alone."""
    limit = engine.scheduler.config.max_total_tokens
    parent: Sequence | None = None
    for number in range(count):
        new = random.randint(1, 12)
        if parent is not None and random.random() < 0.4:
            total = min(limit, parent.num_prompt_tokens + new)
            parent = make_fork(number, parent, max_total_tokens=total, priority=random.randint(0, 2))
            engine.add(parent)
            continue
        prompt = make_tokens(random.randint(1, min(30, limit - new)), first=1000 * random.randint(0, 1))
        parent = make_sequence(
            number,
            prompt=prompt,
            new=new,
            priority=random.randint(0, 2),
            compute_prompt=random.random() < 0.2,
        )
        engine.add(parent)


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
    num_swap_blocks=SWAP_SPACES,
    mode=MODES,
    seconds_per_block=SECONDS_PER_BLOCK,
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
    num_swap_blocks: int,
    mode: PreemptionMode,
    seconds_per_block: float,
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
        num_swap_blocks=num_swap_blocks,
        preemption_mode=mode,
        ageing_steps=20,
        max_overtakes=2,
    )
    engine.scheduler.costs = RestoreCosts(1e-3, seconds_per_block)
    make_crowd(engine, random, count=8)
    while engine.scheduler.has_unfinished or engine.plans:
        if random.random() < 0.1 and len(engine.history) < 100:
            candidates = sorted(engine.unfinished())
            if candidates:
                engine.scheduler.preempt(random.choice(candidates))
        engine.step()
    assert len(engine.finished) == 8
    engine.check_baseline()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_starvation_is_real(in_flight: int) -> None:
    """The crowd that the property runs does preempt, recompute and hit the cache."""
    engine = MiniEngine(in_flight=in_flight, num_blocks=12, block_size=4, ageing_steps=20)
    make_crowd(engine, Random(5), count=30)
    engine.run()
    assert engine.scheduler.counters.num_preemptions > 3
    assert engine.scheduler.counters.num_recomputed_tokens > 10
    assert engine.scheduler.counters.num_prefix_hit_tokens > 30


@pytest.mark.parametrize("in_flight", [1, 2])
def test_swapping_is_real(in_flight: int) -> None:
    """With swap space the same crowd is swapped out and in, and computes less again."""
    recomputed = {}
    for num_swap_blocks in (0, 40):
        engine = MiniEngine(
            in_flight=in_flight, num_blocks=12, block_size=4, num_swap_blocks=num_swap_blocks, ageing_steps=20
        )
        make_crowd(engine, Random(5), count=30)
        engine.run()
        recomputed[num_swap_blocks] = engine.scheduler.counters.num_recomputed_tokens
    assert engine.scheduler.counters.num_swap_preemptions > 3
    assert (
        engine.scheduler.counters.num_blocks_swapped_out > engine.scheduler.counters.num_blocks_swapped_in > 3
    )
    assert engine.scheduler.counters.num_swap_hit_tokens > 3
    assert recomputed[40] < recomputed[0]


def make_families(engine: MiniEngine, random: Random, count: int) -> None:
    """Few prompts with many siblings each, some resumed, some forks of forks, of any priority."""
    limit = engine.scheduler.config.max_total_tokens
    family: list[Sequence] = []
    for number in range(count):
        priority = random.randint(0, 2)
        if not family or random.random() < 0.15:
            prompt = random.randint(1, min(14, limit - 4))
            parent = make_sequence(
                number, prompt=prompt, new=random.randint(1, min(12, limit - prompt)), priority=priority
            )
            family = [parent]
        else:
            parent = random.choice([family[0], random.choice(family)])
            known = parent.num_prompt_tokens
            generated = make_tokens(random.choice([0, 0, random.randint(0, min(6, limit - 1 - known))]))
            total = random.randint(known + len(generated) + 1, min(limit, known + 18))
            family.append(
                make_fork(number, parent, generated=generated, max_total_tokens=total, priority=priority)
            )
        engine.add(family[-1])
        for _ in range(random.choice([0, 0, 0, 1, 3])):
            engine.step()


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(3, 14),
    block_size=st.integers(2, 5),
    max_num_seqs=st.integers(2, 8),
    room=st.integers(0, 8),
    caching=st.booleans(),
    in_flight=st.integers(1, 3),
    num_swap_blocks=SWAP_SPACES,
    mode=MODES,
    seconds_per_block=SECONDS_PER_BLOCK,
)
def test_starved_families_equal_endless(
    *,
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    room: int,
    caching: bool,
    in_flight: int,
    num_swap_blocks: int,
    mode: PreemptionMode,
    seconds_per_block: float,
) -> None:
    random = Random(seed)
    engine = MiniEngine(
        in_flight=in_flight,
        eos=3,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=24,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + room,
        max_prefill_chunk=6,
        enable_prefix_caching=caching,
        num_swap_blocks=num_swap_blocks,
        preemption_mode=mode,
        ageing_steps=6,
        max_overtakes=2,
    )
    engine.scheduler.costs = RestoreCosts(1e-3, seconds_per_block)
    make_families(engine, random, count=16)
    while engine.scheduler.has_unfinished or engine.plans:
        candidates = sorted(engine.unfinished())
        if candidates and random.random() < 0.2 and len(engine.history) < 150:
            chosen = random.choice(candidates)
            if random.random() < 0.2:
                engine.abort(chosen)
            else:
                engine.scheduler.preempt(chosen)
        engine.step()
    assert len(engine.finished) == 16
    engine.check_baseline()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_forking_is_real(in_flight: int) -> None:
    """The families that the property runs do share blocks, in part too, and are torn apart."""
    engine = MiniEngine(in_flight=in_flight, num_blocks=16, block_size=4, ageing_steps=20)
    make_families(engine, Random(5), count=120)
    engine.run()
    assert engine.scheduler.counters.num_preemptions > 10
    assert sum(len(plan.block_copies) for plan in engine.history) > 10
