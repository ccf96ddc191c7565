"""What DeepSpeed's names mean: constants, configuration objects, schedules, builders, utilities. Engines here are of one rank."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compat.constants import TABLES
from slipstream.config.keys import table as config_keys
from slipstream.world import host
from tests import toy
from tests.unit.test_compat import deepspeed, group, make  # noqa: F401 (fixtures)

pytestmark = pytest.mark.usefixtures("deepspeed")
NAN, INF = math.nan, math.inf
DEFAULTS = {name: key.default for name, key in config_keys().items()}


def load(module: str) -> Any:
    return importlib.import_module(f"deepspeed.{module}")


# -- constants --

CONSTANTS = """
runtime.constants TRAIN_BATCH_SIZE "train_batch_size"
runtime.constants TRAIN_BATCH_SIZE_DEFAULT null
runtime.constants GRADIENT_CLIPPING_DEFAULT 1.0
runtime.constants FP16_LOSS_SCALE "loss_scale"
runtime.constants FP16_INITIAL_SCALE_POWER_DEFAULT 16
runtime.constants BFLOAT16 "bf16"
runtime.constants DDP_BFLOAT16 "ddp_bf16"
runtime.constants ROUTE_EVAL "eval"
runtime.constants OPTIMIZER_TYPE_DEFAULT null
runtime.constants SCHEDULER_PARAMS "params"
runtime.constants PIPE_REPLICATED "ds_pipe_replicated"
runtime.constants GRADIENT_ALLREDUCE_OP_SUPPORTED ["mean", "sum"]
runtime.constants CHECKPOINT_TAG_VALIDATION_DEFAULT "WARN"
runtime.config ADAM_OPTIMIZER "adam"
runtime.config LAMB_OPTIMIZER "lamb"
runtime.config ONEBIT_LAMB_OPTIMIZER "onebitlamb"
runtime.config TORCH_ADAM_PARAM "torch_adam"
runtime.config ADAM_W_MODE_DEFAULT true
runtime.config MAX_GRAD_NORM "max_grad_norm"
runtime.config CURRICULUM_LEARNING_SCHEDULE_FIXED_ROOT "fixed_root"
runtime.lr_schedules WARMUP_NUM_STEPS "warmup_num_steps"
runtime.lr_schedules ONE_CYCLE "OneCycle"
runtime.lr_schedules LR_RANGE_TEST_STAIRCASE "lr_range_test_staircase"
runtime.lr_schedules EDGE_VALUE "edge_value"
runtime.lr_schedules WARMUP_LOG_RATE "log"
runtime.fp16.loss_scaler INITIAL_LOSS_SCALE "init_scale"
runtime.fp16.loss_scaler MIN_LOSS_SCALE "min_scale"
runtime.zero.config ZERO_OPTIMIZATION "zero_optimization"
runtime.activation_checkpointing.config ACT_CHKPT_PROFILE_DEFAULT false
runtime.model_checkpointing.constants CHECKPOINT_WRITER_DECOUPLED "decoupled"
runtime.swap_tensor.constants AIO_BLOCK_SIZE_DEFAULT 1048576
runtime.data_pipeline.constants DATA_EFFICIENCY_SEED_DEFAULT 1234
profiling.constants FLOPS_PROFILER_MODULE_DEPTH_DEFAULT -1
comm.constants NCCL_BACKEND "nccl"
checkpoint.constants ZERO_FILE_PREFIX "zero_pp_rank_"
checkpoint.constants UNIVERSAL_CHECKPOINT_VERSION_VALUE 0.4
constants TORCH_DISTRIBUTED_DEFAULT_PORT 29500
""".strip().splitlines()


@pytest.mark.parametrize("line", CONSTANTS)
def test_a_constant(line: str) -> None:
    module, name, value = line.split(" ", 2)
    constant = getattr(load(module), name)
    assert (list(constant) if isinstance(constant, tuple) else constant) == json.loads(value)


def test_defaults_are_those_of_the_schema() -> None:
    """Two of DeepSpeed's own constants are older than its models, and are kept as they are."""
    table = TABLES["deepspeed.runtime.constants"]
    blocks = {"FP16": "fp16.", "BFLOAT16": "bf16.", "TORCH_AUTOCAST": "torch_autocast.", "CHECKPOINT": "checkpoint."}
    keys, compared = DEFAULTS, 0
    for name, key in table.items():
        block = next((path for prefix, path in blocks.items() if name.startswith(f"{prefix}_")), "")
        if f"{name}_DEFAULT" in table and f"{block}{key}" in keys:
            default, deepspeed_default = keys[f"{block}{key}"], table[f"{name}_DEFAULT"]
            same = str(default).lower() == str(deepspeed_default).lower() or default == deepspeed_default
            assert same is not (name in ("BFLOAT16_IMMEDIATE_GRAD_UPDATE", "KEEP_IN_FP32_MODULES")), name
            compared += 1
    assert compared > 35


def test_a_star_brings_all_constants() -> None:
    names: dict[str, Any] = {}
    exec("from deepspeed.runtime.config import *\nfrom deepspeed.runtime.lr_schedules import *", names)
    assert names["ADAM_OPTIMIZER"] in names["DEEPSPEED_OPTIMIZERS"] and names["TRAIN_BATCH_SIZE"] == "train_batch_size"
    assert {*TABLES["deepspeed.runtime.constants"], *TABLES["deepspeed.runtime.lr_schedules"]} <= names.keys()
    for module, table in TABLES.items():
        assert {name: getattr(importlib.import_module(module), name) for name in table} == table


