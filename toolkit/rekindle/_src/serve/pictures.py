"""Pictures in the messages of clients, in the forms of OpenAI and Anthropic: as `data:` URIs, in base64, or by URL.

No path is read. URLs are fetched only by a server that was started for it; see `rekindle._src.serve.fetching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rekindle._src.images import EncodedPicture, PictureLimits, decode_uri, open_bytes
from rekindle._src.serve.errors import ApiError, wrong
from rekindle._src.serve.exchange import Exchange
from rekindle._src.serve.life import CHARACTERS_PER_TOKEN
from rekindle._src.serve.models import ServedSession
from rekindle._src.serve.web_urls import FetchProblem, WebUrl

T = TypeVar("T")
ReadPicture = Callable[[Mapping[str, Any], str], dict[str, Any]]  # from a part and its path to the part of a session
LIMITS = PictureLimits(pixels=1 << 25, total_pixels=1 << 26)  # of a stranger's: a decoded pixel has 3 bytes
MOST_URLS = 16  # of a request

_KINDS = ("image_url", "input_image", "image")  # of chat completions, responses and Anthropic's messages
_DETAILS = ("auto", "low", "high", "original")
_ROW_BYTES = 4_096  # of a picture, in host memory while its request waits, that count as one token which waits
_FETCHED_SIDE = 1_024  # pixels of a picture that is still to be fetched, an estimate


def is_picture(part: Mapping[str, Any]) -> bool:
    """True if a part is a picture, in any of the forms."""
    return part.get("type") in _KINDS


class _PictureUrl(NamedTuple):
    """A picture that is to be fetched, and the part that it goes into."""

    url: WebUrl
    text: str
    path: str
    part: dict[str, Any]


class RequestPictures:
    """The pictures of one request, within the bounds of a server. Its files' headers are read, and nothing is decoded.

    `messages` reads those that came with it; then `tokens` is an estimate for the whole request, and `fetch` completes
    the messages.
    """

    def __init__(self, exchange: Exchange, session: ServedSession) -> None:
        self._exchange, self._session, self._reads = exchange, session, session.reads_pictures
        self._count = self._pixels = self._tokens = self._characters = self._bytes = 0
        self._wanted: list[_PictureUrl] = []

    @property
    def tokens(self) -> int:
        """About how many tokens the request has: its text, and its pictures by their sizes.

        Rows of pictures are encoded before their request runs, and are large: four kilobytes count as a token.
        """
        return (self._exchange.size - self._characters) // CHARACTERS_PER_TOKEN + 1 + self._tokens

    async def messages(self, make: Callable[[ReadPicture], T]) -> T:
        """Return `make(read)`: messages with their pictures, which `make` has taken out of the fields."""
        account = self._exchange.account
        made = await self._exchange.run(lambda: make(self.read))
        account.hold(parsed=max(0, account.parsed - self._characters))  # files have taken the place of texts in base64
        return made

    def read(self, part: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return the part for a session. Raises `ApiError`, or `InvalidRequest` for a value that is no picture."""
        if not self._reads:
            fix = "Send parts of text, or name a model that reads pictures"
            raise wrong(f"{path}.type", part["type"], "is a picture, and this model reads text alone", fix)
        self._count += 1
        if self._count > LIMITS.count:
            problem = f"is one picture too many: a request may have {LIMITS.count}"
            raise wrong(f"{path}.type", part["type"], problem, "Send fewer")
        place, uri = _uri_of(part, path)
        own: dict[str, Any] = {"type": "image"}
        if uri[:5].lower() == "data:":
            self._characters += len(uri)
            own["image"] = self._taken(decode_uri(uri, field=place, limits=LIMITS), place)
        else:
            self._wanted.append(_PictureUrl(self._allowed(uri, place), uri, place, own))
            self._count_tokens(_FETCHED_SIDE, _FETCHED_SIDE, place)
        return own

    async def fetch(self) -> None:
        """Fetch the pictures of URLs. Raises `ApiError`, or `InvalidRequest` for a file that is no picture."""
        exchange, wanted = self._exchange, self._wanted
        fetcher, limit = exchange.service.fetcher, exchange.service.body_limit
        if not wanted or fetcher is None:
            return
        room = min(LIMITS.bytes, limit - exchange.size)  # what is fetched counts as what is sent
        try:
            urls, account = [one.url for one in wanted], exchange.account
            hold = lambda size: account.hold(pictures=self._bytes + size)  # noqa: E731
            files = await fetcher.fetch(urls, most=room, caller=exchange.caller, hold=hold)
        except FetchProblem as refused:
            one = wanted[refused.index]
            problem = wrong(one.path, one.text, refused.problem, refused.fix)
            if refused.large:
                problem = ApiError(413, problem.message, param=one.path, code="body_too_large")
            raise problem from None
        exchange.size += sum(map(len, files))

        def read() -> None:
            for one, data in zip(wanted, files, strict=True):
                one.part["image"] = self._taken(open_bytes(data, field=one.path, limits=LIMITS), one.path)
            account.hold(pictures=self._bytes)

        await exchange.run(read)

    def _taken(self, picture: EncodedPicture, path: str) -> EncodedPicture:
        self._pixels += picture.weight
        self._bytes += len(picture.data)
        account = self._exchange.account
        account.hold(pictures=max(self._bytes, account.pictures))  # of fetched files, all are held already
        self._count_tokens(picture.width, picture.height, path)
        if self._pixels > LIMITS.total_pixels:
            problem = f"makes {self._pixels:,} pixels in all; a request may have {LIMITS.total_pixels:,}"
            raise wrong(path, f"{picture.width}×{picture.height}", problem, "Send fewer or smaller pictures")
        return picture

    def _count_tokens(self, width: int, height: int, path: str) -> None:
        cost = self._session.picture_cost(width, height, field=path)
        self._tokens += max(cost.tokens, cost.bytes // _ROW_BYTES)

    def _allowed(self, uri: str, path: str) -> WebUrl:
        fetcher = self._exchange.service.fetcher
        if fetcher is None:
            fix = "Send the picture itself, as data:image/png;base64,…, or start the server with --allow-urls"
            raise wrong(path, uri, "is not fetched by this server", fix)
        if len(self._wanted) >= MOST_URLS:
            raise wrong(path, uri, f"is one URL too many: {MOST_URLS} are fetched for a request", "Send fewer")
        try:
            return fetcher.parse(uri)
        except FetchProblem as refused:
            raise wrong(path, uri, refused.problem, refused.fix) from None


def _uri_of(part: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Return the path of a picture's URI, and the URI. `detail` is checked and changes nothing: the model decides."""
    if part["type"] == "image":
        return _anthropic(part.get("source"), f"{path}.source")
    uri: Any = part.get("image_url")
    place, detail = f"{path}.image_url", part.get("detail")
    if isinstance(uri, Mapping):
        uri, place, detail = uri.get("url"), f"{place}.url", uri.get("detail", detail)
    if detail is not None and detail not in _DETAILS:
        raise wrong(f"{place.removesuffix('.url')}.detail", detail, "is not known", f"Use one of {', '.join(_DETAILS)}")
    if not isinstance(uri, str):
        raise wrong(place, uri, "is not a string", "Pass data:image/png;base64,…")
    return place, uri


def _anthropic(source: Any, path: str) -> tuple[str, str]:
    """Return the path and the URI of a picture in Anthropic's form."""
    if not isinstance(source, Mapping):
        raise wrong(path, source, "is not an object", "Pass {'type': 'base64', 'media_type': …, 'data': …}")
    if source.get("type") == "url":
        url = source.get("url")
        if not isinstance(url, str):
            raise wrong(f"{path}.url", url, "is not a string", "Pass a URL")
        return f"{path}.url", url
    kind, data = source.get("media_type"), source.get("data")
    if source.get("type") != "base64" or not isinstance(kind, str) or not isinstance(data, str):
        fix = "Pass {'type': 'base64', 'media_type': 'image/png', 'data': …}"
        raise wrong(path, source.get("type"), "is no picture in base64", fix)
    return path, f"data:{kind};base64,{data}"
