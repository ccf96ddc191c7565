"""The files of examples/deploy: what they set is what the launcher reads, and schemas accept them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.launch.cli import build_parser
from slipstream.world.discover import Node, node

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(file: Path) -> list[Any]:
    return list(yaml.safe_load_all(file.read_text()))


def pods(value: Any) -> list[dict[str, Any]]:
    """The pod templates in a document: what has a spec with containers."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if "containers" in value.get("spec", {}) else []
    return own + [pod for item in value.values() for pod in pods(item)]


def notebook(folder: Path) -> list[str]:
    """The code of the Databricks notebook, cell by cell, without magics, and with its own folder for checkpoints."""
    document = json.loads((DEPLOY / "databricks.ipynb").read_text())
    assert document["nbformat"] == 4 and not any(cell.get("outputs") for cell in document["cells"])
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    parameter = 'folder = "/Volumes/main/default/runs/first"'
    assert sum(parameter in cell for cell in cells) == 1
    return [cell.replace(parameter, f"folder = {str(folder)!r}") for cell in cells if not cell.startswith("%")]


@pytest.mark.parametrize("name", ["indexed-job", "jobset"])
def test_pods_are_nodes_of_one_job(name: str) -> None:
    """A Job's pod is NAME-INDEX.SUBDOMAIN; a JobSet's is NAME-REPLICATEDJOB-0-INDEX.NAME."""
    *_, job = documents(DEPLOY / "kubernetes" / f"{name}.yaml")
    (pod,) = pods(job)
    (container,) = pod["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    first = "train-0.train" if name == "indexed-job" else "train-node-0-0.train"
    assert node(variables) == Node(num_nodes=2, node_rank=1, master_addr=first, master_port=29500)
    (rank,) = (entry for entry in container["env"] if entry["name"] == "PET_NODE_RANK")
    assert rank["valueFrom"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    spec = job["spec"] if name == "indexed-job" else job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == int(variables["PET_NNODES"])


def test_commands_are_ones_that_the_launcher_takes() -> None:
    commands = [["run", "--nproc", "2", "train.py"]]  # of slurm.sbatch
    assert 'slipstream run --nproc "$NPROC" "$@"' in (DEPLOY / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"]).returncode == 0
    commands.append(documents(DEPLOY / "skypilot.yaml")[0]["run"].partition("#")[0].split()[1:])
    for document in (document for file in KUBERNETES for document in documents(file)):
        containers = [container for pod in pods(document) for container in pod["spec"]["containers"]]
        containers += [document["spec"]["trainer"]] if document["kind"] == "TrainJob" else []
        commands += [container["command"][1:] for container in containers if "command" in container]
    assert [command[0] for command in commands] == ["run", "run", "run", "run", "serve", "run"]
    for command in commands:
        build_parser().parse_args([word.replace("/models/model", "smollm2") for word in command])


def test_the_image_serves_as_an_ordinary_user() -> None:
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    words = [line.partition(" ")[0] for line in lines]
    assert words[0] == "FROM" and words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")
    assert "USER 10001" in lines and 'ENTRYPOINT ["slipstream"]' in lines and len(lines) <= 20
    assert any("[serve]" in line for line in lines)


@pytest.mark.slow
def test_spark_s_function_trains(tmp_path: Path) -> None:
    """As TorchDistributor runs it: pickled, in a process of torchrun. Here in one process of its own."""
    *cells, last = notebook(tmp_path / "checkpoints")
    assert "TorchDistributor" in last
    code = "\n".join([*cells, "print(train(folder, 3))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) > 0, done.stderr


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None or shutil.which("java") is None, reason="pyspark is not installed")
def test_spark_starts_its_ranks(tmp_path: Path) -> None:
    """Two on this host; a second call finds the run at its end."""
    environment = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Spark calls torchrun
    (tmp_path / "cells.py").write_text("\n".join(notebook(tmp_path / "checkpoints")))
    for last in (r"last loss \d+\.\d+", "last loss nan"):
        command = [sys.executable, str(tmp_path / "cells.py")]
        done = subprocess.run(command, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0 and re.search(last, done.stdout), done.stdout + done.stderr
        assert "FAILED" not in done.stdout + done.stderr
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step100"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed")
@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.stem)
def test_kubernetes_accepts_the_manifests(file: Path) -> None:
    """Core kinds, and the pods in kinds of others."""
    import kubernetes_validate as kubernetes

    for document in documents(file):
        if document["apiVersion"] in ("v1", "batch/v1"):
            kubernetes.validate(document, "1.31", strict=True)
        for pod in pods(document):
            named = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": pod["spec"]}
            kubernetes.validate(named, "1.31", strict=True)
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate({"apiVersion": "v1", "kind": "Service", "spec": {"portz": []}}, "1.31", strict=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("kubeflow_trainer_api") is None, reason="kubeflow-trainer-api is not installed")
def test_kubeflow_and_jobset_accept_the_manifests() -> None:
    """Every field is one of their models': what they do not know would be lost on the way."""
    from kubeflow_trainer_api import models

    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    }
    seen = set()
    for file in KUBERNETES:
        for document in documents(file):
            if (kind := document["kind"]) in kinds:
                seen.add(kind)
                model = kinds[kind].from_dict(document)
                assert model is not None and model.to_dict() == document
    assert seen == kinds.keys()
