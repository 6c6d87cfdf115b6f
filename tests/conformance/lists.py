"""torch's DDP tests: which there are, and what is known of them."""

TORCH = "2.13.0"
"""The version of torch whose tests these are."""


class Fails(str):
    """Why a test fails, or is skipped, with torch's own class on CPU ranks."""


class Excluded(str):
    """Why the subject of a test that passes with torch's class is torch's inner state, words or private interface."""


class Pending(str):
    """Why a test that passes with torch's class does not yet with ``BucketDDP``, though it should."""


PASSES = ""
SYNC_BATCHNORM = Fails("torch's `SyncBatchNorm` works on GPUs only")
BROKEN = Fails("torch skips it as broken")
STEPS_IN_BACKWARD = Excluded(
    "torch's private `_apply_optimizer_in_backward` is refused: it steps before gradients are averaged"
)
MIXED_PRECISION = Excluded("`mixed_precision` is a private, experimental argument of torch's DDP")
LOGGING = Excluded("reads torch-private logging data (`_get_ddp_logging_data`)")
UNUSED = Excluded("wants torch's error for an unused parameter; here that is no error")
USED_MAP = Excluded(
    "reads torch-private state (`reducer._get_local_used_map`), and wants an error for an unused parameter"
)
NAMES = Excluded("builds a torch-private table of names (`_build_params_for_reducer`)")
BUFFER_HOOK = Excluded("registers a hook for module buffers by a torch-private method (`_register_buffer_comm_hook`)")

