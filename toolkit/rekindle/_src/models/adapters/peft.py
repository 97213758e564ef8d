"""Adapters in the format of the PEFT library: `adapter_config.json` beside `adapter_model.safetensors`.

What a folder asks for and is not done here is refused by its name. Every tensor has to land in the model, and every
module that the config names has to have its tensors, so that no adapter does nothing, or half, in silence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.adapters.adapter import Adapter, Product, adapter_of, does_not_fit
from rekindle._src.models.adapters.sites import Site, Sites
from rekindle._src.models.loading.tensor_files import read_header, rows_of
from rekindle.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_CONFIG = 1 << 20
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
# All experts of a layer in one pair of tensors; PEFT wraps the module once for each of its parameters.
_EXPERTS = re.compile(r"(?:.+\.)?layers\.(\d+)\..*\bexperts(?:\.base_layer)*")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # they leave the base's weights as they are
# Fields that change what an adapter computes, with the values that change nothing, and a way out.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "Train without DoRA, or merge it into the model and open that"),
    "use_qalora": ((None, False), "Train without QA-LoRA"),
    "bias": ((None, "none"), 'Train with bias="none"'),
    "lora_bias": ((None, False), "Train with lora_bias=False"),
    "alora_invocation_tokens": ((None, []), "Train without invocation tokens"),
    "modules_to_save": ((None, []), "Train without modules_to_save, or merge the adapter into the model and open that"),
    "trainable_token_indices": ((None, [], {}), "Train without it, or merge the adapter into the model and open that"),
    "layer_replication": ((None, []), "Train without it"),
    "megatron_config": ((None,), "Save the adapter for an undivided model"),
    "arrow_config": ((None,), "Load its adapters one by one"),
    "use_bdlora": ((None, False), "Save the adapter for an undivided model"),
    "monteclora_config": ((None,), "Train without it"),
    "kasa_config": ((None,), "Train without it"),
    "velora_config": ((None,), "Train without it"),
}


def read_folder(folder: Path, name: str, sites: Sites) -> Adapter:
    """Return the adapter of a folder. Raise CheckpointError for one that can't be used as it is."""
    config = _config(folder)
    weights = folder / WEIGHTS
    if not weights.exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights as {pickles[0]}: a pickle can run any code while it is read, so rekindle "
                "does not open it. Convert it where you trust it: PEFT's model.save_pretrained(folder)."
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS}. Pass the folder that PEFT's save_pretrained wrote.")
    tensors: dict[str, NDArray[Any]] = {}
    for entry in read_header(weights).entries:
        if not entry.has_numbers:
            raise CheckpointError(f"{weights}: {entry.name} is stored as {entry.dtype}. Save it in float32 or 16 bits.")
        tensors[entry.name] = rows_of(entry, 0, entry.shape[0]) if entry.shape else np.zeros(())
    return adapter_of_tensors(name, tensors, config, sites, place=str(folder))


def _config(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_plain(folder / CONFIG, _LARGEST_CONFIG))
    except OSError as error:
        raise CheckpointError(f"{folder} has no {CONFIG} that can be read ({error}). Pass a PEFT folder.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG} is no JSON ({error!r}). Save the adapter again.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{folder / CONFIG} is no JSON object. Save the adapter again.")
    return fields


