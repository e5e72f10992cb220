"""Brings the scorers' results to every rank.

Legend: B rollouts of the batch that are trained, T their response tokens (packed), N rollouts including greedy ones, P parts of
the reward, S steps of responses (packed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.algorithms.supervised_losses import response_scores, step_scores
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness.failures import noted
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.engine.stream import DRAWN, share
from oppo_megatron.layout.placements import RolePlacement, scorers_leader
from oppo_megatron.mcore.device import on_device
from oppo_megatron.records import ALONE, Members, Rollout
from oppo_megatron.rewards.functions import NOTHING_KNOWN, NonFiniteRewardError, RewardSum
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.token_text import StepEnds
from oppo_megatron.train.actor import CRITIC_STATS, Critic
from oppo_megatron.train.roles import Relay


@dataclass(frozen=True)
class StepRewards:
    part: RewardPart
    step_ends: StepEnds

    @classmethod
    def of(cls, parts: Sequence[RewardPart], tokenizer: Tokenizer) -> StepRewards | None:
        found = next((part for part in parts if part.kind == "process"), None)
        return None if found is None else cls(found, StepEnds(found.separator, tokenizer.decode))

    def ends(self, responses: Sequence[Sequence[int]]) -> list[list[int]]:
        """Index of each step's last token, per response."""
        return [self.step_ends.of(response) for response in responses]

    def scores(self, logits_S: Tensor, ends: Sequence[Sequence[int]]) -> Tensor:
        return response_scores(step_scores(logits_S), [len(row) for row in ends], self.part.step_rewards)[0]

    def of_tokens(self, logits_T: Tensor, responses: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Scores [B] and weighted token rewards [T] (None: whole responses only)."""
        ends = self.ends(responses)
        starts = accumulate((len(response) for response in responses), initial=0)
        places = [start + end for start, row in zip(starts, ends, strict=False) for end in row]
        places_S = on_device(places, logits_T.device)
        counts = [len(row) for row in ends]
        scores_B, rewards_S = response_scores(step_scores(logits_T[places_S]), counts, self.part.step_rewards)
        if rewards_S is None:
            return scores_B, None
        return scores_B, torch.zeros_like(logits_T, dtype=torch.float32).index_put_(
            (places_S,), (self.part.weight * rewards_S).float()
        )


Known = Mapping[int, Mapping[str, float]]
"""Reward parts already evaluated, by sequence and label."""


@dataclass(frozen=True)
class ScoreReport:
    """Seconds of the scorers' first rank (`work`: per round), `measured` of the actor's; `critic`, `ess`: of the last updates."""

    parts: dict[str, float]
    score_busy_s: float
    scorer_idle_s: float
    work: list[float]
    critic: dict[str, float]
    ess: float
    measured: list[float]


@dataclass
class ScoreExchange:
    """Shares scores with every rank, once per step (collective).  `refusal`: why a reward is NaN (on the scorers' first rank).

    `valuing`: a critic whose ranks only train; it values whole responses.
    """

    rank: int
    device: torch.device
    placements: Mapping[str, RolePlacement]
    rewards: RewardSum
    tokenizer: Tokenizer
    activity: Activity = field(default_factory=Activity)
    members: Members = ALONE
    critic: Critic | None = None
    valuing: RolePlacement | None = None
    relay: Relay | None = None
    steps: StepRewards | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        self._leader = scorers_leader(self.placements)
        self._on_its_way: list[tuple[Tensor, dist.Work]] = []  # verdicts

    def gather(
        self, batch: Sequence[Rollout], rounds: RoundRunner, seconds: Mapping[str, float], work: Sequence[float],
        measured: Callable[[], list[float]], known: Known,
    ) -> tuple[ScoredBatch, ScoreReport]:  # fmt: skip
        """Share the batch's scores, values and reference log-probs.  `seconds`, `work`: this rank's.  `known`: from `judge`.

        `measured`: the effective sample size, and what the actor's first output rank has measured.
        """
        trained = self.members.to_train(batch)
        sizes = [len(r.tokens) for r in trained]
        reference_T, values_T = (
            self._share(role, trained, sizes, rounds).float() if role in self.placements else None
            for role in ("reference", "critic")
        )
        if self.valuing is not None:
            with self.activity.doing("values of the batch"):
                mine = None if self.critic is None else self.critic.values(trained)
            source = self.valuing.output_rank()
            values_T = self.shared("values", mine if self.rank == source else None, sum(sizes), source).float()
        model_N, step_rewards_T = self._model_scores(batch, rounds)
        totals_N, parts = self._rewards(batch, model_N, known)
        scores_B, greedy = totals_N.float(), None
        if self.members.greedy:
            others = [r for r in batch if self.members.is_greedy(r.seq_id)]
            lengths_G = on_device([len(r.tokens) for r in others], self.device)
            cut_G = on_device([r.finish_reason == "length" for r in others], self.device, torch.bool)
            greedy = GreedyRows(scores_B[self._places(batch, greedy=True)], lengths_G, cut_G)
            scores_B = scores_B[self._places(batch, greedy=False)]
        times = [seconds.get("score", 0.0), seconds.get("wait_tokens", 0.0), *work]
        mine = torch.tensor(times, dtype=torch.float64) if self.rank == self._leader else None
        busy_s, idle_s, *leaders_work = self.shared("times", mine, len(times), self._leader).tolist()
        scored = ScoredBatch(
            behaviour_logp_T=on_device([x for r in trained for x in r.logprobs], self.device, torch.float32),
            reference_logp_T=reference_T, values_T=values_T, scores_B=scores_B, lengths_B=sizes,
            truncated_B=on_device([r.finish_reason == "length" for r in trained], self.device, torch.bool),
            group_size=self.members.trained, step_rewards_T=step_rewards_T, greedy=greedy,
            tokens_T=on_device([x for r in trained for x in r.tokens], self.device),
            versions_T=on_device([x for r in trained for x in r.versions], self.device),
        )  # fmt: skip
        critic = self.critic_stats()
        source, mine = self.placements["actor"].output_rank(), None
        of_actor = measured()
        if self.rank == source:
            mine = torch.tensor(of_actor, dtype=torch.float64)
        what = "effective sample size, seconds of the rollout"
        ess, *of_rollout = self.shared(what, mine, len(of_actor), source).tolist()
        return scored, ScoreReport(parts, busy_s, idle_s, leaders_work, critic, ess, of_rollout)

    def drawn_again(self, rollouts: Sequence[Rollout], rounds: RoundRunner) -> Iterator[list[list[float]]]:
        """Yield each response's tokens, log-probs and sampling log-probs, as the present weights draw them."""
        placement, coords = self.placements["actor"], self.placements["actor"].coords(self.rank)
        drawn: dict[int, list[list[float]]] = {}
        for replica in range(placement.dp):
            rows, mine, source = rollouts[replica :: placement.dp], None, placement.output_rank(replica)
            if not rows:
                continue
            if coords is not None and coords.replica == replica:
                assert rounds.decode is not None
                mine = rounds.decode.drawn_again(rows, rounds.planner.micro_batch_tokens)
            sizes = [len(rollout.tokens) for rollout in rows]
            flat = None if mine is None or self.rank != source else mine.flatten()
            shared_T3 = self.shared("tokens drawn again", flat, DRAWN * sum(sizes), source).view(-1, DRAWN).cpu()
            for rollout, part in zip(rows, shared_T3.split(sizes), strict=True):
                drawn[rollout.seq_id] = part.T.tolist()
        yield from (drawn[rollout.seq_id] for rollout in rollouts)

    def judge(self, rollouts: Sequence[Rollout], rounds: RoundRunner, labels: Sequence[str]) -> list[list[float]]:
        """Wait for the reward parts `labels` of finished rollouts.  Ranks that only train get them whenever they ask."""
        within = None if self.relay is None else self.relay.judging
        if self.relay is not None and within is None:
            with waiting_for("verdicts", self.activity):
                table = share(None, len(rollouts) * len(labels), self._leader, torch.device("cpu"), self.relay.verdicts)
            return table.view(len(rollouts), -1).tolist()
        reads_model = self.rewards.reads_model(labels)
        model_N = self._model_scores(rollouts, rounds, within)[0] if reads_model else None
        self.request(rollouts)

        def parts(item: ScoreItem, score: float | None, rollout: Rollout) -> list[float]:
            found = self.rewards.parts(item, score, rollout.prompt.place, len(rollout.tokens), of=labels)
            return [found[label] for label in labels]

        table = self._scored(rollouts, model_N, len(labels), parts, within)
        if self.relay is not None and self.relay.verdicts is not None:
            self._on_its_way = [each for each in self._on_its_way if not each[1].is_completed()]
            flat = table.flatten()
            work = dist.broadcast(flat, self._leader, group=self.relay.verdicts, async_op=True)
            self._on_its_way.append((flat, work))
        return table.tolist()

    def request(self, rollouts: Sequence[Rollout], known: Collection[str] = ()) -> None:
        """Request scores, except `known` parts, from services and rule processes; returns at once."""
        if self.rank != self._leader or not self.rewards.asks_services:
            return
        new = (rollout for rollout in rollouts if rollout.finished and not self.rewards.requested(rollout.seq_id))
        self.rewards.request([self._item(rollout) for rollout in new], known)

    def _item(self, rollout: Rollout) -> ScoreItem:
        prompt, response = rollout.prompt, self.tokenizer.decode(rollout.tokens)
        return ScoreItem(rollout.seq_id, prompt.text, response, prompt.fields, [*prompt.tokens, *rollout.tokens])

    def critic_stats(self) -> dict[str, float]:
        if "critic" not in self.placements and self.valuing is None:
            return {}
        mine, source = None, self._leader if self.valuing is None else self.valuing.output_rank()
        if self.rank == source:
            assert self.critic is not None
            mine = torch.tensor([self.critic.stats[name] for name in CRITIC_STATS], dtype=torch.float64)
        stats = self.shared("critic's statistics", mine, len(CRITIC_STATS), source)
        return dict(zip(CRITIC_STATS, stats.tolist(), strict=True))

    def shared(self, what: str, values: Tensor | None, size: int, source: int, within: dist.ProcessGroup | None = None) -> Tensor:
        """Call `share` and wait for `what`, on the CPU if `within` a group; a watchdog does not blame a rank for this wait."""
        with waiting_for(what, self.activity):
            shared = share(values, size, source, self.device if within is None else torch.device("cpu"), within)
            if shared.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        return shared

    def _share(
        self, role: str, batch: Sequence[Rollout], sizes: Sequence[int], rounds: RoundRunner,
        within: dist.ProcessGroup | None = None,
    ) -> Tensor:  # fmt: skip
        placement, book = self.placements[role], rounds.planner.scorers[role]
        pieces: dict[int, Tensor] = {}
        scored_by: list[list[int]] = [[] for _ in range(placement.dp)]
        for i, replica in enumerate(book.replicas(batch).tolist()):
            scored_by[replica].append(i)
        for replica, rows in enumerate(scored_by):
            source, mine = placement.output_rank(replica), None
            if self.rank == source:
                mine = rounds.scoring[role].collect([batch[i] for i in rows])
            shared = self.shared(f"outputs of {role}", mine, sum(sizes[i] for i in rows), source, within)
            pieces |= dict(zip(rows, shared.split([sizes[i] for i in rows]), strict=True))
        return torch.cat([pieces[i] for i in range(len(batch))])

    def _model_scores(
        self, rollouts: Sequence[Rollout], rounds: RoundRunner, within: dist.ProcessGroup | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        if "reward" not in self.placements:
            return None, None
        if self.steps is None:
            return self._share("reward", rollouts, [1] * len(rollouts), rounds, within), None
        outputs_T = self._share("reward", rollouts, [len(r.tokens) for r in rollouts], rounds, within)
        scores_N, earned_T = self.steps.of_tokens(outputs_T, [r.tokens for r in rollouts])
        if earned_T is not None and self.members.greedy:
            pieces = zip(rollouts, earned_T.split([len(r.tokens) for r in rollouts]), strict=True)
            earned_T = torch.cat([piece for rollout, piece in pieces if not self.members.is_greedy(rollout.seq_id)])
        return scores_N, earned_T

    def _places(self, rollouts: Sequence[Rollout], *, greedy: bool) -> Tensor:
        places = [i for i, rollout in enumerate(rollouts) if self.members.is_greedy(rollout.seq_id) == greedy]
        return on_device(places, self.device, torch.int64)

    def _rewards(self, batch: Sequence[Rollout], model_N: Tensor | None, known: Known) -> tuple[Tensor, dict[str, float]]:
        labels = [summand.label for summand in self.rewards.summands]
        self.request(batch, {label for rollout in batch for label in known.get(rollout.seq_id, ())})

        def reward(item: ScoreItem, score: float | None, rollout: Rollout) -> list[float]:
            found = self.rewards.evaluate(
                item.prompt, item.response, item.fields, score, item.seq_id, rollout.prompt.place, len(rollout.tokens),
                known.get(item.seq_id, NOTHING_KNOWN),
            )  # fmt: skip
            return [found.total, *found.parts.values()]

        self.refusal = None
        shared = self._scored(batch, model_N, 1 + len(labels), reward)
        parts = shared[self._places(batch, greedy=False), 1:] if self.members.greedy else shared[:, 1:]
        return shared[:, 0], dict(zip(labels, parts.mean(0).tolist(), strict=True))

    def _scored(
        self, rollouts: Sequence[Rollout], model_N: Tensor | None, width: int,
        numbers: Callable[[ScoreItem, float | None, Rollout], list[float]], within: dist.ProcessGroup | None = None,
    ) -> Tensor:  # fmt: skip
        """Return `numbers` of each rollout, [N, width]; only the scorers' first rank calls it, because it runs user code."""
        table = None
        if self.rank == self._leader:
            rows, functions = [], " and ".join(map(repr, self.rewards.user_functions))
            scores = [None] * len(rollouts) if model_N is None else model_N.tolist()
            for rollout, score in zip(rollouts, scores, strict=True):
                item = self._item(rollout)
                told = f"the reward function {functions}, called for sequence {item.seq_id} (of {rollout.prompt.place})"
                note = noted(self.rank, told) if functions else nullcontext()  # in case the rank ends in it
                try:
                    with self.activity.doing(f"reward of sequence {item.seq_id}"), note:
                        rows.append(numbers(item, score, rollout))
                except NonFiniteRewardError as error:
                    self.refusal = self.refusal or str(error)
                    rows.append([math.nan] * width)
            table = torch.tensor(rows, dtype=torch.float64).flatten()
        return self.shared("rewards", table, len(rollouts) * width, self._leader, within).view(len(rollouts), -1)


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise sums in rank order, bit for bit the same on all ranks."""
    return _of_all_ranks(values, device).sum(0).tolist()


def by_rank(values: Sequence[float], device: torch.device) -> list[list[float]]:
    return _of_all_ranks(values, device).T.tolist()


def _of_all_ranks(values: Sequence[float], device: torch.device) -> Tensor:
    mine = on_device(values, device, torch.float64)
    all_ranks = [mine] if dist.get_world_size() == 1 else [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    if len(all_ranks) > 1:
        dist.all_gather(all_ranks, mine)
    return torch.stack(all_ranks)
