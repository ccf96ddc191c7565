"""The leg `cuda`, for one GPU: `resident` steps, `train` GPTs in a slice of it with states in host memory, `serve` a Llama, and
`sparse` attention.

`resident`: 760 million parameters, 8 sequences of 1,024, bf16 weights, fp32 masters, AdamW, clipping; everything on the device.
Peers: a plain loop (fused AdamW, grouped clipping), FSDP2, DeepSpeed. Ten steps a round; the median of each.

`train`: 1.3 and 3 billion parameters in 16 GiB, sequence 2,048, recomputed blocks, bf16, 1 and 8 micro-batches a step.
Contenders run in fresh processes, one after the other in each round; `set_per_process_memory_fraction` limits them to the
slice. `resident` alone has the whole device: fp32 weights under autocast and torch's fused AdamW do not fit the slice.
DeepSpeed comes from `--peers`, an interpreter with a torch for CUDA.

`serve`: 1.2 billion random weights in bf16, ours and transformers, batches of 1 and 64, prompts of 128 tokens. The figure is a
generated token: the time of a long answer less that of a short one, so that neither prompts nor the start count. The limit is
reading each weight once per forward at the rate at which this GPU copies memory (bytes read and written). Needs triton and
transformers.

`sparse`: the patterns of the leg of that name, forward and backward, in bf16; dense attention is torch's.

Without a GPU, `--quick` runs `train` with a toy on the CPU, where nothing is offloaded.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.legs import Options
from benchmarks.ranks import free_port, rank_env
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.systems import ADAMW
from benchmarks.worker import Failed, Worker
from benchmarks.workloads import CLIPPING, GPT, Workload, build_batch

if TYPE_CHECKING:
    from benchmarks.worker import Channel

SLICE = 16 << 30
MODELS = (
    Workload(name="1.3B", width=2048, depth=24, heads=16, vocab=32768, batch=1, length=2048),
    Workload(name="3B", width=2560, depth=36, heads=20, vocab=32768, batch=1, length=2048),
)
TOY = Workload(name="toy", width=64, depth=2, heads=2, vocab=256, batch=1, length=32)
HOST = {"device": "cpu", "pin_memory": True}
ZERO: dict[str, dict[str, Any]] = {
    "slipstream:1": {"stage": 1, "offload_optimizer": HOST},  # gradients accumulate on the device and leave it once a step
    "slipstream:2": {"stage": 2, "offload_optimizer": HOST},
    "slipstream:3": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "deepspeed:2": {"stage": 2, "offload_optimizer": HOST},
    "deepspeed:3": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
MIDDLE = Workload(name="760M", width=1536, depth=24, heads=16, vocab=32768, batch=8, length=1024)
LOOPS = ("plain", "fsdp2", "slipstream:1", "slipstream:3", "deepspeed:1", "deepspeed:3")  # of `resident`
RESIDENT = "resident: torch, fused AdamW, the whole device"
TIMED = 3  # steps in a row

BATCHES = (1, 64)
PROMPT, SHORT, LONG = 128, 16, 144  # tokens
LLAMA_1B: dict[str, Any] = {  # meta-llama/Llama-3.2-1B
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# -- a contender of `train`, in its process --


def recomputing(model: GPT, reentrant: bool = False) -> GPT:
    """Blocks keep only their inputs. DeepSpeed's ZeRO-3 is made for the reentrant kind."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    return model


