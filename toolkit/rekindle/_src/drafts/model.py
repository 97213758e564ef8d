"""A small model with the same tokenizer that drafts tokens: its rule on the host, its programs, its weights and pages.

The small model has pages of its own, as many as the model, and finds those of a request by the same page table. So a
request needs no further page, and pages that requests share are shared here, too. On a mesh each device has all of the
small model and of its pages, and computes the same.

On the host, `contents` says for each page of which text the small model has the entries; so the pages of a prefix that
requests share are computed once, and a page that came back from memory or disk, or belongs to another text by now, is
known to lack it. Tokens that are missing are computed before the first draft, some hundred in a step.

A call drafts for all rows, up to `DRAFTS` tokens each. A row brings the last one or two tokens of its text: after a
step in which all drafts were accepted, the small model has seen neither the last of them nor the token after it. They
are rows of their own; then each drafted token is the input of the next row.

Axes: N rows, T tokens, W pages of the longest sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rekindle._src.core.config import ResolvedConfig
from rekindle._src.core.records import DraftTask, IntArray, Row
from rekindle._src.drafts.calls import DRAFTS, DraftChoice, DraftLayout, RowCalls
from rekindle._src.drafts.checkpoint import DraftCheckpoint, DraftShapes, Target, refuse
from rekindle._src.drafts.kind import DraftKind, DraftOpening
from rekindle._src.drafts.resting import FAR, WeightsDrafter, WeightsDrafts
from rekindle._src.drafts.weights import DraftWeights, deleted, take
from rekindle._src.execution.device_calls import DeviceCalls
from rekindle._src.kvcache.pool import pages_for
from rekindle._src.models.base import merge
from rekindle._src.programs import kv_layout as paged
from rekindle._src.programs.buckets import SMALLEST_ROWS, Helper
from rekindle._src.programs.drafting import DraftCalls, DraftPrograms
from rekindle._src.programs.partitioning import ROWS, WHOLE, Recipe
from rekindle._src.programs.programs import Programs
from rekindle._src.programs.recipes import Recipes
from rekindle._src.scheduling.drafting.drafter import DraftableRow, Drafter
from rekindle._src.scheduling.drafting.proposal import Proposal, RequestDrafts
from rekindle._src.scheduling.sequence import Limits, Sequence
from rekindle_kernels import zeros

FILLS = 16, 256  # tokens of a call that drafts none
_FILLED = 256  # tokens that are computed in addition before one step
_WITH_DRAFTS = 2  # tokens that the call which drafts computes, too


def kind_of(checkpoint: DraftCheckpoint, target: Target) -> DraftKind:
    """Return the drafter of a small model. Raise ConfigError for one that can't draft."""
    own = checkpoint.config
    if own.is_recurrent:
        problem = f"is a {own.model_type} model, whose states can't be taken back where its drafts were wrong"
        refuse(checkpoint.name, problem, "Use a small model with attention in all layers")
    if own.is_bidirectional or own.only_embeds:
        problem = f"is a {own.model_type} model, which makes no tokens"
        refuse(checkpoint.name, problem, "Use a small model that generates text")
    return ModelKind(checkpoint, ModelPrograms(checkpoint.shapes))


@dataclasses.dataclass(frozen=True, eq=False)
class ModelKind(DraftKind):
    """The drafter that is a small model."""

    checkpoint: DraftCheckpoint
    programs: ModelPrograms

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        return self.checkpoint.device_bytes

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.checkpoint.fingerprint

    def drafter(self, limits: Limits) -> Drafter:
        return ModelDrafter(limits.page_size, self.checkpoint.config.max_position_embeddings)

    def page_bytes(self, config: ResolvedConfig) -> int:
        return paged.page_bytes(self.checkpoint.config, config.page_size, config.kv_dtype)

    def check(self, tokenizer: Any) -> None:
        self.checkpoint.check_tokens(tokenizer, required=True)

    def open(self, opening: DraftOpening) -> DraftWeights:
        opening.show("weights of the model that drafts")
        return DraftModel(opening.programs, lambda: self.checkpoint.load().leaves, opening.lost)


