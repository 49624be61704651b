"""Turn training code for one device into distributed code, by its syntax tree.

    conversion = convert_source(text, name="train.py", choices=Choices())
    print(conversion.diff(), conversion.listed())

The conversion refuses code that it does not understand, with a line and a next step,
and lists what it could not decide. It keeps formatting and comments. Nothing here
imports torch. It needs LibCST, which the extra ``stretto[convert]`` installs.

- `_script` orders the stages, `_result` holds choices and results. `_reading`,
  `_notebook` and `_split` read files; `_memory` runs a converted script.
  `_comprehensions` writes those that train as ``for`` statements.
- `_tree` answers queries on the syntax, `_flow` where values come from, `_shown` which
  are only shown, `_calls` which functions are called, `_branches` which branches are
  taken, `_graph_names` where gradients flow, `_views` what sees a wrapped model.
  `_edit` collects edits.
- `_job` is what takes part in training: `_trained_models` finds optimizers (with
  `_optimizers`) and their models (with `_parameter_owners` and `_modules`),
  `_batch_loops` the loops and their loaders (with
  `_step_calls`).
- Stages, which `_script` calls: `_models`, `_unwrapping` and `_second_backward` (the
  model), `_loaders`, `_batch`, `_loader_sizes`, `_passes` and `_whole_passes` (its
  data), `_numbers`, `_sample_loops` and `_rank_values` (numbers of one rank),
  `_replicas` (what makes models differ), `_display`, `_file_names` and `_file_reads`
  (output and files), `_device`, `_setup` and `_support` (the ranks, and inserted
  functions), and `_advice`.
- Parts of one stage: `_display` has `_folders`; `_batch` has `_batch_names`, with
  `_bindings` (which lines set what another one reads). `_models` has `_part_names`,
  `_free_tensors`, `_held_models`, `_buffers`, `_freezing`, `_unused` and `_prepared`;
  `_rank_values` has `_rank_value_notes`. `_replicas` has `_changed_parameters`,
  `_gradient_hooks`, `_rank_settings` and `_rank_decisions`, which `_rank_sources`,
  `_trained_parts` and `_replica_notes` serve.

Shared by stages:

- `_loop_sums`: what a loop adds up (for `_numbers`, `_sample_loops` and
  `_whole_passes`).
- `_classify`: whether a rank's number is a mean over its samples, or a sum (for
  `_numbers` and `_rank_values`).
- `_losses`: whether a loss is a mean over samples, or a sum (for `_numbers` and
  `_classify`).
- `_divided`: loops over loaders that are divided among ranks (for `_rank_values` and
  `_loader_sizes`).
- `_collate`: a ``collate_fn`` that makes batches of uneven parts (for `_loaders` and
  `_proof`).

Beside the stages:

- `_proof` shows which losses are means over samples, by computing with values that say
  how a number depends on a batch.
- `_horovod` and `_already_distributed` convert scripts that are distributed already.
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
