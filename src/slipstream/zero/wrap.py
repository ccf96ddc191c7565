"""Group the parameters that are gathered together. Pure: reads the module tree and changes nothing.

A group is one repeated block (an element of a list of like modules: a transformer layer) or, outside of those, a layer that chooses
from a list ([Note: Choices]). Parameters outside all blocks form the root group, which comes first. Inside a block,
groups are keyed by (dtype, trainable, exact, differs, kind): a flat buffer has one dtype and one family, frozen weights need
neither gradients nor optimizer state, codes and scales of quantized weights are never cast, and a reduction covers a whole
buffer. The items of a group are leaves (zero/leaves.py).
A parameter that several modules share belongs to its first group.

[Note: Choices] Without shared memory, a unit is gathered from all ranks, so all ranks must run its block. Not all ranks run each
expert of a list, only those that their tokens chose, so the layer that has the list is the block. A list counts as one of experts
by its name or its elements' class. Any other module that chooses counts if it is marked (`zero_optimization.leaf_module`,
`deepspeed.utils.set_z3_leaf_module`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from slipstream.world.mesh import Differs
from slipstream.zero.leaves import differs_of, kind_of, named_leaves


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of one flat buffer."""

    module_name: str  # the block, "" for the root
    param_names: tuple[str, ...]  # first name of each parameter, in registration order
    dtype: torch.dtype
    trainable: bool
    exact: bool  # never cast to the config's precision
    differs: Differs = ()  # the splits of its parameters, the key of their family
    kind: str = ""  # see zero.leaves.keep_apart

    @property
    def name(self) -> str:
        kinds = [f"split over {split.axis}" for split in self.differs]
        if self.exact:
            kinds += ["frozen", str(self.dtype).removeprefix("torch.")]
        elif not self.trainable:
            kinds.append("frozen")
        return (self.module_name or "<root>") + (f" ({', '.join(kinds)})" if kinds else "")


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the outermost repeated modules: children of one container that share a class and have parameters.

    Children whose names are numbers, as in a PipelineModule, are in a container, too. Experts are no blocks; their layer is one.
    """
    lists = set(expert_lists(model))
    layers = {name.rpartition(".")[0] for name in lists}

    def visit(module: nn.Module, prefix: str) -> list[str]:
        children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
        kinds = [type(child) for _, child in children]
        is_container = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        blocks: list[str] = []
        for name, child in children:
            path = f"{prefix}{name}"
            if ((is_container or name.isdigit()) and kinds.count(type(child)) >= 2) or is_leaf(child):
                blocks.append(path)
            elif path not in lists:
                blocks += visit(child, path + ".") or ([path] if path in layers else [])
        return blocks

    return [] if is_leaf(model) else visit(model, "")


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is marked as one whose modules are gathered together."""
    return bool(vars(module).get("_z3_leaf", False))


def _is_of_class(wanted: type | str, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")


# how modules are chosen: key of the config -> whether the wanted class, name or suffix is that of a module
LEAF_RULES: dict[str, Callable[[Any, str, nn.Module], bool]] = {
    "classes": _is_of_class,
    "names": lambda wanted, name, module: name == wanted,
    "name_suffixes": lambda wanted, name, module: name.endswith(wanted),
}


def mark_leaves(model: nn.Module, rule: str, wanted: Iterable[Any], flag: bool = True) -> dict[Any, list[nn.Module]]:
    """Mark (or unmark) the modules that a rule of `LEAF_RULES` chooses; returns those of each wanted value."""
    modules = list(model.named_modules())
    chosen = {each: [module for name, module in modules if LEAF_RULES[rule](each, name, module)] for each in wanted}
    for module in (module for found in chosen.values() for module in found):
        module._z3_leaf = flag
    return chosen


def expert_lists(model: nn.Module) -> list[str]:
    """The names of lists of experts ([Note: Choices])."""
    return [name for name, module in model.named_modules(remove_duplicate=False) if _are_experts(name, module)]


def _are_experts(name: str, module: nn.Module) -> bool:
    kinds = [type(child).__name__ for child in module.children()]
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(kinds) < 2:
        return False
    return "expert" in name.rpartition(".")[2].lower() or all(kind.endswith("Expert") for kind in kinds)


def wrap(model: nn.Module) -> list[Group]:
    """Group every parameter of `model`; the order of groups is the order of first use in a forward, root first."""
    blocks = repeated_blocks(model)
    names: dict[Group, list[str]] = {}
    for leaf in named_leaves(model):
        block, param = next((block for block in blocks if leaf.name.startswith(f"{block}.")), ""), leaf.tensor
        key = Group(block, (), param.dtype, param.requires_grad, leaf.exact, differs_of(leaf.whole), kind_of(leaf.whole))
        names.setdefault(key, []).append(leaf.name)
    order = {name: i for i, name in enumerate(["", *blocks])}
    return [replace(key, param_names=tuple(names[key])) for key in sorted(names, key=lambda key: order[key.module_name])]
