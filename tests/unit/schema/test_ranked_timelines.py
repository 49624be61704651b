"""Timelines of several ranks in one trace file: written, read again, and refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.schema import Span, Timeline
from stretto.schema.timeline import load_timelines, save_timelines, trace_events


def span(rank: int | None, start_s: float, track: str = "lane0") -> Span:
    args = {"kind": "send"} | ({} if rank is None else {"rank": rank, "step": 0})
    return Span(
        track=track, name="bucket 0", start_s=start_s, end_s=start_s + 1, args=args
    )


SPANS = st.builds(
    span,
    st.none() | st.integers(0, 3),
    st.floats(0, 10),
    st.sampled_from(["compute", "lane0", "lane1"]),
)


@given(spans=st.lists(SPANS, max_size=12), other=st.lists(SPANS, max_size=3))
def test_ranks_survive_a_trace_exactly(tmp_path_factory, spans, other) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    lines = {
        "one": Timeline(name="one", spans=tuple(spans)),
        "two": Timeline(name="two", spans=tuple(other)),
    }
    save_timelines(path, lines)
    assert load_timelines(path) == lines
    lines["one"].save(path)
    assert Timeline.load(path) == lines["one"]


def test_each_rank_is_a_process_and_its_tracks_are_threads() -> None:
    line = Timeline(
        name="all",
        spans=(span(2, 0.0), span(0, 0.0), span(2, 0.0, "compute"), span(0, 1.0)),
    )
    events = trace_events({"all": line})
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "all, rank 0", 2: "all, rank 2"}
    threads = [
        (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    ]
    assert threads == [(1, "lane0"), (2, "compute"), (2, "lane0")]
    assert [e["pid"] for e in events if e["ph"] == "X"] == [2, 1, 2, 1]
    assert line.ranks == (0, 2)
    assert line.of_rank(0).spans == (line.spans[1], line.spans[3])


def test_a_span_under_another_rank_s_process_is_refused(tmp_path) -> None:
    path = tmp_path / "t.json"
    Timeline(name="all", spans=(span(1, 0.0),)).save(path)
    body = json.loads(path.read_text())
    for event in body["traceEvents"]:
        if event["ph"] == "X":
            event["args"]["rank"] = 5
    path.write_text(json.dumps(body))
    with pytest.raises(SpecError, match=r"args\.rank: must be that of process 1, 1"):
        Timeline.load(path)
