"""The interface between the server and its engine. `slipstream.inference.engine.Engine` implements it; tests use fakes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from slipstream.inference.core import SamplingParams
from slipstream.inference.engine import Output
from slipstream.inference.stats import Stats


class ServedTokenizer(Protocol):
    def encode(self, text: str, *, special: bool = True, max_tokens: int | None = None) -> list[int]:
        """May raise text.TooLongError if the text has more than `max_tokens` tokens, and should if encoding is slow."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template reads `tools`."""
        ...

    @property
    def template(self) -> str:
        """The source of the chat template; "" if there is none."""
        ...

    @property
    def variables(self) -> Collection[str]:
        """The variables that the chat template reads."""
        ...

    @property
    def marks(self) -> Mapping[str, int]:
        """The tokens that a grammar cannot write as text, by their text."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation, to be encoded with special=False. Raises ValueError, with a message for the client, if the
        chat template rejects it."""
        ...

    def token_bytes(self, token: int, /) -> bytes: ...


class ServedEngine(Protocol):
    @property
    def model_name(self) -> str: ...
    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that requests may use."""
        ...

    @property
    def max_context(self) -> int: ...
    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling defaults of chats: fields of SamplingParams that a request leaves out."""
        ...

    @property
    def healthy(self) -> bool: ...
    @property
    def tokenizer(self) -> ServedTokenizer | None: ...

    def prepare(self) -> None:
        """Called before the first request, to do the work that request would otherwise wait for."""
        ...

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        n: int,
        priority: int,
        salt: str,
        tenant: str,
        adapter: str,
        sink: Callable[[Output], None],
    ) -> Any:
        """Queue a request and return its handle, without waiting for a forward.

        The engine's thread calls `sink` with one `Output` at a time; if `sink` raises, the request is cancelled. Only
        requests of the same `salt` and `adapter` share the prefix cache, and tenants share the engine evenly. Raises
        ValueError for an invalid request, QueueFullError if the queue is full, and RuntimeError if the engine accepts no more
        requests.
        """
        ...

    def load_adapter(self, name: str, folder: str | os.PathLike[str], *, replace: bool) -> None:
        """Raises ValueError, with a message for the client, as `unload_adapter` does."""
        ...

    def unload_adapter(self, name: str) -> None: ...

    def cancel(self, handle: Any) -> None:
        """End the request's unfinished sequences."""
        ...

    def stats(self) -> Stats: ...
