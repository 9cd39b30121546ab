"""The keys of NeMo 1, NeMo 2 and Megatron-LM, which name most things alike (keys.py says what the tables mean)."""

from __future__ import annotations

from megarlhf.convert.keys import Keys

# Switches of parts that megarlhf does not have. The keys of such a part are harmless while its switch is off.
_FIXED: dict[str, tuple] = {
    "rotary_interleaved": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "linear_attention_type": (None,),
    "mtp_num_layers": (None, 0),
    "mrope_section": (None,),
    "is_hybrid_model": (False,),
    "heterogeneous_block_specs": (False,),
}
_USED = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels max_position_embeddings
    normalization layernorm_epsilon position_embedding_type rotary_base init_method_std make_vocab_size_divisible_by
    tensor_model_parallel_size
"""
_HARMLESS = (
    # how the work is cut over devices
    """
    pipeline_model_parallel_* virtual_pipeline_* context_parallel_* expert_model_parallel_* expert_tensor_parallel_*
    data_parallel_* model_parallel_size sequence_parallel hierarchical_context_* hybrid_context_parallel cp_comm_type
    encoder_*_parallel_size transformer_pipeline_model_parallel_size num_layers_in_*_pipeline_stage
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank *first_pipeline_num_layers
    *last_pipeline_num_layers account_for_*_in_pipeline_split pipeline_dtype microbatch_group_size_per_* use_tp_pp_dp_*
    max_seqlen_per_dp_cp_rank mtp_standalone moe_extended_tp high_priority_stream_groups
    """,
    # how it is sent, kept and scheduled
    """
    tp_comm_* ub_tp_comm_* nccl_* use_nccl_ub use_sharp sharp_* ddp_* fsdp_* use_*fsdp* enable_full_sharding_in_hsdp
    outer_dp_* align_*_gather align_*_reduce overlap_* *_overlap_grad_reduce batch_p2p_* use_ring_exchange_p2p
    async_tensor_model_parallel_* deallocate_pipeline_outputs scatter_gather_tensors_in_pipeline barrier_with_*
    distributed_* distrib_* *distributed_optimizer* fsdp sharp validation_param_sync_overlap
    lazy_mpu_init rank local_rank world_size *_gloo_process_groups
    defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute gradient_accumulation_fusion
    accumulate_allreduce_grads_in_fp32 grad_reduce_in_* gradient_reduce_div_fusion grad_div_ar_fusion
    gradient_as_bucket_view grad_allreduce_chunk_size_mb preserve_fp32_weights suggested_communication_unit_size
    sync_batch_comm variable_seq_lengths symmetric_ar_type disable_symmetric_registration clone_scatter_output_*
    keep_fp8_transpose_cache *_sync_func *_grads_func grad_scale_func ep_overlap_* bucket_size reduce_scatter_*
    recompute_* activations_checkpoint_* checkpoint_activations distribute_*_activations cpu_offloading*
    _cpu_offloading_context num_micro*batches_with_partial_activation_checkpoints fine_grained_activation_offloading
    offload_* min_offloaded_tensor_size optimizer_cpu_offload optimizer_offload_fraction pin_cpu_*
    use_torch_optimizer_for_cpu_offload disable_parameter_transpose_cache reuse_grad_buf_*
    """,
    # how it is rounded, and by which kernels
    """
    fp8* fp4* bf16 fp16 fp16_lm_cross_entropy fp32_residual_connection e4m3 reduce_amax tp_only_amax_red use_emha
    params_dtype precision autocast_dtype enable_autocast megatron_amp_O2 native_amp_* main_*_dtype exp_avg_*dtype
    first_last_layers_bf16 num_layers_at_*_in_bf16 disable_bf16_reduced_precision_matmul attention_softmax_in_fp32
    apply_query_key_layer_scaling use_kitchen* kitchen_* quant_recipe te_precision_* activation_func_fp8_input_store
    bias_*_fusion masked_softmax_fusion apply_rope_fusion rope_fusion cross_entropy_*fusion* use_fused_* fused_*
    get_attention_mask_from_fusion transformer_impl transformer_engine transformer_layer_spec use_transformer_engine_*
    use_te_* te_rng_tracker use_mcore_models use_legacy_models use_flash_* use_inference_optimized_layers
    persist_layer_norm
    memory_efficient_layer_norm attention_backend enable_cuda_graph external_cuda_graph cuda_graph_* deterministic_mode
    batch_invariant_mode onnx_safe jit_* flash_decode perform_initialization init_model_with_meta_device
    mlp_chunks_for_prefill use_cpu_initialization apex_transformer_log_level
    """,
    # training
    """
    adam_* sgd_* muon_* lr lr_* min_lr decoupled_* optim optimizer *weight_decay* *loss_scale* hysteresis clip_grad
    gradient_clip_val store_param_remainders use_precision_aware_optimizer calculate_per_token_loss *_dropout
    *_iters *_iterations *_samples *_interval *batch_size *batch_size_increment rampup_* decrease_batch_size_* seed
    eval_* train_* test_* valid_* full_validation multiple_validation_sets finetune restore_* resume_* pretrained_*
    peft init_method* output_layer_init_method embedding_init_method* use_scaled_init_method qk_clip* check_for_*
    log_* rerun_* error_injection_* iteration num_floating_point_operations_so_far mtp_loss_scaling_factor freeze_*
    answer_only_loss skip_train do_train do_valid do_test
    override_opt_* use_checkpoint_* do_layer_norm_weight_decay
    iterations_to_skip skipped_train_samples data_step_fn forward_step_fn generation_config timers *_megatron_timers
    megatron_timer_* test_mode grad_*_every
    """,
    # the data and the tokenizer, of which the weights have the size
    """
    data data_* dataloader_* mock_data split split_* tokenizer_* vocab_file vocab_extra_ids padded_vocab_size merge_file
    per_split_data_args_path train_data* valid_data* num_dataset_builder_threads object_storage_* trust_remote_code
    special_tokens tiktoken_* null_tokenizer_* metadata_path legacy_tokenizer* allow_ambiguous_pad_tokens s3_cache_path
    seq_length encoder_seq_length decoder_seq_length encoder_num_layers decoder_num_layers override_vocab_size
    num_workers mask_* short_seq_prob sample_rate eod_mask_loss reset_* create_attention_mask_in_dataloader
    mmap_bin_files fim_* sft sft_* inference inference_* embedding_path
    """,
    # what is written, kept, measured and restarted
    """
    logging_level tensorboard_* wandb_* *one_logger* save save_* load load_* ckpt_* auto_detect_ckpt_format async_save
    dist_ckpt_* use_dist_ckpt* *_dist_checkpoint* use_persistent_ckpt_worker non_persistent_* no_save_* no_load_*
    no_ckpt_* exit_* profile profile_* use_pytorch_profiler nsys_* nvtx_* pytorch_profiler_* record_memory_*
    memory_snapshot_* *straggler* manual_gc* gc_* adlr_* enable_ft_* ft_* inprocess_* app_tag_* timing_* replication*
    verify_integrity strict_fsdp_* result_rejected_* phase_transition_* yaml_cfg config_logger_dir empty_unused_memory_*
    e2e_* cuda_max_* disable_jit_* consumed_* curr_iteration start_weight_* end_weight_* main_grads_* dump_* name target
    _target_ nemo_version pre_process post_process parallel_output library model_transform model_type
    """,
    # belongs to the switches above, or to other kinds of models
    """
    moe_* mamba_* use_mamba_mem_eff_path disable_mamba_* q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
    v_head_dim rope_type rotary_scaling_factor original_max_position_embeddings mscale mscale_all_dim beta_fast
    beta_slow cache_mla_latents window_attn_skip_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads dsa_* yarn_* relative_attention_* bert_* biencoder_* retriever_*
    retro_* ict_* dino_* swin_* vision_* img_* patch_dim num_channels num_classes iter_per_epoch
    output_bert_embeddings max_tokens_to_oom langrl_* perform_rl_step query_in_block_prob
    indexer_* use_one_sent_docs classes_fraction block_data_path titles_data_path evidence_data_path kd_* rl_* grpo_*
    export_* modelopt_* enable_experimental hetereogenous_dist_checkpoint
    """,
)
_MEGATRON = Keys(_USED, _FIXED, " ".join(_HARMLESS), null_is_absent=True)

NEMO1 = _MEGATRON.also(
    """
    activation bias bias_activation_fusion openai_gelu encoder_seq_length mcore_gpt scale_positional_embedding
    seq_len_interpolation_factor qkv_bias rotary_percentage share_embeddings_and_output_weights
    layernorm_zero_centered_gamma apply_embedding_scaling num_moe_experts tokenizer
    """,
    {
        "transformer_block_type": ("pre_ln",),
        "megatron_legacy": (False,),
        "headscale": (False,),
        "mcore_customization_config": (None, {}),
        "normalize_attention_scores": (True,),
        "attention_type": ("multihead",),
        "multi_query_attention": (False,),
        "qk_layernorm": (False,),
        "use_avg_pool": (False,),  # of reward models: the score of the last token is ours
    },
    """
    sentencepiece_legacy *_tp_comm_* enforce_divisible_batch use_*_checkpoint num_attributes attribute_weights
    regression reward_model_type output_sequence force_head_dtype loss_mult ppo dpo kto steerlm spin
    """,
)
NEMO2 = _MEGATRON.also(
    """
    activation_func add_bias_linear add_qkv_bias bias_activation_fusion gated_linear_unit seq_length scale_factor
    low_freq_factor high_freq_factor old_context_len rotary_percent qk_layernorm share_embeddings_and_output_weights
    num_moe_experts
    """,
    {
        "layernorm_zero_centered_gamma": (False,),
        "seq_len_interpolation_factor": (None,),
        "scale_embeddings_by_sqrt_dim": (False,),
    },
    "vocab_size should_pad_vocab scatter_embedding_sequence_parallel",
)
MEGATRON_LM = _MEGATRON.also(
    """
    add_bias_linear add_qkv_bias bias_gelu_fusion openai_gelu swiglu group_query_attention norm_epsilon rotary_percent
    use_rope_scaling rope_scaling_factor qk_layernorm vocab_size untie_embeddings_and_output_weights
    add_position_embedding use_rotary_position_embeddings num_experts
    """,
    {
        "apply_layernorm_1p": (False,),
        "squared_relu": (False,),
        "quick_geglu": (False,),
        "rotary_seq_len_interpolation_factor": (None, 1),
        "spec": (None,),
        "hybrid_attention_ratio": (0.0,),
        "hybrid_mlp_ratio": (0.0,),
        "hybrid_override_pattern": (None,),
        "hybrid_layer_pattern": (None,),
        "retro_add_retriever": (False,),
        "heterogeneous_layers_config_path": (None,),
        "heterogeneous_layers_config_encoded_json": (None,),
    },
)
