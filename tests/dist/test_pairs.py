"""Pairs of settings that the tables accept: each trains, at any mesh of four ranks, and none is refused later."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.config import DataWorld, ModelFacts, resolve
from slipstream.train import rehearse
from tests.dist.test_tensor import batch, build, settings
from tests.pool import distributed

Blocks = dict[str, Any]
BF16 = {"bf16": {"enabled": True}}
# Axes of settings: the first value of each is the default.
AXES: dict[str, dict[str, Blocks]] = {
    "mesh": {
        "dp": {},
        "pp": {"slipstream.mesh": {"pp": 2}, "gradient_accumulation_steps": 2},
        "sp": {"slipstream.mesh": {"sp": 2}},
        "tp": {"slipstream.mesh": {"tp": 2}},
        "shares": {"slipstream.mesh": {"tp": 2}, "slipstream.tensor": {"sequence_parallel": True}},
        "ep": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    },
    "stage": {str(stage): {"zero_optimization.stage": stage} for stage in (3, 0, 1, 2)},
    "optimizer": {
        name: {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
        for name in ("AdamW", "LAMB", "Lion", "RMSprop", "OneBitAdam", "Muon")
    },
    "wire": {
        "plain": {},
        "int8": {"communication_data_type": "int8"},
        "int4": {"zero_optimization.zero_quantized_gradients": True, "zero_optimization.zeropp_loco_param": {"err_beta": 0.5}},
        "weights": {"zero_optimization.zero_quantized_weights": True},
        "rows": {"sparse_gradients": True},
    },
    "groups": {
        "none": {},
        "mics": {"zero_optimization.mics_shard_size": 2},
        "hpz": {"zero_optimization.zero_hpz_partition_size": 2},
    },
    "form": {
        "fp32": {},
        "bf16": BF16,
        "int8": {"slipstream.optimizer_states": "int8"},
        "rounded": {**BF16, "slipstream.stochastic_rounding": True},
    },
    "run": {"shared": {}, "gloo": {"slipstream.transport": "gloo"}, "apart": {"slipstream.local_steps": {"every": 2}}},
}
Row = tuple[str, ...]


def config_of(row: Row) -> Blocks:
    raw: Blocks = settings(0)
    for values, name in zip(AXES.values(), row, strict=True):
        for path, value in values[name].items():
            block, _, key = path.rpartition(".")
            (raw.setdefault(block, {}) if block else raw)[key] = value
    return raw


def refusal(row: Row) -> str:
    """What the tables say about the settings; "" if they accept them."""
    facts = ModelFacts(device_type="cpu", supports_bf16=True)
    try:
        rehearse(resolve(config_of(row), world=DataWorld(ranks=4), facts=facts))
    except ValueError as error:
        return str(error)
    return ""


def pairs_of(row: Row) -> set[tuple[tuple[int, str], ...]]:
    return set(combinations(enumerate(row), 2))


def alone(pair: tuple[tuple[int, str], ...]) -> Row:
    """The row of a pair, with the defaults of all other axes."""
    return tuple(dict(pair).get(i, next(iter(values))) for i, values in enumerate(AXES.values()))


def cover() -> Iterator[Row]:
    """Accepted rows that cover every pair of values that is accepted on its own. Greedy, as `cases.pairs`."""
    rows = list(product(*AXES.values()))
    refused = {pair for pair in set().union(*map(pairs_of, rows)) if refusal(alone(pair))}
    met = {row: pairs for row in rows if not (pairs := pairs_of(row)) & refused}
    missing = set().union(*met.values())
    while missing:
        row = max(met, key=lambda row: len(met[row] & missing))
        gained = met.pop(row) & missing
        assert gained, missing
        if not refusal(row):
            missing -= gained
            yield row


@pytest.mark.slow
def test_a_pair_is_refused_or_covered() -> None:
    rows = list(cover())
    covered = set().union(*map(pairs_of, rows))
    every = set().union(*(set(product([(i, a) for a in one], [(j, b) for b in other]))
        for (i, one), (j, other) in combinations(enumerate(AXES.values()), 2)))  # fmt: skip
    assert all(bool(refusal(alone(pair))) is (pair not in covered) for pair in every)
    assert len(rows) < 80 and not any(map(refusal, rows))


@pytest.mark.slow
@distributed(world_size=4, timeout=600)
def test_an_accepted_pair_trains() -> None:
    """The first loss is the model's, the norms agree, and the weights move."""
    for row in cover():
        kind = "mixtral" if row[0] == "ep" else "llama"
        engine = slipstream.initialize(model=build(kind), config=config_of(row))[0]
        replica, before = engine.mesh.batch.index, engine.state_dict()
        for step in range(2):
            if row[0] == "pp":
                micros = [batch(step, 2 * replica + i) for i in range(2)]
                loss, expected = engine.train_batch(iter(micros)), float("nan")
            else:
                loss = engine(**batch(step, replica), use_cache=False).loss
                engine.backward(loss)
                engine.step()
                expected = float(build(kind)(**batch(step, replica), use_cache=False).loss.detach()) if step == 0 else float("nan")
            assert bool(torch.as_tensor(loss).detach().isfinite().all()), row
            if expected == expected:
                assert float(loss.detach()) == pytest.approx(expected, rel=2e-2), row
        norms = [None] * 4
        dist.all_gather_object(norms, engine.global_grad_norm)
        assert row[-1] == "apart" or len(set(norms)) == 1, (row, norms)
        after = engine.state_dict()
        assert all(bool(value.isfinite().all()) for value in after.values()), row
        assert any(not torch.equal(before[name], value) for name, value in after.items()), row
        engine.destroy()
