"""Turns a model and checked options into the parts of an engine: loads the model, chooses its forward, and builds the loop.

`initialize` has checked the options. `source` finds the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from slipstream.inference import generic, outputs, precision, trained
from slipstream.inference.adapters import Opener, opener
from slipstream.inference.config import ModelPart
from slipstream.inference.core import Runner
from slipstream.inference.cross_encoder import CrossEncoder
from slipstream.inference.draft_model import FEW, MOST, DraftModel
from slipstream.inference.embedding import EmbeddingEngine, Pooling
from slipstream.inference.engine import Engine
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.gguf_file import open_gguf, read_gguf
from slipstream.inference.load import LoadedModel, is_config, load
from slipstream.inference.models import ids_of
from slipstream.inference.native import NativeDecoder
from slipstream.inference.on_disk import WeightMemory
from slipstream.inference.ranks import ServingRanks
from slipstream.inference.runner import ON_NATIVE, Opened, Sizes, open_forward, open_generic
from slipstream.inference.scheduler import MAX_RUNNING, budget_of
from slipstream.inference.source import find_source, given_tokenizer, name_of, sampling_of, sparse_mode, tokenizer_of
from slipstream.inference.text import Tokenizer
from slipstream.inference.update import UpdateTarget
from slipstream.inference.weights import leaves
from slipstream.ops.matrices import Int4, KQuant
from slipstream.ops.pages import give_back_freed
from slipstream.ops.team import MAX_THREADS
from slipstream.parallel.inferred import compare, cut, example_inputs, needs_trial, try_out
from slipstream.quantized.packed import BLOCKS, PackedLinear
from slipstream.world.extras import needs
from slipstream.world.watch import PeerLostError

logger = logging.getLogger(__name__)

_NOT_YET = "this engine was opened from a configuration and has no weights yet: call update_weights()"
_ON_DISK = "its experts are on disk; open it without expert_cache_bytes"
_LAYERS_ON_DISK = "layers of it are on disk; open it without weights_bytes and weights_folder"
_ONCE = "transformers' modules are quantized once, when the model is opened; open it in a float dtype"
_BLOCKS = "the blocks of its file have another form; open it with dtype=, or open the unquantized model"
_SPLIT = "it is split over processes; open it again from the new weights"
_EMBEDS = "models that embed texts take no new ones; open it again from them"
_ADAPTERS = "they need the native kernels of one process on a CPU, and here it is {}; merge one into the model, and serve that"
_FOLLOWS = "rank {} computes for rank 0, which answers: call it there, `if engine.leads:`"
_SHARED = "it reads the live model's own tensors on the GPU; open it from a folder, or from the model's configuration"


def open_runner(
    model: Any, sizes: Sizes, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> Runner:
    """Load a decoder and choose its forward, for a caller that composes the batches itself (no loop). Starts `sizes.ranks`. Raises
    what `init_inference` raises, and ValueError for a model without weights or without a head."""
    place, threads = _place(device, sizes.threads, sizes.ranks)
    source = find_source(model)
    if is_config(source):
        raise ValueError(f"a {type(source).__name__} has no weights; give the model or its folder")
    served = _serve(source, precision.parse_dtype(dtype), place, BLOCKS[0], sizes._replace(threads=threads), {})
    if served.embeds:
        raise ValueError(f"{model} has no head, so it computes no logits; slipstream.init_inference embeds texts with it")
    return served.forward.runner


def open_engine(model: Any, *, ep_size: int = 1, moe_tp_size: int = 1, tp_size: int = 1, **options: Any) -> InferenceEngine:
    budget = budget_of(options.get("token_budget"), options.get("max_running", MAX_RUNNING))
    part = ModelPart(ep_size=ep_size, moe_tp_size=moe_tp_size, tp_size=tp_size)
    if part.size == 1:
        return InferenceEngine(*assemble(model, ranks=None, **options))
    ranks = ServingRanks(part, max_rows=budget)
    try:
        return InferenceEngine(*assemble(model, ranks=ranks, **options))
    except BaseException as error:
        ranks.fail_opening(error)
        with suppress(PeerLostError):
            ranks.close()
        raise


class _Vectors(NamedTuple):
    """How a model that embeds texts does it."""

    pooling: Pooling
    classifier: CrossEncoder | None
    vocab_size: int

    @classmethod
    def read(cls, source: Any, vocab_size: int, options: Mapping[str, Any]) -> _Vectors:
        """`options`: those that apply only to models that generate. Raises ValueError for them, and for unsupported files."""
        if given := [option for option, value in options.items() if value is not None]:
            raise ValueError(f"{name_of(source)} embeds texts, it does not generate: leave out {', '.join(given)}")
        pooling = Pooling.read(source if isinstance(source, Path) else None)
        return cls(pooling, CrossEncoder.read(source), vocab_size)


class _Ready(NamedTuple):
    forward: Opened
    target: UpdateTarget | str  # what `update_weights` overwrites, or the reason that it cannot
    weights: str  # for the engine's description
    module: Callable[[], torch.nn.Module] | str  # for `InferenceEngine.module`, or the reason that there is none
    ends: tuple[int, ...]
    metadata: Mapping[str, Any]  # of a GGUF file; else empty
    embeds: _Vectors | None = None  # None: a decoder
    open_adapter: Opener | str = _ADAPTERS.format("transformers' code runs this model")

    @property
    def dtype(self) -> str:
        """`weights` without the parenthesized reason."""
        return self.weights.partition(" (")[0]


class Assembled(NamedTuple):
    """The arguments of `InferenceEngine`. No thread runs yet: `InferenceEngine` starts the engine."""

    engine: Engine | EmbeddingEngine
    description: str
    target: UpdateTarget | str
    module: Callable[[], torch.nn.Module] | str
    ranks: ServingRanks | None = None
    release: Callable[[], object] = bool
    dtype: str = ""


def assemble(
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
    """Load the model, choose the forward and build the loop. `replicas`: how many processes on this host load a model from the same
    memory. `loop`: the other arguments of `Engine`, and `draft`, a model."""
    name, source, kind = model_name or name_of(model), find_source(model), precision.parse_dtype(dtype)
    if group_size is not None and (kind != "int4" or group_size not in BLOCKS):
        raise ValueError(f'group_size is {group_size} with dtype "{kind}"; it needs dtype="int4", and is 32, 64 or 128')
    group, (place, threads) = group_size or BLOCKS[0], _place(device, threads, ranks)
    passed_tokenizer = None if tokenizer is None else given_tokenizer(tokenizer)
    shared: dict[str, Any] = {"ranks": ranks, "replicas": replicas, "memory": memory}
    sizes = Sizes(kv_cache_bytes, max_running or MAX_RUNNING, max_context, threads, expert_cache_bytes, **shared)
    _check_layers_on_disk(sizes, source, place)
    if isinstance(source, torch.nn.Module) and outputs.gives_outputs_only(source):
        loop |= {"max_context": max_context, "max_running": max_running, "kv_cache_bytes": kv_cache_bytes, "tp_size": ranks}
        return _outputs(source, name, kind, place, group, loop | {"tokenizer": tokenizer, "expert_cache_bytes": expert_cache_bytes})
    others = loop | {"max_running": max_running, "kv_cache_bytes": kv_cache_bytes, "expert_cache_bytes": expert_cache_bytes}
    served = _serve(source, kind, place, group, sizes, others)
    give_back_freed()
    own_tokenizer, runner = passed_tokenizer or tokenizer_of(source, served.metadata), cast("Any", served.forward.runner)
    if mode := sparse_mode(source):
        logger.warning("%s was trained with block-sparse attention (mode %r), and is served with all scores", name, mode)
    if served.embeds is not None:
        return _embedding(served, served.embeds, own_tokenizer, name, ranks)
    drafted = _add_draft(loop, runner.vocab_size, own_tokenizer, place, sizes)
    engine = Engine(
        runner,
        own_tokenizer,
        max_running=sizes.max_running,
        end_ids=served.ends,
        model_name=name,
        sampling=sampling_of(source, served.metadata),
        unavailable=_NOT_YET if is_config(source) else _leader_of(ranks),
        expert_use=served.forward.expert_use,
        open_adapter=served.open_adapter,
        **loop,
    )
    sizes_text = f"cache of {runner.num_blocks * runner.block_size:,} tokens, context of {engine.max_context:,}"
    description = f"{name}: {served.weights}, {served.forward.forward}, {sizes_text}{drafted}"
    if ranks is not None:
        ranks.start(runner.follow, engine.fail)
    return Assembled(engine, description, served.target, served.module, ranks, served.forward.close, served.dtype)


def _embedding(served: _Ready, embeds: _Vectors, tokenizer: Tokenizer | None, name: str, ranks: ServingRanks | None) -> Assembled:
    runner, (pooling, classifier, vocab_size) = cast("Any", served.forward.runner), embeds
    vectors = EmbeddingEngine(
        runner, tokenizer, pooling, vocab_size=vocab_size, model_name=name, classifier=classifier, closed=_leader_of(ranks)
    )
    does = "embeds texts" if classifier is None else "scores pairs"
    description = f"{name}: {served.weights}, {served.forward.forward}, {does} of {vectors.max_context:,} tokens"
    if ranks is not None:
        ranks.start(runner.follow, vectors.fail)
    return Assembled(vectors, description, _EMBEDS, served.module, ranks, dtype=served.dtype)


def _leader_of(ranks: ServingRanks | None) -> str:
    """The reason that this process does not answer requests (it follows the first one), or "" if it does."""
    return _FOLLOWS.format(ranks.index) if ranks and ranks.index else ""


def _check_layers_on_disk(sizes: Sizes, source: Any, place: torch.device) -> None:
    """Raise ValueError, before anything is read, for options that weights_bytes and weights_folder do not support."""
    if sizes.memory is None:
        return
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


def _outputs(model: torch.nn.Module, name: str, kind: str, place: torch.device, group: int, others: Mapping[str, Any]) -> Assembled:
    """An engine that only computes a module's outputs. `others`: options that apply only to models that generate or embed."""
    if given := [option for option, value in others.items() if value is not None]:
        raise ValueError(f"{name} gives outputs, it neither generates nor embeds: leave out {', '.join(given)}")
    module = outputs.opened(model, kind, place, group)
    packed = sum(isinstance(layer, PackedLinear) for layer in module.modules())
    weights = "as it is" if kind in ("auto", "stored") else precision.short(kind)
    description = f"{name}: {weights}, outputs only{f', {packed} linear layers by kernels' if packed else ''}"
    engine: Any = outputs.OutputsEngine(name)
    return Assembled(engine, description, _ONCE.replace("transformers' modules are", "it is"), lambda: module)


