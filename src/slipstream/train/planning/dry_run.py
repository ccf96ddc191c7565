"""Dry run: measure the live memory and compute of one micro-batch with fake tensors, which have shapes but no memory.

A copy of the model runs without the engine's hooks. The dry run imitates how an engine frees gradients: replicated gradients leave
`.grad` as soon as they have landed, sharded ones when the last one of their unit has landed.

Each storage counts once, from the operation that creates it until its last user drops it, in forward and backward. Memory that an
operation allocates and frees internally (a matrix product's scratch memory) does not count.

[Note: Even routes] Layers that call the modules of a list (transformers 4, or custom code) read which experts their tokens chose:
`nonzero`, `where`, masks, loops over values. Fake tensors have no values. So operations that choose from the scores of all experts
(`topk`, `argmax`, ...) return indices with values, which assign the experts in turn. Results that depend only on these indices have
values, too. Where a mask with values indexes a tensor without values, it is replaced by the positions that it selects.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from slipstream.config.plan import Plan
from slipstream.train.planning.predict import ComputeWork, Moment, Profile
from slipstream.train.precision import Precision, buffer_rule
from slipstream.zero.buffers import BUFFERS_STAY, BufferRule, buffer_dtypes
from slipstream.zero.leaves import named_leaves
from slipstream.zero.trees import map_tensors
from slipstream.zero.trees import tensors_in as tensors_in  # for observe/, too
from slipstream.zero.wrap import expert_lists, wrap
from slipstream.zero.wrap import repeated_blocks as repeated_blocks

_aten = torch.ops.aten
_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")  # torch's kernels
_CHOOSE: frozenset[Callable[..., Any]] = frozenset(
    getattr(place, name) for place in (torch, Tensor) for name in ("topk", "argmax", "max", "sort", "argsort", "multinomial")
)
_AT = frozenset((Tensor.__getitem__, Tensor.__setitem__))
Formula = Callable[..., int]  # called with an operation's arguments and its result (out_val)


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """FLOP of a grouped product: rows of `a`, or its columns, are sorted by group, or both operands are stacked."""
    return 2 * b.shape[-1] * (a.numel() if a.dim() == 2 or b.dim() == 3 else a.shape[-2] * a.shape[-1])


def _attention_flops(q: Tensor, _: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
    """FLOP of q [..., queries, d] with as many or fewer key and value heads: the scores, and their product with the values."""
    return 2 * q.shape[:-1].numel() * v.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward_flops(_: Tensor, q: Tensor, __: Tensor, v: Tensor, *___: Any, **____: Any) -> int:
    """FLOP of the recomputed scores, and of the gradients of scores, values, queries and keys."""
    return 2 * q.shape[:-1].numel() * v.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


@functools.cache
def formulas() -> Mapping[Any, Formula]:
    """FLOP formulas by operation packet: torch's, those missing in its registry, and attention's, because torch before 2.12 refuses
    keys with fewer heads than queries.

    Block-sparse attention computes scores and values of its tiles in the forward. The backward recomputes the scores and computes
    four more products.
    """
    from slipstream.ops import block_sparse, grouped  # registers its operations

    ours: Any = torch.ops.slipstream

    def forward(q: Tensor, *rest: Any, **_: Any) -> int:
        return block_sparse.product_flops(q, *rest[6:9]) * 2

    def backward(grad: Tensor, *rest: Any, **_: Any) -> int:
        return block_sparse.product_flops(grad, *rest[9:12]) * 5

    return {
        **flop_registry,
        **{getattr(_aten, f"_scaled_dot_product_{name}"): _attention_flops for name in _ATTENTION},
        **{getattr(_aten, f"_scaled_dot_product_{name}_backward"): _attention_backward_flops for name in _ATTENTION},
        **({_aten._grouped_mm: _grouped_flops} if hasattr(_aten, "_grouped_mm") else {}),
        **{product: lambda a, *_, **__: 2 * a.numel() for product in (_aten.mv, _aten.dot)},
        ours.block_sparse_forward: forward,
        ours.block_sparse_backward: backward,
        grouped.grouped_rows._opoverload.overloadpacket: _grouped_flops,
        grouped.grouped_outer._opoverload.overloadpacket: lambda a, b, *_, **__: 2 * a.numel() * b.shape[1],
    }


class DryRunError(ValueError):
    """The model cannot run on fake tensors."""


def dry_run(model: nn.Module, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], *, micro_batch_size: int) -> Profile:
    """Run one micro-batch of `micro_batch_size`. `args` and `kwargs` are an example with the plan's micro-batch size.

    Raises DryRunError if the model reads values, which fake tensors lack, and ValueError if its output requires no gradient.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        resize = partial(_like, size=plan.batch.micro_batch_size, to=micro_batch_size)
        inputs, keywords = map_tensors(tuple(args), resize), map_tensors(dict(kwargs), resize)
        ghost = without_memory(model, buffer_rule(plan.precision))
        meter = _Meter(ghost)
        precision = Precision(plan.precision, torch.device("cpu"))
        if plan.activations.way == "recompute":
            recompute_blocks(ghost, repeated_blocks(ghost)[: plan.activations.num_blocks])
        try:
            with meter, even_routes(ghost):
                inputs, keywords = precision.inputs(inputs, keywords)
                with precision.autocast():
                    output = precision.outputs(ghost(*inputs, **keywords))
                roots = roots_of(output)
                del output
                meter.phase = "backward"
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except (RuntimeError, NotImplementedError, TypeError) as error:
            where = f"{meter.phase} of {meter.block or 'the root'}"
            raise DryRunError(
                f"the dry run failed ({where}: {str(error).strip().splitlines()[0]}). If the batch is right, the model reads "
                f"values: pass the bytes that one micro-batch keeps for its backward instead: slipstream plan --activations 300M"
            ) from error
    return meter.profile()


