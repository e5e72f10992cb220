"""The data sets of the paper's five tasks in their own form, small, and a tiny policy with a tokenizer of these texts."""

import json
import random
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.support.hf import save_tiny, tiny_config
from tests.support.tokenizers import save_byte_level

WORDS = "the cat dog sun tree water plant rock stone light heat moves grows falls eats burns melts cold warm red blue".split()
ROWS = 12
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def sentence(rng: random.Random, least: int = 3, most: int = 8) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def hellaswag(rng: random.Random) -> dict[str, Any]:
    context = f"A {sentence(rng)} [title] and then"
    return {
        "activity_label": sentence(rng, 1, 2), "ctx_a": context, "ctx_b": sentence(rng, 1, 3),
        "endings": [sentence(rng) + "." for _ in range(4)], "label": str(rng.randrange(4)),
    }  # fmt: skip


def arc(rng: random.Random) -> dict[str, Any]:
    labels = list("ABCD")[: rng.randint(3, 4)]
    choices = {"text": [sentence(rng, 1, 5) for _ in labels], "label": labels}
    return {
        "id": f"q{rng.randrange(10**6)}",
        "question": sentence(rng) + "?",
        "choices": choices,
        "answerKey": rng.choice(labels),
    }


def truthfulqa(rng: random.Random) -> dict[str, Any]:
    def targets(number: int, right: int) -> dict[str, Any]:
        return {"choices": [sentence(rng) + "." for _ in range(number)], "labels": [1] * right + [0] * (number - right)}

    return {"question": sentence(rng) + "?", "mc1_targets": targets(4, 1), "mc2_targets": targets(rng.randint(4, 7), 2)}


def gsm8k(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(20), rng.randrange(20)
    return {
        "question": f"A cat has {a} rocks and a dog has {b}. How many?",
        "answer": f"{a} and {b} is <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
    }


TASKS = {
    "hellaswag": (hellaswag, ("train", "validation")),
    "arc_easy": (arc, ("train", "validation", "test")),
    "arc_challenge": (arc, ("train", "validation", "test")),
    "truthfulqa_mc2": (truthfulqa, ("validation",)),
    "gsm8k": (gsm8k, ("train", "test")),
}  # fmt: skip


def write_data(folder: Path) -> Path:
    rng = random.Random(7)
    for name, (row, splits) in TASKS.items():
        (folder / name).mkdir(parents=True)
        for split in splits:
            rows = [row(rng) for _ in range(30 if split == "train" else ROWS)]
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def write_policy(folder: Path, seed: int = 0) -> Path:
    rng = random.Random(8)
    texts = [sentence(rng) + "?" for _ in range(200)] + [gsm8k(rng)["answer"] for _ in range(40)]
    save_byte_level(folder, texts, 512, pad_token="<|end|>", chat_template=TEMPLATE)
    tiny_config("qwen2").save_pretrained(folder)  # transformers chooses the tokenizer's class by it
    largest = max(AutoTokenizer.from_pretrained(folder).get_vocab().values())
    save_tiny(folder, "qwen2", seed=seed, vocab_size=largest + 1, max_position_embeddings=2048)
    return folder
