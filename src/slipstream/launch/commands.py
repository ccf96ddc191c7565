"""Build the commands that start a job. Pure functions: they run nothing, read no file and do not inspect this machine.

`ssh` and `pdsh` start one agent per node (`slipstream.launch.agent`, which accepts torchrun's options), and each agent starts its
node's ranks. `srun` and `mpirun` start the ranks themselves (`slipstream.launch.worker`), which find their ranks with `discover`.

Glossary: *agent* the process that supervises one node; *worker* the process of one rank, which runs the user's script; *exports*
environment variables to set on other hosts; *lease* a pipe to a remote agent's stdin: when it is closed, the agent stops.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.launch.hosts import Host

AGENT = "slipstream.launch.agent"
WORKER = "slipstream.launch.worker"
# Seconds until an unreachable host counts as lost; seconds that a new round of ranks, with the fewest hosts, waits for more
_ELASTIC = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program, its hosts and its environment."""

    hosts: tuple[Host, ...]
    master_addr: str
    master_port: int
    python: str
    directory: str  # where the ranks run
    program: str  # script, module or executable
    arguments: tuple[str, ...]
    module: bool = False
    no_python: bool = False
    pass_local_rank: bool = False
    max_restarts: int = 0
    elastic: str | None = None  # MIN:MAX hosts; None: a fixed number
    quiet: bool = False
    exports: Mapping[str, str] = field(default_factory=dict)
    ssh_port: int | None = None
    log: str | None = None  # each rank's output goes to the file <log>_rank<N>.log
    cores: str | None = None  # "all" or a list: each rank is bound to its share of these
    venv_script: str | None = None  # sourced on other hosts
    launcher_args: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    @property
    def is_bare(self) -> bool:
        """Whether the program runs without our worker around it."""
        return self.no_python and self.log is None and self.cores is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process to start on this host."""

    name: str  # for messages
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # on top of this process's
    lease: bool = False


def worker_arguments(job: Job, *, report: bool) -> list[str]:
    """The arguments after `python -m slipstream.launch.worker`."""
    flags = {"--report": report, "--pass-local-rank": job.pass_local_rank, "-m": job.module, "--exec": job.no_python}
    options = [flag for flag, on in flags.items() if on]
    options += [f"--{name}={value}" for name, value in (("log", job.log), ("cores", job.cores)) if value is not None]
    return [*options, job.program, *job.arguments]


def _remote_agent(job: Job, *flags: str) -> list[str]:
    quiet = ["--quiet"] if job.quiet else []
    return [job.python, "-u", "-m", AGENT, "--report", *flags, *quiet]


def agent_argv(job: Job, *, num_nodes: int, node_rank: int, num_ranks: int, local_addr: str | None) -> list[str]:
    """The arguments of torch.distributed.run for one node.

    With restarts: the c10d rendezvous, through which agents learn of each other's failures and agree on a new port for each
    attempt; it assigns the node ranks itself. Without restarts: the static rendezvous, with our node ranks.
    """
    argv = [f"--nnodes={job.elastic or num_nodes}", f"--nproc-per-node={num_ranks}", f"--max-restarts={job.max_restarts}"]
    if job.max_restarts:
        endpoint = f"{job.master_addr}:{job.master_port}"
        argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id=slipstream-{job.master_port}"]
        argv += [f"--local-addr={local_addr}"] if local_addr else []
        argv += [f"--rdzv-conf={_ELASTIC}"] if job.elastic else []
    else:
        argv += [f"--node-rank={node_rank}", f"--master-addr={job.master_addr}", f"--master-port={job.master_port}"]
    # After `--`, argparse takes no option of the script for an abbreviation of torchrun's
    if job.is_bare:
        return [*argv, "--no-python", "--", job.program, *job.arguments]
    return [*argv, "--module", "--", WORKER, *worker_arguments(job, report=False)]


def one_node(job: Job, *, num_nodes: int = 1, node_rank: int = 0) -> list[str]:
    """The agent's arguments for this host: a single node, or one of several that a user or scheduler starts one by one."""
    reachable = job.master_addr in LOOPBACK or (node_rank == 0 and not job.elastic)
    return agent_argv(
        job,
        num_nodes=num_nodes,
        node_rank=node_rank,
        num_ranks=len(job.hosts[0].devices),
        local_addr=job.master_addr if reachable else None,
    )


