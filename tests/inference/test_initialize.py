"""`init_inference`: what a person has and asks for, as an engine that answers."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from slipstream.attention import use_sparse_attention
from slipstream.inference import draft_model, init_inference
from tests import toy
from tests.inference.twins import NEW, PROMPTS, SIZES, VOCAB, tiny
from tests.pool import run

GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTBigCode": GPT2 | {"pad_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
}


@pytest.mark.parametrize(("family", "forward"), [("Llama", "native kernels, 3 threads"), ("GPTBigCode", "transformers' forward")])
def test_threads(family: str, forward: str) -> None:
    answers = []
    for threads in (1, 3):
        with init_inference(tiny(family, **MODELS[family]), device="cpu", threads=threads) as engine:
            answers.append([one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=NEW)])
            assert torch.get_num_threads() == threads
    assert f"fp32, {forward}" in engine.description
    assert answers[0] == answers[1]


def test_models_that_cannot_answer() -> None:
    with pytest.raises(ValueError, match="threads is 2, but the model runs on cuda"):
        init_inference(tiny("Llama", **SIZES), device="cuda", threads=2)
    with torch.device("meta"), pytest.raises(ValueError, match="the LlamaForCausalLM is on the meta device"):
        init_inference(tiny("Llama", **SIZES))
    for family in ("Llama", "GPTBigCode"):
        headless = tiny(family, **MODELS[family]).base_model
        with pytest.raises(ValueError, match=f"{family}Model has no language model head.*AutoModelForCausalLM"):
            init_inference(headless)


@pytest.mark.parametrize("mode", ["bslongformer", "dense"])
@pytest.mark.parametrize("source", ["model", "folder"])
@pytest.mark.parametrize("family", ["Llama", "GPTBigCode"])
def test_sparse_attention_is_served_with_all_scores_and_a_warning(
    family: str, source: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(family, **MODELS[family])
    prompt = [(7 * i + 3) % VOCAB for i in range(50)]
    with torch.no_grad():
        whole = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    use_sparse_attention(model, {"mode": mode, **({"num_sliding_window_blocks": 1} if mode != "dense" else {})})
    model.save_pretrained(tmp_path)
    with init_inference(tmp_path if source == "folder" else model, device="cpu") as engine:
        assert engine.generate(prompt, max_new_tokens=1, temperature=0).token_ids == [whole]
    told = "was trained with block-sparse attention (mode 'bslongformer'), and is served with all scores"
    assert (told in caplog.text) == (mode != "dense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("family", ["Llama", "GPTBigCode"])
def test_group_size(family: str) -> None:
    """It reaches the weights on both ways; what is no size of int4's is refused."""
    model = tiny(family, **MODELS[family] | {"hidden_size" if family == "Llama" else "n_embd": 128})
    logprobs = {}
    for group_size in (32, 128):
        with init_inference(model, dtype="int4", group_size=group_size, device="cpu", max_context=64) as engine:
            logprobs[group_size] = engine.generate([1, 2, 3], max_new_tokens=2, temperature=0, logprobs=0).logprobs[0].logprob
    assert logprobs[32] != logprobs[128]
    for dtype, group_size in (("int4", 48), ("int8", 32), (None, 64)):
        with pytest.raises(ValueError, match=f"group_size is {group_size} with dtype .*it needs"):
            init_inference(model, dtype=dtype, group_size=group_size, device="cpu")


def test_sizes_are_checked_before_the_model_is_read() -> None:
    with pytest.raises(ValueError, match=r"token_budget \(512\) is below max_running \(600\)"):
        init_inference(Path("nowhere"), max_running=600, token_budget=512)
    with init_inference(tiny("Llama", **SIZES), device="cpu", max_running=600) as engine:
        assert engine.generate([1, 2], max_new_tokens=1).token_ids


DRAWS: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1, "top_p": 0.9, "repetition_penalty": 1.2}]


def told(draft: Any, **options: Any) -> tuple[list[Any], str, int, int]:
    """What a Llama answers: one prompt after the other, greedily and not."""
    with init_inference(tiny("Llama", **SIZES), device="cpu", threads=1, draft=draft, **options) as engine:
        answers = [
            (one.token_ids, one.logprobs)
            for settings in DRAWS
            for prompt in PROMPTS
            for one in [engine.generate(prompt, max_new_tokens=20, logprobs=1, **settings)]
        ]
        stats = engine.engine.stats()
        return answers, engine.description, stats.draft_tokens, stats.accepted_tokens


