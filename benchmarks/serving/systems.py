"""The contenders' own loops, each in its own process and interpreter, which imports its packages in its constructor.

The constructor loads the model, `facts` describes what runs, `run` plays a `Feed`. All use every core. Only ours turns tokens
into text, which it always does.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.traces import Ask, Feed, Outcome

if TYPE_CHECKING:
    from benchmarks.worker import Channel

CONTEXT = 2048  # tokens of one request, at most
SLOTS = 32  # requests at once


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def resident() -> int:
    """Bytes of this process in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def adapter_folder(models: Path, form: str, number: int) -> Path:
    return models / f"adapters-{form}" / str(number)


def adapter_folders(models: Path, form: str | None) -> list[Path]:
    """Of a form's adapters; a request's is that of its number, in turn."""
    return [] if form is None else sorted((models / f"adapters-{form}").iterdir())


class System(ABC):
    facts: dict[str, Any]  # threads, precision, kernels (which ran), setting
    imported: int = 0  # `resident` before the model was opened

    def expert_use(self) -> list[int]:
        """The times that an expert was found in memory, and that it was not."""
        return [0, 0]

    def memory(self) -> int:
        """Bytes in memory since the packages were imported."""
        return resident() - self.imported

    @abstractmethod
    def run(self, feed: Feed) -> None:
        """Serve until `feed.over`. Calls `feed.take` for each token when a client could have it."""


class Ours(System):
    def __init__(
        self,
        models: Path,
        precision: str,
        budget: int,
        *,
        split: bool = True,
        prefix_caching: bool = True,
        token_interval: float | None = None,
        target: Sequence[float] | None = None,
        expert_cache_bytes: str | None = None,
        adapters: str | None = None,
        draft: str | None = None,
    ) -> None:
        import slipstream
        from slipstream.inference.engine import Engine
        from slipstream.inference.native import NativeDecoder

        folders = {folder.name: folder for folder in adapter_folders(models, adapters)}
        self._adapters = [*folders] or [""]
        options = {"expert_cache_bytes": expert_cache_bytes, "adapters": folders or None, "draft": draft and models / draft}
        more: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self.imported, as_stored = resident(), precision.startswith("q")
        opened = slipstream.init_inference(
            models / (f"{precision}.gguf" if as_stored else "hf"),
            dtype="stored" if as_stored else precision,
            max_context=CONTEXT,
            max_running=min(SLOTS, budget),
            token_budget=budget,
            prefix_caching=prefix_caching,
            token_interval=token_interval,
            **more,
        )
        self._opened, self._engine = opened, opened.engine
        runner = opened.engine.runner
        if not isinstance(runner, NativeDecoder):
            raise RuntimeError(f"the native kernels do not run: {opened.description}")
        if not split:  # whole prompts: the budget must hold the longest
            budget = CONTEXT
            self._engine = Engine(
                runner, opened.tokenizer, token_budget=budget, max_running=SLOTS, prefix_caching=prefix_caching, split=False
            )
            self._engine.start()
        setting = f"budget {budget}" + ("" if split else ", SplitFuse off") + ("" if prefix_caching else ", prefix cache off")
        setting += "" if token_interval is None else f", {token_interval * 1000:.0f} ms between tokens"
        setting += "" if target is None else ", requests carry the target"
        self._target = target  # prompt tokens per second, and seconds between tokens, that requests want
        self.facts = {"threads": runner.threads, "precision": precision, "kernels": opened.description, "setting": setting}

    def expert_use(self) -> list[int]:
        stats = self._engine.stats()
        return [stats.expert_hits, stats.expert_misses]

    def run(self, feed: Feed) -> None:
        from slipstream.inference.core import Finish, SamplingParams

        ended, wrong = threading.Event(), list[str]()

        def sink(index: int, output: Any) -> None:
            for token in output.token_ids:
                feed.take(index, token)
            if output.finish not in (None, Finish.LENGTH):
                wrong.append(f"request {index} ended with {output.finish.value}: {output.error}")
            if output.finish is not None:
                ended.set()

        while not feed.over and not wrong:
            ended.clear()
            for index in feed.due():
                ask = feed.trace[index]
                params = SamplingParams(max_tokens=ask.outputs, temperature=0.0, ignore_eos=True)
                more: dict[str, Any] = {"adapter": self._adapters[index % len(self._adapters)]}
                if self._target is not None:
                    rate, gap = self._target
                    more |= {"first_within": len(ask.prompt) / rate, "wait_within": gap}
                self._engine.submit(ask.prompt, params, sink=partial(sink, index), **more)
            if not feed.over:  # else the last sink has been called, and nothing would wake this thread
                ended.wait(min(feed.pause(), 10.0))
        if wrong:
            raise RuntimeError(wrong[0])


