"""Stories of a journey: a hero has an errand, meets an obstacle, overcomes it, and ends the errand well.

Every errand fits every obstacle, so that they make 240 plots, each with two ways past the obstacle. Fields as in
`plots`; the hero goes alone to `there`, for, to or on behalf of the friend.
"""

from __future__ import annotations

from typing import NamedTuple

# ruff: noqa: E501  (a frame of a sentence stays on its line, however long)


class Errand(NamedTuple):
    """The reason of a journey, its end, the answer to the question why, and words that only its stories have."""

    start: str
    end: str
    why: str
    mark: str


class Obstacle(NamedTuple):
    """The obstacle, two ways past it, the answer to the question about it, and words that only its stories have."""

    trouble: str
    ways: tuple[str, str]
    what: str
    mark: str


ERRANDS = {
    "medicine": Errand(
        '{time}, {his} friend {pname} was ill. "Only tea from a silver flower can help," said the doctor. Such flowers grew only {place}.',
        "At last {name} found the silver flower. {He} ran back and made tea for {pname}. [The next day|Soon] {pname} was well again.",
        "{name} wanted to find a silver flower.",
        "silver flower",
    ),
    "letter": Errand(
        "{time}, {name} found a letter at the door. It was for {pname}, who lived {place}. [The letter looked important|On it stood the word: Hurry].",
        'At last {name} gave the letter to {pname}. It was from {phis} brother. "He is coming home!" {phe} shouted, and they danced around the room.',
        "{name} wanted to bring a letter to {pname}.",
        "found a letter at the door",
    ),
    "honey": Errand(
        "{time}, {name} wanted to bake a cake for {pname}. But there was no honey in the house. The best honey came from the bees {place}.",
        'At last {name} got a pot of honey from the bees. The cake was sweet and golden. "It is the best cake of my life," said {pname}.',
        "{name} wanted to get honey for a cake.",
        "there was no honey",
    ),
    "lamb": Errand(
        '{time}, {pname} was in tears. "My little lamb has run away!" {phe} cried. Somebody had seen it {place}. "I will bring it back," said {name}.',
        "There was the lamb, [alone and cold|between two bushes]! {name} carried it home in {his} arms. {pname} kissed the lamb and thanked {name}.",
        "{name} wanted to bring back a lamb.",
        "little lamb",
    ),
    "star": Errand(
        '{time}, a small star fell from the sky in front of {name}. "I am lost," said the star. "My sisters are waiting {place}." {name} told only {pname} about it.',
        "There {name} held the star up high. Its sisters came down and took it home. Every night the star winks at {name} and {pname}.",
        "{name} wanted to bring a star to its sisters.",
        "small star fell",
    ),
    "song": Errand(
        "{time}, {name} heard a song in the wind. It was so beautiful that {he} could not forget it. The song came from {there}.",
        'There sat {pname} and sang. "Please teach me your song," said {name}. They sang it together until the moon came up, and they became friends.',
        "{name} wanted to find out who was singing.",
        "song in the wind",
    ),
    "egg": Errand(
        '{time}, {name} found a big blue egg in the grass. "It belongs to a bird {place}," said {his} friend {pname}. "Its mother must be worried."',
        "There was a nest with a sad bird beside it. {name} laid the egg into it, and a little head came out! The bird sang with joy. {name} told {pname} everything.",
        "{name} wanted to bring an egg back to its mother.",
        "big blue egg",
    ),
    "well": Errand(
        '{time}, the well was empty. Nobody had water. "There is a spring {place}, but it is closed by a stone," said old {pname}.',
        "There {name} rolled the stone away, and clear water came out. Soon the well was full again. {pname} drank the first cup and thanked {name}.",
        "{name} wanted to open a spring.",
        "the well was empty",
    ),
    "bell": Errand(
        "{time}, the golden bell of the school was gone. {pname} was very sad, because {phe} rang it every morning. A bird had carried it off to {there}.",
        "The bell lay in an empty nest. {name} took it and brought it back. The next morning {pname} rang it, louder than ever before.",
        "{name} wanted to bring back the golden bell.",
        "golden bell",
    ),
    "visit": Errand(
        '{time}, {name} got a card from {pname}. "It is my birthday. Please come to my party {place}," it said. {name} did not want to be late.',
        '"There you are!" said {pname}. "Now the party can begin." They ate, they played, and {pname} said that {name} was the best present of all.',
        "{name} wanted to go to the party of {pname}.",
        "a card from",
    ),
    "contest": Errand(
        '{time}, there was a painting contest {place}. {name} had painted [a big tree|the sea at night], but {he} was shy. "Go there," said {his} friend {pname}. "Your picture is wonderful."',
        "There {name} showed the picture with red cheeks. Everybody was quiet, then everybody clapped. {pname} was so proud that {phe} put the picture on the wall.",
        "{name} wanted to show a picture at a contest.",
        "contest",
    ),
    "flower": Errand(
        '{time}, {pname} told {name} about the moon flower. "It grows {place}, and it opens only one night in the year," said {pname}. That night was today.',
        "Just in time {name} sat down beside the flower. It opened slowly and shone like a lamp. {name} never forgot it, and drew it for {pname}.",
        "{name} wanted to see the moon flower.",
        "moon flower",
    ),
    "lamp": Errand(
        '{time}, the light of the tower {place} went out. "Without it the ships cannot find their way," said {pname}. "Somebody must light it again."',
        "There {name} climbed a hundred steps and lit the tower again. Far away, {pname} saw the light and waved. All the ships came home.",
        "{name} wanted to light the tower again.",
        "tower",
    ),
    "book": Errand(
        '{time}, {name} read a story to {pname}, but the last page was missing. "How does it end?" asked {pname}. The man who wrote it lived {place}.',
        'There an old man opened the door. He laughed and wrote the last page again. That evening {name} read it to {pname}, and both said: "What a good ending!"',
        "{name} wanted to get the last page of a story.",
        "last page was missing",
    ),
    "missing": Errand(
        "{time}, {pname} did not come home for dinner. Everyone was worried. {name} knew that {pname} liked to play {place}.",
        'There was {pname}, with a hurt foot! "I knew that you would find me," {phe} said. {name} helped {phim} to walk, and they were home before bed time.',
        "{name} wanted to find {pname}.",
        "come home for dinner",
    ),
    "wind": Errand(
        '{time}, a strong wind took the {thing} and carried it away. "It flew to {there}!" called {pname}. {name} ran after it at once.',
        "There was the {thing}, high up in a tree. {name} climbed up and got it. {pname} was waiting at home and cheered when {he} came back.",
        "{name} wanted to get the {thing} back.",
        "strong wind took",
    ),
    "sorry": Errand(
        "{time}, {name} and {pname} had a fight about [a silly thing|a game]. {pname} went home to {there}. Soon {name} felt bad and wanted to say sorry.",
        '"I am sorry," said {name} at the door. "I am sorry too," said {pname}. They shook hands, and the fight was forgotten.',
        "{name} wanted to say sorry to {pname}.",
        "a fight about",
    ),
    "wish": Errand(
        '{time}, {pname} told {name} about a wishing stone {place}. "Who touches it has one wish," {phe} said. {name} had a wish and did not say what it was.',
        'There {name} touched the stone with closed eyes. When {he} came home, {pname} asked: "What did you wish?" "That we are always friends," said {name}.',
        "{name} wanted to touch the wishing stone.",
        "wishing stone",
    ),
    "wood": Errand(
        "{time}, it was so cold that the windows were white. Old {pname} had no wood for the fire. There was dry wood {place}.",
        "There {name} tied the wood together and pulled it all the way home. Soon a warm fire was burning, and {pname} told stories beside it.",
        "{name} wanted to get wood for the fire.",
        "wood for the fire",
    ),
    "sunrise": Errand(
        '{time}, {name} woke up before everybody else. "The sun rises most beautifully {place}," {pname} had said once. Today {he} wanted to see it.',
        "There {name} sat down, and the sun came up, red and gold. It was even better than {pname} had said. {He} brought {phim} a small stone from there.",
        "{name} wanted to see the sun rise.",
        "The sun rises",
    ),
}

