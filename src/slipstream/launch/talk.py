"""`slipstream generate`, `chat` and `serve`: a model from the command line.

Answers go to stdout as they come, everything else to stderr. Ctrl-C stops what is being generated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.inference import Delta, InferenceEngine

__all__ = ["chat", "generate", "serve"]

Messages = list[dict[str, str]]

_HELP = "Ctrl-C stops an answer, /new starts afresh, /help says this, Ctrl-D leaves"
_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "ignore_eos",
)
_LOADING = (
    "dtype",
    "group_size",
    "device",
    "threads",
    "tokenizer",
    "kv_cache_bytes",
    "max_context",
    "max_running",
    "max_waiting",
    "token_budget",
    "token_interval",
    "num_draft",
    "model_name",
)


def generate(options: argparse.Namespace) -> int:
    """Complete each prompt, all in one batch; they are printed in their order, the first of them live."""
    from slipstream.inference import GenerationError

    if options.system is not None and not options.chat:
        raise ValueError("--system is a conversation's; add --chat, or put the text into the prompt")
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompts]
    if not all(prompts):
        raise ValueError(f"prompt {prompts.index('') + 1} of {len(prompts)} is empty")
    sampling = _sampling(options)
    if options.json_schema is not None:
        sampling["json_schema"] = _schema(options.json_schema)
    with _engine(options) as engine:
        if options.chat:
            prompts = [engine.chat_prompt([*_system(options), _said(prompt)]) for prompt in prompts]
        started = time.perf_counter()
        try:
            usage = _print_in_order(engine.generate(prompts, stream=True, **sampling), len(prompts))
        except KeyboardInterrupt:
            print()
            return 130
        except GenerationError as error:
            print(f"slipstream generate: {error}", file=sys.stderr)
            return 1
        if options.stats:
            seconds = time.perf_counter() - started
            print(f"{usage} tokens in {seconds:.2f} s: {usage / seconds:.1f} per second", file=sys.stderr)
    return 0


def chat(options: argparse.Namespace) -> int:
    """A conversation in the terminal. What goes wrong in one turn leaves the conversation as it was."""
    from slipstream.inference import GenerationError, recommended

    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing and history
    given = _sampling(options)
    with _engine(options) as engine:
        usual = engine.engine.sampling or recommended.UNSTATED
        sampling = {**usual, **given}
        _note(f"answers are sampled with {recommended.said({name: sampling[name] for name in usual})}")
        messages = _system(options)
        engine.chat_prompt([*messages, _said("Hello")])  # a template that is missing, or refuses, says so now
        _note(_HELP)
        while engine.engine.healthy:
            try:
                said = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                _note("\nCtrl-D leaves")
                continue
            if said == "/new":
                messages = _system(options)
            elif found := re.match(r"/\w*(?=\s|$)", said):  # and not /a/path
                _note(_HELP if said == "/help" else f"there is no {found[0]} here: {_HELP}")
            elif said:
                try:
                    messages = _turn(engine, [*messages, _said(said)], sampling)
                except (ValueError, GenerationError) as error:
                    _note(f"slipstream chat: {error}")
    return 1


def serve(options: argparse.Namespace) -> int:
    """OpenAI's HTTP interface and a chat page; SIGTERM lets what runs finish. 1: the engine died, and a new process is needed."""
    keys = _api_keys(options, os.environ)
    with ExitStack() as stack:
        sockets = _bound(options.host, options.port, stack)
        from slipstream import handover
        from slipstream.inference import recommended, server

        engine = stack.enter_context(_engine(options))
        if options.weights_socket is not None:
            stack.enter_context(handover.Receiver(engine, options.weights_socket))
        if engine.engine.sampling:
            _note(f"chats are sampled with {recommended.said(engine.engine.sampling)} unless a request says otherwise")
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # to listen beside connections of the last server
        try:
            server.serve(
                engine.engine,
                sockets=sockets,
                api_keys=keys,
                share_prefixes=options.share_prefixes,
                max_body_bytes=options.max_body_bytes,
                max_output_tokens=options.max_output_tokens,
                request_timeout_s=options.request_timeout,
                drain_timeout_s=options.drain_timeout,
            )
        except server.DeadEngineError as error:
            print(f"slipstream serve: {error}", file=sys.stderr)
            return 1
    return 0


