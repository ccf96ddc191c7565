"""Blocks of DeepSpeed's JSON about data and what of it is computed: curricula, random-LTD, dynamic batches, layer dropping.

The rules are those of `schema.py`.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

from typing import Literal

from slipstream.config.keys import Feature
from slipstream.config.values import Block, Count, Fraction, Number, Positive, Seed, Size, Word, honored, no_effect, switch

_LENGTHS, _SCHEDULE = "test_sequences_grow", "test_difficulties_are_those_of_the_formulas"


class LengthSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until max_difficulty (fixed_linear, fixed_root).", _SCHEDULE)
    difficulty_step: Count | None = honored(None, "Lengths are multiples of it (fixed_linear, fixed_root).", _SCHEDULE)
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).", _SCHEDULE)
    difficulty: list[Count] | None = honored(None, "Lengths, in order (fixed_discrete).", _SCHEDULE)
    max_step: list[Count] | None = honored(None, "The last step of each length but the last one (fixed_discrete).", _SCHEDULE)


class Curriculum(Block):
    """The older, top-level block, whose difficulty is the sequence length."""

    enabled: bool = honored(False, "Train on the first tokens of each sequence, more of them as training goes on.", _LENGTHS)
    curriculum_type: Word[Literal["seqlen"]] = honored("seqlen", "What becomes more difficult: the sequences' length.", _LENGTHS)
    min_difficulty: Count = honored(1, "Tokens at the beginning.", _LENGTHS)
    max_difficulty: Count | None = honored(None, "Tokens at last.", _LENGTHS)
    schedule_type: str = honored("fixed_linear", "fixed_linear, fixed_root, fixed_discrete, or custom: a function.", _SCHEDULE)
    schedule_config: LengthSchedule = LengthSchedule()


_DRAWN, _RAMP, _BY_TOKENS = "test_the_loader_follows_the_config", "test_schedules_of_metrics", "test_batches_by_tokens_by_config"
_ROUTED, _TOKENS = "test_layers_compute_a_part_of_the_tokens", "test_the_number_of_tokens"


class CurriculumSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until max_difficulty (fixed_linear, fixed_root).", _RAMP)
    difficulty_step: Count | None = honored(None, "Difficulties are multiples of it (fixed_linear, fixed_root).", _RAMP)
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).", _RAMP)
    difficulty: list[Number] | None = honored(None, "Difficulties, in order (fixed_discrete).", _RAMP)
    max_step: list[Count] | None = honored(None, "The last step of each difficulty but the last one (fixed_discrete).", _RAMP)


class CurriculumMetric(Block):
    index_to_sample_path: str | None = honored(None, "The samples of each value, a file of `DataAnalyzer` without .idx.", _DRAWN)
    index_to_metric_path: str | None = honored(None, "The values, likewise (difficulty_type value).", _DRAWN)
    difficulty_type: Word[Literal["value", "percentile"]] = honored(
        "value", "value: samples of at most the difficulty; percentile: the first difficulty / max_difficulty of them.", _DRAWN
    )
    clustering_type: Word[Literal["single_cluster", "schedule_based"]] = honored(
        "single_cluster", "single_cluster: the metric selects no samples, its difficulty is only told to a function.", _DRAWN
    )
    min_difficulty: Number = honored(1, "The difficulty at the beginning.", _RAMP)
    max_difficulty: Number | None = honored(None, "The difficulty at last.", _RAMP)
    schedule_type: str = honored("fixed_root", "fixed_linear, fixed_root, fixed_discrete, or custom: a function.", _RAMP)
    schedule_config: CurriculumSchedule = CurriculumSchedule()


class DataCurriculum(Block):
    enabled: bool = honored(False, "Draw samples that are easy enough for the step.", _DRAWN)
    data_cluster_path: str | None = no_effect(None, "the order of samples is a function of seed and step; no files are written")
    curriculum_metrics: dict[str, CurriculumMetric] = {}


class DynamicBatching(Block):
    enabled: bool = honored(False, "Fill micro-batches by tokens, with learning rates scaled by the number of samples.", _BY_TOKENS)
    metrics_path: str | None = honored(None, "Folder of `DataAnalyzer`, with lengths of samples as metric `seqlen`.", _BY_TOKENS)
    lr_scaling_method: Word[Literal["linear", "sqrt", "none"]] = honored(
        "linear", "The rate's factor: samples of the batch over train_batch_size, its square root, or 1.", _BY_TOKENS
    )
    min_batch_size: Count = honored(1, "The fewest samples of a micro-batch.", _BY_TOKENS)
    max_batch_size: Count | None = honored(None, "The most samples of a micro-batch.", _BY_TOKENS)
    sequence_picking_order: Word[Literal["dataloader", "random", "seqlen"]] = honored(
        "dataloader", "The order in which samples fill micro-batches: the dataset's, shuffled once, or by length.", _BY_TOKENS
    )
    max_tokens: Count | None = honored(None, "The most tokens of a micro-batch; longer samples are left out.", _BY_TOKENS)
    verbose: bool = honored(False, "Log the batches and the learning rates.", _BY_TOKENS)


class DataSampling(Block):
    enabled: bool = honored(False, "Allow the blocks in it.", _DRAWN)
    num_epochs: Count = honored(1000, "Samples of one iteration of the loader, in sizes of the dataset.", _DRAWN)
    num_workers: Size = honored(0, "Processes that read samples.", _DRAWN)
    pin_memory: bool = no_effect(False, "batches are pinned if the device is a GPU")
    curriculum_learning: DataCurriculum = DataCurriculum()
    dynamic_batching: DynamicBatching = DynamicBatching()


class LtdScheduleConfig(Block):
    require_steps: Count | None = honored(None, "Steps until max_value.", _TOKENS)
    seq_per_step: Count | None = honored(None, "Numbers of tokens are multiples of it.", _TOKENS)


class LtdSchedule(Block):
    min_value: Count | None = honored(None, "Tokens that a layer computes at the beginning.", _TOKENS)
    max_value: Count | None = honored(None, "Tokens at last: all.", _TOKENS)
    schedule_type: Word[Literal["fixed_linear"]] = honored("fixed_linear", "How the number grows by the step.", _TOKENS)
    schedule_config: LtdScheduleConfig = LtdScheduleConfig()


class LayerTokenLr(Block):
    feature = Feature("a learning rate by tokens of layers, which DeepSpeed has not either", "use a schedule of steps")
    enabled: bool = switch()
    total_layer_tokens: Size | None = None
    warmup_type: str | None = None
    warmup_layer_tokens: Size | None = None


_ENGINES = "the engine knows its batch sizes"


class RandomLtd(Block):
    enabled: bool = honored(False, "Let layers compute a random part of the tokens in training (random-LTD).", _ROUTED)
    total_layer_num: Count | None = honored(None, "Layers of the model.", _ROUTED)
    random_ltd_layer_num: Count | None = honored(None, "Layers that drop tokens; the number of `random_ltd_layer_id`.", _ROUTED)
    random_ltd_layer_id: list[Size] = honored([], "Which layers drop tokens, from 0.", _ROUTED)
    model_mask_name: str | None = honored(None, "A mask argument that each call of a layer must have.", _ROUTED)
    model_type: Word[Literal["encoder", "decoder"]] = no_effect(
        "decoder", "tokens keep their order, and masks follow them in encoders and decoders"
    )
    hidden_state_order: Word[Literal["batch_seq_dim", "seq_batch_dim"]] = honored(
        "batch_seq_dim", "The order of dimensions of hidden states.", "test_sequence_first"
    )
    global_batch_size: Size | None = no_effect(None, _ENGINES)
    micro_batch_size: Size | None = no_effect(None, _ENGINES)
    random_ltd_schedule: LtdSchedule = LtdSchedule()
    layer_token_lr_schedule: LayerTokenLr = LayerTokenLr()


class DataRouting(Block):
    enabled: bool = honored(False, "Allow `random_ltd`.", _ROUTED)
    random_ltd: RandomLtd = RandomLtd()


class DataEfficiency(Block):
    enabled: bool = honored(False, "Allow the blocks in it.", _DRAWN)
    seed: Seed = honored(1234, "Seed of the order of samples and of dropped tokens.", _DRAWN)
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()


class ProgressiveLayerDrop(Block):
    enabled: bool = honored(False, "Skip residual blocks in training, more of them as it goes on.", "test_blocks_are_dropped")
    theta: Fraction = honored(1.0, "Probability of keeping the deepest block at last; 1 keeps all.", "test_the_schedule")
    gamma: Positive = honored(0.001, "Rate per step at which theta falls from 1.", "test_the_schedule")
