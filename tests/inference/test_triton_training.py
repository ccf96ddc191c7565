"""Triton's kernels of training's layers, called as on a GPU: against dense attention and plain torch.

On a CPU they run in Triton's interpreter, on a GPU compiled.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.inference.test_triton import DEAR, DEVICE, quick_interpreter  # isort: skip  # first: it finds triton, or skips
from slipstream.ops import block_sparse, cpu, fused, gpu
from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention
from tests.unit import test_fused
from tests.unit.test_sparse_attention import dense, some_blocks

__all__ = ["quick_interpreter"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # hashes overflow
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}  # the interpreter cuts bf16 off


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


# -- block-sparse attention


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A layout's tables are those of a GPU, which choose the kernels."""
    gpu._is_usable.cache_clear()
    both = BlockLayout._both_sides
    monkeypatch.setattr(BlockLayout, "on", lambda self, device: block_sparse._Tiles(*(x.to(device) for x in both(self))))
    return monkeypatch


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    """Outputs, and gradients of all inputs."""
    weight = torch.randn(theirs.shape, device=DEVICE)
    grads = (torch.autograd.grad((out.double() * weight).sum(), inputs) for out in (ours, theirs))
    for mine, other in ((ours, theirs), *zip(*grads, strict=True)):
        scale = float(other.detach().abs().max()) or 1.0
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=tolerance * scale)


