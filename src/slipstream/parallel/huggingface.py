"""A pipeline over an unmodified decoder of transformers: each chunk is the model with its own layers only.

A chunk is a shallow copy of the modules on the path to the layers, so its parameters are the model's, under the model's names. The
modules before the layers (embeddings) are in the first chunk, those after them (norm, head) in the last; elsewhere an `_Absent`
replaces them. The model's own forward runs in every chunk, so masks and rotary positions come from the batch on every stage. What
it computes before its first layer is replaced by the previous stage's output, so an embedding is not scaled or shifted twice.

If the model returns router logits, for an auxiliary loss over all of its layers, each layer's logits travel on with the hidden
states. The last stage computes the loss from all of them, and their gradients travel back.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.plan import PipelinePlan
from slipstream.parallel.around import connect_before, connect_behind, first_of
from slipstream.parallel.layers import TIMINGS, partition, partition_balanced, partition_uniform
from slipstream.parallel.module import Tied
from slipstream.parallel.schedule import stages_of
from slipstream.parallel.slicing import gather_behind, scatter_before
from slipstream.parallel.tensor import Slices
from slipstream.parallel.transformers_sequence import Sequences
from slipstream.world.mesh import Axis, nearest_divisor
from slipstream.zero.wrap import repeated_blocks

_PROFILED = 128  # tokens in the forward that the method `profile` measures
_OF_THE_LOSS = ("labels", "num_items_in_batch")
_OF_THE_EMBEDDING = ("input_ids", "inputs_embeds")


class PipelinedDecoder(nn.Module):
    """A transformers decoder divided into stages, of which a rank holds some.

    stages   this rank's stages, of `num_stages`; is_v: they go out to the last rank and back
    method   parameters: stages of similar size, where embeddings count 0 (they are looked up); uniform: equally many layers;
             type:REGEX: equally many layers of these classes; profile: similar measured forward times (head and embeddings, too)
    slices, sequences  the model's, if its layers are sliced, or its sequences shared

    Raises ValueError for a model without repeated layers, with fewer layers than stages, or of another kind.
    """

    reads_everywhere = True  # every stage reads masks and positions from the batch
    _chunks: list[DecoderChunk]
    _whole: nn.Module  # the copy of the model with all of this rank's stages: its modules and parameters are this module's
    _positions: dict[str, int]  # the index of each parameter of the unsplit model, and of each module's first one

    def __init__(
        self,
        model: nn.Module,
        num_stages: int,
        stages: Sequence[int],
        method: str = "parameters",
        slices: Slices | None = None,
        sequences: Sequences | None = None,
        is_v: bool = False,
        world: Axis | None = None,
    ) -> None:
        super().__init__()
        self.is_v = is_v
        self.sequences = sequences
        if sequences is not None:
            sequences.unhook()  # chunks divide a micro-batch themselves
        self.tokens = slices if slices is not None and slices.shares_tokens else None  # tokens are shared within each stage
        self.config, self.num_stages, self.stages = model.config, num_stages, tuple(stages)
        base: Any = getattr(model, "get_base_model", lambda: model)()  # without PEFT's wrapper
        self.base_class, self.architecture = type(base), type(base).__name__
        self.generation_config, self.name_or_path = getattr(base, "generation_config", None), getattr(base, "name_or_path", None)
        if hasattr(model, "peft_config"):
            self.peft_config = model.peft_config
        self.num_ranks = num_stages // max(len(self.stages), 1)  # along the pipeline
        self.layers_name, names = _layers_of(model)
        before, after = _around(model, self.layers_name)
        self.parts = _divide(model, self.layers_name, names, after, num_stages, method, world)
        owners = dict.fromkeys(before, 0) | dict.fromkeys(after, num_stages - 1)
        for stage in range(num_stages):
            owners |= {f"{self.layers_name}.{name}": stage for name in names[self.parts[stage] : self.parts[stage + 1]]}
        self._owners, self._positions = owners, dict[str, int]()
        for i, (name, _) in enumerate(model.named_parameters()):
            for end in (*(j for j, letter in enumerate(name) if letter == "."), len(name)):
                self._positions.setdefault(name[:end], i)
        self.tied = _ties(model, owners, num_stages)
        whole = self._part(model, self.stages)
        for tied in self.tied:
            _name_canonically(whole, tied, self.stages)
        self._modules, self._parameters = whole._modules, whole._parameters
        # not registered: their parameters are this module's
        self.__dict__["_whole"] = whole
        self.__dict__["_chunks"] = [DecoderChunk(self, stage) for stage in self.stages]

    @classmethod
    def on_rank(cls, model: nn.Module, index: int, size: int, plan: PipelinePlan, **parts: Any) -> PipelinedDecoder:
        """The decoder with the stages of the `index`-th of `size` pipeline ranks."""
        is_v = plan.schedule == "v"
        count = 2 if is_v else plan.chunks
        return cls(model, size * count, stages_of(size, plan.schedule, index, count), plan.partition, is_v=is_v, **parts)

    def _part(self, model: nn.Module, stages: Sequence[int]) -> Any:
        """A copy of the model with the layers and modules of some stages; other modules with parameters are absent."""
        return _pruned(model, {name for name, stage in self._owners.items() if stage not in stages}, self.layers_name)

    def refresh(self) -> None:
        """Make the chunks of this model's current modules, after a change of the model."""
        for chunk in self._chunks:
            chunk.consist_of(self)

    def position(self, name: str) -> int:
        """The index of a parameter in the unsplit model; for a new parameter, the index of the nearest module's first parameter."""
        while name not in self._positions and name:
            name = name.rpartition(".")[0]
        return self._positions.get(name, len(self._positions))

    def chunk(self, i: int) -> DecoderChunk:
        """The i-th stage of this rank as a module; `stages[i]` is its number."""
        return self._chunks[i]

    def recall(self, batch: Any) -> None:
        """Before a micro-batch's backward, which may recompute attention: restore its positions."""
        if self.sequences is not None:
            self.sequences.begin((), _arguments(batch), compares=False)

    def inputs(self, batch: Any) -> Any:
        """The first stage's input: token ids or embeddings."""
        arguments = _arguments(batch)
        return arguments[_first_input_of(arguments)]

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The model's own loss of a micro-batch, from the last stage's output. Raises ValueError if it computes none."""
        if getattr(outputs, "loss", None) is None:
            raise ValueError(
                f"{self.architecture} computes no loss of a micro-batch with {', '.join(_arguments(batch))}: add labels"
            )
        return outputs.loss

    def forward(self, x: Any, batch: Any = None, chunk: int = 0) -> Any:
        return self.chunk(chunk)(x, batch)


class DecoderChunk(nn.Module):
    """One stage. Its input is the first stage's token ids, or the previous stage's output: hidden states [B, S, H], in a tuple with
    the router logits of all layers so far if the model returns these."""

    sequences: Sequences | None
    part: nn.Module  # the copy of the model
    runs: nn.Module  # the module that forward calls: the copy of the model, or of its body
    is_running = False

    def __init__(self, owner: PipelinedDecoder, stage: int) -> None:
        super().__init__()
        self.__dict__["sequences"] = owner.sequences
        self.stage, self.is_first, self.is_last = stage, stage == 0, stage == owner.num_stages - 1
        self.start, self.stop = owner.parts[stage : stage + 2]
        self.entering: Tensor | None = None
        self.left: Tensor | None = None
        self.routers: tuple[Tensor, ...] = ()  # the router logits of the layers so far
        self.consist_of(owner)
        blocks = list(self.part.get_submodule(owner.layers_name).children())
        if not self.is_first:
            connect_before(blocks[0], self._enter)
            if owner.tokens is not None:
                scatter_before(blocks[0], owner.tokens)
        if not self.is_last:
            if owner.tokens is not None:
                gather_behind(blocks[-1], owner.tokens)
            connect_behind(blocks[-1], self._leave)

    def consist_of(self, owner: PipelinedDecoder) -> None:
        """Copy the owner's current modules of this stage."""
        part = owner._part(owner._whole, [self.stage])
        self._modules = part._modules
        self.__dict__["part"] = part
        self.__dict__["runs"] = part if self.is_last else part.base_model  # the head would change hidden states
        _shorten_configs(part, owner.layers_name, self.start, self.stop)
        part.base_model.register_forward_hook(self._collect_routers)

    def forward(self, x: Any, batch: Any = None) -> Any:
        """Return the hidden states (and router logits) for the next stage; the last stage returns the model's output."""
        arguments = _arguments(batch) if batch is not None else {}
        x, *routers = x if isinstance(x, tuple) else (x,)
        self.routers = tuple(routers)
        if self.sequences is not None:
            if self.is_first:
                arguments[_first_input_of(arguments)] = x
            arguments = self.sequences.begin((), arguments)[1]
            x = arguments[_first_input_of(arguments)] if self.is_first else x
        name = _first_input_of(arguments) if self.is_first else "inputs_embeds"
        skipped = _OF_THE_EMBEDDING if self.is_last else (*_OF_THE_EMBEDDING, *_OF_THE_LOSS)
        arguments = {name: value for name, value in arguments.items() if name not in skipped} | {"use_cache": False}
        self.entering = None if self.is_first else x
        arguments[name] = x if self.is_first else x.detach()
        self.is_running = True
        try:
            output = self.runs(**arguments)
            if self.is_last:
                return output if self.sequences is None else self.sequences.end(output)
            return (self.left, *self.routers) if self.routers else self.left
        finally:
            self.is_running, self.entering, self.left, self.routers = False, None, None, ()

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.entering is None:  # the whole model runs, or a checkpoint recomputes the block with its own input
            return None
        x, self.entering = self.entering, None
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if self.is_running:
            self.left = first_of(output)

    def _collect_routers(self, base: nn.Module, args: Any, output: Any) -> None:
        own = getattr(output, "router_logits", None)
        if self.is_running and own:
            self.routers = output.router_logits = (*self.routers, *own)


