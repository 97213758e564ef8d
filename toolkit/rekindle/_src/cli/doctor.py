"""`rekindle doctor`: check an installation, and show a fix for each problem."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rekindle._src.bench.plan import (
    MANY,
    Plan,
    device_spec,
    is_planned,
    make_plan,
    shape_config,
    stored_in_groups,
    stored_model,
)
from rekindle._src.cli import report
from rekindle._src.cli.controls import for_stream
from rekindle._src.core.config import cache_folder
from rekindle._src.core.memory import available, fits, total
from rekindle._src.core.mesh_shape import DATA, MeshShape
from rekindle._src.core.words import count
from rekindle._src.models.base import Graph, abstract_model, storage_kinds
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.loading.stored import StoredCheckpoint
from rekindle._src.models.loading.stored_types import stored_types
from rekindle._src.models.partition import Partition
from rekindle._src.models.unpacking import words
from rekindle.errors import RekindleError
from rekindle_kernels.private_files import KINDS, distrust_reason

if TYPE_CHECKING:
    import jax

    from rekindle._src.programs.plan import ProgramPlan

REQUIRED = (
    "jax", "jaxlib", "flax", "anyio", "numpy", "orbax-checkpoint", "tokenizers", "safetensors", "jinja2", "ipywidgets",
    "anywidget",
)  # fmt: skip
LOW_DISK = 1 << 30
LOW_MEMORY = 2 << 30
READ_BYTES, READ_TURNS = 192 << 20, 9  # size of an array, and the number of timed reads of it
WITHOUT_KERNELS = "tokens take several times as long, and weights of 4, 6 and 8 bits are unpacked to 16 if they fit"
TRAINED_RANK, TRAINED_TOKENS = 16, 512  # of a planned training
PROMPT, NEW = [1, 5, 9, 33, 7], 8


class Check(NamedTuple):
    """A check: its result, its subject, the details, and a fix."""

    status: Literal["pass", "warn", "fail"]
    title: str
    detail: str
    fix: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Print every check as it ends. Return the exit status: 1 if any failed."""
    failed, checks = False, []
    shown = report.for_others if arguments.report else report.with_tilde
    if arguments.report:
        print(shown("\n".join(report.header())))
    for found in _selected_checks(arguments):
        check = found._replace(title=shown(found.title), detail=shown(found.detail), fix=shown(found.fix))
        failed |= check.status == "fail"
        checks.append(check)
        in_header = arguments.report and check.status == "pass" and check.title in report.IN_HEADER
        if not (arguments.json or in_header):
            fix = f"\n      fix: {check.fix}" if check.fix else ""
            print(for_stream(f"{check.status:4}  {check.title}: {check.detail}{fix}", sys.stdout))
    if arguments.json:
        print(json.dumps([check._asdict() for check in checks], indent=1))
    return int(failed)


def _selected_checks(arguments: argparse.Namespace) -> Iterator[Check]:
    if arguments.plan:
        if arguments.device == "here" or arguments.tune:
            return guarded(lambda: plan_here(arguments), arguments.plan)
        sizes = {"quantize": arguments.quantize, "context": arguments.context, "kv_dtype": arguments.kv_dtype}
        return plan_model(arguments.plan, arguments.mesh, arguments.device, **sizes)
    if arguments.mesh is not None:
        return guarded(lambda: examine_mesh(arguments.mesh), "mesh")
    if arguments.model:
        return guarded(lambda: _weights(arguments.model), arguments.model)
    return examine(cache_folder(arguments.cache_dir))


def examine(folder: Path) -> Iterator[Check]:
    """Run every check in order. A check that raises counts as failed."""
    for look in (_packages, _shadowing, _devices, native_checks, _memory, _reading):
        yield from guarded(look)
    yield from guarded(lambda: cache_checks(folder), "cache directory")
    for look in (_compile, _tiny):
        yield from guarded(look)


