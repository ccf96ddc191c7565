"""What the server asks of an engine. `slipstream.inference.engine.Engine` is one; tests bring their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slipstream.inference.core import Finish, SamplingParams
from slipstream.inference.stats import Stats


class Usage(Protocol):
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class Logprob(Protocol):
    """Of one generated token."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class Output(Protocol):
    """What is new in one sequence; the last one of a sequence has `finish` and `usage`."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def logprobs(self) -> Sequence[Logprob]: ...
    @property
    def finish(self) -> Finish | None: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def error(self) -> str | None: ...


class Tokenizer(Protocol):
    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """May raise text.TooLongError for a text of more than `most` tokens, and should where it takes long to encode."""
        ...

    @property
    def tells_tools(self) -> bool:
        """Whether `chat` makes anything of tools."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a conversation, to be encoded with special=False. ValueError, in words for the client, if the model's
        template cannot say it."""
        ...

    def token_bytes(self, token: int, /) -> bytes: ...


class Engine(Protocol):
    @property
    def model_name(self) -> str: ...
    @property
    def max_context(self) -> int: ...
    @property
    def sampling(self) -> Mapping[str, Any]:
        """What a chat is sampled with where its request does not say, by the names of SamplingParams."""
        ...

    @property
    def healthy(self) -> bool: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def prepare(self) -> None:
        """Called before the first request: makes what that would wait for."""
        ...

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, n: int, priority: int, salt: str, sink: Callable[[Any], None]
    ) -> Any:
        """Returns a handle without waiting for a forward; `sink` gets an `Output` at a time, from the engine's thread. If it
        raises, the request is cancelled. Requests of different `salt` share nothing of the prefix cache.

        Raises ValueError for what the client can mend, QueueFullError when the queue is full, and RuntimeError when the engine
        takes no more requests.
        """
        ...

    def cancel(self, handle: Any) -> None:
        """Ends what of the request still runs."""
        ...

    def stats(self) -> Stats: ...
