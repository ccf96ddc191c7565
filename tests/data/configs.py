"""Configurations like those of public repositories, as text: `TEXTS` are accepted; `REFUSED` are not, with what each refusal names.

Written for this project after the shapes that a survey of 384 public files has found: templates of the transformers documentation
with "auto", LLaVA's and Alpaca's offload files, Megatron's and BERT's pre-training, DeepSpeed-Chat, files with comments, monitors
that are off, keys of the script's own, keys of other versions. Each refusal that the survey
met in more than one repository stands here at least once.
"""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

Config = dict[str, Any]
AUTO = "auto"


def having(config: Config, **changes: Any) -> Config:
    """A copy with other values, by key, `__` between a block and what is in it; None takes a key away."""
    changed = copy.deepcopy(config)
    for path, value in changes.items():
        *blocks, name = path.split("__")
        inner = changed
        for block in blocks:
            inner = inner.setdefault(block, {})
        if value is None:
            inner.pop(name, None)
        else:
            inner[name] = value
    return changed


def trainer(stage: int, **changes: Any) -> Config:
    """The template of the transformers documentation, from which most files are copied."""
    zero: dict[int, Config] = {
        0: {"stage": 0},
        1: {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "overlap_comm": True},
        2: {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": AUTO,
            "contiguous_gradients": True,
        },
        3: {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    config = {
        "fp16": {
            "enabled": AUTO,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": AUTO},
        "zero_optimization": zero[stage],
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "steps_per_print": 2000,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "wall_clock_breakdown": False,
    }
    return having(config, **changes)


ADAMW: Config = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
FILLED: Config = {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
WARMUP: Config = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}}
DECAY: Config = {"type": "WarmupDecayLR", "params": {"total_num_steps": AUTO, **WARMUP["params"]}}
COSINE: Config = {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}}
HOST: Config = {"device": "cpu", "pin_memory": True}
DISK: Config = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}
PARAM: Config = {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
AIO: Config = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
OFF: Config = {"enabled": False}

MEGATRON: Config = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 11,
    },
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
}
BERT: Config = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 32,
    "steps_per_print": 1000,
    "prescale_gradients": False,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 6e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01, "bias_correction": False},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 6e-3, "warmup_num_steps": 5000}},
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0},
}
CHAT: Config = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": False,
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "logs/ds_tensorboard_logs/", "job_name": "step1_tensorboard"},
}
ACCELERATE: Config = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": float("inf"),
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
}
LITTLE: Config = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "wall_clock_breakdown": False,
}
MONITORS: Config = {
    "tensorboard": {"enabled": False, "output_path": "output", "job_name": "train"},
    "wandb": {"enabled": False, "team": "my_team", "group": "my_group", "project": "my_project"},
    "csv_monitor": {"enabled": False, "output_path": "output/csv"},
    "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
}
RECOMPUTE: Config = {
    "partition_activations": True,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}


