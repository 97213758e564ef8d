"""`python tutorials/source/diagrams.py`: the course's diagrams, as SVG files next to the pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import maps
from drawing import Drawing

FOLDER = Path(__file__).resolve().parent / "pictures"


def generation() -> Drawing:
    """01: text, tokens, a distribution, a draw, and back."""
    d = Drawing("Text becomes tokens, tokens a distribution, and the token drawn from it is appended", 700, 130)
    for x, words, fill in (
        (15, "text\n“Once upon a”", "n"),
        (155, "tokens\n521 576 260", "a"),
        (295, "model", "b"),
        (435, "probabilities\n“ time” 1.00", "c"),
        (575, "next token\n“ time”", "d"),
    ):
        d.box(x, 25, 110, 46, words, fill=fill)
    for x in (125, 265, 405, 545):
        d.arrow(x, 48, x + 28, 48)
    d.path("M630 73 V105 H210 V76")
    d.words(420, 94, "append it, and go on until eos, a stop string or max_tokens", "small")
    return d


def step() -> Drawing:
    """02: a prefill and two decode steps next to the cache."""
    d = Drawing("Prefill computes all prompt positions, decode one position that reads all keys and values", 700, 190)
    for row, (label, first, last) in enumerate((("prefill", 0, 4), ("decode", 4, 5), ("decode", 5, 6))):
        y = 30 + row * 50
        d.words(45, y + 15, label)
        for at in range(last):
            d.box(100 + at * 46, y, 40, 30, f"kv {at}", fill="b" if at >= first else "a")
        d.arrow(112 + last * 46, y + 15, 470, y + 15)
        d.box(475, y, 205, 30, f"logits of position {last - 1} → token {last}", fill="c")
    d.words(240, 180, "orange: computed in this step · blue: read from the cache", "small")
    return d


def batching() -> Drawing:
    """03: slots over time, static and continuous."""
    d = Drawing(
        "Static batches wait for their longest text; continuous batching gives a free slot to the next", 700, 190
    )
    groups = {
        "static": [[(0, 9, "a")], [(0, 3, "b"), (9, 4, "n")], [(0, 5, "c"), (9, 6, "d")]],
        "continuous": [[(0, 9, "a")], [(0, 3, "b"), (3, 4, "n")], [(0, 5, "c"), (5, 6, "d")]],
    }
    for column, (name, slots) in enumerate(groups.items()):
        left = 20 + column * 345
        d.words(left + 160, 18, name)
        for row, blocks in enumerate(slots):
            for start, length, fill in blocks:
                d.box(left + start * 21, 35 + row * 40, length * 21 - 2, 30, f"{length} steps", fill=fill)
        end = max(start + length for blocks in slots for start, length, _ in blocks)
        d.arrow(left, 162, left + end * 21, 162)
        d.words(left + end * 10.5, 176, f"{end} steps for the same five texts", "small")
    return d


def tree() -> Drawing:
    """05: a prefix tree with branches."""
    d = Drawing("Pages of three prompts in a prefix tree: what they share is stored once", 700, 190)
    d.box(20, 75, 150, 34, "system prompt", fill="a")
    d.box(230, 35, 150, 34, "document 1", fill="b")
    d.box(230, 120, 150, 34, "document 2", fill="b")
    d.box(440, 12, 120, 30, "question A", fill="c")
    d.box(440, 58, 120, 30, "question B", fill="c")
    d.box(440, 122, 120, 30, "question A", fill="c")
    for x, y, to_x, to_y in (
        (170, 87, 228, 56),
        (170, 97, 228, 132),
        (380, 48, 438, 28),
        (380, 56, 438, 72),
        (380, 137, 438, 137),
    ):
        d.arrow(x, y, to_x, to_y)
    d.words(632, 27, "computed", "small")
    d.words(632, 73, "hits 2 boxes", "small")
    d.words(632, 137, "hits 1 box", "small")
    d.words(350, 177, "“question A” is stored twice: keys and values depend on everything before them", "small")
    return d


def tiers() -> Drawing:
    """06: pages between device, host and disk."""
    d = Drawing("Pages move down when a tier is full, and up when a prompt hits them", 700, 150)
    for x, name, size, fill in (
        (20, "device", "fast, small", "a"),
        (280, "host memory", "larger", "b"),
        (540, "disk", "largest, survives", "c"),
    ):
        d.box(x, 35, 140, 60, f"{name}\n{size}", fill=fill)
    for x in (160, 420):
        d.arrow(x + 4, 52, x + 114, 52)
        d.arrow(x + 116, 80, x + 6, 80)
    d.words(220, 40, "full: least recent", "small")
    d.words(220, 94, "hit: copy < compute", "small")
    d.words(480, 40, "copied meanwhile", "small")
    d.words(480, 94, "hit: read", "small")
    d.words(
        350,
        132,
        "on a CPU, device and host memory are the same chips: a hit saves its computing, but no link is shown",
        "small",
    )
    return d


def pages() -> Drawing:
    """09: a page table."""
    d = Drawing("A page table maps a text's tokens to pages anywhere in one array", 700, 170)
    d.words(75, 22, "text of 19 tokens", "small")
    for index, words in enumerate(("0–7", "8–15", "16–18")):
        d.box(20 + index * 56, 36, 52, 30, words, fill="abc"[index])
    d.words(350, 22, "its row of the page table", "small")
    for index, page in enumerate((9, 2, 5)):
        d.box(280 + index * 48, 36, 44, 30, str(page), fill="abc"[index])
    d.box(424, 36, 44, 30, "0")
    d.arrow(192, 51, 274, 51)
    fills = {9: "a", 2: "b", 5: "c"}
    for page in range(12):
        d.box(20 + page * 55, 110, 50, 30, str(page), fill=fills.get(page, "n"))
    for index, page in enumerate((9, 2, 5)):
        d.arrow(302 + index * 48, 66, 45 + page * 55, 108)
    d.words(350, 157, "one array of pages, shared by all texts; page 0 is scratch", "small")
    return d


def loop() -> Drawing:
    """12: the dispatch loop's overlap."""
    d = Drawing("The host plans step N+1 while the device runs step N, and reads tokens one step late", 700, 150)
    d.words(45, 45, "host")
    d.words(45, 100, "device")
    for index in range(4):
        d.box(100 + index * 150, 30, 60, 30, f"plan {index}", fill="a")
    for index in range(3):
        x = 170 + index * 150
        d.box(x, 85, 146, 30, f"step {index}", fill="b")
        d.box(x + 151, 30, 72, 30, f"commit {index}", fill="c")
        d.arrow(x - 40, 60, x + 6, 83)
    d.words(350, 135, "the device never waits for the host: the next step is there when one ends", "small")
    return d


