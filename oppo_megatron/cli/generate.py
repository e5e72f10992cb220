"""`oppo generate`: decode responses to a prompt, a file of prompts, or in a conversation."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import yaml

from oppo_megatron.cli.launch import check_world_size, external_ranks, launch, speaks_for_all
from oppo_megatron.cli.measure import check_devices
from oppo_megatron.clock import by_time
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.config.paths import missing_path
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.data.tokenizer import Tokenizer, require_stop_texts
from oppo_megatron.errors import CheckpointError, ConfigError, DataError
from oppo_megatron.layout.shape import check_model, max_positions
from oppo_megatron.nesting import read_yaml
from oppo_megatron.policy import answers
from oppo_megatron.policy.answers import Conversation, Drawing, OutputFile, Request, Terminal
from oppo_megatron.policy.finding import Choice, Policy, find_policy, policy_tokenizer, require_layout
from oppo_megatron.policy.given_prompts import Wording, numbered, parent_input, prompts_of_file, prompts_of_texts, within
from oppo_megatron.records import Prompt

ENTRY = "oppo_megatron.policy.answering:run_rank"
MAX_TOKENS, CHAT_LENGTH = 256, 4096
LEAST = {
    "samples": 1, "max_prompts": 1, "max_prompt_tokens": 1, "tp": 1, "pp": 1, "dp": 1, "batch": 1, "max_tokens": 1, "seed": 0,
    "top_k": 0, "context": 2, "threads": 1,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_policy_arguments(parser)
    asked = parser.add_argument_group("prompts (one of these)")
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeatable")
    asked.add_argument("--input", type=Path, metavar="FILE", help="a .txt file, a prompt per line, or rows as for `oppo train`")
    asked.add_argument("--chat", action="store_true", help="a conversation by the chat template; Ctrl-C ends an answer")
    add_prompt_arguments(asked)
    to = parser.add_argument_group("output (default: the standard output)")
    to.add_argument("--output", type=Path, metavar="FILE.jsonl", help="a line of JSON per response, in the prompts' order")
    to.add_argument("--resume", action="store_true", help="--output: continue an interrupted call")
    to.add_argument("--json", action="store_true", help="lines of JSON on the standard output, too")
    add_drawing_arguments(parser)


def add_prompt_arguments(asked: argparse._ArgumentGroup) -> None:
    asked.add_argument("--max-prompts", type=int, metavar="N", help="the file's first N prompts (default: all)")
    asked.add_argument("--max-prompt-tokens", type=int, metavar="N", help="leave out the file's prompts of more tokens")
    asked.add_argument("--column", metavar="NAME", help="the file's column of the prompt, unless it has a known name")
    asked.add_argument(
        "--template", metavar="TEXT",
        help="text around each `{prompt}` (default: as in the run that the policy comes from)",
    )  # fmt: skip
    asked.add_argument("--as-chat", action="store_true", help="prompts are a user's turn, put into the chat template")
    asked.add_argument("--system", metavar="TEXT", help="in a chat: what the system says first")


def add_policy_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options that select one policy (or `several`) and its layout."""
    parser.add_argument(
        "directory", type=Path, nargs="+" if several else None, metavar="DIR",
        help="an export or another Hugging Face directory, adapters, a Megatron directory, a run's checkpoint, or a run: its "
        "final weights, else its last checkpoint",
    )  # fmt: skip
    policy = parser.add_argument_group("policy")
    policy.add_argument("--tokenizer", type=Path, metavar="PATH", help="default: the tokenizer of DIR, or of its run")
    policy.add_argument("--chat-template", metavar="JINJA", help="default: as in the run or the tokenizer")
    policy.add_argument(
        "--template-argument", action="append", metavar="NAME=VALUE",
        help="a variable for the chat template, its value in YAML, as in enable_thinking=false; repeatable (default: the run's)",
    )  # fmt: skip
    policy.add_argument("--base", type=Path, metavar="DIR", help="adapters: the model that they adapt")
    policy.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as in the run, or as stored")
    layout = parser.add_argument_group("layout")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        layout.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{what}-parallel size (default: 1)")
    layout.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one")
    layout.add_argument("--batch", type=int, default=32, metavar="N", help="sequences per replica at once (default: %(default)s)")
    layout.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads per rank (default: OMP_NUM_THREADS, else its share of the cores)"
    )
    layout.add_argument("--kv-cache-mb", type=float, metavar="MB", help="bound of a rank's KV cache (default: none)")
    layout.add_argument(
        "--context", type=int, metavar="N",
        help=f"most tokens of prompt and response (default: as needed; --chat: {CHAT_LENGTH}, or less if the model has less)",
    )  # fmt: skip


