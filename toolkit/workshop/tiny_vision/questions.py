"""Questions about a scene and their answers, in the words of the embedded model."""

from __future__ import annotations

from random import Random

from workshop.tiny.words import a, capital, fill
from workshop.tiny_vision.pictures import Scene

# By topic, which `evaluate.py` counts apart. Frames are those of `words.fill`.
FRAMES = {
    "picture": (
        "[What is|What's] [in|on] [the|this] [picture|image|figure][?|]",
        "[What do you see|What can you see|What is this|What does it show]?",
        "[What is|Tell me what is] in [the picture|the figure].",
        "What is shown[ here|]?",
        "[Describe|Look at] the [picture|figure|image].",
    ),
    "shape": (
        "[What|Which] shape is [it|this|that|in the picture|on the picture|in the figure][?|]",
        "What is the shape[ in the picture|]?",
        "Name the shape.",
    ),
    "colour": (
        "[What|Which] colour is [it|this|the {thing}][?|]",
        "What is the colour of the {thing}?",
        "[What|Which] color is [it|the {thing}]?",
    ),
    "digit": (
        "[What|Which] [digit|number] is [it|this|that|in the picture|on the picture|in the figure|shown][?|]",
        "Which digit do you see?",
        "Read the [digit|number].",
    ),
    "bars": (
        "How many bars [are there|are in the picture|do you see|does it have|are in the plot|are shown][?|]",
        "Count the bars.",
    ),
    "highest": (
        "[Which|What] bar is [the |][highest|tallest|largest][?|]",
        "What colour is the [highest|tallest|largest] bar?",
        "Which colour has the [highest|largest] [bar|value]?",
    ),
    "lowest": (
        "[Which|What] bar is [the |][lowest|shortest|smallest][?|]",
        "What colour is the [lowest|shortest|smallest] bar?",
        "Which colour has the [lowest|smallest] [bar|value]?",
    ),
    "rises": (
        "[Which|What] [line|curve] [rises|goes up|is rising|grows][?|]",
        "What colour is the [line|curve] that [rises|goes up]?",
    ),
    "falls": (
        "[Which|What] [line|curve] [falls|goes down|is falling|shrinks][?|]",
        "What colour is the [line|curve] that [falls|goes down]?",
    ),
    "direction": (
        "Does [it|the line|the curve] [rise or fall|go up or down|fall or rise][?|]",
        "Does the {colour} [line|curve] rise or fall?",
    ),
    "lines": ("How many [lines|curves] [are there|are in the picture|do you see|are in the plot][?|]",),
}


def topics(scene: Scene) -> tuple[str, ...]:
    """Return the topics for questions about a scene."""
    if scene.kind == "bars":
        return ("picture", "bars", "highest", "lowest")
    if scene.kind == "lines":
        return ("picture", "lines", *(("rises", "falls") if len(scene.rises) == 2 else ("direction", "colour")))
    return ("picture", scene.kind, "colour")


def question(scene: Scene, topic: str, rng: Random) -> str:
    """Return a question about a topic."""
    thing = {"shape": "shape", "digit": "digit"}.get(scene.kind, "line")
    if scene.kind == "shape" and rng.random() < 0.4:
        thing = scene.shape
    return fill(rng, rng.choice(FRAMES[topic]), thing=thing, colour=scene.colours[0])


def answer(scene: Scene, topic: str) -> str:
    """Return the answer."""
    first = scene.colours[0]
    if topic == "picture":
        return description(scene)
    if topic == "shape":
        return f"It is {a(scene.shape)}."
    if topic == "colour":
        return f"It is {first}."
    if topic == "digit":
        return f"It is {scene.digit}."
    if topic == "bars":
        return f"There are {len(scene.heights)} bars."
    if topic in ("highest", "lowest"):
        return f"The {scene.highest if topic == 'highest' else scene.lowest} bar is the {topic}."
    if topic in ("rises", "falls"):
        return f"The {scene.line(topic == 'rises')} line {topic}."
    if topic == "direction":
        return f"It {'rises' if scene.rises[0] else 'falls'}."
    return "There is 1 line." if len(scene.rises) == 1 else f"There are {len(scene.rises)} lines."


def description(scene: Scene) -> str:
    """Return a sentence about all of a scene."""
    first = scene.colours[0]
    if scene.kind == "shape":
        return capital(a(f"{first} {scene.shape}")) + "."
    if scene.kind == "digit":
        return f"The digit {scene.digit} in {first}."
    if scene.kind == "bars":
        return f"A plot with {len(scene.heights)} bars. The {scene.highest} bar is the highest."
    if len(scene.rises) == 1:
        return f"A plot with a {first} line that {'rises' if scene.rises[0] else 'falls'}.".replace(
            "a orange", "an orange"
        )
    return f"A plot with 2 lines. The {scene.line(True)} line rises, and the {scene.line(False)} line falls."


def conversation(scene: Scene, rng: Random) -> list[tuple[str, str]]:
    """Return one to four questions, each about another topic, with their answers."""
    possible = topics(scene)
    chosen = rng.sample(possible, rng.randint(1, min(4, len(possible))))
    return [(question(scene, topic, rng), answer(scene, topic)) for topic in chosen]
