"""Between two steps the model itself is changed, and its engine goes on: `Engine.surgery`.

    begin     nothing is under way on any rank; hooks are off; from now on a sharded parameter that is touched is lent, in private
              copies of its unit's, as in `zero.gathered`
    (the user's changes)
    compare   what the model's parameters are now beside what the units hold; the same on all ranks, or all raise
    rebuild   units whose parameters are what they were stay as they are, under their new names; of the others one block after the
              other is built anew, takes its values from the old units, and those go: what is whole at a time is one unit

The first rank's values count wherever something was given or changed, so draws need not agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.optim import muon_groups
from slipstream.train import schedules
from slipstream.train.agreement import options
from slipstream.train.gate import Block
from slipstream.train.origins import Carried, Origin, carry_states
from slipstream.zero import access
from slipstream.zero.build import Plot, Site, allocate, build_block, convert_buffers, disk_needs, longest_on_wire, ring_of, survey
from slipstream.zero.comm import gather_objects
from slipstream.zero.hooks import Slots
from slipstream.zero.leaves import named_leaves, open_up
from slipstream.zero.materialize import FirstValues
from slipstream.zero.unit import Unit
from slipstream.zero.watch import PeerError
from slipstream.zero.wrap import Group, wrap

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

GroupOf = int | Callable[[str, nn.Parameter], int] | None

_HALF_CHANGED = (
    "the model was changed in an engine.surgery() that failed ({why}), so engine and model do not fit: enter another "
    "`with engine.surgery():` and finish or undo the change in it (an empty one takes the model as it is), or load a checkpoint "
    "into a new engine"
)


class Surgery:
    """One surgery of one engine. `begin`, then `finish` or `give_up`."""

    def __init__(self, engine: Engine, group: GroupOf) -> None:
        self.engine, self.group = engine, group
        self.copies: dict[Unit, Tensor] = {}  # of units that were touched
        self.undo = ExitStack()  # of parameter groups, which come with the surgery or not at all
        self.was_half_changed = Block.CHANGING in engine.gate

    # -- the beginning and the end --

    def begin(self) -> None:
        """Raises RuntimeError on every rank where something is under way on any."""
        engine = self.engine
        whys = gather_objects(engine.hooks.under_way(), engine.mesh.data)
        if why := next(filter(None, whys), ""):
            raise RuntimeError(f"engine.surgery() {why}: call it between engine.step() and the next forward")
        for unit in engine.units:
            unit.release()
        engine.hooks.remove()
        for unit in engine.units:
            unit.on_touch = self._lend
        self.before = _outline(engine.module)
        groups = [] if engine.steps is None else engine.steps.inner.param_groups
        self.num_groups = len(groups)
        for group in groups:
            self.undo.callback(group.__setitem__, "params", list(group["params"]))
        engine.operation = self
        engine.gate.shut(Block.CHANGING, "the engine's model is in surgery: leave `with engine.surgery():` before anything else")

    def _lend(self, unit: Unit) -> None:
        if unit not in self.copies:
            unit.on_touch = None  # while its weights are copied
            self.copies[unit] = access.lend(unit, range(len(unit.params)))
            unit.on_touch = self._lend

    def add_group(self, group: dict[str, Any]) -> None:
        """`add_param_group` of the engine's optimizer. Raises as torch does, and ValueError, with no group added."""
        steps = self.engine.steps
        assert steps is not None, "its handle called"
        groups, rate = steps.inner.param_groups, group.get("lr")
        if "bias_correction" in groups[0]:  # no default of torch's
            group.setdefault("bias_correction", groups[0]["bias_correction"])
        steps.inner.add_param_group(group)
        with ExitStack() as failed:
            failed.callback(groups.pop)
            if why := steps.not_computed(groups):
                raise ValueError(f"add_param_group(): {why}")
            if self.engine.lr_scheduler is not None:
                failed.callback(schedules.add_group(self.engine.lr_scheduler, None if rate is None else float(rate)))
            self.undo.push(failed.pop_all())

    def finish(self) -> None:
        """All ranks have made the same change: let it take effect. Raises on every rank where they have not."""
        engine, lines = self.engine, self._fingerprint()
        checksum, ranks = zlib.crc32("\n".join(lines).encode()), engine.mesh.data.ranks
        rows = self._exchange(failed=False, is_changed=self._is_changed(), checksum=checksum)
        if rows[:, 0].any():
            why = f"rank {ranks[int(rows[:, 0].argmax())]} raised inside it"
            self._close(why, is_changed=bool(rows[:, 1].any()))
            raise RuntimeError(f"engine.surgery(): {why}, so nothing of it takes effect")
        try:
            if rows[:, 2].min() != rows[:, 2].max():
                raise ValueError(_difference(ranks, gather_objects(lines, engine.mesh.data)))
            touched = self._touched()
            for unit in engine.units:  # over shared memory one rank can read alone; what follows is of all
                if unit.placement.weights and (unit, 0) in touched:
                    self._lend(unit)
            change = Change(engine, engine.module, self.copies, touched, self.group)
        except Exception as error:
            self._close(f"{type(error).__name__}: {error}", is_changed=True)
            raise
        engine.gate.shut(Block.BROKEN, "engine.surgery() did not end: the engine's states are lost, go on from the last checkpoint")
        change.make()
        engine.gate.open(Block.BROKEN)
        self.undo.pop_all()
        self._close("", is_changed=False)

    def give_up(self, error: BaseException) -> None:
        """The user's code raised on this rank; nothing that it wrote counts."""
        why, is_changed = f"{type(error).__name__}: {error}", self._is_changed()
        if isinstance(error, Exception) and not isinstance(error, PeerError):
            rows = self._exchange(failed=True, is_changed=is_changed)
            is_changed = bool(rows[:, 1].any())
        else:
            is_changed = True
        self._close(why, is_changed=is_changed)

    def _is_changed(self) -> bool:
        """Whether something was done that `_close` does not undo: to the model, or in place to weights that every rank holds."""
        whole = (unit for unit in self.engine.units if not unit.placement.weights and unit not in self.copies)
        written = any(param._version != at for unit in whole for param, at in zip(unit.params, unit._versions, strict=True))
        return written or _outline(self.engine.module) != self.before

    def _exchange(self, *, failed: bool, is_changed: bool, checksum: int = 0) -> Tensor:
        return self.engine.comms.data.exchange(torch.tensor([failed, is_changed, checksum], dtype=torch.float64))

    def _fingerprint(self) -> list[str]:
        engine = self.engine
        groups = [] if engine.steps is None else engine.steps.inner.param_groups
        held = {id(param): i for i, group in enumerate(groups) for param in group["params"]}
        places = {id(param): f"{unit.index}.{i}" for unit in engine.units for i, param in enumerate(unit.params)}
        lines = [
            f"parameter {name!r} {tuple(param.shape)} {param.dtype}{' on meta' * param.is_meta}"
            f"{'' if param.requires_grad else ' frozen'} from {places.get(id(param), 'outside')} in group {held.get(id(param))}"
            for name, param in engine.module.named_parameters(remove_duplicate=False)
        ]
        lines += [f"buffer {name!r} {tuple(buffer.shape)}" for name, buffer in engine.module.named_buffers()]
        return lines + [f"parameter group {i} of {options(group)}" for i, group in enumerate(groups) if i >= self.num_groups]

    def _touched(self) -> set[tuple[Unit, int]]:
        """Which parameters' values may have changed on some rank: the first rank's then count everywhere. Collective."""
        units = self.engine.units
        mine = [(unit.index, i) for unit in units for i in range(len(unit.params)) if _is_touched(unit, i, self.copies)]
        return {(units[index], i) for theirs in gather_objects(mine, self.engine.mesh.data) for index, i in theirs}

    def _close(self, why: str, *, is_changed: bool) -> None:
        """Hook the model to the units again, or say why that cannot be. Without a change having been made, copies are dropped."""
        engine = self.engine
        engine.operation = None
        self.undo.close()
        for unit in engine.units:
            unit.on_touch = None
            if unit in self.copies:
                access.take_back(unit, range(len(unit.params)), self.copies[unit], None, write=False)
            elif not unit.placement.weights:
                for param, view in zip(unit.params, unit.views, strict=True):
                    if param.data_ptr() != view.data_ptr():  # `p.data = ...`, which is given up
                        param.data = view
        self.copies = {}
        if is_changed or (why and self.was_half_changed):
            engine.gate.shut(Block.CHANGING, _HALF_CHANGED.format(why=why))
        else:
            engine.gate.open(Block.CHANGING)
            engine.wire()


