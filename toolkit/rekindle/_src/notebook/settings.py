"""The settings of a chat's next answer: a system prompt and sliders, with presets above them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle._src.core.sampling import ANSWER_TOKENS, Sampling
from rekindle._src.notebook.live import Control, button, field, slider
from rekindle._src.views.answers import AS_OPENED, AS_OPENED_MEANING, PRESETS, RANGES
from rekindle.errors import InvalidRequest

_OF_PRESETS = ("temperature", "top_p")  # what presets are of
Values = Mapping[str, str]


def opened_with(sampling: Sampling, options: Mapping[str, object]) -> dict[str, str]:
    """Return the values of the sliders that a chat begins with."""
    values = {name: str(getattr(sampling, name)) for name in RANGES}
    return values if options.get("max_tokens") is not None else {**values, "max_tokens": str(ANSWER_TOKENS)}


def moved(values: Values, opened: Values) -> dict[str, float]:
    """Return the numbers of moved sliders. The page may send anything; `Sampling` checks the numbers."""
    numbers: dict[str, float] = {}
    for name in RANGES:
        value = values.get(name, opened[name])
        if value != opened[name]:
            try:
                numbers[name] = int(value) if name == "max_tokens" else float(value)
            except ValueError:
                raise InvalidRequest(name, value, "is no number", "Move the slider") from None
    return numbers


def presets(opened: Values) -> dict[str, dict[str, str]]:
    """Return the presets as values of the sliders."""
    own = {name: opened[name] for name in _OF_PRESETS}
    others = {name: {key: str(value) for key, value in one.settings.items()} for name, one in PRESETS.items()}
    return {AS_OPENED: own, **others}


def controls(values: Mapping[str, Any], opened: Values) -> list[Control]:
    """Return the controls, the presets first. The one that the sliders are at is on."""
    now = {name: str(values.get(name, "")) for name in _OF_PRESETS}
    named = presets(opened)
    on = next((name for name, settings in named.items() if settings == now), "")
    meanings = {AS_OPENED: AS_OPENED_MEANING, **{name: preset.meaning for name, preset in PRESETS.items()}}
    buttons = [
        button(f"preset:{name}", name, title=meanings[name], group="drawer", look="on" if name == on else "")
        for name in named
    ]
    ranges = [
        slider(name, name.replace("_", " "), low=low, high=high, step=step, title=title, group="drawer")
        for name, (low, high, step, title) in RANGES.items()
    ]
    return [*buttons, field("system", "System prompt", width="100%", rows=2, group="drawer"), *ranges]
