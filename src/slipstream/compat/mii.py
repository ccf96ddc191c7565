"""DeepSpeed-MII's API: `pipeline` in this process, `serve` and `client` over `slipstream serve` in a separate process.

    pipe = mii.pipeline("path/to/model")
    responses = pipe(["DeepSpeed is", "Seattle is"], max_new_tokens=128)

    client = mii.serve("path/to/model", deployment_name="mine")         # in other processes: mii.client("mine")
    client("DeepSpeed is", max_new_tokens=128)[0].generated_text
    client.terminate_server()

A deployment outlives the process that started it. Its file, which only this user can read, has its address, key and process. The
distribution in compat/mii installs the package `mii`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import stat
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slipstream.compat.together import Leader
from slipstream.inference import SamplingParams, init_inference
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.options import Refused, read_options
from slipstream.world.join import init_distributed

__all__ = [
    "DeploymentNotFoundError",
    "GenerationFinishReason",
    "MIIClient",
    "MIIError",
    "MIIPipeline",
    "Response",
    "ServerError",
    "UnknownArgument",
    "client",
    "pipeline",
    "serve",
]

_START_S = 600.0  # limit for a server to load its model
_STOP_S = 90.0  # limit for a server to finish its requests
_CONNECTIONS = 64  # the most prompts that a client sends at once
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without a proxy: servers are on this machine
_NAME = re.compile(r"[\w.-]{1,100}")
_OF_PIPELINES = ("tensor_parallel", "all_rank_output")
_OF_SERVERS = {"tensor_parallel": "--tp", "replica_num": "--replicas"}  # option of a deployment -> option of `slipstream serve`
_REFUSED: Refused = {
    "replica_num": ((1, None), "a pipeline is one model; set it to 1, or start a deployment by mii.serve"),
    "replica_configs": (([], (), None), "replicas are alike; give their number as replica_num"),
    "task": (("text-generation", None), "text-generation is the task; `slipstream serve` also embeds texts"),
    "deployment_type": (("local", "LOCAL", None), "deployments are processes of this machine; examples/deploy has clusters"),
    "enable_restful_api": ((False, None), "the port has OpenAI's API and no other; send requests to /v1/completions"),
}
_NO_EFFECT = {
    **dict.fromkeys(("torch_dist_port", "zmq_port_number", "sync_debug"), "processes find each other"),
    **dict.fromkeys(("restful_api_port", "restful_api_host", "restful_processes"), "the port has OpenAI's API"),
    **dict.fromkeys(("version", "instance_type", "hostfile"), "deployments are processes of this machine"),
    "all_rank_output": "a deployment answers its clients",
    "inference_engine_config": "the engine sizes itself; slipstream.init_inference has its options",
    "profile_model_time": "/metrics of a server has the times",
    "hf_auth_token": "models are folders, nothing is downloaded",
    "device_map": "device says where the model is",
}


class MIIError(Exception):
    """Base of the errors of a deployment."""


class UnknownArgument(MIIError, ValueError):
    """An unknown option or setting."""


class DeploymentNotFoundError(MIIError):
    """No server of this name is running."""


class ServerError(MIIError, RuntimeError):
    """A server did not start, rejected a request, or has ended."""


class GenerationFinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    NONE = "none"  # of an increment that is not the last


@dataclass
class Response:
    """An answer, or an increment of one."""

    generated_text: str
    prompt_length: int  # tokens
    generated_length: int  # tokens
    finish_reason: GenerationFinishReason

    @classmethod
    def from_msg_dict(cls, msg: Mapping[str, Any]) -> Response:
        return cls(**{**msg, "finish_reason": GenerationFinishReason(msg["finish_reason"])})

    def to_msg_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return self.generated_text

    __str__ = __repr__


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """quantization_mode: int8 or int4, of the weights. dtype, device: as in `slipstream.init_inference`.

    max_length: tokens of a prompt and its answer, unless a call overrides it; at most the model's context.
    """

    model_name_or_path: str
    tokenizer: str | None = None
    max_length: int = 1024
    quantization_mode: str | None = None
    dtype: str | None = None
    device: str | None = None

    @classmethod
    def of(cls, model: str, others: Sequence[Mapping[str, Any]], more: Sequence[str] = ()) -> tuple[ModelConfig, dict[str, Any]]:
        """The config, and the options in `more`. Raises UnknownArgument, ValueError for contradictions and missing features."""
        names = [*(field.name for field in fields(cls)), *more]
        sources = [*([{"model_name_or_path": model}] if model else []), *others]
        given = read_options("mii", names, sources, refused=_REFUSED, idle=_NO_EFFECT, unknown=UnknownArgument)
        own = {name: given.pop(name) for name in more if name in given}
        if not given.get("model_name_or_path"):
            raise ValueError("no model is given; pass the folder of one")
        if given.get("quantization_mode") not in (None, "int8", "int4"):
            raise ValueError(f"quantization_mode is {given['quantization_mode']!r}; it must be None, int8 or int4")
        return cls(**given), own

    @property
    def precision(self) -> str | None:
        return self.quantization_mode or self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParams:
    """Settings of a call, with MII's defaults. max_new_tokens None: up to max_length. stop: texts that end an answer."""

    max_length: int = 1024  # of prompt and answer
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stream: bool = False
    ignore_eos: bool = False
    return_full_text: bool = False
    do_sample: bool = True
    top_p: float = 0.9
    top_k: int | None = None
    temperature: float | None = None
    stop: Sequence[str] | str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], max_length: int) -> GenerateParams:
        """Raises UnknownArgument."""
        names = [field.name for field in fields(cls)]
        return cls(**{"max_length": max_length} | read_options("generation", names, [settings], unknown=UnknownArgument))

    def most(self, num_prompt: int) -> int:
        """Tokens to generate after a prompt. Raises ValueError if none are left."""
        left = self.max_length - num_prompt
        if left < 1:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and max_length is {self.max_length}: shorten it, or raise max_length"
            )
        return left if self.max_new_tokens is None else min(left, self.max_new_tokens)

    def sampling(self, num_prompt: int) -> dict[str, Any]:
        """Under the names of SamplingParams, which are also OpenAI's and vLLM's."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        values = {
            "max_tokens": self.most(num_prompt),
            "min_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": stop,
        }
        if not self.do_sample:
            return values | {"temperature": 0.0}
        temperature = 1.0 if self.temperature is None else self.temperature
        return values | {"temperature": temperature, "top_p": self.top_p, "top_k": self.top_k or 0}


class _Generator(ABC):
    """The common part of a pipeline and a client."""

    config: ModelConfig

    def __call__(self, prompts: str | Sequence[str], **settings: Any) -> list[Response]:
        return self.generate(prompts, **settings)

    def generate(
        self, prompts: str | Sequence[str], streaming_fn: Callable[[list[Response]], object] | None = None, **settings: Any
    ) -> list[Response]:
        """Answer all prompts in one batch; `GenerateParams` lists the settings.

        streaming_fn: receives increments of the answer to a single prompt, each a list of one Response; a client's last has the
        lengths. Raises UnknownArgument for an unknown setting, ValueError for a prompt that leaves no room, RuntimeError for a
        stream of several prompts.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = GenerateParams.of(settings, self.config.max_length)
        if streaming_fn is None and not params.stream:
            return self._answers(texts, params)
        if len(texts) != 1 or streaming_fn is None:
            raise RuntimeError(f"a stream answers one prompt, to streaming_fn; here it is {len(texts)} prompts")
        whole = Response(texts[0] if params.return_full_text else "", 0, 0, GenerationFinishReason.NONE)
        for part in self._stream(texts[0], params):
            if part.generated_text or part.finish_reason is not GenerationFinishReason.NONE:
                streaming_fn([part])
            whole.generated_text += part.generated_text
            whole.prompt_length, whole.finish_reason = part.prompt_length, part.finish_reason
            whole.generated_length += part.generated_length
        return [whole]

    @abstractmethod
    def _answers(self, prompts: list[str], params: GenerateParams) -> list[Response]: ...

    @abstractmethod
    def _stream(self, prompt: str, params: GenerateParams) -> Iterator[Response]: ...


