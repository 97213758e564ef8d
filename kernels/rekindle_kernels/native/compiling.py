"""Object code of one kernel, by numba: the only file that imports numba and is not compiled by it.

Left to itself numba optimises every function alone, again in each caller with what it calls linked in, and turns all of
that into machine code of which a kernel uses none. Here its functions are only gathered as they were generated, linked
once, and optimised once. The kernels of a bfloat16 llama: 7 s, of which LLVM takes 1.7; numba's own way takes 17.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
from numba import types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from rekindle_kernels.native import cpu
from rekindle_kernels.native import kernel_table as table
from rekindle_kernels.native.chain_plan import CHAIN
from rekindle_kernels.native.cpu import has_feature, multiplies_widened
from rekindle_kernels.native.kernel_table import KernelSpec, Variant
from rekindle_kernels.native.kernels import (
    adapter,
    added_keys,
    decode,
    gemm,
    gemm_split,
    heads,
    int4,
    matvec,
    norms_and_gates,
    page_bounds,
    prefill,
    recurrence,
    sample,
)
from rekindle_kernels.native.kernels.attention_job import StoredHeads
from rekindle_kernels.native.kernels.chain_runner import ChainRunner
from rekindle_kernels.native.language import dot_products, vector
from rekindle_kernels.native.language.handler import Kernel
from rekindle_kernels.native.language.vector import STORAGE

SYSTEMS = {"linux": "unknown-linux-gnu", "darwin": "apple-macosx11.0.0", "win32": "pc-windows-msvc"}


def object_code(name: str, entry: str, machine: Any) -> bytes:
    """Return the object code of kernel `name` for a target machine of LLVM's; XLA calls the function `entry`."""
    return object_codes(name, entry, [machine])[0]


def object_codes(name: str, entry: str, machines: Sequence[Any]) -> list[bytes]:
    """Return the object code of kernel `name` for each of these target machines, which differ in their systems alone.

    Most of the time is numba's, which generates the kernel once.
    """
    with _gathering():
        kernel = make(name)
        task, make_handler = kernel.functions()
        handler = make_handler()
    _expose(task, kernel.symbol)
    return _codes([handler, task], entry, machines)


def function_code(make_function: Callable[[], Any], entry: str, machine: Any) -> bytes:
    """Return the object code of a single C function; everything that it calls is gathered while it is made."""
    with _gathering():
        function = make_function()
    return _codes([function], entry, [machine])[0]


def _codes(functions: Sequence[Any], entry: str, machines: Sequence[Any]) -> list[bytes]:
    """Return the object code, for each machine, of the first function, which gets the name `entry`, and of others that
    it names."""
    _expose(functions[0], entry)
    module = _linked(llvm.parse_assembly(""), [function._library for function in functions])
    for index, value in enumerate((*module.functions, *module.global_variables)):
        if not value.is_declaration and value.name != entry:
            value.linkage = "internal"  # seen as a whole no function fails, and what would tell Python so goes
            value.name = f"{entry}.{index}"  # numba's names count what the process compiled before
    for function in module.functions:
        # Nothing is thrown through it, and its tables for unwinding led C++ exceptions of other code astray.
        if not function.is_declaration:
            function.add_function_attribute("nounwind")
    return [_emitted(module.clone(), entry, machine) for machine in machines]


def _emitted(module: Any, entry: str, machine: Any) -> bytes:
    """Return the object code of a module, which is optimised for the machine."""
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    if "windows" in machine.triple:
        module.get_function(entry).storage_class = "dllexport"  # a DLL exports what says so
    _optimise(module, machine)
    numbas = [f.name for f in module.functions if f.is_declaration and f.name.startswith(("numba_", "NRT_"))]
    if numbas:
        raise RuntimeError(f"{entry} still names {', '.join(numbas)}: loading it would end the process")
    code: bytes = machine.emit_object(module)
    return code