def bars(d: Drawing, x: float, y: float, heights: tuple[int, ...], *, fill: str = "a", step: int = 16) -> None:
    """A small bar chart that stands on `y`; heights of 0 are tokens that were cut."""
    for index, height in enumerate(heights):
        d.box(x + index * step, y - max(height, 2), step - 4, max(height, 2), fill=fill if height else "n")


def sampling() -> Drawing:
    """04: logits through the options to a draw."""
    d = Drawing("Sampling options change the logits one after the other, then one token is drawn", 700, 150)
    for x, words, heights, fill in (
        (20, "the model's", (50, 32, 24, 16, 10, 8), "a"),
        (160, "bias, penalties", (50, 0, 36, 16, 10, 8), "b"),
        (300, "temperature", (44, 0, 36, 24, 18, 16), "b"),
        (440, "top_k, top_p, min_p", (44, 0, 36, 24, 0, 0), "c"),
    ):
        bars(d, x, 95, heights, fill=fill)
        d.words(x + 46, 115, words, "small")
    for x in (120, 260, 400, 540):
        d.arrow(x, 70, x + 30, 70)
    d.box(580, 45, 100, 46, "one draw\nby the seed", fill="d")
    d.words(350, 138, "a cut token has probability 0; what remains is divided by its sum", "small")
    return d