class Llama(System):
    """llama.cpp by its C interface, with its server's loop: each batch has a token of each slot that generates, then prompts
    up to `budget`. A cache of its own for each slot, as its documentation advises where little is shared."""

    def __init__(self, models: Path, precision: str, budget: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        self.imported = resident()
        path = models / f"{precision}.gguf"
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = SLOTS * CONTEXT // 2, SLOTS, False
        params.n_batch = params.n_ubatch = max(budget, SLOTS)  # less is an abort; the loop keeps to the budget
        params.n_threads = params.n_threads_batch = len(cores())
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(budget, 0, 1)
        self._budget = budget
        system = llama_cpp.llama_print_system_info().decode().strip()
        self.facts = {
            "threads": llama_cpp.llama_n_threads(self._context),
            "precision": precision,
            "kernels": f"llama-cpp-python {llama_cpp.__version__}: {system.replace(' | ', ', ').strip(' |,')}",
            "setting": f"n_batch {budget}",
        }

    def run(self, feed: Feed) -> None:
        lib = self._lib
        lib.llama_memory_clear(self._memory, False)
        waiting: list[int] = []
        free = list(range(SLOTS))
        slots: dict[int, int] = {}  # request -> its slot
        known: dict[int, list[int]] = {}  # its tokens
        computed: dict[int, int] = {}  # how many of them are in the cache
        while not feed.over:
            waiting += feed.due()
            while waiting and free:
                index = waiting.pop(0)
                slots[index], known[index], computed[index] = free.pop(), list(feed.trace[index].prompt), 0
            # Generations have one token to compute, prompts many.
            order = sorted(slots, key=lambda index: len(known[index]) - computed[index] > 1)
            rows: dict[int, int] = {}  # request -> its row of logits
            count = 0
            for index in order:
                new = known[index][computed[index] :][: self._budget - count]
                for token in new:
                    self._add(count, token, computed[index], slots[index])
                    computed[index] += 1
                    count += 1
                if new and computed[index] == len(known[index]):
                    rows[index] = count - 1
                    self._batch.logits[count - 1] = 1
            if not count:
                feed.wait()
                continue
            self._batch.n_tokens = count
            if code := lib.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode: {code}")
            for index, row in rows.items():
                token = self._greedy(row)
                feed.take(index, token)
                known[index].append(token)
                if len(feed.times[index]) == feed.trace[index].outputs:
                    lib.llama_memory_seq_rm(self._memory, slots[index], -1, -1)
                    free.append(slots.pop(index))

    def _add(self, row: int, token: int, position: int, slot: int) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, 0
        batch.seq_id[row][0] = slot

    def _greedy(self, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def _vllm_settings() -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores()[0]}-{cores()[-1]}",  # by default it keeps one core for itself
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


class Vllm(System):
    """The engine in this process, stepped by hand, without the cost of a second process. Compiled, as by default."""

    def __init__(self, models: Path, precision: str, budget: int, adapters: str | None = None) -> None:
        os.environ |= _vllm_settings()
        import torch
        import vllm
        from vllm.lora.request import LoRARequest

        self._vllm, folders = vllm, adapter_folders(models, adapters)
        self._adapters = [LoRARequest(one.name, number, str(one)) for number, one in enumerate(folders, 1)] or [None]
        more: dict[str, Any] = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": 16} if folders else {}
        self._engine = vllm.LLM(
            model=str(models / "hf"),
            dtype={"bf16": "bfloat16", "fp32": "float32"}[precision],
            max_model_len=CONTEXT,
            max_num_seqs=min(SLOTS, budget),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **more,
        ).llm_engine
        self._number = 0
        self.facts = {
            "threads": torch.get_num_threads(),
            "precision": precision,
            "kernels": f"vllm {vllm.__version__}, torch {torch.__version__}",
            "setting": f"threads bound to {os.environ['VLLM_CPU_OMP_THREADS_BIND']}, max_num_batched_tokens {budget}, "
            + ("Intel's OpenMP" if "libiomp5" in os.environ.get("LD_PRELOAD", "") else "without Intel's OpenMP"),
        }

    def run(self, feed: Feed) -> None:
        names: dict[str, int] = {}
        while not feed.over:
            for index in feed.due():
                ask, name = feed.trace[index], str(self._number)
                self._number += 1
                names[name] = index
                params = self._vllm.SamplingParams(temperature=0.0, max_tokens=ask.outputs, ignore_eos=True, detokenize=False)
                adapter = self._adapters[index % len(self._adapters)]
                self._engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, params, lora_request=adapter)
            if not self._engine.has_unfinished_requests():
                feed.wait()
                continue
            for output in self._engine.step():
                index = names[output.request_id]
                for token in output.outputs[0].token_ids[len(feed.times[index]) :]:
                    feed.take(index, token)


