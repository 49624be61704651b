"""What the demo of background jobs computes from the ranks' rates."""

from __future__ import annotations

import os
import sys

import pytest

from stretto.demo import background_job
from stretto.demo.background import (
    ALONE,
    BACKGROUND,
    PARTITION,
    TOGETHER,
    BackgroundOutcome,
    Measured,
    _unmeasured_note,
    arrangements,
)
from stretto.demo.background_worker import fits
from stretto.errors import BackgroundError
from stretto.report.background import arrangements_table, save_background, totals_svg


def cycle(speed: float, together: float) -> dict[str, Measured]:
    return {
        ALONE: Measured(foreground=100.0 * speed, background=0.0),
        BACKGROUND: Measured(foreground=0.0, background=400.0 * speed),
        PARTITION: Measured(foreground=75.0 * speed, background=100.0 * speed),
        TOGETHER: Measured(foreground=95.0 * speed, background=together * speed),
    }


def rows_of(*cycles: dict[str, Measured]):
    outcome = BackgroundOutcome(cycles=list(cycles), isolation="none", final_loss=1.0)
    return {row.name: row for row in arrangements(outcome, 4)}


def test_rates_are_over_those_alone_in_the_same_cycle():
    rows = rows_of(cycle(1.0, 240.0), cycle(3.0, 240.0), cycle(0.5, 200.0))
    assert rows[ALONE].total == rows[BACKGROUND].total == pytest.approx(1.0)
    assert rows[PARTITION].foreground == pytest.approx(0.75)
    assert rows[PARTITION].background == pytest.approx(0.25)
    assert rows[TOGETHER].foreground == pytest.approx(0.95)
    assert rows[TOGETHER].background == pytest.approx(0.6)
    assert rows[TOGETHER].total == pytest.approx(1.55)
    assert rows[TOGETHER].min_total == pytest.approx(1.45)
    assert rows[TOGETHER].max_total == pytest.approx(1.55)


def test_the_table_and_the_drawing_show_every_arrangement():
    rows = list(rows_of(cycle(1.0, 240.0)).values())
    table, drawing = arrangements_table(rows), totals_svg(rows)
    for row in rows:
        assert row.name in table
        assert row.name in drawing
    assert "5.0%" in table
    assert drawing.count("<rect") == 6


@pytest.mark.parametrize(
    ("elapsed_s", "cycles", "fit"),
    [(0.0, 0, True), (45.0, 1, True), (150.0, 3, True), (300.0, 1, False)],
)
def test_a_busy_machine_measures_fewer_cycles(elapsed_s, cycles, fit):
    assert fits(elapsed_s, cycles) is fit


def starved() -> dict[str, Measured]:
    return cycle(1.0, 240.0) | {BACKGROUND: Measured(foreground=0.0, background=0.0)}


@pytest.mark.parametrize("disturbed", [starved(), cycle(1.0, 1632.0)])
def test_a_cycle_without_the_background_jobs_rate_alone_counts_for_the_foreground_only(
    disturbed,
):
    rows = rows_of(cycle(1.0, 240.0), disturbed, disturbed)
    assert rows[TOGETHER].foreground == pytest.approx(0.95)
    assert rows[TOGETHER].background == pytest.approx(0.6)
    assert rows[TOGETHER].max_total == pytest.approx(1.55)


def test_without_any_rate_of_the_background_alone_its_figures_are_missing(tmp_path):
    rows = list(rows_of(starved()).values())
    assert arrangements_table(rows).splitlines()[-1].split()[-3:] == ["-", "-", "-"]
    page = tmp_path / "page.html"
    save_background(page, title="title", rows=rows, notes=())
    assert page.exists()


@pytest.mark.parametrize(
    ("cycles", "words"),
    [
        ([cycle(1.0, 240.0)], None),
        ([cycle(1.0, 240.0), starved()], "In 1 of the 2 cycles"),
        ([cycle(1.0, 240.0), cycle(1.0, 1632.0)], "In 1 of the 2 cycles"),
        ([starved(), starved()], "In all 2 cycles"),
    ],
)
def test_a_note_says_which_cycles_say_nothing_of_the_background(cycles, words):
    outcome = BackgroundOutcome(cycles=cycles, isolation="none", final_loss=1.0)
    note = _unmeasured_note(outcome)
    assert note is None if words is None else words in note


@pytest.mark.parametrize(
    ("script", "reason"),
    [("exit 3", "with status 3"), ("exec sleep 30", "within 0.2 s")],
)
def test_a_background_job_that_does_not_start_is_an_error(
    tmp_path, monkeypatch, script, reason
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(background_job.sys, "executable", str(python))
    monkeypatch.setattr(background_job, "_START_S", 0.2 if "sleep" in script else 30.0)
    with pytest.raises(BackgroundError, match=reason):
        background_job.BackgroundJob("cpu:demo")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_background_job_whose_rank_was_killed_ends_without_a_traceback(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    answers, answer = os.pipe()
    words, word = os.pipe()
    os.close(word)

    class Words:
        def fileno(self):
            return words

        def readline(self):
            os.close(answers)
            return ""

    monkeypatch.setattr(background_job.sys, "argv", ["job", "exclusive:demo", "0.001"])
    monkeypatch.setattr(background_job.sys, "stdin", Words())
    with os.fdopen(answer, "w") as stdout:
        monkeypatch.setattr(background_job.sys, "stdout", stdout)
        background_job.main()
    os.close(words)