TABLE: dict[str, str] = {
    "test_DistributedDataParallelCPU": PASSES,
    "test_DistributedDataParallelCPU_grad_is_view": PASSES,
    "test_DistributedDataParallel_requires_grad": PASSES,
    "test_ddp_zero_output_features": PASSES,
    "test_ddp_create_graph": Excluded(
        "`create_graph=True` is refused: torch's DDP does it, and its gradients of gradients are silently wrong"
    ),
    "test_DistributedDataParallel_non_default_stream": BROKEN,
    "test_ddp_comm_hook_logging": LOGGING,
    "test_get_data_parallel_params": Excluded("calls a torch-private function (`_get_data_parallel_params`)"),
    "test_ddp_apply_optim_in_backward": STEPS_IN_BACKWARD,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": STEPS_IN_BACKWARD,
    "test_ddp_apply_optim_in_backward_ignored_params": STEPS_IN_BACKWARD,
    "test_ddp_native_mixed_precision_ignored_params": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": MIXED_PRECISION,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": MIXED_PRECISION,
    "test_ddp_hook_parity_allreduce": PASSES,
    "test_ddp_hook_parity_allreduce_process_group": PASSES,
    "test_ddp_hook_parity_powerSGD": PASSES,
    "test_ddp_hook_parity_post_localSGD": PASSES,
    "test_accumulate_gradients_no_sync": PASSES,
    "test_accumulate_gradients_no_sync_grad_is_view": PASSES,
    "test_accumulate_gradients_no_sync_allreduce_hook": PASSES,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": PASSES,
    "test_DistributedDataParallel": BROKEN,
    "test_DistributedDataParallel_with_amp_and_grad_is_view": PASSES,
    "test_post_localSGD_optimizer_parity": PASSES,
    "test_post_localSGD_optimizer_parity_grad_is_view": PASSES,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": PASSES,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": PASSES,
    "test_post_localSGD_optimizer_step_reload": PASSES,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": SYNC_BATCHNORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": SYNC_BATCHNORM,
    "test_ddp_logging_data_cpu": LOGGING,
    "test_ddp_logging_data_gpu": Fails("compares the logged device ids with those of GPUs"),
    "test_ddp_bucket_cap_mb_list": Excluded(
        "reads what torch makes of `bucket_cap_mb_list`, an argument that `BucketDDP` does not have"
    ),
    "test_static_graph_api_cpu": Excluded(
        "wants torch's error where `_set_static_graph` is called late; here it has no effect at any time"
    ),
    "test_ddp_sync_module_states": Excluded(
        "calls a torch-private function (`_sync_module_states`) with inner state of the wrapper"
    ),
    "test_ddp_grad_div_uneven_inputs": PASSES,
    "test_ddp_profiling_autograd_profiler": BROKEN,
    "test_ddp_profiling_torch_profiler": Excluded(
        "counts profiler events: torch's own number of collectives, and its search of the graph"
    ),
    "test_ddp_profiling_execution_trace": BROKEN,
    "test_ddp_join_model_equivalence": PASSES,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": SYNC_BATCHNORM,
    "test_ddp_uneven_inputs": PASSES,
    "test_ddp_uneven_input_join_disable": PASSES,
    "test_ddp_uneven_input_exception": PASSES,
    "test_ddp_ignore_params_arg": PASSES,
    "test_ddp_unused_params_rebuild_buckets_exception": UNUSED,
    "test_ddp_shared_grad_acc_unused_params": PASSES,
    "test_ddp_device": Fails("looks for inputs on a GPU"),
    "test_ddp_namedtuple": PASSES,
    "test_grads_same_across_ranks_with_no_sync": PASSES,
    "test_ddp_control_flow_same_across_ranks": USED_MAP,
    "test_invalid_static_graph": Excluded(
        "wants torch's error where `static_graph=True` was not true; here it may change"
    ),
    "test_ddp_control_flow_different_across_ranks": USED_MAP,
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger": PASSES,
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": BROKEN,
    "test_verify_model_across_rank_with_logger": PASSES,
    "test_verify_model_across_rank_without_logger": PASSES,
    "test_ddp_model_diff_shape_across_ranks": BROKEN,
    "test_ddp_model_diff_num_params_across_ranks": PASSES,
    "test_output_unused_in_loss_tuple_module": PASSES,
    "test_output_unused_in_loss_dict_module": PASSES,
    "test_undefined_grad_parity_unused_parameters": PASSES,
    "test_different_graph_across_ranks": PASSES,
    "test_ddp_build_debug_param_to_name_mapping": NAMES,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": NAMES,
    "test_ddp_multiple_nested_unused_params_error": UNUSED,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": UNUSED,
    "test_ddp_inference": SYNC_BATCHNORM,
    "test_ddp_sync_bn_training_vs_eval": BROKEN,
    "test_ddp_python_error_logged": Excluded(
        "wants torch's words for a hook that is not callable, in torch-private logging data; here it is a TypeError too"
    ),
    "test_ddp_static_graph_nested_types": PASSES,
    "test_ddp_returns_tensor_with_no_grad": PASSES,
    "test_detect_ddp_is_actually_static": Excluded("reads torch-private state (`reducer._ddp_graph_static`)"),
    "test_ddp_new_tensor_in_fwd": PASSES,
    "test_ddp_new_tensor_in_fwd_static_graph": PASSES,
    "test_ddp_buffer_hook_allreduce_return_future": BUFFER_HOOK,
    "test_ddp_buffer_hook_allreduce": BUFFER_HOOK,
    "test_ddp_broadcast_buffer_via_hook": BUFFER_HOOK,
    "test_ddp_remove_autograd_hooks": PASSES,
    "test_ddp_has_finalized": BROKEN,
    "test_ddp_broadcast_buffer": PASSES,
    "test_ddp_join_respects_forward_sync_buffers_false": PASSES,
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": PASSES,
    "test_ddp_broadcast_buffers_deprecation_warning": Excluded(
        "wants torch's warning that `broadcast_buffers` will go; here the argument stays"
    ),
    "test_static_graph_multi_forward": PASSES,
    "test_sync_bn_logged": SYNC_BATCHNORM,
    "test_stateless_api_with_ddp": PASSES,
    "test_ddp_forward_backward_hook": PASSES,
    "test_ddp_hook_pickling_powerSGD": Fails(
        "torch skips it as flaky; it loads a file in a way that torch refuses now"
    ),
    "test_ddp_device_mesh_initialization": Excluded(
        "wants torch's words for a mesh beside a group, and for one of two dimensions"
    ),
    "test_ddp_compile_static_graph": PASSES,
    "test_ddp_sink_noclone": PASSES,
    "test_skip_all_reduce_unused_parameters": Excluded(
        "sets `skip_all_reduce_unused_params`, which `BucketDDP` does not have, and reads torch-private logging data"
    ),
}
"""All tests that use ``DistributedDataParallel``, in torch's order."""

TESTS = tuple(TABLE)
FAILS_WITH_TORCH = {name: reason for name, reason in TABLE.items() if isinstance(reason, Fails)}
EXCLUDED = {name: reason for name, reason in TABLE.items() if isinstance(reason, Excluded)}
PENDING = {name: reason for name, reason in TABLE.items() if isinstance(reason, Pending)}
