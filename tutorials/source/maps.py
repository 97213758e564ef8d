"""Diagrams of the pages that show a whole: a request's way, a layer, an engine in steps, experts, a block of bits."""

from __future__ import annotations

from collections.abc import Callable

from drawing import Drawing


def engine_steps() -> Drawing:
    """27: seven steps, each with the decision that it changes."""
    d = Drawing("Seven steps of an engine, each with the decision that it changes", 700, 150)
    steps = (
        ("1 loop", "the text, again", "n"),
        ("2 cache", "each position once", "a"),
        ("3 batch", "a row for each text", "b"),
        ("4 pages", "room as needed", "b"),
        ("5 tree", "what is there already", "c"),
        ("6 sampling", "chance by position", "d"),
        ("7 drafts", "guesses in a step", "d"),
    )
    for at, (name, changes, fill) in enumerate(steps):
        x, y = 12 + at * 97, 92 - at * 12
        d.box(x, y, 92, 34, name, fill=fill)
        d.words(x + 46, y - 12 if at % 2 else y + 48, changes, "small")
    return d


WAY = (  # the parts of a request's way: words, the page that explains them, a colour
    ("your cell", "01_first_tokens", "n"),
    ("template", "18_a_real_model", "n"),
    ("tokens", "31_tokens", "a"),
    ("scheduler", "03_continuous_batching", "b"),
    ("prefix tree", "05_prefix_cache", "b"),
    ("step", "02_what_a_step_does", "c"),
    ("attention", "09_paged_attention_in_pallas", "c"),
    ("weights", "19_the_roofline", "c"),
    ("grammar", "14_objects_instead_of_text", "d"),
    ("sampling", "04_sampling", "d"),
    ("text", "12_dispatch_loop", "a"),
    ("stream", "08_streams_and_tasks", "n"),
)


def the_map() -> Drawing:
    """00: a request's way through an engine, and the loop that it takes once for each token."""
    d = Drawing(
        "A request from the key press to its tokens: each part is a link to the page that explains it", 700, 250
    )
    places = [(14 + at * 138, 40) for at in range(5)] + [(566, 105)]
    places += [(14 + (9 - at) * 138 + 0, 105) for at in range(6, 10)] + [(14, 180), (152, 180)]
    for (words, page, fill), (x, y) in zip(WAY, places, strict=True):
        d.box(x, y, 118, 40, words, fill=fill)
        d.link(f"{page}.ipynb")
    for at in range(4):
        d.arrow(132 + at * 138, 60, 150 + at * 138, 60)
    d.path("M625 80 V103")
    for at in range(4):
        d.arrow(566 - at * 138, 125, 548 - at * 138, 125)
    d.path("M73 145 V178")
    d.arrow(132, 200, 150, 200)
    d.path("M110 145 V162 H556 V92 H492 V82")
    d.words(330, 174, "once for each token: the new one joins the text, and a step computes it", "small")
    d.words(14, 22, "once for each request", "left small")
    d.words(290, 200, "text as it comes, until eos, a stop string or max_tokens", "left small")
    d.words(
        350,
        235,
        "grey: you · blue: words and tokens · orange: what runs, and where · green: the model · pink: the choice",
        "small",
    )
    step = "H625 V125 H73"
    again = "H110 V162 H556 V92 H492 V60 " + step
    d.travel(f"M73 60 {step} {again} {again} V200 H211", 14)
    return d


