"""What a checkpoint of an engine holds, and how it comes back at any world size, stage or topology.

Tensors by name: `model.<parameter>` (the master's values, in the master's dtype), `buffer.<buffer>`,
`optim.<state>.<parameter>`. Each rank contributes and takes the flat ranges that it owns (checkpoint/). Values: counters,
loss scale, schedule, data position, the optimizer's scalars, further names of tied weights, the caller's `client_state`, and a
transformers model's configuration, which makes the checkpoint one that can be served; per rank: random states, and the data
position where each rank reads data of its own.

[Note: All or nothing] A load applies the values first, each change with its undoing, once the checkpoint layer has checked names,
shapes and files and before it fills a tensor. Whatever is refused on any rank, here or there, is undone on all.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream import checkpoint
from slipstream.checkpoint import CheckpointError, FlatSlice, pretrained
from slipstream.checkpoint.errors import Ranks
from slipstream.compression import Numbers, head_of, row_forms
from slipstream.optim.sharded import Piece, ShardedSteps
from slipstream.train import adapters, handover
from slipstream.train.data import OtherDataError, StatefulLoader
from slipstream.zero.comm import gather_objects
from slipstream.zero.layout import overlap
from slipstream.zero.store import copy_store, section
from slipstream.zero.unit import Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

logger = logging.getLogger(__name__)


Contents = Literal["all", "without_optimizer", "weights", "adapters"]


def save(
    engine: Engine, directory: str, tag: str | None, client_state: Mapping[str, Any] | None, save_latest: bool,
    exclude_frozen: bool, contents: Contents,
) -> None:  # fmt: skip
    """Write one checkpoint, or copy what it takes to be written behind training. Collective; raises the same CheckpointError on
    every rank, also for the save before this one that was still being written."""
    finish(engine)
    data = engine.mesh.data
    _warn_of_what_is_left_out(engine, directory)
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    what = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen, "contents": contents}
    _agree(engine, f"checkpoint {directory}/{tag} was not saved", what)
    tensors = _weights(engine, exclude_frozen=exclude_frozen or contents == "adapters")
    if contents != "adapters":
        tensors |= _buffers(engine)
    if contents == "all":
        tensors |= _optimizer_tensors(engine)
    shared: dict[str, Any] = {}
    per_rank: dict[str, Any] = {}

    def collect() -> None:  # runs code of the user's: what fails on one rank fails on all
        loader = engine.training_dataloader
        together = isinstance(loader, StatefulLoader) and not loader.position_is_own
        position = _state_of(loader)
        shared.update(
            counters={name: getattr(engine, name) for name in _COUNTERS},
            loss_scale=engine.precision.scaler.state_dict(),
            scheduler=_state_of(engine.lr_scheduler),
            data=position if together else None,
            client=dict(client_state or {}),
            model_config=_model_config(engine.module),
            contents=contents,
            aliases=_aliases(engine.module),
        )
        per_rank.update(random=_random_state(engine.device), data=None if together else position)

    Ranks(data.group).gather(f"checkpoint {directory}/{tag} was not saved", collect)
    shared["optimizer"] = _optimizer_scalars(engine) if contents == "all" else None
    plan = engine.plan.checkpoint
    how: dict[str, Any] = {
        "tensors": tensors, "shared": shared, "per_rank": per_rank, "group": data.group, "save_latest": save_latest,
        "tag_validation": plan.tag_validation.capitalize(), "keep": plan.keep,
    }  # fmt: skip
    if plan.asynchronous:
        assert engine.staging is not None, "open_staging() makes it where saves are written behind training"
        engine.saving = checkpoint.save_behind(directory, tag, engine.staging, **how)
    else:
        checkpoint.save(directory, tag, **how)


def open_staging(device: torch.device) -> checkpoint.Staging:
    """What saves behind training are written from, empty as yet. Now, not at the first save, comes the import that all need."""
    import slipstream.checkpoint.storage  # noqa: F401

    return checkpoint.Staging(pinned=device.type == "cuda")


def fill_staging(engine: Engine) -> None:
    """After the first update, which has made the optimizer's states: bring in memory for a copy of all, behind training.

    Otherwise the first save stalls for it: a page's first use costs more than its copy.
    """
    assert engine.staging is not None, "only called where there is one"
    held = [*_weights(engine).values(), *_buffers(engine).values(), *_optimizer_tensors(engine).values()]
    data = [each.data if isinstance(each, FlatSlice) else each for each in held]
    whole = sum(each.numel() * each.dtype.itemsize for each in data)
    shared = not all(unit.placement.optim for unit in engine.units)  # then every rank holds all, and saves a part
    engine.staging.prepare(whole // engine.world_size if shared else whole)


def finish(engine: Engine) -> None:
    """Wait for the save that is being written behind training. Collective; raises the same CheckpointError on every rank, once."""
    saving, engine.saving = engine.saving, None
    if saving is not None:
        ranks = Ranks(engine.mesh.data.group)
        ranks.gather(f"checkpoint {saving.path}, written behind training, was not saved", saving.result)
        ranks.decide(f"checkpoint {saving.path} is saved, but older ones could not be removed", saving.tidied)


def _agree(engine: Engine, step: str, arguments: Mapping[str, Any]) -> None:
    """Refuse, on every rank, a call whose arguments differ: the ranks would wait for each other in different places."""
    ranks = Ranks(engine.mesh.data.group)
    told = ranks.gather(step, lambda: dict(arguments))

    def compare() -> None:
        for rank, theirs in enumerate(told):
            for name, value in arguments.items():
                if theirs[name] != value:
                    others = f"{theirs[name]!r} on rank {rank}"
                    raise CheckpointError(f"{name} is {value!r} on rank 0 and {others}; give the same on all")

    ranks.decide(step, compare)


def save_pretrained(engine: Engine, folder: str, dtype: torch.dtype | None, shard_nbytes: int, only_trainable: bool) -> None:
    """A Hugging Face folder of the masters' values; of weights that `slipstream.quantize` has made bytes, of the numbers that these
    stand for. Collective; each rank writes what it owns. ValueError for weights that other libraries have quantised.

    Of a model with PEFT's adapters: the base with the adapters merged into its weights, or, only_trainable, PEFT's own folder.
    """
    what = {"dtype": dtype, "max_shard_size": shard_nbytes, "only_trainable": only_trainable}
    _agree(engine, f"{folder} was not written", what)
    pairs = [pair for unit in engine.units for pair in zip(unit.wholes, unit.params, strict=True)]
    apart = {id(whole) for whole, param in pairs if whole is not param}
    foreign = next((name for name, param in engine.module.named_parameters() if id(param) in apart), "")
    if foreign and not only_trainable:
        raise ValueError(
            f"save_pretrained() would write the codes of {foreign!r}, which bitsandbytes, torchao or the like has quantised, "
            f"without what its loader needs to know of them: only_trainable=True writes the adapters, which belong on the folder "
            f"that the base came from, and save_checkpoint() everything"
        )
    module: Any = engine.module
    where: dict[str, Any] = {"group": engine.mesh.data.group, "shard_nbytes": shard_nbytes}
    adapted = handover.has_adapters(module)
    if adapted and only_trainable:
        _save_adapters(engine, folder, dtype, where)
        return
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    tensors: dict[str, pretrained.Out] = {}
    buffers = {} if only_trainable else _buffers(engine)
    if adapted:
        for name, (shape, kept) in handover.announced(engine).items():
            tensors[name] = pretrained.Out(torch.empty(shape, device="meta"), dtype or kept)
        called = handover.adapted_buffers(engine, [name.partition(".")[2] for name in buffers])
        buffers = {f"buffer.{new}": buffers[f"buffer.{old}"] for old, new in called.items()}
        where["stream"] = handover.stream(engine)
    numbers = {} if only_trainable or adapted else _numbers(engine)
    for key, held in (({} if adapted else _weights(engine, exclude_frozen=only_trainable)) | buffers).items():
        kind, _, name = key.partition(".")
        wanted = dtype if kind == "model" else None
        if name in numbers:
            tensors[name] = pretrained.Out(numbers[name], wanted or engine.plan.precision.param_dtype)
        else:
            tensors[name] = pretrained.Out(held, wanted or _dtype_of(engine, name, held))
    config = _model_config(base)
    texts = {} if config is None else pretrained.describe(config, type(base).__name__, dtype or engine.plan.precision.param_dtype)
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        texts["generation_config.json"] = generation.to_json_string()
    pretrained.write(folder, tensors, texts=texts, **where)


def _save_adapters(engine: Engine, folder: str, dtype: torch.dtype | None, where: Mapping[str, Any]) -> None:
    """Where PEFT has them: the one that is called default in the folder itself, others in folders below it."""
    held = {key.partition(".")[2]: value for key, value in (_weights(engine) | _buffers(engine)).items()}
    buffers = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    for adapter in adapters.of(engine, buffers):
        tensors = {
            key: pretrained.Out(held[name], (None if name in buffers else dtype) or _dtype_of(engine, name, held[name]))
            for key, name in adapter.tensors.items()
        }
        path = folder if adapter.name == "default" else os.path.join(folder, adapter.name)
        one_file = {**where, "shard_nbytes": sys.maxsize, "single": adapters.WEIGHTS}
        pretrained.write(path, tensors, texts={adapters.CONFIG: adapter.config}, **one_file)


def _numbers(engine: Engine) -> dict[str, FlatSlice]:
    """Quantised weights by name, of the rows that begin in this rank's bytes. Collective."""
    forms = row_forms(engine.module)
    known = {key.removeprefix("model."): held for key, held in _weights(engine).items() if key.removeprefix("model.") in forms}
    held = {name: each for name, each in known.items() if isinstance(each, FlatSlice)}
    heads = {name: head_of(each.data, each.start, forms[name]) for name, each in held.items()}
    everyone = gather_objects(heads, engine.mesh.data) if heads else []
    found = {}
    for name, each in held.items():
        numbers = Numbers(each.data, each.start, [theirs[name] for theirs in everyone], forms[name])
        found[name] = FlatSlice(numbers, (each.shape[0], forms[name].columns), numbers.start)
    return found