def recompute_blocks(ghost: nn.Module, names: Iterable[str]) -> None:
    """Recompute the forward of these modules in the backward."""
    for name in names:
        block = ghost.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def profiles(
    model: nn.Module, plan: Plan, world: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[bool, int], Profile]:
    """Return a function (recompute, micro-batch size) -> profile, which needs two dry runs for any number of sizes."""
    largest, own = plan.batch.train_batch_size // world, plan.batch.micro_batch_size

    @functools.cache
    def measured(recompute: bool, size: int) -> Profile:
        activations = dataclasses.replace(plan.activations, way="recompute" if recompute else "keep")
        return dry_run(model, dataclasses.replace(plan, activations=activations), args, kwargs, micro_batch_size=size)

    def profile(recompute: bool, size: int) -> Profile:
        if size in (1, own, largest):
            return measured(recompute, size)
        return between(measured(recompute, 1), 1, measured(recompute, largest), largest, size)

    return profile


def between(small: Profile, at_small: int, large: Profile, at_large: int, size: int) -> Profile:
    """The profile at `size`, interpolated linearly between two others."""
    if len(small.moments) != len(large.moments):
        raise DryRunError("the order in which the model runs its blocks depends on the batch size; pass --activations")

    def line(a: int, b: int) -> int:
        return a if at_small == at_large else round(a + (b - a) * (size - at_small) / (at_large - at_small))

    moments = [
        Moment(a.phase, a.block, line(a.activations, b.activations), line(a.with_grads, b.with_grads))
        for a, b in zip(small.moments, large.moments, strict=True)
    ]
    forward, backward = (
        ComputeWork(*(line(a, b) for a, b in zip(*pair, strict=True)))
        for pair in ((small.forward, large.forward), (small.backward, large.backward))
    )
    return Profile(tuple(moments), forward, backward, large.dtype)


def _like(tensor: Tensor, size: int, to: int) -> Tensor:
    """A fake copy of the tensor; a first dimension equal to the micro-batch size becomes `to`."""
    shape = list(tensor.shape)
    if shape and shape[0] == size:
        shape[0] = to
    return torch.empty(shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


def without_memory(model: nn.Module, rule: BufferRule = BUFFERS_STAY, device: str = "cpu") -> nn.Module:
    """A copy of the model, without hooks, with parameters and buffers on a device: "cpu" under FakeTensorMode, or "meta".

    rule: an engine's dtypes, of parameters and buffers that have others now
    """
    memo: dict[int, Any] = {}
    for leaf in named_leaves(model):
        for param in {id(each): each for each in (leaf.tensor, leaf.whole)}.values():
            with torch._C.DisableTorchFunctionSubclass():  # released parameters have shapes
                fake = torch.empty(
                    tuple(param.shape), dtype=param.dtype if leaf.exact else rule.weights or param.dtype, device=device
                )
                memo.setdefault(id(param), nn.Parameter(fake, requires_grad=param.requires_grad))
    for _, _, buffer, dtype in buffer_dtypes(model, rule):
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=dtype, device=device)
    for value in (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)):
        memo.setdefault(id(value), torch.empty(value.shape, dtype=value.dtype, device=device))
    ghost = copy.deepcopy(model, memo)
    for module in ghost.modules():
        vars(module).pop("forward", None)  # an instance's forward belongs to the original
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks):
            hooks.clear()
    return ghost


def roots_of(output: Any) -> list[Tensor]:
    """The roots of the backward: the loss (a scalar, `.loss`, or the first output), else all outputs that require a gradient."""
    loss = getattr(output, "loss", None)
    candidates = [tensor for tensor in tensors_in(output if loss is None else loss) if tensor.requires_grad]
    if not candidates:
        raise ValueError("the model's output depends on no parameter that requires a gradient: there is no backward to predict")
    return candidates[:1] if candidates[0].numel() == 1 else candidates