class _Absent(nn.Module):
    """Replaces a module of another stage: returns its first floating point argument, or, for an embedding, a zero to add."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.is_added = isinstance(module, nn.Embedding)  # OPT's embedding gets a mask, which may be floating point

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())
        zero = torch.zeros(())
        return zero if self.is_added else next(tensors, zero)


def _arguments(batch: Any) -> dict[str, Any]:
    """A micro-batch as keyword arguments: of a mapping, of (inputs, labels) with a mapping or token ids, or of token ids."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (tuple, list)):
        return _arguments(batch[0]) | {"labels": batch[1]}
    return {"input_ids": batch}


def _first_input_of(arguments: Mapping[str, Any]) -> str:
    """The name of the argument that the first stage computes from."""
    return next((name for name in _OF_THE_EMBEDDING if arguments.get(name) is not None), "input_ids")


def _layers_of(model: nn.Module) -> tuple[str, list[str]]:
    """The path of the container of the model's layers, and their names in it."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has an encoder and a decoder, and only decoders are cut into pipeline stages: use "
            f"slipstream.mesh.pp 1 with tp instead, or ZeRO stage 3"
        )
    paths = repeated_blocks(model)
    containers = [path.rpartition(".")[0] for path in paths]
    if not paths:
        raise ValueError(
            f"{type(model).__name__} has no repeated layers to cut into pipeline stages; pass a PipelineModule, or use "
            f"slipstream.mesh.pp 1 and ZeRO stage 3"
        )
    longest = max(dict.fromkeys(containers), key=containers.count)
    return longest, [name for name, _ in model.get_submodule(longest).named_children()]


def _around(model: nn.Module, layers: str) -> tuple[list[str], list[str]]:
    """The modules with parameters outside of the layers: those before and those after the layers in a forward.

    The order is that of the model's `_pp_plan` if it names all of them, else that of a forward on meta.
    """
    outside = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if not f"{name}.".startswith(f"{layers}.") and any(param is not None for param in module._parameters.values())
    ]
    plan = [name for name in getattr(model, "_pp_plan", None) or {} if name != layers]
    base = layers.rpartition(".")[0]
    if all(any(f"{name}.".startswith(f"{named}.") for named in plan) for name in outside):
        ordered = [*getattr(model, "_pp_plan", {})]
        inside = [name for name in ordered if name.startswith(f"{base}.")]
        before = set(inside[: inside.index(layers)]) if layers in inside else set()
        roots = {name: next(named for named in plan if f"{name}.".startswith(f"{named}.")) for name in outside}
        return [name for name in outside if roots[name] in before], [name for name in outside if roots[name] not in before]
    return _traced(model, layers, outside)


def _traced(model: nn.Module, layers: str, outside: Sequence[str]) -> tuple[list[str], list[str]]:
    called: list[str] = []
    first = next(model.get_submodule(layers).children())

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    handles = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in outside]
    handles.append(first.register_forward_pre_hook(note(layers)))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    error: Exception | None = None
    try:
        # some models read the values of a 2D mask, which meta lacks, or derive positions from any mask
        mask = torch.zeros(1, 1, 2, 2, device="meta")
        for given in ({"attention_mask": None}, {"attention_mask": mask}, {"attention_mask": mask, "position_ids": ids}):
            called.clear()
            arguments = {"input_ids": ids, "use_cache": False, **given}
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    torch.func.functional_call(model, meta, (), arguments, tie_weights=False)
            except Exception as failure:
                error = failure
            else:
                break
        else:
            raise ValueError(
                f"{type(model).__name__} has no _pp_plan for {', '.join(outside)}, and a forward on meta, which shows their order, "
                f"failed ({error}); give the class a _pp_plan, or pass a PipelineModule"
            ) from error
    finally:
        for handle in handles:
            handle.remove()
    start = called.index(layers)
    return [name for name in outside if name in called[:start]], [name for name in outside if name not in called[:start]]


def _divide(
    model: nn.Module, layers: str, names: Sequence[str], after: Sequence[str], num_stages: int, method: str, world: Axis | None
) -> list[int]:
    """The bounds of the stages, each of at least one layer. Collective over `world` for a measured division."""
    if len(names) < num_stages:
        ranks = num_stages if world is None else world.size
        raise ValueError(
            f"{type(model).__name__} has {len(names)} layers, fewer than the {num_stages} pipeline stages; "
            f"{nearest_divisor(ranks, len(names))} work on {ranks} ranks"
        )
    blocks, kind = list(model.get_submodule(layers).children()), method.partition(":")[0].lower()
    if kind == "uniform":
        return partition_uniform(len(names), num_stages)
    if kind == "type":
        return partition(blocks, num_stages, method)
    if kind == "profile":
        bounds = partition_balanced(_seconds(model, [f"{layers}.{name}" for name in names]), num_stages)
        return bounds if world is None else world.gather(bounds)[0]  # measurements differ between ranks
    if kind != "parameters":
        raise ValueError(f"pipeline.partition {method!r} is none of parameters, uniform, type:REGEX, profile")
    weights = [sum(param.numel() for param in block.parameters()) for block in blocks]
    weights[-1] += sum(param.numel() for name in after for param in model.get_submodule(name).parameters(recurse=False))
    return partition_balanced(weights, num_stages)


def _seconds(model: nn.Module, names: Sequence[str]) -> list[float]:
    """The time of each block in a forward of the whole model; work before the first and after the last counts to these."""
    if any(param.is_meta for param in model.parameters()):
        raise ValueError(
            f"pipeline.partition 'profile' measures {type(model).__name__}, whose weights are on meta; use parameters or uniform"
        )
    device = next(model.parameters()).device
    best, was_training = [math.inf] * len(names), model.training
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    hooks = [model.get_submodule(name).register_forward_pre_hook(mark) for name in names[1:]]
    ids = torch.zeros(1, _PROFILED, dtype=torch.long, device=device)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            for _ in range(TIMINGS):
                marks.clear()
                mark()
                model.eval()(input_ids=ids, use_cache=False)
                mark()
                best = [min(pair) for pair in zip(best, (b - a for a, b in itertools.pairwise(marks)), strict=True)]
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return best


def _ties(model: nn.Module, owners: Mapping[str, int], num_stages: int) -> list[Tied]:
    """The parameters that modules of several stages share."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    ties = []
    for shared in names.values():
        places: dict[int, str] = {}
        for name in shared:
            module = next((owned for owned in owners if name.startswith(f"{owned}.")), None)
            if module is not None:
                places.setdefault(owners[module], name)
        if len(places) > 1:
            ties.append(Tied(shared[0], tuple(sorted(places.items()))))
    return ties


