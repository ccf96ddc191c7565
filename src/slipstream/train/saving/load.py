"""Load a checkpoint into an engine, at any world size, stage or topology: all of it or nothing.

[Note: All or nothing] The checkpoint layer checks names, shapes and files. Then the load applies the values, each with an undo
function. Last, the checkpoint layer fills the tensors. If any rank refuses anything at any point, all ranks undo.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import checkpoint
from slipstream.activations.random_states import tracked
from slipstream.checkpoint import CheckpointError, FlatSlice
from slipstream.checkpoint.errors import Ranks
from slipstream.checkpoint.stacks import restack
from slipstream.data.sampler import OtherDataError
from slipstream.optim.nested import Nested
from slipstream.optim.sharded import ShardedSteps
from slipstream.train.saving import entries
from slipstream.train.saving.save import agree
from slipstream.train.states import States
from slipstream.world.mesh import Mesh

logger = logging.getLogger(__name__)

_OWN_OPTIMIZER = "load_optimizer_states=False skips it and keeps this engine's states"
_OWN_SCHEDULER = "load_lr_scheduler_states=False skips it and keeps this engine's state"


class Wanted(NamedTuple):
    """The arguments of `Engine.load_checkpoint`."""

    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    exclude: list[str]


def load(states: States, loop: entries.Loop, directory: str, tag: str | None, wanted: Wanted) -> tuple[str | None, dict[str, Any]]:
    """Read a checkpoint into the states and the loop; returns (folder, client_state), or (None, {}) if `latest` is missing.

    Collective. Raises CheckpointError on every rank, with nothing changed, if anything in it is wrong.
    """
    world = states.mesh.world
    step = f"checkpoint {'latest' if tag is None else tag} of {directory} was not loaded"
    agree(world, step, {"tag": tag, **wanted._asdict()})
    return checkpoint.retry_if_replaced(directory, tag, partial(_load, states, loop, directory, tag, wanted), group=world.group)


def _load(states: States, loop: entries.Loop, directory: str, tag: str | None, wanted: Wanted) -> tuple[str | None, dict[str, Any]]:
    strict, optimizer, scheduler, module_only, exclude = wanted
    group = states.mesh.world.group
    if tag is None:
        tag = _latest_tag(states, directory)
    if tag is None:
        return None, {}
    metadata = checkpoint.load_metadata(directory, tag, group=group)
    step = f"checkpoint {metadata.path} was not loaded"
    contents = metadata.shared.get("contents", "all")
    module_only = module_only or contents in ("weights", "adapters")
    optimizer = optimizer and not module_only and states.steps.has_optimizer
    metadata, parts = _restacked(states, metadata, step, exclude if strict else ["*"], optimizer=optimizer)
    states.steps.synchronize(states.units)
    of_stages = entries.of_all_stages(dict.fromkeys((*entries.weights(states), *entries.buffers(states))), states.mesh)
    request: _Request
    with ExitStack() as undo:  # [Note: All or nothing]

        def prepare() -> None:
            nonlocal request
            if optimizer:
                _prepare_optimizer(states, metadata, exclude, undo)
            request = _request(states, metadata, of_stages, contents, exclude, optimizer=optimizer, averages=not module_only)
            _check_shapes(metadata, request.tensors)

        Ranks(group).gather(step, prepare)  # a stage may have other parameters than its checkpoint

        def accept(loaded: checkpoint.Loaded) -> None:
            if strict:
                request.refuse_misfit()
            if type(_client_state(loaded)) is not dict:
                raise CheckpointError("it is damaged or hostile: its client_state is not a dict")
            if module_only:
                return
            try:
                lacking = request.lacking if optimizer else None
                if optimizer:
                    _join_scalars(loaded.shared, {name: parts[name] for name in parts if not entries.is_excluded(name, exclude)})
                _take_values(states, loop, loaded, metadata.world_size, undo, lacking, exclude, scheduler=scheduler)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"its values are damaged or of another version: {type(error).__name__}: {error}") from error

        loaded = checkpoint.load(
            directory,
            tag,
            tensors=request.tensors,
            group=group,
            mesh=states.mesh.sizes,
            convert=True,
            accept=accept,
            metadata=metadata,
        )
        undo.pop_all()
    entries.spread_weights(states)
    _restart_averages(states, metadata, request.tensors.keys(), exclude)
    return str(metadata.path), _client_state(loaded)


def _client_state(loaded: checkpoint.Loaded) -> Any:
    """Rank 0's client state; on further tensor-parallel ranks and pipeline stages, the one that a rank of the same place saved."""
    return loaded.nearest.get("client", loaded.shared.get("client"))


