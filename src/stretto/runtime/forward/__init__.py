"""Let communication continue during the next forward, bit for bit as without.

- `overlap`: what is under way of one model: unfinished buckets, pending updates, and
  when they are finished (for `runtime.ddp_reducer`).
- `member`: one parameter of a bucket.
- `halves`: exchanges buckets in halves, for clipping by parts (for `overlap`).
- `order`: launches buckets in the plan's order (for `runtime.planned_group`).
- `steps`: defers optimizers' steps; `undisturbed` executes deferred work.
- `lazy`: a gradient under way; `pending`: a parameter and an optimizer state before
  their update. Any read of these finishes them.
- `module_hooks`: finishes a module's parameters when it is called; `raw_access`: guards
  functions of PyTorch that read memory without asking the tensor's class.
- `reads`: records what a program reads before there is a forward plan, while tuning
  profiles (for `runtime.ddp_reducer`).
- `fallback`: why a model does not overlap with forward; `other_threads`: which thread
  of the program prevents it.
"""
