"""Every slow test is one that some section of `.ci/run` runs: nobody reads what runs once a week and fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import KeywordMatcher, MarkMatcher
from _pytest.mark.expression import Expression

from helpers.thorough import drawn

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci/run"
# Of these each case is run, thorough ones and those of accelerators at every fourth change or so; of slow tests, many
# of which have dozens of cases, one case of each function.
ALL_CASES = ("thorough", "browser", "accelerator")
# Those that slow.yml alone runs, on Saturdays: variants of what the sections run, some of which take minutes. The list
# only gets shorter.
WEEKLY = {
    "accelerator/test_kernels.py": ("test_attention_compiles",),
    "accelerator/test_mesh.py": ("test_devices_of_one_data_shard_exchange_sums_and_logits",),
    "accelerator/test_mosaic.py": ("test_prefill_compiles",),
    "cli/test_bench.py": (
        "test_every_sweep_of_growth_has_points",
        "test_fresh_processes_start_and_restart",
    ),
    "cli/test_breakdown.py": ("test_the_parts_of_a_step_add_up",),
    "cli/test_warm.py": ("test_the_programs_of_structured_output_on_demand",),
    "execution/test_resident_tables.py": ("test_guided_rows_beside_others",),
    "kernels/test_deprecated.py": ("test_no_module_imports_a_deprecated_one",),
    "kernels/test_guard_pages.py": (
        "test_one_byte_too_far_is_a_fault",
        "test_the_kernels_touch_nothing_outside",
    ),
    "kvcache/persist/test_snapshot.py": ("test_fifty_kills_while_saving_leave_a_complete_state",),
    "lessons/test_lesson_25_no_compiling_while_serving.py": (
        "test_lesson_25_the_counters_see_a_program_that_compiles_while_serving",
    ),
    "lessons/test_lesson_30_arguments_of_a_step.py": ("test_lesson_30_calls_per_step_do_not_grow_with_the_leaves",),
    "models/adapters/test_real_peft.py": (
        "test_what_is_not_done_is_refused_as_peft_saved_it",
        "test_what_peft_saved_is_what_it_computed",
    ),
    "models/families/test_parity_transformers.py": (
        "test_live_transformers_computes_the_same_and_what_it_saves_opens_as_the_same",
    ),
    "models/loading/gguf/test_memory.py": ("test_peak_memory_is_the_leaves_and_a_bounded_rest",),
    "models/loading/test_four_bits.py": ("test_logits_of_six_bits_are_those_of_eight_to_the_last_bit",),
    "models/test_diagnosis.py": (
        "test_a_sound_model_has_nothing_to_report",
        "test_the_doctor_names_them",
    ),
    "programs/test_late_store.py": ("test_a_process_that_ends_at_once_has_written",),
    "programs/test_layered.py": (
        "test_a_first_text_is_made_of_parts_where_kernels_are_there_too",
        "test_every_family_writes_what_whole_programs_write",
        "test_layers_of_one_kind_are_traced_alike",
    ),
    "project/test_docs_site.py": ("test_it_builds_without_a_warning",),
    "project/test_packaging.py": ("test_the_wheel_has_what_the_packages_have",),
    "replicas/test_in_a_notebook.py": ("test_random_deaths_for_two_minutes",),
    "replicas/test_on_ray.py": ("test_random_deaths_for_two_minutes",),
    "serve/test_batch_files.py": ("test_the_command_goes_on_after_a_kill",),
    "serve/test_connections.py": ("test_polls_every_five_seconds_over_one_connection",),
    "session/test_any_moment.py": (
        "test_a_session_goes_on_when_its_disk_takes_nothing_more",
        "test_the_next_session_has_what_was_saved_before_the_power_failed",
    ),
    "session/test_autoreload.py": ("test_a_session_goes_on_under_autoreload",),
    "session/test_costs.py": ("test_an_idle_session_costs_nothing_for_ten_seconds",),
    "session/test_deterministic.py": ("test_two_hundred_seeds",),
    "session/test_deterministic_states.py": (
        "test_a_text_has_the_same_bits_alone_beside_others_cut_cached_and_preempted",
    ),
    "session/test_embedding.py": (
        "test_beside_answers_that_follow_a_structure",
        "test_it_equals_a_plain_forward_pass_beside_generation",
    ),
    "session/test_exact_rollouts.py": (
        "test_families_are_near",
        "test_its_ratio_is_one_and_its_gradient_the_plain_forms",
    ),
    "session/test_families.py": (
        "test_a_batch_cut_into_steps_has_the_texts_of_the_plain_loop",
        "test_a_cancelled_request_leaves_nothing_behind",
        "test_a_load_with_too_few_pages_is_exact_and_compiles_nothing",
        "test_a_snapshot_is_restored",
        "test_a_snapshot_is_restored_in_another_process",
        "test_preempted_requests_go_on",
        "test_the_kernels_of_xla_agree",
    ),
    "session/test_kept_captures.py": (
        "test_damaged_captures_are_computed_again_and_those_of_other_weights_are_not_taken",
    ),
    "session/test_kernel_versions.py": ("test_sessions_in_kernels_of_other_versions",),
    "session/test_killed.py": ("test_fifty_processes_that_are_killed_leave_complete_states",),
    "session/test_loaded_programs.py": ("test_loaded_programs_give_exactly_what_compiled_ones_do",),
    "session/test_mesh.py": ("test_on_eight_devices",),
    "session/test_neighbours.py": ("test_an_imported_page_of_another_layout",),
    "session/test_parity.py": ("test_families_agree",),
    "session/test_processes.py": (
        "test_a_restart_loads_the_programs_of_each_process",
        "test_each_process_keeps_its_parts_of_pages",
        "test_followers_end_with_their_leader",
        "test_more_of_several_processes",
    ),
    "session/test_profile.py": ("test_one_profile_is_recorded_at_a_time",),
    "session/test_row_mapping.py": ("test_answers_of_a_structure_are_parsed",),
    "session/test_structured_chaos.py": ("test_neighbours_are_exact_whatever_happens",),
    "session/test_taps.py": ("test_numbers_of_a_deterministic_session_are_the_same_to_the_last_bit_in_any_batch",),
    "session/test_trainers.py": ("test_a_grpo_trainer_of_trl_learns",),
    "session/test_typed_door.py": (
        "test_every_public_symbol_has_a_known_type",
        "test_what_the_door_promises",
    ),
    "session/test_window_pages.py": (
        "test_a_chat_goes_on_in_a_new_process",
        "test_a_chat_goes_on_where_its_last_turn_ended",
        "test_a_sleeping_session_keeps_the_end_of_each_turn",
        "test_batches_chunks_forks_and_drafts_have_the_texts_of_the_plain_loop",
        "test_other_sessions_get_the_window_with_the_pages",
        "test_preempted_requests_go_on_with_pages_from_host_memory",
    ),
    "structured/test_published_schemas.py": (
        "test_no_invalid_instance_of_maskbench_is_accepted",
        "test_no_invalid_instance_of_the_test_suite_is_accepted",
        "test_numbers_are_checked_as_decimals",
        "test_what_the_model_writes_at_temperature_one_is_valid",
    ),
    "text/test_extremes.py": ("test_an_extreme_opens_or_is_refused_by_a_typed_error",),
}


class Command(NamedTuple):
    """A call of pytest in the script: the paths, and the expressions of its options."""

    paths: tuple[str, ...]
    ignored: tuple[str, ...]
    marks: str
    keywords: str

    def selects(self, item: pytest.Item) -> bool:
        """True if the command runs the test."""
        file = item.nodeid.split("::")[0]
        if not any(_within(file, path) for path in self.paths) or any(_within(file, path) for path in self.ignored):
            return False
        marks, keywords = Expression.compile(self.marks), Expression.compile(self.keywords)
        return (not self.marks or marks.evaluate(MarkMatcher.from_markers(item.iter_markers()))) and (
            not self.keywords or keywords.evaluate(KeywordMatcher.from_item(item))
        )


def _within(file: str, path: str) -> bool:
    return file == path or file.startswith(f"{path.rstrip('/')}/")


def commands(script: str, default: str) -> Iterator[Command]:
    """Yield the calls of pytest in a shell script; `default` are the marks of one without `-m`."""
    for text in re.findall(r"(?<=python -m pytest )[^|\n]*", script.replace("\\\n", " ")):
        # Bash takes braces, quotes and comments apart. No variable has a value, and nothing but `printf` is run.
        listed = subprocess.run(
            ["bash", "-fc", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True, env={}, timeout=30
        ).stdout.splitlines()
        arguments = iter(listed)
        paths, ignored, options = [], [], {"-m": default, "-k": "", "-o": ""}
        for argument in arguments:
            if argument in options:
                options[argument] = next(arguments)
            elif argument.startswith("--ignore="):
                ignored.append(argument.removeprefix("--ignore="))
            elif not argument.startswith("-"):
                paths.append(argument)
        yield Command(tuple(paths or ["tests"]), tuple(ignored), options["-m"], options["-k"])


class Collected:
    """A plugin that keeps the tests of a run which collects them."""

    items: Sequence[pytest.Item] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def unselected(items: Sequence[pytest.Item], found: Sequence[Command]) -> list[str]:
    """Return the names of tests, or of functions of slow ones, that no command runs."""
    functions: defaultdict[str, list[bool]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"soak", "gpu", "tpu"} or not marks & {"slow", *ALL_CASES}:
            continue
        slow = "slow" in marks
        name = item.nodeid.split("[")[0] if slow else item.nodeid
        functions[name].append(any(command.selects(item) for command in found))
    return sorted(name for name, selected in functions.items() if not any(selected))


def collected() -> dict[str, list[str]]:
    """Collect all tests in this process. Return the files, and the tests that no section runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = project["tool"]["pytest"]["ini_options"]["addopts"]
    plugin = Collected()
    assert pytest.main(["-q", "--collect-only", "-m", "", str(ROOT / "tests")], plugins=[plugin]) == 0
    found = [*commands(SCRIPT.read_text(), options[options.index("-m") + 1])]
    files = {item.nodeid.split("::")[0] for item in plugin.items}
    return {"files": sorted(files), "missing": unselected(plugin.items, found)}