def _dtype_of(engine: Engine, name: str, held: FlatSlice | Tensor) -> torch.dtype:
    """What the model itself keeps: a master may be wider."""
    if isinstance(held, Tensor):
        return held.dtype
    return next(unit.dtypes.weights for unit in engine.units if name in unit.names)


def _warn_of_what_is_left_out(engine: Engine, directory: str) -> None:
    if engine.rank != 0:
        return
    if engine.hooks.backwards:
        logger.warning(
            "checkpoint in the middle of an accumulation window: the gradients of its %d backward passes are not saved, and a "
            "run that is resumed begins a new window; save after the engine.step() that updates", engine.hooks.backwards,
        )  # fmt: skip
    ranks = engine.mesh.data.ranks
    if dist.is_initialized() and len(ranks) < dist.get_world_size():
        logger.warning(
            "the checkpoint in %s is of this engine, of ranks %s of %d: engines of other groups (mpu) need directories of their "
            "own, or they overwrite each other's", directory, list(ranks), dist.get_world_size(),
        )  # fmt: skip


def load(
    engine: Engine, directory: str, tag: str | None, *, strict: bool, optimizer: bool, scheduler: bool, module_only: bool,
    exclude: Sequence[str] = (),
) -> tuple[str | None, dict[str, Any]]:  # fmt: skip
    """Read a checkpoint into the engine; returns (folder, client_state), or (None, {}) where `latest` is missing.

    Collective. Raises CheckpointError on every rank, with nothing changed, when anything in it is wrong.
    """
    finish(engine)
    what = {
        "tag": tag, "load_module_strict": strict, "load_optimizer_states": optimizer, "load_lr_scheduler_states": scheduler,
        "load_module_only": module_only, "exclude": list(exclude),
    }  # fmt: skip
    _agree(engine, f"checkpoint {'latest' if tag is None else tag} of {directory} was not loaded", what)
    if tag is None:
        tag = checkpoint.latest_tag(directory, group=engine.mesh.data.group, universal=engine.plan.checkpoint.universal)
    if tag is None:
        logger.warning("no checkpoint was loaded: there is no %s/latest; the run starts afresh", directory)
        return None, {}
    found = checkpoint.load_metadata(directory, tag, group=engine.mesh.data.group)
    contents = found.shared.get("contents", "all")
    module_only = module_only or contents in ("weights", "adapters")
    everything: dict[str, FlatSlice | Tensor] = _weights(engine) | _buffers(engine)
    wanted = {name: held for name, held in everything.items() if not _is_excluded(name, exclude)}
    needed = _weights(engine, exclude_frozen=True) if contents == "adapters" else wanted
    missing = [name for name in needed if name in wanted and name not in found.tensors]
    named = [name for name in found.tensors if name.startswith(("model.", "buffer."))]
    surplus = [name for name in named if name not in everything and not _is_excluded(name, exclude)]
    for pattern in exclude:
        if not any(_is_excluded(name, [pattern]) for name in (*everything, *named)):
            raise CheckpointError(f"exclude={list(exclude)}: {pattern!r} matches no parameter or buffer of model or checkpoint")
    optimizer = optimizer and not module_only and engine.steps is not None
    undo: list[Callable[[], None]] = _prepare_optimizer(engine, found, exclude) if optimizer else []
    if optimizer:
        states = _optimizer_tensors(engine)
        wanted |= {name: held for name, held in states.items() if not _is_excluded(name, exclude)}
    lacking = [name for name in wanted if name.startswith("optim.") and name not in found.tensors]
    wanted = {name: held for name, held in wanted.items() if name in found.tensors}
    shapes = {name: (found.tensors[name].shape, tuple(held.shape)) for name, held in wanted.items()}

    def accept(loaded: checkpoint.Loaded) -> None:
        if strict and (missing or surplus):
            verb, names = ("does not hold", missing) if missing else ("holds also", surplus)
            raise CheckpointError(
                f"it {verb} {names[:3]}{' and more' if len(names) > 3 else ''}: it is of another model, or was saved without "
                f"frozen parameters; load_module_strict=False takes the names that both have"
            )
        if type(loaded.shared.get("client")) is not dict:
            raise CheckpointError("it is damaged or hostile: its client_state is no dict")
        if not module_only:
            try:
                _take_values(engine, loaded, undo, lacking, exclude, optimizer=optimizer, scheduler=scheduler)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"its values are damaged or not of this version: {type(error).__name__}: {error}") from error

    try:
        _check_shapes(f"checkpoint {found.path} was not loaded", shapes)
        loaded = checkpoint.load(
            directory, tag, tensors=wanted, group=engine.mesh.data.group, convert=True, accept=accept, metadata=found
        )
    except BaseException:
        for each in reversed(undo):
            each()
        raise
    _spread_weights(engine)
    _begin_window(engine)
    return str(found.path), loaded.shared["client"]


