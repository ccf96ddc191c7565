"""Experts that are the modules of a list: each rank keeps some of them, and the layer that calls them keeps its code.

Older transformers models, models with their own code and users' layers call the experts of an `nn.ModuleList` (or `ModuleDict`)
with rows of tokens, in an order and by routes that only their code determines. So the layer's forward runs twice:

noting  an expert records the rows that it is called with, and returns zeros. Then all rows travel to the ranks that have their
        experts, are computed, and come back
giving  an expert returns the result for the rows of the same call

Rows keep the graph of the first run; outputs have that of the second. A module of the layer that is called with the same tensors in
both runs (the router, a shared expert) computes only in the first one. Random numbers that the layer draws are the same in both.

[Note: Lost rows] Only the layer's code sees the router's logits. If a token is finite and its output is not, although everything
that the experts computed is finite, it was lost in between: in the router, or in a module beside the experts.

An expert must treat each row independently, because it gets tokens in no certain order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slipstream.moe.dispatch import has_dropout, run_experts
from slipstream.moe.grouped import is_autocast
from slipstream.moe.load import LoadMeter
from slipstream.moe.routers import RouterBias
from slipstream.parallel.around import class_before
from slipstream.parallel.exchange import Exchange, without_values
from slipstream.parallel.tensor import generators
from slipstream.zero.hooks import eager
from slipstream.zero.leaves import identity
from slipstream.zero.trees import tensors_in

Answer = Callable[[int, Tensor], Tensor]  # (index of an expert in the list, input [..., d]) -> output
Forward = Callable[..., Any]


def why_whole(model: nn.Module, name: str) -> str:
    """Why the experts in the list of this name cannot be split; "" if they can."""
    experts = model.get_submodule(name)
    if not isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return f"are a {type(experts).__name__}, and no list of modules or stack of transformers' or slipstream.moe's"
    modules = list(experts_in(experts))
    forms = [{key: (param.shape, param.dtype) for key, param in module.named_parameters()} for module in modules]
    params = [id(param) for module in modules for param in module.parameters()]
    if len(list(experts.children())) < len(experts) or len(set(params)) < len(params):
        return "share modules or parameters"
    if not params or any(form != forms[0] for form in forms):
        return "do not have parameters of the same names and shapes"
    if any(buffer in module.state_dict() for module in modules for buffer, _ in module.named_buffers()):
        return "have buffers that a checkpoint has"
    layer = _layer_of(model, name)
    if layer is model:
        return "are called by the model itself, not by a layer of it"
    return "are the second list of their layer" if isinstance(layer, ListedLayer) and layer.listed is not experts else ""


def experts_in(experts: nn.Module) -> Iterator[nn.Module]:
    """The modules of a list, except a dropout for all experts' outputs beside them (NLLB's)."""
    return (module for module in experts.children() if not isinstance(module, nn.Dropout))


def _layer_of(model: nn.Module, name: str) -> nn.Module:
    """The module whose forward calls the experts: the list itself, if it has a forward, or the module that has the list."""
    experts = model.get_submodule(name)
    return experts if type(experts).forward is not nn.Module.forward else model.get_submodule(name.rpartition(".")[0])


def adopt_list(model: nn.Module, name: str) -> Any:
    """Make the layer with a list of experts run as this module describes. Returns the list, which is now a `ListedExperts`."""
    experts: Any = model.get_submodule(name)
    if isinstance(experts, ListedExperts):
        return experts
    layer = _layer_of(model, name)
    modules = list(experts_in(experts))
    for place, module in enumerate(modules):
        vars(module).update(among=experts, place=place)
        module.__class__ = class_before(ListedExpert, type(module))
    others = len(list(_called(layer, experts)))
    attributes = {"exchange": None, "tokens": None, "bias": None, "answer": None, "seen": None, "runs": False}
    meter = LoadMeter(len(modules), or_else=", or a module beside its experts such outputs" if others > 1 else "")
    vars(experts).update(attributes, owned=range(len(modules)), num_experts=len(modules), meter=meter)
    if layer is not experts:
        vars(layer).update(listed=experts)
        layer.__class__ = class_before(ListedLayer, type(layer))
    experts.__class__ = class_before(ListedExperts, type(experts))
    return experts


class ListedExpert(nn.Module):
    """Precedes the class of an expert."""

    among: Any  # the list; not registered as a submodule
    place: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        experts: ListedExperts = self.among
        if experts.answer is not None:
            if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
                raise ValueError(
                    f"an expert ({type(self).__name__}) is called with {len(args)} arguments and {sorted(kwargs)}, and experts "
                    "that are split over ranks take one tensor, rows of tokens: give it no others, or use autoep_size 1"
                )
            return experts.see(self.place, args, experts.answer(self.place, args[0]))
        if self.place in experts.owned:
            return experts.see(self.place, (args, kwargs), super().forward(*args, **kwargs))
        if experts.is_apart and not any(map(without_values, tensors_in(args))):
            raise RuntimeError(
                f"expert {self.place} ({type(self).__name__}), which another rank has, is called outside of the forward of the "
                "layer that has the experts: call it there, or use autoep_size 1"
            )
        return experts.expert(experts.owned[self.place % len(experts.owned)])(*args, **kwargs)  # a dry run: an equal one


class ListedExperts(nn.Module):
    """Precedes the class of a list of experts. `forward` is for a list that has one of its own.

    owned     the experts that this rank has
    exchange  over the ranks that have the others, and `tokens` over the ranks of a replica, which share its tokens
    answer    returns the result of an expert's call; None: the expert computes
    seen      the calls of experts in the running forward, if it counts
    runs      true while a forward runs whose calls are counted, or known not to count
    """

    num_experts: int
    owned: range
    exchange: Exchange | None
    tokens: Exchange | None
    meter: LoadMeter
    bias: RouterBias | None
    answer: Answer | None
    seen: list[_Seen] | None
    runs: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, self, super().forward, args, kwargs)

    @property
    def is_apart(self) -> bool:
        """Whether other ranks have some of the experts."""
        return self.exchange is not None and self.exchange.size > 1

    def expert(self, place: int) -> nn.Module:
        return next(itertools.islice(experts_in(self), place, None))

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Run this rank's experts, each on its rows; those without rows, too, whose gradients are zeros."""
        outs = [self.expert(place)(part) for place, part in zip(self.owned, rows.split(list(counts)), strict=True)]
        for out in outs:
            if not isinstance(out, Tensor) or out.shape[1:] != rows.shape[1:]:
                form = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"an expert ({type(self.expert(0)).__name__}) returns {form} for {rows.shape[1]} features: experts that are "
                    "split over ranks return one tensor with as many features as they are given"
                )
        return torch.cat(outs)

    def see(self, place: int, inputs: Any, output: Any) -> Any:
        """Record an expert's call for the meter; returns its output."""
        if self.seen is not None:
            num_rows = next((_num_rows(x) for x in _floats_in(inputs)), 0)
            with torch.no_grad():
                self.seen.append(_Seen(place, num_rows, [x.sum(dtype=torch.float32) for x in _floats_in(output)]))
        elif not self.runs and torch.is_grad_enabled() and not any(map(without_values, _floats_in(inputs))):
            self.meter.is_partial = True  # for instance by the owner of a layer without a forward
        return output

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Inside, calls of experts return the results of `answer`."""
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None


class ListedLayer(nn.Module):
    """Precedes the class of a layer that has a list of experts."""

    listed: Any  # the list, registered under its own name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, self.listed, super().forward, args, kwargs)


@eager
def _run(layer: nn.Module, experts: ListedExperts, forward: Forward, args: Any, kwargs: Any) -> Any:
    """The forward of a layer of experts. Collective over the experts' ranks, if other ranks have some."""
    inputs = _floats_in((args, kwargs))
    if not inputs or without_values(inputs[0]):
        return forward(*args, **kwargs)
    experts.runs = True
    try:
        metered = partial(_metered, experts, inputs, forward)
        return _run_apart(layer, experts, forward, metered, inputs, args, kwargs) if experts.is_apart else metered(*args, **kwargs)
    finally:
        experts.runs = False


