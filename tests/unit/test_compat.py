"""DeepSpeed's names: every one is served or says why not, and behaves as its contracts say. Engines here are of one rank."""

import argparse
import contextlib
import copy
import gc
import importlib
import importlib.util
import json
import operator
import os
import re
import runpy
import subprocess
import sys
import tarfile
import types
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from slipstream import initialize
from slipstream.checkpoint import load_metadata
from slipstream.compat import commands, launcher, modules, names
from slipstream.train import deepspeed_names
from slipstream.train.planning import explain
from tests import deepspeed_checkpoints as ds
from tests import probe, toy

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "compat" / "deepspeed"


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package from the repository, as if it were installed."""
    before, finders = dict(sys.modules), list(sys.meta_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(SHIM))
    yield importlib.import_module("deepspeed")
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if name.split(".")[0] == "deepspeed"})
    sys.meta_path[:] = finders


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, which is what `zero.Init` and an engine join."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(deepspeed: Any, stage: int = 3, model: Any = None, **blocks: Any) -> Any:
    config = toy.settings(stage, **blocks)
    engine, *_ = deepspeed.initialize(model=model or toy.seeded(toy.Lm), config=config, dist_init_required=False)
    return engine


def step(engine: Any, number: int = 0) -> None:
    engine.backward(engine(toy.tokens(0, number)))
    engine.step()


# -- names --


def test_every_name_that_is_said_to_be_served_is(deepspeed: ModuleType) -> None:
    for module, homes in names.SERVED.items():
        loaded = importlib.import_module(module)
        for name in " ".join(homes.values()).split():
            assert getattr(loaded, name) is not None
            assert name in dir(loaded)
    for alias, module in names.ALIASES.items():
        for name in " ".join(names.SERVED.get(module, {}).values()).split():
            assert getattr(importlib.import_module(alias), name) is getattr(importlib.import_module(module), name)


def test_a_missing_name_says_why(deepspeed: ModuleType) -> None:
    for module, reasons in names.MISSING.items():
        loaded = importlib.import_module(module)
        for name, why in reasons.items():
            attribute = "Anything" if name == "*" else name
            assert not hasattr(loaded, attribute) and getattr(loaded, attribute, 7) == 7  # as clients look whether it is there
            with pytest.raises(AttributeError, match="is not built yet") as error:
                getattr(loaded, attribute)
            with pytest.raises(ImportError, match="is not built yet") as imported:
                exec(f"from {module} import {attribute}")
            assert why in str(error.value) and why in str(imported.value)
    with pytest.raises(ImportError, match="internals of DeepSpeed's MoE layer"):
        exec("from deepspeed.moe.layer import Experts")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.nothing")
    with pytest.raises(AttributeError, match="DEEPSPEED_KEYS"):
        deepspeed.nothing  # noqa: B018


def test_what_deepspeed_has_dropped_says_so_in_a_sentence(deepspeed: ModuleType) -> None:
    for module, name in (
        ("elasticity.elastic_agent", "DSElasticAgent"),
        ("runtime.zero.mics", "MiCS_Optimizer"),
        ("runtime.data_pipeline.data_sampling.data_cluster", "Clusters"),
    ):
        with pytest.raises(ImportError, match=rf"{name} is not built yet: \w"):
            exec(f"from deepspeed.{module} import {name}")
    with pytest.raises(ModuleNotFoundError, match=r"no module 'deepspeed.nothing.at'|no module 'deepspeed.nothing'"):
        importlib.import_module("deepspeed.nothing.at")


def test_whether_a_module_is_there(deepspeed: ModuleType) -> None:
    """OpenFold asks for DeepSpeed's attention before it imports it."""
    for module in ("zero", "launcher.runner", "profiling", "ops.aio"):
        assert importlib.util.find_spec(f"deepspeed.{module}") is not None
    for module in ("ops.deepspeed4science", "linear", "linear.config", "runtime.sparse_tensor"):
        assert importlib.util.find_spec(f"deepspeed.{module}") is None


def test_what_clients_look_for_when_they_import(deepspeed: Any) -> None:
    """accelerate and transformers read attributes of attributes after a bare `import deepspeed`."""
    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert deepspeed.zero.GatheredParameters is deepspeed.runtime.zero.partition_parameters.GatheredParameters
    assert deepspeed.comm.ReduceOp.SUM is dist.ReduceOp.SUM  # torch.distributed's own
    assert deepspeed.comm.TorchBackend.get_all_gather_function() is dist.all_gather_into_tensor
    assert deepspeed.comm.TorchBackend.get_reduce_scatter_function() is dist.reduce_scatter_tensor
    assert callable(deepspeed.checkpointing.checkpoint) and callable(deepspeed.ops.adam.DeepSpeedCPUAdam)
    assert deepspeed.utils.logger.name == "slipstream" and deepspeed.__version__.startswith("0.19.8+slipstream")
    assert deepspeed.get_accelerator().current_device_name() == "cpu"
    assert deepspeed.utils.groups._get_sequence_parallel_world_size() == 1
    assert deepspeed.dist.get_rank() == deepspeed.comm.get_rank() == 0
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    assert deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER is tracker  # GPT-NeoX, and the next three Megatron-DeepSpeed
    assert deepspeed.checkpoint.PADDED_VOCAB_SIZE == deepspeed.checkpoint.constants.PADDED_VOCAB_SIZE
    with pytest.raises(NotImplementedError, match="use DistributedAttention"):
        deepspeed.sequence.fpdt_layer.FPDT_Attention(1)


def test_it_refuses_the_real_ones_files(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    (folder / "__init__.py").write_bytes((SHIM / "deepspeed" / "__init__.py").read_bytes())
    (folder / "runtime").mkdir()
    (folder / "env_report.py").touch()
    with pytest.raises(ImportError, match=r"env_report.py and 1 more.*pip uninstall deepspeed"):
        modules.refuse_mixture([str(folder)])


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        ("env_report", "", "torch"),
        ("launcher.runner", "--autotuning run a.py", "no --deepspeed_config FILE"),
        ("utils.zero_to_fp32", "nowhere out", "nowhere"),
        ("utils.zero_to_torch", "nowhere out --dtype bf16", "nowhere"),
        ("checkpoint.ds_to_universal", "--input_folder nowhere/a --output_folder out/b", "nowhere/a does not exist"),
    ],
)
@pytest.mark.usefixtures("deepspeed")
def test_modules_that_python_runs(
    module: str, arguments: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"deepspeed.{module}", run_name="__main__")
    said = "".join(capfd.readouterr())
    assert text in said and (ended.value.code or 0) == (2 if arguments else 0), said