class ModelPrograms(DraftPrograms):
    """Adds calls of a small model to a session's programs."""

    def __init__(self, shapes: DraftShapes) -> None:
        self.shapes = shapes

    def calls(self, config: ResolvedConfig, target: Recipes) -> DraftCalls:
        return ModelCalls(config, self.shapes, target.model.vocab_size)

    def facts(self) -> dict[str, object]:
        return {"drafter": self.shapes.facts()}


class PageContent(NamedTuple):
    """The tokens with entries in a page of the small model."""

    before: int  # the key of the tokens before it
    tokens: IntArray  # at its beginning


class ModelDrafts(WeightsDrafts):
    """How the drafts of the small model fared, and the part of the request's text that it has."""

    __slots__ = ("contents", "epoch", "keys", "pages", "rows", "since")
    words = "drafts of the small model"

    def __init__(self, drafter: WeightsDrafter) -> None:
        super().__init__(drafter)
        self.keys = [0]  # of the text before each page
        self.contents: dict[int, PageContent] | None = None  # those by which `pages` were looked at
        self.epoch = 0
        self.pages: IntArray = np.empty(0, np.int32)  # full ones that have the request's text
        self.rows: tuple[Row, ...] = ()  # the latest drafts, whose tokens are known when they were checked
        self.since = 0  # the place of the first of them