def _add_draft(loop: dict[str, Any], vocab_size: int, tokenizer: Tokenizer | None, place: torch.device, sizes: Sizes) -> str:
    """Open the draft model `loop["draft"]`, if any, and replace it by a `DraftModel`. Returns text for the engine's description."""
    if (draft := loop.pop("draft", None)) is None:
        return ""
    opened = _draft(draft, vocab_size, tokenizer, place, sizes)
    loop["draft"] = DraftModel(opened.runner, vocab_size, loop.pop("num_draft", MOST))
    return f", drafts by {name_of(draft)}: {opened.forward}"


def _draft(draft: Any, vocab_size: int, tokenizer: Tokenizer | None, place: torch.device, sizes: Sizes) -> Opened:
    """The forward of a draft model, in the precision of its weights. Raises ValueError unless the vocabularies are equal."""
    if place.type != "cpu" or sizes.ranks:
        where = "the model is cut over processes" if sizes.ranks else f"the model runs on {place}"
        raise ValueError(f"draft needs a CPU and one process, and here {where}; leave it out")
    source = find_source(draft)
    if is_config(source):
        raise ValueError(f"draft is a {type(source).__name__}, which has no weights; give the model or its folder")
    served = _serve(source, precision.parse_dtype(None), place, BLOCKS[0], Sizes(None, FEW, None, sizes.threads), {})
    if served.embeds:
        raise ValueError(f"draft is {name_of(draft)}, which embeds texts and generates none; give a small decoder")
    own, size = tokenizer_of(source, served.metadata), served.forward.runner.vocab_size
    if own is None or tokenizer is None:  # without tokenizers compare the sizes; with them the sizes may differ by padding
        if size != vocab_size:
            raise ValueError(f"draft has {size:,} tokens, and the model {vocab_size:,}; give one with the same vocabulary")
        return served.forward
    tokens, draft_tokens = ({number: text for text, number in one.backend.get_vocab().items()} for one in (tokenizer, own))
    for number, text in sorted(tokens.items()):
        if draft_tokens.get(number, text) != text:
            raise ValueError(
                f"token {number} is {text!r} to the model and {draft_tokens[number]!r} to the draft {name_of(draft)}; "
                "give one with the same vocabulary"
            )
    return served.forward