def _restacked(
    states: States, metadata: checkpoint.Metadata, step: str, optional: Sequence[str], *, optimizer: bool
) -> tuple[checkpoint.Metadata, dict[str, list[str]]]:
    """The metadata under this model's names. Also, for names that it has in parts or under an older name, its names.

    optional: patterns of names that may be missing. Collective over the stages. Raises CheckpointError if a parameter's parts do
    not fit; optimizer states that do not fit count as lacking.
    """
    own = {name: tuple(tensor.shape) for name, tensor in (entries.weights(states) | entries.averages(states)).items()}
    wanted = {name: shape for of_stage in states.mesh.pp.gather(own) for name, shape in of_stage.items()}
    needed = [name for name in wanted if name.startswith("model.") and not entries.is_excluded(name, optional)]
    kept = {name.split(".")[1] for name in metadata.tensors if optimizer and name.startswith("optim.")}
    wanted |= {f"optim.{state}.{name[6:]}": wanted[name] for name in list(wanted) if name.startswith("model.") for state in kept}
    try:
        tensors, parts = restack(metadata.document.tensors, wanted, set(needed))
    except CheckpointError as error:
        remedy = "load_module_strict=False, or exclude=[...], keeps the model's values of these stacks"
        raise CheckpointError(f"{step}: {error}; {remedy}") from None
    return replace(metadata, document=replace(metadata.document, tensors=tensors)) if parts else metadata, parts


def _join_scalars(shared: dict[str, Any], parts: Mapping[str, Sequence[str]]) -> None:
    """Give a stack the optimizer's step counts of its parts."""
    saved = (shared.get("optimizer") or {}).get("params", {})
    for name, of_parts in parts.items():
        counts = [saved[part[6:]] for part in of_parts if part[6:] in saved] if name.startswith("model.") else []
        if any(each != counts[0] for each in counts):
            raise CheckpointError(
                f"the experts of {name[6:]!r} have taken different numbers of steps, and a stack has one; {_OWN_OPTIMIZER}"
            )
        if counts:
            saved[name[6:]] = counts[0]


def _latest_tag(states: States, directory: str) -> str | None:
    """The tag of the latest checkpoint; warns if there is none. Collective."""
    tag = checkpoint.latest_tag(directory, group=states.mesh.world.group, universal=states.plan.checkpoint.universal)
    if tag is None and states.mesh.is_first:
        looked_in = Path(os.path.abspath(directory))
        lacks = f"{looked_in / 'latest'} does not exist" if looked_in.is_dir() else f"folder {looked_in} does not exist"
        logger.warning("no checkpoint was loaded: %s; training starts from the beginning", lacks)
    return tag


class _Request(NamedTuple):
    """The tensors that a load fills, and how the names of model and checkpoint differ."""

    tensors: dict[str, FlatSlice | Tensor]
    missing: list[str]  # parameters and buffers that the checkpoint does not hold
    surplus: list[str]  # those that only the checkpoint holds
    lacking: list[str]  # optimizer states that the checkpoint does not hold

    def refuse_misfit(self) -> None:
        """Raise CheckpointError if the checkpoint's parameters and buffers are not the model's."""
        if self.missing or self.surplus:
            verb, names = ("does not hold", self.missing) if self.missing else ("also holds", self.surplus)
            raise CheckpointError(
                f"it {verb} {names[:3]}{' and more' if len(names) > 3 else ''}: it is of another model, or was saved without "
                f"frozen parameters; load_module_strict=False loads the names that model and checkpoint share"
            )


