"""slipstream.quantize(module, dtype): linear layers of any module by the native engine's kernels."""

import copy
import ctypes
import gc
import io
import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers.pytorch_utils import Conv1D

import slipstream
from slipstream.ops import build, cpu, products
from slipstream.ops.grouped import fits, grouped_rows
from slipstream.ops.matrices import CODES, Int4, Int8, dequantize, round_activations
from slipstream.quantized import PackedLinear, QuantizedLinear
from slipstream.quantized.packed import KINDS
from tests.inference import twins

NATIVE = build.load().kernels is not None
native = pytest.mark.skipif(
    not NATIVE and "not built" not in build.load().reason, reason=f"no native kernels: {build.load().reason}"
)
ERRORS = {"int8": 0.02, "int4": 0.12, "bf16": 0.006}  # relative, of one product of random numbers
COSINES = {"int8": 0.999, "int4": 0.98, "bf16": 0.9999}  # of a tiny model's outputs
SHAPES = [(32, 32), (100, 37), (33, 5), (1, 1), (130, 96), (768, 256)]  # in, out


def linear(columns: int, rows: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(columns + rows)
    return nn.Linear(columns, rows, bias)


def packed(layer: nn.Module, kind: str, **more: Any) -> Any:
    return slipstream.quantize(copy.deepcopy(layer), kind, **more)


def off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_near_the_floats(kind: str) -> None:
    for (columns, rows), bias in zip(SHAPES, [True, True, False, True, False, True], strict=True):
        layer = linear(columns, rows, bias)
        ours = packed(layer, kind)
        assert isinstance(ours, PackedLinear) and type(layer) is nn.Linear
        for dtype, limit in ((torch.float32, 0.0), (torch.bfloat16, 0.006), (torch.float16, 0.001)):
            x = torch.randn(3, 5, columns).to(dtype)
            y = ours(x)
            assert (y.dtype, y.shape) == (dtype, (3, 5, rows))
            assert off(y, layer(x.float())) < ERRORS[kind] + limit, (columns, rows, kind, dtype)
        assert off(ours.weight.float(), layer.weight) < ERRORS[kind] and ours.weight.shape == layer.weight.shape
        assert (ours.bias is None) == (layer.bias is None) and (not bias or ours.bias.equal(layer.bias))


@native
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(kind: str) -> None:
    """Alone, among many rows, in views that are not contiguous, and on one thread or two."""
    for columns, rows in [*SHAPES, (1600, 720)]:
        ours, x = packed(linear(columns, rows), kind), torch.randn(700, columns)
        whole = ours(x)
        for part in (slice(0, 1), slice(3, 10), slice(400, 517)):
            assert ours(x[part]).equal(whole[part])
        assert ours(x[5]).equal(whole[5]) and ours(x.T.contiguous().T).equal(whole) and ours(x[::3]).equal(whole[::3])
        assert ours(x[None, :6, None]).equal(whole[None, :6, None])
        assert ours(x[:0]).shape == (0, rows) and ours(x[:0, None]).shape == (0, 1, rows)
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert ours(x).equal(whole)
        finally:
            torch.set_num_threads(threads)


@native
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_twin(kind: str) -> None:
    """Of integers whose scales are 1, so that each sum of the kernels, of their twin and of torch has one value."""
    columns, rows = 160, 50
    torch.manual_seed(3)
    layer = linear(columns, rows)
    limit = {"int8": 127, "int4": 7, "bf16": 60}[kind]
    layer.weight.copy_(torch.randint(-limit, limit + 1, (rows, columns)))
    layer.weight.view(rows, -1, CODES)[..., 0], layer.weight.view(rows, -1, CODES)[..., 1] = limit, -limit - (kind == "int4")
    layer.bias.copy_(torch.randint(-9, 9, (rows,)))
    x = torch.randint(-127, 128, (9, columns)).float()
    x.view(9, -1, CODES)[..., 2] = 127
    ours = packed(layer, kind)
    assert ours(x).equal(layer(x)) and ours.weight.float().equal(layer.weight)
    assert products.linear_by_rows(x, ours.matrix.matrix, layer.bias).equal(layer(x))


@native
@torch.no_grad()
@pytest.mark.skipif(cpu.isa() == "portable", reason="the portable kernels have no fused multiply-add")
def test_int8_in_the_documented_order() -> None:
    """Exact sums of 32 features, which are added up in fp32 in their order; fp64 rounds as a fused multiply-add does."""
    layer, x = linear(200, 33, bias=False), torch.randn(4, 200)
    ours = packed(layer, "int8")
    q, scale = ours.matrix.matrix
    groups = F.pad(x, (0, -200 % CODES)).unflatten(1, (-1, CODES))
    most = groups.abs().amax(2)
    codes = (groups * (127 / most)[..., None]).round()
    sums = torch.einsum("rgc,ogc->rog", codes, F.pad(q.float(), (0, -200 % CODES)).unflatten(1, (-1, CODES)))
    total = torch.zeros(4, 33)
    for i in range(sums.shape[2]):
        total = (sums[..., i].double() * (most[:, i, None] / 127).double() + total.double()).float()
    assert ours(x).equal(total * scale)
    assert off(ours(x), F.linear(round_activations(x).double(), dequantize(ours.matrix.matrix).double())) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_without_native_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layer goes on, row-major, and back; a state_dict is the same for both."""
    layer, x = linear(100, 70), torch.randn(6, 100)
    ours = packed(layer, kind)
    expected, state = ours(x), {name: value.clone() for name, value in ours.state_dict().items()}
    limit = 0.005 if kind == "bf16" and cpu.isa() == "avx512bf16" else 1e-5  # that one rounds x to bf16
    gc.collect()  # engines of earlier tests: only the library ends their threads
    with monkeypatch.context() as patch:
        patch.setattr(build, "load", lambda: build.Library(None, None, "none here"))
        assert off(ours(x), expected) < limit and "kernels=torch" in repr(ours)
        assert all(value.equal(state[name]) for name, value in ours.state_dict().items())
        assert off(packed(layer, kind)(x.bfloat16()), expected) < 0.01
        assert all(value.equal(state[name]) for name, value in packed(layer, kind).state_dict().items())
    assert ours(x).equal(expected)


class Net(nn.Module):
    """Two tied layers, an embedding that a third one is tied with, a layer that is in two places, and one of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 48)
        self.up, self.same = nn.Linear(48, 64), nn.Linear(48, 64)
        self.same.weight = self.up.weight
        self.down = nn.Linear(64, 48)
        self.more = nn.ModuleList([self.down, nn.MultiheadAttention(48, 4, batch_first=True)])
        self.head = nn.Linear(48, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        x = self.down(F.gelu(self.up(x) + self.same(x)))
        return self.head(self.more[1](x, x, x, need_weights=False)[0])


@torch.no_grad()
def test_ties_and_places(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, ids = Net().eval(), torch.arange(20).view(2, 10)
    expected, before = net(ids), net.embed.weight.clone()
    with caplog.at_level(logging.INFO, "slipstream.quantized.packed"):
        ours: Any = slipstream.quantize(net, torch.int8)
    assert ours is net and off(ours(ids), expected) < 0.05
    assert ours.up.matrix is ours.same.matrix and not ours.up.bias.equal(ours.same.bias)
    assert ours.down is ours.more[0] and ours.embed.weight.equal(before)
    assert type(ours.more[1].out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    assert "more.1.out_proj stays as it is: a NonDynamicallyQuantizableLinear computes its product" in caplog.text
    assert "quantize: 3 matrices to int8, 0.0 MB to 0.0 MB" in caplog.text
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    twin = copy.deepcopy(ours)
    assert twin.up.matrix is twin.same.matrix and twin.up.matrix is not ours.up.matrix and twin(ids).equal(ours(ids))
    assert ours.to(torch.float32)(ids).equal(twin(ids))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_fills_another_module(kind: str) -> None:
    torch.manual_seed(1)
    saved = slipstream.quantize(Net(), kind)
    torch.manual_seed(2)
    other: Any = slipstream.quantize(Net(), kind)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    state, ids = torch.load(file, weights_only=True), torch.arange(6)[None]
    dtypes = {"int8": torch.int8, "int4": torch.uint8, "bf16": torch.bfloat16}
    assert state["up.matrix.codes"].dtype == dtypes[kind] and state["up.matrix.codes"].shape[0] == 64
    assert not other(ids).equal(saved(ids))
    other.load_state_dict(state)
    assert other(ids).equal(saved(ids)) and other.up.matrix is other.same.matrix
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(ids).equal(saved(ids))
    with pytest.raises(RuntimeError, match=r"up\.weight is not quantized: load it before slipstream\.quantize"):
        other.load_state_dict(Net().state_dict())
    another = "bf16" if kind == "int8" else "int8"
    with pytest.raises(RuntimeError, match="quantize to the dtype and block that it was saved with"):
        slipstream.quantize(Net(), another).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*down\.bias"):
        other.load_state_dict({name: value for name, value in state.items() if name != "down.bias"})


@torch.no_grad()
def test_casts_leave_codes_as_they_are() -> None:
    ours, x = packed(nn.Sequential(linear(64, 48), nn.LayerNorm(48)), "int8"), torch.randn(3, 64)
    first = ours[0](x)
    state = {name: value.clone() for name, value in ours[0].state_dict().items()}
    ours.bfloat16()
    assert all(value.equal(state[name]) for name, value in ours[0].state_dict().items())
    assert ours[0].weight.dtype == ours[1].weight.dtype == torch.bfloat16 and ours[0](x).equal(first)
    assert ours(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert ours[0](x).equal(first.bfloat16())


@native
@torch.no_grad()
def test_threads_and_forks() -> None:
    """Products of several threads at once, and of a forked process."""
    ours, x = packed(nn.Sequential(linear(768, 2048), nn.GELU(), linear(2048, 8)), "int8"), torch.randn(2, 768)
    expected = ours(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(y.equal(expected) for y in pool.map(lambda _: ours(x), range(40)))
    with warnings.catch_warnings(action="ignore"):  # of a fork beside threads
        child = os.fork()
    if not child:
        os._exit(0 if ours(x).equal(expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@native
@torch.no_grad()
def test_inside_of_a_parallel_region() -> None:
    """There OpenMP gives a product one thread, and threads of its own compute it."""
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "GOMP_parallel"):
        pytest.skip("torch's OpenMP is not GNU's")
    ours, x, threads, found = packed(linear(768, 2048), "int8"), torch.randn(2, 768), torch.get_num_threads(), list[Tensor]()
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(products.linear(x, ours.matrix._record, None)))
    torch.set_num_threads(2)
    try:
        expected = ours(x) - ours.bias
        found.append(products.linear(x, ours.matrix._record, None))
        openmp.GOMP_parallel(region, None, 2, 0)
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 3 and all(y.equal(found[0]) for y in found)
    torch.testing.assert_close(found[0], expected)


@native
@torch.no_grad()
def test_products_end_no_thread() -> None:
    """Where they have fewer than torch has: OpenMP would end the others and start them again for torch's next operation."""
    ours, x, threads = packed(linear(768, 2048), "int8"), torch.randn(2, 768), torch.get_num_threads()
    rows, matrices = torch.randn(12, 256), torch.randn(3, 256, 1024)  # for three threads
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 2)

    def of_torch() -> set[str]:
        torch.zeros(1 << 22).exp_()
        return set(os.listdir("/proc/self/task"))

    try:
        for product in (lambda: ours(x), *[lambda: grouped_rows(rows, matrices, [4, 4, 4])] * fits(rows, matrices)):
            before = of_torch()
            product()
            assert before <= of_torch()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@torch.no_grad()
def test_torch_compile_cuts_its_graph_around_products() -> None:
    ours, x = packed(nn.Sequential(linear(64, 32), nn.GELU(), linear(32, 8)), "int8"), torch.randn(2, 64)
    assert torch.compile(ours, backend="eager")(x).equal(ours(x))


@torch.no_grad()
def test_code_that_reads_weights() -> None:
    """torch's fused encoder layer would multiply by them; it takes its other path, which calls the layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    ours = packed(layer, "int8")
    assert isinstance(ours.linear1, PackedLinear) and 0 < off(ours(x), layer(x)) < 0.02
    weight = ours.linear1.weight
    assert (weight.dtype, weight.device.type, weight.requires_grad) == (torch.float32, "cpu", False)
    assert off(x @ weight.T, x @ layer.linear1.weight.T) < 0.02 and weight.clone().equal(ours.linear1.dequantized())


def tiny(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of transformers with random weights, and inputs of it."""
    torch.manual_seed(4)
    ids, sizes = torch.arange(14).view(2, 7) % 60 + 3, dict[str, Any]()
    if name == "t5":
        sizes = {"d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 2, "num_heads": 3, "vocab_size": 96}
        sizes |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
        config: Any = transformers.T5Config(**sizes)
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    if name == "vit":
        config = transformers.ViTConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8
        )
        return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(3, 3, 32, 32)}
    if name == "whisper":
        sizes = {"d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "vocab_size": 96}
        more: dict[str, Any] = {"encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "decoder_attention_heads": 3, "num_mel_bins": 8}
        ends: dict[str, Any] = {
            "max_source_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        config = transformers.WhisperConfig(**sizes, **more, **ends)
        inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids[:, :5]}
        return transformers.WhisperForConditionalGeneration(config), inputs
    config = transformers.GPT2Config(vocab_size=96, n_embd=48, n_layer=2, n_head=3, n_positions=32)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids}


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "vit", "whisper", "gpt2"])
def test_models_of_transformers(name: str) -> None:
    model, inputs = tiny(name)
    model.eval()
    expected = model(**inputs).logits
    for kind in KINDS:
        ours = packed(model, kind)
        left = [module for module in ours.modules() if isinstance(module, nn.Linear | Conv1D)]
        layers = [module for module in ours.modules() if isinstance(module, PackedLinear)]
        assert not left and len(layers) > 8
        logits = ours(**inputs).logits
        cosine = F.cosine_similarity(logits.flatten(), expected.flatten(), dim=0)
        assert float(cosine) > COSINES[kind], (name, kind, float(cosine))
        assert ours(**inputs).logits.equal(logits)
        if kind == "int4" and (head := ours.get_output_embeddings()) is not None and name != "vit":
            assert head.matrix.bits == 8 and layers[0].matrix.bits == 4
    if name in ("t5", "gpt2"):
        answer = ours.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert answer.shape[0] == 2 and ours.dtype == torch.float32


def test_what_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"dtype is 'int3'; it must be one of int8, int4, bf16"):
        slipstream.quantize(net, "int3")
    with pytest.raises(ValueError, match=r"block is 48, with dtype int4; it is for int4, one of 32, 64, 128"):
        slipstream.quantize(net, "int4", block=48)
    with pytest.raises(ValueError, match=r"block is 32, with dtype int8"):
        slipstream.quantize(net, torch.int8, block=32)
    with pytest.raises(ValueError, match=r"dtype='int8' is for inference and bits=4 to train adapters"):
        slipstream.quantize(net, "int8", bits=4)
    with pytest.raises(ValueError, match=r"include=\['upper'\] matches the name of no nn\.Linear of Net; its first are up, same"):
        slipstream.quantize(net, "int8", include=("upper",))
    with pytest.raises(ValueError, match=r"no linear layer of Net is left to quantize: .*skip=\['\*'\]"):
        slipstream.quantize(net, "int8", skip=("*",))
    with pytest.raises(ValueError, match=r"no linear layer of ReLU is left"):
        slipstream.quantize(nn.ReLU(), "int8")
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ValueError, match=r"layer 'up' is on the meta device, without values: load the model, then quantize it"):
        slipstream.quantize(empty, "int8")
    net.down.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"layer 'down' has non-finite weights; leave it out with skip=\['down'\]"):
        slipstream.quantize(net, "int8")
    assert type(net.up) is nn.Linear
    slipstream.quantize(net, "int8", include=("*down", "head"), skip=("down",))
    kinds = {name: type(module).__name__ for name, module in net.named_children()}
    assert kinds == {"embed": "Embedding", "up": "Linear", "same": "Linear", "down": "Linear", "more": "ModuleList"} | {
        "head": "PackedLinear"
    }


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_what_sees_only_torchs_operations_is_refused() -> None:
    """A trace of the native kernels would return memory that nothing has written."""
    layer, x = packed(linear(64, 32), "int8"), torch.randn(4, 64)
    for call in (
        lambda: torch.jit.trace(layer, x),
        lambda: torch.func.vmap(layer)(x),
        lambda: torch.export.export(layer, (x,), strict=False),
    ):
        with pytest.raises(ValueError, match=r"in native code: trace the model before slipstream\.quantize, or call"):
            call()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"without fullgraph=True, and torch\.export before slipstream\.quantize"
    ):
        torch.export.export(layer, (x,), strict=True)
    with pytest.raises(ValueError, match=r"is on meta, and its weight on cpu: move one of them"):
        layer(x.to("meta"))
    trained = slipstream.quantize(nn.Sequential(linear(64, 32)), bits=8)
    assert torch.equal(torch.func.vmap(trained)(x), trained(x)) and torch.equal(torch.jit.trace(trained, x)(-x), trained(-x))