def _remote_line(job: Job, exports: Mapping[str, str], agent: Sequence[str]) -> str:
    """The command line for a remote shell, with everything quoted. `exec` lets the agent receive the signals."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in exports.items()]
    if job.venv_script:  # the variables that it sets take precedence
        before = ["export", *settings, "&&"] if settings else []
        return f"cd {shlex.quote(job.directory)} && {' '.join([*before, '.', shlex.quote(job.venv_script), '&&', 'exec', *agent])}"
    env = ["env", *settings] if settings else []
    return f"cd {shlex.quote(job.directory)} && exec {' '.join([*env, *agent])}"


def ssh(job: Job) -> list[Command]:
    """One ssh per node. `BatchMode` fails immediately if a host asks for a password, instead of hanging at an invisible prompt."""
    commands = []
    for node_rank, host in enumerate(job.hosts):
        exports = {**job.exports, **({"CUDA_VISIBLE_DEVICES": host.mask} if host.mask else {})}
        argv = agent_argv(job, num_nodes=len(job.hosts), node_rank=node_rank, num_ranks=len(host.devices), local_addr=host.name)
        agent = map(shlex.quote, (*_remote_agent(job, "--lease"), *argv))
        port = ["-p", str(job.ssh_port)] if job.ssh_port else []
        line = _remote_line(job, exports, list(agent))
        ssh_argv = ("ssh", "-o", "BatchMode=yes", *port, *job.launcher_args, host.name, line)
        commands.append(Command(name=host.name, argv=ssh_argv, lease=True))
    return commands


def pdsh(job: Job) -> list[Command]:
    """One pdsh for all nodes, which replaces `%n` with the node's rank. The remote terminal (`-tt`) ends the agents with pdsh.

    The fan-out is the number of nodes: with a smaller one, the first nodes would wait for nodes that are not started yet.
    """
    hosts = job.hosts
    if job.elastic:
        _refuse_restarts(job, "pdsh")
    agent = agent_argv(job, num_nodes=len(hosts), node_rank=0, num_ranks=0, local_addr=None)
    words = [shlex.quote(word) for word in (*_remote_agent(job), *agent)]
    words[words.index("--nproc-per-node=0")] = '--nproc-per-node="$RANKS"'  # index() finds ours, which precede the script's
    if not job.max_restarts:
        words[words.index("--node-rank=0")] = '--node-rank="$NODE"'
    cases = []
    for node_rank, host in enumerate(hosts):
        mask = f" export CUDA_VISIBLE_DEVICES={host.mask};" if host.mask else ""
        cases.append(f"{node_rank}) RANKS={len(host.devices)};{mask};")
    line = f"case $NODE in {' '.join(cases)} esac; {_remote_line(job, job.exports, words)}"
    line = "NODE=%n; " + line.replace("%", "%%")  # pdsh expands %
    port = f" -p {job.ssh_port}" if job.ssh_port else ""
    names = ",".join(host.name for host in hosts)
    argv = ("pdsh", "-S", "-N", "-R", "ssh", "-f", str(len(hosts)), *job.launcher_args, "-w", names, line)
    return [Command(name="pdsh", argv=argv, env={"PDSH_SSH_ARGS_APPEND": f"-tt -o BatchMode=yes{port}"})]


def _ranks_per_host(job: Job, launcher: str) -> int:
    """The number of ranks per host, for launchers that accept only one number."""
    counts = {len(host.devices) for host in job.hosts}
    if len(counts) > 1:
        listed = ", ".join(f"{host.name}: {len(host.devices)}" for host in job.hosts)
        raise ValueError(f"--launcher {launcher} needs the same number of ranks on all hosts ({listed}); set --nproc or use ssh")
    return counts.pop()


def _common_mask(job: Job, launcher: str) -> dict[str, str]:
    masks = {host.mask for host in job.hosts}
    if len(masks) > 1:
        listed = ", ".join(f"{host.name}: {host.devices}" for host in job.hosts)
        raise ValueError(f"--launcher {launcher} needs the same devices on all hosts ({listed}); change the filters or use ssh")
    mask = masks.pop()
    return {"CUDA_VISIBLE_DEVICES": mask} if mask else {}


def _program(job: Job) -> list[str]:
    if job.is_bare:
        return [job.program, *job.arguments]
    return [job.python, "-u", "-m", WORKER, *worker_arguments(job, report=True)]


def _refuse_restarts(job: Job, launcher: str) -> None:
    if job.elastic:
        raise ValueError(f"--elastic {job.elastic}: {launcher} cannot go on with fewer hosts; use --launcher ssh or local")
    if job.max_restarts:
        raise ValueError(
            f"--max_restarts {job.max_restarts}: {launcher} starts the ranks itself and cannot restart them; use its requeueing "
            "or --launcher ssh"
        )


def slurm(job: Job, *, num_nodes: int | None = None) -> list[Command]:
    """One srun inside the allocation, a task per rank. If the job names no hosts, Slurm chooses `num_nodes` nodes. `discover` finds
    MASTER_ADDR in the step's node list and derives MASTER_PORT from job and step, so that jobs on the same node do not collide;
    the user's values, if set, are among the exports."""
    _refuse_restarts(job, "slurm")
    per_host = _ranks_per_host(job, "slurm")
    nodes = num_nodes or len(job.hosts)
    named = [] if num_nodes else [f"--nodelist={','.join(host.name for host in job.hosts)}"]
    argv = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * per_host}", f"--ntasks-per-node={per_host}", *named]
    argv += ["--distribution=block"]  # ranks of a host are consecutive, whatever the cluster's default
    argv += ["--kill-on-bad-exit=1", "--export=ALL", f"--chdir={job.directory}", *job.launcher_args, *_program(job)]
    env = {**job.exports, **_common_mask(job, "slurm")}
    return [Command(name="srun", argv=tuple(argv), env=env)]


