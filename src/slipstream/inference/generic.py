"""Runs all other transformers decoders, with transformers' code over the paged KV cache. New models need no code here.

There are two ways. The decoder compares their logits when it is created, and uses the first if they match:

- *fused*: the tokens of all requests form one long sequence. A function in transformers' attention interface lets each request
  attend to its own cached positions, with the mask that transformers defines (windows included).
- *one by one*: each request's chunk is a separate forward with a transformers `Cache` that keeps keys and values in our blocks.
  For models with their own attention code (BLOOM, Falcon) or without position ids.

Models with other state than keys and values (Mamba, hybrids, encoder-decoders) raise UnsupportedModel.

`quantize_model` replaces matrices, also those of stacked experts, by int8 or int4 ones. On CPUs, native kernels compute their
products.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.config import huggingface
from slipstream.inference.core import Batch, BatchNumbers, Chunk, PartRunner, Request, SamplingParams
from slipstream.inference.decoder import Inputs, RowSpan, add_experts, attend, inputs_of, visible
from slipstream.inference.families import UnsupportedModel
from slipstream.inference.kv_cache import HeadShape, KVCache
from slipstream.inference.models import is_encoder
from slipstream.parallel.around import class_before
from slipstream.quantized import PackedLinear, PackedMatrix
from slipstream.quantized.packed import matrix_of, named_layers, pack

logger = logging.getLogger(__name__)

_NAME = "slipstream_paged"  # in transformers' registries of attention and mask functions
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "max_sequence_length")
_UNBOUNDED = 1 << 20  # positions of models without a limit (ALiBi); memory limits them
_FAR = 9 << 10  # position at which `_fused_agrees` tests: windows, chunks and scales take effect from 8192 at the latest


def open_model(path: str | Path, dtype: torch.dtype | str = "auto") -> Any:
    """Open a folder's causal language model, or the encoder class that its configuration names, in transformers. Reads only
    safetensors and runs no code from the folder."""
    import transformers

    try:
        config = huggingface.read_config(Path(path) / "config.json")
        kind: Any = transformers.AutoModelForCausalLM
        if is_encoder(config.get("model_type")):
            kind = getattr(transformers, (config.get("architectures") or ["AutoModel"])[0], transformers.AutoModel)
        return kind.from_pretrained(path, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except Exception as error:  # transformers documents no exception types for invalid folders
        raise UnsupportedModel(f"transformers cannot open {path} as a causal language model: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@torch.inference_mode()
def cache_shapes(model: Any) -> list[HeadShape]:
    """The shape of one token's keys and values in each layer's cache. Raises UnsupportedModel."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    name = type(model).__name__
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(f"{name} attends in both directions (use_bidirectional_attention), so it cannot generate")
    if model.config.is_encoder_decoder or "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name} is not a decoder with a cache of keys and values, so it cannot be served")
    try:
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True)
    except Exception as error:  # any exception of the model's code
        raise UnsupportedModel(f"{name} fails on its first token: {_one_line(error)}") from error
    shapes = []
    for i, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModel(f"{name} keeps other state than keys and values ({type(layer).__name__} in layer {i})")
        if is_traceable_wrapper_subclass(keys):
            raise UnsupportedModel(f"{name} computes with {type(keys).__name__}, which only torch reads: give its folder")
        if keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1:
            raise UnsupportedModel(f"{name} keeps keys {list(keys.shape)} and values {list(values.shape)} in layer {i}")
        shapes.append(HeadShape(keys.shape[1], keys.shape[3], values.shape[3]))
    if not shapes:
        raise UnsupportedModel(f"{name} left its cache empty, so it cannot be served")
    return shapes


def check_context(model: Any, requested: int | None) -> None:
    """Raise ValueError if max_context exceeds the position where rope frequencies change; warn if the default is reduced."""
    name, stated = type(model).__name__, _stated_context(model)
    limit, kind = min(_rope_limits(model), default=(stated, ""))
    why = f"beyond that its rotary embedding ({kind}) depends on the length, so answers would depend on the other requests"
    if requested is not None and requested > limit < stated:
        raise ValueError(f"max_context is {requested}, but {name} is served up to {limit} positions: {why}")
    if requested is None and limit < stated:
        logger.warning("%s is served with %d of its %d positions: %s", name, limit, stated, why)


def _stated_context(model: Any) -> int:
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in _CONTEXT)
    return next((limit for limit in limits if limit), _UNBOUNDED)