def check_config(config: Mapping[str, Any], place: str) -> None:
    """Raise CheckpointError for what is not done here, by its name."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{place}: peft_type={kind!r} is not supported. Use a LoRA.")
    for field, (harmless, fix) in _REFUSED.items():
        value = config.get(field)
        if value not in harmless:
            raise CheckpointError(f"{place}: {field}={str(value)[:80]!r} is not supported. {fix}.")
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise CheckpointError(
            f"{place}: init_lora_weights={str(init)[:40]!r} changed the base's weights, so the adapter alone is not "
            "enough. Save it with PEFT's path_initial_model_for_weight_conversion."
        )


def adapter_of_tensors(
    name: str, tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any], sites: Sites, *, place: str
) -> Adapter:
    """Return an adapter of tensors under PEFT's names, and of the fields of its config."""
    check_config(config, place)
    by_module = sites.by_module()
    targets = _Targets(config, place)
    pairs: dict[str, dict[str, NDArray[Any]]] = {}
    fused: dict[str, dict[str, NDArray[Any]]] = {}
    names: dict[str, str] = {}  # of modules in the trainer's model, which the config means, by those of the manifest
    problems: list[str] = []
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        module = _known(match[1], by_module) if match is not None else None
        if match is not None and _EXPERTS.fullmatch(match[1]):
            pair = fused.setdefault(match[1], {})
        elif match is None or module is None:
            stripped = match[1] if match is not None else key
            reason = sites.others.get(stripped, "is not a linear layer of this model")
            problems.append(f"{key}: {reason}")
            continue
        elif targets.meant(match[1]) is None:
            problems.append(f"{key}: {CONFIG} does not name its module")
            continue
        else:
            names[module], pair = match[1], pairs.setdefault(module, {})
        if match[2] in pair:
            problems.append(f"{key}: is the second lora_{match[2]} of its module")
        pair[match[2]] = tensor
    single_experts = any(by_module[module][0].experts for module in pairs)
    if not targets.open_ended:
        own, theirs = _prefixes(names)
        for module, (site, _) in by_module.items():
            trained = theirs + module.removeprefix(own) if module.startswith(own) else module
            if module not in pairs and (single_experts or not site.experts) and targets.meant(trained):
                problems.append(f"{trained}: {CONFIG} names it, and it has no tensors")
    products: dict[str, list[Product | None]] = {}
    for module, pair in pairs.items():
        site, index = by_module[module]
        meant = targets.meant(names[module]) or module
        rank, scale = targets.rank(meant), targets.scale(meant)
        expected = {"A": (rank, site.inputs), "B": (site.rows_of(index), rank)}
        shapes = {letter: tensor.shape for letter, tensor in pair.items()}
        if shapes != expected:
            problems.append(f"{module}: lora_A and lora_B have shapes {shapes}, expected {expected}")
            continue
        down, up = (pair[letter].astype(np.float32) for letter in "AB")
        products.setdefault(site.path, [None] * len(site.modules))[index] = Product(down, up * np.float32(scale))
    known = {parameter for trained in names.values() for parameter in targets.naming(f"{trained}.weight")}
    problems += _read_fused(fused, targets, sites, products, known)
    if problems:
        raise does_not_fit(place, problems)
    return adapter_of(name, products)


def _read_fused(
    fused: Mapping[str, Mapping[str, NDArray[Any]]],
    targets: _Targets,
    sites: Sites,
    products: dict[str, list[Product | None]],
    known: set[str],
) -> list[str]:
    """Add the products of tensors of all experts of a layer, [experts · rank, in] and [out, rank · experts].

    Their names don't say which of a layer's parameters they belong to, but their shapes do. Return the problems, which
    parameters that the config names are, but for `known` ones, if they are none of these.
    """
    problems: list[str] = []
    stacks: dict[str, list[Site]] = {}  # by the layer's number
    for site in sites.sites:
        if site.experts:
            stacks.setdefault(site.path.split(".")[1], []).append(site)
    for module, pair in fused.items():
        match, shapes = _EXPERTS.fullmatch(module), {letter: tensor.shape for letter, tensor in pair.items()}
        assert match is not None, "the caller has looked"
        prefix, tried = module.replace(".base_layer", ""), []
        for site in stacks.get(match[1], ()):
            name = f"{prefix}.{_parameter(site)}"
            rank, count = targets.rank(name), site.experts
            expected = {"A": (rank * count, site.inputs), "B": (site.outputs, rank * count)}
            tried.append(f"{_parameter(site)} {expected}")
            if targets.has_parameter(name) and shapes == expected and site.path not in products:
                products[site.path] = _of_experts(site, pair, rank, targets.scale(name))
                known.update(targets.naming(name))
                break
        else:
            problems.append(f"{module}: has shapes {shapes}, and those of its parameters are {', '.join(tried) or '-'}")
    if problems:
        return problems
    for layer, of_layer in stacks.items():
        for site in of_layer:
            prefixes = f"model.layers.{layer}.mlp", site.modules[0].partition(".experts.")[0]
            names = {target for prefix in prefixes for target in targets.naming(f"{prefix}.experts.{_parameter(site)}")}
            known |= names
            if names and site.path not in products:
                problems.append(f"{min(names)}: {CONFIG} names it, and it has no tensors in layer {layer}")
    return problems + [
        f"{name}: {CONFIG} names it, and it is not a parameter of this model's experts"
        for name in targets.parameters
        if name not in known
    ]


def _of_experts(site: Site, pair: Mapping[str, NDArray[Any]], rank: int, scale: float) -> list[Product | None]:
    """Return the products of each expert's modules."""
    downs = pair["A"].astype(np.float32).reshape(site.experts, rank, site.inputs)
    ups = pair["B"].astype(np.float32).reshape(site.outputs, rank, site.experts) * np.float32(scale)
    parts = len(site.rows)
    spans = [slice(part, None, parts) for part in range(parts)] if site.interleaved else site.spans
    return [Product(downs[expert], ups[span, :, expert]) for expert in range(site.experts) for span in spans]