def _weights(model: str) -> Iterator[Check]:
    """Check that a checkpoint's weights, and its layers' outputs for a few tokens, are finite in its own dtype."""
    from rekindle import tiny
    from rekindle._src.models import diagnosis
    from rekindle._src.models.loading.checkpoint import load
    from rekindle._src.models.loading.tensor_files import listed

    loaded = load(tiny.located(model))
    broken = listed([str(weight) for weight in diagnosis.broken_weights(loaded)])
    finite = f"{loaded.num_parameters:,} numbers are finite"
    yield _either(not broken, "weights", finite, broken, "Download the checkpoint again, or ask where it comes from")
    prompt = [token % loaded.config.vocab_size for token in range(1, 17)]
    stage = diagnosis.first_broken_stage(loaded, prompt)
    finite = f"{loaded.config.num_layers} layers made finite numbers of {len(prompt)} tokens"
    fix = "Repair its weights, or open with dtype='float32' if they are finite and overflow"
    yield _either(stage is None, "layers", finite, f"{stage} is the first to make NaN or infinity", fix)


def _either(good: bool, title: str, detail: str, problem: str, fix: str) -> Check:
    return Check("pass", title, detail) if good else Check("fail", title, problem, fix)


def guarded(look: Callable[[], Iterator[Check]], title: str = "") -> Iterator[Check]:
    """Yield checks. One that raises has failed; by default its title is the name of `look`."""
    title = title or getattr(look, "__name__", "check").strip("_")
    try:
        yield from look()
    except RekindleError as error:  # its message ends with a fix
        yield Check("fail", title, str(error))
    except Exception as error:
        fix = "Reinstall: pip install --force-reinstall rekindle"
        yield Check("fail", title, f"{type(error).__name__}: {error}", fix)