def add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("-n", "--samples", type=int, default=1, metavar="N", help="responses per prompt (default: 1)")
    drawing.add_argument(
        "--max-tokens", type=int, metavar="N",
        help=f"most tokens of a response (default: as in the run, or {MAX_TOKENS}; less if the model has no room)",
    )  # fmt: skip
    drawing.add_argument("--greedy", action="store_true", help="the likeliest token each time: the default")
    drawing.add_argument(
        "--temperature", type=float, metavar="T", help="draw at this temperature (1 with -n, --top-k or --top-p; 0: greedy)"
    )
    drawing.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest (default: all)")
    drawing.add_argument("--top-p", type=float, metavar="P", help="draw among the fewest with this mass (default: 1)")
    drawing.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)")
    drawing.add_argument(
        "--stop", action="append", metavar="TEXT",
        help="end a response with this text, in place of the run's texts; repeatable",
    )  # fmt: skip
    drawing.add_argument(
        "--stop-id", action="append", type=int, metavar="ID",
        help="end a response with this token id, in addition to the ids of tokenizer, model and run; repeatable",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Raises an OppoError before ranks start if the request is invalid."""
    request = make_request(args)
    if request is None:
        print(f"oppo generate: {args.output} is whole: nothing to do", file=sys.stderr)
        return 0
    num_ranks = request.parallel.num_ranks
    check_world_size(num_ranks)
    if speaks_for_all(os.environ):
        print(request.policy.summary, *filter(None, [request.about_prompts]), sep="\n", file=sys.stderr, flush=True)
    return launch("generate", request, num_ranks, ENTRY)


def make_request(args: argparse.Namespace) -> Request | None:
    """Return the checked request; None if the output is complete."""
    _require_consistent(args)
    policy = find_policy(args.directory, choice_of(args))
    tokenizer = policy_tokenizer(policy)
    template = args.template
    if template is None:
        template = "{prompt}" if policy.run is None else policy.run.data.prompt_template
    asked, about = _asked(args, Wording(template, args.as_chat or args.chat, args.system), tokenizer)
    longest = max((len(each.tokens) for each in asked), default=0)
    max_length, max_tokens = _room(args, policy, longest)
    drawing = drawing_of(args, policy, max_tokens)
    require_stop_texts(drawing.stop, tokenizer, "--stop", "--stop-id")
    to = _destination(args, policy, drawing)
    if isinstance(to, OutputFile) and not answers.require_output(to):
        return None
    check_devices(args.device, args.tp * args.pp * args.dp, "--tp 1 --pp 1 --dp 1", "--device cpu")
    runtime = RuntimeConfig(device=args.device, kv_cache_mb=args.kv_cache_mb).with_threads(args.threads or 0)
    parallel = ParallelConfig(tp=args.tp, pp=args.pp, dp=args.dp)
    require_layout(policy, parallel, max_length, tokenizer.vocab_size)
    problems, vocab_size = [], int(policy.hf_config["vocab_size"])
    if args.base is not None and policy.adapters is None and policy.model.lora is None:
        problems.append(f"--base is {args.base}, but {args.directory} holds whole weights and no adapters; drop it")
    for i in args.stop_id or ():
        if not 0 <= i < vocab_size:
            problems.append(f"--stop-id is {i}, but the policy's ids are 0 to {vocab_size - 1}; correct or drop it")
    if problems:
        raise ConfigError(problems)
    of_file = args.input is not None
    prompts = tuple(numbered(asked, args.samples, max_length, drawing.max_tokens, of_file=of_file))
    return Request(policy, parallel, runtime, drawing, prompts, args.samples, args.batch, max_length, to, about)


def choice_of(args: argparse.Namespace) -> Choice:
    """Options that select the policy. Raises ConfigError."""
    arguments, date = {}, getattr(args, "date", None)
    if getattr(args, "resume", False) and args.output is not None:
        date = answers.first_date(args.output)
    for given in args.template_argument or ():
        name, sign, value = given.partition("=")
        try:
            arguments[name.strip()] = read_yaml(value)
        except (yaml.YAMLError, ValueError):
            sign = ""
        if not (sign and name.strip()):
            raise ConfigError(f"--template-argument is {given!r}; give NAME=VALUE, as in enable_thinking=false")
    return Choice(args.tokenizer, args.chat_template, args.base, args.dtype, arguments, date)


def _require_consistent(args: argparse.Namespace) -> None:
    """Raise ConfigError listing options that exclude each other or are out of range."""
    problems = []
    given = [name for name, value in (("--prompt", args.prompt), ("--input", args.input), ("--chat", args.chat)) if value]
    if len(given) != 1:
        found = f"{' and '.join(given)} are" if given else "nothing is"
        problems.append(f"{found} given, but one of --prompt, --input and --chat is needed")
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            problems.append(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        problems.append(f"--temperature is {args.temperature:g}, but must be 0 (greedy) or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        problems.append(f"--top-p is {args.top_p:g}, but must be above 0 and at most 1")
    if args.kv_cache_mb is not None and not args.kv_cache_mb > 0:
        problems.append(f"--kv-cache-mb is {args.kv_cache_mb:g}, but must be above 0")
    drawn = [name for name in ("temperature", "top_k", "top_p") if getattr(args, name)]
    if args.greedy and drawn:
        problems.append(f"--greedy and --{drawn[0].replace('_', '-')} exclude each other; drop one of them")
    if args.samples > 1 and (args.greedy or args.temperature == 0 or args.top_k == 1):
        problems.append(f"{args.samples} greedy responses would be the same; drop --samples, or give a --temperature above 0")
    if args.stop and "" in args.stop:
        problems.append("--stop is empty, which would end every response at once; give a text, or drop it")
    if args.template is not None and "{prompt}" not in args.template:
        problems.append(f"--template {args.template!r:.60} has no {{prompt}}, which the prompt replaces; add it")
    if args.template is not None and (args.as_chat or args.chat):
        problems.append("--template is for prompts as they are; drop it with --chat and --as-chat")
    if args.system is not None and not (args.as_chat or args.chat):
        problems.append("--system is part of a chat; add --as-chat, or drop it")
    for name in ("column", "max_prompt_tokens"):
        if getattr(args, name) is not None and args.input is None:
            problems.append(f"--{name.replace('_', '-')} is of an --input; give one, or drop it")
    if args.resume and args.output is None:
        problems.append("--resume continues an --output; give one, or drop it")
    if args.chat and (args.output is not None or args.json or args.samples > 1):
        problems.append("--chat is shown in the terminal, one answer per turn; drop --output, --json and --samples")
    if args.json and args.output is not None:
        problems.append("--json is for the standard output; --output has JSON anyway: drop one of them")
    if problems:
        raise ConfigError(problems)


def drawing_of(args: argparse.Namespace, policy: Policy, max_tokens: int) -> Drawing:
    """Sampling options: greedy by default, with the stop rules and ids of the policy's run, if any."""
    rollout = policy.run.rollout if isinstance(policy.run, TrainSettings) else None
    draws = args.samples > 1 or args.top_k is not None or args.top_p is not None
    temperature = args.temperature if args.temperature is not None else 1.0 if draws and not args.greedy else 0.0
    stop, stop_ids = args.stop or (), args.stop_id or ()
    if rollout is not None:
        stop, stop_ids = stop or rollout.stop_texts, (*rollout.stop_token_ids, *stop_ids)
    return Drawing(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=args.top_k or 0,
        top_p=1.0 if args.top_p is None else args.top_p,
        seed=args.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
    )


def _destination(args: argparse.Namespace, policy: Policy, drawing: Drawing) -> Terminal | OutputFile | Conversation:
    if args.chat:
        started_here = args.tp * args.pp * args.dp > 1 and external_ranks(os.environ) is None
        return Conversation(args.system, parent_input() if started_here else None)
    if args.output is not None:
        return OutputFile(args.output, answers.settings_of(policy, drawing, args.samples), args.resume)
    return Terminal(args.json)


def _asked(args: argparse.Namespace, wording: Wording, tokenizer: Tokenizer) -> tuple[list[Prompt], str]:
    """The prompts (none for a conversation), and a summary of rows read and dropped."""
    if args.chat:
        prompts_of_texts(["?"], wording, tokenizer)
        return [], ""
    if args.prompt is not None:
        return prompts_of_texts(args.prompt, wording, tokenizer), ""
    if not args.input.exists():
        raise DataError(missing_path("--input", args.input))
    bound, about = args.max_prompt_tokens, list[str]()
    most = None if bound else args.max_prompts
    rows = prompts_of_file(args.input, args.column, wording, tokenizer, most, about.append, by_time())
    short = within(rows, bound)
    if len(short) < len(rows):
        about.append(f"{len(rows) - len(short)} of {len(rows)} prompts have more than {bound} tokens and are left out")
    return short[: args.max_prompts], "\n".join(about)


def _room(args: argparse.Namespace, policy: Policy, longest_prompt: int) -> tuple[int, int]:
    """Most tokens of prompt plus response, and of a response, within the model's context."""
    if problems := check_model(str(args.directory), policy.hf_config):
        raise CheckpointError("\n".join(problems))
    most, rollout = max_positions(policy.hf_config), policy.run.rollout if isinstance(policy.run, TrainSettings) else None
    usual = MAX_TOKENS if rollout is None else rollout.max_response_tokens
    if args.chat:
        length = args.context or min(most, max(CHAT_LENGTH, 2 * (args.max_tokens or 0)))
        return length, args.max_tokens or min(usual, length // 2)
    tokens = args.max_tokens or max(1, min(usual, (args.context or most) - longest_prompt))
    return args.context or min(most, longest_prompt + tokens), tokens
