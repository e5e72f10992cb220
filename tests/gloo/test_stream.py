"""The token stream over real ranks."""

from __future__ import annotations

import re

import pytest

from tests.gloo.jobs_stream import SEQ_ID, chunks
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(("world", "fan_out"), [(2, 8), (4, 8), (4, 1), (5, 2)])
def test_every_scorer_rank_receives_what_was_sent(world: int, fan_out: int) -> None:
    """From the actor, or from one of their own that passes it on."""
    answers = run_ranks(world, "tests.gloo.jobs_stream:whole", number=6, fan_out=fan_out)
    assert answers[0]["got"] == []
    for answer in answers[1:]:
        assert answer["got"] == chunks(6)
    assert all(answer["shared"] == [0.5, -3.0] for answer in answers)


@pytest.mark.parametrize(
    "kind,where",
    [
        ("lost", f"message 2 came, but 1 was due; .* sequence {SEQ_ID} at offset 3"),
        ("repeated", f"message 0 came, but 1 was due; .* sequence {SEQ_ID} at offset 3"),
        ("corrupted", f"sequence {SEQ_ID}, offset 3 .*corrupted"),
        ("prompt", f"sequence {SEQ_ID}, offset 0 .*different prompts"),
    ],
)
def test_a_damaged_stream_is_an_error_on_every_scorer_rank(kind: str, where: str) -> None:
    for message in run_ranks(3, "tests.gloo.jobs_stream:damaged", kind=kind)[1:]:
        assert re.search(where, message), message