def restarts() -> Drawing:
    """07: two kernels and what lies on disk between them."""
    d = Drawing("A kernel writes programs and pages to disk; the next kernel reads them", 700, 160)
    for x, name, first in ((20, "first kernel", "compile"), (380, "next kernel", "load")):
        d.words(x + 150, 18, name)
        d.box(x, 32, 90, 34, first, fill="b")
        d.box(x + 95, 32, 100, 34, "prompt" if x == 20 else "pages", fill="b" if x == 20 else "a")
        d.box(x + 200, 32, 100, 34, "text", fill="c")
    d.words(350, 49, "killed", "small")
    d.box(220, 105, 260, 34, "disk: programs · pages · snapshots", fill="a")
    d.arrow(70, 66, 240, 103)
    d.arrow(165, 66, 300, 103)
    d.arrow(400, 103, 425, 68)
    d.arrow(450, 103, 525, 68)
    d.words(590, 122, "nothing compiled twice", "small")
    return d


def tasks() -> Drawing:
    """08: a request's states and what ends it."""
    d = Drawing("A request waits, runs and finishes; cancelling, timeouts and break abort it", 700, 160)
    for x, words, fill in (
        (15, "not submitted", "n"),
        (165, "waiting", "b"),
        (315, "running", "a"),
        (555, "finished", "c"),
    ):
        d.box(x, 35, 120, 36, words, fill=fill)
    d.arrow(135, 53, 163, 53)
    d.arrow(285, 53, 313, 53)
    d.arrow(435, 53, 553, 53)
    d.words(150, 22, "await", "small")
    d.words(300, 22, "a slot is free", "small")
    d.words(495, 40, "a token a step", "small")
    d.box(315, 110, 120, 34, "aborted", fill="d")
    d.arrow(225, 71, 330, 108)
    d.arrow(375, 71, 375, 108)
    d.words(572, 127, "cancel(), timeout, break: its text stays", "small")
    return d


def checkpoint() -> Drawing:
    """10: files to weights in a session, quantised on the way."""
    d = Drawing("Files of a checkpoint are checked, read, perhaps quantised, and become a session's weights", 700, 150)
    for y, words in ((15, "config.json"), (55, "model.safetensors"), (95, "tokenizer.json")):
        d.box(15, y, 150, 32, words, fill="a")
        d.arrow(165, y + 16, 203, 71)
    d.box(205, 45, 110, 50, "check names\nand shapes", fill="n")
    d.arrow(315, 70, 343, 70)
    d.box(345, 45, 140, 50, "w ≈ s · q\n8 bits and a scale", fill="b")
    d.arrow(485, 70, 513, 70)
    for y, words, width in ((20, "float32, 16 MB", 168), (60, "bfloat16, 8", 84), (100, "int8, 4", 50)):
        d.box(515, y, width, 30, words if width > 100 else "", fill="c")
        if width <= 100:
            d.words(515 + width + 8, y + 15, words, "left")
    return d


def processor() -> Drawing:
    """11: where a processor sits in a step."""
    d = Drawing("A logits processor is compiled into the step, between the head and sampling", 700, 140)
    d.box(20, 25, 660, 70)
    d.words(70, 15, "one compiled step", "small")
    for x, words, fill in ((35, "layers", "b"), (175, "head:\nlogits", "b"), (455, "options,\ndraw", "c")):
        d.box(x, 38, 110, 44, words, fill=fill)
    d.box(315, 38, 110, 44, "your function\n(rows that ask)", fill="d")
    d.box(595, 38, 70, 44, "token", fill="a")
    for x in (145, 285, 425, 565):
        d.arrow(x, 60, x + 28, 60)
    d.words(350, 118, "no trip to the host; steps without such rows run a program without it", "small")
    return d


def serving() -> Drawing:
    """13: cells and clients over one session."""
    d = Drawing("Cells and HTTP clients share one session: its batch, its programs and its cache", 700, 170)
    for y, words in ((15, "a cell: await …"), (65, "an editor, an agent"), (115, "an evaluation")):
        d.box(15, y, 150, 36, words, fill="a")
    d.arrow(165, 33, 398, 60)
    d.box(220, 75, 120, 50, "server\n/v1, /metrics", fill="b")
    d.arrow(165, 83, 218, 95)
    d.arrow(165, 133, 218, 108)
    d.arrow(340, 98, 398, 84)
    d.box(400, 45, 120, 60, "session\none batch", fill="c")
    d.arrow(520, 62, 558, 48)
    d.arrow(520, 88, 558, 104)
    d.box(560, 25, 120, 40, "model", fill="n")
    d.box(560, 88, 120, 40, "prefix cache", fill="n")
    d.words(400, 150, "what a cell computed is a hit for a client", "small")
    return d


