"""What an opened model is in Python: `InferenceEngine`, which generates for one prompt or many, at once or as a stream.

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
import inspect
import json
import operator
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.core import Finish, QueueFullError, SamplingParams
from slipstream.inference.engine import Engine, Handle, Logprob, Output, Usage
from slipstream.inference.native import NativeDecoder
from slipstream.inference.update import Target

__all__ = ["Completion", "Delta", "GenerationError", "InferenceEngine"]

_PROMPT = "a text or a list of token ids (engine.chat_prompt(messages) makes them of a conversation)"
_RETRY = 0.02  # seconds, while others fill the queue

# Other names of a request's settings, transformers' and DeepSpeed-MII's.
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
    "stream": ((None, True), "agenerate() is always a stream"),  # generate() has it as an argument of its own
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

    def __init__(
        self,
        engine: Engine,
        description: str,
        target: Target | str = "nothing is known of them",
        open_module: Callable[[], torch.nn.Module] | str = "it has no transformers model",
    ) -> None:
        """
        target       where new weights go, or why they cannot come
        open_module  makes the model that computes outputs of tensors; or why there is none
        """
        self.engine = engine  # the loop itself: submit, cancel, stats
        self._target = target
        self._open_module = open_module
        self._module: torch.nn.Module | None = None
        self._opening = threading.Lock()
        self.description = description
        self.tokenizer = engine.tokenizer
        engine.start()
        # The thread keeps the loop alive, never this object.
        self._finalizer = weakref.finalize(self, engine.close)

    def __repr__(self) -> str:
        return f"<InferenceEngine {self.description}>"

    def close(self) -> None:
        self._forget_module("the engine is closed")
        self._finalizer()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With tensors, the model's outputs, as in DeepSpeed: `engine(input_ids, attention_mask=mask).logits`. With texts or lists
        of token ids, answers, as in DeepSpeed-MII: `generate`.

        Outputs are those of transformers' forward of the model, without a graph, in the requested dtype; a batch on the model's
        device goes in. Raises ValueError where the engine has no such model (see `module`), and for settings of `generate`.
        """
        if not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            return self.generate(*args, **kwargs)
        module = self.module
        settings = sorted(_settings() & kwargs.keys() - inspect.signature(module.forward).parameters.keys())
        if settings:
            raise ValueError(
                f"engine(tensor, {settings[0]}=) would compute outputs; engine.generate(tensor, {settings[0]}=) generates"
            )
        with torch.no_grad():
            return module(*args, **kwargs)

    @property
    def module(self) -> torch.nn.Module:
        """The transformers model behind outputs, made at first use: of a live model a copy that shares what has the same dtype and
        device, of a folder or file a second one in memory. Raises ValueError where there is none; generating needs none.
        """
        with self._opening:
            if self._module is None:
                if isinstance(self._open_module, str):
                    raise ValueError(
                        f"this engine computes no outputs of tensors: {self._open_module}. engine.generate() answers prompts"
                    )
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
        """Serve other weights from now on: `engine.update_weights(trainer.named_weights())`.

        tensors: all of the model's, by the names that they have in it, in any order and any float dtype; each is read before the
        next is asked for, and put in the place of the old one, quantized again where that was. What runs is finished first;
        requests that come meanwhile wait. Nothing of the prefix cache is used again.

        Raises ValueError for a tensor that is not this model's, or that has not come. After that, or an exception in `tensors`,
        some weights are new and some old: nothing is served until an update is complete (where none was put yet, the old ones are
        served on). It raises after the end of `tensors`:
        where they are gathered, other ranks count on this one.
        """
        left = iter(tensors)
        try:
            if isinstance(self._target, str):
                raise ValueError(f"this engine takes no new weights: {self._target}")
            self._forget_module("its weights have been updated since it was opened, and those of its transformers model have not")
            with self.engine.paused(otherwise="an update of the weights has not come to its end") as pause:

                def put(role: str, weight: Any) -> None:
                    pause.changed = True
                    self.engine.runner.put(role, weight)

                self._target.fill(put, left)
        finally:
            for _ in left:
                pass

    def sleep(self) -> None:
        """Give the memory of weights and cache back until `update_weights` brings weights again: for a trainer in the same process.

        What runs is finished first; requests are refused meanwhile. Raises ValueError where the forward is not the native one.
        """
        runner = self.engine.runner
        if isinstance(self._target, str) or not isinstance(runner, NativeDecoder):
            raise ValueError("only an engine on the native kernels that takes new weights can sleep; close() this one instead")
        asleep = "the engine sleeps: call update_weights()"
        self._forget_module("its weights have been given back since it was opened")
        with self.engine.paused(otherwise=asleep, then=asleep) as pause:
            pause.changed = True
            runner.give_back()

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The token ids of a conversation ({"role": ..., "content": ...}), ready for its next answer."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, and this engine has none")
        if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(f'messages is {messages!r:.200}; give a list of messages: [{{"role": "user", "content": "Hello"}}]')
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

    async def agenerate(
        self, prompts: Any, params: SamplingParams | None = None, *, n: int = 1, **settings: Any
    ) -> AsyncIterator[Delta]:
        """`generate(stream=True)` for an event loop, which goes on while prompts become tokens and a schema is compiled."""
        params, n = _sampling(params, n, settings)
        batch, _ = _listed(prompts)
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

        def tell(*item: Any) -> None:
            loop.call_soon_threadsafe(told.put_nowait, item)

        def abandon(submitted: asyncio.Future[None]) -> None:
            submitted.exception()  # nobody else asks for it
            feed.cancel()

        feed = await asyncio.to_thread(_Feed, self.engine, batch, params, n, tell)
        submitting: asyncio.Future[None] | None = None
        try:
            while not feed.over:
                if feed.can_submit:
                    submitting = loop.run_in_executor(None, feed.submit)
                    await asyncio.shield(submitting)  # it cannot be stopped, and its handles must not be lost
                if feed.blocked:
                    await asyncio.sleep(_RETRY)
                else:
                    yield feed.take(*await told.get())
        finally:
            if submitting is None or submitting.done():
                feed.cancel()
            else:
                submitting.add_done_callback(abandon)

    def _deltas(self, batch: Sequence[str | TokenIds], params: SamplingParams, n: int) -> Generator[Delta]:
        """Everything is submitted before it returns, so that what is wrong is raised here."""
        told: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        feed = _Feed(self.engine, batch, params, n, lambda *item: told.put(item))

        def follow() -> Generator[Delta]:
            owner = self  # a forgotten InferenceEngine closes its engine; not while someone reads from it
            try:
                feed.submit()
                yield Delta("", ())  # never seen: to close a generator that has not begun would skip its `finally`
                while not feed.over:
                    feed.submit()
                    if feed.blocked:
                        time.sleep(_RETRY)
                    else:
                        yield feed.take(*told.get())
            finally:
                feed.cancel()
                del owner

        deltas = follow()
        next(deltas)
        return deltas

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

    @property
    def over(self) -> bool:
        """Nothing is left to come."""
        return not self.pending and not self.live

    @property
    def can_submit(self) -> bool:
        return bool(self.pending) and (self.room or not self.live)

    def submit(self) -> None:
        """Submit what the queue takes."""
        while self.can_submit:
            number, ids = self.pending[0]
            try:
                self.handles.append(self.engine.submit(ids, self.params, n=self.n, sink=partial(self.tell, number)))
            except QueueFullError:
                self.room = False
                break
            self.pending.popleft()
            self.live += self.n

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