class ModelDrafter(WeightsDrafter):
    """Plans the work of a small model with the same tokenizer, which computes texts of its own."""

    name = "model"

    def __init__(self, page_size: int, positions: int) -> None:
        super().__init__(positions)
        self._size = page_size
        self.contents: dict[int, PageContent] = {}

    def begin(self, sequence: Sequence) -> RequestDrafts | None:
        text = sequence.tokens.text()
        return ModelDrafts(self) if not len(text) or text.min() >= 0 else None  # pictures are no text

    def propose(self, rows: Items[DraftableRow]) -> list[Proposal | None]:
        room, proposals = _FILLED, list[Proposal | None]()
        for sequence, skip, most in rows:
            drafts = self._of(sequence)
            count = min(most, DRAFTS, self.positions - sequence.tokens.known)
            missing = sequence.tokens.known - self._computed(sequence, drafts) - _WITH_DRAFTS
            if skip or count <= 0 or missing > room or not drafts.awake:
                proposals.append(None)
                continue
            room -= max(0, missing)
            proposals.append(Proposal([0] * count, drafts.chances(count)))  # the small model writes the tokens
        return proposals

    def tasks(self, sequences: Items[Sequence], rows: Items[Row]) -> tuple[DraftTask, ...]:
        tasks, room = list[DraftTask](), _FILLED
        for sequence, (row, chain) in self.chains(sequences, rows).items():
            drafts = sequence.drafting.by_name.get(self.name)
            if not isinstance(drafts, ModelDrafts):
                continue
            known, computed = sequence.tokens.known, self._computed(sequence, drafts)
            missing = known - computed
            self.note_request(drafts, has_drafts=bool(chain))
            if chain:
                end = known
            elif not drafts.awake or known >= self.positions:
                drafts.near = FAR
                continue
            else:
                end = computed if missing <= _WITH_DRAFTS else computed + min(missing, room)
            room -= max(0, end - computed - (_WITH_DRAFTS if chain else 0))
            drafts.near = self.wakes if known - end <= _WITH_DRAFTS else FAR
            if end > computed:
                tokens = sequence.tokens.values(computed, end)
                tasks.append(DraftTask(row, computed, tokens, tuple(chain)))
                self._note(sequence, drafts, computed, end)
                drafts.rows, drafts.since = tuple(chain), end
        return tuple(tasks)

    def lost(self) -> None:
        self.contents = {}

    def _of(self, sequence: Sequence) -> ModelDrafts:
        drafts = sequence.drafting.by_name[self.name]
        assert isinstance(drafts, ModelDrafts), f"{sequence.id} has drafts of another kind"
        return drafts

    def _computed(self, sequence: Sequence, drafts: ModelDrafts) -> int:
        """Return how many tokens of a request's text the small model has in its pages."""
        size, contents, ids = self._size, self.contents, sequence.pages.ids
        if drafts.contents is not contents or drafts.epoch != sequence.epoch.number:
            drafts.contents, drafts.epoch = contents, sequence.epoch.number
            drafts.pages, drafts.rows = drafts.pages[:0], ()
        if drafts.rows:
            # All but the last draft were inputs. Of these it has those that are the text.
            inputs = [int(row.token_ids[0]) for row in drafts.rows[:-1] if row.token_ids is not None]
            since, drafts.rows = drafts.since, ()
            right = _common(
                np.array(inputs, np.int32),
                sequence.tokens.values(since, min(sequence.tokens.known, since + len(inputs))),
            )
            self._note(sequence, drafts, since, since + right)
        full = len(drafts.pages)
        full = _common(drafts.pages, ids[:full])
        while full * size < sequence.tokens.known:
            content = contents.get(int(ids[full])) if full < len(ids) else None
            if content is None or content.before != self._key(sequence, drafts, full):
                break
            text = sequence.tokens.values(full * size, min(sequence.tokens.known, (full + 1) * size))
            count = _common(content.tokens, text)
            if count < size:
                drafts.pages = ids[:full].copy()
                return full * size + count
            full += 1
        if full != len(drafts.pages):
            drafts.pages = ids[:full].copy()
        return full * size

    def _note(self, sequence: Sequence, drafts: ModelDrafts, start: int, end: int) -> None:
        """Note that the small model computes the tokens from `start` to `end` of a request's text."""
        size, ids = self._size, sequence.pages.ids
        for page in range(start // size, -(-end // size) if end > start else 0):
            tokens = sequence.tokens.values(page * size, min(end, (page + 1) * size)).copy()
            self.contents[int(ids[page])] = PageContent(self._key(sequence, drafts, page), tokens)

    def _key(self, sequence: Sequence, drafts: ModelDrafts, page: int) -> int:
        """Return the key of the text before a page."""
        keys, size = drafts.keys, self._size
        while len(keys) <= page:
            place = len(keys) - 1
            keys.append(hash((keys[-1], sequence.tokens.values(place * size, (place + 1) * size).tobytes())))
        return keys[page]


def _common(one: IntArray, other: IntArray) -> int:
    """Return how many leading numbers of two arrays are the same."""
    count = min(len(one), len(other))
    if one[:count].tobytes() == other[:count].tobytes():  # as most are: a tenth of the time
        return count
    differing = np.flatnonzero(one[:count] != other[:count])
    return int(differing[0]) if len(differing) else count


def pack_fill(tokens: int, width: int, task: DraftTask) -> np.ndarray:
    """Return the buffer of a call that computes up to so many tokens of a text."""
    ints = np.zeros(2 + tokens + width, np.int32)
    count = len(task.tokens)
    ints[:2] = count, task.start + count
    ints[2 : 2 + count] = task.tokens
    ints[2 + tokens :][: len(task.pages)] = task.pages[:width]
    return ints


@dataclasses.dataclass(frozen=True)
class ModelCalls(RowCalls):
    """The small model's programs."""

    name = "draft"
    shapes: DraftShapes
    vocab_size: int  # the model's

    @functools.cached_property
    def kv(self) -> paged.KV:
        """The shapes of its pages."""
        return paged.abstract(
            self.shapes.graph.config, self.config.device_pages, self.config.page_size, self.config.kv_dtype
        )

    @property
    def width(self) -> int:
        return pages_for(self.config.max_model_len, self.config.page_size)

    @functools.cached_property
    def memory(self) -> Helper:
        """The program that makes its pages."""
        return Helper("draft-memory")

    @functools.cached_property
    def fills(self) -> dict[int, Helper]:
        """The programs that compute tokens, by how many, the fewest first."""
        return {tokens: Helper(f"draft-prompt{tokens}") for tokens in FILLS}

    @property
    def keys(self) -> tuple[Helper, ...]:
        return (self.memory, *self.fills.values(), *self.drafts.values())

    def pack(self, rows: int, tasks: Items[DraftTask]) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of the program for so many rows; tasks bring one or two tokens and have drafts."""
        before = [int(task.tokens[-2]) if len(task.tokens) > 1 else -1 for task in tasks]
        return DraftLayout(rows, self.width).pack(tasks, before)

    def recipe(self, key: Helper) -> Recipe:
        """Return the recipe of one of `keys`."""
        if key == self.memory:
            return Recipe(lambda: zeros(self.kv), (), (), (), ROWS)
        for tokens, name in self.fills.items():
            if key == name:
                ints = jax.ShapeDtypeStruct((2 + tokens + self.width,), jnp.int32)
                fill = functools.partial(self._fill, tokens)
                return Recipe(fill, (self.shapes.leaves, self.kv, ints), (1,), (WHOLE, ROWS, ROWS), ROWS)
        layout = DraftLayout(next(rows for rows, name in self.drafts.items() if name == key), self.width)
        ints = jax.ShapeDtypeStruct((layout.ints,), jnp.int32)
        floats = jax.ShapeDtypeStruct((layout.floats,), jnp.float32)
        draft = functools.partial(self._draft, layout)
        arguments = (self.shapes.leaves, self.kv, ints, floats)
        return Recipe(draft, arguments, (1,), (WHOLE, ROWS, ROWS, ROWS), (ROWS, ROWS))

    def _fill(self, most: int, leaves: Items[Array], kv: paged.KV, ints: Array) -> paged.KV:
        """Compute the entries of a text's tokens. Nothing else is read of it, so that nothing else is computed."""
        count, end, tokens, pages = ints[0], ints[1], ints[2 : 2 + most], ints[2 + most :]
        # As in steps, rows of one token come first: these are empty.
        rows = SMALLEST_ROWS
        places = lax.iota(jnp.int32, most)
        positions = jnp.where(places < count, end - count + places, 0)
        empty = jnp.zeros(rows, jnp.int32)
        table = jnp.zeros((rows + 1, len(pages)), jnp.int32).at[rows].set(pages)
        cu_lengths = jnp.stack([jnp.zeros((), jnp.int32), count])
        pass_ = _Pass(
            tokens=jnp.concatenate([empty, tokens]),
            positions=jnp.concatenate([empty, positions]),
            valid=jnp.concatenate([empty > 0, places < count]),
            owners=jnp.concatenate([lax.iota(jnp.int32, rows), jnp.full(most, rows, jnp.int32)]),
            table=table,
            lengths=jnp.concatenate([empty, end[None]]),
            cu_lengths=cu_lengths,
            num_prefills=jnp.ones((), jnp.int32),
            rows=rows,
        )
        kv, _ = self._forward(merge(self.shapes.graph, leaves), kv, pass_)
        return kv

    def _draft(
        self, layout: DraftLayout, leaves: Items[Array], kv: paged.KV, ints: Array, floats: Array
    ) -> tuple[paged.KV, Array]:
        """Draft tokens [N, DRAFTS] for all rows. Those beyond a row's number are undefined."""
        head, columns, tables = layout.sections(ints)
        table = tables[0]
        steps, used, flags = head
        before, latest, lengths, counts = (columns[:, column] for column in range(4))
        kernels = self.shapes.graph.precision.implementation
        choice = DraftChoice.of(columns[:, 1:], floats, flags, self.vocab_size, kernels)
        model = merge(self.shapes.graph, leaves)

        def chosen(hidden: Array, lengths: Array) -> Array:
            return choice.tokens(model.logits(hidden, used), lengths)

        both = jnp.stack([before, latest], axis=1).reshape(-1)
        ends = jnp.stack([jnp.where(before >= 0, lengths - 1, 0), lengths], axis=1).reshape(-1)
        kv, hidden = self._forward(model, kv, _Pass.of_rows(both, ends, jnp.repeat(table, 2, axis=0)))
        tokens = chosen(hidden[1::2], lengths)
        drafts = jnp.zeros((layout.rows, DRAFTS), jnp.int32).at[:, 0].set(tokens)

        def another(place: Array, carry: tuple[paged.KV, Array, Array]) -> tuple[paged.KV, Array, Array]:
            kv, tokens, drafts = carry
            ends = jnp.where(place < counts, lengths + place, 0)  # other rows have no pages there
            kv, hidden = self._forward(model, kv, _Pass.of_rows(tokens, ends, table))
            tokens = chosen(hidden, lengths + place)
            return kv, tokens, drafts.at[:, place].set(tokens)

        kv, _, drafts = lax.fori_loop(1, steps, another, (kv, tokens, drafts))
        return kv, drafts

    def _forward(self, model: Any, kv: paged.KV, step: _Pass) -> tuple[paged.KV, Array]:
        """Run the small model over tokens; return its pages with their entries, and the hidden states."""
        size, config = self.config.page_size, self.shapes.graph.config
        pages = step.table[step.owners, step.positions // size]
        paging = paged.Paging(
            jnp.where(step.valid, pages, 0), jnp.where(step.valid, step.positions % size, 0), step.table, step.lengths,
            step.cu_lengths, step.num_prefills, {},
        )  # fmt: skip
        attend = paged.PagedAttention(config, kv, paging, step.rows, self.config.kernels)
        tokens = jnp.clip(step.tokens, 0, config.vocab_size - 1)
        hidden = model(tokens, step.positions, attend, lengths=step.positions + 1)
        return tuple(attend.kv), hidden


class _Pass(NamedTuple):
    """One pass over tokens, as `StepInputs` has them."""

    tokens: Array
    positions: Array
    valid: Array
    owners: Array
    table: Array
    lengths: Array
    cu_lengths: Array
    num_prefills: Array
    rows: int

    @classmethod
    def of_rows(cls, tokens: Array, lengths: Array, table: Array) -> _Pass:
        """Return the pass over one token of each row, the last of `lengths`; 0 is an empty row."""
        rows = lax.iota(jnp.int32, len(tokens))
        none = jnp.zeros((), jnp.int32)
        return cls(
            tokens, jnp.maximum(lengths - 1, 0), lengths > 0, rows, table, lengths, none[None], none, len(tokens)
        )


class DraftModel(DraftWeights):
    """Owns a small model's weights and pages."""

    def __init__(
        self, programs: Programs, load: Callable[[], Items[Array]], lost: Callable[[], object] = lambda: None
    ) -> None:
        """Make pages, too. `lost` is called when they are made anew, in the device thread."""
        assert isinstance(programs.drafting, ModelCalls), "the session has a small model"
        super().__init__(programs, load)
        self._recipes, self.lost = programs.drafting, lost
        self._kv: Any = self._program(self._recipes.memory)()

    def work(self, tasks: Items[DraftTask], calls: DeviceCalls) -> bool:
        drafting = []
        for task in tasks:
            rest = self._fill(task)
            if rest.drafts:
                drafting.append(rest)
        if drafting:
            self._draft(drafting)
        return bool(drafting)

    def renew(self) -> None:
        self.lost()
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._kv)):
            self._kv = self._program(self._recipes.memory)()

    def sleep(self) -> int:
        jax.block_until_ready(self._kv)
        freed = super().sleep()
        self.lost()
        return freed

    def wake(self) -> None:
        super().wake()
        self._kv = self._program(self._recipes.memory)()

    def _free(self) -> int:
        pages, self._kv = jax.tree.leaves(self._kv), ()
        return deleted(pages) + super()._free()

    def _fill(self, task: DraftTask) -> DraftTask:
        """Compute the tokens of a task up to the last one or two, which are drafted after. Return the rest."""
        left = 2 if task.drafts else 0
        while len(task.tokens) > left:
            missing = len(task.tokens) - min(left, 1)
            size = next((size for size in FILLS if size >= missing), FILLS[-1])
            count = min(size, missing)
            part = task._replace(tokens=task.tokens[:count], drafts=())
            ints = pack_fill(size, self._recipes.width, part)
            self._kv = self._program(self._recipes.fills[size])(self._leaves, self._kv, ints)
            task = task._replace(start=task.start + count, tokens=task.tokens[count:])
        return task

    def _draft(self, tasks: Items[DraftTask]) -> None:
        program, ints, floats = self._drafting(tasks)
        self._kv, drafts = program(self._leaves, self._kv, ints, floats)
        take(tasks, drafts)