def _place(device: torch.device | str | None, threads: int | None, ranks: ServingRanks | None) -> tuple[torch.device, int | None]:
    """The device to run on, and the threads of the native forward (None: as many as torch has)."""
    place = _device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if threads is not None:
        if place.type != "cpu":
            raise ValueError(f'threads is {threads}, but the model runs on {place}; leave it out, or give device="cpu"')
        torch.set_num_threads(threads)  # for loading and quantizing, and for forwards by torch
    if place.type == "cuda":
        return _gpu(place, ranks), threads
    if ranks is not None:
        ranks.compute_on(place)
        threads = threads or min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // ranks.neighbors))
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    return place, threads


def _serve(source: Any, kind: str, place: torch.device, group: int, sizes: Sizes, others: Mapping[str, Any]) -> _Ready:
    """Load the model, with Slipstream's forward if it supports the model, else with transformers'. Collective with ranks. `others`:
    options that apply only to models that generate. Raises ValueError before the forward takes memory."""
    ranks = sizes.ranks
    options: dict[str, Any] = {"by_layer": sizes.memory is not None}
    options |= {"part": ranks.part, "devices": ranks.num_devices} if ranks else {}
    read = partial(load, source, dtype=kind, group_size=group, device=place, **options)
    try:
        equal = {"device": _kind_of(place), "max_running": sizes.max_running, "max_context": sizes.max_context}
        loaded = ranks.together(read, **equal) if ranks else read()
    except UnsupportedModel as error:
        _check_transformers_serves(sizes, error)
        return _serve_by_transformers(source, kind, place, group, sizes)
    embeds = None if loaded.config.has_head else _Vectors.read(source, loaded.config.vocab_size, others)
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
        target=fixed or UpdateTarget.decoder(loaded.config, loaded.weights),
        weights=weights + (f" ({loaded.opening.why})" if loaded.opening.why else ""),
        module=_LAYERS_ON_DISK if sizes.memory else _module(source, "blocks" if blocks else loaded.opening.kind, place, group),
        ends=loaded.config.end_ids,
        metadata=loaded.gguf,
        embeds=embeds,
        open_adapter=_opener(loaded, forward, ranks),
    )