def test_a_draft_model_changes_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor log-probabilities: a row's logits do not depend on the others of its forward."""
    monkeypatch.setattr(draft_model, "best_number", lambda likely, most, *_: most)
    expected, description, proposed, _ = told(None)
    assert "drafts" not in description and not proposed
    same, description, proposed, accepted = told(tiny("Llama", **SIZES))
    assert same == expected and "drafts by LlamaForCausalLM: native kernels, 1 threads" in description
    assert proposed == accepted > 60
    other, _, proposed, accepted = told(tiny("Qwen2", **SIZES | {"hidden_size": 32}), num_draft=3)
    assert other == expected and accepted < proposed / 2


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    def folder(name: str, words: list[str], **sizes: Any) -> Path:
        tiny("Llama", **SIZES | sizes).save_pretrained(tmp_path / name)
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        backend.save(str(tmp_path / name / "tokenizer.json"))
        return tmp_path / name

    model, other = folder("model", ["a", "b", "c"]), folder("other", ["a", "c", "b"])
    padded = folder("padded", ["a", "b", "c", "d"], vocab_size=VOCAB + 64)
    with pytest.raises(ValueError, match="token 1 is 'b' to the model and 'c' to the draft other; give one with the same vocab"):
        init_inference(model, device="cpu", draft=other)
    with init_inference(model, device="cpu", draft=padded) as engine:
        assert engine.generate("a b", max_new_tokens=5).token_ids
    with pytest.raises(ValueError, match=r"draft has 192 tokens, and the model 128; give one with the same vocabulary"):
        init_inference(tiny("Llama", **SIZES), device="cpu", draft=padded)
    with pytest.raises(ValueError, match="draft is a LlamaConfig, which has no weights"):
        init_inference(model, device="cpu", draft=tiny("Llama", **SIZES).config)


def test_a_gpu_that_is_not_there() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"device is {device}, and torch sees 0 GPUs here"):
            init_inference(tiny("Llama", **SIZES), device=device)


def train(folder: Path, family: str) -> list[list[int]]:
    """Two steps and a checkpoint; what the model says then."""
    warnings.simplefilter("ignore")  # transformers' own
    engine = toy.make(tiny(family, **MODELS[family]), 1)
    for i in range(2):
        ids = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2 * i + engine.rank))
        engine(input_ids=ids, labels=ids).loss.backward()
        engine.step()
    engine.save_checkpoint(str(folder))
    engine.eval()
    answers = []
    for prompt in PROMPTS:
        output = engine.module.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
    engine.module.generation_config.eos_token_id = [0, answers[0][1]]  # as chat models have it, there alone
    engine.save_checkpoint(str(folder / "ends"))
    engine.destroy()
    return answers


@pytest.mark.parametrize("family", MODELS)
def test_a_checkpoint_says_what_the_trained_model_says(family: str, tmp_path: Path) -> None:
    expected = run(2, train, tmp_path, family)[0]
    for source in (tmp_path, tmp_path / "global_step2"):
        with init_inference(source, device="cpu") as engine:
            assert [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=NEW)] == expected
    with init_inference(tmp_path, device="cpu", dtype="bf16") as engine:
        assert len(engine.generate(PROMPTS[0], max_new_tokens=NEW).token_ids) == NEW
    with init_inference(tmp_path / "ends", device="cpu") as engine:
        ended = engine.generate(PROMPTS[0], max_new_tokens=NEW)
        assert (ended.finish_reason, ended.token_ids) == ("stop", expected[0][: expected[0].index(expected[0][1]) + 1])


def save(folder: Path) -> None:
    engine = toy.make(toy.seeded(toy.Lm), 1)
    engine.save_checkpoint(str(folder))
    engine.destroy()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(1, save, tmp_path)
    with pytest.raises(ValueError, match="global_step0 has no model configuration"):
        init_inference(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "GPTBigCode"])
def test_a_call_with_tensors_gives_the_models_outputs(family: str, tmp_path: Path) -> None:
    """On the native path and transformers' own, of a live model and a folder; a call with texts or ids generates."""
    model = tiny(family, **MODELS[family])
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPTS[1], PROMPTS[2][:19]])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    with torch.no_grad():
        plain = model(**batch)
    for source in (model, tmp_path):
        with init_inference(source, device="cpu") as engine:
            assert torch.equal(engine(ids).logits, model(ids).logits)
            outputs = engine(**batch, output_hidden_states=True)
            assert torch.equal(outputs.logits, plain.logits) and torch.equal(outputs.loss, plain.loss)
            assert len(outputs.hidden_states) == 3 and not outputs.logits.requires_grad
            assert engine([5, 6, 7], max_new_tokens=2).token_ids == engine.generate([5, 6, 7], max_new_tokens=2).token_ids
            with pytest.raises(ValueError, match=r"engine\.generate\(tensor, max_new_tokens=\) generates"):
                engine(ids, max_new_tokens=2)
        with pytest.raises(ValueError, match=r"the engine is closed"):
            engine(ids)
    with init_inference(model, device="cpu", dtype="bf16") as engine:
        torch.testing.assert_close(engine(ids).logits.float(), model(ids).logits, rtol=0.1, atol=0.1)
        assert engine(ids).logits.dtype is engine.module.dtype is torch.bfloat16 and model.dtype is torch.float32


def test_a_call_with_tensors_says_why_there_are_no_outputs() -> None:
    model = tiny("Llama", **SIZES)
    ids = torch.tensor([PROMPTS[0]])
    with init_inference(model, device="cpu", dtype="int8") as engine:
        with pytest.raises(ValueError, match=r"kept in int8, .* dtype bf16, .*\. engine\.generate\(\) answers"):
            engine(ids)
        assert engine.generate(ids, max_new_tokens=2).shape == (1, 7)
    with init_inference(model.config, device="cpu") as engine, pytest.raises(ValueError, match="from a configuration"):
        engine(input_ids=ids)
    with init_inference(model, device="cpu") as engine:
        engine(ids)
        engine.update_weights((name, value + 1) for name, value in model.state_dict().items())
        with pytest.raises(ValueError, match=r"were updated .* engine\.generate\(\)"):
            engine(ids)
