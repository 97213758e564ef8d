"""Adapters in the format of the PEFT library: `adapter_config.json` and `adapter_model.safetensors`.

What a folder asks for and is not done here is refused by its name. Every tensor has to land in the model, and every
module that the config names has to have its tensors, so that no adapter does nothing, or half, in silence.

The config is a stranger's: names and their ends are looked up in sets, and expressions match as `expressions` does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rekindle._src.core.names import printable
from rekindle._src.core.plain_files import read_plain
from rekindle._src.models.adapters.adapter import Adapter, Product, adapter_of, does_not_fit
from rekindle._src.models.adapters.budget import Budget, TooMuchWork
from rekindle._src.models.adapters.expressions import Expression, UnsupportedExpression
from rekindle._src.models.adapters.patterns import ModuleNames
from rekindle._src.models.adapters.sites import Site, Sites
from rekindle._src.models.loading.tensor_files import read_header, rows_of
from rekindle.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAINING = "rekindle.json"  # of an adapter that a session has trained: its base, and how the weights were held
_LONGEST_PRECISION = 200  # characters
_LARGEST_CONFIG = 1 << 20
_MOST_SURPLUS = 1000  # tensors that are listed as problems, beyond those that a model can have
_HEADER = 1 << 20  # bytes of a header, in addition to those of its tensors
_TENSOR = 512  # bytes that the header has for a tensor at most; trainers write about 200
_LONGEST_START, _SHOWN = 200, 80  # characters
_HIGHEST_RANK = 1 << 31  # that is compared with shapes; longer numbers fit into no float
_LIST = "Write the names of modules, as a list or one by one"
Number = TypeVar("Number", int, float)
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_MATRICES = {"lora_A": "A", "lora_B": "B"}
_WRAPPED = ".base_layer"  # PEFT wraps the module of all experts of a layer once for each of its parameters
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


class Tensor(NamedTuple):
    """A tensor of an adapter. It is read once all shapes match the model."""

    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]


def any_rank(rank: int) -> None:
    """Accept an adapter of any rank."""


def read_folder(
    folder: Path, name: str, sites: Sites, fits: Callable[[int], None] = any_rank, budget: Budget | None = None
) -> Adapter:
    """Return the adapter of a folder. Raise CheckpointError for one that can't be used as it is.

    `fits` raises for a rank that is too large, before anything is read.
    """
    config = _fields(folder, CONFIG)
    weights = folder / WEIGHTS
    if not weights.exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights as {pickles[0]}: a pickle can run any code while it is read, so rekindle "
                "does not open it. Convert it where you trust it: PEFT's model.save_pretrained(folder)."
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS}. Pass the folder that PEFT's save_pretrained wrote.")
    tensors: dict[str, Tensor] = {}
    for entry in read_header(weights, _HEADER + _TENSOR * _most_tensors(sites)).entries:
        if not entry.has_numbers:
            raise CheckpointError(
                f"{weights}: {entry.name[:200]} is stored as {str(entry.dtype)[:80]}. Save it in float32 or 16 bits."
            )
        tensors[entry.name] = Tensor(entry.shape, partial(rows_of, entry, 0, entry.shape[0] if entry.shape else 0))
    adapter = adapter_of_tensors(name, tensors, config, sites, place=str(folder), fits=fits, budget=budget)
    return dataclasses.replace(adapter, trained_on=_trained_on(folder))


def _trained_on(folder: Path) -> str:
    """Return how the weights were held that an adapter was trained on; empty where its folder does not say it."""
    if not (folder / TRAINING).exists():
        return ""
    fields = _fields(folder, TRAINING)
    held = fields.get("weights", "")
    return printable(held, _LONGEST_PRECISION) if isinstance(held, str) else ""


def _most_tensors(sites: Sites) -> int:
    """Return how many tensors an adapter of the model may have."""
    return _MOST_SURPLUS + 4 * sum(len(site.modules) + 1 for site in sites.sites)


def _fields(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a file of JSON of an adapter's folder."""
    try:
        fields = json.loads(read_plain(folder / name, _LARGEST_CONFIG))
    except OSError as error:
        raise CheckpointError(f"{folder} has no {name} that can be read ({error}). Pass a PEFT folder.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / name} is no JSON ({error!r}). Save the adapter again.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{folder / name} is no JSON object. Save the adapter again.")
    return fields


