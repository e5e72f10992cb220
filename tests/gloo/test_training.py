"""Training on every layout equals plain torch on one process: Hugging Face's model, AdamW and clip_grad_norm_."""

import math
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo_megatron.config.model import OptimizerConfig, TrainingLayoutConfig
from tests.gloo.jobs_training import ENTROPY_WEIGHT, TEMPERATURE, Minibatch
from tests.gloo.models import save_small
from tests.support.hf import tensors_of
from tests.support.ranks import run_ranks

NUM_ROWS = (6, 7, 1, 9)  # of each minibatch: replicas without rows are among them
NUM_STEPS = len(NUM_ROWS)
SETTINGS = OptimizerConfig(
    lr=0.01, min_lr=0.002, warmup_steps=1, decay="linear", weight_decay=0.1, betas=[0.8, 0.9], eps=1e-5, clip_grad=0.5
)
NAMES = ("qwen2", "qwen3", "qwen3-scalar")
PROBES = [[1, 2, 3, 4], [60], [9, 8, 7]]


def make_data() -> list[Minibatch]:
    dice = random.Random(5)

    def tokens(most: int) -> list[int]:
        # Token 0 pads in these models, and transformers gives a pad token's embedding no gradient.
        return [dice.randrange(1, 64) for _ in range(dice.randint(1, most))]

    data = []
    for count in NUM_ROWS:
        responses = [tokens(9) for _ in range(count)]
        numbers = [[dice.uniform(-0.5, 1.5) for _ in response] for response in responses]
        prompts = [tokens(6) for _ in responses]
        of_groups = [prompts[row - row % 4 if row % 4 < 3 else row] for row in range(count)]  # groups of three and of one
        data.append(Minibatch(of_groups, responses, numbers))
    return data


DATA = make_data()


class Case(NamedTuple):
    tp: int
    pp: int
    dp: int
    options: dict[str, Any] = {}


SEQUENCE = {"sequence_parallel": True}
SELECTIVE, FULL = {"recompute": "selective"}, {"recompute": "full"}
CASES = [
    Case(1, 1, 1), Case(1, 4, 1), Case(1, 1, 4), Case(2, 1, 1, SEQUENCE), Case(2, 2, 1, SEQUENCE | FULL),
    Case(2, 1, 2, SEQUENCE | SELECTIVE), Case(1, 2, 2, FULL),
]  # fmt: skip
CONTEXT = [
    Case(1, 1, 1, {"cp": 2}), Case(2, 1, 1, {"cp": 2} | SEQUENCE | SELECTIVE),
    Case(1, 2, 1, {"cp": 2} | FULL), Case(1, 1, 2, {"cp": 2}), Case(2, 2, 1, {"cp": 2}), Case(1, 1, 1, {"cp": 3}),
]  # fmt: skip
DEEP = [
    Case(1, 2, 1, {"vpp": 2}), Case(1, 4, 1, {"vpp": 2}), Case(1, 2, 2, {"vpp": 2}),
    Case(2, 2, 1, {"vpp": 2} | SEQUENCE | SELECTIVE), Case(1, 2, 1, {"vpp": 2, "cp": 2}),
]  # fmt: skip


def case_id(case: Case) -> str:
    values = [key if value is True else f"{key}-{value}" for key, value in case.options.items()]
    return "-".join([f"tp{case.tp}-pp{case.pp}-dp{case.dp}", *values])


@pytest.fixture(scope="module")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("deep")
    save_small(root / "deep", "qwen2", num_hidden_layers=8, tie_word_embeddings=True)
    save_small(root / "deep-scalar", "qwen3", "scalar", num_hidden_layers=8)
    return {path.name: str(path) for path in root.iterdir()}


def rate(step: int) -> float:
    """SETTINGS' schedule by hand: a warm-up of one step at the full rate, then a line to the end at NUM_STEPS."""
    if step <= SETTINGS.warmup_steps:
        return SETTINGS.lr
    share = (step - SETTINGS.warmup_steps) / (NUM_STEPS - SETTINGS.warmup_steps)
    return SETTINGS.lr + share * (SETTINGS.min_lr - SETTINGS.lr)


def plain_outputs(model: Any, tokens: list[int]) -> Tensor:
    """Logits [T, V] or a score of every prefix [T]."""
    if hasattr(model, "score"):
        return model.score(model.model(torch.tensor([tokens])).last_hidden_state)[0, :, 0]
    return model(torch.tensor([tokens])).logits[0]