def _is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern names the parameter or buffer that an entry is of."""
    kind, _, rest = name.partition(".")
    bare = rest.partition(".")[2] if kind == "optim" else rest
    return any(fnmatch.fnmatchcase(bare, pattern) for pattern in exclude)


def _check_shapes(step: str, shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    wrong = [
        f"{name.partition('.')[2]!r} has shape {there} in it and {here} here"
        for name, (there, here) in shapes.items()
        if there != here and not name.startswith("optim.")
    ]
    if wrong:
        raise CheckpointError(
            f"{step}: {'; '.join(wrong[:3])}{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; exclude=[...] leaves what "
            f"its patterns name as it is here"
        )


def _begin_window(engine: Engine) -> None:
    """No gradients are left, so a new window begins, with the running plan's accumulation, whatever the saved one was."""
    engine.zero_grad()
    engine.micro_steps = engine.global_steps * (engine.plan.batch.accumulation if engine.plan.batch.managed else 1)
    engine._divide(None)


_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
_OWN_OPTIMIZER = "load_optimizer_states=False leaves it out and keeps this engine's own"
_OWN_SCHEDULER = "load_lr_scheduler_states=False leaves it out and keeps this engine's own"


def _take_values(
    engine: Engine, loaded: checkpoint.Loaded, undo: list[Callable[[], None]], lacking: list[str], exclude: Sequence[str], *,
    optimizer: bool, scheduler: bool,
) -> None:  # fmt: skip
    """Bring back what is not a tensor of the model or optimizer; `undo` gets what brings back the present values."""
    shared = loaded.shared
    if engine.steps is not None:  # also a schedule writes there
        undo += [_restoring_group(group) for group in engine.steps.inner.param_groups]
    counters, scale = {name: getattr(engine, name) for name in _COUNTERS}, engine.precision.scaler.state_dict()
    undo.append(lambda: vars(engine).update(counters))
    undo.append(lambda: engine.precision.scaler.load_state_dict(scale))
    for name in _COUNTERS:
        setattr(engine, name, _whole(shared["counters"][name], name))
    _check_like(shared["loss_scale"], scale, "loss_scale")
    if not 0 < shared["loss_scale"]["scale"] < math.inf:
        raise CheckpointError(f"its loss scale is {shared['loss_scale']['scale']}; it must be a number above 0")
    engine.precision.scaler.load_state_dict(shared["loss_scale"])
    if optimizer:
        _take_scalars(engine, shared["optimizer"], undo, lacking, exclude)
    if scheduler and hasattr(engine.lr_scheduler, "load_state_dict"):
        _take_schedule(engine.lr_scheduler, shared["scheduler"], undo)
    _take_position(engine, loaded, undo)
    if loaded.per_rank:
        present = _random_state(engine.device)
        undo.append(lambda: _restore_random(present, engine.device))
        _restore_random(loaded.per_rank["random"], engine.device)
    else:
        logger.info("random states are those of this run: the checkpoint has none for this number of ranks")


