"""Names in Redis: one hash tag per queue, and one place where each is spelled."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from tidemill.jobs import JobId, Priority
from tidemill.keys import JobField, Key, QueueKeys, lane, lua_names, split_lane


def test_all_keys_of_a_queue_share_its_hash_tag() -> None:
    keys = QueueKeys("org/model")
    made = [
        keys.job(JobId("a")),
        keys.jobs(1, Priority.LOW, "t"),
        keys.returned(1, Priority.LOW, "t"),
        keys.results("r"),
        keys.readers,
        keys.deltas(JobId("a")),
        keys.active(1, Priority.HIGH),
        keys.cancelled("w"),
        keys.worker("w"),
        keys.workers,
        keys.server,
        keys.leases,
        keys.deadlines,
        keys.delayed,
        keys.load,
        keys.accounts,
        keys.resting,
        keys.weights,
        keys.doorbell,
        keys.dead,
        keys.card,
    ]

    assert all(key.startswith("tidemill:{org/model}:") for key in made)
    assert len(set(made)) == len(made)


def test_no_key_is_the_beginning_of_a_kind_of_keys() -> None:
    for key in Key:
        for other in Key:
            assert key is other or not key.startswith(other) or not other.endswith(":")


@pytest.mark.parametrize("priority", list(Priority))
def test_a_lane_is_read_back(priority: Priority) -> None:
    assert split_lane(lane(12, priority, "a_b-C")) == (12, priority, "a_b-C")


def test_the_documentation_names_every_key() -> None:
    import tidemill.keys

    documented = re.findall(r"^    ([a-z]+:?)", tidemill.keys.__doc__ or "", flags=re.MULTILINE)
    assert set(documented) == {str(key) for key in Key}


def test_the_page_about_the_queue_names_every_key_too() -> None:
    page = Path(__file__).parents[2] / "docs" / "queue.md"

    documented = re.findall(r"^\| `([a-z]+:?)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert set(documented) == {str(key) for key in Key}


def test_the_scripts_use_only_names_they_are_given() -> None:
    names = lua_names()
    known = {
        table: set(re.findall(r"(\w+) = ", names.split(f"local {table} = ")[1].split("\n")[0]))
        for table in ("K", "F", "E")
    }
    for script in (files("tidemill") / "lua").iterdir():
        for table, name in re.findall(r"\b([KFE])\.(\w+)", script.read_text()):
            assert name in known[table], f"{script.name}: {table}.{name}"


def test_reading_a_job_leaves_its_payload_where_it_is() -> None:
    light = lua_names().split("local LIGHT = ")[1].split("\n")[0]

    assert light.count("'") == 2 * (len(JobField) - 1)
    assert "'payload'" not in light
