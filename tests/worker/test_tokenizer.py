"""From inputs to token ids: templates, one BOS, vocabulary, many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.worker.factories import byte_level_backend, make_job, make_tokenizer, render_chat
from tidemill.errors import InvalidJob, ModelUnsupported
from tidemill.jobs import Job, Message
from tidemill_worker.tokenizer import Tokenizer

CHAT = (Message(role="system", content="Be brief."), Message(role="user", content="Why, ďábel? 🌊"))


def chat_job() -> Job:
    return make_job(None, messages=[message.model_dump() for message in CHAT])


@pytest.mark.parametrize("adds_bos", [True, False])
def test_chat_and_the_same_text_as_a_prompt_are_the_same_tokens(adds_bos: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    assert tokenizer.prompt_token_ids(chat_job()) == tokenizer.prompt_token_ids(make_job(render_chat(CHAT)))


def test_chat_and_the_same_text_as_a_prompt_are_the_same_tokens_for_smollm2(smollm2: Tokenizer) -> None:
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy, ďábel? 🌊<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.prompt_token_ids(chat_job())
    assert ids == smollm2.prompt_token_ids(make_job(text))
    assert ids[:2] == [1, 9690]  # <|im_start|>, system


@pytest.mark.parametrize("prompt", ["The mill", "<bos>The mill"])
def test_a_prompt_gets_exactly_one_bos(prompt: str) -> None:
    ids = make_tokenizer(adds_bos=True).prompt_token_ids(make_job(prompt))
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_a_tokenizer_without_bos_gets_none() -> None:
    assert 0 not in make_tokenizer(adds_bos=False).prompt_token_ids(make_job("The mill"))


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(InvalidJob, match="no chat template") as caught:
        make_tokenizer(chat=False).prompt_token_ids(chat_job())
    assert caught.value.field == "messages"


def test_a_template_may_refuse_messages() -> None:
    from jinja2 import TemplateError

    def picky(_messages: object) -> str:
        raise TemplateError("roles must alternate")

    with pytest.raises(InvalidJob, match="roles must alternate"):
        Tokenizer(byte_level_backend(), render=picky).prompt_token_ids(chat_job())


def test_token_ids_pass_as_they_are() -> None:
    assert make_tokenizer().prompt_token_ids(make_job(None, prompt_token_ids=[5, 0, 388])) == [5, 0, 388]


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(InvalidJob) as caught:
        tokenizer.prompt_token_ids(make_job(None, prompt_token_ids=[5, tokenizer.vocab_size]))
    assert caught.value.field == "prompt_token_ids.1"
    assert caught.value.limit == tokenizer.vocab_size


def test_a_model_may_embed_more_tokens_than_its_tokenizer_has() -> None:
    tokenizer = Tokenizer(byte_level_backend(), vocab_size=512)
    assert tokenizer.prompt_token_ids(make_job(None, prompt_token_ids=[511])) == [511]


def test_the_template_overhead_counts_what_the_template_adds(smollm2: Tokenizer) -> None:
    content = smollm2.prompt_token_ids(make_job("tide"))
    chat = smollm2.prompt_token_ids(make_job(None, messages=[{"role": "user", "content": "tide"}]))
    assert smollm2.chat_template_overhead == len(chat) - len(content)


def test_many_threads_share_one_tokenizer(smollm2: Tokenizer) -> None:
    """ "Already borrowed" came from a shared tokenizer in 3988 of 4000 calls (vllm#40949)."""
    jobs = [make_job(f"The tide turns {n} mills. " * 20) for n in range(40)]
    expected = [smollm2.prompt_token_ids(job) for job in jobs]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            assert list(threads.map(smollm2.prompt_token_ids, jobs)) == expected
            texts = threads.map(smollm2.decode, expected)
            assert [text.startswith("The tide") for text in texts] == [True] * len(jobs)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="tokenizer cannot be loaded"):
        Tokenizer.from_pretrained(tmp_path)
