"""What waits for Redis is weighed without being made."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.factories import token_text
from tests.worker.scripted import ranked
from tidemill.jobs import Choice, JobId, Result, Status
from tidemill_worker.recorder import size_of
from tidemill_worker.token_logprobs import on_wire


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"text": "x" * 50_000, "token_ids": tuple(range(10_000))}, id="text and tokens"),
        pytest.param(
            {"logprobs": on_wire([ranked(token, 20) for token in range(500)], token_text)}, id="logprobs"
        ),
        pytest.param(
            {"prompt_logprobs": (None, *on_wire([ranked(token, 5) for token in range(2000)], token_text))},
            id="logprobs of the prompt",
        ),
        pytest.param(
            {"alternatives": tuple(Choice(index=n, text="y" * 9000) for n in range(1, 8))}, id="alternatives"
        ),
        pytest.param({"metadata": {"k": "v" * 30_000}}, id="metadata"),
    ],
)
def test_a_result_s_size_is_about_that_of_its_json(content: dict[str, Any]) -> None:
    result = Result(id=JobId("job"), status=Status.SUCCEEDED, **content)
    assert 0.5 < size_of(result) / len(result.to_wire()) < 2.0
