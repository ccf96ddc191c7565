"""Triton's kernels and the forward made of them: against plain torch, and the same bits in every batch.

On a CPU they run in Triton's interpreter (tests/conftest.py switches it on), on a GPU compiled.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(os.path.join(sys.prefix, "triton"))  # `make test` puts it where no other process of the tests finds it
pytest.importorskip("triton", reason="needs the package triton, in whose language the kernels are written", exc_type=ImportError)

import triton.language as tl
from benchmarks import cuda as benchmark
from benchmarks.legs import Options

from slipstream.inference import decoder
from slipstream.inference.config import NORMS, Layer, Rope, RoutedExperts, TransformerConfig
from slipstream.inference.cuda import CudaDecoder, why_not
from slipstream.inference.decoder import Decoder, head_shapes
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp, leaves, mapped, quantize
from slipstream.ops import optim, products
from slipstream.ops.matrices import Int4, Int8, dequantize, to_int4, to_int8
from slipstream.ops.triton import attention, flat, rows
from slipstream.ops.triton.linear import linear, num_slices
from slipstream.ops.triton.tiles import num_ranges
from tests.inference.test_native import Requests

sys.path.remove(APART := os.path.join(sys.prefix, "triton"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEAR = pytest.mark.slow if DEVICE == "cpu" else ()  # seconds in the interpreter
# The interpreter cuts bf16 off where it should round.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


# On a GPU, what overflows is infinite and nothing is said.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """At every call of a function within a kernel it prepares all of Triton's language anew, for a millisecond. Once is enough."""
    if DEVICE == "cuda":
        yield
        return
    from triton import _utils
    from triton.runtime import interpreter

    interpreter._patch_lang(tl.sigmoid.fn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", lambda self, *args, **more: self.rewrite()(*args, **more))
        patch.setattr(_utils, "TRITON_MAX_TENSOR_NUMEL", 1 << 21)  # tiles.multiply spreads out its products
        yield


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = float(expected.float().abs().max()) or 1.0
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype] * scale)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# -- kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "int8", "int4", pytest.param("int4 of 128", marks=DEAR)])
def test_linear(kind: str, dtype: torch.dtype) -> None:
    """One row, few and many; slices of the features in planes and together: the same bits."""
    columns, features, slices = 72, 640, 2
    x, bias, w = noise(130, features, dtype=dtype), noise(columns), noise(columns, features)
    matrix = {"plain": w.to(dtype), "int8": to_int8(w), "int4": to_int4(w), "int4 of 128": to_int4(w, 128)}[kind]
    tensors: Any = (*matrix, *(None,) * (3 - len(matrix))) if isinstance(matrix, (Int8, Int4)) else (matrix, None, None)
    full = torch.full((1, 130, columns), torch.nan, device=DEVICE)
    linear(x, *tensors, bias, full, slices)
    close(full[0], x.float() @ dequantize(matrix).float().T + bias, dtype)
    for part, num_planes in ((slice(129, 130), 1), (slice(129, 130), slices), (slice(50, 69), slices)):
        planes = torch.full((num_planes, len(x[part]), columns), torch.nan, device=DEVICE)
        linear(x[part].contiguous(), *tensors, bias, planes, slices)
        assert planes.sum(0).equal(full[0, part]), f"{num_planes} planes of rows {part}"
    close(products._by_triton(x[:7], matrix, bias), full[0, :7], dtype)  # of any module


@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
def test_products_of_each_head(kind: str) -> None:
    """Heads of rows that lie apart, into results that lie apart."""
    heads, columns, features = 3, 40, 64
    x, w = noise(5, heads, features + 8)[:, :, 8:], noise(heads * columns, features)
    matrix = {"plain": w, "int8": to_int8(w), "int4": to_int4(w)}[kind]
    tensors: Any = (*matrix, *(None,) * (3 - len(matrix))) if isinstance(matrix, (Int8, Int4)) else (matrix, None, None)
    out = torch.zeros(1, 5, heads + 1, columns + 4, device=DEVICE)
    linear(x, *tensors, None, out[:, :, :heads, 4:], 1)
    close(out[0, :, :heads, 4:], torch.einsum("thf,hcf->thc", x, dequantize(matrix).unflatten(0, (heads, -1))), torch.float32)
    out[:, :, :heads, 4:] = 0
    assert not out.any(), "what is beside the result was written"