# -- the accelerator, versions, builders --


def test_a_cpu_as_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = load("accelerator").get_accelerator()
    assert load("accelerator").is_current_accelerator_supported()
    assert isinstance(accelerator, load("accelerator.abstract_accelerator").DeepSpeedAccelerator)
    assert torch.tensor([1], device=accelerator.current_device()).device.type == "cpu"
    for same in (copy.deepcopy(accelerator), pickle.loads(pickle.dumps(accelerator))):
        assert same.device_name() == accelerator.device_name()
    assert accelerator.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert accelerator.device_count() == 2
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert accelerator.device_count() == 3
    assert accelerator.FloatTensor([1.0]).dtype is torch.float32 and accelerator.BFloat16Tensor([1.0]).dtype is torch.bfloat16
    state = accelerator.get_rng_state()
    first = torch.rand(2)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    with accelerator.stream(accelerator.current_stream()):
        assert accelerator.lazy_call(lambda: 7) == 7
    accelerator.reset_max_memory_allocated()
    accelerator.range_push("block", domain="model")
    assert not accelerator.is_pinned(torch.ones(1)) and accelerator.is_fp64_supported() and accelerator.export_envs() == []
    stats = accelerator.memory_stats()
    assert 0 < stats["allocated_bytes.all.current"] <= stats["allocated_bytes.all.peak"]
    monkeypatch.setattr(host, "_limits", lambda: {Path("job"): 7 << 20, Path("job/step"): 6 << 20})
    monkeypatch.setattr(host, "_used", lambda folder: (5 << 20) if folder.name == "job" else 1 << 20)
    assert (accelerator.total_memory(), accelerator.available_memory()) == (6 << 20, 2 << 20)  # of the control groups
    env: dict[str, str] = {}
    accelerator.set_visible_devices_envs(env, [0, 2])
    assert env == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert accelerator.create_op_builder("CPUAdamBuilder").name == "cpu_adam"
    assert accelerator.get_op_builder("Unheard") is load("ops.op_builder").NotImplementedBuilder
    assert accelerator.use_host_timers() and not accelerator.is_triton_supported()
    accelerator.set_compile_backend("eager")
    assert accelerator.get_compile_backend() == "eager"
    accelerator.set_compile_backend("inductor")
    with pytest.raises(ValueError, match=r"'no such'.*inductor"):
        accelerator.set_compile_backend("no such")
    with pytest.raises(AssertionError, match="dict is not a subclass"):
        load("accelerator").set_accelerator({})


def test_versions() -> None:
    info = load("git_version_info")
    package = importlib.import_module("deepspeed")
    assert (info.version, "[none]", "[none]") == (package.__version__, package.__git_hash__, package.__git_branch__)
    assert torch.__version__.startswith(f"{info.torch_info['version']}.") and info.torch_info["cuda_version"] == (
        torch.version.cuda or "0.0"
    )
    assert set(info.installed_ops) == set(load("ops").__compatible_ops__) and not any(info.installed_ops.values())
    assert (info.accelerator_name, info.git_hash, info.git_branch) == ("cpu", "[none]", "[none]")
    required = load("utils.torch").required_torch_version
    assert required(min_version=2.1) and required(min_version="2.11", max_version="9") and required(max_version="9.0")
    assert not required(min_version="9.0") and not required(max_version=1.13)
    with pytest.raises(AssertionError, match="min_version"):
        required()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch.compile imports it
def test_hooks_of_torch() -> None:
    tools, weight, grads = load("utils.torch"), torch.nn.Parameter(torch.ones(2)), []
    handle = tools.register_grad_hook(weight, lambda param: grads.append(param.grad.clone()))
    (weight * 3).sum().backward()
    handle.remove()
    weight.sum().backward()
    assert len(grads) == 1 and grads[0].tolist() == [3.0, 3.0]
    inside = []
    torch.func.grad(lambda x: inside.append(tools.is_functorch_transforming()) or x)(torch.tensor(1.0))
    double = lambda x: x * 2  # noqa: E731
    assert tools.jit_script_compat(double)._torchdynamo_orig_callable is double  # compiled when it is called
    assert inside == [True] and not tools.is_functorch_transforming()


def test_names_of_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    tools = load("utils.logging")
    level = tools.logger.level  # 0: that of the root, which other tests set
    try:
        tools.set_log_level_from_string("INFO")
        for _ in range(2):
            tools.logger.warning_once("a warning of the logger's test")
            tools.logger.log_dist_once("a line of the logger's test", ranks=[0])
        said = [record.getMessage() for record in caplog.records if "logger's test" in record.getMessage()]
        assert len(said) == 2 and said[0] == "a warning of the logger's test" and said[1].endswith("a line of the logger's test")
        assert tools.should_log_le("info") and not tools.should_log_le("debug") and tools.log_levels["error"] == logging.ERROR
        with pytest.raises(ValueError, match="log level 'loud' is none of"):
            tools.get_log_level_from_string("loud")
    finally:
        tools.logger.setLevel(level)


