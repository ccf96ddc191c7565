"""Blocks of DeepSpeed's JSON about data and skipped computation: curricula, random-LTD, dynamic batches, layer dropping.

The rules are those of `schema.py`.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for every instance)

from __future__ import annotations

from typing import Literal

from slipstream.config.keys import Feature
from slipstream.config.values import Block, Count, Fraction, Number, Positive, Seed, Size, Word, honored, no_effect, switch


class LengthSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until `max_difficulty` is reached (fixed_linear, fixed_root).")
    difficulty_step: Count | None = honored(None, "Lengths are rounded to multiples of it (fixed_linear, fixed_root).")
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).")
    difficulty: list[Count] | None = honored(None, "Lengths, in order (fixed_discrete).")
    max_step: list[Count] | None = honored(None, "Last step of each length, without the last length (fixed_discrete).")


class Curriculum(Block):
    """The older, top-level block, whose difficulty is the sequence length."""

    enabled: bool = honored(False, "Train on the first tokens of each sequence; their number grows with the steps.")
    curriculum_type: Word[Literal["seqlen"]] = honored("seqlen", "What becomes more difficult: the sequence length.")
    min_difficulty: Count = honored(1, "Sequence length at the start, in tokens.")
    max_difficulty: Count | None = honored(None, "Sequence length at the end, in tokens.")
    schedule_type: str = honored("fixed_linear", "fixed_linear, fixed_root, fixed_discrete, or custom (a function of the step).")
    schedule_config: LengthSchedule = LengthSchedule()


class CurriculumSchedule(Block):
    total_curriculum_step: Count | None = honored(None, "Steps until `max_difficulty` is reached (fixed_linear, fixed_root).")
    difficulty_step: Count | None = honored(None, "Difficulties are rounded to multiples of it (fixed_linear, fixed_root).")
    root_degree: Positive | None = honored(None, "Degree of the root (fixed_root).")
    difficulty: list[Number] | None = honored(None, "Difficulties, in order (fixed_discrete).")
    max_step: list[Count] | None = honored(None, "Last step of each difficulty, without the last difficulty (fixed_discrete).")


class CurriculumMetric(Block):
    index_to_sample_path: str | None = honored(
        None, "File of `DataAnalyzer` with the samples of each metric value, without `.idx` or `.bin`."
    )
    index_to_metric_path: str | None = honored(
        None, "File of `DataAnalyzer` with the metric values, without `.idx` or `.bin` (difficulty_type value)."
    )
    difficulty_type: Word[Literal["value", "percentile"]] = honored(
        "value",
        "`value`: draw samples whose metric is at most the difficulty; `percentile`: draw from the first difficulty / "
        "max_difficulty of the samples, ordered by the metric.",
    )
    clustering_type: Word[Literal["single_cluster", "schedule_based"]] = honored(
        "single_cluster",
        "`schedule_based`: the metric selects samples; `single_cluster`: it selects none, and its difficulty is only passed to a "
        "post-processing function.",
    )
    min_difficulty: Number = honored(1, "Difficulty at the start.")
    max_difficulty: Number | None = honored(None, "Difficulty at the end.")
    schedule_type: str = honored("fixed_root", "fixed_linear, fixed_root, fixed_discrete, or custom (a function of the step).")
    schedule_config: CurriculumSchedule = CurriculumSchedule()


class DataCurriculum(Block):
    enabled: bool = honored(False, "Draw only samples that are easy enough for the step.")
    data_cluster_path: str | None = no_effect(None, "the order of samples depends only on seed and step; no files are written")
    curriculum_metrics: dict[str, CurriculumMetric] = {}


class DynamicBatching(Block):
    enabled: bool = honored(False, "Fill micro-batches by tokens, and scale learning rates by the number of samples.")
    metrics_path: str | None = honored(None, "Output folder of `DataAnalyzer`, with sample lengths as metric `seqlen`.")
    lr_scaling_method: Word[Literal["linear", "sqrt", "none"]] = honored(
        "linear",
        "Factor of the learning rate: samples of the batch / train_batch_size (`linear`), the square root of that, or 1 (`none`).",
    )
    min_batch_size: Count = honored(1, "Minimum number of samples in a micro-batch.")
    max_batch_size: Count | None = honored(
        None, "Maximum number of samples in a micro-batch; not set: as many as `max_tokens` allows."
    )
    sequence_picking_order: Word[Literal["dataloader", "random", "seqlen"]] = honored(
        "dataloader", "Order in which samples fill micro-batches: the dataset's, shuffled once (`random`), or by length (`seqlen`)."
    )
    max_tokens: Count | None = honored(None, "Maximum number of tokens in a micro-batch, required; longer samples are left out.")
    verbose: bool = honored(False, "Log the batches and the learning rates.")


class DataSampling(Block):
    enabled: bool = honored(False, "If not set, the switches of the blocks inside count; false with one of them on is refused.")
    num_epochs: Count = honored(1000, "Length of one iteration of the loader, in passes over the dataset.")
    num_workers: Size = honored(0, "Processes that read samples; 0: the rank itself reads them.")
    pin_memory: bool = no_effect(False, "batches are pinned if the device is a GPU")
    curriculum_learning: DataCurriculum = DataCurriculum()
    dynamic_batching: DynamicBatching = DynamicBatching()


class LtdScheduleConfig(Block):
    require_steps: Count | None = honored(None, "Steps until `max_value` is reached.")
    seq_per_step: Count | None = honored(None, "Numbers of tokens are rounded to multiples of it.")


class LtdSchedule(Block):
    min_value: Count | None = honored(None, "Tokens per sequence that a layer computes at the start.")
    max_value: Count | None = honored(None, "Tokens per sequence at the end: all.")
    schedule_type: Word[Literal["fixed_linear"]] = honored("fixed_linear", "How the number of tokens grows with the steps.")
    schedule_config: LtdScheduleConfig = LtdScheduleConfig()


class LayerTokenLr(Block):
    feature = Feature("a learning rate by tokens of layers (not implemented in DeepSpeed either)", "use a schedule of steps")
    enabled: bool = switch()
    total_layer_tokens: Size | None = None
    warmup_type: str | None = None
    warmup_layer_tokens: Size | None = None


_ENGINES = "the engine knows its batch sizes"


class RandomLtd(Block):
    enabled: bool = honored(False, "In training, layers compute only a random subset of the tokens (random-LTD).")
    total_layer_num: Count | None = honored(None, "Number of layers of the model.")
    random_ltd_layer_num: Count | None = honored(None, "Number of layers that drop tokens; the length of `random_ltd_layer_id`.")
    random_ltd_layer_id: list[Size] = honored([], "Indices of the layers that drop tokens, from 0.")
    model_mask_name: str | None = honored(None, "Name of a mask argument that each call of a layer must have.")
    model_type: Word[Literal["encoder", "decoder"]] = no_effect(
        "decoder", "tokens keep their order, and masks are subset with them, in encoders and decoders"
    )
    hidden_state_order: Word[Literal["batch_seq_dim", "seq_batch_dim"]] = honored(
        "batch_seq_dim", "Order of the dimensions of hidden states."
    )
    global_batch_size: Size | None = no_effect(None, _ENGINES)
    micro_batch_size: Size | None = no_effect(None, _ENGINES)
    random_ltd_schedule: LtdSchedule = LtdSchedule()
    layer_token_lr_schedule: LayerTokenLr = LayerTokenLr()


class DataRouting(Block):
    enabled: bool = honored(False, "If not set, the switch of `random_ltd` counts; false with that on is refused.")
    random_ltd: RandomLtd = RandomLtd()


class DataEfficiency(Block):
    enabled: bool = honored(False, "If not set, the switches of the blocks inside count; false with one of them on is refused.")
    seed: Seed = honored(1234, "Seed of the order of samples and of dropped tokens.")
    data_sampling: DataSampling = DataSampling()
    data_routing: DataRouting = DataRouting()


class ProgressiveLayerDrop(Block):
    enabled: bool = honored(False, "In training, skip residual blocks at random, more of them with each step.")
    theta: Fraction = honored(1.0, "Probability of keeping the deepest block at the end of the schedule; 1: skip none.")
    gamma: Positive = honored(0.001, "Rate per step at which theta falls from 1.")
