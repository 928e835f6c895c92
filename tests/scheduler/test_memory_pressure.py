"""Who is admitted, who is preempted, and who goes first."""

import pytest

from tests.scheduler.factories import MiniEngine, make_scheduler, make_sequence, make_tokens, rows, step
from tidemill_scheduler import SequenceId


class TestPreemption:
    def test_whoever_lacks_a_block_takes_it_from_one_behind(self) -> None:
        engine = MiniEngine(num_blocks=4, block_size=4)
        engine.add(make_sequence(0, prompt=8, new=8), make_sequence(1, prompt=8, new=8))
        engine.run()
        assert engine.sequences[SequenceId(0)].num_preemptions == 0
        assert engine.sequences[SequenceId(1)].num_preemptions == 1
        assert engine.finished == [0, 1]

    def test_the_victim_is_not_in_the_plan(self) -> None:
        engine = MiniEngine(num_blocks=4, block_size=4)
        engine.add(make_sequence(0, prompt=8), make_sequence(1, prompt=8))
        engine.step()
        assert rows(engine.step()) == {0: (8, 1, True)}

    def test_the_last_in_the_order_waits_and_keeps_what_it_has(self) -> None:
        engine = MiniEngine(num_blocks=4, block_size=4)
        engine.add(make_sequence(0, prompt=9), make_sequence(1, prompt=4))
        engine.step()
        assert rows(engine.step()) == {0: (9, 1, True)}
        assert engine.scheduler.counters.num_preemptions == 0
        assert engine.scheduler.num_running == 2

    def test_the_lowest_priority_gives_way_though_it_is_older(self) -> None:
        engine = MiniEngine(num_blocks=6, block_size=4)
        engine.add(
            make_sequence(0, prompt=8, priority=2),
            make_sequence(1, prompt=8, priority=1),
            make_sequence(2, prompt=8, priority=0),
        )
        engine.step()
        engine.step()
        assert engine.sequences[SequenceId(0)].num_preemptions == 1
        assert engine.sequences[SequenceId(1)].num_preemptions == 0

    def test_no_more_are_preempted_than_the_blocks_in_quarantine_make_up_for(self) -> None:
        engine = MiniEngine(num_blocks=6, block_size=4, in_flight=2)
        engine.add(*(make_sequence(number, prompt=8) for number in range(3)))
        engine.schedule()
        engine.schedule()
        assert engine.scheduler.counters.num_preemptions == 1
        engine.run()

    def test_a_sequence_preempted_in_flight_still_receives_its_token(self) -> None:
        engine = MiniEngine(in_flight=2)
        engine.add(sequence := make_sequence(0, prompt=6))
        engine.schedule()
        engine.scheduler.preempt(sequence.id)
        assert engine.land() == [0]
        engine.run()

    def test_one_that_is_about_to_leave_is_left_alone(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0, new=1))
        plan = scheduler.schedule()
        scheduler.preempt(SequenceId(0))
        assert scheduler.num_running == 1
        assert scheduler.update(plan.step_id, {SequenceId(0): 7}) == [0]

    def test_one_that_waits_is_left_alone(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0))
        scheduler.preempt(SequenceId(0))
        assert (scheduler.counters.num_preemptions, scheduler.num_waiting) == (0, 1)


class TestAdmission:
    def test_is_bounded_by_the_slots(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        for number in range(3):
            scheduler.add(make_sequence(number))
        step(scheduler)
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)

    def test_takes_no_memory_for_those_who_would_get_no_tokens(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        for number in range(3):
            scheduler.add(make_sequence(number, prompt=8))
        assert rows(step(scheduler)) == {0: (0, 8, True)}
        assert scheduler.num_running == 1

    def test_a_small_one_passes_a_large_one_that_is_blocked(self) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4)
        engine.add(make_sequence(0, prompt=16, new=10))
        engine.step()
        engine.add(make_sequence(1, prompt=24, new=1), make_sequence(2, prompt=4, new=1))
        assert set(rows(engine.step())) == {0, 2}
        engine.run()

    def test_but_only_so_often(self) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4, max_overtakes=3)
        engine.add(make_sequence(0, prompt=16, new=17))
        engine.step()
        engine.add(make_sequence(1, prompt=24, new=1))
        engine.add(*(make_sequence(number, prompt=3, new=1) for number in range(2, 30)))
        engine.run()
        assert engine.finished.index(SequenceId(1)) == 1 + 3

    def test_nobody_is_admitted_in_a_step_that_had_to_preempt(self) -> None:
        engine = MiniEngine(num_blocks=6, block_size=4)
        engine.add(make_sequence(0, prompt=8), make_sequence(1, prompt=16))
        engine.step()
        engine.add(make_sequence(2, prompt=4))
        assert set(rows(engine.step())) == {0}
        assert engine.scheduler.counters.num_preemptions == 1
        engine.run()


