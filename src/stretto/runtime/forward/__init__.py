"""Let communication continue during the next forward, bit for bit as without.

- `overlap`: what is under way of one model: unfinished buckets, pending updates, and
  when they are finished (for `runtime.ddp_reducer`).
- `member`: one parameter of a bucket (for `overlap`, `reads` and `steps`).
- `halves`: exchanges buckets in halves, for clipping by parts (for `overlap`).
- `order`: launches buckets in the plan's order (for `runtime.planned_group`).
- `steps`: defers optimizers' steps (for `_api.replaying`, `overlap` and `reads`, and
  programs).
- `undisturbed`: executes deferred work (shared, for instance by `overlap` and
  `ddp_reducer`).
- `lazy`: a gradient under way, finished by any read (shared, for instance by `overlap`
  and `steps`).
- `pending`: a parameter and an optimizer state before their update, finished by any
  read (shared, for instance by `overlap` and `reads`).
- `module_hooks`: finishes a module's parameters when it is called (for `overlap` and
  `reads`).
- `raw_access`: guards functions of PyTorch that read memory without asking the tensor's
  class (for `overlap` and `reads`).
- `reads`: records what a program reads before there is a forward plan, while tuning
  profiles (for `runtime.ddp_reducer`).
- `fallback`: why a model does not overlap with forward (for `ddp_reducer` and `steps`).
- `other_threads`: which thread of the program prevents it (for `overlap`, `reads` and
  `steps`).
"""
