"""Wrap the trained models, and unwrap them where their own names are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._buffers import may_have_buffers
from stretto.convert._edit import theirs
from stretto.convert._free_tensors import refuse_free_tensors
from stretto.convert._freezing import Freezing
from stretto.convert._held_models import HeldModels
from stretto.convert._part_names import refuse_renamed
from stretto.convert._prepared import every_backward, is_cut
from stretto.convert._tree import (
    Scope,
    argument,
    arguments_of,
    dotted,
    found,
    is_main_guard,
)
from stretto.convert._unused import why_unused
from stretto.convert._views import Site, Views

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._flow import Key, Origin

_OF_BOTH = frozenset(
    ["train", "eval", "parameters", "zero_grad", "training", "module", "no_sync"]
)
"""Attributes of the wrapper with the same meaning as the module's."""

_OF_MODULE = frozenset(
    [
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "children",
        "compile",
        "cpu",
        "cuda",
        "double",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_parameter",
        "get_submodule",
        "half",
        "load_state_dict",
        "modules",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_module",
        "register_parameter",
        "requires_grad_",
        "share_memory",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "type",
        "zero_grad",
        "save_pretrained",
        "push_to_hub",
        "num_parameters",
        "get_num_params",
        "gradient_checkpointing_enable",
        "resize_token_embeddings",
    ]
)

_MOVING = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "to_empty")
"""Methods after which an earlier wrapper would be wrong."""

_COPYING = ("copy.deepcopy", "copy.copy", "torch.optim.swa_utils.AveragedModel")
"""Calls that copy a whole model."""

_SETTING_UP = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "half",
        "float",
        "double",
        "bfloat16",
        "apply",
        "load_state_dict",
        "requires_grad_",
        "compile",
        "parameters",
        "named_parameters",
        "gradient_checkpointing_enable",
    ]
)

_REPLACING = frozenset(
    [
        "torch.nn.utils.spectral_norm",
        "torch.nn.utils.weight_norm",
        "torch.nn.utils.remove_spectral_norm",
        "torch.nn.utils.remove_weight_norm",
        "torch.nn.utils.parametrizations.spectral_norm",
        "torch.nn.utils.parametrizations.weight_norm",
        "torch.nn.utils.parametrizations.orthogonal",
        "torch.nn.utils.parametrize.register_parametrization",
        "torch.nn.utils.parametrize.remove_parametrizations",
    ]
)
"""Calls that replace parameters of the module that they are given."""

_FUNCTIONAL = (
    "torch.func.functional_call",
    "torch.nn.utils.stateless.functional_call",
    "functorch.make_functional",
    "functorch.make_functional_with_buffers",
    "higher.innerloop_ctx",
)
"""Calls that compute a model with parameters other than its own."""

_NAMES = (cst.Name, cst.Attribute)

Span = tuple[int, int]
"""The first line of a part of a scope, and the line after its last."""

_NEVER = 10**9


