"""`slipstream run`: turn the arguments and this host's state into a job and its commands, and run them.

`HostState` holds everything that is read from this host. `plan_run`, a pure function, decides everything from it and the arguments.
Only `execute` has side effects.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.launch import commands, environment, hosts
from slipstream.launch.commands import Command, Job
from slipstream.launch.cores import Core, cores_of, share
from slipstream.launch.hosts import Host
from slipstream.launch.layout import KnownMesh, arrange, read_mesh
from slipstream.world.discover import Node, node, ranks_per_node
from slipstream.world.sizes import SHOWN, VARIABLE, shown_mesh

DEFAULT_PORT = 29500  # torch's default, for jobs on several hosts
_ELASTIC_RESTARTS = 100  # torch counts a lost host as a failure of the remaining ones
_THIS_HOST = commands.LOOPBACK
# Fields of Job of the same name
_JOB_OPTIONS = ("module", "no_python", "pass_local_rank", "max_restarts", "quiet", "ssh_port", "elastic", "venv_script")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The state of this host that `plan_run` depends on."""

    environ: Mapping[str, str]
    directory: str
    python: str
    names: tuple[str, ...]  # of this host
    num_devices: int  # CUDA devices
    free_port: int
    time: str = ""  # YYYYmmddHHMMSS
    cores: tuple[Core, ...] = ()  # that this job may use
    hostfile: str | None = None  # text
    env_files: tuple[tuple[str, str], ...] = ()  # (path, text), later ones win
    mesh: KnownMesh | None = None  # None: only the script knows
    exports: Mapping[str, str] = field(default_factory=dict)  # set by the launcher, for all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The plan of a run: start `agent` in this process if it is set, else `commands`."""

    commands: tuple[Command, ...]
    agent: tuple[str, ...] | None  # torchrun's options
    env: Mapping[str, str]  # for the agent
    notes: tuple[str, ...]  # for the user, printed before the start
    spare: int = 0  # number of commands that may fail


def _hosts(options: argparse.Namespace, around: HostState) -> tuple[Host, ...]:
    """Hosts and devices after all filters. Without a hostfile: this host, with a device per rank."""
    if around.hostfile is not None:
        selected = hosts.parse_hostfile(around.hostfile, options.hostfile)
    else:
        slots = max(options.nproc or 1, around.num_devices)
        selected = (Host(name="localhost", devices=tuple(range(slots))),)
    if options.include:
        selected = hosts.include(selected, options.include)
    if options.exclude:
        selected = hosts.exclude(selected, options.exclude)
    return hosts.limit(selected, options.num_nodes if around.hostfile is not None else None, options.nproc)


