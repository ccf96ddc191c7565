"""DeepSpeed's names for long sequences: `runtime.sequence_parallel.ulysses_sp` and `sequence.layer`, over slipstream.parallel.

[Note: Groups before an engine] DeepSpeed's recipe creates the groups first and passes them as `mpu`. Its ranks are consecutive, as
on the mesh, so `initialize` only takes their number from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.activations.recompute import checkpoint
from slipstream.activations.tiled import tiled_mlp
from slipstream.compat.comm import axis_of
from slipstream.compat.utils import getter
from slipstream.parallel.exchange import Exchange, connect_activations, swap
from slipstream.parallel.sequence import ulysses_attention
from slipstream.parallel.transformers_sequence import SERVED, SequenceShares
from slipstream.world.join import init_distributed, local_device
from slipstream.world.mesh import build_mesh, nearest_divisor
from slipstream.world.watch import Watch


class SequenceGroups:
    """The process groups of sequence and data parallelism, as an mpu."""

    def __init__(self, size: int, disable_in_eval: bool = False) -> None:
        init_distributed(verbose=False)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise ValueError(
                f"sequence_parallel_size ({size}) does not divide the number of ranks ({world}); use {nearest_divisor(world, size)}"
            )
        self.mesh, self.disable_in_eval = build_mesh(sp=size), disable_in_eval

    get_sequence_parallel_group, get_data_parallel_group = getter("mesh.sp.group"), getter("mesh.batch.group")
    get_sequence_parallel_rank, get_data_parallel_rank = getter("mesh.sp.index"), getter("mesh.batch.index")
    get_sequence_parallel_world_size, get_data_parallel_world_size = getter("mesh.sp.size"), getter("mesh.batch.size")


class UlyssesSPAttentionHF:
    """Ulysses in transformers. `initialize` prepares the model; see slipstream.parallel.transformers_sequence."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceGroups | None:
        """Return the groups, to be passed to `initialize(mpu=)`; None for size 1.

        disable_in_eval   in evaluation, each rank's batches are its own, of whole sequences, as accelerate and `Trainer` ask for

        `micro_batch_size` and the lengths are ignored, because no buffer depends on them. Raises ValueError for an attention that
        is not supported (eager) or not the model's.
        """
        if sequence_parallel_size == 1:
            return None
        if core_attn_implementation not in SERVED:
            raise ValueError(
                f"core_attn_implementation {core_attn_implementation!r} cannot be shared (eager builds whole masks); use one of "
                f"{', '.join(SERVED)}"
            )
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise ValueError("seq_length_is_variable=False needs seq_length")
        config = getattr(model_name_or_path, "config", None)
        used = getattr(config, "_attn_implementation", None)
        if used is not None and used != core_attn_implementation:
            raise ValueError(f"core_attn_implementation is {core_attn_implementation!r}, but the model's attention is {used!r}")
        return SequenceGroups(sequence_parallel_size, disable_in_eval)


class UlyssesSPDataLoaderAdapter(SequenceShares):
    """An iterator over this rank's shares of the batches of all ranks of a sequence axis."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        super().__init__(dl, sp_rank, sp_group, sp_world_size, device)
        self.dl = dl
        self._iterator: Any = None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator = super().__iter__()
        try:
            items: dict[str, Any] = next(self._iterator)
        except StopIteration:
            self._iterator = None  # the next epoch
            raise
        return items


class DistributedAttention(nn.Module):
    """Any attention over whole sequences, given shares of them: `local_attention(query, key, value, *args, **kwargs)`.

    scatter_idx, gather_idx  the dimensions of heads, 2, and of tokens, unless `forward` is told the sequence dimension
    sp_stream     ignored: query, key and value are sent in one all-to-all, so there is no other to overlap with
    num_kv_heads  heads of keys and values, if the caller has repeated these for the query heads: no group of query heads is
                  split over ranks. Default: those of the key

    Any number of heads that is not smaller than the group's number of ranks; key heads may be fewer.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"scatter_idx {scatter_idx}, gather_idx {gather_idx}: heads are dimension 2, tokens 0 or 1 (gather_idx)"
            )
        self.local_attn, self.spg, self.gather_idx = local_attention, sequence_process_group, gather_idx
        self.sp_stream, self.num_kv_heads = sp_stream, num_kv_heads
        self.exchange: Exchange | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int | None = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return this rank's share of `local_attention`'s output, in the same form: [.., heads, d], or with both merged.

        query, key, value  this rank's tokens: [b, s, heads, d] with batch_dim_idx 0, [s, b, heads, d] with 1; by default, the
                           dimension of tokens is gather_idx
        rotary_pos_emb     cosines and sines of the whole sequence, [P s, 1 or b, 1, features], by which query and key are rotated
                           (halves of the first features, as in GPT-NeoX)

        Raises ValueError for another batch_dim_idx, a different number of tokens in rotary_pos_emb, and heads that cannot be
        distributed.
        """
        batch_dim = 1 - self.gather_idx if batch_dim_idx is None else batch_dim_idx
        if batch_dim not in (0, 1):
            raise ValueError(f"batch_dim_idx {batch_dim_idx} must be 0, for [b, s, heads, d], or 1, for [s, b, heads, d]")
        if self.exchange is None:
            self.exchange = exchange_of(self.spg, query.device)
        order, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if batch_dim == 0 else ((1, 2, 0, 3), (2, 0, 1, 3))  # to [b, heads, s, d]
        is_merged = False

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal is_merged
            if rotary_pos_emb is not None:
                q, k = (_turned(each, *rotary_pos_emb) for each in (q, k))
            out = self.local_attn(*(each.permute(back) for each in (q, k, v)), *args, **kwargs)
            is_merged = out.dim() == 3
            return (out.unflatten(-1, (q.shape[1], -1)) if is_merged else out).permute(order)

        q, k, v = (each.permute(order) for each in (query, key, value))
        out = ulysses_attention(attend, q, k, v, self.exchange, self.num_kv_heads).permute(back)
        return out.flatten(2) if is_merged else out


class _SeqAllToAll:
    """The exchange of DistributedAttention, for custom attention."""

    @staticmethod
    def apply(group: Any, input: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *_: Any) -> Tensor:
        """Divide dimension `scatter_idx` among the group's ranks and join the parts received along `gather_idx`.

        Raises ValueError if the ranks do not divide the dimension, and PeerError if their inputs differ in size.
        """
        exchange = exchange_of(group, input.device)
        if input.shape[scatter_idx] % exchange.size:
            raise ValueError(f"{exchange.size} ranks do not divide dimension {scatter_idx} of shape {tuple(input.shape)}")
        if exchange.size == 1:
            return input
        parts = torch.stack(input.chunk(exchange.size, scatter_idx))
        counts = [parts[0].numel()] * exchange.size
        exchange.agree("exchange of {:,} elements with each rank", parts, counts[0])
        received = swap(parts.view(-1, 1), exchange, counts, counts).view(parts.shape)
        return torch.cat(received.unbind(), gather_idx)


def refuse_fpdt(*_: Any, **__: Any) -> Any:
    """Raise NotImplementedError. Megatron-DeepSpeed imports FPDT's names even if it does not use FPDT."""
    raise NotImplementedError("FPDT is not built; use DistributedAttention, and activations on the host (docs/ACTIVATIONS.md)")


