"""A training loop as accelerate's documentation has it, for its DeepSpeed plugin, beside the same in plain torch."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs
from torch import Tensor
from torch.utils.data import DataLoader

from tests import toy

WORLD, ACCUMULATION, CLIP, LR, MICRO = 2, 2, 0.5, 1e-2, 2
FOLDER = Path(os.environ.get("CLIENT_FOLDER", "."))


def data(windows: int) -> list[Tensor]:
    """One sample each; accelerate deals batches of them to the ranks in turn."""
    count = windows * ACCUMULATION * MICRO * WORLD
    return [toy.tokens(0, i)[0] for i in range(count)]


def plain_torch(windows: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms before clipping, and the weights at the end, of one process that sees all ranks' data."""
    model = toy.seeded(toy.Lm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches, norms = list(DataLoader(data(windows), batch_size=MICRO)), []
    for start in range(0, len(batches), ACCUMULATION * WORLD):
        for batch in batches[start : start + ACCUMULATION * WORLD]:
            (model(batch) / (ACCUMULATION * WORLD)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def plugin_of(stage: int, source: str) -> DeepSpeedPlugin:
    if source == "arguments":
        return DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=CLIP, zero3_save_16bit_model=True
        )
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": False}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": LR, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "none", "nvme_path": None},
        },
    }
    file = FOLDER / f"ds_config_{stage}_{os.environ['RANK']}.json"
    file.write_text(json.dumps(config))
    return DeepSpeedPlugin(hf_ds_config=str(file))


def make(stage: int, source: str, windows: int, mixed_precision: str | None = None) -> tuple[Any, Any, Any, Any, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        deepspeed_plugins=plugin_of(stage, source),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        mixed_precision=mixed_precision,
    )
    assert accelerator.num_processes == WORLD and str(accelerator.distributed_type) == "DistributedType.DEEPSPEED"
    model = toy.seeded(toy.Lm)
    loader = DataLoader(data(windows), batch_size=MICRO)
    optimizer: Any
    scheduler: Any
    if source == "arguments":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    else:
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


def check(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def train(stage: int, source: str) -> None:
    """Train, compare with plain torch, save, go on, come back, go on the same way."""
    norms, weights = plain_torch(3)
    accelerator, model, optimizer, loader, scheduler = make(stage, source, 3)
    actual = loop(accelerator, model, optimizer, loader, scheduler)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(norms), rtol=1e-4, atol=1e-6)
    assert not optimizer.step_was_skipped and model.global_steps == 3
    assert accelerator.unwrap_model(model) is model.module and type(model.module) is toy.Lm
    state = accelerator.get_state_dict(model)
    assert (state is None) == (stage == 3 and accelerator.process_index > 0)
    if state is not None:
        check(state, weights)

    folder = FOLDER / f"state_{stage}_{source}"
    accelerator.save_state(str(folder))
    after = loop(accelerator, model, optimizer, loader, scheduler)
    accelerator.load_state(str(folder))
    again = loop(accelerator, model, optimizer, loader, scheduler)
    assert after == again

    accelerator.save_model(model, str(folder / "model"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        from safetensors.torch import load_file

        saved = load_file(folder / "model" / "model.safetensors")
        assert saved.keys() == weights.keys() and all(value.isfinite().all() for value in saved.values())
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def train_in_16_bits(stage: int, word: str) -> None:
    norms, weights = plain_torch(3)
    accelerator, model, optimizer, loader, scheduler = make(stage, "arguments", 3, word)
    assert (model.bfloat16_enabled(), model.fp16_enabled()) == (word == "bf16", word == "fp16")
    actual = loop(accelerator, model, optimizer, loader, scheduler)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(norms), rtol=5e-2, atol=1e-3)
    state = accelerator.get_state_dict(model)
    for name, value in (state or {}).items():
        assert value.dtype is (torch.bfloat16 if word == "bf16" else torch.float16)
        assert (value.float() - weights[name]).abs().mean() < LR / 4, name  # a small gradient's sign may turn, and with it a step's
    accelerator.free_memory()


def several_plugins() -> None:
    """A student that trains at stage 2 and a teacher at stage 3, one plugin and one accelerator each."""
    AcceleratorState._reset_state(reset_partial_state=True)
    student = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 2}})
    teacher = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 3}})
    accelerator = Accelerator(
        deepspeed_plugins={"student": student, "teacher": teacher}, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    first = toy.seeded(toy.Lm)
    optimizer = torch.optim.AdamW(first.parameters(), lr=LR)
    loader = DataLoader(data(1), batch_size=MICRO)
    model, optimizer, loader = accelerator.prepare(first, optimizer, loader)
    other = Accelerator()
    accelerator.state.select_deepspeed_plugin("teacher")
    fixed = other.prepare(toy.seeded(toy.Lm, seed=1))
    fixed.eval()
    before = fixed.gradient_accumulation_steps(), fixed.zero_optimization_stage()
    assert before == (1, 3) and model.zero_optimization_stage() == 2
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for _ in range(3):
        for batch in loader:
            with torch.no_grad():
                target = fixed(batch)
            loss = model(batch) + 0 * target
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] and model.global_steps == len(losses)


