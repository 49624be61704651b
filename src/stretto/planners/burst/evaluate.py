"""Compute the cost of a choice of GPUs directly from the definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.planners.burst.cuts import collapsed, joined
from stretto.planners.burst.tree import Block, Chain, Edge

if TYPE_CHECKING:
    from stretto.planners.burst.problem import BurstProblem, Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a choice."""

    iteration_s: float

    gpu_s: float

    max_amplification: float

    gpus: int
    """The largest number of GPUs at one time."""


def evaluate(problem: BurstProblem, choice: Choice) -> Cost:
    """Return time, GPU time, largest amplification and GPUs of a choice."""
    if problem.crosses and choice.own:
        whole, groups = joined(problem.profile)
        return evaluate(replace(problem, profile=whole), collapsed(choice, groups))
    if problem.crosses:
        return in_turns(problem, choice)
    return _Walk(problem, choice).cost()


def in_turns(problem: BurstProblem, choice: Choice) -> Cost:
    """Return the cost of a choice in which all branches take turns, for any graph."""
    layers = problem.profile.layers
    number = {layer.name: i for i, layer in enumerate(layers)}
    time_s, gpu_s, worst = 0.0, 0.0, 0.0
    for i, layer in enumerate(layers):
        width = choice.widths[i]
        own_s = float(problem.node_s[i, width])
        comms = [
            problem.comm_s(number[n], choice.widths[number[n]], width, moved=False)
            for n in layer.inputs
        ]
        time_s += own_s + sum(comms)
        gpu_s += (own_s + sum(comms)) * problem.widths[width]
        for comm_s in comms or [0.0]:
            worst = max(worst, problem.amplification(i, width, comm_s))
    return Cost(
        iteration_s=time_s,
        gpu_s=gpu_s,
        max_amplification=worst,
        gpus=max(problem.widths[at] for at in choice.widths),
    )


class _Walk:
    def __init__(self, problem: BurstProblem, choice: Choice) -> None:
        self._problem = problem
        self._choice = choice
        self._gpu_s = 0.0
        self._worst = 0.0

    def cost(self) -> Cost:
        tree = self._problem.tree
        time_s = self._layer_s(tree.source)
        self._amplify(tree.source, 0.0)
        gpus = self._gpus(tree.source)
        if tree.chain is not None:
            chain_s, peak = self._chain(tree.chain, tree.source, tree.target)
            time_s += chain_s + self._layer_s(tree.target)
            gpus = max(gpus, peak, self._gpus(tree.target))
        return Cost(
            iteration_s=time_s,
            gpu_s=self._gpu_s,
            max_amplification=self._worst,
            gpus=gpus,
        )

    def _gpus(self, layer: int) -> int:
        return self._problem.widths[self._choice.widths[layer]]

    def _layer_s(self, layer: int) -> float:
        own_s = float(self._problem.node_s[layer, self._choice.widths[layer]])
        self._gpu_s += own_s * self._gpus(layer)
        return own_s

    def _amplify(self, layer: int, comm_s: float) -> None:
        width = self._choice.widths[layer]
        found = self._problem.amplification(layer, width, comm_s)
        self._worst = max(self._worst, found)
        self._gpu_s += comm_s * self._gpus(layer)

    def _chain(
        self,
        chain: Chain,
        source: int,
        target: int,
        *,
        move_in: bool = False,
        move_out: bool = False,
    ) -> tuple[float, int]:
        """Return time and GPUs of the part between two layers."""
        time_s, gpus = 0.0, 0
        ends = (source, *chain.nodes, target)
        for i, link in enumerate(chain.links):
            moved_in = move_in and i == 0
            moved_out = move_out and i == len(chain.nodes)
            if isinstance(link, Edge):
                widths = self._choice.widths
                comm_s = self._problem.comm_s(
                    ends[i],
                    widths[ends[i]],
                    widths[ends[i + 1]],
                    moved=moved_in or moved_out,
                )
                self._amplify(ends[i + 1], comm_s)
                time_s += comm_s
            else:
                block_s, peak = self._block(link, moved_in, moved_out)
                time_s += block_s
                gpus = max(gpus, peak)
            if i < len(chain.nodes):
                time_s += self._layer_s(chain.nodes[i])
                gpus = max(gpus, self._gpus(chain.nodes[i]))
        return time_s, gpus

    def _block(self, block: Block, move_in: bool, move_out: bool) -> tuple[float, int]:  # noqa: FBT001
        turns_s, turns_gpus, beside_s, beside_gpus = 0.0, 0, 0.0, 0
        for chain in block.branches:
            own = bool(chain.nodes) and chain.nodes[0] in self._choice.own
            time_s, gpus = self._chain(
                chain,
                block.source,
                block.target,
                move_in=move_in or own,
                move_out=move_out or own,
            )
            if own:
                beside_s, beside_gpus = max(beside_s, time_s), beside_gpus + gpus
            else:
                turns_s, turns_gpus = turns_s + time_s, max(turns_gpus, gpus)
        return max(turns_s, beside_s), turns_gpus + beside_gpus
