"""Names and arguments of Horovod 0.28.1 for TensorFlow and Keras."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs tensorflow", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")

SCOPE = "name ignore_name_scope process_set"
FACTORS = "prescale_factor postscale_factor"
OPTIMIZER = "compression sparse_as_dense"
GROUPS = "num_groups groups process_set scale_local_gradients"

TENSORFLOW = {
    "allreduce": "tensor average device_dense device_sparse compression op "
    f"{FACTORS} name process_set ignore_name_scope",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op "
    f"{FACTORS} process_set ignore_name_scope name",
    "allgather": f"tensor {SCOPE}",
    "grouped_allgather": f"tensors {SCOPE}",
    "broadcast": f"tensor root_rank {SCOPE}",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": f"tensor splits {SCOPE}",
    "reducescatter": "tensor device_dense compression op name process_set "
    f"ignore_name_scope {FACTORS}",
    "grouped_reducescatter": "tensors device_dense compression op process_set "
    f"{FACTORS}",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "rank_op": "name",
    "local_rank_op": "name",
    "local_size_op": "name",
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "broadcast_global_variables": "root_rank",
    "DistributedGradientTape": f"gradtape device_dense device_sparse {OPTIMIZER} op "
    f"gradient_predivide_factor {GROUPS}",
    "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse "
    f"{OPTIMIZER} backward_passes_per_step op gradient_predivide_factor "
    f"average_aggregated_gradients {GROUPS}",
    "SyncBatchNormalization": "fused kwargs",
}

KERAS = {
    "DistributedOptimizer": f"optimizer name device_dense device_sparse {OPTIMIZER} "
    "gradient_predivide_factor op backward_passes_per_step "
    f"average_aggregated_gradients {GROUPS}",
    "allreduce": f"value name average {FACTORS} op compression",
    "allgather": "value name",
    "broadcast": "value root_rank name",
    "reducescatter": "value name op",
    "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "callbacks.MetricAverageCallback": "device",
    "callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch "
    "end_epoch staircase momentum_correction steps_per_epoch",
    "callbacks.LearningRateWarmupCallback": "initial_lr warmup_epochs "
    "momentum_correction steps_per_epoch verbose",
    "callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode save_freq",
}


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [("tensorflow", *pair) for pair in TENSORFLOW.items()]
    + [("tensorflow.keras", *pair) for pair in KERAS.items()]
    + [("keras", *pair) for pair in KERAS.items()],
)
def test_arguments_are_horovods(module, name, arguments):
    found = importlib.import_module(f"stretto.horovod.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == arguments.split()
