"""Tests of which only a part runs each time, since their cases check the same thing many times or take long.

Of a test's cases every n-th one runs each time, the first one always; 0 stands for none. The others run with the longer
suites (``-m long``). A test that stands here has to exist: :func:`thin` raises an error otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

THINNED: dict[str, int] = {
    # Searches and plans.
    "unit/planner/test_practice.py::test_a_plan_of_published_training_stays": 3,
    "unit/diagnostics/test_diagnostics_rules.py::test_examples_of_the_planner": 3,
    "unit/diagnostics/test_diagnostics_rules.py::test_good_examples_of_the_planner": 3,
    "unit/runtime/test_runtime_groups.py::test_planner_counts_the_groups_that_ranks_open": 2,
    "unit/spec/test_broken_specs.py::test_a_mistake_is_named_at_its_place_with_what_to_write": 2,
    "unit/plan/test_plan_layout.py::test_what_is_printed_leaves_the_layout_and_no_finding": 2,
    "unit/launch/test_deploy.py::test_specs_of_the_notes_have_a_plan": 3,
    "unit/planner/test_planner_kernels.py::test_what_is_required_can_be_looked_at_and_tuned": 0,
    "unit/runtime/test_trace.py::test_the_users_model_is_traced_by_a_process": 0,
    "unit/runtime/calibrate/test_calibrate.py::test_a_failed_rank_is_an_error_and_nothing_is_written": 0,
    "unit/runtime/data/test_runtime_data_cache.py::test_two_processes_build_at_once_and_one_does": 0,
    "unit/replay/test_replay.py::test_step_times_are_as_good_as_they_were_and_err_as_printed": 0,
    "unit/render/test_render_hostile.py::test_harm_in_every_field": 5,
    "unit/schedule/test_schedule_validate.py::test_every_single_fault_is_found": 3,
    "unit/planner/test_planner_sequence.py::test_what_if_of_lengths_tells_the_longest_of_each_method": 0,
    "unit/planner/test_planner_search.py::test_search_equals_exhaustive_enumeration": 3,
    "unit/planner/test_planner_search.py::test_no_layout_is_counted_twice": 2,
    "unit/engines/test_engine_corpus.py::test_every_argument_of_megatron_is_known": 0,
    "unit/engines/test_engine_commands.py::test_a_configuration_that_does_not_fit_is_improved": 0,
    "unit/launch/test_deploy.py::test_the_action_can_be_strict_and_write_no_file": 0,
    "unit/project/test_first_contact.py::test_cases_on_two_ranks_of_a_cpu_show_no_fault": 0,
    "unit/project/test_one_gpu.py::test_every_case_has_a_plan": 2,
    "unit/project/test_api.py::test_names_are_functions_whatever_was_imported_before": 2,
    "unit/launch/test_deploy.py::test_the_action_passes_good_specs": 0,
    "unit/launch/test_slices.py::test_kubernetes_is_asked_for_the_profiles_resource": 2,
    "unit/report/test_report_html.py::test_every_kind_of_schedule_is_drawn": 2,
    "unit/planner/test_planner_allocator.py::test_the_allocators_setting": 2,
    "unit/planner/test_planner_bounds.py::test_the_winner_is_the_best_of_all_layouts": 3,
    "unit/planner/test_planner_bounds.py::test_bounds_of_layers_that_differ_are_close_and_below_the_exact_time": 2,
    "unit/planner/test_planner_fused.py::test_parts_follow_device_compiler_and_precision": 3,
    "unit/planner/test_planner_kernels.py::test_tables_of_engines_cover_deepseek_v3": 2,
    "unit/planner/test_planner_queries.py::test_views_print": 2,
    "unit/planner/test_planner_queries.py::test_extreme_sizes_end_in_a_plan_or_a_finding": 2,
    "unit/planner/test_planner_sequence.py::test_no_form_that_is_left_out_is_faster_and_as_small": 3,
    "unit/planner/test_planner_sequence.py::test_what_a_table_proposes_plans_the_same_layout": 2,
    "unit/planner/test_host_memory.py::test_a_pods_limit_holds_a_save": 3,
    "unit/planner/test_pod_network.py::test_whether_pods_have_adapters_is_seen_in_the_section": 3,
    "unit/planner/test_rank_threads.py::test_threads_stay_within_the_containers_cores": 2,
    # Ranks that are executed without devices.
    "unit/runtime/dry/test_dry_terms.py::test_gradients_that_wait_for_the_norm_or_for_replicas_are_gradients": 0,
    "unit/planner/test_planner_sequence.py::test_the_longest_sequence_of_each_method_fits_and_a_longer_one_does_not": 0,
    "unit/runtime/dry/test_dry.py::test_offloaded_activations_leave_the_device": 0,
    "unit/runtime/dry/test_dry.py::test_ranks_of_a_gpu_plan_agree_on_what_they_exchange": 0,
    "unit/runtime/dry/test_dry_faults.py::test_faults_of_the_code_are_found": 0,
    "unit/runtime/test_adversarial.py::test_nothing_more_is_reduced": 2,
    "unit/runtime/test_adversarial.py::test_the_traffic_of_tensor_ranks_is_priced": 2,
    "unit/runtime/dry/test_dry_host.py::test_state_in_host_memory_takes_no_memory": 0,
    "unit/runtime/dry/test_dry_terms.py::test_terms_of_random_plans_agree_with_their_execution": 0,
    "unit/runtime/graph/test_graph_windows.py::test_the_window_of_a_family_is_described": 0,
    "unit/runtime/graph/test_graph.py::test_models_that_cannot_be_shared_are_refused": 4,
    "unit/runtime/graph/test_graph.py::test_masks_are_recognised": 4,
    "unit/runtime/graph/test_graph_values.py::test_shares_are_parts_of_the_whole": 4,
    "unit/runtime/graph/test_graph_values.py::test_code_that_shares_would_change_is_refused": 4,
    "unit/runtime/fused/test_fused_model.py::test_equal_layers_share_one_compilation": 2,
    "unit/runtime/model/test_runtime_quantised.py::test_a_dry_run_takes_frozen_weights": 2,
    "unit/runtime/calibrate/test_calibrate.py::test_a_real_measurement_of_two_ranks": 0,
    # Models, kernels and files. CI compiles all programs of the registry, for all architectures (make test-triton).
    "unit/kernels/test_kernels_offline.py::test_what_the_registry_answers_can_run": 5,
    "unit/runtime/test_runtime_fp8.py::test_equal_layers_share_one_compilation": 0,
    "unit/kernels/test_host_kernels_builds.py::test_bits_on_aarch64": 0,
    "unit/kernels/test_host_kernels_builds.py::test_thread_sanitizer_is_clean": 0,
    "unit/runtime/fused/test_fused_attention.py::test_a_compiled_block_may_hold_it": 0,
    "unit/cli/test_old_runs.py::test_what_needs_the_plan_says_how_to_go_on": 6,
    "interpreted/test_interpreted_fp8.py::test_products_are_as_exact_as_those_of_torch": 3,
    "interpreted/test_interpreted_coverage.py::test_kernels_are_asked_what_the_plan_says": 2,
    # Ranks: layers, models and whole runs.
    "parity/test_tensor.py::test_passes_equal_one_process": 5,
    "parity/test_tensor.py::test_training_equals_one_process": 2,
    "parity/test_sequence_layers.py::test_layers_on_shares_equal_one_process": 6,
    "parity/test_sequence_ring.py::test_attention_equals_one_process": 3,
    "parity/test_sequence_hf.py::test_models_on_shares_equal_one_process": 3,
    "parity/test_tensor_hf.py::test_models_equal_those_of_transformers": 3,
    "parity/test_atp.py::test_every_shape_arrangement_and_combination_equals_one_process": 4,
    "parity/test_zero_controls_ranks.py::test_equals_one_process": 3,
    "parity/test_fused_loss_ranks.py::test_every_arrangement_of_four_ranks_equals_one_process": 4,
    "parity/test_offload_parameters.py::test_two_ranks_get_the_same_bits": 2,
    "parity/test_offload.py::test_three_ranks_with_uneven_shards": 0,
    "parity/test_offload.py::test_replicas_of_shards": 0,
    "parity/test_sequence_trainer.py::test_low_precision_stays_near": 0,
    "parity/test_tiles.py::test_training_in_tiles_equals_one_process": 3,
    "parity/test_tiles.py::test_tiles_change_nothing": 2,
    "parity/test_fused_parts.py::test_fused_parts_change_nothing": 2,
    "parity/test_fp8.py::test_losses_are_near_those_of_bf16": 2,
    "parity/test_tensor_state.py::test_a_run_in_bf16_goes_on_where_a_rank_has_no_head": 0,
    "parity/test_tensor_state.py::test_every_layout_loads_the_bits_that_any_other_saved": 0,
    "parity/test_one_bit_trainer.py::test_other_layouts_of_the_same_copies_train_alike": 0,
    "launch/test_agent_nodes.py::test_a_failure_ends_all_nodes_with_one_code": 0,
    "parity/test_several_nodes.py::test_two_nodes_equal_one_process": 0,
    "parity/test_dry_repeat.py::test_repeated_micro_batches_and_layers": 0,
    "parity/test_dry_collectives.py::test_a_ring_sends_the_weights_and_gradients_of_a_real_one": 0,
    # Commands, agents and clusters.
    "launch/test_agent_trainer.py::test_every_way_of_stopping_and_going_on": 0,
    "launch/test_kill_resume.py::test_another_number_of_ranks_and_another_stage_go_on_from_a_killed_run": 0,
    "parity/test_experts_state.py::test_a_killed_run_goes_on_in_another_layout": 0,
    "parity/test_sequence_compiled.py::test_stopped_runs_go_on_with_any_number_of_ranks": 0,
    "launch/test_kill_resume.py::test_kills_change_no_bit": 3,
    "launch/test_kill_resume.py::test_low_precision_stays_near_and_the_comparison_can_fail": 0,
    "launch/test_slurm_cluster.py::test_to_the_end": 0,
    "launch/test_install.py::test_core_install_plans_examples_without_torch": 0,
    "launch/test_install.py::test_a_wheel_made_without_a_compiler_installs_and_plans": 0,
    "launch/test_planted_modules.py::test_planted_modules_are_not_imported": 0,
    "launch/test_agent_exit.py::test_folder_is_locked": 0,
    "launch/test_agent_exit.py::test_a_full_disk": 0,
    "launch/test_agent_signals.py::test_shutdown_timeout": 0,
    "launch/test_agent_signals.py::test_launcher_killed_and_detached": 0,
    "launch/test_agent_stops.py::test_a_second_interrupt_says_what_is_kept": 0,
}
"""File and name of a test → n."""


def thin(items: Iterable[pytest.Item], arguments: Iterable[str]) -> None:
    """Mark the tests that do not run each time as long.

    ``arguments`` are those of the command. Raises :class:`pytest.UsageError` for a name in :data:`THINNED` that a
    collected file does not have, unless the command names single tests.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    root = f"{Path(__file__).parent}/"
    for item in items:
        file = str(item.path)
        if file.startswith(root):
            name = getattr(item, "originalname", None) or item.name
            tests[f"{file.removeprefix(root)}::{name}"].append(item)
    files = {name.partition("::")[0] for name in tests}
    whole = not any("::" in argument for argument in arguments)
    for name, every in THINNED.items():
        if whole and name.partition("::")[0] in files and name not in tests:
            raise pytest.UsageError(f"tests/thinned.py: there is no test {name}")
        usual = [item for item in tests[name] if item.get_closest_marker("long") is None]
        for place, item in enumerate(usual):
            if not every or place % every:
                item.add_marker(pytest.mark.long)
