"""Fields of megatron-core's transformer config that `override_transformer_config` may set where a prefix is shared.

Of megatron-core 0.16.1 (megatron/core/transformer/transformer_config.py, TransformerConfig and MLATransformerConfig;
megatron/core/model_parallel_config.py). Each field is in one table: `ACTS` (as in stock), `INERT` (it does nothing
here), `ONLY` (some values are let in), `NEVER` (no value is), `ELSEWHERE` (`config.megatron` decides), or `SIZES`
(verl's own key sets it). tests/config/test_megatron_config.py compares the tables with the installed classes.
"""

from collections.abc import Callable
from typing import Any

# They act: on modules that a shared pass calls as verl's own path does, on how these are built, sharded and recomputed.
ACTS = frozenset("""
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon
    layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
    activation_func_clamp_value normalization qk_layernorm rotary_interleaved apply_residual_connection_post_layernorm
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    window_size window_attn_skip_freq no_rope_freq softmax_scale softmax_type
    attention_backend attention_softmax_in_fp32 masked_softmax_fusion disable_bf16_reduced_precision_matmul
    bias_activation_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion
    use_fused_weighted_squared_relu use_te_activation_func gradient_accumulation_fusion
    async_tensor_model_parallel_allreduce deterministic_mode disable_parameter_transpose_cache
    clone_scatter_output_in_embedding config_logger_dir
    recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
    num_moe_experts moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq
    moe_ffn_hidden_size moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_fusion moe_grouped_gemm
    moe_use_legacy_grouped_gemm moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
    moe_permute_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms moe_extended_tp
    moe_per_layer_logging
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_comm_backend
    batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
    init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
    perform_initialization use_cpu_initialization use_te_rng_tracker
""".split())  # fmt: skip

# They do nothing by themselves, as in stock: they need another field, which is refused, or act outside of training.
INERT = frozenset("""
    mtp_loss_scaling_factor mtp_standalone
    overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage wgrad_deferral_limit
    hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
    fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    kitchen_attention_backend fp4_recipe fp4_quantizer_factory
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
    moe_token_drop_policy qk_clip_alpha qk_clip_threshold
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope
    cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    offload_modules min_offloaded_tensor_size init_model_with_meta_device
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
    cross_entropy_loss_fusion cross_entropy_fusion_impl hetereogenous_dist_checkpoint test_mode flash_decode
    inference_rng_tracker inference_sampling_seed symmetric_ar_type inference_fuse_tp_communication
    mlp_chunks_for_prefill cache_mla_latents autocast_dtype barrier_with_L1_time
""".split())  # fmt: skip

# The sizes that verl's own keys set, `actor.megatron.<name>`: another value here would be of another engine.
TOPOLOGY = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
SIZES = (*TOPOLOGY, "sequence_parallel")

Values = tuple[Callable[[Any], bool], str, str]  # what it may be; a value that works, in words; why


def _off(value: Any) -> bool:
    return not value


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _all(fields: str, why: str, instead: str = "False") -> dict[str, Values]:
    return dict.fromkeys(fields.split(), (_off, instead, why))


_FIXED = "replays or fills buffers of a fixed number of tokens, and a prefix and its waves are of any"
_SCALE = "scales tokens by what else is in their pass"
_CAPACITY = "lets tokens of a pass push each other out of an expert, and a shared prefix is there once"
_ATTENTION = "makes attention another than a shared prefix's kernels compute"
_OFFLOAD = "counts forwards of layers, and a prefix and its waves are several; actor.prefix.offload=True moves what "
_OFFLOAD += "prefixes keep"
_SCHEDULE = "belongs to a schedule of megatron-core's that shared passes do not run"
_DROPOUT = "would give the rows of a group one mask"
_PRECISION = "is set by verl's own key"
_UNTRIED = "was never tried with a shared prefix"

# Which values they may have.
ONLY: dict[str, Values] = {
    **_all("fp8 fp4 quant_recipe moe_input_jitter_eps", _SCALE, "null"),
    **_all("""fp8_param fp8_dot_product_attention fp8_multi_head_attention fp4_param use_kitchen use_kitchen_attention
              activation_func_fp8_input_store moe_router_padding_for_fp8
              moe_router_padding_for_quantization""", _SCALE),
    **_all("moe_z_loss_coeff", "counts a prefix token once, where verl's own path has it in every row", "null"),
    "overlap_p2p_comm": (_off, "False", _SCHEDULE),
    "variable_seq_lengths": (_is(True), "True", "gives passes one length, and they have their own"),
    **_all("moe_expert_capacity_factor", _CAPACITY, "null"),
    **_all("moe_pad_expert_input_to_capacity moe_token_dropping", _CAPACITY),
    **_all("enable_cuda_graph external_cuda_graph", _FIXED),
    "cuda_graph_impl": (_is("none", None), "none", _FIXED),
    **_all("tp_comm_overlap", _FIXED),
    **_all("hidden_dropout attention_dropout", _DROPOUT, "0.0"),
    **_all("calculate_per_token_loss", "divides gradients by tokens of passes, of which shared ones have fewer"),
    **_all("cpu_offloading fine_grained_activation_offloading", _OFFLOAD),
    "experimental_attention_variant": (_off, "null", _ATTENTION),
    **_all("linear_attention_freq", _ATTENTION, "null"),
    **_all("""qk_clip log_max_attention_logit attention_output_gate qk_l2_norm apply_query_key_layer_scaling
              batch_invariant_mode""", _ATTENTION),
    **_all("heterogeneous_block_specs is_hybrid_model", "makes layers of other kinds"),
    **_all("mtp_num_layers", "adds layers that predict several tokens", "null"),
    **_all("mrope_section", "is of images", "null"),
    **_all("moe_enable_routing_replay", "is set by verl's own key, actor.megatron.router_replay.mode"),
    **_all("moe_router_force_load_balancing", "routes tokens by chance, each time they are computed"),
    **_all("""overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
              defer_embedding_wgrad_compute enable_autocast""", _SCHEDULE),
    **_all("num_microbatches_with_partial_activation_checkpoints", _SCHEDULE, "null"),
    **_all("hybrid_context_parallel", "cuts rows as context parallelism does"),
    **_all("distribute_saved_activations fused_single_qkv_rope fp32_residual_connection use_inference_optimized_layers",
           _UNTRIED),
    "transformer_impl": (_is("transformer_engine", "local"), "transformer_engine", _UNTRIED),
}  # fmt: skip
# No value works: verl's own keys set these, or its code.
NEVER: dict[str, str] = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "fp16", "bf16"), f"{_PRECISION}; set actor.megatron.dtype"),
    **dict.fromkeys(
        ("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        "is set by verl's code; remove it",
    ),
}
# Decided where more is known (`config.megatron`): rotary embeddings by the model, losses of routers by the schedule,
# what ranks of context parallelism exchange by their number.
ELSEWHERE = (
    "apply_rope_fusion", "multi_latent_attention", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "cp_comm_type",
)  # fmt: skip


def refusal(name: str, value: Any) -> str | None:
    """Why a field may not have this value, and what to set, to stand behind `key=value`; None: it may."""
    if name in ACTS or name in INERT or name in ELSEWHERE:
        return None
    if name in NEVER:
        return NEVER[name]
    if name not in ONLY:
        return "is no field of megatron-core 0.16.1 that was tried with a shared prefix; remove it"
    works, instead, why = ONLY[name]
    return None if works(value) else f"{why}; set {instead}"
