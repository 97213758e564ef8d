"""What the encoder and the language model are trained on, and that both trainings run, resume and export a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from rekindle._src.images import Picture, processor_of_files
from rekindle._src.models.vision.inputs import ImagePatches, PatchGrid
from rekindle._src.models.vision.registry import vision_config
from rekindle._src.models.vision.tower import abstract_tower, encoder_of, pack_images
from rekindle._src.models.vision.weights import load_tower, tower_tensors
from rekindle.tiny import folder
from workshop.tiny_vision import encoder, evaluate, reader, train
from workshop.tiny_vision.pictures import KINDS, LONGEST, draw, scene, square
from workshop.tiny_vision.questions import FRAMES, answer, conversation, question, topics

FOLDER = folder("tiny-vision")


def test_scenes_are_told_by_facts_questions_and_both_kinds_of_pictures() -> None:
    rng, asked = Random(0), set[str]()
    for number in range(40):
        seen = scene(rng, KINDS[number % 4])
        known = encoder.facts(seen)
        assert all(value in encoder.FACTS[name] for name, value in known.items())
        assert draw(seen, rng).shape[1:] == (LONGEST, 3)
        if number < 4:
            assert evaluate.figure(seen, rng).axes
        asked.update(topics(seen))
        for text, said in conversation(seen, rng):
            assert text[0].isupper() and said.endswith(".") and "{" not in text
        assert str(len(seen.heights)) in answer(seen, "bars")
    assert asked == set(FRAMES)
    bars = scene(Random(3), "bars")
    labels = encoder.labels([bars])[0]
    assert encoder.FACTS["highest"][labels[list(encoder.FACTS).index("highest")]] == f" {bars.highest}"
    assert labels[list(encoder.FACTS).index("digit")] == 10, "none"
    assert question(bars, "highest", Random(1)) == question(bars, "highest", Random(1))


def test_the_training_sees_the_pixels_and_computes_the_rows_of_the_shipped_encoder() -> None:
    """Its own forward pass and its own cutting are those of a session."""
    config, pictures, whole = (
        json.loads((FOLDER / f"{name}.json").read_text())
        for name in ("config", "preprocessor_config", "processor_config")
    )
    processor = processor_of_files(pictures, whole, config)
    rng = Random(0)
    drawn = [draw(scene(rng), rng) for _ in range(3)]
    assert any(pixels.shape[0] % 2 == 0 for pixels in drawn)
    codes = encoder.patches(np.stack([square(pixels, encoder.SIDE) for pixels in drawn]))
    seen = [processor.patches(Picture.of(pixels.copy())) for pixels in drawn]
    for pixels, own, one in zip(drawn, codes, seen, strict=True):
        if pixels.shape[0] % 2:  # the processor makes an odd height even first
            assert np.mean(own == one.codes) > 0.9
        else:
            np.testing.assert_array_equal(own, one.codes)
    codes = np.stack([one.codes for one in seen]).reshape(codes.shape)

    weights = encoder.initial(1, 256)
    stored = {f"model.{name}": np.asarray(array) for name, array in weights.items() if not name.startswith("heights.")}
    vision = vision_config(config)
    assert vision is not None
    tower = abstract_tower(vision)
    grid = PatchGrid(encoder.GRID, encoder.GRID)
    images = [ImagePatches(one.floats(), grid) for one in seen]
    batch = pack_images(images, vision).cut(0, 3 * grid.patches)
    expected = encoder_of(tower.graph)(load_tower(tower, tower_tensors(vision, stored, "here")), batch).tokens
    actual, _ = encoder.encode(weights, codes)
    np.testing.assert_allclose(np.asarray(actual).reshape(expected.shape), expected, atol=2e-3)


def test_windows_have_rows_for_the_tokens_of_pictures_and_learn_answers_alone() -> None:
    words, embed = train.tokenizer_and_embedding()
    writer = reader.Reader(words, embed)
    windows = writer.windows("a seed", 6)
    image = words.token_to_id(reader.IMAGE)
    assert ((windows.tokens == image) == (windows.rows > 0)).all()
    assert sorted(set((windows.tokens == image).sum(1).tolist())) in ([16], [0, 16])
    texts = [words.decode(row[learned]) for row, learned in zip(windows.tokens, windows.learned, strict=True)]
    with_pictures = (windows.tokens == image).any(1)
    for text, row in zip(np.array(texts)[with_pictures], windows.tokens[with_pictures], strict=True):
        assert "<image>" not in text and "?" not in text
        assert "<|im_start|>user" in words.decode(row[row >= 0], skip_special_tokens=False)
    again = writer.windows("a seed", 6)
    for first, second in zip(windows, again, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.thorough
def test_both_parts_train_resume_and_become_a_folder(tmp_path: Path) -> None:
    lines = list[str]()
    small = dataclasses.replace(train.ENCODER, steps=22, size=24, warmup=4)
    train.train_encoder(small, tmp_path, lines.append, until=11)
    weights = train.train_encoder(small, tmp_path, lines.append)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(lines) == 2 and losses[-1] < losses[0]
    graph, text = train.train_reader(dataclasses.replace(train.READER, steps=2, size=2), tmp_path, lines.append)
    train.export(weights, graph, text, tmp_path / "model")
    shipped = {path.name for path in FOLDER.iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == shipped - {"README.md"}
    for name in shipped - {"README.md", "model.safetensors"}:
        assert (tmp_path / "model" / name).read_text() == (FOLDER / name).read_text()
