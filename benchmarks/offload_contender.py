"""One contender of the leg `offload`, in a process and an environment of its own: a number of steps in, their seconds out.

    python -m benchmarks.offload_contender (slipstream | deepspeed) MICROS CLIPPING AHEAD ZERO WORKLOAD WEIGHTS

AHEAD is 0 or 1, ZERO and WORKLOAD are JSON, WEIGHTS is a folder of safetensors from which ours reads its first values, unit by
unit; DeepSpeed's model has the same ones from its own constructor. It prints "@ready", then for each line that it reads, a number
of steps, "@" and JSON: the seconds of them and all losses. A step that is not timed runs before them, so that what streams on
beside the next step is counted as often as it happens; the last one's is waited for before the answer.
"""

import json
import os
import sys
import time
from typing import Any

from benchmarks.workloads import BETAS, EPS, GPT, LEARNING_RATE, WEIGHT_DECAY, Workload, build_batch, build_model


def main() -> None:
    system, micros = sys.argv[1], int(sys.argv[2])
    work = Workload(**json.loads(sys.argv[6]))
    params = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": float(sys.argv[3]),
        "bf16": {"enabled": True},
        "zero_optimization": json.loads(sys.argv[5]),
        "optimizer": {"type": "AdamW", "params": params},
    }
    if system == "deepspeed":
        model = build_model(work)
        import deepspeed  # type: ignore[import-not-found]

        config |= {"steps_per_print": 2**31, "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False}}
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    else:
        import slipstream

        with slipstream.zero.Init():
            model = GPT(work)
        slipstream.zero.load(model, sys.argv[7])
        config["slipstream"] = {"update_ahead": sys.argv[4] == "1"}
        engine = slipstream.initialize(model=model, config=config)[0]
    del model
    batch = build_batch(work, 0)

    def step() -> float:
        for _ in range(micros):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
        return float(loss)

    say = os.fdopen(os.dup(1), "w", buffering=1)
    print("@ready", file=say)
    for line in sys.stdin:
        losses = [step()]
        start = time.perf_counter()
        losses += [step() for _ in range(int(line))]
        seconds = time.perf_counter() - start
        if system == "slipstream":
            engine.updater.finish()
        print("@" + json.dumps({"seconds": seconds, "losses": losses}), file=say)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # no contender's exit handlers are waited for
