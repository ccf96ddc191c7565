"""`slipstream run`'s decisions, and one-line errors with exit code 2."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import slipstream
from slipstream.config import load_config
from slipstream.launch.cli import build_parser, main
from slipstream.launch.layout import read_mesh
from slipstream.launch.run import HostState, Start, plan_run

AROUND = HostState(environ={}, directory="/work", python="/py", names=("me", "me.local"), num_devices=0, free_port=12345)
HOSTFILE = "a slots=2\nb slots=2\n"


def plan(line: str, around: HostState = AROUND) -> Start:
    return plan_run(build_parser().parse_args(["run", *shlex.split(line)]), around)


def agent(start: Start) -> str:
    assert start.agent is not None
    return shlex.join(start.agent)


def test_default_is_a_rank_per_device_and_it_is_said() -> None:
    start = plan("train.py")
    assert "--nproc-per-node=1 " in agent(start)
    assert start.notes[0] == "1 rank on this host (no CUDA device; set --nproc N to start more)"
    start = plan("train.py", replace(AROUND, num_devices=4))
    assert "--nproc-per-node=4 " in agent(start)
    assert start.notes[0] == "4 ranks on this host (4 CUDA devices)"


@pytest.mark.parametrize("flag", ["--nproc", "--num_gpus", "--num-gpus", "--nproc_per_node", "--nproc-per-node"])
def test_spellings(flag: str) -> None:
    start = plan(f"{flag} 3 train.py --nproc 9 --lr 1 -m x -- y")
    assert agent(start) == (
        "--nnodes=1 --nproc-per-node=3 --max-restarts=0 --node-rank=0 --master-addr=127.0.0.1 "
        "--master-port=12345 --module -- slipstream.launch.worker train.py --nproc 9 --lr 1 -m x -- y"
    )


def test_devices_of_this_host() -> None:
    around = replace(AROUND, num_devices=4)
    assert plan("--include localhost:1,3 t.py", around).env == {"CUDA_VISIBLE_DEVICES": "1,3"}
    visible = replace(around, environ={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert plan("--exclude localhost:0 t.py", visible).env == {"CUDA_VISIBLE_DEVICES": "5,6,7"}
    assert plan("--nproc 2 t.py", around).env == {}


def test_one_of_several_nodes_by_hand() -> None:
    start = plan("--num_nodes 2 --node_rank 1 --master_addr a --nproc 2 t.py")
    assert "--nnodes=2 --nproc-per-node=2 --max-restarts=0 --node-rank=1 --master-addr=a --master-port=29500" in agent(start)
    start = plan("--no_ssh --node_rank 1 --hostfile h t.py", replace(AROUND, hostfile="a slots=2\nb slots=1\n"))
    assert "--nnodes=2 --nproc-per-node=1 --max-restarts=0 --node-rank=1 --master-addr=a" in agent(start)


def test_one_of_several_nodes_by_a_scheduler() -> None:
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "23456"}
    start = plan("t.py", replace(AROUND, environ=pet | {"PET_NPROC_PER_NODE": "3"}))
    assert "--nnodes=2 --nproc-per-node=3" in agent(start)
    assert "--nproc-per-node=4" in agent(plan("t.py", replace(AROUND, environ=pet | {"PET_NPROC_PER_NODE": "auto"}, num_devices=4)))
    assert "--nproc-per-node=1" in agent(plan("--nproc 1 t.py", replace(AROUND, environ=pet | {"PET_NPROC_PER_NODE": "3"})))
    assert "--node-rank=1 --master-addr=m --master-port=23456" in agent(start)


def test_hosts_are_reached_by_ssh() -> None:
    start = plan("--hostfile h t.py", replace(AROUND, hostfile=HOSTFILE, environ={"NCCL_DEBUG": "INFO"}))
    assert [command.argv[0] for command in start.commands] == ["ssh", "ssh"]
    assert start.agent is None
    assert start.notes == ("4 ranks on 2 hosts, by ssh; master a:29500", "exported environment: NCCL_DEBUG=INFO")


def test_a_hostfile_of_this_host_is_local() -> None:
    assert plan("--hostfile h t.py", replace(AROUND, hostfile="me slots=2\n")).agent is not None
    assert plan("--hostfile h --launcher ssh t.py", replace(AROUND, hostfile="me slots=2\n")).agent is None


def test_an_allocation_is_filled_by_srun() -> None:
    slurm = replace(AROUND, environ={"SLURM_JOB_NUM_NODES": "3"}, num_devices=2)
    (command,) = plan("t.py", slurm).commands
    assert command.argv[:4] == ("srun", "--nodes=3", "--ntasks=6", "--ntasks-per-node=2")
    assert command.env == {}, "a port for all jobs would make those meet that share a node"
    (command,) = plan("--master_addr a --master_port 1234 t.py", slurm).commands
    assert command.env == {"MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert plan("--num_nodes 1 t.py", slurm).agent is not None
    assert plan("t.py", replace(slurm, environ={"SLURM_JOB_NUM_NODES": "1"})).agent is not None


def test_environment_files() -> None:
    files = (("/h/.deepspeed_env", "A=1\nB=1\n"), ("/w/.slipstream_env", "B=2\n"))
    start = plan("t.py", replace(AROUND, env_files=files))
    assert start.env == {"A": "1", "B": "2"}
    assert start.notes[1:] == ("from /h/.deepspeed_env: A=1 B=1", "from /w/.slipstream_env: B=2")
    (command, _) = plan("-H h t.py", replace(AROUND, env_files=files, hostfile=HOSTFILE)).commands
    assert "env A=1 B=2 /py" in command.argv[-1]


def test_options_without_effect_are_said() -> None:
    notes = plan("--ssh_port 2222 --launcher_args=-v t.py").notes
    assert [note.partition(":")[0] for note in notes[1:]] == ["--launcher_args has no effect", "--ssh_port has no effect"]
    slurm = replace(AROUND, environ={"SLURM_JOB_NUM_NODES": "2"})
    assert "--ssh_port has no effect" in " ".join(plan("--ssh_port 2222 t.py", slurm).notes)
    remote = replace(AROUND, hostfile=HOSTFILE)
    assert "no effect" not in " ".join(plan("-H h --ssh_port 2222 --launcher_args=-v t.py", remote).notes)


def test_what_a_rank_does_before_its_script_reaches_every_launcher() -> None:
    """Logs and cores are options of the worker, which then also starts executables."""
    around = replace(AROUND, time="20260102030405", cores=((0, 2), (1, 3)), hostfile=HOSTFILE)
    flags = "--log=logs/20260102030405 --cores=0-1"
    for line in ("", "--launcher pdsh", "--launcher openmpi", "--launcher slurm", "--node_rank 0 --launcher local"):
        start = plan(f"-H h {line} --enable_each_rank_log logs --bind_core_list 0-1 --no_python prog x", around)
        words = agent(start) if start.agent else start.commands[0].argv[-1]
        words = words if start.agent or "worker" in words else shlex.join(start.commands[0].argv)
        assert words.endswith(f"{flags} prog x") and "slipstream.launch.worker" in words and "--exec" in words, line
        assert "output of the ranks: logs/20260102030405_rank*.log" in start.notes
    assert agent(plan("--bind_cores_to_rank t.py", around=replace(around, hostfile=None))).endswith("worker --cores=all t.py")
    assert agent(plan("--no_python prog")).endswith("--no-python -- prog")


def test_a_script_is_sourced_on_other_hosts() -> None:
    around = replace(AROUND, hostfile=HOSTFILE, environ={"PATH": "/a b"})
    command, _ = plan("-H h --venv_script '/v/my activate' t.py", around).commands
    assert command.argv[-1].startswith("cd /work && export PATH='/a b' && . '/v/my activate' && exec /py -u -m")
    assert "--venv_script has no effect" in " ".join(plan("--venv_script v t.py").notes)
    assert "--venv_script has no effect" in " ".join(plan("-H h --launcher openmpi --venv_script v t.py", around).notes)


def test_more_ranks_than_cores_are_refused_before_anything_starts() -> None:
    around = replace(AROUND, cores=((0, 2), (1, 3)))
    with pytest.raises(ValueError, match=r"3 ranks and 2 core\(s\) on this host; start at most one rank a core"):
        plan("--bind_cores_to_rank --nproc 3 t.py", around)
    with pytest.raises(ValueError, match=r"--bind_core_list 3-4: this host lets the job use cores 0,1,2,3, not 4"):
        plan("--bind_core_list 3-4 t.py", around)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num_nodes 2 t.py", "needs --node_rank 0..1"),
        ("--num_nodes 2 --node_rank 0 t.py", "needs --master_addr"),
        ("--num_nodes 2 --node_rank 2 --master_addr a t.py", r"--node_rank 2 must be in 0\.\.1"),
        ("--launcher ssh t.py", "needs --hostfile"),
        ("--launcher openmpi --num_nodes 2 t.py", "needs --hostfile"),
        ("--module --no_python t.py", "mutually exclusive"),
        ("--no_python --pass_local_rank t.py", "needs a Python script"),
    ],
)
def test_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(line)


TWO_BY_FOUR = "a slots=4\nb slots=4\n"


def known(line: str, hostfile: str = TWO_BY_FOUR) -> HostState:
    """This host, and what is read of the mesh."""
    options = build_parser().parse_args(["run", *shlex.split(line)])
    return replace(AROUND, hostfile=hostfile, mesh=read_mesh(options.mesh, options.arguments))


def test_the_mesh_is_laid_out_before_ranks_start(tmp_path: Path) -> None:
    """One table of hosts, ranks and places: tp innermost on a host; `--mesh` reaches every rank, also on other hosts."""
    line = "--hostfile h --mesh pp=2,tp=2 t.py"
    start = plan(line, known(line))
    assert start.notes[-1].split("\n") == [
        "mesh stage 2 x data 2 x tp 2",
        "  host  ranks  stage  data  tp",
        "  a     0-1    0      0     0-1",
        "  a     2-3    0      1     0-1",
        "  b     4-5    1      0     0-1",
        "  b     6-7    1      1     0-1",
    ]
    assert all("SLIPSTREAM_MESH=pp=2,tp=2" in command.argv[-1] for command in start.commands)
    config = tmp_path / "ds.json"
    config.write_text('{"pipeline": {"stages": 2}, /* a comment */ "tensor_parallel": {"autotp_size": 4}}')
    for line in (f"t.py --deepspeed_config {config}", f"t.py x --deepspeed={config}", f"-H h t.py --deepspeed --config {config}"):
        start = plan(line, replace(known(line), hostfile=None if "-H" not in line else TWO_BY_FOUR, num_devices=8))
        host = "a" if "-H" in line else "this host"
        assert start.notes[-1].split("\n")[2].split() == [*host.split(), "0-3", "0", "0-3"]
        assert "SLIPSTREAM_MESH=" not in str(start.commands), "the ranks read the config themselves"
    start = plan("--num_nodes 2 --node_rank 1 --master_addr a --nproc 4 t.py", replace(known("--mesh sp=8 t.py"), hostfile=None))
    assert not any(note.startswith("mesh") for note in start.notes), "node 0 has said it"
    assert "mesh" not in str(plan("t.py --config pyproject.toml", known("t.py --config pyproject.toml")).notes)


def test_slices_stay_on_a_host() -> None:
    """What would cross without need is refused; more slices than a host has ranks are warned of."""
    six = "a slots=6\nb slots=6\n"
    line = "--hostfile h --mesh tp=4 t.py"
    with pytest.raises(ValueError, match=r"--mesh: tp 4, and a has 6 ranks: .* use --nproc 4, or tp 3"):
        plan(line, known(line, six))
    assert "mesh data 2 x tp 4" in plan(f"--nproc 4 {line}", known(line, six)).notes[-1]
    line = "--hostfile h --mesh tp=8 t.py"
    *_, table, warning = plan(line, known(line)).notes
    assert table.startswith("mesh tp 8\n") and "on the hosts a, b, so the sums of each layer travel" in warning
    with pytest.raises(ValueError, match=r"a: 4, b: 4 are 8; start a multiple of 6, or use pp 2 x sp 1 x tp 2"):
        plan("--hostfile h t.py", known("--mesh pp=3,tp=2 t.py"))
    with pytest.raises(ValueError, match=r"tp 4, and a has 6 ranks"):
        plan("--hostfile h --elastic 1:2 t.py", known("--mesh tp=4 t.py", six))
    notes = plan("--hostfile h --elastic 1:2 t.py", known("--mesh tp=4,pp=2 t.py")).notes
    assert not any(note.startswith("mesh") for note in notes), "hosts come and go"


def test_two_sizes_of_an_axis(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"sequence_parallel_size": 2}')
    with pytest.raises(ValueError, match=r"--mesh sp=4, and the config has sequence_parallel_size 2; drop one of the two"):
        known(f"--mesh sp=4 t.py --config {config}")
    mesh = known(f"--mesh tp=2 t.py --config {config}").mesh
    assert mesh is not None and (dict(mesh.sizes), mesh.source) == ({"tp": 2, "sp": 2}, f"--mesh and {config}")


def test_the_ranks_read_the_launchers_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MESH", "pp=2,tp=4")
    config = {"train_batch_size": 8, "slipstream": {"mesh": {"pp": 2}, "transport": "gloo"}}
    assert load_config(config)["slipstream"] == {"mesh": {"pp": 2, "tp": 4}, "transport": "gloo"}
    for stated, text in (
        ({"tensor_parallel": {"autotp_size": 2}}, r"--mesh tp=4, and the config has tensor_parallel.autotp_size 2"),
        ({"slipstream": {"mesh": {"pp": 1}}}, r"--mesh pp=2, and the config has slipstream.mesh.pp 1; drop one"),
        ({"pipeline": {"stages": 1}}, r"--mesh pp=2, and the config has pipeline.stages 1"),
    ):
        with pytest.raises(ValueError, match=text):
            load_config(stated)
    off = {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}, "pipeline": {"stages": "auto"}}
    assert load_config(off)["slipstream"] == {"mesh": {"pp": 2, "tp": 4}}, "DeepSpeed's defaults state nothing"


def test_refused_with_hosts() -> None:
    with pytest.raises(ValueError, match="--launcher local with 2 hosts"):
        plan("--hostfile h --launcher local t.py", replace(AROUND, hostfile=HOSTFILE))
    with pytest.raises(ValueError, match="other hosts cannot reach"):
        plan("--hostfile h t.py", replace(AROUND, hostfile="localhost slots=1\nb slots=1\n"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run", "slipstream run: no script; slipstream run [options] script.py"),
        ("run --nprc 2 t.py", "slipstream run: unknown option --nprc; did you mean --nproc?"),
        ("run /dev t.py", "slipstream run: /dev: no such script"),
        ("run --hostfile /bin/true t.py", "slipstream run: cannot read /bin/true: 'utf-8' codec can't decode byte"),
        ("run --launcher-args '\"' t.py", "slipstream run: argument --launcher-args: No closing quotation"),
        ("run --nproc 0 t.py", "slipstream run: argument --nproc: '0' is not a number of 1 or more"),
        ("run --master_port 99999 t.py", "slipstream run: argument --master-port: '99999' is not a port"),
        ("run --bind_core_list 3-1 t.py", "slipstream run: argument --bind-core-list: '3-1' is not a list of cores; write 0-3,8"),
        ("run --enable_each_rank_log pyproject.toml t.py", "slipstream run: --enable_each_rank_log pyproject.toml is a file"),
        ("run --mesh pp=2,xp=2 t.py", "slipstream run: argument --mesh: 'pp=2,xp=2' are not sizes of the axes pp, sp, tp"),
        ("run --mesh tp=0 t.py", "slipstream run: argument --mesh: 'tp=0' are not sizes"),
        ("bench-comm --ops all_gatherr", "slipstream bench-comm: argument --ops: 'all_gatherr' is none of all_reduce, all_gather,"),
        ("bench-comm --nproc 1", "slipstream bench-comm: --nproc 1: a single rank communicates with nobody; start 2 or more"),
        ("bench-comm --min 2M --max 1M", "slipstream bench-comm: --max 1048576 is below --min 2097152"),
        ("bench-disk no/such", "slipstream bench-disk: there is no folder 'no/such'; create it, on a local disk"),
        ("bench-disk . --size 64K", "slipstream bench-disk: 65536 bytes are less than twice 1 x 131072, a setting"),
        ("bench-disk . --block-sizes 1000", "slipstream bench-disk: a block of 1000 bytes is not a multiple of 4096"),
        ("run no_such_script.py", "slipstream run: no_such_script.py: no such script"),
        ("run --hostfile /no/such/file t.py", "slipstream run: cannot read /no/such/file: No such file"),
        ("run --no_python no-such-program", "slipstream run: no-such-program: no such executable"),
        ("serve smollm2 --request-timeout 0", "slipstream serve: argument --request-timeout: '0' is not a number above 0"),
        ("serve smollm2 --request-timeout nan", "slipstream serve: argument --request-timeout: 'nan' is not a number above 0"),
        ("serve smollm2 --drain-timeout -1", "slipstream serve: argument --drain-timeout: '-1' is not a number of 0 or more"),
        ("serve smollm2 --drain-timeout nan", "slipstream serve: argument --drain-timeout: 'nan' is not a number of 0 or more"),
        ("serve smollm2 --max-body-bytes 0.0001", "slipstream serve: argument --max-body-bytes: '0.0001' is not a size"),
        ("train.py", "slipstream: invalid choice: 'train.py'"),
        ("servee", "slipstream: invalid choice: 'servee'"),
        ("serve smollm2 --max_num_seqs 4", "slipstream serve: unknown option --max_num_seqs; did you mean --max-running?"),
        ("generate smollm2 x --max_token 4", "slipstream generate: unknown option --max_token; did you mean --max-tokens?"),
        (
            "generate none x",
            "slipstream generate: argument MODEL: none is not a path, smollm2 or minilm; see slipstream generate --help\n",
        ),
        (
            "generate smollm3 x",
            "slipstream generate: argument MODEL: smollm3 is not a path; did you mean smollm2? see slipstream g",
        ),
        ("chat src/slipsteam", "slipstream chat: argument MODEL: src/slipsteam is not a path; did you mean src/slipstream? see "),
        ("generate smollm2 x --system y", "slipstream generate: --system needs --chat; add it"),
        ("generate smollm2 x ''", "slipstream generate: prompt 2 of 2 is empty"),
        ("chat smollm2 --temperature -1", "slipstream chat: temperature is -1.0; it must be between 0 and 100"),
        ("chat src", "slipstream chat: src has no tokenizer.json; add --tokenizer FOLDER"),
        ("serve smollm2 --api-key ''", "slipstream serve: argument --api-key: a key must not be empty"),
        ("serve smollm2 --tls-key /dev/null", "slipstream serve: --tls-key is given without --tls-cert"),
        ("serve smollm2 --tls-cert /nowhere", "slipstream serve: --tls-cert /nowhere: No such file or directory; they must be"),
        ("serve smollm2 --tls-cert /dev/null", "slipstream serve: --tls-cert /dev/null: [SSL] PEM lib"),
        ("serve smollm2 --cors-origin foo", "slipstream serve: --cors-origin: 'foo' is no origin; write http://localhost:3000"),
        ("serve smollm2 --cors-origin https://a.b/", "slipstream serve: --cors-origin: 'https://a.b/' is no origin"),
        ("serve smollm2 --cors-origin https://a.b:443", "slipstream serve: --cors-origin: 'https://a.b:443' is no origin"),
        ("serve smollm2 --otlp-traces localhost:4318", "slipstream serve: --otlp-traces is 'localhost:4318'; it must be a URL"),
        ("serve smollm2 --weights-folder /nowhere", "slipstream serve: argument --weights-folder: there is no folder '/nowhere'"),
        (
            "serve smollm2 'a=smollm2 --weights-folder /nowhere'",
            "slipstream serve 'a=smollm2 --weights-folder /nowhere': argument --weights-folder: there is no folder '/nowhere'",
        ),
        ("serve smollm2 --lora-root /nowhere", "slipstream serve: --lora-root is '/nowhere', but there is no such folder"),
        ("serve smollm2 --host 192.0.2.1", "slipstream serve: cannot listen on 192.0.2.1, port 8000: Cannot assign"),
        ("plan --ranks 8 --bandwidth 0 --model tests.toy:Lm", "slipstream plan: --bandwidth '0' is not a number above 0"),
        ("plan x.json --ranks 8 --model tests.toy:Lm", "slipstream plan: the config has no effect with --ranks: leave it out"),
        ("plan x.json --draw svg", "slipstream plan: --draw has no effect without --ranks: leave it out"),
        ("plan /no/such.json", "slipstream plan: no config file at '/no/such.json'"),
        ("", "slipstream: the following arguments are required: command"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(
    line: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is loaded before they are found."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("slipstream.init_inference", None, raising=False)
    try:
        code = main(shlex.split(line))
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(says)
    assert error.count("\n") == 1


def test_dry_run_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text("raise SystemExit(1)")
    assert main(["run", "--dry_run", "--nproc", "2", "--master_port", "1234", str(script), "--deepspeed_config", "x"]) == 0
    output = capsys.readouterr()
    assert output.out.rstrip().endswith(f"--master-port=1234 --module -- slipstream.launch.worker {script} --deepspeed_config x")
    assert "2 ranks on this host" in output.err


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ('"optimizer": {"type": "AdamW", "params": {"betas": [1.5, 0.9]}}', "refuses optimizer.params .*Invalid beta"),
        ('"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}', "betas must be 2 numbers, like .* not 0.9"),
        ('"optimizer": {"type": "LBFGS"}', "LBFGS"),
        ('"scheduler": {"type": "WarmupLR", "params": {}}', "has no optimizer"),
        (
            '"optimizer": {"type": "AdamW"}, '
            '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_step": 3}}',
            "unknown 'warmup_step'",
        ),
    ],
)
def test_plan_refuses_what_initialize_would(blocks: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"train_batch_size": 4, {blocks}}}')
    assert main(["plan", str(path)]) == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed, re.DOTALL) and "Traceback" not in printed, printed


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (1, r"pass --world 2, which fits the config: train_batch_size \(16\) != micro batch \(4\) x accumulation \(2\) x data"),
        (3, r"pass --world 2, which fits the config: train_batch_size"),
        (2, ""),
    ],
)
def test_plan_names_the_world_that_the_batch_sizes_fit(
    world: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}')
    assert main(["plan", str(path), "--world", str(world)]) == (2 if says else 0)
    printed = capsys.readouterr().err
    assert "Check batch" not in printed and re.match(f"slipstream plan: {says}" if says else "$", printed), printed
    path.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}')
    assert main(["plan", str(path), "--world", str(world)]) == 2
    assert capsys.readouterr().err.startswith("slipstream plan: train_batch_size (16) != micro batch (3)")  # no world fits


@pytest.mark.parametrize("block", ['"slipstream": {"mesh": {"pp": 2}}', '"tensor_parallel": {"autotp_size": 2}'])
def test_plan_does_not_predict_parts_of_a_model(block: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"train_micro_batch_size_per_gpu": 1, {block}}}')
    assert main(["plan", str(path), "--world", "4"]) == 0
    capsys.readouterr()
    assert main(["plan", str(path), "--world", "4", "--num-params", "1M"]) == 2
    assert re.search(r"over ranks \(pp \d, sp 1, tp \d, .* slipstream plan --ranks 4 --model M compares", capsys.readouterr().err)


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert main(["serve", "smollm2", "--port", port]) == 2
    assert capsys.readouterr().err.startswith(f"slipstream serve: cannot listen on 127.0.0.1, port {port}: Address already in use")


def test_every_long_option_has_two_spellings_and_help_one(capsys: pytest.CaptureFixture[str]) -> None:
    for spelling in ("--kv-cache-bytes", "--kv_cache_bytes"):
        assert build_parser().parse_args(["chat", "smollm2", spelling, "1.5G"]).kv_cache_bytes == 3 << 29
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    output = capsys.readouterr().out
    assert "--max-tokens N" in output and "default 256" in output and "--max_tokens" not in output


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_ctrl_c_and_a_reader_who_has_enough_are_silent(error: type[BaseException], code: int) -> None:
    """In processes of their own: standard output is replaced."""
    script = f"""