def test_the_launcher_as_a_module_gives_a_program_its_rank(tmp_path: Path) -> None:
    program = tmp_path / "a.sh"
    program.write_text('#!/bin/sh\necho got: "$@"\n')
    program.chmod(0o755)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--no_python", "./a.sh", "two words", "3"]
    env = os.environ | {"PYTHONPATH": f"{SHIM}:{ROOT / 'src'}"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "got: --local_rank=0 two words 3" in done.stdout and done.returncode == 0, done.stderr


def test_the_page_for_deepspeeds_users_is_a_guide() -> None:
    """The tables of keys and names have a page of their own."""
    assert len((ROOT / "docs" / "COMING_FROM_DEEPSPEED.md").read_text().splitlines()) <= 250


# -- behavior (reference/deepspeed-surface.md, 1.18) --


@pytest.mark.usefixtures("group")
def test_a_window_counts_and_scales_as_deepspeed_does(deepspeed: Any) -> None:
    engine = make(deepspeed, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.get_batch_info() == (4, 2, 2)
    loss = engine(toy.tokens(0, 0))
    torch.testing.assert_close(engine.backward(loss), loss.detach() / 2)
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (0, 1, False)
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(engine(toy.tokens(0, 1)))
    engine.step()
    assert (engine.global_steps, engine.global_samples, engine.was_step_applied()) == (1, 4, True)
    assert engine.get_global_grad_norm() > 0
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 4 and engine.train_batch_size() == 8
    assert explain.of_states(engine.states).setting.plan.batch.accumulation == 4
    for i in range(3):
        step(engine, i)
    assert engine.global_steps == 1
    step(engine)
    assert engine.global_steps == 2
    with pytest.raises(ValueError, match=r"set_train_batch_size\(7\)"):
        engine.set_train_batch_size(7)
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (12, 3, 4)
    engine.destroy()
    engine = make(deepspeed, train_batch_size=4, train_micro_batch_size_per_gpu=None, slipstream={"elastic_batch": True})
    with pytest.raises(ValueError, match=r"set_train_micro_batch_size\(3\): .*elastic_batch derives it"):
        engine.set_train_micro_batch_size(3)
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_more_micro_batches_than_the_engine_was_made_for_are_not_added_up_in_16_bits(deepspeed: Any) -> None:
    for block in ({}, {"data_types": {"grad_accum_dtype": "fp32"}}, {"gradient_accumulation_steps": 2}):
        engine = make(deepspeed, train_micro_batch_size_per_gpu=2, bf16={"enabled": True}, **block)
        if block:
            engine.set_train_batch_size(8)
            assert {unit.grads.dtype for unit in probe.units(engine) if unit.grads is not None} == {torch.float32}
        else:
            with pytest.raises(ValueError, match=r"would accumulate 4 in torch\.bfloat16.*grad_accum_dtype"):
                engine.set_train_batch_size(8)
            engine.set_train_batch_size(2)
        assert engine.gradient_accumulation_steps() == (4 if block else 1)
        engine.destroy()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("block", "batch"),
    [
        ({"train_batch_size": 6}, (6, 6, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, (3, 3, 1)),
        ({"train_batch_size": 6, "gradient_accumulation_steps": 3}, (6, 2, 3)),
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3}, (6, 3, 2)),
        ({}, "neither train_batch_size nor"),
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, r"\(6\) != .* = 8"),
    ],
)
def test_what_is_missing_of_the_batch_is_derived(deepspeed: Any, block: dict[str, int], batch: Any) -> None:
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")) | block
    if isinstance(batch, str):
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=batch):
            make(deepspeed, **sizes)
    else:
        engine = make(deepspeed, **sizes)
        assert engine.get_batch_info() == batch
        engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_step_inside_a_window_changes_nothing_and_one_at_its_end_everything(deepspeed: Any) -> None:
    engine = make(deepspeed, 2, gradient_accumulation_steps=2, gradient_clipping=0.1)
    weight, utils = engine.module.head.weight, deepspeed.utils
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="scalar"):
        engine.backward(engine.module.head(torch.ones(2, 16)))
    engine.zero_grad()
    engine.backward(engine(toy.tokens(0, 0)))
    engine.step()
    assert torch.equal(weight, before) and utils.safe_get_full_grad(weight) is not None and engine.get_global_grad_norm() is None
    engine.backward(engine(toy.tokens(0, 1)))
    engine.step()
    assert not torch.equal(weight, before) and utils.safe_get_full_grad(weight) is None
    assert engine.get_global_grad_norm() > 0.1  # the norm before clipping
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_the_loss_scale_falls_after_two_overflows_and_ends_at_the_lowest(deepspeed: Any) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = make(deepspeed, 1, fp16={"enabled": True, "min_loss_scale": 16384}, scheduler=scheduler)
    scales = [engine.loss_scale()]

    def overflow() -> None:
        engine.backward(engine(toy.tokens(0, 0)) * float("inf"))
        engine.step()
        scales.append(engine.loss_scale())

    for _ in range(3):
        overflow()
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**14] and engine.get_lr() == [0.0] and engine.skipped_steps == 3
    for _ in range(2):
        step(engine)
    assert engine.get_lr() == pytest.approx([0.025]) and engine.global_steps == 5  # skipped steps did not warm it up
    with pytest.raises(OverflowError, match=r"lowest loss scale \(16384"):
        overflow()
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_which_optimizer_a_schedule_gets(deepspeed: Any) -> None:
    """The config's the one that is returned, a callable the one that it stands for."""
    optimizers: list[Any] = []

    def make_schedule(optimizer: Any) -> Any:
        optimizers.append(optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))

    config = toy.settings(1)
    for scheduler, expected in ((make_schedule, [1e-2, 5e-3]), (None, [0.0, 0.1])):
        if scheduler is None:
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}  # by logarithms
        engine, handle, _, schedule = deepspeed.initialize(
            model=toy.seeded(toy.Lm), config=config, lr_scheduler=scheduler, dist_init_required=False
        )
        assert schedule.optimizer is (optimizers[0] if scheduler else handle) and type(optimizers[0]) is torch.optim.AdamW
        rates = [*engine.get_lr()]
        step(engine)
        step(engine) if scheduler is None else None
        assert [*rates, *engine.get_lr()] == pytest.approx(expected) and handle.param_groups[0]["lr"] == engine.get_lr()[0]
        engine.destroy()


@pytest.mark.usefixtures("group")
def test_an_overflow_is_a_step_that_is_skipped(deepspeed: Any) -> None:
    engine = make(deepspeed, 1, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    engine.backward(engine(toy.tokens(0, 0)) * float("inf"))
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale()) == (1, 1, 128.0)
    assert engine.optimizer.overflow and not engine.was_step_applied()
    assert engine.dynamic_loss_scale() and engine.fp16_enabled() and not engine.bfloat16_enabled()
    step(engine)
    assert not engine.optimizer.overflow and engine.skipped_steps == 1
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_schedule_steps_with_the_engine(deepspeed: Any, tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}
    automatic = {"checkpoint": {"folder": str(tmp_path), "every_steps": 4}}
    engine = make(deepspeed, 0, scheduler=scheduler, slipstream=automatic)
    rates = []
    for i in range(3):
        step(engine, i)
        rates += engine.get_lr()
    assert rates == pytest.approx([0.0, 0.025, 0.05]) and engine.lr_scheduler.get_last_lr() == engine.get_lr()
    assert type(engine.lr_scheduler).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    before = engine(toy.tokens(0, 0))
    engine.backward(before)
    engine.optimizer.step()  # Fabric's call; its users step the schedule
    assert engine.global_steps == 4 and engine.get_lr() == rates[2:] and engine(toy.tokens(0, 0)) < before
    assert load_metadata(str(tmp_path), "global_step4").shared["scheduler"] == engine.lr_scheduler.state_dict()
    with pytest.raises(ValueError, match="call the closure"):
        engine.optimizer.step(lambda: None)
    engine.destroy()


class Samples:
    """A schedule that counts samples, as Megatron's `OptimizerParamScheduler`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.num_steps)

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


class Epochs(Samples):
    """One of epochs, as timm's, which would take the number of samples for an epoch."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.num_steps = epoch


