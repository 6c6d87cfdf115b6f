"""torch's DDP tests: which there are, and what is known of them."""

TORCH = "2.13.0"
"""The version of torch whose tests these are."""

TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_zero_output_features",
    "test_ddp_create_graph",
    "test_DistributedDataParallel_non_default_stream",
    "test_ddp_comm_hook_logging",
    "test_get_data_parallel_params",
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_hook_parity_post_localSGD",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_DistributedDataParallel",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_ddp_logging_data_cpu",
    "test_ddp_logging_data_gpu",
    "test_ddp_bucket_cap_mb_list",
    "test_static_graph_api_cpu",
    "test_ddp_sync_module_states",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_profiling_autograd_profiler",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_profiling_execution_trace",
    "test_ddp_join_model_equivalence",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_input_exception",
    "test_ddp_ignore_params_arg",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_device",
    "test_ddp_namedtuple",
    "test_grads_same_across_ranks_with_no_sync",
    "test_ddp_control_flow_same_across_ranks",
    "test_invalid_static_graph",
    "test_ddp_control_flow_different_across_ranks",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_output_unused_in_loss_tuple_module",
    "test_output_unused_in_loss_dict_module",
    "test_undefined_grad_parity_unused_parameters",
    "test_different_graph_across_ranks",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_inference",
    "test_ddp_sync_bn_training_vs_eval",
    "test_ddp_python_error_logged",
    "test_ddp_static_graph_nested_types",
    "test_ddp_returns_tensor_with_no_grad",
    "test_detect_ddp_is_actually_static",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_has_finalized",
    "test_ddp_broadcast_buffer",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_static_graph_multi_forward",
    "test_sync_bn_logged",
    "test_stateless_api_with_ddp",
    "test_ddp_forward_backward_hook",
    "test_ddp_hook_pickling_powerSGD",
    "test_ddp_device_mesh_initialization",
    "test_ddp_compile_static_graph",
    "test_ddp_sink_noclone",
    "test_skip_all_reduce_unused_parameters",
)
"""All tests that use ``DistributedDataParallel``, in torch's order."""

SYNC_BATCHNORM = "torch's `SyncBatchNorm` works on GPUs only"
BROKEN = "torch skips it as broken"
STEPS_IN_BACKWARD = "torch's private `_apply_optimizer_in_backward` is refused: it steps before gradients are averaged"
MIXED_PRECISION = "`mixed_precision` is a private, experimental argument of torch's DDP"
LOGGING = "reads torch-private logging data (`_get_ddp_logging_data`)"
UNUSED = "wants torch's error for an unused parameter; here that is no error"
USED_MAP = "reads torch-private state (`reducer._get_local_used_map`), and wants an error for an unused parameter"
NAMES = "builds a torch-private table of names (`_build_params_for_reducer`)"
BUFFER_HOOK = "registers a hook for module buffers by a torch-private method (`_register_buffer_comm_hook`)"

FAILS_WITH_TORCH: dict[str, str] = {
    "test_DistributedDataParallel_non_default_stream": BROKEN,
    "test_DistributedDataParallel": BROKEN,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": SYNC_BATCHNORM,
    "test_ddp_logging_data_gpu": "compares the logged device ids with those of GPUs",
    "test_ddp_profiling_autograd_profiler": BROKEN,
    "test_ddp_profiling_execution_trace": BROKEN,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": SYNC_BATCHNORM,
    "test_ddp_device": "looks for inputs on a GPU",
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": BROKEN,
    "test_ddp_model_diff_shape_across_ranks": BROKEN,
    "test_ddp_inference": SYNC_BATCHNORM,
    "test_ddp_sync_bn_training_vs_eval": BROKEN,
    "test_ddp_has_finalized": BROKEN,
    "test_sync_bn_logged": SYNC_BATCHNORM,
    "test_ddp_hook_pickling_powerSGD": "torch skips it as flaky; it loads a file in a way that torch refuses now",
}
"""Tests that fail, or are skipped, with torch's own class on CPU ranks, and why."""

EXCLUDED: dict[str, str] = {
    "test_ddp_create_graph": (
        "`create_graph=True` is refused: torch's DDP does it, and its gradients of gradients are silently wrong"
    ),
    "test_ddp_comm_hook_logging": LOGGING,
    "test_get_data_parallel_params": "calls a torch-private function (`_get_data_parallel_params`)",
    "test_ddp_apply_optim_in_backward": STEPS_IN_BACKWARD,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": STEPS_IN_BACKWARD,
    "test_ddp_apply_optim_in_backward_ignored_params": STEPS_IN_BACKWARD,
    "test_ddp_native_mixed_precision_ignored_params": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": MIXED_PRECISION,
    "test_ddp_logging_data_cpu": LOGGING,
    "test_ddp_bucket_cap_mb_list": (
        "reads what torch makes of `bucket_cap_mb_list`, an argument that `BucketDDP` does not have"
    ),
    "test_static_graph_api_cpu": (
        "wants torch's error where `_set_static_graph` is called late; here it has no effect at any time"
    ),
    "test_ddp_sync_module_states": (
        "calls a torch-private function (`_sync_module_states`) with inner state of the wrapper"
    ),
    "test_ddp_profiling_torch_profiler": (
        "counts profiler events: torch's own number of collectives, and its search of the graph"
    ),
    "test_ddp_unused_params_rebuild_buckets_exception": UNUSED,
    "test_ddp_control_flow_same_across_ranks": USED_MAP,
    "test_invalid_static_graph": "wants torch's error where `static_graph=True` was not true; here it may change",
    "test_ddp_control_flow_different_across_ranks": USED_MAP,
    "test_ddp_build_debug_param_to_name_mapping": NAMES,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": NAMES,
    "test_ddp_multiple_nested_unused_params_error": UNUSED,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": UNUSED,
    "test_ddp_python_error_logged": (
        "wants torch's words for a hook that is not callable, in torch-private logging data; here it is a TypeError too"
    ),
    "test_detect_ddp_is_actually_static": "reads torch-private state (`reducer._ddp_graph_static`)",
    "test_ddp_buffer_hook_allreduce_return_future": BUFFER_HOOK,
    "test_ddp_buffer_hook_allreduce": BUFFER_HOOK,
    "test_ddp_broadcast_buffer_via_hook": BUFFER_HOOK,
    "test_ddp_broadcast_buffers_deprecation_warning": (
        "wants torch's warning that `broadcast_buffers` will go; here the argument stays"
    ),
    "test_ddp_device_mesh_initialization": (
        "wants torch's words for a mesh beside a group, and for one of two dimensions"
    ),
    "test_skip_all_reduce_unused_parameters": (
        "sets `skip_all_reduce_unused_params`, which `BucketDDP` does not have, and reads torch-private logging data"
    ),
}
"""Tests that pass with torch's class and whose subject is torch's inner state, words or private interface; and why."""

PENDING: dict[str, str] = {}
"""Tests that pass with torch's class, should with ``BucketDDP``, and do not yet; and why."""
