"""README and pages are executed, and what they count and list is the code's."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import keys
from tests.pool import run as run_on_ranks
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
STATUS = (ROOT / "docs" / "STATUS.md").read_text()
SERVING = (ROOT / "docs" / "SERVING.md").read_text()
CHECKPOINTS = (ROOT / "docs" / "CHECKPOINTS.md").read_text()
TRAIN, SERVE, CLIENT = re.findall(r"```python\n(.*?)```", README, re.S)
ANY_MODULE, ASYNC, _MII, RAGGED = re.findall(r"```python\n(.*?)```", SERVING, re.S)
LEARNING, ROLLOUTS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "RL.md").read_text(), re.S)
COMING = (ROOT / "docs" / "COMING_FROM_DEEPSPEED.md").read_text()
FSDP, LIGHTNING = re.findall(r"```python\n(.*?)```", COMING, re.S)
(QUANTIZED,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "QUANTIZED.md").read_text(), re.S)
(EXPERTS,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "EXPERTS.md").read_text(), re.S)
(ACTIVATIONS,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ACTIVATIONS.md").read_text(), re.S)
(SPARSE,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "SPARSE_ATTENTION.md").read_text(), re.S)
(OBSERVING,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "OBSERVING.md").read_text(), re.S)
(COMPRESSION,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "COMPRESSION.md").read_text(), re.S)
PARAMETERS = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "PARAMETERS.md").read_text(), re.S))


def run(script: Path) -> str:
    done = subprocess.run([sys.executable, script], cwd=script.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def execute(code: str, folder: Path) -> str:
    """What the code prints, in this process."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, {"__name__": "__main__"})
    return output.getvalue()


def test_readme_is_read_in_two_minutes() -> None:
    """With the ratios that the benchmarks wrote."""
    quick_starts, _, _ = README.partition("## What you get")
    assert len(README.splitlines()) <= 90 and len(quick_starts.split()) <= 700
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for name, ratios in re.findall(r"^\| ([^|]*, over (?:DeepSpeed|PyTorch|vLLM)[^|]*) \| ([^|]*\d+\.\d+x[^|]*) \|$", README, re.M):
        for ratio in re.findall(r"([\d.]+)x", ratios):
            measured = {f"{float(value):.1f}" for value in re.findall(r"(?:faster than|over) [^|]*\| ([\d.]+) \|", results)}
            assert ratio in measured, f"{name}: {ratio} is not in RESULTS.md"


def test_quick_start_runs_and_is_short(tmp_path: Path) -> None:
    assert len([line for line in TRAIN.splitlines() if line.strip()]) <= 15
    script = tmp_path / "script.py"
    script.write_text("import torch; torch.manual_seed(0)\n" + TRAIN + "\nassert loss < 8, loss  # the variance of the target\n")
    assert "step 16: loss" in run(script)
    assert (tmp_path / "checkpoints" / "latest").is_file()


def test_checkpoints_run(tmp_path: Path) -> None:
    """The code, with the configuration that the page names, then its command lines."""
    from tests.deepspeed_checkpoints import ARCHIVE, CASES

    keys = re.findall(r'`("\w+": \{.*?\})`', CHECKPOINTS)
    assert len(keys) >= 2
    blocks = [json.loads(f"{{{key.replace(': k', ': 2')}}}") for key in keys]
    lines = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^slipstream convert .*", CHECKPOINTS, re.M)]
    assert {line[-1] for line in lines} >= {"slipstream", "deepspeed", "../base-model"}
    work, base = tmp_path / "work", tmp_path / "base-model"
    work.mkdir()
    base.mkdir()
    (base / "config.json").write_text("{}")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(work, filter="data")
    (work / "deepspeed" / CASES[0].name).rename(work / "deepspeed-run")
    script = f"""
import shutil
import slipstream
import torch
from slipstream.launch import cli

config = {{"optimizer": {{"type": "AdamW"}}, "train_micro_batch_size_per_gpu": 2}}
for block in {blocks!r}:
    config |= block
engine = slipstream.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
{"".join(re.findall(r"```python(.*?)```", CHECKPOINTS, re.S))}
assert client_state == {{"epoch": 3}} and path.endswith("global_step1"), (path, client_state)
engine.destroy()
shutil.copy("folder/model.safetensors", "../base-model")
for line in {lines!r}:
    assert cli.main(line) == 0, line
"""
    run_on_ranks(1, execute, script, work)
    assert (work / "folder" / "config.json").is_file() and (work / "exported" / "latest_universal").is_file()
    assert (work / "checkpoints" / "base-model" / "metadata.json").is_file()


