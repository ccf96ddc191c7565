"""A contender of the leg `offload`, in the interpreter of Slipstream or of DeepSpeed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.systems import ADAMW
from benchmarks.workloads import GPT, Workload, build_batch, build_model

if TYPE_CHECKING:
    from benchmarks.worker import Channel

CLIPPING = 100.0  # a norm that gradients never reach: the step waits for their norm all the same


def train(channel: Channel, system: str, work: dict[str, Any], micros: int, zero: dict[str, Any], weights: str) -> None:
    """Slipstream reads its first weights from the safetensors in the folder `weights`, unit by unit; DeepSpeed's model has the same
    ones from its own constructor."""
    sizes = Workload(**work)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sizes.batch,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    engine: Any
    if system == "deepspeed":
        model = build_model(sizes)
        import deepspeed

        config |= {"steps_per_print": 2**31, "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False}}
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    else:
        import slipstream

        with slipstream.zero.Init():
            model = GPT(sizes)
        slipstream.zero.load(model, weights)
        engine = slipstream.initialize(model=model, config=config)[0]
    del model
    batch = build_batch(sizes, 0)

    def step() -> float:
        for _ in range(micros):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
        return float(loss)

    def steps(count: int) -> dict[str, Any]:
        """One step that is not timed, then `count` that are: disk traffic that overlaps with the next step is counted as often as
        it occurs. The last step's is waited for before the reply."""
        losses = [step()]
        start = time.perf_counter()
        losses += [step() for _ in range(count)]
        seconds = (time.perf_counter() - start) / count
        if system == "slipstream":
            engine.states.updater.finish()
        return {"seconds": seconds, "losses": losses}

    channel.serve({"steps": steps})