class Transformers(System):
    """`model(...)` with its own cache, one request at a time: `generate` without its bookkeeping."""

    def __init__(self, models: Path, precision: str, budget: int) -> None:
        import torch
        import transformers

        self._torch, self._dynamic_cache = torch, transformers.DynamicCache
        torch.set_num_threads(len(cores()))
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(models / "hf", dtype=dtype).eval()
        self.facts = {
            "threads": torch.get_num_threads(),
            "precision": precision,
            "kernels": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "setting": f"experts: {self._model.config._experts_implementation}",
        }

    def run(self, feed: Feed) -> None:
        with self._torch.inference_mode():
            while not feed.over:
                for index in feed.due():
                    ask, cache = feed.trace[index], self._dynamic_cache(config=self._model.config)
                    ids = self._torch.tensor([ask.prompt])
                    for _ in range(ask.outputs):
                        logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                        ids = logits[:, -1].argmax(-1, keepdim=True)
                        feed.take(index, int(ids))
                if not feed.over:
                    feed.wait()


SYSTEMS: dict[str, Callable[..., System]] = {
    "ours": Ours,
    "before": Ours,
    "llama": Llama,
    "vllm": Vllm,
    "transformers": Transformers,
}


def serve(channel: Channel, kind: str, models: str, spawned: float, **options: Any) -> None:
    """The target of a worker. `spawned`: when it was started, by the monotonic clock."""
    system = SYSTEMS[kind](Path(models), **options)
    loaded = time.monotonic() - spawned
    system.run(Feed([Ask(prompt=tuple(range(1000, 1008)), outputs=1)]))
    facts = system.facts | {"loaded": loaded, "first_token": time.monotonic() - spawned}

    def play(trace: list[dict[str, Any]]) -> dict[str, Any]:
        asks = [Ask(**{**ask, "prompt": tuple(ask["prompt"])}) for ask in trace]
        cpu = time.process_time()
        feed = Feed(asks)
        system.run(feed)
        return dataclasses.asdict(Outcome.of(feed, time.process_time() - cpu))

    channel.serve({"facts": lambda: facts, "play": play, "expert_use": system.expert_use, "memory": system.memory})


def embed(channel: Channel, folder: str, context: int) -> None:
    """The target of a worker: vLLM's vectors in fp32. A request has texts of at most `context` tokens, and whether its vectors
    come back with the seconds that they took."""
    os.environ |= _vllm_settings()
    import vllm

    engine = vllm.LLM(model=folder, runner="pooling", dtype="float32", max_model_len=context, disable_log_stats=True)

    def vectors(texts: list[list[int]], shown: bool) -> tuple[float, list[list[float]]]:
        start = time.perf_counter()
        found = engine.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
        return time.perf_counter() - start, [list(one.outputs.embedding) for one in found] if shown else []

    channel.serve({"embed": vectors})
