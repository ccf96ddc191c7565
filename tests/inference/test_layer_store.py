"""Weights larger than memory: layers on disk give the bits of layers in memory, within the stated memory."""

from __future__ import annotations

import gc
import logging
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.inference import draft_model, load
from slipstream.inference.native import NativeDecoder
from slipstream.inference.on_disk import WeightMemory, choose
from slipstream.inference.weights import LayerWeights
from slipstream.launch import cli
from slipstream.ops import build
from slipstream.ops.disk import DiskError, aligned
from tests import tiny_chat
from tests.inference import test_adapters
from tests.inference.test_models import CASES
from tests.inference.test_native import Requests
from tests.inference.twins import SIZES, tiny
from tests.unit import test_disk

pytestmark = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)
disk = test_disk.folder  # a fixture: an empty folder on a real disk
LAYERS = 5
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 2, "kv_cache_bytes": "1M", "token_budget": 16, "max_running": 4}
PROMPTS = [[5, 6, 7], list(range(1, 40)), [9] * 17, [3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("Llama", **SIZES | {"num_hidden_layers": LAYERS}).bfloat16().save_pretrained(path)
    return path


def answers(folder: Path, **options: Any) -> tuple[list[Any], str]:
    """Tokens and log-probabilities of concurrent requests: parts of prompts and answers share forwards of 16 tokens."""
    with slipstream.init_inference(folder, **OPTIONS | options) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=6, ignore_eos=True, logprobs=2, temperature=0.0)
        return [(one.token_ids, one.logprobs) for one in found], engine.description


def own_files() -> list[str]:
    """The deleted files that this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing's own
            continue
    return sorted(link for link in links if link.endswith("(deleted)"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def least(folder: Path, **options: Any) -> tuple[int, int]:
    """The fewest bytes that work, and those of all weights, as the refusal names them."""
    with pytest.raises(ValueError, match=r"weights_bytes \(0\) is less than") as refused:
        slipstream.init_inference(folder, weights_bytes=0, **OPTIONS | options)
    least, whole = re.findall(r"give at least ([\d,]+); all weights have ([\d,]+)", str(refused.value))[0]
    return int(least.replace(",", "")), int(whole.replace(",", ""))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_answers_are_those_of_layers_in_memory(dtype: str, folder: Path, disk: str) -> None:
    expected, description = answers(folder, dtype=dtype)
    assert "on disk" not in description
    fewest, whole = least(folder, dtype=dtype)
    for memory, stored in ({"weights_folder": disk}, LAYERS), ({"weights_bytes": whole}, 0), ({"weights_bytes": whole - 1}, 3):
        if stored == 3 and dtype != "bf16":
            continue
        found, description = answers(folder, dtype=dtype, **memory)
        assert found == expected
        assert (f"{stored} of {LAYERS} layers on disk" in description) == bool(stored), description
    assert fewest < whole and not os.listdir(disk)


@pytest.mark.parametrize("case", ["llama-biases-tied", "gemma2", "mixtral", "qwen2-moe-sparse", "deepseek"])
def test_every_kind_of_layer_passes_through_the_slots(case: str, tmp_path: Path, disk: str) -> None:
    """Layers of different sizes, too: dense ones beside mixtures, and heads' own matrices of latent attention."""
    if case == "deepseek":
        sizes = {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        more = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_hidden_layers": 4}
        model = tiny("DeepseekV3", **SIZES | sizes | experts | more)
    else:
        family, changes = CASES[case]
        model = tiny(family, **SIZES | changes | {"num_hidden_layers": 4})
    model.save_pretrained(tmp_path / "model")
    expected, _ = answers(tmp_path / "model", dtype="int8")
    found, description = answers(tmp_path / "model", dtype="int8", weights_folder=disk)
    assert found == expected
    assert "4 of 4 layers on disk" in description


def test_adapters_and_drafts(tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "best_number", lambda likely, most, *_: most)  # not by the time that a forward takes
    model = test_adapters.llama(num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    test_adapters.write(tmp_path / "red", model, test_adapters.projections(4))
    options = OPTIONS | {"draft": tmp_path / "model", "adapters": {"red": tmp_path / "red"}, "token_budget": 64}
    found: list[Any] = []
    for memory in ({}, {"weights_folder": disk}):
        with slipstream.init_inference(tmp_path / "model", **options, **memory) as engine:
            settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}
            found.append([[one.token_ids for one in engine.generate(PROMPTS, adapter=name, **settings)] for name in ("red", None)])
            assert ("layers on disk" in engine.description) == bool(memory)
            assert engine.engine.stats().accepted_tokens
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_layers_are_chosen() -> None:
    """As few as the memory allows, at even distances, the last one among them."""
    sizes = [4096] * 8
    slots = 2 * 4096
    assert choose(sizes, 100, 8 * 4096 + 100) == []
    assert choose(sizes, 100, None) == choose(sizes, 100, slots + 100) == list(range(8))
    assert choose(sizes, 100, slots + 100 + 5 * 4096) == [2, 5, 7]
    assert choose(sizes, 100, slots + 99 + 5 * 4096) == [1, 3, 5, 7]
    for sizes, most in (([100, 5000] * 9, 2 * 8192), ([4096, 4096], 8192), ([10], 10), ([], 0)):
        with pytest.raises(ValueError, match=rf"give at least {most + 7:,};"):
            choose(sizes, 7, most + 6)
        assert choose(sizes, 7, most + 7) == (list(range(18)) if len(sizes) == 18 else [])


def in_parts(folder: Path, nbytes: int | None, place: str, spy: Callable[[int, int], None] = lambda *_: None) -> NativeDecoder:
    """The folder's decoder with layers on disk. `spy` sees the number of each layer that is read, and how many others are held."""
    loaded, matrices = load.load(folder, by_layer=True), list[Any]()
    read = loaded.weights.read_layer
    assert read is not None and all(layer.q.is_meta for layer in loaded.weights.layers)  # type: ignore[union-attr]

    def spied(index: int) -> LayerWeights:
        spy(index, sum(matrix() is not None for matrix in matrices))
        layer = read(index)
        matrices.append(weakref.ref(layer.q))
        return layer

    weights = replace(loaded.weights, read_layer=spied)
    return NativeDecoder(loaded.config, weights, num_blocks=16, threads=2, memory=WeightMemory(nbytes, place))


def test_memory_holds_what_was_stated(folder: Path, disk: str) -> None:
    """No more than a layer is held beside what is packed while layers are read; afterwards, the slots and the layers that stay."""
    alive: list[int] = []

    def spy(_: int, others: int) -> None:
        alive.append(others)

    fewest, whole = least(folder)
    plain = in_parts(folder, whole, disk)
    per_layer = sum(len(tensor) for tensor in plain._tensors if tensor.dtype == torch.uint8) // LAYERS
    for nbytes in (fewest, whole - 1):
        runner = in_parts(folder, nbytes, disk, spy)
        assert runner.layer_store is not None
        held = sum(slot.nbytes for slot in runner.layer_store._slots) + runner._embed.nbytes
        held += sum(tensor.nbytes for tensor in runner._tensors if tensor.dtype == torch.uint8)  # packed
        assert whole - 3 * per_layer < held <= nbytes if nbytes > fewest else held <= nbytes
        runner.close()
    assert alive == [0] * 2 * LAYERS
    plain.close()


def test_a_forward_reads_each_stored_layer_once(folder: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = in_parts(folder, None, disk)
    store = runner.layer_store
    assert store is not None
    seen: list[int] = []
    read = store._disk.read
    monkeypatch.setattr(store._disk, "read", lambda parts: seen.append(parts[0][0]) or read(parts))  # type: ignore[func-returns-value]
    side = Requests(runner, 0)
    for length in (40, 1, 3):
        side.run([(side.request([5] * length), 0, length)])
    offsets = store._offsets[:-1]
    assert seen == (offsets * 4)[2 : 2 + 3 * LAYERS]  # the first two were read before; the next forward's are, too
    runner.close()


def test_a_failed_read_ends_its_forward_only(folder: Path, disk: str) -> None:
    runner = in_parts(folder, None, disk)
    store = runner.layer_store
    assert store is not None

    def run() -> torch.Tensor:
        side = Requests(runner, 0)
        return side.run([(side.request([5, 6]), 0, 2)])[0]

    expected, content = run(), aligned(store.nbytes)
    store._disk.read([(0, content)]).wait()
    os.truncate(store._disk._file, store._offsets[3])
    for _ in range(2):
        with pytest.raises(DiskError, match="the file was truncated by another process"):
            run()
    os.truncate(store._disk._file, store.nbytes)
    store._disk.write([(0, content)]).wait()
    assert run().equal(expected)
    runner.close()


def test_closing_frees_the_file_and_the_slots(folder: Path, disk: str) -> None:
    files, running = own_files(), threads()
    engine = slipstream.init_inference(folder, weights_folder=disk, **OPTIONS)
    assert any(disk in one for one in own_files())
    engine.generate([5, 6], max_new_tokens=2, temperature=0.0)
    runner: Any = engine.engine.runner
    engine.close()
    assert own_files() == files
    assert not runner.layer_store._slots
    del engine, runner
    gc.collect()
    assert threads() <= running


def test_an_interrupted_load_leaves_nothing(folder: Path, disk: str) -> None:
    files, running = own_files(), threads()

    def stop(index: int, _: int) -> None:
        assert any(disk in one for one in own_files()), "the file exists before a layer is read"
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_parts(folder, None, disk, stop)
    gc.collect()
    assert (own_files(), os.listdir(disk)) == (files, []) and threads() <= running


def test_what_layers_on_disk_do_not_go_with(folder: Path, disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All by name, before a layer is read."""
    monkeypatch.setattr(NativeDecoder, "_layer", lambda *_: pytest.fail("a layer was read"))

    def refused(message: str, model: Any = folder, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            slipstream.init_inference(model, **OPTIONS | {"weights_folder": disk} | options)

    refused("the LlamaForCausalLM is in memory already; give its folder", tiny("Llama", **SIZES))
    refused("expert_cache_bytes keeps experts on disk; leave out one of the two", expert_cache_bytes="1M")
    nowhere = "weights_folder: there is no folder '.*nowhere' that can be written; create it, on a local disk"
    refused(nowhere, weights_folder=tmp_path / "nowhere")
    refused(nowhere, weights_bytes="1G", weights_folder=tmp_path / "nowhere")  # also where all layers fit in memory
    monkeypatch.setattr(slipstream.ops.disk, "num_free", lambda _: 4096)
    refused("has 4096 bytes free of the [0-9]+ needed; free space there or use another folder")
    monkeypatch.undo()
    monkeypatch.setattr(NativeDecoder, "_layer", lambda *_: pytest.fail("a layer was read"))
    tiny("GPTBigCode", vocab_size=64, n_embd=64, n_layer=1, n_head=4).save_pretrained(tmp_path / "other")
    refused("weights_bytes, weights_folder .* need the native kernels", tmp_path / "other")
    with pytest.raises(TypeError, match="weights_folder is 3; it must be a folder on a disk"):
        slipstream.init_inference(folder, weights_folder=3)  # type: ignore[arg-type]


def test_new_weights_and_outputs_are_refused(folder: Path, disk: str) -> None:
    with slipstream.init_inference(folder, weights_folder=disk, **OPTIONS) as engine:
        with pytest.raises(ValueError, match="cannot update its weights: layers of it are on disk; open it without weights_bytes"):
            engine.update_weights([])
        with pytest.raises(ValueError, match="computes no outputs of tensors: layers of it are on disk"):
            engine(torch.tensor([[1, 2]]))


def test_deepspeeds_block(folder: Path, disk: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "device"}
    block: dict[str, Any] = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": disk, "buffer_count": 5}}
    with caplog.at_level(logging.WARNING), slipstream.init_inference(folder, {"zero": block}, **options) as engine:
        assert f"{LAYERS} of {LAYERS} layers on disk" in engine.description
    assert "zero's buffer_count have no effect here: weights_bytes bounds the memory" in caplog.text
    with slipstream.init_inference(folder, zero={"stage": 3, "offload_param": {"device": "cpu"}}, **options) as engine:
        assert "on disk" not in engine.description
    for block, message in (
        ({"stage": 3}, "weights are not sharded, but tp_size cuts the model"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "weights are not sharded"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "has device nvme and no nvme_path"),
    ):
        with pytest.raises(ValueError, match=message):
            slipstream.init_inference(folder, zero=block, **options)
    assert slipstream.inference.initialize._offloaded(0) == slipstream.inference.initialize._offloaded({"stage": 0}) == {}


def test_the_command_line(folder: Path, disk: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = str(tiny_chat.write(tmp_path))
    command = ["generate", str(folder), "One", "--tokenizer", tokenizer, "--device", "cpu", "--max-tokens", "2"]
    assert cli.main([*command, "--weights-folder", disk]) == 0
    assert f"{LAYERS} of {LAYERS} layers on disk" in capfd.readouterr().err
    assert cli.main([*command, "--weights-bytes", "1K"]) != 0
    assert "weights_bytes (1,024) is less than the embedding and the head" in capfd.readouterr().err
