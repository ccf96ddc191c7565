"""`deepspeed.git_version_info` and `deepspeed.utils.torch`: versions, and functions that depend on torch's version."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compat.accelerator import get_accelerator
from slipstream.compat.op_builders import ALL_OPS

version: str = importlib.import_module("deepspeed").__version__
git_hash = git_branch = "[none]"
accelerator_name = get_accelerator().device_name()
installed_ops = dict.fromkeys(ALL_OPS, False)  # the `deepspeed` package compiles no ops
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0",
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
}


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether min_version <= torch's version <= max_version; a local part ("+cpu") sorts after the bare version.

    Raises AssertionError if both are missing.
    """
    if not min_version and not max_version:
        raise AssertionError("required_torch_version() needs min_version= or max_version=")
    now = torch.torch_version.TorchVersion(torch.__version__)
    return not (min_version and now < str(min_version)) and not (max_version and now > str(max_version))


def is_functorch_transforming() -> bool:
    """Whether a torch.func transform (grad, vmap, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def register_grad_hook(param: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Call `hook(param)` after each backward has accumulated its gradient. Returns the handle that removes the hook."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
