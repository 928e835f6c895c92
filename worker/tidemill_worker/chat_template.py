"""A model's chat template as a function of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidemill.jobs import Message


def chat_renderer(loaded: Any) -> Callable[[Sequence[Message]], str] | None:
    """The template of a transformers tokenizer, the assistant's turn opened; `None` if it has none.

    A model may bring several, by name; the one called `default` is taken.
    """
    try:
        template = loaded.get_chat_template()
    except ValueError:  # it has none, or several of which none is for plain chats
        return None

    def render(messages: Sequence[Message]) -> str:
        turns = [message.model_dump() for message in messages]
        return str(
            loaded.apply_chat_template(
                turns, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )

    return render
