"""DeepSpeed's hybrid engine by name: `DeepSpeedHybridEngine`, the rollouts of `deepspeed.runtime.rollout` over it, and the losses
and targets for distillation on a model's own answers.

A rollout's prompts are padded on the left and its answers on the right, so that all answers begin at the same column.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.compat.engine import DeepSpeedEngine
from slipstream.compat.hybrid import Rollouts, chat_adapters, is_fused, product
from slipstream.zero import gathered

logger = logging.getLogger(__name__)


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """The class that `deepspeed.initialize` returns with `hybrid_engine.enabled`. `generate` is that of `hybrid.Rollouts`.

    It measures the times of an iteration, from one `eval()` to the next; rank 0 logs them.
    """

    _t_start: float | None = None  # perf_counter of the last eval()
    _iters = 0  # iterations, each from an eval() to the next
    _total_latency = 0.0  # seconds of all iterations
    _training_latency = 0.0  # seconds from train() to step() since the last eval()
    _training_start_time: float | None = None
    is_lora_fused = False

    @property
    def _rollouts(self) -> Rollouts:
        found: Rollouts = self.states.resources["rollouts"]
        return found

    _generate = property(lambda self: self._rollouts.generate)
    _gather_latency = property(lambda self: self._rollouts.times.handover)  # seconds, of the last generate()
    _generate_latency = property(lambda self: self._rollouts.times.generation)
    _total_batch_size = property(lambda self: self._rollouts.times.num_prompts * self.mesh.batch.size or None)

    def eval(self) -> DeepSpeedHybridEngine:
        now = time.perf_counter()
        if self._t_start is not None:
            latency = now - self._t_start
            self._total_latency, self._iters = self._total_latency + latency, self._iters + 1
            parts = self._gather_latency, self._generate_latency, self._training_latency
            samples = self._total_batch_size or 0
            if self.mesh.is_first:
                logger.info(
                    "iteration %d: %.2f s, of them hand-over %.2f, generation %.2f, training %.2f, others %.2f; %.2f samples/s",
                    *(self._iters, latency, *parts, latency - sum(parts), samples / latency),
                )
        self._t_start, self._training_latency = now, 0.0
        super().eval()
        return self

    def train(self, mode: bool = True) -> DeepSpeedHybridEngine:
        super().train(mode)
        if mode:
            self._training_start_time = time.perf_counter()
        return self

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        super().step(lr_kwargs)
        if self._training_start_time is not None:
            now = time.perf_counter()
            self._training_latency, self._training_start_time = self._training_latency + now - self._training_start_time, now

    def fuse_lora_weight(self) -> None:
        """Add the adapters of PEFT and DeepSpeed-Chat to the weights, for forwards; `generate` includes them anyway. Collective."""
        self._merge("merge_adapter", fused=True)

    def unfuse_lora_weight(self) -> None:
        """Subtract what `fuse_lora_weight` added, up to rounding. Collective."""
        self._merge("unmerge_adapter", fused=False)

    def _merge(self, of_peft: str, *, fused: bool) -> None:
        merge = getattr(self.module, of_peft, None)
        layers = [layer for layer in chat_adapters(self.module).values() if is_fused(layer) != fused]
        if self.is_lora_fused == fused or not (merge or layers):
            return
        with torch.no_grad(), gathered(self.module.parameters()):
            if merge is not None:
                merge()
            for layer in layers:
                factors = layer.lora_scaling, layer.lora_right_weight, layer.lora_left_weight
                layer.weight.add_(product(*factors), alpha=1 if fused else -1)
                layer.fuse_lora = fused
        self.is_lora_fused = fused

    def release_inference_cache(self) -> None:
        """Free the memory of generation until the next `generate`, which is then collective."""
        self._rollouts.release()

    def retake_inference_cache(self) -> None:
        """Hand over the current weights now. Collective."""
        self._rollouts.renew()


# -- rollouts ---------------------------------------------------------------------------------------------------------------


_NO_EFFECT = {  # options of DeepSpeed's rollouts
    "use_graph_capture": "serving captures CUDA graphs where its kernels run",
    "use_shared_prefill": "samples of a prompt share its prefix",
    **dict.fromkeys(
        ("align_decode_fronts", "enable_cache_trimming", "continuous_cache_capacity"), "the cache of serving is in blocks"
    ),
}


@dataclass
class RolloutConfig:
    engine: str = "hybrid_engine"
    use_graph_capture: bool = False  # without effect


@dataclass
class HybridEngineRolloutConfig:
    """enable_profiling: enables `get_last_profile`. The others have no effect: serving does these where it can."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


@dataclass
class SamplingConfig:
    """temperature 0 is greedy; top_k -1 or 0: all tokens. continuous_batch_size has no effect, because batches are continuous."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded on the left; the mask is 1 at their tokens."""

    prompt_ids: Tensor  # [prompts, tokens]
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _check_rows("prompt_ids", self.prompt_ids, prompt_attention_mask=self.prompt_attention_mask)


