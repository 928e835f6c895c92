from itertools import takewhile

import pytest

from tidemill_scheduler import BlockId, IntegrityError
from tidemill_scheduler.block_pool import BlockPool, chain_hash, extend_chain, private_root, shared_root
from tidemill_scheduler.sequence import BlockHash


def make_hashes(count: int, *, salt: bytes = b"") -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_chain(hashes, list(range(4 * count)), root=shared_root(salt), num_blocks=count, block_size=4)
    return hashes


def make_cached(pool: BlockPool, hashes: list[BlockHash]) -> list[BlockId]:
    """A table with these contents, freed."""
    table = pool.allocate(len(hashes))
    for block, block_hash in zip(table, hashes, strict=True):
        pool.register(block, block_hash)
    pool.free(table, last_step=None)
    return table


def match(pool: BlockPool, hashes: list[BlockHash]) -> list[BlockId]:
    """The blocks with these contents, up to the first that none has."""
    blocks = takewhile(lambda block: block is not None, map(pool.find, hashes))
    return [block for block in blocks if block is not None]


class TestHashChain:
    def test_is_128_bits(self) -> None:
        assert {len(value) for value in [*make_hashes(3), private_root(1)]} == {16}

    def test_depends_on_every_token_before(self) -> None:
        root = shared_root(b"")
        assert chain_hash(chain_hash(root, [1]), [3]) != chain_hash(chain_hash(root, [2]), [3])

    def test_does_not_confuse_where_a_token_ends(self) -> None:
        root = shared_root(b"")
        assert chain_hash(root, [1, 256]) != chain_hash(root, [257, 0])
        assert chain_hash(root, [1, 2]) != chain_hash(root, [2, 1])

    def test_salts_and_private_roots_never_meet(self) -> None:
        roots = [shared_root(b""), shared_root(b"1"), shared_root(b"2"), private_root(1), private_root(2)]
        assert len(set(roots)) == len(roots)

    def test_is_extended_in_place_and_never_recomputed(self) -> None:
        whole = make_hashes(3)
        hashes = whole[:1]
        extend_chain(hashes, list(range(12)), root=BlockHash(b"unused"), num_blocks=3, block_size=4)
        assert hashes == whole


class TestAllocation:
    def test_hands_out_every_block_once(self) -> None:
        pool = BlockPool(5)
        assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
        assert (pool.num_free, pool.num_used) == (0, 5)

    def test_a_freed_block_comes_back(self) -> None:
        pool = BlockPool(2)
        table = pool.allocate(2)
        pool.free(table[:1], last_step=None)
        assert pool.allocate(1) == table[:1]

    def test_prefers_blank_blocks_to_cached_ones(self) -> None:
        pool = BlockPool(3)
        hashes = make_hashes(2)
        make_cached(pool, hashes)
        pool.allocate(1)
        assert len(match(pool, hashes)) == 2

    def test_evicts_the_least_recently_used_first(self) -> None:
        pool = BlockPool(2)
        old, new = make_hashes(1, salt=b"old"), make_hashes(1, salt=b"new")
        make_cached(pool, old)
        make_cached(pool, new)
        pool.acquire(block := match(pool, old))
        pool.free(block, last_step=None)
        pool.allocate(1)
        assert len(match(pool, old)) == 1
        assert match(pool, new) == []

    def test_evicts_the_end_of_a_chain_before_its_beginning(self) -> None:
        pool = BlockPool(3)
        hashes = make_hashes(3)
        table = make_cached(pool, hashes)
        pool.allocate(1)
        assert match(pool, hashes) == table[:2]


