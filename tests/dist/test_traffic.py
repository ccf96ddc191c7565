"""The communication log: bytes are those of the plan, waits name the rank, DeepSpeed's tables."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream import zero
from slipstream.compat import comm
from slipstream.compat import engine as compat
from slipstream.train.planning import explain
from slipstream.world.mesh import build_mesh
from slipstream.world.watch import Watch
from slipstream.zero.comm import ProcessGroupComm
from slipstream.zero.leaves import mark_part
from tests import cases, toy
from tests.pool import distributed


def trained(stage: int, transport: str, steps: int = 2, late: float = 0.0, **log: Any) -> Any:
    """The engine after the steps; rank 1 comes to each of them so many seconds late. The log begins with the second step."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    config = toy.settings(stage, transport, comms_logger={"enabled": True, **log})
    engine, *_ = compat.initialize(model=model, config=config)
    for step in range(1 + steps):
        if step == 1:
            engine.states.resources["traffic"].reset()
        if dist.get_rank() == 1:
            time.sleep(late)
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
    return engine


@distributed(world_size=(2, 4), transports=("shared", "gloo"))
def test_comms_logger(world_size: int, transport: str) -> None:
    for stage in cases.stages(transport):
        engine = trained(stage, transport)
        predicted = explain.of_states(engine.states).flow.wire * 2
        sent = engine.states.resources["traffic"].summary()["sent_bytes"]
        moved = sum(nbytes for name, nbytes in sent.items() if name != "all_reduce")  # the verdict's few numbers
        assert moved == predicted, (stage, sent)
        engine.destroy()


