"""Generates `tests/data/deepspeed.tar.xz` with the real DeepSpeed 0.19.8, and defines the model that the tests resume.

    python tests/deepspeed_checkpoints.py [NAME ...]      # in an environment with deepspeed and torch, without slipstream

With names of cases, only these are generated again.

Each case is a folder written by `save_checkpoint` after `STEPS` steps (without the scripts that DeepSpeed adds), or converted from
one by `ds_to_universal`; `losses.json` has the mean losses of DeepSpeed's own next steps.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, MORE, ROWS = 3, 4, 8
ARCHIVE = Path(__file__).parent / "data" / "deepspeed.tar.xz"


class Case(NamedTuple):
    world: int
    stage: int
    dtype: str
    universal: bool = False
    kind: str = "data"  # or "muon"; "pipe", "slices", "moepipe": of two; "moe"; "autoep", "folded": beside two slices
    ep: int = 1

    @property
    def name(self) -> str:
        kind = "" if self.kind == "data" else f"{self.kind}-ep{self.ep}-" if self.has_experts else f"{self.kind}-"
        return f"{kind}z{self.stage}-w{self.world}-{self.dtype}" + ("-universal" if self.universal else "")

    @property
    def has_experts(self) -> bool:
        return self.kind in ("moe", "moepipe", "autoep", "folded")

    @property
    def is_autoep(self) -> bool:
        return self.kind in ("autoep", "folded")

    @property
    def replicas(self) -> int:
        return self.world if self.kind in ("data", "muon", "moe", "autoep") else self.world // 2


CASES = [
    Case(2, 1, "bf16"),
    Case(4, 1, "fp32"),
    Case(2, 2, "fp16"),
    Case(4, 2, "bf16"),
    Case(2, 3, "fp32"),
    Case(4, 3, "bf16"),
    Case(2, 1, "fp32", True),
    Case(4, 2, "fp32", True),
    Case(2, 3, "bf16", True),
    Case(2, 1, "fp32", kind="muon"),
    Case(2, 3, "fp32", kind="muon"),
    Case(2, 1, "bf16", kind="pipe"),
    Case(4, 1, "fp32", kind="pipe"),
    Case(4, 1, "fp32", True, "pipe"),
    Case(2, 1, "fp32", kind="slices"),
    Case(4, 2, "bf16", kind="slices"),
    Case(2, 3, "bf16", kind="slices"),
    Case(2, 0, "fp32", kind="moe"),
    Case(4, 0, "fp32", kind="moe", ep=2),
    Case(2, 0, "bf16", kind="moe", ep=2),
    Case(2, 1, "fp32", kind="moe"),
    Case(2, 1, "bf16", kind="moe", ep=2),
    Case(4, 2, "fp32", kind="moe", ep=2),
    Case(2, 1, "fp32", True, "moe"),
    Case(4, 1, "fp32", kind="moepipe", ep=2),
    Case(2, 0, "fp32", kind="autoep", ep=2),
    Case(4, 1, "fp32", kind="autoep", ep=2),
    Case(2, 2, "bf16", kind="autoep", ep=2),
    Case(4, 3, "fp32", kind="autoep", ep=2),
    Case(2, 1, "fp32", True, "autoep", 2),
    Case(4, 3, "fp32", True, "autoep", 2),
    Case(4, 1, "fp32", kind="folded", ep=2),
    Case(4, 3, "fp32", kind="folded", ep=2),
]
SPECS = [  # AutoTP's
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(down|out)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
]


MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen block, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.frozen = nn.Linear(5, 5)
        self.up = nn.Linear(5, 11)
        self.down = nn.Linear(11, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.arange(5) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        h = h + self.frozen(h) + self.shift.to(h.dtype)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        return F.cross_entropy(self.head(h).float().flatten(0, 1), tokens[:, 1:].flatten())


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 6) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


def logits(table: Table, x: Tensor) -> Tensor:
    return x @ table.weight.T


class Block(nn.Module):
    """With a buffer, a matrix of three parts, and one that is cut along its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 12), nn.Linear(4, 6, bias=False)
        self.register_buffer("shift", torch.arange(6) / 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x)))) + self.shift.to(x.dtype)
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.sigmoid(q) * k + v)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.frozen = nn.Embedding(13, 6), nn.Linear(6, 6).requires_grad_(False)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens[:, :-1])
        h = h + self.frozen(h)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).float().flatten(0, 1), tokens[:, 1:].flatten())