def _outline(model: nn.Module) -> list[Any]:
    """What a surgery that raises has left unchanged."""
    params = model.named_parameters(remove_duplicate=False)
    return [
        *((name, id(module)) for name, module in model.named_modules(remove_duplicate=False)),
        *((name, id(param), tuple(param.shape), param.requires_grad) for name, param in params),
        *((name, id(buffer)) for name, buffer in model.named_buffers(remove_duplicate=False)),
    ]


def _difference(ranks: Sequence[int], everyone: Sequence[Sequence[str]]) -> str:
    """What one rank has that another has not, in words."""
    other = next(i for i, theirs in enumerate(everyone) if theirs != everyone[0])
    found = []
    for ours, theirs in ((everyone[0], set(everyone[other])), (everyone[other], set(everyone[0]))):
        found.append(next((line for line in ours if line not in theirs), "nothing that the other has not"))
    return (
        f"engine.surgery(): ranks changed the model differently. Rank {ranks[0]} has {found[0]}; rank {ranks[other]} has "
        f"{found[1]}. All ranks have to make the same change"
    )


def _is_touched(unit: Unit, i: int, copies: Mapping[Unit, Tensor]) -> bool:
    """Whether the parameter's values may have changed."""
    if unit in copies:
        return True
    param, view = unit.params[i], unit.views[i]
    if unit.placement.weights or not view.numel():
        return False
    return param.data_ptr() != view.data_ptr() or param.shape != view.shape or param._version != unit._versions[i]


