"""Convert a module to operations, and operations to layers.

`operations.trace` records a module and returns its operations as a graph;
`layers.LayerGraph` holds the layers that `grouping` makes of them. Unless a line says
otherwise, `operations` uses what a file defines.

A recording:

- `recorder`: the operations of one forward, on tensors without values.
- `patching`: route calls of modules and functions through it (for `recorder` too).
- `settings`: refuse changes of modes and of values that PyTorch's modules read (for
  `patching`, `recorder` and `recordings`).
- `records`: what a recording consists of (for `recorder` too).
- `source_lines`: the lines of the user's code (for `recorder` too).
- `addresses`: refuse code that asks which memory a tensor has (for `recorder` and
  `trial`).
- `around`: modes and hooks around a call (for `recorder`, `reads`, `backward_reads`,
  `custom_backward`, `proof` and `proven`).
- `questions`: what code does with its rank, or the seed (for `recorder` and `proof`).
- `writes`: which writes of a forward are refused, and why (for `recorder`).
- `views`: writes in place through a view of another tensor (for `recorder`).
- `torch_modules`: kinds of modules that are treated in ways of their own (for
  `recorder`, `layers`, and files of `burst`).
- `copied_norms`: batch norms of the user's that repeat torch's (for `recorder`,
  `recordings` and `build`).
- `inner_calls`: operators in operations, and which of them read other samples (for
  `recorder` and `build`).
- `fakes`: tensors without values, in place of parameters and buffers (for `recorder`
  and `recordings`), and which tensors share memory.
- `reads`: the plain state that forward reads, to detect a change of it.
- `rerun`: run forward's code again before each step, and compare its calls (for
  `recorder` and `operations`).
- `watching`: compare that state before each step (for `reads` and `classify`).
- `freezing`: copies of plain state that can be compared later (for `watching`, `reads`
  and `caches`).
- `packing`: several inputs or outputs in one tensor.
- `output_memory`: outputs that are views of other ones or of inputs.
- `caches`: find and undo what forward keeps outside of the call (for `recordings`,
  `classify`, `layers` and `proof`).
- `cache_search`: search the places in which it may keep that (for `recordings`).
- `package_holders`: those in installed packages, searched once (for `cache_search`).
- `plain_state`: changes of plain values that forward makes (for `recordings` and
  `call_history`).
- `cached_values`: compare what is cached later with what layers compute.

Two recordings:

- `operations`: `trace`, the way from a module to its operations (for `burst.graph`).
- `recordings`: both recordings, with forward's changes undone.
- `call_history`: require that a call does the same whatever calls came before.
- `aligning`: pair their operations, without calls that only change a memory layout
  (for `comparing` and `recordings`).
- `comparing`: sizes that follow the batch.
- `ordering`: an order of fixed operations that all processes share.
- `build`: a graph from both recordings.
- `names`: names of what the graph holds (for `build` and `grouping`).
- `classify`: which operations depend on the input, and have a row for each sample.

What can't be split over samples or ranks:

- `sample_positions`: operations that depend on a sample's position in the batch.
- `own_rows`: computed indexes into the batch, checked at each step (for `build` and
  `proof`).
- `tables`: batch norms whose values do not come from the samples.
- `custom_backward`: layers whose backward is not torch's own (for `proof`).
- `backward_reads`: what such backwards read and change (for `proof`).
- `proven`: what a check by computing depends on (for `classify` and `proof`).
- `overlap`: tensors that share memory (for `grouping` too).
- `behavior`: what a module computes, as a number that ranks compare (for `proof`).
- `failing_backward`: the line of forward whose backward fails (for `proof`).

Layers:

- `grouping`: group operations, and make each group a module (for `layers`).
- `output_parameters`: the parameters from which each output is computed.
- `graph_reach`: those that an output's autograd graph reaches (for `proof`).
- `layers`: `LayerGraph` and `LayerNode` (for `burst.graph`, and what runs layers).
- `proof`: compute the layers: they equal the model and keep rows apart (for
  `burst.graph`).
- `dropout_rows`: a row for each sample before a dropout (for `build`, `recorder` and
  `proof`).
- `equal_layers`: layers that compute the same, of which some are checked (for
  `proof`).
- `layer_runs`: run layers alone (for `proof`, `equal_layers` and `other_values`).
- `one_row`: norms on a rank with one row (for `layer_runs`, and the executor).
- `trial`: random rows, perturbed parameters and constant draws (for `proof`,
  `layer_runs` and `sample_positions`).
- `other_values`: run operations with values that a layer rarely has (for `proof`).
"""
