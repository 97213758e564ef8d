"""Compiler options of programs: loops are captured on GPUs, and nothing changes elsewhere."""

from __future__ import annotations

from rekindle._src.programs.recipes import compiler_options


def test_loops_and_conditionals_are_captured_on_gpus_only() -> None:
    options = compiler_options("gpu")
    assert options is not None
    assert {"CONDITIONAL", "WHILE"} < set(str(options["xla_gpu_enable_command_buffer"]).split(","))
    assert compiler_options("tpu") is compiler_options("cpu") is compiler_options() is None
