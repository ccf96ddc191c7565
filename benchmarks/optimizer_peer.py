"""DeepSpeedCPUAdam for the leg `optimizer`, in the peers' environment: a line in, a step's seconds out; the weights at the end.

python optimizer_peer.py NUMEL THREADS FACTOR LR
"""

import json
import sys
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def main() -> None:
    numel, threads = int(sys.argv[1]), int(sys.argv[2])
    factor, lr = float(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(numel))
    grad = torch.randn(numel).bfloat16()
    weights.grad, out = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weights], lr=lr, weight_decay=0.01, adamw_mode=True)
    print("@ready", flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        start = time.perf_counter()
        torch.mul(grad, factor, out=weights.grad)
        optimizer.step()
        out.copy_(weights.detach())
        print(f"@{time.perf_counter() - start}", flush=True)
    print("@" + json.dumps(out[:4096].tolist()), flush=True)


if __name__ == "__main__":
    main()