def check_config(config: Mapping[str, Any], place: str) -> None:
    """Raise CheckpointError that names each unsupported option."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{place}: peft_type={str(kind)[:80]!r} is not supported. Use a LoRA.")
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
    name: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    sites: Sites,
    *,
    place: str,
    fits: Callable[[int], None] = any_rank,
    budget: Budget | None = None,
) -> Adapter:
    """Return an adapter of tensors under PEFT's names, and of the fields of its config.

    They are read after all of their names and shapes were compared with the model's.
    """
    check_config(config, place)
    most = _most_tensors(sites)
    if len(tensors) > most:
        raise CheckpointError(
            f"{place} has {len(tensors):,} tensors, and an adapter of this model may have {most:,}. Pass one that was "
            "trained on this model."
        )
    budget = budget or Budget()
    try:
        targets = Targets(config, place, budget)
        products, problems = _planned(tensors, targets, sites, _named_alike(tensors, sites))
    except TooMuchWork as error:
        raise CheckpointError(f"{place}: {CONFIG}: {error}. {_LIST}.") from error
    if problems:
        raise does_not_fit(place, problems)
    fits(max((planned.rank for of_site in products.values() for planned in of_site if planned is not None), default=0))
    read: dict[str, list[Product | None]] = {}
    for path, of_site in products.items():
        budget.check()
        read[path] = [product for planned in of_site for product in ((None,) if planned is None else planned.read())]
    return adapter_of(name, read)


def _named_alike(tensors: Mapping[str, Tensor], sites: Sites) -> Mapping[str, tuple[Site, int]]:
    """Return the sites by transformers' names of modules, or by the checkpoint's where an adapter has more of those."""
    by_module, by_stored = sites.by_module(), sites.by_stored_name()
    if by_module.keys() == by_stored.keys():
        return by_module

    def count(names: Mapping[str, tuple[Site, int]]) -> int:
        return sum(_known(_module_of(key)[0], names) is not None for key in tensors)

    return by_stored if count(by_stored) > count(by_module) else by_module


class _ProductPlan(NamedTuple):
    """A product, or the products of all experts of a site, with tensors of the right shapes."""

    rank: int
    read: Callable[[], Sequence[Product]]


def _planned(
    tensors: Mapping[str, Tensor], targets: Targets, sites: Sites, by_module: Mapping[str, tuple[Site, int]]
) -> tuple[dict[str, list[_ProductPlan | None]], list[str]]:
    """Return the products of each site and the problems, by names and shapes alone."""
    pairs: dict[str, dict[str, Tensor]] = {}
    fused: dict[str, dict[str, Tensor]] = {}
    names: dict[str, str] = {}  # of modules in the trainer's model, which the config means, by those of the manifest
    problems: list[str] = []
    for key, tensor in tensors.items():
        stripped, letter = _module_of(key)
        module = _known(stripped, by_module) if letter else None
        if letter and _layer_of_experts(stripped) is not None:
            pair = fused.setdefault(stripped, {})
        elif module is None:
            reason = sites.others.get(stripped, "is not a linear layer of this model")
            problems.append(f"{key}: {reason}")
            continue
        elif targets.meant(stripped) is None:
            problems.append(f"{key}: {CONFIG} does not name its module")
            continue
        else:
            names[module], pair = stripped, pairs.setdefault(module, {})
        if letter in pair:
            problems.append(f"{key}: is the second lora_{letter} of its module")
        pair[letter] = tensor
    single_experts = any(by_module[module][0].experts for module in pairs)
    if not targets.open_ended:
        own, theirs = _prefixes(names)
        for module, (site, _) in by_module.items():
            trained = theirs + module.removeprefix(own) if module.startswith(own) else module
            if module not in pairs and (single_experts or not site.experts) and targets.meant(trained):
                problems.append(f"{trained}: {CONFIG} names it, and it has no tensors")
    products: dict[str, list[_ProductPlan | None]] = {}
    for module, pair in pairs.items():
        site, index = by_module[module]
        meant = targets.meant(names[module]) or module
        rank, scale = targets.rank(meant), targets.scale(meant)
        expected = {"A": (rank, site.inputs), "B": (site.rows_of(index), rank)}
        shapes = {letter: tensor.shape for letter, tensor in pair.items()}
        if shapes != expected:
            problems.append(f"{module}: lora_A and lora_B have shapes {shapes}, expected {expected}")
        elif rank > site.highest_rank:
            problems.append(f"{module}: has rank {rank:,}, and at most {site.highest_rank:,} are read")
        else:
            product = _ProductPlan(rank, partial(_of_module, pair, scale))
            products.setdefault(site.path, [None] * len(site.modules))[index] = product
    known = {parameter for trained in names.values() for parameter in targets.naming(f"{trained}.weight")}
    problems += _plan_fused(fused, targets, sites, products, known)
    return products, problems


def _module_of(key: str) -> tuple[str, str]:
    """Return a tensor's module, without PEFT's prefix, and which of the two matrices it is.

    Names end in ".lora_A.weight", or ".lora_A.default.weight" with the adapter's name. The letter of others is empty.
    """
    module, _, last = key.removesuffix(_WEIGHT).rpartition(".")
    if last not in _MATRICES and last.replace("_", "a").isalnum():
        module, _, last = module.rpartition(".")
    if last not in _MATRICES or not key.endswith(_WEIGHT) or not module:
        return key, ""
    return module.removeprefix(_PREFIX), _MATRICES[last]


def _layer_of_experts(module: str) -> str | None:
    """Return the layer of a module that has all experts of it; None for other modules."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    parts = module.split(".")
    if parts.pop() != "experts":
        return None
    numbers = [number for word, number in itertools.pairwise(parts) if word == "layers" and number.isdecimal()]
    return numbers[-1] if numbers else None