def _mpi_environment(job: Job, launcher: str) -> dict[str, str]:
    rendezvous = {"MASTER_ADDR": job.master_addr, "MASTER_PORT": str(job.master_port)}
    return {**job.exports, **_common_mask(job, launcher), **rendezvous}


def openmpi(job: Job) -> list[Command]:
    """One mpirun; a rank per slot, hosts filled in order, without binding (else a rank's threads would share one core)."""
    _refuse_restarts(job, "openmpi")
    hosts = ",".join(f"{host.name}:{len(host.devices)}" for host in job.hosts)
    settings = [word for name, value in _mpi_environment(job, "openmpi").items() for word in ("-x", f"{name}={value}")]
    argv = ["mpirun", "-np", str(job.num_ranks), "--host", hosts, "--map-by", "slot", "--bind-to", "none"]
    argv += ["--wdir", job.directory, *settings, *job.launcher_args, *_program(job)]
    return [Command(name="mpirun", argv=tuple(argv))]


def mpich(job: Job) -> list[Command]:
    """One Hydra mpiexec (MPICH, Intel MPI), hosts filled in order."""
    _refuse_restarts(job, "mpich")
    hosts = ",".join(f"{host.name}:{len(host.devices)}" for host in job.hosts)
    settings = [word for name, value in _mpi_environment(job, "mpich").items() for word in ("-genv", name, value)]
    argv = ["mpiexec", "-n", str(job.num_ranks), "-hosts", hosts, "-wdir", job.directory]
    argv += [*settings, *job.launcher_args, *_program(job)]
    return [Command(name="mpiexec", argv=tuple(argv))]


Launcher = Callable[[Job], list[Command]]
LAUNCHERS: Mapping[str, Launcher] = {"ssh": ssh, "pdsh": pdsh, "slurm": slurm, "openmpi": openmpi, "mpich": mpich}
