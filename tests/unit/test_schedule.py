"""Pipeline schedules: idle shares and activations by formula, one order of gradients, no deadlock for any numbers and costs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict, deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.parallel.drawing import draw_svg, draw_text
from slipstream.parallel.schedule import Action, Costs, Kind, Schedule, Span, StageMessage, Style, rank_of, simulate, stage_of

STYLES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("v", 2)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any style and numbers; costs of each stage differ, some are zero."""
    p, m, (style, v) = draw(st.integers(1, 6)), draw(st.integers(1, 14)), draw(st.sampled_from(STYLES))
    seconds = st.one_of(st.just(0.0), st.floats(0.01, 4))
    costs = draw(st.one_of(st.just(Costs()), st.lists(st.builds(Costs, seconds, seconds, seconds), min_size=p * v, max_size=p * v)))
    return simulate(p, m, style, v, costs, draw(st.sampled_from([0.0, 0.3, 2.0])), forward_only=draw(st.booleans()))


def is_forward_only(schedule: Schedule) -> bool:
    return {action.kind for row in schedule.actions for action in row} == {Kind.FORWARD}


@pytest.mark.parametrize(("style", "v"), STYLES)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_idle_share_and_activations_are_those_of_the_formulas(style: str, v: int, p: int, factor: int) -> None:
    m = p * factor
    schedule = simulate(p, m, style, v)
    work = {"zero_bubble": 3 * v * m, "v": 6 * m, "interleaved": v * m}.get(style, m)
    assert schedule.idle == pytest.approx((p - 1) / (work + p - 1))
    assert schedule.makespan == pytest.approx(3 * v * m / (1 - schedule.idle))
    if style == "1f1b":
        assert schedule.peaks == tuple(min(m, p - rank) for rank in range(p))
    else:
        most = {"gpipe": m, "interleaved": min(m, p + (p - 1) / v)}.get(style, p)
        assert max(schedule.peaks) == pytest.approx(min(m, most))


@pytest.mark.parametrize(("style", "v"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("v", 2)])
@pytest.mark.parametrize(("p", "m"), [(3, 7), (4, 6), (4, 13), (5, 5), (8, 20)])
def test_numbers_of_micro_batches_that_do_not_divide(style: str, v: int, p: int, m: int) -> None:
    work = 6 * m if style == "v" else v * m
    assert simulate(p, m, style, v).idle == pytest.approx((p - 1) / (work + p - 1))


@pytest.mark.parametrize("costs", [Costs(1, 1.2, 0.8), Costs(1, 1.4, 0.6), Costs(1, 0.8, 1.2)])
@pytest.mark.parametrize("hop", [0.0, 0.2])
def test_weights_later_shorten_the_step_for_other_costs_too(costs: Costs, hop: float) -> None:
    step = {(style, v): simulate(4, 8, style, v, Costs(*(each / v for each in costs)), hop).makespan for style, v in STYLES}
    assert step["zero_bubble", 1] < 0.92 * step["1f1b", 1]
    assert step["zero_bubble", 2] < step["interleaved", 2] < step["1f1b", 1]
    assert step["v", 2] < step["zero_bubble", 1]


