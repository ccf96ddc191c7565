"""The model-parallel ranks of a DeepSpeed checkpoint: their files, and the place of their slices in whole parameters.

Files of DeepSpeed 0.19.8, with D the data-parallel index, M = stage x degree of slicing + slice, and N a layer of a PipelineModule:

[zero_pp_rank_D_]mp_rank_M_model_states.pt              weights, buffers and counters; in a pipeline, without weights
[bf16_]zero_pp_rank_D_mp_rank_M_optim_states.pt         fp32 weights and the optimizer's states
layer_N[-model_S]-model_states.pt                       a layer's weights and buffers under its own names; a tied one's: the first's

`universal_checkpoint_info` tells how slices are cut: regular expressions for names that are copied, or cut along another dimension
than the first, or in sub-parameters (a fused query, key and value). AutoTP and Megatron-DeepSpeed write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.checkpoint.errors import CheckpointError
from slipstream.checkpoint.flat_slice import Box, Shape, places_of
from slipstream.checkpoint.pickled import read

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
# Groups and nested repetition, which legitimate patterns do not need, could make a match take exponential time
_SIMPLE = re.compile(r"(?:[^()*+?{}\\]|\\.|[*+?](?![*+?]))*")
_MOST_REPEATS = 2  # per pattern: matching takes time in proportion to this power of the name's length, up to 1,000
_LONGEST_NAME = 1000


class DeepSpeedPart(NamedTuple):
    """The files and content that one model-parallel rank saved."""

    slice: int  # index among the slices of a stage
    model_files: list[str]  # by data-parallel index; one if weights are not sharded
    optim_files: list[str]
    model: Any  # the content of the first of the model's files

    @property
    def trained(self) -> dict[str, Shape]:
        """The shapes of this rank's trained parameters."""
        return {name: tuple(shape) for group in self.model["param_shapes"] or [] for name, shape in group.items()}


def parts_of(folder: Path, names: Sequence[str]) -> list[DeepSpeedPart]:
    """The parts, by pipeline stage, and within a stage by slice. Raises CheckpointError if files are missing."""
    model_files, optim_files = _by_rank(names, _MODEL), _by_rank(names, _OPTIM)
    if not model_files:
        raise CheckpointError(f"it has no mp_rank_00_model_states.pt, only {', '.join(names[:3])}")
    if sorted(model_files) != list(range(len(model_files))):
        raise CheckpointError(f"its files are of model-parallel ranks {sorted(model_files)}: some are missing")
    if optim_files and sorted(optim_files) != sorted(model_files):
        raise CheckpointError(
            f"its files of optimizer states are of model-parallel ranks {sorted(optim_files)}, those of the model of "
            f"{sorted(model_files)}: some are missing"
        )
    models = [read(folder / model_files[rank][0]) for rank in range(len(model_files))]
    degree = _degree(names, models[0], len(models))
    return [DeepSpeedPart(rank % degree, model_files[rank], optim_files.get(rank, []), models[rank]) for rank in range(len(models))]


