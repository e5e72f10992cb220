"""A rank that waits for another is told from one that hangs, whatever its stretch of work is marked as."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_a_wait_is_told_from_the_stack(tmp_path: Path) -> None:
    waiting, late = run_ranks(2, "tests.gloo.jobs_blocking:look_at_waits", folder=str(tmp_path))
    assert not any(doing.waits for doing in late.values()), late
    assert {name: doing.waits for name, doing in waiting.items()} == {name: name != "hangs" for name in waiting}
    told = {name: doing.what.removeprefix("a wait for scores") for name, doing in waiting.items()}
    assert told["broadcast"] == ", in broadcast" and told["all_gather_object"] == ", in all_gather_object"
    assert told["weights"].endswith("_object") and told["hangs"] == "", told
