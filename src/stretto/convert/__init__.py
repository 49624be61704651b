"""Turn training code for one device into distributed code, by its syntax tree.

    conversion = convert_source(text, name="train.py", choices=Choices())
    print(conversion.diff(), conversion.listed())

The conversion refuses code that it does not understand, with a line and a next step,
and lists what it could not decide. It keeps formatting and comments. Nothing here
imports torch. It needs LibCST, which the extra ``stretto[convert]`` installs.
"""

from stretto.errors import MissingPackage

try:
    import libcst as _libcst  # noqa: F401 - only to say what is missing
except ModuleNotFoundError as error:
    raise MissingPackage(
        "converting scripts needs LibCST, which is not installed: "
        'pip install "stretto[convert]"',
        name="libcst",
    ) from error

from stretto.convert._memory import (
    conversion_to_run,
    open_questions,
    run_converted,
)
from stretto.convert._notebook import (
    convert_bytes,
    convert_notebook,
    script_of_notebook,
)
from stretto.convert._result import (
    Choices,
    Conversion,
    Evaluation,
    Kind,
    Note,
    Target,
)
from stretto.convert._script import convert_source

__all__ = [
    "Choices",
    "Conversion",
    "Evaluation",
    "Kind",
    "Note",
    "Target",
    "conversion_to_run",
    "convert_bytes",
    "convert_notebook",
    "convert_source",
    "open_questions",
    "run_converted",
    "script_of_notebook",
]
