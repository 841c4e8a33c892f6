"""verl's names and signatures that we import, override or call. After an upgrade of verl read the first failure here.

Everything is looked up by name inside a test, so that one symbol that is gone is one failure that says which. Two tests
at the end hold the table complete: what the package imports or overrides must be in it.
"""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

import pytest
import verl  # noqa: F401

import verl_prefix

PACKAGE = Path(verl_prefix.__file__).parent
TI = "verl.workers.engine.fsdp.transformer_impl"
V1 = "verl.trainer.ppo.v1"
PATCHES = "verl.models.transformers.monkey_patch"
WORKER = f"{V1}:AgentLoopWorkerTQ.__ray_metadata__.modified_class"  # Ray gives its methods one more parameter

# verl imports these only where vLLM, VeOmni or Megatron is installed; `make test-vllm`, `make test-veomni` and `make
# test-megatron` run what we build on them.
BESIDE_OTHERS = (
    "verl.workers.rollout.vllm_rollout", "verl.workers.engine.veomni", "verl.workers.engine.megatron",
    "verl.trainer.distillation.megatron", "verl.utils.megatron",
)  # fmt: skip

# Parameters, or None where only the name is ours to rely on (registries, base classes, enumerations).
CONTRACT = {
    "verl.base_config:BaseConfig": None,
    # recipes/musique: search_tool.py and search_turns.py
    "verl.experimental.agent_loop.agent_loop:AgentLoopMetrics": None,
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput": None,
    "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop.run": None,  # main has no priority yet
    "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._call_tool": "self tool_call tools_kwargs agent_data",
    "verl.experimental.agent_loop.tool_parser:ToolParser.extract_tool_calls": "self responses_ids tools",
    "verl.tools.base_tool:BaseTool.create": "self instance_id kwargs",
    "verl.tools.base_tool:BaseTool.execute": "self instance_id parameters kwargs",
    "verl.tools.base_tool:BaseTool.release": "self instance_id kwargs",
    "verl.tools.schemas:ToolResponse": None,
    "verl.plugin.platform:PlatformBase": None,
    "verl.plugin.platform:PlatformBase.is_available": "self",
    "verl.plugin.platform:PlatformBase.is_platform_available": "self use_smi_check",
    "verl.plugin.platform:PlatformBase.current_device": "self",
    "verl.plugin.platform:PlatformBase.device_count": "self",
    "verl.plugin.platform:PlatformBase.manual_seed": "self seed",
    "verl.plugin.platform:PlatformBase.manual_seed_all": "self seed",
    "verl.plugin.platform:PlatformBase.set_device": "self device_index",
    "verl.plugin.platform:PlatformBase.synchronize": "self device_index",
    "verl.plugin.platform:PlatformBase.set_allocator_settings": "self settings",
    "verl.plugin.platform:PlatformBase.empty_cache": "self",
    "verl.plugin.platform:PlatformBase.profiler_start": "self",
    "verl.plugin.platform:PlatformBase.profiler_stop": "self",
    "verl.plugin.platform:PlatformBase.cudart": "self",
    "verl.plugin.platform:PlatformBase.get_device_capability": "self device_index",
    "verl.plugin.platform:PlatformBase.communication_backend_name": "self",
    "verl.plugin.platform:PlatformBase.visible_devices_envvar": "self",
    "verl.plugin.platform:PlatformBase.nvtx_range": "self msg",
    "verl.plugin.platform:PlatformBase.ray_resource_name": "self",
    "verl.plugin.platform:PlatformBase.ray_noset_envvars": "self",
    "verl.plugin.platform:PlatformBase.is_ipc_supported": "self",
    "verl.plugin.platform:PlatformBase.device_name": None,
    "verl.plugin.platform:PlatformBase.vendor_name": None,
    "verl.plugin.platform:PlatformBase.device_module": None,
    "verl.plugin.platform:PlatformRegistry.register": "platform",
    "verl.plugin.platform:get_platform": "",
    f"{V1}.trainer_base:TRAINER_REGISTRY": None,
    f"{V1}.trainer_base:register_trainer": "name",
    f"{V1}.trainer_base:PPOTrainer": None,
    f"{V1}.trainer_colocate_async:PPOTrainerColocateAsync": None,
    f"{V1}.trainer_separate_async:PPOTrainerSeparateAsync": None,
    f"{V1}.trainer_sync:PPOTrainerSync": None,
    f"{V1}.trainer_base:PPOTrainer.__init__": "self config",
    f"{V1}.trainer_base:PPOTrainer._init_dataloader": "self",
    f"{V1}.trainer_base:PPOTrainer._save_checkpoint": "self",
    f"{V1}.trainer_base:PPOTrainer.init": "self",
    f"{V1}.trainer_base:PPOTrainer.fit": "self agent_loop_manager",
    f"{V1}.trainer_base:PPOTrainer.on_step_begin": "self",
    f"{V1}.trainer_base:PPOTrainer.on_sample_begin": "self",
    f"{V1}.trainer_base:PPOTrainer.on_sample_end": "self",
    f"{V1}.trainer_base:PPOTrainer.on_step_end": "self",
    f"{V1}.trainer_base:PPOTrainer._update_actor": "self batch metrics",
    f"{V1}.trainer_base:PPOTrainer._compute_advantage": "self batch metrics",
    f"{V1}.trainer_base:PPOTrainer._compute_metrics": "self batch metrics timing_raw global_steps epoch",
    f"{V1}.trainer_base:PPOTrainer._balance_batch": "self batch metrics logging_prefix keep_minibatch",
    f"{V1}.trainer_base:PPOTrainer._get_required_batch_multiple": "self dp_size",
    "verl.tools.tool_registry:load_all_tools": "tool_config_path function_tool_path",
    "verl.trainer.distillation.losses:distillation_ppo_loss": (
        "config distillation_config model_output data dp_group student_logits data_format"
    ),
    "verl.trainer.distillation.losses:get_distillation_loss_fn": "loss_name",
    "verl.trainer.ppo.core_algos:get_policy_loss_fn": "name",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._balance_batch": "self batch metrics logging_prefix keep_minibatch",
    "verl.trainer.ppo.utils:need_critic": "config",
    "verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY": None,
    "verl.trainer.ppo.core_algos:POLICY_LOSS_REGISTRY": None,
    "verl.trainer.ppo.utils:need_reference_policy": "config",
    f"{V1}:AgentLoopManagerTQ.__init__": "self args kwargs",
    f"{V1}:AgentLoopWorkerTQ": None,
    f"{WORKER}._run_prompt": "self prompt sampling_params trajectory trace",
    f"{WORKER}._agent_loop_postprocess": "self output validate kwargs",
    f"{WORKER}._compute_score": "self outputs kwargs",
    f"{WORKER}._compute_position_ids": "self input_ids attention_mask multi_modal_inputs mm_processor_kwargs",
    "verl.utils:normalize_token_ids": "tokenized_output",
    "verl.utils.config:omega_conf_to_dataclass": "config dataclass_type",
    "verl.utils.dataset.rl_dataset:RLHFDataset.maybe_filter_out_long_prompts": "self dataframe",
    "verl.utils.device:get_device_id": "",
    "verl.utils.device:get_device_name": "",
    "verl.utils.metric:AggregationType": None,
    "verl.utils.metric:Metric.extend": "self values",
    "verl.utils.metric:Metric.aggregate_dp": "metric_lists",
    "verl.utils.py_functional:convert_to_regular_types": "obj",
    "verl.utils.seqlen_balancing:calculate_workload": "seqlen_list",
    "verl.utils.ulysses:get_ulysses_sequence_parallel_group": "",
    "verl.utils.ulysses:set_ulysses_sequence_parallel_group": "group",
    "verl.utils.ulysses:slice_input_tensor": "x dim padding group",
    "verl.utils.seqlen_balancing:get_seqlen_balanced_partitions": "seqlen_list k_partitions equal_size",
    "verl.utils.seqlen_balancing:log_seqlen_unbalance": "seqlen_list partitions prefix",
    "verl.utils.tensordict_utils:assign_non_tensor": "tensor_dict kwargs",
    "verl.utils.tensordict_utils:get": "tensordict key default",
    "verl.utils.tensordict_utils:get_non_tensor_data": "data key default",
    "verl.utils.tensordict_utils:get_tensordict": "tensor_dict non_tensor_dict",
    "verl.utils.tensordict_utils:index_select_tensor_dict": "batch indices",
    "verl.utils.tensordict_utils:list_of_dict_to_tensordict": "list_of_dicts",
    "verl.utils.tensordict_utils:nested_tensor_from_tensor_list": "tensors ragged_idx",
    "verl.trainer.config:CheckpointConfig": None,
    "verl.utils:hf_tokenizer": "name_or_path correct_pad_token correct_gemma2 kwargs",
    "verl.utils:hf_processor": "name_or_path kwargs",
    "verl.utils.dataset.rl_dataset:get_dataset_class": "data_config",
    "verl.utils.dataset.rl_dataset:RLHFDataset._build_messages": "self example key",
    "verl.utils.dataset.rl_dataset:RLHFDataset._process_multi_modal_info": "messages image_patch_size config",
    "verl.utils.import_utils:import_external_libs": "external_libs",
    "verl.utils.model:get_hf_auto_model_class": "hf_config",
    "verl.utils.model:load_valuehead_model": "local_path torch_dtype model_config trust_remote_code",
    "verl.utils.model:update_model_config": "module_config override_config_kwargs",
    "verl.utils.tokenizer:build_multimodal_processor_inputs": (
        "processor text images videos audio mm_processor_kwargs return_tensors"
    ),
    "verl.utils.tokenizer:get_processor_token_id": "processor token_name",
    "verl.utils.torch_dtypes:PrecisionType.to_dtype": "precision",
    "verl.utils.torch_dtypes:PrecisionType.to_str": "precision",
    "verl.utils.fsdp_utils:apply_fsdp2": "model fsdp_kwargs config",
    "verl.utils.torch_functional:allgather_dict_into_dict": "data group",
    "verl.utils.torch_functional:entropy_from_logits": "logits",
    "verl.workers.config:ActorConfig": None,
    "verl.workers.config:FSDPOptimizerConfig": None,
    "verl.workers.config:FSDPActorConfig.__post_init__": "self",
    "verl.workers.config:FSDPActorConfig.validate": "self n_gpus train_batch_size model_config",
    "verl.workers.config:FSDPCriticConfig.__post_init__": "self",
    "verl.workers.config:FSDPCriticConfig.validate": "self n_gpus train_batch_size",
    "verl.workers.config:FSDPEngineConfig.__post_init__": "self",
    "verl.workers.config:FSDPEngineConfig._mutable_fields": None,
    "verl.workers.config:HFModelConfig": None,
    "verl.workers.config:McoreActorConfig.__post_init__": "self",
    "verl.workers.config:McoreActorConfig.validate": "self n_gpus train_batch_size model_config",
    "verl.workers.config:McoreEngineConfig.__post_init__": "self",
    "verl.workers.config:McoreEngineConfig._mutable_fields": None,
    "verl.workers.config:VeOmniActorConfig.__post_init__": "self",
    "verl.workers.config:VeOmniActorConfig.validate": "self n_gpus train_batch_size model_config",
    "verl.workers.config:VeOmniEngineConfig.__post_init__": "self",
    "verl.workers.config:VeOmniEngineConfig._mutable_fields": None,
    "verl.workers.config:PolicyLossConfig": None,
    "verl.workers.config:RolloutConfig": None,
    "verl.workers.engine:EngineRegistry": None,
    "verl.workers.engine:MegatronEngineWithLMHead": None,
    "verl.workers.engine:VeOmniEngineWithLMHead": None,
    "verl.workers.engine.base:EngineRegistry.register": "model_type backend device vendor",
    "verl.workers.engine.base:EngineRegistry._engines": None,
    f"{TI}:FSDPEngineWithLMHead": None,
    f"{TI}:FSDPEngineWithValueHead": None,
    f"{TI}:FSDPEngineWithLMHead.__init__": "self model_config engine_config optimizer_config checkpoint_config",
    f"{TI}:FSDPEngineWithLMHead.disable_adapter": "self",
    f"{TI}:FSDPEngineWithLMHead.initialize": "self",
    f"{TI}:FSDPEngineWithLMHead.forward_backward_batch": "self data loss_function forward_only",
    f"{TI}:FSDPEngineWithLMHead.forward_step": "self micro_batch loss_function forward_only",
    f"{TI}:FSDPEngineWithLMHead.optimizer_step": "self",
    f"{TI}:FSDPEngineWithLMHead.train_batch": "self data loss_function",
    f"{TI}:FSDPEngineWithLMHead.load_checkpoint": "self local_path hdfs_path del_local_after_load kwargs",
    f"{TI}:FSDPEngineWithLMHead.prepare_model_inputs": "self micro_batch",
    f"{TI}:FSDPEngineWithLMHead._gather_and_unpad_packed": "self tensor pad_size",
    f"{TI}:FSDPEngineWithLMHead.prepare_model_outputs": "self output output_args micro_batch logits_processor_func",
    f"{TI}:FSDPEngineWithLMHead._build_fsdp_module": "self module",
    f"{TI}:FSDPEngineWithLMHead._build_lora_module": "self module",
    f"{TI}:FSDPEngineWithLMHead._build_module": "self",
    f"{TI}:FSDPEngineWithLMHead._gradient_sync_context": "self is_last_micro_batch",
    f"{TI}:FSDPEngineWithLMHead.get_data_parallel_group": "self",
    f"{TI}:FSDPEngineWithLMHead.get_data_parallel_size": "self",
    f"{TI}:FSDPEngineWithLMHead.get_data_parallel_rank": "self",
    f"{TI}:FSDPEngineWithLMHead.is_mp_src_rank_with_outputs": "self",
    f"{PATCHES}:_ulysses_flash_attention_forward": (
        "query_states key_states value_states attention_mask query_length args position_ids kwargs"
    ),
    f"{PATCHES}:_flash_attention_forward": None,
    f"{PATCHES}:patch_vlm_for_ulysses_input_slicing": "model_class",
    "verl.workers.engine.utils:postprocess_batch_func": "output_lst indices data",
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY": None,
    "verl.workers.rollout.base:BaseRollout.resume": "self tags",
    "verl.workers.rollout.base:BaseRollout.release": "self",
    "verl.workers.rollout.base:BaseRollout.update_weights": "self weights wire_format kwargs",
    "verl.workers.rollout.replica:RolloutMode.HYBRID": None,
    "verl.workers.rollout.replica:RolloutReplica": None,
    "verl.workers.rollout.replica:RolloutReplica.abort_all_requests": None,  # main has no reject_request yet
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": "self",
    "verl.workers.rollout.replica:RolloutReplica.resume_generation": "self",
    "verl.workers.rollout.replica:RolloutReplicaRegistry._registry": None,
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": "name loader",
    "verl.workers.rollout.utils:ensure_async_iterator": "iterable",
    "verl.workers.rollout.replica:TokenOutput": None,
    "verl.workers.utils.losses:ppo_loss": "config model_output data dp_group",
    "verl.workers.utils.losses:value_loss": "config model_output data dp_group",
    "transfer_queue:KVBatchMeta.reorder": "self indexes",
}


