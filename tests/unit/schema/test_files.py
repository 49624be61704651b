"""What is written is read again, and what is broken is refused with its place."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.schema import Cluster, Plan, Prediction, Span, Timeline, Workload, codec
from stretto.schema._convert import convert
from stretto.schema.burst_host import HostCosts
from stretto.schema.plan import OVERLAPS
from stretto.schema.timeline import load_timelines, save_timelines, trace_events
from stretto.testing import strategies as drawn

FREE = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda below: (
            st.lists(below, max_size=3)
            | st.dictionaries(st.text(max_size=4), below, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)
"""What may stand in a free field."""

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: bool(name.strip()))


@st.composite
def workloads(draw):
    workload = draw(drawn.workloads(max_tensors=6))
    names = draw(
        st.lists(
            NAMES,
            min_size=len(workload.tensors),
            max_size=len(workload.tensors),
            unique=True,
        )
    )
    tensors = tuple(
        dataclasses.replace(tensor, name=name)
        for tensor, name in zip(workload.tensors, names, strict=True)
    )
    return dataclasses.replace(
        workload, name=draw(st.text(max_size=5)), tensors=tensors, provenance=draw(FREE)
    )


@st.composite
def clusters(draw):
    return dataclasses.replace(draw(drawn.clusters()), provenance=draw(FREE))


@st.composite
def plans(draw):
    workload, cluster = draw(workloads()), draw(clusters())
    plan = draw(drawn.plans(workload, cluster, overlaps=OVERLAPS))
    time_s = st.floats(0, 1e6)
    predicted = st.none() | st.builds(
        Prediction,
        iteration_s=time_s,
        backward_s=time_s,
        exposed_communication_s=time_s,
        lower_bound_s=time_s,
        gap=st.floats(-0.5, 1e3),
    )
    return dataclasses.replace(plan, predicted=draw(predicted))


@st.composite
def spans(draw):
    start_s = draw(st.floats(0, 1e4))
    return Span(
        track=draw(st.sampled_from(["compute", "lane0", "lane1", "lane10"]) | NAMES),
        name=draw(st.text(max_size=6)),
        start_s=start_s,
        end_s=start_s + draw(st.floats(0, 1e3)),
        args=draw(FREE)
        | draw(st.sampled_from([{}, {"kind": "wait"}, {"kind": "send"}])),
    )


TIMELINES = st.builds(
    Timeline, name=st.text(max_size=6), spans=st.lists(spans(), max_size=8).map(tuple)
)

FILED = {"workload": workloads, "cluster": clusters, "plan": plans}
TYPES = {"workload": Workload, "cluster": Cluster, "plan": Plan}


@pytest.mark.parametrize("kind", FILED)
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_written_is_read_again(kind, data):
    value = data.draw(FILED[kind]())
    written = codec.encode(value)
    assert codec.decode(written, TYPES[kind]) == value
    assert codec.encode(codec.decode(written, TYPES[kind])) == written


@settings(max_examples=60)
@given(timeline=TIMELINES)
def test_a_timeline_survives_its_trace_exactly(tmp_path_factory, timeline):
    path = tmp_path_factory.mktemp("trace") / "timeline.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline


@settings(max_examples=30)
@given(timelines=st.dictionaries(st.text(max_size=5), TIMELINES, max_size=3))
def test_a_trace_of_several_timelines_keeps_them_apart(tmp_path_factory, timelines):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    save_timelines(path, timelines)
    found = load_timelines(path)
    assert {label: line.spans for label, line in found.items()} == {
        label: line.spans for label, line in timelines.items()
    }
    assert list(found) == list(timelines)


@settings(max_examples=30)
@given(timeline=TIMELINES)
def test_spans_on_one_thread_of_a_trace_never_overlap(timeline):
    # Viewers nest complete events of one thread, so an overlap would be drawn wrong.
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in trace_events({"x": timeline}):
        if event["ph"] == "X":
            threads.setdefault(event["tid"], []).append((event["ts"], event["dur"]))
    for busy in threads.values():
        busy.sort()
        for (ts, dur), (next_ts, _) in pairwise(busy):
            assert ts + dur <= next_ts + 1e-9 * max(1.0, next_ts)


def test_trace_threads_have_unique_numbers_above_zero_and_an_order():
    line = Timeline(
        name="step",
        spans=(
            Span(track="lane10", name="b", start_s=0, end_s=1),
            Span(track="lane2", name="a", start_s=0, end_s=1),
            Span(track="compute", name="forward", start_s=0, end_s=1),
        ),
    )
    events = trace_events({"predicted": line, "measured": line})
    threads = [e for e in events if e["name"] == "thread_name"]
    assert len({e["tid"] for e in threads}) == len(threads) == 6
    assert min(e["tid"] for e in threads) > 0
    assert [e["args"]["name"] for e in threads[:3]] == ["compute", "lane2", "lane10"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["predicted", "measured"]


def example(kind):
    """A full file of a kind as plain data."""
    values = {
        "workload": {
            "name": "m",
            "framework": "f",
            "device": "d",
            "batch_per_rank": 8,
            "forward_s": 0.5,
            "backward_s": 1.0,
            "tensors": [
                {"name": n, "bytes": 8, "dtype": "float32", "ready_s": r, "needed_s": 0}
                for n, r in (("b", 0.25), ("a", 0.75))
            ],
            "provenance": {"host": "x"},
        },
        "cluster": {
            "name": "c",
            "hosts": 2,
            "ranks_per_host": 1,
            "inter_host": {
                "latency_s": 1e-5,
                "bandwidth_bytes_per_s": 1e9,
                "stream_bytes_per_s": 5e8,
            },
            "intra_host": {
                "latency_s": 0,
                "bandwidth_bytes_per_s": 10**10,
                "stream_bytes_per_s": None,
            },
            "allreduce": {"startup_s": 1e-3, "s_per_byte": 1e-9, "ranks": 2},
            "concurrency": {"gamma": [1, 1.5]},
            "contention": {
                "compute": {"alpha1": 1.0, "alpha2": 1e-4},
                "overlapped": {"gamma1": 2, "gamma2": 1, "gamma3": 0.1, "gamma4": 0.5},
                "exclusive": {"gamma1": 2, "gamma2": 1, "gamma3": 0.1, "gamma4": 0.5},
                "resources": [1, 2],
            },
            "provenance": {},
        },
        "plan": {
            "planner": "p",
            "workload_digest": "sha256:0",
            "ranks": 2,
            "overlap": "backward",
            "lanes": 2,
            "buckets": [
                {
                    "tensors": ["b", "a"],
                    "lane": 1,
                    "slices": 2,
                    "resource": None,
                    "algorithm": "ring",
                    "wire_dtype": "float32",
                }
            ],
            "predicted": {
                "iteration_s": 1,
                "backward_s": 0.5,
                "exposed_communication_s": 0,
                "lower_bound_s": 1,
                "gap": 0,
            },
        },
    }
    header = {"kind": kind, "schema_version": 1, "made_by": "test"}
    return header | values[kind]


FREE_PLACES = {"$.provenance.host"}


def places(value, path="$"):
    """Every place in plain data, with how to reach its parent."""
    items = ()
    if isinstance(value, dict):
        items = [(key, f"{path}.{key}") for key in value]
    elif isinstance(value, list):
        items = [(i, f"{path}[{i}]") for i in range(len(value))]
    for key, below in items:
        yield value, key, below
        yield from places(value[key], below)


def refused(body, kind, *, at=None):
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    with pytest.raises(SpecError) as caught:
        codec.decode(data, TYPES[kind], source="some.json")
    assert str(caught.value).startswith("some.json: ")
    if at is not None:
        assert at in str(caught.value)
        assert caught.value.place == at
    return str(caught.value)


def every_place(kind):
    return [
        pytest.param(kind, path, id=path)
        for _, _, path in places(example(kind))
        if path not in FREE_PLACES
    ]


ALL_PLACES = [case for kind in TYPES for case in every_place(kind)]
KEYED = [case for case in ALL_PLACES if not case.values[1].endswith("]")]
"""The places that are keys of an object rather than items of a list."""


def at_path(body, wanted):
    return next((p, k) for p, k, path in places(body) if path == wanted)


@pytest.mark.parametrize("kind", TYPES)
def test_the_examples_are_valid(kind):
    codec.decode(msgspec.json.encode(example(kind)), TYPES[kind])


@pytest.mark.parametrize(("kind", "path"), KEYED)
def test_a_missing_key_is_named(kind, path):
    body = example(kind)
    parent, key = at_path(body, path)
    del parent[key]
    assert "missing" in refused(body, kind, at=path)


@pytest.mark.parametrize(("kind", "path"), KEYED)
def test_an_unknown_key_is_named(kind, path):
    body = example(kind)
    parent, key = at_path(body, path)
    parent[f"{key}x"] = parent[key]
    assert "unknown key" in refused(body, kind, at=f"{path}x")


@pytest.mark.parametrize("wrong", [[1], {"a": 1}, True, "word", -1.5, 1e400])
@pytest.mark.parametrize(("kind", "path"), ALL_PLACES)
def test_a_value_of_a_wrong_type_is_refused_and_never_crashes(kind, path, wrong):
    body = example(kind)
    parent, key = at_path(body, path)
    same_type = type(parent[key]) is type(wrong)
    parent[key] = wrong
    text = json.dumps(body).replace("Infinity", "1e400").encode()
    if same_type and wrong != -1.5:
        return  # a name may be any word, a free object anything
    assert "some.json: " in refused(text, kind)


@pytest.mark.parametrize(("kind", "path"), ALL_PLACES)
def test_nan_is_refused(kind, path):
    body = example(kind)
    parent, key = at_path(body, path)
    parent[key] = math.nan
    refused(json.dumps(body).encode(), kind)


NUMBERS = [
    case
    for case in ALL_PLACES
    if isinstance(
        (lambda p, k: p[k])(*at_path(example(case.values[0]), case.values[1])),
        int | float,
    )
]


@pytest.mark.parametrize(("kind", "path"), NUMBERS)
def test_a_negative_number_is_refused_at_its_place(kind, path):
    body = example(kind)
    parent, key = at_path(body, path)
    parent[key] = -3
    refused(body, kind, at=path)


@pytest.mark.parametrize("kind", TYPES)
@settings(max_examples=25)
@given(data=st.data())
def test_a_truncated_file_is_refused(kind, data):
    whole = msgspec.json.encode(example(kind))
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert "is not JSON" in refused(whole[:cut], kind, at=None)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b'{"kind": "plan",\n "a" 1}', "line 2, column 6: expected ':'"),
        (b'{"kind": "plan",\n', "line 2, column 1: it ends too early"),
        (b'{\n"\xc3\xa4" 1}', "line 2, column 5: "),
        (b'{\n\n"kind": "\xff"}', "line 3, column 10: is not UTF-8"),
    ],
)
def test_what_is_not_json_is_named_with_line_and_column(text, place):
    with pytest.raises(SpecError, match="is not JSON") as caught:
        codec.parse(text, "some.json")
    assert f"some.json: is not JSON: {place}" in str(caught.value)


@pytest.mark.parametrize("kind", TYPES)
@settings(max_examples=40)
@given(data=st.data())
def test_mutated_bytes_raise_spec_error_and_nothing_else(kind, data):
    whole = bytearray(msgspec.json.encode(example(kind)))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(whole) - 1))
        whole[where] = data.draw(st.integers(0, 255))
    try:
        codec.decode(bytes(whole), TYPES[kind], source="some.json")
    except SpecError as error:
        assert str(error).startswith("some.json: ")  # noqa: PT017


@settings(max_examples=40)
@given(garbage=st.binary(max_size=60))
def test_garbage_is_refused(garbage):
    refused(garbage, "plan")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b"[" * 900 + b"]" * 900,
        b"null",
        b"3",
        b'"x"',
        b"\xef\xbb\xbf{}",
        b'{"kind": "\\ud800"}',
        "{}".encode("utf-16"),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_odd_json_is_refused(data):
    refused(data, "workload")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("version", [2, 0, -1, "1", 1.5, None, True, [1], 10**30])
def test_another_version_is_refused_with_what_to_do(kind, version):
    body = example(kind) | {"schema_version": version, "made_by": "stretto 9.9"}
    text = refused(body, kind, at="$.schema_version")
    assert "9.9" in text
    assert "upgrade" in text


def test_another_kind_is_refused():
    assert "'cluster'" in refused(example("cluster"), "workload", at="$.kind")


@pytest.mark.parametrize("key", ["kind", "schema_version", "made_by"])
def test_a_missing_header_is_named(key):
    body = example("plan")
    del body[key]
    refused(body, "plan", at=f"$.{key}")


def test_a_key_that_occurs_twice_is_refused_with_its_place():
    text = msgspec.json.encode(example("plan")).replace(
        b'"lane":1', b'"lane":1,"lane":0'
    )
    assert "duplicate key" in refused(text, "plan", at="$.buckets[0].lane")


def test_whole_numbers_may_stand_for_times():
    link = codec.decode(msgspec.json.encode(example("cluster")), Cluster).intra_host
    assert link.latency_s == 0.0
    assert type(link.latency_s) is float
    assert type(link.bandwidth_bytes_per_s) is float


@settings(max_examples=30)
@given(cluster=clusters())
def test_equal_values_give_equal_bytes(cluster):
    link = cluster.inter_host
    whole = round(link.bandwidth_bytes_per_s)
    assume(link.stream_bytes_per_s is None)

    def with_link(**figures):
        return dataclasses.replace(
            cluster, inter_host=dataclasses.replace(link, **figures)
        )

    a = with_link(latency_s=0, bandwidth_bytes_per_s=whole)
    b = with_link(latency_s=-0.0, bandwidth_bytes_per_s=np.float64(whole))
    assert a == b
    assert codec.encode(a) == codec.encode(b)
    shuffled = dict(reversed(list(cluster.provenance.items())))
    same = dataclasses.replace(cluster, provenance=shuffled)
    assert codec.encode(same) == codec.encode(cluster)


@pytest.mark.parametrize(
    ("odd", "rule"),
    [
        (math.nan, "finite"),
        (math.inf, "finite"),
        ({1, 2}, "set"),
        (object(), "object"),
        (b"bytes", "bytes"),
        ({1: "x"}, "keys"),
        ({("a", 1): "x"}, "keys"),
        (np.zeros(3), "ndarray"),
        (np.float64("nan"), "finite"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_can_not_hold_is_refused_when_written(tmp_path, odd, rule):
    cluster = codec.decode(msgspec.json.encode(example("cluster")), Cluster)
    cluster = dataclasses.replace(cluster, provenance={"a": [0, odd]})
    with pytest.raises(SpecError, match=rule) as caught:
        cluster.save(tmp_path / "c.json")
    assert caught.value.place == "$.provenance.a[1]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_text_that_utf8_can_not_hold_is_refused_when_written(name):
    cluster = codec.decode(msgspec.json.encode(example("cluster")), Cluster)
    with pytest.raises(SpecError, match="written"):
        codec.encode(dataclasses.replace(cluster, provenance={"a": name}))


def test_free_fields_nested_too_deeply_are_refused_when_written():
    nested = current = {}
    for _ in range(5000):
        current["a"] = {}
        current = current["a"]
    cluster = codec.decode(msgspec.json.encode(example("cluster")), Cluster)
    with pytest.raises(SpecError, match="deep"):
        codec.encode(dataclasses.replace(cluster, provenance=nested))


def test_a_value_of_a_wrong_type_is_not_written():
    plan = codec.decode(msgspec.json.encode(example("plan")), Plan)
    with pytest.raises(SpecError, match=r"plan: \$\.ranks: .*int") as caught:
        codec.encode(dataclasses.replace(plan, ranks=2.5))
    assert caught.value.place == "$.ranks"


def test_numpy_scalars_are_written_as_numbers():
    plan = codec.decode(msgspec.json.encode(example("plan")), Plan)
    same = dataclasses.replace(plan, ranks=np.int64(2))
    assert codec.encode(same) == codec.encode(plan)


def test_headers_come_first_and_keys_are_sorted():
    written = json.loads(
        codec.encode(codec.decode(msgspec.json.encode(example("plan")), Plan))
    )
    keys = list(written)
    assert keys[:3] == ["kind", "schema_version", "made_by"]
    assert keys[3:] == sorted(keys[3:])
    assert list(written["buckets"][0]) == sorted(written["buckets"][0])


def trace_example():
    line = Timeline(
        name="step",
        spans=(
            Span(track="compute", name="forward", start_s=0, end_s=0.5),
            Span(track="lane0", name="b0", start_s=0.25, end_s=1, args={"bytes": 4}),
        ),
    )
    with TemporaryDirectory() as folder:
        file = Path(folder) / "t.json"
        line.save(file)
        return json.loads(file.read_text())


def trace_cases():
    """Each place of a trace that carries meaning, with ways to spoil it."""
    for _, key, path in places(trace_example()):
        first_metadata_only = path.startswith("$.traceEvents[0]")
        metadata = any(path.startswith(f"$.traceEvents[{i}]") for i in range(6))
        if (metadata and not first_metadata_only) or ".args." in path:
            continue  # says only how a viewer draws, or is free
        wrongs = [[1], True, -1.5, None]
        if isinstance(key, str):
            wrongs.append("rename")
            if key not in ("args", "displayTimeUnit"):  # which may be left out
                wrongs.append("drop")
        for wrong in wrongs:
            yield pytest.param(path, wrong, id=f"{path} {wrong}")


@pytest.mark.parametrize(("path", "wrong"), list(trace_cases()))
def test_a_mutated_trace_is_refused(tmp_path, path, wrong):
    body = trace_example()
    parent, key = at_path(body, path)
    if wrong == "drop":
        del parent[key]
    elif wrong == "rename":
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent[key] = wrong
    file = tmp_path / "t.json"
    file.write_text(json.dumps(body))
    with pytest.raises(SpecError) as caught:
        Timeline.load(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_broken_span_in_a_trace_is_named(tmp_path):
    body = trace_example()
    span = body["traceEvents"][-1]
    span["end_s"] = 0.125
    span["dur"] = -125_000.0
    file = tmp_path / "t.json"
    file.write_text(json.dumps(body))
    number = len(body["traceEvents"]) - 1
    with pytest.raises(SpecError, match=rf"\$\.traceEvents\[{number}\]\.end_s"):
        Timeline.load(file)


def test_a_file_says_its_kind(tmp_path):
    for kind in TYPES:
        file = tmp_path / f"{kind}.json"
        file.write_bytes(msgspec.json.encode(example(kind)))
        assert codec.kind_in(file) == kind
    file.write_text('{"kind": 3}')
    with pytest.raises(SpecError, match=r"\$\.kind"):
        codec.kind_in(file)


HOST = {
    "message_s": 1e-5,
    "message_s_per_byte": 0.0,
    "copy_s_per_byte": 0.0,
    "exchange_s": 0.0,
    "behind_s": 2e-5,
    "behind_s_per_byte": 1e-9,
    "slowdowns": [],
}
"""Costs as files of release 0.2.0 name them."""


def test_a_fields_earlier_name_is_read() -> None:
    found = convert(HOST, HostCosts, source="profile")
    assert (found.connection_s, found.connection_s_per_byte) == (2e-5, 1e-9)


def test_a_field_under_both_names_is_refused() -> None:
    both = {**HOST, "connection_s": 1e-5}
    with pytest.raises(SpecError, match=r"\$\.behind_s: is an unknown key"):
        convert(both, HostCosts, source="profile")
