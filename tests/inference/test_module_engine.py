"""deepspeed.init_inference: an engine that is the user's module, with the module's outputs and transformers' text."""

import copy
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor, nn

from slipstream.compat.inference import DeepSpeedInferenceConfig, InferenceEngine, init_inference
from slipstream.ops import build
from slipstream.quantized import PackedLinear

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 95, "eos_token_id": 95}
native = pytest.mark.skipif(
    build.load().kernels is None and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)


def made(name: str, config: Any, **sizes: Any) -> Any:
    torch.manual_seed(5)
    model = getattr(transformers, name)(config(**sizes)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def gpt2(**more: Any) -> Any:
    return made("GPT2LMHeadModel", transformers.GPT2Config, **GPT2, **more)


def bert(head: str = "ForMaskedLM") -> Any:
    return made(f"Bert{head}", transformers.BertConfig, **SIZES)


def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(91))])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "CLS", "SEP", "MASK", "UNK")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def ragged(left: bool = False) -> dict[str, Tensor]:
    ids = (torch.arange(36).view(3, 12) * 11) % 90 + 5
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 5, 9)):
        off = slice(None, 12 - length) if left else slice(length, None)
        mask[row, off], ids[row, off] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def uses_own_forward(model: Any) -> list[int]:
    """Gets an entry for each forward of a layer of the module's own."""
    calls: list[int] = []
    layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@torch.no_grad()
@pytest.mark.parametrize("dtype", [None, torch.float32, "bf16", torch.half])
def test_outputs_are_the_module_s(dtype: Any) -> None:
    for model, inputs in ((gpt2(), ragged(left=True)), (bert(), ragged())):
        reference = copy.deepcopy(model)
        engine = init_inference(model, dtype=dtype)
        wanted = torch.float32 if dtype is None else engine.dtype
        expected = reference.to(wanted)(**inputs, output_hidden_states=True)
        computed = engine(**inputs, output_hidden_states=True)
        assert type(computed) is type(expected) and computed.logits.equal(expected.logits)
        assert all(map(torch.equal, computed.hidden_states, expected.hidden_states))
        assert engine.module is model and engine.config is model.config and engine.device.type == "cpu"
        assert isinstance(engine, nn.Module) and isinstance(engine, InferenceEngine)


def test_any_module() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).requires_grad_(True)
    engine = init_inference(model, {"dtype": "half"})
    computed = engine(torch.ones(2, 4, dtype=torch.half))
    assert (
        computed.dtype == torch.half
        and not computed.requires_grad
        and set(engine.state_dict()) == {"module.0.weight", "module.0.bias"}
    )
    with pytest.raises(AttributeError, match="no attribute 'config'"):
        engine.config  # noqa: B018
    with pytest.raises(ValueError, match="init_inference opens folders"):
        init_inference("gpt2")  # type: ignore[arg-type]


