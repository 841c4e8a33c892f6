"""verl's names and signatures that we call or override. Read a failure here first after an upgrade of verl."""

import inspect

import pytest
import verl  # noqa: F401
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine import utils as engine_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
from verl.workers.utils import losses

SIGNATURES = {
    FSDPEngine.__init__: "self model_config engine_config optimizer_config checkpoint_config",
    FSDPEngine.forward_backward_batch: "self data loss_function forward_only",
    FSDPEngine._gradient_sync_context: "self is_last_micro_batch",
    FSDPEngine._build_fsdp_module: "self module",
    FSDPEngine.get_data_parallel_group: "self",
    FSDPEngineWithLMHead.prepare_model_outputs: "self output output_args micro_batch logits_processor_func",
    FSDPEngineWithLMHead.forward_step: "self micro_batch loss_function forward_only",
    EngineRegistry.register: "model_type backend device vendor",
    engine_utils.postprocess_batch_func: "output_lst indices data",
    engine_utils.detach_tree: "obj",
    tensordict_utils.index_select_tensor_dict: "batch indices",
    tensordict_utils.get_non_tensor_data: "data key default",
    losses.ppo_loss: "config model_output data dp_group",
    FSDPActorConfig.validate: "self n_gpus train_batch_size model_config",
    Metric.aggregate_dp: "metric_lists",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_verl_signature(function):
    found = " ".join(inspect.signature(function).parameters)
    assert found == SIGNATURES[function], f"verl changed {function.__module__}.{function.__qualname__}({found})"


@pytest.mark.parametrize("name", ["input_ids_rmpad_rolled", "temperature_rmpad", "pad_size", "temperature_is_one"])
def test_prepare_model_outputs_reads_the_arguments_that_we_hand_it(name):
    source = inspect.getsource(FSDPEngineWithLMHead.prepare_model_outputs)
    assert f'output_args["{name}"]' in source or f'output_args.get("{name}"' in source


def test_base_engine_knows_fsdp2_and_verl_checks_its_own_names():
    assert 'self.engine_config.strategy == "fsdp2"' in inspect.getsource(FSDPEngine._build_fsdp_module)
    assert '"fsdp2"' in inspect.getsource(FSDPEngineConfig.__post_init__)


def test_metric_has_values_and_aggregation():
    metric = Metric(AggregationType.SUM, 1.0)
    metric.extend([2.0])
    assert metric.values == [1.0, 2.0] and metric.aggregation == AggregationType.SUM
