"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum for hidden matrices.

Shape-aware: the update of a matrix needs the whole matrix. One optimizer steps all parameters of a model: groups with
`use_muon=True` (hidden matrices, one state) use Muon, groups with `use_muon=False` (embeddings, heads, vectors) use Adam with
decoupled weight decay (two states). States are fp32.

    momentum = lerp(momentum, grad, 1 - beta)
    update   = orthogonalize(lerp(grad, momentum, beta) if nesterov else momentum)
    param    = param * (1 - lr * weight_decay) - lr * sqrt(max(1, rows / columns)) * update

In addition to `torch.optim.Muon`: the Adam half, stacks of matrices, convolutions, the Gram iteration, and fp32 products on CPU,
where bf16 has no fast path (50 times slower with AVX2: 3.8 s against 0.07 s for 768x768x3072).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from slipstream.optim.loop import step_by_rule, step_each
from slipstream.optim.rules import adamw
from slipstream.zero.leaves import is_stack, whole_shape

log = logging.getLogger(__name__)

# The quintic with the steepest slope at zero (Jordan 2024): singular values converge to about [0.7, 1.2], not to 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_MUON_LR, _ADAM_LR = 0.02, 3e-4
_ADAM = {decoupled: adamw(decoupled=decoupled) for decoupled in (True, False)}

# The beginning of a projection's name -> its kind, the first that fits. None: its rows are heads of several kinds, or no heads
_PROJECTIONS: dict[str, str | None] = {
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "in_proj_qkv", "wqkv", "q_a_proj", "kv_a_proj")),
    "q_b_proj": "latent query",
    "kv_b_proj": "latent key and value",
    **dict.fromkeys(("k_proj", "key", "wk", "v_proj", "value", "wv"), "key or value"),
    **dict.fromkeys(("q_proj", "query", "wq"), "query"),
}
_NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
_NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads")


