"""The ranks that tests start: what is told of one that does not answer, and where they meet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    own = RankPool()
    yield own
    own.close()


def where_ranks_met() -> str:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.FileStore)
    return str(store.path)


def sleep_in_vain(asleep: Path) -> None:
    asleep.touch()
    time.sleep(60)


def test_ranks_that_have_answered_still_have_a_folder_to_leave_their_store_in(pool: RankPool) -> None:
    """torch's store looks for its file as it goes: were the folder removed in that moment, it would wait until time-out."""
    first, second = (Path(pool.run(1, "tests.unit.test_support_ranks:where_ranks_met", 60.0, {})[0]) for _ in range(2))
    assert first != second
    assert first.parent.is_dir()
    pool.close()
    assert not first.parent.exists()


def test_where_a_rank_is_that_does_not_answer(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, collect = tmp_path / "asleep", pool._collect

    def hurried(world: int, deadline: float, worst: str) -> list[tuple[str, Any]]:
        while not asleep.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return collect(world, time.monotonic(), worst)

    monkeypatch.setattr(pool, "_collect", hurried)
    with pytest.raises(AssertionError, match=r"(?s)rank 0: no answer in time; it is in.*sleep_in_vain"):
        pool.run(1, "tests.unit.test_support_ranks:sleep_in_vain", 120.0, {"asleep": asleep})
