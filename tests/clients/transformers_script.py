"""transformers' Trainer with a DeepSpeed config of "auto" values, as its documentation has it."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import Tensor

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
FOLDER = Path(os.environ.get("CLIENT_FOLDER", "."))
STEPS, MICRO, ACCUMULATION, WORLD = 4, 2, 2, 2


def config_of(stage: int, optimizer: bool = True) -> dict[str, Any]:
    """The example of transformers' documentation."""
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        }
    return config


def begin() -> None:
    transformers.logging.set_verbosity_error()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # what the state is to know of before it is made
    PartialState(backend="gloo")


def arguments(stage: int, name: str, optimizer: bool = True, **others: Any) -> Any:
    AcceleratorState._reset_state()  # one process, several runs
    settings: dict[str, Any] = {
        "output_dir": str(FOLDER / name),
        "deepspeed": config_of(stage, optimizer),
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 2,
        "seed": 7,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "accelerator_config": {"use_configured_state": True},
    }
    return transformers.TrainingArguments(**(settings | others))


def samples(count: int = STEPS * MICRO * ACCUMULATION * WORLD) -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 128, (count, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def llama() -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True))


def plain() -> dict[int, Any]:
    """Losses and norms by step, of a model that sees all ranks' batches in one process."""
    model = llama()
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    data, logs = samples(), {}
    order = torch.utils.data.SequentialSampler(data)
    batch = MICRO * ACCUMULATION * WORLD
    indices = list(order)
    for step in range(STEPS):
        rows = [data[i] for i in indices[step * batch : (step + 1) * batch]]
        ids = torch.stack([row["input_ids"] for row in rows])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        logs[step + 1] = (loss.item(), norm.item())
    return logs


class InOrder(transformers.Trainer):
    """Its data in order, so that plain torch can have the same."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def logs_of(trainer: Any) -> dict[int, tuple[float, float]]:
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry}


def train(stage: int, optimizer: bool) -> None:
    """Train as plain torch does, evaluate, resume from the middle and come to the same end, save and load."""
    name = f"{stage}_{optimizer}"
    args = arguments(stage, name, optimizer)
    trainer = InOrder(model=llama(), args=args, train_dataset=samples(), eval_dataset=samples(4))
    trainer.train()
    actual = logs_of(trainer)
    if not optimizer:  # the config's schedule warms up
        expected = plain()
        assert actual.keys() == expected.keys()
        for step, values in expected.items():
            torch.testing.assert_close(torch.tensor(actual[step]), torch.tensor(values), rtol=2e-3, atol=2e-4)
    result = trainer.evaluate()
    assert 0 < result["eval_loss"] < 6

    again = InOrder(model=llama(), args=arguments(stage, name, optimizer), train_dataset=samples(), eval_dataset=samples(4))
    again.train(resume_from_checkpoint=str(FOLDER / name / "checkpoint-2"))
    assert {step: logs_of(again)[step] for step in (3, 4)} == {step: actual[step] for step in (3, 4)}
    assert again.evaluate()["eval_loss"] == result["eval_loss"]
    saved = FOLDER / name / "saved"
    again.save_model(str(saved))
    PartialState().wait_for_everyone()
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    loaded = transformers.LlamaForCausalLM.from_pretrained(saved).eval()
    ids = torch.stack([row["input_ids"] for row in samples(4)])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss.item(), result["eval_loss"], rtol=1e-4, atol=1e-5)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def train_in_16_bits(stage: int, word: str) -> None:
    """Near what plain torch does in fp32; and it resumes to the same end, bit for bit."""
    runs = []
    for resume in (None, str(FOLDER / f"{word}_{stage}" / "checkpoint-2")):
        args = arguments(stage, f"{word}_{stage}", optimizer=False, use_cpu=True, **{word: True})
        trainer = InOrder(model=llama(), args=args, train_dataset=samples(), eval_dataset=samples(4))
        trainer.train(resume_from_checkpoint=resume)
        engine = trainer.deepspeed
        assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (word == "bf16", word == "fp16")
        assert next(engine.module.parameters()).dtype is (torch.bfloat16 if word == "bf16" else torch.float16)
        runs.append((logs_of(trainer), trainer.evaluate()["eval_loss"]))
    assert {step: runs[0][0][step] for step in (3, 4)} == {step: runs[1][0][step] for step in (3, 4)} and runs[0][1] == runs[1][1]
    # fp16 begins at a scale of 2**16, which fits: no step is skipped
    for step, values in plain().items():
        torch.testing.assert_close(torch.tensor(runs[0][0][step]), torch.tensor(values), rtol=4e-2, atol=1e-2)


def pretrained() -> None:
    """`from_pretrained` under stage 3 reads into ranges; its embeddings are resized; it trains."""
    source = FOLDER / "source"
    rank = PartialState().process_index
    if rank == 0:
        llama().save_pretrained(source)
    PartialState().wait_for_everyone()
    args = arguments(3, "pretrained")  # alive, so that transformers knows of stage 3
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    original = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.ds_tensor.numel() == weight.numel() // WORLD and weight.untyped_storage().nbytes() == weight.element_size()
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for (name, actual), reference in zip(model.named_parameters(), original.parameters(), strict=True):
            assert torch.equal(actual, reference), name
    fresh = transformers.AutoModelForCausalLM.from_config(original.config)
    with deepspeed.zero.GatheredParameters(list(fresh.parameters())):
        assert 0.01 < fresh.model.layers[1].mlp.up_proj.weight.std().item() < 0.03
        assert fresh.model.norm.weight.eq(1).all()
    model.resize_token_embeddings(136)  # the new rows near the mean of the old
    with deepspeed.zero.GatheredParameters(model.lm_head.weight):
        actual, reference = model.lm_head.weight.detach(), original.lm_head.weight.detach()
        assert torch.equal(actual[:128], reference) and (actual[128:] - reference.mean(0)).abs().max() < 1e-3
    assert model.lm_head.weight is model.model.embed_tokens.weight and tuple(model.lm_head.weight.shape) == (136, 32)
    trainer = InOrder(model=model, args=args, train_dataset=samples())
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.deepspeed)
    assert rank > 0 or tuple(state["lm_head.weight"].shape) == (136, 32)
    first = next(iter(logs_of(trainer).values()))
    assert abs(first[0] - 4.87) < 0.3


def evaluate_only() -> None:
    """Under stage 3 an evaluation makes an engine without optimizer."""
    trainer = InOrder(model=llama(), args=arguments(3, "evaluate_only"), eval_dataset=samples(4))
    ids = torch.stack([row["input_ids"] for row in samples(4)])
    with torch.no_grad():
        expected = llama().eval()(input_ids=ids, labels=ids).loss.item()
    torch.testing.assert_close(trainer.evaluate()["eval_loss"], expected, rtol=1e-5, atol=0)
    assert trainer.deepspeed.optimizer is None


def everything() -> None:
    begin()
    for stage, optimizer in ((1, False), (2, True), (3, False), (3, True)):
        train(stage, optimizer)
    train_in_16_bits(2, "bf16")
    train_in_16_bits(3, "fp16")
    evaluate_only()
    pretrained()
    torch.distributed.destroy_process_group()
