"""DeepSpeed's inference engine: the user's own module, with faster parts. `deepspeed.init_inference` returns an `InferenceEngine`.

    engine = deepspeed.init_inference(model, dtype=torch.bfloat16, replace_with_kernel_inject=True)
    engine(**inputs).logits, engine.generate(**inputs, max_new_tokens=20), engine.module

As in DeepSpeed, the module is changed in place: its dtype, its linear layers with int8, and its device. From the CPU it moves to
this rank's GPU, if there is one, unless `keep_module_on_host` is set. `kernels` has the native forwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compat import kernels, slices
from slipstream.compat.comm import axis_of
from slipstream.inference.options import Refused, read_config, read_options, suggestion
from slipstream.inference.precision import FLOATS, parse_dtype
from slipstream.parallel.inferred import (
    ForwardError,
    OneTokenError,
    PlanTrial,
    Policy,
    compare,
    cut,
    example_inputs,
    needs_trial,
    try_out,
)
from slipstream.train.agreement import refused_together
from slipstream.world.join import init_distributed, local_device
from slipstream.world.mesh import Axis

logger = logging.getLogger(__name__)

__all__ = ["DeepSpeedInferenceConfig", "InferenceEngine", "init_inference"]

_ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "injection_dict": "injection_policy",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "tm": "triangular_masking",
    "tp": "tensor_parallel",
    "mp_size": "tensor_parallel",
    "expert_group": "ep_group",
    "expert_mp_group": "ep_mp_group",
}
_EXPERTS = "experts are not spread over ranks here; slipstream.init_inference(ep_size=...) serves mixtures over processes"
_REFUSED: Refused = {
    "ep_size": ((1, False), _EXPERTS),
    "ep_group": ((None, False), _EXPERTS),
    "ep_mp_group": ((None, False), _EXPERTS),
    "moe": ((None, False, {}), _EXPERTS),
    "quant": ((None, False, {}), "dtype=torch.int8 quantizes the weights"),
    "zero": ((None, False, {}, 0), "slipstream.init_inference(folder, zero=...) keeps layers on disk"),
}
_NO_EFFECT = {
    **dict.fromkeys(("replace_method", "enable_cuda_graph", "use_triton", "triton_autotune"), "the fastest forward is chosen"),
    **dict.fromkeys(("injection_policy_tuple", "triangular_masking", "moe_experts", "moe_type"), "the module's own layers say it"),
    **dict.fromkeys(("return_tuple", "transposed_mode"), "outputs and weights are the module's"),
    "min_out_tokens": "memory grows with an answer; generate(min_new_tokens=) makes answers longer",
    "training_mp_size": "the checkpoint's files say it",
    "set_empty_params": "the module's own device says it",
}


class DeepSpeedInferenceConfig:
    """The options of `init_inference`, by DeepSpeed's names: from a dictionary or the path of a JSON file, and keywords.

    dtype: of weights and outputs; int8 packs the linear layers: of encoders with kernels all except the head's, of a split module
        also those that every rank holds whole. None: unchanged.
    replace_with_kernel_inject: native kernels compute an encoder's forward, if outputs stay the same and the module is not split.
    injection_policy: {class of a block: names of its linear layers}, checked against the module. If the module is split and has no
        plan, these are the layers whose outputs are summed over the ranks (parallel/inferred.py).
    checkpoint: files of weights (`slices`), relative to base_dir, for a module that may be on the meta device. tensor_parallel,
    mp_size: the ranks of the job, over which the module is split by its plan (transformers' or DeepSpeed's), or by
        one inferred from a forward, with the model's example inputs or in the engine's first call.
    mpu: says which slice the module already is, and of how many; the checkpoint is cut to match. save_mp_checkpoint_path: a folder
    that receives the weights, and a description that `checkpoint` accepts. max_out_tokens: the longest prompt of `generate`.

    The others have no effect, which is logged, or are rejected. Raises ValueError for rejected, unknown and contradictory options.
    """

    dtype: Any = None
    replace_with_kernel_inject: bool = False
    injection_policy: Mapping[Any, Any] | None = None
    max_out_tokens: int | None = None
    tensor_parallel: int | None = None
    mpu: Any = None
    checkpoint: Any = None
    base_dir: str = ""
    save_mp_checkpoint_path: str | None = None
    keep_module_on_host: bool = False

    def __init__(self, config: Any = None, **options: Any) -> None:
        given = vars(config) if isinstance(config, DeepSpeedInferenceConfig) else read_config(config or {})
        sources = [{word: _ranks(word, value) for word, value in source.items()} for source in (given, options)]
        names = DeepSpeedInferenceConfig.__annotations__
        read = read_options("init_inference", names, sources, refused=_REFUSED, idle=_NO_EFFECT, aliases=_ALIASES)
        vars(self).update(read)
        if self.mpu is not None and (self.tensor_parallel or self.place[1]) != self.place[1]:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel!r}, and the slices that mpu counts are {self.place[1]}")
        if self.cuts and self.replace_with_kernel_inject:
            logger.warning("init_inference: replace_with_kernel_inject has no effect here: ranks compute shares of the module")

    @property
    def place(self) -> tuple[int, int]:
        """(index of the module's slice, number of slices)."""
        if self.mpu is None:
            return 0, 1
        return self.mpu.get_model_parallel_rank(), self.mpu.get_model_parallel_world_size()

    @property
    def cuts(self) -> int:
        """The number of ranks over which the module is split here; 0: none, or the module is a slice already."""
        return int(self.tensor_parallel or 0) if self.mpu is None and (self.tensor_parallel or 1) > 1 else 0

    @property
    def kind(self) -> str | None:
        """The requested dtype: int8, or the name of a float dtype; None: unchanged."""
        if self.dtype is None:
            return None
        kind = ""
        with suppress(ValueError):
            kind = parse_dtype(getattr(self.dtype, "value", self.dtype))  # DeepSpeed's DtypeEnum has the dtype as its value
        if kind not in (*FLOATS, "int8"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be float32, bfloat16, float16 or int8")
        return kind


def _ranks(word: str, value: Any) -> Any:
    """The size given in a tensor-parallel block; other options are returned unchanged."""
    if _ALIASES.get(word, word) != "tensor_parallel":
        return value
    block = value if isinstance(value, Mapping) else {"tp_size": getattr(value, "tp_size", value)}
    return block.get("tp_size", 1) if block.get("enabled", True) else 1


class InferenceEngine(nn.Module):
    """Computes what the wrapped module computes. Attributes that it lacks are read from the module: config, device, dtype."""

    module: nn.Module

    def __init__(self, model: nn.Module, config: Any = None, **options: Any) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model is {model!r:.200}: deepspeed.init_inference takes a module; slipstream.init_inference opens folders"
            )
        self._config = DeepSpeedInferenceConfig(config, **options)
        _check_policy(model, self._config)
        self._model_times: list[float] = []
        self.model_profile_enabled = False
        kind = self._config.kind
        if self._config.checkpoint is not None:
            slices.load_checkpoint(model, self._config.checkpoint, self._config.base_dir, *self._config.place)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(f"the {type(model).__name__} is on the meta device, without values; give a checkpoint")
        if self._config.save_mp_checkpoint_path is not None:
            slices.save_checkpoint(model, self._config.save_mp_checkpoint_path)
        self.module = model if kind in (None, "int8") else model.to(FLOATS[str(kind)])
        self.module.eval()
        self._device = self._place()
        self._decoder = None if self._config.cuts else kernels.Decoder(self.module, kind)
        self._spoiled = ""  # why the split module's outputs are invalid; "": they are valid
        self._is_whole = bool(self._config.cuts) and not self._cut()
        if not self._config.cuts and (self._config.replace_with_kernel_inject or kind == "int8"):
            self._use_kernels(kind)

    def _place(self) -> torch.device | None:
        """Where the module moves: to this rank's GPU, if there is one; None: it stays. A module with a plan moves once it is cut,
        because a GPU may not hold all of it."""
        if self._config.keep_module_on_host or any(parameter.is_cuda for parameter in self.module.parameters()):
            return None
        device = local_device()
        if not self._config.cuts or needs_trial(self.module):
            self.module.to(device)
        return device

    def _use_kernels(self, kind: str | None) -> None:
        """Use native kernels for an encoder's forward and, with int8, for the linear layers."""
        encoder = kernels.Encoder.of(self.module, kind)
        if kind == "int8":
            packed = kernels.pack(self.module if encoder is None else self.module.base_model)  # a head of its own stays fast
            self.module = packed if encoder is None else self.module
        if encoder is not None:
            encoder.install(self.module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules["module"], name)

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's outputs, in its own form, without a graph."""
        self._check_ready()
        if self._is_whole:
            counted = len(self._model_times)
            self._is_whole = not self._cut(inputs, kwargs)
            del self._model_times[counted:]  # those of the forwards that inferred the plan
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """transformers' `generate`: token ids [prompts, tokens] -> [prompts, tokens and answers], or the output that its settings
        request.

        Slipstream's engine computes greedy answers of models that it supports, on CPUs; the module's own generate all others.
        Raises RuntimeError for a prompt longer than max_out_tokens, and ValueError for a module that a first call must split.
        """
        self._check_ready()
        if self._is_whole:
            raise ValueError(
                f"the {type(self.module).__name__} has no plan of tensor parallelism and tells no inputs to find one with: call "
                "engine(...) once on all ranks, with equal inputs, before engine.generate"
            )
        limit, ids = self._config.max_out_tokens, kwargs.get("input_ids", inputs)
        if limit is not None and isinstance(ids, Tensor) and ids.shape[-1] > limit:
            raise RuntimeError(f"the prompt has {ids.shape[-1]} tokens and max_out_tokens is {limit}; raise it in init_inference")
        times = self._model_times if self.model_profile_enabled else None
        answers = None if self._decoder is None else self._decoder.generate(ids, generation_config, kwargs, times)
        if answers is not None:
            return answers
        return self.module.generate(inputs, generation_config=generation_config, **kwargs)  # type: ignore[operator]

    def destroy(self) -> None:
        """Free `generate`'s cache and its copy of the weights; afterwards the module's own code generates."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()

    is_compiled = property(lambda self: self.module._compiled_call_impl is not None)

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """`torch.compile` of the module, in place."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward from now on (`model_times`). On a GPU this waits for the device, regardless of `use_cuda_events`."""
        if not self.model_profile_enabled:
            started: list[float] = []
            self.module.register_forward_pre_hook(lambda *_: started.append(self._now()))
            self.module.register_forward_hook(lambda *_: self._model_times.append((self._now() - started.pop()) * 1e3))
        self.model_profile_enabled = True

    def _cut(self, inputs: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None) -> bool:
        """Split the module's layers over all ranks of the job, in place. Every rank passes equal inputs and then has the same
        outputs.

        Returns False, with nothing changed, if the module has no plan and no inputs from which to infer one. Collective. Raises
        ValueError if the job has another size, or for a module that cannot be split."""
        module, axis = self.module, _axis(self._config.cuts)
        trial = None
        if needs_trial(module) and (trial := self._found(axis, inputs, options or {})) is None:
            return False
        if (exchange := cut(module, axis, trial, device=self._device)) is not None and trial is not None:
            try:
                compare(module, trial, exchange)
            except ValueError as error:  # a caller that continues must not get these outputs
                self._spoiled = str(error)
                raise
        if self._config.kind == "int8":
            with refused_together("its slices of the model", axis.group):  # values of one rank's slices may not be finite
                self.module = kernels.pack(module)
        return True

    def _found(self, axis: Axis, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> PlanTrial | None:
        """The plan that all ranks infer, from `inputs` or the module's example inputs; None if it has none. An error of one rank is
        raised on all."""
        examples = None
        if not inputs and not options and (examples := example_inputs(self.module)) is None:
            return None
        trial: PlanTrial | None = None
        failed: Exception | None = None
        try:
            trial = try_out(self.module, axis, inputs, examples or options, _rows_named(self._config))
        except Exception as error:  # other ranks may not have it
            failed = error
        kinds = (OneTokenError,) if examples is None else (OneTokenError, ForwardError)
        waits = isinstance(failed, kinds)  # a later call may provide inputs
        _agree(axis, type(failed).__name__ if waits else repr(failed) if failed else trial and trial.partition, failed, waits)
        if waits:
            logger.warning("%s is whole until a call shows how it can be cut: %s", type(self.module).__name__, failed)
        return trial

    def _check_ready(self) -> None:
        if self._spoiled:
            raise ValueError(self._spoiled)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def model_times(self) -> list[float]:
        """Milliseconds of each forward (in `generate`: of each token of the first answer) since the last call."""
        assert self.model_profile_enabled, "model profiling is not enabled: call profile_model_time()"
        times, self._model_times[:] = list(self._model_times), []
        return times


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Wrap a module for inference, like DeepSpeed's function of this name.

    config: a dictionary, the path of a JSON file, or a `DeepSpeedInferenceConfig`, which lists the options. kwargs: the same
    options as keywords. Raises ValueError for options that are unknown, contradictory or not built.
    """
    return InferenceEngine(model, config, **kwargs)


def _axis(size: int) -> Axis:
    """All ranks of the job. Raises ValueError if their number differs from `size`."""
    init_distributed(verbose=False)
    axis = axis_of("tp")
    if axis.size != size:
        raise ValueError(f"tensor_parallel is {size}, and {axis.size} ranks run this: start it by slipstream run --nproc {size}")
    return axis


def _agree(axis: Axis, own: Any, failed: Exception | None, waits: bool) -> None:
    """Raise this rank's error unless it waits, and ValueError if ranks have inferred different plans. Collective."""
    outcomes = axis.gather(own)
    if failed is not None and not waits:
        raise failed.__cause__ if isinstance(failed, ForwardError) and failed.__cause__ else failed
    if other := next((f"rank {rank}: {one}" for rank, one in enumerate(outcomes) if one != own), ""):
        raise ValueError(f"rank {axis.index} has found another plan of tensor parallelism ({own}) than {other}")


def _rows_named(config: DeepSpeedInferenceConfig) -> Policy:
    """class -> the layers that injection_policy names."""
    named = {kind: (names,) if isinstance(names, str) else names for kind, names in (config.injection_policy or {}).items()}
    return {kind: tuple(names) for kind, names in named.items() if isinstance(names, tuple | list)}


def _check_policy(model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
    """Raise ValueError for a policy that names a block or layer that the model lacks."""
    named = _rows_named(config)
    for kind in config.injection_policy or {}:
        if not isinstance(kind, type):
            raise ValueError(f"injection_policy has the key {kind!r}; keys are classes of modules")
        blocks = [module for module in model.modules() if isinstance(module, kind)]
        if not blocks:
            raise ValueError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        modules = (item for block in blocks for item in block.named_modules())
        inside = {name for name, module in modules if getattr(module, "weight", None) is not None}
        for name in named.get(kind, ()):
            if not any(one == name or one.endswith(f".{name}") for one in inside):
                raise ValueError(f"injection_policy: {kind.__name__} has no {name!r}; {suggestion(name, inside)}")
