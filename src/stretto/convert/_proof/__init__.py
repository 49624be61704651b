"""Which losses of a script are means over samples, shown by computing with values.

A value says how a number depends on the samples of a batch. `proofs`, which `_script`
calls, has the `interpreter` run the script on such values and reports its losses.

- Values: `batch_values` has their classes, `arithmetic` what operators make of two,
  `fixed_tensors` the shapes of those without samples, also of those with as many
  elements as a batch. `counts` notes calls that get a number of samples and are not
  known to keep it in proportion.
- Torch: `tensor_functions` and `tensor_methods` give the result of a call, by the names
  in `tensor_names` and with the rules of `dimensions` (shapes), `reductions`,
  `tensor_joins` (several tensors), `equations` (einsum and einops), `tensor_losses` and
  `draws` (random numbers). `library_modules` does so for layers and networks. All take
  their arguments from `given_arguments`.
- The script: `script_run` holds the variables of one run. The `interpreter` goes from
  `statements` to `branches`, `loops` and `targets`, and from `expressions` to
  `subscripts`, `attributes` and `calls`. `ranks` takes dimensions from `x.size(1)`.
- Calls: `calls` evaluates arguments and notes losses. The `interpreter` chooses among
  `function_calls`, `objects` (of the script's classes), `library_calls` and
  `method_calls`; `library_calls` calls `builtin_calls`, and `method_calls` runs
  backward methods of the script with `own_gradients`. `class_lookups` finds
  methods for `attributes`, `containers` and `objects`; `containers` has lists, dicts
  and the elements of every value, for all of them, and `loaders` the batches of these.
  `known_names` has the names of Python and of libraries.
"""
