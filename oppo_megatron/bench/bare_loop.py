"""Greedy decoding of sequences of one length in plain torch: a lower bound for the engine.

B sequences, P prompt and N new tokens, H hidden, G key/value heads, R query heads per group, D head dimension, L positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def plain(weight_OI: Tensor, bias_O: Tensor | None = None) -> Product:
    return lambda x: F.linear(x, weight_OI, bias_O)


def prepacked(weight_OI: Tensor, bias_O: Tensor | None = None) -> Product:
    """oneDNN's product, with weights laid out once."""
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 16)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, laid_out, bias_O, "none", [], "")


class BareLoop:
    def __init__(self, directory: Path, shape: Mapping[str, Any], product: Callable[..., Product]):
        weights: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            weights |= load_file(file)
        self.heads, self.groups = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.dim = shape["hidden_size"] // self.heads
        self.eps, self.theta = shape.get("rms_norm_eps", 1e-6), shape.get("rope_theta", 10000.0)
        self.embed_VH = weights["model.embed_tokens.weight"]
        self.norm_H = weights["model.norm.weight"]
        self.head = product(weights.get("lm_head.weight", self.embed_VH))
        self.layers = [_Layer(weights, f"model.layers.{number}.", product) for number in range(shape["num_hidden_layers"])]

    @torch.inference_mode()
    def decode(self, prompts_BP: Tensor, num_new: int) -> tuple[float, Tensor]:
        """Seconds of `num_new` decode steps after the prefill, and their tokens [B, N]."""
        batch, length = prompts_BP.shape
        shape = 2, batch, self.groups, length + num_new + 1, self.dim
        cache = [torch.empty(shape, dtype=self.embed_VH.dtype) for _ in self.layers]
        rope = self._rope(length + num_new + 1)
        token_B = self._step(prompts_BP, 0, cache, rope)
        tokens, started = [], time.perf_counter()
        for position in range(length, length + num_new):
            token_B = self._step(token_B[:, None], position, cache, rope)
            tokens.append(token_B)
        return time.perf_counter() - started, torch.stack(tokens, -1)

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        frequency = 1.0 / self.theta ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.outer(torch.arange(length).float(), frequency)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _step(self, tokens_BT: Tensor, start: int, cache: Sequence[Tensor], rope: tuple[Tensor, Tensor]) -> Tensor:
        """Advance by T tokens; return the next ones."""
        batch, count = tokens_BT.shape
        cos, sin = (table[start : start + count].repeat(batch, 1)[:, None] for table in rope)
        x = F.embedding(tokens_BT.flatten(), self.embed_VH)
        for layer, store in zip(self.layers, cache, strict=True):
            qkv = layer.qkv(F.rms_norm(x, x.shape[-1:], layer.norm1_H, self.eps)).view(batch * count, -1, self.dim)
            qk, v = qkv[:, : self.heads + self.groups], qkv[:, self.heads + self.groups :]
            qk = (qk * cos + qk.roll(self.dim // 2, -1) * sin).to(x.dtype)
            store[0, :, :, start : start + count] = qk[:, self.heads :].view(batch, count, -1, self.dim).transpose(1, 2)
            store[1, :, :, start : start + count] = v.view(batch, count, -1, self.dim).transpose(1, 2)
            x = x + layer.out(self._attend(qk[:, : self.heads], store[..., : start + count, :], batch, count))
            gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:], layer.norm2_H, self.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        last = x.view(batch, count, -1)[:, -1]
        return self.head(F.rms_norm(last, last.shape[-1:], self.norm_H, self.eps)).argmax(-1)

    def _attend(self, q_TND: Tensor, kv_2BGLD: Tensor, batch: int, count: int) -> Tensor:
        k, v = kv_2BGLD
        if count == 1:  # the query heads of a group in the place of query positions: keys are read once
            out = F.scaled_dot_product_attention(q_TND.view(batch, self.groups, -1, self.dim), k, v)
            return out.reshape(batch, -1)
        q = q_TND.view(batch, count, self.heads, self.dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch * count, -1)


class _Layer:
    def __init__(self, weights: Mapping[str, Tensor], prefix: str, product: Callable[..., Product]):
        def joined(names: Sequence[str], kind: str) -> Tensor | None:
            found = [weights.get(f"{prefix}{name}.{kind}") for name in names]
            return None if found[0] is None else torch.cat([part for part in found if part is not None])

        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        self.norm1_H = weights[prefix + "input_layernorm.weight"]
        self.norm2_H = weights[prefix + "post_attention_layernorm.weight"]
        self.qkv = product(joined(attention, "weight"), joined(attention, "bias"))
        self.out = product(weights[prefix + "self_attn.o_proj.weight"])
        self.gate_up = product(joined(["mlp.gate_proj", "mlp.up_proj"], "weight"))
        self.down = product(weights[prefix + "mlp.down_proj.weight"])
