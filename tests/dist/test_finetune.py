"""The fine-tuning example with a tiny model: in full, by the native loop. What needs other libraries: tests/clients/test_finetune.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_every_answer_that_is_held_out_was_heard_of_another_key(lesson: ModuleType) -> None:
    learnt, held_out = lesson.lesson()
    assert len(learnt) > 4 * len(held_out) > 100 and not {pair.question for pair in learnt} & {pair.question for pair in held_out}
    assert {pair.answer for pair in held_out} <= {pair.answer for pair in learnt}


def test_only_the_answer_is_learnt(lesson: ModuleType, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_chat.write(tmp_path))
    pair = lesson.Pair("Why?", "So.")
    (row,) = lesson.samples(tokenizer, [pair])
    assert tokenizer.decode(row["input_ids"]) == "system: You know Slipstream.<end>user: Why?<end>assistant: So.<end>"
    assert tokenizer.decode([label for label in row["labels"] if label != lesson.IGNORED]) == "So.<end>"
    batch = lesson.collate([row, {name: values[:3] for name, values in row.items()}])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, len(row["labels"])) and batch["labels"][1].eq(lesson.IGNORED).all()


def test_a_folder_is_whole_or_not_there(lesson: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), lesson.whole(tmp_path / "model") as folder:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def test_what_is_not_installed_is_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", EXAMPLE / "finetune.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "not installed: transformers" in done.stderr and "`make finetune`" in done.stderr
