"""Fused passes and layers against torch's and transformers' own: forward, gradients, dropout, memory, and what stays."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.fused import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, fuse_layers, replace_transformer_layer
from slipstream.fused.transformers import Fused
from slipstream.ops import cpu, fused

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(params=["native", "portable", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    best = cpu.isa()
    if request.param == "torch":
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
    elif request.param == "portable" and not cpu.use_isa("portable"):
        pytest.skip("there are no native kernels")
    yield str(request.param)
    if best:
        cpu.use_isa(best)


def grads_of(out: Any, leaves: list[Tensor]) -> list[Tensor]:
    outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each.requires_grad]
    generator = torch.Generator().manual_seed(7)
    loss = sum((each.float() * torch.randn(each.shape, generator=generator)).sum() for each in outs)
    return list(torch.autograd.grad(loss, leaves))


def check(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        scale = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a.float() / scale, b.float() / scale, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("columns", [16, 40, 67])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_a_sum_and_its_norm(norm: str, columns: int, dtype: torch.dtype, implementation: str) -> None:
    torch.manual_seed(columns)
    x, residual = (torch.randn(3, 5, columns).to(dtype).requires_grad_() for _ in range(2))
    weight, shift, bias = (torch.randn(columns).add(1).requires_grad_() for _ in range(3))
    leaves = [x, residual, bias, *([weight] if norm != "none" else []), *([shift] if norm == "layer" else [])]
    options: Any = {"weight": weight} if norm == "rms" else {"weight": weight, "shift": shift} if norm == "layer" else {}
    for invertible in (False, True):
        more: Any = {"norm": norm, "bias": bias, "residual": residual, "invertible": invertible, "eps": 1e-3}
        total, out = fused.add_norm(x, **more, **options)
        wide = (x.float() + bias + residual.float()).to(dtype)
        twin = wide.float()
        if norm == "layer":
            twin = F.layer_norm(twin, (columns,), weight, shift, 1e-3)
        if norm == "rms":
            twin = F.rms_norm(twin, (columns,), weight, 1e-3)
        both = (total, out) if norm != "none" else total
        expected = (wide, twin.to(dtype)) if norm != "none" else wide
        check([total, out], [wide, twin.to(dtype)], dtype)
        if not invertible or dtype == torch.float32:
            check(grads_of(both, leaves), grads_of(expected, leaves), dtype)


def test_small_weights_are_not_divided_by() -> None:
    """An invertible norm keeps the sum then: gradients of a column that the output has lost would be wrong."""
    torch.manual_seed(5)
    x, shift = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    weight = torch.tensor([1.0, 0.0, 1e-6, 2.0] * 4, requires_grad=True)
    found = [
        grads_of(fused.add_norm(x, weight, shift, norm="layer", invertible=flag)[1], [x, weight, shift]) for flag in (True, False)
    ]
    check(found[0], found[1], torch.float32)


def test_dropout_draws_the_same_numbers_in_every_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = torch.randn(33, 48, requires_grad=True), torch.randn(33, 48, requires_grad=True)
    found = []
    for native in (cpu._kernels, lambda: None):
        monkeypatch.setattr(cpu, "_kernels", native)
        torch.manual_seed(3)
        total, _ = fused.add_norm(x, residual=residual, dropout=0.25)
        found.append([total, *grads_of(total, [x, residual])])
    check(found[0], found[1], torch.float32)
    kept = (found[0][0] - residual).ne(0).float()
    assert 0.7 < kept.mean() < 0.8
    assert torch.equal(found[0][1] != 0, (found[0][0] != residual))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", fused.ACTIVATIONS)
def test_activations_and_mlps(kind: Any, dtype: torch.dtype, implementation: str) -> None:
    torch.manual_seed(1)
    function = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[kind]
    x = torch.randn(2, 7, 20).mul(3).to(dtype).requires_grad_()
    first, up, last = (torch.randn(shape).div(4).to(dtype).requires_grad_() for shape in ((36, 20), (36, 20), (20, 36)))
    bias = torch.randn(36).requires_grad_()
    inner = F.linear(x, first)
    check([fused.activation(inner, kind, bias=bias)], [function(inner.float() + bias).to(dtype)], dtype)
    for gate in (None, up):
        leaves = [each for each in (x, first, last, bias, gate) if each is not None]
        for keep in (False, True):
            twin = function(F.linear(x, first).float() + bias)
            twin = (twin if gate is None else twin * F.linear(x, gate).float()).to(dtype)
            twin = F.linear(twin, last)
            out = fused.mlp(x, first, last, kind=kind, bias=bias, up=gate, keep_activation=keep)
            check([out], [twin], dtype)
            if dtype == torch.float32:
                check(grads_of(out, leaves), grads_of(twin, leaves), dtype)


def test_activations_of_what_is_not_finite(implementation: str) -> None:
    """NaN stays, and the ReLU of -inf, of a product that overflowed, is 0 as in torch."""
    x = torch.tensor([math.nan, math.inf, -math.inf, -1.0]).repeat(3, 5).half().requires_grad_()
    assert all(fused.activation(x, kind)[:, ::4].isnan().all() for kind in fused.ACTIVATIONS)
    out, twin = fused.activation(x, "relu"), F.relu(x)
    assert torch.equal(out.nan_to_num(7), twin.nan_to_num(7))


def test_rotary_positions(implementation: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 6, 3, 24, requires_grad=True)
    angle = torch.randn(1, 6, 8)
    cosine, sine = (torch.cat((each, each), -1) for each in (angle.cos(), angle.sin()))
    turned, rest = x[..., :16], x[..., 16:]
    half = torch.cat((-turned[..., 8:], turned[..., :8]), -1)
    twin = torch.cat((turned * cosine[:, :, None] + half * sine[:, :, None], rest), -1)
    out = fused.rotary(x, cosine, sine)
    check([out], [twin], torch.float32)
    check(grads_of(out, [x]), grads_of(twin, [x]), torch.float32)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda x: fused.add_norm(x, norm="layer"), "layer takes weight and shift"),
        (lambda x: fused.add_norm(x, bias=torch.ones(3)), "x has 8 columns"),
        (lambda x: fused.add_norm(x, residual=x[:1]), "it must be that of x"),
        (lambda x: fused.add_norm(x, dropout=1.0), r"dropout \(1.0\)"),
        (lambda x: fused.activation(x, "tanh"), "is none of gelu_tanh"),
        (lambda x: fused.rotary(x.view(1, 2, 1, 8), torch.ones(1, 2, 3), torch.ones(1, 2, 3)), "with an even R"),
    ],
)
def test_bad_arguments(call: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call(torch.ones(2, 8))


# ---- models of transformers ----

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FAMILIES = [
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "XLMRobertaForMaskedLM",
    "CamembertForMaskedLM",
    "ElectraForMaskedLM",
    "Data2VecTextForMaskedLM",
    "ErnieForMaskedLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def built(family: str, **more: Any) -> Any:
    import transformers

    kind = family.partition("For")[0]
    sizes = SIZES | ({"num_key_value_heads": 2} if family.endswith("ForCausalLM") else {}) | more
    sizes |= {"head_dim": 8} if kind.startswith("Qwen3") else {"embedding_size": 32} if kind == "Electra" else {}
    sizes |= EXPERTS if kind.endswith("Moe") else {}
    torch.manual_seed(0)
    return getattr(transformers, family)(getattr(transformers, f"{kind}Config")(**sizes))


def batch(padded: bool = True) -> dict[str, Tensor]:
    ids = torch.arange(2 * 13).view(2, 13) * 7 % 90 + 3
    mask = torch.ones(2, 13, dtype=torch.long)
    if padded:
        mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), torch.tensor(-100))}


@pytest.mark.parametrize("family", FAMILIES)
def test_unmodified_models(family: str) -> None:
    """Loss and every gradient; names, classes, copies and pickles are the model's own."""
    model = built(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    twin = copy.deepcopy(model)
    names, own = [name for name, _ in model.named_parameters()], {type(module) for module in model.modules()}
    fuse_layers(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(any(isinstance(module, kind) for kind in own) for module in model.modules())
    expected, found = twin(**batch()).loss, model(**batch()).loss
    expected.backward()
    found.backward()
    assert abs(float((found - expected).detach())) < 1e-5
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-3, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(module) for module in again.modules()} == own


@pytest.mark.parametrize("family", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_activations_take_less_memory(family: str) -> None:
    def saved(model: Any) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {param.untyped_storage().data_ptr() for param in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layers = model.bert.encoder if hasattr(model, "bert") else model.model
            x = torch.randn(4, 64, 64, requires_grad=True)
            out = layers(x) if hasattr(model, "bert") else layers(inputs_embeds=x, use_cache=False)
        del out
        return sum(size for place, size in kept.items() if place not in own)

    more = {"hidden_size": 64, "intermediate_size": 256, "attn_implementation": "eager"}
    plain = saved(built(family, **more).train())
    assert saved(fuse_layers(built(family, **more).train())) <= 0.6 * plain


def test_generation_and_what_cannot_be_fused() -> None:
    model = built("LlamaForCausalLM").eval()
    options: Any = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**batch(padded=False) | {"labels": None}, **options)
    assert torch.equal(fuse_layers(model).generate(**batch(padded=False) | {"labels": None}, **options), plain)
    with pytest.raises(ValueError, match="Linear has no layers that can be fused"):
        fuse_layers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the model has no Conv2d"):
        replace_transformer_layer(nn.Conv2d, model)
    with pytest.raises(ValueError, match="checkpoint_dict is not read"):
        replace_transformer_layer(None, model, checkpoint_dict={})
    from transformers.models.bert.modeling_bert import BertLayer

    bert = built("BertForMaskedLM")
    assert replace_transformer_layer(BertLayer, bert) is bert and any(isinstance(module, Fused) for module in bert.modules())


@pytest.mark.parametrize("family", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_the_config_fuses_layers(family: str) -> None:
    """With recompute and sharded states: the losses of the model as it was."""
    losses = []
    for fuses in (False, True):
        model = built(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
            "slipstream": {"fused_layers": fuses, "activations": "recompute"},
        }
        engine, *_ = slipstream.initialize(model=model, config=config)
        for _ in range(3):
            losses.append(engine(**batch()).loss)
            engine.backward(losses[-1])
            engine.step()
        assert any(isinstance(module, Fused) for module in model.modules()) == fuses
        engine.destroy()
    values = torch.stack(losses).detach()
    torch.testing.assert_close(values[:3], values[3:], rtol=1e-4, atol=1e-5)


def test_hooks_see_what_they_saw() -> None:
    """Of modules between products, which a fused pass does not call."""
    model = fuse_layers(built("BertForMaskedLM"))
    seen: list[str] = []
    layer = model.bert.encoder.layer[0]
    for name in ("attention.output.LayerNorm", "intermediate", "output"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    model(**batch())
    assert seen == ["attention.output.LayerNorm", "intermediate", "output"]


def test_attention_to_another_sequence_stays_as_it_was() -> None:
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)).eval()
    encoder, ids = torch.randn(2, 29, 32), batch()["input_ids"]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        found, expected = (each(input_ids=ids, encoder_hidden_states=encoder).logits for each in (fuse_layers(model), twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- DeepSpeed's layer ----


class Twin(nn.Module):
    """The formulas of DeepSpeed's layer, in plain torch."""

    def __init__(self, layer: DeepSpeedTransformerLayer) -> None:
        super().__init__()
        self.layer, self.config = layer, layer.config

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        p, shape = self.layer, (*x.shape[:2], self.config.heads, -1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in F.linear(x, p.attn_qkvw, p.attn_qkvb).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + (0 if mask is None else mask)
        return F.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape), p.attn_ow, p.attn_ob)

    def mlp(self, x: Tensor) -> Tensor:
        p = self.layer
        return F.linear(F.gelu(F.linear(x, p.inter_w, p.inter_b), approximate="tanh"), p.output_w, p.output_b)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        p, eps = self.layer, self.config.layer_norm_eps

        def norm(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(y, y.shape[-1:], weight, bias, eps)

        if self.config.pre_layer_norm:
            a = x + self.attention(norm(x, p.norm_w, p.norm_b), mask)
            return a + self.mlp(norm(a, p.attn_nw, p.attn_nb))
        a = norm(x + self.attention(x, mask), p.attn_nw, p.attn_nb)
        return norm(a + self.mlp(a), p.norm_w, p.norm_b)


def options(**more: Any) -> dict[str, Any]:
    sizes = {"batch_size": 3, "hidden_size": 32, "heads": 4, "num_hidden_layers": 2, "initializer_range": 0.2}
    return {**sizes, "attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0, **more}


@pytest.mark.parametrize("length", [16, 21])
@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize("pre", [True, False])
def test_the_layer_of_deepspeed(pre: bool, invertible: bool, length: int) -> None:
    torch.manual_seed(4)
    given = options(pre_layer_norm=pre, normalize_invertible=invertible, gelu_checkpoint=invertible, intermediate_size=50)
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**given))
    with torch.no_grad():
        for param in layer.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    x = torch.randn(3, length, 32, requires_grad=True)
    padding = torch.zeros(3, 1, 1, length)
    padding[1, ..., 10:] = -1e4
    leaves = [x, *layer.parameters()]
    for mask in (None, padding, torch.randn(3, 1, length, length)):
        found, expected = layer(x, mask), Twin(layer)(x, mask)
        check([found], [expected], torch.float32)
        check(grads_of(found, leaves), grads_of(expected, leaves), torch.float32)


def test_its_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for encoding in ("utf-16", "utf-8"):
        (tmp_path / "c.json").write_text(json.dumps(options(max_seq_length=128)), encoding=encoding)
        config = DeepSpeedTransformerConfig.from_json_file(str(tmp_path / "c.json"))
        assert config.intermediate_size == 128 and config.pre_layer_norm and config.layer_norm_eps == 1e-12
    first = DeepSpeedTransformerLayer(3, config)  # as old scripts do
    second = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options(return_tuple=True, stochastic_mode=True)))
    assert second.config.layer_id == first.config.layer_id + 1 and type(second(torch.ones(1, 4, 32))) is tuple
    assert "stochastic_mode has no effect" in caplog.text
    for adjusts, wanted in ((True, 0.1), (False, 0.2)):
        made = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options(adjust_init_range=adjusts)))
        deviations = [weight.detach().std().item() for weight in (made.output_w, made.inter_w)]
        assert deviations == pytest.approx([wanted, 0.2], rel=0.1)
    weights = [torch.full((shape), float(i)) for i, shape in enumerate([(32, 32)] * 4 + [(32,), (128, 32), (32, 128), (32,)])]
    taken = DeepSpeedTransformerLayer(config, weights, [each[..., :1].reshape(-1) for each in weights])
    assert taken.attn_qkvw[:, 0].unique().tolist() == [0, 1, 2] and taken.norm_b[0].item() == 7
    half = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options(fp16=True)))
    assert half(torch.ones(1, 4, 32)).dtype == torch.float16
    with pytest.raises(ValueError, match="heads must divide hidden_size"):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options(heads=5)))
    with pytest.raises(ValueError, match="computes without head_mask"):
        first(torch.ones(1, 4, 32), None, torch.ones(1))
    with pytest.raises(ValueError, match="computes without encoder_attention_mask, output_attentions"):
        first(torch.ones(1, 4, 32), encoder_attention_mask=torch.ones(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        first(torch.ones(1, 4, 32), torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"attention_mask is torch\.int64"):
        first(torch.ones(1, 4, 32), torch.ones(1, 1, 1, 4, dtype=torch.long))


def test_dropout_trains_and_rests() -> None:
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**options(attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1)))
    x = torch.randn(2, 16, 32)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        out: Tensor = layer(x)
        return out

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    layer.eval()
    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.0), ("sum", 0.0), ("mean", 0.1)])