class TestSharing:
    def test_a_match_ends_at_the_first_unknown_block(self) -> None:
        pool = BlockPool(4)
        hashes = make_hashes(3)
        table = pool.allocate(3)
        pool.register(table[0], hashes[0])
        pool.register(table[2], hashes[2])
        assert match(pool, hashes) == table[:1]

    def test_a_shared_block_is_free_when_its_last_holder_lets_go(self) -> None:
        pool = BlockPool(1)
        hashes = make_hashes(1)
        table = make_cached(pool, hashes)
        pool.acquire(table)
        pool.acquire(table)
        pool.free(table, last_step=None)
        assert (pool.num_free, pool.num_holders(table[0])) == (0, 1)
        pool.free(table, last_step=None)
        assert pool.num_free == 1

    def test_of_two_blocks_with_equal_content_the_first_stays_known(self) -> None:
        pool = BlockPool(2)
        hashes = make_hashes(1)
        first, second = pool.allocate(2)
        pool.register(first, hashes[0])
        pool.register(second, hashes[0])
        assert match(pool, hashes) == [first]
        assert pool.hash_of(second) is None
        pool.check_integrity([[first, second]])

    def test_counts_which_matched_blocks_are_free(self) -> None:
        pool = BlockPool(3)
        table = make_cached(pool, make_hashes(3))
        pool.acquire(table[:1])
        assert pool.count_free(table) == 2

    def test_says_whether_freeing_some_tables_would_free_enough(self) -> None:
        pool = BlockPool(4)
        shared = make_cached(pool, make_hashes(1))
        mine, others = pool.allocate(1), pool.allocate(2)
        pool.acquire(shared)
        pool.acquire(shared)
        assert pool.can_reclaim(1, [shared + mine])
        assert not pool.can_reclaim(2, [shared + mine])
        assert not pool.can_reclaim(1, [shared + mine], mine)
        assert pool.can_reclaim(4, [shared + mine, shared + others])
        assert not pool.can_reclaim(5, [shared + mine, shared + others])


class TestQuarantine:
    def test_a_block_named_by_a_plan_in_flight_is_not_free_until_it_returns(self) -> None:
        pool = BlockPool(2)
        pool.free(pool.allocate(2), last_step=7)
        assert (pool.num_free, pool.num_quarantined, pool.num_used) == (0, 2, 0)
        pool.release(6)
        assert pool.num_free == 0
        pool.release(7)
        assert (pool.num_free, pool.num_quarantined) == (2, 0)

    def test_a_known_block_may_be_taken_back_and_stays_with_its_new_holder(self) -> None:
        pool = BlockPool(2)
        hashes = make_hashes(1)
        table = pool.allocate(1)
        pool.register(table[0], hashes[0])
        pool.free(table, last_step=7)
        assert pool.count_free(match(pool, hashes)) == 0
        pool.acquire(match(pool, hashes))
        pool.release(7)
        assert (pool.num_free, pool.num_holders(table[0])) == (1, 1)
        pool.check_integrity([table])

    def test_one_taken_back_and_freed_again_waits_for_the_newer_plan(self) -> None:
        pool = BlockPool(1)
        hashes = make_hashes(1)
        table = pool.allocate(1)
        pool.register(table[0], hashes[0])
        pool.free(table, last_step=7)
        pool.acquire(table)
        pool.free(table, last_step=8)
        pool.release(7)
        assert pool.num_free == 0
        pool.release(8)
        assert pool.num_free == 1
        pool.check_integrity([])


class TestIntegrity:
    def test_balanced_books_pass(self) -> None:
        pool = BlockPool(6)
        make_cached(pool, make_hashes(2))
        table = pool.allocate(1)
        pool.free(pool.allocate(1), last_step=3)
        pool.check_integrity([table])

    def test_a_table_nobody_counted_is_found(self) -> None:
        pool = BlockPool(2)
        table = pool.allocate(1)
        with pytest.raises(IntegrityError, match="counted 1 times, held by 2 tables"):
            pool.check_integrity([table, table])

    def test_a_lost_block_is_found(self) -> None:
        pool = BlockPool(2)
        pool._blank.pop()
        with pytest.raises(IntegrityError, match="not all blocks"):
            pool.check_integrity([])

    def test_a_hash_that_leads_elsewhere_is_found(self) -> None:
        pool = BlockPool(2)
        hashes = make_hashes(1)
        make_cached(pool, hashes)
        pool._by_hash[hashes[0]] = BlockId(1)
        with pytest.raises(IntegrityError, match="hash index"):
            pool.check_integrity([])