def _take_schedule(part: Any, state: Any, undo: list[Callable[[], None]]) -> None:
    if state is None:
        logger.warning("the schedule was not restored and stays where it is: the checkpoint was saved without a scheduler")
        return
    present, remedy = part.state_dict(), f"it is another scheduler's; {_OWN_SCHEDULER}"
    both = state.keys() & present.keys() if isinstance(state, dict) else set()
    if both:
        ours, theirs = _common(present, state), _common(state, present)
        for name in both & {"base_lrs", "_last_lr"}:  # one number per parameter group
            ours[name], theirs[name] = present[name], state[name]
        _check_like(theirs, ours, "scheduler", remedy)
    else:
        _check_like(state, present, "scheduler", remedy)
    undo.append(_restoring(part))
    part.load_state_dict(state)


def _common(one: Any, other: Any) -> Any:
    """Of a schedule's state, what the other one has too. Which keys torch keeps there changes with its version, and histories grow:
    the rest is for the schedule's own `load_state_dict` to judge."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _common(value, other[key]) for key, value in one.items() if key in other}
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return [_common(mine, theirs) for mine, theirs in zip(one, other, strict=False)]
    return one


def _take_position(engine: Engine, loaded: checkpoint.Loaded, undo: list[Callable[[], None]]) -> None:
    """A position that does not fit is left out: other data may be trained on with the optimizer's state kept."""
    loader = engine.training_dataloader
    if not hasattr(loader, "load_state_dict"):
        return
    state = loaded.shared["data"]
    if state is None and loaded.per_rank:
        state = loaded.per_rank["data"]
    why = (
        "it has none for this number of ranks (each rank's own, of a sharded dataset or of a loader that the user made, is taken "
        "only where as many ranks load as saved)"
    )
    if state is not None:
        undo.append(_restoring(loader))
        try:
            loader.load_state_dict(state)
            return
        except OtherDataError as error:
            why = str(error)
    if engine.rank == 0:
        logger.warning("the checkpoint's data position was not restored, and the data begin with a new epoch: %s", why)