def machine_of(level: cpu.Level, *, linked: bool = True, system: str = sys.platform) -> object:
    """LLVM's target machine for code of a shared library, or for what `object_loader` loads, on one of `SYSTEMS`."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # one kernel has lines of assembly, for x86
    architecture = "arm64" if system == "darwin" and level.machine == "aarch64" else level.machine
    target = llvm.Target.from_triple(f"{architecture}-{SYSTEMS[system]}")
    reloc, model = ("pic", "default") if linked else ("static", "jitdefault")
    return target.create_target_machine(cpu=level.cpu, features=level.flags, opt=3, reloc=reloc, codemodel=model)


def _optimise(module: Any, machine: Any) -> None:
    """Numba's passes in numba's order. With the last alone one row times a matrix takes 2 to 5 % longer."""
    builder = _pass_builder(machine, 3)
    for function in module.functions:
        if not function.is_declaration:
            builder.getFunctionPassManager().run(function, builder)
    cheap = _pass_builder(machine, 0)
    passes = cheap.getModulePassManager()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_jump_threading_pass()
    passes.run(module, cheap)
    builder = _pass_builder(machine, 3)
    builder.getModulePassManager().run(module, builder)


def _pass_builder(machine: Any, level: int) -> Any:
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization, options.slp_vectorization = level > 0, False
    return llvm.create_pass_builder(machine, options)


def _expose(function: Any, symbol: str) -> None:
    """Give a function a name that does not depend on where it was compiled, and keep it although nothing calls it."""
    generated = function._library._final_module.get_function(function.native_name)
    generated.name, generated.linkage = symbol, "external"


def _linked(module: Any, libraries: Sequence[Any]) -> Any:
    """Return the module with the code of these libraries, and of all that they call. Callers come first: LLVM leaves
    out functions that none has named yet."""
    seen, todo = set(), [*libraries][::-1]
    while todo:
        library = todo.pop()
        if library not in seen:
            seen.add(library)
            ours = isinstance(library, _Library)
            module.link_in(library._final_module if ours else library._get_module_for_linking(), preserve=True)
            todo += library._linking_libraries
    return module


class _Library(JITCodeLibrary):
    """The code of one function as it was generated, and the libraries of the functions that it calls."""

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def finalize(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"  # it goes once every call of it is inlined
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _get_module_for_linking(self) -> Any:
        """For numba's own libraries, should they ever meet one of these: all of it."""
        self._ensure_finalized()
        return _linked(self._final_module.clone(), self._linking_libraries)


class _Codegen(JITCPUCodegen):
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Functions that run get their Python globals here; these don't run."""


@cache
def _codegen() -> _Codegen:
    return _Codegen("rekindle")


@contextmanager
def _gathering() -> Iterator[None]:
    """Compile functions meanwhile into a `_Library`. Other threads wait: numba has one lock for all compilations."""
    with global_compiler_lock:
        target, typing = cpu_target.target_context, cpu_target.typing_context
        target.refresh()  # numba's runtime is compiled when this is called first, for everyone
        plain, resolve = target._internal_codegen, typing.resolve_function_type

        def widened(function: Any, args: Sequence[Any], kws: Mapping[str, Any]) -> Any:
            """Numba would compile a function anew for each number that it is called with."""
            if isinstance(function, types.Dispatcher):
                args = tuple(map(types.unliteral, args))
                kws = {key: types.unliteral(value) for key, value in dict(kws).items()}
            return resolve(function, args, kws)

        target._internal_codegen, typing.resolve_function_type = _codegen(), widened
        try:
            yield
        finally:
            target._internal_codegen = plain
            del typing.resolve_function_type


# Every native kernel, made by its name.


def make(name: str) -> Kernel | ChainRunner:
    """Return the kernel of that name, ready to be compiled."""
    if name == CHAIN:
        return ChainRunner()
    variant = table.identify(name)
    if variant is None:
        raise LookupError(f"unknown kernel {name!r}")
    return MAKERS[variant.spec](variant)