def _rope_limits(model: Any) -> Iterator[tuple[int, str]]:
    """Yield (positions, rope type) for each rope whose frequencies change beyond that number of positions.

    [Note: Rotations that follow the length] transformers' "longrope" (Phi-3) and "dynamic" choose the frequencies of a whole
    forward by its largest position. Beyond their limit, a request's logits would depend on the other requests of the batch, on how
    its prompt was split, and on the length of the text when a cached prefix was computed. Up to the limit they are constant.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    for config in configs.values():
        parameters = getattr(config, "rope_parameters", None) or {}
        for p in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):  # for all layers, or per kind
            kind = p.get("rope_type") or p.get("type") or "default"
            if "dynamic" in kind:
                yield config.max_position_embeddings, kind
            elif any(key.startswith("long_") for key in p):  # long_factor; or Phimoe's long_mscale, whose type differs
                yield p.get("original_max_position_embeddings") or config.max_position_embeddings, kind


class GenericDecoder(PartRunner):
    """For a live `PreTrainedModel`, which it sets to evaluation mode. The cache must have `cache_shapes`."""

    generate = None  # it does not run several steps per call

    def __init__(self, model: Any, cache: KVCache, *, over_processes: bool = False):
        """`over_processes`: `model` is split, and the constructor is collective. Raises UnsupportedModel if it cannot run fused."""
        self.model, self.cache = model.eval(), cache
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_context = self.short_context = min([_stated_context(model), *(limit for limit, _ in _rope_limits(model))])
        self._keeps = "logits_to_keep" in (parameters := inspect.signature(model.forward).parameters)
        self._fused = "position_ids" in parameters and self._fused_agrees()
        if over_processes and not self._fused:  # one by one, only a process with non-finite values would compute again
            raise UnsupportedModel(f"{type(model).__name__} computes one request after another, so it is not cut over processes")

    @torch.inference_mode()
    def run(self, numbers: BatchNumbers) -> Tensor:
        self.cache.copy(numbers.pairs)
        inputs = inputs_of(numbers, self.cache)
        return self._forward_fused(inputs) if self._fused else self._forward_one_by_one(inputs)

    def put(self, role: str, weight: Tensor) -> None:
        """As `core.Runner.put`; roles are parameter names. Replaces the tensor, which another live model may share."""
        self.model.get_parameter(role).data = weight.clone()

    def _forward_fused(self, inputs: Inputs) -> Tensor:
        config, step = self.model.config, _GenericStep(self.cache, inputs)
        implementation, token = config._attn_implementation, _STEP.set(step)
        _register()
        config._attn_implementation = _NAME
        try:
            return self._logits(inputs.tokens, inputs.rows, _caches(self.cache, step), position_ids=inputs.positions[None])
        finally:
            config._attn_implementation = implementation
            _STEP.reset(token)

    def _forward_one_by_one(self, inputs: Inputs) -> Tensor:
        parts = []
        for span in inputs.spans:
            rows = inputs.rows[(inputs.rows >= span.begin) & (inputs.rows < span.end)] - span.begin
            logits = self._logits(inputs.tokens[span.begin : span.end], rows, _caches(self.cache, span))
            parts.append(logits if self.cache.is_finite(span.slots[span.start :]) else self._token_by_token(inputs, span, rows))
        return torch.cat(parts)

    def _token_by_token(self, inputs: Inputs, span: RowSpan, rows: Tensor) -> Tensor:
        """Compute a span again so that no token sees a later one ([Note: Values that are not finite] in `decoder`)."""
        steps = [
            RowSpan(at, at + 1, span.start + i, span.slots[: span.start + i + 1])
            for i, at in enumerate(range(span.begin, span.end))
        ]
        one = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
        logits = [self._logits(inputs.tokens[step.begin : step.end], one, _caches(self.cache, step)) for step in steps]
        return torch.cat(logits)[rows]

    def _logits(self, tokens: Tensor, rows: Tensor, cache: Any, **more: Any) -> Tensor:
        keep = {"logits_to_keep": rows} if self._keeps else {}
        logits = self.model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **keep, **more).logits[0]
        return (logits if self._keeps else logits[rows]).float()

    def _fused_agrees(self) -> bool:
        """Whether fused and one-by-one forwards give the same logits, for one request near the start of its context and one deep in
        it. Call it while all blocks are free.

        The deep one reveals effects that begin far from the start (windows, chunks, scales of thousands) and positions that leak
        between requests. Its cache is one block repeated: any keys will do.
        """
        near, far = min(6, self.max_context), min(_FAR, self.max_context)
        num_blocks = min(-(-near // self.block_size), self.num_blocks - 1)
        near = min(near, num_blocks * self.block_size)
        requests = []
        for i, (length, blocks) in enumerate(((near, list(range(num_blocks))), (far, [num_blocks] * -(-far // self.block_size)))):
            tokens = [(11 * i + 7 * j + 3) % self.vocab_size for j in range(length)]
            requests.append(Request(id=str(i), tokens=tokens, params=SamplingParams(), blocks=blocks))
        one, deep = requests
        first = Batch((Chunk(one, 0, near // 2), Chunk(deep, 0, min(self.block_size, far))), ())
        second = Batch((Chunk(one, near // 2, near), Chunk(deep, max(0, far - 3), far)), ())
        logits = []
        for self._fused in (False, True):
            try:
                self.forward(first)
                logits.append(self.forward(second))
            except (AttributeError, TypeError, ValueError, LookupError, RuntimeError):
                if not self._fused:
                    raise
                return False  # the model's code does not use the attention interface as expected
        one_by_one, fused = logits
        # Sums in another order may differ (24 layers in bf16: 0.06); a wrong mask, scale or position changes a whole row.
        limit = max(0.01, 16 * torch.finfo(self.model.dtype).eps)
        return bool(((one_by_one - fused).std(1) <= limit * one_by_one.std(1) + 1e-6).all())


# -- Inside transformers' forward ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _GenericStep:
    """The state of the current fused forward."""

    cache: KVCache
    inputs: Inputs
    layer: int = -1  # the layer that last wrote keys and values; the next attention call belongs to it


_STEP: ContextVar[_GenericStep] = ContextVar("the fused forward that is running")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: list[Tensor] | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D] -> [1, T, H, D]. Keys and values are read from our cache."""
    if unsupported := [name for name in ("s_aux", "position_bias", "head_mask") if more.get(name) is not None]:
        raise UnsupportedModel(f"attention with {', '.join(unsupported)} is not fused")
    step = _STEP.get()
    q_THD = query[0].transpose(0, 1)
    out = []
    for i, span in enumerate(step.inputs.spans):
        k_SKD, v_SKD = step.cache.read(step.layer, span.slots)
        causal = visible(span.start, span.end - span.begin, 0, 0, query.device)
        out.append(
            attend(
                q_THD[span.begin : span.end],
                k_SKD.to(query.dtype),
                v_SKD.to(query.dtype),
                causal if attention_mask is None else attention_mask[i],
                scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
                cap=softcap or 0.0,
            )
        )
    return torch.cat(out)[None], None


