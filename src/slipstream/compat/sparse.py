"""DeepSpeed's sparse tensors (`deepspeed.runtime.sparse_tensor`), and its engine's collectives on them, for code that calls them.

The engine itself sends rows by zero/rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.zero.leaves import rows_of


class SparseTensor:
    """The rows of a matrix that have a value other than 0.

    Differs from DeepSpeed's, which loses rows whose values add up to 0.
    """

    def __init__(self, dense_tensor: Tensor) -> None:
        self.orig_dense_tensor, self.is_sparse, self.dtype = dense_tensor, dense_tensor.is_sparse, dense_tensor.dtype
        self.dense_size = list(dense_tensor.size())
        if dense_tensor.is_sparse:
            dense_tensor = dense_tensor.coalesce()
            self.indices, self.values = dense_tensor.indices().flatten(), dense_tensor.values()
        else:
            self.indices = (dense_tensor != 0).flatten(1).any(1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    @staticmethod
    def type() -> str:
        return "deepspeed.SparseTensor"

    def to_coo_tensor(self) -> Tensor:
        with torch.sparse.check_sparse_tensor_invariants(True):  # torch 2.11 warns of the argument check_invariants=True
            return torch.sparse_coo_tensor(self.indices.unsqueeze(0), self.values, self.dense_size)

    def to_dense(self) -> Tensor:
        return self.values.new_zeros(self.dense_size).index_add_(0, self.indices, self.values)

    def sparse_size(self) -> tuple[int, int]:
        """(the number of indices and values, the number of elements of the matrix)."""
        return self.indices.numel() + self.values.numel(), self.dense_size[0] * self.dense_size[1]

    def add(self, b: SparseTensor) -> None:
        """Add another one, by its rows beside these."""
        assert self.dense_size == b.dense_size, f"a sparse tensor of {b.dense_size} does not add to one of {self.dense_size}"
        self.indices, self.values = torch.cat([self.indices, b.indices]), torch.cat([self.values, b.values])

    def __repr__(self) -> str:
        sparse, dense = self.sparse_size()
        return (
            f"DeepSpeed.SparseTensor(indices_size={self.indices.size()}, values_size={self.values.size()}, "
            f"dense_size={self.dense_size}, device={self.indices.device}, reduction_factor={dense / max(sparse, 1)})"
        )


Buckets = list[tuple[torch.dtype, list[Any]]]


def split_half_float_double_sparse(tensors: Sequence[Tensor | SparseTensor]) -> tuple[Buckets, Buckets]:
    """(dtype, tensors) of each dtype: of the sparse ones, and of the dense ones."""

    def buckets(chosen: list[Any]) -> Buckets:
        return [(dtype, [each for each in chosen if each.dtype is dtype]) for dtype in dict.fromkeys(each.dtype for each in chosen)]

    dense = [tensor for tensor in tensors if not isinstance(tensor, SparseTensor)]
    return buckets([tensor for tensor in tensors if isinstance(tensor, SparseTensor)]), buckets(dense)


# -- the engine's methods --


def all_gather_scalar(engine: Any, value: Tensor, dp_group: Any) -> list[Tensor]:
    """Every rank's `value`, which has one shape on all ranks. Collective."""
    if not dist.is_initialized():
        return [value.detach().clone()]
    gathered = [torch.zeros_like(value) for _ in range(dist.get_world_size(dp_group))]
    dist.all_gather(gathered, value.detach().contiguous(), group=dp_group)
    return gathered


def sparse_all_gather(engine: Any, value: Tensor, dp_group: Any) -> list[Tensor]:
    """Every rank's `value`, of which the first dimension may differ. Collective."""
    sizes = [int(size) for size in all_gather_scalar(engine, torch.tensor([value.shape[0]], device=value.device), dp_group)]
    padded = value.new_zeros(max(sizes), *value.shape[1:])
    padded[: value.shape[0]] = value
    return [each[:size] for each, size in zip(all_gather_scalar(engine, padded, dp_group), sizes, strict=True)]


def sparse_allreduce(engine: Any, sparse: SparseTensor, dp_group: Any, dp_world_size: int | None = None) -> SparseTensor:
    """Add the ranks' rows, or average them if `gradient_allreduce_op` is mean; returns `sparse`. Collective."""
    dtype = engine.plan.precision.comm_dtype
    values = sparse.values.to(dtype) if dtype is not None and dtype.is_floating_point else sparse.values
    if engine.gradient_average:
        size = dist.get_world_size(dp_group) if dist.is_initialized() else 1
        values = values / (dp_world_size or size)
    sparse.indices = torch.cat(sparse_all_gather(engine, sparse.indices, dp_group))
    sparse.values = torch.cat(sparse_all_gather(engine, values, dp_group)).to(sparse.dtype)
    return sparse


def sparse_allreduce_bucket(
    engine: Any, bucket: Sequence[SparseTensor], dp_group: Any, dp_world_size: int | None = None
) -> list[SparseTensor]:
    return [sparse_allreduce(engine, sparse, dp_group, dp_world_size) for sparse in bucket]


def sparse_allreduce_no_retain(
    engine: Any, bucket: Sequence[SparseTensor], dp_group: Any, dp_world_size: int | None = None
) -> None:
    """As `sparse_allreduce`, into the tensors of which the sparse ones were made."""
    for sparse in sparse_allreduce_bucket(engine, bucket, dp_group, dp_world_size):
        if sparse.is_sparse:
            sparse.orig_dense_tensor.data = sparse.to_coo_tensor()
        else:
            sparse.orig_dense_tensor.copy_(sparse.to_dense())


def sparse_tensor_module_names(engine: Any) -> set[str]:
    """The names of the weights whose gradients travel as rows."""
    return set(rows_of(engine.module)) if engine.plan.zero.sends_rows else set()


def set_gradient_average(engine: Any, value: bool) -> None:
    """Raises ValueError unless the engine's plan does so already."""
    if value != engine.gradient_average:
        op = "mean" if value else "sum"
        raise ValueError(f'engine.gradient_average = {value}: set "gradient_allreduce_op": "{op}" in the config')
