from tests.scheduler.factories import make_fork, make_sequence
from tidemill_scheduler import BlockCopy, BlockId, Sequence
from tidemill_scheduler.block_pool import BlockPool
from tidemill_scheduler.copies import PlannedCopies, StepCopies


def make_siblings() -> tuple[Sequence, Sequence]:
    """A parent and its fork."""
    parent = make_sequence(0)
    fork = make_fork(1, parent)
    fork.fork_from(parent)
    return parent, fork


def forks_of(copies: StepCopies) -> dict[Sequence, BlockCopy]:
    """What is copied for whom."""
    return dict(zip(copies.forks, copies.block_copies, strict=True))


class TestPlannedCopies:
    def test_the_source_outlasts_its_table_until_the_plan_has_returned(self) -> None:
        pool = BlockPool(2)
        copies = PlannedCopies(pool)
        source, target = pool.allocate(2)
        _, fork = make_siblings()
        copies.add(fork, source, target)
        pool.free([source], last_step=None)  # its parent leaves while the step is still being planned
        assert pool.num_free == 0
        assert forks_of(copies.take(5)) == {fork: BlockCopy(source, target)}
        assert (pool.num_free, pool.num_quarantined) == (0, 1)
        pool.release(4)
        assert pool.num_free == 0
        pool.release(5)
        assert pool.num_free == 1
        pool.check_integrity([[target]])

    def test_what_is_dropped_is_neither_copied_nor_held(self) -> None:
        pool = BlockPool(3)
        copies = PlannedCopies(pool)
        source, target, other = pool.allocate(3)
        parent, fork = make_siblings()
        second = make_fork(2, parent)
        copies.add(fork, source, target)
        copies.add(second, source, other)
        copies.drop(fork, last_step=None)
        copies.drop(parent, last_step=None)
        assert forks_of(copies.take(0)) == {second: BlockCopy(source, other)}
        assert forks_of(copies.take(1)) == {}
        pool.check_integrity([[source, target, other]])

    def test_a_fork_of_one_that_is_copied_to_copies_from_where_that_does(self) -> None:
        pool = BlockPool(3)
        copies = PlannedCopies(pool)
        source, first, second = pool.allocate(3)
        _, fork = make_siblings()
        grandchild = make_fork(2, fork)
        grandchild.fork_from(fork)
        copies.add(fork, source, first)
        copies.add(grandchild, first, second)
        assert copies.take(0).block_copies == (BlockCopy(source, first), BlockCopy(source, second))
        assert pool.num_holders(BlockId(source)) == 1
