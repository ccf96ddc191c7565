"""DeepSpeed's names of engine methods, for the error text if a script calls one on `slipstream.Engine`.

`compat` builds its methods from `RENAMED`.
"""

from __future__ import annotations

from collections.abc import Mapping

# method of DeepSpeed's engine without arguments -> the attribute of Engine that it returns
RENAMED: Mapping[str, str] = {
    "is_gradient_accumulation_boundary": "at_boundary",
    "was_step_applied": "step_applied",
    "get_global_grad_norm": "global_grad_norm",
    "get_data_parallel_rank": "mesh.batch.index",
    "loss_scale": "precision.loss_scale",
    "train_batch_size": "plan.batch.train_batch_size",
    "train_micro_batch_size_per_gpu": "plan.batch.micro_batch_size",
    "gradient_accumulation_steps": "plan.batch.accumulation",
    "managed_gradient_accumulation": "plan.batch.managed",
    "gradient_clipping": "plan.gradient_clipping",
    "zero_optimization_stage": "plan.zero.stage",
    "fp16_auto_cast": "plan.precision.auto_cast_inputs",
    "torch_autocast_dtype": "plan.precision.autocast_dtype",
    "steps_per_print": "plan.steps_per_print",
    "wall_clock_breakdown": "plan.wall_clock_breakdown",
    "dump_state": "plan.dump_state",
    "dataloader_drop_last": "plan.drop_last",
}

# other methods and attributes of DeepSpeed's engine -> an expression that does the same here
_INSTEAD: Mapping[str, str] = {
    "set_gradient_accumulation_boundary": "engine.set_boundary(...)",
    "get_lr": '[group["lr"] for group in engine.optimizer.param_groups]',
    "module_state_dict": "engine.state_dict()",
    "load_module_state_dict": "engine.load_state_dict(...)",
    "save_16bit_model": "engine.save_pretrained(folder)",
    "save_fp16_model": "engine.save_pretrained(folder)",
    "offload_states": "engine.sleep()",
    "reload_states": "engine.wake()",
    "deepspeed_io": "slipstream.initialize(training_data=...), which returns the loader",
    "generate": '"hybrid_engine": {"enabled": true} in the config',
    "get_batch_info": "engine.plan.batch",
    "dp_world_size": "engine.world_size",
    "config": "engine.plan",
}


def explain_missing(name: str) -> str:
    """Where to find an attribute that `slipstream.Engine` lacks: its name here, or the engine of `import deepspeed`."""
    instead = f"engine.{RENAMED[name]}" if name in RENAMED else _INSTEAD.get(name)
    here = f"use {instead}. " if instead else ""
    return (
        f"{here}DeepSpeed's methods exist on the engine of deepspeed.initialize "
        f"(pip install --no-deps ./compat/deepspeed; docs/COMING_FROM_DEEPSPEED.md)"
    )