def _default_launcher(options: argparse.Namespace, around: HostState, chosen: Sequence[Host], place: Node | None) -> str:
    if options.launcher:
        return str(options.launcher)
    if options.node_rank is not None or options.no_ssh or place is not None:
        return "local"
    if around.hostfile is not None:
        alone = len(chosen) == 1 and chosen[0].name in (*_THIS_HOST, *around.names)
        return "local" if alone else "ssh"
    in_allocation = int(around.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 and "RANK" not in around.environ
    return "slurm" if in_allocation and (options.num_nodes or 2) > 1 else "local"


def _node_of_this_host(options: argparse.Namespace, around: HostState, chosen: Sequence[Host], place: Node | None) -> Node:
    """This host's place, if each host starts only its own ranks. Elastic hosts are numbered at the rendezvous: all give 0."""
    known = place or Node(num_nodes=1, node_rank=0, master_addr=None, master_port=None)
    if options.elastic:
        wanted, num_nodes, node_rank = f"--elastic {options.elastic}", int(options.elastic.partition(":")[2]), 0
    else:
        num_nodes = len(chosen) if around.hostfile is not None else options.num_nodes or known.num_nodes
        wanted, node_rank = f"--num_nodes {num_nodes}", _node_rank(options.node_rank, place, num_nodes)
    master = options.master_addr or known.master_addr or (chosen[0].name if around.hostfile is not None else None)
    if num_nodes > 1 and master is None:
        raise ValueError(f"{wanted} needs --master_addr, the name or address of the host where all meet, the same on all hosts")
    return Node(num_nodes, node_rank, master, options.master_port or known.master_port)


def _node_rank(stated: int | None, place: Node | None, num_nodes: int) -> int:
    if stated is None and place is None and num_nodes > 1:
        raise ValueError(
            f"--num_nodes {num_nodes} needs --node_rank 0..{num_nodes - 1} on each node, or a --hostfile to start all from here"
        )
    node_rank = stated if stated is not None else place.node_rank if place else 0
    if not 0 <= node_rank < num_nodes:
        raise ValueError(f"--node_rank {node_rank} must be in 0..{num_nodes - 1} for {num_nodes} node(s); set --num_nodes")
    return node_rank


def _exports(around: HostState) -> tuple[dict[str, str], list[str]]:
    """The variables of the environment files, and a note on each file."""
    merged = dict(around.exports)
    notes = []
    for path, text in around.env_files:
        variables = environment.parse_file(text, path)
        merged |= variables
        notes.append(f"from {path}: {environment.shown(variables) or 'nothing'}")
    return merged, notes


def _local_mask(mask: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the ranks of this host. Device numbers index into the variable's current value, if it is set."""
    if mask is None:
        return {}
    visible = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    chosen = [int(device) for device in mask.split(",")]
    if visible and max(chosen) >= len(visible):
        raise ValueError(f"device {max(chosen)} is out of range for CUDA_VISIBLE_DEVICES={','.join(visible)}; count from 0")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[device] if visible else str(device) for device in chosen)}


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _describe_local(options: argparse.Namespace, around: HostState, num_ranks: int, place: Node) -> str:
    text = f"{_counted(num_ranks, 'rank')} on this host"
    if options.nproc is None and around.hostfile is None:
        devices = _counted(around.num_devices, "CUDA device")
        text += f" ({devices})" if around.num_devices else " (no CUDA device; set --nproc N to start more)"
    if place.num_nodes > 1:
        master = f"{place.master_addr}:{place.master_port or DEFAULT_PORT}"
        position = f"{options.elastic} hosts" if options.elastic else f"node {place.node_rank} of {place.num_nodes}"
        text += f"; {position}, master {master}"
    return text


def _start_here(options: argparse.Namespace, around: HostState, job: Job, place: Node) -> Start:
    """Plan one node, whose agent runs in this process."""
    exports, notes = _exports(around)
    host = job.hosts[place.node_rank if around.hostfile is not None and len(job.hosts) > 1 else 0]
    port = place.master_port or (around.free_port if place.num_nodes == 1 else DEFAULT_PORT)
    job = replace(job, hosts=(host,), master_addr=place.master_addr or "127.0.0.1", master_port=port)
    agent = commands.one_node(job, num_nodes=place.num_nodes, node_rank=place.node_rank)
    env = {**exports, **_local_mask(host.mask, around.environ)}
    summary = _describe_local(options, around, len(host.devices), place)
    if job.cores:
        share(around.cores, job.cores, len(host.devices), 0)  # raises, before anything has started
    unused = [name for name in ("launcher_args", "ssh_port", "venv_script") if getattr(options, name)]
    notes += [f"--{name} has no effect: ranks on this host are started without a launcher" for name in unused] + _about_logs(job)
    if options.elastic and options.node_rank is not None:
        notes.append("--node_rank has no effect: elastic hosts number themselves where they meet")
    return Start(commands=(), agent=tuple(agent), env=env, notes=(summary, *notes))


def _srun(options: argparse.Namespace, around: HostState, job: Job, from_files: Mapping[str, str]) -> tuple[list[Command], int]:
    """The srun of a job, which exports this process's variables itself, and the number of its nodes."""
    rendezvous = {"MASTER_ADDR": options.master_addr, "MASTER_PORT": options.master_port}
    explicit = {name: str(value) for name, value in rendezvous.items() if value}
    nodes = None
    if around.hostfile is None:
        nodes = options.num_nodes or int(around.environ.get("SLURM_JOB_NUM_NODES", "1"))
    return commands.slurm(replace(job, exports={**from_files, **explicit}), num_nodes=nodes), nodes or len(job.hosts)


