"""A tiny Megatron GPT (V vocabulary) under the real `MegatronGPTActorModel`, of which only the constructor is ours."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo.utils import AppState
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.utils.utils import retrieve_model_state_dict_in_cpu
from omegaconf import DictConfig, OmegaConf

VOCAB, EOS = 32, 1


class Tokenizer:
    eos_id, vocab_size = EOS, VOCAB
    tokenizer = object()

    def ids_to_text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]


def actor_config(micro: int, batch: int, max_length: int, greedy: bool) -> DictConfig:
    """The keys of `model` in NeMo-Aligner's `gpt_ppo_actor.yaml` that its methods read."""
    return OmegaConf.create(
        {
            "mcore_gpt": True, "micro_batch_size": micro, "global_batch_size": batch, "encoder_seq_length": 64,
            "hidden_size": 16, "position_embedding_type": "rope", "sequence_parallel": False, "data": {},
            "activations_checkpoint_granularity": None, "activations_checkpoint_method": None,
            "activations_checkpoint_num_layers": None, "activations_checkpoint_layers_per_pipeline": None,
            "ppo": {
                "rollout_micro_batch_size": micro, "forward_micro_batch_size": micro, "offload_adam_states": False,
                "entropy_bonus": 0.0, "ratio_eps": 0.2, "length_params": {"max_length": max_length, "min_length": 1},
                "sampling_params": {
                    "use_greedy": greedy, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0,
                    "add_BOS": False, "all_probs": False, "compute_logprob": False, "end_strings": ["<|endoftext|>"],
                },
            },
        }
    )  # fmt: skip


class InferenceOfOldMegatron(GPTModel):
    """megatron-core 0.16 gives an inference call the last token's logits only; NeMo counts its cache by the logits of all."""

    def forward(self, *args: Any, inference_params: Any = None, **kwargs: Any) -> torch.Tensor:
        if inference_params is not None:
            inference_params.materialize_only_last_token_logits = False
            kwargs["runtime_gather_output"] = True
        return super().forward(*args, inference_params=inference_params, **kwargs)


class TinyActor(MegatronGPTActorModel):
    """Two layers of 16 on the ranks of the default group: one pipeline stage of it, or all."""

    def __init__(self, cfg: DictConfig, seed: int = 0):
        torch.nn.Module.__init__(self)
        self._cfg = cfg
        self.num_inferred = 0
        self.tokenizer = Tokenizer()
        self.model_parallel_config = self.transformer_config = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, use_cpu_initialization=True,
            hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False, bias_dropout_fusion=False,
            gradient_accumulation_fusion=False, persist_layer_norm=False, init_method_std=0.3,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(), pipeline_dtype=torch.float32,
        )  # fmt: skip
        torch.manual_seed(seed)
        self.model = InferenceOfOldMegatron(
            self.transformer_config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=64,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
            pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        )  # fmt: skip
        self._set_flags()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.init_policy_state_dict = retrieve_model_state_dict_in_cpu(self, megatron_amp_O2=False)

    def _set_flags(self) -> None:
        ppo = self._cfg.ppo
        self._length_params = OmegaConf.to_container(ppo.length_params)
        self._sampling_params = OmegaConf.to_container(ppo.sampling_params)
        self.entropy_bonus, self.ratio_eps = ppo.entropy_bonus, ppo.ratio_eps
        self.forward_micro_batch_size = ppo.forward_micro_batch_size
        self.mcore_gpt, self.get_attention_mask_from_fusion = True, True
        self.megatron_amp_O2 = self.with_distributed_adam = self.with_megatron_fused_adam = False
        self.use_mcore_dist_optim = self.use_fsdp = self.initialize_ub = self.use_trtllm_generation = False
        self.to_offload_adam_states = self.use_peft = False
        self.grad_clip_pl_default = self.validation_param_sync_overlap = False
        self.rampup_batch_size = self.inference_params = self.megatron_timers = None
        self.distributed_adam_offload_manager = None

    def infer(self, inference_batch: Any) -> Any:
        self.num_inferred += 1
        return super().infer(inference_batch)

    def cuda(self, device: Any = None) -> TinyActor:
        return self

    @property
    def use_peft(self) -> bool:
        return False

    @use_peft.setter
    def use_peft(self, value: bool) -> None:
        assert not value


class Sorting(TinyActor):
    """Its `infer` generates with the longest prompts first, and gives the answers back in the order of the prompts."""

    def infer(self, inference_batch: Any) -> Any:
        order = torch.argsort(inference_batch["length"], descending=True)
        found = super().infer({name: inference_batch[name][order] for name in ("text", "length")})
        return {name: rows[torch.argsort(order)] for name, rows in found.items()}


class Choosing(TinyActor):
    """Its `infer` draws two answers and takes the longer one, without the last token where it is long."""

    def infer(self, inference_batch: Any) -> Any:
        one, other = (super(Choosing, self).infer(inference_batch) for _ in range(2))
        width = max(drawn["response_tokens"].size(1) for drawn in (one, other))
        for drawn in (one, other):
            tokens = drawn["response_tokens"]
            drawn["response_tokens"] = torch.nn.functional.pad(tokens, (0, width - tokens.size(1)), value=EOS)
        longer = other["response_lengths"] > one["response_lengths"]
        found = {}
        for name, rows in one.items():
            found[name] = torch.where(longer.view(-1, *[1] * (rows.ndim - 1)), other[name], rows)
        found["response_lengths"] -= (found["response_lengths"] - found["prompt_lengths"] > 3).long()
        return found


class Twice(TinyActor):
    def infer(self, inference_batch: Any) -> Any:
        return super().infer({name: inference_batch[name].repeat_interleave(2, 0) for name in ("text", "length")})


class Elsewhere(TinyActor):
    """Another back end: what its `infer` gives is a function of the prompt, and nothing of NeMo generates it."""

    def infer(self, inference_batch: Any) -> Any:
        self.num_inferred += 1
        lengths = inference_batch["length"].tolist()
        prompts = [text[:length].tolist() for text, length in zip(inference_batch["text"], lengths, strict=True)]
        rows = [torch.tensor([*prompt, *range(4, 6 + sum(prompt) % 9), EOS]) for prompt in prompts]
        return {
            "response_tokens": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=EOS),
            "response_lengths": torch.tensor([len(row) for row in rows]),
            "prompt_lengths": inference_batch["length"],
            "is_end": torch.ones(len(rows), dtype=torch.bool),
        }


def start_megatron(micro: int, batch: int, seed: int, pp: int = 1, tp: int = 1) -> None:
    """megatron's groups over the default group, in replicas of `pp` stages of `tp` ranks, and NeMo's counter of micro-batches."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, init_num_microbatches_calculator

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    initialize_rng_tracker(inference_rng_tracker=True)  # there is no dropout: nothing is drawn inside the model
    destroy_num_microbatches_calculator()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    init_num_microbatches_calculator(rank, None, batch, micro, world // (tp * pp))
    AppState().global_rank = rank
    torch.manual_seed(seed + parallel_state.get_data_parallel_rank())


def weights(actor: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}