def test_a_builder_loads_or_says_what_to_use() -> None:
    module, compatible = load("ops.op_builder"), load("ops").__compatible_ops__
    builders = [
        getattr(module, name) for name in module.__all__ if name.endswith("Builder") and name not in ("OpBuilder", "CUDAOpBuilder")
    ]
    assert len({builder.NAME for builder in builders}) == len(builders) == len(compatible) >= 26
    for builder in builders:
        op = builder()
        assert compatible[builder.NAME] is op.is_compatible() and isinstance(op, module.OpBuilder)
        if op.is_compatible():
            loaded = vars(op.load())
            assert loaded.pop("__name__") == builder.NAME and all(map(callable, loaded.values()))
        else:
            with pytest.raises(ImportError, match=rf"{builder.__name__}.load\(\): Slipstream has no '{op.name}' op; \w"):
                op.load()
    assert compatible["cpu_adam"] and not compatible["deepspeed_not_implemented"]
    assert load("ops.op_builder.all_ops").ALL_OPS["cpu_lion"].NAME == "cpu_lion"


@pytest.mark.parametrize("nbytes", [1, 1000, 3 * 4096, 100_001])
@pytest.mark.parametrize("offset", [0, 1000, 8192])
def test_a_handle_moves_tensors_to_and_from_ranges_of_files(tmp_path: Path, nbytes: int, offset: int) -> None:
    handle = load("ops.aio").AsyncIOBuilder().load().aio_handle(1024, 2, True, False, intra_op_parallelism=2)
    getters = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    assert [getattr(handle, f"get_{name}")() for name in getters] == [1024, 2, True, False, 2]
    locked = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).random_()
    for i, source in enumerate((locked, torch.stack([locked, locked], 1)[:, 0])):  # direct; strided
        path = str(tmp_path / f"{i}")
        before = os.urandom(offset + nbytes + 5000)
        Path(path).write_bytes(before)
        assert handle.async_pwrite(source, path, offset) == 0 and handle.wait() == 1
        want = before[:offset] + bytes(source.tolist()) + before[offset + nbytes :]
        assert Path(path).read_bytes() == want  # nothing else changed
        read, strided = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, 2, dtype=torch.uint8)[:, 0]
        assert handle.async_pread(read, path, offset) == 0 and handle.sync_pread(strided, path, offset) == 2
        assert read.equal(locked) and strided.equal(locked)
    with open(tmp_path / "open", "wb") as file:  # by its descriptor
        assert handle.async_pwrite(buffer=locked, fd=file.fileno(), file_offset=offset) == 0 and handle.wait() == 1
        file.flush()
    assert handle.pread(read, str(tmp_path / "open"), True, False, offset) == 1 and read.equal(locked)
    assert handle.is_pinned(locked[-1:]) and handle.free_cpu_locked_tensor(locked) and not handle.free_cpu_locked_tensor(locked)