def _restoring(part: Any) -> Callable[[], None]:
    """What brings a part back to its present state: its own way, for what it keeps elsewhere, and attribute by attribute."""
    state, attributes = copy.deepcopy(part.state_dict()), dict(getattr(part, "__dict__", {}))

    def restore() -> None:
        part.load_state_dict(state)
        now = getattr(part, "__dict__", {})
        for added in now.keys() - attributes.keys():
            del now[added]
        now.update(attributes)

    return restore


def _restoring_group(group: dict[str, Any]) -> Callable[[], None]:
    present = dict(group)

    def restore() -> None:
        group.clear()
        group.update(present)

    return restore


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(f"its {what} is {str(value)[:40]!r}; it must be a whole number from 0")
    return value


def _check_like(saved: Any, present: Any, what: str, remedy: str = "it is damaged or hostile") -> None:
    """Refuse a saved value that cannot stand where the present one does: other keys, another length, no number."""
    if type(present) is dict:
        alike = type(saved) is dict and saved.keys() == present.keys()
        parts = [(saved[key], value, f"{what}.{key}") for key, value in present.items()] if alike else []
    elif isinstance(present, list | tuple):
        alike = isinstance(saved, list | tuple) and len(saved) == len(present)
        parts = [(saved[i], value, f"{what}[{i}]") for i, value in enumerate(present)] if alike else []
    else:
        alike, parts = not isinstance(present, int | float) or isinstance(saved, int | float | Tensor), []
        if isinstance(present, int) and isinstance(saved, int | float):  # a count; -1 is the last epoch before the first
            alike = saved >= min(-1, present)
    if not alike:
        raise CheckpointError(f"its {what} is {str(saved)[:80]} where this engine has {str(present)[:80]}: {remedy}")
    for one, other, name in parts:
        _check_like(one, other, name, remedy)


