"""Packed micro-batches, parts of a call, attention through a window; and CPU-only ways, which are not taken on a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssRotaryEmbedding

from oppo_megatron.cluster.held_memory import device_bytes, held_bytes, peak_bytes
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.layout.memory import WHOLE_MULTIPLE
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore import attention, roles
from oppo_megatron.mcore.attention import LEAST_PIECE, CausalSpans, PackedPlan, binding, rope_tables
from oppo_megatron.mcore.batch import MicroBatch, join_rows, pack_responses, split_rows
from oppo_megatron.mcore.cpu import HalfOnCpu, can_prepack
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.kv import cached_plan
from oppo_megatron.mcore.kv.cached_plan import Part, parts_of
from oppo_megatron.mcore.kv.sequence_cache import KVCache
from oppo_megatron.mcore.layers import fixed_norm, rms_norm
from oppo_megatron.mcore.vocab import OutputRows, VocabShards
from tests.support.ppo import SHAPE

CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(0, 500), min_size=1, max_size=6)

OSS = SHAPE | {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 8}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("rope", [
    {}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_parameters": {"rope_theta": 500.0}}, {"rope_scaling": YARN},
    {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8.0}, "rope_theta": 9e3,
     "rope_parameters": {"rope_type": "default"}},
])  # fmt: skip
def test_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """Whatever the keys; a limit without a fraction, which transformers' own configuration refuses, is computed."""
    ours = rope_tables(ModelShape.from_hf({**OSS, **rope, "swiglu_limit": 7}), 200, CPU)
    theirs = GptOssRotaryEmbedding(GptOssConfig(**{key: value for key, value in (OSS | rope).items() if key != "model_type"}))
    for our_LD, of_half in zip(ours, theirs(torch.zeros(1), torch.arange(200)[None]), strict=True):
        assert torch.equal(our_LD[:, of_half.shape[-1] :], of_half[0])


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8), budget=st.integers(1, 30))
def test_rows_predict_each_response_token_from_its_own_prefix(pairs: list[tuple[list[int], list[int]]], budget: int) -> None:
    batches = pack_responses([p for p, _ in pairs], [r for _, r in pairs], budget, CPU)
    found: dict[tuple[int, int], tuple[list[int], int]] = {}
    for batch in batches:
        assert len(batch.tokens_T) == sum(batch.lengths)
        assert len(batch.tokens_T) <= budget or len(batch.index) == 1
        starts = [sum(batch.lengths[:k]) for k in range(len(batch.lengths))]
        for row, target in zip(batch.rows_R.tolist(), batch.targets_R.tolist(), strict=True):
            place = max(k for k, start in enumerate(starts) if start <= row)
            prefix = batch.tokens_T[starts[place] : row + 1].tolist()
            found[batch.index[place], len(prefix)] = (prefix, target)
    assert found == {
        (i, len(prompt) + t): (prompt + response[:t], response[t])
        for i, (prompt, response) in enumerate(pairs)
        for t in range(len(response))
    }


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), budget=st.integers(1, 20))
def test_join_inverts_split(lengths: list[int], budget: int) -> None:
    batches = pack_responses([[1]] * len(lengths), [[2] * n for n in lengths], budget, CPU)
    values_T = torch.arange(sum(lengths), dtype=torch.float32)
    pieces = split_rows(values_T, lengths, batches)
    assert [len(p) for p in pieces] == [len(b.rows_R) for b in batches]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert pieces[0].tolist() == [float(starts[i] + t) for i in batches[0].index for t in range(lengths[i])]
    assert torch.equal(join_rows(pieces, lengths, batches), values_T)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), more=st.integers(0, 30), longest=st.integers(1, 9))
