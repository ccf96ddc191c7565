"""Surgery: change the model between two steps and rebuild the engine's units around it (`Engine.surgery`).

    begin     check that no rank is in the middle of a window; remove the hooks; from now on an access to a sharded parameter
              gathers its unit into a private, writable copy, as `zero.gathered` does
    (the user's changes)
    compare   compare the model's parameters with those of the units; all ranks agree, or all raise
    rebuild   keep units whose parameters are unchanged, under their new names; build all others anew, block by block, from the
              values of the old units, which are freed on the way: at most one unit is unsharded at a time

New and modified values are those of the first rank that has the parameter, or its part, so ranks need not draw the same random
numbers. The ranks of a pipeline stage make the same changes, to the stage's own modules. LoRA adapters of sliced layers are built
whole and then sliced like these layers (parallel/adapters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from slipstream.config.refusals import SURGERY, matching
from slipstream.moe.place import adopt_added
from slipstream.optim import fit, muon_groups
from slipstream.parallel.adapters import slice_adapters, whole_features
from slipstream.train import schedules
from slipstream.train.agreement import Facts, conflict, difference, options
from slipstream.train.gate import Obstacle
from slipstream.train.origins import Carried, Origin, carry_states
from slipstream.train.precision import buffer_rule
from slipstream.train.states import States
from slipstream.world.watch import PeerError
from slipstream.zero import access, memory
from slipstream.zero.buffers import convert_buffers
from slipstream.zero.build import UnitPlan, allocate, build_block, disk_needs, longest_on_wire, plan_units
from slipstream.zero.comm import first_said
from slipstream.zero.hooks import Slots
from slipstream.zero.leaves import differs_of, named_leaves, open_up, whole_shape
from slipstream.zero.materialize import FirstValues
from slipstream.zero.unit import Unit
from slipstream.zero.wrap import Group, wrap

GroupOf = int | Callable[[str, nn.Parameter], int] | None

_HALF_CHANGED = (
    "the model was changed in an engine.surgery() that failed ({why}), so engine and model no longer match: enter another "
    "`with engine.surgery():` and finish or undo the change in it (an empty one accepts the model as it is), or load a checkpoint "
    "into a new engine"
)


class Surgery:
    """One surgery of one engine. `begin`, then `finish` or `give_up`."""

    def __init__(self, states: States, group: GroupOf, rewire: Callable[[], None]) -> None:
        self.states, self.group = states, group
        self.rewire = rewire  # installs hooks between the changed model and its units
        self.copies: dict[Unit, Tensor] = {}  # unsharded copies of the units that were accessed
        self.undo = ExitStack()  # restores the parameter groups if the surgery fails
        self.model = states.model
        self.features = ExitStack()  # sliced layers show the whole's feature counts, for adapters
        self.was_half_changed = Obstacle.CHANGING in states.gate

    # -- begin and end --

    def begin(self) -> None:
        """Prepare the model for changes. Raises RuntimeError on every rank if one is in the middle of a window, and ValueError if
        the plan does not allow changes."""
        states = self.states
        for text in matching(SURGERY, states):
            raise ValueError(text)
        if first := first_said(states.hooks.under_way(), states.mesh.world):
            raise RuntimeError(f"engine.surgery() {first[1]}: call it between engine.step() and the next forward")
        for unit in states.units:
            unit.release()
        states.hooks.remove()
        for unit in states.units:
            unit.shown.show_copy = self._show_copy
        self.before = _outline(states.model)
        groups = states.steps.inner.param_groups
        self.num_groups = len(groups)
        for group in groups:
            self.undo.callback(group.__setitem__, "params", list(group["params"]))
        self.features.enter_context(whole_features(states.model))
        states.gate.shut(Obstacle.CHANGING, "the engine's model is in surgery: leave `with engine.surgery():` before anything else")

    def _show_copy(self, unit: Unit) -> None:
        if unit not in self.copies:
            unit.shown.show_copy = None  # while its weights are copied
            self.copies[unit] = access.show_copy(unit, range(len(unit.params)))
            unit.shown.show_copy = self._show_copy

    def add_group(self, group: dict[str, Any], scheduler: Any) -> None:
        """`add_param_group` of the engine's optimizer. Raises like torch, and ValueError; then no group is added."""
        steps = self.states.steps
        groups, rate = steps.inner.param_groups, group.get("lr")
        if "bias_correction" in groups[0]:  # torch has no default for it
            group.setdefault("bias_correction", groups[0]["bias_correction"])
        steps.inner.add_param_group(group)
        with ExitStack() as failed:
            failed.callback(groups.pop)
            if why := steps.unsupported_option(groups):
                raise ValueError(f"add_param_group(): {why}")
            if scheduler is not None:
                failed.callback(schedules.add_group(scheduler, None if rate is None else float(rate)))
            self.undo.push(failed.pop_all())

    def finish(self) -> None:
        """Apply the change, once all ranks have made the same one; otherwise raise on every rank."""
        self.features.close()
        states, world = self.states, self.states.mesh.world
        rows = self._exchange(failed=False, is_changed=self._is_changed())
        if rows[:, 0].any():
            why = f"rank {world.ranks[int(rows[:, 0].argmax())]} raised inside it"
            self._close(why, is_changed=bool(rows[:, 1].any()))
            raise RuntimeError(f"engine.surgery(): {why}, so the change was not applied")
        try:
            if world.size > 1 and (why := difference(self._facts(), world.group, states.mesh.places[states.mesh.rank].pp)):
                raise ValueError(f"engine.surgery(): ranks changed the model differently: {why}. Make the same change on all ranks")
            whys, tied = zip(*world.gather((self._refusal(), _tied(states.model))), strict=True)
            if why := next(filter(None, whys), ""):
                raise ValueError(why)
            if differing := conflict(world.ranks, tied):
                name, first, usual, rank, fact = differing
                raise ValueError(
                    f"engine.surgery(): {name!r} is tied over pipeline stages, and is {usual} on rank {first} and {fact} on rank "
                    f"{rank}: make the same change on the stages that have it"
                )
            touched = self._touched()
            for unit in states.units:  # one rank may have read alone (shared memory); from here on all ranks need the copy
                if unit.placement.weights and (unit, 0) in touched:
                    self._show_copy(unit)
            change = Change(states, states.model, self.copies, touched, self.group)
        except Exception as error:
            self._close(f"{type(error).__name__}: {error}", is_changed=True)
            raise
        states.gate.shut(Obstacle.BROKEN, "engine.surgery() failed: the engine's states are lost, resume from the last checkpoint")
        change.make()
        states.gate.open(Obstacle.BROKEN)
        self.undo.pop_all()
        self._close("", is_changed=False)

    def abort(self, error: BaseException) -> None:
        """Discard the values that the user's code wrote, because it raised on this rank."""
        self.features.close()
        why, is_changed = f"{type(error).__name__}: {error}", self._is_changed()
        if isinstance(error, Exception) and not isinstance(error, PeerError):
            rows = self._exchange(failed=True, is_changed=is_changed)
            is_changed = bool(rows[:, 1].any())
        else:
            is_changed = True
        self._close(why, is_changed=is_changed)

    def _is_changed(self) -> bool:
        """Whether something changed that `_close` cannot undo: the model, or replicated weights in place."""
        replicated = (unit for unit in self.states.units if not unit.placement.weights and unit not in self.copies)
        written = any(unit.shown.is_written(i) for unit in replicated for i in range(len(unit.params)))
        return written or _outline(self.states.model) != self.before

    def _exchange(self, *, failed: bool, is_changed: bool) -> Tensor:
        return self.states.world.exchange(torch.tensor([failed, is_changed], dtype=torch.float64))

    def _facts(self) -> Facts:
        """Facts that are the same on all ranks of a stage after the same changes."""
        states = self.states
        groups = states.steps.inner.param_groups
        held = {id(param): i for i, group in enumerate(groups) for param in group["params"]}
        places = {id(param): f"{unit.index}.{i}" for unit in states.units for i, param in enumerate(unit.params)}
        facts = {
            f"parameter {name!r}": f"{whole_shape(param)} {param.dtype}{' on meta' * param.is_meta}"
            f"{'' if param.requires_grad else ' frozen'} from {places.get(id(param), 'outside')} in group {held.get(id(param))}"
            for name, param in states.model.named_parameters(remove_duplicate=False)
        }
        facts |= {f"buffer {name!r}": str(tuple(buffer.shape)) for name, buffer in states.model.named_buffers()}
        return facts | {f"parameter group {i}": str(options(group)) for i, group in enumerate(groups) if i >= self.num_groups}

    def _refusal(self) -> str:
        """Why the changed model does not fit ranks with parts, the optimizer, or (new routers) the settings; "" if it fits. Also
        slices new adapters: collective over tp."""
        states = self.states
        if states.mesh.pp.size > 1 and states.model is not self.model:
            wrong, states.model = states.model, self.model
            return (
                f"engine.surgery(): engine.module is a {type(wrong).__name__} now, and a pipeline's stages run the "
                f"{type(self.model).__name__}: change modules inside of it (peft.inject_adapter_in_model for adapters)"
            )
        try:
            slice_adapters(states.model)
            adopt_added(states.model, states.plan.experts, states.known)
            if states.steps.has_optimizer:
                fit.refuse(states.plan, states.steps.inner, states.steps.rule, states.model.parameters())
        except ValueError as error:
            return str(error)
        return _lost_parts(states)

    def _touched(self) -> set[tuple[Unit, int]]:
        """Parameters whose values may have changed on any rank; the values of their first rank then count. Collective."""
        params = [(unit, i) for unit in self.states.units for i in range(len(unit.params))]
        own = [unit.names[i] for unit, i in params if _is_touched(unit, i, self.copies)]
        touched = {name for names in self.states.mesh.world.gather(own) for name in names}
        return {(unit, i) for unit, i in params if unit.names[i] in touched}

    def _close(self, why: str, *, is_changed: bool) -> None:
        """Hook the model to the units again; if a failed surgery changed it, block the engine, with `why`. Drops all copies."""
        states = self.states
        self.undo.close()
        for unit in states.units:
            unit.shown.show_copy = None
            if unit in self.copies:
                unit.shown.end_copies(range(len(unit.params)))
            elif not unit.placement.weights:
                for param, view in zip(unit.params, unit.shown.views, strict=True):
                    if access.is_assigned(param, view):  # discard `p.data = ...`
                        param.data = view
        self.copies = {}
        if is_changed or (why and self.was_half_changed):
            states.gate.shut(Obstacle.CHANGING, _HALF_CHANGED.format(why=why))
        else:
            states.gate.open(Obstacle.CHANGING)
            self.rewire()


