"""Whole runs made anew from what they recorded, by an implementation of their own."""

import pytest

pytest.register_assert_rewrite("tests.replay.runs")  # so that what it asserts shows its figures
