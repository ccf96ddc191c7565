"""The native attention over a cache of bf16, whose numbers are multiplied in pairs where the processor can: a layer whose matrices
copy its inputs to queries, keys and values, and the mixed values to its outputs, beside the same in fp64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.inference.config import Layer, TransformerConfig
from slipstream.inference.decoder import distances, visible
from slipstream.inference.native import NativeDecoder
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp
from slipstream.ops import cpu
from tests.cases import EVERYTHING
from tests.inference.test_native import pytestmark

__all__ = ["pytestmark"]

ISAS = ["portable", "avx2", "avx512", "avx512vnni", "avx512bf16"]
ULP = 2.0**-8  # of bf16: rounding changes a number by up to half of it


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    used = cpu.isa()
    if not cpu.use_isa(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    yield request.param
    assert cpu.use_isa(used)


def config_of(heads: int, group: int, dim: int, **more: Any) -> TransformerConfig:
    """One layer, of inputs [queries of `heads` * `group` heads, keys and values of `heads`]."""
    layer = Layer(rope=None, window=more.pop("window", 0))
    size = (heads * group + 2 * heads) * dim
    sizes = {"vocab_size": 16, "hidden_size": size, "intermediate_size": 32, "head_dim": dim, "max_context": 2048}
    more |= {"layers": (layer,), "norms": (), "norm_eps": 1e-5, "final_norm": False, "gated": False, "has_head": False}
    return TransformerConfig(**sizes, num_heads=heads * group, num_kv_heads=heads, **more)


def attended(config: TransformerConfig, x_NLE: Tensor, cache: torch.dtype = torch.bfloat16) -> Tensor:
    """What the kernel's attention adds to rows of N sequences: [N, L, heads * dim]."""
    size = config.hidden_size
    all_E, width = torch.eye(size), config.num_heads * config.head_dim
    q, k, v = all_E.split([width, *[config.num_kv_heads * config.head_dim] * 2])
    mlp = Mlp(up=torch.zeros(32, size), down=torch.zeros(size, 32))
    layer = LayerWeights(q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), out=all_E[:, :width].contiguous(), mlp=mlp)
    weights = DecoderWeights(embed=torch.zeros(16, size), final_norm=None, head=None, layers=[layer])
    num, length = x_NLE.shape[:2]
    runner = NativeDecoder(config, weights, num_blocks=num * -(-length // 16) + 1, cache_dtype=cache, threads=2)
    try:
        runner.keys.fill_(torch.nan)  # of requests that had these blocks before
        runner.values.fill_(torch.nan)
        return (runner.rows(x_NLE.flatten(0, 1), length).view(x_NLE.shape) - x_NLE)[..., :width]
    finally:
        runner.close()


def parts_of(config: TransformerConfig, x_NLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, heads, L, dim], the latter two repeated for each query head."""
    width, group = config.num_heads * config.head_dim, config.num_heads // config.num_kv_heads
    q, k, v = x_NLE.split([width, *[config.num_kv_heads * config.head_dim] * 2], -1)
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in (q, k, v))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def weights_of(config: TransformerConfig, q: Tensor, k: Tensor) -> Tensor:
    """[N, heads, L, L]"""
    length, window, cap = q.shape[2], config.layers[0].window, config.attn_softcap
    scores = q @ k.transpose(2, 3) * config.head_dim**-0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if config.alibi:
        scores = scores + distances(0, length, 0, q.device) * torch.tensor(config.alibi, dtype=q.dtype)[:, None, None]
    return scores.masked_fill(~visible(0, length, 0, window, q.device, causal=config.causal), -torch.inf).softmax(-1)


def side_by_side(mixed: Tensor) -> Tensor:
    return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("seed", range(16 if EVERYTHING else 8))
def test_as_in_fp64(isa: str, seed: int) -> None:
    """The rounding of weights, and of their sum, changes the result by half an ulp each at most; fp32 is exact beside that."""
    rng = random.Random(seed)
    heads, group, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 7]), 16 * rng.choice([1, 2, 3, 4, 5, 7, 9])
    more: dict[str, Any] = {"window": rng.choice([0, 0, 1, 5, 24, 61])}
    more |= {"attn_softcap": rng.choice([0.0, 0.0, 5.0]), "causal": rng.random() < 0.8}
    if more["causal"] and rng.random() < 0.4:
        more["alibi"] = tuple(rng.random() for _ in range(heads * group))
    config = config_of(heads, group, dim, **more)
    torch.manual_seed(seed)
    x = 2 * torch.randn(rng.choice([1, 3]), rng.choice([1, 2, 3, 15, 16, 17, 31, 50, 257, 290]), config.hidden_size)
    q, k, v = (part.double() for part in parts_of(config, x))
    k, v = k.bfloat16().double(), v.bfloat16().double()
    q = q.bfloat16().double() if isa == "avx512bf16" else q
    p = weights_of(config, q, k)
    error = (attended(config, x).double() - side_by_side(p @ v)).abs()
    allowed = ((ULP if isa == "avx512bf16" else 0) + 1e-4) * side_by_side(p @ v.abs()) + 1e-5
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} of what rounding explains; {config}, {list(x.shape)}"


@pytest.mark.parametrize("length", [63, 300])
def test_no_less_exact_than_torch_in_bf16(isa: str, length: int) -> None:
    config = config_of(2, 3, 64)
    torch.manual_seed(length)
    x = torch.randn(2, length, config.hidden_size)
    q, k, v = parts_of(config, x)
    exact = side_by_side(weights_of(config, q.double(), k.double()) @ v.double())
    of_torch = side_by_side(F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)).double()
    ours = (attended(config, x).double() - exact).norm()
    assert ours <= (of_torch - exact).norm(), f"the error is {ours / (of_torch - exact).norm():.2f} of torch's"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 7, 20, 256])
def test_values_out_of_sight_are_no_terms(isa: str, at: int, value: float) -> None:
    """A broken value beside one that a query sees, in a pair, before the causal edge and behind that of a window."""
    for window in (0, 5, 6):
        config = config_of(1, 2, 16, window=window)
        torch.manual_seed(at)
        x = torch.randn(1, 270, config.hidden_size)
        expected = attended(config, x)
        x[0, at, -1] = value
        actual, sees = attended(config, x)[0], visible(0, 270, 0, window, x.device)[:, at]
        assert actual[~sees].equal(expected[0, ~sees])
        assert not actual[sees][:, [15, 31]].isfinite().any()
