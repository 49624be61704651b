"""Parse a file's bytes to a syntax tree, or refuse it with one clear error."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import warnings

import libcst as cst

from stretto.convert._tree import ScriptTree
from stretto.errors import SpecError

_PYTHON_2 = re.compile(
    r"^\s*(?:print\s+[\"'\w]|exec\s+[\"']|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+:)",
    re.MULTILINE,
)

_OTHER_FRAMEWORKS = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "Keras",
    "jax": "JAX",
    "flax": "JAX",
    "optax": "JAX",
    "haiku": "JAX",
    "equinox": "JAX",
    "mxnet": "MXNet",
    "caffe": "Caffe",
    "caffe2": "Caffe",
    "paddle": "Paddle",
}

_WAYS_OUT = {
    "TensorFlow": "train with stretto.horovod.tensorflow, see docs/how-to/keras.md",
    "Keras": "pass stretto.keras.DistributedOptimizer, see docs/how-to/keras.md",
    "JAX": "use stretto.jax.value_and_grad, see docs/how-to/jax.md",
    "MXNet": "move the model to PyTorch, Keras or JAX first: MXNet is retired",
    "Caffe": "move the model to PyTorch, Keras or JAX first: Caffe is retired",
}
"""Steps to do by hand; other libraries have none."""

_DISTRIBUTED = {
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "pytorch_lightning": "Lightning",
    "lightning": "Lightning",
    "fastai": "fastai",
    "ignite.distributed": "Ignite",
    "ray.train": "Ray",
    "byteps": "BytePS",
    "fairscale": "FairScale",
    "torch.distributed.fsdp": "FSDP",
}

_OWN_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.")


_OF_MODULES = ("__file__", "__path__", "__cached__", "__builtins__", "__annotations__")
"""Names that Python sets in a module, beside those of the module of built-ins."""


def decoded(data: bytes, name: str) -> str:
    """Return the text of a file.

    Raises:
        SpecError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data[: exc.start].count(b"\n") + 1
        raise SpecError(
            f"{name}:{line}: a script must be UTF-8, got the byte "
            f"0x{data[exc.start]:02x}: save it as UTF-8 and convert again"
        ) from exc


def compiles(source: str, name: str) -> None:
    """Raise a SyntaxError if a text is not Python; notebooks may await anywhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(
            source,
            name,
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )


def undefined(source: str, name: str) -> set[str]:
    """Return the names that a script reads and that nothing in it sets or imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = symtable.symtable(source, name, "exec")
    read, made = set[str](), {*dir(builtins), *_OF_MODULES}
    waiting = [module]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table is module:
                if symbol.is_assigned() or symbol.is_imported():
                    made.add(symbol.get_name())
                if symbol.is_referenced():
                    read.add(symbol.get_name())
    return read - made


def parsed(source: str, name: str) -> ScriptTree:
    """Return the tree of a script.

    Raises:
        SpecError: it is not Python 3, or not PyTorch code for a single device.
    """
    try:
        compiles(source, name)
        tree = ScriptTree(cst.parse_module(source))
    except SyntaxError as exc:
        if _PYTHON_2.search(source):
            raise SpecError(
                f"{name}:{exc.lineno}: this is Python 2 ({exc.msg}): convert it to "
                "Python 3 first, for instance with 2to3"
            ) from exc
        # A null byte has no line.
        place = f"{name}:{exc.lineno}" if exc.lineno else name
        raise SpecError(
            f"{place}: syntax error: {exc.msg}: stretto converts only scripts that "
            "Python can parse"
        ) from exc
    except (ValueError, cst.ParserSyntaxError) as exc:
        raise SpecError(f"{name}: cannot be parsed: {exc}") from exc
    return tree


def check_framework(tree: ScriptTree, name: str) -> None:
    """Refuse scripts that do not use PyTorch, or handle several devices themselves.

    Raises:
        SpecError: the script is one of these.
    """
    imports = _import_lines(tree)
    for module, line in imports:
        first = module.partition(".")[0]
        if first in _OTHER_FRAMEWORKS:
            framework = _OTHER_FRAMEWORKS[first]
            message = (
                f"{name}:{line}: imports {module}, but {framework} is not supported: "
                "stretto converts only PyTorch training code"
            )
            if framework in _WAYS_OUT:
                message += f". By hand, {_WAYS_OUT[framework]}"
            raise SpecError(message)
        for known, title in _DISTRIBUTED.items():
            if module == known or module.startswith(known + "."):
                raise SpecError(
                    f"{name}:{line}: imports {module}: {title} distributes the "
                    "training already, so there is nothing to convert. Start it with "
                    "`stretto run`, which replaces the DDP that it uses by stretto's"
                )
        if module.startswith(_OWN_TRAINERS):
            raise SpecError(
                f"{name}:{line}: {module} distributes the training itself: start the "
                f"script unchanged, as `stretto run --nproc-per-node N {name}`"
            )
    if not any(module.partition(".")[0] == "torch" for module, _ in imports):
        raise SpecError(
            f"{name}: does not import torch, so it contains no PyTorch training: give "
            "the file that contains the training loop"
        )


def _import_lines(tree: ScriptTree) -> list[tuple[str, int]]:
    out = []
    for node in ast.walk(ast.parse(tree.module.code)):
        if isinstance(node, ast.Import):
            out += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out += [(f"{node.module}.{a.name}", node.lineno) for a in node.names]
    return sorted(out, key=lambda found: found[1])