class Expert(nn.Module):
    """With a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale


class Mixture(nn.Module):
    """Two layers of different numbers of experts, one of them residual, whose choices are those of each token alone."""

    def __init__(self, moe: Any, ep: int) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(13, 6), nn.Linear(6, 6)
        options = {"ep_size": ep, "drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.first = moe(6, Expert(), 4, k=2, **options)
        self.second = moe(6, Expert(), 2, k=1, use_residual=True, **options)
        self.head = nn.Linear(6, 13, bias=False)
        with torch.no_grad():  # experts that differ, the same on every rank
            for name, param in self.named_parameters():
                param.copy_(drawn(name, param.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.embedding(tokens[:, :-1])))
        for layer in (self.first, self.second):
            h = h + layer(h)[0]
        return F.cross_entropy(self.head(h).float().flatten(0, 1), tokens[:, 1:].flatten())


class Residual(nn.Module):
    """A layer of experts with input and output of a pipeline's layers."""

    def __init__(self, moe: Any, num_experts: int, ep: int, seed: int) -> None:
        super().__init__()
        self.layer = moe(6, Expert(), num_experts, k=2, ep_size=ep, drop_tokens=False, top2_2nd_expert_sampling=False)
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(drawn(name, param.shape, seed))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


def transformer() -> nn.Module:
    """Experts beside a shared one with a gate, which AutoEP renames, and frozen biases."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 6, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 4}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    module = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=13, **sizes, **heads, **experts, initializer_range=0.3))
    for name, param in module.named_parameters():
        param.requires_grad_(not name.endswith(("k_proj.bias", "v_proj.bias")))
    return module


def drawn(name: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """What only the name tells."""
    seed += sum(ord(letter) * (i + 1) for i, letter in enumerate(name))
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed)) - 0.4


def pipeline_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


def model(kind: str = "data", pipe: Any = None, num_stages: int = 1, moe: Any = None, ep: int = 1) -> Any:
    """pipe: the package deepspeed.pipe, or ours; moe: the class of DeepSpeed's layer of experts, or ours."""
    torch.manual_seed(3)
    if kind == "moe":
        return Mixture(moe, ep)
    if kind == "autoep":
        return transformer()
    if kind == "folded":
        from transformers import MixtralConfig, MixtralForCausalLM

        heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
        sizes = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_local_experts": 4}
        return MixtralForCausalLM(MixtralConfig(**heads, **sizes, num_experts_per_tok=2, initializer_range=0.3))
    # DeepSpeed waits without end if a stage has no parameter of some group
    if kind == "moepipe":
        sizes = [pipe.LayerSpec(Residual, moe, num, ep, seed) for seed, num in enumerate((4, 2, 4))]
        dense = pipe.LayerSpec(nn.Linear, 6, 6), pipe.LayerSpec(nn.Linear, 6, 13)
        layers = [pipe.LayerSpec(nn.Embedding, 13, 6), dense[0], *sizes, dense[1]]
        return pipe.PipelineModule(layers, num_stages=num_stages, loss_fn=pipeline_loss, partition_method="uniform")
    if kind in ("data", "muon"):
        return Model()
    if kind == "slices":
        return Sliced()
    table, head = pipe.TiedLayerSpec("table", Table), pipe.TiedLayerSpec("table", Table, forward_fn=logits)
    layers = [table, pipe.LayerSpec(Block), pipe.LayerSpec(nn.Linear, 6, 6), torch.tanh, pipe.LayerSpec(Block), head]
    module = pipe.PipelineModule(layers, num_stages=num_stages, loss_fn=pipeline_loss, partition_method="uniform")
    for name, param in module.named_parameters():
        param.requires_grad_(not name.startswith("2."))
    return module


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay; vectors without it and with a higher learning rate."""
    trained = [param for param in module.parameters() if param.requires_grad]
    vectors = {id(param) for name, param in module.named_parameters() if name.endswith("bias") or param.dim() < 2}
    return [
        {"name": "matrices", "params": [param for param in trained if id(param) not in vectors], "weight_decay": 0.1},
        {"name": "vectors", "params": [param for param in trained if id(param) in vectors], "weight_decay": 0.0, "lr": 3e-2},
    ]


def batch(step: int, rank: int, world: int) -> Tensor:
    """This rank's rows of a global batch that does not depend on the world size."""
    rows = torch.randint(13, (ROWS, 7), generator=torch.Generator().manual_seed(step))
    return rows[rank * ROWS // world : (rank + 1) * ROWS // world]


def config(case: Case, world: int, stage: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 2e-2, "warmup_type": "linear"}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }
    if case.dtype != "fp32":
        settings[case.dtype] = {"enabled": True}
    if case.dtype == "fp16":
        settings["fp16"] |= {"initial_scale_power": 12, "loss_scale_window": 5}
    return settings


