"""The Python interface of a model: `InferenceEngine` generates for one prompt or many, at once or as a stream.

    print(engine.generate("Once upon a time", max_new_tokens=50).text)
    for delta in engine.generate("Once upon a time", stream=True):
        print(delta.text, end="")

Sampling settings are a `SamplingParams`, or its fields as keywords, also under the names of transformers and DeepSpeed-MII
(`max_new_tokens`, `do_sample`, ...). With keywords, decoding is greedy as in transformers, unless one of `do_sample`,
`temperature`, `top_k`, `top_p`, `min_p` and `seed` asks for sampling.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.core import Finish, QueueFullError, SamplingParams
from slipstream.inference.embedding import EmbeddingEngine
from slipstream.inference.engine import Engine
from slipstream.inference.native import NativeDecoder
from slipstream.inference.options import Refused, check_int, read_options
from slipstream.inference.ranks import ServingRanks
from slipstream.inference.sequence import Handle, Logprob, Output, Usage
from slipstream.inference.update import UpdateTarget

__all__ = ["Completion", "Delta", "GenerationError", "InferenceEngine"]

_PROMPT = "a text or a list of token ids (engine.chat_prompt(messages) makes them of a conversation)"
_RETRY = 0.02  # seconds between attempts while other callers fill the queue

# Names of sampling settings in transformers and DeepSpeed-MII.
_SAMPLING_ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
}
# transformers' settings without an equivalent here -> (accepted values, which have no effect; the reason).
_SAMPLING_NEUTRAL: Refused = {
    "num_beams": ((None, 1), "there is no beam search; n answers are sampled with n="),
    "use_cache": ((None, True), "keys and values are always kept"),
    "return_full_text": ((None, False), "an answer's text is without its prompt"),
    "synced_gpus": ((None, False), "one engine runs on one device"),
    "max_length": ((None,), "it would count the prompt too; give max_new_tokens"),
    "stream": ((None, True), "agenerate() is always a stream"),  # generate() has a parameter of that name
}


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled
    usage: Usage
    logprobs: list[Logprob] | None = None  # one per token, if requested
    prompt_logprobs: list[Logprob | None] | None = None  # one per token of the prompt, None for the first; if requested

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Delta:
    """An increment of one answer in a stream."""

    text: str
    token_ids: tuple[int, ...]
    prompt: int = 0  # index of the prompt
    index: int = 0  # index of the answer, 0 to n - 1
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None  # only in the answer's last Delta
    usage: Usage | None = None  # likewise
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # only in the answer's first Delta


class GenerationError(RuntimeError):
    """A request failed; the message is the engine's."""


TokenIds = Sequence[int]


