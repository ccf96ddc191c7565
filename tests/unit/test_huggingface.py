"""Hugging Face folders with wrong values: one sentence with file, key and value, whoever reads them."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs Hugging Face folders")
pytest.importorskip("tokenizers", reason="needs Hugging Face folders")

import slipstream
from slipstream.checkpoint import CheckpointError, convert
from slipstream.launch.cli import main
from tests import tiny_chat, toy
from tests.pool import run

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_running": 2, "kv_cache_bytes": "1M"}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole one, with an index and every optional file."""
    path = tiny_chat.write(tmp_path_factory.mktemp("folder"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5}))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    added = {"255": {"content": "<x>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "added_tokens_decoder": added, "chat_template": "x"}))
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    return path


class Changed:
    """The folder with another value in one file, for a while."""

    def __init__(self, folder: Path, file: str, key: str, value: Any) -> None:
        self.path, self.key, self.value = folder / file, key, value
        self.before = self.path.read_text()

    def __enter__(self) -> None:
        self.path.write_text(json.dumps({**json.loads(self.before), self.key: self.value}))

    def __exit__(self, *error: object) -> None:
        self.path.write_text(self.before)


def refusal(folder: Path) -> str:
    """What init_inference says of it; "" where it opens and answers."""
    try:
        with slipstream.init_inference(folder, **OPTIONS) as engine:
            engine.generate("a", max_new_tokens=1)
    except ValueError as error:
        return str(error)
    return ""


WRONG = [
    ("config.json", "head_dim", 10**9, "1000000000; it must be a whole number from 1 to 16,384"),
    ("config.json", "head_dim", 15, "even rotary dimension"),
    ("config.json", "hidden_size", None, "null; it must be a whole number"),
    ("config.json", "num_hidden_layers", "2", '"2"; it must be a whole number from 1 to 10,000'),
    ("config.json", "rms_norm_eps", [1e-5], r"\[1e-05\]; it must be a number"),
    ("config.json", "max_position_embeddings", 10**30, "it must be a whole number"),
    ("config.json", "tie_word_embeddings", 1, "1; it must be true or false"),
    ("config.json", "model_type", ["llama"], "it must be a text"),
    ("config.json", "rope_parameters", {"rope_type": "linear"}, "of type 'linear' lacks factor"),
    ("config.json", "rope_parameters", {"rope_type": "yarn", "factor": "4"}, 'rope_parameters: factor is "4"'),
    ("config.json", "eos_token_id", "2", "it must be a whole number .* or a list"),
    ("config.json", "text_config", {"hidden_size": 0}, "text_config: hidden_size is 0"),
    ("generation_config.json", "top_p", 0, "top_p is 0; it must be a number"),
    ("generation_config.json", "temperature", float("nan"), "temperature is NaN"),
    ("generation_config.json", "eos_token_id", {}, "eos_token_id is {}"),
    ("tokenizer_config.json", "chat_template", 3, "chat_template is 3"),
    ("tokenizer_config.json", "added_tokens_decoder", {"x": {}}, "added_tokens_decoder is .* it must be an object of tokens"),
    ("tokenizer_config.json", "bos_token", [], r"bos_token is \[\]"),
    (INDEX, "weight_map", None, "weight_map is null; it must be an object"),
    (INDEX, "weight_map", {"w": 3}, 'weight_map is {"w": 3}'),
    (INDEX, "weight_map", {"w": "/etc/passwd"}, "weight_map names '/etc/passwd'; it must name files in this folder"),
]


@pytest.mark.parametrize(("file", "key", "value", "words"), WRONG)
def test_a_wrong_value_is_named(file: str, key: str, value: Any, words: str, folder: Path) -> None:
    with Changed(folder, file, key, value), pytest.raises(ValueError, match=f"{key}.*{words}|{words}") as error:
        slipstream.init_inference(folder, **OPTIONS)
    assert "\n" not in str(error.value) and key in str(error.value) and len(str(error.value)) < 500
    assert refusal(folder) == ""


SCALARS = st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from([10**9, 10**30, 0.5, float("nan"), "", "x", "../x"])
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(["a", "3", "content"]), SCALARS, max_size=2)
FILES = st.sampled_from(["config.json", "config.json", "generation_config.json", "tokenizer_config.json", INDEX])


@settings(max_examples=40)
@given(file=FILES, number=st.integers(0, 99), value=VALUES)
def test_any_value_opens_or_is_one_sentence(folder: Path, file: str, number: int, value: Any) -> None:
    keys = sorted(json.loads((folder / file).read_text()))
    began = time.monotonic()
    with Changed(folder, file, keys[number % len(keys)], value):
        message = refusal(folder)
    assert "\n" not in message and len(message) < 500
    assert time.monotonic() - began < 20


def test_files_that_are_no_objects_are_said(folder: Path) -> None:
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX):
        before = (folder / file).read_bytes()
        for content in (b"[]", b"{", b"\xff", b"[" * 100_000):
            (folder / file).write_bytes(content)
            message = refusal(folder)
            assert message.startswith(f"{folder / file} ") and "\n" not in message
        (folder / file).write_bytes(before)


def load_for_training(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    slipstream.zero.load(model, folder)
    with pytest.raises(ValueError, match=r"weight_map is .*; it must be an object, each value a text"):
        toy.make(model, 3)


def test_whoever_reads_a_folder_says_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Changed(folder, INDEX, "weight_map", {"w": 3}):
        run(1, load_for_training, folder)
    plan = tmp_path / "config.json"
    plan.write_text('{"train_batch_size": 2}')
    with Changed(folder, "config.json", "hidden_size", "wide"):
        with pytest.raises(CheckpointError, match=r'config\.json: hidden_size is "wide"; it must be a whole number'):
            convert(folder, tmp_path / "converted", "slipstream")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        served = (["generate", str(folder), "x"], ["chat", str(folder)], ["serve", str(folder), "--port", port])
        for command in (*served, ["plan", str(plan), "--model", str(folder)]):
            capsys.readouterr()
            assert main(command) == 2
            (message,) = capsys.readouterr().err.splitlines()
            assert message.startswith(f'slipstream {command[0]}: {folder / "config.json"}: hidden_size is "wide"; it must be')
