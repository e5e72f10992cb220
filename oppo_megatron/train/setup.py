"""From a checked configuration to this rank's trainer: data first, so that bad input ends the run before models are built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oppo_megatron.config.checks import max_context
from oppo_megatron.config.model import ModelConfig, TrainedRoleConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk import ChunkTuner
from oppo_megatron.control.delta import make_delta_controller
from oppo_megatron.control.kl import KLController
from oppo_megatron.data.prompts import PromptSet, PromptStream, load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rewards.functions import RewardSum, VerifierReward, build_reward_functions
from oppo_megatron.runtime.generation import Generator
from oppo_megatron.runtime.mcore.groups import RoleGroups
from oppo_megatron.runtime.mcore.kv_cache import KVCache
from oppo_megatron.runtime.mcore.model import Head, RoleModel
from oppo_megatron.runtime.mcore.training import TrainedModel
from oppo_megatron.runtime.roles import load_role
from oppo_megatron.runtime.sampler import Sampling
from oppo_megatron.runtime.scoring import Scorer, ScorerRole
from oppo_megatron.runtime.stopping import Stopping
from oppo_megatron.runtime.stream import TokenStream
from oppo_megatron.runtime.world import World
from oppo_megatron.schedule.plan import delta_rule
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.journal import Journal
from oppo_megatron.train.places import Topology, build_topology
from oppo_megatron.train.ppo import PPOTrainer
from oppo_megatron.train.run_dir import RunDirectory
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.scorers import ScorerSide
from oppo_megatron.train.trace import SpanRecorder


@dataclass(frozen=True)
class Inputs:
    """All that is read before a model is built."""

    tokenizer: Tokenizer
    rewards: RewardSum
    prompts: PromptSet
    heldout: PromptSet | None
    quarantine: Quarantine


def read_inputs(config: TrainConfig) -> Inputs:
    """Tokenizer, prompts and rewards.  Raises ConfigError, DataError or RewardError for what cannot be trained on."""
    tokenizer = load_tokenizer(config.tokenizer)
    rewards, quarantine = build_reward_functions(config.rewards), Quarantine()
    prompts = load_prompts(config.data, tokenizer, quarantine=quarantine, check=rewards.check)
    heldout = None
    if config.evaluation is not None:
        judge = VerifierReward(config.evaluation.verifier, config.evaluation.answer)
        heldout = load_prompts(config.evaluation.data, tokenizer, quarantine=quarantine, check=judge.check)
    return Inputs(tokenizer, rewards, prompts, heldout, quarantine)


def build_trainer(config: TrainConfig, world: World, inputs: Inputs) -> PPOTrainer:
    """Groups, models, optimizers and books of this rank."""
    builder = _Builder(config, world, build_topology(config), _prompt_stream(config, inputs.prompts))
    topology = builder.topology
    rank, stream = world.rank, topology.stream
    actor_groups = topology.groups["actor"]
    actor = None if actor_groups is None else builder.actor(actor_groups, inputs.tokenizer)
    evaluator = None
    if inputs.heldout is not None and config.evaluation is not None:
        evaluator = Evaluator(
            config.evaluation, inputs.heldout, inputs.tokenizer, builder.num_slots, builder.kv_budget_bytes
        )
    remote = stream.source != stream.sink
    scheduler = OvercommitScheduler(
        builder.prompts,
        RolloutBuffer(config.rollout.batch_size, 0, config.overlap.max_deferrals),
        make_delta_controller(delta_rule(config.overlap)),
    )
    return PPOTrainer(
        config=config,
        world=world,
        scheduler=scheduler,
        stream=TokenStream(stream, remote and rank == stream.source, world.device),
        exchange=ScoreExchange(rank, world.device, topology.places, inputs.rewards, inputs.tokenizer),
        chunk_tuner=ChunkTuner(config.overlap.chunk, config.rollout.max_response_tokens),
        kl=KLController(config.ppo.kl),
        spans=SpanRecorder(rank, config.run_dir if config.logging.trace else None),
        actor=actor,
        scorers=builder.scorers(),
        evaluator=evaluator,
        journal=Journal(config, builder.total_steps, inputs.tokenizer) if rank == stream.source else None,
    )


def _prompt_stream(config: TrainConfig, prompts: PromptSet) -> PromptStream:
    """Exactly the prompts that will be trained: admission ends early enough that none is left over."""
    limit = None if config.steps is None else config.steps * config.rollout.batch_size
    epochs = config.data_epochs or (1 if config.steps is None else None)
    return PromptStream(prompts, config.seed, epochs=epochs, limit=limit, shuffle=config.data.shuffle)


class _Builder:
    """Builds the roles that this rank has a part in."""

    def __init__(self, config: TrainConfig, world: World, topology: Topology, prompts: PromptStream):
        self.config, self.world, self.topology, self.prompts = config, world, topology, prompts
        assert prompts.end is not None
        self.total_steps = math.ceil(prompts.end / config.rollout.batch_size)
        delta = delta_rule(config.overlap)
        self.num_slots = config.rollout.batch_size + max(delta.max, delta.initial)
        megabytes = config.runtime.kv_cache_mb
        self.kv_budget_bytes = None if megabytes is None else int(megabytes * 2**20)

    def actor(self, groups: RoleGroups, tokenizer: Tokenizer) -> Actor:
        config = self.config
        model = self._model(config.actor, groups, "lm")
        generator = Generator(
            model,
            self._cache(model),
            sampling=Sampling.of(config.rollout, config.seed),
            stopping=Stopping.of(config.rollout, tokenizer.eos_id, config.seed),
            prefill_tokens=config.runtime.micro_batch_tokens,
        )
        keep_kv = config.overlap.actor_kv == "keep"
        temperature = config.rollout.temperature
        gap_limit = config.ppo.gap_limit(config.actor.dtype, temperature)
        return Actor(self._trained(model, config.actor), generator, config.ppo, temperature, keep_kv, gap_limit)

    def scorers(self) -> ScorerSide | None:
        config, roles = self.config, dict(self.topology.held())
        if "critic" not in roles:
            return None
        reference: ModelConfig = config.reference or config.actor
        critic = self._model(config.critic, roles["critic"], "scalar")
        models = {"reference": self._model(reference, roles["reference"], "lm"), "critic": critic}
        if config.reward is not None:
            models["reward"] = self._model(config.reward, roles["reward"], "scalar")
        scorers = {name: self._scorer(name, model) for name, model in models.items()}  # type: ignore[arg-type]
        return ScorerSide(scorers, self._trained(critic, config.critic), config.ppo)

    def _scorer(self, role: ScorerRole, model: RoleModel) -> Scorer:
        if role != "critic":
            model.requires_grad_(False)
        budget, temperature = self.config.runtime.micro_batch_tokens, self.config.rollout.temperature
        return Scorer(role, model, self._cache(model), prefill_tokens=budget, temperature=temperature)

    def _model(self, config: ModelConfig, groups: RoleGroups, head: Head) -> RoleModel:
        lean = self.config.runtime.decode_path == "lean"
        length = max_context(self.config)
        return load_role(config, groups, head=head, max_length=length, device=self.world.device, lean=lean)

    def _cache(self, model: RoleModel) -> KVCache:
        return model.new_cache(self.num_slots, self.kv_budget_bytes)

    def _trained(self, model: RoleModel, config: TrainedRoleConfig) -> TrainedModel:
        steps = self.total_steps * self.config.ppo.epochs * self.config.ppo.minibatches
        return TrainedModel(model, config.optimizer, steps)


def write_quarantine(config: TrainConfig, inputs: Inputs) -> None:
    """`quarantine.jsonl`, where rows were refused."""
    if len(inputs.quarantine):
        inputs.quarantine.write(RunDirectory(config.run_dir).quarantine)
