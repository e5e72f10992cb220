"""Attention by block table in Triton, for decode and prefill; the positions of a few long sequences are split among programs.

A program computes A rows (tokens of a sequence times R heads of a group) over one of F splits, J positions at a time.
Before it, one kernel rotates queries and keys, and writes keys and values to their blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oppo_megatron.mcore.kv.cached_plan import PagedCall

LEAST_ROWS, PREFILL_ROWS = 16, 64  # tensor cores multiply 16 rows or more
PROGRAMS, MOST_SPLITS = 512, 32  # enough programs for the 132 processors of an H100


@triton.jit
def attend_tile(
    q, k, v, tables, starts, lengths, sinks, out, sums, peaks, scale, width, window, cap, MANY: tl.constexpr, BOUND: tl.constexpr,
    CAP: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, K: tl.constexpr, A: tl.constexpr, E: tl.constexpr,
    J: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """E: D rounded up to a power of two."""
    s, tile, g, f = tl.program_id(0), tl.program_id(1), tl.program_id(2) // F, tl.program_id(2) % F
    length, first, new = tl.load(lengths + s), s, 1
    if MANY:
        first = tl.load(starts + s)
        new = tl.load(starts + s + 1) - first
    each: tl.constexpr = A // R  # tokens
    if tile * each >= new:
        return
    a, d, j = tl.arange(0, A), tl.arange(0, E), tl.arange(0, J)
    token = tile * each + a // R
    at, row = length - new + token, ((first + token) * G + g) * R + a % R
    valid = (a < each * R) & (token < new)
    there = valid[:, None] & (d < D)[None, :]
    query = tl.load(q + row[:, None] * D + d[None, :], mask=there, other=0.0)
    low, end = 0, tl.minimum(length - new + (tile + 1) * each, length)
    if BOUND:
        low = tl.maximum(length - new + tile * each + 1 - window, 0) // J * J
    share = tl.cdiv(tl.cdiv(end - low, J), F) * J
    lo = low + f * share
    hi = tl.minimum(lo + share, end)
    top = tl.full([A], -float("inf"), tl.float32)
    mass, acc = tl.zeros([A], tl.float32), tl.zeros([A, E], tl.float32)
    if sinks is not None:
        top, mass = tl.where(f == 0, tl.load(sinks + g * R + a % R).to(tl.float32), top), tl.where(f == 0, 1.0, mass)
    for begin in range(lo, hi, J):
        key = begin + j
        here = key < hi
        block = tl.load(tables + s * width + key // K, mask=here, other=0).to(tl.int64)
        place = ((block * K + key % K) * G + g) * D
        keys = tl.load(k + place[None, :] + d[:, None], mask=here[None, :] & (d < D)[:, None], other=0.0)
        seen = here[None, :] & (key[None, :] <= at[:, None])
        if BOUND:
            seen = seen & (key[None, :] > at[:, None] - window)
        score = tl.dot(query, keys, input_precision="ieee") * scale
        if CAP:
            score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)  # cap tanh(score / cap)
        score = tl.where(seen, score, -float("inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        base = tl.where(peak == -float("inf"), 0.0, peak)  # of a row that has seen nothing yet
        p, shrink = tl.exp(score - base[:, None]), tl.exp(top - base)
        values = tl.load(v + place[:, None] + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        mass, top = mass * shrink + tl.sum(p, 1), peak
    if F == 1:
        whole = acc / tl.where(valid, mass, 1.0)[:, None]
        tl.store(out + row[:, None] * D + d[None, :], whole.to(out.dtype.element_ty), mask=there)
    else:
        spot = row * F + f
        tl.store(peaks + spot * 2, top, mask=valid)
        tl.store(peaks + spot * 2 + 1, mass, mask=valid)
        if lo < hi:
            tl.store(sums + spot[:, None] * D + d[None, :], acc, mask=there)


@triton.jit
def _join(sums, peaks, out, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    row = tl.program_id(0)
    f, d = tl.arange(0, F), tl.arange(0, E)
    top, mass = tl.load(peaks + (row * F + f) * 2), tl.load(peaks + (row * F + f) * 2 + 1)
    weight = tl.exp(top - tl.max(top, 0))
    there = (mass > 0)[:, None] & (d < D)[None, :]
    parts = tl.load(sums + (row * F + f)[:, None] * D + d[None, :], mask=there, other=0.0)
    whole = tl.sum(parts * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out + row * D + d, whole.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def turn_tile(
    qkv, cos, sin, blocks, offsets, q, k, v, G: tl.constexpr, X: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
    K: tl.constexpr, A: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A, E: X and D rounded up to powers of two; the tables turn the first TURNED numbers of a head."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, d = tl.arange(0, A)[:, None], tl.arange(0, E)[None, :]
    half: tl.constexpr = TURNED // 2
    turned, partner = d < TURNED, tl.where(d < half, d + half, d - half)
    own, there = qkv + (t * G + g) * X * D + x * D, (x < X) & (d < D)
    here = tl.load(own + d, mask=there, other=0.0)
    beside = tl.load(own + partner, mask=there & turned, other=0.0).to(tl.float32)
    c, s = tl.load(cos + t * TURNED + d, mask=turned, other=1.0), tl.load(sin + t * TURNED + d, mask=turned, other=0.0)
    found = (here.to(tl.float32) * c + beside * s).to(here.dtype)
    place = ((tl.load(blocks + t) * K + tl.load(offsets + t)) * G + g) * D + d
    tl.store(q + (t * G + g) * (X - 2) * D + x * D + d, found, mask=there & (x < X - 2))
    tl.store(k + place + 0 * x, found, mask=there & (x == X - 2))
    tl.store(v + place + 0 * x, here, mask=there & (x == X - 1))


def triton_turn(
    qkv_TGXD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, block_T: Tensor, offset_T: Tensor, k_PKGD: Tensor, v_PKGD: Tensor
) -> Tensor:
    """Rotate (`apply_rope`), and write keys and values; return the queries [T, N, D]."""
    tokens, groups, heads, dim = qkv_TGXD.shape
    q_TND = torch.empty(tokens, groups * (heads - 2), dim, dtype=qkv_TGXD.dtype, device=qkv_TGXD.device)
    turn_tile[(tokens, groups)](
        qkv_TGXD.contiguous(), cos_T1D, sin_T1D, block_T, offset_T, q_TND, k_PKGD, v_PKGD, groups, heads, dim,
        cos_T1D.shape[-1], k_PKGD.shape[1], triton.next_power_of_2(heads), triton.next_power_of_2(dim),
    )  # fmt: skip
    return q_TND


def triton_attention(
    q_TND: Tensor, k_PKGD: Tensor, v_PKGD: Tensor, call: PagedCall, scale: float, window: int | None = None,
    cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (tokens, heads, dim), (block, groups) = q_TND.shape, k_PKGD.shape[1:3]
    many, repeat, padded = call.most_new > 1, heads // groups, max(LEAST_ROWS, triton.next_power_of_2(dim))
    rows = max(PREFILL_ROWS if many else LEAST_ROWS, triton.next_power_of_2(repeat))
    step = 64 if padded * q_TND.element_size() <= 256 else 32  # shared memory holds two blocks of keys and values
    tiles, sequences = -(-call.most_new // (rows // repeat)), len(call.length_S)
    splits = triton.next_power_of_2(-(-PROGRAMS // (sequences * groups * tiles)))
    splits = min(splits, MOST_SPLITS, triton.next_power_of_2(-(-min(call.longest, window or call.longest) // step)))
    q_TND, out = q_TND.contiguous(), torch.empty(tokens, heads, dim, dtype=q_TND.dtype, device=q_TND.device)
    sums, peaks = (
        torch.empty(tokens * heads * splits * size if splits > 1 else 0, dtype=torch.float32, device=out.device)
        for size in (dim, 2)
    )
    attend_tile[(sequences, tiles, groups * splits)](
        q_TND, k_PKGD, v_PKGD, call.table_SW, call.new_ends if many else call.new_S, call.length_S, sinks, out, sums, peaks,
        scale, call.table_SW.stride(0), window or 0, cap or 0.0, many, window is not None, cap is not None, groups, repeat, dim,
        block, rows, padded, step, splits, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join[(tokens * heads,)](sums, peaks, out, dim, padded, splits)
    return out