@pytest.mark.usefixtures("group")
def test_a_schedule_of_epochs_needs_them_at_each_step(deepspeed: Any) -> None:
    """Without them, nothing is updated. Slipstream's own engine, which cannot pass them, refuses the schedule at once."""
    with pytest.raises(ValueError, match=r"Epochs, whose step\(\) needs epoch, which the engine cannot pass: build it"):
        initialize(model=toy.seeded(toy.Lm), lr_scheduler=Epochs, config=toy.settings(0))
    stages = deepspeed.PipelineModule([torch.nn.Linear(2, 2)], num_stages=1, loss_fn=torch.nn.MSELoss())
    with pytest.raises(ValueError, match=r"Epochs, whose step\(\) needs epoch, which train_batch\(\) cannot pass: build it"):
        deepspeed.initialize(model=stages, lr_scheduler=Epochs, config=toy.settings(0))
    engine, _, _, schedule = deepspeed.initialize(model=toy.seeded(toy.Lm), lr_scheduler=Epochs, config=toy.settings(0))
    engine.backward(engine(toy.tokens(0, 0)))
    with pytest.raises(ValueError, match=r"Epochs, whose step\(\) needs epoch, which engine.step\(\) did not get: pass"):
        engine.step()
    engine.step(lr_kwargs={"epoch": 3})
    assert (schedule.num_steps, engine.global_steps) == (3, 1)