def test_the_loss_of_logits(dtype: torch.dtype, reduction: Any, smoothing: float) -> None:
    """As torch's in fp32, value and gradient, over several tiles and with rows that do not count."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(700, 1001)).to(dtype).requires_grad_()
    twin = logits.detach().float().requires_grad_()
    target = torch.randint(1001, (700,)).masked_fill(torch.rand(700) < 0.2, -100)
    loss = fused.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    expected = F.cross_entropy(twin, target, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (3 * loss).backward()
    (3 * expected).backward()
    assert logits.grad is not None and twin.grad is not None
    torch.testing.assert_close(
        logits.grad.float(), twin.grad.to(dtype).float(), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6
    )
    assert not logits.grad[target == -100].any()


@pytest.mark.parametrize("classes", [1, 15, 16, 33])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_of_what_is_not_finite(classes: int, smoothing: float) -> None:
    """Masked classes count as in torch, and what has no number, loss or gradient, never gets one. Rows with gaps between them."""
    torch.manual_seed(0)
    rows = torch.randn(6, 2 * classes)[:, :classes]
    rows[1, 0], rows[2, -1], rows[3] = math.nan, math.inf, -math.inf
    rows[4, 1:] = -math.inf
    target = torch.zeros(6, dtype=torch.int64)
    for row in range(6):
        own, twin = rows[row : row + 1].clone().requires_grad_(), rows[row : row + 1].clone().requires_grad_()
        loss = fused.cross_entropy(own, target[:1], label_smoothing=smoothing)
        expected = F.cross_entropy(twin, target[:1], label_smoothing=smoothing)
        assert loss.isfinite() == expected.isfinite()
        assert not loss.isfinite() or loss.allclose(expected, rtol=1e-5, atol=1e-6)
        loss.backward()
        expected.backward()
        assert own.grad is not None and twin.grad is not None
        assert row in (2, 3) or own.grad.allclose(twin.grad, atol=1e-6, equal_nan=True)
        assert own.grad.isfinite().all() <= twin.grad.isfinite().all()
    kept = fused.cross_entropy(rows[[0, 5]], target[:2], label_smoothing=smoothing)
    torch.testing.assert_close(kept, F.cross_entropy(rows[[0, 5]], target[:2], label_smoothing=smoothing))


def test_the_loss_refuses_targets_that_are_no_classes() -> None:
    logits = torch.randn(6, 33)
    for target in (torch.arange(6) * 33, torch.arange(6) - 1):
        with pytest.raises((IndexError, RuntimeError), match=r"targets from -?\d+ to \d+ of|out of bounds"):
            fused.cross_entropy(logits, target)
    for dtype in (torch.int32, torch.uint8, torch.float32):
        with pytest.raises(ValueError, match=rf"target is {dtype}; it must be torch.int64"):
            fused.cross_entropy(logits, torch.arange(6).to(dtype))


def test_the_loss_keeps_a_number_for_each_row() -> None:
    kept: list[int] = []
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes if tensor.data_ptr() != logits.data_ptr() else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused.cross_entropy(logits, torch.arange(64))
    assert sum(kept) < 64 * 1000 / 10
    with pytest.raises(ValueError, match=r"target \(3,\)"):
        fused.cross_entropy(logits, torch.arange(3))
    with pytest.raises(ValueError, match=r"label_smoothing 2.0"):
        fused.cross_entropy(logits, torch.arange(64), label_smoothing=2.0)


def test_a_fused_decoder_has_the_loss_of_transformers() -> None:
    plain, model = built("LlamaForCausalLM"), fuse_layers(built("LlamaForCausalLM"))
    assert model.loss_function is not plain.loss_function and model.loss_function.__name__ == "ForCausalLMLoss"
    ids = torch.arange(24).view(2, 12)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    more: dict[str, Any]
    for more in ({}, {"num_items_in_batch": 7}):
        losses = [each(input_ids=ids, labels=labels, **more).loss for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