def _blocks(loaded: LoadedModel) -> str:
    """Text for the description: the matrices keep the file's quantization."""
    kept = [m for _, m in leaves(loaded.weights) if not isinstance(m, torch.Tensor)]
    bits = {m.bits if isinstance(m, KQuant) else 4 if isinstance(m, Int4) else 8 for m in kept}
    return f"{' and '.join(f'{one}-bit' for one in sorted(bits))} blocks as stored, else " if bits else ""


def _opener(loaded: LoadedModel, forward: Opened, ranks: ServingRanks | None) -> Opener | str:
    """A function that opens adapters, or the reason that they are not served."""
    if ranks is None and isinstance(forward.runner, NativeDecoder):
        return opener(loaded.config, loaded.dtype)
    return _ADAPTERS.format("a model over processes" if ranks else forward.forward)


def _serve_by_transformers(source: Any, kind: str, place: torch.device, group: int, sizes: Sizes) -> _Ready:
    live = _transformers_model(source, kind, place, group, sizes.ranks)
    generic.check_context(live, sizes.max_context)
    return _Ready(
        forward=open_generic(live, sizes),
        target=_SPLIT if sizes.ranks else _ONCE if kind in precision.QUANTIZED else UpdateTarget.module(live),
        weights=_weights_text(kind, live.dtype),
        module=_module(source, kind, place, group),
        ends=ids_of(getattr(live.generation_config if live.can_generate() else live.config, "eos_token_id", None)),
        metadata=read_gguf(source).metadata if isinstance(source, Path) and source.is_file() else {},
    )


