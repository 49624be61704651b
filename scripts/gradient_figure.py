"""Draws ``docs/gradient.svg``: the path of a gradient through the runtime.

Run it by hand after a change of that path: ``python scripts/gradient_figure.py``. No
other script calls it. ARCHITECTURE.md shows the picture.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1100, 836
TARGET = Path(__file__).parent.parent / "docs" / "gradient.svg"

STYLE = """
svg{--paper:#ffffff;--ink:#1c2330;--soft:#5b6472;--line:#8a94a3;--box:#f3f5f8;
--torch:#fbe9dc;--torch-line:#c2571a;--ours:#e3f0fa;--ours-line:#0072b2;
--lane:#fdf1d3;--lane-line:#b27a00;--care:#e2f3ec;--care-line:#007a5a}
@media(prefers-color-scheme:dark){svg{--paper:#151a21;--ink:#e8ecf2;--soft:#a7b1bf;
--line:#7d8897;--box:#1e252e;--torch:#38271c;--torch-line:#ff9d5c;--ours:#17293a;
--ours-line:#4aa8e8;--lane:#352c14;--lane-line:#e9ad2b;--care:#15302a;
--care-line:#2fc79a}}
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;
fill:var(--ink)}
.head{font-weight:700;font-size:14px}.row{font-weight:700;font-size:16px}
.file,.note{font-size:12px;fill:var(--soft)}.mid{text-anchor:middle}
rect{fill:var(--box);stroke:var(--line);stroke-width:1.3}
.torch{fill:var(--torch);stroke:var(--torch-line)}
.ours{fill:var(--ours);stroke:var(--ours-line)}
.lane{fill:var(--lane);stroke:var(--lane-line)}
.care{fill:var(--care);stroke:var(--care-line)}
.ground{fill:var(--paper);stroke:none}
.way{fill:none;stroke:var(--ink);stroke-width:1.5}
.may{stroke-dasharray:5 4}.tip{fill:var(--ink)}
""".strip()


def box(
    x: int, y: int, w: int, h: int, kind: str, head: str, lines: list[str], file: str
) -> str:
    """A box with a head, lines, and the file in which it lives at its foot."""
    out = [f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" class="{kind}"/>']
    out.append(words(x + 11, y + 21, head, "head"))
    out += [words(x + 11, y + 41 + 17 * i, line) for i, line in enumerate(lines)]
    if file:
        out.append(words(x + 11, y + h - 9, file, "file"))
    return "".join(out)


def words(x: float, y: float, body: str, kind: str = "") -> str:
    """One line of text."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{named}>{escape(body)}</text>'


def way(path: str, *, may: bool = False) -> str:
    """An arrow along a path."""
    kind = "way may" if may else "way"
    return f'<path d="{path}" class="{kind}" marker-end="url(#tip)"/>'


def drawing() -> str:
    """The figure as SVG text."""
    parts = [
        words(20, 34, "Order known before the step: a plan", "row"),
        box(
            412,
            20,
            196,
            92,
            "",
            "a user's hook, if any",
            ["takes over what is sent;", "the plan's buckets stay"],
            "register_comm_hook",
        ),
        box(
            20,
            146,
            136,
            112,
            "torch",
            "autograd",
            ["a gradient is ready"],
            "PyTorch",
        ),
        box(
            186,
            146,
            196,
            112,
            "torch",
            "Reducer of DDP",
            [
                "copies into its bucket,",
                "divides by the ranks;",
                "full buckets by index",
            ],
            "PyTorch, reducer.py",
        ),
        box(
            412,
            146,
            196,
            112,
            "ours",
            "PlannedGroup",
            [
                "the process group that the",
                "Reducer was given: its n-th",
                "all-reduce is bucket n",
            ],
            "planned_group.py",
        ),
        box(
            638,
            146,
            172,
            112,
            "ours",
            "slices",
            ["cut as planned; in a", "narrower type on the", "wire where planned"],
            "narrow_lanes.py",
        ),
        box(
            412,
            292,
            398,
            92,
            "ours",
            "works and futures",
            [
                "Gloo's own work for a bucket, or one future for its slices;",
                "no thread of Gloo's enters Python in a usual step",
            ],
            "launch.py",
        ),
        box(
            186,
            292,
            196,
            92,
            "ours",
            "end of backward",
            ["waits for all works once,", "finds NaN, reports failures"],
            "planned_group.py, nan_check.py",
        ),
        box(20, 292, 136, 92, "torch", "optimizer", ["all gradients", "in place"], ""),
        words(20, 428, 'Order found while running: order="negotiated"', "row"),
        box(
            20,
            446,
            136,
            112,
            "torch",
            "autograd",
            ["a gradient is ready:", "a hook on its", "parameter"],
            "reducer.py",
        ),
        box(
            186,
            446,
            196,
            112,
            "ours",
            "requests",
            [
                "known ones are numbered,",
                "a bit each: “here it is”;",
                "new ones are described",
            ],
            "ledger.py",
        ),
        box(
            412,
            446,
            196,
            112,
            "ours",
            "round",
            [
                "bitwise-and of all ranks’ bits",
                "on a control group of its",
                "own: ready on all ranks",
            ],
            "control_thread.py, rounds.py",
        ),
        box(
            638,
            446,
            172,
            112,
            "ours",
            "buckets",
            ["small tensors packed,", "large ones cut, in", "index order"],
            "buckets.py, send.py",
        ),
        box(
            412,
            590,
            196,
            76,
            "ours",
            "stable order",
            ["once stable: no rounds"],
            "stable_order.py",
        ),
        box(
            412,
            698,
            398,
            56,
            "ours",
            "handles",
            ["done, or the one error that all ranks have"],
            "",
        ),
        box(
            186,
            680,
            196,
            74,
            "ours",
            "end of backward",
            ["waits for all handles"],
            "reducer.py",
        ),
        box(20, 680, 136, 74, "torch", "optimizer", ["all gradients", "in place"], ""),
        # Lanes and peers, shared by both ways.
        '<rect x="848" y="146" width="136" height="608" rx="7" class="lane"/>',
        words(859, 167, "lanes", "head"),
        words(859, 187, "a communicator"),
        words(859, 204, "each: one after"),
        words(859, 221, "another on a lane,"),
        words(859, 238, "lanes at the same"),
        words(859, 255, "time"),
        *(
            f'<rect x="862" y="{y}" width="108" height="40" rx="5"/>'
            + words(916, y + 25, name, "mid")
            for y, name in ((300, "lane 0"), (420, "lane 1"), (540, "lane 2"))
        ),
        words(916, 625, "…", "mid"),
        words(859, 745, "lanes.py", "file"),
        '<rect x="1018" y="146" width="62" height="608" rx="7"/>',
        words(1049, 455, "peers", "head mid"),
        *(way(f"M970 {y + 20}H1014") for y in (300, 420, 540)),
        # The planned way.
        way("M156 202H182"),
        way("M382 202H408"),
        way("M608 202H634"),
        way("M810 202H844"),
        way("M284 146V66H408", may=True),
        way("M848 338H814"),
        way("M412 338H386"),
        way("M186 338H160"),
        # The negotiated way.
        way("M156 502H182"),
        way("M382 502H408"),
        way("M608 502H634"),
        way("M810 502H844"),
        way("M284 558V628H408", may=True),
        way("M608 628H724V562", may=True),
        way("M848 726H814"),
        way("M412 726H386"),
        way("M186 726H160"),
        # Beside both.
        box(
            20,
            776,
            480,
            48,
            "care",
            "agreement",
            [],
            "",
        ),
        words(118, 797, "before the first step and at each plan: versions,", "note"),
        words(118, 814, "model and plan are equal on all ranks (agreement.py)", "note"),
        box(520, 776, 560, 48, "care", "failures", [], ""),
        words(
            628,
            797,
            "a collective fails: sign into the store, close the lanes, name",
            "note",
        ),
        words(
            628,
            814,
            "who did not sign; backward raises before the optimizer (failure.py)",
            "note",
        ),
        way("M916 754V772", may=True),
    ]
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker>'
        "</defs>"
    )
    label = "The path of a gradient through the runtime"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}">'
        f"<title>{label}</title><style>{STYLE}</style>{tip}"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" class="ground"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