def _parameter(site: Site) -> str:
    """Return what checkpoints call the parameter of all experts."""
    return "down_proj" if site.path.endswith(".down") else "gate_up_proj" if len(site.rows) > 1 else "up_proj"


def _known(module: str, by_module: Mapping[str, Any]) -> str | None:
    """Return a module's name in the model's manifest: models of images have theirs under another prefix."""
    bare = module.replace("language_model.", "")
    for candidate in (module, bare, f"model.{bare}", f"transformer.{bare}", bare.removeprefix("model.")):
        if candidate in by_module:
            return candidate
    return None


def _prefixes(names: Mapping[str, str]) -> tuple[str, str]:
    """Return where names of the manifest begin in another way than the trainer's, and how those begin."""
    module, name = next(iter(names.items()), ("", ""))
    while module and name and module[-1] == name[-1]:
        module, name = module[:-1], name[:-1]
    return module, name


class _Targets:
    """The modules that a config names, and the rank and scale of each, by PEFT's rules."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        try:
            self._targets, self._excluded = (_modules(config.get(f"{word}_modules")) for word in ("target", "exclude"))
            layers, starts = config.get("layers_to_transform"), config.get("layers_pattern") or ()
            self._layers = {layers} if isinstance(layers, int) else set(map(int, layers or ())) or None
            starts = _names([starts] if isinstance(starts, str) else starts)
            self._patterns = [re.compile(rf"(?:^|.*?\.){start}\.(\d+)\.") for start in starts] or [_LAYER]
            self._rank, alpha = int(config.get("r", 8)), config.get("lora_alpha")
            self._alpha = float(8 if alpha is None else alpha)
            self._ranks = {pattern: int(rank) for pattern, rank in _patterns(config.get("rank_pattern"))}
            self._alphas = {pattern: float(alpha) for pattern, alpha in _patterns(config.get("alpha_pattern"))}
            if min([self._rank, *self._ranks.values()]) < 1:
                raise ValueError("a rank below 1")
            self.parameters = _names(config.get("target_parameters") or ())
        except re.error as error:
            raise CheckpointError(
                f"{place}: {CONFIG} has {str(error.pattern)[:80]!r}, which is not a regular expression ({error}). Save "
                "the adapter again."
            ) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{place}: {CONFIG} has what PEFT does not write ({error}). Save the adapter again."
            ) from error
        self._rooted = bool(config.get("use_rslora", False))
        # True if the config does not list the modules, so that the tensors alone say which there are.
        self.open_ended = self._targets is None and not self.parameters

    def naming(self, parameter: str) -> list[str]:
        """Return the names of parameters in the config that mean this one: each is the end of its name."""
        return [name for name in self.parameters if parameter == name or parameter.endswith(f".{name}")]

    def has_parameter(self, parameter: str) -> bool:
        """True if the config names a parameter of all experts."""
        return bool(self.naming(parameter))

    def meant(self, module: str) -> str | None:
        """Return the name by which the config means a module: its own or that of its weight, None if by neither."""
        if self.has(module):
            return module
        weight = f"{module}.weight"  # PEFT has routers so, which are no linear modules in transformers
        return weight if self.has_parameter(weight) else None

    def has(self, module: str) -> bool:
        """True if the config names a module."""
        if self._excluded and _matches(self._excluded, module):
            return False
        if not self.open_ended and not _matches(self._targets or (), module):
            return False
        if self._layers is None or not isinstance(self._targets, tuple) or module in self._targets:
            return True
        match = next((match for match in (pattern.match(module) for pattern in self._patterns) if match), None)
        return match is not None and int(match[1]) in self._layers

    def rank(self, module: str) -> int:
        """Return the rank of a module's product."""
        return int(_by_pattern(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """Return the factor of a module's product."""
        rank = self.rank(module)
        return _by_pattern(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._rooted else rank)


def _modules(value: Any) -> re.Pattern[str] | tuple[str, ...] | None:
    """Return the names of modules, or the expression of those that are meant; None for all of them, or for none."""
    if isinstance(value, str):
        return None if value.lower() == "all-linear" else re.compile(value)
    return None if value is None else _names(value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | set) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{str(value)[:80]!r} is not a list of names")
    return tuple(value)


def _patterns(value: Any) -> list[tuple[re.Pattern[str], Any]]:
    """Return the items of a mapping with expressions of the names, or of their ends, that they are for."""
    return [(re.compile(rf"(.*\.)?({pattern})$"), item) for pattern, item in dict(value or {}).items()]


def _matches(targets: re.Pattern[str] | tuple[str, ...], module: str) -> bool:
    if isinstance(targets, re.Pattern):
        return targets.fullmatch(module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _by_pattern(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    """Return the value of the first pattern that a module's name matches."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)