def _name_canonically(part: nn.Module, tied: Tied, stages: Sequence[int]) -> None:
    """Give a tied parameter its name in the unsplit model, even if this rank holds it at another place, such as the head."""
    (first, canonical), *others = tied.places
    here = next((name for stage, name in others if stage in stages), None)
    if first not in stages and here is not None:
        path, _, leaf = canonical.rpartition(".")
        part.get_submodule(path).register_parameter(leaf, part.get_parameter(here))


def _copy(module: nn.Module) -> nn.Module:
    """A module with the same children and parameters, and hooks of its own."""
    copied = copy.copy(module)
    for name, value in module.__dict__.items():
        if isinstance(value, dict):
            copied.__dict__[name] = type(value)(value) if type(value).__init__ is dict.__init__ else copy.copy(value)
    return copied


def _pruned(module: nn.Module, absent: set[str], layers: str, prefix: str = "") -> nn.Module:
    """A copy of the modules on the path to the absent ones, without these: layers are left out, others have a stand-in."""
    touched = {name for name in absent if name.startswith(prefix)}
    if not touched and not f"{layers}.".startswith(prefix):
        return module
    copied = _copy(module)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path not in absent:
            copied._modules[name] = _pruned(child, absent, layers, f"{path}.")
        elif f"{prefix}".removesuffix(".") == layers:
            del copied._modules[name]
        else:
            copied._modules[name] = child if isinstance(child, _Absent) else _Absent(child)
    return copied


def _shorten_configs(part: nn.Module, layers: str, start: int, stop: int) -> None:
    """Give the module that runs the layers a config with the number of its layers, because its forward counts by it."""
    parent = part.get_submodule(layers.rpartition(".")[0])
    config = getattr(parent, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    if config is None or count is None:
        return
    config = copy.copy(config)
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, value[start:stop])
    config.num_hidden_layers = stop - start
    parent.config = config