@native
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("Bert", "ForMaskedLM"),
        ("Bert", "ForQuestionAnswering"),
        ("Bert", "ForSequenceClassification"),
        ("Bert", "Model"),
        ("Roberta", "ForTokenClassification"),
        ("DistilBert", "ForMaskedLM"),
        ("Electra", "ForSequenceClassification"),
        ("ModernBert", "ForMaskedLM"),
    ],
)
def test_encoders_by_kernels(family: str, head: str) -> None:
    """The same outputs where tokens are, from the kernels alone; and the module's own forward for everything else."""
    sizes: dict[str, Any] = SIZES
    if family == "DistilBert":
        sizes = {"vocab_size": 96, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
    elif family == "ModernBert":
        sizes = {**SIZES, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
    else:
        sizes = {**SIZES, "pad_token_id": 0} | ({"embedding_size": 64} if family == "Electra" else {})
    model = made(f"{family}{head}", getattr(transformers, f"{family}Config"), **sizes)
    reference = copy.deepcopy(model)
    engine = init_inference(model, replace_with_kernel_inject=True)
    calls, inputs = uses_own_forward(model), ragged()
    expected, computed = reference(**inputs), engine(**inputs)
    assert not calls and type(computed) is type(expected)
    kept = inputs["attention_mask"].bool()
    for name, value in expected.items():
        kind = kept if value.dim() > 1 and value.shape[1] == kept.shape[1] else slice(None)
        torch.testing.assert_close(computed[name][kind], value[kind], rtol=1e-3, atol=1e-3)
    for more in (ragged(left=True), {**inputs, "output_hidden_states": True}):
        assert engine(**more)[0].equal(reference(**more)[0])
    assert calls
    words = torch.ones(1, 4, dtype=torch.int64)
    more_words = (words, words, None if family in ("DistilBert", "ModernBert") else 1 - words, None)
    torch.testing.assert_close(engine(*more_words)[0], reference(*more_words)[0], rtol=1e-3, atol=1e-3)
    with torch.no_grad():  # changed weights are seen
        for one in (model, reference):
            one.get_input_embeddings().weight.data.mul_(2)
    assert engine(**inputs)[0].equal(reference(**inputs)[0])


@native
@torch.no_grad()
@pytest.mark.parametrize("inject", [False, True])
def test_pipelines(inject: bool) -> None:
    texts = ["w1 [MASK] w3", "w7 w8 w9 w4 [MASK]"]
    tasks = {"fill-mask": ("ForMaskedLM", texts), "text-classification": ("ForSequenceClassification", texts)}
    tasks["token-classification"] = ("ForTokenClassification", texts)
    for task, (head, given) in tasks.items():
        pipe = transformers.pipeline(task, model=bert(head), tokenizer=tokenizer())
        expected = pipe(given), pipe(given, batch_size=2)
        pipe.model = init_inference(pipe.model, replace_with_kernel_inject=inject)
        assert _alike((pipe(given), pipe(given, batch_size=2)), expected), task
    pipe = transformers.pipeline("text-generation", model=gpt2(), tokenizer=tokenizer())
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = pipe("w1 w2", **settings), pipe(["w1 w2", "w5 w6 w7"], **settings)
    pipe.model = init_inference(pipe.model, replace_with_kernel_inject=inject)
    assert (pipe("w1 w2", **settings), pipe(["w1 w2", "w5 w6 w7"], **settings)) == expected


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return abs(one - other) < 1e-3 if isinstance(one, float) or hasattr(one, "dtype") else bool(one == other)


@native
@torch.no_grad()
def test_generates_transformers_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers by the engine alone, equal to transformers'; all else is transformers' own."""
    model = gpt2(pad_token_id=0)
    reference, engine = copy.deepcopy(model), init_inference(model)
    ids, padded = torch.tensor([[5, 17, 3], [9, 2, 40]]), ragged(left=True)
    ends = reference.generate(ids, max_new_tokens=9, do_sample=False)[0, 6].item()
    greedy: list[dict[str, Any]] = [
        {"inputs": ids, "max_new_tokens": 9},
        {"input_ids": ids, "max_length": 9, "do_sample": False},
        {**padded, "generation_config": transformers.GenerationConfig(max_new_tokens=7, eos_token_id=ends, pad_token_id=1)},
        {**padded, "max_new_tokens": 9, "eos_token_id": [ends, 95], "min_new_tokens": 5},
        {**padded, "max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 7},
    ]
    own: list[dict[str, Any]] = [
        {"inputs": ids, "max_new_tokens": 5, "num_beams": 2},
        {"inputs": ids, "max_new_tokens": 5, "do_sample": True, "num_return_sequences": 2},
        {"inputs": ids, "max_new_tokens": 5, "repetition_penalty": 1.3},
        {"inputs": padded["input_ids"], "max_new_tokens": 5},
        {"inputs": ids, "max_new_tokens": 5, "return_dict_in_generate": True},
    ]
    for settings in own:
        torch.manual_seed(3)
        expected = reference.generate(**settings)
        torch.manual_seed(3)
        computed = engine.generate(**settings)
        same = getattr(computed, "sequences", computed).equal(getattr(expected, "sequences", expected))
        assert same and type(computed) is type(expected), settings
    expected_answers = [reference.generate(**settings) for settings in greedy]
    monkeypatch.setattr(model, "generate", None)
    for settings, expected in zip(greedy, expected_answers, strict=True):
        assert engine.generate(**settings).equal(expected), settings
    for one in (model, reference):
        one.get_input_embeddings().weight.mul_(-1)
    assert engine.generate(**greedy[0]).equal(reference.generate(**greedy[0]))
    for weight in model.parameters():  # as weights are synced
        weight.data.copy_(weight.flip(0))
    reference.load_state_dict(model.state_dict())
    assert engine.generate(**greedy[0]).equal(reference.generate(**greedy[0]))
    monkeypatch.undo()
    engine.destroy()
    engine.destroy()
    assert engine.generate(**greedy[0]).equal(reference.generate(**greedy[0]))


@native
@torch.no_grad()
def test_int8() -> None:
    """Linear layers are packed, outputs stay near, and engine and module compute from the same int8 weights."""
    for model, inputs in ((bert(), ragged()), (gpt2(), ragged(left=True))):
        expected = model(**inputs).logits
        engine = init_inference(model, dtype=torch.int8)
        kept = inputs["attention_mask"].bool()
        computed = engine(**inputs).logits
        assert torch.nn.functional.cosine_similarity(computed[kept].flatten(), expected[kept].flatten(), dim=0) > 0.99
        assert sum(isinstance(module, PackedLinear) for module in engine.modules()) >= 8
    assert engine.generate(torch.tensor([[5, 6]]), max_new_tokens=4).shape == (1, 6)
    for own in (nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())):  # of no library
        x = torch.randn(3, 8)
        expected, engine = own(x), init_inference(own, dtype=torch.int8)
        assert "bits=8" in repr(engine) and torch.nn.functional.cosine_similarity(engine(x), expected).min() > 0.99


@torch.no_grad()
def test_times_of_forwards() -> None:
    engine = init_inference(gpt2(pad_token_id=0))
    with pytest.raises(AssertionError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    for _ in range(3):
        engine(**ragged(left=True))
    assert len(engine.model_times()) == 3 and engine.model_times() == []
    engine.generate(torch.tensor([[5, 6]]), max_new_tokens=4, eos_token_id=94)
    assert len(times := engine.model_times()) == 4 and all(0 < each < 60_000 for each in times)


class Doubled(nn.Module):  # torch.compile skips modules of torch.nn themselves
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_compile() -> None:
    graphs: list[Any] = []
    engine, x = init_inference(Doubled()), torch.randn(3, 8)
    expected = engine(x)
    assert not engine.is_compiled
    engine.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward, compile_kwargs={"fullgraph": True})
    assert engine.is_compiled and engine(x).equal(expected) and len(graphs) == 1


@native
def test_heads_that_the_kernels_do_not_have_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = made("BertModel", transformers.BertConfig, **{**SIZES, "num_attention_heads": 8})
    expected = model(**ragged())[0]
    assert init_inference(model, replace_with_kernel_inject=True)(**ragged())[0].equal(expected)
    assert "the module's own forward is used: torch (heads of 8 features; the kernels need a multiple of 16)" in caplog.text


def test_options(caplog: pytest.LogCaptureFixture) -> None:
    model = bert()
    init_inference(model, replace_method="auto")
    assert "replace_method has no effect here: the fastest forward is chosen" in caplog.text
    layer = type(model.bert.encoder.layer[0])
    init_inference(
        model, injection_policy={layer: ("attention.output.dense", "output.dense")}, mp_size=1, tensor_parallel={"tp_size": 1}
    )
    for policy, words in (
        ({layer: ("output.densed",)}, r"BertLayer has no 'output.densed'; did you mean output.dense"),
        ({nn.LSTM: ("x",)}, "BertForMaskedLM has no LSTM"),
        ({"BertLayer": ("x",)}, "keys are classes"),
    ):
        with pytest.raises(ValueError, match=words):
            init_inference(model, injection_policy=policy)
    for options, words in (
        ({"mp_size": 2}, "tensor_parallel is 2, and 1 ranks run this: start it by slipstream run --nproc 2"),
        ({"dtypo": 1}, "did you mean dtype"),
        ({"dtype": torch.int64}, "it must be float32, bfloat16, float16 or int8"),
        ({"quant": {"enabled": True}}, "dtype=torch.int8"),
        ({"moe": {"ep_size": 4}}, "ep_size"),
        ({"kernel_inject": True, "replace_with_kernel_inject": False}, "given twice"),
    ):
        with pytest.raises(ValueError, match=words):
            init_inference(model, **options)
    with pytest.raises(ValueError, match="given twice"):
        init_inference(model, {"dtype": "fp32"}, dtype="bf16")
    limited = init_inference(gpt2(), {"max_out_tokens": 4, "min_out_tokens": 2})
    with pytest.raises(RuntimeError, match="max_out_tokens is 4"):
        limited.generate(torch.ones(1, 5, dtype=torch.int64))
    first = limited.generate(torch.tensor([[7, 8]]), max_new_tokens=1)[0, -1].item()
    ended = limited.generate(torch.tensor([[7, 8]]), max_new_tokens=5, eos_token_id=first, pad_token_id=0)
    assert ended.shape[1] == 3 and "min_out_tokens has no effect here" in caplog.text  # in DeepSpeed it is a size of memory
    config = DeepSpeedInferenceConfig(dtype="half", tp={"tp_size": 2}, kernel_inject=False, min_tokens=1, tm=True)
    assert (config.kind, config.tensor_parallel, config.cuts) == ("float16", 2, 2)
    assert init_inference(bert(), DeepSpeedInferenceConfig(), dtype="bf16").dtype is torch.bfloat16
    with pytest.raises(ValueError, match="given twice"):
        init_inference(bert(), config, dtype="bf16")