@pytest.mark.usefixtures("group")
def test_a_schedule_may_count_samples(deepspeed: Any, tmp_path: Path) -> None:
    """It gets those of the window, or what the step says; after an overflow nothing. A checkpoint has its state."""
    half = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    config = toy.settings(2, gradient_accumulation_steps=2, optimizer=None, fp16=half)
    model = toy.seeded(toy.Lm)
    stages = deepspeed.PipelineModule([torch.nn.Linear(2, 2)], num_stages=1, loss_fn=torch.nn.MSELoss())
    own, others = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(stages.parameters())
    engine, _, _, schedule = deepspeed.initialize(model=model, optimizer=own, lr_scheduler=Samples(own), config=config)
    for i in range(2):
        step(engine, i)
    assert schedule is engine.lr_scheduler is engine.client_lr_scheduler and schedule.num_steps == engine.train_batch_size() == 4
    engine.save_checkpoint(str(tmp_path))
    for increment, total in ((7, 4), (8, 12)):
        engine.backward(engine(toy.tokens(0, 0)))
        engine.step(lr_kwargs={"increment": increment})
        assert schedule.num_steps == total and engine.get_lr() == [1e-2 / (1 + total)]
    for _ in range(2):
        engine.backward(engine(toy.tokens(0, 0)) * float("inf"))
        engine.step(lr_kwargs={"increment": 8})
    assert schedule.num_steps == 12 and engine.skipped_steps == 1
    engine.set_train_batch_size(6)
    for i in range(3):
        step(engine, i)
    assert schedule.num_steps == 18
    with pytest.raises(ValueError, match=r"lr_kwargs=.*Samples.step\(\): missing a required argument: 'increment'"):
        engine.step(lr_kwargs={"tokens": 1})
    engine.load_checkpoint(str(tmp_path))
    assert schedule.num_steps == 4
    engine.destroy()
    engine, _, _, schedule = deepspeed.initialize(model=stages, optimizer=others, lr_scheduler=Samples, config=toy.settings(1))
    engine.train_batch(iter([(torch.ones(2, 2), torch.zeros(2, 2))]))
    assert schedule.num_steps == 2
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_schedule_without_an_optimizer_is_left_out(deepspeed: Any) -> None:
    """transformers takes the optimizer out of the config, and leaves the schedule, where it only evaluates."""
    config = toy.settings(3, scheduler={"type": "WarmupLR", "params": {}})
    del config["optimizer"]
    model = toy.seeded(toy.Lm)
    engine, handle, _, scheduler = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    assert handle is None and scheduler is None and engine.config == config
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_folder_that_is_none_is_refused(deepspeed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make(deepspeed)
    for call, name in (
        (engine.save_checkpoint, "save_dir"),
        (engine.load_checkpoint, "load_dir"),
        (engine.save_pretrained, "save"),
    ):
        for folder in (None, ""):
            with pytest.raises(ValueError, match=rf"{name}\w*=\) is {folder!r}: pass the path"):
                call(folder)
    assert os.listdir(tmp_path) == []
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_checkpoint_tags(deepspeed: Any, tmp_path: Path) -> None:
    engine = make(deepspeed)
    step(engine)
    engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text().strip() == "global_step1" and (tmp_path / "global_step1").is_dir()
    step(engine)
    folder, client = engine.load_checkpoint(str(tmp_path))
    assert folder == str(tmp_path / "global_step1") and client == {"epoch": 3} and engine.global_steps == 1
    state = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    expected = engine.module_state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    engine.load_module_state_dict({"module": {name: value + 1 for name, value in expected.items()}}, fetch_z3_params=True)
    assert all(torch.equal(value, expected[name] + 1) for name, value in engine.module_state_dict().items())
    engine.load_module_state_dict(expected)
    other = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(toy.seeded(toy.Lm, seed=5), tmp_path)
    assert torch.equal(other.head.weight, expected["head.weight"])
    readers, place = deepspeed.utils.zero_to_fp32, str(tmp_path / "global_step1")  # of Lightning's converter
    zero_stage = torch.load(readers.get_optim_files(place)[0])["optimizer_state_dict"]["zero_stage"]
    assert torch.load(readers.get_model_state_file(place, zero_stage)) == {"epoch": 3}
    assert engine.save_16bit_model(str(tmp_path / "out")) is True
    saved = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    engine.save_16bit_model(str(tmp_path / "out"), "model.safetensors", exclude_frozen_parameters=True)
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() == expected.keys()
    (tmp_path / "out" / "taken").mkdir()
    with pytest.raises(ValueError, match=r"taken was not written: .*directory"):
        engine.save_16bit_model(str(tmp_path / "out"), "taken")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "pytorch_model.bin", "taken"]
    convert = deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(tmp_path, tmp_path / "parts", max_shard_size="2KB")
    index = json.loads((tmp_path / "parts" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert index.keys() == expected.keys() and len(set(index.values())) > 1
    assert all(torch.equal(torch.load(tmp_path / "parts" / file)[name], expected[name]) for name, file in index.items())
    convert(tmp_path, tmp_path / "safe", max_shard_size="2KB", safe_serialization=True)
    assert len(list((tmp_path / "safe").glob("model-*-of-*.safetensors"))) > 1
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_tied_weights_have_all_their_names(deepspeed: Any, tmp_path: Path) -> None:
    def tied() -> Any:
        model = toy.seeded(toy.Lm)
        model.head.weight, model.blocks[2] = model.embedding.weight, model.blocks[0]
        return model

    zero_to_fp32, engine = deepspeed.utils.zero_to_fp32, make(deepspeed, model=tied())
    step(engine)
    engine.save_checkpoint(str(tmp_path))
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    tied().load_state_dict(state)  # strict
    assert state["head.weight"] is state["embedding.weight"] and state["blocks.2.up.bias"] is state["blocks.0.up.bias"]
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "parts", max_shard_size="2KB")
    parts: dict[str, Any] = {}
    for file in (tmp_path / "parts").glob("*.bin"):
        parts |= torch.load(file)
    tied().load_state_dict(parts)
    assert parts["head.weight"].data_ptr() == parts["embedding.weight"].data_ptr()
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "half", dtype="bfloat16")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin")
    assert half["head.weight"].data_ptr() == half["embedding.weight"].data_ptr()
    assert half.keys() == state.keys() and all(torch.equal(value, state[name].bfloat16()) for name, value in half.items())
    with pytest.raises(ValueError, match=r"dtype='int8'.*bf16"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "codes", dtype="int8")
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    safe = safetensors.torch.load_file(tmp_path / "safe" / "model.safetensors")
    assert safe.keys() == {name for name in state if not name.startswith(("head.weight", "blocks.2"))}
    (metadata,) = tmp_path.glob("*/metadata.json")
    header, body = metadata.read_bytes().split(b"\n", 1)
    older = json.loads(body.removesuffix(b"\n}\n"))
    assert older["shared"].pop("aliases")["head.weight"] == "embedding.weight"
    raw = json.dumps(older, separators=(",", ":")).encode()
    metadata.write_bytes(re.sub(rb'"crc32": \d+', b'"crc32": %d' % zlib.crc32(raw), header) + b"\n" + raw + b"\n}\n")
    assert "head.weight" not in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert engine.load_checkpoint(str(tmp_path))[0] is not None
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_folder_of_checkpoints_brings_its_own_converter(deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `ds_to_universal` writes what `load_universal` loads; frozen parameters can be left out."""
    model = toy.seeded(toy.Lm)
    model.embedding.weight.requires_grad_(False)
    engine = make(deepspeed, model=model)
    step(engine)
    engine.save_checkpoint(str(tmp_path), "a")
    expected = {name: value.float() for name, value in engine.state_dict().items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", ".", "out", "--exclude_frozen_parameters"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path("zero_to_fp32.py", run_name="__main__")
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert found.keys() == expected.keys() - {"embedding.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    monkeypatch.setattr(sys, "argv", ["zero_to_torch.py", ".", "half", "--dtype", "bf16"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path("zero_to_torch.py", run_name="__main__")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin")
    assert half.keys() == expected.keys() and all(torch.equal(v, expected[name].bfloat16()) for name, v in half.items())
    folders = argparse.Namespace(input_folder=str(tmp_path / "a"), output_folder=str(tmp_path / "any_name"))
    universal = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    assert universal.main(folders) == 0
    with pytest.raises(ValueError, match="nowhere does not exist"):
        universal.main(argparse.Namespace(input_folder=str(tmp_path / "nowhere"), output_folder=folders.output_folder))
    assert (tmp_path / "latest_universal").read_text() == "any_name" and (tmp_path / "any_name" / "zero").is_dir()
    other = make(deepspeed, model=toy.seeded(toy.Lm, seed=3), checkpoint={"load_universal": True})
    assert other.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "any_name")
    assert all(torch.equal(value.float(), expected[name]) for name, value in other.state_dict().items())
    engine.save_checkpoint(str(tmp_path), "b", contents="weights")
    with pytest.raises(ValueError, match="has no optimizer state, which tells"):
        deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "b", exclude_frozen_parameters=True)
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_tag_may_be_a_number_and_a_client_state_a_namespace(deepspeed: Any, tmp_path: Path) -> None:
    engine = make(deepspeed)
    state = {"args": argparse.Namespace(lr=0.1), "seen": {1, "a"}, "counts": defaultdict(int, {"a": 1})}
    for tag in (0, 1.5):  # CIFAR's example saves under its loss
        assert engine.save_checkpoint(str(tmp_path), tag, client_state=state)
        assert (tmp_path / str(tag) / "metadata.json").is_file()
        assert engine.load_checkpoint(str(tmp_path), tag) == (str(tmp_path / str(tag)), state)
        weights = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag)
        assert torch.equal(weights["head.weight"], engine.state_dict()["head.weight"])
    with pytest.raises(ValueError, match=r"client'?\]?\['engine'\]: a value of type .*Lm"):
        engine.save_checkpoint(str(tmp_path), client_state={"engine": engine.module})
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_a_folder_without_a_checkpoint(deepspeed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(deepspeed)
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)  # Lightning asks for the second
    assert "latest" in caplog.text
    engine.destroy()


@pytest.mark.parametrize("name", ["z2-w4-bf16", "z3-w2-fp32", "z1-w2-fp32-universal"])
def test_weights_of_deepspeeds_own_checkpoints(deepspeed: Any, name: str, tmp_path: Path) -> None:
    """The loss that DeepSpeed itself had next."""
    with tarfile.open(ds.ARCHIVE) as archive:
        members = [member for member in archive.getmembers() if member.name.startswith(f"deepspeed/{name}/")]
        archive.extractall(tmp_path, members, filter="data")
    folder = tmp_path / "deepspeed" / name
    readers, place = deepspeed.utils.zero_to_fp32, folder / "global_step3"
    if place.exists():
        assert len(readers.get_optim_files(place)) == int(name[4])
        assert torch.load(readers.get_model_state_file(place, int(name[1])), weights_only=False)["global_steps"] == 3
    model = ds.model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.5)
    deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(model, folder)
    model.load_state_dict(deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder))  # strict
    expected = json.loads((folder / "losses.json").read_text())[0]
    with torch.no_grad():
        assert model(ds.batch(ds.STEPS, 0, 1)).item() == pytest.approx(expected, rel=1e-6 if "fp32" in name else 5e-3)


@pytest.mark.usefixtures("group")
def test_states_of_a_parameter(deepspeed: Any) -> None:
    utils = deepspeed.utils
    engine = make(deepspeed)
    weight = engine.module.head.weight
    assert hasattr(weight, "ds_id") and weight.ds_status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    assert utils.safe_get_full_grad(weight) is None
    engine.backward(engine(toy.tokens(0, 0)))
    grad = utils.safe_get_full_grad(weight)
    assert grad.shape == weight.ds_shape and grad.norm() > 0
    utils.safe_set_full_grad(weight, torch.zeros_like(grad))
    assert utils.safe_get_full_grad(weight).norm() == 0
    utils.safe_set_local_grad(weight, torch.ones_like(utils.safe_get_local_grad(weight)))
    utils.safe_update_full_grad_vectorized([weight], lambda grad, param: grad * 2)
    torch.testing.assert_close(utils.safe_get_full_grad(weight), torch.full(weight.shape, 2.0))
    engine.step()
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg").norm() > 0
    utils.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    assert utils.safe_get_local_optimizer_state(weight, "exp_avg").norm() == 0
    utils.safe_set_full_fp32_param(weight, torch.ones(weight.shape))
    utils.safe_set_local_fp32_param(weight, utils.safe_get_local_fp32_param(weight) * 3)
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE and weight.eq(3).all()
    with deepspeed.zero.GatheredParameters([weight, None], modifier_rank=0):
        assert weight.eq(3).all()
        weight.data.fill_(7)
    assert utils.safe_get_full_fp32_param(weight).eq(7).all()
    engine.destroy()
    with pytest.raises(ValueError, match="belongs to no engine"):
        utils.safe_get_full_fp32_param(weight)


@pytest.mark.usefixtures("group")
def test_what_the_engine_lacks_it_looks_for_in_the_model(deepspeed: Any) -> None:
    engine = make(deepspeed)
    assert engine.head is engine.module.head
    assert (engine.sparse_gradients_enabled(), engine.pld_enabled(), engine.mics_shard_size) == (False, False, -1)
    engine.optimizer.offload_states()  # on a CPU they are where they would go
    engine.optimizer.reload_states()
    assert not hasattr(engine, "train_batch")
    with pytest.raises(AttributeError, match=r"train_batch is not built yet: .* for pipelines only; loop over engine\(batch\)"):
        engine.train_batch  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engine.nothing  # noqa: B018
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_marks_of_parameters_follow_the_model(deepspeed: Any) -> None:
    """TRL reads `ds_status` of any parameter of a model under stage 3, and transformers `ds_numel`."""
    engine = make(deepspeed)
    model, head, released = engine.module, engine.module.head.weight, deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    assert head.numel() == head.ds_numel > 0 and head.ds_tensor.numel() == head.numel()  # of one rank
    ids = {id(param): param.ds_id for param in model.parameters()}
    with engine.surgery():
        model.extra, model.head = torch.nn.Linear(4, 4), torch.nn.Linear(*reversed(head.shape))
    for param in model.parameters():
        assert (param.ds_status, param.ds_shape, param.ds_numel) == (released, param.shape, param.numel())
        assert param.ds_id == ids.get(id(param), param.ds_id) and param.ds_active_sub_modules == set()
    assert len({param.ds_id for param in model.parameters()}) == len(list(model.parameters())) and not hasattr(head, "ds_id")
    assert model.extra.weight in {param for _, param in engine.optimizer.parameter_offload.module.named_parameters()}
    engine.destroy()
    assert not any(hasattr(param, "ds_id") or hasattr(param, "ds_status") for param in model.parameters())


class _Product(torch.autograd.Function):
    """As TRL's fused losses: both ways ask the weight whether it is whole, and gather it where it is not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        with _gathered(weight):
            return grad @ weight, grad.t() @ x


def _gathered(weight: Any) -> Any:
    if not hasattr(weight, "ds_status"):
        assert type(weight) is not torch.Tensor, "what was saved is the parameter itself"
        return contextlib.nullcontext()
    from deepspeed import zero  # type: ignore[import-not-found,unused-ignore]

    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    return zero.GatheredParameters([weight])


class _Fused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).tanh()
        with _gathered(self.head.weight):
            return _Product.apply(h, self.head.weight).square().mean()