class InferenceEngine:
    """A loaded model that generates. Its loop runs in a thread of its own; every method may be called from any thread.

    `close()` (or `with`) frees all resources; so does garbage collection of the object."""

    def __init__(
        self,
        engine: Engine | EmbeddingEngine,
        description: str,
        target: UpdateTarget | str = "it does not know their names and shapes",
        open_module: Callable[[], torch.nn.Module] | str = "it has no transformers model",
        ranks: ServingRanks | None = None,
        release: Callable[[], object] = bool,
        dtype: str = "",
    ) -> None:
        """
        target       what `update_weights` overwrites; or the reason that it cannot
        open_module  creates the model of `module`; or the reason that there is none
        ranks        the processes that compute the model together
        release      frees what the forward holds besides memory, once no forward runs
        dtype        the weights' precision, as text
        """
        # The loop: submit, cancel, stats. An EmbeddingEngine raises in the methods that it does not support.
        self.engine: Engine = engine  # type: ignore[assignment]
        self._target = target
        self._open_module = open_module
        self._module: torch.nn.Module | None = None
        self._opening = threading.Lock()
        self.description, self.dtype = description, dtype
        self.tokenizer = engine.tokenizer
        engine.start()
        # The thread references the loop, not this object, so that this object can be collected.
        self._ranks = ranks
        closing = ExitStack()
        closing.callback(release)
        if ranks is not None:
            closing.callback(ranks.close)
        closing.callback(engine.close)
        self._finalizer = weakref.finalize(self, closing.close)

    def __repr__(self) -> str:
        return f"<InferenceEngine {self.description}>"

    @property
    def leads(self) -> bool:
        """Whether this process answers requests. False on ranks above 0, whose `close` waits until rank 0 closes."""
        return self._ranks is None or self._ranks.index == 0

    def close(self) -> None:
        self._forget_module("the engine is closed")
        self._finalizer()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With tensors, compute the model's outputs, as in DeepSpeed: `engine(input_ids, attention_mask=mask).logits`. With texts
        or lists of token ids, generate answers, as in DeepSpeed-MII: `generate`.

        Outputs are those of transformers' forward of the model, without autograd, in the requested dtype. Inputs must be on the
        model's device. Raises ValueError if the engine has no such model (see `module`), or if settings of `generate` are given
        with tensors.
        """
        if not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            return self.generate(*args, **kwargs)
        module = self.module
        known = {*(field.name for field in fields(SamplingParams)), *_SAMPLING_ALIASES, *_SAMPLING_NEUTRAL, "do_sample"}
        settings = sorted(known & kwargs.keys() - inspect.signature(module.forward).parameters.keys())
        if settings:
            raise ValueError(f"engine(tensor, {settings[0]}=) computes outputs; engine.generate(tensor, {settings[0]}=) generates")
        with torch.no_grad():
            return module(*args, **kwargs)

    @property
    def module(self) -> torch.nn.Module:
        """The transformers model that computes outputs, created at first use. For a live model it is a copy that shares all tensors
        of equal dtype and device. For a folder or file, the weights are loaded a second time. `generate` does not need it. Raises
        ValueError if there is none.
        """
        with self._opening:
            if self._module is None:
                if isinstance(self._open_module, str):
                    raise ValueError(f"this engine computes no outputs of tensors: {self._open_module}. engine.generate() answers")
                self._module = self._open_module().eval()
            return self._module

    def _forget_module(self, why: str) -> None:
        with self._opening:
            self._open_module, self._module = why, None

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights: `engine.update_weights(trainer.named_weights())`.

        tensors: every weight of the model by its name there, in any order and any float dtype. Each one overwrites the old weight,
        quantized if that was, before the next is fetched. Running requests finish first, new ones wait, and the prefix cache is
        cleared.

        Raises ValueError if a tensor is not this model's or is missing. After that, or after an exception in `tensors`, some
        weights may be new and some old: nothing is served until an update completes. If no weight was overwritten yet, the old ones
        stay in use. `tensors` is always consumed to the end before an error is raised, because gathering them can be a collective
        in which other ranks wait for this one.
        """
        remaining = iter(tensors)
        try:
            if isinstance(self._target, str):
                raise ValueError(f"this engine cannot update its weights: {self._target}")
            self._forget_module("its weights were updated since it was opened, but not those of its transformers model")
            with self.engine.paused(otherwise="a weight update did not complete") as pause:

                def put(role: str, weight: Any) -> None:
                    pause.changed = True
                    self.engine.runner.put(role, weight)

                self._target.fill(put, remaining)
        finally:
            for _ in remaining:
                pass

    def sleep(self) -> None:
        """Free the memory of weights and cache until `update_weights`, for a trainer in the same process.

        Running requests finish first; requests are rejected until the update. Raises ValueError unless the forward is the native
        one.
        """
        runner = self.engine.runner
        if isinstance(self._target, str) or not isinstance(runner, NativeDecoder):
            raise ValueError("sleep() needs the native kernels and weights that can be updated; close() this engine instead")
        asleep = "the engine sleeps: call update_weights()"
        self._forget_module("its weights were freed by sleep()")
        with self.engine.paused(otherwise=asleep, then=asleep) as pause:
            pause.changed = True
            runner.free_memory()

    def embed(self, texts: Any, *, truncate: int = False) -> Tensor:
        """Return vectors of texts, pooled and normalized as the model's files say. A text, or one text's token ids -> fp32
        [dimensions]; a list of these -> fp32 [texts, dimensions].

        Texts that are too long are cut with `truncate` (True, or the number of tokens to keep), and an error otherwise. Raises
        ValueError if the model generates, RuntimeError if a text cannot be computed."""
        batch, single = _as_list(texts)
        vectors = self._encoder().embed(batch, truncate=truncate).vectors
        return vectors[0] if single else vectors

    def score(self, query: str, documents: Sequence[str], *, truncate: int = False) -> list[float]:
        """How well each document fits the query: a cross-encoder's score, or the cosine of their vectors. Raises as `embed`."""
        return self._encoder().score([(query, document) for document in documents], truncate=truncate).scores

    def _encoder(self) -> EmbeddingEngine:
        engine: Any = self.engine
        if not isinstance(engine, EmbeddingEngine):
            hint = "open an encoder, or a model with sentence-transformers' modules.json"
            raise ValueError(f"{engine.model_name} generates and does not embed: {hint}")
        return engine

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the token ids of a conversation ([{"role": ..., "content": ...}]), up to where the next answer starts."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, and this engine has none")
        if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(f'messages is {messages!r:.200}; give a list of messages: [{{"role": "user", "content": "Hello"}}]')
        loop: Any = self.engine
        if isinstance(loop, EmbeddingEngine) and not self.tokenizer.templates:
            raise ValueError(f"{loop.model_name} {loop.does} and does not generate: {loop.instead}")
        return self.tokenizer.encode(self.tokenizer.chat(messages, **variables), special=False)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self.engine.adapters

    def load_adapter(self, name: str, folder: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Load a PEFT adapter for `generate(adapter=name)`, while requests run. See `Engine.load_adapter`."""
        self.engine.load_adapter(name, folder, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests keep it until they end. Raises ValueError if it is not loaded."""
        self.engine.unload_adapter(name)

    def generate(
        self,
        prompts: Any = None,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        n: int = 1,
        adapter: str | None = None,
        first_within: float | None = None,
        wait_within: float | None = None,
        **settings: Any,
    ) -> Any:
        """Generate answers to `prompts`, all in one batch. `adapter`: the name of a loaded adapter; None: the model alone.
        `first_within` and `wait_within`: each prompt's target, seconds from its entry into the engine's queue to the first token,
        and between tokens.

        | prompts | returns | with stream=True |
        |---|---|---|
        | a text, or one prompt's token ids | a `Completion`; a list of n with n > 1 | an iterator of `Delta` |
        | a list of these | a list of `Completion`, each prompt's n in a row | the same; `Delta.prompt` is the prompt's index |
        | a tensor [prompts, tokens] or [tokens] | a tensor of prompt and answer, as transformers returns it | the same |

        Raises ValueError if a request cannot be served, GenerationError if one fails. Closing the iterator, or an exception in its
        consumer, cancels the unfinished answers. Outputs that the consumer has not read wait in memory, at most all of these
        answers: an engine that waited for the consumer would stall its other callers.
        """
        options = {"adapter": adapter or "", "first_within": first_within, "wait_within": wait_within}
        if isinstance(prompts, torch.Tensor) or "input_ids" in settings or "inputs" in settings:
            return self._generate_tensor(prompts, params, stream, n, options, settings)
        params, n = _sampling(params, n, settings)
        batch, single = _as_list(prompts)
        deltas = self._deltas(batch, params, n, options)
        if stream:
            return deltas
        completions = _assemble(deltas, len(batch), n, params)
        return completions[0] if single and n == 1 else completions

    async def agenerate(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        adapter: str | None = None,
        first_within: float | None = None,
        wait_within: float | None = None,
        **settings: Any,
    ) -> AsyncIterator[Delta]:
        """`generate(stream=True)` for asyncio. Tokenizing and compiling a schema do not block the event loop."""
        params, n = _sampling(params, n, settings)
        batch, _ = _as_list(prompts)
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

        def send(*item: Any) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, item)

        def abandon(submitted: asyncio.Future[None]) -> None:
            submitted.exception()  # retrieved, so that asyncio does not log it
            feed.cancel()

        options = {"adapter": adapter or "", "first_within": first_within, "wait_within": wait_within}
        feed = await asyncio.to_thread(_Feed, self.engine, batch, params, n, send, options)
        submitting: asyncio.Future[None] | None = None
        try:
            while not feed.over:
                if feed.can_submit:
                    submitting = loop.run_in_executor(None, feed.submit)
                    await asyncio.shield(submitting)  # the thread cannot be stopped, and its handles must still be cancelled
                if feed.live:
                    yield feed.take(*await outputs.get())
                else:
                    await asyncio.sleep(_RETRY)
        finally:
            if submitting is None or submitting.done():
                feed.cancel()
            else:
                submitting.add_done_callback(abandon)

    def _deltas(
        self, batch: Sequence[str | TokenIds], params: SamplingParams, n: int, options: Mapping[str, Any]
    ) -> Generator[Delta]:
        """Submit the prompts before returning, so that invalid requests raise here."""
        outputs: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        feed = _Feed(self.engine, batch, params, n, lambda *item: outputs.put(item), options)

        def follow() -> Generator[Delta]:
            owner = self  # keeps the engine open: garbage collection of an InferenceEngine closes it
            try:
                feed.submit()
                yield Delta("", ())  # consumed below: closing a generator that has not started would skip its `finally`
                while not feed.over:
                    feed.submit()
                    if feed.live:
                        yield feed.take(*outputs.get())
                    else:
                        time.sleep(_RETRY)
            finally:
                feed.cancel()
                del owner

        deltas = follow()
        next(deltas)
        return deltas

    def _generate_tensor(
        self,
        ids: Tensor | None,
        params: SamplingParams | None,
        stream: bool,
        n: int,
        options: Mapping[str, Any],
        settings: dict[str, Any],
    ) -> Any:
        """transformers' convention: rows of token ids in, rows of prompt and answer out, padded on the right."""
        tensors = [ids, settings.pop("input_ids", None), settings.pop("inputs", None)]
        ids, *surplus = [tensor for tensor in tensors if tensor is not None]
        if surplus or not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point():
            raise ValueError("pass one tensor of token ids, [prompts, tokens] or [tokens]")
        mask, pad = settings.pop("attention_mask", None), settings.pop("pad_token_id", None)
        rows = ids if ids.dim() == 2 else ids[None]
        if mask is None:  # as transformers guesses it; a pad that also ends answers may be part of a prompt
            mask = torch.ones_like(rows) if pad is None or pad in self.engine.end_ids else rows != pad
        mask = mask.reshape(rows.shape)
        batch = [row[row_mask.bool()].tolist() for row, row_mask in zip(rows, mask, strict=True)]
        params, n = _sampling(params, n, settings)
        deltas = self._deltas(batch, params, n, options)
        if stream:
            return deltas
        answers = [torch.tensor(one.token_ids, dtype=ids.dtype) for one in _assemble(deltas, len(batch), n, params)]
        fill = next(iter(sorted(self.engine.end_ids)), 0) if pad is None else pad
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=fill) if answers else rows[:, :0]
        full = torch.cat([rows.repeat_interleave(n, 0), padded.to(rows.device)], 1)
        return full if ids.dim() == 2 or n > 1 else full[0]