def test_a_handle_says_what_is_wrong(tmp_path: Path) -> None:
    op, path = load("ops.op_builder").AsyncIOBuilder().load(), str(tmp_path / "short")
    weights = torch.arange(5000.0)
    assert op.aio_write(weights, path, 1 << 20, 8, False, True, True) == 0 and op.aio_handle().write(weights, path, True) == 0
    read = torch.zeros(5000)
    assert op.aio_read(read, path, 1 << 20, 8, False, True, True) == 0 and read.equal(weights) and op.aio_handle().wait() == 0
    with pytest.raises(ValueError, match=r"20004 bytes at offset 0 is beyond the end of .*short, which has 20000 bytes"):
        op.aio_handle().sync_pread(torch.zeros(5001), path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        op.aio_handle().sync_pread(read, str(tmp_path / "nowhere"))
    with pytest.raises(ImportError, match="aio_handle"):
        load("ops.op_builder").GDSBuilder().load()


@pytest.mark.parametrize("decoupled", [True, False])
def test_loaded_steps_are_torchs(decoupled: bool) -> None:
    module, hyper = load("ops.op_builder"), {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}
    weights, grads = torch.randn(2, 3, 5), torch.randn(2, 3, 5)

    def expected(kind: Any, **arguments: Any) -> torch.Tensor:
        param = torch.nn.Parameter(weights[0].clone())
        optimizer = kind([param], **hyper, **arguments)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        return param.detach()

    adam, adagrad, fused = (module.CPUAdamBuilder().load(), module.CPUAdagradBuilder().load(), module.FusedAdamBuilder().load())
    weight, lists, squares = weights[0].clone(), weights[0].clone(), weights[0].clone()
    states, more, total = torch.zeros(2, 3, 5), torch.zeros(2, 3, 5), torch.zeros(3, 5)
    adam.create_adam(0, 0.1, 0.9, 0.999, 1e-8, 0.1, decoupled, False)
    for step, grad in enumerate(grads, 1):
        adam.adam_update(0, step, 0.1, 0.9, 0.999, 1e-8, 0.1, True, weight, grad, *states)
        tensors = [[grad], [lists], [more[0]], [more[1]]]
        fused.multi_tensor_adam(2048, torch.zeros(1), tensors, 0.1, 0.9, 0.999, 1e-8, step, decoupled, True, 0.1)
        adagrad.adagrad_update(0, step, 0.1, 1e-8, 0.1, squares, grad, total)
    torch.testing.assert_close(weight, expected(torch.optim.AdamW if decoupled else torch.optim.Adam))
    torch.testing.assert_close(squares, expected(torch.optim.Adagrad))
    assert torch.equal(lists, weight)
    fused.multi_tensor_adam(2048, torch.ones(1), tensors, 0.1, 0.9, 0.999, 1e-8, 3, decoupled, True, 0.1)
    assert torch.equal(lists, weight)  # an overflow was found before


def test_loaded_lion_and_utils() -> None:
    module, lion = load("ops.op_builder"), load("ops.op_builder").CPULionBuilder().load()
    weight, grad, moment = torch.ones(2, 2), torch.tensor([[1.0, -1.0], [2.0, 0.5]]), torch.zeros(2, 2)
    lion.lion_update(0, 1, 0.1, 0.9, 0.99, 0.0, weight, grad, moment)
    torch.testing.assert_close(weight, 1 - 0.1 * grad.sign())
    torch.testing.assert_close(moment, 0.01 * grad)
    again, fused = torch.ones(2, 2), module.FusedLionBuilder().load()
    fused.multi_tensor_lion(2048, torch.zeros(1), [[grad], [again], [torch.zeros(2, 2)]], 0.1, 0.9, 0.99, 1, 0.0)
    assert torch.equal(again, weight)
    tools = module.UtilsBuilder().load()
    parts = tools.unflatten(tools.flatten([weight, grad[0]]), [weight, grad[0]])
    assert torch.equal(parts[0], weight) and torch.equal(parts[1], grad[0])


# -- the configuration --


def test_a_zero_config_reads_as_deepspeeds() -> None:
    zero = load("runtime.zero.config")
    config = zero.DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, max_live_parameters=8, reduce_bucket_size="auto")
    assert (config.prefetch_bucket_size, config.max_live_parameters, config.reduce_bucket_size) == (7, 8, 500_000_000)
    assert config.stage == zero.ZeroStageEnum.weights and config.overlap_comm is True
    assert zero.DeepSpeedZeroConfig(stage=2).overlap_comm is False and config.offload_param is None
    old = zero.DeepSpeedZeroConfig(cpu_offload=True, cpu_offload_param=True, stage3_gather_fp16_weights_on_model_save=True)
    assert isinstance(old.offload_optimizer, zero.DeepSpeedZeroOffloadOptimizerConfig) and old.offload_param.device == "cpu"
    assert old.gather_16bit_weights_on_model_save and not hasattr(old, "cpu_offload")
    with pytest.raises(ValueError, match="'cpu_offload' is the older name of 'offload_optimizer', and both are given"):
        zero.DeepSpeedZeroConfig(cpu_offload=True, offload_optimizer={"device": "nvme"})
    assert zero.DeepSpeedZeroConfig(cpu_offload="false").offload_optimizer is None
    with pytest.raises(ValueError, match="cpu_offload"):
        zero.DeepSpeedZeroConfig(cpu_offload="nvme")
    assert zero.DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline and not old.offload_optimizer.pipeline
    assert len(zero.DeepSpeedZeroLeafModuleConfig().classes) == 3
    assert zero.get_zero_config({"zero_optimization": True}).stage == 1 and zero.get_zero_config({}).stage == 0
    for wrong in ({"stage": 4}, {"stagee": 1}, {"sub_group_size": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            zero.DeepSpeedZeroConfig(**wrong)


GIVEN = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 2.0}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "communication_data_type": "fp16",
    "checkpoint": {"tag_validation": "Fail"},
    "flops_profiler": {"profile_step": 5},
    "comms_logger": {"prof_all": False},
    "torch_autocast": {"dtype": "half"},
}
READ = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_enabled": True,
    "zero_optimization_stage": 2,
    "zero_config.offload_optimizer.device": "cpu",
    "bfloat16_config.enabled": True,
    "float16_config.initial_dynamic_scale()": 65536,
    "float16_config.dynamic_loss_scale_args()['scale_window']": 1000,
    "optimizer_name": "adamw",
    "optimizer_params['lr']": 0.1,
    "scheduler_name": None,
    "scheduler_params": None,
    "communication_data_type": torch.float16,
    "torch_autocast_dtype": torch.float16,
    "checkpoint_tag_validation_fail": True,
    "flops_profiler_config.profile_step": 5,
    "flops_profiler_config.top_modules": 1,
    "activation_checkpointing_config.profile": False,
    "comms_config.comms_logger.prof_all": False,
    "monitor_config.enabled": False,
    "aio_config['queue_depth']": 8,
    "checkpoint_config['checkpoint_serialization']": True,
    "pipeline['stages']": "auto",
    "hybrid_engine.max_out_tokens": 512,
    "timers_config.synchronized": True,
    "keep_in_fp32_modules": "auto",
    "wall_clock_breakdown": False,
    "compile_config.deepcompile": False,
    "world_size": 1,
}


def test_a_config_as_an_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GIVEN))
    for source in (GIVEN, str(file)):
        config = load("runtime.config").DeepSpeedConfig(source)
        assert {key: eval(f"config.{key}", {"config": config}) for key in READ} == READ
    assert all(name in dir(config) for name in ("zero_config", "train_batch_size"))
    with caplog.at_level(logging.INFO, "slipstream"):
        config.print("the config")
    assert "gradient_clipping" in caplog.text and '"max_grad_norm": 2.0' in caplog.text
    with pytest.raises(AttributeError, match="zero_config"):
        config.unheard  # noqa: B018
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="Check batch related parameters"):
            load("runtime.config").DeepSpeedConfig({**GIVEN, "gradient_accumulation_steps": 3})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("HybridEngineConfig(enabled=True).inference_tp_size", 1),
        ("DtypeEnum('half').value", torch.float16),
        ("DtypeEnum(torch.bfloat16).name", "bf16"),
        ("DtypeEnum('torch.int8').value", torch.int8),
    ],
)
def test_a_getter_of_the_config(call: str, expected: Any) -> None:
    module = load("runtime.config")
    assert eval(call, {name: getattr(module, name) for name in module.__all__} | {"torch": torch}) == expected


