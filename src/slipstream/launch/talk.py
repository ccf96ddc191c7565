"""`slipstream generate`, `chat`, `serve` and `engine`: run a model from the command line.

Output streams to stdout, everything else goes to stderr. Ctrl-C stops the generation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.launch import cores
from slipstream.launch.followers import following

if TYPE_CHECKING:
    from slipstream.inference import Delta, InferenceEngine

__all__ = ["chat", "engine", "generate", "serve"]

Messages = list[dict[str, str]]

_OPTION = {"adapters": "--lora-modules", "tp_size": "--tp"}  # those whose option has another name
LEAST_SECRET = 16  # bytes of the secret of `engine`; an eavesdropper could guess a short one
_HELP = "Ctrl-C stops an answer, /new starts a new chat, /help shows this help, Ctrl-D quits"
_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "seed", "ignore_eos"),
)
_LOADING = (
    *("dtype", "group_size", "device", "threads", "tokenizer", "kv_cache_bytes", "expert_cache_bytes", "weights_bytes"),
    *("weights_folder", "max_context"),
    *("max_running", "max_waiting", "token_budget", "token_interval", "num_draft", "draft", "model_name", "tp_size"),
)
_SERVING = (
    *("strict_fields", "access_log", "otlp_traces", "share_prefixes", "lora_root"),
    *("max_body_bytes", "max_output_tokens"),
)


def generate(options: argparse.Namespace) -> int:
    """Complete all prompts in one batch and print the outputs in the order of the prompts, streaming the first unfinished one."""
    from slipstream.inference import GenerationError

    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat; add it, or put the text into the prompt")
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompts]
    if not all(prompts):
        raise ValueError(f"prompt {prompts.index('') + 1} of {len(prompts)} is empty")
    sampling = _sampling(options)
    if options.json_schema is not None:
        sampling["json_schema"] = _schema(options.json_schema)
    with _engine(options) as engine:
        if options.chat:
            prompts = [engine.chat_prompt([*_system(options), _user(prompt)]) for prompt in prompts]
        started = time.perf_counter()
        try:
            num_tokens = _print_in_order(engine.generate(prompts, stream=True, **sampling), len(prompts))
        except KeyboardInterrupt:
            print()
            return 130
        except GenerationError as error:
            _note(f"slipstream generate: {error}")
            return 1
        if options.stats:
            seconds = time.perf_counter() - started
            _note(f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")
    return 0


def chat(options: argparse.Namespace) -> int:
    """Chat in the terminal. A turn that fails leaves the conversation unchanged."""
    from slipstream.inference import GenerationError, recommended

    with suppress(ImportError):
        import readline  # noqa: F401  # adds line editing and history to input()
    explicit = _sampling(options)
    with _engine(options) as engine:
        defaults = engine.engine.sampling or recommended.DEFAULTS
        sampling = {**defaults, **explicit}
        _note(f"sampling with {recommended.describe({name: sampling[name] for name in defaults})}")
        messages = _system(options)
        engine.chat_prompt([*messages, _user("Hello")])  # raises now if the chat template is missing or rejects the roles
        _note(_HELP)
        while engine.engine.healthy:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                _note("\nCtrl-D quits")
                continue
            if line == "/new":
                messages = _system(options)
            elif command := re.match(r"/\w*(?=\s|$)", line):  # but not /a/path
                _note(_HELP if line == "/help" else f"unknown command {command[0]}: {_HELP}")
            elif line:
                try:
                    messages = _turn(engine, [*messages, _user(line)], sampling)
                except (ValueError, GenerationError) as error:
                    _note(f"slipstream chat: {error}")
    return 1


def serve(options: argparse.Namespace) -> int:
    """Serve OpenAI's API and the chat page until SIGTERM, then let running requests finish. Returns 1 if the engine dies."""
    keys = _api_keys(options, os.environ)
    priority_keys = (
        [] if options.priority_keys is None else _keys(f"--priority-keys {options.priority_keys}", options.priority_keys)
    )
    _certificate(options.tls_cert, options.tls_key)
    if options.lora_root is not None and not os.path.isdir(options.lora_root):
        raise ValueError(f"--lora-root is {options.lora_root!r}, but there is no such folder")
    if options.engine_tls_ca is not None and not any(one.engines for one in (options, *options.models)):
        raise ValueError("--engine-tls-ca is for engines on other hosts; add --engines, or leave it out")
    with ExitStack() as stack:
        sockets = _bound(options.host, options.port, stack)
        from slipstream.inference import recommended, server, settle

        server.check(options.cors_origin, options.otlp_traces)
        try:
            on_demand = len(options.models) > 1 or (options.max_loaded or options.max_loaded_bytes) is not None
            engine = (_several if on_demand else _served)(options, stack)
        except server.ReplicaError as error:
            _note(f"slipstream serve: {error}")
            return 1
        if engine.sampling:
            _note(f"sampling defaults of chats: {recommended.describe(engine.sampling)}")
        for listener in sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections of a previous server may linger
        settle()
        try:
            server.serve(
                engine,
                sockets=sockets,
                api_keys=keys,
                priority_keys=priority_keys,
                **{name: getattr(options, name) for name in _SERVING},
                cors_origins=options.cors_origin,
                tls=None if options.tls_cert is None else (options.tls_cert, options.tls_key),
                request_timeout_s=options.request_timeout,
                drain_timeout_s=options.drain_timeout,
            )
        except server.DeadEngineError as error:
            _note(f"slipstream serve: {error}")
            return 1
    return 0


