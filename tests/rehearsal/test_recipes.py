"""The recipes: their files, the data as hubs lay it out, and every role at full size on fake CUDA tensors."""

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from benchmarks import recipes
from benchmarks.recipes import FOLDER, Recipe
from oppo_megatron.cli.main import main as oppo
from oppo_megatron.config.load import plain_settings
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.layout.placements import named_roles, role_placements, world_size
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.sim.clusters.reading import read_cluster
from tests.rehearsal.asking import Server
from tests.rehearsal.cuda_stub import compiler
from tests.rehearsal.test_memory_plan import MARGIN, planned_for, taken_by, wrong
from tests.support.configs import run_of

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TRAINED = [name for name in NAMES if Recipe.read(FOLDER / f"{name}.yaml").kind == "train"]


def recipe(name: str) -> Recipe:
    return Recipe.read(FOLDER / f"{name}.yaml")


def settings_of(name: str) -> dict[str, Any]:
    """Settings of a run, with every shape as a mapping."""
    loaded = recipe(name).settings()
    assert isinstance(loaded, TrainSettings)
    tree = plain_settings(loaded)
    for role in recipes.MODELS:
        if tree.get(role) and isinstance(path := tree[role]["init"], str):
            tree[role]["init"] = json.loads(Path(path).read_text())
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_its_gpus_as_it_says(name: str) -> None:
    read, settings = recipe(name), recipe(name).settings()
    config = settings.resolved() if isinstance(settings, TrainSettings) else settings
    assert config is not None
    gpus = read_cluster(read.cluster)
    ranks = world_size(config) if isinstance(config, TrainConfig) else config.parallel.num_ranks
    assert ranks <= gpus.num_ranks and (read.seconds is None) == (read.options is None)
    fullest = max(planned_memory(config, on_cpu=False)) / 1e9
    assert fullest < (1 - MARGIN) * gpus.gpu.memory_bytes / 1e9
    assert read.gigabytes == pytest.approx(fullest, rel=0.05), f"`python -m benchmarks.recipes {name}` writes today's figures"


def test_the_table_has_every_recipe_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(recipes.PAGE.read_text())
    monkeypatch.setattr(recipes, "PAGE", page)
    recipes.write_table(NAMES)
    assert page.read_text() == (FOLDER / "README.md").read_text()


def test_a_recipe_is_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: (FOLDER / f"{name}.yaml").read_text() for name in NAMES}
    read = [recipe(name) for name in NAMES]
    monkeypatch.setattr(Recipe, "path", property(lambda self: tmp_path / f"{self.name}.yaml"))
    for each in read:
        each.write()
        expected = texts[each.name].replace(str(FOLDER / f"{each.name}.yaml"), str(tmp_path / f"{each.name}.yaml"))
        assert (tmp_path / f"{each.name}.yaml").read_text() == expected


# Data, as the data sets' repositories hold them.

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}{% endif %}"
)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


def pairs(number: int) -> dict[str, Any]:
    question = f"What is {number}?"
    chosen, rejected = turns(question, "A number."), turns(question, f"It is {number}.")
    scores = {"score_chosen": 8.0, "score_rejected": 3.0}
    return {"prompt": question, "prompt_id": str(number), "chosen": chosen, "rejected": rejected, "messages": chosen, **scores}


def stack(number: int) -> dict[str, Any]:
    answers = {"response_j": "Use a list.", "response_k": f"Use {number} lists."}
    return {"qid": number, "question": f"How do I sort {number} words?", "date": "2020/01/01", "metadata": ["x"], **answers}


def code(number: int) -> dict[str, Any]:
    asked = f"Write a function that returns {number}."
    return {"seq_id": number, "instruction": asked, "output": "```", "code": "x", "entry_point": "f", "testcase": ["assert f()"]}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, many = tmp_path_factory.mktemp("hubs"), range(300)
    for split in ("train", "test"):
        sums = [{"question": f"What is {i} plus 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in many]
        write_parquet(root / f"gsm8k/main/{split}-00000-of-00001.parquet", sums)
        write_parquet(root / f"ultrafeedback_binarized/data/{split}_prefs-00000-of-00001.parquet", [pairs(i) for i in many])
        asked = [f"\n\nHuman: What is {i}?\n\nAssistant: " for i in many]
        dialogues = [{"chosen": f"{text}A number.", "rejected": f"{text}No."} for text in asked]
        (root / "hh-rlhf/helpful-base").mkdir(parents=True, exist_ok=True)
        with gzip.open(root / f"hh-rlhf/helpful-base/{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in dialogues)
    for part in ("rl", "reward"):
        write_parquet(root / f"stack-exchange-paired/data/{part}/train-00000-of-00020.parquet", [stack(i) for i in many])
    write_parquet(root / "opc-sft-stage2/educational_instruct/data-00000-of-00001.parquet", [code(i) for i in many])
    return root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, letters: PreTrainedTokenizerFast) -> Path:
    """Folders of all models that recipes name, each with the same small tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        for text in json.dumps(recipe(name).tree).split('"'):
            if text.startswith("${oc.env:MODELS,models}/"):
                letters.save_pretrained(root / text.rpartition("/")[2])
    return root


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    words = ["<|im_end|>", "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(kinds.BPE({word: number for number, word in enumerate(words)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    made.chat_template = CHAT
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_for_the_data_it_names(
    name: str, hubs: Path, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", str(models))
    monkeypatch.setenv("DATA", str(hubs))
    kind = recipe(name).kind
    given = [*recipe(name).overrides(), "runtime.device=cuda", f"run_dir={tmp_path / 'run'}"]
    assert oppo(["validate", str(FOLDER / f"{name}.yaml"), "--elsewhere", "--kind", kind, *given]) == 0
    shown = capsys.readouterr().out
    assert "0 rows set aside" in shown and ("Human: What is" in shown) == ("/hh-rlhf/" in json.dumps(recipe(name).tree))


@pytest.fixture(scope="module")
def measurements() -> Iterator[Server]:
    with closing(Server("holding", "Alone")) as found:
        yield found


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="needs g++, for torch's hooks of a CUDA device (Debian: g++)")
@pytest.mark.parametrize("name", TRAINED)
def test_no_role_takes_more_than_its_planned_memory_at_full_size(name: str, measurements: Server) -> None:
    """The plan is an upper bound: groups that share their prompts do not fill micro-batches."""
    settings = settings_of(name)
    config: TrainConfig = run_of(settings)
    for role in named_roles(config):
        placement = role_placements(config)[role]
        for stage in {0, placement.pp - 1}:
            rank = placement.rank(0, stage, 0)
            plan, taken = planned_for(config, role, rank), taken_by(measurements, settings, role, rank)
            assert not {kind for kind, (more, less) in wrong(taken, plan).items() if more > less}, f"{role} on rank {rank}"
            assert plan["weights"] == pytest.approx(taken["weights"], rel=MARGIN)