def look_up(symbol: str) -> object:
    module, _, path = symbol.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        annotations = getattr(found, "__annotations__", {})
        assert hasattr(found, name) or name in annotations, f"verl has no {symbol} any more: {found} lacks {name}"
        found = getattr(found, name, None)
    return found


@pytest.mark.parametrize("symbol", CONTRACT)
def test_verl_still_has(symbol):
    found, expected = look_up(symbol), CONTRACT[symbol]
    if expected is not None:
        names = inspect.signature(inspect.unwrap(found)).parameters
        parameters = " ".join(name for name in names if name != "_ray_trace_ctx")  # Ray adds it to an actor's class
        assert parameters == expected, f"verl changed {symbol}({parameters}); we rely on ({expected})"


@pytest.mark.parametrize("name", ["input_ids_rmpad_rolled", "temperature_rmpad", "pad_size"])
def test_prepare_model_outputs_reads_the_arguments_that_we_hand_it(name):
    source = inspect.getsource(look_up(f"{TI}:FSDPEngineWithLMHead.prepare_model_outputs"))
    assert f'output_args["{name}"]' in source or f'output_args.get("{name}"' in source


def test_sequence_parallelism_asks_for_what_we_set():
    engine = look_up(f"{TI}:FSDPEngineWithLMHead")
    gathers = (engine.prepare_model_outputs, getattr(engine, "_gather_and_unpad_packed", None))
    sources = "".join(inspect.getsource(function) for function in gathers if function)
    assert sources.count("gather_outputs_and_unpad(") == sources.count("if self.use_ulysses_sp:") > 0
    assert "ulysses_parallel_group" in inspect.getsource(engine._init_device_mesh)
    slicing = inspect.getsource(look_up(f"{PATCHES}:patch_vlm_for_ulysses_input_slicing"))
    assert 'getattr(self, "_needs_initial_slice", True)' in slicing
    # What our stock path turns off where it would be wrong.
    assert "if self.use_ulysses_sp:" in inspect.getsource(engine.prepare_model_inputs)
    size = inspect.getsource(look_up("verl.utils.ulysses:get_ulysses_sequence_parallel_world_size"))
    assert "get_ulysses_sequence_parallel_group()" in size and "if group else 1" in size


