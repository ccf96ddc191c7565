"""Elastic batch sizes: DeepSpeed's own figures, properties of random blocks, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.compat.launcher import elastic as ds_elastic
from slipstream.config import DataWorld, ModelFacts, Plan, resolve
from slipstream.config.elastic import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)

FACTS = ModelFacts(device_type="cpu", supports_bf16=True)
# DeepSpeed's example (docs/_tutorials, tests/unit/elasticity): 23 counts of ranks for batches up to 10,000
EXAMPLE = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}
LITTLE = {"enabled": True, "max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3], "version": 0.1}


def computed(block: dict[str, Any], *args: Any, version: str = "0.19.6", **kwargs: Any) -> tuple[Any, ...]:
    return compute_elastic_config({"elasticity": block}, version, *args, **kwargs)


def planned(block: dict[str, Any], ranks: int, **raw: Any) -> Plan:
    return resolve({"elasticity": block} | raw, world=DataWorld(ranks=ranks), facts=FACTS)


def test_deepspeeds_figures() -> None:
    batch, counts = computed(EXAMPLE)
    assert (batch, len(counts)) == (9792, 23)
    assert all(any(batch // count % micro == 0 for micro in (8, 12, 16, 17)) and batch % count == 0 for count in counts)
    assert computed(EXAMPLE, world_size=64) == (batch, counts, 17)
    assert computed(LITTLE | {"micro_batch_sizes": [1, 2, 3, 7]})[0] == 24  # not 42, their least common multiple, which is above 32
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"128 data-parallel ranks do not divide the batch of 9792"):
        computed(EXAMPLE, world_size=128)


def test_nodes_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.2 is version 0.1 over nodes, and where a count is not valid, the largest batch that this count divides."""
    base = {"enabled": True, "micro_batch_sizes": [2, 4], "version": 0.1, "max_train_batch_size": 25, "max_gpus": 16}
    nodes = base | {"version": 0.2, "max_train_batch_size": 100, "num_gpus_per_node": 8, "model_parallel_size": 2, "max_gpus": 128}
    batch, counts = computed(base)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert computed(nodes)[:2] == (4 * batch, [4 * count for count in counts])
    assert computed(nodes, return_microbatch=True)[2] == 4  # 96 samples for 8 replicas of 2 ranks are 12 each
    monkeypatch.setenv("WORLD_SIZE", "40")
    assert computed(nodes, return_microbatch=True) == (80, [20], 4)  # 20 replicas: 20 x 4, or 20 x 2 x 2