@pytest.mark.parametrize(
    ("path", "call", "expected"),
    [
        ("monitor.config", "get_monitor_config({'wandb': {'enabled': True}}).enabled", True),
        ("monitor.config", "DeepSpeedMonitorConfig().enabled", False),
        ("monitor.config", "TensorBoardConfig().job_name", "DeepSpeedJobName"),
        ("monitor.config", "CSVConfig(output_path='x').output_path", "x"),
        ("monitor.config", "WandbConfig().project", "deepspeed"),
        ("monitor.config", "CometConfig().samples_log_interval", 100),
        ("utils.config", "get_timers_config({'timers': {'throughput': {'enabled': False}}}).enabled", False),
        ("utils.config", "DeepSpeedThroughputTimerConfig().synchronized", True),
        ("compile.config", "CompileConfig(deepcompile=True).double_buffer", True),
        ("comm.config", "CommsLoggerConfig().prof_all", True),
        ("comm.config", "hasattr(DeepSpeedCommsConfig({}), 'comms_logger')", False),
        ("profiling.config", "DeepSpeedFlopsProfilerConfig({}).module_depth", -1),
        ("runtime.activation_checkpointing.config", "DeepSpeedActivationCheckpointingConfig({}).number_checkpoints", None),
        ("runtime.swap_tensor.aio_config", "get_aio_config({'aio': {'queue_depth': 3}})['queue_depth']", 3),
        ("runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig(names='x').names", ["x"]),
        ("runtime.zero.config", "ZeroStageEnum(2).name", "gradients"),
        ("runtime.zero.config", "OffloadDeviceEnum.cpu == 'cpu'", True),
        ("runtime.precision_config", "DeepSpeedFP16Config(initial_scale_power=3).initial_dynamic_scale()", 8),
        ("runtime.precision_config", "get_float16_config({'fp16': {'loss_scale': 2}}).loss_scale", 2.0),
        ("runtime.precision_config", "DeepSpeedBF16Config().check_grad_overflow", True),
    ],
)
def test_a_block_as_an_object(path: str, call: str, expected: Any) -> None:
    module = load(path)
    assert eval(call, {name: getattr(module, name) for name in module.__all__}) == expected


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_older_spelling_of_bf16(key: str) -> None:
    assert load("runtime.precision_config").get_bfloat16_config({key: {"enabled": True}}).enabled


def test_models_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    from pydantic import Field

    tools = load("runtime.config_utils")

    class Inner(tools.DeepSpeedConfigModel):  # type: ignore[misc, name-defined]
        size: int = 1

    class Own(tools.DeepSpeedConfigModel):  # type: ignore[misc, name-defined]
        number: int = 0
        old: str | None = Field(
            None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
        )
        old_size: int | None = Field(None, json_schema_extra={"deprecated": True, "new_param": "inner.size"})
        new: list[str] | None = None
        inner: Inner = Field(default_factory=Inner)
        aliased: int = Field(0, alias="another")
        needed: int

    with caplog.at_level(logging.WARNING, "slipstream"):
        own = Own(old="x", old_size=3, another=2, number="auto", needed=1)
    assert (own.new, own.inner.size) == (["x"], 3) and "old is deprecated use new instead" in caplog.text
    with pytest.raises(ValueError, match="'old' is the older name of 'new', and both are given"):
        Own(old="x", new=["y"], needed=1)
    assert (own.aliased, own.number) == (2, 0) and Own(aliased=3, needed=1).aliased == 3
    for wrong in ({"number": "x"}, {"num_ber": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Own(**wrong, needed=1)
    assert tools.get_config_default(Own, "number") == 0
    for name in ("needed", "unheard"):
        with pytest.raises(AssertionError, match=name):
            tools.get_config_default(Own, name)


def test_helpers_of_the_config() -> None:
    tools = load("runtime.config_utils")
    assert tools.get_scalar_param({"a": 1}, "a", 2) == 1 and tools.get_list_param({}, "a", [2]) == [2]
    with pytest.raises(ValueError, match=r"Duplicate keys.*'a'"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=tools.dict_raise_error_on_duplicate_keys)


@pytest.mark.usefixtures("group")
def test_an_engines_config_follows_the_engine(deepspeed: Any) -> None:  # noqa: F811
    config = toy.settings(2, gradient_clipping=0.5, zero_optimization={"reduce_bucket_size": "auto"})
    engine, *_ = deepspeed.initialize(model=toy.seeded(toy.Lm), config=config, dist_init_required=False)
    assert isinstance(engine._config, deepspeed.DeepSpeedConfig) and engine.config["gradient_clipping"] == 0.5
    assert engine._config.zero_config.stage == 2 and engine._config.zero_config.reduce_bucket_size == 500_000_000
    assert (engine._config.train_batch_size, engine._config.gradient_accumulation_steps) == (2, 1)
    engine.set_train_batch_size(6)
    assert (engine._config.train_batch_size, engine._config.gradient_accumulation_steps) == (6, 3)
    assert engine._config._param_dict == engine.config and engine._config.world_size == 1
    engine.destroy()


# -- schedules --


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (0.1,)])


