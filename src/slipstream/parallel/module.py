"""`PipelineModule`: a model as a list of layers, of which a rank builds only those of its stages.

stage  consecutive layers; with several stages on each rank (interleaved pipelines) also called a virtual stage
chunk  one stage as a module, called with the previous stage's output. Its parameters are those of the `PipelineModule`
tied   parameters that several stages hold: one value, and the sum of the stages' gradients

Parameters have the names of the unsplit model: `3.weight` in layer 3, and `tied_modules.KEY.weight` in the module that the layers
with this key share. A layer's output is the only argument of the next layer, even if it is a tuple.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.activations.recompute import checkpoint
from slipstream.parallel.layers import LayerSpec, TiedLayerSpec, partition
from slipstream.parallel.schedule import Style, rank_of, stages_of
from slipstream.parallel.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology, value_of
from slipstream.world.mesh import nearest_divisor

logger = logging.getLogger(__name__)


class PipelineError(Exception):
    """A call that pipelines do not support."""


class Tied(NamedTuple):
    """One parameter that several stages hold. Checkpoints store the first place, and its value counts."""

    key: str  # its name in the unsplit model
    places: tuple[tuple[int, str], ...]  # (stage, its name there), ascending


class PipelineModule(nn.Module):
    """A model for pipeline parallelism, from a sequence of `LayerSpec`s, modules and functions, or an `nn.Sequential`.

    num_stages     the number of pipeline ranks, unless `topology` states it (axis pipe)
    topology       the places of the ranks; on its axis model, the layers are those of slipstream.parallel, or your own with
                   Megatron's marks
    loss_fn        called as loss_fn(outputs, labels); without it, the last layer's output is the loss
    seed_layers    seed with base_seed + i before building layer i, and with base_seed * (k + 1) + i before running it on
                   micro-batch k, counted from 1, by `seed_fn` (default: torch's, numpy's and Python's generators)
    partition_method  uniform, parameters, type:REGEX (of class names), or profile, which measures the layers on `example`
    activation_checkpoint_interval  recompute so many layers at a time; 0: none. Blocks without parameters are not recomputed; with
                   `checkpointable_layers`, only blocks of these classes are
    dynamic_shape  has no effect: shapes may change from micro-batch to micro-batch
    num_chunks     stages on each rank; rank r has the stages r, r + num_stages, ...
    stages         the stages to build here, instead of this rank's
    parts          the bounds of the stages, instead of `partition_method`

    Modules passed as layers of other stages are not kept. Raises RuntimeError if the number of ranks is not a multiple of
    `num_stages`, and NotImplementedError for an unknown `partition_method`.
    """

    is_v = False  # whether the stages come back from the last rank to the first
    reads_everywhere = False  # whether stages between the first and the last need the batch
    _chunks: dict[int, LayerChunk]
    curr_layer: int  # the layer that runs, or ran last

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        num_chunks: int = 1,
        stages: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
        example: Any = None,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("must provide num_stages or topology")
        self.loss_fn, self.seed_layers, self.seed_fn, self.base_seed = loss_fn, seed_layers, seed_fn or _seed_all, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers, self.dynamic_shape = checkpointable_layers, dynamic_shape
        self.has_own_topology = topology is not None
        self._topo = topology if topology is not None else _topology(num_stages or 1, alone=stages is not None)
        self.num_ranks = max(self._topo.get_dim("pipe"), 1)  # along the pipeline
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.stage_id = 0 if stages is not None else int(getattr(self._topo.get_coord(self.global_rank), "pipe", 0))
        self.num_stages = self.num_ranks * num_chunks
        self.stages = stages_of(self.num_ranks, self._style, self.stage_id, num_chunks) if stages is None else tuple(stages)
        specs = list(layers)
        self._num_layers = len(specs)
        self.parts = self._divide(specs, partition_method, parts, example)
        self._layer_specs = [
            layer if self._stage_with(i) in self.stages or not isinstance(layer, nn.Module) else None
            for i, layer in enumerate(specs)
        ]
        self.tied_modules, self.tied_weight_attrs, self._ties = nn.ModuleDict(), dict[str, list[str]](), dict[str, set[int]]()
        for i, layer in enumerate(specs):
            if isinstance(layer, TiedLayerSpec):
                self._ties.setdefault(layer.key, set()).add(self._stage_with(i))
                self.tied_weight_attrs.setdefault(layer.key, layer.tied_weight_attr)
        # not registered: their layers are children here under the same names
        self.__dict__["_chunks"] = {stage: LayerChunk(self, stage) for stage in self.stages}
        for param in self.parameters():
            param.ds_pipe_replicated = False  # type: ignore[attr-defined]

    @property
    def _style(self) -> Style:
        """The style by which stages are assigned to ranks."""
        return Style.V if self.is_v else Style.ONE_F_ONE_B

    def _divide(self, specs: list[Any], method: str, parts: Sequence[int] | None, example: Any) -> list[int]:
        if parts is None:
            bounds = [partition(specs, self.num_stages, method, example)]
            if method.lower() == "profile" and dist.is_initialized():  # measurements differ between ranks
                dist.broadcast_object_list(bounds)
            return bounds[0]
        rising = list(parts) == sorted(parts)
        if len(parts) != self.num_stages + 1 or parts[0] != 0 or parts[-1] != len(specs) or not rising:
            raise ValueError(
                f"parts={list(parts)} are no bounds of {self.num_stages} stages of {len(specs)} layers: pass {self.num_stages + 1} "
                f"ascending numbers from 0 to {len(specs)}"
            )
        return list(parts)

    def _stage_with(self, layer_idx: int) -> int:
        assert 0 <= layer_idx < self._num_layers, f"there is no layer {layer_idx}"
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def _build(self, layer_idx: int) -> tuple[str, Any]:
        """Build one layer, or find the module that it shares. Returns its path below this module ("" for a function), and it."""
        layer = self._layer_specs[layer_idx]
        if self.seed_layers:
            self.seed_fn(self.base_seed + layer_idx)
        if isinstance(layer, PipelineModule):
            raise NotImplementedError(f"layer {layer_idx} is a PipelineModule itself; pass its layers")
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            return f"tied_modules.{layer.key}", module if layer.forward_fn is None else partial(layer.forward_fn, module)
        if isinstance(layer, (LayerSpec, nn.Module)):
            built = layer.build() if isinstance(layer, LayerSpec) else layer
            self.add_module(str(layer_idx), built)
            return str(layer_idx), built
        return "", layer

    # -- what an executor calls --

    def chunk(self, i: int) -> LayerChunk:
        """The i-th stage of this rank as a module; `stages[i]` is its number."""
        return self._chunks[self.stages[i]]

    @property
    def tied(self) -> list[Tied]:
        """The parameters in this rank's chunks that several stages hold."""
        ties = []
        for key, module in self.tied_modules.items():
            stages = sorted(self._ties[key])
            names = [f"tied_modules.{key}.{name}" for name, _ in module.named_parameters()]
            ties += [Tied(name, tuple((stage, name) for stage in stages)) for name in names if len(stages) > 1]
        return ties

    def refresh(self) -> None:
        """Give the chunks this module's current layers, after a change of the model."""
        for chunk in self._chunks.values():
            for i, path in enumerate(chunk.paths):
                if path in self._modules and chunk._modules[path] is not self._modules[path]:
                    chunk._modules[path] = chunk.funcs[i] = self._modules[path]

    def position(self, name: str) -> int:
        """The index of a parameter's layer in the unsplit model, by which parameters are ordered; tied ones are first."""
        layer = name.partition(".")[0]
        return int(layer) if layer.isdigit() else -1

    def recall(self, batch: Any) -> None:
        """Called before a micro-batch's backward."""

    def inputs(self, batch: Any) -> Any:
        """The first stage's input, from a micro-batch (inputs, labels)."""
        return batch[0]

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The loss of a micro-batch (inputs, labels), from the last stage's output."""
        return outputs if self.loss_fn is None else self.loss_fn(outputs, batch[1])

    def forward(self, forward_input: Any, batch: Any = None, chunk: int = 0) -> Any:
        return self.chunk(chunk)(forward_input, batch)

    # -- DeepSpeed's names --

    @property
    def forward_funcs(self) -> list[Any]:
        return [func for i in range(len(self.stages)) for func in self.chunk(i).funcs]

    @property
    def micro_offset(self) -> int:
        return self.chunk(0).micro_offset

    @micro_offset.setter
    def micro_offset(self, count: int) -> None:
        for i in range(len(self.stages)):
            self.chunk(i).micro_offset = count

    @cached_property
    def _grid(self) -> PipelineParallelGrid:
        """The grid of the topology. Collective on first use, unless an engine has set it."""
        return PipelineParallelGrid(self._topo)

    topology, mpu, num_pipeline_stages, partitions = map(value_of, ("_topo", "_grid", "num_ranks", "parts"))

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that has a layer."""
        return rank_of(self.num_ranks, self._style, self._stage_with(layer_idx))

    def set_checkpoint_interval(self, interval: int) -> None:
        if interval < 0:
            raise ValueError(f"the activation checkpoint interval has to be 0 or more layers, not {interval}")
        self.activation_checkpoint_interval = interval

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """For each block of `activation_checkpoint_interval` layers, whether it is recomputed."""
        interval = self.activation_checkpoint_interval
        if not interval:
            return []
        blocks = (chunk.funcs[i : i + interval] for chunk in self._chunks.values() for i in range(0, len(chunk.funcs), interval))
        return list(map(self._is_checkpointable, blocks))

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(func).__name__ in self.checkpointable_layers for func in funcs)
        return any(isinstance(func, nn.Module) and any(True for _ in func.parameters()) for func in funcs)

    @cached_property
    def tied_comms(self) -> dict[str, dict[str, Any]]:
        """ranks, group, weight_attr and module of each tied module on this rank with copies on others. Collective on first use."""
        comms = dict[str, dict[str, Any]]()
        for key in sorted(self._ties):
            owners = sorted({rank_of(self.num_ranks, self._style, stage) for stage in self._ties[key]})
            for pipe in self._grid.pipe_groups if len(owners) > 1 else ():
                ranks = [pipe[owner] for owner in owners]
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    attrs, module = self.tied_weight_attrs[key], self.tied_modules[key]
                    comms[key] = {"ranks": ranks, "group": group, "weight_attr": attrs, "module": module}
        return comms

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        return [
            (comm["module"].get_parameter(attr), comm["group"])
            for _, comm in sorted(self.tied_comms.items())
            for attr in comm["weight_attr"]
        ]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the tied weights' gradients over the stages, for training without an engine."""
        for weight, group in self.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad, group=group)

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Losses to report beside the loss, by name. To be overridden."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer separately."""
        for chunk in self._chunks.values():
            for i, func in enumerate(chunk.funcs):
                if isinstance(func, nn.Module):
                    func.compile(*args, **kwargs)
                else:
                    chunk.funcs[i] = torch.compile(func, *args, **kwargs)