def mask() -> Drawing:
    """14: a grammar's mask over the tokens."""
    d = Drawing("Before each token the grammar says which tokens may come; the others get probability 0", 700, 150)
    d.words(60, 40, "text so far")
    d.box(115, 24, 120, 32, '{"name":"Sam', fill="a")
    d.arrow(235, 40, 263, 40)
    d.box(265, 24, 110, 32, "grammar", fill="b")
    d.arrow(375, 40, 403, 40)
    for index, (token, allowed) in enumerate((('"', 1), ("my", 1), ("}", 1), ("\\n", 0), ("er", 1), ("<eos>", 0))):
        d.box(405 + index * 47, 24, 44, 32, token, fill="c" if allowed else "n")
    d.words(545, 72, "grey: forbidden at this place", "small")
    d.box(115, 95, 120, 32, '…"Sam"', fill="a")
    d.arrow(235, 111, 403, 111)
    d.box(405, 95, 120, 32, ',"age":', fill="d")
    d.words(610, 111, "only one way: a draft", "small")
    return d


def stream() -> Drawing:
    """15: the residual stream, and where it is read and changed."""
    d = Drawing(
        "Layers read the residual stream and add to it; captures read it, patches and vectors change it", 700, 160
    )
    d.box(15, 50, 80, 36, "embed", fill="b")
    for index in range(4):
        x = 150 + index * 120
        d.box(x, 15, 80, 30, f"layer {index}", fill="b")
        d.arrow(x - 10, 62, x + 10, 47)
        d.arrow(x + 70, 47, x + 90, 62)
    d.arrow(95, 68, 613, 68)
    d.box(615, 50, 70, 36, "head", fill="c")
    for x, words, fill in ((270, "capture", "a"), (390, "patch", "d"), (510, "steer", "d")):
        d.box(x - 35, 108, 90, 30, words, fill=fill)
    d.arrow(280, 70, 280, 106)
    d.arrow(400, 106, 400, 71)
    d.arrow(520, 106, 520, 71)
    return d


def rollouts() -> Drawing:
    """16: the loop of rollouts, rewards and updates."""
    d = Drawing("The engine writes answers, a function gives marks, an update changes the weights, and again", 700, 140)
    for x, words, fill in (
        (15, "prompts", "n"),
        (155, "rollouts\n8 answers each", "a"),
        (305, "rewards\nyour function", "b"),
        (455, "update\nlikelier if better", "c"),
    ):
        d.box(x, 30, 120, 44, words, fill=fill)
    for x in (135, 275, 425):
        d.arrow(x, 52, x + 18 if x == 135 else x + 28, 52)
    d.path("M515 76 V108 H215 V77")
    d.words(365, 121, "swap_weights: the same arrays, nothing copied or compiled", "small")
    d.words(640, 52, "and again", "small")
    return d


def adapters() -> Drawing:
    """17: a matrix with two narrow ones next to it, and rows that choose."""
    d = Drawing(
        "Next to a matrix W stand two narrow matrices per adapter; each row of the batch uses its own", 700, 170
    )
    for y, words, fill in ((20, "row: base", "n"), (68, "row: pirate", "a"), (116, "row: butler", "d")):
        d.box(15, y, 110, 34, words, fill=fill)
        d.arrow(125, y + 17, 178, 85)
    d.box(180, 30, 130, 110, "W\n256 × 512\nread once", fill="b")
    d.arrow(310, 85, 618, 85)
    for y, fill in ((20, "a"), (106, "d")):
        d.box(380, y, 24, 44, "A", fill=fill)
        d.box(420, y + 10, 90, 24, "B", fill=fill)
    d.words(440, 78, "rank 8", "small")
    d.box(620, 62, 65, 46, "sum", fill="c")
    d.arrow(510, 42, 618, 76)
    d.arrow(510, 128, 618, 96)
    return d


