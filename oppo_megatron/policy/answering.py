"""The entry point of every rank of `oppo generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch.distributed as dist

from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.world import World, choose_device, open_world
from oppo_megatron.data.prompt_tokens import encode_prompt
from oppo_megatron.engine.completions import PromptDecoder
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping, StopText, all_ids
from oppo_megatron.policy.answers import (
    Conversation,
    Decode,
    GrowingText,
    Meter,
    OutputFile,
    Request,
    ResponseFile,
    Terminal,
    answer_of,
)
from oppo_megatron.policy.chat import Messages, converse, open_lines, until_interrupted
from oppo_megatron.policy.finding import policy_tokenizer
from oppo_megatron.policy.given_prompts import require_room
from oppo_megatron.policy.loading import LoadedPolicy, build_place, load_policy
from oppo_megatron.records import Prompt, Rollout

SHOWN_STEPS = 4
"""Decode steps between updates of a response that is shown while it grows."""
FILE_STEPS = 32
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
    drawing, tokenizer = request.drawing, policy.tokenizer
    text = StopText(drawing.stop, tokenizer.decode) if drawing.stop else None
    return policy.decoder(
        Sampling(drawing.temperature, drawing.top_k, drawing.top_p, drawing.seed),
        Stopping(all_ids(tokenizer.eos_ids, drawing.stop_token_ids), drawing.max_tokens, text=text),
        num_slots=min(request.num_slots, max(1, len(request.prompts))),
        round_steps=round_steps,
    )


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
    decoder: PromptDecoder,
    prompt: Prompt,
    decode: Decode,
    speaks: bool,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Decode one response, printed while it grows if this rank `speaks`."""
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
    left, meter = file.left, Meter(len(file), len(request.prompts))
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
            meter.add(rollout)


def _converse(request: Request, to: Conversation, policy: LoadedPolicy, world: World) -> None:
    turns = _Turns(request, policy, world)
    if world.rank != 0:
        while (prompt := turns.hear()) is not None:
            turns.decode(prompt)
        return
    try:
        with open_lines(to.source) as read:
            converse(to.system, read, turns.answer)
    finally:
        turns.tell(None)


class _Turns:
    """Answers the turns of a conversation, each sampled with its own number."""

    def __init__(self, request: Request, policy: LoadedPolicy, world: World):
        self._request, self._policy, self._world = request, policy, world
        self._decoder = _decoder(replace(request, num_slots=1), policy, SHOWN_STEPS)
        self._count = 0

    def tell(self, prompt: Prompt | None) -> None:
        """Send the next prompt from rank 0; None ends the conversation."""
        if self._world.size > 1:
            dist.broadcast_object_list([prompt], src=0)

    def hear(self) -> Prompt | None:
        told: list[Prompt | None] = [None]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def answer(self, messages: Messages) -> str:
        """Answer, printing tokens as they come.  Raises DataError if the context has no room for an answer."""
        tokenizer, drawing = self._policy.tokenizer, self._request.drawing
        text = tokenizer.chat.render(messages)
        tokens = tuple(encode_prompt(tokenizer, text))
        require_room("the conversation", len(tokens), self._request.max_length, drawing.max_tokens)
        prompt = Prompt(self._count, self._count, text, tokens)
        self._count += 1
        self.tell(prompt)
        return self.decode(prompt)

    def decode(self, prompt: Prompt) -> str:
        """Collective; Ctrl-C ends the answer if this is the only rank."""
        decode, alone = self._policy.tokenizer.decode, self._world.size == 1
        with until_interrupted() if alone else nullcontext(lambda: False) as interrupted:
            return decode(_grow(self._decoder, prompt, decode, self._world.rank == 0, interrupted))