def two_that_train() -> None:
    """Each with its accelerator and its plugin, as both trained alone."""
    settings = {
        name: {"train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.5, "zero_optimization": {"stage": stage}}
        for name, stage in (("first", 2), ("second", 3))
    }
    ends = []
    for names in (("first",), ("second",), ("first", "second")):
        AcceleratorState._reset_state(reset_partial_state=True)
        plugins = {name: DeepSpeedPlugin(hf_ds_config=settings[name]) for name in names}
        accelerators = {
            name: Accelerator(deepspeed_plugins=plugins, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
            if i == 0
            else Accelerator()
            for i, name in enumerate(names)
        }
        prepared = {}
        for name in names:
            accelerators[names[0]].state.select_deepspeed_plugin(name)
            model = toy.seeded(toy.Lm, seed=5 if name == "second" else 4)
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
            loader = DataLoader(data(1), batch_size=MICRO)
            prepared[name] = accelerators[name].prepare(model, optimizer, loader)
        for batches in zip(*(prepared[name][2] for name in names), strict=True):
            for name, batch in zip(names, batches, strict=True):
                model, optimizer, _ = prepared[name]
                accelerators[name].backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
        ends.append([prepared[name][0].state_dict() for name in names])
        for name in names:
            prepared[name][0].destroy()
    for alone, together in zip((*ends[0], *ends[1]), ends[2], strict=True):
        assert all(torch.equal(together[name], value) for name, value in alone.items())


def told_the_backend() -> None:
    """Of a script that names no backend, with the plugin from the environment, as `accelerate launch` sets it."""
    from accelerate import PartialState
    from deepspeed import comm

    states: list[dict[str, Any]] = []
    start, ask = comm.init_distributed, comm.is_initialized

    def noted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = dict(PartialState._shared_state)
            result = function(*args, **kwargs)
            states.append(before | {"after": PartialState._shared_state.get("backend")})
            return result

        return call

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    comm.init_distributed, comm.is_initialized = noted(start), noted(ask)
    try:
        state = PartialState()
    finally:
        comm.init_distributed, comm.is_initialized = start, ask
    first, second = states
    moved = "accelerate's state is made in another way: see [Note: accelerate on CPUs] in slipstream/compat/comm.py"
    assert first["backend"] is None and second["backend"] is None and "num_processes" not in second, moved
    assert (first["after"], second["after"]) == (None, "gloo"), moved
    assert (state.backend, state.num_processes, state.process_index) == ("gloo", WORLD, int(os.environ["RANK"])), moved
    assert str(state.distributed_type) == "DistributedType.DEEPSPEED"
    AcceleratorState._reset_state(reset_partial_state=True)
    again = PartialState()  # with the ranks joined already: told as it asks whether they are
    assert (again.backend, again.num_processes) == ("gloo", WORLD), moved
    torch.distributed.destroy_process_group()


def everything() -> None:
    for stage in (1, 2, 3):
        for source in ("arguments", "json"):
            train(stage, source)
    train_in_16_bits(2, "bf16")
    train_in_16_bits(3, "fp16")
    several_plugins()
    two_that_train()
    torch.distributed.destroy_process_group()
