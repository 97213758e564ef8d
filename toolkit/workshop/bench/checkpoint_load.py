"""How fast a large checkpoint opens, first and second start, and how much memory that takes at its peak.

    python checkpoint_load.py [--gigabytes 1.4] [--folder DIR] [--cold] [--mesh 4]

Writes random Llama-shaped checkpoints in float32 and bfloat16, opens each in fresh processes and removes them. `disk`
is how fast plain reads of the same files went just before, with as much of them in the page cache. With `--mesh` they
are opened on so many simulated devices.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness

PIECE = 8 << 20
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}


def write(folder: Path, dtype: str, gigabytes: float, shards: int = 3) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from rekindle._src.models.base import abstract_model
    from rekindle._src.models.registry import config_from_hf, manifest

    raw = {
        "model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 1, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "torch_dtype": dtype, **SHAPE,
    }  # fmt: skip
    width = 4 if dtype == "float32" else 2

    def parts(layers: int) -> dict[str, tuple[int, ...]]:
        config = config_from_hf({**raw, "num_hidden_layers": layers})
        graph, leaves = abstract_model(config)
        shapes = dict(zip(graph.paths, leaves, strict=True))
        sources = manifest(config).sources
        return {part.name: part.shape for path in sources for part in sources[path].parts(shapes[path].shape)}

    one, two = (sum(int(np.prod(s)) for s in parts(n).values()) * width for n in (1, 2))
    raw["num_hidden_layers"] = max(1, round((gigabytes * 1e9 - one) / (two - one)) + 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1 << 24, np.float32) * 0.02
    stored = noise.astype(np.float32 if width == 4 else ml_dtypes.bfloat16)
    names = list(parts(raw["num_hidden_layers"]).items())
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        state = {}
        for name, shape in names[shard::shards]:
            state[name] = np.resize(np.roll(stored, int(rng.integers(1 << 20))), shape)
        save_file(state, folder / file)
        index |= dict.fromkeys(state, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def forget(folder: Path) -> None:
    """Drops the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def plain_read(folder: Path) -> float:
    """MB/s of two threads that read a folder's tensor files and do nothing with them."""
    files = [path for path in folder.rglob("*.safetensors") if path.stat().st_size]
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, PIECE)]

    def read(part: list[tuple[Path, int]]) -> int:
        buffer, total = bytearray(PIECE), 0
        for path, at in part:
            with path.open("rb", buffering=0) as file:
                file.seek(at)
                total += file.readinto(buffer) or 0
        return total

    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        total = sum(pool.map(read, (pieces[::2], pieces[1::2])))
    return total / 1e6 / (time.perf_counter() - start)


def open_one(folder: str, cache: str, dtype: str, mesh: int, quantize: str | None) -> dict[str, float]:
    """In a process of its own."""
    import jax

    from rekindle._src.core.mesh_shape import checked_mesh
    from rekindle._src.models.loading import checkpoint, prepared
    from rekindle._src.models.placement import placement_of

    jax.devices()
    imports = harness.memory()
    source = checkpoint.inspect(folder).nbytes
    start, used = time.perf_counter(), time.process_time()
    described = checkpoint.describe(folder, checkpoint.WeightForm.of(dtype, quantize), cache_dir=cache)
    model = checkpoint.read(described, placement=placement_of(checked_mesh(mesh), described.graph))
    jax.block_until_ready(model.leaves)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    start = time.perf_counter()
    prepared.wait()
    return {
        "seconds": seconds, "cpu": used, "kept": time.perf_counter() - start, "source": source, "imports": imports,
        "weights": model.nbytes, "peak": harness.memory(),
    }  # fmt: skip


def main() -> None:
    options = harness.options(
        __doc__, gigabytes=1.4, folder=(Path, "where to write; the default is a temporary folder"),
        cold=(False, "drop the files from the page cache before each start"),
        mesh=(1, "simulated devices that share the model"), only=["float32", "bfloat16"],
    )  # fmt: skip
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.mesh}"
    heads = ("MB/s", "disk", "weights MB", "peak MB (imports)", "allowed", "kept in s")
    harness.table("source", "as", "start", "s", "cpu s", *heads)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="rekindle-bench-") as base:
        for source in options.only:
            folder = Path(base, source)
            write(folder, source, options.gigabytes)
            for dtype, quantize in (("float32", None), ("bfloat16", None), ("bfloat16", "int8")):
                if source == "bfloat16" and dtype == "float32":
                    continue
                cache = Path(base, f"cache-{source}-{dtype}-{quantize}")
                for start in ("first", "second"):
                    kept = start == "second" and (cache / "weights").exists()
                    if options.cold:
                        forget(Path(base))
                    disk = plain_read(cache if kept else folder)
                    if options.cold:
                        forget(Path(base))
                    one = harness.child(open_one, folder, cache, dtype, options.mesh, quantize, XLA_FLAGS=flags)
                    mb = {key: value / 1e6 for key, value in one.items()}
                    rate = mb["weights" if kept else "source"] / one["seconds"]
                    print(
                        f"| {source} | {quantize or dtype} | {start} | {one['seconds']:.2f} | {one['cpu']:.2f} "
                        f"| {rate:.0f} | {disk:.0f} | {mb['weights']:.0f} | {mb['peak']:.0f} ({mb['imports']:.0f}) "
                        f"| {1.25 * mb['weights'] + 300:.0f} | {one['kept']:.2f} |",
                        flush=True,
                    )
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
