"""Attention through a sliding window, in pieces, against one mask over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from oppo_megatron.mcore import attention
from oppo_megatron.mcore.attention import LEAST_PIECE, PackedPlan, binding
from oppo_megatron.mcore.kv.dense import KVCache

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.4
LENGTHS = [3 * LEAST_PIECE + 7, 1, LEAST_PIECE + 1, 5]
ROPE = torch.ones(max(LENGTHS), DIM), torch.zeros(max(LENGTHS), DIM)
"""No rotation: what attends is what was given."""


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(num_tokens, heads, DIM, generator=generator).to(dtype).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)
    ]


def plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """transformers' rule: token i attends to j with i - window < j <= i.  In the precision of the arguments."""
    outputs = []
    for q_s, k_s, v_s in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        place = torch.arange(len(q_s))
        seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - window)
        k_s, v_s = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k_s, v_s))
        weights = torch.einsum("qnd,knd->nqk", q_s, k_s) * SCALE
        weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
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


def by_ends(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *, scale: float,
    window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """What torch says of its `varlen_attn`, as it was before it asked for `enable_gqa`."""
    assert ends_q.dtype == torch.int32 and ends_k is ends_q and most_q == most_k == max(LENGTHS) and scale == SCALE
    before, after = window_size
    assert after == 0 and ends_q.diff().tolist() == LENGTHS
    return plain(q, k, v, max(LENGTHS) if before == -1 else before + 1).unflatten(1, (HEADS, DIM))


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
    monkeypatch.setattr(attention, "varlen_kernel", lambda q: attention.torch_varlen())
    found = PackedPlan(LENGTHS, ROPE).attend(0, *given, SCALE, window)
    attention.torch_varlen.cache_clear()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("missing", ["scale", "window_size"])
def test_a_call_that_lacks_an_argument_is_not_taken(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """That of torch 2.10 has no window."""
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
    cache = KVCache(num_slots=4, max_length=max(LENGTHS), rope=ROPE, device=torch.device("cpu"), **sizes)
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
