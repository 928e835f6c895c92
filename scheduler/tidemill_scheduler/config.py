"""The limits within which the scheduler works."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidemill_scheduler.costs import PreemptionMode
from tidemill_scheduler.errors import NeverFits

RELIEF_FACTOR = 4
"""With one mark for admitting and for beginning to admit again, the two would chase each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and bounds; every value is checked, and names follow vLLM's flags where one exists.

    Raises:
        ValueError: naming the field, its value and what it would accept.
    """

    num_blocks: int
    """Blocks of KV memory."""
    max_model_len: int
    """Tokens of one sequence at most, prompt and generated."""
    block_size: int = 16
    """Tokens per block."""
    max_num_seqs: int = 256
    """Sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, over all sequences."""
    enable_prefix_caching: bool = True
    """Share full blocks between sequences of equal beginnings. When off, a preempted sequence may
    still find its own, and forks of one prompt share theirs."""
    enable_chunked_prefill: bool = True
    """Compute a long prompt over several steps."""
    max_prefill_chunk: int = 512
    """Tokens of one prompt computed in a step that others take part in, so that a long prompt
    delays neither their next token nor the short prompts behind it by more."""
    ageing_steps: int = 1024
    """A waiting sequence gains one level of priority each time this many steps pass."""
    max_overtakes: int = 64
    """Sequences that may be admitted past one that is blocked for memory, before all wait for it."""
    num_swap_blocks: int = 0
    """Blocks of swap space in CPU memory: a second tier behind the KV memory."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """Whether preempted sequences are swapped out or computed again."""
    watermark: float = 0.01
    """Share of the KV memory that admitting leaves free, so that those who run can grow; after a
    preemption, nobody is admitted until `RELIEF_FACTOR` times as much is free."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name == "num_swap_blocks" else 1
            if item.type == "int" and value < least:
                raise ValueError(f"{item.name} is {value}, must be at least {least}")
        if not 0.0 <= self.watermark < 1 / RELIEF_FACTOR:
            raise ValueError(
                f"watermark is {self.watermark}, must be at least 0 and below {1 / RELIEF_FACTOR}"
            )
        least, why = self._least_batched_tokens()
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least {least}: {why}"
            )

    def _least_batched_tokens(self) -> tuple[int, str]:
        if self.enable_chunked_prefill:
            return self.max_num_seqs, "each running sequence gets its token (max_num_seqs)"
        return (
            self.max_model_len + self.max_num_seqs,
            "without chunked prefill a whole prompt is computed beside the decodes"
            " (max_model_len + max_num_seqs)",
        )

    def refuse_what_never_fits(self, max_total_tokens: int) -> None:
        """Check the tokens, prompt and generated, of a sequence.

        Raises:
            NeverFits: naming the limit that it exceeds.
        """
        limits = {"max_model_len": self.max_model_len, "kv_cache_tokens": self.kv_cache_tokens}
        for field, limit in limits.items():
            if max_total_tokens > limit:
                raise NeverFits(field, needed=max_total_tokens, limit=limit)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of the largest sequence that the KV memory allows.

        The last token generated is never computed, so it needs no room.
        """
        return self.num_blocks * self.block_size + 1

    @property
    def max_total_tokens(self) -> int:
        """Tokens, prompt and generated, of the largest sequence that `Scheduler.add` takes."""
        return min(self.max_model_len, self.kv_cache_tokens)
