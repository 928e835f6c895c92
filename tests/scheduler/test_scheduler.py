"""What the scheduler promises about plans, limits and the end of a sequence."""

import gc
import sys
from types import FrameType

import pytest

from tests.scheduler.factories import (
    MiniEngine,
    make_fork,
    make_scheduler,
    make_sequence,
    make_tokens,
    rows,
    step,
)
from tidemill_scheduler import (
    BlockId,
    DuplicateSequence,
    NeverFits,
    Row,
    Scheduler,
    SequenceId,
    StepPlan,
)


def make_row(number: int, start: int, count: int, table: list[int], *, sample: bool = True) -> Row:
    return Row(SequenceId(number), start, count, (tuple(map(BlockId, table)),), sample)


class TestPlan:
    def test_is_empty_when_there_is_nothing_to_do(self) -> None:
        plan = make_scheduler().schedule()
        assert plan.is_empty
        assert plan.num_tokens == 0

    def test_a_prompt_is_computed_and_sampled_from_in_one_row(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0, prompt=6))
        assert scheduler.schedule() == StepPlan(0, (make_row(0, 0, 6, [0, 1]),))

    def test_then_one_token_a_step_with_a_block_as_each_is_full(self) -> None:
        scheduler = make_scheduler(block_size=4)
        scheduler.add(make_sequence(0, prompt=7))
        step(scheduler)
        assert step(scheduler).rows == (make_row(0, 7, 1, [0, 1]),)
        assert step(scheduler).rows == (make_row(0, 8, 1, [0, 1, 2]),)

    def test_prefills_and_decodes_share_a_step_decodes_first(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10, max_prefill_chunk=10)
        scheduler.add(make_sequence(0, prompt=4))
        step(scheduler)
        scheduler.add(make_sequence(1, prompt=20))
        plan = scheduler.schedule()
        assert [row.sequence for row in plan.rows] == [0, 1]
        assert rows(plan) == {0: (4, 1, True), 1: (0, 9, False)}

    def test_nothing_is_scheduled_past_the_most_tokens_a_sequence_may_have(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(sequence := make_sequence(0, prompt=4, new=2))
        assert rows(scheduler.schedule()) == {0: (0, 4, True)}
        assert rows(scheduler.schedule()) == {0: (4, 1, True)}
        assert scheduler.schedule().is_empty
        scheduler.update(0, {SequenceId(0): 7})
        scheduler.update(1, {SequenceId(0): 8})
        assert sequence.token_ids[4:] == [7, 8]
        assert scheduler.schedule().is_empty

    def test_a_resumed_sequence_goes_on_after_its_generated_tokens(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(sequence := make_sequence(0, prompt=make_tokens(9), num_prompt_tokens=4))
        assert sequence.num_output_tokens == 5
        assert rows(step(scheduler)) == {0: (0, 9, True)}
        assert sequence.num_output_tokens == 6


class TestChunks:
    def test_a_long_prompt_is_computed_over_several_steps(self) -> None:
        engine = MiniEngine(max_num_batched_tokens=16, max_num_seqs=4)
        engine.add(make_sequence(0, prompt=40, new=2))
        engine.run()
        assert engine.rows_of(0) == [(0, 16), (16, 16), (32, 8), (40, 1)]

    def test_beside_others_it_takes_no_more_than_its_chunk(self) -> None:
        engine = MiniEngine(max_num_batched_tokens=32, max_prefill_chunk=5)
        engine.add(make_sequence(0, prompt=4, new=20))
        engine.step()
        engine.add(make_sequence(1, prompt=40, new=1))
        engine.run()
        assert max(count for _, count in engine.rows_of(1)) == 5

    def test_a_short_prompt_behind_a_long_one_is_not_held_up(self) -> None:
        engine = MiniEngine(max_num_batched_tokens=16, max_prefill_chunk=10)
        engine.add(make_sequence(0, prompt=100, new=1), make_sequence(1, prompt=6, new=1))
        engine.step()
        assert engine.finished == [1]

    def test_switched_off_prompts_are_computed_whole(self) -> None:
        engine = MiniEngine(
            enable_chunked_prefill=False, max_model_len=60, max_num_batched_tokens=68, max_prefill_chunk=5
        )
        engine.add(*(make_sequence(number, prompt=50, new=4) for number in range(3)))
        engine.run()
        assert [engine.rows_of(number)[0] for number in range(3)] == [(0, 50)] * 3


class TestRefusal:
    def test_more_than_the_memory_can_never_fit(self) -> None:
        scheduler = make_scheduler(num_blocks=4, block_size=4)
        with pytest.raises(
            NeverFits, match=r"kv_cache_tokens: .* up to 18 tokens, the limit is 17"
        ) as caught:
            scheduler.add(make_sequence(0, prompt=10, new=8))
        assert (caught.value.field, caught.value.needed, caught.value.limit) == ("kv_cache_tokens", 18, 17)
        assert not scheduler.has_unfinished

    def test_more_than_the_context_can_never_fit(self) -> None:
        with pytest.raises(NeverFits, match=r"max_model_len: .* up to 31 tokens, the limit is 30"):
            make_scheduler(max_model_len=30).add(make_sequence(0, prompt=21, new=10))

    def test_a_second_one_of_the_same_id_is_refused_and_the_first_undisturbed(self) -> None:
        """vllm#10583: a redelivered job must not crash the engine."""
        engine = MiniEngine()
        engine.add(make_sequence(0))
        engine.step()
        with pytest.raises(DuplicateSequence, match="sequence 0"):
            engine.scheduler.add(make_sequence(0))
        engine.run()
        assert engine.finished == [0]

    def test_an_id_may_be_used_again_once_it_has_finished_even_in_flight(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(old := make_sequence(0, prompt=4))
        first = scheduler.schedule()
        scheduler.finish(old.id)
        scheduler.add(new := make_sequence(0, prompt=5))
        second = scheduler.schedule()
        assert scheduler.update(first.step_id, {old.id: 7}) == []
        assert scheduler.update(second.step_id, {new.id: 8}) == [0]
        assert (old.num_output_tokens, new.token_ids[5:]) == (0, [8])

    def test_a_finished_sequence_is_not_taken_back(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(sequence := make_sequence(0))
        scheduler.finish(sequence.id)
        with pytest.raises(ValueError, match="scheduled before"):
            scheduler.add(sequence)

    def test_plans_return_in_order(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0))
        scheduler.schedule()
        scheduler.schedule()
        with pytest.raises(ValueError, match="step 1 returned, the oldest in flight is 0"):
            scheduler.update(1, {})

    def test_what_is_not_here_cannot_be_finished_or_preempted(self) -> None:
        with pytest.raises(KeyError):
            make_scheduler().finish(SequenceId(3))
        with pytest.raises(KeyError):
            make_scheduler().preempt(SequenceId(3))


class TestFinish:
    def test_at_any_moment_gives_all_blocks_back(self) -> None:
        scheduler = make_scheduler()
        waiting, running, flying = (make_sequence(number) for number in range(3))
        scheduler.add(running)
        step(scheduler)
        scheduler.add(flying)
        plan = scheduler.schedule()
        scheduler.add(waiting)
        for sequence in (waiting, running, flying):
            scheduler.finish(sequence.id)
            scheduler.check_integrity()
        assert scheduler.kv_usage > 0  # the plan in flight still names them
        assert scheduler.update(plan.step_id, {}) == []
        assert scheduler.kv_usage == 0
        assert not scheduler.has_unfinished

    def test_the_freed_slot_is_filled_in_the_next_step(self) -> None:
        """vllm#52634: slots are refilled one by one, never per batch."""
        engine = MiniEngine(max_num_seqs=2)
        engine.add(make_sequence(0, new=1), make_sequence(1, new=9), make_sequence(2, new=1))
        engine.step()
        assert set(rows(engine.step())) == {1, 2}

    def test_a_sample_of_one_finished_meanwhile_is_ignored(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(sequence := make_sequence(0))
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.update(first.step_id, {sequence.id: 7})
        scheduler.finish(sequence.id)
        assert scheduler.update(second.step_id, {sequence.id: 8}) == []
        assert sequence.token_ids[8:] == [7]


class TestGauges:
    def test_usage_is_the_share_that_is_not_free(self) -> None:
        """vllm#20302; cached blocks are free."""
        scheduler = make_scheduler(num_blocks=8, block_size=4)
        scheduler.add(make_sequence(0, prompt=8, new=1))
        scheduler.schedule()
        assert scheduler.kv_usage == 2 / 8
        scheduler.update(0, {SequenceId(0): 7})
        scheduler.finish(SequenceId(0))
        assert scheduler.kv_usage == 0.0

    def test_running_and_waiting_are_counted(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        for number in range(3):
            scheduler.add(make_sequence(number))
        step(scheduler)
        scheduler.finish(SequenceId(2))
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


class TestCost:
    def make_busy(self, num_waiting: int) -> Scheduler:
        """Ten decodes, and so many waiting."""
        scheduler = make_scheduler(max_num_seqs=10, num_blocks=200)
        for number in range(10 + num_waiting):
            scheduler.add(make_sequence(number, prompt=4, new=40))
        step(scheduler)
        return scheduler

    def make_forking(self, num_waiting: int) -> Scheduler:
        """Nine decodes, and a long prompt that so many siblings wait for with a slot to spare."""
        scheduler = make_scheduler(max_num_seqs=11, num_blocks=200, max_prefill_chunk=4)
        for number in range(9):
            scheduler.add(make_sequence(number, prompt=4, new=40))
        scheduler.add(parent := make_sequence(9, prompt=80, new=10))
        for number in range(num_waiting):
            scheduler.add(make_fork(10 + number, parent))
        step(scheduler)
        assert (scheduler.num_running, scheduler.num_waiting) == (10, num_waiting)
        return scheduler

    def make_forks_of_the_waiting(self, num_waiting: int) -> Scheduler:
        """Ten decodes, and so many families of three waiting."""
        scheduler = make_scheduler(max_num_seqs=10, num_blocks=200)
        for number in range(10 + num_waiting):
            scheduler.add(parent := make_sequence(3 * number, prompt=4, new=40))
            if number >= 10:
                scheduler.add(make_fork(3 * number + 1, parent))
                scheduler.add(make_fork(3 * number + 2, parent))
        step(scheduler)
        return scheduler

    def count_calls(self, scheduler: Scheduler) -> int:
        """Function calls, Python's and C's, of a step."""
        calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        gc.disable()  # a collection calls whoever watches it
        sys.setprofile(count)
        try:
            plan = scheduler.schedule()
            scheduler.update(plan.step_id, {row.sequence: 7 for row in plan.rows if row.sample})
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    def test_of_a_step_does_not_depend_on_the_number_waiting(self) -> None:
        for make in (self.make_busy, self.make_forking, self.make_forks_of_the_waiting):
            assert self.count_calls(make(10)) == self.count_calls(make(3000))
