"""Held-out evaluation: the actor answers prompts; rules, functions, services and the reward model judge the answers.

Legend: N responses, K metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oppo_megatron.clock import to_stderr
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import share_of_sequences
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.estimates import Figures, estimate
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.engine.round_runner import PromptDecoder, RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.evaluation.tasks import TaskConfig, find_tasks, main_figure, measure_tasks
from oppo_megatron.mcore.batch import join_rows, pack_at
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.policy.answering import LoadedPolicy, PolicyPlacement
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.train.heldout import HeldoutSchedule
from oppo_megatron.train.score_exchange import ScoreExchange, StepRewards


class Evaluator(HeldoutSchedule):
    """Decodes into a temporary cache of at most the run's slots, without forced lengths."""

    def __init__(
        self, config: TrainConfig, prompts: PromptSet, judges: RewardSum, rounds: RoundRunner, exchange: ScoreExchange,
        world: World,
    ):  # fmt: skip
        evaluation = config.evaluation
        assert evaluation is not None
        super().__init__(evaluation.every_steps, config.early_stop)
        self.config, self.judges, self.runtime = evaluation, judges, config.runtime
        tokenizer = exchange.tokenizer
        self.stopping = Stopping.of(config.rollout, tokenizer.eos_ids, config.seed, decode=tokenizer.decode)
        self.max_slots = share_of_sequences(config, "actor", exchange.placements["actor"].dp)
        self.rounds, self.exchange = rounds, exchange
        self.source = rounds.planner.site.source
        self.steps = StepRewards.of(evaluation.metrics, tokenizer)
        self.sampling = Sampling(temperature=evaluation.temperature, seed=config.seed)
        self.policy, self.tasks = None, dict[str, TaskConfig]()
        if evaluation.tasks and rounds.decode is not None:
            place = PolicyPlacement(world, rounds.decode.model.groups, rounds.executor.links)
            self.policy = LoadedPolicy(rounds.decode.model, tokenizer, place, config.runtime)
            self.tasks = find_tasks(evaluation.tasks, evaluation.task_data, "evaluation.task_data") if self.policy.leads else {}
        count = min(len(prompts), evaluation.most_rows)
        once = PromptStream(prompts, 0, epochs=1, limit=count, shuffle=False)
        self.prompts: Sequence[Prompt] = [
            replace(prompt, seq_id=place * evaluation.samples + sample)
            for place, prompt in enumerate(once)
            for sample in range(evaluation.samples)
        ]

    def measure(self, step: int) -> Figures:
        """Measure and report to early stopping.  Raises RewardError on the actor's first output rank if a judge fails."""
        rollouts = None if self.rounds.decode is None else self._decode(self.rounds.decode.model)
        scores_N = self._model_scores(rollouts) if self.judges.reads_model() else None
        of_tasks, table = list[tuple[float, float | None]](), None
        if self.policy is not None:
            results = measure_tasks(self.tasks, self.policy, self.max_slots, self.config.most_rows, to_stderr)
            of_tasks = [main_figure(result) for _, result in results]
        if self.exchange.rank == self.source:
            assert rollouts is not None
            pairs = [*self._judge(rollouts, scores_N), *of_tasks]
            values = [-1.0 if value is None else value for pair in pairs for value in pair]
            table = torch.tensor(values, dtype=torch.float64)
        names = self.config.names
        shared = self.exchange.shared("held-out metrics", table, 2 * len(names), self.source).tolist()
        means, errors = shared[::2], (None if error < 0 else error for error in shared[1::2])
        figures = dict(zip(names, zip(means, errors, strict=True), strict=True))
        self.observe(step, figures)
        return figures

    def _decode(self, actor: RoleModel) -> list[Rollout]:
        decoder = PromptDecoder(
            actor,
            self.rounds.executor.links,
            self.runtime,
            num_slots=min(len(self.prompts), self.max_slots),
            sampling=self.sampling,
            stopping=self.stopping,
            activity=self.exchange.activity,
        )
        return sorted(decoder.decode(self.prompts), key=lambda rollout: rollout.seq_id)

    def _model_scores(self, rollouts: Sequence[Rollout] | None) -> Tensor:
        """Scores [N] on every rank; replicas divide the sequences."""
        exchange, source, prompts = self.exchange, self.source, self.prompts
        speaks = exchange.rank == source
        responses = [rollout.tokens for rollout in rollouts or ()]
        mine = torch.tensor([len(tokens) for tokens in responses]) if speaks else None
        lengths = [int(n) for n in exchange.shared("held-out lengths", mine, len(prompts), source).tolist()]
        mine = torch.tensor([token for tokens in responses for token in tokens]) if speaks else None
        flat = exchange.shared("held-out responses", mine, sum(lengths), source).long().split(lengths)
        placement = exchange.placements["reward"]
        scores_N = torch.empty(len(prompts), dtype=torch.float64, device=exchange.device)
        coords = placement.coords(exchange.rank)
        for replica in range(placement.dp):
            rows, scores = range(replica, len(prompts), placement.dp), None
            if coords is not None and coords.replica == replica and rows:
                of_rows = [(prompts[i].tokens, flat[i].tolist()) for i in rows]
                scores = self._scores_of(of_rows, self.rounds.scoring["reward"].model, exchange.device)
            scores_N[replica :: placement.dp] = exchange.shared(
                "held-out scores", scores, len(rows), placement.output_rank(replica)
            )
        return scores_N

    def _scores_of(
        self, rows: Sequence[tuple[Sequence[int], list[int]]], model: RoleModel, device: torch.device
    ) -> Tensor | None:
        sequences = [[*prompt, *response] for prompt, response in rows]
        places = [[len(sequence) - 1] for sequence in sequences]
        if self.steps is not None:
            ends = self.steps.ends([response for _, response in rows])
            places = [[len(prompt) + end for end in own] for (prompt, _), own in zip(rows, ends, strict=True)]
        batches = pack_at(sequences, places, self.runtime.micro_batch_tokens, device)
        outputs = forward_rows(model, batches, lambda _, scores_S: scores_S.float())
        if not outputs:
            return None
        values = join_rows(outputs, [len(row) for row in places], batches)
        return values if self.steps is None else self.steps.scores(values, ends)

    def _judge(self, rollouts: Sequence[Rollout], scores_N: Tensor | None) -> list[tuple[float, float | None]]:
        columns: list[dict[int, list[float]]] = [{} for _ in self.config.judged]
        items = [ScoreItem(r.seq_id, r.prompt.text, self.exchange.tokenizer.decode(r.tokens), r.prompt.fields) for r in rollouts]
        self.judges.request(items)
        for i, (rollout, item) in enumerate(zip(rollouts, items, strict=True)):
            score = None if scores_N is None else float(scores_N[i])
            parts = self.judges.evaluate(
                item.prompt, item.response, item.fields, score, item.seq_id, num_tokens=len(rollout.tokens)
            ).parts
            measured = [*parts.values(), float(len(rollout.tokens)), float(rollout.finish_reason == "length")]
            for column, value in zip(columns, measured, strict=True):
                column.setdefault(rollout.seq_id // self.config.samples, []).append(value)
        found = [estimate(column) for column in columns]
        return [(each.mean, each.error) for each in found]
