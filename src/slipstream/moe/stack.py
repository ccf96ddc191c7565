"""`ExpertStack`: equal modules as one, whose parameters have a leading dimension of experts.

A checkpoint has the whole stack, so any number of expert-parallel ranks can read it.

If all parameters of an expert belong to linear layers, it computes the rows of all experts at once: its linear layers become
`GroupedLinear`, and what stands between them (activations, dropout, products) must treat each row independently, because an expert
gets tokens in no certain order. Any other module runs once per expert, on the expert's rows: a module with other parameters, or
whose linear layers get other rows than it does (for instance a row cut into parts), which the first forward tries with one row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.moe.grouped import GroupedLinear, RowsError
from slipstream.parallel.around import first_of
from slipstream.parallel.mpu import MARKS
from slipstream.zero.leaves import mark_stack


class ExpertStack(nn.Module):
    """`num_experts` copies of a module, or that many modules that a callable builds.

    Raises ValueError for an expert without parameters, with persistent buffers, or if the callable's modules differ.
    """

    def __init__(self, expert: nn.Module | Callable[[], nn.Module], num_experts: int) -> None:
        super().__init__()
        if num_experts < 1:
            raise ValueError(f"a stack of {num_experts} experts: at least 1")
        if not callable(expert):
            raise TypeError(f"an expert is a module or a callable that builds one, not {expert!r}")
        modules = [expert] if isinstance(expert, nn.Module) else [expert() for _ in range(num_experts)]
        first = modules[0]
        _check(first)
        names = [name for name, _ in first.named_parameters()]
        parts = [dict(module.named_parameters()) for module in modules]
        for part in parts:
            if {name: each.shape for name, each in part.items()} != {name: each.shape for name, each in parts[0].items()}:
                raise ValueError("the experts of a stack must have parameters of the same names and shapes")
        self.num_experts, self.kind, self.is_tried = num_experts, type(first).__name__, False
        self.is_grouped = _linear_only(first)
        self.names = names
        skeleton = copy.deepcopy(first)
        for name in names:
            source = [part[name].detach() for part in parts]
            values = source[0].expand(num_experts, *source[0].shape) if len(source) == 1 else torch.stack(source)
            stacked = nn.Parameter(values.clone(), requires_grad=parts[0][name].requires_grad)
            _mark_as(stacked, parts[0][name])
            mark_stack(stacked)
            path, _, leaf = name.rpartition(".")
            setattr(skeleton.get_submodule(path), leaf, stacked)
        self.expert = _grouped(skeleton) if self.is_grouped else skeleton

    @property
    def num_local(self) -> int:
        """The number of experts that this rank has."""
        return len(next(self.parameters()))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows: [rows, d], sorted by this rank's experts; counts: rows of each. Returns as many rows."""
        if not self.is_tried:
            self._try(rows)
        self._count(counts if self.is_grouped else None)
        if self.is_grouped:
            return first_of(self.expert(rows))  # Megatron's layers also return their bias
        params = {name: self.expert.get_parameter(name).unbind(0) for name in self.names}
        outs = []
        for i, part in enumerate(rows.split(list(counts))):  # also experts without rows: their gradients are zeros
            outs.append(first_of(functional_call(self.expert, {name: values[i] for name, values in params.items()}, (part,))))
        return torch.cat(outs)

    def _count(self, counts: Sequence[int] | None) -> None:
        for module in self.expert.modules():
            if isinstance(module, GroupedLinear):
                module.counts = counts

    @torch.no_grad()
    def _try(self, rows: Tensor) -> None:
        """Test with one row whether the expert can compute all experts' rows at once, and returns as many features."""
        self.is_tried = True
        row, counts = rows.new_zeros(1, *rows.shape[1:]), [1] + [0] * (self.num_local - 1)
        with torch.random.fork_rng([rows.device] if rows.is_cuda else []):
            if self.is_grouped:
                self._count(counts)
                try:
                    self.expert(row)
                except RowsError:
                    self.is_grouped = False
            out = self.forward(row, counts)
        if out.shape != row.shape:
            self.is_tried = False
            raise ValueError(
                f"the expert {self.kind} returns {out.shape[-1]} features for {row.shape[-1]}: experts return as many "
                "as they are given"
            )


def _mark_as(stacked: nn.Parameter, param: nn.Parameter) -> None:
    """Copy marks from a parameter to its stack: Megatron's `partition_dim`, which is one more there, or the user's own."""
    vars(stacked).update({name: value for name, value in vars(param).items() if not name.startswith("_")})
    if any(getattr(param, mark, False) for mark in MARKS):
        vars(stacked).update(partition_dim=max(getattr(param, "partition_dim", 0), 0) + 1)


def _check(expert: nn.Module) -> None:
    if not any(True for _ in expert.parameters()):
        raise ValueError(f"{type(expert).__name__} has no parameters, so copies of it are not experts")
    if len(dict(expert.named_parameters(remove_duplicate=False))) > len(dict(expert.named_parameters())):
        raise ValueError(f"the expert {type(expert).__name__} uses one parameter under several names, which a stack cannot have")
    saved = [name for name, _ in expert.named_buffers() if name in expert.state_dict()]
    if saved:
        raise ValueError(
            f"the expert {type(expert).__name__} has buffers ({', '.join(saved)}), and experts are stacked parameters: make them "
            "parameters with requires_grad=False, or register them with persistent=False"
        )


def _linear_only(expert: nn.Module) -> bool:
    return all(type(module) is nn.Linear for module in expert.modules() if any(True for _ in module.parameters(recurse=False)))


def _grouped(skeleton: nn.Module) -> nn.Module:
    if isinstance(skeleton, nn.Linear):
        return GroupedLinear(skeleton)
    for module in list(skeleton.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, GroupedLinear(child))
    return skeleton
