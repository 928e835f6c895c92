from random import Random

from tests.scheduler.factories import make_sequence
from tidemill_scheduler import Sequence
from tidemill_scheduler.sequence import SequenceState
from tidemill_scheduler.waiting import WaitingQueue


def make_waiting(number: int) -> Sequence:
    sequence = make_sequence(number)
    sequence.rank = (number, 0.0, number)
    return sequence


def finish(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.state = SequenceState.FINISHED
    queue.note_finished()


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
