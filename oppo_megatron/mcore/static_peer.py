"""megatron-core's own decoding, as a peer for `oppo bench decode`.

Legend: B sequences of equal length, P prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import time

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from oppo_megatron.mcore.compat import make_scratch_memory
from oppo_megatron.mcore.model import RoleModel, transformer_config


class StaticContextDecoder:
    def __init__(self, model: RoleModel):
        shape = model.shape
        config = transformer_config(shape, model.groups, next(model.parameters()).dtype)
        config.use_te_activation_func = False  # the stock spec has no activation of its own
        # The stock attention takes a dropout generator and its scratch memory from globals.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        make_scratch_memory()
        self.stock = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm),
            vocab_size=shape.vocab_size,
            max_sequence_length=model.max_length,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(shape.ropes[0]["rope_theta"]),
            pg_collection=model.groups.collection,
        ).eval()
        ours, theirs = dict(model.named_parameters()), dict(self.stock.named_parameters())
        assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
        for name, parameter in theirs.items():
            parameter.data = ours[name].data

    @torch.inference_mode()
    def decode(self, prompts_BP: Tensor, num_new: int) -> tuple[float, Tensor]:
        """Return seconds and tokens [B, N]."""
        batch, length = prompts_BP.shape
        context = StaticInferenceContext(batch, length + num_new + 1)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits = self.stock(prompts_BP, None, hidden, inference_context=context, runtime_gather_output=True)
        context.increment_sequence_len_offset(length)
        token_B1, tokens = logits[:, -1:].argmax(-1), []
        started = time.perf_counter()
        for _ in range(num_new):
            logits = self.stock(token_B1, None, None, inference_context=context, runtime_gather_output=True)
            context.increment_sequence_len_offset(1)
            token_B1 = logits[:, -1:].argmax(-1)
            tokens.append(token_B1)
        return time.perf_counter() - started, torch.cat(tokens, -1)
