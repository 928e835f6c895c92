"""Those that begin alike are served one after the other, whatever the order they come in."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.factories import MiniEngine, make_sequence, make_tokens
from tidemill_scheduler import Sequence
from tidemill_scheduler.block_pool import shared_root
from tidemill_scheduler.prefix_order import PrefixOrder
from tidemill_scheduler.sequence import PrefixPlace

BLOCK_SIZE = 4


def enter(order: PrefixOrder, *prompts: list[int], salt: bytes = b"", first: int = 0) -> list[PrefixPlace]:
    return [order.enter(make_arrived(number, prompt, salt)) for number, prompt in enumerate(prompts, first)]


def make_arrived(number: int, prompt: list[int], salt: bytes = b"") -> Sequence:
    sequence = make_sequence(number, prompt=prompt, salt=salt)
    sequence.arrival, sequence.chain_root = number, shared_root(salt)
    return sequence


def make_prompts(documents: int, questions: int, *, tokens: int = 4 * BLOCK_SIZE) -> list[list[int]]:
    """Each question about each document, question by question."""
    return [
        [*make_tokens(tokens, first=1000 * document), question]
        for question in range(questions)
        for document in range(documents)
    ]


class TestPlace:
    def test_of_one_that_begins_like_another_is_next_to_it(self) -> None:
        first, stranger, second = enter(
            PrefixOrder(BLOCK_SIZE), [*make_tokens(8), 1], make_tokens(9, first=5000), [*make_tokens(8), 2]
        )
        assert first < second < stranger

    def test_is_nearer_to_the_one_with_more_in_common(self) -> None:
        """After half of the prompt they part; the third goes back to the first."""
        common = make_tokens(8)
        first, second, third = enter(
            PrefixOrder(BLOCK_SIZE),
            [*common, *make_tokens(9, first=2000)],
            [*common, *make_tokens(9, first=3000)],
            [*common, *make_tokens(8, first=2000), 7],
        )
        assert first < third < second

    def test_of_prompts_shorter_than_a_block_is_that_of_their_arrival(self) -> None:
        prompt = make_tokens(BLOCK_SIZE)
        assert enter(PrefixOrder(BLOCK_SIZE), prompt, prompt) == [(0,), (1,)]

    def test_takes_no_notice_of_another_salt(self) -> None:
        order, prompt = PrefixOrder(BLOCK_SIZE), make_tokens(9)
        enter(order, prompt, make_tokens(9, first=5000), salt=b"a")
        ((*branch, _),) = enter(order, prompt, salt=b"b", first=2)
        assert set(branch) == {2}

    def test_is_forgotten_with_the_last_that_has_it(self) -> None:
        order, prompt = PrefixOrder(BLOCK_SIZE), make_tokens(9)
        first, second = make_arrived(0, prompt), make_arrived(1, prompt)
        order.enter(first)
        order.enter(second)
        order.leave(first)
        assert enter(order, prompt, first=2)[0][0] == 0
        order.leave(second)
        order.leave(make_arrived(2, prompt))
        assert enter(order, prompt, first=3)[0][0] == 3

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
    def test_puts_every_document_together_the_earliest_first(self, documents: list[int]) -> None:
        order = PrefixOrder(BLOCK_SIZE)
        prompts = [
            [*make_tokens(BLOCK_SIZE, first=1000 * document), number]
            for number, document in enumerate(documents)
        ]
        places = enter(order, *prompts)
        served = [documents[number] for number in sorted(range(len(documents)), key=places.__getitem__)]
        assert [document for document, _ in groupby(served)] == list(dict.fromkeys(documents))


class TestService:
    """Five questions about each of two documents, in turn, in memory that holds one document."""

    def serve(self, *, documents: int = 2, in_flight: int = 1, caching: bool = True) -> MiniEngine:
        engine = MiniEngine(
            num_blocks=8,
            block_size=BLOCK_SIZE,
            max_num_seqs=2,
            in_flight=in_flight,
            enable_prefix_caching=caching,
        )
        prompts = make_prompts(documents, 5)
        engine.add(*(make_sequence(number, prompt=prompt, new=2) for number, prompt in enumerate(prompts)))
        engine.run()
        return engine

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_computes_each_document_once(self, in_flight: int) -> None:
        engine = self.serve(in_flight=in_flight)
        assert [number % 2 for number in engine.finished] == [0] * 5 + [1] * 5
        assert engine.num_prompt_tokens_computed == 2 * 4 * BLOCK_SIZE + 10

    def test_of_many_documents_too(self) -> None:
        engine = self.serve(documents=7)
        assert engine.num_prompt_tokens_computed == 7 * 4 * BLOCK_SIZE + 35

    def test_without_prefix_caching_goes_by_arrival(self) -> None:
        engine = self.serve(caching=False)
        assert engine.finished == list(range(10))
        assert engine.num_prompt_tokens_computed == 10 * (4 * BLOCK_SIZE + 1)
