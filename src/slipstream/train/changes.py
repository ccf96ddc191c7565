"""What the config changes in a model before it is divided into units, or adds to its engine: one row per feature.

Changes replace classes of modules in place, so the names of parameters, and with them checkpoints, stay the same.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from slipstream.attention.modules import SparseSelfAttention
from slipstream.attention.transformers import apply_pattern
from slipstream.compression.compress import clock_of, clocks_of, end_step, init_compression
from slipstream.compression.eigenvalue import Eigenvalue
from slipstream.config.plan import Plan
from slipstream.observe import memory, traffic
from slipstream.observe.profile import profile_step
from slipstream.observe.trace import trace_steps
from slipstream.ops import matmul
from slipstream.quantized.linear import QuantizedEmbedding, nothing
from slipstream.quantized.rules import quantize_by_rules, rules_of
from slipstream.train.curriculum import shorten_sequences
from slipstream.train.engine import Engine
from slipstream.train.figures import monitor
from slipstream.train.layer_drop import drop_layers
from slipstream.train.noise import follow_noise
from slipstream.train.random_ltd import drop_tokens
from slipstream.train.second_order import SecondOrder, mean_over, most_over
from slipstream.train.trial import follow_trial
from slipstream.zero.init import Load, sources
from slipstream.zero.wrap import LEAF_RULES, mark_leaves

logger = logging.getLogger(__name__)

# Changes the model as the plan says, or raises ValueError before it has changed anything. Returns a function that connects the
# change to the engine (hooks per step in `states.after_step`, counters for checkpoints), or None.
Change = Callable[[nn.Module, Plan], "Callable[[Engine], None] | None"]


def _sparse_attention(model: nn.Module, plan: Plan) -> Callable[[Engine], None]:
    if plan.sparse is not None:
        apply_pattern(model, plan.sparse)

    def connect(engine: Engine) -> None:
        for module in engine.module.modules():
            if isinstance(module, SparseSelfAttention):
                module.forget_layouts()  # made before the first rank's `master_layout` was distributed

    return connect


def _multiply(model: nn.Module, plan: Plan) -> None:
    dtypes = {each.dtype for each in model.parameters()} | {plan.precision.param_dtype, plan.precision.autocast_dtype}
    matmul.use(plan.products == "fastest", dtypes)


def _quantize(model: nn.Module, plan: Plan) -> None:
    """The first change, so that copies that other changes make of a layer are quantized, too."""
    if plan.quantized is not None:
        reader = sources.get(model)
        is_unread: Callable[[str], bool] = nothing if reader is None or isinstance(reader, Load) else reader.__contains__
        quantize_by_rules(model, rules_of(plan.quantized), plan.precision.param_dtype, is_unread)
    for module in model.modules():
        if isinstance(module, QuantizedEmbedding):
            module.dtype = plan.precision.param_dtype


def _mark_leaves(model: nn.Module, plan: Plan) -> Callable[[Engine], None]:
    chosen = {rule: mark_leaves(model, rule, getattr(plan.zero, f"leaf_{rule}")) for rule in LEAF_RULES}
    missing = {(rule, wanted) for rule, found in chosen.items() for wanted, modules in found.items() if not modules}

    def connect(engine: Engine) -> None:
        for rule, wanted in sorted(set.intersection(*engine.mesh.pp.gather(missing))):  # a stage has only its own layers
            logger.warning("zero_optimization.leaf_module.%s: no module of the model matches %s", rule, wanted)

    return connect


def _fuse_layers(model: nn.Module, plan: Plan) -> None:
    if plan.fused_layers:
        from slipstream.fused import fuse_layers

        fuse_layers(model, attention=plan.mesh.sp == 1)


def _compress(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """Compress the model, unless `init_compression` has done so before; from now on the engine counts the steps."""
    if plan.compression is not None and clock_of(model) is None:
        init_compression(model, plan.compression)
    clocks = clocks_of(model)
    if not clocks:
        return None
    block = (plan.compression or {}).get("eigenvalue")
    order = None if block is None else SecondOrder(model, Eigenvalue(**block))

    def connect(engine: Engine) -> None:
        keeps = plan.zero.stage < 3 and plan.batch.accumulation > 1  # weights stay in place, so they are rounded once a step

        def follow(_: bool = True) -> None:
            for clock in clocks:
                clock.step = engine.global_steps  # also after a checkpoint was loaded
                if not engine.backwards:
                    clock.kept = {} if keeps else None

        engine.states.before_forward(lambda *_: follow())  # a loaded checkpoint sets the step
        mean, most = mean_over(engine), most_over(engine)
        engine.states.after_step += [follow, lambda _: end_step(engine.module, engine.global_steps, mean, most)]
        if order is not None:
            order.connect(engine)

    return connect


def _generate(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    """`engine.generate`. It combines training and serving, which do not import each other, so compat has it, imported by name."""
    if plan.rollouts is None:
        return None
    hybrid: Any = importlib.import_module("slipstream.compat.hybrid")
    connect: Callable[[Engine], None] = hybrid.generation(model, plan.rollouts)
    return connect


def _observe(model: nn.Module, plan: Plan) -> Callable[[Engine], None] | None:
    rows: tuple[tuple[object, Callable[[Engine], None]], ...] = (
        (plan.profile, profile_step),
        (plan.traffic, traffic.record),
        (plan.trace, trace_steps),
        (plan.memory_breakdown, memory.tell_phases),
    )
    chosen = [connect for wanted, connect in rows if wanted]
    return _all(chosen) if chosen else None


CHANGES: tuple[Change, ...] = (
    _multiply,
    _quantize,
    _mark_leaves,
    _sparse_attention,
    _fuse_layers,
    drop_layers,
    drop_tokens,
    shorten_sequences,
    _compress,
    monitor,
    follow_noise,
    _generate,
    _observe,
    follow_trial,
)


def change_model(model: nn.Module, plan: Plan) -> Callable[[Engine], None]:
    """Apply every change. Returns a function that connects them to the engine once it is built."""
    return _all([connect for change in CHANGES if (connect := change(model, plan)) is not None])


def _all(connections: Sequence[Callable[[Engine], None]]) -> Callable[[Engine], None]:
    def connect_all(engine: Engine) -> None:
        for connect in connections:
            connect(engine)

    return connect_all
