"""The largest eigenvalue of the loss's Hessian for each block: the order of MoQ's second-order schedule (arXiv 1909.05840).

Power iteration: v is random and normalized; lambda = v.Hv, and v becomes the normalized Hv, until the relative change of lambda is
less than `tol`. Hv is the derivative of gradient.v. Nonfinite values count as 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)
Mean = Callable[[list[Tensor]], list[Tensor]]  # averages over ranks


class Eigenvalue:
    """DeepSpeed's class. layer_name: the path of a list of blocks in the model; layer_num: how many of them, 0 for all.

    max_iter: at most this many products per block. stability: added to norms by which v is divided.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0.0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        self.verbose, self.max_iter, self.tol, self.stability = verbose, max_iter, tol, stability
        self.gas_boundary_resolution, self.layer_name, self.layer_num = gas_boundary_resolution, layer_name, layer_num

    def get_layers(self, module: nn.Module) -> list[nn.Module]:
        """The blocks. Raises ValueError if the model has none under the name, or too few."""
        try:
            stack = module.get_submodule(self.layer_name)
        except AttributeError:
            stack = None
        blocks = list(stack) if isinstance(stack, (nn.ModuleList, nn.Sequential)) else []
        if not blocks or len(blocks) < self.layer_num:
            lists = [name for name, each in module.named_modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
            raise ValueError(
                f"eigenvalue.layer_name {self.layer_name!r} and layer_num {self.layer_num}: the model has a list of {len(blocks)} "
                f"blocks of this name; its lists are {', '.join(map(repr, lists)) or 'none'}"
            )
        return blocks[: self.layer_num or len(blocks)]

    def compute_eigenvalue(self, module: nn.Module, device: object = None, scale: float = 1.0) -> dict[int, tuple[float, int]]:
        """After `loss.backward(create_graph=True)`: {id of a parameter: (its block's eigenvalue, 0 to 1; the block's number)}."""
        blocks = self.get_layers(module)
        pairs = [[(p.grad, p) for p in block.parameters() if p.grad is not None and p.grad.requires_grad] for block in blocks]
        if not any(pairs):
            logger.warning("eigenvalue: no gradient has a graph; the backward needs create_graph=True, and kernels that have one")
            return {}
        shares = self.post_process([self._largest(pair) for pair in pairs])
        return {id(p): (share, i) for i, (block, share) in enumerate(zip(blocks, shares, strict=True)) for p in block.parameters()}

    def shares(self, loss: Tensor, blocks: Sequence[nn.Module], mean: Mean = list) -> list[float]:
        """The eigenvalues of the blocks over the largest one, 0 to 1. mean: averages tensors over ranks with the same model."""
        with torch._C.DisableTorchFunctionSubclass():  # stage 3's parameters stay unchanged
            own = [[param for param in block.parameters() if param.requires_grad] for block in blocks]
            every = list({id(param): param for params in own for param in params}.values())
            derivatives = torch.autograd.grad(loss, every, create_graph=True, allow_unused=True)
            grads = {id(p): grad for p, grad in zip(every, derivatives, strict=True) if grad is not None and grad.requires_grad}
            pairs = [[(grads[id(p)], p) for p in params if id(p) in grads] for params in own]
            return self.post_process([self._largest(pair, mean) for pair in pairs])

    def _largest(self, pairs: Iterable[tuple[Tensor, Tensor]], mean: Mean = list) -> float:
        """The eigenvalue of largest magnitude of the parameters' part of the Hessian. pairs: (gradient with a graph, parameter)."""
        grads, params = [grad for grad, _ in pairs], [param for _, param in pairs]
        if not grads:
            return 0.0
        random = torch.Generator().manual_seed(0)  # the same on every rank, without using the model's generator
        v = self.normalize([torch.randn(grad.shape, generator=random).to(grad.device) for grad in grads])
        now, before = 1.0, 0.0
        for _ in range(self.max_iter):
            if now == 0 or abs((now - before) / now) < self.tol:
                break
            before = now
            ahead = [each.to(grad.dtype) for each, grad in zip(v, grads, strict=True)]
            product = torch.autograd.grad(grads, params, ahead, retain_graph=True, allow_unused=True)
            zeros = [torch.zeros_like(each) if hv is None else hv for each, hv in zip(v, product, strict=True)]
            hv = mean([torch.nan_to_num(each.float(), 0.0, 0.0, 0.0) for each in zeros])
            now = float(self.inner_product(hv, v))
            v = self.normalize(hv)
        if self.verbose:
            logger.warning("eigenvalue: %.3g of %d parameters", now, len(params))
        return now

    def normalize(self, v: Sequence[Tensor]) -> list[Tensor]:
        norm = self.inner_product(v, v).sqrt() + self.stability
        return [torch.nan_to_num(each / norm, 0.0, 0.0, 0.0) for each in v]

    def inner_product(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        return torch.stack([(x * y).sum() for x, y in zip(xs, ys, strict=True)]).sum()

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Magnitudes over the largest one; 1 for values that are 0 or not finite."""
        sizes = [abs(value) if math.isfinite(value) else 0.0 for value in value_list]
        return [size / max(sizes) if size else 1.0 for size in sizes]