def _request(
    states: States,
    metadata: checkpoint.Metadata,
    of_stages: Collection[str],
    contents: str,
    exclude: Sequence[str],
    *,
    optimizer: bool,
    averages: bool,
) -> _Request:
    """of_stages: the parameters and buffers of all stages. Raises CheckpointError if a pattern of `exclude` matches nothing."""
    present = {**entries.weights(states), **entries.buffers(states)}
    saved = [name for name in metadata.tensors if name.startswith(("model.", "buffer."))]
    for pattern in exclude:
        if not any(entries.is_excluded(name, [pattern]) for name in (*of_stages, *saved)):
            raise CheckpointError(f"exclude={list(exclude)}: {pattern!r} matches no parameter or buffer of model or checkpoint")

    def included(tensors: Mapping[str, FlatSlice | Tensor]) -> dict[str, FlatSlice | Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not entries.is_excluded(name, exclude)}

    wanted = included(present)
    needed = entries.weights(states, exclude_frozen=True) if contents == "adapters" else wanted
    missing = [name for name in needed if name in wanted and name not in metadata.tensors]
    surplus = [name for name in saved if name not in of_stages and not entries.is_excluded(name, exclude)]
    if optimizer:
        wanted |= included(entries.optimizer_tensors(states) | entries.outer(states))
    if averages:
        wanted |= included(entries.averages(states))
    lacking = [name for name in wanted if name.startswith("optim.") and name not in metadata.tensors]
    tensors = {name: tensor for name, tensor in wanted.items() if name in metadata.tensors}
    return _Request(tensors, missing, surplus, lacking)


