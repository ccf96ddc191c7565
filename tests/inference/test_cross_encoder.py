"""Cross-encoders: scores of pairs as transformers' models for one label compute them, whatever pairs are together; HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import slipstream
from slipstream.inference.server.router import Router
from slipstream.inference.text import Tokenizer
from tests.inference.test_embedding import BERT, DISTIL, MODERN, native
from tests.inference.twins import SIZES

ONE = {"num_labels": 1, "pad_token_id": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "roberta": ("Roberta", BERT),
    "xlm-roberta": ("XLMRoberta", {**BERT, "type_vocab_size": 1}),
    "electra": ("Electra", {**BERT, "embedding_size": 40}),
    "distilbert": ("DistilBert", DISTIL),
    "modernbert": ("ModernBert", MODERN),
    "modernbert-mean": (
        "ModernBert",
        {**MODERN, "classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "silu"},
    ),
}
PAIRS = [("ab", "cdefg"), ("hello", "help"), ("a" * 20, "b"), ("", "x"), ("same", "same")]


def model_of(case: str, **more: Any) -> Any:
    family, sizes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **ONE, **more})
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def backend_of(case: str = "bert") -> tokenizers.Tokenizer:
    """Letters are tokens; [1] first [2] second [2]."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(i): i for i in range(3, 125)} | {"<s>": 1, "</s>": 2}, unk_token="~")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    pair = "<s> $A </s> </s> $B </s>" if "roberta" in case else "<s> $A </s> $B:1 </s>:1"
    around = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.post_processor = around  # type: ignore[assignment]
    return backend


def folder_of(path: Path, case: str = "bert", settings: Any = None, **more: Any) -> Path:
    model_of(case, **more).save_pretrained(path)
    backend_of(case).save(str(path / "tokenizer.json"))
    if settings:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return path


def logits_of(case: str, pairs: Any = PAIRS) -> torch.Tensor:
    model, backend, logits = model_of(case), backend_of(case), []
    for pair in pairs:
        encoded = backend.encode(*pair)
        types = {"token_type_ids": torch.tensor([encoded.type_ids])} if case in ("bert", "electra") else {}
        with torch.no_grad():
            logits.append(model(torch.tensor([encoded.ids]), **types).logits[0, 0])
    return torch.stack(logits)


@native
@pytest.mark.parametrize("case", CASES)
def test_scores_as_transformers(case: str, tmp_path: Path) -> None:
    """Of a folder and of a live model; each pair has the same bits alone and among others."""
    with slipstream.init_inference(folder_of(tmp_path, case), device="cpu") as engine:
        assert "scores pairs" in engine.description
        found = engine.engine.score(PAIRS)  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.tensor(found.scores), logits_of(case).sigmoid(), rtol=2e-4, atol=2e-4)
        assert found.num_tokens == sum(len(backend_of(case).encode(*pair)) for pair in PAIRS)
        assert [engine.score(first, [second])[0] for first, second in PAIRS] == found.scores
        assert len({round(score, 3) for score in found.scores}) == len(PAIRS)
        with pytest.raises(ValueError, match="scores pairs of texts and makes no vectors"):
            engine.embed("abc")
    live = model_of(case)
    live.__class__ = type("Mine", (type(live),), {})
    with slipstream.init_inference(live, tokenizer=str(tmp_path), device="cpu") as engine:
        assert engine.score("ab", ["cdefg"]) == pytest.approx(found.scores[:1], abs=1e-6)