def plain_loss(model: Any, batch: Minibatch) -> Tensor:
    total = torch.zeros(())
    for prompt, response, numbers in zip(batch.prompts, batch.responses, batch.numbers, strict=True):
        out = plain_outputs(model, [*prompt, *response])[len(prompt) - 1 : -1]
        weights = torch.tensor(numbers)
        if out.dim() == 1:
            total = total + ((out - weights) ** 2).sum()
        else:
            logq = torch.log_softmax(out / TEMPERATURE, -1)
            chosen = logq[range(len(response)), response]
            total = total - (weights * chosen).sum() + ENTROPY_WEIGHT * (logq.exp() * logq).sum()
    return total / batch.num_tokens


def plain_training(directory: str, settings: OptimizerConfig) -> dict[str, Any]:
    kind = AutoModelForSequenceClassification if "scalar" in directory else AutoModelForCausalLM
    return plain_steps(kind.from_pretrained(directory, dtype=torch.float32), settings)


def plain_steps(model: Any, settings: OptimizerConfig) -> dict[str, Any]:
    model.train()
    params = [param for param in model.parameters() if param.requires_grad]
    decay, biases = settings.weight_decay, {param for name, param in model.named_parameters() if name.endswith("bias")}
    decays = [param.dim() > 1 and param not in biases for param in params]
    groups = [
        {"params": [p for p, each in zip(params, decays, strict=True) if each == d], "weight_decay": decay * d}
        for d in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps)
    losses, norms = [], []
    for step, batch in enumerate(DATA):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        loss = plain_loss(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, settings.clip_grad or math.inf).item())
        losses.append(loss.item())
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([plain_outputs(model, probe) for probe in PROBES])
    return {"losses": losses, "norms": norms, "outputs": outputs, "weights": model.state_dict()}


@cache
def reference(directory: str, clip_grad: float) -> dict[str, Any]:
    return plain_training(directory, SETTINGS.model_copy(update={"clip_grad": clip_grad}))


def check(
    answers: list[dict[str, Any]], name: str, expected: dict[str, Any], written: Path, speaking: int, rel: float = 1e-5,
    apart: float = 1e-4,
) -> None:  # fmt: skip
    """`speaking`: number of last-stage ranks.  `rel`: tolerance of gradient norms, `apart` of weights."""
    for answer in (a[name] for a in answers):
        assert answer["grad_norm"] == pytest.approx(expected["norms"], rel=rel)
        assert answer["lr"] == pytest.approx([rate(step) for step in range(NUM_STEPS)])
    speakers = [a[name] for a in answers if "outputs" in a[name]]
    assert len(speakers) == speaking
    for answer in speakers:
        assert [stats["loss"] for stats in answer["stats"]] == pytest.approx(expected["losses"], abs=2e-5, rel=2e-5)
        assert all(0 < stats["max_tokens"] <= 24 for stats in answer["stats"])
        assert (answer["outputs"] - expected["outputs"]).abs().max() < 2e-4
    assert all(stats == {} for a in answers if "outputs" not in a[name] for stats in a[name]["stats"])
    kind = AutoModelForSequenceClassification if "scalar" in name else AutoModelForCausalLM
    found = kind.from_pretrained(written / name, dtype=torch.float32).state_dict()
    assert found.keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        assert (found[key] - weight).abs().max() < apart, key


def run_case(
    chosen: dict[str, str], case: Case, target: Path, config: OptimizerConfig = SETTINGS, bucket_size: int | None = None
) -> list[dict[str, Any]]:
    tp, pp, dp, options = case
    layout = TrainingLayoutConfig(**options)
    return run_ranks(
        tp * pp * dp * layout.cp, "tests.gloo.jobs_training:train", directories=chosen, target=str(target), tp=tp, pp=pp,
        config=config, data=DATA, probes=PROBES, layout=layout, bucket_size=bucket_size,
    )  # fmt: skip


LATER = [pytest.param(case, marks=pytest.mark.long) for case in CONTEXT[2:]]


