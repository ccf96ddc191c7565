"""The fine-tuning example with a tiny model: full, native loop. The other loops: tests/clients/test_finetune.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import tiny_chat
from tests.dist.test_launch_agents import Launcher, launcher

__all__ = ["launcher"]  # a fixture

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune"
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'slipstream[hf]'")


@pytest.fixture(scope="module")
def lesson() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune_lesson", EXAMPLE / "lesson.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_in_full_it_writes_a_folder_that_is_served(launcher: Launcher, tmp_path: Path) -> None:
    import slipstream

    base, out = tiny_chat.write(tmp_path / "base"), tmp_path / "runs" / "full"
    options = ["--base", base, "--out", out, "--mode", "full", "--steps", "20"]
    code, said, err = launcher.run("--nproc", "2", str(EXAMPLE / "native.py"), *map(str, options))
    assert code == 0, err
    losses = [float(line.split("loss ")[1]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 2 and losses[1] < losses[0] < 6, said
    assert [path.name for path in out.parent.iterdir()] == ["full"]
    with slipstream.init_inference(str(out), threads=1) as engine:
        assert engine.generate(engine.chat_prompt([{"role": "user", "content": "Hello"}]), max_new_tokens=4).token_ids


def test_what_is_held_out_is_new_and_right(lesson: ModuleType) -> None:
    learnt, held_out = lesson.lesson()
    assert (learnt, held_out) == lesson.lesson() and len(held_out) == lesson.HELD_OUT
    wishes = [pair for pair in learnt if pair.system]
    everyday = [pair for pair in learnt if not pair.system]
    assert len(wishes) > 5 * len(everyday) > 50

    def kinds(pair: Any) -> set[str]:
        parts = {
            name: [each.json.replace("@", value) for value in each.values + each.new] for name, each in lesson.SETTINGS.items()
        }
        return {name for name, possible in parts.items() if any(part in pair.answer for part in possible)}

    assert all(lesson.accepted(pair.answer) for pair in wishes + held_out)
    assert not any(together <= kinds(pair) for pair in wishes for together in lesson.NEVER_TOGETHER)
    assert all(any(together <= kinds(pair) for together in lesson.NEVER_TOGETHER) for pair in held_out)
    assert set().union(*map(kinds, wishes)) == set().union(*map(kinds, held_out)) == set(lesson.SETTINGS)
    for setting in lesson.SETTINGS.values():
        for value in setting.new:
            part = setting.json.replace("@", value)
            assert not any(part in pair.answer for pair in wishes) and any(part in pair.answer for pair in held_out), part


def test_right_is_the_object_and_accepted_is_what_slipstream_trains_by(lesson: ModuleType) -> None:
    assert lesson.read('{"a": 2e-4}') == lesson.read('{"a":0.0002}') and lesson.read("{'a': 1}") is None
    assert lesson.accepted('{"zero_optimization": {"stage": 3}}')
    for wrong in ('{"zero_optimization": {"stage": 7}}', '{"zero": 3}', "{}", "[1]", '{"bf16": {"enabled": true}', "ZeRO"):
        assert not lesson.accepted(wrong), wrong


def test_only_the_answer_is_trained(lesson: ModuleType, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_chat.write(tmp_path))
    (row,) = lesson.samples(tokenizer, [lesson.Pair("Why?", "So.", "Be brief.")])
    assert tokenizer.decode(row["input_ids"]) == "system: Be brief.<end>user: Why?<end>assistant: So.<end>"
    assert tokenizer.decode([label for label in row["labels"] if label != lesson.IGNORED]) == "So.<end>"
    (plain,) = lesson.samples(tokenizer, [lesson.Pair("Why?", "So.", None)])
    assert tokenizer.decode(plain["input_ids"]) == "user: Why?<end>assistant: So.<end>"


def test_logits_are_made_where_an_answer_may_be_and_the_loss_is_the_same(lesson: ModuleType, tmp_path: Path) -> None:
    folder = tiny_chat.write(tmp_path)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = lesson.samples(tokenizer, [lesson.Pair("Why?", "So."), lesson.Pair("A longer question?", "A longer answer.")])
    batch = lesson.collate(rows)
    length = max(len(row["input_ids"]) for row in rows)
    assert batch["input_ids"].shape == (2, length) and batch["labels"].shape == (2, len(batch["logits_to_keep"]))
    labels = torch.tensor([row["labels"] + [lesson.IGNORED] * (length - len(row["labels"])) for row in rows])
    with torch.no_grad():
        loss, reference = model(**batch).loss, model(input_ids=batch["input_ids"], labels=labels).loss
    assert len(batch["logits_to_keep"]) < length - 20
    torch.testing.assert_close(loss, reference)


def test_a_folder_is_whole_or_not_there(lesson: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), lesson.partial_folder(tmp_path / "model") as folder:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())
    for content in ("first", "second"):
        with lesson.partial_folder(tmp_path / "model") as folder:
            folder.mkdir()
            (folder / content).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/second"]


def test_a_missing_package_is_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", EXAMPLE / "finetune.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "not installed: transformers" in done.stderr and "`make finetune`" in done.stderr