def _check_shapes(metadata: checkpoint.Metadata, tensors: Mapping[str, FlatSlice | Tensor]) -> None:
    shapes = {name: (metadata.tensors[name].shape, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wrong = [
        f"{name.partition('.')[2]!r} has shape {saved} in the checkpoint and {present} in the model"
        for name, (saved, present) in shapes.items()
        if saved != present and not name.startswith(("optim.", entries.AVERAGE, entries.OUTER))
    ]
    if wrong:
        raise CheckpointError(
            f"{'; '.join(wrong[:3])}{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; exclude=[...] keeps the "
            f"model's values of the parameters that its patterns match"
        )


def _restart_averages(states: States, metadata: checkpoint.Metadata, loaded: AbstractSet[str], exclude: Sequence[str]) -> None:
    """Restart local steps and averages that were not loaded from the loaded weights, because they belong to other weights."""
    if states.outer is not None:
        states.outer.restart(loaded)
    average = states.average
    names = {name for name in average.tensors().keys() - loaded if not entries.is_excluded(name, exclude)} if average else set()
    if average is not None and names:
        average.restart({name.removeprefix(entries.AVERAGE) for name in names})
        average.num_updates = average.num_updates if loaded & average.tensors().keys() else 0
    if not states.mesh.is_first:
        return
    if names:
        logger.warning("%d moving averages were not loaded and restart from the loaded weights, e.g. %r", len(names), min(names))
    elif average is None and any(name.startswith(entries.AVERAGE) for name in metadata.tensors):
        logger.warning(
            "the checkpoint's moving averages were not loaded: create slipstream.ema.Ema(engine) before load_checkpoint()"
        )


def _take_values(
    states: States,
    loop: entries.Loop,
    loaded: checkpoint.Loaded,
    num_saved: int,
    undo: ExitStack,
    lacking: list[str] | None,
    exclude: Sequence[str],
    *,
    scheduler: bool,
) -> None:
    """Apply the values that are not tensors of the model or optimizer; `undo` gets functions that restore the current ones.
    num_saved: the number of ranks that saved the checkpoint. lacking: the optimizer states that it does not hold; None: the
    optimizer is not loaded.
    """
    shared = loaded.shared
    nested = states.steps.nested
    for part in (*nested.groups(), *nested.homes()):  # a schedule writes to the groups, too
        undo.callback(part.update, dict(part))
        undo.callback(part.clear)  # before the update
    scaler = loop.precision.scaler
    scale = scaler.state_dict()
    undo.callback(scaler.load_state_dict, scale)
    for name in entries.COUNTERS:
        undo.callback(setattr, loop, name, getattr(loop, name))
        setattr(loop, name, _whole(shared["counters"][name], name))
    _check_like(shared["loss_scale"], scale, "loss_scale")
    if not 0 < shared["loss_scale"]["scale"] < math.inf:
        raise CheckpointError(f"its loss scale is {shared['loss_scale']['scale']}; it must be a number above 0")
    scaler.load_state_dict(shared["loss_scale"])
    if lacking is not None:
        _take_scalars(states, shared["optimizer"], undo, lacking, exclude)
    elif states.steps.has_optimizer and (why := states.steps.loaded_without_states(loop.global_steps - loop.skipped_steps)):
        raise CheckpointError(why)
    if scheduler and hasattr(loop.lr_scheduler, "load_state_dict"):
        _take_schedule(loop.lr_scheduler, shared["scheduler"], undo)
    if (average := states.average) is not None and shared.get("average") is not None:
        undo.callback(setattr, average, "num_updates", average.num_updates)
        average.num_updates = _whole(shared["average"]["num_updates"], "number of averages")
    _take_kept(states, shared.get("kept", {}), undo)
    _take_position(states.mesh, loop, loaded, num_saved, undo)
    _take_random(states.mesh, states.device, loaded, undo)


def _take_random(mesh: Mesh, device: torch.device, loaded: checkpoint.Loaded, undo: ExitStack) -> None:
    """Continue the random states of the rank at this rank's place."""
    if not loaded.nearest:
        logger.info("random states were not restored: the checkpoint has none")
        return
    present = entries.random_state(device)
    undo.callback(_restore_random, present, device)
    _restore_random(loaded.nearest["random"], device)
    if loaded.copy:
        _seed_copy(loaded.nearest["random"], loaded.copy, device)
    if loaded.per_rank is None and mesh.is_first:
        logger.info(
            "random states continue on another mesh (%s): a rank has that of its place on the axes that were there; batch and sp "
            "ranks beyond those of the checkpoint are seeded from one of it",
            " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items()),
        )


def _take_kept(states: States, kept: Mapping[str, Any], undo: ExitStack) -> None:
    """Apply the states of features (`entries.kept`)."""
    for name, part in ((name, part) for name, part in entries.kept(states).items() if name in kept):
        _check_like(kept[name], part.state_dict(), name)
        undo.callback(_restoring(part))
        part.load_state_dict(kept[name])


def _take_schedule(part: Any, state: Any, undo: ExitStack) -> None:
    if state is None:
        logger.warning("the learning-rate schedule was not restored: the checkpoint was saved without a scheduler")
        return
    present, remedy = part.state_dict(), f"it is another scheduler's; {_OWN_SCHEDULER}"
    shared = state.keys() & present.keys() if isinstance(state, dict) else set()
    if shared:
        current, saved = _common(present, state), _common(state, present)
        for name in shared & {"base_lrs", "_last_lr"}:  # one number per parameter group
            current[name], saved[name] = present[name], state[name]
        _check_like(saved, current, "scheduler", remedy)
    else:
        _check_like(state, present, "scheduler", remedy)
    undo.callback(_restoring(part))
    part.load_state_dict(state)


def _common(one: Any, other: Any) -> Any:
    """The part of one schedule state that the other has, too. Keys differ between versions of torch, and histories grow; the
    schedule's own `load_state_dict` checks the rest."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _common(value, other[key]) for key, value in one.items() if key in other}
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return [_common(a, b) for a, b in zip(one, other, strict=False)]
    return one


def _take_position(mesh: Mesh, loop: entries.Loop, loaded: checkpoint.Loaded, num_saved: int, undo: ExitStack) -> None:
    """Restore the data position. If it does not fit, it is skipped, so that a run can continue on other data."""
    loader = loop.training_dataloader
    if not hasattr(loader, "load_state_dict"):
        return
    state = loaded.shared["data"]
    if state is None and loaded.per_rank:
        state = loaded.per_rank["data"]
    why = "the checkpoint has none"
    if num_saved != mesh.world.size:
        why = (
            f"the number of ranks was {num_saved} when the checkpoint was saved and is {mesh.world.size} now (per-rank positions, "
            "of a sharded dataset or a custom loader, need the same number)"
        )
    if state is not None:
        undo.callback(_restoring(loader))
        try:
            loader.load_state_dict(state)
            return
        except OtherDataError as error:
            why = str(error)
    if mesh.is_first:
        logger.warning("the checkpoint's data position was not restored, and the data start with a new epoch: %s", why)


def _restoring(part: Any) -> Callable[[], None]:
    """A function that restores a part's current state by attribute, and by `load_state_dict` for state kept elsewhere."""
    state, attributes = copy.deepcopy(part.state_dict()), dict(getattr(part, "__dict__", {}))

    def restore() -> None:
        part.load_state_dict(state)
        current = getattr(part, "__dict__", {})
        for added in current.keys() - attributes.keys():
            del current[added]
        current.update(attributes)

    return restore


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(f"its {name} is {str(value)[:40]!r}; it must be an integer >= 0")
    return value


def _check_like(saved: Any, present: Any, name: str, remedy: str = "it is damaged or hostile") -> None:
    """Raise CheckpointError if a saved value cannot replace the present one: other keys, another length, not a number."""
    if type(present) is dict:
        alike = type(saved) is dict and saved.keys() == present.keys()
        parts = [(saved[key], value, f"{name}.{key}") for key, value in present.items()] if alike else []
    elif isinstance(present, list | tuple):
        alike = isinstance(saved, list | tuple) and len(saved) == len(present)
        parts = [(saved[i], value, f"{name}[{i}]") for i, value in enumerate(present)] if alike else []
    else:
        alike, parts = not isinstance(present, int | float) or isinstance(saved, int | float | Tensor), []
        if isinstance(present, int) and isinstance(saved, int | float):  # a count; -1 is the last epoch before the first
            alike = saved >= min(-1, present)
    if not alike:
        raise CheckpointError(f"its {name} is {str(saved)[:80]} where this engine has {str(present)[:80]}: {remedy}")
    for part in parts:
        _check_like(*part, remedy)


def _prepare_optimizer(states: States, metadata: checkpoint.Metadata, exclude: Sequence[str], undo: ExitStack) -> None:
    """Allocate the optimizer states that the checkpoint holds."""
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for key, info in metadata.tensors.items():
        kind, _, entry = key.partition(".")
        if kind == "optim":
            state, _, name = entry.partition(".")
            dtypes.setdefault(name, {})[state] = info.dtype
    if why := states.steps.nested.misfit(state for of_param in dtypes.values() for state in of_param):
        raise CheckpointError(f"its {why}; {_OWN_OPTIMIZER}")
    for piece in entries.pieces(states, exclude):
        undo.callback(states.steps.make_states(piece, dtypes.get(piece.name, {})))


def _saved_groups(steps: ShardedSteps, saved: Any, lacking: list[str]) -> list[dict[str, Any]]:
    """The saved options of each group. Raises CheckpointError if the saved optimizer is not like this engine's."""
    if saved is None:
        raise CheckpointError(f"it was saved without an optimizer, and this engine has one; {_OWN_OPTIMIZER}")
    classes, groups = entries.optimizer_classes(steps), steps.nested.groups()
    options_of_groups = _groups_like(saved["groups"], groups)
    known = saved.get("classes")  # None: DeepSpeed's, and the first checkpoints of version 1
    if known is not None and not set(classes) & set(known):
        raise CheckpointError(f"its optimizer is {known[0]} and this engine's is {classes[0]}; {_OWN_OPTIMIZER}")
    if len(options_of_groups) == len(steps.inner.param_groups):  # DeepSpeed saves no groups of optimizers inside
        options_of_groups = [*options_of_groups, *({} for _ in groups[len(options_of_groups) :])]
    if len(groups) != len(options_of_groups):
        raise CheckpointError(
            f"its optimizer has {len(saved['groups'])} parameter groups and this engine's has {len(groups)}; {_OWN_OPTIMIZER}"
        )
    lacking = [name for name in lacking if name.split(".", 2)[2] in saved["params"]]
    if lacking:
        raise CheckpointError(f"it lacks the optimizer state {lacking[:3]}; {_OWN_OPTIMIZER}")
    if why := steps.nested.misfit(state for of_param in saved["params"].values() for state in of_param):
        raise CheckpointError(f"its {why}; {_OWN_OPTIMIZER}")
    return options_of_groups


def _take_scalars(states: States, saved: Any, undo: ExitStack, lacking: list[str], exclude: Sequence[str]) -> None:
    steps = states.steps
    options_of_groups, groups = _saved_groups(steps, saved, lacking), steps.nested.groups()
    for i, (group, options) in enumerate(zip(groups, options_of_groups, strict=True)):
        common = options.keys() & group.keys() - {"params"}
        part = {key: options[key] for key in common}
        _check_like(part, {key: group[key] for key in common}, f"optimizer group {i}", _OWN_OPTIMIZER)
        group.update({key: value for key, value in options.items() if key != "params"})
    if why := steps.unsupported_option(groups):
        raise CheckpointError(f"its {why}; {_OWN_OPTIMIZER}")
    steps.groups_loaded()
    if steps.state_names is None:
        _take_counts(steps.nested, saved.get("counts") or [{} for _ in steps.nested.homes()])
    for piece in entries.pieces(states, exclude):
        if piece.name in saved["params"]:
            present = copy.deepcopy(steps.scalars(piece))
            undo.callback(steps.load_scalars, piece, present)
            # SGD saved by torch or DeepSpeed has no step count
            uncounted = isinstance(steps.inner, torch.optim.SGD) and not saved["params"][piece.name]
            if present and not uncounted:
                _check_like(saved["params"][piece.name], present, f"optimizer state of {piece.name}")
            steps.load_scalars(piece, saved["params"][piece.name])


def _take_counts(nested: Nested, saved: Any) -> None:
    """Set the counts of the optimizer and of those inside it. Counts that are not saved were as in a new optimizer; flags stay."""
    homes = nested.homes()
    if len(saved) != len(homes):
        parts = f"its counts are of {len(saved) // 2} optimizers and this engine's of {len(homes) // 2}"
        raise CheckpointError(f"{parts}; {_OWN_OPTIMIZER}")
    for home, values in zip(homes, saved, strict=True):
        for name, value in values.items():
            if not isinstance(value, int | float) or not isinstance(home.get(name, 0), int | float | None):
                raise CheckpointError(f"its optimizer count {name!r} is {str(value)[:40]}; {_OWN_OPTIMIZER}")
    flags = ({name: value for name, value in now.items() if isinstance(value, bool)} for now in nested.counts())
    nested.set_counts(first | kept | values for first, kept, values in zip(nested.first_counts, flags, saved, strict=True))


def _groups_like(saved: list[dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Drop DeepSpeed's groups of experts if the engine's optimizer has none and each has the options of a dense group."""
    if any(group.get("moe") for group in groups):
        return saved

    def options(group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in ("name", "moe")}

    dense = [group for group in saved if not group.get("moe")]
    return dense if all(options(group) in map(options, dense) for group in saved) else saved


def _seed_copy(state: Mapping[str, Any], copy: int, device: torch.device) -> None:
    """Seed all generators from a saved state and the number of the copy: reproducible, but different for each copy."""
    import numpy

    def seed_of(generator: Tensor, name: str = "") -> int:
        content = generator.numpy().tobytes() + name.encode()
        return int.from_bytes(hashlib.blake2b(content, salt=copy.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1

    seed = seed_of(state["torch"])
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    if "tracked" in state:
        tracked.reset()
        for name, generator in state["tracked"].items():
            tracked.add(name, seed_of(generator, name))


def _restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "tracked" in state:
        tracked.set_states(state["tracked"])