def test_attributes_of_schedules() -> None:
    module = load("runtime.lr_schedules")
    cycle = module.OneCycle(optimizer(0.1, 0.2), 0.01, [0.1, 0.3], cycle_first_step_size=10, cycle_second_step_size=30)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.step_ratio, cycle.total_size) == ([0.01, 0.01], [0.1, 0.3], 0.25, 40.0)
    assert (cycle.first_step_size, cycle.second_step_size, cycle.first_stair_count, cycle.second_stair_count) == (10, 30, 0, 0)
    assert cycle.min_moms == [(0.8, 0.99)] * 2 and cycle.skip_lr_decay and cycle.skip_mom_decay
    assert cycle.get_mom() == [(0.9, 0.99)] * 2 and cycle.optimizer.param_groups[1]["betas"] == (0.8, 0.99)
    warmup = module.WarmupLR(optimizer(), warmup_min_lr=0.02, warmup_num_steps=10, warmup_type="linear")
    assert (warmup.min_lrs, warmup.max_lrs, warmup.warmup_num_steps, warmup.warmup_type) == ([0.02], [0.1], 10, "linear")
    assert warmup.delta_lrs == pytest.approx([0.08]) and warmup.inverse_log_warm_up == pytest.approx(1 / math.log(10))
    cosine = module.WarmupCosineLR(optimizer(), total_num_steps=20, warmup_num_steps=10, cos_min_ratio=0.1)
    ratios = [cosine.get_lr_ratio()]
    for _ in range(22):
        cosine.step()
        assert cosine.get_lr() == pytest.approx([0.1 * cosine.get_lr_ratio()])
        ratios.append(cosine.get_lr_ratio())
    assert ratios[0] == 0.0 and ratios[10] == pytest.approx(1.0) and ratios[-1] == pytest.approx(0.1) and cosine.org_lrs == [0.1]
    test = module.LRRangeTest(optimizer(), lr_range_test_min_lr=0.5, lr_range_test_step_size=2)
    assert (test.min_lr, test.step_size, test.step_rate, test.staircase) == (0.5, 2, 1.0, False)


def test_a_warmup_that_nobody_knows_is_logarithmic(caplog: pytest.LogCaptureFixture) -> None:
    module = load("runtime.lr_schedules")
    for kind, arguments in ((module.WarmupLR, ()), (module.WarmupDecayLR, (50,)), (module.WarmupCosineLR, (50,))):
        caplog.clear()
        odd, log = (kind(optimizer(), *arguments, warmup_num_steps=9, warmup_type=name) for name in ("steep", "log"))
        assert odd.warmup_type == "log" and [record.levelname for record in caplog.records] == ["WARNING"]
        for _ in range(4):
            odd.step()
            log.step()
        assert odd.get_lr() == log.get_lr()


@pytest.mark.usefixtures("group")
def test_a_schedule_of_the_json_is_the_one_that_is_imported(deepspeed: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "steep"}}
    engine, _, _, scheduler = deepspeed.initialize(
        model=toy.seeded(toy.Lm), config=toy.settings(1, scheduler=block), dist_init_required=False
    )
    assert isinstance(scheduler, deepspeed.runtime.lr_schedules.WarmupLR) and scheduler.max_lrs == [0.1]
    assert type(scheduler).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert "'steep' is none of" in caplog.text and scheduler.warmup_type == "log"
    state = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(state)
    assert scheduler.last_batch_iteration == -1
    engine.destroy()
    with pytest.raises(ValueError, match=r"warmup_type 'steep' must be"):
        toy.make(toy.seeded(toy.Lm), 1, scheduler=block)


# -- deepspeed.runtime.utils --


def params(*grads: list[float]) -> list[torch.nn.Parameter]:
    weights = [torch.nn.Parameter(torch.ones(len(grad))) for grad in grads]
    for param, grad in zip(weights, grads, strict=True):
        param.grad = torch.tensor(grad)
    return weights


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("prefix_sum_inc([3, 4, 5])", [3, 7, 12]),
        ("partition_uniform(10, 4)", [0, 3, 6, 8, 10]),
        ("partition_uniform(2, 4)", [0, 1, 2, 2, 2]),
        ("partition_balanced([1, 1, 1, 1, 4], 2)", [0, 4, 5]),
        ("partition_balanced([5, 1, 1, 1, 1, 1], 3)", [0, 1, 4, 6]),
        ("partition_balanced([9, 9], 3)", [0, 1, 2, 2]),
        ("call_to_str('base')", "base()"),
        ("call_to_str('base', 1, x='y')", "base(1, x='y')"),
        ("get_global_norm([3.0, 4.0])", 5.0),
        ("get_global_norm([3.0, -1])", INF),
        ("get_global_norm([NAN])", INF),
        ("float(get_global_norm_of_tensors([torch.tensor([3.0]), torch.tensor([4.0])]))", 5.0),
        ("float(get_global_norm_of_tensors([torch.tensor([3.0, -7.0])], norm_type=INF))", 7.0),
        ("float(get_global_norm_of_tensors([torch.tensor([NAN])]))", -1.0),
        ("get_weight_norm(params([0.0] * 4))", 2.0),
        ("bool(has_inf_or_nan(torch.tensor([1.0, NAN])))", True),
        ("bool(has_inf_or_nan(torch.tensor([])))", False),
        ("bool(has_inf_or_nan(torch.tensor([0.0, INF]).to_sparse()))", True),
        ("[is_invalid_grad_norm(norm) for norm in (1.0, -1, INF, torch.tensor([1.0, NAN]))]", [False, True, True, True]),
        ("get_tensor_bytes([torch.ones(3), {'x': torch.ones(2, dtype=torch.int8)}, 'y'])", 14),
        ("maybe_loss_for_backward(params([1.0])[0].sum())", True),
        ("maybe_loss_for_backward(torch.ones(()))", False),
        ("is_model_parallel_parameter(params([1.0])[0])", False),
        ("[t.dtype for t in copy_to_device([torch.ones(1), 2.0], torch.float64, torch.is_tensor)[:1]]", [torch.float64]),
        ("(lambda t: move_to_device({'a': (t, 2)}, 'cpu', torch.is_tensor)['a'][0] is t)(torch.ones(1))", True),
    ],
)
def test_a_utility(call: str, expected: Any) -> None:
    module = load("runtime.utils")
    names = {name: getattr(module, name) for name in module.__all__}
    assert eval(call, names | {"torch": torch, "params": params, "NAN": NAN, "INF": INF}) == expected