class Muon(Optimizer):
    """Muon and Adam in one optimizer, with DeepSpeed's arguments and defaults.

    `params`: `model.named_parameters()` (split by `muon_groups`), or groups that each have `use_muon`. A group's own `lr` takes
    precedence over `muon_lr` / `adam_lr`, which take precedence over `lr`. With `use_muon`, a 3-D parameter is a stack of matrices
    (experts); one with more dimensions is flattened to two (convolutions); with a group's `heads`, a matrix is a stack of this many
    equal blocks of rows (`attention_heads`). `adam_w_mode=False` adds `weight_decay` to the Adam
    half's gradients instead. `ns_method`: "gram" (on products of the short side, cheaper for oblong matrices) or "standard"; equal
    in exact arithmetic.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | None = None,
        *,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_method: str = "gram",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
    ) -> None:
        rates = {
            True: next(rate for rate in (muon_lr, lr, _MUON_LR) if rate is not None),
            False: next(rate for rate in (adam_lr, lr, _ADAM_LR) if rate is not None),
        }
        if min(rates.values()) < 0 or weight_decay < 0 or eps < 0:
            raise ValueError(f"Muon: learning rates ({rates}), weight_decay ({weight_decay}), eps ({eps}) must not be negative")
        if not all(0 <= beta < 1 for beta in (momentum, *betas)):
            raise ValueError(f"Muon: momentum ({momentum}) and betas {tuple(betas)} must lie in [0, 1)")
        if ns_method not in _ITERATIONS:
            raise ValueError(f"Muon: ns_method {ns_method!r} is not one of {sorted(_ITERATIONS)}")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"Muon: ns_steps ({ns_steps}) must lie in 1..99; the usual value is 5")
        defaults = {
            "lr": rates[False],
            "use_muon": False,
            "heads": 1,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "adam_w_mode": adam_w_mode,
        }
        super().__init__([{"lr": rates[bool(group["use_muon"])], **group} for group in _groups(params)], defaults)
        for group in self.param_groups:
            for shape in map(whole_shape, group["params"] if group["heads"] != 1 else ()):
                if len(shape) != 2 or group["heads"] < 1 or shape[0] % group["heads"]:
                    raise ValueError(f"Muon: a parameter of shape {shape} has no rows for {group['heads']} equal heads")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return step_each(self, closure, self._update)

    def _update(self, state: dict[str, Any], param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not group["use_muon"]:
            step_by_rule(_ADAM[bool(group["adam_w_mode"])], state, param, grad, group)
            return
        if not state:
            if param.ndim < 2:
                raise ValueError(
                    f"Muon: a parameter of shape {tuple(param.shape)} is not a matrix; put it in a group with"
                    f" use_muon=False (muon_groups(model.named_parameters()) does that)"
                )
            state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
        buffer: Tensor = state["momentum_buffer"]
        grad = grad.to(buffer.dtype)
        momentum = group["momentum"]
        buffer.lerp_(grad, 1 - momentum)
        update = as_matrices(grad.lerp(buffer, momentum) if group["nesterov"] else buffer)
        if (heads := group.get("heads", 1)) > 1:  # groups saved before have none
            update = update.unflatten(0, (heads, -1))
        rows, columns = update.shape[-2:]
        update = orthogonalize(update, steps=group["ns_steps"], method=group["ns_method"]).reshape(param.shape)
        lr = float(group["lr"])
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-lr * math.sqrt(max(1.0, rows / columns)))


def muon_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    groups: Iterable[Mapping[str, Any]] | None = None,
    heads: Mapping[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Split parameters into groups for `Muon`: hidden matrices (`use_muon=True`) and all others (`use_muon=False`).

    Hidden matrices have two or more dimensions. Not hidden: vectors, matrices with a side of 1 (nothing to orthogonalize), and
    parameters that are an embedding or a head by any of their names. `groups` are the caller's parameter groups: each is split in
    two and keeps its options; a group that already has `use_muon` is unchanged. Empty groups are dropped, so pass the whole model's
    parameters, not one rank's. With `heads` (of `attention_heads`), each number of heads has a group of its own.
    """
    named = list(named_parameters)
    parameters = {id(param): param for _, param in named}
    adam = {id(param) for name, param in named if not _is_hidden_matrix(name, param)}
    result: list[dict[str, Any]] = []
    for group in groups if groups is not None else [{"params": list(parameters.values())}]:
        if "use_muon" in group:
            result.append(dict(group))
            continue
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for param in params:
            if id(param) not in parameters:
                raise ValueError(
                    f"Muon: a parameter of shape {tuple(param.shape)} is in a group but not in the model,"
                    f" so its name is unknown; set use_muon in its group"
                )
        halves: dict[tuple[bool, int], list[Tensor]] = {}
        for param in params:
            is_adam = id(param) in adam
            halves.setdefault((is_adam, 1 if is_adam else (heads or {}).get(id(param), 1)), []).append(param)
        for (is_adam, number), half in sorted(halves.items(), key=lambda item: item[0]):
            result.append({**group, "params": half, "use_muon": not is_adam, **({"heads": number} if number > 1 else {})})
    return result


def attention_heads(model: nn.Module) -> dict[int, int]:
    """The heads of the model's query, key and value projections: id of a weight -> number of heads, each a block of its rows.

    A projection is known by the name of its module (`q_proj`, `key`, `wv`; `q_b_proj` and `kv_b_proj` of latent attention), its
    heads by `model.config`: it must have as many rows as heads times a head's width. Combined projections are left out; so is, with
    a warning, one whose rows do not fit. Raises ValueError if none fits.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    found: dict[int, int] = {}
    unfit: dict[str, int] = {}
    for name, param in model.named_parameters():
        module = name.lower().split(".")[-2:][0]
        kind = next((kind for start, kind in _PROJECTIONS.items() if module.startswith(start)), None)
        if kind is None or len(whole_shape(param)) != 2 or not _is_hidden_matrix(name, param):
            continue
        rows, (heads, widths) = whole_shape(param)[0], _heads(kind, config)
        if heads and any(rows == heads * width for width in widths):
            found[id(param)] = heads
        else:
            unfit[module] = rows
    if not found:
        raise ValueError(
            f"optimizer.params.per_head_muon: no query, key or value projection of {type(model).__name__} has as many rows as "
            f"model.config has heads times their width (rows: {unfit or 'none found'}); drop the option"
        )
    if unfit:
        log.warning("per_head_muon: %s (rows) are not heads of model.config, and are orthogonalized as whole matrices", unfit)
    return found


def _heads(kind: str, config: Any) -> tuple[int | None, list[int]]:
    """The number of heads in a projection's rows, and the possible widths of one."""

    def first(*names: str) -> int | None:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    heads, hidden, rest = first(*_NUM_HEADS), first("hidden_size"), first("qk_nope_head_dim")
    plain = first("head_dim") or (hidden // heads if heads and hidden and hidden % heads == 0 else None)
    if kind == "key or value":
        return first(*_NUM_KEY_HEADS) or heads, [plain] if plain else []
    beside = first("v_head_dim" if kind == "latent key and value" else "qk_rope_head_dim")
    latent = [rest + beside] if rest is not None and beside is not None else []
    return heads, latent + ([plain] if plain and kind == "query" else [])


def as_matrices(tensor: Tensor) -> Tensor:
    """[rows, columns] or [stack, rows, columns]; with more dimensions, all but the first are flattened."""
    return tensor if tensor.ndim <= 3 else tensor.flatten(1)


def orthogonalize(matrices: Tensor, *, steps: int, method: str, dtype: torch.dtype | None = None) -> Tensor:
    """The approximate nearest semi-orthogonal matrix of each of `matrices`, by a quintic Newton-Schulz iteration.

    `dtype`: of the products and the result. Default: fp32 on CPU; on an accelerator bf16 for "standard", and for "gram" fp16, which
    has three more bits (all values stay near 1 after the normalization).
    """
    if dtype is None:
        dtype = torch.float32 if matrices.device.type == "cpu" else _ITERATIONS[method][1]
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)).to(dtype)  # all singular values <= 1
    x = _ITERATIONS[method][0](x, steps)
    return x.mT if tall else x


