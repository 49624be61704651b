"""Plan a running job again: ``python -m stretto.cluster.job_replan FOLDER``.

The supervisor of a job's first rank runs this in a process of its own, because planning
takes seconds. It reads `QUESTION` in the folder and writes `ANSWER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import zoo
from stretto.cluster import processes
from stretto.cluster.job_plans import NETWORK
from stretto.cluster.part_spec import write_json
from stretto.cluster.replanning import PlanPrediction
from stretto.cost import cluster_at
from stretto.cost.burst import BurstNetwork
from stretto.cost.burst_times import updated
from stretto.errors import StrettoError
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.simulated import plan_on, simulate
from stretto.schema import Cluster, codec
from stretto.schema.burst import BurstPlan, LayerProfile, LayerTiming

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

QUESTION, ANSWER = "question.json", "answer.json"


def predict(
    plan: BurstPlan,
    profile: LayerProfile,
    network: Cluster,
    timings: Sequence[LayerTiming],
    *,
    amplification_limit: float | None,
) -> PlanPrediction:
    """Return what the present plan and the best one take with measured layers.

    Args:
        plan: the present one.
        profile: for which it was made.
        network: resized to the plan's devices.
        timings: of all ranks.
        amplification_limit: of the job.

    Raises:
        StrettoError: a layer is of another model, or nothing can be predicted.
    """
    now = updated(profile, timings)
    resized = cluster_at(network, plan.gpus)
    problem = BurstProblem.of(
        now,
        BurstNetwork.of(resized, plan.gpus),
        gpus=plan.gpus,
        batch=plan.batch,
        widths="powers" if plan.gpus & (plan.gpus - 1) == 0 else "divisors",
        amplification_limit=amplification_limit,
    )
    best, step = plan_on(problem, resized)
    is_same = best.layers == plan.layers
    return PlanPrediction(
        now_s=simulate(now, plan, resized).iteration_s,
        new_s=step.iteration_s,
        plan="" if is_same else codec.encode(best).decode(),
    )


def ask(folder: Path, question: Mapping[str, Any]) -> list[str]:
    """Write the question and return the command that answers it.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / ANSWER).unlink(missing_ok=True)
    write_json(folder / QUESTION, question)
    return [*processes.PYTHON, "-m", __name__, str(folder)]


def read_answer(folder: Path) -> PlanPrediction | str:
    """Return the prediction, or why it is missing."""
    try:
        found = json.loads((folder / ANSWER).read_bytes())
        why = found.pop("why")
        return why or PlanPrediction(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"planning ended without an answer: {error}"


def main(folder: str) -> int:
    """Answer the question in a folder."""
    found: dict[str, Any] = {"why": ""}
    try:
        question = json.loads(Path(folder, QUESTION).read_bytes())
        path = question["network"]
        prediction = predict(
            codec.decode(question["plan"].encode(), BurstPlan, source="plan"),
            LayerProfile.load(question["profile"]),
            Cluster.load(path) if path else zoo.cluster(NETWORK),
            [
                codec.convert(each, LayerTiming, source="timings")
                for each in question["timings"]
            ],
            amplification_limit=question["amplification_limit"],
        )
        found |= {
            "now_s": prediction.now_s,
            "new_s": prediction.new_s,
            "plan": prediction.plan,
        }
    except (StrettoError, OSError, ValueError, TypeError, KeyError) as error:
        found["why"] = str(error) or type(error).__name__
    write_json(Path(folder, ANSWER), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
