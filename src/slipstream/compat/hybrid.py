"""Generation between steps of training: `"hybrid_engine": {"enabled": true}`.

    answers = engine.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=True)    # as transformers' generate
    answers = engine.module.generate(...)                                                     # the same

Each rank answers its own prompts with Slipstream's serving engine or, for models and settings that the engine does not support,
with transformers' own code in a second module. Each of these has a full copy of the weights. If the weights have changed since the
last call, `engine.named_weights()` renews the copy: the call is then collective, and a rank without prompts passes an empty tensor
[0, n]. The choice between the two depends on the call's settings, not on its prompts, so ranks with equal settings agree.

PEFT's adapters are merged on the way (train/handover.py), and so are DeepSpeed-Chat's own: layers with `lora_right_weight` [inputs,
rank], `lora_left_weight` [rank, outputs] and `lora_scaling` beside their weight; `fuse_lora`, if
they have it, tells that the weight includes them. The trainer's weights are not modified.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.compat.generation import Asked, is_known
from slipstream.inference import init_inference
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.models import from_hf
from slipstream.inference.native import NativeDecoder
from slipstream.inference.update import UpdateTarget
from slipstream.train import handover

if TYPE_CHECKING:
    from slipstream.config.features import HybridEngine
    from slipstream.train.engine import Engine

logger = logging.getLogger(__name__)

_MAX_WAITING = 1 << 20  # prompts per call
_PARTS = ("weight", "lora_right_weight", "lora_left_weight")


@dataclass(slots=True)
class RolloutTimes:
    """The last call of `generate`: seconds, and the number of this rank's prompts."""

    handover: float = 0.0
    generation: float = 0.0
    num_prompts: int = 0


class Rollouts:
    """Generates with the current weights of an engine. The engine may sleep if they have not changed."""

    def __init__(self, engine: Engine, plan: HybridEngine) -> None:
        self._engine = weakref.ref(engine)
        self._plan = plan
        self.times = RolloutTimes()
        self._server: InferenceEngine | None = None
        self._twin: _Twin | None = None
        self._versions: dict[type, tuple[Any, ...]] = {}  # versions of the weights in the server and in the twin
        self._patched: nn.Module | None = None
        self._follow(engine)
        engine.states.on_hooks.append(lambda _: self._follow(self._living("surgery")))

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **settings: Any) -> Any:
        """Answer token ids [prompts, tokens] as transformers' `generate` does: [prompts, tokens and answers], padded on the right.

        Collective if the weights have changed since the last call, or with release_inference_cache. Samples have the same
        distribution as transformers', with seeds from torch's generator. Raises ValueError for a row without a token, and if prompt
        and answer together exceed max_out_tokens.
        """
        engine = self._living("generate")
        ids = settings.pop("input_ids", None) if inputs is None else inputs
        asked = None
        if self._known and "inputs_embeds" not in settings:
            asked = Asked.of(self._base.generation_config, generation_config, settings, may_sample=True)
        began = time.perf_counter()
        with torch.no_grad():
            source: Any = self._serving(engine) if asked is not None else self._own_code(engine)
            self._renew(engine, source)
            self.times.handover, self.times.num_prompts = time.perf_counter() - began, 0 if ids is None else len(ids)
            try:
                if isinstance(ids, Tensor) and not ids.numel():
                    return ids
                if asked is None:
                    return source.module.generate(ids, generation_config=generation_config, **settings)
                return self._answers(asked, source, ids, settings.get("attention_mask"))
            finally:
                self.times.generation = time.perf_counter() - began - self.times.handover
                if self._plan.release_inference_cache:
                    self.release()

    def renew(self) -> None:
        """Hand over the current weights now, so that the next calls of `generate` need no other rank. Collective."""
        engine = self._living("named_weights")
        with torch.no_grad():
            self._renew(engine, self._serving(engine) if self._known else self._own_code(engine))

    def release(self) -> None:
        """Free the memory of generation until the next call of `generate`, which is then collective."""
        self._versions.clear()
        self._twin = None
        if self._server is None:
            return
        if isinstance(self._server.engine.runner, NativeDecoder):
            self._server.sleep()
        else:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Free everything, and restore the module's own `generate`. Called when the engine is destroyed."""
        self._versions.clear()
        self._twin = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._patched is not None:
            del self._patched.generate
            self._patched = None

    # -- the trainer's side --

    def _living(self, call: str) -> Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError("the engine of this model is gone, and with it the weights to generate with")
        engine.gate.check(call)
        return engine

    def _follow(self, engine: Engine) -> None:
        """Adopt the model's current form: after a surgery it can have other sizes, adapters, or another class."""
        self.close()
        module: Any = engine.module
        self._base = _base(module)
        self._known = is_known(self._base, engine.device)
        module.generate = self.generate
        self._patched = module

    def _renew(self, engine: Engine, source: InferenceEngine | _Twin) -> None:
        if self._versions.get(type(source)) == self._version(engine):
            return
        source.update_weights(fused(engine.named_weights(), chat_adapters(engine.module)))
        self._versions[type(source)] = self._version(engine)

    def _version(self, engine: Engine) -> tuple[Any, ...]:
        counts = engine.global_steps, engine.skipped_steps  # an update may still run; it is not in any unit's version yet
        fusions = [is_fused(layer) for layer in chat_adapters(engine.module).values()]
        return *counts, fusions, *handover.version(engine.states)

    # -- the serving side --

    def _serving(self, engine: Engine) -> InferenceEngine:
        if self._server is None:
            config = self._base.config
            self._server = init_inference(
                config,
                dtype=engine.plan.precision.param_dtype,
                device=engine.device,
                max_context=min(self._plan.max_out_tokens, from_hf(config.to_dict()).max_context),
                max_waiting=_MAX_WAITING,
            )
            logger.info("generation in training: %s", self._server.description)
        return self._server

    def _own_code(self, engine: Engine) -> _Twin:
        if self._twin is None:
            self._twin = _Twin(self._base, engine.plan.precision.param_dtype, engine.device)
            logger.info("generation in training: %s by transformers' own code", type(self._base).__name__)
        return self._twin

    def _answers(self, asked: Asked, server: InferenceEngine, ids: Any, mask: Tensor | None) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise ValueError(
                "generate() needs prompts: token ids [prompts, tokens]; a rank without prompts gives an empty tensor [0, n]"
            )
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"attention_mask is {list(mask.shape)} and the prompts are {list(ids.shape)}; give one of their shape")
        prompts, most = asked.prompts(ids, mask), asked.max_tokens(ids)
        empty = [row for row, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise ValueError(f"row {empty[0]} of the prompts has no token outside its padding; leave it out")
        self._check_length(max(map(len, prompts)), most, server.engine.max_context)
        return asked.padded(ids, asked.answers(server, ids, prompts))

    def _check_length(self, longest: int, most: int, limit: int) -> None:
        if most < 1:
            raise ValueError(f"max_length leaves {most} tokens to generate after the prompt; give max_new_tokens")
        if longest + most > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {most} new ones are more than {limit}: raise hybrid_engine.max_out_tokens "
                f"({self._plan.max_out_tokens}), up to the model's context, or generate fewer"
            )


