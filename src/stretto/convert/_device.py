"""Give each rank its own device; load and download on several ranks."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._edit import appended
from stretto.convert._tree import argument, arguments_of, dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_NUMBER_NAMES = ("gpu", "gpu_id", "gpu_ids", "gpus", "device_id", "device_num")
"""Names of settings that usually hold a GPU's number."""

_NUMBERED = re.compile(r"""^[rR]?(["'])cuda:(\d+)\1$""")


def convert(work: Work, *, saves: bool) -> None:
    """Map devices, loads and downloads."""
    _numbers(work)
    _moves_to_numbers(work)
    _visible(work)
    _loads(work, saves=saves)
    _downloads(work)


def _numbers(work: Work) -> None:
    """Replace ``cuda:0`` and similar devices by this rank's device."""
    tree = work.tree
    for text in found(tree.module, cst.SimpleString):
        if _NUMBERED.match(text.value):
            work.replace(text, 'f"cuda:{LOCAL_RANK}"')
            work.done(text, f"{text.value} became this rank's device")
    for shown in found(tree.module, cst.FormattedString):
        first = shown.parts[0] if shown.parts else None
        if isinstance(first, cst.FormattedStringText) and first.value == "cuda:":
            work.replace(shown, 'f"cuda:{LOCAL_RANK}"')
            work.done(shown, f"{tree.text(shown)} became this rank's device")
    for call in tree.calls:
        full = tree.called(call)
        moved = tree.method_called(call, "cuda") is not None
        place = 0 if moved or full == "torch.cuda.set_device" else 1
        if not (moved or full in ("torch.cuda.set_device", "torch.device")):
            continue
        positional, _ = arguments_of(call)
        number = positional[place] if place < len(positional) else None
        of_device = full == "torch.cuda.set_device" or isinstance(number, cst.Integer)
        if number is not None and of_device:
            work.replace(number, "LOCAL_RANK")
            work.done(call, f"device {tree.text(number)} became this rank's")


def _moves_to_numbers(work: Work) -> None:
    """Handle ``model.to(gpu)`` with a device number that all ranks would share."""
    tree = work.tree
    changed: list[cst.CSTNode] = []
    for call in tree.calls:
        given = argument(call, 0, "device")
        if tree.method_called(call, "to") is None or given is None:
            continue
        for origin in work.flow.origins(given, tree.function(call)):
            made = origin.value
            if any(made is known for known in changed):
                continue
            if isinstance(made, cst.Integer):
                changed.append(made)
                work.replace(made, "LOCAL_RANK")
                work.done(made, f"device {made.value} became this rank's")
            elif (dotted(made) or "").rpartition(".")[2] in _NUMBER_NAMES:
                changed.append(made)
                work.undecided(
                    call,
                    f"`{tree.text(made)}` may be one device's number on all ranks: "
                    "pass LOCAL_RANK if it is a GPU's",
                )


def _visible(work: Work) -> None:
    """Remove lines that would make the same GPU visible to all ranks."""
    tree = work.tree
    for line in found(tree.module, cst.Assign):
        target = line.targets[0].target
        if (
            isinstance(target, cst.Subscript)
            and tree.full(target.value) == "os.environ"
            and "CUDA_VISIBLE_DEVICES" in tree.text(target)
        ):
            statement = tree.statement(line)
            alone = len(tree.block(statement).body) == 1
            work.remove(statement, alone=alone)
            work.done(
                line,
                f"`{tree.text(line)}` removed: it would put all ranks on one GPU. "
                "Choose GPUs in the launching shell",
            )


def _loads(work: Work, *, saves: bool) -> None:
    tree = work.tree
    for call in tree.calls:
        if tree.called(call) != "torch.load":
            continue
        if argument(call, 1, "map_location") is None:
            scope = tree.function(call)
            known = work.flow.assigned("device", scope)
            where = "device" if known else '"cpu"'
            if "self.device" in {dotted(a) for a in _attributes(work, call)}:
                where = "self.device"
            value = cst.Arg(
                keyword=cst.Name("map_location"),
                value=work.expression(where),
                equal=cst.AssignEqual(
                    whitespace_before=cst.SimpleWhitespace(""),
                    whitespace_after=cst.SimpleWhitespace(""),
                ),
            )
            work.change(call, partial(appended, argument=value))
            work.done(
                call, (f"loads to {where}, not to the device that it was saved from")
            )
        if saves and not work.is_guarded(call):
            work.before(tree.statement(call), work.barrier)
            work.done(call, "every rank waits here until rank 0 has written")


def _attributes(work: Work, call: cst.Call) -> list[cst.Attribute]:
    owner = work.tree.owner(work.tree.function(call))
    return [] if owner is None else list(found(owner, cst.Attribute))


def may_download(work: Work, call: cst.Call) -> bool:
    """Return whether a call makes a data set that may download its files."""
    download = arguments_of(call)[1].get("download")
    return download is not None and work.tree.text(download.value) != "False"


_ONE_DOWNLOADS = "the first rank of each host downloads, the others wait"


def _downloads(work: Work) -> None:
    tree = work.tree
    done: list[cst.CSTNode] = []
    for call in tree.calls:
        if not may_download(work, call):
            continue
        if any(tree.within(call, data) for data in work.hoisted):
            work.done(call, _ONE_DOWNLOADS)
            continue
        statement = tree.statement(call)
        if any(tree.within(statement, other) for other in done):
            continue
        if isinstance(statement, cst.SimpleStatementLine) and not isinstance(
            statement.body[0], cst.Return
        ):
            done.append(statement)
            work.under(statement, "with rank0_first()")
            work.done(call, _ONE_DOWNLOADS)
        else:
            work.undecided(
                call,
                (
                    "every rank may download here at the same time: download before "
                    "the run"
                ),
            )
