"""The plain-torch twin of a training run: one process, the whole batch, no code of Slipstream.

`batches[step][micro][rank]` is the `batch` of `loss(model, batch)`. Each rank's backward runs separately, in `dtype`. A
micro-batch's gradients are added in rank order in fp32, times 1 / world, and stored in `accum_dtype` (default: `dtype` without
accumulation, else fp32). A parameter that no rank used has gradient zero. The norm is that of `clip_grad_norm_`, the optimizer
steps fp32 masters, and weights are masters rounded to `dtype`. Masters start as the weights of `model`: if the system under test
rounds these first, pass a model whose weights `dtype` represents exactly.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Run(NamedTuple):
    losses: Tensor  # [step, micro, rank], fp32, unscaled, each rank's own
    norms: Tensor  # [step], of the averaged gradient before clipping
    weights: dict[str, Tensor]  # trained parameters by name, in dtype
    masters: dict[str, Tensor]  # the same in fp32


def adamw(masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(masters.values(), lr=1e-3)


def train(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Sequence[Sequence[Any]]],
    *,
    optimizer: Callable[[dict[str, Tensor]], torch.optim.Optimizer] = adamw,
    dtype: torch.dtype = torch.float32,
    accum_dtype: torch.dtype | None = None,
    clip: float = 0.0,
    loss_scale: float = 1.0,
) -> Run:
    masters = {n: p.detach().clone().float() for n, p in model.named_parameters() if p.requires_grad}
    model = copy.deepcopy(model).to(dtype)
    params = {name: model.get_parameter(name) for name in masters}
    optim = optimizer(masters)
    losses, norms = [], []
    for micros in batches:
        kept = accum_dtype or (dtype if len(micros) == 1 else torch.float32)
        total = {name: torch.zeros_like(master, dtype=kept) for name, master in masters.items()}
        for ranks in micros:
            sums = {name: torch.zeros_like(master) for name, master in masters.items()}
            for batch in ranks:
                value = loss(model, batch).float()
                losses.append(value.item())
                torch.autograd.backward(value * (loss_scale / len(micros)))
                for name, p in params.items():
                    sums[name] += 0 if p.grad is None else p.grad.float()
                    p.grad = None
            for name in total:
                total[name] = (total[name].float() + sums[name] * (1 / len(ranks))).to(kept)
        for name, master in masters.items():
            master.grad = total[name].float() / loss_scale
        norms.append(nn.utils.clip_grad_norm_(masters.values(), clip or math.inf).item())
        optim.step()
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(masters[name])
    shape = len(batches), len(batches[0]), len(batches[0][0])
    weights = {name: p.detach() for name, p in params.items()}
    return Run(torch.tensor(losses).reshape(shape), torch.tensor(norms), weights, masters)
