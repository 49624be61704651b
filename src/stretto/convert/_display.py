"""Make only rank 0 print, log and write files."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._bindings import Bindings
from stretto.convert._edit import theirs
from stretto.convert._folders import MadeFolders
from stretto.convert._tree import (
    OWN,
    argument,
    arguments_of,
    dotted,
    found,
    sets_names,
)

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._tree import ScriptTree

SAVES = (
    "torch.save",
    "numpy.save",
    "numpy.savez",
    "numpy.savetxt",
    "json.dump",
    "pickle.dump",
    "joblib.dump",
    "torchvision.utils.save_image",
    "matplotlib.pyplot.savefig",
    "matplotlib.pyplot.show",
    "shutil.copyfile",
    "shutil.copy",
    "os.makedirs",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.replace",
    "os.unlink",
    "os.rmdir",
    "os.symlink",
    "shutil.rmtree",
    "shutil.copy2",
    "shutil.copytree",
    "shutil.move",
    "numpy.savez_compressed",
    "scipy.io.savemat",
    "torch.jit.save",
    "safetensors.torch.save_file",
    "torchaudio.save",
    "torchvision.io.write_png",
    "torchvision.io.write_jpeg",
    "torchvision.io.write_video",
    "cv2.imwrite",
    "imageio.imwrite",
    "imageio.imsave",
    "imageio.mimsave",
    "matplotlib.pyplot.imsave",
    "torch.onnx.export",
    "torch.onnx.dynamo_export",
    "torch.export.save",
)
SAVING_METHODS = (
    "save_pretrained",
    "savefig",
    "to_csv",
    "to_json",
    "to_pickle",
    "to_parquet",
    "to_excel",
    "write_text",
    "mkdir",
    "write_bytes",
    "save",
    "save_weights",
    "save_model",
    "save_checkpoint",
    "tofile",
    "write_image",
    "write_html",
)
_STREAMS = tuple(
    f"sys.{stream}.{method}"
    for stream in ("stdout", "stderr")
    for method in ("write", "writelines")
)
_WRITERS = ("SummaryWriter", "CometLogger", "Experiment")
_OF_WRITERS = (
    "torch.utils.tensorboard.",
    "tensorboardX.",
    "comet_ml.",
    "test_tube.",
    "pytorch_lightning.loggers.",
    "lightning.",
)
"""Modules of such classes; one of another module may be anything."""
BARS = (
    "tqdm",
    "tqdm.tqdm",
    "tqdm.auto.tqdm",
    "tqdm.notebook.tqdm",
    "tqdm.trange",
    "tqdm.auto.trange",
)


_LOGGER = re.compile(r"^([A-Z]\w*)?(Logger|Writer)$|^Progress([A-Z]|$)")
"""Names of classes whose objects write files or print."""

_NOT_SHOWING = ("logging.", "csv.", "codecs.", "io.", "torch.")
"""Modules whose classes with such names are handled otherwise, or need no rank."""


OPENERS = ("open", "io.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open")
"""Functions that open the file of their first argument in the mode of the second."""

_MODE = re.compile(r"([rwaxbtU+]{1,4})([:|]\w*)?\Z")
"""A mode, also one of a tar file such as w:gz; no name of a file."""

_LOG_FILES = ("logging.FileHandler", "logging.handlers.RotatingFileHandler")
_SHOWS_LOGS = ("logging.basicConfig", "logging.StreamHandler")


def is_writer(tree: ScriptTree, call: cst.Call) -> bool:
    """Return whether a call makes a known object that writes a log."""
    module, dot, last = tree.called(call).rpartition(".")
    return last in _WRITERS and (not module or f"{module}{dot}".startswith(_OF_WRITERS))


def opens_for_writing(tree: ScriptTree, node: cst.BaseExpression) -> bool:
    """Return whether an expression opens a file for writing."""
    if not isinstance(node, cst.Call):
        return False
    full = tree.called(node)
    method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
    if full not in OPENERS and method != "open":
        return False
    positional, named = arguments_of(node)
    if "mode" in named:
        given = [named["mode"].value]
    else:  # a method gets the mode first, a function second, after the file's name
        given = positional[1:2] if full in OPENERS else positional[:2]
    modes = [
        found_mode[1]
        for mode in given
        if isinstance(mode, cst.SimpleString)
        and (found_mode := _MODE.match(str(mode.evaluated_value))) is not None
    ]
    return bool(modes) and any(letter in modes[-1] for letter in "wax+")


@final
class Display:
    """Printing, logging and files."""

    def __init__(self, work: Work) -> None:
        self._work, self._tree = work, work.tree
        self._folders = MadeFolders(work)
        self.saves = False

    def guard_files(self) -> None:
        """Make only rank 0 execute calls that write files."""
        for node in found(self._tree.module, cst.With):
            if any(opens_for_writing(self._tree, item.item) for item in node.items):
                self._guard_block(node)
        for call in self._tree.calls:
            full = self._tree.called(call)
            method = (
                call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            )
            if full in SAVES or (
                method in SAVING_METHODS and not self._work.flow.local(call)
            ):
                self._guard(call, full or method)
            elif full in (*_LOG_FILES, "logging.basicConfig"):
                self._log_file(call)
            elif full == "os.system" and not self._work.is_guarded(call):
                self._work.undecided(
                    call,
                    f"`{self._tree.text(call)[:50]}` runs on every rank: put it under "
                    "`if RANK == 0:` if it writes",
                )
            elif opens_for_writing(self._tree, call) and not self._work.is_guarded(
                call
            ):
                if call in self._work.written or self._write_on_rank_0(call):
                    continue
                self._work.undecided(
                    call,
                    f"`{self._tree.text(call)[:50]}` opens a file for writing on every "
                    "rank: put it and the code that writes to it under `if RANK == "
                    "0:`",
                )

    def _log_file(self, call: cst.Call) -> None:
        """Let other ranks than 0 log to a file without content."""
        place = -1 if self._tree.called(call) == "logging.basicConfig" else 0
        path = argument(call, place, "filename")
        if path is not None and not self._work.is_guarded(call):
            self._work.call_around(path, "rank0_file")
            self._work.done(call, "only rank 0 logs to this file")

    def _write_on_rank_0(self, call: cst.Call) -> bool:
        """Open an empty device on the other ranks; return whether that was possible.

        All ranks execute what computes the lines, so that numbers may be reduced there.
        """
        full = self._tree.called(call)
        path = argument(call, 0, "file" if full in ("open", "io.open") else "filename")
        mode = argument(call, 1, "mode")
        if (
            full not in OPENERS
            or path is None
            or mode is None
            or any(a.star for a in call.args)
            or any(c in self._tree.text(mode) for c in "x+")
        ):
            return False
        self._work.call_around(path, "rank0_file")
        self._work.written.add(call)
        self._work.done(
            call,
            f"only rank 0 writes to {self._tree.text(path)[:50]}; what the other ranks "
            "write there is discarded",
        )
        return True

    @cached_property
    def _bindings(self) -> Bindings:
        return Bindings(self._tree, self._work.flow)

    def _guard_block(self, node: cst.With) -> None:
        in_all = any(
            self._tree.within(b, node) for b in self._work.job.backwards
        ) or self._evaluates(node, set())
        read = None if in_all else self._bindings.read_outside(node)
        if in_all or read is not None:
            opened = [
                item.item
                for item in node.items
                if opens_for_writing(self._tree, item.item)
            ]
            if all(
                isinstance(c, cst.Call) and self._write_on_rank_0(c) for c in opened
            ):
                return
            self._work.undecided(
                node,
                "a file is open for writing on every rank during a loop over batches: "
                "open it under `if RANK == 0:`, or in another place"
                if read is None
                else "a file is open for writing on every rank, because the block sets "
                f"`{read}` for other lines: open the file under `if RANK == 0:` and "
                f"set `{read}` on all ranks before",
            )
            return
        self._work.on_rank_0(node)
        self._work.done(node, "only rank 0 writes this file")

    def _guard(self, call: cst.Call, what: str) -> None:
        self.saves = self.saves or what == "torch.save" or what == "save_pretrained"
        if self._work.is_guarded(call):
            return
        small = self._tree.parent(call)
        if not isinstance(small, cst.Expr):
            self._work.undecided(
                call,
                f"`{what}` writes on every rank here, where its value is also used: "
                "put it under `if RANK == 0:`",
            )
            return
        if self._folders.made_by_all(call):
            return
        if self._evaluates(call, set()) or sets_names(call):
            self._call_on_rank0(call)
        else:
            self._work.on_rank_0(self._tree.statement(small))
        self._folders.wait_after(call)
        self._work.done(call, f"only rank 0 calls {what}")

    def _call_on_rank0(self, call: cst.Call) -> None:
        """Call a function on rank 0, and on others one that does nothing.

        All ranks compute the function and its arguments.
        """
        nothing = cst.Element(self._work.expression("OnRank0()"))
        others = cst.SubscriptElement(cst.Index(self._work.expression("RANK > 0")))
        self._work.change(
            call.func,
            lambda new: cst.Subscript(cst.Tuple([cst.Element(new), nothing]), [others]),
        )

    def _evaluates(self, node: cst.CSTNode, seen: set[int]) -> bool:
        """Return whether code goes through batches, which all ranks must do."""
        batches = self._work.job.batches
        for call in found(node, cst.Call):
            if self._tree.method_called(call, "eval") is not None and not call.args:
                return True
            for function in self._work.flow.local(call):
                if id(function) not in seen:
                    seen.add(id(function))
                    if self._evaluates(function.body, seen):
                        return True
        return any(
            batches.loop(loop) is not None
            for loop in found(node, cst.BaseCompoundStatement)
            if isinstance(loop, cst.For | cst.While)
        ) or any(
            batches.sources(inner.iter, self._tree.function(inner))
            for inner in found(node, cst.CompFor)
        )

    def convert(self) -> None:
        """Make only rank 0 show output."""
        count = 0
        for call in self._tree.calls:
            full = self._tree.called(call)
            last = full.rpartition(".")[2]
            own = full == f"{OWN}print" and isinstance(
                self._tree.parent(call), cst.Expr
            )
            if full == "print" or own:
                # Leave a file that is rank 0's own, or a rank that is guarded already.
                if not self._work.is_guarded(call):
                    self._work.replace(call.func, "print0")
                    count += 1
            elif isinstance(call.func, cst.Attribute) and (
                full in _STREAMS or self._is_of_bar(call.func)
            ):
                if not self._work.is_guarded(call):
                    self._stream(call, call.func)
            elif full in BARS and "disable" not in arguments_of(call)[1]:
                self._work.add_argument(call, "disable", "RANK != 0")
                self._work.done(call, "only rank 0 shows the progress bar")
            elif full == "wandb.init" and "mode" not in arguments_of(call)[1]:
                self._work.add_argument(
                    call, "mode", 'None if RANK == 0 else "disabled"'
                )
                self._work.done(call, "only rank 0 logs to wandb")
            elif is_writer(self._tree, call):
                self._writer(call)
            elif self._shows(call):
                self._call_on_rank0(call)
                self._work.done(call, f"only rank 0 calls {last}")
            elif full == "input":
                self._work.undecided(call, "every rank waits for input here")
            else:
                self._logger(call)
        for name in self._printers():
            self._work.replace(name, "print0")
            self._work.done(name, "`print` became print0, which prints on rank 0")
        if count:
            self._work.done(
                None, f"{count} print calls became print0, which prints on rank 0"
            )

    def _of_another_file(self, call: cst.Call) -> bool:
        """Return whether the script does not define what is called."""
        full = self._tree.called(call)
        return not (
            self._work.is_guarded(call)
            or self._work.flow.local(call)
            or self._tree.own_class(call) is not None
            or full.startswith(_NOT_SHOWING)
        )

    def _logger(self, call: cst.Call) -> None:
        """Make another file's object that writes or shows on rank 0 only."""
        last = self._tree.called(call).rpartition(".")[2]
        if not _LOGGER.search(last) or not self._of_another_file(call):
            return
        above = self._tree.parent(call)
        path = dotted(above.targets[0].target) if isinstance(above, cst.Assign) else ""
        if path and all(self._is_only_called(n) for n in self._named(path)):
            self._writer(call)
            return
        self._work.undecided(
            call,
            f"`{self._tree.text(call)[:50]}` of another file may write or print on "
            "every rank, and its value is used: make only rank 0 write there",
        )

    def _named(self, path: str) -> list[cst.Name | cst.Attribute]:
        """Return where an object is named, except where it is assigned."""
        return [
            node
            for node in found(self._tree.module, cst.BaseExpression)
            if isinstance(node, cst.Name | cst.Attribute)
            and dotted(node) == path
            and not self._tree.is_label(node)
            and not isinstance(self._tree.parent(node), cst.AssignTarget | cst.NameItem)
        ]

    def _is_only_called(self, node: cst.Name | cst.Attribute) -> bool:
        """Return whether a statement calls an object's method, whose value is lost."""
        func = self._tree.parent(node)
        if isinstance(func, cst.Attribute) and func.attr is node:
            return True  # the name of something else
        call = self._tree.parent(func) if isinstance(func, cst.Attribute) else None
        return (
            isinstance(call, cst.Call)
            and call.func is func
            and isinstance(self._tree.parent(call), cst.Expr)
        )

    def _shows(self, call: cst.Call) -> bool:
        """Return whether a statement calls another file's function that prints."""
        if not isinstance(self._tree.parent(call), cst.Expr):
            return False
        last = (
            call.func.attr.value
            if isinstance(call.func, cst.Attribute)
            else dotted(call.func) or ""
        )
        words = [w.lower() for w in re.split(r"_|(?<=[a-z])(?=[A-Z])", last) if w]
        bar = "progressbar" in words or {"progress", "bar"} <= set(words)
        named = bar or words[:1] in (["print"], ["pprint"])
        return named and self._of_another_file(call)

    def _is_of_bar(self, func: cst.Attribute) -> bool:
        """Return whether a method prints past a bar, also one that is not shown."""
        if func.attr.value != "write":
            return False
        made = self._work.flow.origins(func.value, self._tree.function(func))
        return self._tree.full(func.value) in BARS or any(
            isinstance(o.value, cst.Call) and self._tree.called(o.value) in BARS
            for o in made
        )

    def _printers(self) -> list[cst.Name]:
        """Return where `print` itself is a value, as in ``trace_func=print``."""
        names = [n for n in found(self._tree.module, cst.Name) if n.value == "print"]
        called = {id(call.func) for call in self._tree.calls}
        values = []
        for name in names:
            above = self._tree.parent(name)
            bound = (
                getattr(above, "target", None)
                if isinstance(above, cst.AssignTarget | cst.NamedExpr | cst.AnnAssign)
                else getattr(above, "name", None)
                if isinstance(above, cst.FunctionDef | cst.AsName | cst.Param)
                else None
            )
            if bound is name:
                return []  # the script has its own
            if id(name) in called or self._tree.is_label(name):
                continue
            if not self._work.is_guarded(name):
                values.append(name)
        return values

    def _stream(self, call: cst.Call, func: cst.Attribute) -> None:
        own = theirs(self._tree.text(func.value))
        self._work.replace(func.value, f"({own} if RANK == 0 else OnRank0())")
        name = self._tree.full(func.value) or self._tree.text(func.value)
        self._work.done(call, f"only rank 0 writes to {name}")

    def _writer(self, call: cst.Call) -> None:
        here, instead = (
            self._work.expression("RANK == 0"),
            self._work.expression("OnRank0()"),
        )
        if sets_names(call):
            self._call_on_rank0(call)
        else:
            self._work.change(
                call, lambda new: cst.IfExp(test=here, body=new, orelse=instead)
            )
        self._work.done(call, f"only rank 0 has a {self._tree.called(call)}")

    def logs(self) -> cst.CSTNode | None:
        """Return the first statement that lets the script's log be shown."""
        shown = [c for c in self._tree.calls if self._tree.called(c) in _SHOWS_LOGS]
        if not shown:
            return None
        if self._tree.imported.get("logging") == "logging":
            return self._tree.statement(shown[0])
        self._work.undecided(
            shown[0],
            "each rank shows its log: put `logging.disable(logging.WARNING)` under "
            "`if RANK > 0:`",
        )
        return None