def _standard(x: Tensor, steps: int) -> Tensor:
    """x <- (a + b A + c A^2) x, with A = x x^T, `steps` times; x has no more rows than columns."""
    for _ in range(steps):
        gram = x @ x.mT
        x = _fma(x, _fma(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x


def _gram(x: Tensor, steps: int) -> Tensor:
    """`_standard`, but with polynomials of A alone (square, of the short side), which are applied to x at the end.

    A is recomputed after two steps: otherwise rounding in half precision makes small eigenvalues of A negative, and they grow
    12-fold per step (tridao.me/blog/2026/gram-newton-schulz).
    """
    if x.size(-2) == x.size(-1):
        return _standard(x, steps)
    for start, stop in ((0, min(2, steps)), (2, steps)):
        if start >= stop:
            continue
        gram, product = x @ x.mT, None
        for step in range(start, stop):
            z = _fma(gram, gram, gram, beta=_B, alpha=_C)
            if product is None:
                product = z.clone()
                product.diagonal(dim1=-2, dim2=-1).add_(_A)
            else:
                product = _fma(product, z, product, beta=_A)
            if step < stop - 1:  # A <- (a + z) A (a + z); they commute
                half = _fma(gram, z, gram, beta=_A)
                gram = _fma(half, z, half, beta=_A)
        assert product is not None, "at least one step between restarts"
        x = product @ x
    return x


def _fma(addend: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta * addend + alpha * left @ right, for a matrix or a stack of them."""
    multiply = torch.addmm if addend.ndim == 2 else torch.baddbmm
    return multiply(addend, left, right, beta=beta, alpha=alpha)


_ITERATIONS: dict[str, tuple[Callable[[Tensor, int], Tensor], torch.dtype]] = {
    "standard": (_standard, torch.bfloat16),
    "gram": (_gram, torch.float16),
}


def _is_hidden_matrix(name: str, param: Tensor) -> bool:
    lowered = re.sub(r"\.modules_to_save\.[^.]*", "", name.lower())  # PEFT's copies
    parts = lowered.split(".")
    if "embed" in lowered or "lm_head" in lowered or {"wte", "wpe"} & {*parts} or "shared" in parts[-2:]:  # GPT-2's, T5's
        return False
    shape = whole_shape(param)
    return len(shape) - is_stack(param) >= 2 and min(shape[-2:] if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))) > 1


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    items = list(params)
    if items and all(isinstance(item, tuple) for item in items):
        return muon_groups(items)
    if items and all(isinstance(item, dict) and "use_muon" in item for item in items):
        return items
    raise ValueError(
        "Muon needs names to tell hidden matrices from embeddings and heads: pass model.named_parameters(),"
        " or muon_groups(model.named_parameters(), groups), or groups that each have use_muon"
    )
