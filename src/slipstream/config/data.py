"""Blocks of DeepSpeed's JSON about data and what of it is computed: curricula, random-LTD, dynamic batches, layer dropping.

The rules are those of `schema.py`.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

from typing import Literal

from slipstream.config.keys import Feature
from slipstream.config.values import Block, Count, Fraction, Number, Positive, Seed, Size, Word, honored, no_effect, switch


class LengthSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until max_difficulty (fixed_linear, fixed_root).")
    difficulty_step: Count | None = honored(None, "Lengths are multiples of it (fixed_linear, fixed_root).")
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).")
    difficulty: list[Count] | None = honored(None, "Lengths, in order (fixed_discrete).")
    max_step: list[Count] | None = honored(None, "The last step of each length but the last one (fixed_discrete).")


class Curriculum(Block):
    """The older, top-level block, whose difficulty is the sequence length."""

    enabled: bool = honored(False, "Train on the first tokens of each sequence, more of them as training goes on.")
    curriculum_type: Word[Literal["seqlen"]] = honored("seqlen", "What becomes more difficult: the sequences' length.")
    min_difficulty: Count = honored(1, "Tokens at the beginning.")
    max_difficulty: Count | None = honored(None, "Tokens at last.")
    schedule_type: str = honored("fixed_linear", "fixed_linear, fixed_root, fixed_discrete, or custom: a function.")
    schedule_config: LengthSchedule = LengthSchedule()


class CurriculumSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until max_difficulty (fixed_linear, fixed_root).")
    difficulty_step: Count | None = honored(None, "Difficulties are multiples of it (fixed_linear, fixed_root).")
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).")
    difficulty: list[Number] | None = honored(None, "Difficulties, in order (fixed_discrete).")
    max_step: list[Count] | None = honored(None, "The last step of each difficulty but the last one (fixed_discrete).")


class CurriculumMetric(Block):
    index_to_sample_path: str | None = honored(None, "The samples of each value, a file of `DataAnalyzer` without .idx.")
    index_to_metric_path: str | None = honored(None, "The values, likewise (difficulty_type value).")
    difficulty_type: Word[Literal["value", "percentile"]] = honored(
        "value", "value: samples of at most the difficulty; percentile: the first difficulty / max_difficulty of them."
    )
    clustering_type: Word[Literal["single_cluster", "schedule_based"]] = honored(
        "single_cluster", "single_cluster: the metric selects no samples, its difficulty is only told to a function."
    )
    min_difficulty: Number = honored(1, "The difficulty at the beginning.")
    max_difficulty: Number | None = honored(None, "The difficulty at last.")
    schedule_type: str = honored("fixed_root", "fixed_linear, fixed_root, fixed_discrete, or custom: a function.")
    schedule_config: CurriculumSchedule = CurriculumSchedule()


class DataCurriculum(Block):
    enabled: bool = honored(False, "Draw samples that are easy enough for the step.")
    data_cluster_path: str | None = no_effect(None, "the order of samples is a function of seed and step; no files are written")
    curriculum_metrics: dict[str, CurriculumMetric] = {}


class DynamicBatching(Block):
    enabled: bool = honored(False, "Fill micro-batches by tokens, with learning rates scaled by the number of samples.")
    metrics_path: str | None = honored(None, "Folder of `DataAnalyzer`, with lengths of samples as metric `seqlen`.")
    lr_scaling_method: Word[Literal["linear", "sqrt", "none"]] = honored(
        "linear", "The rate's factor: samples of the batch over train_batch_size, its square root, or 1."
    )
    min_batch_size: Count = honored(1, "The fewest samples of a micro-batch.")
    max_batch_size: Count | None = honored(None, "The most samples of a micro-batch; not set: as many as have room.")
    sequence_picking_order: Word[Literal["dataloader", "random", "seqlen"]] = honored(
        "dataloader", "The order in which samples fill micro-batches: the dataset's, shuffled once, or by length."
    )
    max_tokens: Count | None = honored(None, "The most tokens of a micro-batch, to be set; longer samples are left out.")
    verbose: bool = honored(False, "Log the batches and the learning rates.")


class DataSampling(Block):
    enabled: bool = honored(False, "Allow the blocks in it.")
    num_epochs: Count = honored(1000, "Samples of one iteration of the loader, in sizes of the dataset.")
    num_workers: Size = honored(0, "Processes that read samples; 0: the rank itself reads them.")
    pin_memory: bool = no_effect(False, "batches are pinned if the device is a GPU")
    curriculum_learning: DataCurriculum = DataCurriculum()
    dynamic_batching: DynamicBatching = DynamicBatching()


class LtdScheduleConfig(Block):
    require_steps: Count | None = honored(None, "Steps until max_value.")
    seq_per_step: Count | None = honored(None, "Numbers of tokens are multiples of it.")


class LtdSchedule(Block):
    min_value: Count | None = honored(None, "Tokens that a layer computes at the beginning.")
    max_value: Count | None = honored(None, "Tokens at last: all.")
    schedule_type: Word[Literal["fixed_linear"]] = honored("fixed_linear", "How the number grows by the step.")
    schedule_config: LtdScheduleConfig = LtdScheduleConfig()


class LayerTokenLr(Block):
    feature = Feature("a learning rate by tokens of layers, which DeepSpeed has not either", "use a schedule of steps")
    enabled: bool = switch()
    total_layer_tokens: Size | None = None
    warmup_type: str | None = None
    warmup_layer_tokens: Size | None = None


_ENGINES = "the engine knows its batch sizes"


class RandomLtd(Block):
    enabled: bool = honored(False, "Let layers compute a random part of the tokens in training (random-LTD).")
    total_layer_num: Count | None = honored(None, "Layers of the model.")
    random_ltd_layer_num: Count | None = honored(None, "Layers that drop tokens; the number of `random_ltd_layer_id`.")
    random_ltd_layer_id: list[Size] = honored([], "Which layers drop tokens, from 0.")
    model_mask_name: str | None = honored(None, "A mask argument that each call of a layer must have.")
    model_type: Word[Literal["encoder", "decoder"]] = no_effect(
        "decoder", "tokens keep their order, and masks follow them in encoders and decoders"
    )
    hidden_state_order: Word[Literal["batch_seq_dim", "seq_batch_dim"]] = honored(
        "batch_seq_dim", "The order of dimensions of hidden states."
    )
    global_batch_size: Size | None = no_effect(None, _ENGINES)
    micro_batch_size: Size | None = no_effect(None, _ENGINES)
    random_ltd_schedule: LtdSchedule = LtdSchedule()
    layer_token_lr_schedule: LayerTokenLr = LayerTokenLr()


class DataRouting(Block):
    enabled: bool = honored(False, "Allow `random_ltd`.")
    random_ltd: RandomLtd = RandomLtd()


class DataEfficiency(Block):
    enabled: bool = honored(False, "Allow the blocks in it.")
    seed: Seed = honored(1234, "Seed of the order of samples and of dropped tokens.")
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()


class ProgressiveLayerDrop(Block):
    enabled: bool = honored(False, "Skip residual blocks in training, more of them as it goes on.")
    theta: Fraction = honored(1.0, "Probability of keeping the deepest block at last; 1 keeps all.")
    gamma: Positive = honored(0.001, "Rate per step at which theta falls from 1.")