def train(case: Case, folder: Path) -> None:
    """Train and save one rank's part with DeepSpeed."""
    import deepspeed
    import deepspeed.module_inject.auto_ep
    import deepspeed.moe.layer
    import torch.distributed as dist

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # refused on CPUs, although they support it

    settings = config(case, case.replicas, case.stage)
    if case.kind == "muon":
        settings |= {"optimizer": MUON, "gradient_clipping": 0.0}
        settings["zero_optimization"]["reduce_scatter"] = False  # refused at stage 3
    elif case.stage == 3:
        settings["zero_optimization"] |= {"sub_group_size": 60, "stage3_param_persistence_threshold": 0}
    if case.kind != "data":
        deepspeed.init_distributed("gloo")
    if case.kind in ("slices", "folded"):
        del settings["train_batch_size"]  # DeepSpeed divides it by all ranks
    if case.kind == "folded":
        settings["tensor_parallel"] = {"autotp_size": 2, "preset_model": "mixtral"}
    if case.kind == "slices":
        settings["tensor_parallel"] = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}
    if case.has_experts:
        del settings["gradient_clipping"]  # DeepSpeed averages the norms of experts
    if case.is_autoep:
        settings["gradient_clipping"] = 0.0  # DeepSpeed's default is 1
        settings["expert_parallel"] = {
            "enabled": True,
            "autoep_size": case.ep,
            "preset_model": "mixtral" if case.kind == "folded" else "qwen3_moe",
            "use_grouped_mm": False,
        }
        # fails with transformers 5.23, and is for outputs that are not asked for
        deepspeed.module_inject.auto_ep.AutoEP._retarget_transformers_output_recorders = lambda *_: None
    module = model(case.kind, deepspeed.pipe, 2, deepspeed.moe.layer.MoE, case.ep)
    # AutoEP and Muon sort the parameters of one group of the caller's alone
    is_one = case.is_autoep or case.kind == "muon"
    params = [param for param in module.parameters() if param.requires_grad] if is_one else groups(module)
    engine = deepspeed.initialize(model=module, model_parameters=params, config=settings)[0]
    losses = []
    for step in range(STEPS + MORE):
        losses.append(pipeline_step(engine, case, step) if "pipe" in case.kind else data_step(engine, case, step))
        if step == STEPS - 1:
            engine.save_checkpoint(str(folder), client_state={"epoch": 7, "names": ["a", None], "seen": (1, 2.5)})
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses[STEPS:]))
    dist.barrier()
    os._exit(0)  # torch's threads of groups may abort a process that ends by itself


def pipeline_step(engine: Any, case: Case, step: int) -> float:
    tokens = batch(step, engine.grid.get_data_parallel_rank(), case.replicas)
    return engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])])).item()


def data_step(engine: Any, case: Case, step: int) -> float:
    import torch.distributed as dist

    index = dist.get_rank() // (case.world // case.replicas)
    loss = loss_of(engine, batch(step, index, case.replicas))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    return mean.item() / case.world


def loss_of(engine: Any, tokens: Tensor) -> Tensor:
    if isinstance(getattr(engine.module, "config", None), dict | type(None)):
        return engine(tokens)
    return engine(input_ids=tokens, labels=tokens).loss


def launch(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True)
    variables = {"WORLD_SIZE": str(case.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(case), str(folder)],
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(case.world)
    ]
    codes = [rank.wait() for rank in ranks]
    assert not any(codes), case
    if case.universal:
        tag = (folder / "latest").read_text()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "deepspeed.checkpoint.ds_to_universal",
                "--input_folder",
                str(folder / tag),
                "--output_folder",
                str(folder / f"{tag}_universal"),
                "--inject_missing_state",
            ],
            check=True,
        )
        (folder / "latest").unlink()
        for file in (folder / tag).iterdir():
            file.unlink()
        (folder / tag).rmdir()
    for script in folder.glob("zero_to_*.py"):
        script.unlink()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        train(Case(*json.loads(sys.argv[1])), Path(sys.argv[2]))
    else:
        ARCHIVE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            if sys.argv[1:]:
                with tarfile.open(ARCHIVE) as old:
                    old.extractall(scratch, filter="data")
                (Path(scratch) / "deepspeed").rename(Path(scratch) / "all")
            for each in CASES:
                if not sys.argv[1:] or each.name in sys.argv[1:]:
                    shutil.rmtree(Path(scratch) / "all" / each.name, ignore_errors=True)
                    launch(each, Path(scratch) / "all" / each.name)
            with tarfile.open(ARCHIVE, "w:xz") as archive:
                archive.add(Path(scratch) / "all", "deepspeed")
