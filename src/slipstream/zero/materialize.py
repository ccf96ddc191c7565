"""Initial values of a model's parameters and buffers, block by block: beside the states, at most one block's values are in memory.

given        a parameter that has memory: the first rank's values are used on all ranks
recorded     a parameter on meta that was built inside `zero.Init`: its constructors are replayed (zero/recording.py), with the
             first rank's draws
initialized  any other parameter on meta: its module's `reset_parameters` and the model's `_init_weights` run, with the first
             rank's draws, or PEFT's initializer ([Note: Adapters on meta])
read         a parameter that a `Reader` knows: each rank reads its own ranges

[Note: Whose turn it is] An initializer may write to its module's children, or to parameters that it shares. The root's parameters
are initialized first, then each block's. While modules initialize themselves, every parameter of another turn is on meta, where a
write does nothing and draws no random number. So the draws depend on the model and the seed, never on stage, tier or world size.

[Note: Adapters on meta] PEFT's own initialization has no effect on adapters that were added to a model on meta. A PEFT layer lists
in `adapter_layer_names` the attributes that hold adapters by name. LoRA adapters are initialized again by the layer's own
initializer. Any other adapter raises an error: some start from the base weights, and the default initializers of their modules
would be wrong for all of them.

Parameters stay the same Python objects (`torch.utils.swap_tensors`), so earlier references stay valid.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.zero.comm import Comm
from slipstream.zero.layout import Layout, overlap
from slipstream.zero.leaves import Leaf, cuts_of, named_leaves, part_of, refuse_trainable, whole_shape
from slipstream.zero.recording import forget, is_recorded, values_of
from slipstream.zero.wrap import Group


class Reader(Protocol):
    """A source of values by name, such as files. It knows all names of a tied parameter or none."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def reads_part(self, name: str, numel: int) -> bool:
        """Whether the reader indexes a parameter that is a part (of `numel` elements) by the part's elements, not the whole's."""

    def fetch(self, names: Sequence[str]) -> None:
        """Announce a block's parameters, in the same order on all ranks, just before their ranges are read. Collective."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order, 1D. The caller copies them at once."""

    def close(self) -> None:
        """Free the memory used for reading. `read` may be called again."""


