"""Who am I, from the variables that each starter sets."""

from __future__ import annotations

import pytest

from slipstream.world.discover import Node, discover, node, ranks_per_node, slurm_hosts

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "77",
}


def test_alone() -> None:
    assert discover({"PATH": "/bin"}) is None


def test_torchrun_wins_and_is_not_second_guessed() -> None:
    assert discover(SLURM | TORCHRUN) == TORCHRUN
    assert discover({"RANK": "0", "WORLD_SIZE": "2"}) == {"RANK": "0", "WORLD_SIZE": "2"}


def test_slurm_step() -> None:
    env = discover(SLURM)
    assert env is not None
    port = env.pop("MASTER_PORT")
    assert env == {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"}
    assert 20_000 <= int(port) < 30_000
    assert discover(SLURM | {"SLURM_PROCID": "0"})["MASTER_PORT"] == port  # type: ignore[index]
    for other in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}):  # may run on the same node
        assert discover(SLURM | other)["MASTER_PORT"] != port  # type: ignore[index]


def test_slurm_batch_script_is_one_process() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert discover(batch) is None


def test_openmpi_on_one_host_needs_nothing() -> None:
    env = discover(OPENMPI)
    assert env is not None
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "2", "1")
    assert env["MASTER_ADDR"] == "127.0.0.1"


def test_openmpi_over_hosts_needs_the_master() -> None:
    spread = OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ValueError, match=r"Open MPI does not publish .*mpirun -x MASTER_ADDR"):
        discover(spread)
    env = discover(spread | {"MASTER_ADDR": "host1", "MASTER_PORT": "2222"})
    assert env is not None
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("host1", "2222")


def test_pmi() -> None:
    env = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    variables = discover(env)
    assert variables is not None
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("2", "2", "3")


def test_incomplete_is_refused() -> None:
    with pytest.raises(ValueError, match="Open MPI set a rank but not OMPI_COMM_WORLD_SIZE"):
        discover({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(ValueError, match="PMI set PMI_RANK but not MPI_LOCALRANKID"):
        discover({"PMI_RANK": "0", "PMI_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK='x'"):
        discover({"RANK": "x", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu1,cpu2", ["gpu1", "cpu2"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("", []),
    ],
)
def test_slurm_hosts(text: str, hosts: list[str]) -> None:
    assert slurm_hosts(text) == hosts


def test_one_launcher_per_node() -> None:
    per_node = SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}
    place = node(per_node)
    assert place is not None
    assert place[:3] == (3, 2, "gpu07")
    assert node(SLURM) is None  # a task per rank
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "23456"}
    assert node(pet) == Node(num_nodes=2, node_rank=1, master_addr="m", master_port=23456)
    assert node({}) is None


def test_clouds_that_start_one_launcher_per_node() -> None:
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "sky-1"}
    place = node(sky)
    assert place is not None and place[:3] == (2, 1, "10.0.0.1") and 20_000 <= (place.master_port or 0) < 30_000
    assert node(sky | {"SKYPILOT_NODE_RANK": "0"}) == place._replace(node_rank=0)
    assert node(sky | {"SKYPILOT_TASK_ID": "sky-2"}) != place
    assert node({"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}) is None
    sagemaker = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
    assert node(sagemaker) == Node(num_nodes=2, node_rank=1, master_addr="algo-1", master_port=None)
    with pytest.raises(ValueError, match="SM_CURRENT_HOST='x' is not among"):
        node(sagemaker | {"SM_CURRENT_HOST": "x"})
    with pytest.raises(ValueError, match=r"SM_HOSTS='algo-1' \(SageMaker\) is not a JSON list"):
        node(sagemaker | {"SM_HOSTS": "algo-1"})


@pytest.mark.parametrize(
    ("env", "address", "port"),
    [
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6105"}, "10.0.0.4", "6105"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5", "MASTER_PORT": "2222"}, "10.0.0.5", "2222"),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6105", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "h", "1"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "MASTER_PORT": "7"}, "algo-1", "7"),
    ],
)
def test_clouds_name_the_master_of_an_mpi_job(env: dict[str, str], address: str, port: str) -> None:
    found = discover(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"} | env)
    assert found is not None and (found["MASTER_ADDR"], found["MASTER_PORT"]) == (address, port)


def test_ranks_that_an_operator_asks_for() -> None:
    assert [ranks_per_node({"PET_NPROC_PER_NODE": text}) for text in ("4", "auto", "gpu")] == [4, None, None]
    assert ranks_per_node({}) is None
    with pytest.raises(ValueError, match="PET_NPROC_PER_NODE='cpu' is not a number of ranks, auto or gpu; pass --nproc"):
        ranks_per_node({"PET_NPROC_PER_NODE": "cpu"})


def test_init_distributed_takes_deepspeeds_keywords_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from slipstream.world import join as distributed

    def port_with(**env: str) -> str | None:
        monkeypatch.setattr(os, "environ", dict(env))
        options = {"auto_mpi_discovery": False, "distributed_port": 1234, "verbose": False, "config": None}
        return os.environ.get("MASTER_PORT") if distributed.init_distributed(**options) else None  # type: ignore[arg-type]

    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(distributed, "_backend", lambda: "gloo")
    assert port_with() is None
    assert port_with(RANK="0", WORLD_SIZE="2") == "1234"
    assert port_with(RANK="0", WORLD_SIZE="2", MASTER_PORT="99") == "99"
    assert port_with(**OPENMPI) is None, "auto_mpi_discovery=False"
    monkeypatch.setattr(os, "environ", dict(OPENMPI))
    with pytest.raises(ValueError, match="each of the 2 ranks would train alone"):
        distributed.init_distributed(dist_init_required=False)
    monkeypatch.setattr(os, "environ", {})
    assert distributed.init_distributed(dist_init_required=False) is False
    with pytest.raises(TypeError, match="timeot"):
        distributed.init_distributed(timeot=None)  # type: ignore[call-arg]
