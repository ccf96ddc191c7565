"""Scores of text pairs by a one-label classifier over an encoder, as in transformers' `...ForSequenceClassification`.

The encoder reads both texts at once, so each token attends to both. That is more exact than the cosine of two vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.config import huggingface
from slipstream.inference import trained
from slipstream.inference.load import safetensors_of

logger = logging.getLogger(__name__)


_CLASS = "ForSequenceClassification"


class _Row(NamedTuple):
    """Names of the layers of a family's classifier. Names in a file may lack the family's base, as the encoder's own may."""

    dense: str
    activation: str
    out: str
    norm: str = ""


_ROWS: Mapping[str, _Row] = {
    "bert": _Row("bert.pooler.dense", "tanh", "classifier"),
    "roberta": _Row("classifier.dense", "tanh", "classifier.out_proj"),
    "xlm-roberta": _Row("classifier.dense", "tanh", "classifier.out_proj"),
    "electra": _Row("classifier.dense", "gelu", "classifier.out_proj"),
    "distilbert": _Row("pre_classifier", "relu", "classifier"),
    "modernbert": _Row("head.dense", "classifier_activation", "classifier", norm="head.norm"),
}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu, "relu": F.relu, "silu": F.silu}
_ENDS: Mapping[str, Callable[[Tensor], Tensor]] = {"Sigmoid": torch.sigmoid, "Identity": lambda logits: logits}


class _Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    dense: _Affine
    activation: Callable[[Tensor], Tensor]
    norm: _Affine | None
    norm_eps: float
    out: _Affine
    end: Callable[[Tensor], Tensor]  # applied to the logit
    averages: bool  # the classifier reads the mean of all tokens; False: the first token

    @classmethod
    def read(cls, source: Any) -> CrossEncoder | None:
        """Read the classifier of a folder or a live model; None if it has none of one label. Raises ValueError for its
        activation."""
        config, state = _found(source)
        row = _ROWS.get(str(config.get("model_type")))
        if row is None:
            return None

        def layer(name: str) -> _Affine:
            known = next((each for each in (name, name.partition(".")[2]) if f"{each}.weight" in state), name)
            parts = [state[each] if (each := f"{known}.{part}") in state else None for part in ("weight", "bias")]
            weight, bias = (None if one is None else one.detach().float().cpu() for one in parts)
            if weight is None:
                raise ValueError(f"the model has no {name}.weight, which the classifier of {config['model_type']} needs")
            return _Affine(weight, bias)

        if len((out := layer(row.out)).weight) != 1:
            logger.warning("the classifier of %d labels is not computed: texts get the encoder's vectors", len(out.weight))
            return None
        return cls(
            dense=layer(row.dense),
            activation=_known(_ACTIVATIONS, str(config.get(row.activation, "gelu" if row.norm else row.activation))),
            norm=layer(row.norm) if row.norm else None,
            norm_eps=float(config.get("norm_eps", 1e-5)),
            out=out,
            end=_known(_ENDS, _end_of(config)),
            averages=config.get("classifier_pooling") == "mean",
        )

    def __call__(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """rows: fp32 [tokens of all pairs, hidden]; lengths: tokens of each -> fp32 [pairs, 1]."""
        x = torch.segment_reduce(rows, "mean", lengths=lengths) if self.averages else rows[lengths.cumsum(0) - lengths]
        return torch.cat([self._score(row) for row in x.cpu().split(1)])  # a product's bits depend on the number of rows

    def _score(self, x: Tensor) -> Tensor:
        x = self.activation(F.linear(x, *self.dense))
        if self.norm is not None:
            x = F.layer_norm(x, x.shape[1:], *self.norm, eps=self.norm_eps)
        return self.end(F.linear(x, *self.out))


def _found(source: Any) -> tuple[Mapping[str, Any], Any]:
    """The configuration and weights of a model for sequence classification; both empty for any other model."""
    if isinstance(source, torch.nn.Module):
        is_one = any(each.__name__.endswith(_CLASS) for each in type(source).__mro__)
        return (getattr(source, "config").to_dict(), source.state_dict()) if is_one else ({}, {})  # noqa: B009
    if not isinstance(source, Path) or source.is_file():
        return {}, {}
    if (saved := trained.find(source)) is not None:  # a checkpoint does not name its class
        state, row = saved.state(), _ROWS.get(str(saved.config.get("model_type")))
        is_one = row is not None and all(f"{name}.weight" in state for name in (row.dense, row.out))
        return (saved.config, state) if is_one else ({}, {})
    config = huggingface.read_config(source / "config.json")
    is_one = str(next(iter(config.get("architectures") or ()), "")).endswith(_CLASS)
    return (config, safetensors_of(source, keep=True)) if is_one else ({}, {})


def _end_of(config: Mapping[str, Any]) -> str:
    """The activation that sentence-transformers applies to the logit: the class named in the configuration, or a sigmoid."""
    newer = (config.get("sentence_transformers") or {}).get("activation_fn")
    return str(newer or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]


def _known(table: Mapping[str, Callable[[Tensor], Tensor]], name: str) -> Callable[[Tensor], Tensor]:
    if name not in table:
        raise ValueError(f"the classifier's activation is {name}; supported are {', '.join(table)}")
    return table[name]