class InitialValues:
    """The initial values of one unit's flat buffer: in memory (`flat`), or read a range at a time (`reader`)."""

    def __init__(self, layout: Layout, flat: Tensor | None, reader: Reader | None, leaves: Mapping[str, Leaf]) -> None:
        self.flat, self.reader, self.leaves = flat, reader, leaves
        stored = [] if reader is None else [slot for slot in layout.slots if slot.name in reader and slot.numel]
        self._read = sorted(stored, key=lambda slot: slot.offset)
        self._ends = [slot.offset + slot.numel for slot in self._read]
        dtypes = [] if reader is None else [reader.dtype(slot.name) for slot in self._read]
        dtypes += [] if flat is None else [flat.dtype]
        self.dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32  # represents all values exactly

    def get(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), 1D, for reading; gaps are zero."""
        if self.flat is not None and not self._read:
            return self.flat[start:stop]
        result, reader = torch.zeros(stop - start, dtype=self.dtype), self.reader
        if self.flat is not None:
            result.copy_(self.flat[start:stop])
        if reader is None:
            return result
        for slot in self._read[bisect.bisect_right(self._ends, start) :]:
            if slot.offset >= stop:
                break
            first, last = overlap(slot.span, (start, stop))
            span = first - slot.offset, last - slot.offset
            own = reader.reads_part(slot.name, slot.numel)
            for begin, end, at in [(*span, span[0])] if own else _runs(self.leaves[slot.name].whole, *span):
                place = slot.offset + begin - start
                result[place : place + end - begin].copy_(reader.read(slot.name, at, at + end - begin))
        return result


def _runs(param: nn.Parameter, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split elements [start, stop) of a parameter into runs that are contiguous in the whole: (begin, end, offset in the whole)."""
    shape, cuts = whole_shape(param), cuts_of(param)
    if not cuts or start == stop:
        yield start, stop, start
        return
    ranges = {part.dim: part.ranges for part in cuts if part.ranges is not None}
    assert len(ranges) == len(cuts), f"{len(cuts)} cuts of different dimensions, with ranges"
    last = max(ranges)  # after this dimension the whole is contiguous
    outer = [ranges.get(dim, ((0, shape[dim]),)) for dim in range(last)]
    places = [[i for low, high in each for i in range(low, high)] for each in outer]  # in the whole
    inner = math.prod(shape[last + 1 :])
    row = sum(high - low for low, high in ranges[last]) * inner
    for number in range(start // row, -(-stop // row)):
        at, rest = 0, number
        for dim in reversed(range(last)):
            rest, index = divmod(rest, len(places[dim]))
            at += places[dim][index] * math.prod(shape[dim + 1 : last])
        begin = number * row
        for low, high in ranges[last]:
            end = begin + (high - low) * inner
            if max(begin, start) < min(end, stop):
                skipped = max(begin, start) - begin
                yield begin + skipped, min(end, stop), (at * shape[last] + low) * inner + skipped
            begin = end


class FirstValues:
    """Initializes a model's parameters and buffers, block by block. The constructor only checks the model.

    Raises ValueError if a tensor on meta is neither read nor can be initialized, or for `refuse_trainable`'s reasons.
    """

    def __init__(self, model: nn.Module, device: torch.device, reader: Reader | None = None) -> None:
        self.model, self.device, self.reader = model, device, reader
        self._init = getattr(model, "_init_weights", None)  # transformers, nanoGPT
        refuse_trainable(model)
        self.modules = dict(model.named_modules())
        self._modules = list(self.modules.items())
        self._holders: dict[int, list[int]] = {}  # parameter to initialize -> the modules that hold it
        for i, (name, module) in enumerate(self._modules):
            for leaf, param in module.named_parameters(recurse=False):
                if param.is_meta and not self._is_read(name, leaf) and not is_recorded(param):
                    self._holders.setdefault(id(param), []).append(i)
        self._adapters = find_adapters(model, self._holders)
        able = {key for key, holders in self._holders.items() if any(self._is_able(self._modules[i][1]) for i in holders)}
        able |= {id(param) for adapters in self._adapters.values() for adapter in adapters for param in adapter.params}
        for name, module in self._modules:
            unable = [param for param in module.parameters(recurse=False) if id(param) in self._holders and id(param) not in able]
            if unable or (self._buffers_on_meta(name, module) and not self._is_able(module)):
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) is on meta and has no reset_parameters(); give it one, build the "
                    f"model with real weights, or load them from files (slipstream.zero.load)"
                )

    def _is_read(self, prefix: str, leaf: str) -> bool:
        return self.reader is not None and (f"{prefix}.{leaf}" if prefix else leaf) in self.reader

    def _is_able(self, module: nn.Module) -> bool:
        return self._init is not None or callable(getattr(module, "reset_parameters", None))

    def _buffers_on_meta(self, prefix: str, module: nn.Module) -> list[str]:
        buffers = module.named_buffers(recurse=False)
        return [leaf for leaf, buffer in buffers if buffer.is_meta and not self._is_read(prefix, leaf) and not is_recorded(buffer)]

    def begin(self, blocks: Collection[str]) -> None:
        """Allocate all buffers. `blocks` are the modules that are initialized in turns of their own, after the root's turn."""
        self.leaves = {leaf.name: leaf for leaf in named_leaves(self.model)}
        self._turns: dict[str, list[int]] = {"": []}
        self._buffers: dict[int, list[str]] = {}
        for i, (name, module) in enumerate(self._modules):
            parents = itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}")
            self._turns.setdefault(next((parent for parent in parents if parent in blocks), ""), []).append(i)
            if fresh := self._buffers_on_meta(name, module):
                self._buffers[i] = fresh
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                if is_recorded(buffer) and not self._is_read(name, leaf):
                    setattr(module, leaf, values_of(f"{name}.{leaf}", buffer).to(self.device))
                elif buffer.is_meta:
                    setattr(module, leaf, real := torch.empty_like(buffer, device=self.device))
                    _mark(real)
                elif buffer.device != self.device:
                    setattr(module, leaf, buffer.to(self.device))

    def of_block(self, block: str, units: Sequence[tuple[Group, Layout, Comm]]) -> list[InitialValues]:
        """The initial values of one block's units: those of the first rank of each unit's transport.

        Collective; the root (`""`) must come first."""
        fresh: dict[int, str] = {}
        parts: list[tuple[Tensor, nn.Parameter]] = []  # (the initialized whole, the parameter that is a part of it)
        flats: list[Tensor | None] = []
        for group, layout, _ in units:
            not_read = [slot for slot in layout.slots if not self._is_read("", slot.name)]
            flat = torch.zeros(layout.numel if not_read else 0, dtype=group.dtype, device=self.device)
            for slot in not_read:
                view, param = flat[slice(*slot.span)].view(slot.shape), self.leaves[slot.name].tensor
                if is_recorded(param):
                    view.copy_(part_of(values_of(slot.name, param), param))
                    forget(param)
                elif param.is_meta and cuts_of(param):
                    _mark(whole := torch.empty(whole_shape(param), dtype=view.dtype, device=self.device))
                    parts.append((view, param))
                    move_in(param, whole)
                    fresh[id(param)] = slot.name
                elif param.is_meta:
                    _mark(view)
                    move_in(param, view)
                    fresh[id(param)] = slot.name
                else:
                    view.copy_(param.detach())
            flats.append(flat if not_read else None)
        self._initialize(block, fresh)
        for view, param in parts:
            view.copy_(part_of(param.detach(), param))
            param.data = view
        for made, (_, _, comm) in zip(flats, units, strict=True):
            if made is not None:
                comm.broadcast(made)
        if self.reader is not None:
            self.reader.fetch([slot.name for _, layout, _ in units for slot in layout.slots if slot.name in self.reader])
        return [InitialValues(layout, flat, self.reader, self.leaves) for (_, layout, _), flat in zip(units, flats, strict=True)]

    def _initialize(self, block: str, fresh: Mapping[int, str]) -> None:
        turn = self._turns.get(block, [])
        own = {*(i for i in turn if i in self._buffers), *(i for key in fresh for i in self._holders[key])}
        if not own:
            return
        root = self.modules[block]
        with _only(fresh, [*root.modules(), *(self._modules[i][1] for i in own)]):
            wanted = fresh.keys() | {id(getattr(self._modules[i][1], leaf)) for i in own for leaf in self._buffers.get(i, ())}
            for i in sorted(own):
                if callable(reset := getattr(self._modules[i][1], "reset_parameters", None)):
                    reset()
            self._run_init((self._modules[i][1] for i in sorted({*turn, *own}, reverse=True)), wanted)
            for i in turn:
                for adapter in self._adapters.get(self._modules[i][0], ()):
                    adapter.reset()
        if block and any(_is_marked(self.leaves[name].tensor) for name in fresh.values()):
            parents = list(itertools.accumulate(block.split(".")[:-1], lambda a, b: f"{a}.{b}"))
            with _only(fresh, self.model.modules()):
                self._run_init((self.modules[name] for name in [*reversed(parents), ""]), fresh.keys())
        initialized = [(name, self.leaves[name].tensor, self._modules[self._holders[key][0]][1]) for key, name in fresh.items()]
        for i in own:
            name, module = self._modules[i]
            initialized += [(f"{name}.{leaf}", getattr(module, leaf), module) for leaf in self._buffers.get(i, ())]
        for name, tensor, module in initialized:
            if _is_marked(tensor):
                raise ValueError(
                    f"{name} was on meta, and neither its module's ({type(module).__name__}) reset_parameters() nor the model's "
                    f"_init_weights() gave it a value; build the model with real weights, initialize it there, or load it from "
                    f"files (slipstream.zero.load)"
                )

    def _run_init(self, modules: Iterable[nn.Module], wanted: Collection[int]) -> None:
        """Call the model's `_init_weights` on each module that contains a tensor of `wanted` (ids)."""
        if self._init is None or not wanted:
            return
        for module in modules:
            if any(id(tensor) in wanted for tensor in itertools.chain(module.parameters(), module.buffers())):
                self._init(module)

    def finish(self) -> None:
        """After all parameters, read the buffers that files contain."""
        for prefix, module in self._modules:
            for leaf, buffer in module.named_buffers(recurse=False):
                if self.reader is not None and self._is_read(prefix, leaf) and buffer.numel():
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    buffer.copy_(self.reader.read(name, 0, buffer.numel()).view(buffer.shape))
        self.close_reader()

    def close_reader(self) -> None:
        """Free the memory used for reading."""
        if self.reader is not None:
            self.reader.close()