def _api_keys(options: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """From everywhere. ValueError for a place that should have keys and has none: the server would be open to everybody."""
    places: dict[str, list[str]] = {}
    if (name := "SLIPSTREAM_API_KEYS") in environment:
        places[name] = environment[name].split(",")
    if options.api_key_file is not None:
        try:
            places[f"--api-key-file {options.api_key_file}"] = Path(options.api_key_file).read_text().splitlines()
        except (OSError, ValueError) as error:
            raise ValueError(f"--api-key-file {options.api_key_file}: {error}") from error
    keys = list(options.api_key)
    for place, given in places.items():
        if not (found := [key.strip() for key in given if key.strip()]):
            raise ValueError(f"{place} has no key, and without one the server is open to everybody; leave it out if that is meant")
        keys += found
    return keys


def _bound(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """A socket for each address of the host, bound before a model is loaded and kept, so that nobody else has the port when the
    server listens. Until then, who connects is refused."""
    sockets = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(one := stack.enter_context(socket.socket(family, kind, protocol)))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, for ports of one that just ended
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own
            one.bind(address)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else another could bind too, and listen first
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"cannot listen on {host}, port {port}: {why}; give another --host or --port") from error
    return sockets


def _engine(options: argparse.Namespace) -> InferenceEngine:
    """The model, loaded; how long it took goes to stderr."""
    folder = Path(options.model)
    if options.tokenizer is None and folder.is_dir() and not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json, and a prompt here is text: add --tokenizer FOLDER")
    import slipstream

    started = time.perf_counter()
    given = {name: value for name in _LOADING if (value := getattr(options, name, None)) is not None}
    engine = slipstream.init_inference(options.model, **given)
    _note(f"{engine.description}; ready in {time.perf_counter() - started:.1f} s")
    return engine


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """As `InferenceEngine.generate` takes it. What is wrong with it is said here, before a model is loaded."""
    from slipstream.inference import SamplingParams

    given = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    SamplingParams(**{**given, "stop": tuple(given.get("stop", ()))})
    return given


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _system(options: argparse.Namespace) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _schema(path: str) -> str:
    """The text of a JSON schema's file, or ValueError."""
    try:
        text = Path(path).read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--json-schema {path}: {error}") from error
    return text


def _turn(engine: InferenceEngine, messages: Messages, sampling: dict[str, Any]) -> Messages:
    """The conversation and the answer to its last message, which is printed as it comes: all of it, or what there was at Ctrl-C."""
    context, most = engine.engine.max_context, sampling.get("max_tokens", 256)
    kept, prompt = _fitting(messages, engine.chat_prompt, context - min(most, context // 4))
    if gone := len(messages) - len(kept):
        _note(f"(the context of {context:,} tokens is full: the oldest {gone} messages are left out; /new starts afresh)")
    text, last = "", None
    try:
        with suppress(KeyboardInterrupt), closing(engine.generate(prompt, stream=True, **sampling)) as deltas:
            for last in deltas:
                text += last.text
                print(last.text, end="", flush=True)
    finally:
        print()
    if last is not None and last.finish_reason == "length":
        cut = last.usage.completion_tokens
        _note(f"(cut after {cut} tokens: " + ("--max-tokens N allows more)" if cut == most else "the context is full)"))
    return [*kept, {"role": "assistant", "content": text}]


def _fitting(messages: Messages, tokens: Callable[[Messages], list[int]], room: int) -> tuple[Messages, list[int]]:
    """A conversation without as many of its oldest turns as it takes to have at most `room` tokens, and these. The system message
    and the last message stay, also where they are too long."""
    kept, prompt = list(messages), tokens(messages)
    oldest = int(messages[0]["role"] == "system")
    while len(prompt) > room and len(kept) > oldest + 1:
        del kept[oldest : oldest + 2]  # what was said, and the answer
        prompt = tokens(kept)
    return kept, prompt


def _print_in_order(deltas: Iterable[Delta], num: int) -> int:
    """Print the texts of `num` prompts one after another, though they come at once; how many tokens they have."""
    held: list[list[str]] = [[] for _ in range(num)]
    over = [False] * num
    turn = total = 0
    for delta in deltas:
        held[delta.prompt].append(delta.text)
        total += len(delta.token_ids)
        over[delta.prompt] = delta.finish_reason is not None
        while turn < num:
            print("".join(held[turn]), end="", flush=True)
            held[turn].clear()
            if not over[turn]:
                break
            print()
            turn += 1
    return total
