"""Which tokens may not come next."""

from __future__ import annotations

from tidemill_worker.model.bans import OUTSIDE, Bans


def banned(bans: Bans, output: list[int], prompt: tuple[int, ...] = (50, 51)) -> set[int]:
    return set(bans.now([*prompt, *output], len(output)).tolist())


def test_end_tokens_are_banned_until_there_are_min_tokens() -> None:
    bans = Bans([], {7, 8}, min_tokens=2)
    assert [banned(bans, [0] * count) for count in range(4)] == [{7, 8}, {7, 8}, set(), set()]
    assert banned(Bans([], {7, 8}, min_tokens=0), []) == set()


def test_words_of_one_token_are_banned_throughout() -> None:
    bans = Bans([[3], [4]], {7}, min_tokens=1)
    assert banned(bans, []) == {3, 4, 7}
    assert banned(bans, [3, 4]) == {3, 4}


def test_the_last_token_of_a_word_is_banned_behind_its_beginning() -> None:
    bans = Bans([[1, 2, 3], [2, 4], [1, 1, 5]], (), min_tokens=0)
    assert banned(bans, [1]) == set()
    assert banned(bans, [1, 2]) == {3, 4}
    assert banned(bans, [9, 9, 1, 2]) == {3, 4}
    assert banned(bans, [1, 9, 2]) == {4}
    assert banned(bans, [1, 2, 9]) == set()
    assert banned(bans, [1, 1, 1]) == {5}


def test_the_prompt_is_not_a_beginning() -> None:
    bans = Bans([[1, 2, 3]], (), min_tokens=0)
    assert banned(bans, [], prompt=(1, 2)) == set()
    assert banned(bans, [2], prompt=(1,)) == set()
    assert banned(bans, [1, 2], prompt=(1,)) == {3}


def test_an_id_too_large_for_any_vocabulary_does_no_harm() -> None:
    assert banned(Bans([[2**40]], {2**70}, min_tokens=1), []) == {OUTSIDE}