@final
class Models:
    """The models of a job, where each is wrapped, and what uses them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tree, self._flow = work.tree, work.flow
        made = self._every_value(work.job.models)
        self._made: set[Key] = {o.key for o in made}
        self._known: dict[tuple[int, str], bool] = {}
        self._sites: list[tuple[Origin, Site]] = []
        self._freezing = Freezing(work, self._beginnings)
        self._held = HeldModels(work, self.in_training)
        self._partly_used: set[Key] = set()
        """Models of which a step may leave parameters without a gradient."""
        self.parallel_before = False

    def _every_value(self, models: list[Origin]) -> list[Origin]:
        out = list(models)
        for model in models:
            if model.path is not None:
                out += self._flow.assigned(model.path, model.scope)
        return out

    def is_model(self, node: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether an expression is one of the trained models."""
        path = dotted(node)
        if path is None:
            return False
        key = (id(scope), path)
        if key not in self._known:
            self._known[key] = any(
                key in self._made for key in self._flow.reached(node, scope)
            )
        return self._known[key]

    def is_wrapped(self, node: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether an expression is a trained model that is wrapped by then."""
        return self.is_model(node, scope) and not self._is_set_up(node, scope)

    def convert(self) -> None:
        """Wrap every model and adapt its uses."""
        self._drop_data_parallel()
        if not self._work.horovod:
            refuse_free_tensors(self._work.job)
            self._freezing.refuse_unfreezing()
        for model in self._work.job.models:
            self._check_called(model)
            self._wrap(model)
        if not self._work.horovod:
            refuse_renamed(self._work, [site for _, site in self._sites])
        self._uses()

    # Wrapping

    def _drop_data_parallel(self) -> None:
        for call in self._tree.calls:
            if self._tree.called(call) not in (
                "torch.nn.DataParallel",
                "torch.nn.parallel.DataParallel",
            ):
                continue
            self.parallel_before = True
            inner = arguments_of(call)[0][0]
            if not self._drop_statement(call, inner):
                self._work.change(call, lambda new: new.args[0].value)
            self._work.done(
                call,
                f"DataParallel removed from `{self._tree.text(inner)}`: every rank has "
                "one device. The names in checkpoints keep their `module.`",
            )

    def _drop_statement(self, call: cst.Call, inner: cst.BaseExpression) -> bool:
        """Remove ``m = DataParallel(m)``, and an ``if`` that contained nothing else."""
        line = self._tree.parent(call)
        statement = self._tree.statement(call)
        if not isinstance(line, cst.Assign) or not isinstance(
            statement, cst.SimpleStatementLine
        ):
            return False
        if dotted(line.targets[0].target) != dotted(inner) or len(statement.body) > 1:
            return False
        block = self._tree.block(statement)
        around = self._tree.parent(block)
        if len(block.body) > 1 or not isinstance(around, cst.If):
            alone = len(block.body) == 1
            self._work.change(
                statement,
                lambda _: (
                    self._work.statement("pass") if alone else cst.RemoveFromParent()
                ),
            )
        elif around.orelse is None and isinstance(self._tree.parent(around), cst.If):
            return False
        elif around.orelse is None:
            self._work.change(around, lambda _: cst.RemoveFromParent())
        else:
            return False
        return True

    def _anchors(
        self, model: Origin, path: str, scope: Scope, span: Span
    ) -> list[cst.CSTNode]:
        """Return the statements that set up a model under one of its names."""
        marked = [
            o.statement
            for o in self._flow.assigned(path, scope)
            if self._flow.home(o.path or "", o.scope) is self._flow.home(path, scope)
        ]
        for call in self._tree.calls:
            on = self._tree.method_called(call, *_SETTING_UP)
            same = self._tree.function(call) is scope
            if same and on is not None and f"{dotted(on)}.".startswith(f"{path}."):
                marked.append(self._tree.statement(call))
        marked += self._replacements(path, scope)
        marked += [
            self._tree.statement(o.call)
            for o in self._work.job.optimizers
            if o.scope is scope and any(m.key == model.key for m in o.models)
        ]
        return [
            s
            for s in marked
            if self._tree.function(s) is scope
            and span[0] <= self._tree.line(s) < span[1]
        ]

    def _replacements(self, path: str, scope: Scope) -> list[cst.CSTNode]:
        """Return the statements of a scope that replace parameters of a model."""
        out: list[cst.CSTNode] = []
        for call in self._tree.calls:
            if self._tree.function(call) is not scope:
                continue
            replaces = self._tree.called(call) in _REPLACING or any(
                self._tree.called(inner) in _REPLACING
                for function in self._flow.local(call)
                for inner in found(function.body, cst.Call)
            )
            if not replaces:
                continue
            given = [part for a in call.args[:1] for part in found(a, _NAMES)]
            given += [
                part
                for loop in self._tree.loops(call)
                if isinstance(loop, cst.For)
                for part in found(loop.iter, _NAMES)
            ]
            if any(f"{dotted(part)}.".startswith(f"{path}.") for part in given):
                out.append(self._tree.statement(call))
        for line in found(self._tree.module, cst.Assign):
            new = isinstance(line.value, cst.Call) and (
                self._tree.called(line.value).startswith("torch.nn.")
                or self._tree.own_class(line.value) is not None
            )
            if new and self._tree.function(line) is scope:
                targets = [dotted(t.target) or "" for t in line.targets]
                if any(t.startswith(f"{path}.") for t in targets):
                    out.append(self._tree.statement(line))
        return out

    def _spans(self, model: Origin) -> list[Span]:
        """Return the lines in which each model of a name is set up, up to its training.

        A name that means another model once the first one has been trained has several.

        Raises:
            SpecError: a loop trains a model and replaces it.
        """
        path, scope = model.path or "", model.scope
        begins = sorted(self._tree.line(node) for node in self._beginnings(scope))
        assigned = self._flow.assigned(path, scope)
        first = min(
            (self._tree.line(o.statement) for o in assigned if o.scope is scope),
            default=0,
        )
        out = [(0, next((begin for begin in begins if begin > first), _NEVER))]
        for made in assigned:
            line = self._tree.line(made.statement)
            home = self._flow.home(path, made.scope)
            if (
                path.startswith("self.")
                or home is not self._flow.home(path, scope)
                or line <= out[-1][1]
                or not self._is_another(made, model)
            ):
                continue
            later = next((begin for begin in begins if begin > line), None)
            if later is not None:
                out.append((line, later))
            elif any(
                self._tree.within(node, loop)
                for loop in self._tree.loops(made.statement)
                for node in self._beginnings(scope)
            ):
                raise self._work.job.refuse(
                    made.statement,
                    f"`{path}` becomes another model within a loop that trains it, and "
                    "that model would not be wrapped. Give each model its own name, or "
                    "create it before it is trained in the loop",
                )
        return out

    def _is_another(self, made: Origin, model: Origin) -> bool:
        """Return whether an assignment creates a model, rather than return this one."""
        if not isinstance(made.value, cst.Call) or made.place is not None:
            return False
        of = {id(o.value) for o in self._flow.assigned(model.path or "", model.scope)}
        inside = [made.value, *found(made.value, cst.Name)]
        return not any(
            key[0] in of - {id(made.value)}
            for node in inside
            for key in self._flow.reached(node, made.scope)
        )

    def _site(self, model: Origin, path: str, scope: Scope, span: Span) -> Site:
        """Return where a model would be wrapped under one of its names."""
        anchors = self._anchors(model, path, scope, span) or [model.statement]
        at = last_of_common_block(self._work, anchors)
        while self._contains_training(at, scope):
            inside = [a for a in anchors if self._tree.within(a, at)]
            if not is_main_guard(at):
                # What is set up before the block, since the block may train.
                inside = [a for a in anchors if not self._tree.within(a, at)]
            if not inside or len(inside) == len(anchors):
                raise self._work.job.refuse(
                    at,
                    f"`{path}` is set up and trained within this statement, in "
                    "different blocks of it, so there is no place to wrap it before "
                    "training. Create the model and its optimizer before it",
                )
            anchors = inside
            at = last_of_common_block(self._work, anchors)
        last = max(self._tree.line(n) for n in (at, *anchors))
        own = self._values(model)
        others: set[Key] = set()
        for other in self._work.job.models:
            others |= self._values(other)
        return Site(
            path=path,
            scope=scope,
            at=at,
            last_line=last,
            first_line=span[0],
            values=frozenset(own),
            others=frozenset(others - own),
        )

    def _values(self, model: Origin) -> set[Key]:
        """Return the keys of what a model's name is assigned."""
        made = self._flow.assigned(model.path or "", model.scope)
        return {model.key, *(o.key for o in made)}

    def _place(self, model: Origin, span: Span) -> Site:
        """Return where to wrap a model so that every call in training uses the wrapper.

        Raises:
            SpecError: there is no such place.
        """
        calls = [c for c in self._calls_of(model) if self.in_training(c)]
        calls = [c for c in calls if not self._evaluates(c)]
        views = Views(self._work)
        first = self._site(model, model.path or "", model.scope, span)
        if span[0]:
            return first
        names = views.names([(c.func, self._tree.function(c)) for c in calls])
        sites = [first]
        for path, scope in reversed(names):
            whole = (0, self._training_begins(scope))
            sites.append(self._site(model, path, scope, whole))
        moves = self._moves(model)
        hidden: cst.Call | None = None
        seen: Site | None = None
        for site in sites:
            missed = next((c for c in calls if not views.wrapped(c.func, site)), None)
            if missed is None:
                if not any(views.wrapped(move, site) for move in moves):
                    return site
                seen = seen or site
            else:
                hidden = hidden or missed
        if seen is not None:
            return seen
        if hidden is None:
            return first
        raise self._work.job.refuse(
            hidden,
            f"`{self._tree.text(hidden.func)}` is another name of the trained model "
            f"`{model.path}`, assigned before the model is complete, so wrapping "
            f"`{model.path}` would not affect this call and gradients would not be "
            "exchanged. Use one name for the model, or assign this one after the "
            "optimizer is created",
        )

    def _moves(self, model: Origin) -> list[cst.BaseExpression]:
        """Return what is moved to a device or another type while training is set up."""
        reaching = reaching_training(self._work)
        owners = {id(self._tree.owner(f)) for f in reaching if self._tree.owner(f)}
        out = []
        for call in self._tree.calls:
            on = self._tree.method_called(call, *_MOVING)
            scope = self._tree.function(call)
            if on is None or not self._is(on, scope, model):
                continue
            builds = scope is not None and (
                scope in reaching
                or (
                    scope.name.value == "__init__"
                    and id(self._tree.owner(scope)) in owners
                )
            )
            before = self._tree.line(call) < self._training_begins(scope)
            if (scope is None or builds) and before:
                out.append(on)
        return out

    def _is(self, node: cst.BaseExpression, scope: Scope, model: Origin) -> bool:
        """Return whether an expression is one certain model."""
        values = {model.key}
        if model.path is not None:
            values |= {o.key for o in self._flow.assigned(model.path, model.scope)}
        return not values.isdisjoint(self._flow.reached(node, scope))

    def _is_named(self, node: cst.BaseExpression, model: Origin) -> bool:
        """Return whether a name or an attribute is one certain model."""
        return dotted(node) is not None and self._is(
            node, self._tree.function(node), model
        )

    def _contains_training(self, block: cst.CSTNode, scope: Scope) -> bool:
        """Return whether a batch may be trained on within a compound statement."""
        return isinstance(block, cst.BaseCompoundStatement) and any(
            self._tree.within(node, block) for node in self._beginnings(scope)
        )

    def _ids(self, model: Origin) -> set[int | None]:
        made = self._flow.assigned(model.path or "", model.scope)
        return {id(model.value), *(id(o.value) for o in made)}

    def _training_begins(self, scope: Scope) -> int:
        """Return the first line of a scope at which a batch may be trained on."""
        lines = [self._tree.line(node) for node in self._beginnings(scope)]
        return min(lines, default=_NEVER)

    def _beginnings(self, scope: Scope) -> list[cst.CSTNode]:
        """Return the loops and calls of a scope in which a batch may be trained on."""
        reaching = reaching_training(self._work)
        names = {f.name.value for f in reaching}
        for function in reaching:
            owner = self._tree.owner(function)
            if owner is not None:
                names.add(owner.name.value)
        out: list[cst.CSTNode] = [
            loop.node
            for loop in self._work.job.training
            if self._tree.function(loop.node) is scope
        ]
        out += [
            call
            for call in self._tree.calls
            if self._tree.function(call) is scope
            and (dotted(call.func) or "").rpartition(".")[2] in names
        ]
        return out

    def _wrap(self, model: Origin) -> None:
        for span in self._spans(model):
            if self._work.horovod:
                site = self._site(model, model.path or "", model.scope, span)
            else:
                site = self._place(model, span)
            self._wrap_at(model, site)

    def _wrap_at(self, model: Origin, site: Site) -> None:
        work = self._work
        path, at = site.path, site.at
        self._sites.append((model, site))
        if work.horovod:
            own = theirs(path)
            work.after(at, f"hvd.broadcast_parameters({own}.state_dict(), root_rank=0)")
            work.done(at, f"`{path}`: every rank begins with rank 0's parameters")
            return
        self._held.check(site, lambda node: self._is_named(node, model))
        calls = self._forwards(model)
        several = len(calls) > 1
        unused = why_unused(work, model, calls)
        if unused is None and self._freezing.in_training(self._ids(model)):
            unused = "some are frozen in training"
        options = ", broadcast_buffers=False" if several else ""
        options += ", find_unused_parameters=True" if unused is not None else ""
        own = theirs(path)
        work.after(at, f"{own} = DistributedDataParallel({own}{options})")
        work.done(at, f"`{path}` wrapped in DistributedDataParallel")
        if several and may_have_buffers(work, model):
            work.know(
                at,
                f"`{path}` is called at several places, so its buffers are not sent to "
                "the other ranks in forward; rank 0's are saved",
            )

        if unused is not None:
            self._partly_used.add(model.key)
            work.know(
                at,
                f"a step may leave parameters of `{path}` without a gradient "
                f"({unused}), so DistributedDataParallel looks for them in each step; "
                "if all have one, remove find_unused_parameters",
            )

    def _forwards(self, model: Origin) -> list[cst.Call]:
        """Return the places in training from which a model is called."""
        return [
            call
            for call in self._calls_of(model)
            if not self._tree.without_gradient(call)
        ]

    def _calls_of(self, model: Origin) -> list[cst.Call]:
        return [
            call
            for call in self._tree.calls
            if dotted(call.func) is not None
            and self._is(call.func, self._tree.function(call), model)
        ]

    def _refuse_held(self, model: Origin) -> None:
        """Refuse a model that is called only through what holds it.

        Raises:
            SpecError: it is; the error has the line and the next step.
        """
        made, tree = model.value, self._tree
        name = dotted(made.func) if isinstance(made, cst.Call) else None
        kind = tree.classes.get(name or "")
        holds = (tree.full(made.func) if isinstance(made, cst.Call) else None) == (
            "types.SimpleNamespace"
        )
        if kind is not None:
            names = {f.name.value for f in found(kind.body, cst.FunctionDef)}
            holds = not kind.bases and names.isdisjoint(("forward", "__call__"))
        if holds:
            raise self._work.job.refuse(
                model.statement,
                f"the optimizer trains a module that is an attribute of `{model.path}`,"
                " which cannot be wrapped by name. Assign the module to a variable "
                "first, give the optimizer its parameters(), and call it by that name",
            )
        for node in found(tree.module, cst.Name):
            above = tree.parent(node)
            call = tree.parent(above) if isinstance(above, cst.Arg) else None
            into = isinstance(above, cst.BaseElement | cst.BaseDictElement) or (
                isinstance(call, cst.Call)
                and (
                    tree.method_called(call, "append", "insert", "add") is not None
                    or dotted(call.func) in tree.classes
                )
            )
            if node.value == model.path and into and not tree.is_label(node):
                raise self._work.job.refuse(
                    node,
                    f"`{model.path}`, which the optimizer trains, is put into "
                    f"`{tree.text(tree.statement(node))[:50]}` and called only from "
                    "there, where its wrapper is not seen. Call it by its own name, "
                    "which each model needs",
                )

    def _check_called(self, model: Origin) -> None:
        for call in self._tree.calls:
            given = argument(call, 0, "module")
            if (
                self._tree.called(call) in _FUNCTIONAL
                and given is not None
                and not self._work.horovod
                and self._is(given, self._tree.function(call), model)
            ):
                raise self._work.job.refuse(
                    call,
                    f"`{self._tree.text(call)[:50]}` computes `{model.path}` with "
                    "other parameters, by name, which DistributedDataParallel does not "
                    "see. Call the model itself in training, or use --to horovod",
                )
        if not self._calls_of(model) and not self._work.horovod:
            self._refuse_held(model)
            raise self._work.job.refuse(
                model.statement,
                f"the optimizer trains `{model.path}`, but nothing calls "
                f"`{model.path}(...)`, which prepares gradients for the exchange. Call "
                "the model itself in training, or use --to horovod",
            )

    # Uses

    def _evaluated(self) -> None:
        """Give all ranks rank 0's buffers where a model begins to evaluate.

        In training each rank computes them from its own samples, so without it ranks
        would evaluate differently, and decide differently on the result.
        """
        for call in self._tree.calls:
            on = self._tree.method_called(call, "eval", "train")
            if (
                on is None
                or self._work.is_guarded(call)
                or not self.is_model(on, self._tree.function(call))
                or not self.has_buffers(on)
            ):
                continue
            mode = argument(call, 0, "mode")
            trains = mode is None or self._tree.text(mode) == "True"
            if self._tree.method_called(call, "train") is not None and trains:
                continue
            loop = self.loop_of_a_share(call)
            if loop is None:
                self._work.call_around(on, "buffers_of_rank0")
            elif self._tree.function(loop) is self._tree.function(call):
                self._work.before(loop, f"buffers_of_rank0({self._tree.text(on)})")
            else:
                continue
            self._work.done(
                call,
                f"buffers of `{self._tree.text(on)}` (as of batch norm) become rank "
                "0's, so that all ranks evaluate the same model",
            )

    def loop_of_a_share(self, node: cst.CSTNode) -> cst.For | cst.While | None:
        """Return the outermost loop around a node whose batches ranks may share.

        In it, also through calls, ranks may take different numbers of batches.
        """
        out: cst.For | cst.While | None = None
        waiting, seen = [node], set[int]()
        while waiting:
            below = waiting.pop()
            for above in self._tree.ancestors(below):
                if isinstance(above, cst.For) and self._tree.within(below, above.iter):
                    continue  # computed once, before the loop
                if isinstance(above, cst.FunctionDef) and id(above) not in seen:
                    seen.add(id(above))
                    waiting += self._work.flow.calls_of(above)
                elif (
                    isinstance(above, cst.For | cst.While)
                    and self._work.job.batches.loop(above) is not None
                    and not self._trains(above)
                ):
                    out = above
        return out

    def _trains(self, node: cst.CSTNode) -> bool:
        """Return whether a training loop is in some code, also through calls."""
        loops = [loop.node for loop in self._work.job.training]
        waiting, seen = [node], set[int]()
        while waiting:
            here = waiting.pop()
            if any(self._tree.within(loop, here) for loop in loops):
                return True
            for call in found(here, cst.Call):
                if call in self._work.job.batches.idle:
                    continue
                for function in self._work.flow.local(call):
                    if id(function) not in seen:
                        seen.add(id(function))
                        waiting.append(function)
        return False

    def has_buffers(self, node: cst.BaseExpression) -> bool:
        """Return whether what an expression is, a model, may have buffers."""
        scope = self._tree.function(node)
        return any(
            may_have_buffers(self._work, model)
            for model, _ in self._sites
            if self._is(node, scope, model)
        )

    def _uses(self) -> None:
        for node in found(self._tree.module, cst.Attribute):
            scope = self._tree.function(node)
            if node.attr.value in _OF_BOTH or not self.is_model(node.value, scope):
                continue
            if self._is_set_up(node.value, scope) or self._keeps_prefix(node):
                continue
            self._check_method(node)
            if not self._work.horovod:
                self._work.call_around(node.value, "unwrap")
        self._evaluated()
        if self._work.horovod:
            return
        self._saved_whole()
        for call in self._tree.calls:
            scope = self._tree.function(call)
            if self._tree.without_gradient(call) and self.is_model(call.func, scope):
                self._work.call_around(call.func, "unwrap")

    def _saved_whole(self) -> None:
        """Save and copy the module inside the wrapper, not the wrapper.

        A copied wrapper would give its parameters other names than the model's, and
        would run its own collectives.
        """
        for call in self._tree.calls:
            called = self._tree.called(call)
            saved = called == "torch.save" and not self.parallel_before
            if not saved and called not in _COPYING:
                continue
            for whole in found(call, (cst.Name, cst.Attribute)):
                scope = self._tree.function(call)
                alone = isinstance(
                    self._tree.parent(whole), cst.Arg | cst.DictElement
                ) and not self._tree.is_label(whole)
                if (
                    alone
                    and self.is_model(whole, scope)
                    and not self._is_set_up(whole, scope)
                ):
                    self._work.call_around(whole, "unwrap")

    def _keeps_prefix(self, node: cst.Attribute) -> bool:
        """Return whether DataParallel's checkpoints had `module.` at this place."""
        names = ("state_dict", "load_state_dict", "named_parameters")
        return self.parallel_before and node.attr.value in names

    def _is_set_up(self, node: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether the model is not wrapped yet where an expression uses it."""
        line = self._tree.line(node)
        return any(
            scope is site.scope
            and site.first_line <= line <= site.last_line
            and self._is(node, scope, model)
            for model, site in self._sites
        )

    def _check_method(self, node: cst.Attribute) -> None:
        """Refuse training through a method that the wrapper does not see."""
        call = self._tree.parent(node)
        method = node.attr.value
        if (
            self._work.horovod
            or not isinstance(call, cst.Call)
            or call.func is not node
            or (method in _OF_MODULE and method != "forward")
            or self._tree.without_gradient(call)
            or isinstance(self._tree.parent(call), cst.Expr)
            or not self.in_training(call)
        ):
            return
        if method != "forward" and not self._computes(method):
            return
        if is_cut(self._work, call):
            return
        if method != "forward" and self._is_prepared(node):
            name = self._tree.text(node.value)
            self._work.know(
                call,
                f"`{self._tree.text(node)}(...)` is called beside `{name}(...)`, which "
                "comes before each backward(), so DistributedDataParallel exchanges "
                "the gradients of both",
            )
            return
        raise self._work.job.refuse(
            call,
            f"training calls `{self._tree.text(node)}(...)`, which "
            "DistributedDataParallel does not see, so its gradients would not be "
            "exchanged. Call it from the model's forward(), or use --to horovod",
        )

    def _is_prepared(self, node: cst.Attribute) -> bool:
        """Return whether a model itself is called before each backward, and wholly.

        If DistributedDataParallel looks for parameters that a forward leaves out, it
        takes those that only the method uses for unused, and backward fails.
        """
        scope = self._tree.function(node)
        models = [
            model for model, _ in self._sites if self._is(node.value, scope, model)
        ]
        return bool(models) and all(
            model.key not in self._partly_used
            and every_backward(self._work, self._forwards(model))
            for model in models
        )

    def _evaluates(self, node: cst.CSTNode) -> bool:
        """Return whether a node runs without gradients, also in all of its calls."""
        if self._tree.without_gradient(node):
            return True
        waiting: list[cst.CSTNode] = [node]
        seen: set[cst.FunctionDef] = set()
        while waiting:
            function = self._tree.function(waiting.pop())
            if function is None or self._tree.owner(function) is not None:
                return False
            calls = self._flow.calls_of(function)
            named = [
                name
                for name in found(self._tree.module, cst.Name)
                if name.value == function.name.value and not self._tree.is_label(name)
            ]
            if function in seen:
                continue
            seen.add(function)
            if not calls or len(named) != len(calls):
                return False  # called under another name, too
            if generates(function) and not all(self._is_run_here(c) for c in calls):
                return False
            waiting += [c for c in calls if not self._tree.without_gradient(c)]
        return True

    def _is_run_here(self, call: cst.Call) -> bool:
        """Return whether what a generator yields is taken where it is called."""
        below: cst.CSTNode = call
        for above in self._tree.ancestors(call):
            if isinstance(above, cst.For | cst.CompFor):
                inside = above.iter is below
                comp = self._tree.parent(above)
                return inside and not isinstance(comp, cst.GeneratorExp)
            if not isinstance(above, cst.Arg | cst.Call):
                return False
            below = above
        return False

    def in_training(self, node: cst.CSTNode) -> bool:
        """Return whether code may run in a training step, also through calls."""
        if any(self._tree.within(node, loop.node) for loop in self._work.job.training):
            return True
        inner = trained_functions(self._work)
        return any(a in inner for a in self._tree.ancestors(node))

    def _computes(self, method: str) -> bool:
        """Return whether a method may call layers; a method of another file may."""
        local = [
            f
            for f in self._tree.functions
            if f.name.value == method and self._tree.owner(f) is not None
        ]
        if not local:
            return True
        return any(
            isinstance(call.func, cst.Attribute)
            and dotted(call.func.value) == "self"
            and call.func.attr.value not in _OF_MODULE
            for function in local
            for call in found(function.body, cst.Call)
        )


def generates(function: cst.FunctionDef) -> bool:
    """Return whether a function is a generator."""
    return any(True for _ in found(function.body, cst.Yield))


def reaching_training(work: Work) -> list[cst.FunctionDef]:
    """Return the functions in which, or below which, a batch is trained on."""
    tree = work.tree
    inner: list[cst.CSTNode] = [*work.job.backwards]
    inner += [loop.node for loop in work.job.training]
    out: dict[int, cst.FunctionDef] = {}
    while inner:
        node = inner.pop()
        for function in tree.ancestors(node):
            if isinstance(function, cst.FunctionDef) and id(function) not in out:
                out[id(function)] = function
                inner += [
                    call
                    for call in work.flow.calls_of(function)
                    if call not in work.job.batches.idle
                ]
    return list(out.values())


def trained_functions(work: Work) -> list[cst.FunctionDef]:
    """Return the functions that contain a backward, or that a training step calls."""
    tree = work.tree
    out = [
        a
        for call in work.job.backwards
        for a in tree.ancestors(call)
        if isinstance(a, cst.FunctionDef)
        and not any(tree.within(loop.node, a) for loop in work.job.training)
    ]
    waiting: list[cst.CSTNode] = [*out, *(loop.node for loop in work.job.training)]
    while waiting:
        for call in found(waiting.pop(), cst.Call):
            for function in (*work.flow.local(call), *work.calls.functions(call)):
                if function not in out:
                    out.append(function)
                    waiting.append(function)
    return out


def last_of_common_block(work: Work, statements: list[cst.CSTNode]) -> cst.CSTNode:
    """Return the last of some statements, or what contains it in the common block."""
    tree = work.tree
    chains = []
    for statement in statements:
        chain = [statement]
        chain += [
            a
            for a in tree.ancestors(statement)
            if isinstance(a, cst.SimpleStatementLine | cst.BaseCompoundStatement)
            and not isinstance(a, cst.FunctionDef | cst.ClassDef)
            and tree.function(a) is tree.function(statement)
        ]
        chains.append(
            {
                id(tree.parent(s)): s
                for s in chain
                if isinstance(tree.parent(s), cst.Module | cst.BaseSuite)
            }
        )
    for block in chains[0]:
        if all(block in chain for chain in chains):
            return max((chain[block] for chain in chains), key=tree.line)
    return statements[-1]
