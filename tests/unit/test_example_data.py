"""The example's text: split by name, packed alike each time, whole or not there, evaluated token by token."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="the examples extra is not installed")

PRETRAIN = Path(__file__).parents[2] / "examples" / "pretrain"
VOCAB_SIZE = 300  # the 256 bytes, END and a few merges


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pretrain_{name}", PRETRAIN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


data = load_module("data")
model = load_module("model")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for index in range(120):
        path = folder / f"part{index % 7}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{index}(x):\n    return x + {index}  # naïve, with bytes above 127\n" * 4)
    (folder / "empty.py").write_text("")
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_f.py").write_text("assert True\n")
    return folder


@pytest.fixture
def cache(source: Path, tmp_path: Path) -> Iterator[Path]:
    yield data.prepare(source, tmp_path / "cache", VOCAB_SIZE)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_text_gives_the_same_bytes(source: Path, cache: Path, tmp_path: Path) -> None:
    again = data.prepare(source, tmp_path / "other", VOCAB_SIZE)
    assert again.name == cache.name
    assert files(again) == files(cache)


def test_a_cache_is_built_once_and_leaves_nothing_else(source: Path, cache: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert data.prepare(source, cache.parent, VOCAB_SIZE) == cache
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    assert list(cache.parent.iterdir()) == [cache]


def test_other_text_or_vocabulary_is_another_cache(source: Path, cache: Path) -> None:
    assert data.prepare(source, cache.parent, VOCAB_SIZE + 1) != cache
    (source / "part0" / "module0.py").write_text("changed = True\n")
    assert data.prepare(source, cache.parent, VOCAB_SIZE) != cache


def test_losing_the_race_takes_the_winner_s_cache(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    build = data._build

    def build_and_be_overtaken(texts: dict[str, bytes], folder: Path, vocab_size: int) -> None:
        build(texts, folder, vocab_size)
        monkeypatch.setattr(data, "_build", build)
        data.prepare(source, shared, vocab_size)

    monkeypatch.setattr(data, "_build", build_and_be_overtaken)
    folder = data.prepare(source, shared, VOCAB_SIZE)
    assert files(folder) == files(cache)
    assert list(shared.iterdir()) == [folder]


def test_a_failed_build_leaves_no_cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(data, "pack", fail)
    with pytest.raises(OSError, match="no space left"):
        data.prepare(source, tmp_path / "cache", VOCAB_SIZE)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_split_is_by_name_and_whole(source: Path, cache: Path) -> None:
    texts = data.read_texts(source)
    assert set(texts) == {f"part{i % 7}/module{i}.py" for i in range(120)}
    corpus = data.load(cache, context=8)
    validation = {name: texts[name] for name in data.validation_names(texts)}
    for split, count, names in (
        ("train", corpus.facts.train_tokens, set(texts) - set(validation)),
        ("validation", corpus.facts.validation_tokens, set(validation)),
    ):
        tokens = np.fromfile(cache / f"{split}.bin", dtype=np.uint16)
        assert len(tokens) == count
        ends = np.flatnonzero(tokens == corpus.end)
        assert ends[0] == 0
        runs = np.split(tokens, ends[1:])
        assert [corpus.tokenizer.decode(run[1:].tolist()).encode() for run in runs] == [texts[n] for n in sorted(names)]
    assert corpus.facts.validation_bytes == sum(map(len, validation.values()))
    assert corpus.facts.validation_gzip_bytes == sum(len(gzip.compress(text, 9)) for text in validation.values())


def test_a_few_files_still_give_one_to_validation() -> None:
    names = [f"{letter}.py" for letter in "abcdef"]
    held_out = data.validation_names(names)
    assert len(held_out) == 1
    assert data.validation_names(reversed(names)) == held_out


def test_too_little_text_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"1 text files .* too few to hold some out .* give --data a folder with more"):
        data.prepare(tmp_path, tmp_path / "cache", VOCAB_SIZE)


def test_training_windows_are_consecutive_with_targets_one_later(cache: Path) -> None:
    windows = data.load(cache, context=16).train()
    tokens = torch.from_numpy(np.fromfile(cache / "train.bin", dtype=np.uint16).astype(np.int64))
    assert len(windows) == (len(tokens) - 1) // 16
    assert torch.equal(torch.cat([window for window, _ in windows]), tokens[: 16 * len(windows)])
    assert torch.equal(torch.cat([targets for _, targets in windows]), tokens[1 : 16 * len(windows) + 1])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_evaluate_every_validation_token_once(cache: Path, world_size: int) -> None:
    corpus = data.load(cache, context=16)
    by_rank = [corpus.validation(4, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in by_rank}) == 1
    assert {tuple(part.shape) for batches in by_rank for batch in batches for part in batch} == {(4, 16)}
    tokens = np.fromfile(cache / "validation.bin", dtype=np.uint16).astype(np.int64)
    in_order = [batch for batches in zip(*by_rank, strict=True) for batch in batches]
    targets = torch.cat([targets.flatten() for _, targets in in_order])
    inputs = torch.cat([inputs.flatten() for inputs, _ in in_order])
    counted = targets != data.IGNORED
    assert targets[counted].tolist() == tokens[1:].tolist()
    assert inputs[counted].tolist() == tokens[:-1].tolist()


def test_the_model_is_causal_and_computes_in_a_dtype_that_the_processor_has() -> None:
    torch.manual_seed(0)
    small = model.LanguageModel(model.ModelConfig(vocab_size=32, dim=16, layers=2, heads=2, hidden=32))
    tokens = torch.randint(32, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = 31 - changed[:, 8:]
    before, after = small(tokens), small(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])

    loss = small.bfloat16()(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in small.parameters()} == {torch.bfloat16}
    arithmetic = model.arithmetic_dtype(torch.device("cpu"), torch.bfloat16)
    flags = torch.cpu.get_capabilities()
    assert (arithmetic == torch.bfloat16) == (flags.get("avx512_bf16", False) or flags.get("bf16", False))
    assert model.arithmetic_dtype(torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert model.arithmetic_dtype(torch.device("cpu"), torch.float32) == torch.float32
