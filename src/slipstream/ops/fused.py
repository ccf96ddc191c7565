"""The computations of a transformer layer between its products, each in one pass over memory, forward and backward.

add_norm    sum = dropout(x + bias) + residual, and its LayerNorm or RMSNorm
activation  GELU, SiLU or ReLU of x + bias, times a second input if the MLP is gated
mlp         two (gated: three) products with the activation between; the backward recomputes the activation
rotary      rotary positions of queries and keys
cross_entropy  the loss of logits, without fp32 copies of them

CPU tensors of fp32, bf16 and fp16 go to native kernels (`csrc/fused.c`), those of GPUs to Triton's (`ops/triton/fused.py`),
others to the same functions in torch. Arithmetic is fp32, and each result is rounded once. Biases and weights of norms may have
another dtype than the activations.

[Note: Dropout without a mask] An element's dropout factor is a hash of (seed, row, column), in forward and backward, so nothing
is stored. The seed comes from torch's generator: the recompute of activation checkpointing draws the same one.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slipstream.ops import cpu, gpu
from slipstream.ops.derivatives import once_differentiable

Norm = Literal["none", "layer", "rms"]
Activation = Literal["gelu_tanh", "gelu", "silu", "relu"]
NORMS: dict[str, int] = {"none": 0, "layer": 1, "rms": 2}  # as in csrc/fused.h
ACTIVATIONS: dict[str, int] = {"gelu_tanh": 0, "gelu": 1, "silu": 2, "relu": 3}  # as in csrc/vec_activation.h
_ADD_NORM, _ADD_NORM_BACKWARD, _ACTIVATE, _ACTIVATE_BACKWARD, _ROTATE, _LOSE, _LOSE_BACKWARD = range(7)
_LEAST = 1 << 14  # minimum elements per thread
_MOST_COLUMNS = 1 << 14  # of a norm on a GPU, where one program holds a row
_WORD = 0xFFFFFFFF


class _FusedArrays(ctypes.Structure):
    """`struct fused` of csrc/fused.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "grad", "sum_grad", "sum", "out", "dsum", "dx")),
        *((name, ctypes.c_void_p) for name in ("bias", "weight", "shift", "inverse_weight")),
        *((name, ctypes.c_void_p) for name in ("dbias", "dweight", "dshift", "stats")),
        *((name, ctypes.c_int64) for name in ("columns", "heads", "rotated", "tokens", "stride")),
        *((name, ctypes.c_float) for name in ("eps", "least")),
        ("seed", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "kind")),
    )


def _kernels(x: Tensor) -> Any:
    """Triton's kernels for a GPU tensor; None for other tensors, without triton, and while torch compiles."""
    is_real = x.is_cuda and x.dtype in cpu.DTYPES and not isinstance(x, FakeTensor)
    return gpu.module("fused") if is_real and not torch.compiler.is_compiling() else None


def _is_native(x: Tensor) -> bool:
    if x.is_cpu and x.dtype in cpu.DTYPES and not isinstance(x, FakeTensor) and cpu._kernels() is not None:
        return True
    return _kernels(x) is not None


def _is_native_norm(x: Tensor) -> bool:
    return _is_native(x) and (_kernels(x) is None or x.shape[-1] <= _MOST_COLUMNS)