def engine(options: argparse.Namespace) -> int:
    """Run a model for servers on other hosts until SIGTERM, then let running requests finish. Returns 1 if the engine dies."""
    secret, certificate = _secret(options, os.environ), _certificate(options.tls_cert, options.tls_key)
    with ExitStack() as stack:
        sockets = _bound(options.host, options.port, stack)
        from slipstream.inference import Listener, settle

        opened = stack.enter_context(_engine(options))
        listener = Listener.of(opened, options.model, secret, certificate)
        settle()

        def drain(number: int, frame: object) -> None:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, lambda number, frame: listener.stop())
            listener.drain()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, drain)
        host, port = sockets[0].getsockname()[:2]
        print(f"Slipstream's engine listens on {f'[{host}]' if ':' in host else host}:{port}", flush=True)
        listener.run(sockets, options.drain_timeout)
        if not opened.engine.healthy:
            _note("slipstream engine: the engine failed permanently; see the log, and restart the process")
            return 1
    return 0


def _certificate(cert: str | None, key: str | None) -> Any:
    """Load the certificate before the model. Raises ValueError for unusable files."""
    if cert is None:
        if key is not None:
            raise ValueError("--tls-key is given without --tls-cert; add the certificate")
        return None
    from slipstream.inference import tls

    try:
        return tls.Certificate(tls.engine_context(cert, key), cert, key)
    except OSError as error:
        files = f"--tls-cert {cert}" + ("" if key is None else f", --tls-key {key}")
        raise ValueError(f"{files}: {error.strerror}; they must be a certificate and its key, in PEM") from None


def _secret(options: argparse.Namespace, environment: Mapping[str, str]) -> bytes:
    """The secret that servers and engines on other hosts share. Raises ValueError if it is missing or short."""
    source, text = "SLIPSTREAM_ENGINE_SECRET", environment.get("SLIPSTREAM_ENGINE_SECRET", "")
    if options.engine_secret_file is not None:
        source = f"--engine-secret-file {options.engine_secret_file}"
        try:
            text = Path(options.engine_secret_file).read_text()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{source}: {error}") from error
    if len(secret := text.strip().encode()) < LEAST_SECRET:
        problem = f"{source} has {len(secret)} bytes" if secret else "there is none"
        raise ValueError(
            f"servers and engines on other hosts need a common secret of at least {LEAST_SECRET} bytes, and {problem}: "
            "openssl rand -hex 32 > FILE, and --engine-secret-file FILE on all hosts"
        )
    return secret


