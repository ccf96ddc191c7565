"""`deepspeed.comm`: torch.distributed's operations with DeepSpeed's arguments; other names resolve to torch.distributed.

An operation takes torch's arguments, DeepSpeed's names for them, and `prof`, `log_name` and `debug` for the log of operations
(`comms_logger`). An entry of the log is named by `log_name` and has the bytes of the whole buffer. Its time is that of the call, so
it does not include the rest of an asynchronous operation.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.observe import clock, traffic
from slipstream.world.join import init_distributed as _init_distributed
from slipstream.world.join import local_rank
from slipstream.world.mesh import Axis

get_local_rank = local_rank
logger = logging.getLogger(__name__)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Call `slipstream.init_distributed`; `dist_backend=None` selects gloo on the CPU. `config` is that of `configure`."""
    _init_distributed(**locals())  # same names, in another order
    configure(config)
    _tell_accelerate()


def is_initialized() -> bool:
    _tell_accelerate()
    return dist.is_initialized()


def _tell_accelerate() -> None:
    """[Note: accelerate on CPUs] Without a GPU, accelerate sets no backend, and each rank runs as if it were the only one, even
    with its DeepSpeed plugin, unless the script names gloo; no setting outside the script helps. PartialState calls this module
    while it is being constructed, so the backend is set here. tests/clients/test_accelerate.py tests the attributes used here."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    if dist.is_initialized() and "backend" in shared and shared["backend"] is None and "num_processes" not in shared:
        shared["backend"] = dist.get_backend()


is_available, new_group = dist.is_available, dist.new_group
_INPUTS = ("tensor", "input_tensor", "input", "tensors", "input_list", "input_tensor_list", "p2p_op_list")


def _operation(name: str, newer: str = "", **renamed: str) -> Callable[..., Any]:
    """torch.distributed's operation. newer: its name from torch 2.13 on, where the other one warns. renamed: DeepSpeed's name of an
    argument -> torch's."""

    def call(*args: Any, prof: bool = False, log_name: str = name, debug: str | None = None, **named: Any) -> Any:
        run = getattr(dist, newer, None) or getattr(dist, name)
        named = {renamed.get(key, key): value for key, value in named.items()}
        if not comms_logger.asks_for(log_name, prof):
            return run(*args, **named)
        arguments = inspect.signature(run).bind(*args, **named).arguments
        given: Any = next((arguments[key] for key in _INPUTS if key in arguments), [])
        tensors = [given] if isinstance(given, Tensor) else [getattr(each, "tensor", each) for each in given]
        device = tensors[0].device if tensors else torch.device("cpu")
        start = clock.mark(device)
        result = run(*args, **named)
        marks = start, clock.mark(device)
        ranks = max(1, get_world_size(arguments.get("group")))
        nbytes = sum(tensor.nbytes for tensor in tensors) * (ranks if name.startswith("all_gather") else 1)
        caller = f" | [Caller Func: {sys._getframe(1).f_code.co_name}]" if comms_logger.debug else ""
        comms_logger.add(log_name + caller, nbytes, ranks, marks, kind=name)
        return result

    call.__name__ = call.__qualname__ = name
    return call


inference_all_reduce = all_reduce = _operation("all_reduce")
all_gather, all_gather_object = _operation("all_gather"), _operation("all_gather_object")
allgather_fn = all_gather_into_tensor = _operation("all_gather_into_tensor", "all_gather_single", tensor="input_tensor")
reduce_scatter_fn = reduce_scatter_tensor = _operation(
    "reduce_scatter_tensor", "reduce_scatter_single", output_tensor="output", tensor="input"
)
all_to_all_single, all_to_all = _operation("all_to_all_single", tensor="input"), _operation("all_to_all")
broadcast, broadcast_object_list = _operation("broadcast"), _operation("broadcast_object_list")
reduce, reduce_scatter, gather, scatter = map(_operation, ("reduce", "reduce_scatter", "gather", "scatter"))
send, recv, isend, irecv, batch_isend_irecv = map(_operation, ("send", "recv", "isend", "irecv", "batch_isend_irecv"))
barrier, monitored_barrier = _operation("barrier"), _operation("monitored_barrier")


def P2POp(op: Callable[..., Any], *args: Any, **named: Any) -> dist.P2POp:
    """An operation for `batch_isend_irecv`; `op` is this module's `isend` or `irecv`, or torch's."""
    return dist.P2POp(getattr(dist, op.__name__), *args, **named)


