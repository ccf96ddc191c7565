"""Shares of sequences in an unmodified transformers model: its attention runs on whole sequences with a share of the heads
(Ulysses), or, with more ranks than heads, on one rank's keys after another's (ring attention).

`initialize` registers one attention function with transformers, points the model's config to it, and hooks the model's forward.
Each rank of the sequence axis gets the same batch, and the hook keeps its share of the tokens; labels are shifted first. A batch
with `shift_labels` is already a share (`SequenceShares`, DeepSpeed's UlyssesSPDataLoaderAdapter). On every rank, the model's loss
is the mean over the whole sequence: its `loss_function` is replaced. A class that has a loss of its own (BERT's masked language
model) gets no labels, and a hook after its forward adds the loss of its logits. Other outputs are this rank's share.

Positions decide the mask: where they restart, another packed sample begins. Padding and sliding windows are masked, too.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.parallel.exchange import Exchange, LocalExchange, without_values
from slipstream.parallel.ring import Mask, Span, deal_spans, ring_attention
from slipstream.parallel.same_inputs import INPUTS, check_alike, checksum
from slipstream.parallel.sequence import deal_heads, sequence_mean, ulysses_attention
from slipstream.parallel.tensor import Slices, vocab_parallel_cross_entropy
from slipstream.parallel.vocabulary_loss import ShiftedLoss, calls_loss_function
from slipstream.world.mesh import Axis, gather_objects
from slipstream.zero.hooks import eager

NAME = "slipstream_ulysses"  # name of the attention function
_HOLDER = "_slipstream_sequences"  # attribute of a model's modules
_BY_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels", "loss_mask")
_LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}  # loss -> whether it shifts labels
_POOLS = re.compile(r"For(SequenceClassification|MultipleChoice|QuestionAnswering|NextSentencePrediction|PreTraining)|DoubleHeads")
_TARGETS = ("labels", "shift_labels")
SERVED = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")  # of transformers' implementations


class Sequences:
    """The state of one model's attention: the exchange, and positions and padding of the current forward's whole sequences."""

    def __init__(self, axis: Axis, is_ring: bool = False) -> None:
        self.axis, self.is_ring = axis, is_ring
        self.hooks: list[Any] = []  # they call `begin` and `end` around the model's forward
        self.changes: list[tuple[Any, str, Any, Any]] = []  # an object, its attribute, and the values without and with shares
        self.modules: list[nn.Module] = []  # they refer to this object
        self.in_eval = True  # share sequences in evaluation, too
        self.is_compared = False  # whether the ranks' batches have been compared
        self.spans: list[list[Span]] = []  # the tokens of each rank in the current forward
        self.exchange: Exchange = LocalExchange(axis, torch.device("meta"))  # until `initialize` connects it
        self.positions: Tensor | None = None  # [1 or b, S]; None: 0, 1, 2, ...
        self.padding: Tensor | None = None  # [b, S], False for padding; None: there is none
        self.shifts = True  # labels belong to the next token
        self.no_loss = ""  # why the model's loss cannot be served
        self.loss: _Loss | None = None  # computed after the forward, from its logits
        self.targets: Mapping[str, Any] = {}  # the current forward's targets of this loss
        self.offset: Callable[[Tensor], Tensor] | None = None  # computes positions from token ids, for a model that does so
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}

    def unhook(self) -> None:
        for handle in self.hooks:
            handle.remove()

    def change(self, owner: Any, name: str, value: Any) -> None:
        """Let `switch` set an attribute. transformers sets some of a config on its parts, too: change a whole before its parts."""
        self.changes.append((owner, name, getattr(owner, name), value))

    def switch(self, shared: bool) -> None:
        """Compute on shares of sequences, or, as without this class, on whole ones."""
        for owner, name, own, ours in self.changes:
            setattr(owner, name, ours if shared else own)

    def close(self) -> None:
        """Restore computation on whole sequences. Safe to call twice."""
        self.unhook()
        self.switch(False)
        self.changes.clear()
        for module in self.modules:
            vars(module).pop(_HOLDER, None)

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, compares: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward's arguments for this rank. Collective: compares the ranks' batches, except in a backward."""
        self._masks.clear()
        tokens = _tokens(args, kwargs)
        size, is_share = self.axis.size, kwargs.get("shift_labels") is not None
        if compares and not without_values(tokens):
            self._compare(tokens, kwargs, is_share)
        length = tokens.shape[1] * size if is_share else tokens.shape[1]
        if length % size:
            raise ValueError(
                f"a sequence of {length} tokens cannot be shared by {size} ranks (sequence_parallel_size); pad it to "
                f"{length + size - length % size} tokens (labels -100)"
            )
        self.spans = deal_spans(length, size, causal=self.is_ring and not is_share)

        def whole(value: Tensor | None) -> Any:
            return self.exchange.gather(value, 1, [length // size] * size) if is_share and value is not None else value

        self.padding, self.positions = whole(kwargs.get("attention_mask")), whole(kwargs.get("position_ids"))
        shared = {name: value for name, value in kwargs.items() if name != "attention_mask"} | {"use_cache": False}
        if not is_share:
            self._cut(shared, length)
        if self.positions is None:
            at = torch.arange(length, device=tokens.device)[None] if self.offset is None else self.offset(whole(tokens))
            shared["position_ids"] = self._share(at)
        elif not bool((self.positions.diff(dim=-1) != 1).any()):
            self.positions = None
        if self.padding is not None and bool(self.padding.all()):
            self.padding = None
        self._take_targets(shared)
        return args, shared

    def _share(self, value: Tensor) -> Tensor:
        """This rank's tokens of whole sequences, [b, S, ...]."""
        return torch.cat([value[:, slice(*span)] for span in self.spans[self.axis.index]], 1)

    def _cut(self, shared: dict[str, Any], length: int) -> None:
        """Replace each per-token argument by this rank's share, after labels were shifted to the next token's."""
        if shared.get("labels") is not None and self.shifts:
            shared["labels"] = F.pad(shared["labels"], (0, 1), value=-100)[:, 1:]
        for name in _BY_TOKEN:
            if isinstance(value := shared.get(name), Tensor) and value.dim() > 1 and value.shape[1] == length:
                shared[name] = self._share(value)

    def _take_targets(self, shared: dict[str, Any]) -> None:
        """Keep the targets of a loss computed after the forward. Raises ValueError if the model's own loss is not supported."""
        if self.no_loss and any(shared.get(name) is not None for name in _TARGETS):
            raise ValueError(self.no_loss)
        if self.loss is not None:
            self.targets = {name: shared.pop(name) for name in (*_TARGETS, "num_items_in_batch") if shared.get(name) is not None}

    @eager
    def _compare(self, tokens: Tensor, kwargs: dict[str, Any], is_share: bool) -> None:
        """Raise ValueError on all ranks unless their batches have one shape, and equal values in the first whole batch."""
        facts = {"numbers of sequences": tokens.shape[0], "numbers of tokens": tokens.shape[1]}
        facts[INPUTS] = 0 if is_share or self.is_compared else checksum(kwargs)
        check_alike(self.exchange, "shares of the same sequences", facts)
        self.is_compared = self.is_compared or not is_share

    def end(self, output: Any) -> Any:
        """A forward's output, with its loss over the whole sequence if the model class has its own loss."""
        if self.loss is None or not any(name in self.targets for name in _TARGETS):
            return output
        if isinstance(output, tuple):
            return (self.loss(output[0], **self.targets), *output)
        return type(output)(**{**output, "loss": self.loss(output.logits, **self.targets)})

    def samples(self) -> Tensor | None:
        """The index of each token's packed sample, [1 or b, S]; None if there is only one."""
        return None if self.positions is None else (F.pad(self.positions.diff(dim=-1), (1, 0), value=1) != 1).cumsum(-1)

    def mask(self, length: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
        """The attention mask, [1 or b, 1, S, S], made once a forward; None: all tokens, or, if causal, all previous ones."""
        if self.positions is None and self.padding is None and (window is None or window >= length):
            return None
        key = (length, causal, window, str(device))
        if key not in self._masks:
            allowed = Mask((), causal, window, self.samples(), self.padding).tile((0, length), (0, length), device)
            if self.padding is not None and allowed is not None:
                allowed = allowed | torch.eye(length, dtype=torch.bool, device=device)  # no row without a key
            self._masks[key] = allowed
        return self._masks[key]


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """A forward's token ids or embeddings, [b, S, ...]. Raises ValueError for arguments that cannot be shared."""
    if args:
        raise ValueError("with sequence_parallel_size, call the model with keywords (input_ids=..., labels=...)")
    if (padding := kwargs.get("attention_mask")) is not None and padding.dim() != 2:
        raise ValueError("with sequence_parallel_size, attention_mask must be [b, S], or position_ids say what is packed")
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(value := kwargs.get(name), Tensor):
            return value
    raise ValueError("with sequence_parallel_size, the model needs input_ids or inputs_embeds")


def _unserved(module: nn.Module, size: int) -> str:
    return (
        f"{type(module).__name__} caps its scores or has sinks, which sequence_parallel_size does not serve: use tp {size} instead "
        "(slipstream.mesh.tp)"
    )


def _check_outputs(base: nn.Module, is_encoder_decoder: bool) -> None:
    """Raise ValueError for a model whose outputs need more than this rank's tokens."""
    if is_encoder_decoder or _POOLS.search(type(base).__name__):
        needs = "shares of an encoder's sequence and a decoder's" if is_encoder_decoder else "one token's state"
        raise ValueError(
            f"{type(base).__name__} computes its outputs from {needs}, which sequence_parallel_size does not serve: use data or "
            "tensor parallelism for it, or a model whose loss is a sum over tokens (causal or masked language models, token "
            "classification)"
        )


def serve_sequences(model: nn.Module, axis: Axis, slices: Slices | None) -> Sequences | None:
    """Prepare a transformers model for shares of sequences; None if there is nothing to do. The caller connects the exchange.

    slices: of the model's layers, if it is sliced

    Raises ValueError for a model, an attention or a number of heads that is not supported.
    """
    config: Any = getattr(model, "config", None)
    if axis.size == 1 or not hasattr(config, "_attn_implementation"):
        return None
    base: Any = getattr(model, "get_base_model", lambda: model)()  # without PEFT's wrapper
    _check_outputs(base, getattr(config, "is_encoder_decoder", False))
    implementation = config._attn_implementation
    if implementation not in (*SERVED, NAME):
        raise ValueError(
            f"{type(model).__name__} computes attention by {implementation!r}, which sequence_parallel_size cannot share; build it "
            'with attn_implementation="sdpa"'
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "attn_logit_softcapping", None):
        raise ValueError(_unserved(base, axis.size))
    sliced = slices is not None and any("_slipstream_heads" in vars(module) for module in model.modules())
    is_ring = text.num_attention_heads // (slices.axis.size if slices is not None and sliced else 1) < axis.size
    if not is_ring:
        deal_heads(text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads, axis.size)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    holder = Sequences(axis, is_ring)
    holder.modules = list(model.modules())
    for module in holder.modules:
        vars(module)[_HOLDER] = holder
    configs = {id(each): each for each in (*(getattr(module, "config", None) for module in holder.modules), text)}
    for each in (each for each in configs.values() if hasattr(each, "_attn_implementation")):
        holder.change(each, "_attn_implementation", NAME)
    _serve_loss(base, holder)
    holder.switch(True)
    holder.offset = _positions_of(base)

    def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not holder.in_eval:
            holder.switch(model.training)
        return holder.begin(args, kwargs) if model.training or holder.in_eval else None

    def end(model: nn.Module, args: Any, output: Any) -> Any:
        if model.training or holder.in_eval:
            return holder.end(output)
        holder.switch(True)
        return output

    holder.hooks = [model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end)]
    return holder


def _serve_loss(model: Any, holder: Sequences) -> None:
    """Replace the model's loss by one over whole sequences, or record why it cannot be."""
    function: Any = getattr(model, "loss_function", None)
    if function is None:  # a body without a head
        return
    is_sliced = isinstance(function, ShiftedLoss)
    kind = "ForCausalLMLoss" if is_sliced else getattr(function, "__name__", type(function).__name__)
    if kind in _LOSSES and calls_loss_function(model):
        holder.shifts = _LOSSES[kind]
        holder.change(model, "loss_function", _Loss(holder, function))
    elif kind in _LOSSES and not _LOSSES[kind]:
        holder.shifts, holder.loss = False, _Loss(holder, function)
    else:
        holder.no_loss = (
            f"{type(model).__name__} computes a loss of its own ({kind}), which sequence_parallel_size would compute of shares of "
            "the sequence: call it without labels, and take slipstream.parallel.sequence.sequence_mean of its logits' losses"
        )


def _positions_of(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Computes positions of whole sequences in a model that derives them from token ids, without padding (RoBERTa); else None."""
    name = "create_position_ids_from_input_ids"
    for module in model.modules():
        if hasattr(module, "position_embeddings") and hasattr(module, "padding_idx"):
            of_ids: Any = getattr(module, name, None) or getattr(sys.modules[type(module).__module__], name, None)
            if of_ids is not None:
                first: int = module.padding_idx + 1  # type: ignore[assignment,operator]
                return lambda tokens: (
                    torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(0)
                    if tokens.is_floating_point()
                    else of_ids(tokens, first - 1)
                )
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [b, h, s, d], key and value [b, key heads, s, d]; returns [b, s, h, d]."""
    holder: Sequences = vars(module)[_HOLDER]
    if softcap is not None or kwargs.get("s_aux") is not None:
        raise ValueError(_unserved(module, holder.exchange.axis.size))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)

    if holder.is_ring:
        if dropout:
            raise ValueError(
                f"{type(module).__name__} has attention dropout {dropout}, and more ranks share a sequence than it has heads; ring "
                "attention has no dropout: set attention_dropout (attn_pdrop) of its config to 0"
            )
        mask = Mask(holder.spans, causal, sliding_window, holder.samples(), holder.padding)
        return ring_attention(query, key, value, holder.exchange, mask, scaling).transpose(1, 2), None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = holder.mask(q.shape[2], causal, sliding_window, q.device)
        if k.shape[1] != q.shape[1]:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal and mask is None, scale=scaling)

    return ulysses_attention(attend, query, key, value, holder.exchange).transpose(1, 2), None


class _Loss:
    """A model's loss over whole sequences. Labels are this rank's share, already shifted.

    own: the model's loss, of evaluations that are not shared
    """

    def __init__(self, holder: Sequences, own: Callable[..., Tensor]) -> None:
        self.holder, self.own = holder, own

    def __call__(
        self, logits: Tensor, labels: Tensor | None = None, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if not (self.holder.in_eval or self.holder.modules[0].training):
            return self.own(logits, labels, *args, shift_labels=shift_labels, **kwargs)
        targets = labels if shift_labels is None else shift_labels
        if targets is None:
            raise ValueError("the loss of a share of a sequence needs labels, or shift_labels")
        if isinstance(self.own, ShiftedLoss):  # of logits of this rank's share of the vocabulary
            losses = vocab_parallel_cross_entropy(logits, targets, self.own.slices.exchange).sum()
        else:
            losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
        count = (targets != -100).sum()
        return sequence_mean(losses, count, self.holder.exchange, kwargs.get("num_items_in_batch"))


class SequenceShares:
    """A loader for a sequence axis on which each rank reads batches of its own: it yields shares of all ranks' batches in turn.

    batches  mappings with input_ids and labels, and position_ids if samples are packed, [b, S]; S a multiple of the ranks
    group    the ranks of the sequence axis

    Yields this rank's share of each, with `shift_labels` instead of labels. Raises ValueError on all ranks if one has fewer
    batches. DeepSpeed's UlyssesSPDataLoaderAdapter.
    """

    def __init__(self, batches: Iterable[Mapping[str, Any]], rank: int, group: Any, size: int, device: torch.device | str) -> None:
        self.batches, self.rank, self.group, self.size, self.device = batches, rank, group, size, device

    def __len__(self) -> int:
        return len(self.batches) * self.size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in itertools.chain(map(dict, self.batches), [None]):  # None marks the end
            every = gather_objects(batch, self.group)
            ended = [rank for rank, each in zip(dist.get_process_group_ranks(self.group), every, strict=True) if each is None]
            if 0 < len(ended) < self.size:
                raise ValueError(
                    f"ranks {ended} have no batch left, and others of their sequence axis have: give each as many (drop_last, or a "
                    "sampler with num_replicas)"
                )
            yield from map(self._share, every if batch is not None else ())

    def _share(self, batch: dict[str, Any]) -> dict[str, Any]:
        length = batch["input_ids"].shape[1]
        if length % self.size:
            raise ValueError(f"a sequence of {length} tokens cannot be shared by {self.size} ranks; pad it to a multiple")
        batch.setdefault("position_ids", torch.arange(length).expand(len(batch["input_ids"]), -1))
        labels = batch.pop("labels")
        batch["shift_labels"] = F.pad(labels, (0, 1), value=-100)[:, 1:]
        share = slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)
        return {
            name: value[:, share].contiguous().to(self.device) if isinstance(value, Tensor) and value.dim() > 1 else value
            for name, value in batch.items()
        }