def _packages() -> Iterator[Check]:
    yield Check("pass", "rekindle", report.version())
    yield Check("pass", "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in REQUIRED:
        yield _installed(package, "fail", "pip install rekindle")
    yield _installed("jupyterlab", "warn", "pip install 'rekindle[notebook]', if you want to open the tutorials here")


def _installed(package: str, otherwise: Literal["warn", "fail"], fix: str) -> Check:
    version = report.installed(package)
    return Check(otherwise, package, "is not installed", fix) if version is None else Check("pass", package, version)


def _shadowing() -> Iterator[Check]:
    """Check for a folder called `kernels` on the path: it hides Hugging Face's package, which transformers imports."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        yield Check("pass", "imports", "nothing shadows Hugging Face's `kernels` (not installed)")
        return
    spec = importlib.util.find_spec("kernels")
    origin = spec.origin if spec else None
    if origin and ("site-packages" in origin or "dist-packages" in origin):
        yield Check("pass", "imports", "nothing shadows Hugging Face's `kernels`")
    else:
        place = origin or (list(spec.submodule_search_locations or [])[:1] if spec else "nowhere")
        yield Check(
            "warn", "imports", f"`kernels` comes from {place}, not from Hugging Face's package",
            "Start Python from another folder, or rename that one",
        )  # fmt: skip


def _devices() -> Iterator[Check]:
    import jax

    from rekindle_kernels import gpu_path

    devices = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    yield Check("pass", "devices", f"{len(devices)} × {jax.default_backend()} ({kinds}), {os.cpu_count()} CPU cores")
    if path := gpu_path():
        yield Check("pass", "GPU kernels", path)


def native_checks() -> Iterator[Check]:
    """Check for the native kernels, which replace slow operations of XLA:CPU. CPU only."""
    import jax

    from rekindle_kernels import configure, kernels_origin, unavailable_reason

    if jax.default_backend() != "cpu":
        return
    configure(cache_folder=cache_folder())  # as a session does
    reason = unavailable_reason()
    if reason is None:
        yield Check("pass", "native kernels", kernels_origin())
    else:
        problem, _, fix = reason.partition(": ")
        yield Check("warn", "native kernels", f"{problem}; {WITHOUT_KERNELS}", fix)


def _memory() -> Iterator[Check]:
    free, whole = available(), f"{total() / 2**30:.1f} GiB"
    if free is None:
        yield Check("pass", "memory", f"{whole}; the system does not report how much is available")
        return
    detail = f"{free / 2**30:.1f} GiB available of {whole}"
    fix = "Close other programs, or open smaller models, or quantize='int4'"
    yield Check("warn", "memory", detail, fix) if free < LOW_MEMORY else Check("pass", "memory", detail)


def _reading() -> Iterator[Check]:
    """Measure the read rate of memory, and the share of it that decoding's products of one row reach. CPU only."""
    import jax

    from rekindle._src.bench import limits

    if jax.default_backend() != "cpu" or (available() or LOW_MEMORY) < LOW_MEMORY:
        return
    rate, products = limits.read_rate(READ_BYTES, READ_TURNS), limits.decode_rates(READ_BYTES, READ_TURNS)
    yield Check("pass", "reading", reading_words(rate, products))


def reading_words(rate: float, products: Mapping[int, float]) -> str:
    """Return the rate at which memory is read, and the share of it that products reach, by their bits.

    A product may read faster than a plain sum does: the rate is the highest that anything reached.
    """
    most = max(rate, *products.values())
    shares = ", ".join(f"{product / most:.0%} of it in {bits} bits" for bits, product in products.items())
    return f"{most:.0f} GB/s; products of one row read at {shares}"


def cache_checks(folder: Path) -> Iterator[Check]:
    """Check that sessions can write and trust the cache directory, and its free space, and list its contents."""
    fix = "Point $REKINDLE_CACHE or cache_dir= to a folder you can write to"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # as sessions do: no other user may write to it
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"embers")
            file.flush()
    except OSError as error:
        yield Check("fail", "cache directory", f"{folder} can't be written: {error.strerror or error}", fix)
        return
    usage = {entry.name: _size(entry) for entry in sorted(folder.iterdir())}
    contents = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in usage.items()) or "empty"
    reasons = {kind: reason for kind in KINDS if (reason := distrust_reason(folder / kind)) is not None}
    if not reasons:
        yield Check("pass", "cache directory", f"{folder}: {contents}")
    for reason in dict.fromkeys(reasons.values()):
        refused = [kind for kind in reasons if reasons[kind] == reason]
        use = "no session uses it" if len(refused) == len(KINDS) else f"sessions don't use its {', '.join(refused)}"
        problem, mark, remedy = reason.rpartition(": ")
        yield Check("fail", "cache directory", f"{problem if mark else reason}; {use}", remedy if mark else fix)
    if folder != cache_folder():
        shared = f"{cache_folder()}, which only $REKINDLE_CACHE moves"
        yield Check("pass", "shared by sessions", f"kernels, tokenizers of GGUF files and fingerprints lie in {shared}")
    status = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if status and status.f_bavail * status.f_frsize < LOW_DISK:
        free = status.f_bavail * status.f_frsize
        yield Check("warn", "disk", f"{free / 2**20:.0f} MiB free below {folder}", "rekindle cache prune, or free disk")


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _compile() -> Iterator[Check]:
    import jax
    import jax.numpy as jnp

    start = time.perf_counter()
    total = jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8)))
    seconds = time.perf_counter() - start
    detail, problem = f"a program compiled and ran in {seconds:.2f} s", f"a program computed {float(total)}"
    yield _either(float(total) == 512.0, "compile", detail, f"{problem} instead of 512", "Reinstall jax and jaxlib")


def _tiny() -> Iterator[Check]:
    from rekindle._src.session.opening import open_sync

    start = time.perf_counter()
    with open_sync("tiny", quiet=True, max_model_len=256, max_requests=2) as session:
        completion = session.generate_sync("Once upon a time", max_tokens=8)
    seconds = time.perf_counter() - start
    yield Check("pass", "generate", f"the embedded model said {completion.text!r} after {seconds:.1f} s")