class _Works(list[Any]):
    """Operations in flight together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = _Works(all_gather_into_tensor(output, each, group, async_op=True) for output, each in pairs)
    return works if async_op else works.wait()


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **log: Any
) -> Any:
    works = _Works(all_reduce(tensor, op, group, async_op=True, **log) for tensor in tensors)
    return works if async_op else works.wait()


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    return dist.device_mesh.init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names
    )


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


class TorchBackend:
    """DeepSpeed's backend: the operations over flat tensors, which its communication benchmarks get from here."""

    @staticmethod
    def get_all_gather_function() -> Callable[..., Any]:
        return dist.all_gather_into_tensor

    @staticmethod
    def get_reduce_scatter_function() -> Callable[..., Any]:
        return dist.reduce_scatter_tensor


class CommsLogger:
    """The log of this process: operations that the script calls here if `enabled`, and those of its engines that have a log.

    verbose: log each operation. prof_all: record all operations; otherwise those of `prof_ops` and those called with `prof=True`.
    debug: names of entries include the calling function. comms_dict: {name: {bytes: [count, [ms], [algbw], [busbw]]}}, in Gbps.
    """

    def __init__(self) -> None:
        self.enabled, self.verbose, self.debug, self.prof_all = False, False, False, True
        self.prof_ops: list[str] = []
        self._own: traffic.CommLog | None = None

    def use(self, block: Mapping[str, Any]) -> None:
        """Take over values of a config's `comms_logger`."""
        for name, value in block.items():
            setattr(self, name, value)

    def asks_for(self, log_name: str, prof: bool) -> bool:
        return self.enabled and (prof or self.prof_all or log_name in self.prof_ops)

    def add(self, name: str, nbytes: int, ranks: int, marks: tuple[Any, Any], kind: str) -> None:
        self._own = self._own or traffic.CommLog(self, axis_of("world"), torch.device("cpu"))
        self._own.add(name, nbytes, ranks, marks, kind=kind)

    def logs(self) -> list[traffic.CommLog]:
        from slipstream.compat.zero import traffic_of_engines

        return [*traffic_of_engines(), *([self._own] if self._own else [])]

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        return traffic.merged(self.logs())

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        return self.get_raw_data()

    @comms_dict.setter
    def comms_dict(self, value: dict[Any, Any]) -> None:
        if value:
            raise ValueError(
                f"comms_logger.comms_dict = ... with {len(value)} entries: only {{}} can be assigned, which resets the log"
            )
        self.reset_data()

    def reset_data(self) -> None:
        self._own = None
        for log in self.logs():
            log.reset()

    def has_data(self) -> bool:
        return bool(self.get_raw_data())

    def get_operation_names(self) -> list[str]:
        return list(self.get_raw_data())

    def get_total_operations(self) -> int:
        return sum(entry[0] for sizes in self.get_raw_data().values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        return traffic.table(self.get_raw_data()).get(operation_name)

    def log_all(self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
        """Write the tables. Returns them with `return_dict`. Collective with `show_straggler`."""
        found = traffic.summary(self.logs(), axis_of("world"), show_straggler)
        if print_log:
            traffic.write_tables(found)
        return found if return_dict else None


def axis_of(name: str, group: Any = None) -> Axis:
    """The ranks of a process group, by default all."""
    if not dist.is_initialized():
        return Axis(name, None, (0,), 0, 1)
    group = group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, group if len(ranks) > 1 else None, ranks, dist.get_rank(group), len(ranks))


comms_logger = CommsLogger()
reset_log, has_comm_data = comms_logger.reset_data, comms_logger.has_data
get_comm_operation_count, get_logged_comm_ops = comms_logger.get_total_operations, comms_logger.get_operation_names
configured: dict[str, Any] = {}  # the comms_logger block for engines whose config has none


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the log of operations called here, and that of engines initialized from now on. deepspeed_config: a
    DeepSpeedConfig or a dictionary; its `comms_logger` applies if it is enabled."""
    from slipstream.compat.engine import read_config

    raw = getattr(deepspeed_config, "_param_dict", deepspeed_config)
    block = {} if raw is None else read_config(raw).get("comms_logger", {})
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    configured.update((block if block.get("enabled") else {}) | {name: value for name, value in given.items() if value is not None})
    comms_logger.use(configured)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Write on rank 0 what the script's operations and the engines of this process have sent so far. Collective with
    `show_straggler`. Returns the figures with `return_dict`. If there is no log, a warning says how to get one.
    """
    if not comms_logger.enabled and not comms_logger.logs():
        text = '"comms_logger": {"enabled": true}'
        logger.warning("deepspeed.comm.log_summary(): there is no log; set %s in the config of an engine", text)
    return comms_logger.log_all(get_rank() == 0, show_straggler, return_dict)


def __getattr__(name: str) -> Any:
    """A name of torch.distributed; `cdb`, by which scripts see whether a process group exists, is that module or None."""
    return (dist if dist.is_initialized() else None) if name == "cdb" else getattr(dist, name)