def test_slices_follow_from_the_matrix() -> None:
    assert [num_slices(*shape) for shape in ((2048, 2048), (16384, 2048), (2048, 8192), (64, 64))] == [4, 1, 8, 1]


def norm_of(kind: str, *shape: int) -> rows.Norm:
    bias = noise(*shape) if kind == "layer with bias" else None
    return rows.Norm(noise(*shape), bias, 1e-5, centered=kind != "rms")


def normed(x: Tensor, norm: rows.Norm | rows.HeadNorms | None, part: slice = slice(None)) -> Tensor:
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm.centered else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight[part]
    return x if norm.bias is None else x + norm.bias[part]


@pytest.mark.parametrize("kinds", [("rms", "rms"), ("rms", ""), ("", "rms"), ("layer", "layer with bias"), ("", "")])
@pytest.mark.parametrize("planes", [0, 1, 3])
def test_add_norm(planes: int, kinds: tuple[str, str]) -> None:
    """Before and after the residual, and without an output."""
    post, norm = (norm_of(kind, 80) if kind else None for kind in kinds)
    for after, dtype in ((False, torch.float32), (True, torch.float32), (False, None)):
        x, added = noise(3, 80) + 1, noise(max(planes, 1), 3, 80)
        total = added.sum(0)
        expected = x.clone()
        if planes:
            expected = normed(x + total, post) if after else x + 0.5 * normed(total, post)
        actual = rows.add_norm(x, added if planes else None, post, norm, dtype, scale=0.5, after=after)
        close(x, expected, torch.float32)
        if dtype is None:
            assert actual is x
        else:
            close(actual, normed(expected, norm), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "whole", "half"),
    [("", False, 0), ("", False, 12), ("rms", False, 12), ("rms", False, 5), ("rms", True, 5), ("layer with bias", False, 5)],
)
def test_place(norm: str, whole: bool, half: int, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, planes = 6, 2, 24, noise(2, 3, 10 * 24)
    norms = rows.HeadNorms(*norm_of(norm, heads + kv_heads, dim), whole=whole) if norm else None
    angle = torch.arange(9.0, device=DEVICE)[:, None] * torch.rand(half, device=DEVICE)
    turns = (angle.cos(), angle.sin()) if half else None
    angles, slots = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([3, 0, 8], [9, -1, 2]))
    keys, values = (torch.zeros(4, 4, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    q = rows.place(planes, norms, turns, angles, slots, keys, values, num_heads=heads, dtype=dtype)
    parts = list(planes.sum(0).unflatten(1, (10, dim)).split((heads, kv_heads, kv_heads), 1))
    for i, part in ((0, slice(heads)), (1, slice(heads, heads + kv_heads))):
        if norms is not None:
            own = norms._replace(weight=norms.weight[part].flatten()) if whole else norms
            parts[i] = normed(parts[i].flatten(1), own).view(3, -1, dim) if whole else normed(parts[i], own, part)
        if turns is not None:
            parts[i] = decoder.rotate(parts[i], *(turn[angles.long()][:, None] for turn in turns))
    close(q, parts[0], dtype)
    for cache, expected in ((keys, parts[1]), (values, parts[2])):
        flat = cache.flatten(0, 1)
        close(flat[[9, 2]], expected[[0, 2]], dtype)
        flat[[9, 2]] = 0
        assert not flat.any(), "a slot of no row was written"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_gate(activation: str) -> None:
    planes = 3 * noise(2, 3, 2 * 1100)
    gate, up = planes.sum(0).chunk(2, -1)
    close(rows.gate(planes, activation, torch.float32), decoder.activate(activation, gate) * up, torch.float32)
    plain = rows.gate(planes, activation, torch.float32, gated=False)
    close(plain, decoder.activate(activation, planes.sum(0)), torch.float32)


def test_ranges() -> None:
    """Without a gap, one after the other; few for a long context."""
    starts = [next(p for p in range(0, 40_000, 128) if num_ranges(p + 1) == number + 1) for number in range(40)]
    assert starts[:18] == [128 * r for r in range(17)] + [2304]
    assert all(num_ranges(start) == number for number, start in enumerate(starts) if number)
    assert num_ranges(131_072) == 64


@pytest.mark.parametrize(
    ("window", "cap", "alibi", "causal", "dim", "dtype"),
    [
        pytest.param(0, 0.0, False, True, 24, torch.float16, marks=DEAR),
        (0, 3.0, False, True, 24, torch.bfloat16),
        (50, 0.0, True, True, 24, torch.float32),
        (10, 0.0, False, False, 24, torch.float32),
        pytest.param(0, 0.0, True, False, 24, torch.float32, marks=DEAR),
        pytest.param(0, 0.0, False, True, 300, torch.float32, marks=DEAR),  # in three chunks
        pytest.param(50, 0.0, False, True, 200, torch.float32, marks=DEAR),  # in two, which 16-bit numbers do not need
    ],
)
def test_attention(window: int, cap: float, alibi: bool, causal: bool, dim: int, dtype: torch.dtype) -> None:
    """Two requests over scattered blocks, in one tile or many; what is not theirs is NaN."""
    heads, kv_heads, block_size, starts, lengths = 6, 2, 16, (1100, 130), (21, 1)
    slopes = torch.rand(heads, device=DEVICE) / 20 if alibi else None
    keys, values = (torch.full((99, block_size, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    order, tables, at, expected = torch.randperm(99).tolist(), [], [], []
    q = noise(sum(lengths), heads, dim, dtype=dtype)
    for start, length, queries in zip(starts, lengths, q.split(lengths), strict=True):
        stop = start + length
        at.append(len(tables))
        blocks = [order.pop() for _ in range(-(-stop // block_size))]
        tables += blocks
        slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(stop)])
        k, v = (noise(stop, kv_heads, dim, dtype=dtype) for _ in range(2))
        keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v
        mask = decoder.visible(start, length, 0, window, q.device, causal=causal)
        bias = None if slopes is None else decoder.distances(start, length, 0, q.device) * slopes[:, None, None]
        expected.append(decoder.attend(queries.float(), k.float(), v.float(), mask, scale=0.3, cap=cap, bias=bias))
    pairs = list(zip(starts, lengths, strict=True))
    ints = {
        "positions": [p for start, length in pairs for p in range(start, start + length)],
        "stops": [p + 1 if causal else start + length for start, length in pairs for p in range(start, start + length)],
        "row": [0, 16, 21],
        "length": [16, 5, 1],
        "table": [at[0], at[0], at[1]],
        "tables": tables,
    }
    on = {name: torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for name, numbers in ints.items()}
    where = [on.pop("positions"), on.pop("stops")]
    options: Any = {"scale": 0.3, "cap": cap, "window": window, "slopes": slopes}
    actual = attention.attend(q, keys, values, *where, attention.Tiles(**on, lanes=64, context=1121), **options)
    close(actual, torch.cat(expected).flatten(1), dtype)
    one = attention.Tiles(
        *(torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (0, 1, at[0])),
        on["tables"],
        lanes=64 if dtype == torch.float32 else 16,
        context=1121,
    )
    own = (ints[20:21] for ints in where)
    assert attention.attend(q[20:21], keys, values, *own, one, **options).equal(actual[20:21])


# -- a training step's flat arrays

RULES: dict[str, dict[str, Any]] = {
    "adamw": {
        "step": 3,
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled": True,
        "bias_correction": True,
    },
    "adam": {
        "step": 3,
        "lr": 1e-2,
        "beta1": 0.4,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled": False,
        "bias_correction": False,
    },
    "lion": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.3, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": True, "first": False},
    "plain sgd": {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "first": True},
    "adagrad": {"step": 2, "lr": 1e-2, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1},
}


# The interpreter cuts bf16 off.
@pytest.mark.parametrize("half", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_updates_have_the_bits_of_the_kernels_for_cpus(name: str, half: torch.dtype) -> None:
    """Masters in fp32 and in half, states in fp32 and in half, with weights to write and without. 2,100: two blocks and a bit."""
    kind = {"adam": "adamw", "plain sgd": "sgd"}.get(name, name)
    for master_type, state_type, writes in ((torch.float32, torch.float32, True), (half, half, False), (torch.float32, half, True)):
        master, grad = torch.randn(2100).to(master_type), torch.randn(2100).to(half)
        m = None if name in ("adagrad", "plain sgd") else torch.randn(2100).to(state_type)
        v = torch.rand(2100).to(state_type) if kind in ("adamw", "adagrad") else None
        arrays = [master, grad, m, v, torch.zeros(2100, dtype=half) if writes else None]
        own = [None if array is None else array.to(DEVICE, copy=True) for array in arrays]
        options = RULES[name] | {"scale": 0.5}

        def run(values: list[Any], options: dict[str, Any] = options) -> None:
            states = values[2:4] if kind == "adamw" else values[3:4] if kind == "adagrad" else values[2:3]
            getattr(optim, kind)(*values[:2], *states, values[4], **options)

        with pytest.MonkeyPatch.context() as patch:  # the call of the public operation, as it would be for a GPU
            caught: list[Any] = []
            patch.setattr(optim.optim_reference, "step", lambda *args: caught.append(args) or (0.0, 0.0))
            patch.setattr(optim.cpu, "_kernels", lambda: None)
            patch.setattr(optim.gpu, "kernels", lambda *_: None)
            run(own)
        rule, *values, c, flags, _ = caught[0]
        flat.step(rule, *values, c, flags)
        run(arrays)
        for one, other in zip(own, arrays, strict=True):
            assert (one is other is None) or torch.equal(one.cpu(), other), f"{master_type} {state_type}"


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_reduction_has_the_bits_of_torch(accumulate: bool) -> None:
    for source_type, out_type in itertools.product((torch.float32, torch.float16), repeat=2):
        source, out = noise(5000, dtype=source_type), noise(5000, dtype=out_type)
        wide = source.float() * 0.3
        expected = (wide + out.float() if accumulate else wide).to(out_type)
        square = flat.reduce_into(out, source, 0.3, accumulate)
        assert torch.equal(out, expected) and square.item() == pytest.approx(expected.double().square().sum().item(), rel=1e-12)


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Serving's products by wgmma alone, whatever the rows, and nothing contracted: batch invariance rests on it. All kernels fit
    the shared memory of smaller GPUs. No GPU is needed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.compile_kernels"],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), APART])},
    )
    assert not done.returncode, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels and all(kernel["shared"] <= 99 << 10 for kernel in kernels), kernels
    sparse = [kernel for kernel in kernels if kernel["module"] == "sparse"]
    assert {kernel["kernel"] for kernel in sparse if kernel["wgmma"]} == {"_forward", "_query_grads", "_key_grads"}
    for kernel in [kernel for kernel in kernels if kernel["module"] not in ("sparse", "fused")]:
        multiplies = kernel["kernel"] in ("_linear", "_attend")
        assert kernel["wgmma"] == (multiplies and kernel["products"] != "fp32"), kernel
        assert not kernel["mma"] and kernel["fused"] <= (multiplies and kernel["products"] == "fp32"), kernel


# -- the forward


def config_of(**changes: Any) -> TransformerConfig:
    rope = Rope(inv_freq=tuple(100.0 ** (-i / 6) for i in range(6)), scale=1.1)  # 12 of a head's 32 features turn
    config = TransformerConfig(
        vocab_size=113,
        hidden_size=96,
        intermediate_size=160,
        num_heads=3,
        num_kv_heads=1,
        head_dim=32,
        layers=(Layer(rope=rope), Layer(rope=rope, window=10)),
        norm_eps=1e-5,
        max_context=512,
    )
    return replace(config, **changes)


def weights_of(c: TransformerConfig, dtype: torch.dtype) -> DecoderWeights:
    """Of every kind that the configuration has a place for."""
    torch.manual_seed(3)
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def w(*shape: int) -> Tensor:
        return noise(*shape, dtype=dtype) / shape[-1] ** 0.5

    def vector(size: int, present: bool = True) -> Any:
        return noise(size, dtype=dtype) / 2 + (1 - c.norm_offset) if present else None

    def mlp(size: int) -> Mlp:
        biases = {f"{name}_bias": vector(n, c.mlp_bias) for name, n in (("gate", size), ("up", size), ("down", c.hidden_size))}
        return Mlp(gate=w(size, c.hidden_size), up=w(size, c.hidden_size), down=w(c.hidden_size, size), **biases)

    def layer(kind: Layer) -> LayerWeights:
        e = kind.experts
        return LayerWeights(
            input_norm=vector(c.hidden_size),
            mlp_norm=vector(c.hidden_size),
            attn_post_norm=vector(c.hidden_size, c.norms == NORMS),
            mlp_post_norm=vector(c.hidden_size, c.norms == NORMS),
            q=w(q_size, c.hidden_size),
            k=w(kv_size, c.hidden_size),
            v=w(kv_size, c.hidden_size),
            out=w(c.hidden_size, q_size),
            q_bias=vector(q_size, c.qkv_bias),
            k_bias=vector(kv_size, c.qkv_bias),
            v_bias=None,
            out_bias=vector(c.hidden_size, c.out_bias),
            q_norm=vector(c.head_dim, bool(c.qk_norm)),
            k_norm=vector(c.head_dim, bool(c.qk_norm)),
            mlp=None if e else mlp(c.intermediate_size),
            experts=[mlp(e.intermediate_size) for _ in range(e.num)] if e else [],
            router=w(e.num, c.hidden_size) if e else None,
            shared=mlp(e.shared_size) if e and e.shared_size else None,
            shared_gate=w(1, c.hidden_size) if e and e.shared_size else None,
        )

    return DecoderWeights(
        embed=w(c.vocab_size, c.hidden_size),
        final_norm=vector(c.hidden_size),
        head=None if c.tied else w(c.vocab_size, c.hidden_size),
        layers=[layer(kind) for kind in c.layers],
    )


def runner_of(kind: type, config: TransformerConfig, weights: DecoderWeights, dtype: torch.dtype, **options: Any) -> Any:
    cache = KVCache(head_shapes(config), num_blocks=96, block_size=16, dtype=dtype, device=DEVICE)
    return kind(config, weights, cache, dtype, **options)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases, tied": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True, "activation": "gelu"},
    "gemma": {
        "norms": NORMS,
        "norm_offset": 1.0,
        "qk_norm": "head",
        "activation": "gelu_tanh",
        "attn_softcap": 4.0,
        "logit_softcap": 3.0,
        "embed_scale": 5.5,
        "attn_scale": 0.3,
    },
    "experts": {
        "layers": tuple(
            Layer(rope=None, experts=RoutedExperts(num=4, top_k=2, intermediate_size=48, normalize=n, shared_size=s))
            for n, s in ((True, 0), (False, 40))
        )
    },
}


@pytest.mark.parametrize("model", [name if name in ("gemma", "experts") else pytest.param(name, marks=DEAR) for name in MODELS])
def test_forward_as_the_torch_decoder(model: str) -> None:
    """A prompt in chunks beside a generation, and then both generate."""
    config = config_of(**MODELS[model])
    weights = weights_of(config, torch.float32)
    twin, cuda = (
        Requests(runner_of(Decoder, config, weights, torch.float32), 0),
        Requests(runner_of(CudaDecoder, config, weights, torch.float32, max_batch=4), 0),
    )
    tokens = [[i * i % 113 for i in range(14)], [3, 1, 4]]
    both = [[side.request(t) for t in tokens] for side in (twin, cuda)]
    for chunks in ([(0, 0, 8), (1, 0, 2)], [(1, 2, 3), (0, 8, 13)], [(0, 13, 14), (1, 2, 3)]):
        actual, reference = (
            torch.stack(side.run([(requests[r], start, stop) for r, start, stop in chunks]))
            for side, requests in ((cuda, both[1]), (twin, both[0]))
        )
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)


def test_a_context_that_memory_does_not_hold() -> None:
    """Rotary tables, of short texts and of long ones, are as long as the cache."""
    rope = Rope(inv_freq=(1.0, 0.5, 0.2, 0.1), long_inv_freq=(0.5, 0.2, 0.1, 0.01), short_context=8)
    config = config_of(layers=(Layer(rope=rope),), max_context=10**15)
    weights = weights_of(config, torch.float32)
    twin, cuda = (
        Requests(runner_of(Decoder, config, weights, torch.float32), 0),
        Requests(runner_of(CudaDecoder, config, weights, torch.float32, max_batch=0), 0),
    )
    for length in (5, 14):
        actual, reference = (
            torch.stack(side.run([(side.request([i * i % 113 for i in range(length)]), 0, length)])) for side in (cuda, twin)
        )
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "kind"), [pytest.param("gemma", "", marks=DEAR), ("experts", ""), pytest.param("biases, tied", "int8", marks=DEAR)]
)
def test_new_weights_take_the_place_of_old_ones(model: str, kind: str) -> None:
    """The same bits as of a decoder that is made of them."""
    config = config_of(**MODELS[model])

    def scaled(scale: float) -> DecoderWeights:
        weights = mapped(weights_of(config, torch.float32), lambda role, m: m * scale)
        return quantize(weights, kind, 32) if kind else weights

    old, new = (runner_of(CudaDecoder, config, scaled(scale), torch.float32, max_batch=4) for scale in (0.5, 1.0))
    for role, weight in leaves(scaled(1.0)):
        old.put(role, weight)
    actual, reference = (side.run([(side.request([3, 1, 4]), 0, 3)])[0] for side in (Requests(old, 0), Requests(new, 0)))
    assert actual.equal(reference)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("plain", torch.float16), ("plain", torch.bfloat16), ("int8", torch.bfloat16), ("mixed", torch.float16)]
)
def test_forward_in_few_bits(kind: str, dtype: torch.dtype) -> None:
    config = config_of(layers=(Layer(rope=None),) * 2)
    weights = weights_of(config, dtype)
    if kind != "plain":
        weights = quantize(weights, "int8")
    if kind == "mixed":  # as in GGUF files: q, k and v of different types
        weights.layers[0].k = to_int4(dequantize(weights.layers[0].k))
        weights.layers[1].v = dequantize(weights.layers[1].v).to(dtype)
    wide = mapped(weights, lambda role, m: dequantize(m).float())  # the twin in fp32, of the very same weights
    tokens = [i * i % 113 for i in range(12)]
    actual, reference = (
        side.run([(side.request(tokens), 0, 12)])[0]
        for side in (
            Requests(runner_of(CudaDecoder, config, weights, dtype, max_batch=0), 0),
            Requests(runner_of(Decoder, config, wide, torch.float32), 0),
        )
    )
    close(actual, reference, torch.bfloat16)