class _Feed:
    """Submits prompts to the engine: as many as its queue accepts, the rest as answers end."""

    def __init__(
        self,
        engine: Engine,
        batch: Sequence[str | TokenIds],
        params: SamplingParams,
        n: int,
        send: Callable[[int, Output], object],
        options: Mapping[str, Any],
    ) -> None:
        """`options`: adapter and target, arguments of `Engine.submit`."""
        self.engine, self.params, self.n, self.send, self.options = engine, params, n, send, options
        self.pending = deque((number, engine.encode(prompt)) for number, prompt in enumerate(batch))
        self.handles: list[Handle] = []
        self.live = 0  # unfinished answers; at 0, no output will arrive
        self.queue_free = True  # False after the engine has reported a full queue

    @property
    def over(self) -> bool:
        """All prompts are submitted and answered."""
        return not self.pending and not self.live

    @property
    def can_submit(self) -> bool:
        return bool(self.pending) and (self.queue_free or not self.live)

    def submit(self) -> None:
        """Submit as many prompts as the queue accepts."""
        while self.can_submit:
            number, ids = self.pending[0]
            try:
                self.handles.append(self.engine.submit(ids, self.params, n=self.n, sink=partial(self.send, number), **self.options))
            except QueueFullError:
                self.queue_free = False
                break
            self.pending.popleft()
            self.live += self.n

    def take(self, number: int, output: Output) -> Delta:
        if output.finish is not None:
            self.live, self.queue_free = self.live - 1, True
        if output.finish is Finish.ERROR:
            raise GenerationError(f"prompt {number}: {output.error}")
        reason = None if output.finish is None else output.finish.value
        scored = output.prompt_logprobs
        return Delta(output.text, output.token_ids, number, output.index, output.logprobs, reason, output.usage, scored)

    def cancel(self) -> None:
        """Cancel the unfinished answers and drop the pending prompts."""
        self.pending.clear()
        if self.live:
            for handle in self.handles:
                self.engine.cancel(handle)


