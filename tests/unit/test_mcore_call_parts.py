"""The parts in which a GPU attends to the new tokens of a call: none is lost, none wastes or holds much, and the numbers are
those of sequences one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.mcore.kv import cached_plan, call_parts
from oppo_megatron.mcore.kv.cached_plan import CallPlan
from oppo_megatron.mcore.kv.call_parts import Part, parts_of
from oppo_megatron.mcore.kv.dense import KVCache
from oppo_megatron.mcore.kv.paged import PagedKVCache
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache

HEADS, GROUPS, DIM, LENGTH, LAYERS = 4, 2, 4, 24, 2
SEQUENCES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=12)


@given(SEQUENCES, st.sampled_from([1, 4]), st.sampled_from([None, 7]), st.integers(1, 3000), st.integers(16, 4000))
def test_every_new_token_is_in_one_part_that_sees_what_it_attends_to(
    sequences: list[tuple[int, int]], repeat: int, window: int | None, call: int, most: int
) -> None:
    past, lens = [p for p, _ in sequences], [n for _, n in sequences]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(call_parts, "MASK_NUMBERS", most)
        parts = parts_of(past, lens, repeat, window, call)
    seen: list[tuple[int, int]] = []
    for part in parts:
        assert part.mask_numbers(repeat) <= most or (part.alone and part.queries.stop - part.queries.start == 1)
        for row in range(part.rows.start, part.rows.stop):
            for column in range(part.queries.start, min(part.queries.stop, lens[row])):
                seen.append((row, column))
                position = past[row] + column
                first = 0 if window is None else max(0, position + 1 - window)
                assert part.keys.start <= first and position < part.keys.stop
                assert not part.causal or past[row] == part.keys.start == 0
    assert seen == [(row, column) for row, new in enumerate(lens) for column in range(new)]


def test_a_long_sequence_among_short_ones_attends_alone_and_new_ones_need_no_mask() -> None:
    short = [130] * 4
    parts = parts_of([0] * 9, [*short, 4000, *short], 8, None)
    assert parts == [
        Part(slice(0, 4), slice(0, 130), slice(0, 130), None, True),
        Part(slice(4, 5), slice(0, 4000), slice(0, 4000), None, True),
        Part(slice(5, 9), slice(0, 130), slice(0, 130), None, True),
    ]
    going_on = parts_of([4000, 100], [4000, 100], 8, None)
    assert len(going_on) > 2 and sum(part.mask_numbers(8) for part in going_on) > call_parts.MASK_NUMBERS
    assert [part.rows for part in going_on[-2:]] == [slice(0, 1), slice(1, 2)]


def new_cache(kind: type[SequenceCache]) -> SequenceCache:
    rope = torch.ones(LENGTH, DIM), torch.zeros(LENGTH, DIM)
    return kind(  # type: ignore[call-arg]
        num_layers=LAYERS, num_kv_heads=GROUPS, head_dim=DIM, num_slots=4, max_length=LENGTH, rope=rope,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 3, LENGTH])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3]], ids=["neighbours", "scattered slots"])
@pytest.mark.parametrize("kind", [KVCache, PagedKVCache], ids=["dense", "paged"])
def test_parts_attend_as_sequences_one_by_one_do(
    order: list[int], kind: type[SequenceCache], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls over new sequences, over some that go on, and over these alone; in few parts and in many, masked in pieces."""
    monkeypatch.setattr(cached_plan, "FEW_TOKENS", 0)
    found = [attended(order, kind, window, lambda: None)]
    monkeypatch.setattr(CallPlan, "parts_on", staticmethod(lambda _: True))
    for call, most in ((2**20, 2**25), (1, 2**25), (30, 40), (2**20, 1)):

        def smaller(call: int = call, most: int = most) -> None:
            monkeypatch.setattr(call_parts.parts_of, "__defaults__", (call,))
            monkeypatch.setattr(call_parts, "MASK_NUMBERS", most)

        found.append(attended(order, kind, window, smaller))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-6, rtol=1e-6)


def attended(order: list[int], kind: type[SequenceCache], window: int | None, prepare: Callable[[], None]) -> torch.Tensor:
    prepare()
    torch.manual_seed(0)
    cache, outputs = new_cache(kind), []
    for seq_id in range(4):
        cache.open(seq_id)
    for lens in ([5, 1, 3, 9], [2, 6, 1, 7], [2, 2, 2, 2]):
        lens = [lens[i] for i in order]
        plan = cache.begin(order, lens)
        q, k, v = (torch.randn(sum(lens), heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
        outputs += [plan.attend(layer, q, k, v, DIM**-0.5, window) for layer in range(LAYERS)]
        cache.commit(plan)
    return torch.cat(outputs)