def _run_apart(
    layer: nn.Module, experts: ListedExperts, forward: Forward, metered: Forward, inputs: Sequence[Tensor], args: Any, kwargs: Any
) -> Any:
    versions, draws = [x._version for x in inputs], generators(inputs[0].device)
    calls: list[_Asked] = []
    others = _Others(layer, experts, draws)
    first = _states(draws)
    with others.watched(others.compute), experts.answering(partial(_note, calls)):
        forward(*args, **kwargs)
    if [x._version for x in inputs] != versions:
        raise ValueError(
            f"{type(layer).__name__} changes its input in place, and its forward runs twice if its experts are split over ranks: "
            "let it change a copy, or use autoep_size 1"
        )
    has_drawn = not all(map(torch.equal, first, _states(draws)))
    rows = _computed(experts, calls, inputs[0])
    last = _states(draws)
    if has_drawn:
        _go_on(draws, first)
    due = deque(zip(calls, rows.split([_num_rows(call.x) for call in calls]), strict=True))
    with others.watched(others.repeat), experts.answering(partial(_give, layer, due)):
        output = metered(*args, **kwargs)
    if due:
        raise _differs(layer, f"called expert {due[0][0].place}", "did not")
    if has_drawn:
        _go_on(draws, last)
    if len(rows):
        return output
    own = {id(param) for param in experts.parameters()}
    return _tied(output, [rows, *inputs, *(param for param in layer.parameters() if id(param) not in own)])


