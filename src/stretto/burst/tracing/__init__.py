"""Convert a module to operations, and operations to layers.

`operations.trace` records a module and returns its operations as a graph;
`layers.LayerGraph` holds the layers that `grouping` makes of them. Unless a line says
otherwise, a file is imported by `operations`.

A recording:

- `recorder`: the operations of one forward, on tensors without values (shared, for
  instance by `recordings` and `operations`).
- `patching`: route calls of modules and functions through it (shared, for instance by
  `rerun` and `operations`).
- `settings`: refuse changes of modes and of values that PyTorch's modules read (shared,
  for instance by `patching` and `recordings`).
- `records`: what a recording consists of (shared, for instance by `aligning` and
  `recorder`).
- `source_lines`: the lines of the user's code (shared, for instance by `recorder` and
  `operations`).
- `addresses`: refuse code that asks which memory a tensor has (for `recorder` and
  `trial`).
- `around`: modes and hooks around a call (shared, for instance by `recorder` and
  `proof`).
- `questions`: what code does with its rank, or the seed (for `recorder` and `proof`).
- `writes`: which writes of a forward are refused, and why (for `recorder`).
- `views`: writes in place through a view of another tensor (for `recorder`).
- `torch_modules`: kinds of modules that are treated in ways of their own (shared, for
  instance by `recorder` and `forward`).
- `copied_norms`: batch norms of the user's that repeat torch's (for `recorder`,
  `recordings` and `build`).
- `inner_calls`: operators in operations, and which of them read other samples (for
  `recorder`, `records` and `build`).
- `fakes`: tensors without values, in place of parameters and buffers, and which tensors
  share memory (shared, for instance by `recorder` and `recordings`).
- `constant_values`: values of constants, by which forward's code may decide (for
  `fakes`).
- `reads`: the plain state that forward reads, to detect a change of it (shared, for
  instance by `executor` and `captures`).
- `rerun`: run forward's code again before each step, and compare its calls (for
  `classify` and `recorder` too).
- `watching`: compare that state before each step (for `reads` and `classify`).
- `freezing`: copies of plain state that can be compared later (shared, for instance by
  `watching` and `reads`).
- `packing`: several inputs or outputs in one tensor (shared, for instance by
  `operations` and `classify`).
- `output_memory`: outputs that are views of other ones or of inputs.
- `caches`: find and undo what forward keeps outside of the call (shared, for instance
  by `recordings` and `package_holders`).
- `cache_search`: search holders, the containers and objects in which it may keep that
  (for `recordings`).
- `package_holders`: holders in installed packages, searched once (for `cache_search`).
- `plain_state`: changes of plain values that forward makes (for `recordings` and
  `call_history`).
- `cached_values`: compare what is cached later with what layers compute (shared, for
  instance by `recordings` and `captures`).

Two recordings:

- `operations`: `trace`, the way from a module to its operations (for `burst.graph`).
- `recordings`: both recordings, with forward's changes undone (shared, for instance by
  `operations` and `call_history`).
- `call_history`: require that a call does the same whatever calls came before.
- `without_constants`: recordings without operations on constants (for
  `call_history`).
- `aligning`: pair their operations, without calls that only change a memory layout
  (for `call_history`, `comparing` and `recordings`).
- `comparing`: sizes that follow the batch (shared, for instance by `recordings` and
  `classify`).
- `ordering`: an order of fixed operations that all processes share.
- `build`: a graph from both recordings (for `classify` too).
- `names`: names of what the graph holds (for `build` and `grouping`).
- `classify`: which operations depend on the input, and have a row for each sample
  (for `grouping` and `layers` too).

What can't be split over samples or ranks:

- `sample_positions`: operations that depend on a sample's position in the batch
  (shared, for instance by `classify` and `grouping`).
- `own_rows`: computed indexes into the batch, checked at each step (for `build`,
  `other_values` and `proof`).
- `tables`: batch norms whose values do not come from the samples.
- `replaced`: functions and forwards of PyTorch that the program has replaced (shared,
  for instance by `recorder` and `trial`).
- `custom_backward`: layers whose backward is not torch's own (for `proof`).
- `backward_reads`: what such backwards read and change (for `proof` and
  `burst.checks`).
- `proven`: what a check by computing depends on (for `classify`, `proof` and
  `burst.backward_pass`).
- `overlap`: tensors that share memory (for `grouping` and `burst.checks` too).
- `behavior`: what a module computes, as a number that ranks compare (for `proof` and
  `burst.forward_exchange`).
- `failing_backward`: the line of forward whose backward fails (for `proof`).

Layers:

- `grouping`: group operations, and make each group a module (for `layers` and
  `burst.graph`).
- `output_parameters`: the parameters from which each output is computed.
- `graph_reach`: those that an output's autograd graph reaches (for `proof`).
- `layers`: `LayerGraph` and `LayerNode` (shared, for instance by `schedule` and
  `profiling.layer_profile`).
- `gradient_rounding`: by how much rounding changes gradients (for `proof`).
- `proof`: compute the layers: they equal the model and keep rows apart (for
  `burst.graph` and `burst.checks`).
- `dropout_rows`: a row for each sample before a dropout (for `build`, `recorder` and
  `proof`).
- `equal_layers`: layers that compute the same, of which some are checked (for
  `proof`).
- `layer_runs`: run layers alone (shared, for instance by `proof` and `behavior`).
- `one_row`: norms on a rank with one row (for `layer_runs`, `burst.forward` and
  `burst.norm`).
- `trial`: random rows, perturbed parameters and constant draws (shared, for instance by
  `proof` and `checks.verify_first_step`).
- `other_values`: run operations with values that a layer rarely has (for `proof`).
"""