def _run(
    which: int, rows: int, x: Tensor, arrays: Mapping[str, Tensor | None], sums: Mapping[str, bool], **numbers: float
) -> dict[str, Tensor]:
    """Run a pass over all rows, in threads. sums: column gradients and whether they are wanted; returns those, fp32 [columns]."""
    if (kernels := _kernels(x)) is not None:
        by_triton: dict[str, Tensor] = kernels.run(which, rows, x, arrays, sums, numbers)
        return by_triton
    columns = int(numbers["columns"])
    wanted = [name for name, is_wanted in sums.items() if is_wanted]
    padded = -(-columns // 16) * 16
    parts: dict[int, Tensor] = {}
    lock = threading.Lock()
    tensors = {name: tensor for name, tensor in arrays.items() if tensor is not None}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def run(begin: int, end: int) -> None:
        own = x.new_zeros(len(wanted), padded, dtype=torch.float32)
        s = _FusedArrays(dtype=cpu.DTYPES[x.dtype], **pointers, **numbers)
        for name, each in zip(wanted, own, strict=True):
            setattr(s, name, each.data_ptr())
        cpu._kernels().fused(which, ctypes.addressof(s), begin, end)
        with lock:
            parts[begin] = own

    cpu.in_threads(run, rows, torch.get_num_threads(), least=_LEAST // max(columns, 1) + 1, multiple=1)
    if not wanted:
        return {}
    total = functools.reduce(torch.add, (parts[begin] for begin in sorted(parts)))
    return dict(zip(wanted, total[:, :columns], strict=True))


def _column(values: Tensor | None) -> Tensor | None:
    """The values as fp32, padded to whole vectors; for a GPU unchanged."""
    if values is None:
        return None
    if _kernels(values) is not None:
        return values.detach().contiguous()
    values = values.detach().float()
    return F.pad(values, (0, -len(values) % 16)).contiguous()


# ---- dropout ----


def kept(seed: int, rows: int, columns: int, dropout: float, device: torch.device | None = None) -> Tensor:
    """The dropout factors, fp32 [rows, columns]: 0, or 1 / (1 - p) with p rounded to 1 / 65536 (csrc/vec_drop.h)."""
    least = _least(dropout)
    row = torch.arange(rows, device=device)[:, None]
    panel = torch.arange(-(-columns // 16), device=device)[None]
    x = row * 0x85EBCA6B & _WORD ^ seed
    x = _product((x ^ x >> 15) + panel * 0xC2B2AE35 & _WORD, 0x27D4EB2F)
    x = (x ^ x >> 13)[..., None] ^ (torch.arange(8, device=device) * 0x9E3779B9 & _WORD)
    x = _product(x, 0x7FEB352D)
    x = _product(x ^ x >> 15, 0x846CA68B)
    x = x ^ x >> 16
    numbers = torch.stack([x & 0xFFFF, x >> 16], -1).view(rows, -1)[:, :columns]
    return (numbers >= least).float() * (65536.0 / (65536 - least))


def _product(x: Tensor, by: int) -> Tensor:
    """The lower 32 bits of x * by, which fits into 64 bits except for its sign."""
    return x * by & _WORD


def _least(dropout: float) -> int:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout ({dropout}) must be at least 0 and less than 1")
    return min(round(dropout * 65536), 65535)


def draw_seed(dropout: float) -> int:
    """A seed from torch's generator; 0, without a draw, if nothing is dropped."""
    return int(torch.randint(1 << 32, ()).item()) if dropout else 0


# ---- sum and norm ----


class _Sum(NamedTuple):
    """What the backward needs from the forward besides tensors."""

    norm: Norm
    eps: float
    dropout: float
    seed: int
    invertible: bool
    has_bias: bool
    has_residual: bool


def _normalized(x: Tensor, weight: Tensor, shift: Tensor | None, norm: Norm, eps: float) -> Tensor:
    """The norm in torch, in fp32."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight.float(), None if shift is None else shift.float(), eps)
    return F.rms_norm(x, x.shape[-1:], weight.float(), eps)


def _sum_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, shift: Tensor | None, call: _Sum
) -> tuple[Tensor, Tensor, Tensor]:
    """sum, its norm (the sum itself without one), and statistics of rows; x: [rows, columns]."""
    adds = call.has_bias or call.has_residual or call.dropout > 0
    if not _is_native_norm(x):
        wide = x.float() if bias is None else x.float() + bias.float()
        if call.dropout:
            wide = wide * kept(call.seed, len(x), x.shape[1], call.dropout, x.device)
        total = (wide if residual is None else wide + residual.float()).to(x.dtype) if adds else x
        stats = x.new_empty(0, dtype=torch.float32)
        out = total if weight is None else _normalized(total.float(), weight, shift, call.norm, call.eps).to(x.dtype)
        return total, out, stats
    total = torch.empty_like(x) if adds else x
    has_norm = call.norm != "none"
    out = torch.empty_like(x) if has_norm else total
    stats = x.new_empty((len(x), 2) if has_norm else 0, dtype=torch.float32)
    columns = {"bias": _column(bias), "weight": _column(weight), "shift": _column(shift)}
    arrays = {"x": x, "residual": residual, "sum": total, "out": out, "stats": stats, **columns}
    numbers = {"columns": x.shape[1], "eps": call.eps, "least": _least(call.dropout), "seed": call.seed}
    _run(_ADD_NORM, len(x), x, arrays, {}, kind=NORMS[call.norm], **numbers)
    return total, out, stats


class _SumGrads(NamedTuple):
    x: Tensor | None
    residual: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    shift: Tensor | None


def _sum_backward(
    saved: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    grad: Tensor | None,
    sum_grad: Tensor | None,
    call: _Sum,
) -> _SumGrads:
    """saved: the sum, or the norm's output if the call is invertible."""
    if not _is_native_norm(saved):
        return _sum_backward_torch(saved, weight, shift, grad, sum_grad, call)
    norm = call.norm if grad is not None else "none"
    if norm == "none" and not call.dropout and not call.has_bias:
        return _SumGrads(sum_grad, sum_grad, None, None if weight is None else torch.zeros_like(weight), None)
    scaled = _column(weight)
    inverse = torch.where(scaled == 0, 0.0, 1 / scaled.float()) if scaled is not None and call.invertible else None  # 0: padding
    d_sum = torch.empty_like(saved) if call.has_residual or not call.dropout else None
    dx = torch.empty_like(saved) if call.dropout else None
    arrays = {"x": saved, "grad": grad, "sum_grad": sum_grad, "dsum": d_sum, "dx": dx, "stats": stats, "weight": scaled}
    arrays |= {"shift": _column(shift), "inverse_weight": inverse}
    sums = {"dbias": call.has_bias, "dweight": norm != "none", "dshift": norm != "none" and shift is not None}
    numbers = {"columns": saved.shape[1], "eps": call.eps, "least": _least(call.dropout), "seed": call.seed}
    column_grads = _run(_ADD_NORM_BACKWARD, len(saved), saved, arrays, sums, kind=NORMS[norm], **numbers)
    return _SumGrads(d_sum if dx is None else dx, d_sum, *(column_grads.get(name) for name in ("dbias", "dweight", "dshift")))


def _through(function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor) -> tuple[Tensor, list[Any]]:
    """function(*inputs) in torch, in fp32, and the gradients of the inputs that are not None."""
    with torch.enable_grad():
        leaves = [None if each is None else each.detach().float().requires_grad_() for each in inputs]
        out = function(*leaves)
    grads = iter(torch.autograd.grad(out, [each for each in leaves if each is not None], grad.float()))
    return out.detach(), [None if each is None else next(grads) for each in leaves]


def _sum_backward_torch(
    saved: Tensor, weight: Tensor | None, shift: Tensor | None, grad: Tensor | None, sum_grad: Tensor | None, call: _Sum
) -> _SumGrads:
    d_weight = d_shift = None
    d_sum: Any = None if sum_grad is None else sum_grad.float()
    if grad is not None and weight is not None:
        _, (through, d_weight, d_shift) = _through(
            lambda x, w, b: _normalized(x, w, b, call.norm, call.eps), (saved, weight, shift), grad
        )
        d_sum = through if d_sum is None else d_sum + through
    dx = d_sum * kept(call.seed, len(saved), saved.shape[1], call.dropout, saved.device) if call.dropout else d_sum
    d_bias = dx.sum(0) if call.has_bias else None
    return _SumGrads(dx.to(saved.dtype), d_sum.to(saved.dtype), d_bias, d_weight, d_shift)


class _AddNorm(torch.autograd.Function):
    """Returns sum and norm, or that one of them that is not its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, shift: Tensor | None, call: _Sum
    ) -> Any:
        total, out, stats = _sum_forward(x, bias, residual, weight, shift, call)
        ctx.call, ctx.outputs = call, (total is not x, out is not total)
        ctx.dtypes = [None if each is None else each.dtype for each in (bias, weight, shift)]
        ctx.save_for_backward(out if call.invertible else total if call.norm != "none" else x.new_empty(0), stats, weight, shift)
        ctx.set_materialize_grads(False)
        return (total, out) if all(ctx.outputs) else out

    @staticmethod
    @once_differentiable("fused.add_norm")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, stats, weight, shift = ctx.saved_tensors
        sum_grad, grad = grads if len(grads) == 2 else (None, *grads) if ctx.outputs[1] else (*grads, None)
        if sum_grad is None and grad is None:
            return (None,) * 6
        sum_grad, grad = (None if each is None else each.contiguous() for each in (sum_grad, grad))
        if ctx.call.norm == "none":
            saved = sum_grad
        input_grads = _sum_backward(saved, stats, weight, shift, grad, sum_grad, ctx.call)
        columns = [
            None if each is None else each.to(dtype)
            for each, dtype in zip((input_grads.bias, input_grads.weight, input_grads.shift), ctx.dtypes, strict=True)
        ]
        return input_grads.x, columns[0], input_grads.residual if ctx.call.has_residual else None, columns[1], columns[2], None


def _may_invert(weight: Tensor, shift: Tensor | None) -> bool:
    """Whether division by the weights loses few digits."""
    largest = 1.0 if shift is None else 1.0 + shift.detach().abs()
    return bool((weight.detach().abs() >= 0.05 * largest).all())


def _check_sum(
    x: Tensor, weight: Tensor | None, shift: Tensor | None, norm: str, bias: Tensor | None, residual: Tensor | None, dropout: float
) -> None:
    columns = x.shape[-1]
    if norm not in NORMS or (norm != "none") != (weight is not None) or (shift is not None and norm != "layer"):
        raise ValueError(f"norm is {norm!r}: layer takes weight and shift, rms weight, none neither; others are {list(NORMS)}")
    for name, each in (("weight", weight), ("shift", shift), ("bias", bias)):
        if each is not None and each.shape != (columns,):
            raise ValueError(f"{name} has shape {tuple(each.shape)}; x has {columns} columns, so it must have shape ({columns},)")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}; it must be that of x, {tuple(x.shape)}")
    _least(dropout)


def add_norm(
    x: Tensor,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    norm: Norm = "none",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    dropout: float = 0.0,
    invertible: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum, norm of the sum), where sum = dropout(x + bias) + residual.

    x, residual: [..., C] of one shape; if their dtypes differ, the wider one is used. weight, shift: [C], of the norm; bias: [C].
    norm: "layer" (weight x normal + shift), "rms" (weight x normal) or "none" (the sum again). dropout: the probability; pass 0 in
    evaluation. invertible: the native backward reads the norm's output instead of the sum, which then need not be kept, unless a
    weight is too small to divide by. No second derivative. Raises ValueError.
    """
    _check_sum(x, weight, shift, norm, bias, residual, dropout)
    columns = x.shape[-1]
    if residual is not None and residual.dtype != x.dtype:
        wide = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wide), residual.to(wide)
    flags = (bias is not None, residual is not None)
    invertible = invertible and weight is not None and _is_native_norm(x) and _may_invert(weight, shift)
    call = _Sum(norm, eps, dropout, 0 if isinstance(x, FakeTensor) else draw_seed(dropout), invertible, *flags)
    if norm == "none" and not (dropout or flags[0] or flags[1]):
        return x, x
    flat = None if residual is None else residual.reshape(-1, columns).contiguous()
    results = _AddNorm.apply(x.reshape(-1, columns).contiguous(), bias, flat, weight, shift, call)
    total, out = results if isinstance(results, tuple) else (x if norm != "none" else results, results)
    return total.view(x.shape), out.view(x.shape)


# ---- activations ----


def _activated(x: Tensor, bias: Tensor | None, up: Tensor | None, kind: Activation) -> Tensor:
    """The activation in torch, in fp32."""
    x = x if bias is None else x + bias.float()
    functions: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}
    y = functions[kind](x) if kind in functions else F.gelu(x, approximate="tanh")
    return y if up is None else y * up


def _activate(x: Tensor, bias: Tensor | None, up: Tensor | None, kind: Activation) -> Tensor:
    if not _is_native(x):
        return _activated(x.float(), bias, None if up is None else up.float(), kind).to(x.dtype)
    out = torch.empty_like(x)
    arrays = {"x": x, "bias": _column(bias), "residual": up, "out": out}
    _run(_ACTIVATE, len(x), x, arrays, {}, kind=ACTIVATIONS[kind], columns=x.shape[1])
    return out


def _activate_backward(
    x: Tensor, bias: Tensor | None, up: Tensor | None, grad: Tensor, kind: Activation, out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, up and bias; writes the output again into `out`. Overwrites `grad`."""
    if not _is_native(x):
        y, (dx, d_bias, d_up) = _through(functools.partial(_activated, kind=kind), (x, bias, up), grad)
        if out is not None:
            out.copy_(y)
        return dx.to(x.dtype), None if d_up is None else d_up.to(x.dtype), d_bias
    d_up = None if up is None else torch.empty_like(x)
    arrays = {"x": x, "bias": _column(bias), "residual": up, "grad": grad, "dx": grad, "dsum": d_up, "out": out}
    numbers = {"kind": ACTIVATIONS[kind], "columns": x.shape[1]}
    found_sums = _run(_ACTIVATE_BACKWARD, len(x), x, arrays, {"dbias": bias is not None}, **numbers)
    return grad, d_up, found_sums.get("dbias")


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, up: Tensor | None, kind: Activation) -> Tensor:
        ctx.save_for_backward(x, bias, up)
        ctx.kind = kind
        return _activate(x, bias, up, kind)

    @staticmethod
    @once_differentiable("fused.activation")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, up = ctx.saved_tensors
        dx, d_up, d_bias = _activate_backward(x, bias, up, grad.clone(memory_format=torch.contiguous_format), ctx.kind, None)
        return dx, None if d_bias is None else d_bias.to(bias.dtype), d_up, None


def activation(x: Tensor, kind: Activation, *, bias: Tensor | None = None, up: Tensor | None = None) -> Tensor:
    """act(x + bias), times `up` if given. x, up: [..., C] of one dtype; bias: [C]. Keeps its inputs, not its output.

    Raises ValueError for another kind or shape.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} is none of {', '.join(ACTIVATIONS)}")
    if (bias is not None and bias.shape != x.shape[-1:]) or (up is not None and (up.shape, up.dtype) != (x.shape, x.dtype)):
        shapes = [None if each is None else (tuple(each.shape), each.dtype) for each in (x, bias, up)]
        raise ValueError(f"x, bias and up are {shapes}; bias must have x's last dimension, and up its shape and dtype")
    flat = None if up is None else up.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = _Activation.apply(x.reshape(-1, x.shape[-1]).contiguous(), bias, flat, kind)
    return out.view(x.shape)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, bias: Tensor | None, up: Tensor | None, last: Tensor, kind: Activation, keep: bool
    ) -> Tensor:
        inner = x @ first.t()
        gate = None if up is None else x @ up.t()
        active = _activate(inner, bias, gate, kind)
        ctx.save_for_backward(x, inner, gate, active if keep else None, first, bias, up, last)
        ctx.kind = kind
        return active @ last.t()

    @staticmethod
    @once_differentiable("fused.mlp")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, gate, active, first, bias, up, last = ctx.saved_tensors
        needs = ctx.needs_input_grad
        again = torch.empty_like(inner) if active is None and needs[4] else None
        d_inner, d_gate, d_bias = _activate_backward(inner, bias, gate, grad @ last, ctx.kind, again)
        active = again if active is None else active
        d_last = grad.t() @ active if active is not None and needs[4] else None
        del active, again
        dx = d_inner @ first if needs[0] else None
        if dx is not None and d_gate is not None:
            dx.addmm_(d_gate, up)
        d_first = d_inner.t() @ x if needs[1] else None
        d_up = d_gate.t() @ x if d_gate is not None and needs[3] else None
        return dx, d_first, None if d_bias is None else d_bias.to(bias.dtype), d_up, d_last, None, None


def mlp(
    x: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    kind: Activation,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    keep_activation: bool = False,
) -> Tensor:
    """act(x first^T + bias) last^T, or (act(x first^T + bias) * x up^T) last^T; the caller adds the last product's bias.

    x: [..., H]. first, up: [I, H]; last: [O, I]; bias: [I]. Returns [..., O]. The backward recomputes the activation's output in
    the pass that computes its gradient, unless keep_activation. No second derivative. Under autocast, products are in its dtype.
    Raises ValueError for another kind.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} is none of {', '.join(ACTIVATIONS)}")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, first, last, up = x.to(dtype), first.to(dtype), last.to(dtype), None if up is None else up.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = _Mlp.apply(x.reshape(-1, x.shape[-1]), first, bias, up, last, kind, keep_activation)
    return out.view(*x.shape[:-1], len(last))


# ---- rotary positions ----


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> Tensor:
    """x: [tokens, heads, features] without gaps inside a token; cosine, sine: fp32 [positions, rotated], for the tokens in turn."""
    if not _is_native(x):
        rotated, half = cosine.shape[1], cosine.shape[1] // 2
        turns = len(x) // len(cosine)
        c, s = (each.repeat(turns, 1)[:, None] for each in (cosine, sine))
        a = x[..., :rotated].float()
        if back:
            turned = a * s
            turned = torch.cat((turned[..., half:], -turned[..., :half]), -1)
        else:
            turned = torch.cat((-a[..., half:], a[..., :half]), -1) * s
        return torch.cat(((a * c + turned).to(x.dtype), x[..., rotated:]), -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    numbers = {"columns": x.shape[2], "heads": x.shape[1], "rotated": cosine.shape[1], "tokens": len(cosine), "stride": x.stride(0)}
    _run(_ROTATE, len(x), x, {"x": x, "out": out, "bias": cosine, "weight": sine}, {}, kind=int(back), **numbers)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, False)

    @staticmethod
    @once_differentiable("fused.rotary")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotate(grad.contiguous(), cosine, sine, True), None, None


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x * cosine + rotate_half(x) * sine for the first R features of each head; the others stay unchanged.

    x: [B, S, heads, D]; cosine, sine: [B or 1, S, R], as transformers' rotary embeddings return them (R even, at most D).
    Returns [B, S, heads, D]. Raises ValueError.
    """
    batch, length, _, dim = x.shape
    rotated = cosine.shape[-1]
    if cosine.shape != sine.shape or cosine.shape[-2] != length or len(cosine) not in (1, batch) or rotated % 2 or rotated > dim:
        shapes = f"cosine {tuple(cosine.shape)}, sine {tuple(sine.shape)}"
        raise ValueError(
            f"{shapes}: they must be [{batch} or 1, {length}, R] for x {tuple(x.shape)}, with an even R of at most {dim}"
        )
    tables = [each.detach().float().reshape(-1, rotated).contiguous() for each in (cosine, sine)]
    flat = x.reshape(-1, *x.shape[2:])
    if flat.stride(2) != 1 or flat.stride(1) != dim:
        flat = flat.contiguous()
    out: Tensor = _Rotary.apply(flat, *tables)
    return out.view(x.shape)


# -- cross-entropy --

_TILE = 1 << 18  # number of logits widened to fp32 at once: they stay in the caches


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy(logits.float(), target, ...)`, an fp32 scalar, which keeps one number per row instead of fp32 logits.

    logits: [N, V], fp32, bf16 or fp16; target: int64 [N], classes or `ignore_index`. The backward recomputes the probabilities,
    tile by tile, and writes the gradient in the logits' dtype. No second derivative. Raises ValueError for other shapes, targets of
    another dtype, or a label_smoothing outside [0, 1]. For targets outside the classes, raises IndexError, or torch's RuntimeError
    without native kernels. GPU kernels, for which nothing waits, make the loss and the gradients of such rows NaN.
    """
    if target.dtype is not torch.int64:  # the kernels read its memory
        raise ValueError(f"cross_entropy: target is {target.dtype}; it must be torch.int64: pass target.long()")
    if logits.dim() != 2 or target.shape != logits.shape[:1] or not 0 <= label_smoothing <= 1 or reduction not in ("mean", "sum"):
        raise ValueError(
            f"cross_entropy: logits {tuple(logits.shape)}, target {tuple(target.shape)}, label_smoothing {label_smoothing}, "
            f"reduction {reduction!r}; they must be [N, V], [N], 0 to 1, and mean or sum"
        )
    counted = target != ignore_index
    loss: Tensor = _RowLoss.apply(logits, torch.where(counted, target, 0), counted, label_smoothing)
    return loss / counted.sum() if reduction == "mean" else loss


class _RowLoss(torch.autograd.Function):
    """The sum over counted rows of (1 - s)(log-sum-exp - the target's logit) + s (log-sum-exp - the mean logit)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor, smoothing: float) -> Tensor:
        kernels = _kernels(logits)
        ends, losses = (_row_losses if kernels is None else kernels.row_losses)(logits, target, smoothing)
        ctx.save_for_backward(logits, target, counted, ends)
        ctx.smoothing = smoothing
        return torch.where(counted, losses, 0.0).sum()

    @staticmethod
    @once_differentiable("fused.cross_entropy")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, counted, ends = ctx.saved_tensors
        kernels = _kernels(logits)
        row_grads = _row_grads if kernels is None else kernels.row_grads
        return row_grads(logits, target, ends, grad * counted, ctx.smoothing), None, None, None


def _row_losses(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and loss of each row."""
    ends, losses = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    if _is_native(logits):
        if len(target) and not 0 <= int(target.min()) <= int(target.max()) < logits.shape[1]:
            raise IndexError(f"cross_entropy: targets from {target.min()} to {target.max()} of {logits.shape[1]} classes")
        arrays = {"x": logits.contiguous(), "residual": target.contiguous(), "stats": ends, "out": losses}
        _run(_LOSE, len(logits), logits, arrays, {}, columns=logits.shape[1], eps=smoothing)
        return ends, losses
    for rows, end, loss, wanted in _tiles(logits, ends, losses, target):
        wide = rows.float()
        torch.logsumexp(wide, 1, out=end)
        chosen = wide.gather(1, wanted[:, None])[:, 0]
        torch.sub(end, torch.lerp(chosen, wide.mean(1), smoothing) if smoothing else chosen, out=loss)
    return ends, losses


def _row_grads(logits: Tensor, target: Tensor, ends: Tensor, scale: Tensor, smoothing: float) -> Tensor:
    """The gradient of the sum of scale [N] times the losses."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if _is_native(logits):
        arrays = {"x": logits.contiguous(), "residual": target.contiguous(), "bias": ends, "weight": scale.contiguous(), "dx": out}
        _run(_LOSE_BACKWARD, len(logits), logits, arrays, {}, columns=logits.shape[1], eps=smoothing)
        return out
    for rows, end, into, wanted, by in _tiles(logits, ends, out, target, scale):
        share = rows.float().sub_(end[:, None]).exp_()
        if smoothing:
            share.sub_(smoothing / rows.shape[1])
        share.scatter_add_(1, wanted[:, None], share.new_full((len(rows), 1), smoothing - 1))
        into.copy_(share.mul_(by[:, None]))
    return out


def _tiles(logits: Tensor, *others: Tensor) -> Any:
    """Rows of logits, with the same rows of the others, tile by tile."""
    rows = max(1, _TILE // max(1, logits.shape[1]))
    return zip(*(each.split(rows) for each in (logits, *others)), strict=True)