def layer() -> Drawing:
    """00: a layer of a transformer, with the shape of everything that flows and of every matrix."""
    d = Drawing(
        "A layer of a transformer with its shapes: attention, then an MLP, each added to what came in", 700, 330
    )
    d.words(
        14,
        14,
        "T tokens, E numbers for each · H query heads, K heads of keys and values, D numbers in a head",
        "left small",
    )
    d.words(470, 14, "· S positions · F inner size", "left small")
    top = (
        ("x", "[T, E]", "n", 60),
        ("norm", "[E]", "n", 60),
        ("q k v", "[E, (H + 2K) D]", "a", 110),
        ("rotate", "q and k", "n", 70),
    )
    x = 14
    for words, shape, fill, width in top:
        d.box(x, 40, width, 40, words, fill=fill)
        d.words(x + width / 2, 92, shape, "small")
        if words != "rotate":
            d.arrow(x + width, 60, x + width + 22, 60)
        x += width + 24
    d.box(392, 30, 90, 24, "q [T, H, D]", fill="b")
    d.box(392, 66, 90, 24, "k, v [T, K, D]", fill="b")
    d.arrow(387, 54, 392, 46)
    d.arrow(387, 66, 392, 74)
    d.box(392, 112, 90, 34, "KV cache", fill="a")
    d.words(437, 156, "[S, K, D] twice", "small")
    d.path("M437 90 V111")
    d.box(520, 48, 82, 60, "attention\n[T, H, S]", fill="c")
    d.arrow(482, 42, 519, 64)
    d.path("M482 129 H500 V92 H518")
    d.box(624, 52, 62, 52, "out", fill="a")
    d.words(655, 116, "[H D, E]", "small")
    d.arrow(602, 78, 623, 78)
    d.path("M655 124 V196 H612", arrow=True)
    d.box(570, 180, 40, 32, "+", fill="c")
    d.path("M44 80 V172 H590 V179")
    d.words(300, 164, "x is added", "small")
    bottom = (
        ("norm", "[E]", 60, "n"),
        ("gate, up", "[E, 2F]", 96, "a"),
        ("silu(gate) · up", "[T, F]", 110, "c"),
        ("down", "[F, E]", 70, "a"),
    )
    x = 546
    for words, shape, width, fill in bottom:
        d.box(x - width, 176, width, 40, words, fill=fill)
        d.words(x - width / 2, 228, shape, "small")
        if x != 546:
            d.arrow(x + 24, 196, x + 2, 196)
        else:
            d.arrow(569, 196, 548, 196)
        x -= width + 24
    d.box(80, 180, 40, 32, "+", fill="c")
    d.arrow(x + 24, 196, 121, 196)
    d.path("M590 212 V252 H100 V214")
    d.words(345, 262, "and added again", "small")
    d.box(14, 184, 50, 24, "[T, E]", fill="n")
    d.arrow(80, 196, 66, 196)
    d.words(350, 300, "After the last layer: a norm, and the head [E, V] makes a row of V logits for each token.", "")
    d.words(
        350, 318, "blue: matrices that a step reads, and the cache · orange and green: computed in the step", "small"
    )
    return d


def experts() -> Drawing:
    """33: a router, eight experts, and two tokens of one step."""
    d = Drawing("A router sends each token to two of eight experts; tokens of one step meet in the same ones", 700, 190)
    for y, words, fill in ((30, "token A", "a"), (110, "token B", "d")):
        d.box(14, y, 80, 40, words, fill=fill)
        d.arrow(94, y + 20, 128, 78 if y < 70 else 98)
    d.box(130, 64, 80, 48, "router\n[G, E]", fill="c")
    for at in range(8):
        fill = {1: "a", 4: "b", 6: "d"}.get(at, "n")
        d.box(270 + at * 42, 64, 36, 48, str(at), fill=fill)
    d.path("M170 64 V36 H330 V62")
    d.path("M170 64 V36 H456 V62")
    d.path("M170 112 V140 H456 V114")
    d.path("M170 112 V140 H540 V114")
    d.words(330, 24, "A: experts 1 and 4", "small")
    d.words(330, 153, "B: experts 4 and 6", "small")
    d.box(630, 64, 56, 48, "Σ p · y", fill="c")
    d.arrow(604, 88, 628, 88)
    d.words(350, 176, "four products, three of eight experts read; all eight are in memory", "small")
    return d


def block() -> Drawing:
    """34: what a group of numbers is stored as."""
    d = Drawing("A block: 32 numbers share a scale, perhaps a minimum, and each has four bits", 700, 150)
    d.box(14, 40, 80, 40, "scale s", fill="b")
    d.words(54, 92, "16 bits", "small")
    d.box(100, 40, 96, 40, "minimum m", fill="d")
    d.words(148, 92, "16 bits, or none", "small")
    for at, number in enumerate((3, 11, 7, 8, 15, 0, 9, 6, 12, 5, 8)):
        d.box(210 + at * 36, 40, 33, 40, str(number), fill="a")
    d.words(622, 60, "…", "")
    d.box(644, 40, 33, 40, "10", fill="a")
    d.words(440, 92, "32 numbers of 4 bits: which of 16 levels", "small")
    d.words(350, 122, "number ≈ m + s · level: few bits for each, because 32 of them share the rest", "small")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "00_map": the_map,
    "00_layer": layer,
    "27_engine": engine_steps,
    "33_experts": experts,
    "34_block": block,
}
