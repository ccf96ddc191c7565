"""Combines what the processes of one model compute, for forwards that split it with `config.ModelPart.sums`.

A process multiplies the outputs of its heads, and of its columns of an MLP, by their inputs of the next matrix. The results are
terms of that product, which are summed over processes. A dense layer has two such sums. So has a routed layer, whichever experts or
columns of experts a process holds. An embedding comes from the process that holds its row. Logits are concatenated.

[Note: Sums in rank order] An element is summed over processes in rank order, in fp32, and rounded once, in one of two ways: every
process gets all terms; or it gets those of its share of the elements, and then the others' sums. So all processes have the same
bits, by which experts are chosen, and a row's bits do not depend on the other rows of the batch. NCCL's all-reduce cannot be used:
it chooses the algorithm, and thus the order of terms, by the size of the message and by an element's place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from slipstream.inference.config import TransformerConfig
from slipstream.inference.models import shape_of
from slipstream.ops.matrices import Matrix, dequantize
from slipstream.parallel.exchange import Exchange


class JoinedParts:
    """`exchange`: connects the model's processes, which all call the same methods in one order. None: this process has it all."""

    def __init__(self, config: TransformerConfig, exchange: Exchange | None) -> None:
        assert config.part.size == (1 if exchange is None else exchange.size), f"{config.part} is of another number of processes"
        self._exchange, self._cuts_all = exchange, config.part.tp_size > 1
        parts = [replace(config.part, index=index) for index in range(config.part.size)]
        self._tokens = [part.columns(config.vocab_size) for part in parts]
        self._first_token = config.part.columns(config.vocab_size).start
        own = [part.heads(config.num_heads, config.num_kv_heads) for part in parts]
        # Features over all processes; a head that several processes hold counts once in each.
        self._num_features = [config.head_dim * sum(one[i].stop - one[i].start for one in own) for i in range(2)]

    def added(self, x: Tensor) -> Tensor:
        """Sum the terms of a product that `tp_size` splits."""
        return x if self._exchange is None or not self._cuts_all else self._exchange.sum(x)

    def routed(self, x: Tensor) -> Tensor:
        """Sum the outputs of the experts of all processes."""
        return x if self._exchange is None else self._exchange.sum(x)

    def planes(self, planes: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `added` or `routed` to terms given as planes [planes, T, features], which are added in order: [1, T, features]."""
        if self._exchange is None:
            return planes
        own = planes[0]
        for plane in planes[1:]:
            own = own + plane
        return join(own)[None]

    def embedded(self, table: Matrix, tokens: Tensor) -> Tensor:
        """Embed tokens [T] with the rows of all processes: [T, features]."""
        if not self._cuts_all:
            return _rows(table, tokens)
        own = tokens - self._first_token
        elsewhere = (own < 0) | (own >= shape_of(table)[0])
        return self.added(_rows(table, own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0.0))

    def logits(self, own: Tensor) -> Tensor:
        """Concatenate the columns of all processes: [rows, vocabulary]."""
        if self._exchange is None or not self._cuts_all:
            return own
        return self._exchange.gather(own, 1, [one.stop - one.start for one in self._tokens])

    def mean_of_heads(self, x: Tensor, kind: int) -> Tensor:
        """The mean over the features of all heads, of queries (kind 0) or keys (kind 1): [T, 1]."""
        return x.mean(-1, keepdim=True) if not self._cuts_all else self.added(x.sum(-1, keepdim=True)) / self._num_features[kind]


def _rows(table: Matrix, at: Tensor) -> Tensor:
    return F.embedding(at, table) if isinstance(table, Tensor) else dequantize(type(table)(*(part[at] for part in table)))
