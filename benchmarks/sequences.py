"""The leg `sequences`: the longest sequence that a step can have under a limit of memory per rank.

A step's peak grows in proportion to the tokens. Two short lengths give the bytes of a token and of the rest, these the longest
length, and that is then run: the figure is the length whose step was seen to stay under the limit.
"""

from __future__ import annotations

from benchmarks import memory
from benchmarks.cgroup import Cgroup, Sampler, meter
from benchmarks.legs import Options
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import table, verdict, verdicts
from benchmarks.worker import Failed

LIMIT = 1_500_000_000  # bytes of a rank, with the interpreter and torch
STEP = 256  # tokens by which lengths differ
MOST = 16_384  # tokens of a rank that are tried: attention's time grows with their square
CONTENDERS = {  # name: (system, ranks, two short lengths)
    "plain transformers": ("plain", 1, (256, 768)),
    "Slipstream": ("keep", 1, (256, 768)),
    "Slipstream, 2 ranks": ("keep", 2, (512, 1536)),
    "all": ("all", 1, (2048, 4096)),
    "all, 2 ranks": ("all", 2, (4096, 8192)),
}


def run(options: Options) -> str:
    rows, longest = [], dict[str, int]()
    for name, (system, world, lengths) in CONTENDERS.items():
        try:
            with meter() as gauge:
                seat = Seat(env=memory.MALLOC, enter=gauge.enter)
                with Ranks("benchmarks.sequences_worker:train", {"system": system}, world, name=name, seat=seat) as ranks:
                    ranks.call("step", length=lengths[0])  # creates the optimizer's states
                    low, high = (peak_of(ranks, gauge, world, length) for length in lengths)
                    per_token = (high - low) / (lengths[1] - lengths[0])
                    length = min(int((LIMIT - low) / per_token + lengths[0]) // STEP * STEP, MOST * world)
                    while True:
                        peak = peak_of(ranks, gauge, world, length)
                        print(f"  sequences {name}: {length:,} tokens, {peak / 1e9:.3f} GB a rank", flush=True)
                        if peak <= LIMIT or length <= lengths[1]:
                            break
                        length -= max(STEP, int((peak - LIMIT) / per_token) // STEP * STEP + STEP)
        except (OSError, Failed) as error:
            rows.append([name, str(error).splitlines()[0]])
            continue
        longest[name] = length
        rows.append(
            [name, f"{length:,}{' or more' if length == MOST * world else ''}", f"{peak / 1e9:.3f}", f"{per_token / 1e3:.1f}"]
        )
    judged = []
    for name, other, wanted in (
        ("Slipstream, 2 ranks", "Slipstream", 1.9),
        ("all", "plain transformers", 12.0),
        ("all, 2 ranks", "plain transformers", 12.0),
    ):
        if name in longest and other in longest:
            judged.append(verdict(f"{name}, over {other}", longest[name] / longest[other], wanted, at_least=True))
    return "\n\n".join(
        (
            "A step on one sequence of a Llama of 25 million parameters (transformers; width 256, 8 blocks, 32,000 words), fp32, "
            f"AdamW, ZeRO-3; at most {LIMIT / 1e9} GB of memory for each rank. `all`: recomputed blocks, MLPs and loss in tiles. "
            f"Lengths over {MOST:,} a rank were not tried.",
            table(["contender", "longest sequence", "GB a rank", "kB a token and rank"], rows),
            verdicts(judged),
        )
    )


def peak_of(ranks: Ranks, gauge: Cgroup, world: int, length: int) -> float:
    """Bytes of a rank during a step."""
    sampler = Sampler(gauge)
    sampler.start()
    try:
        ranks.call("step", length=length)
    finally:
        most = sampler.stop()
    return max(most, gauge.peak() or 0) / world
