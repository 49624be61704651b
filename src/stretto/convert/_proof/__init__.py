"""Which losses of a script are means over samples, shown by computing with values.

A value says how a number depends on the samples of a batch.

The whole:

- `proofs`: run the script and report its losses (for `_script`).
- `interpreter`: run it on values, and choose what evaluates each part (for `proofs`).
- `script_run`: the variables of one run (shared, for instance by `expressions` and
  `interpreter`).
- `ranks`: the number of a batch's dimensions, from `x.size(1)` (for `statements`).

Values:

- `batch_values`: their classes (shared, for instance by `arithmetic` and
  `builtin_calls`).
- `arithmetic`: what operators make of two (shared, for instance by `tensor_methods` and
  `tensor_joins`).
- `fixed_tensors`: shapes of tensors without samples (shared, for instance by
  `tensor_methods` and `tensor_joins`).
- `counts`: calls that get a number of samples (for `library_calls` and `method_calls`).
- `containers`: lists, dicts, and the elements of every value (shared, for instance by
  `builtin_calls` and `expressions`).
- `loaders`: the batches of a loader (shared, for instance by `containers` and `loops`).

The script's text:

- `statements`: statements, one by one (for `interpreter`).
- `branches`: tests, and the variables after them (shared, for instance by `loops` and
  `expressions`).
- `loops`: loops, and what they add up (for `statements`).
- `targets`: assignments (shared, for instance by `statements` and `expressions`).
- `expressions`: operators, displays and comprehensions (for `interpreter` and
  `statements`).
- `subscripts`: elements and slices (for `interpreter` and `targets`).
- `attributes`: attributes of values (for `builtin_calls`, `interpreter` and
  `method_calls`).

Calls:

- `calls`: arguments of a call, and losses (for `interpreter`).
- `given_arguments`: what is certain of an argument (shared, for instance by
  `tensor_methods` and `dimensions`).
- `function_calls`: functions of the script (for `interpreter` and `objects`).
- `objects`: objects of the script's classes (for `interpreter` and `method_calls`).
- `class_lookups`: their methods and attributes (shared, for instance by `objects` and
  `calls`).
- `own_gradients`: functions with a backward of their own (for `attributes` and
  `method_calls`).
- `library_calls`: functions of libraries (for `interpreter` and `objects`).
- `library_modules`: layers and networks of libraries (for `calls` and `library_calls`).
- `builtin_calls`: functions of Python's own (for `library_calls` and `method_calls`).
- `method_calls`: methods of values (for `calls` and `interpreter`).
- `known_names`: names of Python and of libraries (shared, for instance by
  `method_calls` and `library_calls`).

Functions of torch:

- `tensor_functions`: functions by their full names (for `library_calls` and
  `method_calls`).
- `tensor_methods`: methods of tensors (for `attributes`, `method_calls` and
  `tensor_functions`).
- `tensor_names`: both by what they do to samples (shared, for instance by
  `tensor_methods` and `tensor_functions`).
- `dimensions`: shapes, and where the dimension of samples moves (shared, for instance
  by `tensor_methods` and `reductions`).
- `reductions`: functions that combine elements (for `tensor_methods`).
- `tensor_joins`: functions of several tensors (for `expressions`, `tensor_functions`
  and `tensor_methods`).
- `equations`: einsum and einops (for `tensor_functions`).
- `tensor_losses`: losses (for `library_modules` and `tensor_functions`).
- `draws`: random numbers (shared, for instance by `library_calls` and `method_calls`).
"""