def _start_elsewhere(options: argparse.Namespace, around: HostState, job: Job, launcher: str) -> Start:
    """Plan several nodes, or a launcher that starts the ranks itself."""
    from_files, notes = _exports(around)
    if options.ssh_port and launcher not in ("ssh", "pdsh"):
        notes.append(f"--ssh_port has no effect: --launcher {launcher} does not use ssh; see --launcher_args")
    if options.venv_script and launcher not in ("ssh", "pdsh"):
        notes.append(f"--venv_script has no effect: --launcher {launcher} hands on this environment")
    master = options.master_addr or job.hosts[0].name
    if options.master_addr is None and master in _THIS_HOST and any(host.name not in _THIS_HOST for host in job.hosts):
        raise ValueError(
            f"the first host is {master}, which other hosts cannot reach; set --master_addr, or write its real name in the hostfile"
        )
    if launcher == "slurm":
        started, num_nodes = _srun(options, around, job, from_files)
        num_ranks, address = num_nodes * len(job.hosts[0].devices), ""
    else:
        shared = environment.propagated(around.environ)
        port = options.master_port or DEFAULT_PORT
        job = replace(job, master_addr=master, master_port=port, exports={**shared, **from_files})
        started, num_nodes, num_ranks = commands.LAUNCHERS[launcher](job), len(job.hosts), job.num_ranks
        address = f"; master {master}:{port}"
        notes.insert(0, f"exported environment: {environment.shown(shared) or 'nothing'}")
    summary = f"{_counted(num_ranks, 'rank')} on {_counted(num_nodes, 'host')}, by {launcher}{address}"
    spare = len(started) - int(options.elastic.partition(":")[0]) if options.elastic else 0
    if spare < 0:
        raise ValueError(f"--elastic {options.elastic} needs at least as many hosts, and the hostfile selects {len(started)}")
    notes += _about_logs(job)
    return Start(commands=tuple(started), agent=None, env={}, notes=(summary, *notes), spare=spare)


def _about_logs(job: Job) -> list[str]:
    return [] if job.log is None else [f"output of the ranks: {job.log}_rank*.log"]


def _refuse_without_hostfile(options: argparse.Namespace, launcher: str) -> None:
    if launcher in ("ssh", "pdsh"):
        raise ValueError(f"--launcher {launcher} needs --hostfile, with one `HOST slots=N` per line")
    if launcher in ("openmpi", "mpich") and (options.num_nodes or 1) > 1:
        raise ValueError(f"--launcher {launcher} with --num_nodes {options.num_nodes} needs --hostfile, which names the hosts")


def _refuse_without_python(options: argparse.Namespace) -> None:
    if options.module and options.no_python:
        raise ValueError("--module and --no_python are mutually exclusive: a module needs Python")
    if options.no_python and options.pass_local_rank:
        raise ValueError("--pass_local_rank needs a Python script; an executable can read LOCAL_RANK from its environment")


def _fill_in(options: argparse.Namespace, around: HostState) -> None:
    if options.elastic and not options.max_restarts:
        options.max_restarts = _ELASTIC_RESTARTS
    if options.nproc is None and around.hostfile is None:
        options.nproc = ranks_per_node(around.environ)


def _layout(
    options: argparse.Namespace, around: HostState, chosen: Sequence[Host], launcher: str, place: Node | None
) -> tuple[list[str], dict[str, str]]:
    """A report on the placement of ranks, and variables for the ranks. Raises ValueError if the mesh does not fit."""
    if around.mesh is None:
        return [], {}

    ranks = [(host.name, len(host.devices)) for host in chosen]
    if around.hostfile is None:
        in_job = around.environ.get("SLURM_JOB_NUM_NODES", "1") if launcher == "slurm" else place.num_nodes if place else 1
        num_nodes = options.num_nodes or int(in_job)
        ranks = [(f"node {i}" if num_nodes > 1 else "this host", ranks[0][1]) for i in range(num_nodes)]
    notes = arrange(around.mesh, ranks, may_change=options.elastic is not None)
    exports = {VARIABLE: shown_mesh(options.mesh)} if options.mesh else {}
    if notes and not options.quiet:
        exports[SHOWN] = notes[0].partition("\n")[0]
    is_first = (options.node_rank or (place.node_rank if place else 0)) == 0
    return notes if is_first else [], exports


def plan_run(options: argparse.Namespace, around: HostState) -> Start:
    """Decide how `slipstream run` starts the job. Raises ValueError for invalid or incomplete options."""
    _refuse_without_python(options)
    _fill_in(options, around)
    place = node(around.environ)
    chosen = _hosts(options, around)
    launcher = _default_launcher(options, around, chosen, place)
    layout, exports = _layout(options, around, chosen, launcher, place)
    start = _start(options, replace(around, exports=exports), chosen, launcher, place)
    return replace(start, notes=(*start.notes, *layout))


