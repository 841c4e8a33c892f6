"""Every place of the package that asks whether there is CUDA, or calls it, and the test that runs it without a GPU."""

import ast
from pathlib import Path

import verl_prefix

PACKAGE = Path(verl_prefix.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
FLASH, CORE, TOOLS = "core/test_flash_attn_package.py", "core/test_core_on_cuda.py", "tools/test_tools_on_cuda.py"
FAULTS = "engine/test_faults.py"
LOG_LINE = f"{FLASH}:test_the_first_log_line_says_what_a_missing_fa3_costs_and_how_to_install_it"
NEWEST = f"{FLASH}:test_the_newest_interface_that_the_gpu_runs_is_chosen"
CAPACITY = f"{TOOLS}:test_capacity_is_searched_under_the_allocators_limit"
PEAK = f"{FAULTS}:test_the_peak_of_the_waves_stands_in_the_step_that_had_it"
ROOM = f"{FAULTS}:test_attention_is_kept_where_updates_without_left_room_to_spare"
PLACES = {
    "auto/calibration.py:measure.run": f"{CORE}:test_a_pass_is_measured_until_the_device_has_computed_it",
    "cli.py:_ab": f"{TOOLS}:test_ab_leaves_verl_its_platform_where_there_is_a_gpu",
    "config/veomni.py:PrefixVeOmniActorConfig.check_spread":
        "config/test_veomni_config.py:test_what_cannot_be_is_refused_in_the_driver_by_its_key",
    "core/kernels/merge.py:_fused_merge": f"{CORE}:test_the_fused_merge_is_taken_where_triton_is_installed",
    "core/host_memory.py:HostPages.__init__":
        f"{CORE}:test_the_host_waits_for_the_oldest_copies_where_too_much_is_on_its_way",
    "core/kernels/__init__.py:_chosen": f"{FLASH}:test_on_a_gpu_nothing_falls_back_to_the_dense_reference_unasked",
    "core/kernels/__init__.py:_chosen.log": LOG_LINE,
    "core/kernels/aten.py:unavailable": f"{CORE}:test_torchs_own_flash_attention_runs_from_sm_80_on",
    "core/kernels/flash_attn.py:_installed": NEWEST,
    "core/kernels/flash_attn.py:missing_best": NEWEST,
    "core/kernels/flash_attn.py:runs_on_this_gpu": f"{FLASH}:test_no_remedy_is_named_where_no_package_runs",
    "core/kernels/flash_attn.py:unavailable": NEWEST,
    "core/kernels/cuda_rules.py:unsupported_by_all": LOG_LINE,
    "core/meter.py:Meter.seconds": f"{CORE}:test_phases_are_timed_by_events_for_which_only_the_reader_waits",
    "core/meter.py:Meter.between_a_and_c": PEAK,
    "core/meter.py:_now": f"{CORE}:test_phases_are_timed_by_events_for_which_only_the_reader_waits",
    "core/offload.py:device_room": "core/test_offload.py:test_room_for_prefetching_leaves_an_eighth_of_the_device",
    "engine/headroom.py:Headroom.__init__": ROOM,
    "engine/headroom.py:Headroom.fits": f"{FAULTS}:test_an_engine_for_log_probs_alone_has_no_update_to_fit",
    "engine/headroom.py:Headroom.choose_memory": f"{FAULTS}:test_what_another_engine_takes_between_updates_is_no_room",
    "engine/headroom.py:Headroom.measured_update": ROOM,
    "models/recurrent.py:Mamba2._chunk_scan":
        "models/test_recurrent_packages.py:test_models_are_those_of_hugging_face_by_functions_with_these_arguments",
    "tools/ab/arm.py:_measured": f"{TOOLS}:test_a_pass_of_ab_is_measured_on_the_gpu",
    "tools/ab/command.py:join_ranks": f"{TOOLS}:test_a_rank_of_ab_takes_its_gpu_and_both_kinds_of_collectives",
    "tools/ab/other_engines.py:_of_megatron":
        "engine/test_trace.py:test_a_trace_of_megatron_becomes_one_of_fsdp2",
    "tools/ab/source.py:Source.__init__":
        "tools/test_ab.py:test_more_ranks_than_gpus_are_refused_before_they_start",
    "tools/ab/source.py:synthetic_budget": f"{TOOLS}:test_made_up_rows_of_ab_are_bf16_and_fill_a_gpu",
    "tools/ab/source.py:synthetic_manifest": f"{TOOLS}:test_made_up_rows_of_ab_are_bf16_and_fill_a_gpu",
    "tools/bench/arms.py:run_arm": f"{TOOLS}:test_an_update_is_timed_when_the_device_has_computed_it",
    "tools/bench/arms.py:stock_attention": f"{TOOLS}:test_stock_has_the_best_attention_of_a_gpu",
    "tools/bench/memory.py:capacity": CAPACITY,
    "tools/bench/memory.py:capacity.trains": CAPACITY,
    "tools/bench/memory.py:free_memory": CAPACITY,
    "tools/bench/options.py:Options.__post_init__": f"{TOOLS}:test_bench_takes_the_gpu_bf16_and_full_passes",
    "tools/bench/options.py:Options.budget_of": f"{TOOLS}:test_bench_takes_the_gpu_bf16_and_full_passes",
    "tools/bench/report.py:compare": f"{TOOLS}:test_a_report_of_a_known_gpu_has_the_share_of_its_peak",
    "tools/doctor.py:_check_kernels": LOG_LINE,
    "tools/memory.py:memory_mib": f"{TOOLS}:test_memory_is_the_allocators",
    "tools/memory.py:reset_peak_mib": f"{TOOLS}:test_memory_is_the_allocators",
    "versions.py:device_name": f"{TOOLS}:test_the_device_of_a_report_is_the_gpu",
}  # fmt: skip
# Places that decide nothing.
NOT_RUN = {
    "cli.py:_add_bench": "the choices of --device",
    "tools/simulate/operations.py:FakeFlashAttention.unsupported": "asks aten what it takes, as every simulation does",
}


def asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node).startswith("torch.cuda.") or node.attr in ("is_cuda", "get_device_module")
    return isinstance(node, ast.Constant) and node.value == "cuda"


def places(node: ast.AST, within: str = "") -> set[str]:
    """Functions in which CUDA is asked for, by their names from the outermost on."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
        found |= places(child, name) | ({name} if asks(child) and name else set())
    return found


def test_every_place_that_asks_for_cuda_runs_in_a_test_or_is_named():
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in PACKAGE.rglob("*.py")
        for name in places(ast.parse(path.read_text()))
    }
    assert found == PLACES.keys() | NOT_RUN.keys()
    for place, test in PLACES.items():
        file, name = test.split(":")
        assert f"def {name}(" in (TESTS / file).read_text(), (place, test)
