"""Wrap the optimizers of a script that trains through Horovod's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._edit import theirs
from stretto.convert._optimizers import is_named
from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._models import Models


def distribute_optimizers(work: Work, models: Models) -> None:
    """Put ``hvd.DistributedOptimizer`` around each optimizer.

    Raises:
        SpecError: a step is not one backward and one ``step()``, which Horovod's
            optimizer requires.
    """
    tree = work.tree
    if len(work.job.backwards) > 1:
        raise work.job.refuse(
            work.job.backwards[1],
            "a step has several backward() calls, which Horovod's optimizer allows "
            "only if it knows their number. Use --to stretto",
        )
    for call in tree.calls:
        full = tree.called(call)
        if full.endswith("GradScaler") or "clip_grad" in full:
            raise work.job.refuse(
                call,
                f"{full} works on gradients between backward() and step(), where "
                "Horovod's optimizer has not averaged them yet. Use --to stretto",
            )
        if tree.method_called(call, "step") is not None and call in conditional_steps(
            work
        ):
            raise work.job.refuse(
                call,
                "gradients are accumulated over several backward() calls, and "
                "Horovod's optimizer needs to know their number. Use --to stretto",
            )
    for optimizer in work.job.optimizers:
        if not is_named(tree, optimizer.call):
            raise work.job.refuse(
                optimizer.call,
                f"`{tree.text(optimizer.call)[:60]}` makes an optimizer of a class "
                "that Horovod's may not average gradients for. Use --to stretto",
            )
        line = tree.parent(optimizer.call)
        path = dotted(line.targets[0].target) if isinstance(line, cst.Assign) else None
        names = [m.path for m in optimizer.models]
        if path is None or len(names) > 1:
            raise work.job.refuse(
                optimizer.call,
                "Horovod's optimizer needs one optimizer with a name over one model. "
                "Use --to stretto",
            )
        model = optimizer.models[0]
        after, own = tree.statement(optimizer.call), theirs(path)
        named = (
            f", named_parameters={theirs(names[0] or '')}.named_parameters()"
            if model.scope is optimizer.scope
            else ""
        )
        work.after(after, f"{own} = hvd.DistributedOptimizer({own}{named})")
        work.after(after, f"hvd.broadcast_optimizer_state({own}, root_rank=0)")
        work.done(optimizer.call, f"`{path}` wrapped in DistributedOptimizer")
    del models


def conditional_steps(work: Work) -> list[cst.Call]:
    """Return the calls of ``step()`` that a step may skip."""
    out = []
    for loop in work.job.training:
        for call in work.tree.calls:
            if work.tree.within(call, loop.node) and any(
                isinstance(a, cst.If)
                and work.tree.within(a, loop.node.body)
                and any(True for _ in found(a.test, cst.Modulo))
                for a in work.tree.ancestors(call)
            ):
                on = work.tree.method_called(call, "step")
                if on is not None and "sched" not in (dotted(on) or ""):
                    out.append(call)
    return out
