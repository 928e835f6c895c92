"""One generation as the scheduler sees it: tokens, the blocks that hold their KV, and its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

SequenceId = NewType("SequenceId", int)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

PrefixPlace = tuple[int, ...]
"""Arrivals of the first sequences that had the same beginning, for ever longer beginnings, and its own."""

Rank = tuple[int, int, float, PrefixPlace]
"""Place in the order of service, smallest first; never changes, and no two are equal."""


class SequenceState(Enum):
    """Where a sequence is; only the scheduler moves it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt, what was generated after it, and the scheduler's notes.

    The caller fills in the first group of fields and leaves the rest to the scheduler. A resumed
    job arrives with generated tokens already: then `len(token_ids) > num_prompt_tokens`, and they
    are computed again like a longer prompt.

    Raises:
        ValueError: if the counts contradict each other, nothing is left to generate, or the prompt is
            to be shared and computed at once.
    """

    id: SequenceId
    token_ids: list[int]
    """Prompt and generated tokens; `Scheduler.update` appends to it, nobody else."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and generated tokens at most; no row that would pass it is ever scheduled."""
    priority: int = 1
    """Smaller is sooner: high 0, normal 1, low 2."""
    deadline: float | None = None
    """Orders those of the same priority that arrive in the same span of steps, earliest first. The unit
    is the caller's; the scheduler has no clock."""
    salt: bytes = b""
    """Sequences share cached blocks only with those of the same salt."""
    fork_of: SequenceId | None = None
    """A sibling with the same prompt and salt, whose computation of it this one shares: it waits for
    that, and computes no more of the prompt than its last token. If no such sibling is here, or it
    was preempted, this is a sequence like any other."""
    compute_prompt: bool = False
    """Compute every position of the prompt at least once, whatever the prefix cache holds of it."""

    state: SequenceState = field(default=SequenceState.WAITING, init=False)
    arrival: int = field(default=-1, init=False)
    """Counts the sequences in the order they were added."""
    rank: Rank = field(default=(0, 0, 0.0, ()), init=False)
    num_tokens: int = field(init=False)
    """Known tokens, and those that plans in flight will have sampled."""
    num_computed_tokens: int = field(default=0, init=False)
    """Positions whose KV is in the block table once the plans in flight have run."""
    block_table: list[BlockId] = field(default_factory=list, init=False)
    block_tables: tuple[tuple[BlockId, ...], ...] = field(default=(), init=False)
    """The block table as rows carry it, rebuilt only when it changes."""
    capacity: int = field(default=0, init=False)
    """Positions that the block table has room for."""
    chain_root: BlockHash = field(default=BlockHash(b""), init=False)
    """Where the hash chain starts: says with whom blocks may be shared."""
    parent: Sequence | None = field(default=None, init=False, repr=False)
    """The sibling that `fork_of` named when this sequence was added, which may have ended since."""
    block_hashes: list[BlockHash] = field(default_factory=list, init=False)
    """Hash chain of the full blocks of `token_ids`, as far as it was needed."""
    num_hashed_blocks: int = field(default=0, init=False)
    """Leading blocks of the table that the pool knows by their hash."""
    table_step: int = field(default=0, init=False)
    """First step whose rows may name the present block table; those before it named another."""
    num_recompute_tokens: int = field(default=0, init=False)
    """Positions that were computed once and lost to a preemption; those below are done again."""
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found computed at the first admission, in the prefix cache or by the parent."""
    num_kept_blocks: int = field(default=0, init=False)
    """Leading blocks that the swap space keeps for it while it waits."""
    num_preemptions: int = field(default=0, init=False)
    leader: Sequence | None = field(default=None, init=False, repr=False)
    """A sequence that computes what this one begins with."""
    num_awaited_blocks: int = field(default=0, init=False)
    """Blocks that the leader has in common with this one."""
    num_overtaken: int = field(default=0, init=False)
    """Sequences admitted past this one while it was blocked at the head of the waiting."""

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens <= len(self.token_ids):
            raise ValueError(
                f"num_prompt_tokens is {self.num_prompt_tokens}, must be 1 to len(token_ids),"
                f" {len(self.token_ids)}"
            )
        if self.max_total_tokens <= len(self.token_ids):
            raise ValueError(
                f"max_total_tokens is {self.max_total_tokens}, must exceed len(token_ids),"
                f" {len(self.token_ids)}"
            )
        if self.fork_of is not None and self.compute_prompt:
            raise ValueError(f"sequence {self.id} cannot share its prompt and compute it by itself")
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that computing has to catch up with before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        """Whether its last token is known or in flight, so that nothing is left to schedule."""
        return self.num_tokens >= self.max_total_tokens

    def fork_from(self, parent: Sequence) -> None:
        """Take a sibling as the parent.

        Raises:
            ValueError: if they have not the same prompt and salt.
        """
        prompt, shared = (each.token_ids[: each.num_prompt_tokens] for each in (self, parent))
        if prompt != shared:
            raise ValueError(f"sequence {self.id} forks from {parent.id}, which has another prompt")
        if self.salt != parent.salt:
            raise ValueError(f"sequence {self.id} forks from {parent.id}, which has another salt")
        self.parent = parent

    @property
    def num_shareable_tokens(self) -> int:
        """Positions that forks take over: the prompt but its last token, from which each one samples."""
        return self.num_prompt_tokens - 1

    @property
    def can_be_forked(self) -> bool:
        """Whether all that siblings share is in its blocks once the plans in flight have run."""
        return self.state is SequenceState.RUNNING and self.num_computed_tokens >= self.num_shareable_tokens

    @property
    def waits_for_parent(self) -> bool:
        """Whether its prompt is about to be computed by the parent.

        A preempted parent is not waited for, lest one that lacks memory hold up all its siblings.
        """
        parent = self.parent
        if parent is None or parent.num_computed_tokens >= self.num_shareable_tokens:
            return False
        if parent.state is SequenceState.WAITING:
            return parent.num_preemptions == 0
        return parent.state is SequenceState.RUNNING

    @property
    def waits_for_leader(self) -> bool:
        """Whether blocks that it could take over are being computed."""
        leader = self.leader
        return (
            leader is not None
            and leader.state is SequenceState.RUNNING
            and leader.num_hashed_blocks < self.num_awaited_blocks
        )

    @property
    def awaited(self) -> Sequence | None:
        """Whom it stands aside for, if it does."""
        if self.waits_for_leader:
            return self.leader
        return self.parent if self.waits_for_parent else None