def _check_transformers_serves(sizes: Sizes, error: Exception) -> None:
    """Raise ValueError for options that a model run by transformers cannot honor. `error`: why Slipstream's forward is not used."""
    if sizes.expert_nbytes or sizes.memory:
        raise ValueError(f"{ON_NATIVE} need the native kernels: {error}") from error
    if sizes.ranks is not None and sizes.ranks.part.ep_size * sizes.ranks.part.moe_tp_size > 1:
        raise ValueError(f"ep_size and moe_tp_size do not cut transformers' code, which tp_size does: {error}") from error


def _cut(live: Any, ranks: ServingRanks) -> None:
    """Cut a transformers model in place, by its own tensor-parallel plan or an inferred one. Collective. Raises ValueError."""
    inputs = example_inputs(live)
    trial = try_out(live, ranks.axis, (), inputs, {}) if needs_trial(live) and inputs is not None else None
    if (exchange := cut(live, ranks.axis, trial, ranks.exchange(live.device))) is not None and trial is not None:
        compare(live, trial, exchange)


def _module(source: Any, kind: str, place: torch.device, group_size: int) -> Callable[[], torch.nn.Module] | str:
    """As `_Ready.module`. `kind`: of `precision.DTYPES`, or "blocks"."""
    if kind in (*precision.QUANTIZED, "blocks"):
        form = "the blocks of their file" if kind == "blocks" else kind
        return f"its weights are kept in {form}, for generating only; open the model with dtype bf16, fp16 or fp32"
    if is_config(source):
        return "it was opened from a configuration; open the model or its folder"
    return partial(_transformers_model, source, kind, place, group_size)


def _device(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = torch.device("meta")  # the caller rejects it
    if place.type == "cpu" and not place.index:
        return torch.device("cpu")
    if place.type != "cuda":
        raise ValueError(f'device is {str(device)!r}; give "cpu", "cuda", or "cuda:1" for the second GPU')
    return place


def _weights_text(kind: str, dtype: torch.dtype) -> str:
    return kind if kind in precision.QUANTIZED else precision.short(str(dtype).removeprefix("torch."))


def _gpu(place: torch.device, ranks: ServingRanks | None) -> torch.device:
    """Resolve "cuda" to a numbered GPU. With ranks, each process of a host takes the next GPU that it sees (always the first, if
    the launcher shows each process only one). Else it is the current one: that is a thread-local setting, and another thread runs
    the model. Collective with ranks."""
    count = torch.cuda.device_count()
    if (place.index or 0) >= count:
        raise ValueError(f'device is {place}, and torch sees {count} GPUs here; give device="cpu"')
    numbered = place.index is not None
    if ranks is None:
        return place if numbered else torch.device("cuda", torch.cuda.current_device())
    own = place if numbered else torch.device("cuda", ranks.place % count)
    ranks.compute_on(own)
    if not (ranks.have_a_device_each or numbered):
        share = 'with device="cuda:0" they share the first, slowly'
        raise ValueError(f"{ranks.neighbors} processes of this host need a GPU each, and torch sees {count} in one: {share}")
    return own


def _kind_of(place: torch.device) -> str:
    """The GPU's product name, or the type of another device: two devices with the same name compute alike."""
    return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type


def _transformers_model(source: Any, kind: str, place: torch.device, group_size: int, ranks: ServingRanks | None = None) -> Any:
    """Load a transformers model for a model that `TransformerConfig` cannot describe. With `ranks`, load only this process's part;
    the call is then collective. Raises UnsupportedModel."""
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
        if dtype is not None and not quantized:
            generic.cast(own, dtype)
    if ranks is not None:
        _cut(own.to(place), ranks)  # cut first, then quantize only this process's part
    return (generic.quantize_model(own, kind, group_size=group_size) if quantized else own).to(place)
