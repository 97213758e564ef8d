"""Extensions of a request: what each capability that it uses carries with it, from its admission to its end.

A capability declares a class of its own, and the code that runs the request finds the object by that class, as in
`request.extensions.get(RequestTaps)`. Records know none of these classes. They read the answers that all of them give,
which are put together once for each request, because steps ask for some of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


E = TypeVar("E", bound="Extension")


class PromptNote(NamedTuple):
    """The part of a request's explanation that its prompt's tokens of one kind have."""

    kind: str  # of the tokens, such as "picture"
    tokens: int
    cached: int  # of them, taken from the cache
    words: str


class SentExtension(NamedTuple):
    """A capability's part of a request for the process that runs it."""

    fields: object  # as JSON
    slow: bool = False  # its intake may take long there


class Extension:
    """The part of a request that belongs to one capability, checked and resolved at intake. The base of all others."""

    __slots__ = ()

    @property
    def altered(self) -> tuple[str, ...]:
        """Digests of what changes the request's keys and values: only requests with the same ones share pages."""
        return ()

    @property
    def generates(self) -> bool:
        """False if the prompt is computed for its own sake: it samples nothing, and shares no pages."""
        return True

    @property
    def by_position(self) -> bool:
        """True if the programs that a decode row needs depend on its position."""
        return False

    @property
    def reads_logits(self) -> bool:
        """True if it reads logits of all layers, which a program of their own computes."""
        return False

    @property
    def ends_itself(self) -> bool:
        """True if it may end the text before the request's limits do."""
        return False

    @property
    def needs_masks(self) -> bool:
        """True if late masks decide which tokens its rows may choose: programs without them can't run the request."""
        return False

    @property
    def held(self) -> bool:
        """True while no step may have the request. Asked in every step, if a class overrides it."""
        return False

    @property
    def uncounted(self) -> tuple[tuple[int, int], ...]:
        """The places [start, stop) of the prompt with tokens that are not text: penalties and DRY do not count them."""
        return ()

    @property
    def embedded(self) -> tuple[tuple[int, int], ...]:
        """The places [start, stop) of the prompt with rows in the place of embeddings. No decode row computes them."""
        return ()

    @property
    def elsewhere(self) -> Mapping[str, object]:
        """Options of the request with other values in the process that runs it."""
        return {}

    def reusable(self, prompt_length: int) -> int:
        """Return how many leading tokens of the prompt may have pages from the cache: of others, results are read."""
        return prompt_length

    def cut(self, start: int, length: int, room: int) -> int:
        """Return how many tokens from `start` on a step computes that would compute `length`, and has `room` for more;
        0 if it has to be a later step. Asked only if a class overrides it."""
        return length

    def names(self, tokens: NDArray[np.int32], start: int, page_size: int) -> NDArray[np.int32]:
        """Return the names of a page's `tokens` in the prefix tree; the first token is at `start` of the request.

        Overridden where more than the tokens decides what pages hold; called only then.
        """
        return tokens

    def masked(self, tokens: NDArray[np.int32], start: int) -> NDArray[np.int32]:
        """Return the request's `tokens` from `start` on, with a number below 0 in place of each token that is not text.

        Overridden where `names` is; called only then.
        """
        return tokens

    def note(self, cached: int) -> PromptNote | None:
        """Return the extension's note on the request; its first `cached` tokens came from the cache."""
        return None

    def resume(self, token_ids: NDArray[np.int32]) -> None:
        """Take over the tokens that the request has generated in another process."""

    def another(self) -> Extension:
        """Return the extension of another sequence of the same prompt."""
        return self


class DeviceLoad:
    """Something that requests' extensions need on the device, in addition to pages, before their rows run."""

    __slots__ = ()


class Extensions(dict[type[Extension], Extension]):
    """The extensions of one request by their classes, in the order of the capabilities. Not changed once made."""

    __slots__ = (
        "altered", "by_position", "cutting", "embedded", "generates", "holding", "naming", "reads_logits", "uncounted",
    )  # fmt: skip

    def __init__(self, *extensions: Extension) -> None:
        super().__init__((type(extension), extension) for extension in extensions)
        self.altered: tuple[str, ...] = ()
        self.generates: bool = True
        self.by_position: bool = False
        self.reads_logits: bool = False
        self.holding: tuple[Extension, ...] = ()  # extensions that may hold the request
        self.cutting: tuple[Extension, ...] = ()  # extensions that decide where its prompt is cut
        self.uncounted: tuple[tuple[int, int], ...] = ()  # places of the prompt that are not text
        self.embedded: tuple[tuple[int, int], ...] = ()  # places of the prompt with rows
        self.naming: Extension | None = None  # the one that names its tokens for the prefix tree, if any
        for extension in self.values():
            self.altered += extension.altered
            self.generates = self.generates and extension.generates
            self.by_position = self.by_position or extension.by_position
            self.reads_logits = self.reads_logits or extension.reads_logits
            self.uncounted += extension.uncounted
            self.embedded += extension.embedded
            if type(extension).held is not Extension.held:
                self.holding += (extension,)
            if type(extension).cut is not Extension.cut:
                self.cutting += (extension,)
            if type(extension).names is not Extension.names:
                assert self.naming is None, "two extensions name the tokens of one request"
                self.naming = extension

    if TYPE_CHECKING:  # at run time it is the method of dicts: rows of every step are asked

        def get(self, kind: type[E], /) -> E | None:  # type: ignore[override]
            """Return the extension of a class; None if the request has none."""

        def __getitem__(self, kind: type[E], /) -> E: ...  # type: ignore[override]

    def reusable(self, prompt_length: int) -> int:
        """Return how many leading tokens of the prompt may have pages from the cache."""
        return min((extension.reusable(prompt_length) for extension in self.values()), default=prompt_length)

    def names(self, tokens: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
        """Return the names of a prompt's tokens in the prefix tree."""
        return tokens if self.naming is None else self.naming.names(tokens, 0, page_size)

    def notes(self, cached: int) -> tuple[PromptNote, ...]:
        """Return the extensions' notes on the request; its first `cached` tokens came from the cache."""
        return tuple(note for extension in self.values() if (note := extension.note(cached)) is not None)

    def plus(self, *more: Extension) -> Extensions:
        """Return these extensions and `more`; a new extension replaces one of its class."""
        return Extensions(*self.values(), *more)

    def resume(self, token_ids: NDArray[np.int32]) -> None:
        """Take over the tokens that the request has generated in another process."""
        for extension in self.values():
            extension.resume(token_ids)

    def another(self) -> Extensions:
        """Return the extensions of another sequence of the same prompt."""
        return Extensions(*(extension.another() for extension in self.values())) if self else self

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __reduce__(self) -> tuple[type[Extensions], tuple[Extension, ...]]:
        return Extensions, tuple(self.values())


NONE = Extensions()
