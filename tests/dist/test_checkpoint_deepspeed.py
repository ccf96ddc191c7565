"""DeepSpeed's checkpoints: loaded at another world size and stage, training continues as in DeepSpeed."""

import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.checkpoint import CheckpointError, convert, deepspeed, load_metadata, pickled
from slipstream.checkpoint.deepspeed_parts import Cuts
from slipstream.checkpoint.flat_slice import whole_box
from slipstream.compat.moe import MoE, split_params_into_different_moe_groups_for_optimizer
from tests import deepspeed_checkpoints as ds
from tests.cases import EVERYTHING
from tests.pool import distributed

# fp32 differs by the order of sums; in 16 bits a weight may round differently
CLOSE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    with tarfile.open(ds.ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path / "deepspeed"


def build(case: ds.Case, stage: int, **blocks: Any) -> Any:
    module = ds.model()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(0.5)  # nothing of it must remain
    settings = ds.config(case, dist.get_world_size(), stage) | {"slipstream": {"timeout_s": 20}} | blocks
    settings["optimizer"]["params"].pop("torch_adam", None)
    return slipstream.initialize(model=module, model_parameters=ds.groups(module), config=settings)[0]


def go_on(engine: Any, case: ds.Case, steps: range = range(ds.STEPS, ds.STEPS + ds.MORE)) -> list[float]:
    losses = []
    for step in steps:
        tokens = ds.batch(step, engine.mesh.batch.index, engine.mesh.batch.size)
        if "pipe" in case.kind:
            loss = engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])]))
        else:
            loss = ds.loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


@distributed(world_size=(1, 2, 4))
def test_training_continues_as_in_deepspeed(world_size: int, folder: Path) -> None:
    cases = [case for case in ds.CASES if case.kind == "data"]
    for i, case in list(enumerate(cases))[:: {1: 1, 2: 2, 4: 4}[world_size]]:
        stage = (case.stage + world_size + i) % 4
        engine = build(case, stage)
        path, client = engine.load_checkpoint(str(folder / case.name))
        assert Path(path).parent == folder / case.name
        assert client == {"epoch": 7, "names": ["a", None], "seen": (1, 2.5)}
        assert (engine.global_steps, engine.global_samples) == (ds.STEPS, ds.STEPS * ds.ROWS)
        results = go_on(engine, case)
        expected = json.loads((folder / case.name / "losses.json").read_text())
        assert results == pytest.approx(expected, rel=CLOSE[case.dtype]), f"{case} at stage {stage}"
        engine.destroy()


@distributed(world_size=1)
def test_muons_momentum_of_whole_parameters(folder: Path, tmp_path: Path) -> None:
    """As ZeRO 1 and 2 keep it; at stage 3, ranks have parts of it. Also in a universal checkpoint."""
    states: list[dict[str, Any]] = []
    for case in (case for case in ds.CASES if case.kind == "muon"):
        engine = slipstream.initialize(model=ds.model(), config=ds.config(case, 1, case.stage) | {"optimizer": ds.MUON})[0]
        names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        engine.load_checkpoint(str(folder / case.name))
        states.append({name: engine.optimizer_state(name) for name in names})
        engine.save_checkpoint(str(tmp_path), case.name)
        convert(tmp_path / case.name, tmp_path, "deepspeed", name=f"{case.name}_universal")
        engine.load_checkpoint(str(tmp_path), f"{case.name}_universal")
        torch.testing.assert_close({name: engine.optimizer_state(name) for name in names}, states[-1], rtol=0, atol=0)
        engine.destroy()
    assert "momentum_buffer" in states[0]["up.weight"] and "exp_avg" in states[0]["norm.weight"]
    torch.testing.assert_close(*states)


def build_parts(case: ds.Case, stage: int, mesh: dict[str, int]) -> Any:
    """A model of the case on axes of ours, filled with a value of which nothing must remain."""
    replicas = dist.get_world_size() // (mesh.get("pp", 1) * mesh.get("tp", 1))
    settings = ds.config(case, replicas, stage) | {"slipstream": {"timeout_s": 20, "mesh": mesh}}
    settings["optimizer"]["params"].pop("torch_adam", None)
    if "tp" in mesh:
        settings["tensor_parallel"] = {"partition_config": {"use_default_specs": False, "layer_specs": ds.SPECS}}
    module = ds.model(case.kind, slipstream, mesh.get("pp", 1))
    # ds_to_universal leaves out what a pipeline does not train
    others = () if case.universal else (*module.buffers(), *(param for param in module.parameters() if not param.requires_grad))
    with torch.no_grad():
        for tensor in (*others, *(param for param in module.parameters() if param.requires_grad)):
            tensor.fill_(0.5)
    return slipstream.initialize(model=module, model_parameters=ds.groups(module), config=settings)[0]