@pytest.mark.usefixtures("group")
def test_a_function_gathers_the_parameter_that_it_has_saved(deepspeed: Any) -> None:
    engine, plain, x = make(deepspeed, model=toy.seeded(_Fused)), toy.seeded(_Fused), torch.randn(3, 4)
    engine.backward(engine(x))
    plain(x).backward()
    for name, param in engine.module.named_parameters():
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(param), plain.get_parameter(name).grad)
    engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    "sizes",
    [
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"train_batch_size": 7, "gradient_accumulation_steps": 2},
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
    ],
)
@pytest.mark.usefixtures("group")
def test_batch_sizes_that_disagree_say_so_in_known_words(deepspeed: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="Check batch related parameters"):
        make(deepspeed, **sizes)


@pytest.mark.usefixtures("group")
def test_the_engine_says_what_the_config_says(deepspeed: Any) -> None:
    offload = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 7, "prefetch_bucket_size": 5}
    blocks = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", **offload}, "gradient_clipping": "auto"}
    engine, bare = make(deepspeed, **blocks), make(deepspeed, 0, optimizer=None)
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_partial_offload() == 0.5
    assert (engine.zero_sub_group_size(), engine.zero_prefetch_bucket_size()) == (7, 5)
    assert bare.zero_offload_optimizer() is None is bare.zero_offload_param() and bare.zero_partial_offload() == 1.0
    assert engine.zero_reduce_bucket_size() == bare.zero_reduce_bucket_size() == 500_000_000
    assert not bare.flops_profiler_enabled() and not bare.curriculum_learning_enabled()
    assert bare.gradient_predivide_factor() == 1.0
    assert (engine.zero_overlap_comm(), bare.zero_overlap_comm()) == (True, False) and engine.get_type() == [0.0]
    assert engine.communication_data_type is torch.float32 and engine.aio_config()["queue_depth"] == 8
    sampling, routing = engine.data_efficiency_config()["data_sampling"], engine.random_ltd_config()
    assert sampling == engine.data_sampling_config() and not sampling["enabled"] and not routing["enabled"]
    for name in names.CONFIG_GETTERS:
        getattr(bare, name)(), getattr(engine, name)()
    assert not engine.is_compiled
    engine.compile(backend="eager")
    assert engine.is_compiled
    for name, why in names.MISSING_METHODS.items():
        with pytest.raises(AttributeError, match=re.escape(f"engine.{name} is not built yet: {why}")):
            getattr(engine, name)
    engine.destroy()
    bare.destroy()