@pytest.mark.parametrize("seed", range(6))
def test_a_random_block(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        micros = draw.sample(range(1, 12), draw.randint(1, 3))
        most = draw.randint(max(micros), 600)
        block = {"enabled": True, "max_train_batch_size": most, "micro_batch_sizes": micros, "version": draw.choice((0.1, 0.2))}
        ranks = draw.randint(1, 16)
        if block["version"] == 0.2 and min(micros) * ranks > most:
            continue
        batch, counts, *_ = computed(block, **({} if block["version"] == 0.1 else {"world_size": ranks}))
        assert 0 < batch <= most
        for count in counts:
            assert any(batch % (count * micro) == 0 for micro in micros)
        if block["version"] == 0.1:
            assert counts == [n for n in range(1, batch + 1) if any(batch % (n * micro) == 0 for micro in micros)]
            smaller = computed(block | {"prefer_larger_batch": False})
            assert len(smaller[1]) == len(counts) and smaller[0] <= batch


def test_elasticity() -> None:
    """The block's keys, through the plan: the global batch stays, accumulation follows the number of ranks."""
    sizes = {ranks: planned(LITTLE, ranks).batch for ranks in (1, 2, 4, 8)}
    assert {batch.train_batch_size for batch in sizes.values()} == {24}
    for ranks, batch in sizes.items():
        assert batch.micro_batch_size * batch.accumulation * ranks == 24
    assert [batch.micro_batch_size for batch in sizes.values()] == [3, 3, 3, 3]
    assert planned(LITTLE | {"max_train_batch_size": 16}, 2).batch.train_batch_size == 12
    assert planned(LITTLE | {"micro_batch_sizes": [2]}, 2).batch.micro_batch_size == 2
    assert planned(LITTLE | {"version": 0.2}, 5).batch.train_batch_size == 30  # 0.1 has no batch for five ranks
    even = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], "version": 0.1}
    assert [planned(even | {"prefer_larger_batch": large}, 2).batch.train_batch_size for large in (True, False)] == [8, 6]
    for key, value in (("min_gpus", 4), ("max_gpus", 1)):
        with pytest.raises(ElasticityIncompatibleWorldSize, match="2 data-parallel ranks"):
            planned(LITTLE | {key: value}, 2)
    sliced = {"slipstream": {"mesh": {"tp": 2}}}
    two = LITTLE | {"version": 0.2, "num_gpus_per_node": 4, "model_parallel_size": 2}
    assert planned(two, 4, **sliced).batch.train_batch_size == planned(two, 8, **sliced).batch.train_batch_size == 24
    with pytest.raises(ValueError, match=r"model_parallel_size is 1, but one replica .* = 2 ranks; set it to 2"):
        planned(LITTLE | {"version": 0.2}, 4, **sliced)
    with pytest.raises(ElasticityConfigError, match="computes the batch sizes, but the config has train_batch_size"):
        planned(LITTLE, 2, train_batch_size=64)
    assert planned(LITTLE | {"ignore_non_elastic_batch_info": True}, 2, train_batch_size=64).batch.train_batch_size == 24
    assert planned(LITTLE | {"enabled": False}, 2, train_batch_size=64).batch.train_batch_size == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enabled": False}, "no elasticity.enabled = true"),
        ({"max_train_batch_size": None}, "without max_train_batch_size"),
        ({"micro_batch_sizes": None}, "without micro_batch_sizes"),
        ({"micro_batch_sizes": []}, "without a size"),
        ({"micro_batch_sizes": 5}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [1, 4, -1, 2, -10]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": ["a", None, 0.5]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [2, 0.5, 4]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [20000]}, "above the largest batch"),
        ({"min_gpus": -1}, "min_gpus"),
        ({"max_gpus": -1}, "max_gpus"),
        ({"max_gpus": 31}, r"max_gpus \(31\) is below min_gpus \(32\)"),
        ({"min_gpus": 9000, "max_gpus": 9001}, "on 9000 to 9001 ranks; widen min_gpus and max_gpus"),
        ({"version": 0.3}, "version 0.3 does not exist"),
        ({"version": 0.2}, r"pass world_size .*, or set the variable WORLD_SIZE"),
        ({"model_parallel_size": 2}, "version 0.1 has no model parallelism"),
        ({"max_train_batch": 10}, "max_train_batch_size"),
    ],
)
def test_a_block_that_is_not_valid(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityError, match=message):
        computed(EXAMPLE | change)


def test_other_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ElasticityError, match=r"DeepSpeed 0\.2 has no elasticity"):
        computed(EXAMPLE, version="0.2")
    two = LITTLE | {"version": 0.2}
    with pytest.raises(ElasticityError, match=r"num_gpus_per_node \(8\) is not a multiple of model_parallel_size \(16\)"):
        computed(two | {"num_gpus_per_node": 8, "model_parallel_size": 16}, world_size=16)
    with pytest.raises(ElasticityError, match="a micro-batch of 1 on each of 40 data-parallel ranks is above max_train_batch_size"):
        computed(two, world_size=40)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(LITTLE | {"max_train_batch_size": 64}))
    with pytest.raises(ElasticityConfigError, match=r"elasticity\.max_train_batch_size is 32, and .* has 64"):
        planned(LITTLE, 2)


def test_ds_elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"elasticity": LITTLE}))
    monkeypatch.setattr(sys, "argv", ["ds_elastic", "-c", str(path), "-w", "4"])
    assert ds_elastic() == 0
    lines = capsys.readouterr().out
    assert (
        "final_batch_size .... 24\nvalid_gpus .......... [1, 2, 3, 4, 6, 8, 12, 24]" in lines and "micro_batch_size .... 3" in lines
    )
    monkeypatch.setattr(sys, "argv", ["ds_elastic", "-c", str(path), "-w", "5"])
    assert ds_elastic() == 2 and "5 data-parallel ranks" in capsys.readouterr().err