def _masks(*args: Any, mask_function: Callable[..., Tensor], **more: Any) -> list[Tensor]:
    """transformers' mask interface: apply its rule (causal, windowed, chunked, ...) to each request's positions, bool [T, S]."""
    step = _STEP.get()
    device = step.cache.device
    masks = []
    for span in step.inputs.spans:
        stop = span.start + span.end - span.begin
        one = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        queries = torch.arange(span.start, stop, device=device)[None, None, :, None]
        mask = mask_function(one, one, queries, torch.arange(stop, device=device)[None, None, None])
        masks.append(mask.expand(1, 1, stop - span.start, stop)[0, 0])
    return masks


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _masks)


def _caches(cache: KVCache, source: _GenericStep | RowSpan) -> Any:
    """A transformers Cache over our blocks: of one request (a RowSpan), or a write-only one for all of them (a _GenericStep)."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class PagedLayer(CacheLayerMixin):
        is_sliding = False  # it keeps all positions; the mask hides those outside a window

        def __init__(self, index: int):
            super().__init__()
            self.index = index
            self.length = source.start if isinstance(source, RowSpan) else 0
            self.is_initialized = True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            pass

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
            """Takes [1, K, T, D] each. For a RowSpan, returns them appended to the cached ones."""
            if isinstance(source, _GenericStep):
                source.layer = self.index
                slots = source.inputs.slots
            else:
                slots = source.slots[source.start :]
            cache.write(self.index, slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
            self.length += slots.numel()
            if isinstance(source, _GenericStep):
                return key_states, value_states
            keys, values = cache.read(self.index, source.slots)
            return keys.transpose(0, 1)[None].to(key_states.dtype), values.transpose(0, 1)[None].to(value_states.dtype)

        def get_seq_length(self) -> int:
            if isinstance(source, _GenericStep) and self.index:  # Llama 4 takes positions from this, not from position_ids
                raise LookupError(f"layer {self.index} asks for its cache's length, of which a fused forward has several")
            return self.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length + query_length, 0

        def get_max_length(self) -> int:
            return -1

    return Cache(layers=[PagedLayer(i) for i in range(len(cache.keys))])


# -- Quantized -------------------------------------------------------------------------------------------------------------


class PackedExperts(nn.Module):
    """Put before the class of transformers' experts, whose weights are stacks: each expert's matrices are packed separately."""

    first: nn.ModuleList  # gate and up, or up
    down: nn.ModuleList
    has_gate: bool
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, d], top_k_index and top_k_weights [T, k] -> [T, d]; sums are fp32."""

        def compute(expert: int, rows: Tensor) -> Tensor:
            hidden = self.first[expert](rows)
            output: Tensor = self.down[expert](self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden))
            return output.float()

        out = torch.zeros(hidden_states.shape, device=hidden_states.device)
        add_experts(out, hidden_states, top_k_weights, top_k_index, range(len(self.down)), compute)
        return out.to(hidden_states.dtype)