@pytest.mark.usefixtures("group")
def test_what_the_caller_gave(deepspeed: Any, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed's own in lower case, others as the config has them, and the class of a caller's own."""
    model = toy.seeded(toy.Lm)
    for config, own, name in (
        ({"type": "AdamW", "params": {}}, None, "adamw"),
        ({"type": "SGD", "params": {"lr": 0.1}}, None, "SGD"),
        (None, torch.optim.RMSprop(model.parameters()), "RMSprop"),
    ):
        settings = toy.settings(1, optimizer=config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=settings, dist_init_required=False)
        assert engine.optimizer_name() == name and engine.mpu is engine.client_lr_scheduler is engine.seq_parallel_group is None
        assert engine.basic_optimizer is (own or engine.optimizer.optimizer) and engine.sequence_parallel_size == 1
        assert engine.optimizer.dp_process_group is engine.data_parallel_group
        assert not engine.has_moe_layers and engine.num_experts == []
        engine.has_moe_layers = True  # GPT-NeoX, for layers that DeepSpeed does not know
        assert engine.has_moe_layers
        engine.destroy()
        assert engine.basic_optimizer is None
    pipeline = deepspeed.PipelineModule([model], loss_fn=lambda out, target: out.mean(), num_stages=1)
    engine, *_ = deepspeed.initialize(model=pipeline, config=toy.settings(1), dist_init_required=False)
    assert engine.mpu is engine.grid and engine.mpu.get_data_parallel_world_size() == 1  # as scripts read it
    micro = iter([(toy.tokens(0, 0), toy.tokens(0, 0))] * 9)
    engine.micro_batches *= 3  # qlora-pipe, around an evaluation
    assert engine.eval_batch(micro).isfinite() and len([*micro]) == 6 and not engine.is_pipe_parallel
    engine.micro_batches = 1
    assert engine.gradient_accumulation_steps() == engine.train_batch_size() // engine.train_micro_batch_size_per_gpu() == 1
    for dtype, warns in ((torch.float32, False), (torch.bfloat16, True)):
        engine.communication_data_type = dtype
        assert ("torch.bfloat16 has no effect: set" in caplog.text) == warns
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_slipstreams_engine_names_what_replaces_a_method_of_deepspeeds(deepspeed: Any) -> None:
    engine, *_ = initialize(model=toy.seeded(toy.Lm), config=toy.settings(3), dist_init_required=False)
    for name in (*deepspeed_names.RENAMED, *deepspeed_names._INSTEAD):
        assert hasattr(deepspeed.DeepSpeedEngine, name) or name in ("config", "generate")  # by config, of one engine
        assert not hasattr(engine, name) and getattr(engine, name, None) is None
    for name, path in deepspeed_names.RENAMED.items():
        operator.attrgetter(path)(engine)
        with pytest.raises(AttributeError, match=re.escape(f"no attribute '{name}': use engine.{path}. DeepSpeed's methods")):
            getattr(engine, name)
    with pytest.raises(AttributeError, match=re.escape("'dump_state_of_zero': DeepSpeed's methods exist on the engine of")):
        engine.dump_state_of_zero  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute '__deepcopy__'$"):
        engine.__deepcopy__  # noqa: B018
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_unknown_top_level_keys_are_ignored_and_logged(deepspeed: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As DeepSpeed ignores them; a typo is refused, and natively every unknown key is."""
    engine = make(deepspeed, model_name="mine", max_epochs=3)
    (message,) = [record.getMessage() for record in caplog.records if "unknown top-level keys" in record.getMessage()]
    assert "model_name" in message and "max_epochs" in message
    assert (
        engine.config["model_name"] == "mine"
        and "unknown_keys" not in engine.config["slipstream"]
        and engine.zero_optimization_stage() == 3
    )
    engine.destroy()
    with pytest.raises(ValueError, match="gradient_cliping; did you mean gradient_clipping"):
        make(deepspeed, gradient_cliping=1.0)
    with pytest.raises(ValueError, match="model_name; no similar key exists"):
        initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": 1, "model_name": "mine"})


def test_configs_of_clients(deepspeed: Any) -> None:
    """base64 (DeepSpeed's command lines), and TRL's dotted keys, which do not override what the block says."""
    import base64
    import json

    from slipstream.compat.engine import _decode, _unfold

    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    assert _decode(base64.urlsafe_b64encode(json.dumps(config).encode()).decode()) == config
    assert _decode("missing.json") == "missing.json"
    dotted = config | {"zero_optimization.stage": 1, "zero_optimization.reduce_bucket_size": 0.9}
    assert _unfold(dotted)["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 0.9}


@pytest.mark.usefixtures("group")
def test_a_model_built_in_init_is_in_ranges_until_it_has_an_engine(deepspeed: Any) -> None:
    zero = deepspeed.zero
    plain = toy.seeded(toy.Lm)
    with zero.Init():
        model = toy.seeded(toy.Lm)
        model.head.weight.data.mul_(2)  # constructors write after modules are complete
        model.head.weight.float().clone().flatten().zero_()  # a copy's own values
        third = torch.nn.Module()
        third.weight = torch.nn.Parameter(model.head.weight.float().T.contiguous())
        third.same = torch.nn.Parameter(model.head.weight.float())
        third.register_buffer("first", model.head.weight.double().clone())
        third.register_buffer("rows", model.head.weight.detach())
    for buffer in third.buffers():
        torch.testing.assert_close(buffer.float(), plain.head.weight * 2)
        assert type(buffer) is torch.Tensor
    with zero.GatheredParameters(third.parameters()):
        torch.testing.assert_close(third.weight, plain.head.weight.T * 2)
        torch.testing.assert_close(third.same, plain.head.weight * 2)
    weight = model.head.weight
    assert weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE and weight.isnan().all()
    assert weight.shape == plain.head.weight.shape and weight.device.type == "cpu" and weight.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="GatheredParameters"):
        weight.zero_()
    assert model.to("cpu") is model and model.bfloat16().head.weight is weight and weight.ds_tensor.dtype is torch.bfloat16
    assert model.float().head.weight is weight and weight.dtype is torch.float32
    weight.data = torch.nn.functional.pad(weight.data.clone(), (0, 0)).to(weight.dtype)  # as transformers does when it ties a head
    twin, ones = model.embedding.weight, torch.ones(weight.shape, dtype=torch.float64)
    assert twin.shape == weight.shape
    others = (twin.data, twin.data.clone(), twin.float(), ones.to(weight.data))
    for computed in (weight.data * 2, torch.nn.functional.pad(weight.data, (0, 1)), *others):
        with pytest.raises(RuntimeError, match="GatheredParameters"):
            weight.data = computed
    for write in (lambda values: values.fill_(1), lambda values: values.__setitem__(0, 1)):
        with pytest.raises(RuntimeError, match="GatheredParameters"):
            write(weight.data.clone())
    assert weight.equal(weight) and not torch.equal(weight, model.embedding.weight)
    assert weight.untyped_storage().nbytes() == 4
    torch.testing.assert_close(weight.ds_tensor.view(weight.shape), (plain.head.weight * 2).bfloat16().float())
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(plain.state_dict())
        weight.data.mul_(2)
    with zero.GatheredParameters(model.parameters()):
        torch.testing.assert_close(weight, plain.head.weight * 2)
    with zero.GatheredParameters([model.embedding.weight], modifier_rank=0):
        model.embedding.weight.data.fill_(float("nan"))
    with zero.GatheredParameters([model.embedding.weight]):
        assert model.embedding.weight.isnan().all()
    with zero.GatheredParameters([model.embedding.weight], modifier_rank=0):
        model.embedding.weight.data.fill_(0.5)
    model.blocks[0].up.weight.data[0].zero_()
    with pytest.raises(RuntimeError, match=r"a view of it was written.*GatheredParameters"):
        make(deepspeed, model=model)
    model.blocks[0].up.weight.data[0].fill_(float("nan"))  # as before
    model.extra = torch.nn.Linear(2, 2)  # an adapter, beside parameters in ranges
    with pytest.raises(ValueError, match="train_batch_siz;"):
        deepspeed.initialize(model=model, config={"train_batch_siz": 1}, dist_init_required=False)
    engine = make(deepspeed, model=model)
    state = engine.state_dict()
    torch.testing.assert_close(state["head.weight"], plain.head.weight * 2)
    torch.testing.assert_close(state["blocks.1.up.weight"], plain.blocks[1].up.weight)
    assert state["embedding.weight"].eq(0.5).all() and weight.ds_tensor.untyped_storage().nbytes() > weight.ds_tensor.nbytes
    step(engine)
    engine.destroy()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_has_one_engine_after_another(deepspeed: Any, stage: int) -> None:
    """TRL's precompute_ref_log_probs, whose engine goes on answering; Lightning's fit, test and fit."""
    model, ids = toy.seeded(toy.Lm), toy.tokens(0, 0)
    config = {"train_batch_size": len(ids), "zero_optimization": {"stage": stage}}
    deepspeed.initialize(model=model, config=config)  # dropped, but not on each rank at once
    gc.collect()
    reference, *_ = deepspeed.initialize(model=model, config=config)
    before = reference.eval()(ids).item()
    engine = make(deepspeed, model=model)
    assert reference(ids).item() == before
    step(engine)
    assert reference(ids).item() < before
    evaluation, *_ = deepspeed.initialize(model=model.to(torch.float32), config=config)
    assert evaluation.eval()(ids).item() == engine(ids).item() < before
    with pytest.raises(RuntimeError, match="this engine was destroyed"):
        engine.step()
    engine = make(deepspeed, model=model)
    step(engine)
    engine.destroy()
    head = copy.copy(model.head)
    head.weight = torch.nn.Parameter(torch.zeros_like(model.head.weight))
    assert head.state_dict()["weight"].eq(0).all()


@pytest.mark.usefixtures("group")
def test_a_module_of_a_model_in_init_can_be_whole(deepspeed: Any) -> None:
    inside, utils = deepspeed.zero.partition_parameters, importlib.import_module("deepspeed.runtime.zero.utils")
    with deepspeed.zero.Init():
        inside.shutdown_init_context()
        whole = torch.nn.Linear(4, 4)
        with deepspeed.zero.Init():
            assert utils.is_zero_param(torch.nn.Sequential(torch.nn.Linear(2, 2))[0].weight)
        inside.restore_init_context()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), whole)
        inside.shutdown_init_context()
    inside.restore_init_context()  # of a context that has ended
    assert [utils.is_zero_param(param) for param in model.parameters()] == [True, True, False, False]
    assert utils.apply_to_tensors_only(torch.numel, (model[1].bias, {"a": 3})) == (4, {"a": 3})
    assert not deepspeed.zero.Init.is_open() and not utils.is_zero_param(torch.nn.Linear(2, 2).weight)
    make(deepspeed, model=torch.nn.Sequential(model)).destroy()


