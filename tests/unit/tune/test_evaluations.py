from __future__ import annotations

import pytest

from stretto.tune.evaluations import Evaluations


@pytest.mark.parametrize(
    ("evaluations", "disturbed"),
    [
        ([0] * 9, []),
        ([0, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0, 30, 0], [5, 12]),
        ([1] * 9, [0]),
        ([2, 1, 1, 2, 1, 1, 2, 1, 1, 2], [0]),
        ([1, 1, 1, 1, 1, 40, 1, 1], [0, 5]),
    ],
)
def test_steps_with_more_evaluations_than_usual_are_disturbed(evaluations, disturbed):
    counted = Evaluations()
    found = []
    for number, count in enumerate(evaluations):
        for _ in range(count):
            counted.add()
        if counted.end_step():
            found.append(number)
    assert found == disturbed
