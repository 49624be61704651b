"""Turn training code for one device into distributed code, by its syntax tree.

    conversion = convert_source(text, name="train.py", choices=Choices())
    print(conversion.diff(), conversion.listed())

The conversion refuses code that it does not understand, with a line and a next step,
and lists what it could not decide. It keeps formatting and comments. Nothing here
imports torch. It needs LibCST, which the extra ``stretto[convert]`` installs.

The whole:

- `_script`: the order of the stages (for `_memory` and `_notebook`, and programs).
- `_result`: choices and results (shared, for instance by `_already_distributed` and
  `_notebook`).
- `_memory`: run a converted script in memory (for `cli.run` and `script`, and
  programs).
- `_reading`: a file's bytes as a syntax tree (for `_memory`, `_notebook` and
  `_script`).
- `_notebook`: the cells of a notebook as one script (for `cli.convert` and `_memory`,
  and programs).
- `_split`: one statement on each line (for `_edit` and `_script`).
- `_comprehensions`: comprehensions that train as ``for`` statements (for `_batch_loops`
  and `_script`).
- `_already_distributed`: convert Horovod's scripts and DDP's (for `_script`).
- `_horovod`: wrap the optimizers of Horovod's (for `_advice` and `_script`).

Queries on the script:

- `_tree`: its syntax (shared, for instance by `_models` and `_rank_values`).
- `_edit`: edits, and the state that stages share (shared, for instance by `_loaders`
  and `_script`).
- `_parentheses`: parentheses around inserted expressions (for `_edit`, `_numbers` and
  `_split`).
- `_flow`: where values come from (shared, for instance by `_batch_loops` and
  `_trained_models`).
- `_shown`: which values are only shown (for `_batch`, `_loader_sizes` and `_numbers`).
- `_calls`: which functions are called (for `_edit`).
- `_branches`: which branches are taken (for `_losses`).
- `_graph_names`: where gradients flow (for `_edit`).
- `_views`: what sees a wrapped model (for `_models`).

What takes part in training:

- `_job`: all of it: models, optimizers, loops and loaders (for `_script`).
- `_trained_models`: optimizers and the models that they train (for `_job` and
  `_script`).
- `_optimizers`: calls that make optimizers (for `_free_tensors`, `_horovod` and
  `_trained_models`).
- `_parameter_owners`: whose parameters an expression has (for `_trained_models`).
- `_modules`: modules that contain trained ones (for `_parameter_owners` and
  `_part_names`).
- `_batch_loops`: loops over batches, and their loaders (shared, for instance by
  `_divided` and `_held_models`).
- `_step_calls`: calls of training functions that do not train (for `_batch_loops` and
  `_passes`).

Stages for the model:

- `_models`: wrap the trained models (shared, for instance by `_passes` and `_script`).
- `_part_names`: refuse checkpoints of a part of a wrapped module (for `_models`).
- `_free_tensors`: refuse trained tensors outside of modules (for `_models`).
- `_held_models`: refuse training through a container of the unwrapped model (for
  `_models`).
- `_buffers`: find models with buffers (for `_models`).
- `_freezing`: find parameters frozen after wrapping (for `_models`).
- `_unused`: find parameters that may get no gradient (for `_models`).
- `_prepared`: find whether a forward prepares each backward (for `_models`).
- `_unwrapping`: give code the module inside of the wrapper (for `_rank_value_notes` and
  `_script`).
- `_second_backward`: refuse gradients that DDP would exchange only in part (for
  `_script`).

Stages for its data:

- `_loaders`: divide the loaders (for `_script`).
- `_containers`: what is put into lists and dicts (for `_batch_loops`).
- `_untaken`: loaders whose batches are taken in a way not followed (for `_script`).
- `_batch`: where a step relies on the batch size (for `_loaders` and `_script`).
- `_batch_names`: which numbers are the batch size of all ranks (for `_batch`).
- `_number_forms`: what a number is computed from (for `_batch_names`).
- `_bindings`: which lines set the value that another line reads (for `_display` and
  `_number_forms`).
- `_held_tensors`: which calls make what attributes and containers hold (for `_batch`).
- `_sample_draws`: random numbers that all ranks draw for their samples (for `_script`).
- `_loader_sizes`: sizes that a script reads from a loader (for `_script`).
- `_passes`: loops that train in some passes only (for `_loaders`, `_numbers` and
  `_script`).
- `_whole_passes`: keep loaders whole outside of training steps (for `_script`).
- `_divided`: loops over divided loaders (for `_rank_values` and `_loader_sizes`).
- `_collate`: a ``collate_fn`` that makes batches of uneven parts (for `_loaders` and
  `_proof`).

Stages for numbers of one rank:

- `_numbers`: replace them by those of all ranks (for `_script`).
- `_sample_loops`: loops over samples that add up losses (for `_script`).
- `_rank_values`: follow values of a rank's own samples (for `_script`).
- `_rank_value_notes`: list where they are shown or combined (for `_rank_values`).
- `_loop_sums`: what a loop adds up (shared, for instance by `_numbers` and
  `_rank_values`).
- `_classify`: whether a rank's number is a mean over its samples, or a sum (for
  `_numbers` and `_rank_values`).
- `_losses`: whether a loss is a mean over samples, or a sum (for `_numbers` and
  `_classify`).
- `_proof`: which losses are means over samples, by computing with values that say how
  a number depends on a batch.

Stages for what makes models of ranks differ:

- `_replicas`: list it all (for `_script`).
- `_changed_parameters`: changes of parameters and gradients (for `_replicas`).
- `_gradient_hooks`: uses of gradients before the exchange (for `_replicas`).
- `_rank_settings`: settings, seeds and data (for `_replicas`).
- `_rank_decisions`: decisions by which ranks would take unequal steps (for
  `_replicas`).
- `_rank_sources`: random numbers, clocks and new modules (shared, for instance by
  `_replicas` and `_setup`).
- `_trained_parts`: expressions that are parts of trained models (for `_replica_notes`
  and `_replicas`).
- `_replica_notes`: facts about the ranks' models (for `_changed_parameters`,
  `_rank_settings` and `_replicas`).

Stages for output, files and ranks:

- `_display`: only rank 0 prints, logs and writes (shared, for instance by `_file_names`
  and `_rank_values`).
- `_folders`: make folders on all ranks (for `_display`).
- `_file_names`: equal names of files on all ranks (for `_script`).
- `_file_reads`: reads of a file after rank 0 has written it (for `_script`).
- `_device`: a device for each rank (for `_loaders`, `_script` and `_setup`).
- `_setup`: insert the ranks and the end of the group (for `_file_names`, `_folders`
  and `_script`).
- `_support`: the functions that a script is given (for `_edit`, `_script` and
  `_setup`).
- `_advice`: notes that only a person can decide (for `_script`).
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