@distributed(world_size=4, transports=("gloo",))
def test_a_read_of_experts_makes_later_steps_no_slower(world_size: int, transport: str) -> None:
    """Operations that followed on the same ones before are launched without a comparison of the ranks."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    mark_part(model[1].weight, "ep", 2)
    engine, *_ = compat.initialize(model=model, config=toy.settings(3, transport, comms_logger={"enabled": True}))
    sent = []
    for step in range(6):
        engine.states.resources["traffic"].reset()
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
        sent.append(engine.states.resources["traffic"].summary()["sent_bytes"]["all_reduce"])
        if step == 2:
            with zero.gathered(model[1].weight):
                pass
    assert sent[-1] == sent[2], sent
    engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_tables_and_raw_data(world_size: int, transport: str) -> None:
    engine = trained(3, transport)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        found = comm.log_summary(show_straggler=True, return_dict=True)
    assert found is not None
    assert set(found["metadata"]) == {"world_size", "rank", "timestamp"} and found["metadata"]["rank"] == dist.get_rank()
    nbytes = 64 * 64 * 4
    row = found["summary"]["all_gather_into_tensor"][nbytes]
    assert row["count"] == 2 * 3 * 2 and row["msg_size_str"] == "16.0 KB" and row["msg_size_bytes"] == nbytes
    assert row["total_latency_ms"] >= row["avg_latency_ms"] > 0 and row["tput_avg_gbps"] == 2 * row["busbw_avg_gbps"] > 0
    raw = engine.states.resources["traffic"].raw()["all_gather_into_tensor"][nbytes]
    assert raw[0] == 12 == len(raw[1]) == len(raw[2]) == len(raw[3]) and all(ms > 0 for ms in raw[1])
    straggler = found["straggler_analysis"]["all_gather_into_tensor"][nbytes]
    assert straggler["total_comm_lat_ms"] + straggler["total_straggler_ms"] == torch.tensor(row["total_latency_ms"]).item() or (
        abs(straggler["total_comm_lat_ms"] + straggler["total_straggler_ms"] - row["total_latency_ms"]) < 1e-6
    )
    text = out.getvalue()
    if dist.get_rank() == 0:
        head = text.splitlines()[0]
        titles = [head[start : start + 20].strip() for start in range(0, 140, 20)]
        assert titles[:4] == ["Comm. Op", "Message Size", "Count", "Total Latency(ms)"] and titles[6] == "busbw_avg (Gbps)"
        assert re.search(r"^all_gather_into_tensor\n {20}16.0 KB {13}12 {18}[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +$", text, re.MULTILINE)
        assert "Breakdown with straggler effect" in text
    else:
        assert text == ""
    engine.destroy()


@distributed(world_size=2, transports=("shared", "gloo"))
def test_who_waits_for_a_late_rank(world_size: int, transport: str) -> None:
    engine = trained(2, transport, late=0.1)
    waited = engine.states.resources["traffic"].summary()["waited_ms"]
    if dist.get_rank() == 0:
        assert sum(waited.values()) > 150, waited
        if transport == "shared":
            assert max(waited, key=lambda name: waited[name]).endswith(" for rank 1")
    engine.destroy()


@distributed(world_size=2, transports=("gloo",))
def test_some_operations_in_lines(world_size: int, transport: str) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    package, handler = logging.getLogger("slipstream"), Keep()
    before = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        engine = trained(3, transport, prof_all=False, prof_ops=["all_reduce"], verbose=True)
        assert set(engine.states.resources["traffic"].raw()) == {"all_reduce"}
        engine.destroy()
    finally:
        package.removeHandler(handler)
        package.setLevel(before)
    told = [line for line in lines if line.startswith("comm op: ")]
    form = r"comm op: all_reduce \| time \(ms\): [\d.]+ \| msg size: 1.0 KB \| algbw \(Gbps\): [\d.]+ \| busbw \(Gbps\): [\d.]+ "
    assert all(re.match(form, line) for line in told) and bool(told) is (dist.get_rank() == 0), told


@distributed(world_size=2, transports=("gloo",))
def test_operations_with_the_arguments_of_deepspeed(world_size: int, transport: str) -> None:
    rank, ones = dist.get_rank(), torch.ones(4)
    asked: dict[str, Any] = {"prof": True, "log_name": "mine", "debug": "caller"}
    comm.configure(enabled=True, prof_all=False, prof_ops=["asked"])
    comm.reset_log()
    try:
        comm.all_reduce(total := ones.clone(), op=comm.ReduceOp.SUM, group=None, async_op=False, **asked)
        comm.all_reduce(ones.clone())
        comm.all_reduce(ones.clone(), log_name="asked")
        comm.all_gather_into_tensor(output_tensor=(both := torch.empty(8)), tensor=rank * ones, **asked)
        comm.reduce_scatter_tensor(output_tensor=(half := torch.empty(2)), tensor=ones, **asked)
        comm.all_to_all_single(output=(swapped := torch.empty(2)), tensor=torch.full((2,), float(rank)), **asked)
        comm.broadcast(told := rank * ones, src=1, **asked)
        comm.all_gather_object(objects := [None, None], rank, **asked)
        comm.barrier(**asked)
        received = torch.empty(4)
        pair = [comm.P2POp(comm.isend, rank * ones, 1 - rank), comm.P2POp(comm.irecv, received, peer=1 - rank)]
        for work in comm.batch_isend_irecv(pair, **asked):
            work.wait()
        parts = [torch.empty(2, dtype=torch.int64), torch.empty(4, dtype=torch.int64)]
        comm.all_gather_coalesced(parts, [torch.tensor([rank]), torch.tensor([rank, 2])], async_op=True).wait()
        assert [each.tolist() for each in (total, both, half)] == [[2.0] * 4, [0.0] * 4 + [1.0] * 4, [2.0] * 2]
        comm.all_reduce_coalesced(sums := [ones.clone(), rank * ones])
        assert [each.tolist() for each in sums] == [[2.0] * 4, [1.0] * 4]
        assert (told.tolist(), swapped.tolist(), objects) == ([1.0] * 4, [0.0, 1.0], [0, 1])
        assert received.tolist() == [1.0 - rank] * 4 and [part.tolist() for part in parts] == [[0, 1], [0, 2, 1, 2]]
        found = comm.log_summary(return_dict=True, show_straggler=True)
        assert found is not None and set(found["summary"]) == set(comm.get_logged_comm_ops()) == {"mine", "asked"}
        counts = {nbytes: row["count"] for nbytes, row in found["summary"]["mine"].items()}
        assert counts == {0: 2, 8: 1, 16: 3, 32: 2} and comm.get_comm_operation_count() == 9, counts
        assert set(found["straggler_analysis"]) == {"mine", "asked"} and found["metadata"]["world_size"] == 2
        comm.comms_logger.comms_dict = {}
        assert not comm.has_comm_data() and comm.cdb.is_initialized()
    finally:
        comm.configure(enabled=False, prof_all=True, prof_ops=[])


@distributed(world_size=2)
def test_transports_between_the_same_ranks_have_ledgers_of_their_own() -> None:
    """Families with equal shards: the monitor compares ledgers by name."""
    axis, watch = build_mesh().world, Watch(20.0)
    assert axis.group is not None
    for _ in range(3):
        ProcessGroupComm(axis, axis.group, torch.device("cpu"), watch)
    assert len({ledger.name for ledger in watch.ledgers}) == 3
