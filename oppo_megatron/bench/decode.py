"""Decode speed of this engine, Hugging Face `generate` and megatron-core's context, on the same weights.

B sequences, P prompt tokens, N decode steps up to the last sequence's end, V vocabulary, H hidden, G key/value heads, D head
dimension, L positions. Medians of peers that take turns; decode steps after the prefill, and tokens within given lengths, count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oppo_megatron.bench.figures import describe_machine
from oppo_megatron.cluster.world import World, open_world
from oppo_megatron.config.explain import explain
from oppo_megatron.config.model import Dtype, ModelConfig, RuntimeConfig
from oppo_megatron.config.ppo import ForcedLimits, RolloutConfig, log_normal
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.engine.round_runner import Decoding, RoundRunner, decoder
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import ConfigError
from oppo_megatron.mcore.cpu import can_prepack
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import DecodePath, RoleModel, step
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.static_peer import StaticContextDecoder
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.preflight.validate import check_trace
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.report.comparison import draw_decode
from oppo_megatron.rundir.directory import write_json

COLUMNS = {
    "peer": "peer", "batch": "batch", "tokens/s": "tokens_per_s", "min": "min", "max": "max", "x bare": "over_bare",
    "x bare-packed": "over_bare_packed", "x hf": "over_hf", "x mcore-static": "over_mcore_static",
    "same tokens": "same_tokens",
}  # fmt: skip
OVER = {"over_bare": "bare", "over_bare_packed": "bare-packed", "over_hf": "hf", "over_mcore_static": "mcore-static"}


@dataclass(frozen=True)
class DecodeWork:
    shape: Mapping[str, Any]  # Hugging Face config.json
    batches: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    threads: int
    dtype: Dtype = "float32"
    forced_lengths: Mapping[str, Any] | None = None  # as in `rollout`; None: all sequences end at new_tokens

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + self.new_tokens + 1

    @property
    def stopping(self) -> Stopping:
        """1 to `new_tokens` decoded tokens after the prefill's. Raises ConfigError or DataError."""
        limit = self.new_tokens + 1
        if self.forced_lengths is None:
            return Stopping((), limit)
        try:
            rollout = RolloutConfig(batch_size=1, max_response_tokens=limit, **self.forced_lengths)
        except ValidationError as error:
            raise ConfigError(explain(RolloutConfig, error)) from error
        if problems := check_trace(rollout):
            raise ConfigError(problems)
        forced = rollout.lengths
        assert forced is not None, "it says where sequences end"
        quantile = forced_quantile(forced, limit) or log_normal(forced)
        return Stopping((), limit, ForcedLimits(lambda u: 1 + max(1.0, quantile(u)), limit, seed=1))


Decode = Callable[[Tensor, Sequence[int]], tuple[float, Tensor]]
"""Prompts [B, P] and lengths [B] -> seconds of the decode steps, and tokens [B, N]."""


@dataclass(frozen=True)
class StepLoop:
    model: RoleModel

    def decode(self, prompts_BP: Tensor, num_new: int) -> tuple[float, Tensor]:
        batch, length = prompts_BP.shape
        cache = self.model.new_cache(batch)
        ids, ones, tokens = list(range(batch)), [1] * batch, []
        for seq_id in ids:
            cache.open(seq_id)
        ends_B = torch.arange(1, batch + 1) * length - 1
        hidden_BH = step(self.model, cache, ids, [length] * batch, prompts_BP.flatten(), ends_B)
        token_B = self.model.logits(hidden_BH).argmax(-1)
        started = time.perf_counter()
        for _ in range(num_new):
            token_B = self.model.logits(step(self.model, cache, ids, ones, token_B)).argmax(-1)
            tokens.append(token_B)
        return time.perf_counter() - started, torch.stack(tokens, -1)


def decode_round(rounds: RoundRunner, rollouts: Sequence[Rollout], steps: int, score: Sequence[Rollout] = ()) -> None:
    """`score` is scored as it was before."""
    chunk = rounds.run(rollouts, score, steps, Decoding(0, 0, Unending))
    assert chunk is not None
    held = {r.seq_id: r for r in rollouts}
    for row in chunk.rows:
        held[row.seq_id].tokens.extend(row.tokens)
        held[row.seq_id].finish_reason = row.finish_reason
        held[row.seq_id].finish_clock = row.finish_clock
    rounds.recorded(rollouts)


@dataclass(frozen=True)
class Engine:
    """Rounds of decode micro-steps as in training, with sampling and log-probs."""

    model: RoleModel
    stopping: Stopping

    def decode(self, prompts_BP: Tensor, lengths_B: Sequence[int]) -> tuple[float, Tensor]:
        rounds = decoder(
            self.model,
            self.model.new_cache(len(prompts_BP)),
            sampling=Sampling(seed=1),
            stopping=self.stopping,
            micro_batch_tokens=prompts_BP.numel(),
            timeout_s=RuntimeConfig().timeout_s,
        )
        rollouts = [Rollout(Prompt(i, i, "", tuple(tokens)), i) for i, tokens in enumerate(prompts_BP.tolist())]
        decode_round(rounds, rollouts, 1)
        started = time.perf_counter()
        decode_round(rounds, rollouts, max(lengths_B))
        seconds = time.perf_counter() - started
        rows = [torch.tensor(rollout.tokens[1:]) for rollout in rollouts]
        assert [len(row) for row in rows] == list(lengths_B)
        return seconds, pad_sequence(rows, batch_first=True)


class Unending:
    ready, least = False, 0

    def finish(self, *seq_ids: int) -> None:
        pass