def plain_loop(work: Workload, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    with batch[0].device:
        model = GPT(work).bfloat16()
    params: list[Tensor] = list(model.parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(masters, **{**ADAMW, "betas": tuple(ADAMW["betas"])}, fused=True)

    def step() -> float:
        loss = model(*batch)
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIPPING, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return float(loss)

    return step


def fsdp2_loop(work: Workload, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl")
    with batch[0].device:
        model = GPT(work)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model.blocks, model):
        fully_shard(block, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "betas": tuple(ADAMW["betas"])}, fused=True)

    def step() -> float:
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def engine_step(library: Any, model: GPT, config: dict[str, Any], micros: int, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    library.init_distributed()
    engine = library.initialize(model=model, config=config | {"steps_per_print": 2**31}, model_parameters=model.parameters())[0]

    def step() -> float:
        for _ in range(micros):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
        return float(loss)

    return step


def build(system: str, work: Workload, micros: int, batch: tuple[Tensor, Tensor], offloaded: bool = True) -> Callable[[], float]:
    """A function that makes a step and returns its last loss."""
    kind, device = system.split(":")[0], batch[0].device
    if system in ("plain", "fsdp2"):
        return (plain_loop if system == "plain" else fsdp2_loop)(work, batch)
    if kind == "torch":
        with device:
            plain = recomputing(GPT(work))
        optimizer = torch.optim.AdamW(plain.parameters(), **{**ADAMW, "betas": tuple(ADAMW["betas"])}, fused=True)

        def torch_step() -> float:
            for _ in range(micros):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = plain(*batch)
                (loss / micros).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        return torch_step
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": ZERO[system] if offloaded else {"stage": int(system[-1])},
    }
    library: Any = __import__(kind)
    if not offloaded:
        with device:
            model = GPT(work)
    elif kind == "slipstream":
        with library.zero.Init():
            model = GPT(work)
        config |= {"slipstream": {"activations": "recompute"}}
    else:
        library.init_distributed(verbose=False)
        torch.set_default_dtype(torch.bfloat16)
        with library.zero.Init(config_dict_or_path=config, enabled=system == "deepspeed:3"):
            model = recomputing(GPT(work), reentrant=True)
        torch.set_default_dtype(torch.float32)
    return engine_step(library, model, config, micros, batch)


def contend(channel: Channel, system: str, work: dict[str, Any], micros: int, nbytes: int, offloaded: bool = True) -> None:
    """`nbytes`: the limit of device memory, or 0."""
    sizes, cuda = Workload(**work), torch.cuda.is_available()
    if cuda and nbytes:
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / torch.cuda.get_device_properties(0).total_memory), 0)
    torch.manual_seed(0)
    tokens, targets = build_batch(sizes, 0)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    step = build(system, sizes, micros, (tokens.to(device), targets.to(device)), offloaded)

    def steps(count: int) -> dict[str, Any]:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses, ends = [], [start]
        for _ in range(count):
            losses.append(step())  # reads the loss, so the step has ended
            ends.append(time.perf_counter())
        if cuda:
            torch.cuda.synchronize()
        median = statistics.median(stop - begin for begin, stop in itertools.pairwise(ends))
        peak = torch.cuda.max_memory_reserved() if cuda else 0
        return {"seconds": (time.perf_counter() - start) / count, "median": median, "peak": peak, "losses": losses}

    channel.serve({"steps": steps})


# -- resident --


def resident(options: Options, rounds: int) -> str:
    systems = [name for name in LOOPS if not name.startswith("deepspeed") or options.peers.exists()]
    took: dict[str, list[float]] = {name: [] for name in systems}
    last: dict[str, dict[str, Any]] = {}
    for name in [name for _ in range(rounds) for name in systems]:
        arguments = {"system": name, "work": asdict(MIDDLE), "micros": 1, "nbytes": 0, "offloaded": False}
        python = options.peers if name.startswith("deepspeed") else None
        with Worker("benchmarks.cuda:contend", arguments, name=name, python=python, env=rank_env(0, 1, free_port())) as worker:
            worker.ready()
            worker.call("steps", count=4)
            last[name] = worker.call("steps", count=10)
        took[name].append(last[name]["median"])
        print(f"{name}: {1e3 * took[name][-1]:.1f} ms a step", flush=True)
    rows = [
        [
            name,
            Spread.of([1e3 * each for each in took[name]]).show(),
            Spread.ratio(took[name], took["plain"]).show(2),
            f"{last[name]['peak'] / 2**30:.1f}",
            f"{last[name]['losses'][-1]:.3f}",
        ]
        for name in systems
    ]
    return table(["contender", "step, ms", "over a plain loop", "device, GiB", "last loss"], rows)


# -- train --


def attempt(system: str, work: Workload, micros: int, options: Options) -> dict[str, Any]:
    """Raises Failed, also if the device's memory is not enough."""
    arguments = {"system": system, "work": asdict(work), "micros": micros, "nbytes": 0 if system == "torch" else SLICE}
    python = options.peers if system.startswith("deepspeed") else None
    with Worker("benchmarks.cuda:contend", arguments, name=system, python=python, env=rank_env(0, 1, free_port())) as worker:
        worker.ready()
        first = worker.call("steps", count=1)
        return {**worker.call("steps", count=TIMED), "first": first["losses"][0]}


def train(options: Options, works: tuple[Workload, ...], rounds: int) -> str:
    systems = ["torch", *(system for system in ZERO if not system.startswith("deepspeed") or options.peers.exists())]
    rows, judged = [], []
    for work, micros in itertools.product(works, (1, 8)):
        replies: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
        failed: dict[str, str] = {}
        for _ in range(rounds):
            for system in [system for system in systems if system not in failed]:
                try:
                    replies[system].append(attempt(system, work, micros, options))
                except Failed as error:
                    print(error)
                    failed[system] = error.reason
        took = {system: [reply["seconds"] for reply in replies[system]] for system in systems if system not in failed}
        for system in systems:
            name = [work.name, str(micros), RESIDENT if system == "torch" else f"{system}, offloaded"]
            if system in failed:
                rows.append([*name, failed[system]])
                continue
            last = replies[system][-1]
            over = Spread.ratio(took[system], took["torch"]).show(2) if "torch" in took else ""
            loss = f"{last['first']:.3f} -> {last['losses'][-1]:.3f}"
            rows.append([*name, Spread.of(took[system]).show(), over, f"{last['peak'] / 2**30:.1f}", loss])
        # Each at its best stage, as a user would choose it
        times = {kind: [min(one) for system, one in took.items() if system.startswith(kind)] for kind in ("slip", "deep", "torch")}
        best = {kind: min(each) for kind, each in times.items() if each}
        what = f"{work.name}, {micros} micro-batches"
        if {"slip", "deep"} <= best.keys():
            judged.append(verdict(f"{what}: faster than DeepSpeed", best["deep"] / best["slip"], 2.0, at_least=True))
        if {"slip", "torch"} <= best.keys() and micros == 8:
            judged.append(verdict(f"{what}: of resident's rate", best["torch"] / best["slip"], 0.9, at_least=True))
    head = ["model", "micro-batches", "contender", "step, s", "over resident", "device, GiB", "loss"]
    return "\n\n".join((table(head, rows), verdicts(judged)))


