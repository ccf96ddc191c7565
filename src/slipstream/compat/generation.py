"""A call of transformers' `generate`: what it requests, whether Slipstream's engine gives the same answers, and what it returns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.inference.core import SamplingParams
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.models import from_hf
from slipstream.inference.native import why_not

# Settings of GenerationConfig that change neither greedy decoding nor sampling; those that only change sampling; and those without
# effect at this value. Any other setting that is not off (False, 0, empty) needs transformers' own code.
_ANY = {
    *"""transformers_version bos_token_id length_penalty early_stopping num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind disable_compile use_cache synced_gpus""".split()  # noqa: SIM905 (a list of words)
}
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # transformers' defaults
_ALL = {**_SAMPLING, "top_k": 0}  # the meaning of None, if a call gives it
_OFF_IN_SAMPLING = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
_NEUTRAL = dict.fromkeys(
    ("num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty", "encoder_repetition_penalty"), 1
)
_READ = ("do_sample", "max_new_tokens", "max_length", "min_new_tokens", "eos_token_id", "pad_token_id")
_INPUTS = ("input_ids", "inputs", "attention_mask")


class Asked(NamedTuple):
    """The request of a call. It depends only on the settings, so it is equal on ranks with different prompts."""

    limit: tuple[str, int]  # (max_new_tokens or max_length, value)
    samples: bool
    settings: dict[str, Any]  # fields of SamplingParams except max_tokens and seed
    pad: int
    guesses_mask: bool  # without a mask, padding tokens are skipped
    num: int = 1  # answers per prompt

    @classmethod
    def of(cls, defaults: Any, generation_config: Any, settings: Mapping[str, Any], *, may_sample: bool = False) -> Asked | None:
        """None for a call that needs transformers' own code. defaults: the model's GenerationConfig."""
        asked = _given(generation_config) | {name: value for name, value in settings.items() if name not in _INPUTS}
        merged = _merged(_given(defaults), asked, may_sample)
        limits = [name for name in ("max_new_tokens", "max_length") if asked.get(name) is not None]
        if merged is None or not limits:  # without a limit, transformers' default depends on the prompt
            return None
        ends = merged.get("eos_token_id", [])
        ends = [ends] if isinstance(ends, int) else ends
        samples = bool(merged.get("do_sample"))
        if not isinstance(ends, list):
            return None
        sampling: dict[str, Any] = {"temperature": 0.0}
        if samples:
            sampling = {
                name: _ALL[name] if name in asked and asked[name] is None else merged.get(name, value)
                for name, value in _SAMPLING.items()
            }
        return cls(
            limit=(limits[0], asked[limits[0]]),
            samples=samples,
            settings=sampling
            | {
                "min_tokens": merged.get("min_new_tokens", 0),
                "repetition_penalty": merged.get("repetition_penalty", 1.0),
                "stop_token_ids": tuple(ends),
                "ignore_eos": True,
            },
            pad=merged.get("pad_token_id", ends[0] if ends else 0),
            guesses_mask="pad_token_id" in merged and merged["pad_token_id"] not in ends,
            num=merged.get("num_return_sequences", 1) if samples else 1,
        )

    def max_tokens(self, ids: Tensor) -> int:
        name, value = self.limit
        return value - (ids.shape[1] if name == "max_length" else 0)

    def prompts(self, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
        """Each row's tokens without padding; may be empty."""
        if mask is None and self.guesses_mask:
            mask = ids != self.pad
        return ids.tolist() if mask is None else [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]

    def params(self, ids: Tensor, seed: int | None = None) -> SamplingParams:
        """Raises ValueError for settings that no engine supports."""
        return SamplingParams(max_tokens=self.max_tokens(ids), seed=seed, **self.settings)

    def answers(
        self, engine: InferenceEngine, ids: Tensor, prompts: Sequence[list[int]], times: list[float] | None = None
    ) -> list[list[int]]:
        """The new tokens of each prompt's `num` answers, in order. Each prompt's seed for sampling comes from torch's generator.

        times: receives the milliseconds of each token of the first answer.
        """
        if self.samples:
            seeds = torch.randint(1 << 62, (len(prompts),)).tolist()
            streams = [  # each submits its prompt now, so all are in one batch
                engine.generate([prompt], self.params(ids, seed), n=self.num, stream=True)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
        else:
            streams = [engine.generate(prompts, self.params(ids), stream=True)]
        found: list[list[int]] = [[] for _ in range(self.num * len(prompts))]
        before = time.perf_counter()
        for i, stream in enumerate(streams):
            for delta in stream:
                place = (i + delta.prompt) * self.num + delta.index
                found[place].extend(delta.token_ids)
                if times is not None and place == 0 and delta.token_ids:
                    now = time.perf_counter()
                    times += [(now - before) * 1e3 / len(delta.token_ids)] * len(delta.token_ids)
                    before = now
        return found

    def padded(self, ids: Tensor, answers: Sequence[list[int]]) -> Tensor:
        """Token ids [prompts x num, tokens and answers], padded on the right."""
        longest = max(map(len, answers))
        padded = torch.tensor([answer + [self.pad] * (longest - len(answer)) for answer in answers], dtype=ids.dtype)
        return torch.cat([ids.repeat_interleave(self.num, 0), padded.to(ids.device)], 1)


def is_known(model: Any, device: torch.device) -> bool:
    """Whether Slipstream's engine has a forward for this transformers model."""
    try:
        config = from_hf(model.config.to_dict())
    except (UnsupportedModel, ValueError):
        return False
    return config.has_head and (device.type != "cpu" or why_not(config) is None)


def _given(generation_config: Any) -> dict[str, Any]:
    values = {} if generation_config is None else generation_config.to_dict()
    return {name: value for name, value in values.items() if value is not None}


def _merged(defaults: Mapping[str, Any], asked: Mapping[str, Any], may_sample: bool) -> dict[str, Any] | None:
    """The settings of a call; None if it needs more than greedy decoding, or sampling by temperature, top_k, top_p and min_p."""
    if any(value is None and defaults.get(name) is not None for name, value in asked.items()):
        return None  # a default that is switched off
    merged = {name: value for name, value in {**defaults, **asked}.items() if value is not None}
    if merged.get("do_sample") and not may_sample:
        return None
    free = {*_ANY, *_READ, *_SAMPLING} | ({"repetition_penalty"} if may_sample else set())
    free |= {"num_return_sequences"} if merged.get("do_sample") else _OFF_IN_SAMPLING.keys()
    others = {name: value for name, value in merged.items() if name not in free and name[0] != "_" and _is_on(value)}
    neutral = _NEUTRAL | _OFF_IN_SAMPLING
    return None if any(name not in neutral or value != neutral[name] for name, value in others.items()) else merged


def _is_on(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)