class _Twin:
    """A second module of the model's class, for calls that only transformers' own `generate` supports."""

    def __init__(self, base: Any, dtype: torch.dtype, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):  # its initial values are overwritten
            module = type(base)(deepcopy(base.config))
        self.module: Any = module.to(device, dtype).eval().requires_grad_(False)
        self.module.generation_config = base.generation_config
        self._base = weakref.ref(base)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        remaining, own = iter(tensors), dict(self.module.named_parameters())
        try:
            UpdateTarget.module(self.module).fill(lambda name, weight: own[name].copy_(weight), remaining)
        finally:
            for _ in remaining:
                pass
        buffers = dict(self.module.named_buffers())
        for name, value in self._base().named_buffers():  # type: ignore[union-attr]
            if (bare := handover.bare(name)) in buffers:
                buffers[bare].copy_(value)


def generation(model: nn.Module, plan: HybridEngine) -> Callable[[Engine], None]:
    """The change that adds `generate` to an engine. Raises ValueError for a model that cannot generate."""
    base = _base(model)
    if not hasattr(base, "can_generate") or not base.can_generate():
        raise ValueError(
            f"hybrid_engine is enabled, and {type(model).__name__} is no model of transformers that generates; set "
            f"hybrid_engine.enabled to false for this engine"
        )

    def connect(engine: Engine) -> None:
        rollouts = engine.states.resources["rollouts"] = Rollouts(engine, plan)
        generate: Any = rollouts.generate
        engine.generate = generate

    return connect


def chat_adapters(model: nn.Module) -> dict[str, Any]:
    """DeepSpeed-Chat's layers with adapters, by their path."""
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, "lora_right_weight")}


def is_fused(layer: Any) -> bool:
    """Whether a layer's weight includes its adapter already."""
    return bool(getattr(layer, "fuse_lora", False))


def product(scaling: float, right: Tensor, left: Tensor) -> Tensor:
    """What an adapter adds to the weight [outputs, inputs]."""
    return scaling * (right @ left).t()


def fused(weights: Iterable[tuple[str, Tensor]], layers: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with these layers' adapters merged. Keeps copies of a layer's parts until it has all of them."""
    held: dict[str, dict[str, Tensor]] = {path: {} for path in layers}
    for name, weight in weights:
        path, _, part = name.rpartition(".")
        if path not in layers or part not in _PARTS:
            yield name, weight
        elif is_fused(layers[path]):
            if part == _PARTS[0]:
                yield name, weight
        else:
            held[path][part] = weight.detach().clone()
            if len(held[path]) == len(_PARTS):
                whole, right, left = (held[path].pop(each) for each in _PARTS)
                yield f"{path}.{_PARTS[0]}", whole + product(layers[path].lora_scaling, right, left).to(whole)


def _base(model: Any) -> Any:
    """The transformers model, which PEFT may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