def _by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, list[str]]:
    """Model-parallel rank -> its files by data-parallel index."""
    by_rank: dict[int, dict[int, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            by_rank.setdefault(int(match[2]), {})[int(match[1] or 0)] = name
    for files in by_rank.values():
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(f"its files are of ranks {sorted(files)}: some are missing")
    return {rank: [files[index] for index in range(len(files))] for rank, files in by_rank.items()}


def _degree(names: Sequence[str], model: Mapping[str, Any], count: int) -> int:
    layers = [match for match in map(_LAYER.fullmatch, names) if match is not None]
    stored_degree = (model.get("checkpoint_parallel_dimensions") or {}).get("tp_degree")
    degree = int(stored_degree or (len({match[2] for match in layers}) if layers else count))
    if degree < 1 or count % degree:
        raise CheckpointError(f"it has files of {count} model-parallel ranks, which are not stages of {degree} slices")
    return degree


def layers_of(names: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """(layer's number, slice, file) of each file of a pipeline's layer."""
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None:
            yield str(int(match[1])), int(match[2] or 0), name


class PartPlace(NamedTuple):
    """The whole parameter, and the boxes in it that a slice fills; (): all of it."""

    whole: Shape
    boxes: tuple[Box, ...] = ()
    is_copy: bool = False  # every slice has the same values


class Cuts:
    """How the slices of a stage lie in whole parameters. Raises CheckpointError if the checkpoint does not tell."""

    def __init__(self, info: Mapping[str, Any] | None, degree: int) -> None:
        if info is None and degree > 1:
            raise CheckpointError(
                f"it has files of {degree} tensor-parallel ranks and no universal_checkpoint_info, which says how parameters are "
                "cut: save it with a model that has that attribute, or join the slices with the tools of the model's project"
            )
        self.info, self.degree = info or {}, degree
        self._patterns: dict[str, _Patterns] = {}  # by key of the info
        subs = [sub if isinstance(sub, Mapping) else vars(sub) for sub in self.info.get("parameter_with_sub_params", ())]
        self._subs = [(_Patterns(sub["patterns"]), sub) for sub in subs]
        self._affine = (self.info.get("affine_map") or {}).get("params") or {}

    def place(self, name: str, index: int, shapes: Sequence[Shape]) -> PartPlace:
        """The place of slice `index` of a parameter whose slices have these shapes."""
        if self.degree == 1:
            return PartPlace(shapes[index])
        if self._matched("autotp_unsupported_parameter_patterns", name) is not None:
            raise CheckpointError(f"{name!r} is cut in a way that DeepSpeed does not describe, and cannot be joined")
        if self._matched("tp_replicated_parameter_patterns", name) or self._matched("parameter_to_average_patterns", name):
            return PartPlace(shapes[index], is_copy=True)
        dim, widths = self._widths(name, shapes)
        whole, ranges = list(shapes[index]), [[(0, size)] for size in shapes[index]]
        ranges[dim], whole[dim] = [], sum(map(sum, widths))
        start = 0
        for sub in widths:
            ranges[dim].append((start + sum(sub[:index]), start + sum(sub[: index + 1])))
            start += sum(sub)
        affine = self._affine.get(f"^{re.escape(name)}$")
        if affine is not None and tuple(affine["logical_shape"]) != tuple(whole):
            raise CheckpointError(f"{name!r} has shape {tuple(affine['logical_shape'])}, and its slices join to {tuple(whole)}")
        return PartPlace(tuple(whole), places_of(ranges))

    def _widths(self, name: str, shapes: Sequence[Shape]) -> tuple[int, list[list[int]]]:
        """The dimension of the cut and, for each sub-parameter, the sizes of the slices along it."""
        if self._matched("parameter_with_2_sub_params_cat_dim_0", name) is not None:
            return 0, [[shape[0] // 2 for shape in shapes]] * 2
        for patterns, sub in self._subs:
            if (pattern := patterns.find(name)) is not None:
                return self._sub_widths(name, shapes, sub, pattern)
        dim = 1 if self._matched("parameter_with_row_parallelism_patterns", name) is not None else 0
        if any(len(shape) <= dim for shape in shapes):
            raise CheckpointError(f"{name!r} has shape {shapes[0]}, and would be cut along dimension {dim}")
        return dim, [[shape[dim] for shape in shapes]]

    def _sub_widths(self, name: str, shapes: Sequence[Shape], sub: Mapping[str, Any], pattern: str) -> tuple[int, list[list[int]]]:
        dim, spec = int(sub["partition_dim"]), sub["shape"]
        widths = (self.info.get("sub_param_shard_widths") or {}).get(pattern)
        if widths is None:  # up to version 0.3: equal shares, given as sizes or as a number of sub-parameters
            total = sum(shape[dim] for shape in shapes)
            sizes = spec[dim] if isinstance(spec[dim], (tuple, list)) else [total // spec[dim]] * spec[dim]
            widths = [[size // self.degree] * self.degree for size in sizes]
        widths = [[int(width) for width in each] for each in widths]
        for index, shape in enumerate(shapes):
            if (
                len(spec) != len(shape)
                or any(len(each) != self.degree for each in widths)
                or shape[dim] != sum(each[index] for each in widths)
            ):
                raise CheckpointError(f"{name!r} has slices of {shape}, which are not sub-parameters of {spec} in {widths}")
        return dim, widths

    def _matched(self, key: str, name: str) -> str | None:
        """The pattern of a list (or dictionary) that matches the name, or None."""
        if key not in self._patterns:
            self._patterns[key] = _Patterns(self.info.get(key) or ())
        return self._patterns[key].find(name)


class _Patterns:
    """Regular expressions from a file, most of which match only one name."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.exact: dict[str, str] = {}  # name -> its pattern
        self.others: list[re.Pattern[str]] = []
        for pattern in patterns:
            name = re.sub(r"\\(.)", r"\1", pattern)[1:-1]
            if pattern == f"^{re.escape(name)}$":
                self.exact[name] = pattern
            elif _SIMPLE.fullmatch(pattern) and sum(pattern.count(sign) for sign in "*+?") <= _MOST_REPEATS:
                self.others.append(re.compile(pattern))
            else:
                raise CheckpointError(
                    f"the pattern {pattern[:80]!r} of universal_checkpoint_info has groups or more than {_MOST_REPEATS} repetitions"
                )

    def find(self, name: str) -> str | None:
        if name in self.exact:
            return self.exact[name]
        if self.others and len(name) > _LONGEST_NAME:
            raise CheckpointError(f"the parameter {name[:80]!r}... has a name of {len(name)} characters")
        return next((pattern.pattern for pattern in self.others if pattern.match(name)), None)
