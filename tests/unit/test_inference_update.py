"""New weights between requests: who ends first, who waits, and what is left when they do not arrive whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import handover
from slipstream.inference.core import Batch, Finish, SamplingParams
from slipstream.inference.engine import ClosedError, Engine
from slipstream.inference.generate import InferenceEngine
from slipstream.inference.update import UpdateTarget, WeightForm
from tests.inference.blocks import check_engine
from tests.unit.test_inference_engine import HashRunner, ask, byte_tokenizer, wait

PROMPT = "a prompt of several blocks"
NEW = ("model.bias", torch.arange(3.0))


class Runner(HashRunner):
    """Its one weight is added to what the cache says."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks)
        self.weight = torch.zeros(3)
        self.events: list[str] = []

    def put(self, role: str, weight: Tensor) -> None:
        self.events.append(f"put {role}")
        self.weight = weight.clone()

    def logits(self, history: list[int], num_generated: int) -> Tensor:
        return super().logits([*history, int(self.weight.sum())], num_generated)


def make(runner: Runner) -> InferenceEngine:
    target = UpdateTarget(
        {"model.bias": ((3,), [("bias", lambda bias: bias)])}, {"bias": WeightForm.of(runner.weight)}, frozenset(["tied"])
    )
    return InferenceEngine(Engine(runner, byte_tokenizer()), "hashes", target)


def test_what_has_begun_ends_first_and_what_comes_waits() -> None:
    runner = Runner()
    with make(runner) as served:
        alone = served.generate(PROMPT).token_ids
        began, go_on = threading.Event(), threading.Event()

        def before(batch: Batch) -> None:
            began.set()
            assert go_on.wait(60)

        runner.before = before
        first = ask(served.engine, PROMPT)
        assert began.wait(60)
        updating = threading.Thread(target=served.update_weights, args=([("module.model.bias", NEW[1])],))
        updating.start()
        until = time.monotonic() + 60
        while not served.engine._scheduler.pausing:
            assert time.monotonic() < until
        second = ask(served.engine, PROMPT)
        assert not runner.events and not second.started.is_set()
        go_on.set()
        updating.join(60)
        assert wait(first).ids() == alone, "the old weights say all of it"
        assert wait(second).ids() != alone and second.last().usage.cached_tokens == 0  # type: ignore[union-attr]
        assert runner.events == ["put bias"]
        assert served.generate(PROMPT).usage.cached_tokens > 0
        check_engine(served.engine)


