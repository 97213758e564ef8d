"""Kernels that were compiled ahead: one library for several levels, used without numba and without llvmlite."""

from __future__ import annotations

import importlib.util
import json
import logging
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.kernel_state import look_for_library_again
from helpers.python import run_python
from helpers.small import MODEL, OPTIONS
from rekindle import EngineConfig
from rekindle._src.opening.blueprint import blueprint
from rekindle._src.opening.open_request import OpenRequest
from rekindle._src.opening.source import source_of
from rekindle._src.programs.programs import Programs
from rekindle_kernels import kernels_origin, private_files, system
from rekindle_kernels.native import build, build_library, cpu, kernel_files, library, object_loader

pytestmark = pytest.mark.skipif(build.unavailable_reason() is not None, reason="no native kernels here")
SCRIPT = Path(__file__).parents[1] / "helpers" / "fresh_machine.py"
LEVELS = cpu.levels()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    look_for_library_again()
    yield
    look_for_library_again()


def build_in_process(folder: Path, levels: tuple[cpu.Level, ...], kernels: list[str]) -> None:
    """A process that forks should have no threads, which this one has."""
    names = ["--levels", *(level.name for level in levels), "--kernels", *kernels, "--out", str(folder)]
    run_python("-m", "rekindle_kernels.native.build_library", *names)
    made = json.loads((folder / library.MANIFEST).read_text())["levels"]
    fitting = {level.name: [name for name in kernels if build_library.fits(name, level)] for level in levels}
    oldest = levels[-1].name
    assert made.keys() == fitting.keys() and made[oldest] == fitting[oldest]
    assert all({*names} <= {*fitting[level]} for level, names in made.items()), "without those that are equal"


LIMITED = """
import json, sys, time, types
from pathlib import Path
from rekindle_kernels.native import build_library, cpu
sys.modules["rekindle_kernels.native.compiling"] = types.ModuleType("compiling")
cpu.usable_cores = lambda: 1

def compiled(name, place, systems):
    begun = time.process_time()
    while time.process_time() - begun < (0.2 if name == "norm" else 0.0):
        pass
    time.sleep(0.3)
    for system in systems:
        place.path(name, system).touch()

build_library._compile = compiled
def made(**bounds):
    place = build_library.ObjectFolder(Path(sys.argv[1]) / str(len(bounds)), cpu.LEVELS[0], linked=False)
    names = ["argmax", "norm", "rope"]
    build_library._compile_all(names, place, ["linux"], **bounds)
    return [place.path(name, "linux").exists() for name in names]
print(json.dumps([made(limit=0.2), made(limit=0.2, deadline=0.0)]))
"""


def test_an_installations_compiling_is_bounded_in_processor_time(tmp_path: Path) -> None:
    by_core, by_clock = json.loads(run_python("-c", LIMITED, str(tmp_path)))
    assert by_core == [True, True, False], "waiting for a core does not count"
    assert by_clock == [False, False, False]


@pytest.mark.parametrize(
    ("codes", "kept"),
    [
        ({"x86-64-v4-bf16": "a", "x86-64-v4-vnni": "a", "x86-64-v3": "a"}, ["x86-64-v3"]),
        ({"x86-64-v4-bf16": "b", "x86-64-v4-vnni": "b", "x86-64-v3": "a"}, ["x86-64-v3", "x86-64-v4-vnni"]),
        # A Zen 4 would find the one between, which is another.
        (
            {"x86-64-v4-bf16": "a", "x86-64-v4-vnni": "b", "x86-64-v3": "a"},
            ["x86-64-v3", "x86-64-v4-vnni", "x86-64-v4-bf16"],
        ),
        # Some processors with AVX-512 have AVX-VNNI, and would find that one.
        ({"x86-64-v4": "a", "x86-64-v3-vnni": "b", "x86-64-v3": "a"}, ["x86-64-v3", "x86-64-v3-vnni", "x86-64-v4"]),
        ({"x86-64-v4": "b", "x86-64-v3-vnni": "b", "x86-64-v3": "a"}, ["x86-64-v3", "x86-64-v3-vnni", "x86-64-v4"]),
    ],
)
def test_a_library_has_equal_code_once(codes: dict[str, str], kept: list[str], tmp_path: Path) -> None:
    objects = {}
    for name, code in codes.items():
        level = cpu.level_called(name)
        objects[level] = tmp_path / name
        objects[level].write_text(f"{code} {library.symbol('norm', level)} {code}")
    assert [level.name for level in build_library.without_copies(objects)] == kept


