from random import Random

import pytest

from tests.scheduler.factories import make_fork, make_sequence
from tidemill_scheduler import IntegrityError, Sequence
from tidemill_scheduler.sequence import SequenceState
from tidemill_scheduler.waiting import WaitingQueue


def make_waiting(number: int) -> Sequence:
    sequence = make_sequence(number)
    sequence.rank = (number, sequence.priority, 0.0, (number,))
    return sequence


def finish(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.state = SequenceState.FINISHED
    queue.note_finished(sequence)


def make_queue(count: int) -> tuple[WaitingQueue, list[Sequence]]:
    queue, sequences = WaitingQueue(), [make_waiting(number) for number in range(count)]
    for sequence in Random(1).sample(sequences, count):
        queue.push(sequence)
    return queue, sequences


def test_gives_out_in_the_order_of_rank() -> None:
    queue, sequences = make_queue(50)
    assert [queue.pop() for _ in range(51)] == [*sequences, None]


def test_looking_at_the_head_takes_nothing() -> None:
    queue, sequences = make_queue(2)
    assert queue.head() is queue.head() is sequences[0]
    assert len(queue) == 2


def test_the_finished_are_skipped_and_not_counted() -> None:
    queue, sequences = make_queue(4)
    finish(queue, sequences[0])
    assert (len(queue), queue.head()) == (3, sequences[1])
    finish(queue, sequences[2])
    assert [queue.pop() for _ in range(3)] == [sequences[1], sequences[3], None]


def test_memory_follows_the_number_waiting() -> None:
    queue, sequences = make_queue(1000)
    for sequence in sequences[10:]:
        finish(queue, sequence)
    assert len(queue) == 10
    assert len(queue._heap) <= 20
    assert [queue.pop() for _ in range(11)] == [*sequences[:10], None]


def test_what_is_pushed_back_keeps_its_place() -> None:
    queue, sequences = make_queue(3)
    popped = [queue.pop(), queue.pop()]
    queue.push_back(sequence for sequence in reversed(popped) if sequence)
    assert [queue.pop() for _ in range(3)] == sequences


class TestForks:
    def make_family(self, count: int) -> tuple[WaitingQueue, Sequence, list[Sequence]]:
        """A queue with a parent, one of 8 prompt tokens, and its forks, which stand aside."""
        queue, parent = WaitingQueue(), make_waiting(0)
        queue.push(parent)
        forks = [make_fork(number, parent) for number in range(1, count + 1)]
        for fork in forks:
            fork.fork_from(parent)
            fork.rank = (fork.id, fork.priority, 0.0, (fork.id,))
            queue.push(fork)
        return queue, parent, forks

    def run(self, queue: WaitingQueue, parent: Sequence, *, computed: int) -> None:
        parent.state = SequenceState.RUNNING
        parent.num_computed_tokens = computed
        queue.release(parent)

    def test_stand_aside_until_the_prompt_is_computed_but_for_its_last_token(self) -> None:
        queue, parent, forks = self.make_family(3)
        assert len(queue) == 4
        assert queue.pop() is parent
        self.run(queue, parent, computed=6)
        assert (queue.head(), queue.num_aside, len(queue)) == (None, 3, 3)
        self.run(queue, parent, computed=7)
        assert not queue.num_aside
        assert [queue.pop() for _ in range(4)] == [*forks, None]

    def test_or_the_parent_is_gone(self) -> None:
        queue, parent, forks = self.make_family(2)
        parent.state = SequenceState.FINISHED
        queue.note_finished(parent)
        queue.release(parent)
        assert [queue.pop() for _ in range(3)] == [*forks, None]

    def test_one_that_finishes_meanwhile_leaves(self) -> None:
        queue, parent, forks = self.make_family(2)
        queue.pop()
        for left, fork in zip((1, 0), forks, strict=True):
            finish(queue, fork)
            assert (len(queue), queue.num_aside) == (left, left)
        self.run(queue, parent, computed=7)
        assert queue.head() is None
        queue.check_integrity()

    def test_stand_aside_again_when_a_preempted_parent_runs_again(self) -> None:
        queue, parent, forks = self.make_family(2)
        queue.pop()
        parent.num_preemptions = 1
        queue.release(parent)
        assert queue.head() is forks[0]
        self.run(queue, parent, computed=3)
        assert queue.head() is None
        assert (len(queue), queue.num_aside) == (2, 2)
        queue.check_integrity()

    def test_one_that_waits_for_a_leader_goes_on_doing_so_when_its_parent_runs_again(self) -> None:
        queue, parent, (fork,) = self.make_family(1)
        parent.num_preemptions = 1  # and so not waited for
        queue.release(parent)
        assert [queue.pop(), queue.pop()] == [parent, fork]
        leader = make_waiting(9)
        leader.state = SequenceState.RUNNING
        fork.leader, fork.num_awaited_blocks = leader, 1
        queue.push(fork)
        parent.state = SequenceState.RUNNING
        queue.check_integrity()
        leader.num_hashed_blocks = 1
        queue.release(leader)
        assert (fork.leader, queue.num_aside) == (None, 1)
        queue.check_integrity()

    def test_one_that_nobody_would_release_is_found(self) -> None:
        queue, parent, _ = self.make_family(1)
        queue.check_integrity()
        parent.num_computed_tokens = 7
        with pytest.raises(IntegrityError, match="sequence 1 stands aside for 0, in vain"):
            queue.check_integrity()
