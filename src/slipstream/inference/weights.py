"""A transformer's weights by role, independent of the file format. Row-major [out, in] as in `nn.Linear`.

`quantize` makes matrices of attention and MLPs (experts included) int8 (per output channel) or int4 (per group of inputs). Norms,
biases, the router (its top-k is discontinuous) and the embedding (a lookup, not a product) stay unquantized. The output matrix is
int8 for both kinds, because its error goes directly into the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from slipstream.ops.matrices import Int4, Int8, KQuant, Matrix, to_int8, to_kind

_QUANTIZED = ("q", "k", "v", "out", "latent", "q_latent", "gate", "up", "down", "embed_in", "embed_out")


@dataclass(slots=True, kw_only=True)
class Mlp:
    gate: Matrix | None = None  # [intermediate, hidden]; None: a plain MLP
    up: Matrix
    down: Matrix  # [hidden, intermediate]
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    input_norm: Tensor | None = None  # [hidden], before attention
    mlp_norm: Tensor | None = None  # [hidden], before the MLP
    q: Matrix  # [num_heads * head_dim, hidden]
    k: Matrix  # latent attention: [num_heads * rank, plain_dim], see `config.Latent`
    v: Matrix  # latent attention: [num_heads * value_dim, rank]
    out: Matrix  # [hidden, num_heads * head_dim]
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim], or all heads' if the norm is over them together
    k_norm: Tensor | None = None
    q_norm_bias: Tensor | None = None
    k_norm_bias: Tensor | None = None
    q_norms: list[Tensor] = field(default_factory=list)  # [head_dim] per head, if each head has its own
    k_norms: list[Tensor] = field(default_factory=list)
    latent: Matrix | None = None  # [rotary_dim + rank, hidden]
    latent_bias: Tensor | None = None
    latent_norm: Tensor | None = None  # [rank]
    q_latent: Matrix | None = None  # [q_rank, hidden]
    q_latent_bias: Tensor | None = None
    q_latent_norm: Tensor | None = None
    attn_post_norm: Tensor | None = None  # norm of the output, see `config.NORMS`
    mlp_post_norm: Tensor | None = None
    input_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    attn_post_norm_bias: Tensor | None = None
    mlp_post_norm_bias: Tensor | None = None
    mlp: Mlp | None = None  # if the layer is dense
    experts: list[Mlp] = field(default_factory=list)  # if the layer is routed
    router: Tensor | None = None  # [num_experts, hidden]
    router_bias: Tensor | None = None  # [num_experts], changes only the choice
    shared: Mlp | None = None
    shared_gate: Tensor | None = None  # [1, hidden]

    @property
    def dense_mlp(self) -> Mlp:
        if self.mlp is None:
            raise ValueError("this layer has experts and no MLP of its own")
        return self.mlp

    @property
    def latents(self) -> tuple[Matrix, Tensor]:
        """The matrix that computes the shared key, and the norm of its latent."""
        if self.latent is None or self.latent_norm is None:
            raise ValueError("this layer's attention has no latents")
        return self.latent, self.latent_norm

    @property
    def routing(self) -> Tensor:
        if self.router is None:
            raise ValueError("this layer has no experts, and so no router")
        return self.router


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    embed: Matrix  # [vocab, hidden], or [vocab, embed_size]
    final_norm: Tensor | None  # [hidden]
    head: Matrix | None  # [vocab, hidden]; None: the embedding is used, or there is no head
    layers: list[LayerWeights]
    final_norm_bias: Tensor | None = None
    head_bias: Tensor | None = None
    embed_norm: Tensor | None = None
    embed_norm_bias: Tensor | None = None
    positions: Tensor | None = None  # [num_positions, hidden]
    token_types: Tensor | None = None  # [num_token_types, hidden]
    embed_in: Matrix | None = None  # [hidden, embed_size]
    embed_in_bias: Tensor | None = None
    embed_out: Matrix | None = None  # [embed_size, hidden], before the head
    read_layer: Callable[[int], LayerWeights] | None = None  # reads one layer; matrices in `layers` are then on meta


def leaves(part: Any, path: str = "") -> Iterator[tuple[str, Matrix]]:
    """Yield (role, weight) for all weights that are present; the role is the path, like "layers.3.mlp.gate"."""
    match part:
        case Tensor() | Int8() | Int4() | KQuant():
            yield path, part
        case list():
            for i, child in enumerate(part):
                yield from leaves(child, f"{path}.{i}")
        case DecoderWeights() | LayerWeights() | Mlp():
            for one in fields(part):
                yield from leaves(getattr(part, one.name), f"{path}.{one.name}" if path else one.name)


def mapped(part: Any, change: Callable[[str, Matrix], Matrix], path: str = "") -> Any:
    """The same structure with `change(role, weight)` in place of each weight, in the order of `leaves`."""
    match part:
        case Tensor() | Int8() | Int4() | KQuant():
            return change(path, part)
        case list():
            return [mapped(child, change, f"{path}.{i}") for i, child in enumerate(part)]
        case DecoderWeights() | LayerWeights() | Mlp():
            below = f"{path}." if path else ""
            return replace(part, **{one.name: mapped(getattr(part, one.name), change, below + one.name) for one in fields(part)})
        case _:
            return part


def put(weights: DecoderWeights, role: str, weight: Matrix) -> None:
    """Replace the weight of a role, which must exist."""
    owner: Any = weights
    *path, name = role.split(".")
    for step in path:
        owner = owner[int(step)] if isinstance(owner, list) else getattr(owner, step)
    if isinstance(owner, list):
        owner[int(name)] = weight
    else:
        setattr(owner, name, weight)


def quantize(weights: DecoderWeights, kind: str, group: int = 32, *, has_head: bool = True) -> DecoderWeights:
    """The same decoder with matrices of `kind`, "int8" or "int4"; int8 for both if the group size does not divide the inputs.
    Matrices that are quantized already stay unchanged."""
    if kind not in ("int8", "int4"):
        raise ValueError(f'kind is {kind!r}; it must be "int8" or "int4"')

    def quantized(role: str, m: Matrix) -> Matrix:
        return to_kind(m, kind, group) if role.rpartition(".")[2] in _QUANTIZED and isinstance(m, Tensor) else m

    head = weights.embed if weights.head is None else weights.head
    weights = mapped(weights, quantized)
    return replace(weights, head=to_int8(head) if isinstance(head, Tensor) else head) if has_head else weights
