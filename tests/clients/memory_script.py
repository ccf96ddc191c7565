"""Host memory of transformers' from_pretrained under stage 3, of initialize and of save_pretrained, measured by test_memory.py."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
DEPTH = 12
SIZES = {"vocab_size": 3072, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
# A process of its own reads the rank's anonymous and shared memory (not the pages of files) until its stdin closes: in the rank
# itself, a thread would wait for the interpreter's lock.
WATCH = """
import select, sys
most, path = 0, f"/proc/{sys.argv[1]}/status"
print(flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    fields = dict(line.split(":", 1) for line in open(path).read().splitlines())
    most = max(most, sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")))
print(most)
"""


class Usage(NamedTuple):
    """Bytes before, at the peak of, and after a call."""

    before: int
    peak: int
    after: int


def measure(call: Callable[[], Any]) -> tuple[Any, Usage]:
    gc.collect()
    before = _memory()
    with subprocess.Popen([sys.executable, "-c", WATCH, str(os.getpid())], stdin=-1, stdout=-1, text=True) as watch:
        assert watch.stdin is not None and watch.stdout is not None
        watch.stdout.readline()
        result = call()
        peak, _ = watch.communicate()
    gc.collect()
    return result, Usage(before, max(before, int(peak)), _memory())


def _memory() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def peaks() -> None:
    """No call needs more than two units, the parameters that are gathered together (here a block), beyond what stays."""
    folder = Path(os.environ["CLIENT_FOLDER"])
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        for name, depth in (("small", 1), ("source", DEPTH)):
            config = transformers.LlamaConfig(**SIZES, num_hidden_layers=depth, tie_word_embeddings=False)
            transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    dist.barrier()
    alive = HfDeepSpeedConfig(CONFIG)  # tells from_pretrained of stage 3, as long as it lives

    def load(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder / name)

    def initialize(model: Any) -> Any:
        return deepspeed.initialize(model=model, config=CONFIG)[0]

    def step(engine: Any) -> None:
        ids = torch.arange(8)[None]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    small = initialize(load("small"))  # the first use of everything imports and allocates
    step(small)
    small.save_pretrained(str(folder / "small-out"))
    small.destroy()
    model, loading = measure(lambda: load("source"))
    engine, starting = measure(lambda: initialize(model))
    step(engine)
    _, saving = measure(lambda: engine.save_pretrained(str(folder / "out")))
    params = dict(engine.module.named_parameters())
    unit = 4 * sum(shape.numel() for shape in _shapes(params, "model.layers.0."))
    shard = 4 * sum(shape.numel() for shape in _shapes(params, "")) // dist.get_world_size()
    beyond = {
        "from_pretrained": loading.peak - min(loading.before + shard, loading.after),  # malloc may have kept memory
        "initialize": starting.peak - max(starting.before, starting.after),
        "save_pretrained": saving.peak - saving.before,
    }
    print({name: f"{nbytes / unit:.2f} units" for name, nbytes in beyond.items()}, flush=True)
    assert max(beyond.values()) <= 2 * unit, f"a unit is {unit} bytes, a shard {shard}: {beyond}, {loading}, {starting}, {saving}"
    assert loading.after - loading.before < shard + unit
    del alive
    engine.destroy()


def _shapes(params: dict[str, Any], prefix: str) -> list[torch.Size]:
    return [torch.Size(param.ds_shape) for name, param in params.items() if name.startswith(prefix)]