class TestPriority:
    def test_sooner_ones_are_admitted_first(self) -> None:
        engine = MiniEngine(max_num_seqs=1)
        engine.add(*(make_sequence(n, priority=p, new=2) for n, p in enumerate([2, 1, 0, 1])))
        engine.run()
        assert engine.finished == [2, 1, 3, 0]

    def test_takes_a_slot_from_a_lower_one(self) -> None:
        """vllm#40004: no inversion when every slot is taken; vllm#24365: no doubled latency."""
        engine = MiniEngine(max_num_seqs=2)
        engine.add(make_sequence(0, priority=1), make_sequence(1, priority=2))
        engine.step()
        engine.add(make_sequence(2, priority=0, new=2))
        assert set(rows(engine.step())) == {0, 2}
        engine.run()
        assert engine.finished == [2, 0, 1]

    def test_takes_memory_from_lower_ones(self) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4)
        engine.add(*(make_sequence(number, prompt=6, new=6, priority=1) for number in range(4)))
        engine.step()
        engine.add(make_sequence(4, prompt=14, new=2, priority=0))
        assert 4 in rows(engine.step())
        assert engine.scheduler.counters.num_preemptions == 2
        engine.run()

    def test_preempts_nobody_if_that_would_not_help(self) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4)
        engine.add(make_sequence(0, prompt=18, new=2, priority=0), make_sequence(1, prompt=9, new=2))
        engine.step()
        engine.add(make_sequence(2, prompt=18, new=2, priority=0))
        engine.step()
        assert engine.scheduler.counters.num_preemptions == 0
        engine.run()

    def test_blocks_it_would_share_with_its_victims_are_no_help(self) -> None:
        scheduler = make_scheduler(num_blocks=4, block_size=4)
        scheduler.add(victim := make_sequence(0, prompt=make_tokens(9), priority=2, new=3))
        scheduler.add(make_sequence(1, prompt=2, priority=0, new=2))
        step(scheduler)
        # Needs four blocks: two are the victim's, which it would keep, and only one comes free.
        scheduler.add(make_sequence(2, prompt=make_tokens(8) + make_tokens(7, first=5000), priority=0, new=2))
        step(scheduler)
        assert victim.num_preemptions == 0

    def test_does_not_take_the_place_of_an_equal(self) -> None:
        engine = MiniEngine(max_num_seqs=1)
        engine.add(make_sequence(0))
        engine.step()
        engine.add(make_sequence(1))
        engine.run()
        assert engine.scheduler.counters.num_preemptions == 0

    def test_a_stream_of_higher_ones_does_not_starve_a_lower_one(self) -> None:
        engine = MiniEngine(max_num_seqs=1, ageing_steps=10)
        engine.add(make_sequence(0, priority=2, new=4))
        for number in range(1, 60):
            engine.add(make_sequence(number, priority=0, new=1))
            engine.step()
            if SequenceId(0) in engine.finished:
                break
        assert 20 <= number <= 30

    def test_waiting_in_flight_blocks_does_not_preempt_again(self) -> None:
        engine = MiniEngine(num_blocks=8, block_size=4, in_flight=2)
        engine.add(*(make_sequence(number, prompt=6, new=6, priority=1) for number in range(4)))
        engine.schedule()
        engine.add(make_sequence(4, prompt=8, new=2, priority=0))
        engine.schedule()
        engine.schedule()
        assert engine.scheduler.counters.num_preemptions == 1
        engine.run()


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_what_was_made_room_for_waits_for_plans_in_flight_and_nobody_takes_it(in_flight: int) -> None:
    """Given a newcomer whose victim's blocks are still in plans, the victim does not take them back."""
    engine = MiniEngine(num_blocks=16, block_size=4, in_flight=in_flight)
    victim = make_sequence(0, prompt=20, new=20, priority=1)
    engine.add(make_sequence(1, prompt=4, new=12, priority=0), victim)
    for _ in range(4):
        engine.step()
    engine.add(make_sequence(5, prompt=44, new=1, priority=0))
    engine.run()
    assert victim.num_preemptions == 1
    assert engine.finished[-1] == victim.id


def test_nobody_is_displaced_for_one_whose_blocks_those_before_it_would_take() -> None:
    """Given an older sequence that needs a block now, a newcomer is not let in to lose its own."""
    engine = MiniEngine(num_blocks=4, block_size=4)
    engine.add(make_sequence(0, prompt=8, new=4, priority=0), make_sequence(1, prompt=8, new=4, priority=1))
    engine.step()
    engine.add(newcomer := make_sequence(2, prompt=8, new=4, priority=0))
    engine.run()
    assert newcomer.num_preemptions == 0
    assert engine.finished == [0, 2, 1]
