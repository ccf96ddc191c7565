"""`slipstream generate`, `chat` and `serve`: a model from the command line.

Answers go to stdout as they come, everything else to stderr. Ctrl-C stops what is being generated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.inference import Delta, InferenceEngine

__all__ = ["chat", "generate", "serve"]

_SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop", "seed", "ignore_eos",
)  # fmt: skip
_LOADING = (
    "dtype", "device", "threads", "tokenizer", "kv_cache_bytes", "max_context", "max_running", "max_waiting", "token_budget",
    "token_interval", "num_draft", "model_name",
)  # fmt: skip


def generate(options: argparse.Namespace) -> int:
    """Complete each prompt, all in one batch; they are printed in their order, the first of them live."""
    from slipstream.inference import GenerationError

    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompts]
    sampling = _sampling(options)
    if options.json_schema is not None:
        sampling["json_schema"] = _schema(options.json_schema)
    with _engine(options) as engine:
        if options.chat:
            prompts = [engine.chat_prompt([*_system(options), {"role": "user", "content": prompt}]) for prompt in prompts]
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
    """A conversation in the terminal. Ctrl-C stops an answer, /new starts afresh, Ctrl-D leaves."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing and history
    sampling = _sampling(options)
    with _engine(options) as engine:
        print("Ctrl-C stops an answer, /new starts afresh, Ctrl-D leaves", file=sys.stderr)
        messages = _system(options)
        while True:
            try:
                said = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\nCtrl-D leaves", file=sys.stderr)
                continue
            if said == "/new":
                messages = _system(options)
            elif said:
                messages.append({"role": "user", "content": said})
                answer = _answer(engine, messages, sampling)
                messages.append({"role": "assistant", "content": answer})


def serve(options: argparse.Namespace) -> int:
    """OpenAI's HTTP interface and a chat page; SIGTERM lets what runs finish. 1: the engine died, and a new process is needed."""
    from slipstream.inference import server

    keys = _api_keys(options, os.environ)
    with _engine(options) as engine:
        try:
            server.serve(
                engine.engine,
                host=options.host,
                port=options.port,
                api_keys=keys,
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


def _engine(options: argparse.Namespace) -> InferenceEngine:
    """The model, loaded; how long it took goes to stderr."""
    import slipstream

    started = time.perf_counter()
    given = {name: value for name in _LOADING if (value := getattr(options, name, None)) is not None}
    engine = slipstream.init_inference(options.model, **given)
    print(f"{engine.description}; ready in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return engine


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}


def _system(options: argparse.Namespace) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _schema(path: str) -> str:
    """The text of a JSON schema's file, or ValueError."""
    try:
        text = Path(path).read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--json-schema {path}: {error}") from error
    return text


def _answer(engine: InferenceEngine, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    """One answer, printed as it comes; what there is of it when Ctrl-C stops it."""
    parts: list[str] = []
    deltas = engine.generate(engine.chat_prompt(messages), stream=True, **sampling)
    try:
        for delta in deltas:
            parts.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        deltas.close()
    print()
    return "".join(parts)


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
