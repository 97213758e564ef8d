"""The meanings of the figures of `session.stats()`, in the groups and the order in which a notebook shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.core import html

GROUPS: dict[str, dict[str, str]] = {
    "requests": {
        "running": "sequences that steps compute now",
        "waiting": "in the queue",
        "parked": "of them, those that wait for a prefix which another request computes",
        "leaving": "ended, but a step in flight still contains them",
        "submitted": "so far",
        "finished": "ended by themselves or at max_tokens",
        "aborted": "cancelled, timed out, or abandoned by their caller",
        "failed": "ended by an error",
        "preemptions": "lost their pages to an older request and resumed later",
        "live": "between submit and their end; n=3 counts three times",
        "places": "how many may be live at once: max_requests + max_queue",
        "waiting_for_a_place": "callers that await a place",
    },
    "tokens": {
        "prompt_tokens": "of all prompts so far",
        "cached_tokens": "of them, found in the prefix cache",
        "hit_rate": "their share",
        "prefill_tokens": "of prompts, computed; once more after a preemption",
        "generated_tokens": "sampled",
        "drafted_tokens": "proposed by prompt_lookup and computed",
        "accepted_tokens": "of them, those that sampling confirmed",
        "tokens": "positions that steps computed, prompts and decoding together",
        "padding": "positions computed for nothing, because a program was larger than its step",
    },
    "steps": {
        "steps": "of the engine so far",
        "step_sizes": "steps by how many tokens they computed, rounded up to a power of two",
        "steps_in_flight": "given to the device and not read yet",
        "device_seconds": "in which a step ran, as far as the host can tell",
        "collective_seconds": "what the collectives of these steps take alone: sums over devices, gathering logits",
        "collective_share": "their share of device_seconds",
        "host_seconds": "packing and dispatch, compiling included",
        "idle_seconds": "the device had nothing to do although requests were there",
        "idle_share": "of the time in which requests were there",
        "slow_steps": "that took longer than step_timeout",
        "traces": "Python functions traced by JAX",
        "compilations": "programs compiled; the others came from disk",
        "paused": "inside a paused() block",
        "stalled": "what has been running for longer than step_timeout",
    },
    "pages": {
        "pages_total": "of KV memory on the device",
        "pages_free": "hold nothing",
        "pages_held": "by requests that run",
        "pages_cached": "kept by the prefix cache alone, until room is needed",
        "pages_out": "copied from the device to host memory",
        "pages_in": "copied back",
        "reserve_fraction": "of the tokens that running requests may still make, for which pages are kept back",
    },
    "cache": {
        "nodes": "pages in the tree, on all tiers",
        "device_pages": "of them, on the device",
        "evictable_pages": "of them, those that no request holds",
        "pinned_pages": "kept by pin()",
        "forgotten_nodes": "gone from every tier",
        "matches": "prompts looked up",
        "hits": "of them, those that found something",
        "device_hit_pages": "found on the device",
        "host_hit_pages": "found in host memory or on disk",
        "published_pages": "put into the tree",
        "merged_pages": "computed twice and then kept once",
        "evicted_pages": "left the device",
        "offloaded_pages": "of them, to host memory",
    },
}


def foremost(figures: Mapping[str, Any]) -> html.Markup:
    """Show the six figures that summarise a session; the others are for a closer look."""
    prompted, cached = figures.get("prompt_tokens", 0), figures.get("cached_tokens", 0)
    pairs = {
        "requests running": figures.get("running", 0),
        "waiting": figures.get("waiting", 0),
        "finished": figures.get("finished", 0),
        "tokens generated": figures.get("generated_tokens", 0),
        "prompt tokens cached": f"{cached:,} of {prompted:,}" + (f" ({cached / prompted:.0%})" if prompted else ""),
        "programs compiled": figures.get("compilations", 0),
    }
    return html.pairs(pairs)


def grouped(figures: Mapping[str, Any]) -> list[html.Markup]:
    """Return one table for each group that has figures, and one for the figures of no group."""
    remaining = dict(figures)
    parts: list[html.Markup] = []
    for title, words in GROUPS.items():
        present = {name: remaining.pop(name) for name in words if name in remaining}
        present = {
            name: value for name, value in present.items() if value is not False and value != ""
        }  # paused, stalled
        if present:
            parts.append(_table(title, present, words))
    if remaining:
        parts.append(_table("more", remaining, {}))
    return parts


def _table(title: str, figures: Mapping[str, Any], words: Mapping[str, str]) -> html.Markup:
    pairs = {name.replace("_", " "): value for name, value in figures.items()}
    titles = {name.replace("_", " "): meaning for name, meaning in words.items()}
    block = html.block(html.pairs(pairs, titles), title=title)
    return html.Markup(f'<div style="display:inline-block;vertical-align:top;margin-right:1em">{block}</div>')