CASES = [  # batch, heads, key heads, tokens, features, block, a layout per head, causal, dtype, biased
    (2, 4, 2, 96, 24, 16, True, False, torch.float32, True),
    (1, 2, 2, 128, 16, 64, False, True, torch.float32, False),
    (1, 2, 1, 96, 40, 48, True, True, torch.float16, True),
    pytest.param((1, 1, 1, 128, 256, 32, False, False, torch.float32, False), marks=DEAR),
    pytest.param((1, 2, 1, 256, 128, 128, True, True, torch.bfloat16, True), marks=DEAR),
    pytest.param((2, 2, 2, 128, 80, 64, True, False, torch.bfloat16, False), marks=DEAR),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sparse_attention_is_dense_attention_with_a_mask(by_triton: pytest.MonkeyPatch, case: tuple[Any, ...]) -> None:
    batch, num, kv, length, dim, block, per_head, causal, dtype, biased = case
    layout = BlockLayout(some_blocks(num if per_head else 1, length // block), block, causal=causal)
    inputs = [leaf(batch, length, each, dim, dtype=dtype) for each in (num, kv, kv)]
    heads = [x.transpose(1, 2) for x in inputs]  # rows with gaps
    bias = key_bias = None
    biases: tuple[Tensor, ...] = ()
    if biased:
        bias, key_bias = leaf(batch, num, length, length), torch.randn(batch, length, device=DEVICE)
        key_bias[0, 5:37] = float("-inf")
        biases, inputs = (bias, key_bias[:, None, None].double()), [*inputs, bias]
    ours = block_sparse_attention(*heads, layout, bias=bias, key_bias=key_bias)
    assert ours.dtype == dtype
    compare(ours, dense(*heads, layout, *biases), inputs, TOLERANCE[dtype])


def test_queries_see_their_spans_and_a_bias_is_shared_by_sequences(by_triton: pytest.MonkeyPatch) -> None:
    layout = BlockLayout(torch.ones(1, 4, 4), 16)
    inputs = [leaf(3, 2, 64, 16) for _ in range(3)]
    bias = leaf(1, 64, 64)
    spans = torch.randint(65, (3, 64, 2), device=DEVICE).sort(-1).values
    key = torch.arange(64, device=DEVICE)
    outside = (key < spans[..., :1]) | (key >= spans[..., 1:])
    ours = block_sparse_attention(*inputs, layout, bias=bias, spans=spans)
    compare(ours, dense(*inputs, layout, bias, -1e38 * outside[:, None].double()), [*inputs, bias], 2e-5)


def test_a_query_without_keys_gets_zeros(by_triton: pytest.MonkeyPatch) -> None:
    inputs = [leaf(1, 1, 32, 16) for _ in range(3)]
    never = torch.full((1, 32), torch.finfo(torch.float32).min, device=DEVICE)
    out = block_sparse_attention(*inputs, BlockLayout(torch.ones(1, 2, 2), 16), key_bias=never)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert not out.any() and not any(grad.any() for grad in grads)


def test_attention_drops_what_the_kernels_for_cpus_drop(by_triton: pytest.MonkeyPatch) -> None:
    if not cpu.isa():
        pytest.skip("there is no native code")
    layout = BlockLayout(some_blocks(1, 4), 16)
    inputs = [leaf(2, 4, 64, 16), *(leaf(2, 2, 64, 16) for _ in range(2))]
    outs = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(5)
        outs.append(block_sparse_attention(*(x.to(device) for x in inputs), layout, dropout=0.3).to(DEVICE))
        by_triton.undo()
    compare(outs[0], outs[1], inputs, 2e-5)


# -- the passes between products


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, also for tensors of a CPU."""
    gpu._is_usable.cache_clear()
    monkeypatch.setattr(fused, "_kernels", lambda x: gpu.module("fused"))


through_tests_of_cpus = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has these passes on a GPU")


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_a_sum_and_its_norm(norm: str, dtype: torch.dtype) -> None:
    test_fused.test_a_sum_and_its_norm(norm, 67, dtype, "triton")


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", fused.ACTIVATIONS)
def test_activations_and_mlps(kind: str, dtype: torch.dtype) -> None:
    test_fused.test_activations_and_mlps(kind, dtype, "triton")


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
def test_rotary_positions() -> None:
    test_fused.test_rotary_positions("triton")


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("norm", ["layer", "none"])
def test_what_is_dropped_is_what_torch_drops(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients of the sum and of its norm, and of one of them."""
    leaves = [leaf(33, 48), leaf(33, 48), leaf(48)]
    columns: dict[str, Any] = {"weight": leaf(48), "shift": leaf(48)} if norm == "layer" else {}
    found: list[list[Tensor]] = []
    for kernels in (fused._kernels, lambda _: None):
        monkeypatch.setattr(fused, "_kernels", kernels)
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
        found.append([])
        for first in (0, 1):
            torch.manual_seed(3)
            both = fused.add_norm(leaves[0], residual=leaves[1], bias=leaves[2], norm=norm, dropout=0.25, **columns)
            found[-1] += [*both, *test_fused.grads_of(both[first:], [*leaves, *columns.values()])]
    test_fused.check(found[0], found[1], torch.float32)


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(("dtype", "smoothing"), [(torch.float32, 0.1), (torch.float16, 0.0)])
def test_the_loss_of_logits(dtype: torch.dtype, smoothing: float) -> None:
    """Longer rows than a block, that are columns of a matrix, too; some do not count."""
    for shape in ((6, 4500), (4500, 6)):
        logits = (4 * torch.randn(shape)).to(dtype).requires_grad_()
        rows = logits if shape[1] > 6 else logits.t()
        target = torch.tensor([0, 4499, -100, 4095, 4096, 7])
        loss = fused.cross_entropy(rows, target, label_smoothing=smoothing)
        expected = torch.nn.functional.cross_entropy(
            rows.double(), target, label_smoothing=smoothing
        )  # fp32: 1e-5 off without AVX-512
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(3 * each, logits)[0].float() for each in (loss, expected)]
        torch.testing.assert_close(*grads, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("classes", [1, 33])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_of_what_is_not_finite(classes: int, smoothing: float) -> None:
    test_fused.test_the_loss_of_what_is_not_finite(classes, smoothing)


@through_tests_of_cpus
@pytest.mark.usefixtures("passes")
def test_the_loss_of_targets_that_are_no_classes_is_nan() -> None:
    """Nothing outside the logits is read: it would be the rows beside."""
    matrix = torch.randn(6, 33, requires_grad=True)
    for wrong in (-1, 33, 1 << 40):
        loss = fused.cross_entropy(matrix, torch.tensor([0, 1, wrong, -100, 32, 7]))
        loss.backward()
        assert loss.isnan() and matrix.grad is not None
        assert matrix.grad.isnan().all(1).tolist() == [False, False, True, False, False, False]
        assert matrix.grad[[0, 1, 3, 4, 5]].isfinite().all()
        matrix.grad = None