def files() -> Drawing:
    """18: what a file needs of a laptop."""
    d = Drawing("A model's file, its memory and its speed follow from weights and bits", 700, 150)
    d.box(15, 40, 130, 50, "weights × bits / 8\n135 M × 5.8 bits", fill="a")
    d.arrow(145, 65, 183, 65)
    d.box(185, 40, 120, 50, "file\n98 MB", fill="b")
    d.arrow(305, 50, 343, 36)
    d.arrow(305, 80, 343, 100)
    d.box(345, 15, 160, 44, "memory:\nfile + cache + runtime", fill="c")
    d.box(345, 80, 160, 44, "tokens/s ≤\nbandwidth / file", fill="c")
    d.words(600, 37, "does it fit?", "small")
    d.words(600, 102, "is it quick enough?", "small")
    return d


def roofline() -> Drawing:
    """19: the two limits of a step."""
    d = Drawing("A step's time is the larger of reading bytes and computing; few rows are bound by reading", 700, 190)
    d.arrow(60, 160, 640, 160)
    d.arrow(60, 160, 60, 20)
    d.words(640, 175, "rows in a step", "small")
    d.words(100, 18, "tokens/s", "small")
    d.path("M60 160 L330 50 H620", arrow=False)
    d.box(95, 60, 130, 34, "bound by reading", fill="a")
    d.box(430, 80, 160, 34, "bound by arithmetic", fill="b")
    d.words(330, 36, "bytes / bandwidth = operations / FLOP/s", "small")
    d.words(92, 175, "decode", "small")
    d.words(520, 175, "prefill, large batches", "small")
    return d


def table_of_rows() -> Drawing:
    """20: one prefix, many rows, choices."""
    d = Drawing("The common beginning is computed once; each row adds its text, each choice its few tokens", 700, 160)
    d.box(15, 55, 160, 44, "instruction\nand examples", fill="a")
    for y, words in ((15, "row 1"), (62, "row 2"), (109, "row 1,000")):
        d.box(230, y, 100, 32, words, fill="b")
        d.arrow(175, 77, 228, y + 16)
        for index, choice in enumerate((" good", " bad")):
            d.box(380 + index * 90, y, 80, 32, choice, fill="c")
        d.arrow(330, y + 16, 378, y + 16)
    d.words(620, 31, "log p = −0.2, −1.9", "small")
    d.words(620, 78, "log p = −2.4, −0.1", "small")
    return d


def agent() -> Drawing:
    """21: the loop of an agent."""
    d = Drawing("The model writes a call, your code runs it, its result becomes a message, and again", 700, 150)
    for x, words, fill in (
        (15, "question", "n"),
        (165, "model", "a"),
        (335, "call?\nname, arguments", "b"),
        (525, "your function", "d"),
    ):
        d.box(x, 30, 130 if x > 300 else 110, 44, words, fill=fill)
    d.arrow(125, 52, 163, 52)
    d.arrow(275, 52, 333, 52)
    d.arrow(465, 52, 523, 52)
    d.path("M590 76 V112 H220 V77")
    d.words(405, 125, "result, as a message: the prompt so far is in the cache", "small")
    d.words(400, 16, "no call: the answer", "small")
    return d


def drafts() -> Drawing:
    """22: drafts looked up in the text, verified in one step."""
    d = Drawing("Drafts are copied from where the text said this before; one step verifies all of them", 700, 160)
    for index, (word, fill) in enumerate(
        (("the", "b"), ("red", "a"), ("ball", "a"), ("is", "a"), ("…", "n"), ("the", "b"))
    ):
        d.box(15 + index * 62, 25, 58, 30, word, fill=fill)
    d.words(200, 72, "found again: copy what came then", "small")
    for index, (word, ok) in enumerate((("red", 1), ("ball", 1), ("is", 0))):
        d.box(420 + index * 82, 25, 76, 30, word, fill="c" if ok else "d")
    d.arrow(387, 40, 418, 40)
    d.words(540, 72, "accepted, accepted, refused", "small")
    d.box(395, 100, 290, 34, "one step: 4 positions, 3 tokens gained", fill="n")
    d.words(180, 117, "without drafts: three steps", "small")
    return d


