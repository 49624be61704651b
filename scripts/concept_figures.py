"""Draws the pictures of docs/concepts.md, from plans that the simulator predicts.

Run it by hand after a change of the drawings or the simulator: ``python
scripts/concept_figures.py``. No other script calls it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from stretto import planners  # noqa: E402
from stretto.planners import Draft, finish  # noqa: E402
from stretto.schema import AllReduceFit, Cluster, Link, Plan, Workload  # noqa: E402
from stretto.sim.step import simulate_step  # noqa: E402
from stretto.testing.instances import build_workload  # noqa: E402

WIDTH, LEFT, RIGHT, ROW, GAP = 860, 92, 20, 26, 6
STYLE = """
svg{--ink:#1c2330;--soft:#5b6472;--fwd:#9cc9ee;--bwd:#0072b2;--net:#f0b429;
--wait:#5b6472;--bound:#007a5a;--paper:#fff;--on-net:#1c2330;--on-bwd:#fff}
@media(prefers-color-scheme:dark){svg{--ink:#e8ecf2;--soft:#a7b1bf;--fwd:#2f5f86;
--wait:#c5ccd6;--bound:#2fc79a;--paper:#151a21}}
.bg{fill:var(--paper)}text{font:12px system-ui,sans-serif;fill:var(--ink)}
.head{font-weight:600;font-size:14px}.note{fill:var(--soft)}.mid{text-anchor:middle}
.end{text-anchor:end}.forward{fill:var(--fwd)}.backward{fill:var(--bwd)}
.send{fill:var(--net)}.wait{fill:var(--wait)}.on-send{fill:var(--on-net)}
.on-backward{fill:var(--on-bwd)}.stop{stroke:var(--soft);stroke-dasharray:6 3}
.bound{stroke:var(--bound);stroke-width:2}text.bound-text{fill:var(--bound)}
""".strip()

LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=125e6, stream_bytes_per_s=40e6)


@dataclass(frozen=True)
class Panel:
    """One plan's step in a picture."""

    head: str
    plan: Plan
    workload: Workload
    cluster: Cluster
    with_bound: bool = False


def cluster(*, flow_bytes_per_s: float | None, startup_s: float = 4e-3) -> Cluster:
    """Four hosts at 1 Gbit/s with a start-up per collective."""
    flow = flow_bytes_per_s or LINK.bandwidth_bytes_per_s
    link = replace(LINK, stream_bytes_per_s=flow_bytes_per_s)
    return Cluster(
        name="figure",
        hosts=4,
        ranks_per_host=1,
        inter_host=link,
        intra_host=link,
        allreduce=AllReduceFit(startup_s=startup_s, s_per_byte=1.5 / flow, ranks=4),
    )


def evenly(sizes: list[int], *, forward_s: float, backward_s: float) -> Workload:
    """Gradients that become ready at even distances."""
    ready = [backward_s * (i + 1) / len(sizes) for i in range(len(sizes))]
    return build_workload(sizes, ready, forward_s=forward_s, backward_s=backward_s)


def panel(head: str, draft: Draft, workload: Workload, on: Cluster) -> Panel:
    """A panel of a plan that is written down."""
    return Panel(head, finish(draft, "figure", workload, on), workload, on)


def picture(title: str, panels: list[Panel]) -> str:
    """The panels under each other, on one scale of time."""
    steps = [simulate_step(p.workload, p.cluster, p.plan) for p in panels]
    scale = (WIDTH - LEFT - RIGHT - 90) / max(step.iteration_s for step in steps)
    y, parts = 10, []
    for each, step in zip(panels, steps, strict=True):
        y += 18
        parts.append(text(20, y, each.head, "head"))
        top = y = y + 10
        for track in step.timeline.tracks:
            parts.append(text(20, y + 17, track.replace("lane", "lane ")))
            for span in step.timeline.spans:
                if span.track == track:
                    kind = str(span.args["kind"])
                    x, end = (LEFT + s * scale for s in (span.start_s, span.end_s))
                    parts.append(box(x, y, end - x, kind, label(span.name, kind)))
            y += ROW + GAP
        end = LEFT + step.iteration_s * scale
        parts.append(line(end, top - 4, y, "stop"))
        parts.append(text(end + 6, y - 12, f"{1e3 * step.iteration_s:.0f} ms"))
        if each.with_bound and each.plan.predicted is not None:
            bound_s = each.plan.predicted.lower_bound_s
            at = LEFT + bound_s * scale
            parts.append(line(at, top - 4, y, "bound"))
            words = f"bound {1e3 * bound_s:.0f} ms"
            parts.append(text(at - 6, y + 10, words, "end bound-text"))
        y += 14
    height = y + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def label(name: str, kind: str) -> str:
    """A span's text: the bucket's number, and the slice's."""
    if kind == "wait":
        return ""
    return name.replace("bucket ", "").replace(" slice ", ": ")


def text(x: float, y: float, body: str, kind: str = "") -> str:
    """One line of text."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(body)}</text>'


def line(x: float, top: float, bottom: float, kind: str) -> str:
    """An upright line."""
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="{kind}"/>'


def box(x: float, y: float, width: float, kind: str, body: str) -> str:
    """A span, with its text where there is room."""
    thin = 4 if kind == "wait" else ROW  # a wait lies over the send that it waits for
    out = (
        f'<rect x="{x:.1f}" y="{y + ROW - thin}" width="{max(width, 1):.1f}" '
        f'height="{thin}" rx="3" class="{kind}"/>'
    )
    if body and 7 * len(body) < width:
        out += text(x + width / 2, y + 17, body, f"mid on-{kind}")
    return out


def pictures() -> dict[str, str]:
    """The SVG files by name."""
    mb = 10**6
    small = evenly([mb] * 8, forward_s=0.03, backward_s=0.16)
    even = evenly([2 * mb] * 8, forward_s=0.03, backward_s=0.16)
    slow_start = cluster(flow_bytes_per_s=None, startup_s=15e-3)
    capped = cluster(flow_bytes_per_s=40e6)
    giant = evenly([mb, mb, mb, 9 * mb], forward_s=0.03, backward_s=0.1)
    best = planners.get("joint").plan(even, capped)
    return {
        "bucket": picture(
            "The same gradients in eight buckets, in one, and in three",
            [
                panel("eight buckets", Draft.in_turn(range(1, 9)), small, slow_start),
                panel("one bucket", Draft.in_turn([8]), small, slow_start),
                panel("three buckets", Draft.in_turn([2, 5, 8]), small, slow_start),
            ],
        ),
        "lane": picture(
            "The same buckets on one lane and on two",
            [
                panel("one lane", Draft.in_turn([2, 4, 6, 8]), even, capped),
                panel("two lanes", Draft.in_turn([2, 4, 6, 8], lanes=2), even, capped),
            ],
        ),
        "slice": picture(
            "A large gradient whole and in two slices",
            [
                panel("whole", Draft.in_turn([3, 4], lanes=2), giant, capped),
                panel(
                    "two slices each",
                    Draft.in_turn([3, 4], lanes=2, slices=2),
                    giant,
                    capped,
                ),
            ],
        ),
        "bound": picture(
            "Two plans and the bound that no plan can beat",
            [
                Panel(
                    "DDP's rule, buckets of 8 MB",
                    planners.get("ddp", cap_bytes=8 * mb).plan(even, capped),
                    even,
                    capped,
                    with_bound=True,
                ),
                Panel("the plan of joint", best, even, capped, with_bound=True),
            ],
        ),
    }


def main() -> None:
    """Write the pictures beside the pages."""
    for name, drawn in pictures().items():
        path = ROOT / "docs" / f"concept-{name}.svg"
        path.write_text(drawn)
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
