"""Exponential moving averages (EMA) of an engine's weights, sharded like its optimizer states: `slipstream.ema.Ema`.

    average = slipstream.ema.Ema(engine, decay=0.999)
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()
        average.update()
    with average.applied(), torch.no_grad():
        evaluate(engine)

average  the average of one unit's masters in this rank's optimizer span, fp32 or wider; stored in the masters' tier
kept     a copy of the masters inside `applied`, if they are narrower than the averages and so cannot be swapped with them

[Note: Bits of an average] average += (master - average) * (1 - decay), in three operations that round once each. So the result is
bit-identical to the same line over unsharded weights in plain torch, for any sharding.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint import FlatSlice
from slipstream.train.engine import Engine
from slipstream.train.gate import Obstacle
from slipstream.train.saving import entries
from slipstream.train.saving.entries import spread_weights
from slipstream.zero import access
from slipstream.zero.leaves import whole_shape
from slipstream.zero.shown import check_writes
from slipstream.zero.storage.store import Store, copy_store, pieces
from slipstream.zero.unit import Unit


class Ema:
    """The averages of an engine's trainable parameters. An engine has at most one `Ema`, and checkpoints include it.

    decay   the weight of the old average in an update, 0 <= decay < 1
    warmup  use min(decay, (1 + n) / (10 + n)) in update n, so that initial values decay quickly (TensorFlow's `num_updates`)

    Frozen parameters are not averaged; one that is unfrozen later is averaged from the next update on. After a surgery that rebuilt
    units, calls raise RuntimeError: call `state_dict()` before, and load it into a new `Ema` after.

    Raises ValueError for another decay, for an engine without optimizer, or for one that already has an `Ema`.
    """

    def __init__(self, engine: Engine, decay: float = 0.999, *, warmup: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"Ema(decay={decay!r}): decay must be >= 0 and < 1; 0.999 averages over about 1000 steps")
        if not engine.states.steps.has_optimizer:
            raise ValueError("Ema: this engine has no optimizer, so its weights do not change; pass one to initialize()")
        if engine.states.average is not None:
            raise ValueError("Ema: this engine has one already; use that, or drop the last reference to it first")
        engine.gate.check("ema")
        self.engine, self.decay, self.warmup = engine, decay, warmup
        self.num_updates = 0
        self._averages: dict[Unit, Store] = {}
        self._kept: dict[Unit, Store] = {}
        engine.states.settle()
        self._follow()
        engine.states.average_ref = weakref.ref(self)

    def _follow(self) -> None:
        """Start averages of units that are trainable now and were not before, from their current masters."""
        units = [unit for unit in self.engine.units if unit.grads is not None]
        if any(unit not in units for unit in self._averages):
            raise RuntimeError(
                "Ema: engine.surgery() has changed the model, and these averages are of its old units: call state_dict() before a "
                "surgery, and after it make a new Ema and call its load_state_dict(state, strict=False)"
            )
        for unit in units:
            if unit not in self._averages:
                master = unit.master
                self._averages[unit] = unit.homes.state(master.numel, torch.promote_types(master.dtype, torch.float32))
                copy_store(self._averages[unit], master)

    def update(self) -> bool:
        """Update the averages after `engine.step()`. Returns False, without a change, if that step was not applied. Collective."""
        self.engine.gate.check("update")
        if not self.engine.step_applied:
            return False
        self.engine.states.settle()
        self._follow()
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
        with torch.no_grad():
            for unit, average in self._averages.items():
                for start, stop in pieces(average.numel):
                    mean = average.get(start, stop)
                    change = unit.master.get(start, stop).to(mean) - mean
                    average.put(start, mean.add_(change.mul_(1 - decay)))  # [Note: Bits of an average]
        self.num_updates += 1
        return True

    # -- averages as weights --

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the engine's weights are the averages: evaluate, or call `save_pretrained`, `state_dict` or `named_weights`.

        Collective. Each rank swaps its own shards, and gathers no more than a step does. Afterwards weights and masters are bit for
        bit the old ones. Inside, calls that train, save or change the engine raise RuntimeError.
        """
        engine = self.engine
        with engine.together("ema"), torch.no_grad():
            self._follow()
            self._swap_masters(back=False)
        reason = "the engine's weights are averages inside `with average.applied():`, which is for evaluation only; leave it first"
        engine.gate.shut(Obstacle.AVERAGED, reason)
        engine.states.hooks.refusal = reason
        try:
            yield
        finally:
            if Obstacle.DESTROYED not in engine.gate:
                engine.gate.open(Obstacle.AVERAGED)
                engine.states.hooks.refusal = ""
                with engine.together("ema"), torch.no_grad():
                    self._swap_masters(back=True)

    def _swap_masters(self, *, back: bool) -> None:
        """Swap masters and averages, and update the weights from the masters. Collective."""
        for unit in self.engine.units:
            unit.release()
            if not back:
                check_writes(unit)
        for unit, average in self._averages.items():
            if average.dtype == unit.master.dtype:
                _swap(average, unit.master)
            elif back:
                master = self._kept.pop(unit)
                copy_store(unit.master, master)
                unit.homes.drop(master)
            else:
                self._kept[unit] = unit.homes.state(unit.master.numel, unit.master.dtype)
                copy_store(self._kept[unit], unit.master)
                copy_store(unit.master, average)
        spread_weights(self.engine.states)

    # -- saving and loading --

    def state_dict(self) -> dict[str, Any]:
        """Return `{"num_updates": n, "average": {name: average}}` on every rank, whole, of all pipeline stages. Collective.

        `engine.save_checkpoint` and `load_checkpoint` write and read shards instead.
        """
        with self.engine.together("ema"):
            averages: dict[str, Tensor] = {}
            for unit, average in self._averages.items():
                whole = unit.unsharded(average.whole(), unit.placement.optim)
                for i, (name, slot) in enumerate(zip(unit.names, unit.layout.slots, strict=True)):
                    averages[name] = access.whole_of(whole[slice(*slot.span)].view(slot.shape).clone(), unit, i)
            averages = entries.of_all_stages(averages, self.engine.mesh)
        return {"num_updates": self.num_updates, "average": averages}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load `state_dict`'s values, of any layout; the same on all ranks. strict=False ignores names that only the state or the
        engine has. In a pipeline, collective over the stages.

        Raises ValueError, with nothing changed, for other names (strict) or shapes.
        """
        self.engine.gate.check("ema")
        self._follow()
        values, num_updates = state["average"], int(state["num_updates"])
        own = {
            name: whole_shape(param, slot.shape)
            for unit in self._averages
            for name, param, slot in zip(unit.names, unit.params, unit.layout.slots, strict=True)
        }
        shapes = entries.of_all_stages(own, self.engine.mesh)
        if strict and (odd := sorted(values.keys() ^ shapes.keys())):
            side = "the state" if odd[0] in values else "this engine"
            raise ValueError(f"Ema.load_state_dict(): only {side} has an average of {odd[0]!r}; strict=False loads the common ones")
        for name in values.keys() & shapes.keys():
            if tuple(values[name].shape) != shapes[name]:
                raise ValueError(
                    f"Ema.load_state_dict(): {name!r} has shape {tuple(values[name].shape)} in the state, and {shapes[name]} here"
                )
        for unit, average in self._averages.items():
            for i, (name, start, within) in enumerate(_owned(unit)):
                if name in values:
                    average.put(start, access.part_of_whole(values[name], unit, i).reshape(-1)[within])
        self.num_updates = num_updates

    def tensors(self) -> dict[str, FlatSlice]:
        """This rank's ranges of the averages, for a checkpoint."""
        return {
            f"{entries.AVERAGE}{name}": part
            for unit, average in self._averages.items()
            for name, _, part in entries.slices(unit, average)
        }

    def stores(self) -> Collection[Store]:
        """The stores of this rank's averages."""
        return self._averages.values()

    def restart(self, names: Collection[str]) -> None:
        """Restart the averages of these parameters from their current values."""
        for unit, average in self._averages.items():
            for name, start, within in _owned(unit):
                if name in names:
                    average.put(start, unit.master.get(start, start + within.stop - within.start))


def _owned(unit: Unit) -> Iterator[tuple[str, int, slice]]:
    """Yield each parameter's name, the offset of its part in this rank's optimizer span, and the part's range in the parameter."""
    for name, slot in zip(unit.names, unit.layout.slots, strict=True):
        inside, of_param = slot.common(unit.optim_span)
        yield name, inside.start, of_param


def _swap(one: Store, other: Store) -> None:
    for start, stop in pieces(one.numel):
        old = one.get(start, stop).clone()
        one.put(start, other.get(start, stop))
        other.put(start, old)
