"""The lattice: every program that a session can have, by sizes and variants. Some of them are made ahead."""

from __future__ import annotations

import functools
import itertools

import jax

from rekindle._src.kvcache.node import least_copied
from rekindle._src.programs import buckets
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import (
    ADMIT,
    COPY,
    FEW,
    FILLED,
    LENS,
    MANY,
    MEMORY,
    SCATTER,
    TABLES,
    TRANSFER,
    Bucket,
    Helper,
    Key,
    ProgramVariant,
    StepSpan,
)
from rekindle._src.programs.partitioning import Partitioning
from rekindle._src.programs.recipes import Recipes
from rekindle_kernels import current_platform, has_mask_gates, traits


class Lattice:
    """The programs that a session can ask for. Asking for another one raises KeyError."""

    def __init__(self, recipes: Recipes, more: tuple[Key, ...] = ()) -> None:
        """Have the programs of the recipes, and `more`."""
        self._recipes, self._more = recipes, more
        single = traits(recipes.graph.precision.implementation).single_rows
        # Step programs that are compiled ahead, in every size
        self.ahead: tuple[Bucket, ...] = buckets.lattice(recipes.config, recipes.features.warmed, single=single)
        # Programs that repeat decode steps, if the session has some
        self.repeated: tuple[Bucket, ...] = buckets.repeated_lattice(self.ahead) if recipes.repeats else ()
        self.moved_pages = moved_pages(recipes.parts, recipes.kv)  # pages of a transfer, the largest number first
        self.fills = fills(self.moved_pages, at_once=single and not recipes.parts.divided)

    @functools.cached_property
    def gated(self) -> bool:
        """True if a step with guided rows is one program, which waits for its masks."""
        recipes = self._recipes
        return not recipes.parts.divided and has_mask_gates(recipes.graph.precision.implementation)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The programs that `precompile` makes; they move pages only if there is a tier below the device."""
        return (*self._plain_keys, *(self.late_keys if self._recipes.config.structured else ()))

    @property
    def _plain_keys(self) -> tuple[Key, ...]:
        recipes, config = self._recipes, self._recipes.config
        sizes = self.moved_pages[::-1] if config.host_memory or config.disk_memory else ()
        kinds = ("gather", "collect") if recipes.parts.multi_process else ("gather",)
        moves = [Helper(kind, pages) for kind in kinds for pages in sizes]
        tables = (TABLES,) if recipes.resident else ()
        shared = not recipes.sides and least_copied(recipes.page_size)
        copies = (COPY,) if config.prefix_cache and shared else ()
        tree = recipes.sides if sizes and config.prefix_cache else ()
        entries = [key for plan in tree for key in (plan.read_out, plan.fill)]
        fills = self.fills if sizes else ()
        return (*self.ahead, *self.repeated, MEMORY, ADMIT, *tables, *copies, *moves, *fills, *entries, *self._more)

    @property
    def late_keys(self) -> tuple[Key, ...]:
        """The programs of steps with guided rows: made ahead if config.structured, or as needed."""
        return buckets.programs_of(buckets.late_lattice(self.ahead, _late_span(gated=self.gated)))

    def known(self) -> tuple[Key, ...]:
        """Return all programs that the session can have."""
        # Variants that few sessions ever need are compiled when a step first does, whatever `precompile` says.
        choices = self._recipes.features.choices
        as_needed = [buckets.with_variants(self.ahead, more) for more in buckets.combinations(choices)[1:]]
        late = buckets.late_programs((self.ahead,), choices)
        return (*self._plain_keys, LENS, *itertools.chain(*as_needed), *late)

    def sizes(self, variants: ProgramVariant, *, late: bool, waits: bool) -> tuple[Bucket, ...]:
        """Return the buckets that a step can choose from; a `late` one is one program if it `waits` for its masks."""
        lattice = self.ahead
        if late:
            lattice = buckets.late_lattice(lattice, _late_span(gated=waits and self.gated))
        more = variants and variants & self._recipes.features.as_needed
        return buckets.with_variants(lattice, more) if more else lattice


def _late_span(*, gated: bool) -> StepSpan:
    return StepSpan.GATED if gated else StepSpan.HALVES


def moved_pages(parts: Partitioning, kv: paged.KV) -> tuple[int, ...]:
    """Return the numbers of pages that a transfer may have, the largest first.

    On CPU that is a copy within memory. A GPU or TPU starts a transfer of 64 pages as quickly as one of a single page.
    Followers of a session repeat transfers of FEW pages.
    """
    if current_platform() == "cpu" or parts.multi_process:
        return (FEW,)
    layers = paged.pages_of(kv)
    page = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    return (*[pages for pages in MANY if pages * page <= TRANSFER][:1], FEW)


def fills(moved: tuple[int, ...], *, at_once: bool) -> tuple[Helper, ...]:
    """Return the programs that fill pages, the fewest first, where transfers have the numbers of pages in `moved`.

    Where one native call fills all pages `at_once`, its program compiles as quickly for many of them.
    """
    sizes = (FILLED, FEW) if at_once and moved == (FEW,) else moved
    return tuple(Helper(SCATTER.kind, pages) for pages in sizes[::-1])
