"""Native forwards inside a transformers module: `Encoder` computes the base model's hidden states, `Decoder` generates with
Slipstream's engine, and `pack` replaces linear layers by int8 ones.

Each is only used if it gives the module's results. An encoder is compared with the module's own forward when it is opened. Calls
that request anything else (hidden states of all layers, embeddings as inputs, beams, sampling) run the module's own code.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compat.generation import Asked, is_known
from slipstream.inference import generic, init_inference
from slipstream.inference.embedding import ROWS
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.load import load
from slipstream.inference.models import is_encoder
from slipstream.inference.native import NativeDecoder
from slipstream.inference.runner import Sizes, open_forward
from slipstream.quantized import quantize

logger = logging.getLogger(__name__)

_NEAR = {"int8": 0.1, "float32": 1e-3}  # relative difference of hidden states from the module's; other dtypes: _ROUNDED
_ROUNDED = 0.05
_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False, "use_cache": False}


def pack(model: Any) -> Any:
    """Replace a module's linear layers by int8 ones, in place; in a transformers model also stacked experts. Returns the module, or
    for an `nn.Linear` its replacement."""
    if hasattr(model, "get_output_embeddings") and hasattr(model, "config"):
        return generic.quantize_model(model, "int8", model.dtype)
    return quantize(model, "int8")


class _Watched:
    """Tells whether weights have changed since it was created. Writes to `.data` change no version, so it also compares one value
    of each parameter, which reveals syncs and merges of weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        middles = [parameter.detach().reshape(-1)[parameter.numel() // 2 :][:1].view(torch.uint8) for parameter in self._parameters]
        self._probes = [torch.zeros(1, dtype=torch.uint8), *middles]
        self._seen = self._now()

    def _now(self) -> tuple[list[tuple[int, int]], Tensor]:
        return [(parameter._version, parameter.data_ptr()) for parameter in self._parameters], torch.cat(self._probes)

    def has_changed(self) -> bool:
        (places, values), (before, seen) = self._now(), self._seen
        return places != before or not values.equal(seen)


class Encoder:
    """The native forward of an encoder: token ids to the last hidden states."""

    def __init__(self, runner: NativeDecoder, parameters: list[nn.Parameter], num_types: int, pad: int | None) -> None:
        self._runner, self._weights, self._num_types, self._pad = runner, _Watched(parameters), num_types, pad
        self._running = threading.Lock()

    @classmethod
    def of(cls, model: Any, kind: str | None) -> Encoder | None:
        """`kind`: the name of a dtype; None: that of the weights. Returns None if the kernels cannot compute this model."""
        config = getattr(model, "config", None)
        if not is_encoder(getattr(config, "model_type", None)) or next(model.parameters()).device.type != "cpu":
            return None
        stored = str(model.dtype).removeprefix("torch.")
        try:
            loaded = load(model, dtype=kind or "stored")
            sizes = Sizes(None, 1, None, torch.get_num_threads())
            opened = open_forward(loaded.config, loaded.weights, torch.device("cpu"), loaded.dtype, sizes)
            if not isinstance(runner := opened.runner, NativeDecoder):
                raise UnsupportedModel(opened.forward)
        except (UnsupportedModel, ValueError) as error:
            logger.warning("replace_with_kernel_inject: the module's own forward is used: %s", error)
            return None
        frozen = kind == "int8"  # the module's own layers are replaced, too
        parameters = [] if frozen else list(model.base_model.parameters())
        encoder = cls(runner, parameters, loaded.config.num_token_types, getattr(config, "pad_token_id", None))
        difference = encoder._difference(model.base_model, loaded.config.vocab_size)
        if difference > _NEAR.get(kind or stored, _ROUNDED):
            logger.warning("replace_with_kernel_inject: the kernels differ by %.2g: the module's own forward is used", difference)
            return None
        return encoder

    @torch.no_grad()
    def _difference(self, base: Any, vocab_size: int) -> float:
        """The relative difference from the module's own hidden states, for two texts of different lengths."""
        ids = (torch.arange(24).view(2, 12) * 7 + 5) % vocab_size
        ids[ids == self._pad] = (1 + (self._pad or 0)) % vocab_size
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        if self._pad is not None:
            ids[1, 7:] = self._pad
        expected = base(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        computed = self.hidden(ids, mask, None)
        if computed is None:
            return float("inf")
        kept = mask.bool()
        return float((computed[kept] - expected[kept]).norm() / expected[kept].norm())

    def hidden(self, ids: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor | None:
        """Token ids, mask and types [texts, tokens] -> fp32 [texts, tokens, hidden], 0 where the mask is; None for other inputs."""
        if self._weights.has_changed() or any(
            one is not None and (one.shape != ids.shape or one.dim() != 2 or one.device.type != "cpu") for one in (ids, mask, types)
        ):
            return None
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if not self._fits(ids, kept) or (types is not None and not self._num_types):
            return None
        lengths, rows = kept.sum(1).tolist(), [one.tolist() for one in (ids, types) if one is not None]
        parts, step = [], max(1, ROWS // ids.shape[1])
        with self._running:
            for first in range(0, len(ids), step):
                batch = range(first, min(first + step, len(ids)))
                parts.append(self._runner.hidden(*([row[i][: lengths[i]] for i in batch] for row in rows)))
        out = torch.zeros(*ids.shape, parts[0].shape[1])
        out[kept] = torch.cat(parts)
        return out

    def _fits(self, ids: Tensor, kept: Tensor) -> bool:
        """Whether each text's tokens come first and its padding after them, with no padding token among them."""
        if not ids.numel() or ids.shape[1] > self._runner.max_context:
            return False
        lengths = kept.sum(1)
        first = torch.arange(ids.shape[1]) < lengths[:, None]
        padding = self._pad is not None and bool(((ids == self._pad) & kept).any())
        return first.equal(kept) and bool(lengths.min()) and not padding

    def install(self, model: Any) -> None:
        """Make the model's base model use this forward wherever it can."""
        base = model.base_model
        own = base.forward
        names = list(inspect.signature(own).parameters)

        @functools.wraps(own)
        def forward(*args: Any, **more: Any) -> Any:
            asked = {**dict(zip(names, args, strict=False)), **more}
            hidden = None if torch.is_grad_enabled() or base.training else self._asked(base.config, **asked)
            return own(*args, **more) if hidden is None else _output(base, hidden.to(base.dtype))

        base.forward = forward

    def _asked(
        self, config: Any, *, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **more: Any
    ) -> Tensor | None:
        """The hidden states that a call requests; None if it requests anything else."""
        plain = all(value is None or (name in _OUTPUTS and value == _OUTPUTS[name]) for name, value in more.items())
        beside = any(getattr(config, name, None) for name in ("output_attentions", "output_hidden_states"))
        return self.hidden(input_ids, attention_mask, token_type_ids) if plain and not beside and input_ids is not None else None


def _output(base: Any, hidden: Tensor) -> Any:
    """The output of a base model: its hidden states, and its pooler's output."""
    from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPoolingAndCrossAttentions

    if not hasattr(base, "pooler"):
        output: Any = BaseModelOutput(last_hidden_state=hidden)
    else:
        pooled = None if base.pooler is None else base.pooler(hidden)
        output = BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)
    return output if getattr(base.config, "return_dict", True) else output.to_tuple()


# -- Decoders --------------------------------------------------------------------------------------------------------------


class Decoder:
    """Answers of a transformers decoder by Slipstream's engine, which is opened at first use, and again for changed weights."""

    def __init__(self, model: Any, kind: str | None) -> None:
        self._model, self._kind = model, kind
        self._engine: InferenceEngine | None = None
        self._weights = _Watched([])
        generates = hasattr(model, "can_generate") and model.can_generate()
        self._known = generates and next(model.parameters()).device.type == "cpu" and is_known(model, torch.device("cpu"))
        self._opening = threading.Lock()
        if kind == "int8" and self._known:  # while the weights are still floats
            self._opened()

    def _opened(self) -> InferenceEngine | None:
        """The engine; None if only the module can run these weights."""
        with self._opening:
            if self._engine is None or self._weights.has_changed():
                if self._engine is not None:
                    self._engine.close()
                self._engine = init_inference(self._model, dtype=self._kind or "stored", device="cpu")
                self._weights = _Watched([] if self._kind == "int8" else self._model.parameters())
            self._known = isinstance(self._engine.engine.runner, NativeDecoder)
            return self._engine if self._known else None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def generate(self, ids: Any, generation_config: Any, settings: Mapping[str, Any], times: list[float] | None) -> Tensor | None:
        """Token ids [prompts, tokens and answers]; None for a call that the module's own `generate` must answer.

        times: receives the milliseconds of each token of the first answer.
        """
        if not self._known:
            return None
        asked, mask = Asked.of(self._model.generation_config, generation_config, settings), settings.get("attention_mask")
        prompts = None if asked is None else self._prompts(asked, ids, mask)
        engine = None if prompts is None else self._opened()
        if asked is None or prompts is None or engine is None:
            return None
        if engine.engine.max_context < max(map(len, prompts)) + asked.max_tokens(ids):
            return None
        return asked.padded(ids, asked.answers(engine, ids, prompts, times))

    def _prompts(self, asked: Asked, ids: Any, mask: Tensor | None) -> list[list[int]] | None:
        """The prompts; None for inputs that the engine does not support."""
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return None
        if (mask is not None and mask.shape != ids.shape) or asked.max_tokens(ids) < max(asked.settings["min_tokens"], 1):
            return None
        prompts = asked.prompts(ids, mask)
        return prompts if all(prompts) else None