def test_who_was_preempted_has_begun() -> None:
    """Two that do not fit beside each other to their ends: one gives its blocks back meanwhile, and still ends first."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [letter * 20 for letter in "xyz"]
    with make(Runner()) as served:
        alone = [wait(ask(served.engine, prompt, params)).ids() for prompt in prompts]
    runner = Runner(num_blocks=13)
    with make(runner) as served:
        asked, both, go_on = threading.Event(), threading.Event(), threading.Event()

        def before(batch: Batch) -> None:
            assert asked.wait(60)  # else the first may end before the second is asked for
            if len(batch.chunks) == 2:
                both.set()
            assert not both.is_set() or go_on.wait(60)

        runner.before = before
        first = [ask(served.engine, prompt, params) for prompt in prompts[:2]]
        asked.set()
        assert both.wait(60)
        updating = threading.Thread(target=served.update_weights, args=([NEW],))
        updating.start()
        until = time.monotonic() + 60
        while not served.engine._scheduler.pausing:
            assert time.monotonic() < until
        last = ask(served.engine, prompts[2], params)
        go_on.set()
        updating.join(60)
        assert [wait(answer).ids() for answer in first] == alone[:2] and wait(last).ids() != alone[2]
        assert served.engine.stats().preemptions


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([NEW, ("model.bias", torch.zeros(4))], r"'model\.bias' is \[4\]; this model's is \[3\]"),
        ([NEW, ("model.other", torch.zeros(3))], r"'model\.other' is none of this model's weights"),
    ],
)
def test_half_an_update_is_not_served(tensors: list[tuple[str, Tensor]], why: str) -> None:
    runner = Runner()
    with make(runner) as served:
        with pytest.raises(ValueError, match=why):
            served.update_weights(tensors)
        with pytest.raises(ClosedError, match=f"a weight update did not complete: ValueError: .*{why}"):
            served.generate(PROMPT)
        assert served.engine.healthy
        served.update_weights([NEW, ("tied", torch.zeros(3))])
        assert served.generate(PROMPT).token_ids


def test_an_update_that_has_changed_nothing_leaves_the_old_weights_served() -> None:
    def dying() -> Iterator[tuple[str, Tensor]]:
        raise ConnectionError("the trainer has gone")
        yield

    runner = Runner()
    with make(runner) as served:
        before = served.generate(PROMPT).token_ids
        for tensors, error, why in (
            (dying(), ConnectionError, "the trainer has gone"),
            ([("model.bias", torch.zeros(4))], ValueError, r"is \[4\]"),
            ([("tied", torch.zeros(3))], ValueError, r"1 weights are missing: model\.bias"),
        ):
            with pytest.raises(error, match=why):
                served.update_weights(tensors)
            again = served.generate(PROMPT)
            assert again.token_ids == before and again.usage.cached_tokens and not runner.events


def test_who_waits_while_the_sender_dies_is_told() -> None:
    runner = Runner()
    with make(runner) as served:
        waiting = []

        def dying() -> Iterator[tuple[str, Tensor]]:
            waiting.append(ask(served.engine, PROMPT))
            yield NEW
            raise ConnectionError("the trainer has gone")

        with pytest.raises(ConnectionError):
            served.update_weights(dying())
        last = wait(waiting[0]).last()
        assert last.finish is Finish.ERROR and "the trainer has gone" in str(last.error)


def test_an_engine_without_known_weights_says_so() -> None:
    with (
        InferenceEngine(Engine(Runner(), byte_tokenizer()), "hashes") as served,
        pytest.raises(ValueError, match="cannot update its weights"),
    ):
        served.update_weights([NEW])


def test_who_takes_no_weights_still_asks_for_all() -> None:
    """Other ranks would wait in their gathering."""
    unknown, closed, refusing = InferenceEngine(Engine(Runner(), byte_tokenizer()), "hashes"), make(Runner()), make(Runner())
    closed.close()
    wrong = ("model.other", torch.zeros(3))
    for served, error in ((unknown, ValueError), (closed, ClosedError), (refusing, ValueError)):
        left = iter([wrong, NEW, NEW])
        with served, pytest.raises(error):
            served.update_weights(left)
        assert not list(left)


def stalled(path: Path) -> socket.socket:
    """A sender that has said hello and then nothing."""
    sender = socket.socket(socket.AF_UNIX)
    sender.connect(str(path))
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(sender, [handover._HELLO], [memory])
    os.close(memory)
    return sender


def paused(served: InferenceEngine) -> bool:
    until = time.monotonic() + 60
    while not served.engine._scheduler.pausing:
        assert time.monotonic() < until
    return True


@pytest.mark.parametrize("silent", [True, False])
def test_a_sender_that_stalls_is_given_up(silent: bool, tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    with make(Runner()) as served, handover.Receiver(served, path, timeout_s=0.2), socket.socket(socket.AF_UNIX) as mute:
        if silent:
            mute.connect(str(path))
        with contextlib.nullcontext() if silent else stalled(path):
            handover.send([NEW], to=path, timeout_s=10)
        assert served.generate(PROMPT).token_ids


def test_a_receiver_closes_while_a_sender_stalls(tmp_path: Path) -> None:
    path = tmp_path / "weights.sock"
    with make(Runner()) as served:
        receiver = handover.Receiver(served, path)
        with stalled(path):
            assert paused(served)
            receiver.close()
            receiver.close()
        assert not path.exists() and not served.engine._scheduler.pausing


def test_a_receiver_takes_no_path_but_its_own(tmp_path: Path) -> None:
    """A file stays what it is, and a living server's socket; one of a killed server is replaced, and the next one's stays."""
    path = tmp_path / "weights.sock"
    path.write_text("mine")
    with make(Runner()) as served:
        with pytest.raises(ValueError, match=r"weights\.sock: a file that is no socket is there"):
            handover.Receiver(served, path)
        with pytest.raises(ValueError, match=r"weights cannot come to .*/no/folder: No such file or directory"):
            handover.Receiver(served, tmp_path / "no" / "folder")
        assert path.read_text() == "mine"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        old = handover.Receiver(served, path)
        with pytest.raises(ValueError, match=r"weights\.sock: another server takes them there"):
            handover.Receiver(served, path)
        handover.send([NEW], to=path, timeout_s=10)
        path.unlink()
        with handover.Receiver(served, path):
            assert path.stat().st_mode & 0o777 == 0o600
            old.close()
            handover.send([NEW], to=path, timeout_s=10)
        assert not path.exists()
