"""The limits within which the scheduler works."""

from __future__ import annotations

from dataclasses import dataclass, fields


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

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"{item.name} is {value}, must be at least 1")
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