def _pack_experts(module: Any, kind: str, block: int) -> None:
    """Pack a module of experts in place, so that hooks and wrappers around its calls stay."""
    for name, stored in (("first", "gate_up_proj" if module.has_gate else "up_proj"), ("down", "down_proj")):
        weights, biases = getattr(module, stored), getattr(module, f"{stored}_bias") if module.has_bias else None
        experts = nn.ModuleList()
        for i, weight in enumerate(weights):
            matrix = (weight.T if module.is_transposed else weight).contiguous()
            packed = PackedMatrix(matrix_of(matrix, kind, block))
            experts.append(PackedLinear(packed, matrix.shape, None if biases is None else biases[i], matrix.dtype))
        setattr(module, stored, None)
        setattr(module, name, experts)
    module.__class__ = class_before(PackedExperts, type(module))


def _stacked_experts(model: nn.Module) -> Iterator[nn.Module]:
    """transformers' modules of experts. Those of an unknown layout are left out."""
    layout = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")
    for module in model.modules():
        if all(hasattr(module, each) for each in layout) and not getattr(module, "has_post_expert_norm", False):
            yield module


@torch.no_grad()
def quantize_model(model: Any, kind: str, dtype: torch.dtype = torch.bfloat16, group_size: int = 32) -> Any:
    """Replace the matrices of a transformers model by matrices of `kind`, and cast the rest to the compute dtype `dtype`.

    As in `slipstream.quantize`, the output matrix is int8 for both kinds. Embeddings, norms, biases and routers are not quantized.
    Raises UnsupportedModel, with nothing changed, if most weights are in modules of other types.
    """
    stored, routers, stacks = model.dtype, list(_routers(model)), list(_stacked_experts(model))
    _check_mostly_quantized(model, kind, routers, stacks)
    pack(model, kind, block=group_size, skip=routers)
    for module in stacks:
        _pack_experts(module, kind, group_size)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.dtype = dtype
    cast(model, dtype, stored)
    return model


def cast(model: Any, dtype: torch.dtype, stored: torch.dtype | None = None) -> None:
    """Cast the floating-point tensors (with `stored`, only those of that dtype) as transformers does when it opens a file.
    Exceptions: tensors that the class keeps in fp32, rotary frequencies, and packed codes."""
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype is torch.float16 else [])]
    exact = [name for each in lists if dtype is not torch.float32 for name in getattr(model, each, None) or ()]
    for path, module in model.named_modules():
        packs = isinstance(module, PackedMatrix | PackedLinear)
        derived = {name for name in module._buffers if packs or name.endswith("inv_freq")}
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            is_other = not tensor.is_floating_point() if stored is None else tensor.dtype is not stored
            if is_other or name in derived or any(one in f"{path}.{name}" for one in exact):
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(dtype)
            else:
                setattr(module, name, tensor.to(dtype))


def _check_mostly_quantized(model: Any, kind: str, routers: Sequence[str], stacks: Sequence[nn.Module]) -> None:
    from transformers.pytorch_utils import Conv1D

    packed = {id(layer.weight) for layer in named_layers(model, (nn.Linear, Conv1D), ("*",), routers)}
    packed |= {id(param) for module in stacks for param in module.parameters(recurse=False)}
    weights = {
        name: param
        for path, module in model.named_modules()
        if not isinstance(module, nn.Embedding)
        for name, param in module.named_parameters(path, recurse=False)
        if param.dim() > 1
    }
    others = {name: param.numel() for name, param in weights.items() if id(param) not in packed}
    total, num_others = sum(param.numel() for param in weights.values()), sum(others.values())
    if 2 * num_others > total:
        largest = max(others, key=lambda name: others[name])
        raise UnsupportedModel(
            f"{kind} would leave {num_others:,} of {total:,} weights of {type(model).__name__} unquantized: they are in no "
            f"nn.Linear ({largest}: {list(weights[largest].shape)}); serve it without quantization"
        )


def _routers(model: Any) -> Iterator[str]:
    """Yield the names of linear layers with one output per expert."""
    num_experts = [value for name, value in model.config.get_text_config().to_dict().items() if name.endswith("_experts")]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.out_features in num_experts and not getattr(module, "stays_exact", False):
            yield name


def shared_copy(model: Any) -> Any:
    """A copy of the module tree that shares all tensors: replacing or casting parameters in it does not change `model`."""
    memo: dict[int, Any] = {id(one): nn.Parameter(one.data, requires_grad=False) for one in model.parameters()}
    return copy.deepcopy(model, memo | {id(one): one for one in model.buffers()})
