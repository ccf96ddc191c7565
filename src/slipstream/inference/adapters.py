"""PEFT's LoRA adapters beside a model: `read` a folder, `pack` it for the native forward (ops/csrc/decoder_products.h).

An adapter adds scale * B (A x) to some of the model's products. The model's weights stay unchanged, so requests with different
adapters, and requests without one, share a batch. A and B are stored in bf16, or in fp32 if the model is.

Glossary: a *term* is what an adapter adds to one product. Its `role` is the role of the matrix (a path in `DecoderWeights`).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.config import huggingface
from slipstream.inference.config import TransformerConfig
from slipstream.inference.families import FAMILIES
from slipstream.inference.load import opened
from slipstream.inference.models import canonical, places
from slipstream.ops.matrices import PANEL, MatrixRecord, record_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
ROLES = ("q", "k", "v", "out", "gate", "up", "down")  # in the order of enum low_place in csrc/decoder.h
# Settings of adapter_config.json that change more than the sum of products -> the values that are served.
_SERVED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"), (None, [], {})),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config", "monteclora_config"), (None,)),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),  # the others change the model's weights
}
_LOADS = itertools.count()


class LowRank(NamedTuple):
    """A term: y += scale * b @ (a @ x)."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


def read(folder: str | os.PathLike[str], config: TransformerConfig) -> dict[str, LowRank]:
    """Read the terms, by role, of an adapter that PEFT or `save_checkpoint` of a trained PEFT model wrote.

    Raises ValueError if the folder holds no such adapter, if it is more than sums of products, or if it fits another model."""
    path = Path(folder)
    settings = _settings(path)
    if config.latent is not None:
        raise ValueError(
            f"{path}: adapters of models with latent attention are not served; merge it into the model, and serve that"
        )
    targets, turned = places(config), FAMILIES[config.family].transposed
    terms: dict[str, LowRank] = {}
    for module, parts in _modules(path).items():
        name = canonical(FAMILIES[config.family], f"{module}.weight")
        if name not in targets:
            raise ValueError(f"{path}: the adapter changes {module}, which is not a matrix of this model; it is another's adapter")
        shape, roles = targets[name]
        for role, _ in roles:
            if not re.fullmatch(r"layers\.\d+\.((q|k|v|out)|mlp\.(gate|up|down))", role):
                raise ValueError(f"{path}: the adapter changes {module}; served are the matrices of attention and of dense MLPs")
        a, b = (_checked(path, module, parts, kind) for kind in ("A", "B"))
        out, features = reversed(shape) if turned else shape
        if (b.shape[0], a.shape[1]) != (out, features) or len(a) != b.shape[1]:
            shapes = f"A {list(a.shape)} and B {list(b.shape)}"
            raise ValueError(f"{path}: {module} has {shapes}; this model's weight is {[out, features]}, so it is another's adapter")
        scale = _scale(settings, module, len(a))
        for role, pick in roles:
            terms[role] = LowRank(a, pick(b.T if turned else b), scale)  # a role may be a slice of the stored matrix's rows
    if not terms:
        raise ValueError(f"{path}: {WEIGHTS} is empty")
    return terms


def _settings(path: Path) -> Mapping[str, Any]:
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is pickle, which is never read)" if (path / "adapter_model.bin").is_file() else ""
        raise ValueError(f"{path} is no adapter: it needs {CONFIG} and {WEIGHTS}, as PEFT writes them{pickled}")
    settings = huggingface.read_object(path / CONFIG)
    for name, served in _SERVED.items():
        if (value := settings.get(name)) not in served:
            hint = "merge it into the model (PEFT's merge_and_unload), and serve that"
            raise ValueError(f"{path}: {name} is {value!r:.100}, and adapters with it are not served: {hint}")
    return settings


def _modules(path: Path) -> dict[str, dict[str, Tensor]]:
    """{name of the module in the model: {"A": A, "B": B}}."""
    modules: dict[str, dict[str, Tensor]] = {}
    with opened(path / WEIGHTS) as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            match = re.fullmatch(rf"(?:{re.escape(PREFIX)})?(.+)\.lora_([AB])(?:\.default)?\.weight", key)
            if match is None:
                raise ValueError(f"{path}: {key} is not a matrix A or B of LoRA, and other parameters are not served")
            modules.setdefault(match[1], {})[match[2]] = file.get_tensor(key)
    return modules


def _checked(path: Path, module: str, parts: Mapping[str, Tensor], kind: str) -> Tensor:
    if kind not in parts or parts[kind].dim() != 2 or not parts[kind].is_floating_point():
        raise ValueError(f"{path}: {module} has no matrix lora_{kind}; the file is incomplete, or of another kind")
    if not parts[kind].isfinite().all():
        raise ValueError(f"{path}: lora_{kind} of {module} has values that are not finite")
    return parts[kind]


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) with PEFT's rslora."""
    patterns = settings.get("alpha_pattern") or {}
    alpha = next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", module)), settings.get("lora_alpha", 8))
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha of {module} is {alpha!r:.100}; it must be a number")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


class LowRankRecord(ctypes.Structure):
    """`struct low_rank` of csrc/decoder.h."""

    _fields_ = (("a", MatrixRecord), ("b", MatrixRecord), ("scale", ctypes.c_float))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """An adapter in the native forward's format. Requests hold a reference, so it is freed after the last one that uses it."""

    key: str  # identifies its prefixes in the prefix cache; never reused
    records: ctypes.Array[LowRankRecord]  # [layers * ROLES]
    rank: int  # the largest, padded to PANEL
    nbytes: int
    tensors: list[Tensor] = field(default_factory=list)  # keeps alive what `records` points to

    @property
    def address(self) -> int:
        return ctypes.addressof(self.records)


def pack(name: str, terms: Mapping[str, LowRank], num_layers: int, dtype: torch.dtype) -> Packed:
    """`dtype`: of the packed A and B, bfloat16 or float32."""
    records, tensors = (LowRankRecord * (num_layers * len(ROLES)))(), list[Tensor]()
    for role, term in terms.items():
        _, layer, *_, place = role.split(".")
        record = records[int(layer) * len(ROLES) + ROLES.index(place)]
        record.scale = term.scale
        for part, columns in (("a", PANEL), ("b", 2 * PANEL)):
            matrix = getattr(term, part).to(dtype)
            packed = record_of(matrix)
            tensors.append(_panels(matrix, columns))
            packed.data = tensors[-1].data_ptr()
            setattr(record, part, packed)
    rank = max((len(term.a) for term in terms.values()), default=0)
    return Packed(f"{name}#{next(_LOADS)}", records, rank + -rank % PANEL, sum(tensor.nbytes for tensor in tensors), tensors)


def _panels(matrix: Tensor, multiple: int) -> Tensor:
    """The panels of a matrix [out, in] after padding `out` to a multiple of `multiple`. The layout is that of `ops.matrices`."""
    pair = 2 if matrix.dtype == torch.bfloat16 else 1
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % pair, 0, -len(matrix) % multiple))
    return padded.unflatten(0, (-1, PANEL)).unflatten(2, (-1, pair)).transpose(1, 2).contiguous()


Opener = Callable[[str, "str | os.PathLike[str]"], Packed]


def opener(config: TransformerConfig, dtype: torch.dtype) -> Opener:
    """A function (name, folder) -> `Packed` that reads adapters for a model with weights in `dtype`."""
    kept = torch.float32 if dtype == torch.float32 else torch.bfloat16
    return lambda name, folder: pack(name, read(folder, config), len(config.layers), kept)