@pytest.mark.parametrize("case", [*CASES, *CONTEXT[:2], *LATER], ids=case_id)
def test_steps_equal_plain_torch(models: dict[str, str], case: Case, tmp_path: Path) -> None:
    names = (*NAMES, "mistral") if case.tp == case.pp else NAMES
    bucket_size = 3000 if case == Case(1, 1, 4) else None
    answers = run_case({name: models[name] for name in names}, case, tmp_path, bucket_size=bucket_size)
    for name in names:
        expected = reference(models[name], SETTINGS.clip_grad)
        assert max(expected["norms"]) > SETTINGS.clip_grad, "clipping is put to the test"
        check(answers, name, expected, tmp_path, case.tp * case.dp * case.options.get("cp", 1))


EXPERTS = [Case(2, 2, 1, SEQUENCE | FULL), Case(2, 1, 2)]
MORE = [Case(1, 1, 1), Case(1, 1, 4), Case(2, 1, 1), Case(2, 1, 2, SEQUENCE), Case(2, 1, 1, {"cp": 2} | SEQUENCE)]


NAMES_OF = {
    "experts": ("mixtral", "qwen3-moe", "qwen3-moe-scalar"),
    "own layers": ("phi3", "olmo2", "olmo2-scalar", "gemma2", "gemma3", "gpt-oss"),
}  # fmt: skip
QUICK = {"experts": EXPERTS, "own layers": EXPERTS[:1]}


@pytest.mark.parametrize(("kind", "case"), [
    pytest.param(kind, case, id=f"{kind}-{case_id(case)}", marks=[] if case in QUICK[kind] else [pytest.mark.long])
    for kind in NAMES_OF for case in (*EXPERTS, *MORE)
])  # fmt: skip
def test_steps_of_other_layers_equal_plain_torch(models: dict[str, str], kind: str, case: Case, tmp_path: Path) -> None:
    names = NAMES_OF[kind]
    answers = run_case({name: models[name] for name in names}, case, tmp_path)
    for name in names:
        check(
            answers,
            name,
            reference(models[name], SETTINGS.clip_grad),
            tmp_path,
            case.tp * case.dp * case.options.get("cp", 1),
            rel=3e-5,
        )