def test_the_target_of_two_ranks_and_four_micro_batches() -> None:
    assert simulate(2, 4).makespan == 3 * (4 + 1)
    assert simulate(2, 4, "zero_bubble").makespan <= 0.9 * simulate(2, 4).makespan


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_action_once_and_each_parameter_in_the_order_of_micro_batches(schedule: Schedule) -> None:
    kinds = [Kind.FORWARD]
    if not is_forward_only(schedule):
        kinds += [Kind.INPUT, Kind.WEIGHT] if schedule.style in ("zero_bubble", "v") else [Kind.BACKWARD]
    for rank, row in enumerate(schedule.actions):
        by_kind = defaultdict(list)
        for kind, chunk, micro in row:
            by_kind[kind, chunk].append(micro)
        micros = list(range(schedule.num_micro))
        assert by_kind == {(kind, chunk): micros for kind in kinds for chunk in range(schedule.num_chunks)}, rank
        place = {action: i for i, action in enumerate(row)}
        assert all(place[a] > place[Action(Kind.INPUT, a.chunk, a.micro)] for a in row if a.kind == Kind.WEIGHT)
    for row in schedule.spans:
        assert all(before.stop <= after.start for before, after in pairwise(row))
    assert all(peak <= max(schedule.num_micro, 1) for peak in schedule.peaks)
    if schedule.style in ("zero_bubble", "v") and not is_forward_only(schedule):
        assert max(schedule.peaks) <= schedule.num_ranks


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_no_deadlock_with_blocking_senders_and_few_buffers(schedule: Schedule) -> None:
    """Each rank runs its actions in order, waits for the message of each and for a free buffer after each.

    There are as many buffers as an engine's mail has (train/pipeline.py).
    """
    num_slots = schedule.num_ranks * schedule.num_chunks + 1
    rings: dict[tuple[Kind, int], deque[int]] = defaultdict(deque)
    local: set[StageMessage] = set()
    left = [deque(row) for row in schedule.actions]
    unsent: list[StageMessage | None] = [None] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank in range(schedule.num_ranks):
            while left[rank] or unsent[rank]:
                if (message := unsent[rank]) is not None:
                    if len(rings[message[:2]]) == num_slots:
                        break
                    rings[message[:2]].append(message.micro)
                    unsent[rank], progress = None, True
                    continue
                message = schedule.receives(rank, left[rank][0])
                if message is not None and message.source == rank:
                    assert message in local
                elif message is not None:
                    assert message.target == rank
                    if not rings[message[:2]]:
                        break
                    assert rings[message[:2]].popleft() == message.micro
                sent = schedule.sends(rank, left[rank].popleft())
                progress = True
                if sent is not None and sent.target == rank:
                    local.add(sent)
                else:
                    unsent[rank] = sent
    assert not any(left)
    assert not any(unsent)
    assert not any(rings.values())


def test_messages_of_a_v() -> None:
    """Rank r has the stages r and 2p-1-r; the turn at the last rank and the loss need no message between ranks."""
    schedule = simulate(3, 6, Style.V)
    assert [[schedule.stage_of(rank, chunk) for chunk in (0, 1)] for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert schedule.receives(0, Action(Kind.FORWARD, 0, 4)) is None
    assert schedule.sends(0, Action(Kind.FORWARD, 0, 4)) == StageMessage(Kind.FORWARD, 1, 4, 0, 1)
    assert schedule.sends(2, Action(Kind.FORWARD, 0, 4)) == StageMessage(Kind.FORWARD, 3, 4, 2, 2)
    assert schedule.receives(2, Action(Kind.INPUT, 1, 4)) == StageMessage(Kind.BACKWARD, 3, 4, 1, 2)
    assert schedule.sends(0, Action(Kind.FORWARD, 1, 4)) is None
    assert schedule.receives(0, Action(Kind.INPUT, 1, 4)) is None
    assert schedule.receives(1, Action(Kind.WEIGHT, 0, 4)) is None
    assert schedule.sends(1, Action(Kind.WEIGHT, 0, 4)) is None


@pytest.mark.parametrize("style", list(Style))
def test_stages_and_ranks_are_inverse(style: Style) -> None:
    stages = [stage_of(4, style, rank, chunk) for rank in range(4) for chunk in range(2)]
    assert sorted(stages) == list(range(8))
    assert [rank_of(4, style, stage) for stage in stages] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("style", "v"), STYLES)
def test_evaluation_is_forwards_without_gaps(style: str, v: int) -> None:
    """In a V the last micro-batch has to come back from the last rank."""
    p, m = 4, 8
    assert simulate(p, m, style, v, forward_only=True).makespan == v * m + (p - 1) * (2 if style == "v" else 1)


