"""A tensor parallelism plan for a model without one: found in one forward, checked block by block, and once for the whole model.

A column layer is a linear layer whose input does not depend on another column layer of its block. A row layer's input does, and its
output has the block's width. Column layers and the row layers that depend on them form a region. A region is cut in copies of its
block, one for each rank, all in this process: it may be cut if the shares of each row layer add up to the layer's output. A fused
layer is tried in all forms that its length allows. Regions that fit no form stay whole.

DeepSpeed's `injection_policy` names the row layers; a named layer must fit.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from slipstream.config.plan import TensorPlan
from slipstream.parallel.cuts import has_plan
from slipstream.parallel.exchange import Exchange, LocalExchange, connect_activations
from slipstream.parallel.slicing import is_transposed, slice_model
from slipstream.world.mesh import Axis
from slipstream.world.watch import Watch
from slipstream.zero.comm import Pending
from slipstream.zero.leaves import is_quantized
from slipstream.zero.wrap import repeated_blocks

logger = logging.getLogger(__name__)

_PATIENCE_S = 1800.0  # seconds to wait for the other ranks in a forward
_OWN = TensorPlan(size=0, preset=None, partition=None, vocab_head=False, shares_tokens=False, overlaps=False)
_NUM_TOKENS = 12
_ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # tolerance, relative to the largest output
_EXACT = 1e-4  # tolerance, relative to a row layer's largest output, in fp32

Policy = Mapping[type, Sequence[str]]  # class of blocks -> the suffixes of their row layers' names


class CutRegion(NamedTuple):
    """The column and row layers of a region, by their names in the block."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


class _Kind(NamedTuple):
    """What blocks with the same plan have in common."""

    block: type[nn.Module]
    regions: tuple[CutRegion, ...]
    shapes: tuple[Any, ...]


class _Block(NamedTuple):
    module: nn.Module
    inputs: tuple[Any, ...]  # positional arguments of its first call; the first tensor is the hidden states
    options: Mapping[str, Any]
    names: list[str]  # of all blocks of this kind


class ForwardError(Exception):
    """The model's forward has failed on the inputs; its error is the cause."""


class OneTokenError(ValueError):
    """The inputs have one token, for which attention is the value itself, so they show too little."""


class PlanTrial(NamedTuple):
    """A model's inputs, its outputs before it is cut, and the `partition_config` that was found."""

    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    outputs: Any
    partition: Mapping[str, Any]