@dataclass
class RolloutBatch:
    """Prompts with their answers; a prompt's samples are consecutive."""

    input_ids: Tensor  # [prompts x samples, tokens]
    attention_mask: Tensor
    response_start_idx: Tensor  # [prompts x samples]: the column of an answer's first token

    def __post_init__(self) -> None:
        _check_rows("input_ids", self.input_ids, attention_mask=self.attention_mask)
        if self.response_start_idx.shape != self.input_ids.shape[:1]:
            raise ValueError(
                f"response_start_idx is {list(self.response_start_idx.shape)}; it must have one number for each of the "
                f"{self.batch_size} rows"
            )

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]


class RolloutEngine(ABC):
    """Answers prompts with a model that is being trained."""

    name = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answer every prompt `n_samples_per_prompt` times."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Hand over the current weights. Collective. step: of the training, for logs."""

    def shutdown(self) -> None:  # noqa: B027 (optional for engines that hold nothing)
        """Free the memory of the rollouts."""


class HybridEngineRollout(RolloutEngine):
    """Rollouts by an engine of `deepspeed.initialize` or `slipstream.initialize`. Without `hybrid_engine.enabled`, and with another
    object that has `module`, transformers' own `generate` answers; at stage 3, it is collective."""

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        """tokenizer: has `pad_token_id` and `eos_token_id`. cfg: any object with attributes of `HybridEngineRolloutConfig`.

        Raises ValueError if the tokenizer has neither."""
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if pad is None:
            raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id; set one of them")
        for name in (name for name in _NO_EFFECT if getattr(cfg, name, None)):
            logger.warning("rollouts: %s has no effect here: %s", name, _NO_EFFECT[name])
        self.engine, self.tokenizer, self.enable_profiling = engine, tokenizer, bool(getattr(cfg, "enable_profiling", False))
        self._last_profile: dict[str, float] | None = None
        self._rollouts: Rollouts | None = engine.states.resources.get("rollouts") if hasattr(engine, "states") else None
        self._pad: int = pad

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """See `RolloutEngine.generate`. Collective after a step; a rank without prompts passes an empty request."""
        began = time.perf_counter()
        ids, mask, num = request.prompt_ids, request.prompt_attention_mask, sampling.n_samples_per_prompt
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            settings |= {"top_k": max(sampling.top_k, 0), "num_return_sequences": num}
        elif num > 1:
            ids, mask = ids.repeat_interleave(num, 0), mask.repeat_interleave(num, 0)
        end, started = self.tokenizer.eos_token_id, ids.shape[1]
        settings |= {
            "max_new_tokens": sampling.max_new_tokens,
            "pad_token_id": self._pad,
            # transformers' own code gathers in every forward: all ranks generate equally many tokens
            "eos_token_id": [] if end is None or self._rollouts is None else end,
        }
        expanded = time.perf_counter()
        whole = self.engine.module.generate(ids, attention_mask=mask, **settings)
        generated, rows = time.perf_counter(), whole.shape[0]
        answers = whole[:, started:]
        ended = torch.zeros_like(answers) if end is None else (answers == end).long()
        before = ended.cumsum(1) - ended  # end tokens before each
        answers.masked_fill_(before > 0, self._pad)
        kept = mask.repeat_interleave(rows // max(len(mask), 1), 0) if rows else mask
        attended = torch.cat([kept.long(), (before == 0).long()], 1)
        batch = RolloutBatch(whole, attended, torch.full((rows,), started, dtype=torch.long, device=whole.device))
        if self.enable_profiling:
            handed = 0.0 if self._rollouts is None else self._rollouts.times.handover
            new, seconds, ended_at = int((before == 0).sum()), generated - expanded - handed, time.perf_counter()
            self._last_profile = {
                "prompt_expansion_ms": (expanded - began) * 1e3,
                "handover_ms": handed * 1e3,
                "generation_ms": seconds * 1e3,
                "post_processing_ms": (ended_at - generated) * 1e3,
                "total_ms": (ended_at - began) * 1e3,
                "num_generated_tokens": new,
                "tokens_per_second": new / max(seconds, 1e-9),
                "batch_size": len(request.prompt_ids),
                "num_samples_per_prompt": num,
                "prompt_length": started,
                "response_length": answers.shape[1],
            }
        return batch

    def get_last_profile(self) -> dict[str, float] | None:
        """Milliseconds and tokens of the last `generate`, with enable_profiling. Generation excludes the hand-over of weights."""
        return self._last_profile

    def sync_weights(self, step: int) -> None:
        logger.debug("rollouts take the weights of step %d", step)
        if self._rollouts is not None:
            self._rollouts.renew()

    def shutdown(self) -> None:
        if self._rollouts is not None:
            self._rollouts.release()


def build_rollout(rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **unused: Any) -> RolloutEngine:
    """Create the rollout that `rollout_cfg.engine` names; other arguments have no effect. Raises ValueError for names other than
    "hybrid_engine", or without the engine or the tokenizer."""
    if rollout_cfg.engine != HybridEngineRollout.name:
        raise ValueError(
            f"the rollout engine is {rollout_cfg.engine!r}; set it to {HybridEngineRollout.name!r}, or hand the weights to another "
            "server: slipstream.handover.send(engine.named_weights(), to=...)"
        )
    if student_engine is None or tokenizer is None:
        raise ValueError("a rollout by the hybrid engine needs student_engine and tokenizer; give both")
    if unused:
        logger.warning("build_rollout: %s have no effect", ", ".join(sorted(unused)))
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


def _check_rows(name: str, rows: Tensor, **masks: Tensor) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name} is {list(rows.shape)}; it must be [rows, tokens]")
    for other, mask in masks.items():
        if mask.shape != rows.shape:
            raise ValueError(f"{other} is {list(mask.shape)} and {name} {list(rows.shape)}; they must have the same shape")


