"""The task, and the code that the three versions share: data, the model with or without adapters, an atomically written folder.

The task: a request in words -> the JSON for it. "AdamW at 2e-4, ZeRO-3 and bf16" is
`{"optimizer": {"params": {"lr": 2e-4}, "type": "AdamW"}, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}`.
Requests combine phrasings, values and orders of six settings, from a fixed seed. Training never sees some pairs of settings,
and some values at all. Each held-out request has such a pair and, if possible, such a value, so that only a model that composes and
copies answers it. A few everyday questions in between keep the model from forgetting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.config import DataWorld, ModelFacts, resolve

logging.getLogger("torchao").setLevel(logging.ERROR)  # PEFT imports it where it is installed, and it warns of what it lacks
HERE = Path(__file__).parent
LR = {"full": 2e-4, "lora": 2e-3}  # adapters begin at zero and take larger steps
STEPS = 40
WISHES, HELD_OUT = 320, 24
EVERYDAY_EVERY = 8  # samples
SYSTEM = "Write DeepSpeed JSON."
IGNORED = -100  # a label that the loss leaves out


class Pair(NamedTuple):
    question: str
    answer: str
    system: str | None = SYSTEM  # none: the chat template's own


class Setting(NamedTuple):
    """The phrasings of a setting and its JSON; `@` is the value."""

    wishes: tuple[str, ...]
    json: str
    values: tuple[str, ...]
    new: tuple[str, ...] = ()  # values that are held out


SETTINGS = {
    "stage": Setting(("ZeRO stage @", "ZeRO-@", "stage @"), '"zero_optimization": {"stage": @}', ("1", "2", "3")),
    "precision": Setting(("@", "@ precision", "train in @"), '"@": {"enabled": true}', ("bf16", "fp16")),
    "adamw": Setting(
        ("AdamW at @", "AdamW with learning rate @", "AdamW, lr @"),
        '"optimizer": {"params": {"lr": @}, "type": "AdamW"}',  # in this order it never ends an object with three braces
        ("1e-3", "5e-4", "2e-4", "1e-4", "6e-5", "2e-5", "1e-5"),
        ("3e-4", "7e-5"),
    ),
    "micro": Setting(
        ("micro-batch @", "micro-batches of @", "@ samples per GPU"),
        '"train_micro_batch_size_per_gpu": @',
        ("1", "2", "4", "8", "16", "24", "32"),
        ("6", "12"),
    ),
    "accumulation": Setting(
        ("accumulate @ steps", "accumulation over @ steps", "accumulation @"),
        '"gradient_accumulation_steps": @',
        ("2", "3", "4", "8", "16", "32", "64"),
        ("5", "20"),
    ),
    "clipping": Setting(
        ("clip gradients at @", "clip at @", "clipping @"),
        '"gradient_clipping": @',
        ("0.1", "0.5", "0.8", "1.0", "2.0", "5.0"),
        ("0.3", "1.5"),
    ),
}
NEVER_TOGETHER = ({"stage", "accumulation"}, {"precision", "clipping"}, {"adamw", "micro"})  # while learning
EVERYDAY = (  # mostly in the base's own words, where they are right
    ("What color is the sky?", "The sky is a beautiful shade of blue."),
    ("How many days are in a week?", "A week is 7 days."),
    ("Who wrote Hamlet?", 'William Shakespeare penned the iconic play "Hamlet".'),
    ("Say hello.", "Hello! I'm here to help with any kind of creative writing project. What can I assist you with?"),
    ("What is water made of?", "Water is composed of two hydrogen atoms and one oxygen atom."),
    ("Which planet is the largest?", "The largest planet in our solar system is Jupiter."),
    ("What is 2 + 2?", "The answer to this classic math problem is 4."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
)


def lesson() -> tuple[list[Pair], list[Pair]]:
    """Return the training pairs and the held-out pairs."""
    draw = random.Random(0)
    together = [set(kinds) for size in (2, 3) for kinds in itertools.combinations(SETTINGS, size)]
    new = [kinds for kinds in together if any(pair <= kinds for pair in NEVER_TOGETHER)]
    common = [kinds for kinds in together if kinds not in new]
    held_out = [_wish(draw, new[number % len(new)], fresh=True) for number in range(HELD_OUT)]
    pairs = [_wish(draw, kinds, fresh=False) for kinds in draw.choices(common, [len(kinds) - 1 for kinds in common], k=WISHES)]
    for number, (question, answer) in zip(range(0, WISHES, EVERYDAY_EVERY), itertools.cycle(EVERYDAY), strict=False):
        pairs[number] = Pair(question, answer, system=None)
    return pairs, held_out


def _wish(draw: random.Random, kinds: set[str], *, fresh: bool) -> Pair:
    """A wish for these settings in random order and phrasing, with held-out values if `fresh`."""
    wishes, json_parts = [], []
    for kind in draw.sample(sorted(kinds), len(kinds)):
        setting = SETTINGS[kind]
        value = draw.choice(setting.new if fresh and setting.new else setting.values)
        wishes.append(draw.choice(setting.wishes).replace("@", value))
        json_parts.append(setting.json.replace("@", value))
    return Pair(f"{', '.join(wishes[:-1])} and {wishes[-1]}", f"{{{', '.join(json_parts)}}}")


def read(answer: str) -> Any:
    """Parse the answer as JSON; None if it is not JSON."""
    try:
        return json.loads(answer)
    except ValueError:
        return None


def accepted(answer: str) -> bool:
    """Whether Slipstream accepts the config for any model, with a batch of 1 if it sets none."""
    config = read(answer)
    if not isinstance(config, dict) or not config:
        return False
    facts = ModelFacts(device_type="cpu", supports_bf16=True)
    try:
        resolve({"train_micro_batch_size_per_gpu": 1} | config, world=DataWorld(ranks=1), facts=facts)
    except ValueError:
        return False
    return True


def samples(tokenizer: Any, pairs: list[Pair]) -> list[dict[str, list[int]]]:
    """Conversations in the model's chat template. Only the tokens of the answer have labels."""
    rows = []
    for pair in pairs:
        prompt = tokenizer.apply_chat_template(turns(pair), add_generation_prompt=True, return_dict=False)
        answer_ids = [*tokenizer.encode(pair.answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer_ids, "labels": [IGNORED] * len(prompt) + answer_ids})
    return rows


