"""`rekindle doctor --mesh`: check that devices of this machine can share a model, and plan a model on others."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle._src.bench.plan import MANY, Plan, device_spec, make_plan, shape_config
from rekindle._src.cli.checks import Check
from rekindle._src.core.mesh_shape import DATA, MeshShape
from rekindle._src.models.partition import Partition

PROMPT, NEW = [1, 5, 9, 33, 7], 8


def examine(mesh: MeshShape) -> Iterator[Check]:
    """Check for enough devices, and compare a small model's continuation on all of them with that on one."""
    import jax

    present = jax.devices()
    if mesh.size > len(present):
        simulate = f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} simulates them on a CPU"
        yield Check("fail", "devices", f"--mesh needs {mesh.size}, and there are {len(present)}", simulate)
        return
    yield Check("pass", "devices", f"{len(present)} × {present[0].device_kind}, {mesh.size} of them for the mesh")
    from rekindle._src.models.base import random_model
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


def plan(
    shape: str, mesh: MeshShape | None, device: str, *, quantize: str | None = None, context: int = 8192
) -> Iterator[Check]:
    """Return a model's needs on each device, as lines of the report."""
    sizes = mesh or MeshShape({"model": 1})
    config, dtype = shape_config(shape)
    shards = sizes.get(DATA, 1)  # each shard has the whole model and its own requests
    result = make_plan(
        config,
        Partition(sizes.get("model", 1), sizes.get("expert", 1)),
        device_spec(device),
        dtype=dtype,
        quantize=quantize,
        context=context,
        shards=shards,
    )
    per_shard = f" in {shards} data shards of {result.devices // shards}" if shards > 1 else ""
    yield from plan_checks(result, f"{shape} on {result.devices} × {device}{per_shard}")


def plan_checks(plan: Plan, title: str) -> Iterator[Check]:
    """Yield a plan in words."""
    weights, memory = plan.weight_bytes / 1e9, plan.memory_bytes / 1e9
    if plan.free_bytes <= 0:
        detail = f"weights take {weights:.1f} GB on each device, of {memory:.1f} GB that can be used"
        yield Check("fail", title, detail, "Use more devices, larger ones, or --quantize int4")
        return
    yield Check("pass", title, f"weights take {weights:.1f} GB on each device, of {memory:.1f} GB that can be used")
    tokens = (
        f"{plan.kv_tokens:,} tokens fit beside them ({plan.token_bytes:,} bytes of each on a device), in "
        f"{plan.pages:,} pages of {plan.page_size}"
        + (f" of each data shard, {plan.shards * plan.kv_tokens:,} in all" if plan.shards > 1 else "")
        + f": {plan.contexts:,} requests of {plan.context:,} tokens"
    )
    if plan.fits:
        yield Check("pass", "keys and values", tokens)
    else:
        yield Check("fail", "keys and values", tokens, "Use more devices, or a shorter --context")
    yield Check(
        "pass", "a step takes at least",
        f"{plan.alone_seconds * 1e3:.2f} ms with one request ({1 / plan.alone_seconds:,.0f} tokens/s), of which sums "
        f"over devices {plan.sum_seconds * 1e3:.2f} ms; {plan.many_seconds * 1e3:.2f} ms with {MANY} requests "
        f"({MANY / plan.many_seconds:,.0f} tokens/s): a bound on paper, not a measurement",
    )  # fmt: skip