import sys
from slipstream.launch import cli, talk
def generate(options):
    print("x")
    raise {error.__name__}
talk.generate = generate
sys.exit(cli.main(["generate", "smollm2", "x"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    script = "from slipstream.launch import cli, talk\ntalk.generate = lambda options: print('x') or 0\n"
    script += "raise SystemExit(cli.main(['generate', 'smollm2', 'x']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
        )
    assert (done.returncode, done.stderr) == (1, "slipstream generate: No space left on device: its output\n")


def test_a_full_disk_under_another_file_is_no_output_s(tmp_path: Path) -> None:
    """What was printed is there, and the traceback shows where."""
    script = "from slipstream.launch import cli, talk\n"
    script += "talk.generate = lambda options: (print('x'), open('/dev/full', 'w', 1).write('y\\n'))\n"
    script += "raise SystemExit(cli.main(['generate', 'smollm2', 'x']))"
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and "write('y" in done.stderr + script and "Traceback" in done.stderr
    assert (tmp_path / "out").read_text() == "x\n"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 4}')
    script, folder = tmp_path / "train.py", tmp_path / "c.json" / "tuning"
    script.touch()
    assert main(["tune", str(tmp_path / "c.json"), "--folder", str(folder), "--script", str(script)]) == 1
    assert capsys.readouterr().err == f"slipstream tune: Not a directory: {folder}\n"


def test_ctrl_c_while_torch_imports_numpy(tmp_path: Path) -> None:
    """Torch drops exceptions of that import."""
    script = """
import sys
from slipstream.launch import cli
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "numpy.matrixlib":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.exit(cli.main(["serve", sys.argv[1], "--port", "0"]))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_as_a_module_it_tells_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "slipstream", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"slipstream {slipstream.__version__}\n"