def test_each_change_draws_a_fourth_of_the_files_and_no_file_is_never_drawn() -> None:
    files = [f"tests/core/test_{number}.py" for number in range(200)]
    changes = [f"{number:040x}" for number in range(32)]
    fourths = [{file for file in files if drawn(file, change)} for change in changes]
    assert all(25 < len(fourth) < 75 for fourth in fourths)
    assert set().union(*fourths) == {*files} and not set.intersection(*fourths[:16])
    partly = "thorough tests in two sections, starts, accelerators, tutorials, and browsers with a second try"
    assert SCRIPT.read_text().count('--fourth-of="$change" -') == 7, partly


def test_each_change_draws_one_of_four_groups_of_sections_that_few_changes_touch() -> None:
    script = SCRIPT.read_text()
    start = script.index("groups=(")
    functions = script[start : script.index("\n}\n", start) + 3]
    groups = [set(names.split()) for names in re.findall(r'^ +"([^"$]+)"', functions, re.M)]
    names = sorted(set().union(*groups))
    assert len(groups) == 4 and len(names) == sum(map(len, groups))
    assert all(re.search(rf"^{name}\(\) {{", script, re.M) for name in names)
    started = re.findall(r"if drawn (\w+);", script) + re.findall(r"^for name in (.*); do$", script, re.M)[0].split()
    assert {*names} <= {*started}, "a group has a section that is never started"
    loop = f'{functions}for name in {" ".join(names)} kernels; do if drawn "$name"; then echo "$name"; fi; done'
    bash = shutil.which("bash")
    assert bash is not None
    found = []
    for number in range(16):
        command = [bash, "-c", f"change={number:040x}; {loop}"]
        printed = {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}
        assert "kernels" in printed and printed - {"kernels"} in groups
        found.append(printed)
    assert set().union(*found) == {*names, "kernels"}


@pytest.mark.thorough
def test_a_fourth_is_run() -> None:
    options = ["--collect-only", "-qq", "-m", "", "--fourth-of=a change"]
    command = [sys.executable, "-m", "pytest", *options, "tests/images"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/images/")}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/images").glob("test_*.py")}
    assert found == {file for file in files if drawn(file, "a change")} and found < files
    file = min(files - found)
    none = subprocess.run([*command[:-1], file], capture_output=True, text=True, check=True, cwd=ROOT)
    assert file not in none.stdout, "nothing is drawn, and that is no failure"


@pytest.mark.thorough
def test_a_section_runs_every_slow_test() -> None:
    code = "import json; from project.test_sections import collected; print('', json.dumps(collected()), sep='\\n')"
    paths = os.pathsep.join(str(ROOT / name) for name in ("tests", "toolkit", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    missing = {*found["missing"]}
    weekly = {f"tests/{file}::{name}" for file, names in WEEKLY.items() for name in names}
    here = {name for name in weekly if name.split("::")[0] in found["files"]}  # of other files a package is missing
    assert missing - weekly == set(), "name it in a section of .ci/run, or remove it"
    assert here - missing == set(), "a section runs it now, or it is gone"
