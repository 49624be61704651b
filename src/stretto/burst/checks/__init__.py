"""Check that ranks train the model that one process would train.

Ranks compare numbers that travel with each forward (`burst.forward_exchange`), and with
each refresh. Unless a line says otherwise, a file is imported by `burst.parts`, which
constructs the model's parts, or by `burst.forward_exchange`, which sends its numbers.

The module and the program:

- `structure`: notice replaced modules and parameters (for `burst.plan_follower`).
- `input_classes`: classes and identity of input tensors change no result.
- `backward_use`: the same backward passes end, and their gradients have known weights.
- `hook_use`: hooks that change something are on all ranks.
- `later_hooks`: hooks registered after building change nothing (for `hook_use` and
  `later_of_all`).
- `later_of_all`: nor do those of all modules, where no layer's call would show it.
- `constant_buffers`: buffers that forward only reads are the same.
- `changes`: gradients and parameters are scaled equally on all ranks.
- `replicas`: ranks of a layer hold the same parameters.
- `recheck`: forward still does what was captured.
- `verify_first_step`: a first step equals one process's, with ``verify=True`` (for
  `burst.executor` and `burst.plan_follower`).

Optimizers:

- `optimizer_use`: they are used equally, with the same options.
- `optimizer_options`: their options as numbers and as JSON (for `optimizer_use`).
- `optimizers`: what they keep outside their state is the same (for
  `burst.plan_change`).
- `joined_calls`: calls that join gradients, such as clipping, are for the same
  parameters (for `burst.executor`, `burst.torch_calls` and `burst.torch_seam`).
- `separable`: an optimizer treats parameters separately (for `stale_guard` and
  `burst.torch_seam`).

Values of layers that other ranks run:

- `stale_guard`: nothing reads values that this rank does not keep current.
- `guarded_tensors`: tensors that ask before they are read (for `stale_guard` and
  `burst.plan_follower`).

What several of these use:

- `numbers`: values as integers, for the exchange (shared, for instance by
  `optimizer_use` and `backward_use`).
- `tolerances`: how near values of several ranks must be (shared, for instance by
  `changes` and `backward_use`).
"""