def test_padding_is_sequences_behind_the_batch(lengths: list[int], more: int, longest: int) -> None:
    (batch,) = pack_responses([[7]] * len(lengths), [[5] * n for n in lengths], 1000, CPU)
    num_tokens = sum(lengths)
    padded_lengths, tokens_T = batch.padded(num_tokens + more, longest)
    assert padded_lengths[: len(lengths)] == batch.lengths and sum(padded_lengths) == len(tokens_T) == num_tokens + more
    assert all(1 <= n <= longest for n in padded_lengths[len(lengths) :])
    assert torch.equal(tokens_T[:num_tokens], batch.tokens_T) and not tokens_T[num_tokens:].any()
    assert int(batch.rows_R.max()) < num_tokens, "no row looks at the padding"


def test_a_dummy_belongs_to_no_sequence_and_tokens_that_do_not_fit_are_our_own_bug() -> None:
    dummy, (batch,) = MicroBatch.dummy(CPU), pack_responses([[1, 2]], [[3, 4]], 10, CPU)
    assert dummy.is_dummy and len(dummy.tokens_T) == sum(dummy.lengths) == 1 and dummy.rows_R.tolist() == [0]
    assert not batch.is_dummy
    with pytest.raises(AssertionError, match="3 tokens do not fit into 2"):
        batch.padded(2, 8)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=12), st.sampled_from([1, 4]),
    st.sampled_from([None, 7]), st.integers(1, 3000), st.integers(16, 4000),
)  # fmt: skip
def test_every_new_token_is_in_one_part_that_sees_what_it_attends_to(
    sequences: list[tuple[int, int]], repeat: int, window: int | None, call: int, most: int
) -> None:
    past, lens = [p for p, _ in sequences], [n for _, n in sequences]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cached_plan, "MASK_NUMBERS", most)
        parts = parts_of(past, lens, repeat, window, call)
    seen: list[tuple[int, int]] = []
    for part in parts:
        assert part.mask_numbers(repeat) <= most or (part.alone and part.queries.stop - part.queries.start == 1)
        for row in range(part.rows.start, part.rows.stop):
            for column in range(part.queries.start, min(part.queries.stop, lens[row])):
                seen.append((row, column))
                position = past[row] + column
                assert part.keys.start <= (0 if window is None else max(0, position + 1 - window)) and position < part.keys.stop
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
    assert len(going_on) > 2 and sum(part.mask_numbers(8) for part in going_on) > cached_plan.MASK_NUMBERS
    assert [part.rows for part in going_on[-2:]] == [slice(0, 1), slice(1, 2)]


HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.4
LENGTHS = [3 * LEAST_PIECE + 7, 1, LEAST_PIECE + 1, 5]
ROPE = torch.ones(max(LENGTHS), DIM), torch.zeros(max(LENGTHS), DIM)
"""No rotation: what attends is what was given."""


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = [(num_tokens, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def plain(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None = None) -> Tensor:
    """transformers' rules: token i attends to j with i - window < j <= i, and to a sink.  In the precision of the arguments."""
    outputs = []
    for q_s, k_s, v_s in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        place = torch.arange(len(q_s))
        seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - window)
        k_s, v_s = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k_s, v_s))
        weights = torch.einsum("qnd,knd->nqk", q_s, k_s) * SCALE
        weights = weights.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            weights = torch.cat([weights, sinks[:, None, None].expand(-1, len(q_s), 1)], -1)
        weights = weights.softmax(-1)[..., : len(q_s)]
        outputs.append(torch.einsum("nqk,knd->qnd", weights, v_s).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [1, 9, LEAST_PIECE, 100, max(LENGTHS) - 1, max(LENGTHS), 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_sequences_and_their_gradients(window: int, dtype: torch.dtype) -> None:
    given = inputs(sum(LENGTHS), dtype)
    weights = torch.randn(sum(LENGTHS), HEADS * DIM, generator=torch.Generator().manual_seed(3))
    found = PackedPlan(LENGTHS, ROPE).attend(0, *given, SCALE, window)
    (found.float() * weights).sum().backward()
    exact = [x.detach().float().requires_grad_() for x in given]
    expected = plain(*exact, window)
    (expected * weights).sum().backward()
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.03}
    torch.testing.assert_close(found.float(), expected, **tolerance)
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, **tolerance)