OBSTACLES = {
    "river": Obstacle(
        "But [half way|soon] there was a wide river, and the bridge was gone.",
        (
            "{name} [thought for a while|looked around]. Then {he} pushed a fallen tree over the water and walked across.",
            'A turtle swam by. "Sit on my back," it said, and it carried {name} to the other side.',
        ),
        "A wide river was in the way.",
        "wide river",
    ),
    "fog": Obstacle(
        "But thick fog came up, and {name} could not see the path.",
        (
            "{He} stood still and listened. Far away a dog was barking, and {he} followed the sound until the fog was gone.",
            "{He} laid small white stones behind {him}, so that {he} never walked in a circle.",
        ),
        "Thick fog was in the way.",
        "fog",
    ),
    "goose": Obstacle(
        'But a [fat|big] goose stood on the path. "Nobody may pass!" it said in a grumpy voice.',
        (
            'Then {name} gave it some {food}. "Oh," said the goose. "Nobody was ever so kind to me." And it stepped aside.',
            "Then {name} told it a funny story. The goose laughed so much that it fell over, and {name} could pass.",
        ),
        "A grumpy goose was in the way.",
        "goose stood",
    ),
    "night": Obstacle(
        "But the way was long, and it became night. [Everything was black|{name} could not see {his} own hands].",
        (
            'Then many little lights came out of the bushes. "We are fireflies," they said. "We will show you the way."',
            "{name} was afraid, but {he} sang a song and walked on, step by step, under the stars.",
        ),
        "It was night, and everything was dark.",
        "became night",
    ),
    "storm": Obstacle(
        "But a storm came. It thundered, and the rain fell like a wall.",
        (
            "{name} crept into a hollow tree and waited there, warm and dry, until the storm was over.",
            'A mole put its head out of the ground. "Come in," it said, and {name} drank hot soup in its little house until the storm was over.',
        ),
        "A storm was in the way.",
        "storm came",
    ),
    "gate": Obstacle(
        "But there was a high gate on the path, and it was locked.",
        (
            "{name} looked under every stone. Under the last one lay a rusty key, and it fitted!",
            "{name} walked along the fence until {he} found a small hole. {He} made {himself} thin and crept through.",
        ),
        "A locked gate was in the way.",
        "high gate",
    ),
    "mud": Obstacle(
        "But the path was wet, and {name} got stuck in deep mud. {He} could not move.",
        (
            "A strong horse came by. {name} held its tail, and with one big pull {he} was free.",
            "{name} lay down flat and pulled {himself} out by a branch. {He} was brown from head to foot, and {he} had to laugh.",
        ),
        "Deep mud was in the way.",
        "deep mud",
    ),
    "roads": Obstacle(
        "But soon the road split in two, and the sign had fallen down. Left or right?",
        (
            "{name} climbed a tall tree. From the top {he} could see the right road.",
            "{name} asked an old woman with a basket. She smiled and showed {him} the right road.",
        ),
        "The road split in two, and the sign had fallen down.",
        "split in two",
    ),
    "snow": Obstacle(
        "But it began to snow. The snow was so deep that {name} could not walk any more.",
        (
            "Then {name} made a sled of old boards and flew down the white hill. What fun that was!",
            "A fox had made a small path. {name} walked in its tracks, one foot after the other.",
        ),
        "Deep snow was in the way.",
        "began to snow",
    ),
    "bird": Obstacle(
        "But on the way {name} heard a thin cry. A little bird had fallen from its nest. {name} could not just walk on.",
        (
            '{He} put the bird back very gently. "Thank you," sang its mother. "I know a shorter way. Follow me!"',
            "{He} climbed up with the bird in one hand. It took a long time, but the bird was safe, and {name} ran the rest of the way.",
        ),
        "A little bird had fallen from its nest.",
        "fallen from its nest",
    ),
    "rocks": Obstacle(
        "But high rocks were in the way. They were as steep as a wall.",
        (
            "{name} made a rope of long grass, threw it over a rock and pulled {himself} up.",
            'A goat was looking down. "Put your feet where I put mine," it said, and so they climbed to the top.',
        ),
        "High rocks were in the way.",
        "high rocks",
    ),
    "bear": Obstacle(
        "But a huge bear was sleeping in the middle of the path. It was snoring.",
        (
            "{name} took off {his} shoes and went past on the tips of {his} toes. The bear only scratched its nose.",
            '"Excuse me," {name} said politely. The bear opened one eye. "At last somebody who asks," it said, and it moved over.',
        ),
        "A sleeping bear was in the way.",
        "huge bear",
    ),
}

LEAVING = (
    "{name} packed some {food}, took the {thing} and set off.",
    "So {name} took the {thing} and some {food} and went on {his} way.",
    '"I am not afraid," said {name}. {He} put some {food} and the {thing} into a bag and left.',
    "{name} did not wait. With the {thing} under {his} arm {he} walked to {there}.",
)
