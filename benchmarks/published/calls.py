"""The work of one of ReaL's calls: seconds by the cost laws, and counts that five constants multiply.

Facts of its engine from the release (openpsi-project/ReaLHF, commit be75fce), none of them fitted:

- pipeline stages by parameters (`cut_stages`); m micro-batches: the printed factor times PP, twice that in training, the printed
  number alone without a pipeline.  Seconds: the sum over the stages, and (m - 1) times the slowest stage;
- training recomputes each block (`gradient_checkpointing: bool = True`): four forwards; backward twice a forward;
- training with tensor parallelism is sequence parallel, generation and inference are not (`search.py`): their norms and sums
  are not divided, and every tensor rank sends whole hidden states to the next stage;
- stages send and receive in turn and do nothing meanwhile (`static_schedule.py`, `p2p.py`);
- norms are five passes in float32 and two in half precision (`_LlamaRMSNorm`): 36 bytes a value; the activation is two passes,
  10 bytes a value;
- gradients are reduced in float32, and half-precision weights gathered (`accumulate_allreduce_grads_in_fp32`, ZeRO);
- ranks: pipeline stages outermost, then replicas, then tensor ranks.

If a stage or a group of replicas crosses nodes, all bytes of a node pass its NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from benchmarks.published.tables import (
    CONTEXT_TOKENS,
    GPUS_A_NODE,
    MINIBATCHES,
    PROMPT_TOKENS,
    SHAPES,
    PublishedCall,
    Stage,
    cut_stages,
)
from oppo_megatron.layout.shape import causal_pairs, head_linear, layer_linears
from oppo_megatron.sim.clusters.cluster import GB, GPUS, INSIDE, Cluster
from oppo_megatron.sim.laws import WIDTH, Group, LayerLaw, LayerSizes, all_reduce_s, scatter_s

NODE = Cluster(1, GPUS_A_NODE, GPUS["h100"], INSIDE["h100"])
"""The paper does not name the GPU; its figures exceed an A100's peak and fit an H100."""
LAW = LayerLaw(NODE.gpu)
NORM_BYTES, ACTIVATION_BYTES, LOGIT_BYTES = 36, 10, 10
"""Bytes per value of an eager float32 norm, of silu and a product, and of temperature and log-softmax of logits."""
ADAM_BYTES, STATE_BYTES = 28, 6
"""Bytes per parameter: main weight, moments and gradient, divided over replicas; gradient and weight, on each replica."""
GRADIENT_WIDTH = 4
FORWARDS = {"infer": 1, "generate": 1, "train": 4}
NODE_BYTES_PER_S = 25 * GB
"""200 Gb/s per node, as the release's own search assumes."""