def test_utilities_that_change_what_they_get() -> None:
    module = load("runtime.utils")
    weights = params([3.0], [4.0])
    assert float(module.clip_grad_norm_(weights, 1.0)) == 5.0
    assert [float(param.grad) for param in weights] == pytest.approx([0.6, 0.8])
    assert float(module.clip_grad_norm_(params([3.0, -8.0]), 1.0, norm_type=INF)) == 8.0
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert float(module.clip_tensors_by_global_norm(tensors, 10.0)) == 5.0 and tensors[0].tolist() == [3.0]
    module.clip_tensors_by_global_norm(tensors, 1.0)
    assert torch.cat(tensors).tolist() == pytest.approx([0.6, 0.8])
    odd = torch.tensor([1.0, NAN, -INF])
    module.mask_nan_or_inf_with_val_inplace(odd)
    assert odd.tolist() == [1.0, -1.0, -1.0]
    module.set_random_seed(2**40 + 1)  # numpy takes 32 bits
    first = torch.rand(2)
    module.set_random_seed(2**40 + 1)
    assert torch.equal(torch.rand(2), first)
    with module.noop_context():
        module.empty_cache()
    assert module.get_ma_status() > 0
    with pytest.raises(AttributeError, match="DeepSpeed's internals"):
        module.all_gather_dp_groups  # noqa: B018


def test_memory_is_told_where_it_is_forced(caplog: pytest.LogCaptureFixture) -> None:
    see = load("runtime.utils").see_memory_usage
    see("quiet")
    assert not caplog.text
    see("after the model", force=True)
    assert "after the model" in caplog.text and "Max_MA" in caplog.text and "CPU Virtual Memory:  used = " in caplog.text


# -- the optimizer --

KINDS = {
    "runtime.ZeROOptimizer": (1, 2, 3),
    "runtime.base_optimizer.ZeROOptimizer": (1, 2, 3),
    "DeepSpeedOptimizer": (0, 1, 2, 3),
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (1, 2),
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (3,),
    "runtime.bf16_optimizer.BF16_Optimizer": (),
    "runtime.fp16.fused_optimizer.FP16_Optimizer": (0,),
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": (0,),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_optimizer_is_what_isinstance_looks_for(deepspeed: Any, stage: int) -> None:  # noqa: F811
    engine = make(deepspeed, stage, fp16={"enabled": True, "initial_scale_power": 4})
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for path, stages in KINDS.items():
        module, _, name = f"deepspeed.{path}".rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        assert isinstance(engine.optimizer, kind) is (stage in stages) and not isinstance(plain, kind), path
        with pytest.raises(TypeError, match=f"{name} is there for isinstance"):
            kind(plain)

        class Own(kind):  # type: ignore[misc, valid-type]
            def __init__(self, number: int) -> None:
                self.number = number

        assert isinstance(Own(1), kind) and Own(2).number == 2 and not isinstance(engine.optimizer, Own)
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    engine.destroy()


SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("stage", "blocks", "expected"),
    [
        (0, {}, "FP16_Optimizer"),
        (1, SUMS, "BF16_Optimizer"),
        (1, {}, "DeepSpeedZeroOptimizer"),
        (2, SUMS, "DeepSpeedZeroOptimizer"),
    ],
)
def test_the_class_of_an_optimizer_of_bf16(deepspeed: Any, stage: int, blocks: Any, expected: str) -> None:  # noqa: F811
    engine = make(deepspeed, stage, dtype="bf16", **blocks)
    kinds = {path.rpartition(".")[2]: load(path.rpartition(".")[0]) for path in KINDS if path.count(".") > 1}
    found = {name for name, module in kinds.items() if isinstance(engine.optimizer, getattr(module, name))}
    assert (
        expected in found
        and len(found - {"FP16_UnfusedOptimizer", "ZeROOptimizer"}) == 1
        and ("ZeROOptimizer" in found) is (stage > 0)
    )
    engine.destroy()