# -- tensors --


def _weights(engine: Engine, exclude_frozen: bool = False) -> dict[str, FlatSlice | Tensor]:
    entries: dict[str, FlatSlice | Tensor] = {}
    for unit in engine.units:
        span = unit.optim_span
        for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
            start, stop = overlap(slot.span, span)
            if not (exclude_frozen and not param.requires_grad):
                data = section(unit.master, start - span[0], stop - span[0])
                entries[f"model.{name}"] = FlatSlice(data, slot.shape, min(max(start - slot.offset, 0), slot.numel))
    return entries


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied tensors, each with the first one, under which it is saved."""
    params, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(tensor), name)) for name, tensor in (*params, *buffers)]
    return {name: other for name, other in named if name != other}


def _buffers(engine: Engine) -> dict[str, FlatSlice | Tensor]:
    saved: dict[str, FlatSlice | Tensor] = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                saved[f"buffer.{prefix}.{name}" if prefix else f"buffer.{name}"] = buffer
    return saved


def _pieces(engine: Engine, exclude: Sequence[str] = ()) -> Iterator[tuple[ShardedSteps, Unit, Piece]]:
    """Everything that this rank's optimizer may hold state of, but for what patterns exclude."""
    if engine.steps is not None:
        for unit in engine.units:
            if unit.grads is not None:
                for piece in engine.steps.pieces[unit.index]:
                    if not _is_excluded(f"model.{piece.name}", exclude):
                        yield engine.steps, unit, piece


def _optimizer_tensors(engine: Engine) -> dict[str, FlatSlice | Tensor]:
    entries: dict[str, FlatSlice | Tensor] = {}
    for steps, unit, piece in _pieces(engine):
        for state, values in steps.states(unit, piece).items():
            entries[f"optim.{state}.{piece.name}"] = FlatSlice(values, piece.shape, piece.offset)
    return entries


def _prepare_optimizer(engine: Engine, found: checkpoint.Metadata, exclude: Sequence[str]) -> list[Any]:
    """Make room for the states that the checkpoint holds; returns what undoes it."""
    states: dict[str, dict[str, torch.dtype]] = {}
    for key, info in found.tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optim":
            state, _, name = rest.partition(".")
            states.setdefault(name, {})[state] = info.dtype
    return [steps.make_states(unit, piece, states.get(piece.name, {})) for steps, unit, piece in _pieces(engine, exclude)]