@pytest.mark.slow
def test_sparse_attention_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPARSE + "\nassert model.config._attn_implementation == 'slipstream_sparse' and loss.isfinite()\n")
    run(script)


@pytest.mark.slow
def test_compression_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COMPRESSION + "\nassert BertForMaskedLM.from_pretrained('small')(ids).logits.isfinite().all()\n")
    run(script)


@pytest.mark.slow
def test_observing_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OBSERVING)
    first, backward = run(script).splitlines()
    assert f"# {first}\n" in OBSERVING and int(backward) == 3 * 2 * 8 * 64 * 256, "the first layer's input has no gradient"


@pytest.mark.slow
def test_experts_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    check = "\nassert {name: int(load.sum()) for name, load in expert_loads(engine.module).items()} == {'1.moe': 8, '2.moe': 8}\n"
    script.write_text(EXPERTS + check)
    run(script)


@pytest.mark.slow
def test_activations_by_hand_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ACTIVATIONS + "\nassert x.grad is not None and wide(h).shape == (2, 32, 1000)\n")
    run(script)


@pytest.mark.slow
def test_parameters_by_hand_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    check = "\nassert 'exp_avg' not in engine.optimizer_state('0.weight') and average.num_updates == 3\n"
    check += "assert [group['lr'] for group in engine.optimizer.param_groups] == [1e-2, 1e-3]\n"
    check += "assert engine.optimizer_state('4.weight')['exp_avg'].any() and rows.shape == (50, 8)\n"
    script.write_text(PARAMETERS + check)
    run(script)


def test_any_module_runs(tmp_path: Path) -> None:
    assert re.fullmatch(r"PackedLinear\(256, 10, bias=True, bits=8, kernels=\w+\)\n", execute(ANY_MODULE, tmp_path))


# What QUANTIZED.md's code asks of PEFT, where PEFT is not installed; tests/clients runs it with the real one.
PEFT = """
import torch

def LoraConfig(task_type, r, target_modules):
    return r

class Lora(torch.nn.Module):
    def __init__(self, base, r):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, r, bias=False)
        self.lora_B = torch.nn.Linear(r, base.out_features, bias=False)
        torch.nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

def get_peft_model(model, r):
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "QuantizedLinear":
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], Lora(module, r))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model
"""


def quantized_page(folder: Path) -> list[float]:
    """The losses that its code prints."""
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:  # later tests of this rank look whether peft is installed
        if importlib.util.find_spec("peft") is None:
            patch.setitem(sys.modules, "peft", types.ModuleType("peft"))
            exec(PEFT, vars(sys.modules["peft"]))
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as output:
            exec(QUANTIZED, scope)
    assert {module.form.bits for module in scope["engine"].module.modules() if hasattr(module, "form")} == {4}
    scope["engine"].destroy()
    return [float(line) for line in output.getvalue().split()]


def test_adapters_on_a_quantized_base_run(tmp_path: Path) -> None:
    """Each loss is below the one before: what is trained are the adapters."""
    (losses,) = run_on_ranks(1, quantized_page, tmp_path)
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.01
    assert (tmp_path / "adapters" / "latest").is_file()


@pytest.mark.slow
def test_learning_from_answers_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEARNING + ROLLOUTS)
    run(script)