DIVIDED = [
    Case(1, 1, 4, {"ep": 2}), Case(2, 1, 2, {"ep": 2} | SEQUENCE | SELECTIVE), Case(1, 1, 2, {"ep": 2}),
    Case(1, 1, 4, {"ep": 4}), Case(1, 2, 2, {"ep": 2} | FULL), Case(2, 1, 4, {"ep": 2}),
    Case(2, 2, 2, {"ep": 2} | SEQUENCE | FULL), Case(1, 2, 2, {"ep": 2, "vpp": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("mixtures")
    save_small(root / "mixtral", "mixtral", num_local_experts=8)
    save_small(root / "qwen3-moe", "qwen3_moe", num_local_experts=8)
    save_small(root / "qwen3-moe-scalar", "qwen3_moe", "scalar", num_local_experts=8)
    save_small(root / "gpt-oss", "gpt_oss", num_local_experts=8, sliding_window=5, swiglu_limit=1.5)
    return {path.name: str(path) for path in root.iterdir()}


@pytest.mark.parametrize(
    "case", [case if case in DIVIDED[:2] else pytest.param(case, marks=pytest.mark.long) for case in DIVIDED], ids=case_id
)
def test_steps_with_experts_divided_over_replicas_equal_plain_torch(mixtures: dict[str, str], case: Case, tmp_path: Path) -> None:
    """Replicas have unlike numbers of micro-batches; a rank holds, sums and changes its own experts alone."""
    assert min(NUM_ROWS) < case.dp, "a replica has no rows"
    answers = run_case(mixtures, case, tmp_path)
    for name, directory in mixtures.items():
        check(answers, name, reference(directory, SETTINGS.clip_grad), tmp_path, case.tp * case.dp, rel=3e-5)
        width = 24 if name.startswith("qwen3") else 48
        of_one = 3 * 32 * width + (2 * width + 32 if name == "gpt-oss" else 0)
        size = 4 * 8 * of_one // (case.tp * case.pp * case.options["ep"])
        copies = case.dp // case.options["ep"]
        for answer in answers:
            assert answer[name]["experts"] == {"weights": size, "gradients": size, "moments": 2 * size // copies}


@pytest.mark.long
@pytest.mark.parametrize("case", DIVIDED[1:4:2], ids=case_id)
def test_a_replica_whose_experts_no_token_chooses_takes_part(mixtures: dict[str, str], case: Case, tmp_path: Path) -> None:
    tensors = tensors_of(Path(mixtures["gpt-oss"]))
    for name in (name for name in tensors if name.endswith("router.bias")):
        tensors[name][:2] += 100  # the first replica's experts
    shutil.copytree(mixtures["gpt-oss"], tmp_path / "gpt-oss")
    save_file(tensors, tmp_path / "gpt-oss" / "model.safetensors", {"format": "pt"})
    answers = run_case({"gpt-oss": str(tmp_path / "gpt-oss")}, case, tmp_path / "written")
    expected = reference(str(tmp_path / "gpt-oss"), SETTINGS.clip_grad)
    check(answers, "gpt-oss", expected, tmp_path / "written", case.tp * case.dp, rel=3e-5)


@pytest.mark.parametrize(
    "case", [pytest.param(Case(4, 1, 1), marks=pytest.mark.long), Case(2, 2, 1, SEQUENCE), Case(2, 1, 2)], ids=case_id
)
def test_rows_that_belong_to_no_token_change_nothing(tmp_path: Path, case: Case) -> None:
    """The tensor ranks do not divide this vocabulary: losses, norms, decayed weights and exports."""
    root = tmp_path / "models"
    save_small(root / "tied", "qwen2", vocab_size=67, tie_word_embeddings=True)
    save_small(root / "untied", "qwen3", vocab_size=67)
    chosen = {path.name: str(path) for path in root.iterdir()}
    answers = run_case(chosen, case, tmp_path)
    for name, directory in chosen.items():
        check(answers, name, plain_training(directory, SETTINGS), tmp_path, case.tp * case.dp)
        assert all(answer[name]["filled up"] == 0 for answer in answers)


@pytest.mark.parametrize(
    "case",
    [DEEP[0], pytest.param(DEEP[1], marks=pytest.mark.long), *DEEP[2:4], pytest.param(DEEP[4], marks=pytest.mark.long)],
    ids=case_id,
)
def test_interleaved_steps_equal_plain_torch(deep_models: dict[str, str], case: Case, tmp_path: Path) -> None:
    """Micro-batches of different lengths, and of a number that is no multiple of the stages."""
    assert all(len({len(micro.tokens_T) for micro in batch.pack()}) > 1 for batch in DATA if len(batch.prompts) > 1)
    assert any(len(batch.pack()) % case.pp for batch in DATA)
    answers = run_case(deep_models, case, tmp_path)
    for name, directory in deep_models.items():
        check(
            answers,
            name,
            reference(directory, SETTINGS.clip_grad),
            tmp_path,
            case.tp * case.dp * case.options.get("cp", 1),
            rel=3e-5,
        )


def test_without_clipping_the_norm_is_still_reported(models: dict[str, str], tmp_path: Path) -> None:
    answers = run_case({"qwen2": models["qwen2"]}, Case(1, 2, 1), tmp_path, SETTINGS.model_copy(update={"clip_grad": 0.0}))
    check(answers, "qwen2", reference(models["qwen2"], 0.0), tmp_path, 1, rel=3e-5, apart=5e-4)


@pytest.mark.parametrize("tp,pp", [(2, 2), (1, 2)])
def test_a_gradient_that_is_not_finite_changes_nothing(models: dict[str, str], tp: int, pp: int) -> None:
    for message in run_ranks(4, "tests.gloo.jobs_training:refused_step", directory=models["qwen3"], tp=tp, pp=pp, data=DATA):
        assert "gradient norm is nan" in message and "learning rate" in message


def test_an_update_is_the_same_on_any_number_of_replicas(models: dict[str, str], tmp_path: Path) -> None:
    """Six minibatches of two or three rollouts: with four replicas some have none."""
    lengths = [(3, 9), (5, 2), (1, 7), (4, 4), (2, 8), (6, 1), (3, 3)]
    found = []
    for number, (world, tp, pp) in enumerate([(1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 1, 2)]):
        answers = run_ranks(
            world, "tests.gloo.jobs_training:updates", directory=models["qwen2"], target=str(tmp_path / str(number)), tp=tp,
            pp=pp, lengths=lengths,
        )  # fmt: skip
        reports = [reports for reports, _ in answers]
        assert reports[-1] == reports[-2 if world > 1 else -1], "the last stage of every replica knows the same"
        found.append((reports[-1], tensors_of(tmp_path / str(number))))
    (alone, weights), *others = found
    assert len(alone) == 6 and sum(report["tokens"] for report in alone) == 2 * sum(n for _, n in lengths)
    assert [report["first"] > 0 for report in alone] == [True] + [False] * 5
    for reports, found_weights in others:
        for ours, theirs in zip(reports, alone, strict=True):
            assert ours["tokens"] == theirs["tokens"] and ours["lr"] == theirs["lr"]
            for name in ("loss", "max_logp", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=2e-5), name
        assert max(float((found_weights[name] - weights[name]).abs().max()) for name in weights) < 2e-5


@pytest.mark.parametrize(("world", "tp", "pp", "layout"), [
    (1, 1, 1, {}), (2, 2, 1, SEQUENCE), (2, 1, 1, {}), pytest.param(4, 1, 1, {}, marks=pytest.mark.long),
    (1, 1, 1, FULL), (2, 1, 2, {}), pytest.param(2, 1, 1, {"cp": 2}, marks=pytest.mark.long),
], ids=["1", "TP2", "DP2", "DP4", "recompute", "PP2", "CP2"])  # fmt: skip
def test_an_update_that_was_begun_ahead_is_the_same_to_the_bit(
    models: dict[str, str], tmp_path: Path, world: int, tp: int, pp: int, layout: dict[str, Any]
) -> None:
    """Costs no forward pass more where the same batch was meant; nothing is begun where the pipeline has stages."""
    lengths = [(3, 9), (5, 2), (1, 7), (4, 4), (2, 8), (6, 1), (3, 3)]

    def run(begin: str) -> tuple[list[Any], dict[str, Tensor]]:
        options = {"begin": begin, "layout": TrainingLayoutConfig(**layout)}
        where = {"directory": models["qwen2"], "target": str(tmp_path / f"weights-{begin}"), "tp": tp, "pp": pp}
        answers = run_ranks(world, "tests.gloo.jobs_training:updates", lengths=lengths, **where, **options)
        return answers, tensors_of(tmp_path / f"weights-{begin}")

    (plain, weights), (same, same_weights), (others, others_weights) = run(""), run("same"), run("others")
    for found in (same_weights, others_weights):
        assert all(torch.equal(weights[name], found[name]) for name in weights)
    ahead = 0
    for (reports, (none, total)), (reports_same, (first, rest)), (reports_others, (wrong, all_of_it)) in zip(
        plain, same, others, strict=True
    ):
        assert reports == reports_same == reports_others
        assert none == 0 and first <= 1 and first + rest == total
        assert wrong <= 1 and all_of_it == total, "what was begun with another batch is not taken"
        ahead += first
    assert ahead == (0 if pp > 1 else min(world, 2 if tp > 1 else 3)), "replicas without rows have nothing to begin"


@pytest.mark.parametrize("tp", [1, 2])
def test_an_update_that_was_begun_can_be_abandoned(models: dict[str, str], tp: int) -> None:
    for seen in run_ranks(tp, "tests.gloo.jobs_training:begun_and_abandoned", directory=models["qwen2"], tp=tp):
        assert seen == [(True, False), (False, True), (True, False)]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rate_schedule(models: dict[str, str], decay: Any, warmup: int) -> None:
    config = OptimizerConfig(lr=4e-4, min_lr=1e-4, warmup_steps=warmup, decay=decay)
    options = {"directory": models["qwen2"], "config": config, "total_steps": 10, "steps": 14, "data": DATA[0]}
    (found,) = run_ranks(1, "tests.gloo.jobs_training:learning_rates", **options)
    expected = []
    for step in range(14):
        share = min(1.0, (step - warmup) / (10 - warmup))
        if step < warmup:
            expected.append(4e-4 / warmup + (4e-4 - 4e-4 / warmup) * step / warmup)
        elif decay == "constant":
            expected.append(4e-4)
        else:
            shape = 1 - share if decay == "linear" else (1 + math.cos(math.pi * share)) / 2
            expected.append(1e-4 + 3e-4 * shape)
    assert found == pytest.approx(expected)
    assert found[0] > 0, "the first step is one of the ramp"
