"""Convert one script, depending on its kind: the order of the stages."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert import (
    _advice,
    _already_distributed,
    _device,
    _file_names,
    _file_reads,
    _loader_sizes,
    _passes,
    _rank_values,
    _reading,
    _replicas,
    _sample_draws,
    _sample_loops,
    _setup,
    _support,
    _untaken,
    _unwrapping,
    _whole_passes,
)
from stretto.convert._batch import Batch
from stretto.convert._comprehensions import TrainingComprehension, unrolled
from stretto.convert._display import Display
from stretto.convert._edit import Work
from stretto.convert._horovod import distribute_optimizers
from stretto.convert._job import FoundTraining
from stretto.convert._loaders import Loaders
from stretto.convert._models import Models, reaching_training
from stretto.convert._numbers import Numbers
from stretto.convert._proof.proofs import Proofs
from stretto.convert._result import Choices, Conversion, Kind, Note, Target
from stretto.convert._second_backward import Steps
from stretto.convert._split import Split, split, with_name
from stretto.convert._trained_models import UnnamedModel
from stretto.convert._tree import found
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from stretto.convert._tree import ScriptTree

_MARKED = re.compile(rf"^{re.escape(_support.MARK)} --to (\w+)$", re.MULTILINE)


def convert_source(source: str, *, name: str, choices: Choices) -> Conversion:
    """Convert a script's text; a script that was converted before does not change.

    Raises:
        SpecError: it is not Python 3, contains no training for one device that is
            understood, or was converted for another target.
    """
    after, notes = converted(source, name, choices)
    return Conversion(name=name, before=source, after=after, notes=tuple(notes))


def converted(source: str, name: str, choices: Choices) -> tuple[str, list[Note]]:
    """Return a script's new text, and the list of changes.

    Raises:
        SpecError: as `convert_source`.
        StrettoError: the new text is not Python, or reads a name that it does not
            define, which is an error of this package.
    """
    try:
        after, notes = _converted(source, name, choices)
    except SpecError as refused:
        said = _with_true_ways(str(refused), source, name, choices)
        if said == str(refused):
            raise
        raise SpecError(said) from None
    if after != source:
        _check(source, after, name)
    return after, notes


_OR_HOROVOD = ", or use --to horovod"
_OR_PER_RANK = ", or convert with --per-rank, so that each rank takes one"
_STRETTO = "Use --to stretto"


def _with_true_ways(said: str, source: str, name: str, choices: Choices) -> str:
    """Return a refusal that names other options only if they accept the script."""
    if _OR_HOROVOD in said:
        other = replace(choices, target=Target.HOROVOD)
        if _refusal(source, name, other) is not None:
            return said.replace(_OR_HOROVOD, "")
    if _OR_PER_RANK in said:
        other = replace(choices, per_rank_batch=True)
        if _refusal(source, name, other) is not None:
            return said.replace(_OR_PER_RANK, "")
    if said.endswith(_STRETTO):
        why = _refusal(source, name, replace(choices, target=Target.STRETTO))
        if why is not None:
            why = why.replace(_OR_HOROVOD, "").removeprefix(f"{name}:").strip()
            return said.replace(_STRETTO, f"--to stretto refuses it, too: line {why}")
    return said


def _refusal(source: str, name: str, choices: Choices) -> str | None:
    """Return the sentence with which a script is refused, if it is."""
    try:
        _converted(source, name, choices)
    except SpecError as refused:
        return str(refused)
    return None


def _check(before: str, after: str, name: str) -> None:
    """Raise an error if a converted script could not run."""
    try:
        _reading.compiles(after, name)
    except (SyntaxError, ValueError) as exc:
        raise StrettoError(
            f"{name}: internal error: the converted script is not Python ({exc}): "
            "nothing is written. Report it with the script"
        ) from exc
    missing = _reading.undefined(after, name) - _reading.undefined(before, name)
    if missing:
        raise StrettoError(
            f"{name}: internal error: the converted script uses "
            f"{', '.join(sorted(missing))} without a definition: nothing is written. "
            "Report it with the script"
        )


def _converted(source: str, name: str, choices: Choices) -> tuple[str, list[Note]]:
    tree = _reading.parsed(source, name)
    marked = _MARKED.search(source)
    if marked is not None:
        if marked[1] != choices.target.value and choices.target is not Target.STRETTO:
            raise SpecError(
                f"{name}: was converted with --to {marked[1]}: convert the original "
                f"script with --to {choices.target.value}"
            )
        note = Note(line=0, kind=Kind.KNOW, text="converted already: nothing to do")
        return source, [note]
    moved = _already_distributed.converted(tree, choices.target, name)
    if moved is not None:
        return moved
    _reading.check_framework(tree, name)
    after, notes = _distributed(tree, choices, name)
    return after, sorted(notes)


def _distributed(
    tree: ScriptTree, choices: Choices, name: str
) -> tuple[str, list[Note]]:
    """Return a script's distributed form, and the list of changes.

    Raises:
        SpecError: the script is not understood; the error has the line and the next
        step.
    """
    job, splits, notes = _job(tree, name)
    tree = job.tree
    work = Work(job, choices, splits)
    work.notes += notes
    work.proofs = proofs = Proofs(work)
    display = Display(work)
    display.guard_files()
    models = Models(work)
    if not work.horovod:
        Steps(work, models).check()
    models.convert()
    _unwrapping.convert(work, models)
    if work.horovod:
        distribute_optimizers(work, models)
    loaders = Loaders(work)
    loaders.convert()
    _untaken.point_out(work, loaders)
    _passes.convert(work)
    whole = _whole_passes.convert(work, models, loaders)
    read = _loader_sizes.convert(work, loaders)
    Batch(work, loaders.batch_sizes, loaders.without_size, [*whole, *read]).convert()
    shares = _rank_values.Shares(work, loaders)
    numbers = Numbers(work, models, loaders, shares)
    numbers.convert()
    _sample_loops.point_out(work, shares)
    _sample_draws.point_out(work)
    values = _rank_values.point_out(work, loaders, numbers)
    first = _first_epoch(work)
    _replicas.point_out(work, models, values, first)
    display.convert()
    _file_names.convert(work)
    _device.convert(work, saves=display.saves)
    _file_reads.convert(work)
    _setup.convert(work, logs=display.logs(), seeds_before=first)
    _advice.give(work)
    proofs.point_out()
    return work.result().code, work.notes


def _job(tree: ScriptTree, name: str) -> tuple[FoundTraining, list[Split], list[Note]]:
    """Return a script's training, in a tree that the stages can read.

    In it every trained model has a name, and ``for`` statements train.

    Raises:
        SpecError: the script is not understood.
    """
    notes: list[Note] = []
    while True:
        lines, splits = split(tree)
        try:
            return FoundTraining(lines, name), splits, notes
        except UnnamedModel as error:
            place = next(
                (i for i, call in enumerate(lines.calls) if call is error.value), None
            )
            named = with_name(tree, tree.calls[place]) if place is not None else None
            if named is None:
                raise SpecError(str(error)) from None
            tree = named
        except TrainingComprehension as error:
            comps = list(found(lines.module, cst.BaseComp))
            place = next(i for i, comp in enumerate(comps) if comp is error.value)
            comp = list(found(tree.module, cst.BaseComp))[place]
            made = unrolled(tree, comp)
            if made is None:
                raise SpecError(str(error)) from None
            text = (
                f"`{tree.text(comp)[:60]}` is written as a `for` statement, in whose "
                "body each step trains"
            )
            line = tree.shown_line(comp)
            notes.append(Note(line=line, kind=Kind.DONE, text=text))
            tree = made


def _first_epoch(work: Work) -> cst.CSTNode:
    """Return the outermost loop that trains, the first of them in the text."""
    tree = work.tree
    inner: list[cst.CSTNode] = [loop.node for loop in work.job.training]
    outermost: list[cst.CSTNode] = []
    for node in inner:
        around = tree.loops(node)
        outermost.append(around[-1] if around else node)
    for function in reaching_training(work):
        for call in work.flow.calls_of(function):
            around = tree.loops(call)
            if around:
                outermost.append(around[-1])
    callers = [n for n in outermost if _is_first_level(work, n, outermost)]
    return min(callers or outermost, key=tree.line)


def _is_first_level(work: Work, node: cst.CSTNode, others: list[cst.CSTNode]) -> bool:
    """Return whether a loop does not run within another of them through a call."""
    scope = work.tree.function(node)
    if scope is None:
        return True
    calls = work.flow.calls_of(scope)
    return not any(work.tree.within(call, other) for call in calls for other in others)
