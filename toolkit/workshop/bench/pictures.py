"""What a picture costs: a neighbour's longest pause while a large one is encoded, first tokens, and seconds to encode.

    python pictures.py [--side 4096] [--seconds 60] [--ask 512] [--dtype bfloat16] [--layers 24]
                                   [--encode 512] [--peer] [--many 50] [--repeat 3] [--work FOLDER]

The model has random weights: an encoder as large as that of Qwen3-VL 2B (1,024 wide, 24 layers, patches of 16
pixels), and a small text model, whose own steps take a few milliseconds. Pauses are the times between two tokens of a
stream of text that runs along with a picture of `--side` pixels, for `--seconds`, or until it is encoded; they are
compared with those of the same stream alone, before and after it. First tokens are those of a first and a second
question about a picture of `--ask` pixels. `--encode` are the sides of pictures whose encoding is timed alone, and
`--many` the number of pictures of different sizes over which compilations are counted. With `--peer`, encoding takes
turns with transformers' encoder of the same weights and dtype in this process (needs torch), and so do whole prompts:
from a picture that is new to the first token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np

import rekindle
from helpers import picture_models as small

QUESTION = "What is in <image>? "


def case_of(layers: int, hidden: int) -> small.PictureModel:
    """Qwen3-VL with a small text model, and pictures of up to 4096 × 4096 pixels."""
    base = small.CASES["qwen3-vl"]
    text = {
        **small.TEXT, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1 << 15,
        "rope_parameters": {**small.MROPE, "mrope_section": [12, 10, 10]},
    }  # fmt: skip
    vision = {
        **small.QWEN_VISION, "depth": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "num_heads": hidden // 64, "out_hidden_size": 256, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": sorted({layers // 4, layers // 2, 3 * layers // 4}),
    }  # fmt: skip
    config = {**base.config, "text_config": text, "vision_config": vision}
    size = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
    return dataclasses.replace(base, config=config, preprocessor={**base.preprocessor, "size": size})


def png(side: int, seed: int = 0) -> bytes:
    """A picture as a file: squares of several colours."""
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1)).save(file, "PNG")
    return file.getvalue()


class Neighbour:
    """A stream of text that goes on until it is stopped, and the times of its tokens."""

    def __init__(self, session: rekindle.Session) -> None:
        self._session, self._over = session, threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            options: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1.0}
            handle = self._session.submit("Once upon a time", **options)
            with contextlib.suppress(rekindle.RequestAborted):  # it is cancelled at the end
                for _ in handle.stream_sync():
                    self.times.append(time.perf_counter())
                    if self._over.is_set():
                        handle.cancel()

    def __enter__(self) -> Neighbour:
        self._thread.start()
        while len(self.times) < 20 and self._thread.is_alive():
            time.sleep(0.01)
        self.times.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def figures(self) -> dict[str, float]:
        pauses = [1000 * gap for gap in harness.gaps(self.times)]
        return {
            "tokens": len(pauses), "median_ms": round(statistics.median(pauses), 1),
            "p99_ms": round(harness.quantile(pauses, 0.99), 1), "longest_ms": round(max(pauses), 1),
        }  # fmt: skip


def pauses(session: rekindle.Session, side: int, seconds: float) -> dict[str, Any]:
    """The pauses of a neighbour alone, with a picture, and alone again."""
    report: dict[str, Any] = {"side": side, "patches": (side // 16) ** 2}

    def alone() -> dict[str, float]:
        with Neighbour(session) as neighbour:
            time.sleep(min(seconds, 20))
        return neighbour.figures()

    picture = png(side)
    report["alone"] = alone()
    with Neighbour(session) as neighbour:
        start = time.perf_counter()
        handle = session.submit(QUESTION, images=picture, max_tokens=1, temperature=0.0)
        while time.perf_counter() - start < seconds and not handle.done:
            time.sleep(0.05)
        report["with_picture_seconds"] = round(time.perf_counter() - start, 1)
        report["answered"] = handle.done
        report["with_picture"] = neighbour.figures()
        longest = sorted(zip(harness.gaps(neighbour.times), neighbour.times, strict=False), reverse=True)[:6]
        report["longest_at"] = [(round(1000 * gap), round(at - start, 2)) for gap, at in longest]
        handle.cancel()
    report["alone_again"] = alone()
    return report


def first_tokens(session: rekindle.Session, side: int, repeat: int) -> dict[str, Any]:
    """Seconds to the first token of a first and of a second question about a picture."""
    rounds = list[dict[str, float]]()
    for number in range(repeat):
        picture, seconds = png(side, 100 + number), list[float]()
        for question in ("What is it?", "And which colour is it?"):
            start = time.perf_counter()
            session.generate_sync("<image>" + question, images=picture, max_tokens=1, temperature=0.0)
            seconds.append(time.perf_counter() - start)
        rounds.append({"first": seconds[0], "second": seconds[1], "share": seconds[1] / seconds[0]})
    return {
        "side": side,
        "rounds": repeat,
        **{name: round(value, 4) for name, value in harness.medians(rounds).items()},
    }


def encoding(session: rekindle.Session, sides: list[int], repeat: int, peer: Peer | None) -> list[Any]:
    """Seconds to encode pictures, from patches to rows; with a peer, in turns."""
    from rekindle._src.capabilities.pictures.request import PICTURES
    from rekindle._src.images.picture import open_picture

    pictures: Any = PICTURES.of(session._front)
    encoder, processor = pictures._encoder, pictures._processor
    lines = []
    for side in sides:
        patches = processor.patches(open_picture(png(side)).decode())
        runs: dict[str, Callable[[], object]] = {"ours": partial(encoder, patches, lambda: True)}
        if peer is not None:
            runs["theirs"] = partial(peer.encode, patches)
        lines.append({"side": side, "patches": len(patches.codes), **in_turns(runs, repeat)})
    return lines


def in_turns(runs: dict[str, Callable[[], object]], repeat: int) -> dict[str, Any]:
    """Seconds, and seconds of processor time, of what runs in turns; ratios are theirs to ours."""
    clocks = {"seconds": time.perf_counter, "processor": time.process_time}
    spent: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in runs} for clock in clocks}
    for number, name in harness.turns(tuple(runs), repeat):
        starts = {clock: read() for clock, read in clocks.items()}
        runs[name]()
        if number >= 0:
            for clock, read in clocks.items():
                spent[clock][name].append(read() - starts[clock])
    report: dict[str, Any] = {}
    for clock, by_name in spent.items():
        report[clock] = {name: harness.spread(values) for name, values in by_name.items()}
        if len(runs) > 1:
            report[f"ratio of {clock}"] = harness.spread(harness.ratios(by_name["theirs"], by_name["ours"]))
    return report


def prompts(session: rekindle.Session, sides: list[int], repeat: int, peer: Peer) -> list[Any]:
    """Seconds from a new picture to the first token, in turns with transformers' model for the same tokens."""
    from rekindle._src.capabilities.pictures.request import PICTURES
    from rekindle._src.images.picture import open_picture

    pictures: Any = PICTURES.of(session._front)
    seeds, lines = itertools.count(1000), []
    for side in sides:
        ids = list[int]()

        def ours(side: int = side, ids: list[int] = ids) -> None:
            picture = png(side, next(seeds))
            done = session.generate_sync(QUESTION, images=picture, max_tokens=1, temperature=0.0)
            ids[:] = done.prompt_token_ids

        def theirs(side: int = side, ids: list[int] = ids) -> None:
            peer.first_token(ids, pictures._processor.patches(open_picture(png(side, next(seeds))).decode()))

        ours()
        lines.append({"side": side, "tokens": len(ids), **in_turns({"ours": ours, "theirs": theirs}, repeat)})
    return lines