# -- serve --


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate() -> float:
    """Bytes/s, read and written, of copies that no cache holds."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(10))


def per_token(generate: Callable[[int], object], rounds: int) -> float:
    """Median seconds of a forward that generates; `generate(n)` makes n tokens of each prompt."""
    generate(SHORT)
    return statistics.median(
        (seconds(lambda: generate(LONG)) - seconds(lambda: generate(SHORT))) / (LONG - SHORT) for _ in range(rounds)
    )


def serve(rounds: int) -> str:
    import transformers

    import slipstream

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_1B)).bfloat16().eval()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())  # the tied head once: the embedding is looked up
    rate, rows = copy_rate(), []

    def own(serving: Any, ids: Tensor, new: int) -> None:
        serving.generate(ids.tolist(), max_new_tokens=new, temperature=0, ignore_eos=True)

    def reference(ids: Tensor, new: int) -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)  # no token ends it

    for dtype in ("bf16", "int8", "int4"):
        with slipstream.init_inference(model, dtype=dtype, device="cuda", max_running=max(BATCHES), max_context=1024) as serving:
            if "Triton kernels" not in serving.description:
                raise RuntimeError(f"not the forward to be measured: {serving.description}")
            for batch in BATCHES:
                ids = torch.randint(1, LLAMA_1B["vocab_size"], (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
                ours, peer = per_token(partial(own, serving, ids), rounds), per_token(partial(reference, ids.cuda()), rounds)
                share = weight_bytes / rate / ours
                print(f"{dtype}, batch {batch}: {1e3 * ours:.3f} ms a token, transformers {1e3 * peer:.3f}", flush=True)
                rows.append([dtype, str(batch), f"{1e3 * ours:.3f}", f"{share:.2f}", f"{1e3 * peer:.3f}", f"{peer / ours:.1f}"])
    head = ["our weights", "batch", "ms per token", "of bf16's limit", "transformers, bf16, ms", "faster than transformers"]
    text = f"Copies at {rate / 1e12:.2f} TB/s (read and written); {weight_bytes / 1e9:.2f} GB of weights in bf16."
    return f"{text}\n\n{table(head, rows)}"


# -- sparse --


def sparse(rounds: int) -> str:
    from benchmarks.sparse import BLOCKS, PATTERNS, density
    from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

    rows = []
    for length in (4096, 16_384):
        q, k, v = (torch.randn(1, 16, length, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
        weight = torch.randn_like(q)

        def step(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...] = (q, k, v), weight: Tensor = weight) -> float:
            return statistics.median(seconds(lambda: torch.autograd.grad(attend(), inputs, weight)) for _ in range(10))

        dense = {causal: partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal) for causal in (False, True)}
        for (name, pattern), block in itertools.product(PATTERNS.items(), BLOCKS):
            layout = BlockLayout(pattern(block).make_layout(length), block, causal="causal" in name)
            ours = partial(block_sparse_attention, q, k, v, layout)
            for attend in (ours, dense[layout.causal]):  # compile and warm up
                step(attend)
            took = [(step(ours), step(dense[layout.causal])) for _ in range(rounds)]
            gain = statistics.median(peer / own for own, peer in took)
            ms = 1e3 * statistics.median(own for own, _ in took)
            share = density(layout)
            rows.append([f"{length:,}", name, str(block), f"1/{1 / share:.1f}", f"{ms:.2f}", f"{gain:.2f}", f"{gain * share:.2f}"])
        print(f"sparse, {length:,} tokens: done", flush=True)
    return table(["tokens", "pattern", "block", "density", "ms", "dense over it", "share of the limit"], rows)


def run(options: Options) -> str:
    if not torch.cuda.is_available():
        if not options.quick:
            raise RuntimeError(
                "the leg `cuda` needs a CUDA device, and torch finds none here; with --quick, a toy trains on the CPU"
            )
        return "\n\n".join(("A toy on the CPU.", train(options, (TOY,), 1)))
    parts, rounds = options.only or ("resident", "train", "serve", "sparse"), options.num_rounds(3)
    text = [f"{torch.cuda.get_device_name()}; `train` has {SLICE >> 30} GiB of it."]
    if "resident" in parts:
        text.append(resident(options, rounds))
    if "train" in parts:
        text.append(train(options, MODELS, rounds))
    if "serve" in parts:
        text.append(serve(rounds))
    if "sparse" in parts:
        text.append(sparse(rounds))
    return "\n\n".join(text)