@pytest.mark.parametrize("kind", [pytest.param("bfloat16", marks=DEAR), "int4"])  # the output matrix is int8 in int4
def test_the_same_bits_in_every_batch(kind: str) -> None:
    """Alone, beside others, with random splits of the prompt, and generating, by graphs where there is a GPU."""
    config, dtype = config_of(qk_norm="head", num_heads=2, layers=config_of().layers[1:]), torch.bfloat16
    weights = weights_of(config, dtype)
    weights = quantize(weights, kind) if kind.startswith("int") else weights
    rng = random.Random(kind)
    prompts = [[rng.randrange(113) for _ in range(length)] for length in (1, 7, 24)]
    runner = runner_of(CudaDecoder, config, weights, dtype, max_batch=4)
    expected = []
    for prompt in prompts:
        alone = Requests(runner, 0)
        expected.append(alone.run([(alone.request(prompt), 0, len(prompt))])[0])
    many = Requests(runner, 1)
    requests = [many.request(prompt) for prompt in prompts]
    done = [0] * len(requests)
    while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
        left = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
        chunks = [(requests[i], done[i], rng.randint(done[i] + 1, len(prompts[i]))) for i in left]
        for i, chunk, logits in zip(left, chunks, many.run(chunks), strict=True):
            done[i] = chunk[2]
            if done[i] == len(prompts[i]):
                assert logits.equal(expected[i]), f"request {i} of {len(prompts[i])} tokens"
    again = many.run([(request, len(request.tokens) - 1, len(request.tokens)) for request in requests])
    assert all(logits.equal(reference) for logits, reference in zip(again, expected, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="there are true graphs in test_the_same_bits_in_every_batch")
def test_what_is_static_around_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU: stand-ins, whose replay computes again from what was captured."""
    config = config_of(layers=config_of().layers[1:])
    runner = runner_of(CudaDecoder, config, weights_of(config, torch.float32), torch.float32, max_batch=0)
    computed: list[tuple[Any, Tensor]] = []

    def compute(step: Any) -> Tensor:
        computed.append((step, CudaDecoder._compute(runner, step)))
        return computed[-1][1]

    class Graph:
        def replay(self) -> None:
            self.logits.copy_(CudaDecoder._compute(runner, self.step))

    @contextmanager
    def capturing(graph: Any, **_: Any) -> Iterator[None]:
        yield
        graph.step, graph.logits = computed[-1]

    stand_ins = {"CUDAGraph": Graph, "Stream": object, "graph": capturing, "graph_pool_handle": object, "synchronize": lambda: None}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(runner, "_compute", compute)
    runner._capture(5)
    assert list(runner._graphs) == [1, 2, 4, 5] and not any(keys.any() for keys in runner.cache.keys)
    requests, expected = Requests(runner, 0), []
    prompts = [[i * i % 113 for i in range(length)] for length in (18, 2, 5)]
    handles = [requests.request(prompt) for prompt in prompts]
    for request, prompt in zip(handles, prompts, strict=True):
        expected += requests.run([(request, 0, len(prompt))])
    computed.clear()
    for chosen in ([0], [2, 0], [1, 2, 0]):
        actual = requests.run([(handles[i], len(prompts[i]) - 1, len(prompts[i])) for i in chosen])
        assert all(logits.equal(expected[i]) for logits, i in zip(actual, chosen, strict=True)), chosen
    assert not computed, "a forward went past the graphs"


def test_rows_without_a_request_change_nothing() -> None:
    """As in a graph for more rows than there are requests."""
    config = config_of()
    runner = runner_of(CudaDecoder, config, weights_of(config, torch.float32), torch.float32, max_batch=0)
    one = Requests(runner, 0)
    expected = one.run([(one.request([5, 6]), 0, 2)])[0]
    numbers, cuts = runner._pack([[5, 6], [0, 1], [0, 1], [1, 2], [48, 49], [1], [0], [2], [0], [3]], 4)
    before = [keys.clone() for keys in runner.cache.keys]
    logits = runner._compute(runner._step(numbers.to(DEVICE), cuts, 64, 512))
    assert logits[0].equal(expected)
    for old, new in zip(before, runner.cache.keys, strict=True):
        assert (old != new).flatten(1).any(1).nonzero().flatten().tolist() == [3], "blocks that were written"


def test_matrices_are_held_once() -> None:
    config = config_of()
    weights = weights_of(config, torch.float32)
    q = weights.layers[0].q.clone()
    runner_of(CudaDecoder, config, weights, torch.float32, max_batch=0)
    layer = weights.layers[0]
    assert layer.q.equal(q) and layer.q.untyped_storage().data_ptr() == layer.v.untyped_storage().data_ptr()


@pytest.mark.skipif(DEVICE == "cuda", reason="this is for hosts without a GPU")
def test_the_benchmark_says_what_it_lacks() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        benchmark.run(Options())


def test_what_it_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    weights = weights_of(config, torch.float32)
    assert why_not(config, weights, torch.device(DEVICE)) is None
    weights.layers[1].out = to_int4(weights.layers[1].out, 48)
    assert why_not(config, weights, torch.device(DEVICE)) == "int4 in groups of 48; the kernels support groups of 32, 64, 128"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not(config, weights, torch.device("cuda")) == "compute capability 7.5; the kernels need 8.0"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_reaches_only_who_sees_it(value: float) -> None:
    keys, values, q = (noise(2, 16, 1, 24), noise(2, 16, 1, 24), noise(20, 2, 24))
    numbers = ([0, 16], [16, 4], [0, 0], [0, 1])  # tiles of rows 0 to 15 and 16 to 19; both blocks
    tiles = attention.Tiles(*(torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in numbers), lanes=64, context=32)
    positions = torch.arange(20, dtype=torch.int32, device=DEVICE)
    options: Any = {"scale": 0.3, "cap": 0.0, "window": 0}
    expected = attention.attend(q, keys, values, positions, positions + 1, tiles, **options)
    values[0, 9, 0, 3] = value
    actual = attention.attend(q, keys, values, positions, positions + 1, tiles, **options)
    assert actual[:9].equal(expected[:9]) and not actual[9:].isfinite().any()