def test_a_whole_library_lacks_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation does without a kernel that LLVM can't compile, and a release does not."""

    def compile_all(names: object, place: build_library.ObjectFolder, systems: list[str], *bounds: float) -> None:
        path = place.path("norm", *systems)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"code")

    monkeypatch.setattr(build_library, "_compile_all", compile_all)
    monkeypatch.setattr(build_library, "_link", lambda place, *arguments: place.write_bytes(b"linked"))
    monkeypatch.setattr(build_library, "_common_object", lambda folder, *arguments: folder / "common.o")
    levels, kernels = cpu.LEVELS[:1], ["norm", "argmax"]
    made = build_library.build(tmp_path / "some", levels, kernels, linker="true")
    assert json.loads((made.parent / library.MANIFEST).read_text())["levels"] == {levels[0].name: ["norm"]}
    with pytest.raises(RuntimeError, match=r"^kernels that were not compiled: argmax for x86-64-v4-bf16"):
        build_library.build(tmp_path / "all", levels, kernels, linker="true", whole=True)
    assert not (tmp_path / "all").exists()
    packed = build_library.build(tmp_path / "packed", levels, kernels, linker="true", packed=True)
    manifest = json.loads((packed.parent / library.MANIFEST).read_text())
    assert packed.name == manifest["library"] == f"{made.name}{library.PACKED}"
    assert lzma.decompress(packed.read_bytes()) == made.read_bytes() == b"linked"
    assert manifest["digest"] == kernel_files.digest_of(b"linked"), "of what is loaded"


OBJECTS = """
import sys
from pathlib import Path
from rekindle_kernels.native import build_library, cpu
folder, level = Path(sys.argv[1]), cpu.LEVELS[-1]
for systems in (["linux"], ["linux", "darwin"]):
    build_library.compile_objects(folder, level, ["norm"], systems)
    place = build_library.ObjectFolder(folder, level, linked=True)
    print(*(place.path("norm", system) for system in systems))
"""


def test_kernels_are_compiled_for_several_systems_at_once_and_no_object_twice(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (first,), (again, other) = [line.split() for line in run_python("-c", OBJECTS, str(tmp_path)).splitlines()]
    assert again == first and Path(first).read_bytes().startswith(b"\x7fELF")
    assert Path(other).read_bytes().startswith(b"\xcf\xfa\xed\xfe"), "Mach-O of 64 bits"
    assert Path(first).stat().st_mtime_ns < Path(other).stat().st_mtime_ns, "what is there stays"


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packed library, and an empty folder for unpacked ones."""
    path = tmp_path / f"kernels-here.so{library.PACKED}"
    path.write_bytes(lzma.compress(b"code"))
    monkeypatch.setattr(kernel_files, "cache_folder", tmp_path / "cache")
    return path


def test_a_packed_library_is_unpacked_once(packed: Path) -> None:
    digest = kernel_files.digest_of(b"code")
    place = library.unpacked(packed, digest)
    assert place == kernel_files.folder() / f"kernels-here-{digest}.so" and place.read_bytes() == b"code"
    packed.unlink()
    assert library.unpacked(packed, digest) == place, "it was kept"


def test_a_damaged_library_is_never_loaded(packed: Path) -> None:
    digest = kernel_files.digest_of(b"code")
    place = library.unpacked(packed, digest)
    place.write_bytes(b"cod")
    assert library.unpacked(packed, digest).read_bytes() == b"code", "unpacked anew"
    place.unlink()
    for content in (b"", b"code", lzma.compress(b"another"), packed.read_bytes()[:-20]):
        packed.write_bytes(content)
        with pytest.raises(OSError, match=r"kernels-here\.so\.xz is damaged: install rekindle again"):
            library.unpacked(packed, digest)
    assert not place.exists()


@pytest.mark.skipif(not LEVELS, reason="no level of ours has so little")
def test_xla_does_the_work_of_a_library_that_can_not_be_unpacked(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed.write_bytes(b"cut")
    manifest(tmp_path, library=packed.name)
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    assert library.find() is not None
    assert [library.address("norm"), library.address("norm")] == [None, None]
    assert [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()] == [
        f"the native kernels of the installation can't be used: {packed} is damaged: install rekindle again"
    ]


@pytest.mark.skipif(system.owner() is None, reason="files have no owners here")
def test_where_others_could_write_a_process_unpacks_for_itself(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system opens a library by its name: another one could be there by then."""
    digest = kernel_files.digest_of(b"code")
    kept = library.unpacked(packed, digest)
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    for change in (
        lambda: kernel_files.folder().chmod(0o777),
        lambda: (kernel_files.folder().chmod(0o700), monkeypatch.setenv(private_files.KEY_VARIABLE, str(key))),
    ):
        change()
        own = library.unpacked(packed, digest)
        assert own != kept and own.read_bytes() == b"code" and own.parent.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not LEVELS, reason="no level of ours has so little")