@pytest.mark.usefixtures("group")
def test_the_optimizer_tells_its_loss_scale(deepspeed: Any) -> None:  # noqa: F811
    engine = make(deepspeed, 2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2})
    optimizer = engine.optimizer
    assert optimizer.needs_scaler() and optimizer.dynamic_loss_scale and optimizer.dtype is torch.float16
    now = optimizer.loss_scale_config
    assert (optimizer.cur_scale, optimizer.loss_scale, now.cur_scale, optimizer.loss_scaler.loss_scale) == (16.0,) * 4
    assert (now.last_overflow_iter, now.scale_factor, now.scale_window, now.min_loss_scale, now.cur_iter) == (-1, 2.0, 2, 1.0, 0)
    for factor in (1.0, INF, 1.0):
        engine.backward(engine(toy.tokens(0, 0)) * factor)
        engine.step()
    assert (now.cur_iter, now.cur_scale, now.last_overflow_iter) == (3, 8.0, 1) and not optimizer.overflow
    optimizer.set_lr(0.0)
    norms = []
    for scale, then in ((8, 8.0), (4, 8.0), (32, 32.0)):  # doubled in the third step after the overflow, whoever set it
        (optimizer if scale > 4 else optimizer.loss_scaler).cur_scale = scale
        engine.backward(engine(toy.tokens(0, 0)))
        with pytest.raises(RuntimeError, match=r"optimizer\.cur_scale set after 1 backward passes"):
            optimizer.cur_scale = 2
        engine.step()
        norms.append(engine.get_global_grad_norm())
        assert optimizer.loss_scale == then
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-2)
    with pytest.raises(ValueError, match=r"optimizer\.cur_scale = 0: fp16's scale is a number above 0"):
        optimizer.cur_scale = 0
    engine.destroy()
    for dtype in ("fp32", "bf16"):
        engine = make(deepspeed, 2, dtype=dtype)
        now = engine.optimizer.loss_scale_config
        assert not (engine.optimizer.needs_scaler() or now.use_grad_scaling or now.dynamic) and now.loss_scale == 1.0
        assert engine.optimizer.clip_grad == 0.0 and engine.optimizer.is_gradient_accumulation_boundary
        engine.optimizer.set_lr(0.5)
        assert engine.optimizer.get_lr() == 0.5 == engine.get_lr()[0]
        engine.destroy()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_of_a_script_reach_the_masters(deepspeed: Any, stage: int) -> None:  # noqa: F811
    engine = make(deepspeed, stage, dtype="bf16")
    optimizer, weight = engine.optimizer, engine.module.head.weight
    before = engine.optimizer_state("head.weight")["master"]
    weight.data[0] = 3.0  # which changes no version of the parameter
    optimizer.refresh_fp32_params()
    master = engine.optimizer_state("head.weight")["master"]
    assert master[0].eq(3).all() and torch.equal(master[1:], before[1:])  # with what bf16 has not
    engine.backward(engine(toy.tokens(0, 0)))
    engine.step()
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    loader = engine.deepspeed_io([torch.ones(2)] * 4)
    kind = load("runtime.dataloader").DeepSpeedDataLoader
    assert isinstance(loader, kind) and not isinstance([], kind)
    with pytest.raises(TypeError, match="deepspeed_io"):
        kind([])
    engine.destroy()


def test_classes_that_pickles_name(tmp_path: Path) -> None:
    scalers, fragments, stages = (
        load(name) for name in ("runtime.fp16.loss_scaler", "utils.tensor_fragment", "runtime.zero.config")
    )
    named = [scalers.LossScaler, scalers.DynamicLossScaler, fragments.fragment_address, stages.ZeroStageEnum]
    assert all(kind.__module__.startswith("deepspeed.") for kind in named)
    moving = scalers.DynamicLossScaler(4.0)
    moving.cur_iter = 7
    saved = [scalers.LossScaler(8.0), moving, fragments.fragment_address(2, 3), stages.ZeroStageEnum.weights]
    torch.save(saved, tmp_path / "file")
    with torch.serialization.safe_globals(named):
        scaler, moving, address, stage = torch.load(tmp_path / "file", weights_only=True)
    assert (scaler.loss_scale, scaler.dynamic, address.start, int(stage)) == (8.0, False, 3, 3)
    assert (moving.loss_scale, moving.dynamic, moving.cur_iter) == (4.0, True, 7)


def test_estimates_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows in bytes per parameter of a layer. Weights and gradients take 2 each, masters and moments 12."""
    inside, size = load("runtime.zero.stage3"), 1 << 26
    inside.estimate_zero3_model_states_mem_needs_all_cold(8.0 * size, 1.0 * size, num_gpus_per_node=4, num_nodes=2)
    load("runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs_all_live(torch.nn.Linear(1 << 13, 1 << 13), 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "offload_optimizer" in line]
    rows = [[float(cell.rstrip(" GB")) * 2**30 / size for cell in line.split("|")[:2]] for line in lines]
    (all_host, all_device), (host, device), (none, in_memory), (host_2, device_2), (none_2, in_memory_2) = rows
    assert none == none_2 == 0 and 16 + 4 * 2 < in_memory < 16 + 7 * 2  # layers are gathered while others compute
    assert in_memory - device > 11 and device - all_device > 1 and 4 * 14 < host < all_host - 4
    assert 14 / 2 * 2 < host_2 < 16 and in_memory_2 - device_2 > 4
    assert inside.model_to_params(torch.nn.Linear(3, 4)) == (16, 16)
    for none in ((0, 0), (size, 0)):
        inside.estimate_zero3_model_states_mem_needs_all_cold(*none)


@pytest.mark.usefixtures("group")
def test_a_loss_is_scaled_once_whoever_scales_it(deepspeed: Any) -> None:  # noqa: F811
    """DeepSpeed's callers pass `engine.scale(loss)` to a backward of their own; outputs scale by themselves here."""
    norms = []
    for scale in (None, "engine.scale", "optimizer.scale_if_loss"):
        engine = make(deepspeed, 2, fp16={"enabled": True, "initial_scale_power": 6})
        loss = engine(toy.tokens(0, 0))
        (loss if scale is None else eval(scale, {"engine": engine, "optimizer": engine.optimizer})(loss)).backward()
        engine.step()
        norms.append(engine.get_global_grad_norm())
        penalty = engine.module.head.weight.float().square().sum()  # of no output
        assert torch.equal(engine.scale(penalty), 64.0 * penalty)
        engine.destroy()
    assert norms[0] == norms[1] == norms[2] > 0
