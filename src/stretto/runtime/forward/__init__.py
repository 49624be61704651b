"""Let communication travel under the next forward, bit for bit as without.

- `overlap` is what is under way of one model: unfinished buckets, pending updates, and
  when they are settled. `member` is one parameter of a bucket.
- `order` launches buckets in the plan's order.
- `lazy` stands for a gradient under way, `pending` for a parameter and an optimizer
  state before their update; any read settles them.
- `entrances` are PyTorch's functions that read memory without asking a class.
- `steps` defers optimizers' steps, `readers` settles a module's parameters when it is
  called, and `undisturbed` is how deferred work is executed.
- `entrances` guards functions of PyTorch that read memory without asking the tensor.
- `fallback` says why a model does not overlap with forward.
"""