@pytest.mark.parametrize("window", [None, 9, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_positions_of_each_sequence_and_their_gradients(window: int | None, dtype: torch.dtype) -> None:
    given, reach, new = inputs(sum(LENGTHS), dtype), [LENGTHS[0], 1, 30, 5], [LENGTHS[0] - 10, 1, 7, 2]
    ours, theirs = ([x.detach().to(kind).requires_grad_() for x in given] for kind in (dtype, torch.float32))
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    keys = [start + i for start, most in zip(starts, reach, strict=True) for i in range(most)]
    queries = [start + i for start, most, last in zip(starts, reach, new, strict=True) for i in range(most - last, most)]
    spans = CausalSpans(new, reach, CPU)
    found = spans.attend(ours[0][queries], ours[1][keys], ours[2][keys], SCALE, window).flatten(1)
    expected = plain(*theirs, window or max(LENGTHS))[queries]
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    (found.float() * weights).sum().backward()
    (expected * weights).sum().backward()
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.03}
    torch.testing.assert_close(found.float(), expected, **tolerance)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, **tolerance)


def by_ends(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *, scale: float,
    window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Stand in for torch's `varlen_attn` before `enable_gqa`."""
    assert ends_q.dtype == torch.int32 and ends_k is ends_q and most_q == most_k == max(LENGTHS) and scale == SCALE
    before, after = window_size
    assert after == 0 and ends_q.diff().tolist() == LENGTHS
    return plain(q, k, v, max(LENGTHS) if before == -1 else before + 1).unflatten(1, (HEADS, DIM))


TREE, PREFIXES = [5, 70, 9, 1, 66, 3, 2], {2: 1, 3: 1, 4: 1, 6: 5}
"""Some sequences continue others."""
POSITIONS = [
    [*range(5)],
    *([*range(5, 75), *own] for own in ([], range(75, 84), [84], range(85, 151))),
    *([151, 152, 153, *own] for own in ([], [154, 155])),
]
"""Packed positions that each sequence reads."""


@pytest.mark.parametrize("window", [None, 4, 40, 4096])
@pytest.mark.parametrize(("dtype", "by_kernel"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_sequences_that_continue_another_read_it_whole(
    monkeypatch: pytest.MonkeyPatch, window: int | None, dtype: torch.dtype, by_kernel: bool
) -> None:
    """As packed copies with their prefix do; gradients of the prefix add up."""
    given, copied = (inputs(sum(TREE), dtype) for _ in range(2))
    rope = torch.randn(2, 200, DIM, generator=torch.Generator().manual_seed(5)).unbind(0)
    weights = torch.randn(sum(TREE), HEADS * DIM, generator=torch.Generator().manual_seed(3))
    all_positions = [position for own in POSITIONS for position in own]
    plan = PackedPlan([len(own) for own in POSITIONS], rope)
    expected = plan.attend(0, *(x[all_positions] for x in copied), SCALE, window).float()
    last = {position: place for place, position in enumerate(all_positions)}  # one copy of each counts
    expected = expected[[last[position] for position in range(sum(TREE))]]
    (expected * weights).sum().backward()
    if by_kernel:
        monkeypatch.setattr(attention, "varlen_kernel", lambda q, cap: by_parts)
    found = PackedPlan(TREE, rope, PREFIXES).attend(0, *given, SCALE, window).float()
    (found * weights).sum().backward()
    tolerance: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.03}
    torch.testing.assert_close(found, expected, **tolerance)
    for ours, theirs in zip(given, copied, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)


def by_parts(
    q: Tensor, k: Tensor, v: Tensor, queries: attention.Ends, keys: attention.Ends, scale: float, window: int | None
) -> Tensor:
    """flash-attn's rule for fewer queries than keys: the last query sees the last key."""
    lengths = [ends.diff().tolist() for ends, _ in (queries, keys)]
    assert [max(own) for own in lengths] == [queries[1], keys[1]] and queries[0].dtype == torch.int32
    outputs = []
    for q_s, k_s, v_s in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True):
        behind = torch.arange(len(k_s) - len(q_s), len(k_s))[:, None] - torch.arange(len(k_s))
        mask = (behind >= 0) & (behind < (window or len(k_s)))
        q_s, k_s, v_s = (x.transpose(0, 1)[None] for x in (q_s, k_s, v_s))
        out = F.scaled_dot_product_attention(q_s, k_s, v_s, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def test_keys_that_are_joined_are_not_kept_until_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's keys and values are in memory once, however many responses read them."""
    held: list[StorageWeakRef] = []
    plain_attention = attention.torch_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
        held.extend(StorageWeakRef(x.untyped_storage()) for x in (k, v))
        return plain_attention(q, k, v, *more, **options)

    monkeypatch.setattr(attention, "torch_attention", watched)
    out = PackedPlan([70, 9, 30], ROPE, {1: 0, 2: 0}).attend(0, *inputs(109), SCALE)
    assert [ref.expired() for ref in held] == [False] * 2 + [True] * 4
    out.sum().backward()


@pytest.mark.parametrize("window", [None, 1, 100, 4096])
@pytest.mark.parametrize("asks_for_groups", [False, True])
def test_one_call_for_all_sequences(monkeypatch: pytest.MonkeyPatch, window: int | None, asks_for_groups: bool) -> None:
    def later(*args: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
        assert enable_gqa
        return by_ends(*args, scale=scale, window_size=window_size)

    given = inputs(sum(LENGTHS))
    expected = PackedPlan(LENGTHS, ROPE).attend(0, *given, SCALE, window)
    monkeypatch.setattr(varlen, "varlen_attn", later if asks_for_groups else by_ends)
    attention.torch_varlen.cache_clear()
    monkeypatch.setattr(attention, "varlen_kernel", lambda q, cap: attention.torch_varlen())
    found = PackedPlan(LENGTHS, ROPE).attend(0, *given, SCALE, window)
    attention.torch_varlen.cache_clear()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def spans_of(ends: tuple[Tensor, Tensor], window: list[int]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys and what they see, of each sequence."""
    for first_q, end_q, first_k, end_k in zip(*(x for e in ends for x in (e.tolist(), e.tolist()[1:])), strict=False):
        new, reach = end_q - first_q, end_k - first_k
        behind = torch.arange(reach - new, reach)[:, None] - torch.arange(reach)
        yield slice(first_q, end_q), slice(first_k, end_k), (behind >= 0) & (behind <= (reach if window[0] < 0 else window[0]))


def flash_forward(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output and log-sums of flash attention, which its backward pass reads."""
    (_, _, _, scale, window, *_), repeat = how, q.shape[1] // k.shape[1]
    out, log_sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for queries, keys, seen in spans_of((ends_q, ends_k), window):
        own_k, own_v = (x[keys].repeat_interleave(repeat, 1) for x in (k, v))
        logits = (torch.einsum("qnd,knd->nqk", q[queries], own_k) * scale).masked_fill(~seen, -torch.inf)
        log_sums[:, queries] = logits.logsumexp(-1)
        out[queries] = torch.einsum("nqk,knd->qnd", logits.softmax(-1), own_v)
    return out, log_sums, torch.zeros(2, dtype=torch.uint64)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ends_q: Tensor, ends_k: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P (dO V^T - rowsum(dO O)), with P from the log-sums (Dao et al. 2022)."""
    (_, _, _, _, scale, window), repeat, grads = how, q.shape[1] // k.shape[1], tuple(map(torch.zeros_like, (q, k, v)))
    for queries, keys, seen in spans_of((ends_q, ends_k), window):
        own_k, own_v = (x[keys].repeat_interleave(repeat, 1) for x in (k, v))
        logits = (torch.einsum("qnd,knd->nqk", q[queries], own_k) * scale).masked_fill(~seen, -torch.inf)
        weights = (logits - log_sums[:, queries, None]).exp()
        along = (grad[queries] * out[queries]).sum(-1).t()[..., None]
        inner = weights * (torch.einsum("qnd,knd->nqk", grad[queries], own_v) - along) * scale
        grads[0][queries] = torch.einsum("nqk,knd->qnd", inner, own_k)
        for found, rows, x in ((grads[1], inner, q[queries]), (grads[2], weights, grad[queries])):
            found[keys] = torch.einsum("nqk,qnd->knd", rows, x).unflatten(1, (-1, repeat)).sum(2)
    return grads


@pytest.fixture(scope="module")
def flash_on_cpu() -> None:
    """Uses what torch registered for a device that has the kernels, autograd included."""
    varlen._varlen_attn.register_kernel("cpu")(flash_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(flash_backward)


@pytest.mark.parametrize("window", [None, 9, 100])
@pytest.mark.parametrize("way", ["composed", "composed, bfloat16", "kernel", "kernel, computed again"])
def test_sinks_and_their_gradients(flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch, window: int | None, way: str) -> None:
    """A kernel's backward pass reads the output and log-sums that sinks have changed."""
    if "kernel" in way:
        monkeypatch.setattr(attention, "varlen_kernel", lambda q, cap: attention.torch_varlen())
    monkeypatch.setattr(attention, "COMPOSED_NUMBERS", 2**12)
    dtype = torch.bfloat16 if "bfloat16" in way else torch.float32
    given = [*inputs(sum(LENGTHS), dtype), torch.linspace(-3.0, 4.0, HEADS).to(dtype).requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in given]
    again = partial(checkpoint, use_reentrant=False) if "again" in way else lambda function, *tensors: function(*tensors)
    found = again(lambda q, k, v, sinks: PackedPlan(LENGTHS, ROPE).attend(0, q, k, v, SCALE, window, sinks=sinks), *given)
    expected = plain(*exact[:3], window or max(LENGTHS), exact[3])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (found.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.03}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **tolerance)


def test_sinks_of_sequences_that_continue_another(flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Tensor]] = []
    for kernel in (None, attention.torch_varlen()):
        monkeypatch.setattr(attention, "varlen_kernel", lambda q, cap, kernel=kernel: kernel)
        given = [*inputs(sum(TREE)), torch.linspace(-3.0, 4.0, HEADS).requires_grad_()]
        rope = torch.ones(200, DIM), torch.zeros(200, DIM)
        out = PackedPlan(TREE, rope, PREFIXES).attend(0, *given[:3], SCALE, 40, sinks=given[3])
        (out**2).sum().backward()
        found.append([out.detach(), *(x.grad for x in given)])
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "size"), [(None, [-1, 0]), (2, [1, 0]), (50, [-1, 0])])
def test_torchs_call_has_gradients(monkeypatch: pytest.MonkeyPatch, window: int | None, size: list[int]) -> None:
    """Its kernels are CUDA's; the shapes and types of both passes are those that torch has registered."""
    calls: list[Any] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((func.name(), [each for each in args if not isinstance(each, Tensor)]))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(attention, "varlen_kernel", lambda q, cap: attention.torch_varlen())
    with tensors_of(META) as made, torch.enable_grad(), Calls():
        given = [made(7, heads, DIM).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
        out = PackedPlan([3, 4], (made(9, DIM, dtype=torch.float32),) * 2).attend(0, *given, SCALE, window)
        assert out.shape == (7, HEADS * DIM) and out.dtype == torch.bfloat16
        out.sum().backward()
    (_, there), (backward, back) = (call for call in calls if "torch_attn" in call[0])
    assert there[:6] == [4, 4, size == [-1, 0], SCALE, size, True]
    assert backward == "torch_attn::_varlen_attn_backward" and back == there[:5]


def test_torchs_call_goes_before_flash_attns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention, "usable", lambda _: True)
    for theirs in (by_ends, None):
        monkeypatch.setattr(attention, "torch_varlen", lambda theirs=theirs: theirs)
        with tensors_of(CUDA) as made:
            assert attention.varlen_kernel(made(3, 4, 8)) == (theirs or attention.flash_varlen)
            assert attention.varlen_kernel(made(3, 4, 12)) is attention.varlen_kernel(made(3, 4, 264)) is None