def _as_list(prompts: Any) -> tuple[list[str | TokenIds], bool]:
    """The prompts as a list, and whether `prompts` is a single one."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {prompts!r:.200}; give {_PROMPT}, a list of either, or a tensor")
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], Integral):
        return [_prompt("prompts", prompts)], True
    return [_prompt(f"prompts[{number}]", prompt) for number, prompt in enumerate(prompts)], False


def _prompt(name: str, prompt: Any) -> str | TokenIds:
    """A text, or token ids as Python integers."""
    if isinstance(prompt, str):
        return prompt
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(f"{name} is {prompt!r:.200}; give {_PROMPT}") from None


def _assemble(deltas: Iterable[Delta], num: int, n: int, params: SamplingParams) -> list[Completion]:
    """Assemble the answers of a stream, in the order of the prompts and of each prompt's n."""
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
                prompt_logprobs=next((list(delta.prompt_logprobs) for delta in answer if delta.prompt_logprobs), None),
            )
        )
    return completions


def _sampling(params: SamplingParams | None, n: int, settings: Mapping[str, Any]) -> tuple[SamplingParams, int]:
    """Return `params`, or those of the keywords `settings`, and n."""
    n = check_int("n", n, 1)
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r:.200}; give SamplingParams, or the settings as keywords")
        if settings:
            raise TypeError(f"pass settings as params or as keywords, not both: {', '.join(settings)}")
        return params, n
    names = [*(field.name for field in fields(SamplingParams)), "n", "do_sample"]
    sources = [{"n": n if n != 1 else None}, settings]
    tables: dict[str, Any] = {"refused": _SAMPLING_NEUTRAL, "aliases": _SAMPLING_ALIASES}
    values = read_options("generation", names, sources, **tables, unknown=TypeError)
    words = {_SAMPLING_ALIASES.get(word, word): word for word, value in settings.items() if value is not None}
    sample = values.pop("do_sample", any(name in values for name in ("temperature", "top_k", "top_p", "min_p", "seed")))
    if not sample:
        values["temperature"] = 0.0
    n = check_int(words.get("n", "n"), values.pop("n", 1), 1)
    try:
        return SamplingParams(**values), n
    except ValueError as error:  # the message begins with the field's name
        first, _, rest = str(error).partition(" ")
        raise ValueError(f"{words.get(first, first)} {rest}") from None
