"""Show measurements and predictions: tables, traces, pages.

- `tables`: tables for a terminal (shared, for instance by `cli._burst_background` and
  `cli.compare`).
- `trace`: trace files (for `demo.driver`, `gather` and `tune.artifacts`, and programs).
- `results`: what a demo or a run found (shared, for instance by `gather` and
  `tune.artifacts`).
- `gather`: read the files that `stretto report` is given (for `cli.report`).
- `ranks`: find late ranks (for `page` and `ranks_page`).

Pages:

- `page`: the page of a demo or a run (shared, for instance by `tune.artifacts` and
  `cli._planning`).
- `page_facts`: its sections about plans, model and cluster (for `page`).
- `tuning`: its section about tuning (for `page`).
- `ranks_page`: its section about ranks (for `page`).
- `burst`: pages about burst plans (for `cli._burst_background` and `cli._burst_scale`).
- `background`: the page about background jobs (for `cli.demo` and `demo.background`).
- `cluster`: the page about a trace under several policies (for
  `cli._cluster_simulate`).
- `html`: the frame of all pages, and its parts (shared, for instance by `page` and
  `burst`).
- `svg`: drawings of steps, timelines and losses (shared, for instance by `curves` and
  `tuning`).
- `curves`: curves over ranks or rates (for `cli.reproduce`, `burst` and `page`).
- `bars`: bars of gaps and contributions (for `page`).
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