def compiled_over(session: rekindle.Session, count: int) -> dict[str, int]:
    """Count what is compiled while questions about pictures of different sizes are answered."""
    sizes = np.random.default_rng(0).integers(20, 700, (count, 2))
    from rekindle._src.capabilities.pictures.request import PICTURES

    pictures: Any = PICTURES.of(session._front)
    before = session.stats().compilations + pictures.compilations
    for width, height in sizes:
        pixels = np.random.default_rng(int(width)).integers(0, 256, (height, width, 3), np.uint8)
        session.generate_sync(QUESTION, images=pixels, max_tokens=2)
    return {"pictures": count, "compiled": session.stats().compilations + pictures.compilations - before}


class Peer:
    """Transformers' model with the same weights, in a dtype, on as many cores."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import Qwen3VLForConditionalGeneration

        self._torch, self._dtype = torch, getattr(torch, dtype)
        load: Any = Qwen3VLForConditionalGeneration.from_pretrained
        options = {"attn_implementation": "sdpa", "ignore_mismatched_sizes": True}
        self._model: Any = load(folder, dtype=self._dtype, **options).eval()
        patches = self._model.model.visual.patch_embed.proj.weight  # which the folder has as a matrix
        stored = load_file(folder / "model.safetensors")["model.visual.patch_embed.proj.weight"]
        patches.data.copy_(stored.reshape(patches.shape))

    def _inputs(self, patches: Any) -> tuple[Any, Any]:
        view = patches.plan.views[0]
        pixels = self._torch.from_numpy(patches.floats()).to(self._dtype)
        return pixels, self._torch.tensor([[1, view.rows, view.columns]])

    def encode(self, patches: Any) -> None:
        pixels, grid = self._inputs(patches)
        with self._torch.inference_mode():
            self._model.model.visual(pixels, grid_thw=grid)

    def first_token(self, ids: list[int], patches: Any) -> None:
        """Encode a picture and compute the prompt's last logits."""
        torch, (pixels, grid) = self._torch, self._inputs(patches)
        tokens = torch.tensor([ids])
        places = tokens == small.CASES["qwen3-vl"].id_of(small.CASES["qwen3-vl"].token)
        with torch.inference_mode():
            self._model(
                input_ids=tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=places.int(),
                logits_to_keep=1,
            )  # fmt: skip