def plain() -> dict[str, Config]:
    """Templates by stage, optimizer, schedule, precision and tier, as their users have combined them."""
    results: dict[str, Config] = {}
    for stage, (name, blocks) in itertools.product(
        (1, 2, 3),
        {
            "bare": {},
            "adamw": {"optimizer": ADAMW},
            "warmup": {"optimizer": ADAMW, "scheduler": WARMUP},
            "cosine": {"optimizer": FILLED, "scheduler": COSINE},
        }.items(),
    ):
        results[f"trainer-{stage}-{name}"] = trainer(stage, **blocks)
    for stage, precision in itertools.product((0, 1, 2, 3), ("fp16", "bf16", "fp32")):
        switched = {f"{half}__enabled": half == precision for half in ("fp16", "bf16")}
        results[f"filled-{stage}-{precision}"] = trainer(
            stage,
            train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=8,
            gradient_clipping=1.0,
            optimizer=FILLED,
            **switched,
        )
    for stage, schedule in itertools.product((2, 3), (WARMUP, DECAY)):
        name = f"offload-{stage}-{schedule['type']}"
        results[name] = trainer(stage, optimizer=ADAMW, scheduler=schedule, zero_optimization__offload_optimizer=HOST)
    results["zero3-offload-both"] = trainer(3, zero_optimization__offload_optimizer=HOST, zero_optimization__offload_param=HOST)
    results["zero3-nvme"] = trainer(3, zero_optimization__offload_optimizer=DISK, zero_optimization__offload_param=PARAM, aio=AIO)
    results["zero3-nvme-optimizer"] = trainer(3, optimizer=FILLED, zero_optimization__offload_optimizer=DISK, aio=AIO)
    results["zero2-round-robin"] = trainer(2, zero_optimization__round_robin_gradients=True, zero_allow_untested_optimizer=True)
    results["zero3-hf-old-names"] = trainer(3, zero_optimization__stage3_gather_fp16_weights_on_model_save=True)
    results["zero3-hf-old-names"]["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save")
    results["zero3-leaf"] = trainer(3, zero_optimization__leaf_module={"classes": ["MixtralSparseMoeBlock"]})
    results["zero2-cpu-adam"] = trainer(2, optimizer=FILLED, zero_optimization__cpu_offload=True, zero_force_ds_cpu_optimizer=False)
    results["diffusers"] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    results["megatron"] = MEGATRON
    results["megatron-bf16"] = having(MEGATRON, fp16=None, bf16__enabled=True, data_types__grad_accum_dtype="fp32")
    results["megatron-zero2"] = having(MEGATRON, zero_optimization__stage=2, zero_optimization__reduce_bucket_size=5e7)
    results["megatron-comm-dtype"] = having(MEGATRON, communication_data_type="fp16", gradient_predivide_factor=8.0)
    results["bert"] = BERT
    results["bert-lamb"] = having(
        BERT,
        optimizer={
            "type": "Lamb",
            "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01},
        },
    )
    results["bert-clip-in-params"] = having(BERT, gradient_clipping=None, optimizer__params__max_grad_norm=1.0)
    results["chat-sft"] = CHAT
    results["chat-zero3"] = having(CHAT, zero_optimization__stage=3, zero_optimization__offload_param=HOST)
    results["chat-lora"] = having(CHAT, zero_optimization__stage=0, bf16__enabled=True, fp16=None)
    results["accelerate"] = ACCELERATE
    results["accelerate-3"] = having(ACCELERATE, zero_optimization__stage=3, bf16__enabled=AUTO, gradient_clipping=AUTO)
    for stage in (0, 1):
        results[f"accelerate-{stage}"] = having(ACCELERATE, zero_optimization={"stage": stage}, gradient_accumulation_steps=AUTO)
    results["offload-1"] = trainer(1, optimizer=ADAMW, zero_optimization__offload_optimizer=HOST)
    results["lion"] = having(LITTLE, optimizer={"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}, scheduler=None)
    results["megatron-zero3"] = having(MEGATRON, zero_optimization={"stage": 3, "sub_group_size": 1e9, "overlap_comm": True})
    results["chat-offload"] = having(CHAT, zero_optimization__offload_optimizer=HOST, zero_optimization__stage=3)
    results["accelerate-fp16"] = having(ACCELERATE, bf16__enabled=False, fp16={"enabled": True, "auto_cast": True})
    results["cifar"] = LITTLE
    results["cifar-zero2"] = having(
        LITTLE, zero_optimization={"stage": 2, "cpu_offload": True}, fp16={"enabled": True, "fp16_master_weights_and_grads": False}
    )
    results["sgd"] = having(LITTLE, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, scheduler=None)
    results["one-cycle"] = having(
        LITTLE, scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 100}}
    )
    results["cosine"] = having(
        LITTLE, scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}}
    )
    results["strings"] = having(LITTLE, train_batch_size="16", gradient_clipping="0.5", optimizer__params__lr="1e-3")
    results["bool-zero"] = having(LITTLE, zero_optimization=True, allgather_size=5e8)
    results["bfloat16"] = having(LITTLE, bfloat16={"enabled": True})
    results["lightning"] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    results["comms-log"] = having(LITTLE, comms_logger={"enabled": True, "verbose": True})
    results["flops"] = having(LITTLE, flops_profiler={"enabled": True, "profile_step": 5})
    results["logging"] = having(LITTLE, dump_state=True, memory_breakdown=True, wall_clock_breakdown=True, steps_per_print=1)
    results["apex-off"] = having(LITTLE, amp={"enabled": False, "opt_level": "O2"}, fp16={"enabled": True})
    results["sparse-dense"] = having(LITTLE, sparse_gradients=False, dataloader_drop_last=True)
    results["elastic-off"] = having(
        LITTLE, elasticity={"enabled": False, "max_train_batch_size": 1024, "micro_batch_sizes": [2, 4]}
    )
    results["curriculum-off"] = having(
        LITTLE, curriculum_learning={"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 8}
    )
    results["data-efficiency-off"] = having(LITTLE, data_efficiency={"enabled": False, "seed": 1234})
    results["autotuning-off"] = having(LITTLE, autotuning={"enabled": False, "fast": False, "arg_mappings": {"lr": "--lr"}})
    results["autotuning"] = trainer(2, autotuning={"enabled": True, "fast": True, "tuner_type": "model_based"})
    results["checkpoint-tags"] = having(LITTLE, checkpoint={"tag_validation": "FAIL", "load_universal": False})
    results["dtypes"] = having(MEGATRON, data_types={"grad_accum_dtype": "bf16"}, fp16=None, bf16={"enabled": True})
    for name in MONITORS:
        results[f"{name}-off"] = having(LITTLE, **{name: MONITORS[name]})
        results[f"trainer-{name}-off"] = trainer(2, **{name: MONITORS[name]})
    return results


def shapes() -> dict[str, Config]:
    """What once was refused, and stands in public files again and again."""
    results: dict[str, Config] = {}
    for stage, name in ((1, "alpaca"), (2, "llava"), (2, "vicuna"), (0, "rwkv")):
        results[f"{name}-offload-param-{stage}"] = trainer(stage, zero_optimization__offload_param=HOST, steps_per_print=len(name))
    results["zero2-offload-both"] = trainer(
        2, optimizer=ADAMW, zero_optimization__offload_param=HOST, zero_optimization__offload_optimizer=HOST
    )
    for name, base in (("megatron", MEGATRON), ("bert", BERT), ("little", LITTLE), ("trainer", trainer(3))):
        results[f"{name}-partition-activations"] = having(base, activation_checkpointing=RECOMPUTE)
    for name in ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"):
        results[f"bf16-{name}"] = trainer(2, **{f"bf16__{name}": 0 if name == "loss_scale" else 2})
    scales = {name: trainer(2)["fp16"][name] for name in ("loss_scale", "initial_scale_power", "hysteresis")}
    results["bf16-as-fp16"] = having(MEGATRON, fp16=None, bf16={"enabled": True, **scales})
    results["opt-level"] = trainer(2, fp16__opt_level="O2")
    results["opt-level-auto"] = trainer(3, fp16__opt_level=AUTO)
    results["compile"] = trainer(1, compile={"enabled": True, "backend": "inductor", "kwargs": {}})
    results["compile-off"] = trainer(1, compile={"enabled": False})
    results["compile-disable"] = having(LITTLE, compile={"disable": True, "backend": "inductor"})
    for name, base in (("chat", CHAT), ("megatron", MEGATRON), ("little", LITTLE)):
        results[f"{name}-node-local"] = having(base, checkpoint={"use_node_local_storage": True})
    own: tuple[Config, ...] = (
        {"model_name": "bert-base", "max_seq_length": 512},
        {"lr": 1e-4, "epochs": 3},
        {"logging": {"level": "info"}},
        {"local_rank": 0},
        {"num_workers": 8, "output_dir": "out"},
        {"tokenizer_path": "tok.model"},
        {"zero_reduce_scatter": True},
        {"max_grad_norm": 1.0},
        {"overlap_comm": True, "contiguous_gradients": True},
        {"stage3_gather_16bit_weights_on_model_save": True},
        {"distributed_backend": "nccl", "tensorboard_dir": "tb"},
        {"nccl_debug": "INFO"},
    )
    for base, (i, extra) in zip(itertools.cycle((trainer(2), LITTLE, MEGATRON, trainer(3))), enumerate(own)):
        results[f"own-keys-{i}"] = base | extra
    results["comment-keys"] = trainer(
        2, _comment="stage 2", zero_optimization__stage=2, zero_optimization___why="it fits", _optimizer=FILLED
    )
    for stage in (2, 3):
        without = trainer(stage)
        results[f"no-batch-size-{stage}"] = {name: value for name, value in without.items() if "batch_size" not in name}
    results["no-batch-size-little"] = having(LITTLE, train_batch_size=None, gradient_accumulation_steps=4)
    results["schedule-by-the-loop"] = trainer(2, scheduler=DECAY)
    results["all-monitors-off"] = trainer(3) | MONITORS
    return results


TEXTS: dict[str, str] = {name: json.dumps(config, indent=2) for name, config in (plain() | shapes()).items()}
TEXTS["comments"] = """{
  // effective batch: 32 x 8
  "train_micro_batch_size_per_gpu": 32,  # per device
  "zero_optimization": {
    "stage": 2, /* 3 is slower
                   here */
    "reduce_bucket_size": 5e8,
  },
  "fp16": {"enabled": true, "loss_scale": 0,},
}
"""
TEXTS["trailing-comma"] = TEXTS["cifar"].rstrip("}\n") + ",\n}\n"

_EIGHT = {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["attention.self", "intermediate"]}
_QUANTIZED = {"shared_parameters": {"enabled": True, "quantize_groups": 64}, "different_groups": {"wq1": _EIGHT}}
TEXTS["compression"] = json.dumps(having(BERT, compression_training={"weight_quantization": _QUANTIZED}), indent=2)
TEXTS["layer-drop"] = json.dumps(having(BERT, progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.001}), indent=2)
_LINEAR = {"total_curriculum_step": 15000, "difficulty_step": 8}
_SHORT_FIRST = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 1024, "schedule_type": "fixed_linear"}
TEXTS["curriculum"] = json.dumps(
    having(MEGATRON, curriculum_learning={"enabled": True, **_SHORT_FIRST, "schedule_config": _LINEAR}), indent=2
)
_ON: dict[str, Any] = {"enabled": True}
_METRIC = {
    "index_to_sample_path": "i",
    "index_to_metric_path": "m",
    "difficulty_type": "value",
    "clustering_type": "schedule_based",
}
_METRICS = {
    "seqlen": {**_METRIC, "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear", "schedule_config": _LINEAR}
}
_SAMPLED = {**_ON, "num_epochs": 2, "curriculum_learning": {**_ON, "data_cluster_path": "c", "curriculum_metrics": _METRICS}}
_SEQUENCES = {
    "min_value": 128,
    "max_value": 2048,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 9, "seq_per_step": 16},
}
_LAYERS = {"total_layer_num": 24, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "model_type": "decoder"}
_LTD = {
    **_ON,
    **_LAYERS,
    "model_mask_name": "attention_mask",
    "hidden_state_order": "seq_batch_dim",
    "random_ltd_schedule": _SEQUENCES,
}
_EFFICIENT = {**_ON, "seed": 1234, "data_sampling": _SAMPLED, "data_routing": {**_ON, "random_ltd": _LTD}}
_NO_STEP = {"enabled": True, "profile_step": -1, "module_depth": -1, "top_modules": 1, "detailed": True}
TEXTS["vision"] = json.dumps(having(BERT, optimizer__adam_w_mode=True, flops_profiler=_NO_STEP), indent=2)  # BEiT and its heirs
TEXTS["data-efficiency"] = json.dumps(having(MEGATRON, data_efficiency=_EFFICIENT), indent=2)
TEXTS["hybrid"] = json.dumps(having(CHAT, hybrid_engine__enabled=True), indent=2)
TEXTS["hybrid-sliced"] = json.dumps(having(CHAT, hybrid_engine__enabled=True, hybrid_engine__inference_tp_size=2), indent=2)
TEXTS["tensorboard"] = json.dumps(having(CHAT, tensorboard__enabled=True), indent=2)
TEXTS["wandb"] = json.dumps(trainer(2, wandb={"enabled": True, "project": "p"}), indent=2)
TEXTS["sparse"] = json.dumps(having(BERT, sparse_attention={"mode": "fixed", "block": 16, "num_local_blocks": 4}), indent=2)
TEXTS["data-efficiency"] = json.dumps(having(MEGATRON, data_efficiency={"data_routing": {"random_ltd": {"enabled": True}}}))

# name: (config, what the refusal names)
REFUSED_CONFIGS: dict[str, tuple[Config, str]] = {
    "typo": (trainer(2) | {"train_micro_batch_size_per_gpus": 4}, "train_micro_batch_size_per_gpu"),
    "typo-in-block": (trainer(3, zero_optimization__stage3_max_live_paramters=1e9), "stage3_max_live_parameters"),
    "unknown-in-block": (trainer(2, zero_optimization__sharding_strategy="full"), "sharding_strategy"),
    "both-halves": (trainer(2, fp16__enabled=True, bf16__enabled=True), "bf16.enabled"),
    "batch-triad": (having(MEGATRON, gradient_accumulation_steps=7), "train_batch_size"),
}
REFUSED: dict[str, tuple[str, str]] = {name: (json.dumps(config), named) for name, (config, named) in REFUSED_CONFIGS.items()}
