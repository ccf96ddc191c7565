"""Configurations as they are out there: at least 96 % are accepted, and each refusal is a sentence with a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slipstream.compat.engine import tolerant
from slipstream.config import DataWorld, ModelFacts, Plan, resolve
from slipstream.config.arguments import read_config
from slipstream.config.text import read_json
from slipstream.train.recipe import rehearse
from tests.data.configs import REFUSED, TEXTS

WORLD = DataWorld(ranks=2)
FACTS = ModelFacts(device_type="cuda", supports_bf16=True, ahead=True)
REMEDY = re.compile(r"\b(set|drop|use|give|write|remove|keep|turn|did you mean|known here|is derived)\b")


def planned(text: str) -> Plan:
    """As `deepspeed.initialize` reads it and `slipstream plan` goes on where a training loop would fill something in."""
    raw = read_json(text, "ds_config.json").value
    plan = resolve(tolerant(raw), world=WORLD, facts=FACTS)
    assert plan.batch.train_batch_size > 0
    return plan


def test_the_corpus_is_large_and_its_files_differ() -> None:
    texts = [*TEXTS.values(), *(text for text, _ in REFUSED.values())]
    assert len(texts) >= 100 and len({text.replace(" ", "") for text in texts}) == len(texts)


def test_at_least_96_percent_are_accepted() -> None:
    refused = {}
    for name, text in TEXTS.items() | {name: text for name, (text, _) in REFUSED.items()}.items():
        try:
            planned(text)
        except ValueError as error:
            refused[name] = str(error)
    assert set(refused) == set(REFUSED), {name: refused.get(name) for name in set(refused) ^ set(REFUSED)}
    accepted = len(TEXTS) / (len(TEXTS) + len(REFUSED))
    assert accepted >= 0.96, f"{accepted:.1%}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence_with_a_remedy(name: str) -> None:
    text, named = REFUSED[name]
    with pytest.raises(ValueError) as error:
        planned(text)
    message = str(error.value)
    assert named in message and REMEDY.search(message) and "\n" not in message and len(message) < 400, message
    assert len(re.findall(r"\.\s+[A-Z]", message)) == 0, f"more than one sentence: {message}"


def test_what_does_nothing_is_said() -> None:
    for name, key in (
        ("llava-offload-param-2", "zero_optimization.offload_param"),
        ("megatron-partition-activations", "activation_checkpointing.partition_activations"),
        ("little-node-local", "checkpoint.use_node_local_storage"),
        ("bf16-hysteresis", "bf16.hysteresis"),
        ("opt-level", "fp16.opt_level"),
        ("own-keys-0", "model_name"),
        ("comment-keys", "_optimizer"),
        ("no-batch-size-little", "no batch size"),
    ):
        plan = planned(TEXTS[name])
        notes = [note for note in (*plan.idle, *plan.notes) if key in note]
        assert len(notes) == 1, (name, notes)


def test_the_optimizers_and_schedules_of_accepted_files_can_be_built() -> None:
    for name in ("bert", "bert-lamb", "trainer-3-warmup", "one-cycle", "cosine", "schedule-by-the-loop", "strings", "sgd"):
        rehearse(planned(TEXTS[name]))


def test_comments_reach_the_reader_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    for name in ("comments", "trailing-comma"):
        file.write_text(TEXTS[name])
        raw, notes, _ = read_config(file)
        assert len(notes) == 1 and planned(json.dumps(raw)) is not None
