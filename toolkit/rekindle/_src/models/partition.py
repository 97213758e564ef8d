"""The partition of a model over devices: their number, the models that it fits, and the sizes on each device."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from rekindle._src.models.base import Graph, kinds_in, leaf_shapes
from rekindle._src.models.config import ModelConfig, MoeSpec, Pages, RecurrentSpec, SharedWith
from rekindle._src.models.nn.packing import Packing, packings_in
from rekindle._src.models.precision import Shards
from rekindle._src.models.registry import manifest
from rekindle._src.models.roles import Role
from rekindle.errors import ConfigError
from rekindle_kernels import int4

LISTED = 64  # an error names the numbers of devices up to this one


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """A mesh by its sizes: `expert` groups of `model` devices each."""

    model: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """The number of devices. Everything but experts is divided over all of them."""
        return self.model * self.expert

    @property
    def sizes(self) -> dict[str, int]:
        return {"expert": self.expert, "model": self.model}

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a model that can't be divided like this; it lists the numbers that work."""
        sizes = {name: count for name, count in self.sizes.items() if count > 1} or {"model": 1}
        if not divides_heads(config, self.size):
            possible = [str(count) for count in range(1, LISTED + 1) if divides_heads(config, count)]
            kv_heads = " and ".join(str(heads) for heads in dict.fromkeys(kv_heads_of(config)))
            raise ConfigError(
                "mesh",
                sizes,
                f"{self.size} devices can't share {config.num_heads} attention heads over {kv_heads} kv "
                f"heads{_heads_of_states(config)} of this {config.model_type} model",
                f"Use {' or '.join(filter(None, [', '.join(possible[:-1]), possible[-1]]))} devices",
            )
        if self.expert == 1:
            return
        counts = {spec.num_experts for spec in config.moe if spec is not None}
        if not counts:
            raise ConfigError(
                "mesh", sizes, f"this {config.model_type} model has no experts", f"Use mesh={self.size} instead"
            )
        uneven = [count for count in sorted(counts) if count % self.expert]
        if uneven:
            possible = [str(n) for n in range(1, uneven[0] + 1) if all(count % n == 0 for count in counts)]
            raise ConfigError(
                "mesh",
                sizes,
                f"{self.expert} groups can't share {uneven[0]} experts evenly",
                f'Use one of {", ".join(possible)} for "expert"',
            )

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config of one device's part. A router still chooses among all experts."""
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=self.kv_heads(config.num_kv_heads),
            pages=tuple(self._local_pages(cache) for cache in config.pages),
            intermediate_size=-(-config.intermediate_size // self.size),
            mlp_sizes=tuple(-(-size // self.size) for size in config.mlp_sizes),
            vocab_size=-(-config.vocab_size // self.size),
            moe=tuple(spec and self._local_experts(spec) for spec in config.moe),
            recurrent=tuple(spec and self._local_state(spec) for spec in config.recurrent),
            added_pages=tuple(dataclasses.replace(one, heads=self.kv_heads(one.heads)) for one in config.added_pages),
        )

    def _local_state(self, spec: RecurrentSpec) -> RecurrentSpec:
        """Divide the value heads, and the key heads as far as there are some; else channels."""
        if not spec.heads:
            return dataclasses.replace(spec, channels=-(-spec.channels // self.size))
        keys, heads = max(1, spec.key_heads // self.size), spec.heads // self.size
        channels = 2 * keys * spec.key_size + heads * spec.value_size
        return dataclasses.replace(spec, channels=channels, key_heads=keys, heads=heads)

    def _local_experts(self, spec: MoeSpec) -> MoeSpec:
        """Divide the experts' sizes over the devices of a group, and the shared MLP's size over all."""
        return dataclasses.replace(
            spec,
            intermediate_size=-(-spec.intermediate_size // self.model),
            shared_size=-(-spec.shared_size // self.size),
        )

    def _local_pages(self, cache: Pages | SharedWith | None) -> Pages | SharedWith | None:
        return dataclasses.replace(cache, heads=self.kv_heads(cache.heads)) if isinstance(cache, Pages) else cache

    def kv_heads(self, heads: int) -> int:
        """Return the number of KV heads of each device, of so many in all."""
        return max(1, heads // self.size)

    def kv_copies(self, heads: int) -> int:
        """Return how many devices have the same KV heads, of so many in all."""
        return max(1, self.size // heads)

    def check_packed(self, graph: Graph) -> None:
        """Raise ConfigError for a 4-bit matrix that can't be divided into whole blocks and groups."""
        sources = manifest(graph.config).sources
        for path, packing in packings_of(graph).items():
            source = sources[path]
            reason = source.role.reason_against_packing(source.stack, int4.OUTPUTS, packing.unit, self.sizes)
            if reason is not None:
                raise ConfigError(
                    "mesh",
                    {name: count for name, count in self.sizes.items() if count > 1},
                    f"{path} is kept in {packing.bits} bits and can't be divided like this: {reason}",
                    f"Use fewer devices, quantize='int4-{min(int4.GROUPS)}', or eight bits for this part",
                )

    def graph(self, graph: Graph) -> Graph:
        """Return the graph of one device's part, for use under `jax.shard_map` over the mesh.

        Its matrices are stored like the whole model's, even if a plan would choose otherwise for their parts' own
        sizes.
        """
        kinds = kinds_in(graph) if packings_of(graph) else graph.precision.kinds
        precision = dataclasses.replace(graph.precision, shards=self.shards(graph.config), kinds=kinds)
        return Graph(self.local(graph.config), precision, graph.paths)

    def shards(self, config: ModelConfig) -> Shards:
        """Return the facts about the partition that layers need."""
        keys = [spec.key_heads for spec in config.recurrent if spec is not None and spec.heads]
        return Shards(self.model, self.expert, config.vocab_size, max(1, self.size // keys[0]) if keys else 1)


def roles_of(graph: Graph) -> dict[str, Role]:
    """Return the role of every leaf of a graph by its path, scales and minimums of quantised matrices included."""
    sources, packings = manifest(graph.config).sources, packings_of(graph)
    roles = {}
    for path in graph.paths:
        matrix = path if path in sources else path.removesuffix("scale").removesuffix("minimum") + "weight"
        role, packing = sources[matrix].role, packings.get(matrix)
        if packing is not None:
            per_input = int4.COLUMNS[packing.dtype]
            columns = Fraction(per_input) if path == matrix else int4.scale_columns(packing.group, packing.scales)
            roles[path] = role.packed(sources[matrix].stack, int4.OUTPUTS, columns)
        else:
            roles[path] = role if path == matrix else role.scale
    return roles


def packings_of(graph: Graph) -> dict[str, Packing]:
    """Return the packings of matrices of four, six or eight bits in groups, by the paths of their weights."""
    if not graph.precision.quantizes:
        return {}
    return packings_in(dict(zip(graph.paths, leaf_shapes(graph), strict=True)))


def divides_heads(config: ModelConfig, count: int) -> bool:
    """True if `count` devices can share a model's heads: all get equally many, with the kv heads that they need.

    Pages that are alike on the devices have to be alike in the whole model, too.
    """
    kinds = Partition(count)
    local = {(kinds.kv_heads(pages.heads), pages.key_size, pages.latent) for pages in config.kinds_of_pages}
    states = [spec for spec in config.recurrent if spec is not None and spec.heads]
    return (
        config.num_heads % count == 0
        and all(heads % count == 0 or count % heads == 0 for heads in kv_heads_of(config))
        and len(local) == len(config.kinds_of_pages)
        and all(spec.heads % count == 0 for spec in states)
        and all(spec.key_heads % count == 0 or count % spec.key_heads == 0 for spec in states)
    )


def _heads_of_states(config: ModelConfig) -> str:
    """Return words for the heads of recurrent layers, if there are any."""
    spec = next((spec for spec in config.recurrent if spec is not None and spec.heads), None)
    return "" if spec is None else f" and states of {spec.heads} heads over {spec.key_heads} of keys"


def kv_heads_of(config: ModelConfig) -> list[int]:
    """Return the number of KV heads of each kind of pages; the config's, where no layer has pages."""
    return [pages.heads for pages in config.kinds_of_pages] or [config.num_kv_heads]
