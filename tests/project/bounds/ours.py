"""Constants that are bounds by their names, of our own work and of what is shown: nobody else sends what they count."""

from __future__ import annotations

from project.bounds.records import OURS, PACE, SHOWN, TIME, Bound, Other, within

BOUNDS: list[Bound] = []

OTHERS: dict[str, dict[str, Other]] = {
    "core/captured.py": {"_LARGEST_PICTURES": within("values of a checkpoint's JSON")},
    "calls/content.py": {"_MOST_SHOWN": SHOWN, "MOST_DRAWN": SHOWN, "MOST_WRITTEN": OURS},
    "cli/cache.py": {"MOST_NAMED": SHOWN},
    "capabilities/captures/files.py": {
        "_LONGEST_NUMBER": OURS, "LONGEST_HEADER": within("values of tensors' entries"),
        "LARGEST_CHANGES": Other("the bytes of a file that is read whole; its vectors have twice as many at most"),
    },
    "capabilities/gradients/owner.py": {"MOST_BYTES": OURS, "MOST_PROGRAMS": OURS},
    "capabilities/gradients/paths.py": {"_MOST_ROWS": OURS},
    "capabilities/gradients/request.py": {"MOST_LAYERS": OURS},
    "capabilities/tuning/batches.py": {"_MOST_TOKENS": PACE},
    "capabilities/tuning/checkpoint.py": {"MOST_TRAININGS": OURS, "_LARGEST_HISTORY": OURS},
    "capabilities/tuning/data.py": {"MOST_ITEMS": OURS},
    "capabilities/tuning/losses.py": {"_MOST_APART": OURS},
    "capabilities/tuning/owner.py": {"MOST_PROGRAMS": OURS},
    "capabilities/tuning/request.py": {
        "MOST_STEPS": OURS, "MOST_RANK": OURS, "MOST_BATCH": OURS, "MOST_LENGTH": OURS, "MOST_TARGETS": OURS,
    },
    "capabilities/overflow/request.py": {"MOST_FUNCTIONS": PACE},
    "capabilities/tuning/run.py": {"_MOST_FAILURES": OURS},
    "capabilities/tuning/trainer.py": {"_LARGEST_NORM": OURS},
    "session/attributions.py": {"MOST_STEPS": OURS, "MOST_PATCHES": OURS},
    "views/icicle.py": {"MOST": SHOWN},
    "views/markdown.py": {"_DEEPEST": SHOWN},
    "core/mesh_shape.py": {"MAX_DEVICES": OURS, "MAX_PROCESSES": OURS},
    "core/names.py": {"MAX_NAME": SHOWN, "MAX_PATH": OURS, "_MAX_PART": OURS},
    "core/records.py": {"MOST_MISSING": SHOWN},
    "core/rope_scaling.py": {"MOST_FACTOR": OURS, "MOST_POSITIONS": OURS, "_LONGEST": OURS},
    "core/soft_prompt.py": {"MOST_PARTS": OURS, "MOST_ROWS": OURS, "MOST_TEXT": OURS},
    "core/shared_cache.py": {"MAX_BYTES": OURS, "MAX_AGE": TIME, "_MOST_HEADER": OURS, "_MOST_FILES": OURS},
    "drafts/resting.py": {"_LONGEST": PACE},
    "evaluation/attention.py": {"MOST": OURS},
    "execution/page_transfers.py": {"MAX_BYTES": PACE},
    "models/drafters/dflash.py": {"MOST_BLOCK": OURS},
    "opening/exporting.py": {"_LONGEST": SHOWN},
    "opening/head_start.py": {"MOST": PACE},
    "opening/resolve.py": {"LONGEST_DEFAULT": OURS},
    "programs/buckets.py": {"MAX_PREFILL_ROWS": PACE},
    "programs/collectives.py": {"MOST_TOKENS": PACE, "MOST_ROWS": PACE},
    "programs/request_state.py": {"MAX_END_IDS": OURS, "BIAS_LIMIT": OURS},
    "programs/sampling.py": {"LARGEST": OURS},
    "programs/store.py": {"MAX_AGE": TIME, "LONGEST": TIME},
    "replicas/routing.py": {"MOST_CHARACTERS": PACE, "MOST_PARTS": PACE},
    "programs/repeated.py": {"MOST_STEPS": PACE, "_LARGEST": PACE},
    "scheduling/drafting/drafts.py": {"_MOST": PACE},
    "capabilities/guides/guidance.py": {"MAX_DRAFTS": PACE},
    "scheduling/ready_rows.py": {"_LONGEST": TIME},
    "cli/commands/serve.py": {"LONGEST_IDLE": TIME},
    "shelf/keeper.py": {"MOST_WAITING": Other("requests in line; what they brought counts as bytes of requests")},
    "shelf/policy.py": {"LONGEST_STAY": TIME, "LONGEST_TURN": TIME},
    "shelf/shelf.py": {"MOST_MODELS": OURS, "LONGEST_IDLE": TIME},
}  # fmt: skip