def examine_mesh(mesh: MeshShape) -> Iterator[Check]:
    """Check for enough devices, and compare a small model's continuation on all of them with that on one."""
    import jax

    present = jax.devices()
    if mesh.size > len(present):
        simulate = f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} simulates them on a CPU"
        yield Check("fail", "devices", f"--mesh needs {mesh.size}, and there are {len(present)}", simulate)
        return
    yield Check("pass", "devices", f"{len(present)} × {present[0].device_kind}, {mesh.size} of them for the mesh")
    from rekindle._src.models.placement import random_model
    from rekindle._src.models.registry import config_from_hf
    from rekindle._src.session.opening import open_sync

    raw = {
        "model_type": "mixtral" if mesh.get("expert", 1) > 1 else "llama", "vocab_size": 512, "hidden_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": mesh.size, "num_key_value_heads": mesh.size, "head_dim": 32,
        "intermediate_size": 128, "max_position_embeddings": 256, "tie_word_embeddings": True, "eos_token_id": 2,
        "num_local_experts": 2 * mesh.get("expert", 1), "num_experts_per_tok": 2, "bos_token_id": 1,
    }  # fmt: skip
    model = random_model(config_from_hf(raw))
    texts = []
    for devices in (None, mesh):
        with open_sync(
            model, mesh=devices, dtype="float32", quiet=True, max_model_len=64, max_requests=2, disk_memory=0
        ) as session:
            texts.append(session.generate_sync(PROMPT, max_tokens=NEW).token_ids)
            stats = session.stats()
            description = stats.mesh
    if texts[0] == texts[1]:
        yield Check("pass", "mesh", f"{description}; they gave the tokens that one device gives")
        if stats.collective_seconds is not None:
            each = 1e3 * stats.collective_seconds / stats.steps
            total = f"{1e3 * stats.device_seconds / stats.steps:.2f} ms of each of {stats.steps} steps"
            yield Check("pass", "collectives", f"sums over devices take {each:.2f} ms by themselves, of {total}")
    else:
        yield Check(
            "fail", "mesh", f"{description}; they gave {texts[1]}, and one device {texts[0]}",
            "Report it with this machine's devices, and open without mesh",
        )  # fmt: skip


def plan_here(arguments: argparse.Namespace) -> Iterator[Check]:
    """Yield what opening a model on this machine's devices would do; nothing is compiled, and no weights are read."""
    import jax

    from rekindle._src.core.config import EngineConfig
    from rekindle._src.opening.blueprint import blueprint
    from rekindle._src.opening.local_models import describe
    from rekindle._src.opening.open_request import OpenRequest
    from rekindle._src.opening.source import CheckpointSource, ModelSource, ShapeSource, source_of
    from rekindle._src.programs.programs import Programs

    options = {"mesh": arguments.mesh, "quantize": arguments.quantize, "cache_dir": arguments.cache_dir}
    options |= {"max_model_len": arguments.context, "kv_dtype": arguments.kv_dtype}
    request = OpenRequest(arguments.plan, EngineConfig.of(options))
    if is_planned(arguments.plan):
        source: ModelSource = ShapeSource(arguments.plan, *shape_config(arguments.plan), arguments.quantize)
    else:
        source = source_of(request)
    plan = blueprint(request, source)
    facts, config, programs = plan.facts(), plan.config, Programs.open(plan.programs)
    file = "" if plan.folder is None else describe(plan.name, plan.folder).precision
    origin = f"the shape {plan.name}" if plan.folder is None else f"{plan.folder}{file and f' ({file})'}"
    held = storage_kinds(plan.graph, plan.programs.leaves)
    yield Check("pass", "weights", f"{facts['weights'] / 1e9:.2f} GB of {origin}, held as {held}")
    free = available()
    if free is not None and jax.default_backend() == "cpu" and not fits(facts["weights"]):
        need = f"the weights need {facts['weights'] / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are available"
        yield Check("warn", "memory", need, "Close other programs, or plan a smaller model or --quantize int4")
    if isinstance(source, CheckpointSource) and source.plan.found.stored.may_be_quantized:
        found = source.plan.found
        yield from _types(found.stored, found.config, plan.graph, plan.programs.leaves)
    for cache in plan.caches:
        sizes = f"{cache.slots:,} of {cache.slot_bytes:,} bytes on the device"
        below = f"{cache.host_bytes / 2**20:,.0f} MiB of host memory and {cache.disk_bytes / 2**20:,.0f} MiB of disk"
        yield Check("pass", cache.kind, f"{sizes}; {below} below it")
    stored = sum(programs.stored(key) for key in programs.keys)
    detail = f"{len(programs.keys)} for up to {config.max_requests} requests, {stored} of them stored already"
    warm = plan.folder is not None and stored < len(programs.keys)
    yield Check("pass", "programs", detail, f"rekindle warm {arguments.plan}" if warm else "")
    if arguments.tune:
        yield training_check(plan.programs, facts["weights"])


