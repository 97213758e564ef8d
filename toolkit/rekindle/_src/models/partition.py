"""How many devices share a model, which models that fits, and the sizes that each of them computes with."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from rekindle._src.models.base import Graph, kinds_in, leaf_shapes
from rekindle._src.models.config import ModelConfig
from rekindle._src.models.nn.packing import Packing, packing_of
from rekindle._src.models.nn.shards import Shards
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
        """Devices in all. Everything but experts is divided over all of them."""
        return self.model * self.expert

    @property
    def sizes(self) -> dict[str, int]:
        return {"expert": self.expert, "model": self.model}

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError, with the numbers that work, for a model that can't be divided like this."""
        shown = {name: count for name, count in self.sizes.items() if count > 1} or {"model": 1}
        if not divides_heads(config, self.size):
            possible = [str(count) for count in range(1, LISTED + 1) if divides_heads(config, count)]
            raise ConfigError(
                "mesh",
                shown,
                f"{self.size} devices can't share {config.num_heads} attention heads over {config.num_kv_heads} kv "
                f"heads of this {config.model_type} model",
                f"Use {' or '.join(filter(None, [', '.join(possible[:-1]), possible[-1]]))} devices",
            )
        if self.expert == 1:
            return
        counts = {spec.num_experts for spec in config.moe if spec is not None}
        if not counts:
            raise ConfigError(
                "mesh", shown, f"this {config.model_type} model has no experts", f"Use mesh={self.size} instead"
            )
        wrong = [count for count in sorted(counts) if count % self.expert]
        if wrong:
            possible = [str(n) for n in range(1, wrong[0] + 1) if all(count % n == 0 for count in counts)]
            raise ConfigError(
                "mesh",
                shown,
                f"{self.expert} groups can't share {wrong[0]} experts evenly",
                f'Use one of {", ".join(possible)} for "expert"',
            )

    def local(self, config: ModelConfig) -> ModelConfig:
        """The config of one device's part; a router still chooses among all experts."""
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=self.kv_heads(config),
            intermediate_size=-(-config.intermediate_size // self.size),
            vocab_size=-(-config.vocab_size // self.size),
            moe=tuple(
                spec and dataclasses.replace(spec, intermediate_size=-(-spec.intermediate_size // self.model))
                for spec in config.moe
            ),
        )

    def kv_heads(self, config: ModelConfig) -> int:
        """KV heads of each device."""
        return max(1, config.num_kv_heads // self.size)

    def kv_copies(self, config: ModelConfig) -> int:
        """How many devices have the same KV heads."""
        return max(1, self.size // config.num_kv_heads)

    def check_packed(self, graph: Graph) -> None:
        """Raise ConfigError for a 4-bit matrix whose parts are not whole blocks of outputs and groups of inputs."""
        sources = manifest(graph.config).sources
        for path, packed in packings_of(graph).items():
            source = sources[path]
            reason = source.role.reason_against_packing(source.stack, int4.OUTPUTS, packed.unit, self.sizes)
            if reason is not None:
                raise ConfigError(
                    "mesh",
                    {name: count for name, count in self.sizes.items() if count > 1},
                    f"{path} is kept in {packed.bits} bits and can't be divided like this: {reason}",
                    f"Use fewer devices, quantize='int4-{min(int4.GROUPS)}', or eight bits for this part",
                )

    def graph(self, graph: Graph) -> Graph:
        """The graph of one device's part, for use under `jax.shard_map` over the mesh.

        Its matrices are stored as the whole model's are, whatever a plan would choose for their parts' own sizes.
        """
        kinds = kinds_in(graph) if packings_of(graph) else graph.precision.kinds
        precision = dataclasses.replace(graph.precision, shards=self.shards(graph.config), kinds=kinds)
        return Graph(self.local(graph.config), precision, graph.paths)

    def shards(self, config: ModelConfig) -> Shards:
        """What the layers of this model have to know."""
        return Shards(self.model, self.expert, config.vocab_size)


def roles_of(graph: Graph) -> dict[str, Role]:
    """The role of every leaf of a graph by its path, those beside quantised matrices included."""
    sources, packings = manifest(graph.config).sources, packings_of(graph)
    found = {}
    for path in graph.paths:
        matrix = path if path in sources else path.removesuffix("scale").removesuffix("minimum") + "weight"
        role, packed = sources[matrix].role, packings.get(matrix)
        if packed is not None:
            each = int4.COLUMNS[int4.DTYPES[packed.bits]]
            columns = Fraction(each) if path == matrix else int4.scale_columns(packed.group, packed.scales)
            found[path] = role.packed(sources[matrix].stack, int4.OUTPUTS, columns)
        else:
            found[path] = role if path == matrix else role.scale
    return found


def packings_of(graph: Graph) -> dict[str, Packing]:
    """How the matrices of four, six or eight bits in groups are stored, by the paths of their weights."""
    if not graph.precision.quantizes:
        return {}
    leaves = dict(zip(graph.paths, leaf_shapes(graph), strict=True))
    found = {}
    for path, leaf in leaves.items():
        others = (path.removesuffix("weight") + name for name in ("scale", "minimum"))
        packed = packing_of(leaf, *(leaves[other] for other in others if other in leaves))
        if packed is not None:
            found[path] = packed
    return found


def divides_heads(config: ModelConfig, count: int) -> bool:
    """Whether so many devices can share a model's heads: all get equally many, with the kv heads that they need."""
    kv = config.num_kv_heads
    return config.num_heads % count == 0 and (kv % count == 0 or count % kv == 0)