def _gemm(kernel: Variant) -> Kernel:
    if kernel.dtype == "float32" and not multiplies_widened("float32"):
        return gemm_split.kernel()
    add = dot_products.add_pairs if kernel.dtype == "bfloat16" else dot_products.add_quads
    return gemm.kernel(STORAGE[kernel.dtype].size, add)


def _grouped(weight: str, kernel: Variant) -> Kernel:
    return int4.kernel(kernel.dtype, weight, smallest=kernel.spec in table.GROUPED_SMALLEST.values())


def _write_kv(kernel: Variant) -> Kernel:
    put = vector.store if kernel.dtype == "float32" else vector.store_bf16
    return heads.write_kernel(put, STORAGE[kernel.dtype].size)


def _stored(kernel: Variant) -> StoredHeads:
    storage = STORAGE[kernel.dtype]
    return StoredHeads(storage, storage, kernel.head_dim, scaled=kernel.dtype == "int8")


def _packed(kernel: Variant) -> StoredHeads:
    values = vector.four_bits(kernel.head_dim)
    keys = STORAGE["int8"] if table.PACKED_KEYS[kernel.dtype] == "int8" else values
    return StoredHeads(keys, values, kernel.head_dim, scaled=True, packed=True)


def _multiplies_pairs(kernel: Variant) -> bool:
    return kernel.dtype == "bfloat16" and has_feature("avx512bf16")


def _adapter(kernel: Variant) -> Kernel:
    gated = kernel.spec is table.ADAPTER_GATE
    return adapter.kernel(STORAGE[kernel.dtype], gated=gated, paired=_multiplies_pairs(kernel))


MAKERS: dict[KernelSpec, Callable[[Variant], Kernel]] = {
    table.MATVEC: lambda kernel: matvec.kernel(STORAGE[kernel.dtype], scaled=kernel.dtype == "int8"),
    table.GEMM: _gemm,
    **{spec: partial(_grouped, weight) for weight, spec in table.GROUPED.items()},
    **{spec: partial(_grouped, weight) for weight, spec in table.GROUPED_SMALLEST.items()},
    table.RMS_NORM: lambda kernel: norms_and_gates.norm_kernel(),
    table.GATED_ROWS: lambda kernel: norms_and_gates.gated_kernel(),
    table.ROPE: lambda kernel: heads.rope_kernel(),
    table.WRITE_KV: _write_kv,
    table.DECODE: lambda kernel: decode.kernel(_stored(kernel)),
    table.PREFILL: lambda kernel: prefill.kernel(
        _stored(kernel), kernel.head_dim % 32 == 0 and _multiplies_pairs(kernel)
    ),
    table.WRITE_PACKED: lambda kernel: heads.packed_write_kernel(
        kernel.head_dim, 8 if table.PACKED_KEYS[kernel.dtype] == "int8" else 4
    ),
    table.DECODE_PACKED: lambda kernel: decode.kernel(_packed(kernel)),
    table.PREFILL_PACKED: lambda kernel: prefill.kernel(_packed(kernel), False),
    table.BOUND_PAGES: lambda kernel: page_bounds.bound_kernel(_stored(kernel)),
    table.BOUND_PACKED: lambda kernel: page_bounds.bound_kernel(_packed(kernel)),
    table.CHOOSE_PAGES: lambda kernel: page_bounds.choose_kernel(kernel.head_dim),
    table.ARGMAX: lambda kernel: sample.argmax_kernel(),
    table.SAMPLE: lambda kernel: sample.sample_kernel(),
    table.GATE: lambda kernel: sample.gate_kernel(),
    table.ADD_KEYS: lambda kernel: added_keys.kernel(kernel.dtype),
    table.CONVOLUTION: lambda kernel: recurrence.convolution_kernel(),
    table.GATED_DELTA: lambda kernel: recurrence.delta_kernel(),
    table.CHANNEL_DELTA: lambda kernel: recurrence.channel_delta_kernel(),
    table.SELECTIVE_SCAN: lambda kernel: recurrence.scan_kernel(),
    table.ADAPTER: _adapter,
    table.ADAPTER_GATE: _adapter,
}