def training_check(plan: ProgramPlan, weights: int) -> Check:
    """Say what training an adapter takes next to a model's weights."""
    from rekindle._src.capabilities.tuning.memory import planned

    need, seconds = planned(plan, rank=TRAINED_RANK, tokens=TRAINED_TOKENS)
    detail = (
        f"an adapter of rank {TRAINED_RANK} needs {need} in addition to the weights; a step of {TRAINED_TOKENS} tokens "
        f"takes about {seconds:.1f} s by the products alone"
    )
    return _either(fits(need.total, beside=weights), "training", detail, detail, "Train with a smaller rank or targets")


def plan_model(
    shape: str,
    mesh: MeshShape | None,
    device: str,
    *,
    quantize: str | None = None,
    context: int | None = None,
    kv_dtype: str | None = None,
) -> Iterator[Check]:
    """Return a model's needs on each device, as lines of the report."""
    sizes = mesh or MeshShape({"model": 1})
    config, dtype = shape_config(shape)
    shards = sizes.get(DATA, 1)  # each shard has the whole model and its own requests
    partition = Partition(sizes.get("model", 1), sizes.get("expert", 1))
    seen = stored_model(shape)
    kinds = () if quantize is not None else stored_in_groups(seen, config, divided=partition.size > 1)
    result = make_plan(
        config,
        partition,
        device_spec(device),
        dtype=dtype,
        quantize=quantize,
        context=context,
        kv_dtype=kv_dtype,
        shards=shards,
        kinds=kinds,
    )
    per_shard = f" in {shards} data shards of {result.devices // shards}" if shards > 1 else ""
    yield from plan_checks(result, f"{shape} on {result.devices} × {device}{per_shard}")
    if seen is not None and seen.may_be_quantized:
        yield from _types(seen, config, *abstract_model(config, dtype, quantize, kinds=kinds))


def _types(
    stored: StoredCheckpoint, config: ModelConfig, graph: Graph, shapes: Sequence[jax.ShapeDtypeStruct]
) -> Iterator[Check]:
    """Yield what becomes of the tensors of each type that a checkpoint stores."""
    for kind in stored_types(stored, config, graph, shapes):
        exactly = ", exactly" if kind.exact else ""
        yield Check(
            "pass", kind.name,
            f"{count(kind.tensors, 'tensor')}, {kind.stored_bytes / 1e6:,.1f} MB; {kind.form}{exactly}: "
            f"{kind.bytes / 1e6:,.1f} MB of memory",
        )  # fmt: skip
    if reason := words(graph):
        yield Check("warn", "weights", reason, "`rekindle doctor` says why there are no native kernels")


def plan_checks(plan: Plan, title: str) -> Iterator[Check]:
    """Yield a plan in words."""
    weights, memory = plan.weight_bytes / 1e9, plan.memory_bytes / 1e9
    detail = f"weights take {weights:.1f} GB on each device, of {memory:.1f} GB that can be used"
    yield _either(plan.free_bytes > 0, title, detail, detail, "Use more devices, larger ones, or --quantize int4")
    if plan.free_bytes <= 0:
        return
    tokens = (
        f"{plan.kv_tokens:,} tokens fit next to them ({plan.token_bytes:,} bytes of each on a device), in "
        f"{plan.pages:,} pages of {plan.page_size}"
        + (f" of each data shard, {plan.shards * plan.kv_tokens:,} in all" if plan.shards > 1 else "")
        + f": {plan.contexts:,} requests of {plan.context:,} tokens"
    )
    yield _either(plan.fits, "keys and values", tokens, tokens, "Use more devices, or a shorter --context")
    yield Check(
        "pass", "a step takes at least",
        f"{plan.alone_seconds * 1e3:.2f} ms with one request ({1 / plan.alone_seconds:,.0f} tokens/s), of which sums "
        f"over devices {plan.sum_seconds * 1e3:.2f} ms; {plan.many_seconds * 1e3:.2f} ms with {MANY} requests "
        f"({MANY / plan.many_seconds:,.0f} tokens/s): a bound on paper, not a measurement",
    )  # fmt: skip