class MIIPipeline(_Generator):
    """A model in this process, or over all processes of the job, which must make the same calls."""

    def __init__(self, config: ModelConfig, tensor_parallel: int | None = None, all_rank_output: bool = False) -> None:
        """tensor_parallel: the number of processes over which the model is split; None: those that a launcher started.
        all_rank_output: all processes get the answers, else only rank 0. Raises as `slipstream.init_inference`."""
        self.config, self._all_output = config, all_rank_output
        if tensor_parallel != 1:  # one process needs no others
            init_distributed(verbose=False)
        size = tensor_parallel or (dist.get_world_size() if dist.is_initialized() else 1)
        options: dict[str, Any] = {"dtype": config.precision, "tokenizer": config.tokenizer, "device": config.device}
        options |= {"tp_size": size} if size > 1 else {}
        self._leader = Leader() if size > 1 and dist.is_initialized() else None
        with contextlib.ExitStack() as opening:
            if self._leader is not None:
                opening.callback(self._leader.close)
            self.inference_engine: InferenceEngine = init_inference(config.model_name_or_path, **options)
            opening.callback(self.inference_engine.close)
            self._open = opening.pop_all()
        self.tokenizer = self.inference_engine.tokenizer

    def generate(
        self, prompts: str | Sequence[str], streaming_fn: Callable[[list[Response]], object] | None = None, **settings: Any
    ) -> list[Response]:
        """As `_Generator.generate`. Collective over processes: rank 0 streams; the others return [] unless all_rank_output."""
        compute = partial(super().generate, prompts, streaming_fn, **settings)
        if self._leader is None:
            return compute()
        found = self._leader.answer(compute)
        return found if self._leader.leads or self._all_output else []

    def destroy(self) -> None:
        """Free the model; with several processes, the others wait for rank 0."""
        self._open.close()

    def _answers(self, prompts: list[str], params: GenerateParams) -> list[Response]:
        streams = [self._stream(prompt, params) for prompt in prompts]
        for stream in streams:
            next(stream)  # submits the prompt, so that all are in one batch
        return [_joined(prompt, list(stream), params) for prompt, stream in zip(prompts, streams, strict=True)]

    def _stream(self, prompt: str, params: GenerateParams) -> Iterator[Response]:
        ids = self.inference_engine.engine.encode(prompt)
        sampling = params.sampling(len(ids))
        context = self.inference_engine.engine.max_context
        sampling |= {"stop": tuple(sampling["stop"]), "max_tokens": min(sampling["max_tokens"], max(context - len(ids), 1))}
        deltas = self.inference_engine.generate([ids], SamplingParams(**sampling), stream=True)
        yield Response("", len(ids), 0, GenerationFinishReason.NONE)
        for delta in deltas:
            reason = GenerationFinishReason(delta.finish_reason or "none")
            yield Response(delta.text, len(ids), len(delta.token_ids), reason)


