"""Faults of every kind, against real processes and real servers."""

import pytest

pytest.register_assert_rewrite("tests.faults.invariants")