@pytest.mark.usefixtures("group")
def test_init_shards_at_the_end_of_each_context_and_engines_are_built_inside(deepspeed: Any) -> None:
    models = []
    with deepspeed.zero.Init():
        for stage in (3, 3, 0):
            with deepspeed.zero.Init():
                models.append(torch.nn.Linear(4, 1))
            assert hasattr(models[-1].weight, "ds_id")
            models.append(torch.nn.Linear(4, 1))
            for model in models[-2:]:
                engine = make(deepspeed, stage, model)
                engine.backward(engine(torch.ones(1, 4)).sum())
                engine.step()
        last = torch.nn.Linear(4, 1)
    assert hasattr(last.weight, "ds_id") and not hasattr(torch.nn.Linear(4, 1).weight, "ds_id")


@pytest.mark.usefixtures("group")
def test_init_does_not_shard_over_fewer_ranks_than_were_launched(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RuntimeError, match="the launcher started 8 ranks"):
        deepspeed.zero.Init()
    assert deepspeed.zero.Init(data_parallel_group=torch.distributed.group.WORLD).enabled


@pytest.mark.parametrize("mode", [True, False])
def test_optimizers_are_those_that_have_kernels(deepspeed: Any, mode: bool) -> None:
    from slipstream.optim import rule_of

    param = torch.nn.Parameter(torch.zeros(3))
    groups = torch.optim.Adam([param]).param_groups  # as accelerate hands them over
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=0.1, weight_decay=0.0, adamw_mode=mode)
    assert adam.param_groups[0] is groups[0]  # whose rates a schedule of the other optimizer sets
    assert isinstance(adam, torch.optim.AdamW) is mode and isinstance(adam, deepspeed.ops.adam.DeepSpeedCPUAdam)
    assert rule_of(adam) is not None and adam.param_groups[0]["decoupled_weight_decay"] is mode
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam

    one_bit = OnebitAdam([param], freeze_step=5, cuda_aware=True, comm_backend_name="mpi")
    assert isinstance(one_bit, OnebitAdam) and one_bit.param_groups[0]["freeze_step"] == 5 and rule_of(one_bit) is not None
    with pytest.raises(RuntimeError, match="AMSGrad"):
        OnebitAdam([param], amsgrad=True)
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

    zero_one = ZeroOneAdam([param], var_freeze_step=5, local_step_clipper=2, comm_backend_name="mpi")
    assert isinstance(zero_one, ZeroOneAdam) and zero_one.rounds(zero_one.param_groups[0]).longest == 2
    with pytest.raises(ValueError, match="set gradient_clipping"):
        ZeroOneAdam([param], max_grad_norm=1.0)
    for kind in (deepspeed.ops.adagrad.DeepSpeedCPUAdagrad, deepspeed.ops.lion.FusedLion, deepspeed.ops.lamb.FusedLamb):
        assert kind([param]).param_groups[0]["params"] == [param]
    ops = deepspeed.ops
    for kind in (ops.adam.DeepSpeedCPUAdam, ops.adagrad.DeepSpeedCPUAdagrad, ops.lion.DeepSpeedCPULion):
        with pytest.raises(ValueError, match=r"fp32_optimizer_states=False: set bf16\.bf16_optimizer_states"):
            kind([param], fp32_optimizer_states=False)


def test_checkpointing_is_configured_or_says_what_a_call_cannot_do(
    deepspeed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure = deepspeed.checkpointing.configure
    parted = {"activation_checkpointing": {"partition_activations": True}}
    (tmp_path / "ds.json").write_text(json.dumps(parted))
    for config in (parted, str(tmp_path / "ds.json")):
        for overridden, is_said in (({}, True), ({"partition_activations": False}, False)):
            with caplog.at_level("INFO", "slipstream"):
                configure(None, deepspeed_config=config, **overridden)
            assert ('"sequence_parallel": true' in caplog.text) is is_said
            caplog.clear()
    for name, key in (("checkpoint_in_cpu", "cpu_checkpointing"), ("synchronize", "synchronize_ch"), ("profile", "profile")):
        with pytest.raises(ValueError, match=rf"configure\({name}=True\).*activation_checkpointing\.{key}"):
            configure(None, **{name: True})
    with caplog.at_level("INFO", "slipstream"):
        configure(None, contiguous_checkpointing=True, num_checkpoints=4, profile=False)
    assert "has no effect" in caplog.text and deepspeed.checkpointing.is_configured()


def test_a_checkpointed_function_gets_its_keywords(deepspeed: Any) -> None:
    x, weight = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    deepspeed.checkpointing.checkpoint(lambda x, *, weight: (x * weight).exp(), x, weight=weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0).exp() * 2)
    torch.testing.assert_close(weight.grad, torch.full((3,), 2.0).exp())


def test_ranks_of_slices_draw_apart(deepspeed: Any) -> None:
    """Megatron's two random states: dropout outside of slices is the same on all ranks of the mpu, inside it is another on each."""
    checkpointing, draws = deepspeed.checkpointing, []
    states = checkpointing.get_cuda_rng_tracker()
    assert isinstance(states, checkpointing.CudaRNGStatesTracker)
    try:
        for rank in (0, 1, 0):
            checkpointing.configure(types.SimpleNamespace(get_tensor_model_parallel_rank=lambda rank=rank: rank))
            checkpointing.model_parallel_cuda_manual_seed(5)
            with states.fork():
                inside = torch.rand(4)
            saved = states.get_states()
            outside = torch.rand(4)
            checkpointing.model_parallel_reconfigure_tp_seed(6)
            with states.fork():
                anew = torch.rand(4)
            states.set_states(saved)
            with states.fork():
                later = torch.rand(4)
            draws.append((inside.tolist(), anew.tolist(), later.tolist(), outside.tolist()))
        torch.manual_seed(5)
        assert [draw[-1] for draw in draws] == [torch.rand(4).tolist()] * 3
        assert draws[0] == draws[2] and all(one != other for one, other in zip(draws[0][:3], draws[1][:3], strict=True))
        torch.manual_seed(5 + 2718)
        assert draws[0][0] == torch.rand(4).tolist()
    finally:
        states.reset()
        checkpointing.configure(None)