@contextmanager
def _only(fresh: Collection[int], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, `modules` have a stand-in on meta for every parameter that is not in `fresh` (ids)."""
    hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in set(modules):
            for leaf, param in module._parameters.items():
                if param is not None and not param.is_meta and id(param) not in fresh:
                    hidden.append((module, leaf, param))
                    empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
                    module._parameters[leaf] = nn.Parameter(empty, requires_grad=param.requires_grad)
        yield
    finally:
        for module, leaf, param in hidden:
            module._parameters[leaf] = param


def move_in(param: nn.Parameter, memory: Tensor) -> None:
    """Give a parameter other memory, also from or to meta. It stays the same object, with its attributes."""
    if param.is_meta == memory.is_meta:
        param.data = memory
        return
    new = nn.Parameter(memory.data, requires_grad=param.requires_grad)  # .data: a version counter of its own
    vars(new).update(vars(param))
    torch.utils.swap_tensors(param, new)


def _mark(tensor: Tensor) -> None:
    """Fill new memory with a value that no initializer writes; bool has no such value and gets False."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _is_marked(tensor: Tensor) -> bool:
    """Whether the tensor still holds the mark somewhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor.detach()).any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())


class Adapter(NamedTuple):
    """An adapter that needs initial values."""

    params: list[nn.Parameter]
    reset: Callable[[], None]


def find_adapters(model: nn.Module, fresh: Collection[int]) -> dict[str, list[Adapter]]:
    """The adapters with parameters in `fresh` (ids), by layer name. Raises ValueError for one that only PEFT can initialize."""
    adapters: dict[str, list[Adapter]] = {}
    configs = getattr(model, "peft_config", {})
    for path, layer in model.named_modules():
        for name, params in _adapter_params(layer).items():
            uninitialized = [param for param in params if id(param) in fresh]
            if not uninitialized:
                continue
            config = configs.get(name)
            init: Any = getattr(config, "init_lora_weights", None)
            is_plain = name not in getattr(layer, "lora_variant", {})  # set by DoRA and others
            if not (hasattr(layer, "reset_lora_parameters") and is_plain and (init is True or str(init).lower() == "gaussian")):
                raise ValueError(
                    f"adapter {name!r} of module {path!r} ({type(layer).__name__}) was made on meta, and its initial values are "
                    f"lost; of PEFT's adapters only LoRA (init_lora_weights=True or 'gaussian', no variants) can be initialized "
                    f"again. Add it after initialize, inside `with engine.surgery():`, or to a model that has its weights"
                )
            adapters.setdefault(path, []).append(Adapter(uninitialized, partial(layer.reset_lora_parameters, name, init)))
    return adapters


def _adapter_params(layer: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of a layer's adapters, by the adapter's name."""
    params: dict[str, list[nn.Parameter]] = {}
    for attribute in getattr(layer, "adapter_layer_names", ()):
        holder = getattr(layer, attribute, None)
        for name, item in holder.items() if isinstance(holder, nn.ModuleDict | nn.ParameterDict) else ():
            if isinstance(item, nn.Module | nn.Parameter):
                params.setdefault(name, []).extend([item] if isinstance(item, nn.Parameter) else item.parameters())
    return params
