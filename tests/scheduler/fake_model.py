"""A model that computes nothing but remembers everything: what the block tables say is what it sees."""

from __future__ import annotations

from tidemill_scheduler import BlockCopy, BlockId, Row, Sequence, SequenceId, StepPlan

VOCABULARY = 50

Slot = tuple[int, int]
"""The token computed into a slot, and its position."""
Blocks = list[list[Slot]]


def choice_of(sequence: Sequence) -> int:
    """Forks draw other tokens than their parent and than each other."""
    return 0 if sequence.fork_of is None else 1 + sequence.id


def next_token(context: list[Slot], choice: int) -> int:
    """Depends on every token that is attended to and on where it stands."""
    return hash((tuple(context), choice)) % VOCABULARY


def undisturbed(sequence: Sequence, eos: int | None = None) -> list[int]:
    """What the model generates with endless memory and nobody else around, prompt included."""
    tokens = list(sequence.token_ids)
    while len(tokens) < sequence.max_total_tokens:
        context = [(token, position) for position, token in enumerate(tokens)]
        tokens.append(next_token(context, choice_of(sequence)))
        if tokens[-1] == eos:
            break
    return tokens


POISON: Slot = (-1, -1)
"""What a slot holds that must not be read."""


class FakeModel:
    """Executes plans on simulated blocks, those of the device and those of the swap space.

    A sampled token is a function of what is read back through the row's block table, and of nothing
    else. Reading a slot that was never filled, or was freed since, fails on the spot; one that holds
    another sequence's or an older content gives another token.
    """

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        self.block_size = block_size
        self.blocks = [[POISON] * block_size for _ in range(num_blocks)]
        self.swap_blocks = [[POISON] * block_size for _ in range(num_swap_blocks)]
        self._token_ids: dict[SequenceId, list[int]] = {}
        self._choices: dict[SequenceId, int] = {}

    def add(self, sequence: Sequence) -> None:
        self._token_ids[sequence.id] = list(sequence.token_ids)
        self._choices[sequence.id] = choice_of(sequence)

    def poison(self, block: BlockId) -> None:
        self.blocks[block] = [POISON] * self.block_size

    def execute(self, plan: StepPlan) -> dict[SequenceId, int]:
        self._swap(plan.swap_out, self.blocks, self.swap_blocks)
        self._swap(plan.swap_in, self.swap_blocks, self.blocks)
        self._copy(plan.block_copies)
        for row in plan.rows:
            self._write(row)
        return {row.sequence: self._sample(row) for row in plan.rows if row.sample}

    def _swap(self, copies: tuple[BlockCopy, ...], sources: Blocks, targets: Blocks) -> None:
        """Full blocks only, in any order."""
        assert len({copy.target for copy in copies}) == len(copies), "a block is swapped over twice"
        for copy in copies:
            assert POISON not in sources[copy.source], f"block {copy.source} is swapped, and is not full"
            targets[copy.target] = list(sources[copy.source])

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """In any order, or all at once, as a device would."""
        targets = {copy.target for copy in copies}
        assert len(targets) == len(copies), "a block is copied over twice"
        assert targets.isdisjoint(copy.source for copy in copies), "a block is copied from and over"
        for copy in copies:
            self.blocks[copy.target] = list(self.blocks[copy.source])

    def _write(self, row: Row) -> None:
        """What stands behind the last position written is no content of this sequence, if any."""
        for position in range(row.start, row.start + row.count):
            slots = self.blocks[row.block_tables[0][position // self.block_size]]
            offset = position % self.block_size
            slots[offset] = (self._token_ids[row.sequence][position], position)
            slots[offset + 1 :] = [POISON] * (self.block_size - offset - 1)

    def _sample(self, row: Row) -> int:
        context = [self._read(row, position) for position in range(row.start + row.count)]
        token_ids = self._token_ids[row.sequence]
        assert len(token_ids) == len(context), "a row samples a token that is known already"
        token_ids.append(next_token(context, self._choices[row.sequence]))
        return token_ids[-1]

    def _read(self, row: Row, position: int) -> Slot:
        slot = self.blocks[row.block_tables[0][position // self.block_size]][position % self.block_size]
        assert slot is not POISON, f"sequence {row.sequence} reads position {position}, which holds nothing"
        return slot
