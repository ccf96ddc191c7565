"""Pairs of settings that the tables accept: each trains, at any mesh of four ranks, and none is refused later."""

import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import combinations
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
DISK = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
# Axes of settings: the first value of each is the default.
AXES: dict[str, dict[str, Blocks]] = {
    "mesh": {
        "dp": {},
        "pp": {"slipstream.mesh": {"pp": 2}},
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
    "rest": {
        "memory": {},
        "optimizer": {"zero_optimization.offload_optimizer": DISK},
        "weights": {"zero_optimization.offload_param": {**DISK, "max_in_cpu": 0}},
        "part": {"zero_optimization.offload_optimizer": {**DISK, "ratio": 0.5}},
    },
    "schedule": {
        name: {"slipstream.pipeline": {"schedule": name}, "gradient_accumulation_steps": 2}
        for name in ("1f1b", "gpipe", "zero_bubble", "v")
    },
    "run": {"shared": {}, "gloo": {"slipstream.transport": "gloo"}, "apart": {"slipstream.local_steps": {"every": 2}}},
}
Row = tuple[str, ...]
Pair = tuple[tuple[int, str], ...]


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


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(enumerate(row), 2))


def every_pair() -> list[Pair]:
    values = [[(i, name) for name in axis] for i, axis in enumerate(AXES.values())]
    return [(one, other) for first, second in combinations(values, 2) for one in first for other in second]


def alone(pair: Pair) -> Row:
    """The row of a pair, with the defaults of all other axes."""
    return tuple(dict(pair).get(i, next(iter(values))) for i, values in enumerate(AXES.values()))


def cover() -> Iterator[Row]:
    """Accepted rows that cover every pair of values that is accepted on its own.

    Greedy: starts from the row of the first missing pair, and changes one axis after another to the value that meets most others.
    """
    missing = dict.fromkeys(pair for pair in every_pair() if not refusal(alone(pair)))

    def gained(row: Row) -> int:
        return len(pairs_of(row) & missing.keys())

    while missing:
        pair = next(iter(missing))
        row = alone(pair)
        for i, values in enumerate(AXES.values()):
            rows = [] if i in dict(pair) else [(*row[:i], name, *row[i + 1 :]) for name in values]
            better = sorted((each for each in rows if gained(each) > gained(row)), key=gained, reverse=True)
            row = next((each for each in better if not refusal(each)), row)
        for met in pairs_of(row):
            missing.pop(met, None)
        yield row


@pytest.mark.slow
def test_a_pair_is_refused_or_covered() -> None:
    rows = list(cover())
    covered = set().union(*map(pairs_of, rows))
    assert not [pair for pair in every_pair() if pair not in covered and not refusal(alone(pair))]
    assert len(rows) < 80 and not any(map(refusal, rows))


@pytest.mark.slow
@distributed(world_size=4, timeout=600)
def test_an_accepted_pair_trains() -> None:
    """The first loss is the model's, the norms agree, and the weights move."""
    for row in cover():
        model = partial(build, "mixtral" if row[0] == "ep" else "llama", num_hidden_layers=4)  # a V has four stages
        engine = slipstream.initialize(model=model(), config=config_of(row))[0]
        replica, before = engine.mesh.batch.index, engine.state_dict()
        for step in range(2):
            micros = [batch(step, 2 * replica + i) for i in range(2)]
            if row[0] == "pp":
                losses = [engine.train_batch(iter(micros))]
            else:
                losses = []
                for micro in micros:
                    losses.append(engine(**micro, use_cache=False).loss)
                    engine.backward(losses[-1])
                    engine.step()
            assert bool(torch.stack(losses).detach().isfinite().all()), row
            if step == 0 and row[0] != "pp":
                expected = [float(model()(**micro, use_cache=False).loss.detach()) for micro in micros]
                assert [float(loss.detach()) for loss in losses] == pytest.approx(expected, rel=2e-2), row
        norms = [None] * 4
        dist.all_gather_object(norms, engine.global_grad_norm)
        assert row[-1] == "apart" or len(set(norms)) == 1, (row, norms)
        after = engine.state_dict()
        assert all(bool(value.isfinite().all()) for value in after.values()), row
        assert any(not torch.equal(before[name], value) for name, value in after.items()), row
        engine.destroy()