def _outline(model: nn.Module) -> list[Any]:
    """The identity of the model's modules, parameters and buffers, to detect changes."""
    params = model.named_parameters(remove_duplicate=False)
    return [
        *((name, id(module)) for name, module in model.named_modules(remove_duplicate=False)),
        *((name, id(param), tuple(param.shape), param.requires_grad) for name, param in params),
        *((name, id(buffer)) for name, buffer in model.named_buffers(remove_duplicate=False)),
    ]


def _tied(model: nn.Module) -> dict[str, str]:
    """Facts of the parameters that several stages share, on which these must agree."""
    shared = {name: param for name, param in model.named_parameters() if any(split.axis == "pp" for split in differs_of(param))}
    return {name: f"{tuple(param.shape)}{'' if param.requires_grad else ' frozen'}" for name, param in shared.items()}


def _lost_parts(states: States) -> str:
    """Why the change does not keep a parameter that is split over ranks as it is; "" if all are kept."""
    params = dict(states.model.named_parameters())
    kept = {id(param) for param in params.values()}
    old = {id(param) for unit in states.units for param in (*unit.params, *unit.model_params)}
    for unit in states.units:
        for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True):
            differs = unit.comms.family.differs
            if not differs:
                continue
            path = name.rpartition(".")[0]
            new = [] if id(param) in kept else [other for other in params if other == name or other.startswith(f"{path}.")]
            wrong = [other for other in new if id(params[other]) not in old and differs_of(params[other]) != differs]
            if wrong or (id(param) in kept and tuple(param.shape) != slot.shape):
                splits = " and ".join(f"{split.axis} ({split.size} parts)" for split in differs)
                return (
                    f"engine.surgery(): {(wrong or [name])[0]!r} replaces or resizes {name!r}, which is split over {splits}: build "
                    f"each rank's part and mark it with slipstream.zero.leaves.mark_part, or make the change before initialize()"
                )
    strange = [name for name, param in params.items() if differs_of(param) not in states.families]
    return (
        f"engine.surgery(): {strange[0]!r} is split over {differs_of(params[strange[0]])}, like no parameter that the engine had: "
        "split it like another one, or add it before initialize()"
        if strange
        else ""
    )