def example_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Inputs for a transformers model, the same on all ranks; None for a module that does not describe its inputs."""
    config: Any = getattr(model, "config", None)
    device = next(model.parameters()).device
    chance = torch.Generator().manual_seed(0)
    main, tokens = getattr(model, "main_input_name", None), getattr(config, "vocab_size", None)
    if main == "input_ids" and isinstance(tokens, int):
        ids = torch.randint(tokens, (1, _NUM_TOKENS), generator=chance).to(device)
        if isinstance(end := getattr(config, "eos_token_id", None), int) and 0 <= end < tokens:
            ids[0, -1] = end
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {})
        return inputs | ({"use_cache": False} if hasattr(config, "use_cache") else {})
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if main == "input_features" and isinstance(tokens, int) and isinstance(bins, int) and isinstance(frames, int):
        sound = torch.randn(1, bins, 2 * frames, generator=chance).to(device, next(model.parameters()).dtype)
        ids = torch.randint(tokens, (1, _NUM_TOKENS), generator=chance).to(device)
        return {"input_features": sound, "decoder_input_ids": ids, "use_cache": False}
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(size, int):
        pixels = torch.randn(1, getattr(config, "num_channels", 3), size, size, generator=chance)
        return {"pixel_values": pixels.to(device, next(model.parameters()).dtype)}
    return None


@torch.no_grad()
def try_out(model: nn.Module, axis: Axis, inputs: Sequence[Any], options: Mapping[str, Any], policy: Policy) -> PlanTrial:
    """Find the plan of a whole model from its own inputs. No communication: every rank finds the same plan.

    Raises ForwardError if the model's forward fails on the inputs, OneTokenError if they show too little, and ValueError if no
    region, or a region that the policy names, cannot be cut.
    """
    own: Any = tree_map_only(Tensor, Tensor.detach, (tuple(inputs), dict(options)))
    originals = copy.deepcopy(own)  # the forward may change them
    batch = next((len(x) for x in tree_leaves(own) if isinstance(x, Tensor) and x.dim() > 1), 1)
    modules = dict(model.named_modules())
    named = {name: ends for kind, ends in policy.items() for name, module in modules.items() if isinstance(module, kind)}
    blocks = {name: modules[name] for name in named or repeated_blocks(model)}
    try:
        with _Trace(blocks, named, batch) as trace:
            outputs = model(*own[0], **own[1])
    except Exception as error:
        raise ForwardError(f"{type(error).__name__}: {error}") from error
    if trace.one_token:
        shape = f"{trace.one_token} if sequences come first; if time does, show it two sequences"
        raise OneTokenError(f"any split of heads fits one token, as in {shape}")
    if not _floats(outputs):
        raise ValueError(f"{type(model).__name__} returns no tensors by which a plan of tensor parallelism could be checked")
    specs = _specs(model, trace, named, axis)
    if not specs:
        raise ValueError(
            f"{type(model).__name__} has no plan for tensor parallelism, and none was found that gives its outputs on {axis.size} "
            "ranks: build it of slipstream.parallel.ColumnParallelLinear and RowParallelLinear"
        )
    partition = {"layer_specs": specs, "use_default_specs": False}
    logger.info("%s is cut by the plan that was found: partition_config %s", type(model).__name__, json.dumps(partition))
    return PlanTrial(originals[0], originals[1], outputs, partition)


def needs_trial(model: nn.Module) -> bool:
    """Whether a model has no plan of its own."""
    return not has_plan(model, _OWN)


def cut(
    model: nn.Module, axis: Axis, trial: PlanTrial | None, exchange: Exchange | None = None, device: torch.device | None = None
) -> Exchange | None:
    """Cut a model in place for this rank, by its own plan or a trial's, and move its slices to `device`, if given. `compare` should
    follow a trial. Collective.

    Returns the exchange of sums, a new one by default; None if nothing is cut. Raises ValueError like `slice_model`, before any
    layer is cut."""
    slices = slice_model(model, axis, _OWN if trial is None else replace(_OWN, partition=trial.partition))
    if slices is None:
        return None
    if device is not None:
        model.to(device)
    if exchange is None:
        exchange = connect_activations(axis, next(model.parameters()).device, "auto", Watch(_PATIENCE_S))
    slices.exchange = exchange
    return slices.exchange


def _specs(model: nn.Module, trace: _Trace, named: Mapping[str, Sequence[str]], axis: Axis) -> list[dict[str, Any]]:
    """The entries of `partition_config` that fit, for all blocks."""
    specs: list[dict[str, Any]] = []
    config = getattr(model, "config", None)
    for (kind, regions, _), block in trace.found.items():
        ends = named.get(block.names[0], ())
        rows = {row for region in regions for row in region.rows}
        if idle := [end for end in ends if not any(_is_named(row, (end,)) for row in rows)]:
            raise ValueError(f"injection_policy: {kind.__name__}: the input of {', '.join(idle)} depends on no other linear layer")
        for region in regions:
            cuts = _checked(block, region, axis, config)
            if cuts is None and (wanted := [row for row in region.rows if _is_named(row, ends)]):
                raise ValueError(
                    f"injection_policy: {kind.__name__} cannot be cut between {', '.join(region.columns)} and {', '.join(wanted)} "
                    f"over {axis.size} ranks: the sum of the shares is not the layer's output"
                )
            if cuts is None:
                logger.warning("%s: %s of %s stay whole", type(model).__name__, ", ".join(region.columns), kind.__name__)
                continue
            specs += [spec | {"patterns": [_pattern(block.names, trace.blocks, name)]} for name, spec in cuts.items()]
    return specs


@torch.no_grad()
def compare(model: nn.Module, trial: PlanTrial, exchange: Exchange) -> None:
    """Compare a model's outputs with those before it was cut. Collective. Raises ValueError if they differ."""
    before, after = _floats(trial.outputs), _floats(model(*trial.inputs, **trial.options))
    off = torch.tensor([math.inf if len(before) != len(after) else 0.0, *map(_distance, before, after)]).max()  # NaN if any is
    worst = float(exchange.gather(off.view(1).to(exchange.device), 0, [1] * exchange.size).max())
    if not worst <= 1:
        raise ValueError(
            f"the {type(model).__name__} that is cut by the plan {json.dumps(trial.partition)} does not give the outputs that it "
            f"had ({worst:.3g} times what rounding explains): load it again, and name its row layers in injection_policy"
        )


def _floats(outputs: Any) -> list[Tensor]:
    """The tensors of a model's outputs, also in a dataclass."""
    parts = ([leaf] if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values() for leaf in tree_leaves(outputs))
    return [x for part in parts for x in part if isinstance(x, Tensor) and x.is_floating_point()]


def _distance(before: Tensor, after: Tensor) -> float:
    """The largest difference, as a multiple of what rounding explains."""
    if before.shape != after.shape:
        return math.inf
    if not before.numel():
        return 0.0
    most = float(before.abs().max()) or 1.0
    return float((after - before).abs().max()) / (_ROUNDING.get(before.dtype, 1e-4) * most)