def _settings() -> set[str]:
    """What `generate` takes beside prompts, by all its names."""
    names = {field.name for field in fields(SamplingParams)}
    return names | _SAMPLING_ALIASES.keys() | _SAMPLING_NEUTRAL.keys() | {"do_sample"}


def _listed(prompts: Any) -> tuple[list[str | TokenIds], bool]:
    """As a list, and whether it was one prompt alone."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {prompts!r:.200}; give {_PROMPT}, a list of either, or a tensor")
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], Integral):
        return [_prompt("prompts", prompts)], True
    return [_prompt(f"prompts[{number}]", prompt) for number, prompt in enumerate(prompts)], False


def _prompt(name: str, given: Any) -> str | TokenIds:
    """A text, or token ids as Python's own integers."""
    if isinstance(given, str):
        return given
    try:
        return [operator.index(token) for token in given]
    except TypeError:
        raise TypeError(f"{name} is {given!r:.200}; give {_PROMPT}") from None


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
    n = whole("n", n, 1)
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r:.200}; give SamplingParams, or the settings as keywords")
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
            raise TypeError(f"generation has no setting {word!r}; {near(word, [*known, *_SAMPLING_ALIASES, 'do_sample'])}")
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
    n = whole("n", given.pop("n", 1), 1)
    return SamplingParams(**given), n


def whole(name: str, value: Any, least: int, most: int = sys.maxsize) -> int:
    """A whole number, numpy's too, as Python's own. Raises TypeError or ValueError."""
    bounds = f"of {least} or more" if most == sys.maxsize else f"from {least} to {most}"
    wrong = f"{name} is {value!r:.200}; it has to be a whole number {bounds}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(wrong)
    if not least <= int(value) <= most:
        raise ValueError(wrong)
    return int(value)


def near(word: str, known: Iterable[str]) -> str:
    """For the end of an error: which of the known words was meant."""
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {match[0]}?" if match else f"it has {', '.join(known)}"
