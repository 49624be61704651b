from __future__ import annotations

import pytest

from stretto.report import MethodResult, RunReport, labeled_timelines, render
from stretto.report.gather import gather
from stretto.report.ranks import RanksFound, find_late
from stretto.report.ranks_page import MAX_DRAWN, drawn_ranks
from stretto.report.trace import save_trace
from stretto.schema import Span, Timeline


def spans_of(
    rank: int,
    *,
    step: int = 0,
    between_s: float = 0.01,
    forward_s: float = 0.1,
    backward_s: float = 0.2,
    end_s: float = 0.6,
    lanes_s: tuple[float, ...] = (0.55, 0.55),
    clock_error_s: float = 1e-4,
) -> list[Span]:
    """A step that begins at ``step`` seconds plus what lies between steps."""

    def span(track: str, kind: str, at: tuple[float, float], **args: object) -> Span:
        return Span(
            track=track,
            name=kind,
            start_s=step + at[0],
            end_s=step + at[1],
            args={"kind": kind, "rank": rank, "step": step, **args},
        )

    begin_s = 0.05 + between_s
    ready_s = begin_s + forward_s + backward_s
    made = [
        span(
            "compute",
            "forward",
            (begin_s, begin_s + forward_s),
            clock_error_s=clock_error_s,
        ),
        span("compute", "backward", (begin_s + forward_s, ready_s)),
        span("compute", "exposed", (ready_s, end_s)),
        *(
            span(f"lane{i}", "send", (ready_s, at_s), bucket=i)
            for i, at_s in enumerate(lanes_s)
        ),
    ]
    if step:
        made.insert(0, span("compute", "outside", (0.05, begin_s)))
    return made


def timeline(*ranks: dict[str, object], steps: int = 5) -> Timeline:
    return Timeline(
        name="all",
        spans=tuple(
            span
            for rank, options in enumerate(ranks)
            for step in range(steps)
            for span in spans_of(rank, step=step, **options)
        ),
    )


def found(*ranks: dict[str, object]) -> RanksFound:
    shown = find_late(timeline(*ranks))
    assert shown is not None
    return shown


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"between_s": 0.11}, "outside"),
        ({"forward_s": 0.2}, "forward"),
        ({"backward_s": 0.3}, "backward"),
    ],
)
def test_the_late_rank_is_named_with_the_part_that_made_it_late(
    options: dict[str, object], part: str
) -> None:
    shown = found({}, {}, options, {})
    (late,) = shown.late
    assert (late.rank, late.part) == (2, part)
    assert late.late_s == pytest.approx(0.1)
    assert late.part_s == pytest.approx(0.1)
    assert shown.words().startswith("Rank 2 is late: it has its gradients 100 ms")


def test_of_two_ranks_the_later_one_is_late() -> None:
    assert [row.rank for row in found({"forward_s": 0.2}, {}).late] == [0]


def test_two_late_ranks_do_not_hide_each_other() -> None:
    shown = found({}, {"backward_s": 0.3}, {"backward_s": 0.32}, {})
    assert [row.rank for row in shown.late] == [2, 1]
    assert "Also late: rank 1." in shown.words()


def test_less_than_the_clocks_can_show_makes_no_rank_late() -> None:
    options = {"forward_s": 0.13}
    assert [row.rank for row in found({}, options).late] == [1]
    unsure = found({}, {**options, "clock_error_s": 0.016})
    assert unsure.late == ()
    assert unsure.words().startswith("No rank is late: the last one, rank 1, has")


def test_a_single_slow_step_makes_no_rank_late() -> None:
    slow = spans_of(1, step=4, forward_s=0.25)
    spans = [s for s in timeline({}, {}).spans if (s.rank, s.args["step"]) != (1, 4)]
    shown = find_late(Timeline(name="all", spans=(*spans, *slow)))
    assert shown is not None
    assert shown.late == ()


def test_a_lane_that_ends_long_after_the_others_is_named() -> None:
    assert found({}, {}).slow_lane is None
    near = found({"lanes_s": (0.54, 0.55)}, {})
    assert near.slow_lane is None
    slow = found({"lanes_s": (0.4, 0.6)}, {"lanes_s": (0.4, 0.6)})
    assert slow.slow_lane is not None
    assert slow.slow_lane.track == "lane1"
    assert "lane1 ends 240 ms after the slowest backward" in slow.words()


def test_a_timeline_of_one_rank_or_without_whole_steps_finds_nothing() -> None:
    alone = Timeline(name="x", spans=(Span(track="a", name="b", start_s=0, end_s=1),))
    assert find_late(alone) is None
    halves = [s for s in timeline({}, {}).spans if s.name != "backward" or not s.rank]
    assert find_late(Timeline(name="x", spans=tuple(halves))) is None


def report(*ranks: dict[str, object]) -> RunReport:
    method = MethodResult(
        name="ours",
        predicted_step_s=None,
        measured_step_s=0.6,
        spread_s=None,
        speedup_over_ddp=None,
        bound_share=None,
        final_loss=None,
        ranks=timeline(*ranks),
    )
    return RunReport(title="t", methods=(method,))


def test_the_page_shows_all_ranks_and_what_spans_mean() -> None:
    page = render(report({}, {}, {"forward_s": 0.2}))
    assert "All ranks on one clock" in page
    assert "Rank 2 is late" in page
    assert page.count("late by") >= 2  # the table's head and the drawing
    assert "a collective starts with its last rank" in page
    assert "All ranks on one clock" not in render(RunReport(title="t"))


def test_of_many_ranks_the_latest_and_the_earliest_are_drawn() -> None:
    many: list[dict[str, object]] = [{} for _ in range(40)]
    many[17] = {"forward_s": 0.2}
    shown = drawn_ranks(found(*many))
    assert len(shown) == MAX_DRAWN
    assert 17 in shown
    assert "12 of 40 ranks are drawn" in render(report(*many))


def test_all_ranks_survive_the_trace(tmp_path) -> None:
    made = report({}, {"forward_s": 0.2})
    path = tmp_path / "trace.json"
    save_trace(path, made)
    (method,) = gather([path]).methods
    assert list(labeled_timelines(made)) == ["ours all ranks"]
    assert method.ranks is not None
    assert method.ranks.spans == made.methods[0].ranks.spans
    # A timeline file of all ranks goes to the same place.
    single = tmp_path / "ours all ranks.json"
    made.methods[0].ranks.save(single)
    (again,) = gather([single]).methods
    assert (again.name, again.ranks) == ("ours", made.methods[0].ranks)
