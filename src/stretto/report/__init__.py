"""Show measurements and predictions: tables, traces, pages.

`tables` prints on a terminal, `trace` writes trace files, `results` is what a demo or a
run found. `page` makes its HTML page, with `page_facts`, `tuning` and, for the ranks,
`ranks_page`; `burst`, `background` and `cluster` make other pages. All use `html` for
the frame and its parts, and `svg`, `curves` and `bars` for drawings. `gather` reads the
files that `stretto report` is given; `ranks` compares ranks.
"""

from stretto.report.page import render, save
from stretto.report.results import (
    MethodResult,
    Results,
    RunReport,
    ScaledStep,
    report_of,
    results_json,
    results_of,
    save_results,
)
from stretto.report.svg import step_time_svg
from stretto.report.tables import methods_table, plan_table, planners_table
from stretto.report.trace import labeled_timelines, save_trace

__all__ = [
    "MethodResult",
    "Results",
    "RunReport",
    "ScaledStep",
    "labeled_timelines",
    "methods_table",
    "plan_table",
    "planners_table",
    "render",
    "report_of",
    "results_json",
    "results_of",
    "save",
    "save_results",
    "save_trace",
    "step_time_svg",
]