def main() -> None:
    arguments = harness.options(
        __doc__, side=4096, seconds=60.0, ask=512, dtype="bfloat16", layers=24, hidden=1024, encode=[512],
        peer=False, repeat=3, many=0, work="/tmp/rekindle-pictures",
    )  # fmt: skip
    folder = Path(arguments.work) / f"qwen3-vl-{arguments.hidden}x{arguments.layers}"
    if not (folder / "config.json").exists():
        small.written("qwen3-vl", folder, case=case_of(arguments.layers, arguments.hidden))
    options: dict[str, Any] = {
        "dtype": arguments.dtype, "max_model_len": 1 << 15, "max_requests": 4, "max_tokens_per_step": 128,
        "precompile": "all", "cache_dir": str(Path(arguments.work) / "cache"), "disk_memory": 0, "host_memory": 1 << 30,
        "quiet": True,
    }  # fmt: skip
    report: dict[str, Any] = {"dtype": arguments.dtype, "layers": arguments.layers, "hidden": arguments.hidden}
    with rekindle.open_sync(folder, **options) as session:
        session.generate_sync(QUESTION, images=png(256, 1), max_tokens=2)  # reads the encoder's weights
        if arguments.side:
            report["pauses"] = pauses(session, arguments.side, arguments.seconds)
            print(json.dumps(report), flush=True)
        if arguments.ask:
            report["first_tokens"] = first_tokens(session, arguments.ask, arguments.repeat)
        if arguments.many:
            report["many"] = compiled_over(session, arguments.many)
        peer = Peer(folder, arguments.dtype) if arguments.peer else None
        if any(arguments.encode):
            report["encoding"] = encoding(session, arguments.encode, arguments.repeat, peer)
        if peer is not None:
            report["prompts"] = prompts(session, arguments.encode, arguments.repeat, peer)
        statistics_of = session.stats()
        report["stats"] = statistics_of.pictures and statistics_of.pictures._asdict()
        report["compilations"] = statistics_of.compilations
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