def test_a_checkpoint(tmp_path: Path) -> None:
    model = model_of("bert")
    engine = slipstream.initialize(model=model, config={"train_batch_size": 1})[0]
    engine.save_checkpoint(str(tmp_path / "c"), "t")
    engine.destroy()
    backend_of().save(str(tmp_path / "tokenizer.json"))
    with slipstream.init_inference(str(tmp_path / "c"), tokenizer=str(tmp_path), device="cpu") as serving:
        scores = torch.tensor([serving.score(first, [second])[0] for first, second in PAIRS])
    torch.testing.assert_close(scores, logits_of("bert").sigmoid(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0"}},
    ],
)
def test_logits_if_the_model_says_so(settings: Any, tmp_path: Path) -> None:
    with slipstream.init_inference(folder_of(tmp_path, settings=settings), device="cpu") as engine:
        scores = torch.tensor(engine.score("hello", ["help", "cdefg"]))
    torch.testing.assert_close(scores, logits_of("bert", [("hello", "help"), ("hello", "cdefg")]), rtol=2e-4, atol=2e-4)


def test_other_classifiers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with slipstream.init_inference(folder_of(tmp_path / "three", num_labels=3), device="cpu") as engine:
        assert engine.embed("abc").shape == (64,)
        assert "the classifier of 3 labels is not computed: texts get the encoder's vectors" in caplog.text
    with pytest.raises(ValueError, match=r"the classifier's activation is Tanh; supported are Sigmoid, Identity"):
        slipstream.init_inference(
            folder_of(tmp_path / "tanh", settings={"sbert_ce_default_activation_function": "torch.nn.Tanh"}), device="cpu"
        )
    config = transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, num_labels=1)
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "decoder")
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification, a classifier over a decoder, which is not served"):
        slipstream.init_inference(tmp_path / "decoder", device="cpu")


@given(st.text("abcd", max_size=30), st.text("abcd", max_size=30), st.integers(3, 40))
def test_pairs_are_cut_as_tokenizers_cuts_them(first: str, second: str, most: int) -> None:
    cut = backend_of()
    cut.enable_truncation(most, strategy="longest_first")
    expected = cut.encode(first, second)
    assert Tokenizer(backend_of()).pair(first, second, most) == (expected.ids, expected.type_ids)
    assert len(Tokenizer(backend_of()).pair(first, second, 1)[0]) == 3, "no fewer than the special ones"
    whole = backend_of().encode(first, second)
    assert Tokenizer(backend_of()).pair(first, second) == (whole.ids, whole.type_ids)


def test_the_routes(tmp_path: Path) -> None:
    """Also behind a router."""
    pytest.importorskip("uvicorn")
    from tests.inference.test_replicas import Shared
    from tests.inference.test_server import call, serving

    with slipstream.init_inference(folder_of(tmp_path), device="cpu") as engine:
        scores = engine.score("hello", ["help", "ab", "same"])
        router = Router([Shared(engine.engine)], engine.tokenizer).open()
        for served in (engine.engine, router):
            with serving(served) as address:  # type: ignore[arg-type]

                def post(path: str, **fields: Any) -> Any:
                    reply = call(address, "POST", path, json.dumps(fields))
                    return json.loads(reply.body) | {"status": reply.status}

                ranked = post("/v1/rerank", query="hello", documents=["help", "ab", "same"])["results"]
                order = sorted(range(3), key=lambda i: -scores[i])
                assert [(one["index"], one["relevance_score"]) for one in ranked] == [(i, scores[i]) for i in order]
                found = post("/score", text_1="hello", text_2=["help", "ab", "same"])
                assert [one["score"] for one in found["data"]] == scores
                long = post("/v1/rerank", query="a" * 40, documents=["b" * 40])
                assert long["status"] == 400 and "pair 0 has 83 tokens" in long["error"]["message"]
                for kept, num in ((-1, 64), (10, 10)):
                    cut = post("/v1/rerank", query="a" * 40, documents=["b" * 40], truncate_prompt_tokens=kept)
                    assert cut["usage"]["prompt_tokens"] == num
                chat = post("/v1/completions", model=tmp_path.name, prompt="abc")["error"]["message"]
                assert "scores pairs of texts and does not generate" in chat and "/v1/rerank" in chat
                refused = post("/v1/embeddings", input="abc")
                assert refused["status"] == 400 and "makes no vectors" in refused["error"]["message"]
        router.close()
