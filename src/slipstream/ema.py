"""Exponential moving averages of an engine's weights, sharded as its optimizer states are: `slipstream.ema.Ema`.

    average = slipstream.ema.Ema(engine, decay=0.999)
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()
        average.update()
    with average.applied(), torch.no_grad():
        evaluate(engine)

average  of one unit's masters in this rank's optimizer span, fp32 or wider; rests where masters do: device, host or disk
kept     the masters while averages stand in their place, where they are too narrow to trade places with them

[Note: Bits of an average] average += (master - average) * (1 - decay), in three operations that round once each. So the bits are
those of the same line over whole weights in plain torch, however the weights are sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.checkpoint import FlatSlice
from slipstream.train import entries
from slipstream.train.gate import Block
from slipstream.train.restore import spread_weights
from slipstream.zero.layout import overlap
from slipstream.zero.store import Store, copy_store
from slipstream.zero.unit import Unit

if TYPE_CHECKING:
    from slipstream.train.engine import Engine

_PIECE = 1 << 20  # elements that are worked on at a time


class Ema:
    """The averages of an engine's trainable parameters. An engine has one, and saves and loads it with its checkpoints.

    decay   what an average keeps of itself in an update, from 0 to below 1
    warmup  min(decay, (1 + n) / (10 + n)) in update n, so that first values fade soon (TensorFlow's `num_updates`)

    Frozen parameters have no average: theirs is their value. One that is unfrozen later has one from the next update on. After a
    surgery that rebuilt units, calls raise RuntimeError: take `state_dict()` before, and load it into a new `Ema` after.

    Raises ValueError for another decay, an engine without optimizer, or one that has an `Ema` already.
    """

    def __init__(self, engine: Engine, decay: float = 0.999, *, warmup: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"Ema(decay={decay!r}): it is from 0 to below 1; 0.999 averages over about 1000 steps")
        if engine.steps is None:
            raise ValueError("Ema: this engine has no optimizer, so its weights do not change; give initialize() one")
        if entries.average_of(engine) is not None:
            raise ValueError("Ema: this engine has one already; use that, or drop the last reference to it first")
        engine.gate.check("ema")
        self.engine, self.decay, self.warmup = engine, decay, warmup
        self.num_updates = 0
        self._averages: dict[Unit, Store] = {}
        self._kept: dict[Unit, Store] = {}
        engine._settle_disk()
        self._follow()
        engine.average = weakref.ref(self)

    def _follow(self) -> None:
        """Average units that train by now and did not before, beginning with what they are."""
        units = [unit for unit in self.engine.units if unit.grads is not None]
        if any(unit not in units for unit in self._averages):
            raise RuntimeError(
                "Ema: the model was changed by engine.surgery() since, and these averages are of its old units: take state_dict() "
                "before a surgery, and after it make another Ema and call its load_state_dict(state, strict=False)"
            )
        for unit in units:
            if unit not in self._averages:
                master = unit.master
                self._averages[unit] = unit.homes.state(master.numel, torch.promote_types(master.dtype, torch.float32))
                copy_store(self._averages[unit], master)

    def update(self) -> bool:
        """Take the last `engine.step()` into the averages. False, and nothing is done, where that applied no update. Collective."""
        self.engine.gate.check("update")
        if not self.engine.step_applied:
            return False
        self.engine._settle_disk()
        self._follow()
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
        with torch.no_grad():
            for unit, average in self._averages.items():
                for start, stop in _pieces(average):
                    mean = average.get(start, stop)
                    change = unit.master.get(start, stop).to(mean) - mean
                    average.put(start, mean.add_(change.mul_(1 - decay)))  # [Note: Bits of an average]
        self.num_updates += 1
        return True

    # -- in place of the weights --

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the engine's weights are the averages: evaluate, or call `save_pretrained`, `state_dict` or `named_weights`.

        Collective. Each rank trades its own shards; nothing is gathered that a step does not gather. Afterwards weights and masters
        are what they were, bit for bit. Inside, what trains, saves or changes the engine raises RuntimeError.
        """
        engine = self.engine
        with engine.together("ema"), torch.no_grad():
            self._follow()
            self._trade(back=False)
        reason = (
            "the engine's weights are averages inside `with average.applied():`, for evaluating under torch.no_grad(); leave it"
        )
        engine.gate.shut(Block.AVERAGED, reason)
        engine.hooks.refusal = reason
        try:
            yield
        finally:
            if Block.DESTROYED not in engine.gate:
                engine.gate.open(Block.AVERAGED)
                engine.hooks.refusal = ""
                with engine.together("ema"), torch.no_grad():
                    self._trade(back=True)

    def _trade(self, *, back: bool) -> None:
        """Masters and averages trade places, and the weights follow the masters. Collective."""
        for unit in self.engine.units:
            unit.release()
        for unit, average in self._averages.items():
            if average.dtype == unit.master.dtype:
                _swap(average, unit.master)
            elif back:
                kept = self._kept.pop(unit)
                copy_store(unit.master, kept)
                unit.homes.drop(kept)
            else:
                self._kept[unit] = unit.homes.state(unit.master.numel, unit.master.dtype)
                copy_store(self._kept[unit], unit.master)
                copy_store(unit.master, average)
        spread_weights(self.engine)

    # -- saved and loaded --

    def state_dict(self) -> dict[str, Any]:
        """`{"num_updates": n, "average": {name: the whole average}}`, on every rank. Collective.

        `engine.save_checkpoint` writes each rank's own shards instead, and `load_checkpoint` reads them.
        """
        with self.engine.together("ema"):
            averages: dict[str, Tensor] = {}
            for unit, average in self._averages.items():
                whole = unit.whole(average.whole(), bool(unit.placement.optim))
                for name, slot in zip(unit.names, unit.layout.slots, strict=True):
                    averages[name] = whole[slice(*slot.span)].view(slot.shape).clone()
        return {"num_updates": self.num_updates, "average": averages}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take `state_dict`'s values, the same on all ranks. strict=False: names that only one of the two has are left as they are.

        Raises ValueError, with nothing changed, for other names (strict) or shapes.
        """
        self.engine.gate.check("ema")
        self._follow()
        given: Mapping[str, Tensor] = state["average"]
        shapes = {name: slot.shape for unit in self._averages for name, slot in zip(unit.names, unit.layout.slots, strict=True)}
        if strict and (odd := sorted(given.keys() ^ shapes.keys())):
            where = "the state" if odd[0] in given else "this engine"
            raise ValueError(f"Ema.load_state_dict(): only {where} has an average of {odd[0]!r}; strict=False takes what both have")
        for name in given.keys() & shapes.keys():
            if tuple(given[name].shape) != shapes[name]:
                raise ValueError(
                    f"Ema.load_state_dict(): {name!r} has shape {tuple(given[name].shape)} in the state, and {shapes[name]} here"
                )
        for unit, average in self._averages.items():
            for name, start, within in _owned(unit):
                if name in given:
                    average.put(start, given[name].reshape(-1)[within])
        self.num_updates = int(state["num_updates"])

    def tensors(self) -> dict[str, FlatSlice]:
        """This rank's ranges of the averages, as a checkpoint has them."""
        return {
            f"{entries.AVERAGE}{name}": part
            for unit, average in self._averages.items()
            for name, _, part in entries.slices(unit, average)
        }

    def stores(self) -> Collection[Store]:
        """Where this rank's averages rest."""
        return self._averages.values()

    def restart(self, names: Collection[str]) -> None:
        """The averages of these parameters begin again with what these are now."""
        for unit, average in self._averages.items():
            for name, start, within in _owned(unit):
                if name in names:
                    average.put(start, unit.master.get(start, start + within.stop - within.start))


def _owned(unit: Unit) -> Iterator[tuple[str, int, slice]]:
    """Each parameter's name, where its part begins in this rank's optimizer span, and which elements of the parameter that is."""
    for name, slot in zip(unit.names, unit.layout.slots, strict=True):
        start, stop = overlap(slot.span, unit.optim_span)
        yield name, start - unit.optim_span[0], slice(start - slot.offset, stop - slot.offset)


def _pieces(store: Store) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _PIECE, store.numel)) for start in range(0, store.numel, _PIECE))


def _swap(one: Store, other: Store) -> None:
    for start, stop in _pieces(one):
        held = one.get(start, stop).clone()
        one.put(start, other.get(start, stop))
        other.put(start, held)
