"""The matrices that a training gives an adapter, by the modules that a caller names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rekindle._src.models.adapters.sites import Site, sites_of
from rekindle._src.models.config import ModelConfig
from rekindle.errors import InvalidRequest

ALL = "all"
_LEFT_OUT = ("router", "shared_gate")  # they choose experts


class TrainedMatrix(NamedTuple):
    """A matrix of a layer, and its trained modules."""

    layer: int
    name: str  # "attention.qkv"
    site: Site
    modules: tuple[int, ...]  # their places in the site

    @property
    def spans(self) -> tuple[slice, ...]:
        """The rows of each trained module."""
        return tuple(self.site.spans[index] for index in self.modules)

    @property
    def outputs(self) -> int:
        """The outputs of all trained modules."""
        return sum(self.site.rows[index] for index in self.modules)

    def parameters(self, rank: int) -> int:
        """Return how many numbers an adapter of it has."""
        return rank * (len(self.modules) * self.site.inputs + self.outputs)


def trained_matrices(config: ModelConfig, targets: str | Sequence[str]) -> tuple[TrainedMatrix, ...]:
    """Return the matrices for modules' last names, such as ["q_proj", "v_proj"], or for "all" of the blocks' linear
    layers but experts and routers.
    """
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    sites = [site for site in sites_of(config).sites if not site.experts and not site.path.endswith(_LEFT_OUT)]
    known = dict.fromkeys(module.rpartition(".")[2] for site in sites for module in site.modules)
    for name in names:
        if name != ALL and name not in known:
            fix = f"Use {ALL!r}, or names among {', '.join(map(repr, known))}"
            raise InvalidRequest("targets", name, "is not a linear layer of this model's blocks", fix)
    trained: list[TrainedMatrix] = []
    for site in sites:
        modules = tuple(
            index for index, module in enumerate(site.modules) if ALL in names or module.rpartition(".")[2] in names
        )
        if modules:
            _, layer, name = site.path.split(".", 2)
            trained.append(TrainedMatrix(int(layer), name, site, modules))
    if not trained:
        raise InvalidRequest("targets", targets, "names no linear layers", f"Use {ALL!r}")
    return tuple(trained)
