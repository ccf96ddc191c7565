"""Serving from Python: `init_inference` in DeepSpeed's form, `pipeline` in DeepSpeed-MII's, and what they give.

    engine = slipstream.init_inference("path/to/model", dtype="int8")
    print(engine.generate("Once upon a time", max_new_tokens=50).text)
    for delta in engine.generate("Once upon a time", stream=True):
        print(delta.text, end="")

Settings of sampling are `SamplingParams`, or its fields as keywords, also under the names of transformers and DeepSpeed-MII
(`max_new_tokens`, `do_sample`, ...). Given as keywords, without `temperature`, `do_sample` or `seed` the likeliest token is taken
each time, as in transformers.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import queue
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from slipstream.inference.core import Finish, QueueFullError, SamplingParams
from slipstream.inference.engine import Engine, Handle, Logprob, Output, Usage

if TYPE_CHECKING:
    import os

    from torch import Tensor

__all__ = ["Completion", "Delta", "InferenceEngine", "init_inference", "pipeline"]

logger = logging.getLogger(__name__)

# What DeepSpeed's init_inference takes and what becomes of it here. Value: what switches it off, and why it is refused else.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "checkpoint": ((None,), "a checkpoint's description is not read; give its folder as `model`"),
    "base_dir": (("", None), "it belongs to `checkpoint`; give the model's folder as `model`"),
    "save_mp_checkpoint_path": ((None,), "there are no tensor-parallel checkpoints to save"),
    "mp_size": ((1, None), "tensor parallelism is not built for serving yet; run one engine per device"),
    "training_mp_size": ((1,), "tensor parallelism is not built for serving yet; export the model to one Hugging Face folder"),
    "ep_size": ((1,), "experts are not spread over devices yet; all are served from one"),
    "mpu": ((None,), "tensor parallelism is not built for serving yet; run one engine per device"),
    "quant": ((None,), 'weights are quantised by dtype="int8" or dtype="int4"'),
    "zero": ((None, {}), "weights are not streamed from host or disk while serving; dtype=\"int4\" makes them small"),
    "keep_module_on_host": ((False,), "the weights are where they are used; choose with `device`"),
    "triangular_masking": ((True,), "only decoders are served, which are causal"),
}
_NO_EFFECT = {
    "replace_with_kernel_inject": "the fast kernels are always used",
    "kernel_inject": "the fast kernels are always used",
    "replace_method": "the fast kernels are always used",
    "injection_policy": "what the model is made of is read from its configuration",
    "injection_policy_tuple": "what the model is made of is read from its configuration",
    "injection_dict": "what the model is made of is read from its configuration",
    "enable_cuda_graph": "decoding is captured by itself where the device can",
    "use_triton": "Triton kernels are used on CUDA",
    "triton_autotune": "Triton kernels are tuned by themselves",
    "return_tuple": "there is one form of result",
    "set_empty_params": "weights are never made twice",
    "min_out_tokens": "use min_new_tokens in generate()",
    "moe": "routed experts are read from the model's configuration",
    "moe_experts": "routed experts are read from the model's configuration",
    "moe_type": "routed experts are read from the model's configuration",
    "max_batch_size": "use max_running",
}  # fmt: skip