def test_prepare_model_outputs_reads_no_argument_that_we_do_not_know():
    """Under remove-padding and without fused kernels: another key would be a KeyError in the middle of a step."""
    source = inspect.getsource(look_up(f"{TI}:FSDPEngineWithLMHead.prepare_model_outputs"))
    read = {
        node.slice.value
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "output_args"
    }
    ours = {"input_ids_rmpad_rolled", "temperature_rmpad", "pad_size"}
    assert read <= ours | {"temperature"}, f"prepare_model_outputs reads {sorted(read - ours)}"


def test_base_engine_knows_fsdp2_and_verl_checks_its_own_names():
    from verl.workers.config import FSDPEngineConfig

    source = inspect.getsource(look_up(f"{TI}:FSDPEngineWithLMHead._build_fsdp_module"))
    assert 'self.engine_config.strategy == "fsdp2"' in source
    assert '"fsdp2"' in inspect.getsource(FSDPEngineConfig.__post_init__)


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped():
    """We inherit it; our warning says that the update is skipped."""
    source = inspect.getsource(look_up(f"{TI}:FSDPEngineWithLMHead.optimizer_step"))
    assert "if not torch.isfinite(grad_norm):" in source and "self.optimizer.zero_grad()" in source


def test_verls_engines_have_what_our_protocols_list():
    """By their sources, since most attributes are set when an engine is built, and Megatron is not installed here."""
    engines = Path(verl.__file__).parent / "workers/engine"
    bases = engines / "fsdp/transformer_impl.py", engines / "base.py"
    sources = {"VerlMegatronEngine": (engines / "megatron/transformer_impl.py", engines / "base.py")}
    found = 0
    for path in [PACKAGE / "engine/backend.py", *(PACKAGE / "backends").glob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or "Protocol" not in map(ast.unparse, node.bases):
                continue
            source = "".join(file.read_text() for file in sources.get(node.name, bases))
            for member in node.body:
                name = member.target.id if isinstance(member, ast.AnnAssign) else getattr(member, "name", "")
                if name and name != "verls_forward_backward":  # PrefixEngine's
                    assert f"self.{name} = " in source or f"def {name}(" in source, f"{node.name}.{name} is gone"
                    found += 1
    assert found >= 19
    losses = (Path(verl.__file__).parent / "trainer/distillation/megatron/losses.py").read_text()
    assert "preprocess_thd_engine(" in losses, "it pads the teacher's rows, and is replaced while it would"


def test_metric_has_values_and_aggregation():
    from verl.utils.metric import AggregationType, Metric

    metric = Metric(AggregationType.SUM, 1.0)
    metric.extend([2.0])
    assert metric.values == [1.0, 2.0] and metric.aggregation == AggregationType.SUM


def classes() -> list[type]:
    import verl_prefix.backends.fsdp
    import verl_prefix.config.actor
    import verl_prefix.config.fsdp
    import verl_prefix.config.options
    import verl_prefix.config.veomni
    import verl_prefix.cpu.engine
    import verl_prefix.cpu.platform
    import verl_prefix.cpu.rollout
    import verl_prefix.trainer.prefix_sync
    import verl_prefix.trainer.shared_pixels

    modules = [
        verl_prefix.config.actor, verl_prefix.config.fsdp, verl_prefix.config.options, verl_prefix.backends.fsdp,
        verl_prefix.config.veomni, verl_prefix.trainer.shared_pixels,
        verl_prefix.trainer.prefix_sync,
        verl_prefix.cpu.engine, verl_prefix.cpu.platform, verl_prefix.cpu.rollout,
    ]  # fmt: skip
    found = [x for module in modules for x in vars(module).values() if inspect.isclass(x)]
    return [x for x in found if x.__module__.startswith("verl_prefix.")]


def covered(module: str, name: str) -> bool:
    """Whether the table has `module:name` itself or something inside it, wherever verl re-exports it from."""
    target = getattr(importlib.import_module(module), name)
    heads = {":".join((s.partition(":")[0], s.partition(":")[2].split(".")[0])) for s in CONTRACT}
    return any(look_up(head) is target for head in heads)


def test_the_table_has_everything_that_we_import():
    missing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "verl":
                if node.module.startswith(BESIDE_OTHERS):
                    continue
                for alias in node.names:
                    try:
                        importlib.import_module(f"{node.module}.{alias.name}")
                    except ModuleNotFoundError:
                        if not covered(node.module, alias.name):
                            missing.add(f"{node.module}:{alias.name}")
    assert not missing, f"add to CONTRACT: {sorted(missing)}"


def test_the_table_has_everything_that_we_override():
    pairs = [symbol.rpartition(".") for symbol in CONTRACT if "." in symbol.partition(":")[2]]
    table = {(look_up(owner), name) for owner, _, name in pairs}
    missing = set()
    for ours in classes():
        bases = [base for base in ours.__mro__[1:] if base.__module__.startswith("verl.")]
        fields = getattr(ours, "__dataclass_fields__", {})
        defined = {name for part in ours.__mro__ if part.__module__.startswith("verl_prefix.") for name in vars(part)}
        for name in {name for base in bases for name in vars(base)} & defined - set(fields):
            by_python = name == "_abc_impl" or (name.startswith("__") and name not in ("__init__", "__post_init__"))
            if by_python or (fields and name == "__init__"):
                continue
            if not any((base, name) in table for base in bases):
                missing.add(f"{bases[0].__module__}:{bases[0].__qualname__}.{name}")
    assert not missing, f"add to CONTRACT: {sorted(missing)}"
