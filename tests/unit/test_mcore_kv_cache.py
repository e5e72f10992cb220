"""The KV caches' books and contents, dense and paged, against plain dictionaries and plain attention."""

import random
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oppo_megatron.errors import CapacityError, CheckpointError
from oppo_megatron.layout.memory import BLOCK_TOKENS, slot_tokens
from oppo_megatron.mcore.kv import cached_plan
from oppo_megatron.mcore.kv.cached_plan import CallPlan, PagedCall
from oppo_megatron.mcore.kv.paged import PagedKernel, PagedKVCache
from oppo_megatron.mcore.kv.sequence_cache import KVCache, SequenceCache

HEADS, GROUPS, DIM, LENGTH, LAYERS = 4, 2, 4, 12, 2
SLOT_BYTES = 2 * LAYERS * GROUPS * LENGTH * DIM * 4
CPU = torch.device("cpu")


# Without rotation, so that what attends is what was given.
SIZES: dict[str, Any] = {
    "num_layers": LAYERS, "num_kv_heads": GROUPS, "head_dim": DIM, "max_length": LENGTH,
    "rope": (torch.ones(LENGTH, DIM), torch.zeros(LENGTH, DIM)), "device": CPU,
}  # fmt: skip


def new_cache(num_slots: int, budget_bytes: int | None = None, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(num_slots=num_slots, dtype=dtype, budget_bytes=budget_bytes, **SIZES)


def new_paged(num_slots: int, budget_bytes: int | None = None, **changes: Any) -> PagedKVCache:
    """Blocks of 5 positions, so that 12 take 3 of them."""
    sizes = {"dtype": torch.float32, "block_tokens": 5, **SIZES, **changes}
    return PagedKVCache(num_slots=num_slots, budget_bytes=budget_bytes, **sizes)


def by_tables(
    q: Tensor, k: Tensor, v: Tensor, call: PagedCall, scale: float, window: int | None, cap: None, sinks: None
) -> Tensor:
    """The kernel's attention, token by token: causal, the last query sees all that is cached, or a window of it."""
    outputs = []
    for s, (start, end) in enumerate(pairwise(call.new_ends.tolist())):
        length = int(call.length_S[s])
        assert call.length_ends[s + 1] - call.length_ends[s] == length
        assert end - start <= call.most_new and length <= call.longest
        keys, values = (pool[call.table_SW[s].long()].flatten(0, 1) for pool in (k, v))
        for t in range(start, end):
            seen = length - (end - 1 - t)
            low = 0 if window is None else max(0, seen - window)
            outputs.append(plain_attention(q[t], keys[low:seen], values[low:seen], scale).view(HEADS, DIM))
    return torch.stack(outputs)


CACHES: dict[str, Callable[[int], SequenceCache]] = {
    "dense": new_cache, "paged": new_paged, "paged, by a kernel": lambda slots: new_paged(slots, kernel=PagedKernel(by_tables)),
}  # fmt: skip


def plain_attention(q_ND: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float) -> Tensor:
    groups = [(head, head // (HEADS // GROUPS)) for head in range(HEADS)]
    weights = [torch.softmax(k_LGD[:, group] @ q_ND[head] * scale, 0) for head, group in groups]
    return torch.cat([weights[head] @ v_LGD[:, group] for head, group in groups])


class Naive:
    """The cache as a dictionary of lists of (key, value), one list a layer."""

    def __init__(self, cache: SequenceCache, seed: int, windows: tuple[int | None, ...] = (None,) * LAYERS):
        self.cache, self.random, self.windows = cache, random.Random(seed), windows
        self.held: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}
        self.blocks: dict[int, list[object]] = {}
        self.opened = 0

    def open(self) -> None:
        if len(self.held) == self.cache.num_slots:
            with pytest.raises(CapacityError, match=f"sequence {self.opened} finds no free slot"):
                self.cache.open(self.opened)
            return
        self.cache.open(self.opened)
        self.held[self.opened], self.blocks[self.opened] = [[] for _ in range(LAYERS)], []
        self.opened += 1

    def fork(self) -> None:
        count = min(self.random.randint(1, 2), self.cache.num_slots - len(self.held))
        if not self.held or not count:
            return
        source, targets = self.random.choice(sorted(self.held)), list(range(self.opened, self.opened + count))
        length = self.random.randint(0, len(self.held[source][0]))
        for _ in targets:
            self.open()
        self.cache.fork(source, targets, length)
        for target in targets:
            self.held[target] = [layer[:length] for layer in self.held[source]]
            self.blocks[target] = self.blocks[source][: length // 5] + [object()] * (length % 5 > 0)

    def close(self) -> None:
        if self.held:
            seq_id = self.random.choice(sorted(self.held))
            self.cache.close(seq_id)
            del self.held[seq_id], self.blocks[seq_id]

    def exchange(self) -> None:
        if self.held:
            one, other = self.random.choices(sorted(self.held), k=2)
            slots = {i: self.cache.slot(i) for i in self.held}
            self.cache.exchange(one, other)
            slots[one], slots[other] = slots[other], slots[one]
            assert {i: self.cache.slot(i) for i in self.held} == slots

    def truncate(self) -> None:
        if self.held:
            seq_id = self.random.choice(sorted(self.held))
            length = self.random.randint(0, len(self.held[seq_id][0]))
            self.cache.truncate(seq_id, length)
            del self.blocks[seq_id][-(-length // 5) :]
            for layer in self.held[seq_id]:
                del layer[length:]

    def step(self, decode: bool) -> None:
        room = {i: LENGTH - len(layers[0]) for i, layers in self.held.items()}
        ids = [i for i in self.cache.seq_ids if room[i]]
        ids = ids if self.random.random() < 0.5 else self.random.sample(ids, self.random.randint(0, len(ids)))
        if not ids:
            return
        lens = [1 if decode else self.random.randint(1, min(4, room[i])) for i in ids]
        for seq_id, new in zip(ids, lens, strict=True):
            self.write(seq_id, len(self.held[seq_id][0]), new)
        plan = self.cache.begin(ids, lens)
        assert [self.cache.length(i) for i in ids] == [len(self.held[i][0]) for i in ids], "nothing is committed yet"
        for layer in range(LAYERS):
            q, k, v = (torch.randn(sum(lens), heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
            expected, start = [], 0
            for seq_id, new in zip(ids, lens, strict=True):
                for t in range(start, start + new):
                    held = self.held[seq_id][layer]
                    held.append((k[t], v[t]))
                    keys, values = (torch.stack(x) for x in zip(*held[-(self.windows[layer] or LENGTH) :], strict=True))
                    expected.append(plain_attention(q[t], keys, values, 0.7))
                start += new
            assert (plan.attend(layer, q, k, v, 0.7, self.windows[layer]) - torch.stack(expected)).abs().max() < 1e-5
        self.cache.commit(plan)

    def write(self, seq_id: int, length: int, new: int) -> None:
        own, others = self.blocks[seq_id], {b for i, held in self.blocks.items() if i != seq_id for b in held}
        if length % 5 and own[length // 5] in others:
            own[length // 5] = object()
        own += [object() for _ in range(-(-(length + new) // 5) - len(own))]

    def act(self, action: str) -> None:
        self.step(action == "decode") if action in ("decode", "prefill") else getattr(self, action)()
        assert sorted(self.cache.seq_ids) == sorted(self.held)
        assert self.cache.seq_ids == sorted(self.held, key=self.cache.slot)
        assert sorted(self.cache.slot(i) for i in self.held) == list(range(len(self.held))), "no gaps"
        assert self.cache.num_free == self.cache.num_slots - len(self.held)
        for seq_id in range(self.opened):
            assert (seq_id in self.cache) == (seq_id in self.held)
        for seq_id, layers in self.held.items():
            assert self.cache.length(seq_id) == len(layers[0])
        if isinstance(self.cache, PagedKVCache):
            taken = {block for blocks in self.blocks.values() for block in blocks}
            assert self.cache.num_free_blocks == self.cache.num_slots * 3 - len(taken), "what is shared is counted once"


ACTIONS = ("open", "open", "fork", "fork", "close", "exchange", "truncate", "decode", "decode", "prefill", "prefill")


@settings(deadline=None, max_examples=120)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=40), num_slots=st.integers(1, 4), seed=st.integers(0, 99),
    kind=st.sampled_from(list(CACHES)), windows=st.tuples(*[st.none() | st.integers(1, LENGTH)] * LAYERS),
)  # fmt: skip
def test_books_and_contents_equal_a_dictionary(
    actions: list[str], num_slots: int, seed: int, kind: str, windows: tuple[int | None, ...]
) -> None:
    naive = Naive(CACHES[kind](num_slots), seed, windows)
    for action in actions:
        naive.act(action)


@pytest.mark.parametrize("kind", CACHES)
def test_forks_go_on_by_themselves_and_leave_no_block_behind(kind: str) -> None:
    forks = ("open", "prefill", "prefill", "prefill", "fork", "fork", "truncate", "truncate", "decode", "exchange", "close")
    for seed in range(20):
        naive, rng = Naive(CACHES[kind](4), seed), random.Random(seed)
        for action in (rng.choice(forks) for _ in range(50)):
            naive.act(action)
        while naive.held:
            naive.act("close")


class Failing(TorchDispatchMode):
    def __init__(self, at: int):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("planted")
        return func(*args, **(kwargs or {}))


def beginnings(cache: SequenceCache) -> dict[int, Tensor]:
    return {seq_id: cache.stored(seq_id) for seq_id in cache.seq_ids}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("work", [
    lambda cache: cache.close(0), lambda cache: cache.fork(0, [3, 4], 8),
    lambda cache: cache.begin([2, 1], [3, 1]),  # the first was rolled back into a block that it shares
    lambda cache: cache.restore(5, torch.ones(2 * LAYERS, LENGTH, GROUPS, DIM)),
], ids=["close", "fork", "begin", "restore"])  # fmt: skip
def test_what_fails_in_the_middle_changes_no_sequence(work: Callable[[SequenceCache], None], kind: str) -> None:
    def made() -> SequenceCache:
        cache = CACHES[kind](6)
        torch.manual_seed(0)
        for seq_id in (0, 1):
            cache.restore(seq_id, torch.randn(2 * LAYERS, 9 + seq_id, GROUPS, DIM))
        for seq_id in (2, 3, 4):
            cache.open(seq_id)
        cache.fork(0, [2], 8)
        cache.truncate(2, 3)
        return cache

    whole = made()
    work(whole)
    for at in range(1, 200):
        cache = made()
        before, free = beginnings(cache), cache.num_free
        try:
            with Failing(at):
                work(cache)
        except MemoryError:
            assert cache.num_free == free and cache.seq_ids == list(before)
            assert all(torch.equal(kept, before[i]) for i, kept in beginnings(cache).items() if i in whole)
            work(cache)
        else:
            break
        assert beginnings(cache).keys() == beginnings(whole).keys()
        assert all(torch.equal(kept, cache.stored(i)) for i, kept in beginnings(whole).items())
        if isinstance(cache, PagedKVCache) and isinstance(whole, PagedKVCache):
            assert cache.num_free_blocks == whole.num_free_blocks
    assert at < 199


def test_sequences_of_a_paged_cache_change_their_slots_without_a_copy() -> None:
    cache = new_paged(4)
    for seq_id in range(4):
        cache.open(seq_id)
    lens = [12, 3, 6, 11]
    plan = cache.begin(range(4), lens)
    q, k, v = (torch.randn(sum(lens), heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    for layer in range(LAYERS):
        plan.attend(layer, q, k, v, 1.0)
    cache.commit(plan)
    writes = [store._version for store in (*cache.k, *cache.v)]
    held = cache.tables([2], 2)
    cache.exchange(1, 2)
    cache.close(0)
    cache.truncate(3, 2)
    assert torch.equal(cache.tables([cache.slot(2)], 2), held)
    assert [store._version for store in (*cache.k, *cache.v)] == writes
    assert cache.num_free_blocks == 12 - 1 - 2 - 1


def test_a_paged_slot_takes_whole_blocks_of_the_budget() -> None:
    token_bytes = 2 * LAYERS * GROUPS * DIM * 4
    for length, positions in ((12, 256), (256, 256), (257, 512)):
        assert slot_tokens(length, "paged") == positions and slot_tokens(length, "dense") == length
        sizes = {"max_length": length, "rope": (torch.ones(length, DIM), torch.zeros(length, DIM)), "block_tokens": BLOCK_TOKENS}
        cache = new_paged(5, 3 * positions * token_bytes + 7, **sizes)
        assert cache.num_slots == 3 and cache.num_free_blocks == 3 * positions // BLOCK_TOKENS
        assert sum(x.nbytes for x in (*cache.k, *cache.v)) == 3 * positions * token_bytes
        with pytest.raises(CapacityError, match=f"takes {positions * token_bytes:,} bytes"):
            new_paged(5, positions * token_bytes - 1, **sizes)


@pytest.mark.parametrize("layout", CACHES)
def test_what_cannot_be_restored_leaves_no_sequence_open(layout: str) -> None:
    cache = CACHES[layout](2)
    fitting = torch.ones(2 * LAYERS, LENGTH, GROUPS, DIM)
    long = fitting.repeat(1, 2, 1, 1)
    others = fitting[:-1], fitting[..., 1:], fitting.double()  # in layers, head size and type
    for stored, error in [*((each, CheckpointError) for each in others), (long, CapacityError)]:
        with pytest.raises(error, match="sequence 5"):
            cache.restore(5, stored)
        assert 5 not in cache and cache.num_free == 2
    cache.restore(5, fitting)
    assert torch.equal(cache.stored(5), fitting)


def test_the_budget_in_bytes_is_kept_to() -> None:
    """And a sequence beyond its positions is an error that names it."""
    for slots, spare in product((1, 3, 5), (0, SLOT_BYTES - 1)):
        cache = new_cache(5, slots * SLOT_BYTES + spare)
        assert cache.num_slots == cache.num_free == slots
        assert sum(x.numel() * x.element_size() for x in (*cache.k, *cache.v)) == slots * SLOT_BYTES
    assert new_cache(2, 100 * SLOT_BYTES).num_slots == 2
    assert new_cache(5, SLOT_BYTES, torch.bfloat16).num_slots == 2
    needs, remedy = rf"{SLOT_BYTES - 1:,} bytes.*{LENGTH} tokens.*{SLOT_BYTES:,} bytes", "runtime.kv_cache_mb to at least 1,"
    with pytest.raises(CapacityError, match=rf"(?=.*{needs}).*{remedy}"):
        new_cache(5, SLOT_BYTES - 1)
    cache = new_cache(2)
    cache.open(9)
    cache.commit(cache.begin([9], [LENGTH - 1]))
    with pytest.raises(CapacityError, match=f"sequence 9: {LENGTH - 1} cached \\+ 2 new tokens exceed {LENGTH} "):
        cache.begin([9], [2])
    cache.begin([9], [1])


@pytest.mark.parametrize("window", [None, 5, LENGTH])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3]], ids=["neighbours", "scattered slots"])
@pytest.mark.parametrize("new", [new_cache, new_paged], ids=["dense", "paged"])
def test_sequences_attend_the_same_one_by_one_all_at_once_in_stretches_and_in_the_parts_of_a_gpu(
    order: list[int], new: Callable[[int], SequenceCache], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, cuts, products, attend = [], [], list[int](), F.scaled_dot_product_attention

    def watched(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        products.append(len(q))
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    on_gpu = [(2**20, 2**25), (1, 2**25), (30, 40), (2**20, 1)]
    for fewest, call, parts in [(0, 1e9, None), (1e9, 1e9, None), (1e9, 0.5, None), *[(0, 1e9, parts) for parts in on_gpu]]:
        monkeypatch.setattr(cached_plan, "FEW_TOKENS", fewest)
        monkeypatch.setattr(cached_plan, "CALL_NUMBERS", call)
        if parts is not None:
            monkeypatch.setattr(CallPlan, "parts_on", staticmethod(lambda _: True))
            monkeypatch.setattr(cached_plan.parts_of, "__defaults__", parts[:1])
            monkeypatch.setattr(cached_plan, "MASK_NUMBERS", parts[1])
        torch.manual_seed(0)
        cache, outputs = new(4), []
        for seq_id in range(4):
            cache.open(seq_id)
        for lens in ([5, 1, 3, 4], [2, 6, 1, 5], [1, 1, 1, 1], [2, 2, 2, 2]):
            ids, lens = order, [lens[i] for i in order]
            plan = cache.begin(ids, lens)
            q, k, v = (torch.randn(sum(lens), heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
            products.clear()
            outputs += [plan.attend(layer, q, k, v, DIM**-0.5, window) for layer in range(LAYERS)]
            cuts.append(list(products))
            cache.commit(plan)
        found.append(torch.cat(outputs))
    each, all_at_once, stretches = cuts[:4], cuts[4:8], cuts[8:12]
    alone, together = [1] * LAYERS * len(order), [len(order)] * LAYERS
    assert each == [alone, alone, together, alone], "decode steps attend at once"
    assert all_at_once == [together] * 4
    assert all(len(sizes) > LAYERS and sum(sizes) == LAYERS * len(order) for sizes in stretches)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-6, rtol=1e-6)


def test_steps_of_unknown_positions_reach_no_further_than_the_cache() -> None:
    rope = (torch.ones(600, DIM), torch.zeros(600, DIM))
    cache = PagedKVCache(num_slots=1, dtype=torch.float32, **(SIZES | {"max_length": 600, "rope": rope}))
    assert [cache.bucket(longest) for longest in (1, 256, 257, 512, 513, 600)] == [256, 256, 512, 512, 600, 600]