def test_leaf_modules_are_marked_and_returned(deepspeed: Any) -> None:
    utils, model = deepspeed.utils, toy.Lm()
    assert utils.set_z3_leaf_modules(model, [toy.Block]) == list(model.blocks) == utils.get_z3_leaf_modules(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["head"]) == ([model.head], [])
    assert utils.unset_z3_leaf_modules(model, ["Block"]) and utils.get_z3_leaf_modules(model) == [model.head]
    for mark, name in ((utils.set_z3_leaf_modules_by_name, "blocks.1.up"), (utils.set_z3_leaf_modules_by_suffix, "s.1.up")):
        up = model.blocks[1].up
        assert mark(model, [name, "none", name], raise_if_not_found=False) == ([up], ["none"]) and utils.z3_leaf_module(up)
        assert mark(model, [name], flag=False)[0] == [up] and not utils.z3_leaf_module(up)
        with pytest.raises(ValueError, match=r"no module of Lm is .* 'none'"):
            mark(model, [name, "none"])
    with pytest.raises(ValueError, match="no module of Lm is of class"):
        utils.set_z3_leaf_modules(model, ["Experts"])
    assert utils.set_z3_leaf_modules(model, ["Experts"], raise_if_not_found=False) == []
    assert utils.unset_z3_leaf_modules(model, ["Experts"], raise_if_not_found=False) == []


def test_z3_leaf_module_is_a_module_and_a_function(deepspeed: Any, group: None) -> None:
    from deepspeed.utils import z3_leaf_module, z3_leaf_parameter  # type: ignore[import-not-found]
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module  # type: ignore[import-not-found]

    module = importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert isinstance(module, ModuleType) and module.z3_leaf_module is z3_leaf_module is deepspeed.utils.z3_leaf_module
    model = toy.seeded(toy.Lm)
    set_z3_leaf_module(model.blocks[0], True)
    assert z3_leaf_module(model.blocks[0]) and not z3_leaf_module(model.head)
    engine = make(deepspeed, model=model)
    assert z3_leaf_parameter(model.blocks[0].up.weight) and not z3_leaf_parameter(model.head.weight)
    engine.destroy()
    assert not z3_leaf_parameter(model.blocks[0].up.weight)


@pytest.mark.parametrize(
    ("command", "translated"),
    [
        ("--num_gpus 2 a.py --lr 1", "run --pass-local-rank --num_gpus 2 a.py --lr 1"),
        ("--num_accelerators=2 --no_local_rank -m a.b", "run --num_gpus=2 -m a.b"),
        ("-i host:0,1 --master_port 29501 --force_multi a.py", "run --pass-local-rank -i host:0,1 --master_port 29501 a.py"),
        ("a.py --num_gpus 2", "run --pass-local-rank a.py --num_gpus 2"),
        ("--log_level error a.py", "run --pass-local-rank --quiet a.py"),
        ("--log_level=info --num_gpus=2 a.py", "run --pass-local-rank --num_gpus=2 a.py"),
        ("--elastic_training --max_elastic_nodes 4 a.py", "run --pass-local-rank --elastic 1:4 a.py"),
        ("--num_nodes 3 --min_elastic_nodes=2 --elastic_training a.py", "run --pass-local-rank --num_nodes 3 --elastic 2:3 a.py"),
        ("--bind_core_list 0-1 --venv_script v a.py", "run --pass-local-rank --bind_core_list 0-1 --venv_script v a.py"),
        ("--save_pid --enable_each_rank_log=d a.py", "run --pass-local-rank --save_pid --enable_each_rank_log=d a.py"),
        ("--bind_cores_to_rank --launcher IMPI a.py", "run --pass-local-rank --bind_cores_to_rank --launcher mpich a.py"),
        ("--num_gpu 2 --launcher_arg=-v a.py", "run --pass-local-rank --num_gpus 2 --launcher-args=-v a.py"),
        (  # what DeepSpeed's launcher runs on each host: {"a": [0, 1], "b": [2]}
            "--world_info=eyJhIjogWzAsIDFdLCAiYiI6IFsyXX0= --master_addr=a --enable_each_rank_log=None a.py",
            "run --pass-local-rank --master_addr=a --num_nodes=2 --node_rank=0 --num_gpus=2 a.py",
        ),
        (
            "--node_rank 1 --world_info eyJhIjogWzAsIDFdLCAiYiI6IFsyXX0= --master_addr=a a.py",
            "run --pass-local-rank --node_rank 1 --master_addr=a --num_nodes=2 --node_rank=1 --include localhost:2 a.py",
        ),
        ("--launcher slurm --account=x a.py", "run --pass-local-rank --launcher slurm --launcher-args=--account=x a.py"),
    ],
)
def test_the_command_is_slipstream_run(command: str, translated: str) -> None:
    from slipstream.launch import cli

    assert launcher.translate(command.split()) == translated.split()
    cli.build_parser().parse_args(translated.split())


def test_hosts_for_scripts_that_launch(deepspeed: Any, tmp_path: Path) -> None:
    """GPT-NeoX and MII read a hostfile themselves."""
    runner, file = deepspeed.launcher.runner, tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=2  # a comment\n")
    pool = runner.fetch_hostfile(str(file))
    assert pool == {"a": 4, "b": 2} and runner.fetch_hostfile(str(tmp_path / "none")) is None
    for inclusion, exclusion, chosen in (
        ("", "", {"a": [0, 1, 2, 3], "b": [0, 1]}),
        ("b@a:1,3", "", {"a": [1, 3], "b": [0, 1]}),
        ("", "a@b:0", {"b": [1]}),
    ):
        assert runner.parse_inclusion_exclusion(pool, inclusion, exclusion) == chosen
    with pytest.raises(ValueError, match="unknown host c"):
        runner.parse_inclusion_exclusion(pool, "c", "")
    assert runner.main(["--autotuning", "all", "a.py"]) == 2  # GPT-NeoX's deepy.py passes the arguments


def test_the_command_refuses_what_is_not_there() -> None:
    for flags, message in (
        ("--autotuning run", "no --deepspeed_config FILE"),
        ("--autotuning all", "'all' is neither tune nor run"),
        ("--elastic_training", "add --max_elastic_nodes N"),
        ("--min_elastic_nodes 2", "add --elastic_training"),
        ("--comment x", "--comment is an option of srun: add --launcher slurm"),
        ("--log_level loud", "'loud' is none of"),
        ("--world_info None", "must be the base64 of JSON"),
        ("--world_info eyJhIjogWzBdfQ== --node_rank 1", "with a host of this rank"),
    ):
        with pytest.raises(ValueError, match=message):
            launcher.translate([*flags.split(), "a.py"])


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        (
            "ds_bench",
            "--all-reduce --pt2pt --maxsize 20 --trials 5 --nproc 2",
            "bench-comm --ops all_reduce,send_recv --max 1048576 --nproc 2",
        ),
        ("ds_bench", "--scan", "bench-comm"),
        ("ds_io", "--folder d --io_size 400M --read --queue_depth 8", "bench-disk d --size 400M --depths 8"),
        ("ds_io", "--nvme_dir d", "bench-disk d --size 1G"),
        (
            "openai_api_server",
            "--model a/b --host 0.0.0.0 --port 8000 --max-length 2048 --tensor-parallel 2",
            "serve a/b --model-name a/b --tp 2 --host 0.0.0.0 --port 8000",
        ),
    ],
)
def test_benchmarks_take_deepspeed_s_options(command: str, given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("slipstream.launch.cli.main", lambda words: seen.append(words) or 0)
    monkeypatch.setattr(sys, "argv", [command, *given.split()])
    assert getattr(commands, command)() == 0 and seen == [expected.split()]