class _Trace(TorchDispatchMode):
    """Finds the regions of blocks in a forward, by tracking on which column layers of the block each storage depends."""

    def __init__(self, blocks: Mapping[str, nn.Module], named: Mapping[str, Sequence[str]], batch: int) -> None:
        """named: block -> suffixes of its row layers' names. batch: number of sequences in the inputs."""
        super().__init__()
        self.blocks, self.named, self.batch = blocks, named, batch
        self.found: dict[_Kind, _Block] = {}
        self.one_token: list[int] = []  # the shape of hidden states with one token per sequence
        self._depends: dict[int, frozenset[str]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> _Trace:
        for name, block in self.blocks.items():
            steps = _BlockSteps(self, self.named.get(name))
            self._handles += [
                block.register_forward_pre_hook(partial(self._begin, steps), with_kwargs=True),
                block.register_forward_hook(partial(self._end, name, steps)),
            ]
            for inner, module in block.named_modules():
                if _is_product(module):
                    self._handles.append(module.register_forward_hook(partial(steps.product, inner)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        depends = self.of((args, kwargs))
        result = func(*args, **(kwargs or {}))
        own = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                before = self._depends.get(_storage(x), frozenset()) if _storage(x) in own else frozenset()
                self.mark(x, before | depends)
        return result

    def of(self, values: Any) -> frozenset[str]:
        """The layers that tensors depend on."""
        tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
        return frozenset().union(*(self._depends.get(_storage(x), ()) for x in tensors))

    def mark(self, x: Tensor, layers: frozenset[str]) -> None:
        self._depends[_storage(x)] = layers

    def _begin(self, steps: _BlockSteps, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depends.clear()
        first = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        if steps.inputs is None and first is not None and first.dim() > 1:
            steps.inputs, steps.options = copy.deepcopy((args, kwargs))  # a block may add to its input in place
            steps.width = first.shape[-1]
            if first.shape[:-1].numel() // max(1, self.batch) == 1:
                self.one_token = list(first.shape)

    def _end(self, name: str, steps: _BlockSteps, block: nn.Module, args: Any, output: Any) -> None:
        self._depends.clear()
        if not steps.inputs and not steps.options:
            return
        kind = _Kind(type(block), tuple(steps.regions()), _shapes(block))
        self.found.setdefault(kind, _Block(block, steps.inputs or (), steps.options, [])).names.append(name)
        steps.inputs, steps.options = (), {}  # further calls show nothing new, and one block's inputs suffice for its kind


class _BlockSteps:
    """The linear layers of a block, in the order of their calls."""

    def __init__(self, trace: _Trace, named: Sequence[str] | None) -> None:
        """named: the row layers; None: the layers that depend on column layers and have the block's width"""
        self.trace, self.named = trace, named
        self.inputs: tuple[Any, ...] | None = None
        self.options: Mapping[str, Any] = {}
        self.width = 0
        self.columns: set[str] = set()
        self.rows: dict[str, frozenset[str]] = {}
        self.seen: set[str] = set()

    def product(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook of a linear layer."""
        if not isinstance(output, Tensor):
            return
        before = self.trace.of(args)
        if name in self.seen or not args:  # called before, from another place
            self.columns.discard(name)
            self.rows.pop(name, None)
            self.trace.mark(output, frozenset())
            return
        self.seen.add(name)
        is_row = output.shape[-1] == self.width if self.named is None else _is_named(name, self.named)
        if before and is_row:
            self.rows[name] = before
            self.trace.mark(output, frozenset())
            return
        self.columns -= before  # what follows another product is not part of a region
        self.columns.add(name)
        self.trace.mark(output, frozenset({name}))

    def regions(self) -> Iterator[CutRegion]:
        """Yield regions: rows that depend on the same columns. Columns without a row stay whole."""
        left = {row: layers & self.columns for row, layers in self.rows.items()}
        while left:
            row, columns = left.popitem()
            rows = [row]
            while met := [other for other, layers in left.items() if layers & columns]:
                columns = columns.union(*(left.pop(other) for other in met))
                rows += met
            if columns:
                yield CutRegion(tuple(sorted(columns)), tuple(sorted(rows)))


class _Share(LocalExchange):
    """Simulates one rank alone: a region only needs sums, and these return the rank's own share."""

    def _sum(self, flat: Tensor) -> Pending[Tensor]:
        return Pending(None, flat)


class _RowsSeenError(Exception):
    """All row layers of a region have run, so the rest of the block need not run."""


def _checked(block: _Block, region: CutRegion, axis: Axis, config: Any) -> dict[str, dict[str, Any]] | None:
    """The entries of `partition_config`, by layer, that reproduce the region's outputs; None if there are none."""
    module = block.module
    if any(is_quantized(parameter) for parameter in module.parameters()):
        return None
    exact = copy.deepcopy(module).float()
    for parameter in exact.parameters():
        if not parameter.any():  # zeros would fit any form
            parameter.normal_(std=0.02, generator=torch.Generator(parameter.device).manual_seed(0))
    expected = _outputs(exact, block, region.rows)
    if expected is None:
        return None
    length = {name: _lengths(exact.get_submodule(name)) for name in (*region.columns, *region.rows)}
    width = max(length[row][1] for row in region.rows)
    for shapes in itertools.product(*(_shapes_of(length[name][0], width) for name in region.columns)):
        rows = {name: {"partition_type": "row"} for name in region.rows}
        columns = {
            name: {"partition_type": "column"} | ({} if shape is None else {"shape": shape})
            for name, shape in zip(region.columns, shapes, strict=True)
        }
        if _fits(exact, block, columns | rows, expected, axis, config):
            return columns | rows
    return None


def _fits(
    exact: nn.Module, block: _Block, specs: Mapping[str, Any], expected: Mapping[str, Tensor], axis: Axis, config: Any
) -> bool:
    """Whether the ranks' shares add up to the row layers' outputs."""
    partition = {"layer_specs": [spec | {"patterns": [rf"block\.{re.escape(name)}\.weight$"]} for name, spec in specs.items()]}
    plan = replace(_OWN, partition=partition | {"use_default_specs": False})
    total: dict[str, Tensor] = {}
    for index in range(axis.size):
        own = replace(axis, index=index)
        holder = nn.Module()
        holder.config = config
        holder.block = copy.deepcopy(exact)
        try:
            slices = slice_model(holder, own, plan)
        except ValueError:  # heads that cannot be distributed
            return False
        if slices is None:
            return False
        slices.exchange = _Share(own, next(exact.parameters()).device)
        outputs = _outputs(holder.block, block, tuple(expected))
        if outputs is None:
            return False
        for name, output in outputs.items():
            bias = getattr(exact.get_submodule(name), "bias", None)
            if output.shape != expected[name].shape:
                return False
            share = output if bias is None or not index else output - bias
            total[name] = total[name] + share if index else share
    return all(float((total[name] - output).abs().max()) <= _EXACT * float(output.abs().max()) for name, output in expected.items())


def _outputs(module: nn.Module, block: _Block, rows: Sequence[str]) -> dict[str, Tensor] | None:
    """The outputs of a block's row layers in fp32; None if the block fails."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Tensor) -> None:
            outputs[name] = output
            if len(outputs) == len(rows):
                raise _RowsSeenError

        return hook

    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in rows]
    hidden = next(x for x in tree_leaves((block.inputs, block.options)) if isinstance(x, Tensor))
    chance = torch.Generator().manual_seed(0)  # random: inputs equal for all tokens would fit any split of heads
    random = torch.randn(hidden.shape, generator=chance).to(hidden.device)
    inputs, options = tree_map(
        lambda value: random if value is hidden and hidden.is_floating_point() else _as_float(value),
        (block.inputs, dict(block.options)),
    )
    try:
        module(*inputs, **options)
    except _RowsSeenError:
        return outputs
    except Exception:  # a block with fewer heads than it was built for may fail in any way
        return None
    finally:
        for handle in handles:
            handle.remove()
    return None


def _as_float(value: Any) -> Any:
    """A copy with floating point tensors in fp32."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)


def _shapes_of(length: int, width: int) -> list[list[Any] | None]:
    """The candidate forms of a layer of `length` features before one of `width`: equal parts, long and two short, or one."""
    if length in (2 * width, 3 * width):
        return [[length // width, -1], None]
    rest, odd = divmod(length - width, 2)
    return [[[width, rest, rest], -1], None] if rest > 0 and not odd else [None]


def _is_product(module: nn.Module) -> bool:
    """Whether the module is a linear layer, or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or (hasattr(module, "nx") and isinstance(getattr(module, "weight", None), Tensor))


def _lengths(layer: Any) -> tuple[int, int]:
    """(out, in) features."""
    out, width = layer.weight.shape
    return (width, out) if is_transposed(layer) else (out, width)


def _is_named(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _pattern(names: Sequence[str], blocks: Mapping[str, nn.Module], layer: str) -> str:
    """A pattern for a layer's parameters in these blocks; block numbers are wildcards if all blocks of the container are alike."""
    containers = {name.rpartition(".")[0] for name in names}
    alike = [name for name in blocks if name.rpartition(".")[0] in containers]
    numbers = all(name.rpartition(".")[2].isdigit() for name in names)
    if numbers and len(containers) == 1 and len(alike) == len(names):
        container = re.escape(containers.pop())
        path = rf"{container}\.\d+" if container else r"\d+"
    else:
        path = f"({'|'.join(map(re.escape, names))})" if any(names) else ""
    return rf"{path}\.{re.escape(layer)}\.weight$" if path else rf"{re.escape(layer)}\.weight$"


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
