"""The command line: one module per command, imported when the command is called.

- `_main`: the group of commands, and exit codes.
- `profile`, `probe`, `plan`, `compare`, `simulate`, `run`, `report`, `replay`, `tune`,
  `convert`, `demo`, `lab`, `doctor`, `zoo`, `reproduce`, `burst`, `cluster`: one
  command each. `burst` has `_burst_background`, `_burst_profile` and `_burst_scale`;
  `cluster` has `_cluster_engine`, `_cluster_jobs`, `_cluster_simulate` and
  `_cluster_options`; `doctor` has `_machine`; `run` has `_elastic` and
  `_rank_options`; `demo` and `lab` have `_lab_options`.
- `_planning`: options and output of the planning commands; `_outputs`: checks of output
  files, and ``-o PLAN``; `_programs`: errors of a user's program; `_ranks`: commands
  that run on every rank; `_tables`: aligned columns; `_values`: types of options.
"""

from stretto.cli._main import main

__all__ = ["main"]