def test_a_slow_stage_bounds_the_step() -> None:
    costs = [Costs(), Costs(2, 2, 2), Costs(), Costs()]
    schedule = simulate(4, 8, costs=costs)
    assert schedule.makespan >= 8 * 6
    assert schedule.idle > simulate(4, 8).idle
    assert simulate(4, 8, "zero_bubble", costs=costs).makespan < schedule.makespan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 4, "2f2b"), "'2f2b' is none of gpipe, 1f1b, interleaved, zero_bubble, v"),
        ((2, 4, "1f1b", 2), "1f1b with 2 stages on each rank: set the stages on each rank to 1, or use interleaved or zero_bubble"),
        ((2, 4, "interleaved", 1), "interleaved with 1 stages on each rank: .* to 2, or use 1f1b or zero_bubble"),
        ((2, 4, "v", 3), "v with 3 stages on each rank: .* to 2, or use interleaved"),
        ((2, 4, "zero_bubble", 0), "zero_bubble with 0 stages on each rank: .* to 1$"),
        ((0, 4), "0 ranks with 4 micro-batches: set the number of ranks to at least 1"),
        ((2, 0), "2 ranks with 0 micro-batches: set the number of micro-batches to at least 1"),
        ((2, 4, "1f1b", 1, [Costs()] * 3), r"one for each of the 2 stages \(2 ranks x 1 chunks\)"),
        ((2, 4, "1f1b", 1, Costs(-1)), "no negative seconds"),
    ],
)
def test_refusals(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(*arguments)  # type: ignore[arg-type]


# -- pictures --

MEASURED = [
    Span(0, Action(Kind.FORWARD, 0, 0), 100.0, 100.002),
    Span(0, Action(Kind.BACKWARD, 0, 0), 100.005, 100.0098),
    Span(1, Action(Kind.FORWARD, 0, 0), 100.002, 100.0031),
    Span(1, Action(Kind.BACKWARD, 0, 0), 100.0031, 100.005),
]


def test_text_of_a_schedule() -> None:
    """The shortest action has up to four columns."""
    assert draw_text(simulate(2, 2)).splitlines() == [
        "1f1b, 2 ranks, 2 micro-batches: step 9 s, idle 33.3%",
        "rank 0 |F0--F1--........B0------....B1------|",
        "rank 1 |....F0--B0------F1--B1------........|",
        "F forward | B backward | . idle",
    ]
    narrow = draw_text(simulate(2, 2, "zero_bubble", 2), 40).splitlines()
    assert narrow[2:4] == ["rank 0 |F0F1f0f1..i0w0i1I0I1w1W0W1|", "rank 1 |..F0F1f0i0f1i1I0I1w0w1W0W1|"]
    assert "lower case: a later chunk" in " ".join(narrow)


@settings(max_examples=50, deadline=None)
@given(schedules(), st.integers(40, 200))
def test_text_fits_the_terminal_and_has_a_row_for_each_rank(schedule: Schedule, width: int) -> None:
    lines = draw_text(schedule, width).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == schedule.num_ranks
    assert len({len(row) for row in rows}) == 1


def test_measured_times_are_drawn_from_their_first() -> None:
    text = draw_text(MEASURED, 40, "measured").splitlines()
    assert text[0] == "measured: step 9.8 ms, idle 50.0%"
    assert text[1:3] == ["rank 0 |F0---.........B0-----------|", "rank 1 |.....F0-B0----.............|"]
    assert "measured: step 9.8 ms, idle 50.0%" in draw_svg(MEASURED, "measured")
    with pytest.raises(ValueError, match="no actions to draw"):
        draw_text([])


def test_svg_has_every_action_at_its_time() -> None:
    schedule = simulate(3, 6, "v")
    root = ET.fromstring(draw_svg(schedule, "a <V>"))
    space = {"svg": "http://www.w3.org/2000/svg"}
    bars = [rect for rect in root.iterfind("svg:rect", space) if rect.find("svg:title", space) is not None]
    texts = [text.text or "" for text in root.iterfind("svg:text", space)]
    assert len(bars) == sum(map(len, schedule.actions)) == 3 * 2 * 3 * 6
    assert f"a <V>: step {schedule.makespan:.4g} s, idle {schedule.idle:.1%}" in texts
    assert {"rank 0", "rank 1", "rank 2", "F forward", "I gradient of the input", "W gradients of the weights"} <= set(texts)
    assert [float(bar.get("x", 0)) for bar in bars] == pytest.approx(
        [64 + span.start / schedule.makespan * 880 for row in schedule.spans for span in row], abs=0.06
    )
    assert "prefers-color-scheme:dark" in draw_svg(schedule)
    assert "http" not in draw_svg(schedule).replace("http://www.w3.org/2000/svg", "")