def _api_keys(options: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """The API keys of all sources. Raises ValueError if a source is set but empty: the server would accept every client."""
    keys = list(options.api_key)
    if (name := "SLIPSTREAM_API_KEYS") in environment:
        keys += _stripped(name, environment[name].split(","))
    if options.api_key_file is not None:
        keys += _keys(f"--api-key-file {options.api_key_file}", options.api_key_file)
    return keys


def _keys(source: str, file: str) -> list[str]:
    """The keys in a file, one per line; a line that begins with # is a comment."""
    try:
        return _stripped(source, (line for line in Path(file).read_text().splitlines() if not line.lstrip().startswith("#")))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{source}: {error}") from error


def _stripped(source: str, entries: Iterable[str]) -> list[str]:
    if not (stripped := [key.strip() for key in entries if key.strip()]):
        raise ValueError(f"{source} contains no key; add one, or leave it out to serve without authentication")
    return stripped


def _bound(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """Bind a socket to each address of the host before the model loads, so that no other process takes the port meanwhile.

    They refuse connections until the server listens. Port 0: a free one, the same on all addresses. Raises ValueError if an address
    cannot be bound.
    """
    sockets = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sockets.append(bound := stack.enter_context(socket.socket(family, kind, protocol)))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that has just ended is free
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own socket
            bound.bind((address[0], port, *address[2:]))
            port = bound.getsockname()[1]
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else another process could bind too, and listen first
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen on {host}, port {port}: {reason}; set another --host or --port") from error
    return sockets


def _served(options: argparse.Namespace, stack: ExitStack) -> Any:
    """The engine of a server: in this process, or several in processes of their own."""
    options = _with_own(options, options.models[0])
    if options.replicas is None and options.engines is None:
        from slipstream.inference import handover

        engine = stack.enter_context(_engine(options))
        if options.weights_socket is not None:
            stack.enter_context(handover.Receiver(engine, options.weights_socket))
        return engine.engine
    if options.tp_size is not None and options.replicas is not None:
        raise ValueError("--tp cuts one model over processes, and --replicas starts several of it; leave out one of the two")
    if options.weights_socket is not None:
        raise ValueError("--weights-socket needs the engine in the server's process; leave --replicas and --engines out")
    from slipstream.inference import server

    started, arguments, spare = time.perf_counter(), _arguments(options), stack.enter_context(server.Spare())
    others = _others(options, arguments)
    router = stack.enter_context(server.Router.local(options.model, arguments, _cores(options), spare, others=others).open())
    number = f"{len(router.engines)} x " if len(router.engines) > 1 else ""
    _note(f"{number}{router.description}; ready in {time.perf_counter() - started:.1f} s")
    return router


def _others(options: argparse.Namespace, arguments: Mapping[str, Any]) -> list[Any]:
    """The engines on other hosts. Raises ValueError for options of engines if all engines are there."""
    if options.engines is None:
        return []
    from slipstream.inference import server

    if own := [name for name in arguments if name not in ("tokenizer", "model_name")] if options.replicas is None else []:
        named = ", ".join(_OPTION.get(name, f"--{name.replace('_', '-')}") for name in own)
        raise ValueError(f"{named}: all engines are on other hosts (--engines); give it to slipstream engine there")
    secret, context = _secret(options, os.environ), _authorities(options.engine_tls_ca)
    return [server.EngineAddress(address=address, secret=secret, tls=context) for address in options.engines]


def _authorities(file: str | None) -> Any:
    """The authorities of engines' certificates; None: connect without TLS. Raises ValueError for an invalid file."""
    if file is None:
        return None
    from slipstream.inference import tls

    try:
        return tls.server_context(file)
    except OSError as error:
        raise ValueError(f"--engine-tls-ca {file}: {error.strerror}; it must be certificates in PEM") from None


def _with_own(options: argparse.Namespace, own: argparse.Namespace) -> argparse.Namespace:
    """The options of all models, overridden by those of one. Raises ValueError if two options name the same setting."""
    if own.name is not None and options.model_name is not None:
        raise ValueError(f"--model-name {options.model_name} and {own.name}= both name the model; leave one of them out")
    given = {name: value for name, value in vars(own).items() if value not in (None, [])}
    name = given.pop("name", options.model_name)
    return argparse.Namespace(**{**vars(options), **given, "model_name": name})


def _several(options: argparse.Namespace, stack: ExitStack) -> Any:
    """Models that are loaded at their first request, each in its own processes."""
    for name, remedy in (
        ("model_name", "write NAME=MODEL"),
        ("lora_modules", "write them into the quotes of the model that they are of: 'MODEL --lora-modules NAME=FOLDER'"),
        ("engines", "write it into the quotes of the model that it is of: 'MODEL --engines HOST:PORT'"),
        ("lora_root", "adapters are loaded at run time if there is one model"),
        ("weights_socket", "new weights need the engine in the server's process"),
    ):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is of one model, and here models are loaded on demand; {remedy}")
    from slipstream.inference import server

    spare = stack.enter_context(server.Spare())
    models = [_model(_with_own(options, own), spare) for own in options.models]
    limits = {"max_loaded": options.max_loaded, "max_bytes": options.max_loaded_bytes}
    chosen = stack.enter_context(closing(server.Models(models, **limits)))
    _note(f"{chosen.model_name}: each is loaded at its first request")
    return chosen


def _model(options: argparse.Namespace, spare: Any) -> Any:
    """One of several models, with its own options."""
    from slipstream.inference import server

    name = options.model_name or Path(options.model).name
    if options.tp_size is not None:
        raise ValueError(f"{name}: --tp cuts the one model of a server over processes; leave it out, or serve {name} alone")
    arguments = _arguments(options) | {"model_name": name}
    others = _others(options, arguments)
    cores = [list[int]()] if options.replicas is None and not others else _cores(options)
    return server.HostedModel.local(name, options.model, arguments, cores, spare, others)


def _cores(options: argparse.Namespace) -> list[list[int]]:
    """Equal shares of this process's cores, neighbors for each replica. With --threads or a GPU, replicas are not bound."""
    if options.replicas is None:
        return []
    if options.threads is not None or (options.device or "cpu") != "cpu":
        return [[] for _ in range(options.replicas)]
    own = cores.cores_of(os.sched_getaffinity(0))
    if options.replicas > len(own):
        raise ValueError(
            f"--replicas {options.replicas} is more than the {len(own)} cores of this process: start fewer, or say --threads 1"
        )
    return [[cpu for core in cores.share(own, "all", options.replicas, index) for cpu in core] for index in range(options.replicas)]


@contextmanager
def _engine(options: argparse.Namespace) -> Iterator[InferenceEngine]:
    """Load the model, with `--tp` in other processes too, and print its description and the loading time."""
    import slipstream

    started = time.perf_counter()
    arguments = _arguments(options)
    with (
        following(os.fspath(options.model), arguments, options.tp_size or 1) as opened,
        slipstream.init_inference(options.model, **arguments) as engine,
    ):
        opened()
        if not engine.leads:  # started by a launcher; closing it waits for rank 0
            engine.close()
            sys.exit()
        _note(f"{engine.description}; ready in {time.perf_counter() - started:.1f} s")
        yield engine


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `init_inference`."""
    folder = Path(options.model)
    if options.tokenizer is None and folder.is_dir() and not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json; add --tokenizer FOLDER")
    arguments = {name: value for name in _LOADING if (value := getattr(options, name, None)) is not None}
    if modules := getattr(options, "lora_modules", None):
        if len(adapters := dict(modules)) < len(modules):
            raise ValueError(f"--lora-modules has a name twice: {', '.join(name for name, _ in modules)}")
        arguments["adapters"] = adapters
    return arguments


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling arguments of `InferenceEngine.generate`. Raises ValueError for invalid ones, before a model is loaded."""
    from slipstream.inference import SamplingParams

    arguments = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    SamplingParams(**{**arguments, "stop": tuple(arguments.get("stop", ()))})
    return arguments


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _system(options: argparse.Namespace) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _schema(path: str) -> str:
    """Read a JSON schema. Raises ValueError if the file is unreadable or not JSON."""
    try:
        text = Path(path).read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--json-schema {path}: {error}") from error
    return text


def _turn(engine: InferenceEngine, messages: Messages, sampling: dict[str, Any]) -> Messages:
    """Stream the answer to the last message. Returns the conversation with it; Ctrl-C truncates the answer."""
    context, max_tokens = engine.engine.max_context, sampling.get("max_tokens", 256)
    kept, prompt = _truncate(messages, engine.chat_prompt, context - min(max_tokens, context // 4))
    if dropped := len(messages) - len(kept):
        _note(f"(the context of {context:,} tokens is full: dropped the oldest {dropped} messages; /new starts a new chat)")
    text, last = "", None
    try:
        with suppress(KeyboardInterrupt), closing(engine.generate(prompt, stream=True, **sampling)) as deltas:
            for last in deltas:
                text += last.text
                print(last.text, end="", flush=True)
    finally:
        print()
    if last is not None and last.finish_reason == "length":
        length = last.usage.completion_tokens
        reason = "raise --max-tokens" if length == max_tokens else "the context is full"
        _note(f"(truncated after {length} tokens: {reason})")
    return [*kept, {"role": "assistant", "content": text}]


def _truncate(messages: Messages, encode: Callable[[Messages], list[int]], max_tokens: int) -> tuple[Messages, list[int]]:
    """Drop the oldest turns until the conversation has at most `max_tokens` tokens; return it and its tokens.

    The system message and the last message are kept, even if they are too long.
    """
    kept, prompt = list(messages), encode(messages)
    oldest = int(messages[0]["role"] == "system")
    while len(prompt) > max_tokens and len(kept) > oldest + 1:
        del kept[oldest : oldest + 2]  # a message and its answer
        prompt = encode(kept)
    return kept, prompt


def _print_in_order(deltas: Iterable[Delta], num: int) -> int:
    """Print the outputs of `num` prompts in the prompts' order while they arrive interleaved. Returns the number of tokens."""
    pending: list[list[str]] = [[] for _ in range(num)]
    finished = [False] * num
    current = total = 0
    for delta in deltas:
        pending[delta.prompt].append(delta.text)
        total += len(delta.token_ids)
        finished[delta.prompt] = delta.finish_reason is not None
        while current < num:
            print("".join(pending[current]), end="", flush=True)
            pending[current].clear()
            if not finished[current]:
                break
            print()
            current += 1
    return total
