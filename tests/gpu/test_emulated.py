"""CUDA's paths without a GPU: the cases of `test_gpu`, on the device of `tests/emulation`, and what that device notices."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu import test_gpu
from tests.gpu.cases import ALONE, TOGETHER

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"), pytest.mark.timeout(900)]

EMULATED = {"SLIPSTREAM_TESTS_ON_GPU": "emulated", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "0"}
TRAINING = (  # of `cases`; others need Triton's kernels or sums, CUDA's graphs, or the rounding of a GPU's products
    "fp32_equals_plain_torch",
    "fp16_equals_plain_torch",
    "lamb_equals_its_own_loop",
    "samples_lie_where_the_dataset_has_them",
    "states_by_name_are_here",
    "ranks_tell_each_other_values_of_the_device",
    "a_wait_for_values_of_a_late_rank_ends",
    "deepspeeds_inference_engine_moves_the_module_here",
    "stages_agree_bit_for_bit",
    "signs_of_momentum_are_those_of_simulated_workers",
    "gradients_in_codes_are_those_of_simulated_workers",
    "copies_beside_computing_change_nothing",
    "sleep_gives_the_device_back_and_wakes_the_same",
    "released_weights_give_their_memory_back",
    "engines_come_and_go_at_flat_memory",
    "an_overflow_is_skipped_on_all_ranks",
    "a_checkpoint_moves_between_stages",
    "slices_of_matrices_are_joined",
    "stages_of_a_pipeline_have_the_bits_of_one",
    "a_hugging_face_llama_trains_and_generates",
    "layers_of_any_module_move_here_and_back",
    "an_engine_serves_weights_that_another_stream_wrote",
)
NOTICES = {  # what a script does: what races, or nothing
    "a read that nothing orders after a write": (
        "with torch.cuda.stream(side): x.fill_(1)\nx + 1",
        "aten::add reads [8] on stream 0, which nothing orders after aten::fill_'s write on stream 1",
    ),
    "a stream that waits": ("with torch.cuda.stream(side): x.fill_(1)\ntorch.cuda.current_stream().wait_stream(side)\nx + 1", ""),
    "an event of before the write": (
        "event = side.record_event()\nwith torch.cuda.stream(side): x.fill_(1)\nevent.wait()\nx + 1",
        "nothing orders after aten::fill_'s write",
    ),
    "halves of one tensor": ("with torch.cuda.stream(side): x[:4].fill_(1)\nx[4:].fill_(1)", ""),
    "memory that is freed while a stream reads it": (
        "with torch.cuda.stream(side): y = x + 1\ndel x",
        "memory of stream 0 is freed while aten::add on stream",
    ),
    "memory that is kept for a stream": ("with torch.cuda.stream(side): y = x + 1\nx.record_stream(side)\ndel x", ""),
    "a host that reads before a copy has ended": (
        "host = torch.empty(8, pin_memory=True)\nhost.copy_(x, non_blocking=True)\nhost + 1",
        "reads [8] on the host, which nothing orders after copy_'s write on stream 0",
    ),
    "a host that waits": (
        "host = torch.empty(8, pin_memory=True)\nhost.copy_(x, non_blocking=True)\ntorch.cuda.synchronize()\nhost + 1",
        "",
    ),
    "native code that reads before a copy has ended": (
        "host = torch.empty(8, pin_memory=True)\nhost.copy_(x, non_blocking=True)\nhost.data_ptr()",
        "native code reads [8] on the host",
    ),
    "a collective that nobody waits for": (
        "work = dist.all_reduce(x, async_op=True)\nx + 1",
        "nothing orders after all_reduce's write",
    ),
    "a collective that is waited for": ("work = dist.all_reduce(x, async_op=True)\nwork.wait()\nx + 1", ""),
    "a step of training": (
        "net = torch.nn.Linear(8, 8).cuda()\nstep = torch.optim.AdamW(net.parameters())\nnet(x).sum().backward()\nstep.step()",
        "",
    ),
}


def run(script: str) -> Any:
    """What `script` prints last, in a process with the device."""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | EMULATED, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_streams_without_order_are_noticed() -> None:
    found = run(f"""
import json, tests, torch, torch.distributed as dist
from tests.emulation import races
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
found = {{}}
for name, (script, _) in {NOTICES!r}.items():
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    races()
    names = dict(globals(), side=side, x=x)
    del x
    exec(script, names)
    found[name] = races()
    del names
print(json.dumps(found))
""")
    for name, (_, race) in NOTICES.items():
        assert any(race in each for each in found[name]) if race else not found[name], (name, found[name])


def test_the_device_is_not_the_host() -> None:
    what = run("""
import json, tests, torch
x, told = torch.zeros(4, device="cuda"), ""
try:
    x + torch.zeros(4)
except RuntimeError as error:
    told = str(error)
unwritten = torch.empty(4, device="cuda")
print(json.dumps([told, bool(unwritten.isnan().all()), torch.cuda.memory_allocated(), x.data_ptr() - x.cpu().data_ptr() > 1 << 40]))
""")
    assert "at least two devices" in what[0]
    assert what[1:] == [True, 32, True]


@pytest.mark.parametrize(
    ("world", "backend", "name"),
    [
        (world, backend, name)
        for world, backend in ((1, ""), (2, ""), (2, "nccl"))  # "": gloo, by which two ranks share a device
        for name in TRAINING
        if name not in (ALONE if world > 1 else TOGETHER)
    ],
)
def test_as_on_cuda(world: int, backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (EMULATED | {"EMULATED_CUDA_STRICT": "1", "EMULATED_CUDA_BACKEND": backend}).items():
        monkeypatch.setenv(key, value)
    done, printed = test_gpu.start(world, [name])
    assert name in done, f"the processes ended in it:\n{printed[-6000:]}"
    assert not done[name]["trouble"], done[name]["trouble"]