@distributed(world_size=(1, 2, 4) if EVERYTHING else (1, 2))
def test_stages_and_slices_continue_on_any_axes(world_size: int, folder: Path) -> None:
    """Layers of a pipeline, slices of AutoTP, and a universal checkpoint of a pipeline: tied, frozen, buffers, fused matrices."""
    for case in ds.CASES:
        for axis in {"pipe": ("", "pp"), "slices": ("", "tp")}.get(case.kind, ()):
            if axis and (world_size == 1 or (world_size == 4 and case.world == 4)):
                continue
            mesh = {axis: 2} if axis else {}
            engine = build_parts(case, (case.stage + world_size) % 4, mesh)
            _, client = engine.load_checkpoint(str(folder / case.name), load_module_strict=not case.universal)
            assert client == {"epoch": 7, "names": ["a", None], "seen": (1, 2.5)}
            assert engine.global_steps == ds.STEPS
            results = go_on(engine, case)
            expected = json.loads((folder / case.name / "losses.json").read_text())
            assert results == pytest.approx(expected, rel=CLOSE[case.dtype]), f"{case} on {mesh}"
            engine.destroy()


def build_experts(case: ds.Case, stage: int, ep: int, split: bool, pp: int = 1) -> Any:
    """split: experts in parameter groups of their own, as DeepSpeed has them."""
    module = ds.model(case.kind, slipstream, pp, MoE, ep)
    with torch.no_grad():
        for name, param in module.named_parameters():
            if case.universal and name.endswith("scale") and "stack" in name:  # ds_to_universal leaves out frozen experts
                names = [name.replace("stack.expert", f"deepspeed_experts.{i}") for i in range(len(param))]
                param.copy_(torch.stack([ds.drawn(each, param.shape[1:]) for each in names]))
            elif param.requires_grad or not case.universal:
                param.fill_(0.5)
    settings = ds.config(case, dist.get_world_size() // pp, stage) | {"slipstream": {"timeout_s": 20, "mesh": {"pp": pp}}}
    settings["optimizer"]["params"].pop("torch_adam", None)
    del settings["gradient_clipping"]
    groups = ds.groups(module)
    if case.is_autoep:
        settings |= {"expert_parallel": {"enabled": True, "autoep_size": ep}, "gradient_clipping": 0.0}
        groups = [{"params": [param for param in module.parameters() if param.requires_grad]}]
    elif split:
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return slipstream.initialize(model=module, model_parameters=groups, config=settings)[0]


@distributed(world_size=(1, 2, 4) if EVERYTHING else (1, 2))
def test_experts_continue_at_any_size(world_size: int, folder: Path) -> None:
    """Without ZeRO, at stages 1 to 3 and universal; layers of 4 and of 2 experts, in one stage or two, frozen ones, a residual
    branch; AutoEP's, with a shared expert, and beside slices."""
    for i, case in enumerate(case for case in ds.CASES if case.has_experts):
        pp = min(world_size, 2) if case.kind == "moepipe" else 1
        ep = min(world_size // pp, 1 + i % 2)
        engine = build_experts(case, (i + world_size) % (4 if pp == 1 else 2), ep, split=i % 2 == 0, pp=pp)
        loaded = engine.load_checkpoint(str(folder / case.name), load_module_strict=not case.universal)
        assert loaded[1] == {"epoch": 7, "names": ["a", None], "seen": (1, 2.5)}
        results = go_on(engine, case)
        expected = json.loads((folder / case.name / "losses.json").read_text())
        close = CLOSE[case.dtype] * (3 if case.is_autoep else 1)  # a route may change, too
        assert results == pytest.approx(expected, rel=close), f"{case} at ep {ep}"
        engine.destroy()


@distributed(world_size=1)
def test_experts_whose_files_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    cases = {case.name: case for case in ds.CASES}
    engine = build_experts(cases["moe-ep1-z1-w2-fp32"], 2, 1, split=False)
    before = engine.state_dict()

    def one_shape(inside: Path) -> None:
        """A trained and a frozen vector of one length, and no names."""
        state = torch.load(inside / "mp_rank_00_model_states.pt", weights_only=False)
        state["module"]["second.mlp.scale"] = torch.ones(6)
        torch.save(state, inside / "mp_rank_00_model_states.pt")

    def masters(inside: Path) -> None:
        torch.save({"optimizer": {"fp32_groups_flat": []}}, inside / "expp_rank_0_mp_rank_00_optim_states.pt")

    for name, change, words in (
        (
            "z1-w2",
            lambda inside: (inside / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink(),
            "no layer_0_expert_2_mp_rank_00",
        ),
        (
            "z0-w2",
            lambda inside: (inside / "layer_1_expert_0_mp_rank_00_model_states.pt").unlink(),
            "no layer_1_expert_0_mp_rank_00",
        ),
        ("z0-w2", one_shape, r"1 states of shape \(6,\) in 1 groups for up\.bias, second\.mlp\.scale: save it at stage 1"),
        ("z0-w2", masters, "its optimizer has no states by parameter"),
        (
            "z0-w2",
            lambda inside: (inside / "mp_rank_01_model_states.pt").write_bytes(model_bytes(inside)),
            "layer_0_expert_0_mp_rank_01",
        ),
    ):
        shutil.copytree(folder / f"moe-ep1-{name}-fp32", tmp_path / "c", dirs_exist_ok=True)
        change(tmp_path / "c" / "global_step3")
        with pytest.raises(CheckpointError, match=words):
            engine.load_checkpoint(str(tmp_path / "c"))
        shutil.rmtree(tmp_path / "c")
    shutil.copytree(folder / "moe-ep2-z0-w4-fp32", tmp_path / "c")
    (tmp_path / "c" / "global_step3" / "expp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizers of experts are of ranks \[1\]: some are missing"):
        engine.load_checkpoint(str(tmp_path / "c"))
    state = tmp_path / "d" / "global_step3" / "expp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copytree(folder / "moe-ep2-z0-w2-bf16", tmp_path / "d")
    infos = load_metadata(tmp_path / "d", "global_step3").tensors
    masters_of = ("model.up.weight", "model.first.deepspeed_moe.experts.stack.expert.up.weight")
    assert {infos[name].dtype for name in masters_of} == {torch.float32} and infos["model.second.mlp.scale"].dtype is torch.bfloat16
    saved = torch.load(state, weights_only=False)
    for dynamic, scale in ((False, 4096), (True, 1)):
        saved["optimizer"] |= {"dynamic_loss_scale": dynamic, "cur_scale": scale}
        torch.save(saved, state)
        with pytest.raises(CheckpointError, match=rf"of fp16 and ZeRO stage 0, whose moments .* by the loss scale \({scale}\)"):
            engine.load_checkpoint(str(tmp_path / "d"))
    after = engine.state_dict()
    assert all(before[name].equal(after[name]) for name in before)
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "file", "change", "words"),
    [
        ("z1-w4", "layer_1_expert_2_mp_rank_00_model_states.pt", None, "it has no layer_1_expert_2_mp_rank_00_model_states.pt"),
        ("z1-w4", "zero_pp_rank_2_mp_rank_00_optim_states.pt", None, r"its files are of ranks \[0, 1, 3\]: some are missing"),
        ("z1-w4", "", {"expert_placement": {"ranks": [{"experts": [0, 2]}, {"experts": [1, 3]}]}}, r"placed as \[0, 2, 1, 3\]"),
        ("z3-w4", "", {"num_local_experts": 1}, r"placed as \[0, 1, 2, 3\], which is not in equal parts"),
        ("z3-w4", "", {"num_experts": 6, "num_local_experts": 3, "expert_placement": None}, "only 384 of 576 elements"),
    ],
)
def test_experts_of_autoep_that_do_not_fit_are_refused(
    name: str, file: str, change: dict[str, Any] | None, words: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / f"autoep-ep2-{name}-fp32", tmp_path / "c")
    inside = tmp_path / "c" / "global_step3"
    if file:
        (inside / file).unlink()
    for path in inside.glob("*model_states.pt") if change else ():
        state = torch.load(path, weights_only=False)
        if "ds_autoep_layers" in state:
            torch.save(state | {"ds_autoep_layers": [layer | change for layer in state["ds_autoep_layers"]]}, path)
    with pytest.raises(CheckpointError, match=words):
        load_metadata(tmp_path / "c", "global_step3")


def model_bytes(inside: Path) -> bytes:
    return (inside / "mp_rank_00_model_states.pt").read_bytes()


class Hostile:
    """A pickle that runs a command if anything executes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Nested:
    """A pickle inside a pickle."""

    def __reduce__(self) -> Any:
        return pickle.loads, (b"",)


def archive(raw: bytes) -> bytes:
    """A torch.save file with this pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("archive/data.pkl", raw)
    return made.getvalue()


def laughs(pair: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """Pairs nested 40 deep in a few hundred bytes; alone, or as a key of a dictionary."""
    made = b"\x80\x02)q\x00"
    for i in range(40):
        made += b"h%ch%c" % (i, i) + pair + b"q%c" % (i + 1)
    return made + (before + b"%c" % 40 if before else b"") + after + b"."


def test_a_pickle_has_no_lasting_effect(tmp_path: Path) -> None:
    """Attributes that it sets on a named object disappear with it."""
    file = tmp_path / "c.pt"
    file.write_bytes(archive(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}U\x05kindsU\x01xsb."))
    pickled.read(file)
    assert not hasattr(pickled._Unpickler._tensor, "kinds")


@distributed(world_size=1)
def test_names_in_a_pickle_are_refused_and_nothing_runs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "z1-w2-bf16", tmp_path / "c")
    inside = tmp_path / "c" / "global_step3"
    model, optim = inside / "mp_rank_00_model_states.pt", inside / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    engine = build(ds.CASES[0], 2)
    before = engine.state_dict()
    kept = torch.load(model, weights_only=True)
    for harm, names in (
        (Hostile(tmp_path / "ran"), r"mp_rank_00_model_states.pt: it asks for posix\.system"),
        (Nested(), r"asks for pickle\.loads"),
        (CheckpointError("x"), r"slipstream\.checkpoint\.errors\.CheckpointError"),
    ):
        torch.save(kept | {"mine": harm}, model)
        with pytest.raises(CheckpointError, match=names):
            engine.load_checkpoint(str(tmp_path / "c"))
    assert not (tmp_path / "ran").exists()
    torch.save(kept, model)
    whole = optim.read_bytes()
    for raw, words in (
        (whole[:-50], "truncated"),
        (b"\x80\x02}.", "truncated"),
        (archive(b"\x80\x02}r\xff\xff\xff\x7f."), "value 2 under the number"),
        (archive(b"\x80\x02K\x01."), "not as DeepSpeed"),
        (archive(b"\x80\x02(dR."), "damaged or hostile"),
        (archive(laughs(b"\x86")), "makes a value of more than"),
        (archive(laughs(b"\x86", b"}h", b"K\x00s")), "makes a value of more"),
        (archive(b"\x80\x02]q\x00]q\x01ah\x01K\x01a."), "inside another already"),
        (archive(b"\x80\x02)" + b"\x85" * 2000 + b"."), "1000 levels"),
        (archive(b"\x80\x02]2\x86."), "duplicates"),
    ):
        optim.write_bytes(raw)
        with pytest.raises(CheckpointError, match=words):
            engine.load_checkpoint(str(tmp_path / "c"))
    optim.unlink()
    with pytest.raises(CheckpointError, match=r"saved by \[2, 2\] ranks and has the files of 1"):
        engine.load_checkpoint(str(tmp_path / "c"))
    (inside / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(
        CheckpointError, match=r"optimizer states are of model-parallel ranks \[0\], those of the model of \[0, 1\]"
    ):
        engine.load_checkpoint(str(tmp_path / "c"))
    after = engine.state_dict()
    assert all(before[name].equal(after[name]) for name in before)
    engine.destroy()


@distributed(world_size=1)
def test_slices_whose_cuts_are_unknown_are_refused(folder: Path, tmp_path: Path) -> None:
    """What `universal_checkpoint_info` does not say, or says in a way that could take forever to read."""
    case = next(case for case in ds.CASES if case.kind == "slices")
    shutil.copytree(folder / case.name, tmp_path / "c")
    files = sorted((tmp_path / "c" / "global_step3").glob("mp_rank_*_model_states.pt"))
    engine = build_parts(case, 2, {})
    before = engine.state_dict()
    key, others = "universal_checkpoint_info", "tp_replicated_parameter_patterns"
    for changed, words in (
        (lambda info: None, r"files of 2 tensor-parallel ranks and no universal_checkpoint_info"),
        (lambda info: info | {others: ["(a+)+$"]}, r"the pattern '\(a\+\)\+\$' .* has groups"),
        (lambda info: info | {others: [".*.*.*x"]}, "more than 2 repetitions"),
        (lambda info: info | {"autotp_unsupported_parameter_patterns": {"blocks": "new"}}, "cannot be joined"),
        (lambda info: info | {"sub_param_shard_widths": {r"^blocks\.0\.qkv\.weight$": [[1, 3]]}}, "not sub-parameters"),
        (lambda info: info | {"parameter_with_row_parallelism_patterns": []}, "its slices join to"),
    ):
        whole = {file: file.read_bytes() for file in files}
        for file in files:
            state = torch.load(file, weights_only=False)
            torch.save(state | {key: changed(state[key])}, file)
        with pytest.raises(CheckpointError, match=words):
            engine.load_checkpoint(str(tmp_path / "c"))
        for file, raw in whole.items():
            file.write_bytes(raw)
    after = engine.state_dict()
    assert all(before[name].equal(after[name]) for name in before)
    engine.destroy()


def test_cuts_of_megatron() -> None:
    """Two sub-parameters, a number of them (before version 0.4), a matrix cut along its second dimension, copies."""
    info = {
        "parameter_with_2_sub_params_cat_dim_0": [r"\d+.glu.weight"],
        "parameter_with_sub_params": [{"patterns": [r"\d+.qkv.weight"], "shape": (3, -1), "partition_dim": 0}],
        "parameter_with_row_parallelism_patterns": [r"\d+.dense.weight"],
        "tp_replicated_parameter_patterns": [r"\d+.norm.*"],
    }
    cuts, whole = Cuts(info, 2), torch.arange(72.0).view(12, 6)
    halves = {
        "1.glu.weight": [torch.cat([part.chunk(2)[i] for part in whole.chunk(2)]) for i in range(2)],
        "1.qkv.weight": [torch.cat([part.chunk(2)[i] for part in whole.chunk(3)]) for i in range(2)],
        "1.dense.weight": list(whole.chunk(2, 1)),
        "1.up.weight": list(whole.chunk(2)),
        "1.norm.weight": [whole, whole],
    }
    for name, slices in halves.items():
        results = torch.zeros_like(whole)
        for index, part in enumerate(slices):
            place = cuts.place(name, index, [tuple(each.shape) for each in slices])
            assert place.whole == (12, 6) and place.is_copy is (name == "1.norm.weight")
            values = part.flatten().split([box.numel for box in place.boxes or [whole_box(place.whole)]])
            for box, value in zip(place.boxes or [whole_box(place.whole)], values, strict=True):
                box.of(results).copy_(value.view(box.sizes))
        assert torch.equal(results, whole), name


@distributed(world_size=1)
def test_a_small_file_needs_little_memory(folder: Path, tmp_path: Path) -> None:
    """Many tensors over the same bytes, and a sparse file: refused before any memory is allocated."""
    shutil.copytree(folder / "z1-w2-bf16", tmp_path / "c")
    model = tmp_path / "c" / "global_step3" / "mp_rank_00_model_states.pt"
    engine = build(ds.CASES[0], 2)
    kept = torch.load(model, weights_only=True)
    one = torch.zeros(1 << 18)
    torch.save(kept | {"mine": {str(i): one.view(1, -1) for i in range(40)}}, model)
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states.pt have 41,\d+,\d+ bytes, and the file 1,.* the same bytes"
    ):
        engine.load_checkpoint(str(tmp_path / "c"))
    torch.save(kept | {"mine": torch.zeros(1 << 23)}, model)
    raw = model.read_bytes()
    with open(model, "wb") as sparse:
        for at in range(0, len(raw), 4096):
            if any(raw[at : at + 4096]):
                sparse.seek(at)
                sparse.write(raw[at : at + 4096])
    assert model.read_bytes() == raw and model.stat().st_blocks * 512 < len(raw) // 8
    with pytest.raises(CheckpointError, match=r"values of 33,554,\d+ bytes besides its tensors, of which [\d,]{1,9} are on disk"):
        engine.load_checkpoint(str(tmp_path / "c"))
    model.write_bytes(raw)
    assert engine.load_checkpoint(str(tmp_path / "c"))[1]["mine"].shape == (1 << 23,)
    engine.destroy()


@distributed(world_size=1)
def test_states_of_other_optimizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's Adagrad and Lion use Adam's state names; SGD counts no steps. The files are modified from AdamW's."""
    case = ds.CASES[0]
    engine = build(case, 1)
    engine.load_checkpoint(str(folder / case.name))
    adam = engine.optimizer_state("up.weight")
    engine.destroy()
    for kind, lacks, options, ours, reference in (
        ("Adagrad", ("exp_avg",), ("betas",), "sum", "exp_avg_sq"),
        ("Lion", (), ("eps",), "exp_avg", "exp_avg"),
        ("SGD", ("exp_avg_sq", "step"), ("betas", "eps"), "momentum_buffer", "exp_avg"),
    ):

        def changed(path: Path, kind: str = kind, lacks: Any = lacks, options: Any = options) -> Any:
            read = pickled.read(path)
            base = read.get("optimizer_state_dict", {}).get("base_optimizer_state", {"state": {}, "param_groups": []})
            for state in base["state"].values():
                for name in lacks:
                    del state[name]
                if kind == "SGD":
                    state["momentum_buffer"] = state.pop("exp_avg")
            for group in base["param_groups"]:
                for option in options:
                    del group[option]
            return read

        params = {"lr": 1e-3} | ({"momentum": 0.5} if kind == "SGD" else {})
        engine = build(case, 3, optimizer={"type": kind, "params": params})
        with monkeypatch.context() as patch:
            patch.setattr(deepspeed, "read", changed)
            engine.load_checkpoint(str(folder / case.name))
        state = engine.optimizer_state("up.weight")
        assert state.keys() == {"master", ours} and state[ours].equal(adam[reference]) and state[ours].any()
        if kind == "SGD":  # the loaded momentum stays in the sum: a first step would start a new one
            begun = build(case, 3, optimizer={"type": kind, "params": params})
            begun.load_checkpoint(str(folder / case.name), load_module_only=True)
            for each in (engine, begun):
                go_on(each, case, range(1))
            gradient, after = (each.optimizer_state("up.weight")[ours] for each in (begun, engine))
            torch.testing.assert_close(after, 0.5 * state[ours] + gradient)
            begun.destroy()
        engine.destroy()


@distributed(world_size=1)
def test_another_optimizer_is_refused_and_weights_load_without(folder: Path) -> None:
    case = ds.CASES[1]
    engine = build(case, 3, optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    with pytest.raises(CheckpointError, match=r"its optimizer is AdamW and this engine's is Lion"):
        engine.load_checkpoint(str(folder / case.name))
    engine.load_checkpoint(str(folder / case.name), load_module_only=True)
    expected = json.loads((folder / case.name / "losses.json").read_text())
    assert go_on(engine, case, range(ds.STEPS, ds.STEPS + 1)) == pytest.approx(expected[:1], rel=1e-5)
    engine.destroy()


@distributed(world_size=2)
def test_each_byte_of_a_state_is_read_once_and_summed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, one rank alone reads each file's structure."""
    read: list[tuple[int, int, int]] = []
    structures: list[str] = []
    real = os.preadv

    def noted(path: Path) -> Any:
        structures.append(path.name)
        return pickled.read(path)

    def counted(handle: int, buffers: Any, at: int) -> int:
        got = real(handle, buffers, at)
        read.extend((os.fstat(handle).st_ino, byte, 1) for byte in range(at, at + got))
        return got

    engine = build(ds.CASES[3], 3)
    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(deepspeed, "read", noted)
    engine.load_checkpoint(str(folder / ds.CASES[3].name))
    monkeypatch.undo()
    assert len(structures) == len(set(structures)) and bool(structures) is (engine.rank == 0)
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, read)
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    values = [byte for own in everyone for byte in own]
    # Also frozen weights in bf16, the buffer on each rank, and a 4-byte step count per parameter and rank
    frozen, buffer, steps = 30 * 2, 2 * 5 * 4, 2 * 8 * 4
    archives = [zipfile.ZipFile(file) for file in (folder / ds.CASES[3].name).rglob("*.pt")]
    records = sum(record.file_size for archive in archives for record in archive.infolist() if "/data/" in record.filename)
    summed = len(values) - (trained * 12 + frozen + buffer + steps)
    assert trained * 12 + frozen < summed < records  # by one rank, the needed records only: not the 16-bit copies of weights
    often = sum(times > 2 for times in Counter(values).values())
    assert often <= buffer + steps  # read by both ranks
    engine.destroy()
