"""A released parameter: every operation raises an error with its name; none crashes the process or succeeds silently."""

import json
import sys

import pytest

from tests.ranks import SpawnRanks

# Expressions over `p`, a released parameter of shape (16, 8), and `t`, an ordinary tensor of the same shape.
OPERATIONS = (
    "p + 1",
    "1 - p",
    "p * t",
    "t.add_(p)",
    "p.add_(1)",
    "p @ t.T",
    "-p",
    "p == t",
    "p[0]",
    "p[0, 0].item()",
    "p.sum()",
    "p.mean()",
    "p.norm()",
    "p.clone()",
    "p.detach()",
    "p.data",
    "p.view(-1)",
    "p.reshape(-1)",
    "p.t()",
    "p.T",
    "p.float()",
    "p.half()",
    "p.to('cpu', torch.float64)",
    "p.cpu()",
    "p.contiguous()",
    "p.tolist()",
    "p.numpy(force=True)",
    "numpy.asarray(p)",
    "p.__dlpack__()",
    "torch.from_dlpack(p)",
    "copy.copy(p)",
    "copy.deepcopy(p)",
    "pickle.dumps(p)",
    "torch.save(p, io.BytesIO())",
    "torch.save({'a': [p]}, io.BytesIO())",
    "torch.cat([p, t])",
    "torch.stack([t, p])",
    "torch.isfinite(p)",
    "torch.equal(p, t)",
    "F.linear(t, p)",
    "torch.nn.init.normal_(p)",
    "p.copy_(t)",
    "p.zero_()",
    "p.data.zero_()",
    "setattr(p, 'data', t)",
    "p.__setitem__(0, 1.0)",
    "bool(p.any())",
    "float(p.max())",
    "iter(p)",
    "p.data_ptr()",
    "p.untyped_storage()",
    "p.share_memory_()",
    "p.expand(2, 16, 8)",
    "p.element_size() + p",
    "torch.add(t, other=p)",
    "torch.no_grad()(lambda: p * 2)()",
    "model.state_dict()['inp.weight'] + 1",
    "torch.add(t, 1, out=p)",
    "torch._foreach_add([p], 1)",
    "hash(p.storage())",
    "p.set_(t)",
    "torch.no_grad()(lambda: p.set_(t))()",
    "p.as_subclass(torch.Tensor)",
    "p.swapaxes(0, 1)",
)

# Metadata, which needs no memory, stays available.
FACTS = (
    "p.shape == (16, 8)",
    "p.size(0) == 16",
    "p.dim() == 2",
    "p.numel() == 128",
    "p.nelement() == 128",
    "len(p) == 16",
    "p.dtype is torch.float32",
    "p.device.type == 'cpu'",
    "p.requires_grad",
    "p.is_leaf",
    "p.stride() == (8, 1)",
    "p.is_floating_point()",
    "p.grad is None",
    "p.grad_fn is None",
    "isinstance(p, torch.nn.Parameter)",
    "p in {p}",
    "hash(p) == id(p) or True",
    "'inp.weight' in repr(p)",
    "'inp.weight' in f'{p}'",
    "p is model.inp.weight",
    "p.register_hook(lambda g: g) is not None",
    "p.requires_grad_(True) is p",
    "p.element_size() == 4",
    "p.nbytes == 512",
    "sum(q.numel() for q in model.parameters()) > 0",
    "p.is_contiguous()",
    "p.ndim == 2",
    "not p.is_meta",
)

# Reads in C++ that bypass the class: no error with the name, but no crash and no plausible weights.
UNASKED = (
    "torch.tensor(p)",
    "torch.Tensor(p)",
    "torch.as_tensor(p, dtype=torch.float64)",
    "torch.asarray(p, copy=True)",
    "torch.func.vmap(lambda a: a * 2)(p)",
    "torch.func.grad(lambda a: (a * 2).sum() + a.sum() * p.new_zeros(()))(p)",
)

SCRIPT = """
import copy, gc, io, json, os, pickle, sys
import numpy, torch
import torch.nn.functional as F
import slipstream
from tests import toy

torch.distributed.init_process_group("gloo")
model = toy.seeded(toy.Net)
engine = toy.make(model, 3, os.environ["TRANSPORT"])
p, t = model.inp.weight, torch.zeros(16, 8)
answers = {}
for source in json.loads(os.environ["OPERATIONS"])[engine.rank::2]:  # each rank tries half of them
    print("AT", source, flush=True)
    try:
        value = eval(source)
    except Exception as error:
        answers[source] = f"{type(error).__name__}: {error}"
    else:
        answers[source] = f"it gave {type(value).__name__}"
import warnings
warnings.simplefilter("ignore")
for source in json.loads(os.environ["UNASKED"])[engine.rank::2]:
    print("AT", source, flush=True)
    try:
        value = eval(source)
    except RuntimeError as error:
        answers[source] = f"RuntimeError: {error}"
    else:
        safe = value.isnan().all() or os.environ["TRANSPORT"] == "shared"  # whose memory stays
        answers[source] = "'inp.weight' zero.gathered" if safe else f"it gave {value}"
facts = {source: bool(eval(source)) for source in json.loads(os.environ["FACTS"])}
engine(toy.floats(engine.rank, 0)).square().mean().backward()
engine.step()
print("ANSWERS", json.dumps([answers, facts]), flush=True)
engine.destroy()
del engine, model, p, source, value
gc.collect()
torch.distributed.destroy_process_group()
names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
assert "gloo_tcp_loop" not in names, f"the group's threads live on: {names}"  # they may abort the interpreter at its end
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_every_operation_raises_by_name(spawn_ranks: SpawnRanks, transport: str) -> None:
    env = {"TRANSPORT": transport, "OPERATIONS": json.dumps(OPERATIONS), "FACTS": json.dumps(FACTS), "UNASKED": json.dumps(UNASKED)}
    ranks = spawn_ranks(SCRIPT, 2, env)
    codes = ranks.wait(100)
    lasts = [ranks.stdout(rank).splitlines()[-1] for rank in range(2)]
    assert codes == [0, 0], f"ended at {lasts}:\n{ranks.stderr(0)[-3000:]}\n{ranks.stderr(1)[-3000:]}"
    (even, facts), (odd, _) = (json.loads(last.removeprefix("ANSWERS ")) for last in lasts)
    answers = even | odd
    assert len(answers) == len({*OPERATIONS, *UNASKED})
    silent = {source: answer for source, answer in answers.items() if "'inp.weight'" not in answer}
    assert not silent, f"these do not raise by name: {silent}"
    assert all("zero.gathered" in answer for answer in answers.values())
    assert not [source for source, held in facts.items() if not held]