@pytest.mark.parametrize("how", [{"dtype": "int8"}, {"bits": 4}])
def test_lazy_layers_are_refused(how: Any) -> None:
    model = nn.Sequential(linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is lazy, .* before the first forward: run one, then quantize"):
        slipstream.quantize(model, **how)
    assert type(model[0]) is nn.Linear
    model(torch.randn(2, 8))
    assert isinstance(slipstream.quantize(model, **how)[1], PackedLinear | QuantizedLinear)  # type: ignore[index]


def test_gradients_are_refused() -> None:
    ours = packed(nn.Sequential(linear(8, 6), nn.Tanh()), "bf16")
    x = torch.ones(2, 8)
    assert not ours(x).requires_grad  # all parameters are frozen
    with pytest.raises(
        ValueError, match=r"PackedLinear\(8, 6, bias=True, bits=16, kernels=\w+\) computes no gradients: .*no_grad.*bits=4"
    ):
        ours(x.requires_grad_())
    with torch.no_grad():
        ours(x)
    with pytest.raises(ValueError, match=r"has the shape \[2, 16\]; its last dimension must be 8"):
        ours(torch.ones(2, 16))


def test_routers_stay() -> None:
    """Of our layer of experts and DeepSpeed's, and the weights that mix a residual branch."""
    from slipstream.compat.moe import MoE as DeepSpeeds
    from slipstream.moe import GatedMLP, MoE

    ours = MoE(32, None, 4, expert_size=32, residual=GatedMLP(32, 32))
    theirs = DeepSpeeds(32, GatedMLP(32, 32), 4, use_residual=True)
    model = nn.ModuleList((ours, theirs))
    slipstream.quantize(model, "int4")
    stay = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert stay == {"0.router", "0.coefficient", "1.deepspeed_moe.gate.wg", "1.coefficient"}
    assert isinstance(model.get_submodule("0.residual.down"), PackedLinear)


@torch.no_grad()
def test_layers_that_stay(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Plain(nn.Linear):
        pass

    model = nn.Sequential(Mine(4, 4), Plain(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[2].register_forward_hook(lambda *_: None)
    slipstream.quantize(model, "int8")
    assert [type(module).__name__ for module in model] == ["Mine", "PackedLinear", "Linear", "Linear"]
    for line in (
        "0 stays as it is: a Mine computes",
        "2 stays as it is: it has hooks",
        "3 stays as it is: its weight is torch.float64",
    ):
        assert line in caplog.text


@torch.no_grad()
def test_weights_that_only_torch_reads(caplog: pytest.LogCaptureFixture) -> None:
    """A wrapper of tensors (DTensor, torchao) has no memory: reading it crashed the process."""
    model = twins.tiny("Llama", **twins.SIZES)
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight.data
        layer.mlp.up_proj.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    with pytest.raises(ValueError, match="LlamaForCausalLM computes with TwoTensor, which only torch"):
        slipstream.init_inference(model, device="cpu")
    slipstream.quantize(model, "int8")
    assert "model.layers.0.mlp.up_proj stays as it is: its weight is a TwoTensor, which" in caplog.text
    with pytest.raises(ValueError, match="the input is a TwoTensor"):
        model(torch.tensor([[3, 1]]))


@torch.no_grad()
def test_conv1d_is_transposed() -> None:
    torch.manual_seed(0)
    layer = Conv1D(24, 64)
    ours = packed(layer, "int8")
    assert (ours.in_features, ours.out_features) == (64, 24)
    assert off(ours(torch.eye(64)), layer(torch.eye(64))) < 0.02


def test_bits_of_the_stored_matrix() -> None:
    ours = packed(linear(64, 32), "int4", block=64)
    assert isinstance(ours.matrix.matrix, Int4) and ours.matrix.matrix.scale.shape == (32, 1)
    assert isinstance(packed(linear(64, 32), "int8").matrix.matrix, Int8)
    assert [packed(linear(64, 32), kind).matrix.bits for kind in KINDS] == [8, 4, 16]
    stored = sum(part.nbytes for part in ours.matrix.buffers())
    assert stored == 64 * 32 // 2 + 2 * 32 * 2


@torch.no_grad()
def test_engines_of_any_module() -> None:
    """`init_inference` of what is no decoder and no encoder: outputs, of a copy."""
    for name in ("t5", "vit", "whisper"):
        model, inputs = tiny(name)
        expected = model.eval()(**inputs).logits
        with slipstream.init_inference(model, dtype="int8", device="cpu") as engine:
            cosine = F.cosine_similarity(engine(**inputs).logits.flatten(), expected.flatten(), dim=0)
            assert 0.999 < float(cosine) < 1 and "int8, outputs only, " in engine.description
            assert not any(isinstance(module, PackedLinear) for module in model.modules())
            with pytest.raises(ValueError, match=rf"{type(model).__name__} is not a decoder that is served: engine\(\.\.\.\)"):
                engine.generate([1, 2, 3])
            if name == "t5":
                assert engine.module.generate(inputs["input_ids"], max_new_tokens=2).shape[0] == 2
    net, x = nn.Sequential(linear(64, 48), nn.Dropout(0.5), linear(48, 32)), torch.randn(4, 64)
    expected = net.eval()(x)
    net.train()
    for dtype, packs in ((None, False), ("fp32", False), ("bf16", True), ("int4", True)):
        engine = slipstream.init_inference(net, dtype=dtype, device="cpu")
        assert isinstance(engine.module[0], PackedLinear) == packs and net.training
        assert off(engine(x.bfloat16() if dtype == "bf16" else x).float(), expected) < (0.2 if packs else 1e-6)
    assert not engine(torch.randn(1, 64)).requires_grad and net[0].weight.requires_grad
    with pytest.raises(
        ValueError, match="Sequential gives outputs, it neither generates nor embeds: leave out max_context, max_running"
    ):
        slipstream.init_inference(net, device="cpu", max_context=8, max_running=3)
    with pytest.raises(ValueError, match="cannot update its weights: it is quantized once"):
        engine.update_weights([])