@dataclass(frozen=True)
class Work:
    """The work of a call.  `decode_s` is by law and unscaled; the constants multiply the other fields."""

    decode_s: float = 0.0
    kernels_s: float = 0.0
    node_bytes: float = 0.0
    launches: float = 0.0
    calls: float = 0.0
    replays: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: float) -> Work:
        return Work(*(count * getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Constants:
    """Non-negative constants of an engine that the laws leave open.

    `kernels`: factor on kernels and tensor-parallel messages; `node_s_per_gb`: of a node's NICs; `launch_s`: per layer launched
    by the host, once per pass; `call_s`: per call, and once more between calls; `replay_s`: per layer of a captured decode step,
    beyond the law.
    """

    kernels: float = 1.0
    node_s_per_gb: float = GB / NODE_BYTES_PER_S
    launch_s: float = 0.0
    call_s: float = 0.0
    replay_s: float = 0.0

    def seconds(self, work: Work) -> float:
        return work.decode_s + sum(
            constant * feature for constant, feature in zip(vector_of(self), features_of(work), strict=True)
        )


UNFITTED = Constants()


def features_of(work: Work) -> tuple[float, ...]:
    """Return the multiplied fields in the order of `Constants`."""
    return work.kernels_s, work.node_bytes / GB, work.launches, work.calls, work.replays


def vector_of(constants: Constants) -> tuple[float, ...]:
    return tuple(getattr(constants, field.name) for field in fields(constants))


def work_of(call: PublishedCall, batch: int, *, graphs: bool = True) -> Work:
    """Return the work of a call over `batch` sequences; `graphs`: decode steps are captured as CUDA graphs."""
    return Engine(call, batch).generation(graphs) if call.kind == "generate" else Engine(call, batch).passes()


@dataclass(frozen=True)
class Engine:
    """One call on ReaL's engine."""

    call: PublishedCall
    batch: int

    @property
    def micro_batches(self) -> int:
        call = self.call
        if call.pp == 1:
            return call.micro_batches
        return call.micro_batches * call.pp * (2 if call.kind == "train" else 1)

    @property
    def sequences(self) -> float:
        """Sequences of one micro-batch."""
        minibatches = MINIBATCHES if self.call.kind == "train" else 1
        return self.batch / self.call.dp / minibatches / self.micro_batches

    @property
    def hidden_share(self) -> float:
        return 1 / self.call.tp if self.call.kind == "train" else 1.0

    def passes(self) -> Work:
        """Return inference over all sequences, or the update of all minibatches."""
        if self.call.kind == "infer":
            return self._pipeline(CONTEXT_TOKENS) + Work(calls=1)
        minibatch = self._pipeline(CONTEXT_TOKENS) + self._update()
        return minibatch.times(MINIBATCHES) + Work(calls=1)

    def generation(self, graphs: bool) -> Work:
        """Return the prefill of the prompts, then a step of every micro-batch per further token."""
        decode = self._decode_step()
        steps = (CONTEXT_TOKENS - PROMPT_TOKENS - 1) * self.micro_batches
        launched = Work() if graphs else Work(launches=decode.replays)
        return self._pipeline(PROMPT_TOKENS, heads=False) + (decode + launched).times(steps) + Work(calls=1)

    def _pipeline(self, length: int, *, heads: bool = True) -> Work:
        tokens = self.sequences * length
        works = [self._stage(stage, tokens, length, heads) for stage in self._stages()]
        slowest = max(works, key=lambda work: work.kernels_s)
        hop = Work(node_bytes=self._hop_bytes(tokens))
        return pipelined(works, slowest, self.micro_batches) + hop.times(self.micro_batches + self.call.pp - 1)

    def _stage(self, stage: Stage, tokens: float, length: int, heads: bool) -> Work:
        forwards = FORWARDS[self.call.kind]
        seconds = stage.layers * (forwards * self._layer_s(tokens, length) + self._tensor_s(tokens))
        if stage.has_head and heads and not self.call.scalar:
            backward = 3 if self.call.kind == "train" else 1  # logits are not recomputed
            logits = LOGIT_BYTES * tokens * self._shape["vocab_size"] / self.call.tp
            head = LAW.head_s(self._shape, self.call.tp, tokens) + LAW.plain_s(logits)
            seconds += backward * head
        return Work(kernels_s=seconds, launches=forwards * stage.layers)

    def _layer_s(self, tokens: float, length: int) -> float:
        pairs = tokens / length * causal_pairs(0, length)
        return LAW.products_s(self._sizes, tokens) + LAW.attention_s(self._sizes, pairs) + self._elementwise_s(tokens)

    def _elementwise_s(self, tokens: float) -> float:
        """Return the seconds of eager norms and activation, two sums and rotations."""
        shape, tp = self._shape, self.call.tp
        hidden = 2 * (NORM_BYTES + 3 * WIDTH) * shape["hidden_size"] * self.hidden_share
        rotations = 2 * WIDTH * (self._sizes.queries + self._sizes.keys / 2)
        inner = ACTIVATION_BYTES * shape["intermediate_size"] / tp + rotations
        return LAW.gpu.efficiencies.elementwise_fixed_s + LAW.plain_s(tokens * (hidden + inner))

    def _tensor_s(self, tokens: float) -> float:
        """Return seconds of two all-reduces per forward and backward, and one more gather with sequence parallelism."""
        reduced = all_reduce_s(NODE, Group(self.call.tp), WIDTH * self._shape["hidden_size"] * tokens)
        return reduced * (2 * 3 + 1 if self.call.kind == "train" else 2)

    def _hop_bytes(self, tokens: float) -> float:
        """Return the bytes per micro-batch that leave a node for the next stage, with gradients on the way back."""
        call, on_stage = self.call, self.call.tp * self.call.dp
        if call.pp == 1 or on_stage * call.pp <= GPUS_A_NODE:
            return 0.0
        ways = 2 if call.kind == "train" else 1
        sent = WIDTH * self._shape["hidden_size"] * tokens * self.hidden_share
        return ways * sent * min(GPUS_A_NODE, on_stage)

    def _update(self) -> Work:
        """Return the reduction of gradients, the optimizer, and the gathering of weights."""
        call = self.call
        held = parameters(call) / call.tp / call.pp
        seconds = held * (ADAM_BYTES / call.dp + STATE_BYTES) / LAW.gpu.bytes_per_s
        if call.dp == 1:
            return Work(kernels_s=seconds)
        if call.tp * call.dp <= GPUS_A_NODE:
            group = Group(call.dp)
            exchange = scatter_s(NODE, group, GRADIENT_WIDTH * held) + scatter_s(NODE, group, WIDTH * held)
            return Work(kernels_s=seconds + exchange)
        nodes = call.dp * call.tp / GPUS_A_NODE
        leaving = (GRADIENT_WIDTH + WIDTH) * held * (nodes - 1) / nodes
        return Work(kernels_s=seconds, node_bytes=leaving * min(GPUS_A_NODE, call.tp))

    def _decode_step(self) -> Work:
        """Return one micro-batch's decode step through the slowest stage, halfway through the responses."""
        call, rows, sizes = self.call, self.sequences, self._sizes
        positions = rows * (PROMPT_TOKENS + CONTEXT_TOKENS) / 2
        layer = LAW.products_s(sizes, rows) + LAW.cached_attention_s(sizes, positions) + self._elementwise_s(rows)
        layer += 2 * all_reduce_s(NODE, Group(call.tp), WIDTH * self._shape["hidden_size"] * rows)
        head = LAW.head_s(self._shape, call.tp, rows)
        stages = self._stages()
        slowest = max(stages, key=lambda stage: stage.layers * layer + stage.has_head * head)
        return Work(decode_s=slowest.layers * layer + slowest.has_head * head, replays=slowest.layers)

    @property
    def _shape(self) -> dict[str, int]:
        return dict(SHAPES[self.call.model])

    @property
    def _sizes(self) -> LayerSizes:
        return LayerSizes.of(self._shape, self.call.tp)

    def _stages(self) -> tuple[Stage, ...]:
        return cut_stages(self._shape, self.call.pp, scalar=self.call.scalar)


def pipelined(stages: Sequence[Work], slowest: Work, micro_batches: int) -> Work:
    """Return the first micro-batch through all stages, and each further one through the slowest."""
    total = slowest.times(micro_batches - 1)
    for stage in stages:
        total += stage
    return total


def parameters(call: PublishedCall) -> int:
    """Return the parameters of the call's model without norms."""
    shape = SHAPES[call.model]
    layer = sum(linear.size for linear in layer_linears(shape))
    ends = head_linear(shape, scalar=False).size + head_linear(shape, scalar=call.scalar).size
    return int(shape["num_hidden_layers"] * layer + ends)
