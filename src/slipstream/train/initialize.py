"""`slipstream.initialize`: build an engine from a model and a config. Validation first, then memory, then hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from slipstream.checkpoint.errors import Ranks
from slipstream.checkpoint.weights import WeightFiles, check_same, open_weights
from slipstream.config import DataWorld, ModelFacts, Plan, for_inference, keys, resolve
from slipstream.config.arguments import ConfigError, LoadedConfig, read_config
from slipstream.moe.place import Join, choose_slices, draws, split_experts
from slipstream.optim import fit, resolve_optimizer
from slipstream.optim.native import Form, NativeSteps
from slipstream.optim.onebit import OneBitSteps
from slipstream.optim.onebit_lamb import OneBitLambSteps
from slipstream.optim.rules import Rule
from slipstream.optim.sharded import NoOptimizer, ShardedSteps, TorchSteps
from slipstream.parallel.cuts import has_own_cuts, has_slices
from slipstream.parallel.huggingface import PipelinedDecoder
from slipstream.parallel.module import PipelineModule
from slipstream.parallel.mpu import is_marked, layout_of, mark_marked, places_of
from slipstream.parallel.same_inputs import check_first_inputs
from slipstream.parallel.slicing import slice_model, wanted_size
from slipstream.parallel.tensor import Slices
from slipstream.parallel.topology import check_places
from slipstream.parallel.transformers_sequence import Sequences, serve_sequences
from slipstream.quantized import row_forms
from slipstream.train import agreement, compiled
from slipstream.train.changes import change_model
from slipstream.train.disk_space import open_spaces, warn_of_resident_weights
from slipstream.train.engine import Engine
from slipstream.train.experts import connect_experts
from slipstream.train.handle import OptimizerHandle
from slipstream.train.loaders import Loader, build_loader, scaled_schedule
from slipstream.train.local_steps import LocalSteps
from slipstream.train.pipeline import agree_on_kinds, kept, pipeline_engine, prepare
from slipstream.train.planning import explain
from slipstream.train.precision import Precision, buffer_rule
from slipstream.train.progress import log_layout, log_plan
from slipstream.train.recipe import CODE_BITS, build_optimizer, mark_kinds, recipe_of, scheduler_of, transport_of, warn_of_frozen
from slipstream.train.schedules import check_step
from slipstream.train.states import States
from slipstream.world import brief
from slipstream.world.join import init_distributed, local_device, local_world_size
from slipstream.world.mesh import Mesh, build_mesh
from slipstream.world.watch import Watch
from slipstream.zero import access
from slipstream.zero.buffers import convert_buffers, spread_first
from slipstream.zero.build import build_units, connect
from slipstream.zero.init import Load, sources
from slipstream.zero.leaves import differs_of, parts_of
from slipstream.zero.materialize import FirstValues, Reader
from slipstream.zero.placement import Tier
from slipstream.zero.reduction import ErrorFeedback
from slipstream.zero.unit import Unit

logger = logging.getLogger(__name__)
_OF_WORKERS = ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """Build an engine for `model`; returns (engine, optimizer, training dataloader, lr scheduler). Collective.

    args              parsed arguments; only `deepspeed_config` is read
    model             a torch.nn.Module, on any device or on meta; its parameters stay the same objects
    config            a path to a DeepSpeed JSON, or its dict; default: `args.deepspeed_config`
    optimizer         a torch optimizer over the model's parameters, or a callable that makes one from parameters or groups;
                      default: the config's, or none (an engine for inference)
    model_parameters  parameters or parameter groups for the config's optimizer; default: all
    training_data     a dataset, for a distributed loader with the config's micro-batch size; or a DataLoader, of which the new
                      loader keeps dataset, order (shuffled or not, the generator's seed), collate_fn, drop_last and workers
    lr_scheduler      a scheduler whose `step()` needs no arguments, or `increment`, the number of samples (Megatron's); or a
                      callable that makes one from the optimizer; default: the config's
    collate_fn        of the loader for `training_data`
    mpu               your own model parallelism, by Megatron's contract (parallel/mpu.py): `get_data_parallel_group()` holds the
                      ranks that share the states, `get_tensor_model_parallel_rank()` and the like place a rank in its replica
    distributed_port  port of the rendezvous, if the environment does not set it
    dist_init_required  False: the process group exists, or this process trains alone
    config_params     an older name of `config`
    mesh_param        (data-parallel size, sequence-parallel size), as `sequence_parallel_size` in the config

    Raises ValueError for user errors, before any weight is sharded. If the config, the data or the mpu is invalid, or ranks have
    different configs, models or versions, it raises before it changes the model.
    """
    model = _checked_model(model)
    brief.install_hook()
    loaded = read_together(
        lambda: read_config(config=config, config_params=config_params, args=args), distributed_port, mpu, dist_init_required
    )
    device = local_device()
    group, sizes = layout_of(mpu, mesh_param)
    facts = _facts(model, device, optimizer, training_data, lr_scheduler, sizes)
    plan, overrides = _resolve(loaded, facts, group, optimizer is not None)
    facts_of_plan = agreement.facts_of_plan(plan, model, device)
    agreement.check_alike(facts_of_plan, group)  # the first exchange: a rank that refuses its config waits here
    places = places_of(mpu)
    with agreement.refused_together("its model", group):  # one rank alone may have nonfinite weights, for instance
        connect_changes = change_model(model, plan)
    mesh = _mesh(plan, model, group, places)
    is_users = places is not None and (is_marked(model) or not (plan.tensor.size > 1 or wanted_size(model)))
    part = _part(model, mesh, is_users)
    agreement.check_alike_on(agreement.facts_of_model(model), mesh.world, part)
    mesh, cut = _cut(model, plan, mesh, is_users)
    if cut.sequences is not None:
        cut.sequences.in_eval = not getattr(mpu, "disable_in_eval", False)
    model, model_parameters = _in_stages(model, plan, mesh, model_parameters, cut)
    plan = _recomputing(plan, model)
    mesh = mesh.with_families(map(differs_of, model.parameters()))
    _log_config(plan, loaded, overrides, optimizer, mesh)
    with agreement.refused_together("its samples", group):  # a host may lack one of their files
        loader = None if training_data is None else _loader(plan, training_data, collate_fn, mesh, device)
    named = resolve_optimizer(plan.optimizer.type, plan.optimizer.params) if optimizer is None and plan.optimizer else None
    values = _first_values(model, mesh, device)
    with agreement.refused_together("its optimizer", group):  # a stage may have no heads for per_head_muon
        inner, rule = build_optimizer(named, model, optimizer, model_parameters)
    scheduler = scaled_schedule(plan, loader, scheduler_of(plan, lr_scheduler, inner), inner)
    if scheduler is not None and isinstance(model, PipelineModule | PipelinedDecoder):
        check_step(scheduler, "which train_batch() cannot pass:")
    agreement.check_alike_on(agreement.facts_of_optimizer(model, inner, scheduler), mesh.world, part)
    # one rank of a replica may have the data and send them to the others
    agreement.check_alike_on(agreement.facts_of_data(loader), mesh.world, (part, loader is None))
    if mesh.is_first:
        warn_of_frozen(inner)
    mark_kinds(model, plan, inner, rule)
    agree_on_kinds(model, mesh)
    engine = _engine(plan, model, mesh, device, inner, rule, values)
    cut.connect(engine)
    connect_changes(engine)
    sources.pop(model, None)  # a later engine starts from the weights that this one has trained
    engine.optimizer = OptimizerHandle(engine, inner) if inner is not None else None
    engine.lr_scheduler, engine.training_dataloader = scheduler, loader
    engine.saves.auto.resume(engine)
    _log_traffic(engine)
    return engine, engine.optimizer, loader, scheduler


def _mesh(plan: Plan, model: nn.Module, group: Any, places: Any) -> Mesh:
    """Collective."""
    axes = {"pp": plan.mesh.pp, "sp": plan.mesh.sp, "tp": plan.mesh.tp}
    is_apart = plan.local_steps.every > 0
    shards, size = plan.zero.shard_size or (axes["sp"] * axes["tp"] if is_apart else None), plan.zero.group_size
    mesh = build_mesh(**axes, shard_size=shards, group_size=size, is_apart=is_apart, group=group, places=places)
    if isinstance(model, PipelineModule) and model.has_own_topology:
        check_places(model.topology(), mesh)
    return mesh


def _part(model: nn.Module, mesh: Mesh, is_users: bool) -> tuple[int, ...]:
    """The part of the model that a rank was given: its stage, and its slices if the user made them. Replicas have the same."""
    is_sliced = is_users or _has_model_axis(model) or any(_is_on(param, "tp") for param in model.parameters())
    place = mesh.places[mesh.rank]
    return (place.pp, place.tp) if is_sliced else (place.pp,)


def _checked_model(model: Any) -> nn.Module:
    """Raise ValueError or TypeError for a model that an engine cannot have."""
    if model is None:
        raise ValueError("initialize() needs model=")
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize(model=) must be a torch.nn.Module, not {model!r}")
    for unit in access.units_of(model.parameters()):
        raise ValueError(
            f"parameter {unit.names[0]!r} already belongs to an engine; call that engine's destroy() first, or build the model "
            "again if nothing refers to the engine any more"
        )
    return model


class _Cut(NamedTuple):
    """What computes this rank's part of a model's layers, sequences and experts; None: whole, or cut by the user."""

    slices: Slices | None
    sequences: Sequences | None
    join_experts: Join

    def connect(self, engine: Engine) -> None:
        """Collective over the axes."""
        if self.slices is not None:
            self.slices.exchange = engine.exchange("tp")
            check_first_inputs(engine.module, self.slices.exchange, draws=self.slices.dropout)
        if self.sequences is not None:
            self.sequences.exchange = engine.exchange("sp")
            engine.states.resources["sequences"] = self.sequences
        self.join_experts(engine.states.exchange)
        connect_experts(engine)


def _cut(model: nn.Module, plan: Plan, mesh: Mesh, is_users: bool) -> tuple[Mesh, _Cut]:
    """Slice the layers, and prepare the attention for shares of sequences. is_users: the caller's mpu has sliced them."""
    if is_users or _has_model_axis(model):
        mark_marked(model, mesh.tp)
    choose_slices(model, mesh, plan.experts)
    if isinstance(model, PipelineModule) and plan.tensor.partition is None and not (has_slices(model) or has_own_cuts(model)):
        is_users = True  # a stage may have other layers only
    slices = None if is_users else slice_model(model, mesh.tp, plan.tensor)
    if slices is not None:
        slices.dropout = slices.dropout or draws(model)
    mesh, join = split_experts(model, mesh, plan.experts, token_shares=plan.tensor.shares_tokens)
    return mesh, _Cut(slices, serve_sequences(model, mesh.sp, slices), join)


def _in_stages(model: nn.Module, plan: Plan, mesh: Mesh, model_parameters: Any, cut: _Cut) -> tuple[nn.Module, Any]:
    """The module of this rank's pipeline stages, and the given parameters that it has; without stages, both are unchanged."""
    given_model = model
    ties = any(_is_on(param, "pp") for param in model.parameters())
    own_stages = any(mesh.pp.gather(ties))  # stages built by the user, which share parameters (mark_tied)
    if mesh.pp.size > 1 and not isinstance(model, PipelineModule) and not own_stages:
        if not hasattr(getattr(model, "config", None), "model_type"):
            raise ValueError(
                f"the config has {mesh.pp.size} pipeline stages (pipeline.stages or slipstream.mesh.pp), and {type(model).__name__}"
                " is neither a slipstream.PipelineModule nor a decoder of transformers: pass PipelineModule(layers, num_stages=...)"
                ", or drop the stages"
            )
        model = PipelinedDecoder.on_rank(
            model, mesh.pp.index, mesh.pp.size, plan.pipeline, slices=cut.slices, sequences=cut.sequences, world=mesh.world
        )
        model_parameters = None if model_parameters is None else kept(model_parameters, model, given_model)
    if isinstance(model, PipelineModule | PipelinedDecoder):
        prepare(model, plan.pipeline, mesh)
    return model, model_parameters


def _recomputing(plan: Plan, model: nn.Module) -> Plan:
    """The plan in which `pipeline.activation_checkpoint_interval` recomputes a decoder's blocks. A PipelineModule reads it."""
    if not plan.pipeline.recompute_interval or isinstance(model, PipelineModule) or plan.activations.way == "recompute":
        return plan
    if not isinstance(model, PipelinedDecoder) or plan.activations.way == "offload":
        raise ValueError(
            f"pipeline.activation_checkpoint_interval ({plan.pipeline.recompute_interval}) recomputes a pipeline's layers, and "
            + (
                'slipstream.activations is "offload"; drop one of the two'
                if plan.activations.way == "offload"
                else f'{type(model).__name__} has no stages; drop it, or set slipstream.activations to "recompute"'
            )
        )
    return replace(plan, activations=replace(plan.activations, way="recompute"))


def _log_config(plan: Plan, loaded: LoadedConfig, overrides: Mapping[str, Any], optimizer: Any, mesh: Mesh) -> None:
    if not mesh.is_first:
        return
    keys.say(loaded.notes)
    log_plan(plan)
    if optimizer is not None and plan.optimizer:
        logger.warning("initialize(optimizer=) overrides the config's optimizer block (%s)", plan.optimizer.type)
    if overrides:
        logger.info("no optimizer: offload_param applies at any configured stage, as in stage 3 with one rank per shard group")
    log_layout(mesh, local_world_size())


def _log_traffic(engine: Engine) -> None:
    shows = engine.mesh.is_first and engine.mesh.world.size > 1 and logger.isEnabledFor(logging.INFO)
    if shows and (text := explain.traffic_text(explain.of_states(engine.states))):
        logger.info("%s (engine.explain() has the parts)", text)


def _first_values(model: nn.Module, mesh: Mesh, device: torch.device) -> FirstValues:
    """The model's initial values; a model with real weights moves to the device. Collective."""
    weights = _weights(model, mesh)
    values = FirstValues(model, device, weights)
    if weights is None and not any(param.is_meta for param in model.parameters()):
        model.to(device)
    return values


def _resolve(loaded: LoadedConfig, facts: ModelFacts, group: Any, has_optimizer: bool) -> tuple[Plan, dict[str, Any]]:
    """The plan, and the settings that an engine for inference overrides. Collective; raises ConfigError on every rank."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    try:
        overrides = {} if has_optimizer else for_inference(loaded.raw)
        world = DataWorld(ranks=size, one_host=size <= local_world_size())
        plan = resolve(loaded.raw, world=world, facts=facts, overrides=overrides)
        compiled.check(plan.compile)
    except ValueError as error:
        refusal = loaded.refusal(error)
        agreement.check_alike(agreement.fact_of_refusal(refusal), group)
        raise refusal from None
    return plan, overrides


def read_together(
    read: Callable[[], LoadedConfig], distributed_port: int | None = None, mpu: Any = None, dist_init_required: bool | None = None
) -> LoadedConfig:
    """Read a config and join the process group. Collective: if a rank cannot read its config, all raise and name that rank."""
    refusal: ConfigError | None = None
    try:
        loaded = read()
    except ValueError as error:
        refusal = ConfigError(str(error))
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if refusal is not None:
        agreement.check_alike(agreement.fact_of_refusal(refusal), layout_of(mpu).group)
        raise refusal
    return loaded


def _loader(plan: Plan, data: Any, collate_fn: Any, mesh: Mesh, device: torch.device) -> Loader:
    """Build the distributed loader. Of a DataLoader it keeps the dataset, the order, collate_fn, drop_last and the workers."""
    if not isinstance(data, DataLoader):
        return build_loader(plan, data, mesh, device, collate_fn)
    sampler = data.sampler
    standard = isinstance(data.dataset, IterableDataset) or type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    redraws = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None) is not None
    fits = data.batch_size == plan.batch.micro_batch_size or (plan.batch.elastic and data.batch_size)  # own sizes of the ranks
    if redraws or not (fits and standard):
        raise ValueError(
            f"training_data is a DataLoader with batch size {data.batch_size} and sampler {type(sampler).__name__}"
            f"{' that draws with replacement or another number of samples' if redraws else ''}; initialize() would rebuild it with "
            f"each sample once an epoch, in batches of {plan.batch.micro_batch_size}. Set train_micro_batch_size_per_gpu to its "
            f'batch size (or "auto"); to keep a custom sampler, iterate over your DataLoader yourself instead of passing it'
        )
    options = _order_and_workers(data) | {"drop_last": plan.drop_last or data.drop_last}
    return build_loader(plan, data.dataset, mesh, device, collate_fn or data.collate_fn, **options)


def _order_and_workers(data: DataLoader[Any]) -> dict[str, Any]:
    """The order and worker options of a DataLoader that the distributed loader keeps, as arguments of `build_loader`."""
    sampler: Any = data.sampler
    options: dict[str, Any] = {"shuffle": isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False)}
    generator = getattr(sampler, "generator", None) or data.generator
    seed = (getattr(sampler, "seed", 0) or None) if generator is None else generator.initial_seed() % (1 << 62)
    if seed is not None:
        options["seed"] = seed
    if data.num_workers:
        options |= {"num_workers": data.num_workers, "workers": {name: getattr(data, name) for name in _OF_WORKERS}}
    return options


def _weights(model: nn.Module, mesh: Mesh) -> Reader | None:
    """Open the files that `zero.load` named for the model; all ranks check that they fit it. Collective."""
    load = sources.get(model)
    if not isinstance(load, Load):
        return load
    files: list[WeightFiles] = []

    def open_files() -> str:
        files.append(open_weights(load.path, model, rename=load.rename, strict=load.strict, forms=row_forms(model)))
        return files[0].fingerprint

    ranks, step = Ranks(mesh.world.group), "slipstream.zero.load: nothing was loaded"
    prints = ranks.gather(step, open_files)
    ranks.decide(step, lambda: check_same(prints))
    if ranks.index == 0 and files[0].left_out:
        logger.warning("slipstream.zero.load: %s", files[0].left_out)
    return files[0]


def _facts(
    model: nn.Module, device: torch.device, optimizer: Any, training_data: Any, lr_scheduler: Any, sizes: Mapping[str, int]
) -> ModelFacts:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    rates = {float(group["lr"]) for group in groups if isinstance(group.get("lr"), (int, float, torch.Tensor))}
    return ModelFacts(
        device_type=device.type,
        supports_bf16=device.type != "cuda" or torch.cuda.is_bf16_supported(),
        loader_batch_size=training_data.batch_size if isinstance(training_data, DataLoader) else None,
        has_data=training_data is not None,
        optimizer_lr=rates.pop() if len(rates) == 1 else None,
        brings_schedule=lr_scheduler is not None,
        mesh=_sizes(model, sizes),
        has_tensor_ranks=sizes.get("tp", 1) > 1 or _has_model_axis(model),
    )


def _sizes(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of axes that the model and the mpu ask for. Raises ValueError if they ask for different ones."""
    requests = [("tp_model_init", wanted_size(model)), ("the mpu or mesh_param", sizes)]
    if isinstance(model, PipelineModule | PipelinedDecoder):
        requests.insert(0, ("the pipeline module", {"pp": model.num_ranks}))
    if _has_model_axis(model):
        requests.insert(0, ("the pipeline module's topology", {"tp": model.topology().get_dim("model")}))
    places, stated = zip(*requests, strict=True)
    if differing := agreement.conflict(places, stated):
        axis, first, usual, other, size = differing
        raise ValueError(f"{other} asks for {axis} {size}, and {first} for {usual}; make them equal, or drop one")
    return {axis: size for stated_sizes in stated for axis, size in stated_sizes.items()}


def _is_on(param: Tensor, axis: str) -> bool:
    return any(part.split.axis == axis for part in parts_of(param))


def _has_model_axis(model: nn.Module) -> TypeGuard[PipelineModule]:
    return isinstance(model, PipelineModule) and model.topology().get_dim("model") > 1


def _engine(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    inner: torch.optim.Optimizer | None,
    rule: Rule | None,
    values: FirstValues,
) -> Engine:
    precision, recipe = plan.precision, recipe_of(plan, inner, rule)
    form = Form.of(plan)
    if inner is not None:
        fit.refuse(plan, inner, rule)
    transport, watch = transport_of(plan, device.type), Watch(plan.timeout_s)
    watch.names = mesh.names
    watch.start(mesh.world)
    with ExitStack() as failed, watch.guard("initialize"):
        failed.callback(watch.stop)
        world, replica, families = connect(mesh, device, transport, watch, gradient_bits=CODE_BITS.get(precision.comm_dtype))
        for family in families.values():
            for comm in reversed([*family.all()]):
                failed.callback(comm.close)
        failed.callback(world.close)
        failed.callback(replica.close)
        open_space = open_spaces(plan.offload, world)
        units, slots, homes = build_units(model, recipe, world, families, device, open_space, values)
        buffers = [b for name, b in model.named_buffers() if values.reader is None or name not in values.reader]
        spread_first(buffers, families[()].data)
        failed.pop_all()
    if recipe.tiers.weights is Tier.DISK and mesh.is_first:
        num_resident = sum(unit.weights.resident_nbytes // unit.weights.dtype.itemsize for unit in units)
        warn_of_resident_weights(plan.offload, plan.sources, sum(unit.weights.numel for unit in units), num_resident)
    convert_buffers(model, buffer_rule(precision))
    states = States(
        model=model,
        plan=plan,
        mesh=mesh,
        world=world,
        replica=replica,
        families=families,
        units=units,
        slots=slots,
        homes=homes,
        recipe=recipe,
        open_space=open_space,
        steps=_steps(plan, units, inner, rule, form, whole=recipe.whole),
        watch=watch,
        device=device,
    )
    in_stages = isinstance(model, PipelineModule | PipelinedDecoder)
    casts = Precision(precision, device, in_stages=in_stages, weight=plan.batch.weight(mesh.batch.index, mesh.batch.size))
    if plan.zero.error_beta is not None:
        errors = ErrorFeedback(states.feedback, plan.zero.error_steps)
        states.after_step.append(errors.end_step)
        casts.scaler.changed.append(errors.rescale)
    if mesh.is_apart:
        local_steps = states.resources["local steps"] = LocalSteps(states, plan.local_steps, transport)
        states.after_step.append(local_steps.end_step)
    return pipeline_engine(states, casts, transport) if in_stages else Engine(states, casts)


def _steps(
    plan: Plan, units: list[Unit], inner: torch.optim.Optimizer | None, rule: Rule | None, form: Form, *, whole: bool
) -> ShardedSteps:
    if inner is not None and rule is not None:
        late = OneBitLambSteps if rule.is_whole else OneBitSteps
        kind, numel = (late, 1 << 62) if rule.late else (NativeSteps, plan.offload.chunk_numel)
        return kind(inner, units, rule, form, chunk_numel=numel, num_buffers=plan.offload.num_buffers)
    return TorchSteps(inner or NoOptimizer(), units, whole=whole, state_dtype=plan.precision.state_dtype)