class _Meter(TorchDispatchMode):
    """Tracks the lifetime of every storage and counts the operations' compute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.phase, self.block = "forward", ""
        self.live = 0  # bytes of live storages, without parameters and landed gradients
        self.held: dict[int, list[int]] = {}  # group -> [bytes in `.grad`, number of outstanding gradients]
        self.moments: list[Moment] = []
        self.work = {"forward": [0, 0], "backward": [0, 0]}
        self.products: dict[str, int] = {"float32": 0}  # FLOP by dtype
        self.alive: dict[int, tuple[Any, int]] = {}  # storage -> (a weak reference with a callback, bytes)
        for storage in {param.untyped_storage() for param in model.parameters()} | {b.untyped_storage() for b in model.buffers()}:
            self.alive[storage._cdata] = (storage, 0)
        self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        params, modules = dict(model.named_parameters()), dict(model.named_modules())
        for index, group in enumerate(wrap(model)):
            if not group.trainable:
                continue
            self.held[index] = [0, len(group.param_names)]
            for name in group.param_names:
                params[name].register_post_accumulate_grad_hook(partial(self._landed, index))
        for name in repeated_blocks(model):
            modules[name].register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            modules[name].register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.phase == "forward":
            self.block = name
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._end_block, name))
                break

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.phase == "forward":
            self.block = ""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_block, name))

    def _begin_block(self, name: str, grad: Tensor) -> None:
        self.block = name

    def _end_block(self, name: str, grad: Tensor) -> None:
        if self.block == name:  # the block's input is the previous block's output, whose backward may have begun
            self.block = ""

    def _landed(self, group: int, param: Tensor) -> None:
        """Free a gradient like an engine: see the module's docstring."""
        assert param.grad is not None, "autograd calls it after it has written `.grad`"
        self._look()
        held, (_, nbytes) = self.held[group], self.alive.get(param.grad.untyped_storage()._cdata, (None, 0))
        param.grad = None
        held[0], held[1] = held[0] + nbytes, held[1] - 1
        self._look()
        if held[1] == 0:
            held[0] = 0

    def _look(self) -> None:
        grads = sum(nbytes for nbytes, _ in self.held.values())
        last = self.moments[-1] if self.moments else None
        if last is None or (last.phase, last.block) != (self.phase, self.block):
            self.moments.append(Moment(self.phase, self.block, self.live, self.live + grads))
        elif self.live > last.activations or self.live + grads > last.with_grads:
            self.moments[-1] = Moment(
                self.phase, self.block, max(last.activations, self.live), max(last.with_grads, self.live + grads)
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace not in ("aten", "slipstream"):  # metadata queries
            return out
        new_nbytes = 0
        for tensor in tensors_in(out):
            new_nbytes += self._follow(tensor.untyped_storage())
        work = self.work[self.phase]
        formula = formulas().get(func.overloadpacket)
        if formula is not None:
            flops = formula(*args, **(kwargs or {}), out_val=out)
            work[0] += flops
            dtype = str(next(tensors_in(args)).dtype).removeprefix("torch.")
            self.products[dtype] = self.products.get(dtype, 0) + flops
        elif new_nbytes or func._schema.is_mutable:  # not a view
            work[1] += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, out)))
        self._look()
        return out

    def _follow(self, storage: Any) -> int:
        """Start counting a storage; returns its bytes if it is new, else 0."""
        key = storage._cdata
        if key in self.alive:
            return 0
        nbytes = storage.nbytes()
        self.live += nbytes
        self.alive[key] = (weakref.ref(storage, partial(self._ended, key)), nbytes)
        return nbytes

    def _ended(self, key: int, _: Any) -> None:
        self.live -= self.alive.pop(key)[1]

    def profile(self) -> Profile:
        dtype = max(self.products, key=lambda name: self.products[name])
        return Profile(tuple(self.moments), ComputeWork(*self.work["forward"]), ComputeWork(*self.work["backward"]), dtype)


def even_routes(model: nn.Module) -> AbstractContextManager[Any]:
    """The context for the forward and backward of a model on fake tensors: [Note: Even routes]. A no-op for models without lists of
    experts."""
    lists = [list(model.get_submodule(name).children()) for name in expert_lists(model)]
    sizes = {sum(any(True for _ in module.parameters()) for module in modules) for modules in lists}
    return EvenRoutes(sizes) if sizes else nullcontext()


class EvenRoutes(TorchFunctionMode):
    """sizes: numbers of experts; a float tensor whose last dimension has such a size is taken for scores."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        if tensors and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _AT:
            args = (args[0], _index(args[1]), *args[2:])
        out = func(*args, **kwargs)
        scores = tensors[0] if func in _CHOOSE else None
        if scores is None or not scores.is_floating_point() or not scores.dim() or scores.shape[-1] not in self.sizes:
            return out
        num = scores.shape[-1]
        return map_tensors(out, lambda each: each if each.is_floating_point() else _even(each, num))


def _even(chosen: Tensor, num: int) -> Tensor:
    with unset_fake_temporarily():
        return torch.arange(chosen.numel()).remainder(num).view(chosen.shape)


def _index(index: Any) -> Any:
    """The index with real masks and scalars replaced by positions and numbers, because the shape of the result depends on them."""
    if not isinstance(index, tuple):
        index = (index,)
    return tuple(each for part in index for each in _parts(part))


def _parts(part: Any) -> Iterator[Any]:
    if not isinstance(part, Tensor) or isinstance(part, FakeTensor):
        yield part
    elif part.dtype is torch.bool:
        with unset_fake_temporarily():
            yield from part.nonzero().unbind(1)
    elif not part.dim():
        with unset_fake_temporarily():
            yield int(part)
    else:
        yield part
