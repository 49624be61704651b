"""The command line: one module per command, imported when the command is called.

- `_main`: the group of commands, and exit codes (for `__main__`, and programs).
- `profile`, `probe`, `plan`, `compare`, `simulate`, `run`, `report`, `replay`, `tune`,
  `convert`, `demo`, `lab`, `doctor`, `zoo`, `reproduce`, `burst`, `cluster`: one
  command each (for `_main`).

Parts of one command:

- `_burst_profile`: ``stretto burst profile`` (for `burst`).
- `_burst_scale`: ``stretto burst scale`` (for `burst`).
- `_burst_background`: output of ``stretto burst plan --collocation`` (for `burst`).
- `_cluster_engine`: ``stretto cluster start``, ``down`` and ``status`` (for `cluster`).
- `_cluster_jobs`: commands of ``stretto cluster`` about jobs (for `cluster`).
- `_cluster_simulate`: ``stretto cluster simulate`` (for `cluster`).
- `_cluster_options`: options of these commands (for `_cluster_engine` and
  `_cluster_jobs`).
- `_machine`: checks of interfaces, NCCL, MPS and limits (for `doctor`).
- `_elastic`: ``stretto run --elastic`` (for `run`).
- `_rank_options`: options that are checked once, instead of on each rank (for
  `_elastic` and `run`).
- `_lab_options`: options of the commands that build an emulated cluster (for `demo` and
  `lab`).

Shared by commands:

- `_planning`: options and output of the planning commands (shared, for instance by
  `simulate` and `compare`).
- `_outputs`: checks of output files, and ``-o PLAN`` (shared, for instance by `zoo` and
  `burst`).
- `_programs`: errors of a user's program (for `_burst_profile` and `profile`).
- `_ranks`: commands that run on every rank (for `probe` and `replay`).
- `_tables`: aligned columns (shared, for instance by `_burst_scale` and
  `_cluster_jobs`).
- `_values`: types of options (shared, for instance by `_planning` and
  `_cluster_engine`).
"""

from stretto.cli._main import main

__all__ = ["main"]