class HuggingFace:
    """`transformers` generate, greedy, timed from the prefill's token on."""

    def __init__(self, directory: Path, dtype: Dtype):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def decode(self, prompts_BP: Tensor, num_new: int) -> tuple[float, Tensor]:
        device, times = prompts_BP.device, list[float]()

        def never(input_ids_BT: Tensor, scores: Tensor, **options: Any) -> Tensor:
            """Do not stop, but note the time after the first token."""
            if not times:
                times.append(now(device))
            return torch.zeros(len(input_ids_BT), dtype=torch.bool, device=device)

        with torch.inference_mode():
            tokens: Tensor = self.model.generate(
                prompts_BP, attention_mask=torch.ones_like(prompts_BP), max_new_tokens=num_new + 1,
                min_new_tokens=num_new + 1, do_sample=False, stopping_criteria=[never],
            )  # fmt: skip
        return now(device) - times[0], tokens[:, prompts_BP.shape[1] + 1 :]


def now(device: torch.device) -> float:
    """Seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bench_decode(work: DecodeWork, names: Sequence[str], out: Path) -> dict[str, Any]:
    """Write decode.json and decode.png. Raises ConfigError, DataError or OSError before measuring."""
    stopping = work.stopping
    out.mkdir(parents=True, exist_ok=True)
    runtime = RuntimeConfig(device="cpu").with_threads(work.threads)
    lengths = {batch: [stopping.limit(i) - 1 for i in range(batch)] for batch in work.batches}
    with open_world(runtime) as world, tempfile.TemporaryDirectory() as scratch:
        peers = _build_peers(work, names, world, Path(scratch))
        parameters = sum(p.numel() for p in _load(work, _groups(), world).parameters())
        rows = [row for batch in work.batches for row in _measure(peers, work, lengths[batch])]
    found = {"machine": describe_machine(), "work": asdict(work), "parameters": parameters, "results": rows}
    write_json(out / "decode.json", found)
    draw_decode(rows, out / "decode.png")
    return found


PEERS = ("bare", "bare-packed", "ours-packed", "ours-fused", "ours-module", "ours-engine", "mcore-static", "hf")
"""docs/benchmarks.md explains them.  All but the engine are greedy and decode all sequences to the longest length."""


def available_peers() -> list[str]:
    return [name for name in PEERS if name != "bare-packed" or can_prepack(torch.empty(0))]


def _groups() -> RoleGroups:
    groups = build_groups([0], 1, 1, "bench")
    assert groups is not None
    return groups


def _load(work: DecodeWork, groups: RoleGroups, world: World, path: DecodePath = "packed") -> RoleModel:
    config = ModelConfig(init=dict(work.shape), dtype=work.dtype)
    model = load_role(config, groups, head="lm", max_length=work.max_length, device=world.device, path=path)
    return model.requires_grad_(False)


def _build_peers(work: DecodeWork, names: Sequence[str], world: World, scratch: Path) -> dict[str, Decode]:
    groups = _groups()
    model = _load(work, groups, world)
    export_weights(model, scratch / "hf")
    makers: dict[str, Callable[[], Any]] = {
        "bare": lambda: BareLoop(scratch / "hf", work.shape, plain),
        "bare-packed": lambda: BareLoop(scratch / "hf", work.shape, prepacked),
        "ours-packed": lambda: StepLoop(model),
        "ours-fused": lambda: StepLoop(_load(work, groups, world, "fused")),
        "ours-module": lambda: StepLoop(_load(work, groups, world, "module")),
        "mcore-static": lambda: StaticContextDecoder(model),
        "hf": lambda: HuggingFace(scratch / "hf", work.dtype),
    }

    def peer(name: str) -> Decode:
        if name == "ours-engine":
            return Engine(model, work.stopping).decode
        decode = makers[name]().decode
        return lambda prompts_BP, lengths_B: decode(prompts_BP, max(lengths_B))

    return {name: peer(name) for name in names}


def _measure(peers: Mapping[str, Decode], work: DecodeWork, lengths_B: Sequence[int]) -> list[dict[str, Any]]:
    """A row per peer. `same_tokens`: share equal to the first greedy peer's (the engine samples)."""
    batch = len(lengths_B)
    within_BN = torch.arange(max(lengths_B)) < torch.tensor(lengths_B)[:, None]
    generator = torch.Generator().manual_seed(batch)
    prompts_BP = torch.randint(int(work.shape["vocab_size"]), (batch, work.prompt_tokens), generator=generator)
    tokens = {name: decode(prompts_BP, lengths_B)[1] for name, decode in peers.items()}  # warms up, too
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(work.repeats):
        for name, decode in peers.items():
            seconds[name].append(decode(prompts_BP, lengths_B)[0])
    greedy = next((name for name in peers if name != "ours-engine"), "ours-engine")
    rates = {name: sorted(sum(lengths_B) / s for s in times) for name, times in seconds.items()}

    def same(name: str) -> float:
        return float((tokens[name] == tokens[greedy])[within_BN].float().mean())

    return [
        {
            "peer": name,
            "batch": batch,
            "tokens_per_s": median(rate),
            "min": rate[0],
            "max": rate[-1],
            **{key: median(rate) / median(rates[base]) if base in rates else None for key, base in OVER.items()},
            "same_tokens": None if "ours-engine" in (name, greedy) else same(name),
        }
        for name, rate in rates.items()
    ]


Product = Callable[[Tensor], Tensor]


def plain(weight_OI: Tensor, bias_O: Tensor | None = None) -> Product:
    return lambda x: F.linear(x, weight_OI, bias_O)


def prepacked(weight_OI: Tensor, bias_O: Tensor | None = None) -> Product:
    """oneDNN's product, with weights laid out once."""
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 16)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, laid_out, bias_O, "none", [], "")


class BareLoop:
    """Greedy decoding of sequences of one length in plain torch: a lower bound for the engine."""

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
