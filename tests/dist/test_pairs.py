"""Pairs of settings that the tables accept: each trains, at any mesh of four ranks, and none is refused later.

The axes are those by which every row of the tables of refusals is met (tests/unit/test_config_refusals.py): a value that no row
refuses on these ranks joins by itself, and so does an axis that a new row needs.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.config import DataWorld, ModelFacts, resolve
from slipstream.train.recipe import rehearse
from tests.dist.test_tensor import batch, build
from tests.pool import run
from tests.unit.test_config_refusals import OPTIMIZERS, PLANS, Config, disk, half, nested

BASE: Config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer.type": "AdamW",
    "optimizer.params": {"lr": 1e-3},
}
APART = {  # axes that need more than a model and its batches, or change what it computes
    "device": "these ranks have CPUs",
    "saves": "folders",
    "noise": "monitors",
    "curriculum": "shorter sequences",
    "data efficiency": "metrics of samples, fewer tokens",
    "compile": "a minute for each row",
    "curvature": "layers that lose bits",
}
# Values that the tables accept, and the model of four experts refuses
UNFIT = ({"optimizer.type": "OneBitLamb"}, {"expert_parallel.enabled": True, "expert_parallel.autoep_size": 8})
MORE: Mapping[str, tuple[Config, ...]] = {  # values that no row is about
    "optimizer": ({"optimizer.type": "Muon"},),
    "wire": (
        {"communication_data_type": "int8"},
        {"zero_optimization.zero_quantized_gradients": True, "zero_optimization.zeropp_loco_param.err_beta": 0.5},
        {"zero_optimization.zero_quantized_weights": True},
    ),
    "rounding": (half("bf16") | {"slipstream.stochastic_rounding": True},),
    "weights' home": (disk("param", max_in_cpu=0),),
    "schedule": tuple({"slipstream.pipeline.schedule": name} for name in ("1f1b", "gpipe", "zero_bubble", "v")),
    "micro-batches": ({"gradient_accumulation_steps": 2}, {}),
}
Row = tuple[int, ...]  # of each axis, the number of its value
Pair = tuple[tuple[int, int], ...]


def refusal(config: Config) -> str:
    """What the tables say about the settings; "" if they accept them."""
    facts = ModelFacts(device_type="cpu", supports_bf16=True)
    try:
        rehearse(resolve(nested(BASE | config), world=DataWorld(ranks=4), facts=facts))
    except ValueError as error:
        return str(error)
    return ""


def accepted(values: Sequence[Config]) -> tuple[Config, ...]:
    """Those that the tables accept without others; the first one is the default."""
    return tuple(value for value in values if value not in UNFIT and not refusal({"zero_optimization.stage": 3} | value))


def axes() -> list[tuple[Config, ...]]:
    """The axes with several values, ZeRO stage 3 as the default."""
    known = {**PLANS, **OPTIMIZERS, "stage": PLANS["stage"][::-1], "optimizer": ({}, *OPTIMIZERS["optimizer"])}
    names = [name for name in dict.fromkeys((*known, *MORE)) if name not in APART]
    every = [accepted((*known.get(name, ()), *MORE.get(name, ()))) for name in names]
    return [values for values in every if len(values) > 1]


class Table:
    """The axes, and rows over them."""

    def __init__(self) -> None:
        self.axes = axes()
        self.known: dict[Row, str] = {}

    def config(self, row: Row) -> Config:
        merged: Config = {}
        for values, i in zip(self.axes, row, strict=True):
            merged |= values[i]
        return merged

    def refusal(self, row: Row) -> str:
        if row not in self.known:
            config = self.config(row)
            values = (values[i] for values, i in zip(self.axes, row, strict=True))
            differs = any(config[key] != given for value in values for key, given in value.items())
            self.known[row] = "two of the values set one key" if differs else refusal(config)
        return self.known[row]

    def alone(self, pair: Pair) -> Row:
        """The row of a pair, with the defaults of all other axes."""
        return tuple(dict(pair).get(i, 0) for i in range(len(self.axes)))

    def every_pair(self) -> list[Pair]:
        values = [[(i, number) for number in range(len(axis))] for i, axis in enumerate(self.axes)]
        return [(one, other) for first, second in combinations(values, 2) for one in first for other in second]

    def cover(self) -> Iterator[Row]:
        """Accepted rows that cover every pair of values that is accepted on its own.

        Greedy: starts from the row of the first missing pair, and changes one axis after another to the value that meets most
        others.
        """
        missing = dict.fromkeys(pair for pair in self.every_pair() if not self.refusal(self.alone(pair)))

        def gained(row: Row) -> int:
            return len(pairs_of(row) & missing.keys())

        while missing:
            pair = next(iter(missing))
            row = self.alone(pair)
            for i, values in enumerate(self.axes):
                rows = [] if i in dict(pair) else [(*row[:i], number, *row[i + 1 :]) for number in range(len(values))]
                better = sorted((each for each in rows if gained(each) > gained(row)), key=gained, reverse=True)
                row = next((each for each in better if not self.refusal(each)), row)
            for met in pairs_of(row):
                missing.pop(met, None)
            yield row

    def draw(self, seed: int) -> Row:
        """An accepted row: every axis takes a value by chance, if the tables accept it beside those of the axes before it."""
        chance, row = random.Random(seed), self.alone(())
        for i in chance.sample(range(len(self.axes)), len(self.axes)):
            changed = (*row[:i], chance.randrange(len(self.axes[i])), *row[i + 1 :])
            row = row if self.refusal(changed) else changed
        return row


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(enumerate(row), 2))


def train(configs: Sequence[Config]) -> None:
    """On four ranks: the first loss is the model's, the norms agree, and the weights move."""
    for config in configs:
        raw = nested(BASE | config)
        model = partial(build, "mixtral" if "expert_parallel" in raw else "llama", num_hidden_layers=4)  # a V has four stages
        engine = slipstream.initialize(model=model(), config=raw)[0]
        replica, before, staged = engine.mesh.batch.index, engine.state_dict(), engine.mesh.pp.size > 1
        for step in range(2):
            micros = [batch(step, 2 * replica + i) for i in range(engine.plan.batch.accumulation)]
            if staged:
                losses = [engine.train_batch(iter(micros))]
            else:
                losses = []
                for micro in micros:
                    losses.append(engine(**micro, use_cache=False).loss)
                    engine.backward(losses[-1])
                    engine.step()
            assert bool(torch.stack(losses).detach().isfinite().all()), config
            if step == 0 and not staged:
                expected = [float(model()(**micro, use_cache=False).loss.detach()) for micro in micros]
                assert [float(loss.detach()) for loss in losses] == pytest.approx(expected, rel=2e-2), config
        norms = [None] * 4
        dist.all_gather_object(norms, engine.global_grad_norm)
        assert engine.plan.local_steps.every or len(set(norms)) == 1, (config, norms)
        after = engine.state_dict()
        assert all(bool(value.isfinite().all()) for value in after.values()), config
        moved = any(not torch.equal(before[name], value) for name, value in after.items())
        assert moved or engine.skipped_steps == 2, config  # a loss scale that is too large at first
        engine.destroy()


@pytest.mark.parametrize("first", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_some_rows_train(first: int) -> None:
    """A row has a pair of each two axes."""
    table = Table()
    rows = [table.draw(seed) for seed in range(first, first + 6)]
    assert len(set().union(*map(pairs_of, rows))) > len(table.every_pair()) / 5
    run(4, train, [table.config(row) for row in rows])


@pytest.mark.slow
def test_every_accepted_pair_trains() -> None:
    table = Table()
    rows = list(table.cover())
    covered = set().union(*map(pairs_of, rows))
    assert not [pair for pair in table.every_pair() if pair not in covered and not table.refusal(table.alone(pair))]
    assert len(rows) < 200 and not any(map(table.refusal, rows))
    run(4, train, [table.config(row) for row in rows], timeout=600)