def _plan_fused(
    fused: Mapping[str, Mapping[str, Tensor]],
    targets: Targets,
    sites: Sites,
    products: dict[str, list[_ProductPlan | None]],
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
        shapes = {letter: tensor.shape for letter, tensor in pair.items()}
        prefix, tried = module.replace(_WRAPPED, ""), []
        for site in stacks.get(_layer_of_experts(module) or "", ()):
            name = f"{prefix}.{_parameter(site)}"
            rank, count = targets.rank(name), site.experts
            expected = {"A": (rank * count, site.inputs), "B": (site.outputs, rank * count)}
            tried.append(f"{_parameter(site)} {expected}")
            fits = shapes == expected and rank <= site.highest_rank
            if targets.has_parameter(name) and fits and site.path not in products:
                products[site.path] = [_ProductPlan(rank, partial(_of_experts, site, pair, rank, targets.scale(name)))]
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


def _of_module(pair: Mapping[str, Tensor], scale: float) -> list[Product]:
    down, up = (pair[letter].read().astype(np.float32) for letter in "AB")
    return [Product(down, up * np.float32(scale))]


def _of_experts(site: Site, pair: Mapping[str, Tensor], rank: int, scale: float) -> list[Product]:
    """Return the products of each expert's modules."""
    downs = pair["A"].read().astype(np.float32).reshape(site.experts, rank, site.inputs)
    ups = pair["B"].read().astype(np.float32).reshape(site.outputs, rank, site.experts) * np.float32(scale)
    parts = len(site.rows)
    spans = [slice(part, None, parts) for part in range(parts)] if site.interleaved else site.spans
    return [Product(downs[expert], ups[span, :, expert]) for expert in range(site.experts) for span in spans]


def _parameter(site: Site) -> str:
    """Return the name of the parameter of all experts in checkpoints."""
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


class Targets:
    """The modules that a config names, and the rank and scale of each, by PEFT's rules."""

    def __init__(self, config: Mapping[str, Any], place: str, budget: Budget) -> None:
        self._place, self._budget, self._matched = place, budget, ModuleNames(budget)
        try:
            self._targets = self._modules(config, "target_modules")
            self._excluded = self._modules(config, "exclude_modules")
            layers, starts = config.get("layers_to_transform"), config.get("layers_pattern") or ()
            self._layers = {layers} if isinstance(layers, int) else set(map(int, layers or ())) or None
            self._starts = tuple(map(self._start, _names([starts] if isinstance(starts, str) else starts)))
            self._rank, alpha = int(config.get("r", 8)), config.get("lora_alpha")
            self._alpha = float(8 if alpha is None else alpha)
            self._ranks = self._patterns(config, "rank_pattern", int)
            self._alphas = self._patterns(config, "alpha_pattern", float)
            for rank in (self._rank, *(rank for _, rank in self._ranks)):
                if not 1 <= rank <= _HIGHEST_RANK:
                    raise ValueError("a rank below 1" if rank < 1 else f"a rank above {_HIGHEST_RANK:,}")
            self.parameters = _names(config.get("target_parameters") or ())
        except (CheckpointError, TooMuchWork):
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{place}: {CONFIG} has what PEFT does not write ({str(error)[:200]}). Save the adapter again."
            ) from error
        self._of_parameters = frozenset(self.parameters)
        self._rooted = bool(config.get("use_rslora", False))
        # True if the config does not list the modules, so that the tensors alone say which there are.
        self.open_ended = self._targets is None and not self.parameters

    def naming(self, parameter: str) -> list[str]:
        """Return the names of parameters in the config that mean this one: each is the end of its name."""
        return [name for name in self._ends(parameter) if name in self._of_parameters]

    def has_parameter(self, parameter: str) -> bool:
        """True if the config names a parameter of all experts."""
        return bool(self.naming(parameter))

    def meant(self, module: str) -> str | None:
        """Return the module's name in the config: its own or its weight's. None without either."""
        if self.has(module):
            return module
        weight = f"{module}.weight"  # PEFT has routers so, which are no linear modules in transformers
        return weight if self.has_parameter(weight) else None

    def has(self, module: str) -> bool:
        """True if the config names a module."""
        if self._excluded and self._matches(self._excluded, module):
            return False
        if not self.open_ended and not self._matches(self._targets or frozenset(), module):
            return False
        if self._layers is None or not isinstance(self._targets, frozenset) or module in self._targets:
            return True
        return self.layer(module) in self._layers

    def rank(self, module: str) -> int:
        """Return the rank of a module's product."""
        return int(_by_pattern(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """Return the factor of a module's product."""
        rank = self.rank(module)
        return _by_pattern(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._rooted else rank)

    def _ends(self, name: str) -> Iterator[str]:
        """Yield a name, and the part after each of its dots."""
        self._budget.spend(1 + name.count("."))
        yield name
        while "." in name:
            name = name.partition(".")[2]
            yield name

    def _matches(self, targets: Expression | frozenset[str], module: str) -> bool:
        if isinstance(targets, Expression):
            return targets.matches(module)
        return any(end in targets for end in self._ends(module))

    def _modules(self, config: Mapping[str, Any], field: str) -> Expression | frozenset[str] | None:
        """Return the chosen modules as names or an expression; None if all are chosen, or nothing is."""
        value = config.get(field)
        if isinstance(value, str):
            return None if value.lower() == "all-linear" else self._expression(field, value)
        return None if value is None else frozenset(_names(value))

    def _patterns(
        self, config: Mapping[str, Any], field: str, kind: Callable[[Any], Number]
    ) -> list[tuple[Expression, Number]]:
        """Return the items of a mapping with expressions of the names, or of their ends, that they are for."""
        items = dict(config.get(field) or {}).items()
        return [(self._expression(field, text), kind(value)) for text, value in items]

    def _expression(self, field: str, text: str) -> Expression:
        try:
            return Expression(text, self._matched)
        except UnsupportedExpression as error:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise CheckpointError(f"{self._place}: {CONFIG} has {field}={shown!r}: {error}. {_LIST}.") from error

    def _start(self, text: str) -> list[str]:
        """Return the parts of a name of the list of layers, between dots; PEFT lets a dot stand for any character."""
        parts = text.split(".")
        if len(text) > _LONGEST_START or not all(part.replace("_", "a").isalnum() for part in parts):
            raise CheckpointError(
                f"{self._place}: {CONFIG} has layers_pattern={text[:_SHOWN]!r}, which is not a name of letters, "
                "digits, underscores and dots, such as 'layers'. Name the list of layers, or leave layers_pattern out."
            )
        return parts

    def layer(self, module: str) -> int | None:
        """Return the number of a module's layer, by the name of the list of layers if the config has it."""
        if not self._starts:
            parts = module.split(".")
            return next((int(part) for part in parts[2:-1] if part.isdecimal()), None)
        tries = 1 + module.count(".")
        for start in self._starts:
            self._budget.spend(2 * tries + len(start))
            number = _number_after(start, module)
            if number is not None:
                return number
        return None


def _number_after(start: Sequence[str], module: str) -> int | None:
    """Return the number that is the part of a module's name after the first place where a name starts."""
    size = len(start) - 1 + sum(map(len, start))
    at = 0
    while True:
        end = at + size
        number, dot, _ = module[end + 1 :].partition(".")
        if module[end : end + 1] == "." and dot and number.isdecimal():
            begin = at
            for part in start:
                if not module.startswith(part, begin):
                    break
                begin += len(part) + 1
            else:
                return int(number)
        at = module.find(".", at) + 1
        if not at:
            return None


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | set) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{str(value)[:80]!r} is not a list of names")
    return tuple(value)


def _by_pattern(patterns: Sequence[tuple[Expression, float]], module: str, default: float) -> float:
    """Return the value of the first pattern that a module's name matches."""
    return next((value for pattern, value in patterns if pattern.matches_end(module)), default)