@pytest.mark.parametrize("missing", ["scale", "window_size"])
def test_a_call_that_lacks_an_argument_is_not_taken(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The call of torch 2.10 has no window."""
    older: Any = (lambda *args, window_size: None) if missing == "scale" else (lambda *args, scale: None)
    monkeypatch.setattr(varlen, "varlen_attn", older)
    attention.torch_varlen.cache_clear()
    assert attention.torch_varlen() is None
    attention.torch_varlen.cache_clear()


@pytest.mark.parametrize("window", [1, 9, LEAST_PIECE, 150])
@pytest.mark.parametrize("chunk", [1, 7, LEAST_PIECE, 90, max(LENGTHS)])
def test_prefill_in_chunks(window: int, chunk: int) -> None:
    q, k, v = (x.detach() for x in inputs(sum(LENGTHS)))
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": GROUPS, "head_dim": DIM, "dtype": torch.float32}
    cache = KVCache(num_slots=4, max_length=max(LENGTHS), rope=ROPE, device=CPU, **sizes)
    starts = [sum(LENGTHS[:s]) for s in range(4)]
    for s in range(4):
        cache.open(s)
    found = torch.zeros(sum(LENGTHS), HEADS * DIM)
    for done in range(0, max(LENGTHS), chunk):
        ids = [s for s in range(4) if done < LENGTHS[s]]
        lens = [min(chunk, LENGTHS[s] - done) for s in ids]
        tokens = [starts[s] + done + t for s, new in zip(ids, lens, strict=True) for t in range(new)]
        plan = cache.begin(ids, lens)
        found[tokens] = plan.attend(0, q[tokens], k[tokens], v[tokens], SCALE, window)
        cache.commit(plan)
    torch.testing.assert_close(found, plain(q, k, v, window), atol=1e-5, rtol=1e-5)


def test_no_mask_where_the_window_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert binding(8, 9) == 8 and binding(8, 8) is None and binding(None, 9) is None
    masked, attend = [], F.scaled_dot_product_attention

    def watched(*given: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        masked.append(attn_mask is not None)
        return attend(*given, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for window in (8, 7):
        PackedPlan([7, 8], ROPE).attend(0, *inputs(15), SCALE, window)
    assert masked == [False, False, False, True]


CUDA, META = torch.device("cuda"), torch.device("meta")
"""Tensors of the first are fake: which way is taken shows.  The second stands for it if torch's CPU build cannot index them."""


@contextmanager
def tensors_of(device: torch.device) -> Iterator[Callable[..., Tensor]]:
    with FakeTensorMode() if device.type == "cuda" else nullcontext(), torch.no_grad():
        yield lambda *shape, dtype=torch.bfloat16: torch.ones(shape, dtype=dtype, device=device)


@contextmanager
def counted(owner: Any, name: str) -> Iterator[mock.Mock]:
    calls = mock.Mock(side_effect=getattr(owner, name))
    with mock.patch.object(owner, name, lambda *args, **kwargs: calls(*args, **kwargs)):
        yield calls


@pytest.fixture(scope="module")
def groups() -> Iterator[RoleGroups]:
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}):
        yield build_groups([0], 1, 1, "actor")