class Change:
    """From the units as they were to units of the model as it is now. Made: everything is known and refused that can be."""

    def __init__(
        self, engine: Engine, model: nn.Module, copies: dict[Unit, Tensor], touched: set[tuple[Unit, int]], group: GroupOf
    ) -> None:
        self.engine, self.model, self.copies, self.touched = engine, model, copies, touched
        open_up(model)
        self.leaves = {leaf.name: leaf for leaf in named_leaves(model)}
        self.params = {name: leaf.tensor for name, leaf in self.leaves.items()}
        self.before = {id(param) for unit in engine.units for param in (*unit.params, *unit.wholes)}
        self.ids = {id(param) for leaf in self.leaves.values() for param in (leaf.tensor, leaf.whole)}
        self.places = {id(param): (unit, i) for unit in engine.units for i, param in enumerate(unit.params)}  # as they were
        self.origins = self._find_origins()
        self.groups = wrap(model)
        self.held = self._find_held()
        self.kept = self._find_kept()
        self.joins = self._agreed_groups(group)
        firsts = {id(param): name for name, param in self.params.items()}
        others = model.named_parameters(remove_duplicate=False)
        aliases = {name: firsts.get(id(param), name) for name, param in others} | {name: name for name in self.params}
        self.reader = Carried(self.origins, aliases, engine.comms.data)
        self.values = FirstValues(model, engine.device, self.reader)
        self.site = Site(engine.recipe, engine.comms, engine.homes)
        new = [i for i in range(len(self.groups)) if i not in self.kept]
        self.plots = dict(zip(new, survey([self.groups[i] for i in new], model, engine.recipe, engine.comms), strict=True))
        self._make_room()

    def _find_origins(self) -> dict[str, Origin]:
        """By the name of each parameter that goes on from one that the engine had."""
        by_name = {name: (unit, i) for unit in self.engine.units for i, name in enumerate(unit.names)}
        origins, replaced = {}, []
        for name, param in self.params.items():
            unit, i = self.places.get(id(param)) or by_name.get(name) or (None, 0)
            if unit is None:
                continue
            slot = unit.layout.slots[i]
            shape = tuple(param.shape)
            if shape != slot.shape and (not shape or shape[1:] != slot.shape[1:]):
                continue
            is_same = param is unit.params[i]
            if not is_same and (id(unit.params[i]) in self.ids or param.is_meta):
                continue
            given = param.data if not is_same or (unit, i) in self.touched else None
            origins[name] = Origin(unit, i, min(slot.numel, param.numel()), given)
            if not is_same:
                replaced.append(name)
        for name in self._not_continued(replaced, origins):
            del origins[name]
        return origins

    def _not_continued(self, names: Sequence[str], origins: Mapping[str, Origin]) -> list[str]:
        """Of parameters that others were replaced by under their names: those whose values have nothing to do with the old ones."""
        fresh = []
        for name in names:
            origin = origins[name]
            old = self.copies[origin.unit] if origin.unit in self.copies else origin.unit.whole_weights()
            assert origin.given is not None, "another object's values are its own"
            new = origin.given.reshape(-1)[: origin.common].to(old)
            if not new.equal(old[origin.start : origin.start + origin.common]):
                fresh.append(name)
        return list(gather_objects(fresh, self.engine.mesh.data)[0]) if names else []

    def _find_held(self) -> dict[int, int]:
        """The parameter group that each is in now, by its id. Raises ValueError for what is in none of the model's modules."""
        held = {}
        for i, group in enumerate(self.engine.steps.inner.param_groups if self.engine.steps is not None else ()):
            for param in group["params"]:
                held[id(param)] = i
                if id(param) not in self.ids and id(param) not in self.before:
                    raise ValueError(
                        f"parameter group {i} was given a parameter of shape {tuple(param.shape)} that is not the model's when "
                        f"engine.surgery() ends: add the group after the model has its final parameters"
                    )
        return held

    def _find_kept(self) -> dict[int, Unit]:
        """Groups of the model whose parameters, shapes and kind are those of a unit."""
        by_params = {tuple(map(id, unit.params)): unit for unit in self.engine.units}
        kept = {}
        for index, group in enumerate(self.groups):
            unit = by_params.get(tuple(id(self.params[name]) for name in group.param_names))
            if unit is not None and self._fits(unit, group):
                kept[index] = unit
        return kept

    def _fits(self, unit: Unit, group: Group) -> bool:
        shapes = [tuple(self.params[name].shape) for name in group.param_names]
        if self.engine.steps is not None and self.engine.steps.groups[unit.index] != [self.held.get(id(p)) for p in unit.params]:
            return False
        is_trained = unit.grads is not None
        return (
            shapes == [slot.shape for slot in unit.layout.slots]
            and is_trained == group.trainable
            and (group.dtype == unit.dtypes.weights)
        )

    # -- the optimizer's groups --

    def _agreed_groups(self, group: GroupOf) -> dict[str, int]:
        """As `_find_groups`. Collective: raises on every rank where it raises on one, or ranks choose differently."""
        joins, error = {}, None
        try:
            joins = self._find_groups(group)
        except Exception as caught:
            error = caught
        everyone = gather_objects((f"{type(error).__name__}: {error}" if error else "", joins), self.engine.mesh.data)
        if error is not None:
            raise error
        for rank, (why, theirs) in zip(self.engine.mesh.data.ranks, everyone, strict=True):
            if why or theirs != joins:
                raise ValueError(f"engine.surgery(group=...) on rank {rank} gives {why or theirs}, and here {joins}")
        return joins

    def _find_groups(self, group: GroupOf) -> dict[str, int]:
        """Which parameter group each joins that is new, or was frozen and in none. Raises ValueError for one that is not there."""
        if self.engine.steps is None:
            return {}
        groups, held = self.engine.steps.inner.param_groups, self.held
        joins = {}
        for name, param in self.params.items():
            origin = self.origins.get(name)
            if id(param) in held or self.leaves[name].exact:
                continue
            if origin is not None and id(old := origin.unit.params[origin.i]) in held:
                joins[name] = held[id(old)]
                continue
            if origin is not None and not (param.requires_grad and origin.unit.grads is None):
                continue  # it was left out on purpose
            which = group(name, param) if callable(group) else _default_group(groups, name, param) if group is None else group
            joins[name] = which
            if not (isinstance(which, int) and 0 <= which < len(groups)):
                raise ValueError(
                    f"engine.surgery(group=...) puts {name!r} into parameter group {which!r}, and the optimizer has {len(groups)}, "
                    f"counted from 0; engine.optimizer.add_param_group() inside the surgery makes another"
                )
        return joins

    def _regroup(self) -> None:
        """In place: schedules hold the groups."""
        assert self.engine.steps is not None
        firsts = {id(param): name for name, param in self.model.named_parameters()}
        for i, group in enumerate(self.engine.steps.inner.param_groups):
            stay = [param for param in group["params"] if id(param) in self.ids]
            group["params"] = stay + [self.params[name] for name, which in self.joins.items() if which == i]
            if "param_names" in group:
                group["param_names"] = [firsts[id(param)] for param in group["params"]]

    # -- making it --

    def _make_room(self) -> None:
        """Files for what of the new units rests on disk. Collective; all ranks raise ValueError where one has no room."""
        engine, homes = self.engine, self.engine.homes
        if homes.on_disk and self.plots:
            needs = disk_needs(list(self.plots.values()), engine.recipe, engine.comms, homes.to_keep, on_host=homes.lane is None)
            homes.extend(engine.open_space(needs))

    def make(self) -> None:
        engine, steps = self.engine, self.engine.steps
        engine.comms.data.exchange(torch.zeros(1, dtype=torch.float64))
        if engine.updater is not None:
            engine.updater.finish()
        if steps is not None:
            steps.take_given(engine.units)
            steps.ring = None
            self._regroup()
        self._take_writes()
        staying, going = set(self.kept.values()), [unit for unit in engine.units if unit not in set(self.kept.values())]
        before = {unit: unit.index for unit in engine.units}
        for unit in going:
            unit.expire_graphs()
        built = self._build(going, len(engine.units))
        access.forget(going)
        access.register(built.values())
        units = [self.kept[i] if i in self.kept else built[i] for i in range(len(self.groups))]
        modules = self.values.modules
        known = [(before[unit] if unit in staying else unit.index, unit) for unit in units]
        for index, (unit, group) in enumerate(zip(units, self.groups, strict=True)):
            block = modules[group.module_name] if group.module_name else None
            unit.rename(index, group.name, block, [self.leaves[name] for name in group.param_names])
        if steps is not None:
            steps.renumber(known)
        engine.units[:] = units  # the updater's too
        self._refit_ring()
        convert_buffers(self.model, engine.recipe.weights_dtype, engine.plan.precision.buffer_dtype)

    def _take_writes(self) -> None:
        """Values of units that stay: the first rank's."""
        for unit in self.kept.values():
            touched = [i for i in range(len(unit.params)) if (unit, i) in self.touched]
            if touched:
                copy = self.copies.pop(unit) if unit in self.copies else access.full_values(unit)
                access.adopt(unit, touched, copy)
                access.take_back(unit, touched, copy, 0, write=True)

    def _build(self, going: list[Unit], first: int) -> dict[int, Unit]:
        """The new units by their place, numbered from `first` on for now; `going` go as soon as no block needs them."""
        steps = self.engine.steps
        blocks: dict[str, list[int]] = {"": []}
        for i in self.plots:
            blocks.setdefault(self.groups[i].module_name, []).append(i)
        needed: dict[Unit, str] = {}  # the last block that takes from it
        for block, which in blocks.items():
            for name in (name for i in which for name in self.groups[i].param_names if name in self.origins):
                needed[self.origins[name].unit] = block
        self.values.begin(blocks)
        for unit in going:
            if unit not in needed:
                self._let_go(unit)
        built: dict[int, Unit] = {}
        for block, which in blocks.items():
            plots: list[Plot] = [self.plots[i] for i in which]
            everything = [name for plot in plots for name in plot.group.param_names]
            names = [name for name in everything if name in self.origins]
            for name in everything:
                self._prepare(self.params[name])
            parts = zip((first + i for i in which), plots, allocate(self.site, plots), strict=True)
            units = build_block(self.site, self.values, block, list(parts))
            built.update(zip(which, units, strict=True))
            if steps is not None:
                steps.add(units)
                sources = {self.origins[name].unit: None for name in names}  # in order, the same on all ranks
                for unit in sources:
                    carry_states(steps, unit, units, self.origins)
            for unit in going:
                if needed.get(unit) == block:
                    self._let_go(unit)
        self.values.finish()
        self.engine.comms.data.exchange(torch.zeros(1, dtype=torch.float64))  # common weights are written before anyone reads them
        return built

    def _prepare(self, param: nn.Parameter) -> None:
        """Let the parameter take other memory."""
        if id(param) not in self.places:
            return
        unit, i = self.places[id(param)]
        unit.dress(i, nn.Parameter)
        if unit.layout.slots[i].shape != tuple(param.shape):
            # What autograd keeps for a parameter while a graph of the past lives has the old shape: another dtype renews it
            now = param.data
            param.data = torch.empty(0, dtype=torch.float32 if now.dtype == torch.float64 else torch.float64, device=now.device)
            param.data = now

    def _let_go(self, unit: Unit) -> None:
        """A unit that nothing is taken from any more. Parameters that left the model are ordinary ones again."""
        lost = [i for i, param in enumerate(unit.params) if id(param) not in self.ids]
        if lost and unit not in self.copies:
            whole = unit.whole_weights()
            for i in lost:
                slot, param = unit.layout.slots[i], unit.params[i]
                unit.dress(i, nn.Parameter)
                param.data = whole[slice(*slot.span)].view(slot.shape).clone()
        elif lost:
            for i in lost:
                unit.params[i].data = unit.params[i].data.clone()
        self.copies.pop(unit, None)
        if self.engine.steps is not None:
            self.engine.steps.drop(unit)
        unit.leave()

    def _refit_ring(self) -> None:
        """The buffers that gradients pass through, as long as the longest unit now."""
        engine = self.engine
        longest = longest_on_wire([(unit.layout, unit.dtypes) for unit in engine.units if unit.grads is not None], engine.recipe)
        if longest != engine.slots.longest:
            engine.slots = Slots({})
            engine.slots = Slots(ring_of(engine.comms.dp, longest))


def _default_group(groups: Sequence[Mapping[str, Any]], name: str, param: nn.Parameter) -> int:
    """The first; where groups say what Muon is for, the first of the parameter's kind."""
    wanted = muon_groups([(name, param)])[0]["use_muon"]
    return next((i for i, group in enumerate(groups) if group.get("use_muon", wanted) == wanted), 0)
