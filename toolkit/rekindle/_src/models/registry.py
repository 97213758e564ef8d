"""The model families that rekindle implements, one or more for each module in `families`. To add one, write its module.

A family's module is imported when a config of its type is read or its model is made.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rekindle._src.core.names import printable
from rekindle._src.models import drafters, families
from rekindle._src.models.config import ModelConfig, PictureSpec
from rekindle._src.models.loading.manifest import Manifest
from rekindle.errors import UnsupportedModel

if TYPE_CHECKING:
    from rekindle._src.models.drafters.mtp import DraftForm
    from rekindle._src.models.family import Family, GgufForm
    from rekindle._src.models.precision import Precision

# The model types of config.json that are implemented.
FAMILIES = tuple(sorted({*(module.name for module in pkgutil.iter_modules(families.__path__)), *families.RELATIVES}))


def family(model_type: object, shown: str = "") -> Family:
    """Return the family of a model_type. Raise `UnsupportedModel`, which lists the implemented ones."""
    if not isinstance(model_type, str) or model_type not in (*FAMILIES, *drafters.MODULES):
        raise UnsupportedModel(
            f"model_type={model_type!r}{shown} is not implemented. Use one of: {', '.join(FAMILIES)}."
        )
    if model_type in drafters.MODULES:
        module = f"{drafters.__name__}.{drafters.MODULES[model_type]}"
    else:
        module = f"{families.__name__}.{families.RELATIVES.get(model_type, model_type)}"
    entry: Family = import_module(module).FAMILIES[model_type]
    return entry


def gguf_form(model_type: str) -> GgufForm:
    """Return a family's form as a GGUF file. Raise `UnsupportedModel` if llama.cpp does not know the family."""
    form = family(model_type).gguf
    if form is None:
        raise UnsupportedModel(
            f"rekindle reads and writes no GGUF files of {model_type} models. Use a folder of safetensors."
        )
    return form


def gguf_forms() -> dict[str, GgufForm]:
    """Return the forms of all families that can be GGUF files, by model_type."""
    forms = {model_type: family(model_type).gguf for model_type in FAMILIES}
    return {model_type: form for model_type, form in forms.items() if form is not None}


def family_of_gguf(architecture: str) -> str | None:
    """Return the model_type of a GGUF architecture; None if no family has it. Names that are alike are tried first."""
    known = (*FAMILIES, *drafters.MODULES)
    for model_type in sorted(known, key=lambda name: _letters(name) != _letters(architecture)):
        form = family(model_type).gguf
        if form is not None and architecture in (form.architecture, *form.others):
            return model_type
    return None


def _letters(name: str) -> str:
    """Return a name in llama.cpp's spelling: qwen3_moe is its qwen3moe."""
    return re.sub("[^a-z0-9]", "", name.removesuffix("_text"))


def config_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Return the `ModelConfig` of a parsed config.json. Raise `UnsupportedModel` for anything not implemented."""
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    architecture = printable(first, 80) if isinstance(first, str) else "?"
    entry = family(raw.get("model_type"), f" (architecture {architecture})")
    from rekindle._src.models.hf_config import (  # a start that finds everything kept needs neither
        MAX_EXPERTS,
        ConfigKeys,
    )
    from rekindle._src.models.loading.quantized import scheme

    scheme(raw)  # raises for a quantization_config that is not supported
    try:
        nested = entry.nested if "nested_in" in raw else {}
        config = entry.config(ConfigKeys({**nested, **raw}, entry.aliases))
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(
            f"config.json has a value of the wrong kind ({type(error).__name__}: {str(error)[:200]}). Download it "
            "again."
        ) from error
    if isinstance(pictures := raw.get("pictures"), dict):  # as `loading.stored` finds it
        config = dataclasses.replace(config, pictures=PictureSpec(**pictures))
    if raw.get("draft_head") is True and config.model_type in drafters.OWN_HEADS:  # as `loading.stored` finds it
        config = dataclasses.replace(config, draft_head=_own_head(config).config(config))
    experts = sum(spec.num_experts for spec in config.moe if spec is not None)
    if experts > MAX_EXPERTS:
        raise UnsupportedModel(
            f"config.json describes {experts:,} experts in all layers, and {MAX_EXPERTS:,} are read. Check the file."
        )
    if raw.get("headless") and not config.tie_embeddings:  # the checkpoint of a model that embeds, without its head
        return dataclasses.replace(config, tie_embeddings=True, headless=True)
    if raw.get("another_head") and config.tie_embeddings:  # as in transformers, whatever the config says
        return dataclasses.replace(config, tie_embeddings=False)
    return config


def module(config: ModelConfig, precision: Precision) -> Any:
    """Make the module of a model, including its own draft head if the checkpoint has a supported one."""
    made = family(config.model_type).module(config, precision)
    if config.draft_head is not None:
        made.drafter = family(config.draft_head.model_type).module(config.draft_head, precision)
    return made


def _own_head(config: ModelConfig) -> DraftForm:
    """Return the form of the head that models of this type have."""
    from rekindle._src.models.drafters.mtp import HEADS  # few sessions use one

    return HEADS[config.model_type]


def manifest(config: ModelConfig) -> Manifest:
    """Return the sources of the model's parameters in a checkpoint."""
    entry = family(config.model_type)
    result = entry.manifest(config)
    if config.draft_head is not None:
        head = {f"drafter.{path}": source for path, source in _own_head(config).sources(config).items()}
        result = dataclasses.replace(result, sources={**result.sources, **head})
    if config.tie_embeddings:  # some checkpoints store the embedding again as the head
        result = dataclasses.replace(result, ignored=(*result.ignored, r"lm_head\.weight"))
    return result