def test_weights_are_laid_out_for_a_cpus_products_only() -> None:
    with tensors_of(CUDA) as made:
        assert not any(can_prepack(made(8, 8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert can_prepack(torch.ones(8, 8)) is torch.backends.mkldnn.is_available()


@pytest.mark.parametrize(("device", "calls"), [(CPU, 0), (CUDA, 2)])
def test_the_norm_is_torchs_kernel_but_on_a_cpu(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made, counted(F, "rms_norm") as found:
        for out in (rms_norm(made(3, 8), made(8), 1e-5), fixed_norm(made(8), 1e-5)(made(3, 8))):
            assert out.shape == (3, 8) and out.device.type == device.type and out.dtype == torch.bfloat16
    assert found.call_count == calls


def opened(made: Any, device: torch.device, num_seqs: int) -> KVCache:
    cache = KVCache(
        num_layers=1, num_kv_heads=2, head_dim=8, num_slots=num_seqs, max_length=700, dtype=torch.bfloat16, device=device,
        rope=(made(700, 8, dtype=torch.float32), made(700, 8, dtype=torch.float32)),
    )  # fmt: skip
    for seq_id in range(num_seqs):
        cache.open(seq_id)
    return cache


@pytest.mark.parametrize(("device", "calls"), [(CPU, 3), (META, 1)])
def test_sequences_of_a_prefill_attend_one_by_one_on_a_cpu_and_at_once_elsewhere(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made, counted(F, "scaled_dot_product_attention") as found:
        plan = opened(made, device, 3).begin(range(3), [600, 300, 100])
        out = plan.attend(0, made(1000, 4, 8), made(1000, 2, 8), made(1000, 2, 8), 0.1, None)
        assert out.shape == (1000, 32) and out.device.type == device.type
    assert found.call_count == calls


@pytest.mark.parametrize(("device", "calls"), [(CPU, 2), (META, 1)])
def test_on_a_cpu_alone_long_sequences_attend_apart_from_short_ones(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made:
        cache = opened(made, device, 8)
        plan = cache.begin(range(8), [650, *[10] * 7])
        plan.attend(0, made(720, 4, 8), made(720, 2, 8), made(720, 2, 8), 0.1, None)
        cache.commit(plan)
        with counted(F, "scaled_dot_product_attention") as found:
            plan = cache.begin(range(8), [2] * 8)
            assert plan.attend(0, made(16, 4, 8), made(16, 2, 8), made(16, 2, 8), 0.1, None).shape == (16, 32)
    assert found.call_count == calls


@pytest.mark.parametrize(("device", "calls"), [(CPU, 2), (META, 0)])
def test_bfloat16_attention_of_whole_sequences_is_torchs_own_but_on_a_cpu(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made, counted(HalfOnCpu, "apply") as found:
        plan = PackedPlan([3, 4], (made(9, 8, dtype=torch.float32), made(9, 8, dtype=torch.float32)))
        assert plan.attend(0, made(7, 4, 8), made(7, 2, 8), made(7, 2, 8), 0.1).shape == (7, 32)
    assert found.call_count == calls


def test_log_probs_take_few_kernels_on_a_gpu(groups: RoleGroups) -> None:
    shards, blocks = VocabShards(groups.collection.tp, 50_000, 50_000), {}
    for device in (CPU, META):
        with tensors_of(device) as made, counted(Tensor, "amin") as found:
            OutputRows(made(64, 8), made(50_000, 8), shards).figures(made(64, dtype=torch.int64))
        blocks[device.type] = found.call_count
    assert blocks["meta"] == 1 < blocks["cpu"]


def test_rows_are_filled_up_for_a_cpus_bfloat16_alone(groups: RoleGroups) -> None:
    model = roles.load_role(ModelConfig(init=SHAPE, dtype="bfloat16"), groups, head="lm", max_length=64, device=CPU)
    assert model.token_multiple == WHOLE_MULTIPLE and model.to("meta").token_multiple == 1


def test_memory_is_the_devices_where_a_rank_computes_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(total_memory=9))
    assert (held_bytes(CUDA), peak_bytes(CUDA), device_bytes(CUDA)) == (5, 7, 9)
    assert min(held_bytes(CPU), peak_bytes(CPU), device_bytes(CPU)) > 2**20