def states() -> Drawing:
    """23: a growing cache next to a state of one size."""
    d = Drawing("Attention keeps keys and values of every token; a recurrent layer keeps one state", 700, 170)
    d.words(80, 20, "attention")
    for index in range(12):
        d.box(15 + index * 25, 36, 22, 40, fill="a")
    d.words(340, 56, "grows with each token", "small left")
    d.words(80, 100, "recurrent")
    for index in range(11):
        d.arrow(30 + index * 25, 132, 48 + index * 25, 132)
    d.box(300, 112, 44, 40, "S", fill="b")
    d.words(360, 125, "one size, overwritten at each token:", "small left")
    d.words(360, 141, "cut it in the middle, and it is gone", "small left")
    return d


def mesh() -> Drawing:
    """24: a layer over two devices, with its sums."""
    d = Drawing("Each device has half of the heads and half of the MLP; two sums a layer join them", 700, 160)
    for y, name in ((20, "device 0"), (90, "device 1")):
        d.words(50, y + 22, name)
        d.box(100, y, 120, 44, "half of the heads", fill="a")
        d.box(330, y, 120, 44, "half of the MLP", fill="b")
        d.arrow(220, y + 22, 258, 77)
        d.arrow(292, 77, 328, y + 22)
        d.arrow(450, y + 22, 488, 77)
    d.box(260, 62, 32, 30, "Σ", fill="d")
    d.box(490, 62, 32, 30, "Σ", fill="d")
    d.arrow(522, 77, 558, 77)
    d.box(560, 58, 110, 38, "next layer", fill="c")
    d.words(350, 148, "what crosses the link: two sums of one row per token", "small")
    return d


def routing() -> Drawing:
    """25: a router in front of replicas."""
    d = Drawing("A router sends a request to the replica that has its beginning, unless that one is too busy", 700, 170)
    for y, words, fill in ((15, "chat A, turn 2", "a"), (67, "chat B, turn 5", "b"), (119, "chat C, new", "n")):
        d.box(15, y, 130, 36, words, fill=fill)
        d.arrow(145, y + 18, 218, 85)
    d.box(220, 60, 120, 50, "router\nhash of the start", fill="c")
    for y, words, fill in ((25, "replica 0: pages of A", "a"), (105, "replica 1: pages of B", "b")):
        d.box(440, y, 190, 40, words, fill=fill)
        d.arrow(340, 85, 438, y + 20)
    return d


def picture_rows() -> Drawing:
    """26: from pixels to rows among the embeddings of words."""
    d = Drawing("Patches become rows, which stand among the embeddings of a prompt's words", 700, 170)
    for row in range(4):
        for column in range(4):
            d.box(20 + column * 26, 20 + row * 26, 26, 26, fill="a")
    d.words(72, 140, "patches of pixels", "small")
    d.arrow(126, 72, 168, 72)
    d.box(170, 46, 90, 52, "encoder", fill="c")
    d.arrow(260, 72, 298, 72)
    for index in range(4):
        d.box(300 + index * 28, 58, 24, 28, fill="a")
    for index, word in enumerate(("Which", "bar", "…")):
        d.box(414 + index * 52, 58, 48, 28, word, fill="b")
    d.words(354, 104, "rows of the picture", "small")
    d.words(490, 104, "rows of words", "small")
    d.arrow(570, 72, 598, 72)
    d.box(600, 46, 80, 52, "layers", fill="d")
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "01_generation": generation,
    "02_step": step,
    "03_batching": batching,
    "04_sampling": sampling,
    "05_tree": tree,
    "06_tiers": tiers,
    "07_restarts": restarts,
    "08_tasks": tasks,
    "09_pages": pages,
    "10_checkpoint": checkpoint,
    "11_processor": processor,
    "12_loop": loop,
    "13_serving": serving,
    "14_mask": mask,
    "15_stream": stream,
    "16_rollouts": rollouts,
    "17_adapters": adapters,
    "18_files": files,
    "19_roofline": roofline,
    "20_rows": table_of_rows,
    "21_agent": agent,
    "22_drafts": drafts,
    "23_states": states,
    "24_mesh": mesh,
    "25_routing": routing,
    "26_pictures": picture_rows,
    **maps.DRAWINGS,
}


def main() -> None:
    for name, drawing in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(drawing().svg())


if __name__ == "__main__":
    main()