def test_a_python_without_lzma_says_why_kernels_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest(tmp_path, library=f"kernels.so{library.PACKED}")
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    assert library.find() is not None
    look_for_library_again()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert library.find() is None and "built without lzma" in caplog.text


def kernels_of_model() -> list[str]:
    request = OpenRequest(MODEL, EngineConfig(**OPTIONS))
    return Programs.open(blueprint(request, source_of(request)).programs).recipes.kernels()


@pytest.mark.skipif(not LEVELS, reason="no level of ours has so little")
@pytest.mark.slow
def test_processes_without_numba_give_the_same_tokens_at_the_highest_and_the_lowest_level(tmp_path: Path) -> None:
    """Of one library; `test_levels.py` calls the kernels that differ at those between."""
    levels = tuple(dict.fromkeys((LEVELS[0], LEVELS[-1])))
    build_in_process(tmp_path / "library", levels, kernels_of_model())
    for level in levels:
        options = {library.FOLDER: str(tmp_path / "library"), cpu.MASK: level.name}
        printed = run_python(str(SCRIPT), "lazy", str(tmp_path / level.name), "--without-compiler", **options)
        found = json.loads(printed.splitlines()[-1])
        assert found["at_first"] and all(found["at_first"].values()), "nothing had to be compiled first"
        assert (found["wrong"], found["refused"]) == (0, [])
        assert not (tmp_path / level.name / "native").exists()


@pytest.mark.skipif(library.platform_tag() != build_library.UNLINKED or not LEVELS, reason="kernels are linked here")
@pytest.mark.slow
def test_an_installation_measures_how_to_prefetch_and_keeps_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens as before, and what was chosen is in the library's manifest and words."""
    command = "-m", "rekindle_kernels.native.build_library", "--here", "--out", str(tmp_path)
    run_python(*command, "--kernels", "matvec_int8")
    said = json.loads((tmp_path / library.MANIFEST).read_text())["prefetch"]
    candidates = [one["prefetch"] for one in said["gb_per_s"]]
    assert said["chosen"].keys() == {*cpu.Prefetching._fields} and len(candidates) >= 4
    assert all(choice in candidates for choice in said["chosen"].values())
    assert all(one[kind] > 0 for one in said["gb_per_s"] for kind in said["chosen"])
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    found = library.find()
    assert found is not None and found.prefetch == cpu.Prefetching.read(said["chosen"])
    assert found.processor == cpu.model_name() != ""
    cache, ahead = found.prefetch.several
    assert (f"{ahead >> 10} KiB ahead into cache level {cache}" if cache else "none") in kernels_origin()


def test_each_number_of_bits_has_a_choice_of_its_own_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"wide": [0, 0], "int8": [2, 8192], "grouped": [1, 2048], "several": [2, 8192]}
    manifest(tmp_path, prefetch={"chosen": chosen, "processor": "A processor"})
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    found = library.find()
    assert found is not None and found.prefetch is not None
    assert found.prefetch.wide == cpu.Prefetch(0, 0) and found.prefetch.grouped == cpu.Prefetch(1, 2048)
    words = kernels_origin()
    assert "measured on A processor" in words and "(16 bits: none; " in words
    assert "8 bits, several or long rows: 8 KiB ahead into cache level 2" in words
    assert "4 bits: 2 KiB ahead into cache level 1" in words
    look_for_library_again()
    manifest(tmp_path, prefetch={"chosen": {"wide": [0, 0]}})
    assert library.find() is None, "one kind is missing"


def test_another_prefetching_has_to_be_faster_in_most_turns() -> None:
    tuning = pytest.importorskip("rekindle_kernels.native.tuning")
    steady = [[10.0, 12.0, 11.0]] * 8
    assert tuning.fastest(steady, 0) == 1
    assert tuning.fastest(steady, 1) == 1
    assert tuning.fastest([[10.0, 10.2, 9.0]] * 8, 0) == 0, "a gain of 2 % is none"
    noisy = [[10.0, 30.0]] * 3 + [[10.0, 9.0]] * 5
    assert tuning.fastest(noisy, 0) == 0, "three lucky turns of eight"
    barely = [[10.0, 11.0]] * 9 + [[10.0, 9.0]] * 6
    assert tuning.fastest(barely, 0) == 0, "faster in nine turns of fifteen"


