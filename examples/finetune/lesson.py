"""What is learnt, and what the three versions share: the data, the model with or without adapters, a folder that appears whole.

The lesson: say in one sentence what Slipstream does with a key of DeepSpeed's JSON. Questions and answers are made of the table
that decides it (`slipstream.config.keys`), so nothing is downloaded. Keys that share an answer share a block or a reason; a part
of each such group is held out, and is answered rightly only by a model that has learnt what the others have in common.
"""

from __future__ import annotations

import argparse
import json
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

from slipstream.config import keys

HERE = Path(__file__).parent
LR = {"full": 2e-4, "lora": 2e-3}  # adapters begin at zero and take larger steps
MOST_OF_ONE_ANSWER = 12  # keys: or a third of the lesson would be the block of compression
HELD_OUT_EVERY = 4
IGNORED = -100  # a label that the loss leaves out


class Pair(NamedTuple):
    question: str
    answer: str


def lesson() -> tuple[list[Pair], list[Pair]]:
    """To learn from, and held out: every fourth key of those that share an answer."""
    groups: dict[str, list[Pair]] = {}
    for name, key in sorted(keys.table().items()):
        pair = Pair(f"What becomes of `{name}` in Slipstream?", _fate(key))
        groups.setdefault(_fate(key), []).append(pair)
    learnt: list[Pair] = []
    held_out: list[Pair] = []
    for group in groups.values():
        random.Random(0).shuffle(group)
        for number, pair in enumerate(group[:MOST_OF_ONE_ANSWER], start=1):
            (learnt if number % HELD_OUT_EVERY else held_out).append(pair)
    return learnt, held_out


def _fate(key: keys.Key) -> str:
    match key.fate:
        case keys.Fate.HONOURED:
            return "Honoured."
        case keys.Fate.NO_EFFECT:
            return f"No effect: {key.reason}."
        case keys.Fate.REFUSED:
            return f"Refused: {key.reason}. {key.remedy[:1].upper()}{key.remedy[1:]}."


def samples(tokenizer: Any, pairs: list[Pair]) -> list[dict[str, list[int]]]:
    """Conversations in the model's own form. Only the answer is to be learnt."""
    found = []
    for question, answer in pairs:
        prompt = tokenizer.apply_chat_template(turns(question), add_generation_prompt=True, return_dict=False)
        spoken = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        found.append({"input_ids": prompt + spoken, "labels": [IGNORED] * len(prompt) + spoken})
    return found


def turns(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You know Slipstream."}, {"role": "user", "content": question}]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Padded on the right, where a causal model does not look: no mask is needed."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows])

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED)}


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder of the model to start from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write: the model, or with lora its adapters")
    parser.add_argument("--mode", choices=LR, default="full", help="train every weight, or LoRA adapters on a frozen base")
    parser.add_argument("--steps", type=int, default=36)
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
def whole(folder: Path) -> Iterator[Path]:
    """A folder for all ranks to write into, which takes its name when everything is in it: what fails or is stopped leaves none."""
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
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    together()