def _start(options: argparse.Namespace, around: HostState, chosen: tuple[Host, ...], launcher: str, place: Node | None) -> Start:
    job = Job(
        hosts=chosen,
        master_addr="",
        master_port=0,
        python=around.python,
        directory=around.directory,
        program=options.script,
        arguments=tuple(options.arguments),
        launcher_args=tuple(options.launcher_args),
        log=options.enable_each_rank_log and os.path.join(options.enable_each_rank_log, around.time),
        cores=options.bind_core_list or ("all" if options.bind_cores_to_rank else None),
        **{name: getattr(options, name) for name in _JOB_OPTIONS},
    )
    if launcher == "local":
        if around.hostfile is not None and len(chosen) > 1 and not options.elastic and options.node_rank is None and place is None:
            raise ValueError(
                f"--launcher local with {len(chosen)} hosts needs --node_rank on each; or use --launcher ssh to start all from here"
            )
        return _start_here(options, around, job, _node_of_this_host(options, around, chosen, place))
    if around.hostfile is None:
        _refuse_without_hostfile(options, launcher)
    return _start_elsewhere(options, around, job, launcher)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None


def _env_files(explicit: str | None) -> list[Path]:
    if explicit is not None:
        return [Path(explicit)]
    folders = dict.fromkeys((Path.home(), Path.cwd()))
    return [path for folder in folders for name in environment.FILES if (path := folder / name).is_file()]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def read_host(options: argparse.Namespace) -> HostState:
    """Read the state of this host for `plan_run`. Raises ValueError if a file cannot be read."""
    import torch

    return HostState(
        environ=dict(os.environ),
        directory=os.getcwd(),
        python=sys.executable,
        names=tuple(dict.fromkeys((socket.gethostname(), socket.getfqdn()))),
        num_devices=torch.cuda.device_count(),
        free_port=_free_port(),
        time=time.strftime("%Y%m%d%H%M%S"),
        cores=cores_of(os.sched_getaffinity(0)),
        hostfile=_read(options.hostfile) if options.hostfile else None,
        env_files=tuple((str(path), _read(path)) for path in _env_files(options.env_file)),
        mesh=read_mesh(options.mesh, options.arguments),
    )


def _check_program(options: argparse.Namespace) -> None:
    """For ranks on this host: report a missing program in one line, not as a failure of every rank."""
    script = options.script
    if options.enable_each_rank_log and os.path.isfile(options.enable_each_rank_log):
        raise ValueError(f"--enable_each_rank_log {options.enable_each_rank_log} is a file; name a folder")
    if options.no_python:
        if shutil.which(script) is None:
            raise ValueError(f"{script}: no such executable (--no_python runs it without Python)")
    elif not options.module and (not Path(script).exists() or Path(script).is_dir()):
        folder = Path(script).parent
        siblings = [entry.name for entry in folder.glob("*.py")] if folder.is_dir() else []
        near = difflib.get_close_matches(Path(script).name, siblings, n=1)
        hint = f"; did you mean {folder / near[0]}?" if near else "; --module runs a module by its dotted name"
        raise ValueError(f"{script}: no such script{hint}")


def execute(options: argparse.Namespace) -> int:
    """Run the `slipstream run` command. Returns the exit code."""
    start = plan_run(options, read_host(options))
    if start.agent is not None:
        _check_program(options)
    if not options.quiet:
        for note in start.notes:
            print(f"slipstream run: {note}", file=sys.stderr, flush=True)
    if options.dry_run:
        shown = [(command.env, command.argv) for command in start.commands]
        if start.agent is not None:
            shown.append((start.env, (sys.executable, "-m", "torch.distributed.run", *start.agent)))
        for env, argv in shown:
            settings = [f"{name}={value}" for name, value in env.items()]
            print(shlex.join(["env", *settings, *argv] if settings else argv))
        return 0
    with _pid_file() if options.save_pid else nullcontext():
        if start.agent is None:
            from slipstream.launch.remote import run_commands

            return run_commands(start.commands, start.spare)
        from slipstream.launch.agent import run_node

        os.environ.update(start.env)
        return run_node(start.agent, report=False, quiet=options.quiet)


@contextmanager
def _pid_file() -> Iterator[None]:
    """While the job runs, a file with DeepSpeed's name holds the pid of the process to which a signal stops all ranks."""
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    path.write_text(str(os.getpid()))
    print(f"slipstream run: launcher pid {os.getpid()}, in {path}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
