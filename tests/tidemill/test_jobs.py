"""A refusal names the field, and a limit only where there is one."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.errors import ErrorCode, InvalidJob
from tidemill.jobs import Job


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"prompt": ""}, "prompt", 1),
        ({"messages": []}, "messages", 1),
        ({"prompt_token_ids": []}, "prompt_token_ids", 1),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids.1", 0),
        ({"prompt": "x", "params": {"top_p": 1.5}}, "params.top_p", 1.0),
        ({"prompt": "x", "params": {"seed": 2**63}}, "params.seed", 2**63),
        ({"prompt": "x", "params": {"stop": ["a"] * 17}}, "params.stop", 16),
        ({"prompt": "x", "params": "greedy"}, "params", None),
        ({"prompt": "x", "metadata": {"a": 1}}, "metadata.a", None),
        ({"prompt": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata", 16),
        ({"prompt": "x", "priority": "urgent"}, "priority", "'high', 'normal' or 'low'"),
        ({"prompt": "x", "tempo": 1}, "tempo", None),
        ({"prompt": "half \ud83c"}, "prompt", None),
        ({"messages": [{"role": "user", "content": "half \ud83c"}]}, "messages.0.content", None),
        ({"prompt": "x", "model": "half \ud83c"}, "model", None),
        ({"prompt": "x", "metadata": {"a": "half \ud83c"}}, "metadata.a", None),
        ({}, None, None),
    ],
)
def test_a_refusal_names_field_and_limit(fields: dict[str, Any], field: str | None, limit: object) -> None:
    with pytest.raises(InvalidJob) as refused:
        Job.parse(fields)
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_what_is_no_object_has_no_limit() -> None:
    with pytest.raises(InvalidJob, match="object") as refused:
        Job.from_wire(b"[1, 2]")
    assert (refused.value.field, refused.value.limit) == (None, None)
    assert refused.value.code is ErrorCode.UNDECODABLE