FPDT_Attention = FPDT_FFN = FPDT_InputConstruct = refuse_fpdt


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position embedding of x [b, heads, s, d]; cosines and sines [s, 1 or b, 1, features]."""
    if cosines.shape != sines.shape or cosines.shape[0] != x.shape[2] or cosines.shape[2] != 1:
        raise ValueError(
            f"rotary_pos_emb has the shapes {tuple(cosines.shape)} and {tuple(sines.shape)}; pass cosines and sines of the whole "
            f"sequence, [{x.shape[2]}, 1 or {x.shape[0]}, 1, features]"
        )
    cos, sin = (each.permute(1, 2, 0, 3) for each in (cosines, sines))
    turning, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def exchange_of(group: Any, device: torch.device) -> Exchange:
    """The exchange over a process group, through torch.distributed."""
    return connect_activations(
        axis_of("sequence", group), local_device() if device.type == "cuda" else device, "gloo", Watch(1800.0)
    )


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Sequence[nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Call `fn` on `shards` parts of its arguments along dimension 1, with activation checkpointing, and join the outputs.

    output_reduction  None: join outputs along `output_unshard_dimension` (scalars are stacked); "mean" or "sum" of the outputs
    `grad_requiring_tensor_key` and `compute_params` are ignored: autograd finds what needs gradients. Raises ValueError if an
    argument to be sharded does not have `seqlen` tokens.
    """
    for name, value in kwargs_to_shard.items():
        if not isinstance(value, Tensor) or value.shape[1] != seqlen:
            raise ValueError(f"kwargs_to_shard[{name!r}] must be a tensor with {seqlen} tokens in dimension 1 (seqlen)")
    parts = {name: value.tensor_split(max(min(shards, seqlen), 1), 1) for name, value in kwargs_to_shard.items()}
    names = list(parts)

    def call(*tensors: Tensor) -> Tensor:
        return fn(**dict(zip(names, tensors, strict=True)), **kwargs_to_pass)

    outputs = [checkpoint(call, *part) for part in zip(*parts.values(), strict=True)]
    whole = torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs, output_unshard_dimension)
    return whole if output_reduction is None else {"mean": whole.mean, "sum": whole.sum}[output_reduction]()


class TiledMLP:
    """A token-wise function over parts of the sequence (dimension 1), with activation checkpointing."""

    @staticmethod
    def apply(fn: Callable[[Any, Tensor], Tensor], module: Any, x: Tensor, shards: int, compute_params: Any = None) -> Tensor:
        return tiled_mlp(lambda part: fn(module, part), x, shards, dim=1)


class TiledFusedLogitsLoss:
    """A loss over parts of the tokens, with activation checkpointing: only one part's logits exist at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        module: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Return the "mean" or "sum" of the losses of `shards` parts of all tokens: fn(module, x, y[, mask]), x [tokens, h]."""
        if x.shape[:2] != y.shape[:2] or (mask is not None and mask.shape[:2] != y.shape[:2]):
            raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)} and the mask must have the same sequences and tokens")
        flat = {name: each.flatten(0, 1)[None] for name, each in (("x", x), ("y", y), ("mask", mask)) if each is not None}

        def loss(**parts: Tensor) -> Tensor:
            return fn(module, *(part[0] for part in parts.values()))

        return sequence_tiled_compute(loss, flat["x"].shape[1], shards, flat, {}, None, None, 0, output_reduction)
