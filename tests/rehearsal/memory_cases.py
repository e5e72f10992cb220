"""Layouts whose memory plan is held to what their ranks take on fake CUDA tensors."""

from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements


def _llama(hidden: int, layers: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": ffn, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    }  # fmt: skip


def _qwen(kind: str, hidden: int, layers: int, heads: int, groups: int, ffn: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 128,
        "intermediate_size": ffn, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES = {
    "1B, one key head": _llama(2048, 24, 16, 1, 5504),
    "2B, a key head each": _qwen("qwen3", 2048, 24, 16, 16, 6144, True),
    "1.5B": _qwen("qwen2", 1536, 28, 12, 2, 8960, True),
    "30B, experts": _qwen("qwen3_moe", 2048, 48, 32, 4, 6144, False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    # A small vocabulary: torch adds the two gradients of tied embeddings in place, fake tensors make a third.
    "2B, soft caps": _qwen("gemma2", 2304, 26, 8, 4, 9216, True) | {"head_dim": 256, "vocab_size": 32000},
    "20B, sinks": _qwen("gpt_oss", 2880, 24, 64, 8, 2880, False)
    | {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "num_local_experts": 32,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
    },
    "7B, width norms": _qwen("olmo2", 4096, 32, 32, 32, 11008, False),
    "8B": _llama(4096, 32, 32, 8, 14336),
    "32B": _qwen("qwen3", 5120, 64, 64, 8, 25600, False),
    "72B": _qwen("qwen2", 8192, 80, 64, 8, 29568, False),
    "70B": _llama(8192, 80, 64, 8, 28672),
    "405B": _llama(16384, 128, 128, 8, 53248),  # 126 layers, filled up so that 16 stages divide them
}


@dataclass(frozen=True)
class Layout:
    """A role of a run on the rank of one pipeline stage (-1: the last); prompts are short, so most tokens are response tokens."""

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    role: str = "actor"
    stage: int = 0
    layers: int | None = None  # fewer than the model has
    rows: int = 4  # a replica and optimizer step
    group: int = 1  # rows that share a prompt
    carried: int = 12  # rollouts of a replica beyond those
    tokens: int = 4096  # of a micro-batch
    prompt: int = 2
    response: int = 2046
    dtype: str = "bfloat16"
    kv: str = "dense"
    train: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        more = self.carried * self.dp
        layout = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        shape = SHAPES[self.model]
        frozen = {"init": shape | {"num_hidden_layers": self.layers or shape["num_hidden_layers"]}}
        trained = frozen | {"train": self.train} | ({"lora": self.lora} if self.lora else {})
        return {
            "run_dir": "none", "steps": 3, "placement": {"mode": "disaggregated", "actor": layout, "scorer": layout},
            "tokenizer": {"path": "none"}, "data": {"path": "none", "max_prompt_tokens": self.prompt}, "actor": trained,
            "critic": trained, "reward": frozen, "rewards": [{"kind": "model"}],
            "rollout": {"batch_size": self.rows * self.dp, "group_size": self.group, "max_response_tokens": self.response},
            "overlap": {"delta": {"rule": "fixed", "initial": more, "max": more}}, "ppo": {"minibatches": 1},
            "runtime": {"device": "cuda", "dtype": self.dtype, "micro_batch_tokens": self.tokens, "kv_layout": self.kv},
        } | self.more  # fmt: skip

    def rank(self, config: TrainConfig) -> int:
        placement = role_placements(config)[self.role]
        return placement.rank(0, self.stage % placement.pp, 0)


PARALLEL = {"sequence_parallel": True}
FULL = PARALLEL | {"recompute": "full"}
LORA = {"rank": 16}
QUICK = {
    "1.5B, one rank": Layout("1.5B", layers=2, rows=2),
    "1.5B, 32k tokens": Layout("1.5B", layers=2, rows=8, tokens=32768, response=4094, carried=0, train={"recompute": "full"}),
    "70B, first of 8 stages": Layout("70B", 8, 8, 2, layers=16, tokens=8192, response=4094, rows=4, train=PARALLEL),
    "405B, first of 16 stages": Layout("405B", 8, 16, 2, layers=32, tokens=8192, response=4094, rows=2, train=FULL),
    "8B critic, last of 4 stages": Layout("8B", 2, 4, 2, "critic", -1, layers=4, rows=2, train={"recompute": "selective"}),
    "8B reference, paged": Layout("8B", 4, 2, role="reference", stage=-1, layers=2, rows=16, kv="paged"),
    "1B critic, one key head": Layout("1B, one key head", role="critic", layers=2, rows=3, train={"recompute": "full"}),
    "1.5B, a prompt of eight responses": Layout("1.5B", layers=2, rows=8, group=8, carried=1, prompt=1024, response=385),
    "30B, experts": Layout("30B, experts", layers=2, rows=4, tokens=4096),
    "2B, soft caps": Layout("2B, soft caps", layers=2, rows=2),
    "20B, sinks": Layout("20B, sinks", layers=2, rows=4, tokens=4096),
    "1.5B, cp 2": Layout("1.5B", dp=2, layers=4, rows=2, response=4094, tokens=8192, train={"cp": 2}),
    "8B, long prompts, one adapter": Layout(
        "8B", 8, layers=2, rows=8, prompt=976, response=48, lora=LORA | {"targets": ["down_proj"]}, train=PARALLEL
    ),
}
"""With few layers; `make test` has these."""

LAYOUTS = {
    "1.5B": Layout("1.5B", layers=8),
    "1.5B, float32": Layout("1.5B", tp=2, rows=2, dtype="float32", train={"recompute": "selective"}, layers=8),
    "1.5B, adapters": Layout("1.5B", rows=2, lora=LORA, layers=8),
    "8B, tp 8, recomputed": Layout("8B", 8, rows=4, train=FULL, layers=8), "8B, pp 4, first": Layout("8B", 1, 4, 2, rows=10),
    "8B, pp 2, interleaved": Layout("8B", 2, 2, rows=8, train={"vpp": 2}, layers=8),
    "8B, adapters of queries and values": Layout("8B", 2, 4, stage=-1, lora={"rank": 8, "targets": ["q_proj", "v_proj"]}),
    "30B, experts, ep 2": Layout("30B, experts", dp=2, layers=2, rows=4, train={"ep": 2}),
    "30B, experts, ep 4, recomputed": Layout(
        "30B, experts", dp=4, layers=2, rows=4, tokens=8192, train={"ep": 4, "recompute": "full"}),
    "30B, experts, tp 2 ep 2": Layout("30B, experts", 2, dp=2, layers=2, rows=4, train={"ep": 2} | PARALLEL),
    "30B, experts, ep 2, adapters": Layout(
        "30B, experts", dp=2, layers=2, rows=4, lora=LORA | {"targets": ["q_proj", "v_proj"]}, train={"ep": 2}),
    "20B, sinks, tp 2": Layout("20B, sinks", 2, layers=2, rows=4, tokens=4096, train=PARALLEL),
    "20B, sinks, ep 2": Layout("20B, sinks", dp=2, layers=2, rows=4, tokens=4096, train={"ep": 2}),
    "8B, cp 4 of long sequences": Layout(
        "8B", 2, dp=4, layers=4, rows=1, response=8190, tokens=8192, carried=1,
        train={"cp": 4, "recompute": "selective"} | PARALLEL),
    "8B, cp 2 in 2 stages": Layout("8B", 2, 2, 2, layers=8, rows=4, train={"cp": 2} | FULL),
    "8B critic, cp 8": Layout(
        "8B", dp=8, role="critic", layers=2, rows=1, response=8190, tokens=8192, carried=0, train={"cp": 8}),
    "8B critic": Layout("8B", 2, role="critic", rows=2, train={"recompute": "full"}, layers=8),
    "8B reward, paged": Layout("8B", 2, role="reward", kv="paged", rows=64, layers=8),
    "8B, trained as tp 8": Layout("8B", 2, dp=4, rows=2, train={"tp": 8, "pp": 1, "dp": 1} | PARALLEL, layers=8),
    "72B, pp 4, four interleaved": Layout("72B", 8, 4, layers=16, rows=16, tokens=2048, train={"vpp": 4} | PARALLEL),
    "8B, pp 4, interleaved, few rows": Layout("8B", 2, 4, layers=16, train={"vpp": 2, "recompute": "full"}, rows=2),
    "1B, float32, one key head": Layout("1B, one key head", layers=4, rows=2, dtype="float32"),
    "2B, a key head each": Layout("2B, a key head each", 2, 2, stage=-1, layers=4, rows=3, train={"recompute": "selective"}),
    "2B, soft caps, float32": Layout("2B, soft caps", tp=2, layers=2, rows=2, dtype="float32"),
    "20B, sinks, paged": Layout("20B, sinks", 2, role="reference", layers=2, rows=16, kv="paged"),
    "7B, width norms": Layout("7B, width norms", 2, layers=4, rows=2, train=PARALLEL),
    "32B, pp 8, first": Layout("32B", 8, 8, 4, tokens=8192, response=4094, rows=16, train=PARALLEL),
    "32B critic": Layout("32B", 8, 4, 2, "critic", -1, layers=32, rows=4, train=FULL),
    "70B, pp 8, first": Layout("70B", 8, 8, 16, tokens=8192, response=4094, rows=16, train=PARALLEL),
    "70B, pp 8, last": Layout("70B", 8, 8, 16, stage=-1, tokens=8192, response=4094, rows=8, train=FULL),
    "405B, pp 16, first": Layout("405B", 8, 16, 2, tokens=8192, response=4094, rows=32, train=FULL),
    "405B, pp 16, last": Layout("405B", 8, 16, 2, stage=-1, tokens=8192, response=4094, rows=8, train=PARALLEL),
}  # fmt: skip
"""Those of more than ten layers a stage have eight in all; `make test-long` has these."""