def test_the_code_of_a_kernel_differs_in_its_prefetching_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results can't: the instructions that compute are the same."""
    pytest.importorskip("numba")
    from rekindle_kernels.native.compiling import function_code, machine_of
    from rekindle_kernels.native.tuning import _probe

    if cpu.machine() != "x86_64" or not LEVELS:
        pytest.skip("compares code for x86-64")
    machine, sizes = machine_of(LEVELS[0], linked=False), set()
    monkeypatch.setattr(cpu, "building_for", LEVELS[0])
    codes = []
    for choice in (cpu.Prefetch(1, 8 << 10), cpu.Prefetch(2, 8 << 10)):
        monkeypatch.setattr(cpu, "prefetching", cpu.Prefetching(*[choice] * 4))
        code = function_code(lambda: _probe("int8"), "entry", machine)
        executable = 4
        codes += [
            code[section.offset :][: section.size]
            for section in object_loader._sections(code)
            if section.flags & executable and section.size
        ]
        sizes.add(len(codes[-1]))
    assert len(sizes) == 1 < len(codes[0]) and len(codes) == 2 and codes[0] != codes[1]
    changed = [(a, b) for a, b in zip(*codes, strict=True) if a != b]
    # 0F 18 /1 is prefetcht0 and 0F 18 /2 prefetcht1: the bits of the register's field change, and nothing else.
    assert {a ^ b for a, b in changed} == {0x18}


def manifest(folder: Path, **changes: object) -> None:
    said = {
        "platform": library.platform_tag(), "sources": library.source_digest(), "library": "kernels.so",
        "digest": "1", "levels": {level.name: ["norm"] for level in cpu.LEVELS},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / library.MANIFEST).write_text(json.dumps({**said, **changes}))


@pytest.mark.parametrize("changes", [{"platform": "other"}, {"sources": "other"}, {"levels": {}}, {"levels": 3}])
def test_a_library_for_something_else_is_not_used(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    caplog.set_level(logging.DEBUG, library.__name__)
    assert library.find() is None and "no library" in caplog.text
    manifest(tmp_path)
    look_for_library_again()
    assert (library.find() is not None) == bool(LEVELS)
    manifest(tmp_path, **changes)
    look_for_library_again()
    assert library.find() is None


@pytest.mark.skipif(not LEVELS, reason="no level of ours has so little")
def test_level_and_library_are_part_of_a_programs_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle_kernels import environment

    seen = [environment()]
    monkeypatch.setenv(library.FOLDER, str(tmp_path))
    for digest in ("1", "2"):
        manifest(tmp_path, digest=digest)
        look_for_library_again()
        seen.append(environment())
    for level in LEVELS:
        monkeypatch.setenv(cpu.MASK, level.name)
        seen.append(environment())
        assert seen[-1]["level"] == level.name
    assert len({json.dumps(one, sort_keys=True) for one in seen}) == len(seen)


def test_a_mask_takes_features_away_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = cpu.features()
    monkeypatch.setenv(cpu.MASK, "x86-64-v3")
    assert cpu.features() == everything & cpu.level_called("x86-64-v3").features
    assert not cpu.has_feature("avx512f")
    assert {level.name for level in cpu.levels()} <= {"x86-64-v3"}
    monkeypatch.setenv(cpu.MASK, "486")
    with pytest.raises(ValueError, match=r"'486' is not a level .* x86-64-v4-bf16, "):
        cpu.features()


def test_features_are_those_that_llvm_sees() -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    seen = {name for name, there in llvm.get_host_cpu_features().items() if there}
    known = frozenset[str]().union(*(level.features for level in cpu.LEVELS if level.machine == cpu.machine()))
    slower = "GenuineIntel" in cpu.identity() and "avx512fp16" in seen and "amx-bf16" not in seen
    counted = seen - {"avx512bf16"} if slower else seen
    assert cpu._own_features() & known == counted & known


def test_the_list_of_kernels_is_closed_but_for_the_head_size() -> None:
    names = build_library.all_kernels([64, 128])
    assert len(set(names)) == len(names)
    assert {"chain", "gemm_int8", "gemm_bfloat16", "matvec_float16", "write_bfloat16", "prefill_int8_128"} <= {*names}
    assert {*kernels_of_model()} <= {*build_library.all_kernels([MODEL.config.head_dim])}


def test_the_digest_covers_all_that_compiling_imports_and_no_jax_is_among_it() -> None:
    pytest.importorskip("numba")
    code = (
        "import sys; sys.modules['jax'] = None; import rekindle_kernels.native.compiling, json; "
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.startswith('rekindle_kernels.')]))"
    )
    imported = {Path(file) for file in json.loads(run_python("-c", code))}
    assert imported - {Path(build.__file__).parent / "__init__.py"} == {*library.sources()}
