"""The leg `draft`: greedy tokens per second of one stream with a draft model of an eighth of the size, over the same without.

Both are trained here, once, by the recipe of `make train` (examples/pretrain: its text, tokenizer and ds_config.json), as models of
transformers. The prompts are beginnings of windows of the validation text, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdicts
from benchmarks.serving.contenders import OURS
from benchmarks.serving.limits import Shape
from benchmarks.serving.measure import Run, contenders_table, interleaved, judged, ratios
from benchmarks.serving.traces import Ask, Trace
from benchmarks.worker import ROOT, Worker

FOLDER, RECIPE = ROOT / "runs" / "bench-draft", ROOT / "examples" / "pretrain"
SIZES = {"hf": (768, 10, 12, 2048), "draft": (320, 5, 5, 896)}  # folder: width, layers, heads, features of the MLP
WINDOWS = 2  # per step: what two ranks of `make train` see
PROMPTS, PROMPT, OUTPUTS, ROUNDS = 8, 64, 128, 5
WITH = replace(OURS, extra=(("draft", "draft"),))
TRAINING_LIMIT = 3600.0


def train(channel: Any, folder: str, name: str) -> None:
    """The target of a worker: train one model and save it in bf16."""
    sys.path.insert(0, str(RECIPE))
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    import data
    import slipstream
    import train as recipe

    slipstream.init_distributed()
    text = data.load(data.prepare(data.standard_library(), Path(folder), recipe.VOCAB_SIZE), recipe.CONTEXT)
    width, layers, heads, features = SIZES[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=text.tokenizer.get_vocab_size(),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=features,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    embedding = model.model.embed_tokens.weight
    torch.nn.init.normal_(embedding, std=0.3)  # as the recipe's, whose rate is fast
    body = [parameter for parameter in model.parameters() if parameter is not embedding]
    config = json.loads((RECIPE / "ds_config.json").read_text()) | {"train_micro_batch_size_per_gpu": WINDOWS}
    engine, _, loader, _ = slipstream.initialize(
        model=model,
        model_parameters=[
            {"params": body},
            {"params": [embedding], "lr": recipe.EMBEDDING_LR * config["optimizer"]["params"]["lr"], "weight_decay": 0.0},
        ],
        training_data=text.train(),
        config=config,
    )
    loss = torch.zeros(())
    for tokens, targets in islice(slipstream.RepeatingLoader(loader), config["scheduler"]["params"]["total_num_steps"]):
        loss = F.cross_entropy(engine(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=data.IGNORED)
        engine.backward(loss)
        engine.step()
    engine.save_pretrained(str(Path(folder) / name))
    batches = text.validation(1, 0, 1)
    windows = [tokens[0, :PROMPT].tolist() for tokens, _ in batches[:: len(batches) // (ROUNDS * PROMPTS)]]
    (Path(folder) / "prompts.json").write_text(json.dumps(windows))
    channel.serve({"loss": lambda: float(loss)})


def prepare(folder: Path) -> Path:
    """The models' folder, made if it is not complete. The file `complete` is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "complete").exists():
        for name in SIZES:
            print(f"training {folder / name} ...", flush=True)
            with Worker("benchmarks.serving.draft:train", {"folder": str(folder), "name": name}) as worker:
                worker.ready(TRAINING_LIMIT)
                print(f"  its last loss: {worker.call('loss'):.2f}", flush=True)
        (folder / "complete").touch()
    return folder


def run(options: Options) -> str:
    folder = prepare(FOLDER)
    return measure(Run.of(options, ROUNDS, folder, Shape.read(folder / "hf")))


def measure(run: Run) -> str:
    prompts, outputs = json.loads((run.models / "prompts.json").read_text()), 16 if run.quick else OUTPUTS

    def stream(turn: int) -> Trace:
        own = prompts[turn::ROUNDS][:PROMPTS]
        return [Ask(prompt=tuple(one), outputs=outputs, after=index - 1 if index else None) for index, one in enumerate(own)]

    kinds: dict[str, Callable[[int], Trace]] = {"one stream": stream}
    with run.fleet() as fleet:
        processes = [fleet.start(contender) for contender in (OURS, WITH)]
        results = interleaved(run, fleet, kinds)
    rates = {name: [outcome.output_rate for outcome in each] for (_, name), each in results.items()}
    weights = ((run.models / name).glob("*.safetensors") for name in SIZES)
    sizes = " and ".join(f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB" for files in weights)
    return "\n\n".join(
        (
            f"Two Llamas of {sizes} in bf16, trained by `make train`'s recipe; {PROMPTS} prompts of {PROMPT} tokens of the "
            f"validation text, {outputs} tokens out each, greedy, one after the other. Median of {run.rounds} rounds (min-max).",
            table(["contender", "tokens per second"], [[name, Spread.of(each).show(1)] for name, each in rates.items()]),
            run.describe_limits(),
            contenders_table([one for one in processes if one], results),
            verdicts([judged("one stream with the draft, over without", ratios(rates[WITH.name], rates[OURS.name]), 1.5)]),
        )
    )
