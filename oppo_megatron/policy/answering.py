"""Policies on their ranks; entry point of `oppo generate`.  Legend: N pairs, R tokens of continuations, V vocabulary shard."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.clock import ByTime, to_stderr
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.cluster.world import World, choose_device, open_world
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.data.tokenizer import Tokenizer, encode_prompt
from oppo_megatron.engine.executor import Links, build_links
from oppo_megatron.engine.round_runner import PromptDecoder
from oppo_megatron.engine.sampler import Sampling, draw_at
from oppo_megatron.engine.stopping import Stopping, StopText, all_ids
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.batch import Answered, MicroBatch, pack_responses
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.mcore.vocab import OutputRows
from oppo_megatron.mcore.weights.checkpoint import load_adapters
from oppo_megatron.policy import answers
from oppo_megatron.policy.answers import Conversation, Decode, GrowingText, OutputFile, Request, ResponseFile, Terminal, answer_of
from oppo_megatron.policy.finding import Policy, policy_tokenizer
from oppo_megatron.policy.given_prompts import Messages, converse, open_lines, require_room, until_interrupted
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.rounds import Site

SHOWN_STEPS = 4
"""Decode steps between updates of a response that is shown while it grows."""
FILE_STEPS = 32
SHOW_EVERY_S = 2.0
WAITING_S = 7 * 24 * 3600.0
"""Time that ranks wait for someone to type."""


def run_rank(kind: str, request: Request) -> int:
    runtime = request.runtime
    if isinstance(request.to, Conversation):
        runtime = runtime.model_copy(update={"timeout_s": WAITING_S})
    choose_device(runtime)
    with open_world(runtime) as world:
        if world.rank == 0:
            show_hosts(world.hosts)
        tokenizer, place = policy_tokenizer(request.policy), build_place(world, request.parallel)
        policy = load_policy(request.policy, place, runtime, tokenizer, max_length=request.max_length)
        if isinstance(request.to, Conversation):
            _converse(request, request.to, policy, world)
        elif isinstance(request.to, OutputFile):
            _fill(request, request.to, policy, world)
        else:
            _show(request, request.to, policy, world)
    return 0


def _decoder(request: Request, policy: LoadedPolicy, round_steps: int) -> PromptDecoder:
    return policy.drawing(request.drawing, min(request.num_slots, max(1, len(request.prompts))), round_steps)


def _show(request: Request, to: Terminal, policy: LoadedPolicy, world: World) -> None:
    speaks, prompts = world.rank == 0, request.prompts
    if len(prompts) == 1 and not to.as_json:
        _grow(_decoder(request, policy, SHOWN_STEPS), prompts[0], policy.tokenizer.decode, speaks)
        return
    waiting: dict[int, Rollout] = {}
    due = iter(prompts)
    following = next(due).seq_id
    for rollout in _decoder(request, policy, FILE_STEPS).decode(prompts):
        waiting[rollout.seq_id] = rollout
        while following in waiting:
            ended = waiting.pop(following)
            following = next((prompt.seq_id for prompt in due), -1)
            if not speaks:
                continue
            answer = answer_of(ended, request.samples, policy.tokenizer.decode)
            if to.as_json:
                print(json.dumps(answer, ensure_ascii=False, default=str), flush=True)
                continue
            which = f"prompt {answer['row']}" + (f", sample {answer['sample']}" if request.samples > 1 else "")
            print(f"--- {which}\n{answer['response']}", flush=True)


def _grow(
    decoder: PromptDecoder, prompt: Prompt, decode: Decode, speaks: bool, interrupted: Callable[[], bool] = lambda: False
) -> list[int]:
    """Decode one response; the rank that `speaks` prints it as it grows."""
    shown, tokens = GrowingText(decode, sys.stdout), list[int]()
    for (rollout,) in decoder.rounds([prompt]):
        tokens, left = rollout.tokens, interrupted()
        if speaks:
            shown.show(tokens, rollout.finished or left)
        if left:
            break
    if speaks:
        print(flush=True)
    return tokens


def _fill(request: Request, to: OutputFile, policy: LoadedPolicy, world: World) -> None:
    decode = policy.tokenizer.decode
    file = ResponseFile(to, request.prompts, request.samples, decode)
    left, say, tokens = file.left, ByTime(to_stderr, SHOW_EVERY_S), 0
    if world.size > 1:
        dist.barrier()  # all have read the file before it is written again
    responses = _decoder(request, policy, FILE_STEPS).decode(left)
    if world.rank != 0:
        for _ in responses:
            pass
        return
    with file.writing() as write:
        for rollout in responses:
            write(rollout)
            tokens += len(rollout.tokens)
            say(f"{len(file)}/{len(request.prompts)} responses, {tokens} tokens")
    print(f"{len(file)} responses", file=sys.stderr, flush=True)


def _converse(request: Request, to: Conversation, policy: LoadedPolicy, world: World) -> None:
    """Answer turn after turn; other ranks get the prompts from rank 0, None at the end."""
    tokenizer, decoder, numbers = policy.tokenizer, _decoder(replace(request, num_slots=1), policy, SHOWN_STEPS), count()

    def shared(prompt: Prompt | None) -> Prompt | None:
        box = [prompt]
        if world.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def decode(prompt: Prompt) -> str:
        """Answer one prompt.  Collective.  Ctrl-C ends the answer if this rank is alone."""
        with until_interrupted() if world.size == 1 else nullcontext(lambda: False) as interrupted:
            return tokenizer.decode(_grow(decoder, prompt, tokenizer.decode, world.rank == 0, interrupted))

    def answer(messages: Messages) -> str:
        """Print tokens as they come.  Raises DataError if the context is full."""
        text = tokenizer.chat.render(messages)
        tokens = tuple(encode_prompt(tokenizer, text))
        require_room("the conversation", len(tokens), request.max_length, request.drawing.max_tokens)
        number = next(numbers)
        prompt = Prompt(number, number, text, tokens)
        shared(prompt)
        return decode(prompt)

    if world.rank != 0:
        while (prompt := shared(None)) is not None:
            decode(prompt)
        return
    try:
        with open_lines(to.source) as read:
            converse(to.system, read, answer)
    finally:
        shared(None)


@dataclass(frozen=True)
class PolicyPlacement:
    """Policies on all ranks, in one layout."""

    world: World
    groups: RoleGroups
    links: Links


def build_place(world: World, parallel: ParallelConfig) -> PolicyPlacement:
    """Build groups and links.  Collective of a world of `parallel.num_ranks` ranks."""
    ranks = tuple(range(world.size))
    groups = build_groups(ranks, parallel.tp, parallel.pp, "policy")
    assert groups is not None
    placement = RolePlacement(ranks, parallel.tp, parallel.pp, parallel.dp)
    links = build_links(Site({"actor": placement}))
    use_once(groups.made, world.device)
    links.use_once(world.device)
    return PolicyPlacement(world, groups, links)


Asked = tuple[Sequence[Answered], answers.Drawing | None, int]
"""Pairs (context, continuation) to score; or, with a drawing and slots per replica, contexts to continue."""


@dataclass(frozen=True)
class LoadedPolicy:
    model: RoleModel
    tokenizer: Tokenizer
    placement: PolicyPlacement
    runtime: RuntimeConfig

    def decoder(
        self, sampling: Sampling, stopping: Stopping, *, num_slots: int, round_steps: int = 64, activity: Activity | None = None
    ) -> PromptDecoder:
        """Return a decoder of `num_slots` sequences per replica at once.  Collective."""
        return PromptDecoder(
            self.model,
            self.placement.links,
            self.runtime,
            num_slots=num_slots,
            sampling=sampling,
            stopping=stopping,
            round_steps=round_steps,
            activity=activity or self.placement.world.activity,
        )

    def drawing(self, drawing: answers.Drawing, num_slots: int, round_steps: int = 64) -> PromptDecoder:
        """As `decoder`, by the settings of a `drawing`."""
        text = StopText(drawing.stop, self.tokenizer.decode) if drawing.stop else None
        stopping = Stopping(all_ids(self.tokenizer.eos_ids, drawing.stop_token_ids), drawing.max_tokens, text=text)
        sampling = Sampling(drawing.temperature, drawing.top_k, drawing.top_p, drawing.seed)
        return self.decoder(sampling, stopping, num_slots=num_slots, round_steps=round_steps)

    @property
    def leads(self) -> bool:
        return dist.get_rank() == self.model.groups.output_rank

    def answer(self, asked: Asked | None, progress: Callable[[str], None] = lambda line: None) -> list[Any] | None:
        """Answer the rank that leads, whose last request is None; the others call this with None until they get None.

        The answer to a pair is the log-prob of its continuation, and whether greedy decoding writes it; with a `Drawing` a text.
        """
        groups, box = self.model.groups, [asked]
        if len(groups.ranks) > 1:
            with self.placement.world.activity.doing("requests of an evaluation", waits=not self.leads):
                dist.broadcast_object_list(box, groups.output_rank, groups.all, self.placement.world.device)
        if box[0] is None:
            return None
        pairs, drawing, num_slots = box[0]
        if drawing is None:
            return self._score(pairs)
        texts, prompts = [""] * len(pairs), [Prompt(i, i, "", tuple(context)) for i, (context, _) in enumerate(pairs)]
        for done, rollout in enumerate(self.drawing(drawing, min(num_slots, len(pairs))).decode(prompts), start=1):
            texts[rollout.seq_id] = self.tokenizer.decode(rollout.tokens)
            progress(f"{done} of {len(pairs)} responses")
        return texts

    def _score(self, pairs: Sequence[Answered]) -> list[tuple[float, bool]]:
        """Replicas divide the pairs."""
        groups, device, vocab = self.model.groups, self.placement.world.device, self.model.vocab
        mine = range(groups.dp_rank, len(pairs), groups.dp)
        found_N2 = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)

        def greedy(logits_BV: Tensor, targets_B: Tensor) -> Tensor:
            return draw_at(logits_BV.float(), Sampling(temperature=0.0), targets_B, vocab).tokens == targets_B

        def finish(batch: MicroBatch, output: OutputRows) -> Tensor:
            targets_R = batch.targets_R
            columns = output.figures(targets_R).logp_R.double(), output.by_rows(greedy, targets_R).double()
            columns_R2 = torch.stack(columns, -1)
            return torch.stack([torch.stack([x[:, 0].sum(), x[:, 1].amin()]) for x in columns_R2.split(list(batch.counts))])

        contexts, continuations = [pairs[i][0] for i in mine], [pairs[i][1] for i in mine]
        batches = pack_responses(contexts, continuations, self.runtime.micro_batch_tokens, device)
        tables = forward_rows(self.model, batches, finish)
        for batch, table in zip(batches, tables if groups.tp_rank == 0 else (), strict=False):
            found_N2[[mine[i] for i in batch.index]] = table
        if len(groups.ranks) > 1:
            dist.all_reduce(found_N2, group=groups.all)
        return [(total, greedy == 1.0) for total, greedy in found_N2.tolist()]


def load_policy(
    policy: Policy, placement: PolicyPlacement, runtime: RuntimeConfig, tokenizer: Tokenizer, max_length: int
) -> LoadedPolicy:
    """Load a policy.  Collective.  `max_length`: most tokens of prompt and response.  Raises CheckpointError."""
    model = load_role(policy.model, placement.groups, head="lm", max_length=max_length, device=placement.world.device)
    if policy.adapters is not None:
        load_adapters(*policy.adapters, model)
    return LoadedPolicy(model.requires_grad_(False), tokenizer, placement, runtime)