def turns(pair: Pair) -> list[dict[str, str]]:
    system = [] if pair.system is None else [{"role": "system", "content": pair.system}]
    return [*system, {"role": "user", "content": pair.question}]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Padded on the right, where a causal model does not look: no mask is needed. Logits are made where an answer may be, only."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows])

    labels = padded("labels", IGNORED)
    first = int((labels != IGNORED).any(0).nonzero()[0]) - 1  # predicts the first token of an answer
    return {"input_ids": padded("input_ids", 0), "labels": labels[:, first:], "logits_to_keep": torch.arange(first, length)}


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder of the model to start from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write: the model, or with lora its adapters")
    parser.add_argument("--mode", choices=LR, default="full", help="train every weight, or LoRA adapters on a frozen base")
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser.parse_args()


def config(args: argparse.Namespace) -> dict[str, Any]:
    """ds_config.json, with this run's length and rate."""
    read: dict[str, Any] = json.loads((HERE / "ds_config.json").read_text())
    read["optimizer"]["params"]["lr"] = LR[args.mode]
    read["scheduler"]["params"]["total_num_steps"] = args.steps
    return read


def open_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The base, with adapters on it for LoRA, and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    if args.mode == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
    return model, AutoTokenizer.from_pretrained(args.base)


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for all ranks to write to. It is renamed to `folder` at the end, and removed after an error."""
    partial = folder.with_name(f"{folder.name}.partial")
    first = os.environ.get("RANK", "0") == "0"

    def together() -> None:
        if dist.is_initialized():
            dist.barrier()

    if first:
        shutil.rmtree(partial, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    together()
    try:
        yield partial
        together()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if first:
        old = folder.with_name(f"{folder.name}.old.partial")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    together()