class DualPipeVModule(PipelineModule):
    """A `PipelineModule` with twice as many stages as ranks: rank r of p has the stages r and 2 p - 1 - r.

    Rank 0 has the first and the last layer: it loads batches and computes losses, and a tied embedding and head are one module.
    `overlapped_forward_backward`, which would run a forward and a backward together, is never called; a warning says so.
    """

    is_v = True

    def __init__(self, *args: Any, overlapped_forward_backward: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        if (num_chunks := kwargs.pop("num_chunks", 1)) != 1:
            raise ValueError(f"DualPipeVModule has two stages on each rank, so num_chunks={num_chunks} has no meaning; drop it")
        super().__init__(*args, num_chunks=2, **kwargs)
        if overlapped_forward_backward is not None:
            logger.warning(
                "DualPipeVModule(overlapped_forward_backward=...) has no effect: forwards and backwards run in turn here"
            )


class LayerChunk(nn.Module):
    """One stage of a `PipelineModule`: its layers in order."""

    owner: PipelineModule

    def __init__(self, owner: PipelineModule, stage: int) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # not a child
        self.stage, self.micro_offset = stage, 0
        self.is_first, self.is_last = stage == 0, stage == owner.num_stages - 1
        self.start, self.stop = owner.parts[stage : stage + 2]
        self.paths, self.funcs = list[str](), list[Any]()
        self.tied_modules = nn.ModuleDict()
        for i in range(self.start, self.stop):
            path, func = owner._build(i)
            kind, _, key = path.rpartition(".")
            if kind:
                self.tied_modules[key] = owner.tied_modules[key]
            elif path:
                self.add_module(path, func)
            self.paths.append(path)
            self.funcs.append(func)

    def forward(self, x: Any, batch: Any = None) -> Any:
        """Run the layers. `batch` is unused; other kinds of chunks read masks from it."""
        owner = self.owner
        self.micro_offset += 1
        interval = owner.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        for start in range(0, len(self.funcs), interval or len(self.funcs) or 1):
            stop = min(start + interval, len(self.funcs)) if interval else len(self.funcs)
            run = partial(self._run, start, stop, self.micro_offset + 1)
            if not interval or not owner._is_checkpointable(self.funcs[start:stop]):
                x = run(x)
            elif isinstance(x, tuple):
                x = owner.activation_checkpoint_func(lambda *items, run=run: run(items), *x)
            else:
                x = owner.activation_checkpoint_func(run, x)
        return x

    def _run(self, start: int, stop: int, micro: int, x: Any) -> Any:
        owner = self.owner
        for i in range(start, stop):
            owner.curr_layer = self.start + i
            if owner.seed_layers:
                owner.seed_fn(owner.base_seed * micro + self.start + i)
            x = self.funcs[i](x)
        return x


def _topology(num_stages: int, alone: bool) -> ProcessTopology:
    world_size = num_stages if alone else dist.get_world_size() if dist.is_initialized() else 1
    if world_size % num_stages:
        nearest = f"use {nearest_divisor(world_size, num_stages)}"
        remedy = nearest if dist.is_initialized() else "call init_distributed first, or pass stages=, the stages to build here"
        raise RuntimeError(f"num_stages ({num_stages}) must divide distributed world size ({world_size}); {remedy}")
    return PipeDataParallelTopology(num_stages, world_size // num_stages)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # numpy's limit
    torch.manual_seed(seed)