def _metered(experts: ListedExperts, inputs: Sequence[Tensor], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer; in training, the meter counts each expert's rows, and lost rows ([Note: Lost rows])."""
    if not experts.meter.counts(training=experts.training):
        return forward(*args, **kwargs)
    with torch.no_grad():
        before = [x.sum(-1, dtype=torch.float32).reshape(-1, 1) for x in inputs if x.dim()]  # the layer may modify them
    seen: list[_Seen] = []
    experts.seen = seen
    try:
        output = forward(*args, **kwargs)
    finally:
        experts.seen = None
    counts = [0] * experts.num_experts
    for call in seen:
        counts[call.place] += call.num_rows
    with torch.no_grad():
        after = [x.sum(-1, dtype=torch.float32).reshape(-1, 1) for x in _floats_in(output) if x.dim()]
        pairs = [(x, y) for y in after for x in before if len(x) == len(y)]
        x, y = pairs[0] if pairs else (inputs[0].new_zeros(0, 1), inputs[0].new_zeros(0, 1))
        computed = [total for call in seen for total in call.totals]
        if computed:
            x = x + torch.stack(computed).sum()
    experts.meter.record(torch.tensor(counts, device=inputs[0].device), x, y)
    return output


class _Seen(NamedTuple):
    """A call of an expert that the meter counts."""

    place: int
    num_rows: int
    totals: list[Tensor]  # sums of its outputs: finite if the outputs are


def _floats_in(value: Any) -> list[Tensor]:
    return [x for x in tensors_in(value) if x.is_floating_point()]


def _num_rows(x: Tensor) -> int:
    return x.shape[:-1].numel()


class _Asked(NamedTuple):
    place: int
    x: Tensor  # [..., d]


def _note(calls: list[_Asked], place: int, x: Tensor) -> Tensor:
    calls.append(_Asked(place, x))
    dtype = torch.get_autocast_dtype(x.device.type) if is_autocast(x.device) else x.dtype
    return torch.zeros_like(x, dtype=dtype, requires_grad=False)


def _give(layer: nn.Module, due: deque[tuple[_Asked, Tensor]], place: int, x: Tensor) -> Tensor:
    if not due:
        raise _differs(layer, "called no other expert", f"called expert {place}")
    call, rows = due.popleft()
    if (call.place, call.x.shape) != (place, x.shape):
        raise _differs(
            layer, f"called expert {call.place} with {tuple(call.x.shape)}", f"called expert {place} with {tuple(x.shape)}"
        )
    return rows.view(x.shape)


def _differs(layer: nn.Module, first: str, second: str) -> RuntimeError:
    return RuntimeError(
        f"the forward of {type(layer).__name__}, which runs twice because its experts are split over ranks, {first} in its first "
        f"run and {second} in its second: let its calls depend on its inputs alone, or use autoep_size 1"
    )


def _computed(experts: ListedExperts, calls: Sequence[_Asked], like: Tensor) -> Tensor:
    """The experts' outputs for the rows of all calls, in the order of the calls. Collective."""
    parts = [call.x.reshape(-1, call.x.shape[-1]) for call in calls]
    rows = torch.cat(parts) if parts else like.reshape(-1, like.shape[-1])[:0]
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # the backward is collective, too
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    places = torch.tensor([call.place for call in calls], dtype=torch.int64).repeat_interleave(lengths)[:, None]
    routes = (places.to(rows.device), None, None, experts.num_experts)
    draws = experts.tokens is not None and has_dropout(experts)  # for different numbers of rows on each rank
    with torch.random.fork_rng([rows.device] if rows.is_cuda else [], enabled=draws):
        return run_experts(rows, *routes, experts.compute, experts.exchange, tokens=experts.tokens)


def _tied(output: Any, sources: Sequence[Tensor]) -> Any:
    """The output of a layer without tokens, with a backward that still reaches the sources, with zeros.

    Gradients of other ranks' rows pass through here, and those ranks wait for this rank's share of the layer's gradients.
    """
    leaves, form = pytree.tree_flatten(output)
    i = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    for source in sources:
        leaves[i] = leaves[i] + source.reshape(-1)[:0].sum().to(leaves[i].dtype)
    return pytree.tree_unflatten(leaves, form)


def _states(draws: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in draws]


def _go_on(draws: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(draws, states, strict=True):
        generator.set_state(state)


class _Result(NamedTuple):
    """A call of another module of the layer."""

    inputs: Any  # kept alive, so that no other tensor gets their memory
    of_inputs: list[Any]
    output: Any
    of_output: list[Any]
    drawn: list[Tensor] | None  # the random generators' states afterwards; None: nothing was drawn

    def is_of(self, inputs: Any) -> bool:
        return _identities(inputs) == self.of_inputs and _identities(self.output) == self.of_output


def _identities(value: Any) -> list[Any]:
    """A key that is equal for the same tensors with the same values, and for the same other objects."""
    leaves = pytree.tree_leaves(value)
    return [(identity(leaf), leaf._version) if isinstance(leaf, Tensor) else id(leaf) for leaf in leaves]


class _Others:
    """The other modules of a layer, and their results in the first run."""

    def __init__(self, layer: nn.Module, experts: nn.Module, draws: Sequence[torch.Generator]) -> None:
        self.draws = draws
        self.results: dict[nn.Module, deque[_Result]] = {module: deque() for module in _called(layer, experts)}

    @contextmanager
    def watched(self, call: Callable[..., Any]) -> Iterator[None]:
        """Inside, `call(module, its forward, *args, **kwargs)` replaces the forward of each module."""
        before = {module: vars(module).get("forward") for module in self.results}
        for module in self.results:
            vars(module)["forward"] = partial(call, module, module.forward)
        try:
            yield
        finally:
            for module, forward in before.items():
                vars(module).pop("forward")
                if forward is not None:
                    vars(module)["forward"] = forward

    def compute(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        before, of_inputs = _states(self.draws), _identities((args, kwargs))
        output = forward(*args, **kwargs)
        drawn = _states(self.draws)
        has_drawn = not all(map(torch.equal, before, drawn))
        result = _Result((args, kwargs), of_inputs, output, _identities(output), drawn if has_drawn else None)
        self.results[module].append(result)
        return output

    def repeat(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        results = self.results[module]
        result = results.popleft() if results else None
        if result is None or not result.is_of((args, kwargs)):
            return forward(*args, **kwargs)
        if result.drawn is not None:
            _go_on(self.draws, result.drawn)
        return result.output


def _called(layer: nn.Module, experts: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that it may call, without its experts."""
    for module in layer.children() if layer is not experts else ():
        if module is not experts:
            yield from _called(module, experts) if type(module).forward is nn.Module.forward else (module,)
