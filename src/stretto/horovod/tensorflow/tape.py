"""`DistributedGradientTape`: a tape whose gradients are reduced over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from stretto.errors import SpecError
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Average, ReduceOp, require_no_adasum
from stretto.horovod.tensorflow.compression import Compression
from stretto.horovod.tensorflow.gradients import on_values, reduce_gradients
from stretto.horovod.tensorflow.host_calls import not_converted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def reduction(
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Sequence[Any]], list[Any]]:
    """Return the function that reduces a list of gradients, with Horovod's arguments.

    Raises:
        NotImplementedError: ``op`` is `Adasum`.
        ValueError: ``gradient_predivide_factor`` is given with an op other than
            Average.
    """
    op = ReduceOp(op)
    require_no_adasum(op, "a reduction of gradients")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError(
            "gradient_predivide_factor divides an average before and multiplies after "
            f"the reduction: it needs op=Average, got {op.name}"
        )

    def reduce(gradients: Sequence[Any]) -> list[Any]:
        sent: list[Any] = []
        contexts: list[Any] = []
        for gradient in gradients:
            if sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            is_dense = not isinstance(gradient, tf.IndexedSlices)
            if gradient is None or not is_dense:
                sent.append(gradient)
                contexts.append(None)
            else:
                pair = compression.compress(gradient)
                sent.append(pair[0])
                contexts.append(pair[1])
        reduced = reduce_gradients(
            sent,
            op=op,
            prescale=1.0 / gradient_predivide_factor,
            postscale=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        return [
            value
            if value is None or isinstance(value, tf.IndexedSlices)
            else compression.decompress(value, context)
            for value, context in zip(reduced, contexts, strict=True)
        ]

    found: Callable[[Sequence[Any]], list[Any]] = not_converted(reduce)
    return found


def refuse_groups(num_groups: int, groups: Any) -> None:
    """Check Horovod's arguments on groups, which have no effect.

    Raises:
        ValueError: they break their rule.
    """
    if num_groups < 0 or (isinstance(groups, int) and groups < 0):
        raise ValueError("groups must be a number >= 0, a list of lists, or None")


class _ReducedTape(tf.GradientTape):  # type: ignore[misc]
    """The class that `DistributedGradientTape` gives a tape in place of its own."""

    _reduce: Any
    _process_set: ProcessSet
    _scales_local: bool
    _local: set[Any]

    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of a variable this rank's own."""
        self._local.add(_key(source))

    @not_converted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: FBT001, FBT002
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return gradients reduced over ranks; those of local sources are scaled.

        Args:
            target: As in ``tf.GradientTape``.
            sources: As in ``tf.GradientTape``, in the same order on all ranks.
            output_gradients: As in ``tf.GradientTape``.
            use_generic_names: Has no effect: names are numbers.
            unconnected_gradients: As in ``tf.GradientTape``.
        """
        del use_generic_names
        found = super().gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        gradients = _flat(found)
        keys = [_key(source) for source in _flat(sources)]
        shared = [i for i, key in enumerate(keys) if key not in self._local]
        for i, value in zip(
            shared, self._reduce([gradients[i] for i in shared]), strict=True
        ):
            gradients[i] = value
        size = self._process_set.size() or 1
        if self._scales_local and self._local:
            for i, key in enumerate(keys):
                if key in self._local:
                    gradients[i] = on_values(gradients[i], lambda v: v / float(size))
        return tf.nest.pack_sequence_as(sources, gradients)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: TensorFlow computes rows by `gradient`, several at once.

        Raises:
            SpecError: always.
        """
        del args, kwargs
        raise SpecError(
            "a distributed tape reduces gradients, not Jacobians: take the Jacobian "
            "from a tf.GradientTape that isn't distributed, and reduce it with "
            "allreduce"
        )

    batch_jacobian = jacobian

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[list[Any], list[Any]]:
        """Return pairs of source and gradient: of local sources, and of others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(_flat(sources), _flat(gradients), strict=True))
        return (
            [pair for pair in pairs if _key(pair[0]) in self._local],
            [pair for pair in pairs if _key(pair[0]) not in self._local],
        )


def _flat(structure: Any) -> list[Any]:
    """Return the leaves, where ``tf.IndexedSlices`` and None are leaves."""
    return list(tf.nest.flatten(structure))


def _key(source: Any) -> Any:
    value = getattr(source, "value", source)  # a variable of Keras holds TensorFlow's
    source = source if callable(value) else value
    return source.ref() if hasattr(source, "ref") else id(source)


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,  # noqa: FBT001, FBT002
) -> Any:
    """Return the tape, whose `gradient` now reduces over ranks.

    In a `tf.function` each gradient leaves while backward computes the next ones;
    eagerly they leave when the tape is done.

    Args:
        gradtape: A ``tf.GradientTape``.
        device_dense: Has no effect.
        device_sparse: Has no effect.
        compression: Applied on the wire.
        sparse_as_dense: Whether to reduce ``tf.IndexedSlices`` as dense tensors; if
            not, all ranks' rows are gathered.
        op: The reduction.
        gradient_predivide_factor: Splits an average's division: by this factor before
            the sum, and by the rest after it.
        num_groups: Has no effect: small gradients are sent together anyway.
        groups: Has no effect.
        process_set: The participating ranks; all of them must call `gradient`.
        scale_local_gradients: Whether to divide the gradients of sources registered as
            local by the number of ranks.

    Raises:
        SpecError: the tape is distributed already.
        NotImplementedError: ``op`` is `Adasum`.
        ValueError: an argument breaks its rule.
    """
    del device_dense, device_sparse
    refuse_groups(num_groups, groups)
    if isinstance(gradtape, _ReducedTape):
        raise SpecError("the tape is distributed already: wrap it once")
    reduce = reduction(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    cls = type(gradtape)
    gradtape.__class__ = type(cls.__name__, (_ReducedTape, cls), {})
    gradtape._reduce = reduce  # noqa: SLF001
    gradtape._process_set = process_set  # noqa: SLF001
    gradtape._scales_local = scale_local_gradients  # noqa: SLF001
    gradtape._local = set()  # noqa: SLF001
    return gradtape