# -- distillation -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponseTokenBatch:
    """The targets that logits of `input_ids` predict, per token, and which of them belong to answers."""

    input_ids: Tensor  # [rows, tokens]
    attention_mask: Tensor
    target_ids: Tensor  # [rows, tokens - 1]: what the logits of each token except the last predict
    response_mask: Tensor  # bool, like target_ids: tokens of answers

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """Raises ValueError if an answer begins outside 1 to the number of tokens."""
        starts, width = rollout.response_start_idx, rollout.seq_len
        if bool(((starts < 1) | (starts > width)).any()):
            raise ValueError(f"response_start_idx is {starts.tolist()!s:.200}; each must be from 1 to {width}")
        columns = torch.arange(1, width, device=starts.device)
        is_answer = (columns >= starts[:, None]) & rollout.attention_mask[:, 1:].bool()
        return cls(rollout.input_ids, rollout.attention_mask, rollout.input_ids[:, 1:], is_answer)

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Logits [rows, tokens, vocabulary] -> those that predict `target_ids`."""
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            raise ValueError(f"logits are {list(logits.shape)}; they must be {[*self.input_ids.shape, 'vocabulary']}")
        return logits[:, :-1]


class JSDLossOutput(NamedTuple):
    loss: Tensor  # mean over the tokens of answers
    loss_sum: Tensor
    valid_token_count: Tensor  # int64


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """The generalized Jensen-Shannon divergence of two models on answers (Agarwal et al. 2024, arXiv:2306.13649).

    Logits [rows, tokens, vocabulary], mask [rows, tokens]. With the mixture m = beta * teacher + (1 - beta) * student it is beta *
    KL(teacher, m) + (1 - beta) * KL(student, m); beta 0 is KL(teacher, student), 1 is KL(student, teacher). teacher_top_k: both
    distributions cover only the teacher's most likely tokens. pointwise_clip: the most that one vocabulary entry adds. Raises
    ValueError for inconsistent shapes and values.
    """
    fits = student_logits.shape == teacher_logits.shape and student_logits.dim() == 3
    if not fits or response_mask.shape != student_logits.shape[:2]:
        shapes = [list(each.shape) for each in (student_logits, teacher_logits, response_mask)]
        raise ValueError(
            f"student, teacher and mask are {shapes}; they must be twice [rows, tokens, vocabulary], and [rows, tokens]"
        )
    vocabulary = student_logits.shape[-1]
    for name, value, fit, expected in (
        ("beta", beta, 0 <= beta <= 1, "from 0 to 1"),
        ("temperature", temperature, temperature > 0, "above 0"),
        ("teacher_top_k", teacher_top_k, teacher_top_k is None or 1 <= teacher_top_k <= vocabulary, f"from 1 to {vocabulary}"),
        ("pointwise_clip", pointwise_clip, pointwise_clip is None or pointwise_clip >= 0, "0 or more"),
    ):
        if not fit:
            raise ValueError(f"{name} is {value}; it must be {expected}")
    student, teacher = student_logits / temperature, teacher_logits / temperature
    if teacher_top_k is not None:
        chosen = teacher.topk(teacher_top_k, -1).indices
        student, teacher = student.gather(-1, chosen), teacher.gather(-1, chosen)
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta in (0, 1):
        first, second = (teacher, student) if beta == 0 else (student, teacher)
        points = first.exp() * (first - second)
    else:
        mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        points = beta * teacher.exp() * (teacher - mixed) + (1 - beta) * student.exp() * (student - mixed)
    if pointwise_clip is not None:
        points = points.clamp(max=pointwise_clip)
    total, count = (points.sum(-1) * response_mask).sum(), response_mask.sum().long()
    return JSDLossOutput(total / count.clamp_min(1), total, count)