def _joined(prompt: str, parts: Sequence[Response], params: GenerateParams) -> Response:
    text = (prompt if params.return_full_text else "") + "".join(part.generated_text for part in parts)
    return Response(text, parts[-1].prompt_length, sum(part.generated_length for part in parts), parts[-1].finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A server, as described in its file."""

    name: str
    url: str
    key: str  # clients send it
    pid: int
    started: str  # start of the process in ticks since boot; distinguishes it from a later process with the same pid
    model: ModelConfig

    @classmethod
    def read(cls, name: str) -> Deployment | None:
        try:
            values = json.loads(_file(name).read_text())
        except FileNotFoundError:
            return None
        found = cls(**{**values, "model": ModelConfig(**values["model"])})
        if found.runs():
            return found
        _file(name).unlink(missing_ok=True)
        return None

    def write(self) -> None:
        with open(os.open(_file(self.name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)

    def runs(self) -> bool:
        return _start_of(self.pid) == self.started


class MIIClient(_Generator):
    """A deployment, started by this or another process."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.config = deployment, deployment.model

    def terminate_server(self) -> None:
        """End the deployment once its requests are finished. Any client can do so."""
        if self.deployment.runs():
            os.kill(self.deployment.pid, signal.SIGTERM)
            _wait(lambda: not self.deployment.runs(), _STOP_S, f"the server of {self.deployment.name} does not end")
        _file(self.deployment.name).unlink(missing_ok=True)

    def _answers(self, prompts: list[str], params: GenerateParams) -> list[Response]:
        with ThreadPoolExecutor(max(1, min(len(prompts), _CONNECTIONS))) as threads:
            return list(threads.map(lambda prompt: self._answer(prompt, params), prompts))

    def _answer(self, prompt: str, params: GenerateParams) -> Response:
        with self._post("/v1/completions", self._body(prompt, params)) as reply:
            body = json.load(reply)
        choice, usage = body["choices"][0], body["usage"]
        text = (prompt if params.return_full_text else "") + choice["text"]
        return Response(text, usage["prompt_tokens"], usage["completion_tokens"], GenerationFinishReason(choice["finish_reason"]))

    def _stream(self, prompt: str, params: GenerateParams) -> Iterator[Response]:
        body = self._body(prompt, params) | {"stream": True, "stream_options": {"include_usage": True}}
        reason = GenerationFinishReason.NONE
        with self._post("/v1/completions", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(f"{self.deployment.name}: {event['error'].get('message', event['error'])}")
                for choice in event["choices"]:
                    reason = GenerationFinishReason(choice["finish_reason"] or "none")
                    yield Response(choice["text"], 0, 0, GenerationFinishReason.NONE)
                if usage := event.get("usage"):
                    yield Response("", usage["prompt_tokens"], usage["completion_tokens"], reason)

    def _body(self, prompt: str, params: GenerateParams) -> dict[str, Any]:
        with self._post("/tokenize", {"prompt": prompt}) as reply:
            counts = json.load(reply)
        sampling = params.sampling(counts["count"])
        most = max(counts["max_model_len"] - counts["count"], 1)
        return {"model": self.deployment.name, "prompt": prompt, **sampling, "max_tokens": min(sampling["max_tokens"], most)}

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.deployment.key}"}
        request = urllib.request.Request(self.deployment.url + path, json.dumps(body).encode(), headers)
        try:
            return _DIRECT.open(request)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise ServerError(f"{self.deployment.name}: {text:.1000}") from None
        except OSError as error:
            raise ServerError(f"the server of {self.deployment.name} does not answer at {self.deployment.url}: {error}") from None


def pipeline(model_name_or_path: str = "", model_config: Mapping[str, Any] | None = None, **options: Any) -> MIIPipeline:
    """Open a model in this process, or over the processes that a launcher has started. `ModelConfig` and `MIIPipeline` list the
    options.

    Raises UnknownArgument for other options, and ValueError for options of missing features."""
    config, own = ModelConfig.of(model_name_or_path, [model_config or {}, options], _OF_PIPELINES)
    return MIIPipeline(config, **own)


def serve(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> MIIClient:
    """Start a server for a model and wait until it answers. The server outlives this process.

    Options beside those of `ModelConfig`: deployment_name (default: the model's, with -mii-deployment), port_number (default: a
    free one); tensor_parallel or replica_num: the number of processes that split one model, or hold one each.

    Raises as `pipeline`, and ServerError if the server does not start or the name is taken.
    """
    whole = dict(mii_config or {})
    sources = [whole.pop("model_config", {}), model_config or {}, whole, options]
    config, own = ModelConfig.of(model_name_or_path, sources, ("deployment_name", "port_number", *_OF_SERVERS))
    name = own.get("deployment_name") or _default_name(config.model_name_or_path)
    if not _NAME.fullmatch(name):
        raise ValueError(f"deployment_name is {name!r:.200}; it may have letters, digits, '_', '-' and '.', at most 100")
    if Deployment.read(name) is not None:
        raise ServerError(
            f"a deployment {name!r} runs already; end it by mii.client({name!r}).terminate_server(), or take another name"
        )
    processes = [text for option, flag in _OF_SERVERS.items() if own.get(option, 1) != 1 for text in (flag, str(own[option]))]
    deployment = _start(name, config, own.get("port_number", 0), processes)
    deployment.write()
    return MIIClient(deployment)


def client(model_or_deployment_name: str) -> MIIClient:
    """A client of a deployment, by its name or its model's. Raises DeploymentNotFoundError if none is running."""
    for name in (model_or_deployment_name, _default_name(model_or_deployment_name)):
        if _NAME.fullmatch(name) and (deployment := Deployment.read(name)) is not None:
            return MIIClient(deployment)
    running = sorted(file.stem for file in _folder().glob("*.json"))
    raise DeploymentNotFoundError(f"no deployment {model_or_deployment_name!r} runs; there are {', '.join(running) or 'none'}")


def _start(name: str, config: ModelConfig, port: int, more: Sequence[str]) -> Deployment:
    """Start `slipstream serve`, and wait for its address."""
    command = [sys.executable, "-m", "slipstream", "serve", config.model_name_or_path, "--model-name", name, "--port", str(port)]
    command += more
    for option, value in (("--dtype", config.precision), ("--tokenizer", config.tokenizer), ("--device", config.device)):
        command += [] if value is None else [option, value]
    key, log = secrets.token_urlsafe(24), _folder() / f"{name}.log"
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    # Not by `subprocess`, which expects to wait for its end. It has its own session, so that Ctrl-C here does not reach it.
    pid = os.posix_spawn(sys.executable, command, os.environ | {"SLIPSTREAM_API_KEYS": key}, file_actions=files, setsid=True)

    def address() -> str | None:
        found = re.search(r"^Slipstream serves (http://\S+)", log.read_text(errors="replace"), re.M)
        if found is None and _start_of(pid) is None:
            raise ServerError(f"the server of {name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
        return None if found is None else found[1]

    try:
        url = _wait(address, _START_S, f"the server of {name} has not started; {log} has its output")
    except BaseException:
        if _start_of(pid) is not None:
            os.kill(pid, signal.SIGKILL)
        raise
    return Deployment(name=name, url=url, key=key, pid=pid, started=_start_of(pid) or "", model=config)


def _wait(ready: Callable[[], Any], seconds: float, failure: str) -> Any:
    """Return the first true result of `ready`. Raises ServerError after `seconds`."""
    until = time.monotonic() + seconds
    while not (result := ready()):
        if time.monotonic() > until:
            raise ServerError(f"{failure} ({seconds:g} s)")
        time.sleep(0.05)
    return result


def _start_of(pid: int) -> str | None:
    """The start of a process in ticks since boot; None if it has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # an ended child of this process remains until it is waited for
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if facts[0] == "Z" else facts[19]


def _default_name(model: str) -> str:
    return f"{Path(model).name}-mii-deployment"


def _file(name: str) -> Path:
    return _folder() / f"{name}.json"


def _folder() -> Path:
    """The folder of deployments, which only this user can read. Raises MIIError if it belongs to another user."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-mii-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise MIIError(f"{folder} is not a folder of this user alone; remove it, or set TMPDIR to another place")
    return folder
