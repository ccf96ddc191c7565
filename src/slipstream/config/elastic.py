"""Elastic batch sizes: the block `elasticity`, with the results of DeepSpeed's versions 0.1 and 0.2.

A run that is restarted on another number of ranks keeps its global batch if that batch divides into micro-batches on many counts of
ranks. Both versions search for such a batch among multiples of each micro-batch size and of their least common multiple. The factor
is the largest highly composite number that stays within the largest batch. The candidate with the most valid counts wins. Version
0.2 counts whole nodes; if a count is not valid, it falls back to the largest batch that this count divides.
Source: DeepSpeed's `compute_elastic_config` at c5601dbe (its algorithm and names; 0.19.6 also took a common multiple above the
largest batch, and divided by ranks instead of replicas).
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from slipstream.config.features import Elasticity

# Each has more divisors than any smaller number (OEIS A002182)
_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160, 25200),
    *(27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
_OLDEST = (0, 3, 8)  # the oldest DeepSpeed version with elasticity
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SCHEDULERS = "DEEPSPEED_ELASTICITY_CONFIG"  # environment variable: the block that a scheduler has seen, as JSON


class ElasticityError(ValueError):
    """No elastic batch fits."""


class ElasticityConfigError(ElasticityError):
    """The block `elasticity` is not valid."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch does not divide on this number of ranks."""


class ElasticBatch(NamedTuple):
    train: int  # samples per step over all ranks
    counts: list[int]  # numbers of data-parallel ranks on which `train` divides into a micro-batch size
    micro: int | None = None  # version 0.2: for the present ranks


def elastic_batch(block: Elasticity, ranks: int) -> ElasticBatch:
    """The batch of an elastic job. ranks: of the whole job, including model parallelism; version 0.1 ignores it.

    Raises ElasticityError if no batch of at most `max_train_batch_size` fits.
    """
    missing = [name for name in ("max_train_batch_size", "micro_batch_sizes") if name not in block.model_fields_set]
    if missing or not block.micro_batch_sizes:
        what = missing[0] if missing else "a size in micro_batch_sizes"
        raise ElasticityConfigError(f"elasticity is enabled without {what}; set it")
    if block.max_gpus < block.min_gpus:
        raise ElasticityConfigError(f"elasticity.max_gpus ({block.max_gpus}) is below min_gpus ({block.min_gpus}); swap them")
    if block.version not in (0.1, 0.2):
        raise ElasticityConfigError(f"elasticity.version {block.version:g} does not exist; use 0.1 or 0.2")
    if block.version == 0.2:
        return _by_nodes(block, ranks)
    if block.model_parallel_size > 1:
        raise ElasticityConfigError(
            f"elasticity.version 0.1 has no model parallelism (model_parallel_size {block.model_parallel_size}); use version 0.2"
        )
    return ElasticBatch(*_best(block, block.max_train_batch_size, block.min_gpus, block.max_gpus))


def largest_micro(block: Elasticity, train: int, ranks: int) -> int:
    """The largest micro-batch size that divides the batch on a valid count of ranks."""
    return max(micro for micro in block.micro_batch_sizes if train // ranks % micro == 0)


def check_count(batch: ElasticBatch, ranks: int) -> None:
    if ranks not in batch.counts:
        near = sorted(batch.counts, key=lambda count: (abs(count - ranks), count))[:8]
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {ranks} data-parallel ranks do not divide the batch of {batch.train} into a micro-batch size; the "
            f"nearest valid counts are {', '.join(map(str, sorted(near)))}; version 0.2 has a batch for every count"
        )


def check_stated(block: Elasticity, given: Iterable[str]) -> None:
    """Raise ElasticityConfigError if the config also states the batch sizes, which the block computes."""
    stated = [name for name in BATCH_KEYS if name in set(given)]
    if stated and not block.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"elasticity is enabled and computes the batch sizes, but the config has {' and '.join(stated)}; drop these, or set "
            "elasticity.ignore_non_elastic_batch_info to true"
        )