def _is_touched(unit: Unit, i: int, copies: Mapping[Unit, Tensor]) -> bool:
    """Whether the parameter's values may have changed."""
    if unit in copies:
        return True
    param, view = unit.params[i], unit.shown.views[i]
    if unit.placement.weights or not view.numel():
        return False
    return access.is_assigned(param, view) or unit.shown.is_written(i)


class Change:
    """Rebuilds the units for the changed model. The constructor makes all checks; `make` applies the change."""

    def __init__(
        self, states: States, model: nn.Module, copies: dict[Unit, Tensor], touched: set[tuple[Unit, int]], group: GroupOf
    ) -> None:
        self.states, self.model, self.copies, self.touched = states, model, copies, touched
        open_up(model)
        self.leaves = {leaf.name: leaf for leaf in named_leaves(model)}
        self.params = {name: leaf.tensor for name, leaf in self.leaves.items()}
        self.before = {id(param) for unit in states.units for param in (*unit.params, *unit.model_params)}
        self.ids = {id(param) for leaf in self.leaves.values() for param in (leaf.tensor, leaf.whole)}
        self.places = {id(param): (unit, i) for unit in states.units for i, param in enumerate(unit.params)}  # before the change
        self.origins = self._find_origins()
        self.groups = wrap(model)
        self.held, self.joins = self._agreed_groups(group)
        self.kept = self._find_kept()
        firsts = {id(param): name for name, param in self.params.items()}
        others = model.named_parameters(remove_duplicate=False)
        aliases = {name: firsts.get(id(param), name) for name, param in others} | {name: name for name in self.params}
        self.reader = Carried(self.origins, aliases)
        self.values = FirstValues(model, states.device, self.reader)
        new = [i for i in range(len(self.groups)) if i not in self.kept]
        self.plans = dict(zip(new, plan_units([self.groups[i] for i in new], model, states.recipe, states.families), strict=True))
        self._open_files()

    def _find_origins(self) -> dict[str, Origin]:
        """Map the name of each parameter that continues one of the engine's to its origin."""
        by_name = {name: (unit, i) for unit in self.states.units for i, name in enumerate(unit.names)}
        origins, replaced = {}, dict[str, Tensor]()
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
                replaced[name] = param.data
        for name in self._not_continued(replaced, origins):
            del origins[name]
        return origins

    def _not_continued(self, replaced: Mapping[str, Tensor], origins: Mapping[str, Origin]) -> list[str]:
        """The parameters that replaced others of the same name, with values unrelated to the old ones. Collective."""
        fresh = []
        for name, given in replaced.items():
            origin = origins[name]
            old = self.copies[origin.unit] if origin.unit in self.copies else origin.unit.unsharded_weights()
            new = given.reshape(-1)[: origin.common].to(old)
            if origin.unit.comms.data.index == 0 and not new.equal(old[origin.start : origin.start + origin.common]):
                fresh.append(name)
        everywhere = {name for of_rank in self.states.mesh.world.gather(fresh) for name in of_rank}
        return [name for name in replaced if name in everywhere]

    def _find_held(self) -> dict[int, int]:
        """Map the id of each parameter to its group. Raises ValueError for a parameter that is in no module of the model."""
        held = {}
        for i, group in enumerate(self.states.steps.inner.param_groups):
            for param in group["params"]:
                held[id(param)] = i
                if id(param) not in self.ids and id(param) not in self.before:
                    raise ValueError(
                        f"parameter group {i} was given a parameter of shape {tuple(param.shape)} that is not the model's at the "
                        f"end of engine.surgery(): add the group after the model has its final parameters"
                    )
        return held

    def _find_kept(self) -> dict[int, Unit]:
        """Map groups of the model to existing units with the same parameters, shapes and kind."""
        by_params = {tuple(map(id, unit.params)): unit for unit in self.states.units}
        kept = {}
        for index, group in enumerate(self.groups):
            unit = by_params.get(tuple(id(self.params[name]) for name in group.param_names))
            if unit is not None and self._fits(unit, group):
                kept[index] = unit
        return kept

    def _fits(self, unit: Unit, group: Group) -> bool:
        shapes = [tuple(self.params[name].shape) for name in group.param_names]
        if self.states.steps.members[unit].groups != [self.held.get(id(p)) for p in unit.params]:
            return False
        is_trained = unit.grads is not None
        return (
            shapes == [slot.shape for slot in unit.layout.slots]
            and is_trained == group.trainable
            and (group.dtype == unit.dtypes.weights)
        )

    # -- the optimizer's groups --

    def _agreed_groups(self, group: GroupOf) -> tuple[dict[int, int], dict[str, int]]:
        """`_find_held` and `_find_groups`, checked: if one raises on a rank, or ranks choose differently, all raise. Collective."""
        held, joins, error = dict[int, int](), dict[str, int](), None
        try:
            held = self._find_held()
            joins = self._find_groups(group, held)
        except Exception as caught:
            error = caught
        world = self.states.mesh.world
        whys, chosen = zip(*world.gather((f"{type(error).__name__}: {error}" if error else "", joins)), strict=True)
        if error is not None:
            raise error
        for rank, why in zip(world.ranks, whys, strict=True):
            if why:
                raise ValueError(f"engine.surgery(group=...): rank {rank} gives {why}, this rank {joins}")
        if differing := conflict(world.ranks, chosen):  # other stages have other names
            name, first, usual, rank, others = differing
            raise ValueError(
                f"engine.surgery(group=...): rank {rank} gives {{{name!r}: {others}}}, rank {first} {{{name!r}: {usual}}}"
            )
        return held, joins

    def _find_groups(self, group: GroupOf, held: Mapping[int, int]) -> dict[str, int]:
        """The group of each parameter that is new, or was frozen and in no group. Raises ValueError for an invalid index."""
        if not self.states.steps.has_optimizer:
            return {}
        groups = self.states.steps.inner.param_groups
        joins = {}
        for name, param in self.params.items():
            origin = self.origins.get(name)
            if id(param) in held or self.leaves[name].exact:
                continue
            if origin is not None and id(old := origin.unit.params[origin.i]) in held:
                joins[name] = held[id(old)]
                continue
            if origin is not None and not (param.requires_grad and origin.unit.grads is None):
                continue  # the user left it out deliberately
            which = group(name, param) if callable(group) else _default_group(groups, name, param) if group is None else group
            joins[name] = which
            if not (isinstance(which, int) and 0 <= which < len(groups)):
                raise ValueError(
                    f"engine.surgery(group=...) puts {name!r} into parameter group {which!r}, but the optimizer has groups 0 to "
                    f"{len(groups) - 1}; engine.optimizer.add_param_group() inside the surgery adds one"
                )
        return joins

    def _regroup(self) -> None:
        """Update the groups in place, because schedules hold references to them."""
        firsts = {id(param): name for name, param in self.model.named_parameters()}
        for i, group in enumerate(self.states.steps.inner.param_groups):
            stay = [param for param in group["params"] if id(param) in self.ids]
            group["params"] = stay + [self.params[name] for name, which in self.joins.items() if which == i]
            if "param_names" in group:
                group["param_names"] = [firsts[id(param)] for param in group["params"]]

    # -- applying the change --

    def _open_files(self) -> None:
        """Open files for the new units' states on disk. Collective; all ranks raise ValueError if one lacks disk space."""
        states, homes = self.states, self.states.homes
        if homes.on_disk and any(states.mesh.pp.gather(bool(self.plans))):
            needs = disk_needs(list(self.plans.values()), states.recipe, homes.to_keep, on_host=homes.lane is None)
            homes.extend(states.open_space(needs))

    def make(self) -> None:
        states, steps = self.states, self.states.steps
        states.fence()
        states.updater.finish()
        steps.adopt_initial_state()
        steps.ring = None
        self._regroup()
        self._take_writes()
        going = [unit for unit in states.units if unit not in set(self.kept.values())]
        for unit in going:
            unit.shown.expire_graphs()
        built = self._build(going, len(states.units))
        access.forget(going)
        units = [self.kept[i] if i in self.kept else built[i] for i in range(len(self.groups))]
        modules = self.values.modules
        for index, (unit, group) in enumerate(zip(units, self.groups, strict=True)):
            block = modules[group.module_name] if group.module_name else None
            unit.rename(index, group.name, block, [self.leaves[name] for name in group.param_names])
        access.register(units)
        states.units[:] = units  # in place: the updater holds the same list
        self._refit_ring()
        convert_buffers(self.model, buffer_rule(states.plan.precision))

    def _take_writes(self) -> None:
        """Write rank 0's modified values into the units that stay."""
        for unit in self.kept.values():
            touched = [i for i in range(len(unit.params)) if (unit, i) in self.touched]
            if touched:
                copy = self.copies.pop(unit) if unit in self.copies else access.full_values(unit)
                access.copy_assigned(unit, touched, copy)
                access.use_values_of(0, unit, copy)
                access.write_back(unit, touched, copy)
                unit.shown.end_copies(touched)

    def _build(self, going: list[Unit], first: int) -> dict[int, Unit]:
        """Build the new units, keyed by group and numbered from `first` for now; free each unit of `going` after its last use."""
        steps, recipe, homes = self.states.steps, self.states.recipe, self.states.homes
        blocks: dict[str, list[int]] = {"": []}
        for i in self.plans:
            blocks.setdefault(self.groups[i].module_name, []).append(i)
        needed: dict[Unit, str] = {}  # the last block that uses the old unit
        for block, which in blocks.items():
            for name in (name for i in which for name in self.groups[i].param_names if name in self.origins):
                needed[self.origins[name].unit] = block
        self.values.begin(blocks)
        for unit in going:
            if unit not in needed:
                self._let_go(unit)
        built: dict[int, Unit] = {}
        for block, which in blocks.items():
            plans: list[UnitPlan] = [self.plans[i] for i in which]
            everything = [name for plan in plans for name in plan.group.param_names]
            names = [name for name in everything if name in self.origins]
            for name in everything:
                self._prepare(self.params[name])
            parts = zip((first + i for i in which), plans, allocate(recipe, homes, plans), strict=True)
            units = build_block(recipe, homes, self.values, block, list(parts))
            built.update(zip(which, units, strict=True))
            steps.add(units)
            sources = {self.origins[name].unit: None for name in names}  # ordered, the same on all ranks
            for unit in sources:
                carry_states(steps, unit, units, self.origins)
            for unit in going:
                if needed.get(unit) == block:
                    self._let_go(unit)
        self.values.finish()
        self.states.fence()  # shared weights are written before any rank reads them
        return built

    def _prepare(self, param: nn.Parameter) -> None:
        """Detach the parameter from its old unit's memory."""
        if id(param) not in self.places:
            return
        unit, i = self.places[id(param)]
        unit.shown.make_plain(i)
        if unit.layout.slots[i].shape != tuple(param.shape):
            # While an old graph lives, autograd's metadata of the parameter has the old shape: a change of dtype resets it
            data = param.data
            param.data = torch.empty(0, dtype=torch.float32 if data.dtype == torch.float64 else torch.float64, device=data.device)
            param.data = data

    def _let_go(self, unit: Unit) -> None:
        """Free a unit that is no longer used. Parameters that left the model become ordinary ones again."""
        indices = [i for i, param in enumerate(unit.params) if id(param) not in self.ids]
        if indices and unit not in self.copies:
            whole = unit.unsharded_weights()
            for i in indices:
                slot, param = unit.layout.slots[i], unit.params[i]
                unit.shown.make_plain(i)
                param.data = whole[slice(*slot.span)].view(slot.shape).clone()
        elif indices:
            for i in indices:
                unit.params[i].data = unit.params[i].data.clone()
        self.copies.pop(unit, None)
        self.states.steps.drop(unit)
        memory.free(unit)

    def _refit_ring(self) -> None:
        """Resize the ring of gradient buffers to the longest unit."""
        states = self.states
        trained = [(unit.comms, unit.layout, unit.dtypes) for unit in states.units if unit.grads is not None]
        longest = longest_on_wire(trained, states.recipe)
        if longest != states.slots.numels:
            states.slots = Slots({})
            states.slots = Slots(longest)


def _default_group(groups: Sequence[Mapping[str, Any]], name: str, param: nn.Parameter) -> int:
    """The first group; with Muon's groups, the first of the parameter's kind."""
    wanted = muon_groups([(name, param)])[0]["use_muon"]
    return next((i for i, group in enumerate(groups) if group.get("use_muon", wanted) == wanted), 0)