@pytest.mark.slow
def test_loops_of_fsdp_and_lightning_run_here(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    check = "\nassert engine.global_steps == 32 and weights['2.weight'].shape == (1, 32) and engine.global_grad_norm\n"
    script.write_text("import torch; torch.manual_seed(0)\n" + FSDP + check + LIGHTNING + "\nassert loss < 6, loss\n")
    run(script)
    assert (tmp_path / "checkpoints" / "latest").is_file()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokens are bytes, in a folder of the name that README gives: it goes before the installed model."""
    import tokenizers
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("readme") / "smollm2"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_serving_from_python_runs_and_is_short(smollm2: Path) -> None:
    assert len([line for line in SERVE.splitlines() if line.strip()]) <= 12
    out = execute(SERVE + ASYNC, smollm2.parent)
    assert len(out) > 8 and {line[:2] for line in out.splitlines()} >= {"0 ", "1 "}


@pytest.mark.slow
def test_the_server_and_its_client_run(smollm2: Path) -> None:
    """Also the command lines around them."""
    generate, serve = (shlex.split(line) for line in re.findall(r"^slipstream (?:generate|serve) .*", README, re.M))
    port = str(free_port())
    module = [sys.executable, "-m", "slipstream.launch.cli"]
    done = subprocess.run([*module, *generate[1:]], cwd=smollm2.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout) > 8, done.stderr
    command = [*module, *(word.replace("8000", port) for word in serve[1:])]
    with subprocess.Popen(command, cwd=smollm2.parent, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert port in server.stdout.readline()
            script = smollm2.with_name("client.py")
            script.write_text(CLIENT.replace("8000", port))
            assert run(script)
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_serving_s_lists_are_the_code_s() -> None:
    from slipstream.inference.server.chat import ChatRequest
    from slipstream.inference.server.completions import CompletionRequest
    from slipstream.inference.server.metrics import Loading, ModelFigures, Traffic, render
    from slipstream.inference.stats import Histogram, Stats
    from slipstream.launch.cli import build_parser

    named = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", SERVING, flags=re.S)))
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert fields <= named, fields - named

    empty = Histogram((), (0,), 0.0)
    histograms = [name for name, one in Stats.__dataclass_fields__.items() if one.type == "Histogram"]
    numbers = dict.fromkeys(Stats.__dataclass_fields__, 1) | {"finished": {}, **dict.fromkeys(histograms, empty)}
    metrics = set(
        re.findall(
            r"# TYPE slipstream_(\S+)", render([ModelFigures("", Stats(**numbers), [], Loading(True, 0, 0, 0, 0))], Traffic())
        )
    )  # type: ignore[arg-type]
    assert metrics and metrics <= named, metrics - named

    (commands,) = (action for action in build_parser()._actions if action.dest == "command")
    flags = {word for action in commands.choices["serve"]._actions for word in action.option_strings}  # type: ignore[index, union-attr]
    options = {word.replace("_", "-") for word in flags if word.startswith("--")} - {"--help"}
    (table,) = re.findall(r"## Options of `slipstream serve`\n(.*?)\n## ", SERVING, re.S)
    assert set(re.findall(r"`(--[a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line))) == options

    source = ROOT / "src" / "slipstream" / "inference"
    files = {str(file.relative_to(source)).removesuffix(".py") for file in source.rglob("*.*") if file.suffix in (".py", ".html")}
    (table,) = re.findall(r"## Files of `inference/`\n(.*?)\n## ", SERVING, re.S)
    assert {name for name in files if not name.endswith("__init__")} == set(re.findall(r"^\| `([^`]+)` \|", table, re.M))


def test_key_counts_are_the_code_s() -> None:
    """Those of DeepSpeed's; the block "slipstream" is ours, and all of it is honored."""
    honored, idle, refused = (len(keys.of_fate(fate)) for fate in keys.Fate)
    own = sum(name.startswith("slipstream.") for name in keys.of_fate(keys.Fate.HONORED))
    assert own == sum(name.startswith("slipstream.") for name in keys.table())
    line = re.search(
        r"Of the (\d+) keys in DeepSpeed's .*?, (\d+) are honored, (\d+) have no effect .*? and (\d+) ask .*? adds (\d+) keys",
        STATUS,
        re.S,
    )
    assert line is not None
    assert tuple(map(int, line.groups())) == (len(keys.table()) - own, honored - own, idle, refused, own)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tree_names_every_module_and_nothing_else() -> None:
    rows = re.findall(r"^\| (`\w+/`.*?) \| (.*)$", (ROOT / "docs" / "ARCHITECTURE.md").read_text(), re.M)
    code = {rooms: re.findall(r"[\w/]+", " ".join(re.findall(r"`(.*?)`", text))) for rooms, text in rows}
    named = {room: names for rooms, names in code.items() for room in re.findall(r"`(\w+)/`", rooms)}
    source = ROOT / "src" / "slipstream"
    for module in source.glob("*/*"):
        entry = f"{module.name}/" if module.is_dir() else module.stem
        if (module.suffix == ".py" or (module / "__init__.py").exists()) and entry != "__init__":
            assert entry in named.get(module.parent.name, ()) or module.parent.name == "compat", f"{module.parent.name}/{entry}"
    for rooms, text in rows:
        homes = [source / room for room in re.findall(r"`(\w+)/`", rooms)]
        homes += [source, *(folder for home in homes for folder in home.glob("*/"))]
        for folders, pattern in ((homes, r"`([a-z]\w*)/?`"), ((source, ROOT), r"`(\w+/[\w/]+)(?:\.py)?`")):
            for name in re.findall(pattern, text):
                assert any((folder / name).is_dir() or (folder / f"{name}.py").exists() for folder in folders), f"{rooms} {name}"


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("*.md")):
        for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in _anchors(target), f"{page.name}: {link}"