def _spread_weights(engine: Engine) -> None:
    """Masters have changed: round them into the weights and offer those to the other ranks."""
    engine.comms.data.exchange(torch.zeros(1, dtype=torch.float64))
    with torch.no_grad():
        pending = []
        for unit in engine.units:
            if unit.out is not None:
                copy_store(unit.out, unit.master)
            unit.expire_graphs()
            pending.append(unit.publish())
        for each in pending:
            each.wait()


# -- values --


def _optimizer_scalars(engine: Engine) -> dict[str, Any] | None:
    if engine.steps is None:
        return None
    mine = {piece.name: steps.scalars(unit, piece) for steps, unit, piece in _pieces(engine)}
    everyone: dict[str, Any] = {}
    for one in gather_objects(mine, engine.mesh.data):
        everyone |= one
    groups = [{key: value for key, value in group.items() if key != "params"} for group in engine.steps.inner.param_groups]
    return {"classes": _optimizer_classes(engine.steps), "params": everyone, "groups": groups}


def _optimizer_classes(steps: ShardedSteps) -> list[str]:
    """The optimizer's class and its bases: two that share one keep the same states (Adam and AdamW)."""
    classes = type(steps.inner).__mro__
    return [cls.__name__ for cls in classes[: classes.index(torch.optim.Optimizer)]]


def _take_scalars(
    engine: Engine, saved: Any, undo: list[Callable[[], None]], lacking: list[str], exclude: Sequence[str]
) -> None:
    steps = engine.steps
    assert steps is not None, "load asks for optimizer states of an engine that has an optimizer"
    if saved is None:
        raise CheckpointError(f"it was saved without an optimizer, and this engine has one; {_OWN_OPTIMIZER}")
    classes, groups = _optimizer_classes(steps), steps.inner.param_groups
    if saved["classes"] is not None and not set(classes) & set(saved["classes"]):
        raise CheckpointError(f"its optimizer is {saved['classes'][0]} and this engine's is {classes[0]}; {_OWN_OPTIMIZER}")
    if len(groups) != len(saved["groups"]):
        raise CheckpointError(
            f"its optimizer has {len(saved['groups'])} parameter groups and this engine's has {len(groups)}; {_OWN_OPTIMIZER}"
        )
    lacking = [name for name in lacking if name.split(".", 2)[2] in saved["params"]]
    if lacking:
        raise CheckpointError(f"it lacks the optimizer state {lacking[:3]}; {_OWN_OPTIMIZER}")
    for i, (group, options) in enumerate(zip(groups, saved["groups"], strict=True)):
        common = options.keys() & group.keys() - {"params"}
        part = {key: options[key] for key in common}
        _check_like(part, {key: group[key] for key in common}, f"optimizer group {i}", _OWN_OPTIMIZER)
        group.update({key: value for key, value in options.items() if key != "params"})
    if why := steps.not_computed(groups):
        raise CheckpointError(f"its {why}; {_OWN_OPTIMIZER}")
    steps.groups_loaded()
    for steps, unit, piece in _pieces(engine, exclude):
        if piece.name in saved["params"]:
            present = copy.deepcopy(steps.scalars(unit, piece))
            undo.append(partial(steps.load_scalars, unit, piece, present))
            uncounted = isinstance(steps.inner, torch.optim.SGD) and not saved["params"][piece.name]  # as torch's and DeepSpeed's
            if present and not uncounted:
                _check_like(saved["params"][piece.name], present, f"optimizer state of {piece.name}")
            steps.load_scalars(unit, piece, saved["params"][piece.name])


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else None


def _model_config(module: torch.nn.Module) -> dict[str, Any] | None:
    """What config.json has of a transformers model, with the end tokens that it generates until."""
    config: Any = getattr(module, "config", None)
    if not (hasattr(config, "model_type") and hasattr(config, "to_json_string")):
        return None
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    return json.loads(config.to_json_string(use_diff=False)) | ({} if ends is None else {"eos_token_id": ends})


def _random_state(device: torch.device) -> dict[str, Any]:
    import numpy

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