def _best(block: Elasticity, largest: int, least: int, most: int) -> tuple[int, list[int]]:
    """The candidate batch with the most valid counts, and these counts."""
    micros = block.micro_batch_sizes
    least, most = least or 1, most or largest // min(micros)
    if max(micros) > largest:
        raise ElasticityError(
            f"elasticity.micro_batch_sizes has {max(micros)}, above the largest batch ({largest} samples of max_train_batch_size "
            f"{block.max_train_batch_size} for {block.num_gpus_per_node} ranks a node); drop it, or allow a larger batch"
        )
    bases = [base for base in (*micros, math.lcm(*micros)) if base <= largest]
    batches = {base * _COMPOSITE[bisect_right(_COMPOSITE, largest // base) - 1] for base in bases}
    valid = {batch: _valid_counts(batch, micros, least, most) for batch in batches}
    sign = 1 if block.prefer_larger_batch else -1
    batch = max(batches, key=lambda batch: (len(valid[batch]), sign * batch))
    if not valid[batch]:
        raise ElasticityError(
            f"elasticity: none of the batches {sorted(batches)} divides into micro-batches of {micros} on {least} to {most} "
            f"{'nodes' if block.version == 0.2 else 'ranks'}; widen min_gpus and max_gpus, or max_train_batch_size"
        )
    return batch, valid[batch]


def _valid_counts(batch: int, micros: Sequence[int], least: int, most: int) -> list[int]:
    parts = [batch // micro for micro in micros if batch % micro == 0]
    counts = {count for part in parts for low in range(1, math.isqrt(part) + 1) if part % low == 0 for count in (low, part // low)}
    return sorted(count for count in counts if least <= count <= most)


def _by_nodes(block: Elasticity, ranks: int) -> ElasticBatch:
    per_node, left = divmod(block.num_gpus_per_node, block.model_parallel_size)
    if left:
        raise ElasticityError(
            f"elasticity.num_gpus_per_node ({block.num_gpus_per_node}) is not a multiple of model_parallel_size "
            f"({block.model_parallel_size}): change one of them"
        )
    nodes, most = block.num_gpus_per_node, block.max_train_batch_size
    batch, counts = _best(block, most // per_node, block.min_gpus // nodes, block.max_gpus // nodes)
    batch, counts = batch * per_node, [count * per_node for count in counts]
    replicas = max(1, ranks // block.model_parallel_size)
    if replicas not in counts:
        fitting = [size for micro in block.micro_batch_sizes if (size := most // (micro * replicas) * micro * replicas)]
        if not fitting:
            raise ElasticityError(
                f"elasticity: a micro-batch of {min(block.micro_batch_sizes)} on each of {replicas} data-parallel ranks is above "
                f"max_train_batch_size ({most}); use fewer ranks, or allow a larger batch"
            )
        batch, counts = max(fitting) if block.prefer_larger_batch else min(fitting), [replicas]
    micros = [micro for micro in block.micro_batch_sizes if batch // replicas % micro == 0]
    return ElasticBatch(batch, counts, max(micros) if block.prefer_larger_batch else micros[0])


# DeepSpeed's functions, on the config as a dictionary


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """Return (batch size, valid data-parallel counts[, micro-batch size]); the last with `world_size` or `return_microbatch`.

    Version 0.2 needs a number of ranks: `world_size`, or the environment's WORLD_SIZE. Raises ElasticityError.
    """
    if not isinstance(ds_config, Mapping):
        raise ElasticityConfigError(f"the config must be a dictionary, got {type(ds_config).__name__}; load the JSON file first")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("the config has no elasticity.enabled = true; set it")
    version = tuple(int(part) for part in re.findall(r"\d+", target_deepspeed_version.partition("+")[0]))
    if version < _OLDEST:
        raise ElasticityError(f"DeepSpeed {target_deepspeed_version} has no elasticity; the oldest version with it is 0.3.8")
    from slipstream.config.parse import parse  # pydantic is slow to import

    try:
        block = parse({"elasticity": ds_config["elasticity"]}).config.elasticity
    except ValueError as error:
        raise ElasticityConfigError(str(error)) from None
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "0").strip() or 0)
    if not ranks and (block.version == 0.2 or return_microbatch):
        raise ElasticityConfigError(
            "elasticity needs the number of ranks: pass world_size (ds_elastic -w N), or set the variable WORLD_SIZE"
        )
    batch = elastic_batch(block, ranks)
    if not world_size and not return_microbatch:
        return batch.train, batch.counts
    if not world_size and block.version == 0.2:
        return batch
    check_count(batch, ranks)
    return batch.train, batch.counts, largest_micro(block, batch.train, ranks)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise ElasticityConfigError if the block differs from the scheduler's, in the variable DEEPSPEED_ELASTICITY_CONFIG."""
    if SCHEDULERS not in os.environ:
        return
    seen = json.loads(os.environ[SCHEDULERS])
    defaults = {"version": 0.2}
    for name in ("max_train_batch_size", "micro_batch_sizes", "version"):
        now, then = (block.get(name, defaults.get(name)) for block in (runtime_elastic_config_dict, seen))
        if now != then:
            raise ElasticityConfigError(
                f"elasticity.{name} is {now!r}, and {SCHEDULERS} has {then!r}: restart with the same config"
            )
