"""Short stories with named characters, and questions about them.

They are frames of sentences, to be filled by `words.fill`: plots, and journeys of an errand and an obstacle. Every errand
fits every obstacle, so that they make 240 plots, each with two ways past the obstacle.

Fields: `name kind he him his He His` are the hero's, and with a leading `p` the friend's; `thing` is a coloured toy, `toy` the same
without its colour; `home` and `place` are places with their preposition, `there` is `place` without it; `food` is a food.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from workshop.tiny.words import COLOURS, FOODS, PLACES, TIMES, TOYS, TRAITS, Being, a, being, fill

# ruff: noqa: E501  (a frame of a sentence stays on its line, however long)

OPENINGS = (
    "Once upon a time, there was {a_trait} {kind} named {name}. {He} lived {home}[| with {his} family| in a small house].",
    "Once upon a time, {a_trait} {kind} [named|called] {name} lived {home}. {name} was always {trait}[|, even on bad days].",
    "Once upon a time, {who} lived {home}. Everyone said that {name} was very {trait}.",
    "Once there was {a_trait} {kind} named {name}. {name} lived {home} and loved {food}.",
    "{name} was {a_trait} {kind} who lived {home}. {He} liked [{food}|to eat {food}|the smell of {food}] more than anything.",
    "In a [small|little|cosy] house {home} lived {a_trait} {kind} called {name}.",
    "There was once {a_kind} who lived {home}. {His} name was {name}, and {he} was very {trait}.",
    "A long time ago, {a_trait} {kind} named {name} lived {home}.",
)

BELONGINGS = (
    "{name} had {a_thing}. {He} [took it everywhere|played with it every day|was very proud of it|kept it [under {his} bed|near the door]].",
    "{His} favourite thing was {a_thing}.",
    "The thing that {name} loved most was {a_thing}. It was a present from {his} [mother|father|grandmother|uncle].",
    "{name} [always carried|never went out without] {a_thing}.",
    "For {his} birthday, {name} got {a_thing}. {He} [thanked everyone|was so happy that {he} danced|smiled all day].",
)

PLOTS = {
    "lost": (
        "{time}, {name} could not find the {toy}. {He} looked [under the bed|behind the door|in every corner], but it was not there.",
        '"Where is my {thing}?" [cried|asked] {name}. {He} [felt very sad|began to cry|did not know what to do].',
        "{pname}, {a_pkind} who lived nearby, [heard {him}|came to help|saw the tears]. \"[Don't worry|Do not be sad], {name}. "
        'We will look for it together," said {pname}.',
        "They [walked to {there}|looked {place}|went to {there} and looked everywhere]. [At first they found nothing.|They looked for a long time.|]",
        "Then {pname} saw something {colour} [behind a stone|under a bush|in the tall grass|next to a tree]. It was the {toy}!",
        '"[Thank you|Oh, thank you], {pname}!" said {name}. {He} [hugged {phim}|jumped with joy|laughed and laughed].',
        "From then on, {name} [always put the {toy} back in its place|took better care of the {toy}]."),
    "lonely": (
        "But {name} had no friends {home}, and {he} often felt lonely.",
        "{time}, {name} [took the {toy} and went|walked] to {there}. There {he} saw {a_pkind} [sitting alone|who looked sad|with a kind face].",
        '"[Hello|Hi], my name is {name}. What is your name?" asked {name}.',
        '"I am {pname}," said the {pkind}. "I [just moved here|am new here]. I [do not know anyone|have no friends yet]."',
        '"[I can be your friend|Then let us be friends|Would you like to play with me]," said {name}, and {he} [showed|gave] {pname} the {thing}.',
        "They played {place} until [the sun went down|it was dark|dinner time]. They [laughed a lot|told each other stories|shared some {food}].",
        "After that day, {name} was never lonely again."),
    "dark": (
        "There was one thing that {name} did not like. {He} was afraid of [the dark|loud storms|deep water|high places].",
        "{time}, {name} and {his} friend {pname} went to {there}. On the way, {name} dropped the {toy} into [a deep hole|a dark cave|a hollow tree].",
        '"I am too afraid to get it," said {name}. {His} [legs|hands] were shaking.',
        '"[You can do it|Be brave|I will hold your hand]," said {pname}. "I am right here with you."',
        "{name} took a deep breath. {He} counted to [three|five|ten] and [reached in|went in]. {He} felt something [smooth|soft|cold]. It was the {toy}!",
        '"I did it!" shouted {name}. {pname} [clapped|cheered|smiled]. "I knew that you could," {phe} said.',
        "That night, {name} was not afraid [at all|any more]."),
    "share": (
        "{time}, {name} had a basket of {food}. {He} wanted to eat [all of it|everything] alone.",
        'Then {pwho} came by. "I am so hungry," said {pname}. "[May I have some {food}|Can you share the {food} with me], please?"',
        '{name} [thought for a moment|looked at the basket|did not know what to say]. "[No|Sorry], this is all mine," {he} said, and {pname} walked away with a sad face.',
        "But the {food} did not taste good any more. {name} felt [sorry|bad|ashamed].",
        '{He} took the basket and ran to {there}. There sat {pname}, all alone. "I am sorry. Let us share," said {name}.',
        "So they sat down {place} and ate the {food} together. [It was a wonderful meal.|Nothing had ever tasted so good.]",
        "Then {name} let {pname} play with the {thing} too. {name} learned that [sharing is fun|good things are better when you share them]."),
    "build": (
        "{time}, {name} wanted to build a [little house|raft|tree house|tower] {place}. {His} friend {pname} came to help.",
        "They [collected|carried] [wood|stones|sticks] and worked all [morning|day]. But then the wind blew, and everything fell down.",
        '"[It is no use|I give up|We will never do it]," said {name}. {He} sat down [and sighed|with tears in {his} eyes].',
        '"[Let us try again|We should not give up|We only need a better plan]," said {pname}. "This time we will go slowly."',
        "So they tried again. {name} put the {thing} on top [for good luck|so that everyone could see it].",
        "When they were done, they [looked at their work|sat inside|stood back]. It was [strong and beautiful|the best one {place}|not perfect, but it was theirs].",
        '"We did it [together|because we did not give up]," said {name}, and {pname} [nodded|smiled|agreed].'),
    "stuck": (
        "{time}, {name} was walking {place} with the {toy}. Suddenly {he} heard a [small voice|cry|strange sound].",
        '"Help! Help!" somebody called. It was {pname}, {a_young_pkind}. {His_p} foot was stuck [between two stones|in a fence|under a branch].',
        '"[Stay calm|Do not move|Hold on]," said {name}. "I will help you."',
        "{name} pulled and pulled, but [nothing happened|{he} was not strong enough]. Then {he} had an idea. {He} used the {thing} to push [the heavy thing|it] away.",
        '{pname} was free! "You are [so clever|my hero|very kind]," {phe} said. "How can I thank you?"',
        '"You don\'t have to," said {name}. "[Friends help each other|I am just happy that you are safe]."',
        "The next day, {pname} came with a basket of {food} for {name}. They [became|were] best friends [from that day on|for ever]."),
    "party": (
        "{time}, {name} woke up and remembered that it was {his} birthday. But nobody said anything.",
        '{name} went to see {pname}. "[Sorry, I have no time|I am very busy today]," said {pname}, and {phe} [closed the door|hurried away].',
        '{name} took the {thing} and walked to {there}. "[Everyone has forgotten me|Nobody remembers my birthday]," {he} said [sadly|in a small voice].',
        "In the evening, {name} came home. The house was dark and quiet. {He} opened the door slowly.",
        '"Surprise!" shouted {pname} and all the others. There was [a big cake|a table full of {food}|music], and there were [balloons|flowers|lights] everywhere.',
        '"We did not forget you," said {pname}. "We [only wanted to surprise you|needed time to get everything ready]."',
        "{name} [was so happy that {he} cried|laughed and danced all night]. It was the best birthday ever."),
    "broken": (
        "{time}, {name} was playing [in the house|near the table]. {He} was not careful, and [a vase|a cup|a window] broke. It belonged to {his} friend {pname}.",
        '"[Oh no|Oh dear]! What shall I do?" thought {name}. {He} wanted to [hide the pieces|run away|say nothing].',
        "{name} went to {there} and thought about it for a long time. {He} held the {thing} and felt [bad|worse and worse].",
        'In the end, {he} went to {pname}. "I broke it," said {name}. "I am very sorry."',
        '{pname} was quiet for a moment. Then {phe} smiled. "[Thank you for telling me the truth|It was brave of you to tell me]," {phe} said.',
        "{name} helped {pname} to clean up, and {he} brought {phim} some {food}.",
        "{name} felt much better. {He} knew that [it is always best to tell the truth|the truth makes a heart light]."),
    "map": (
        "{time}, {name} found an old map [in a book|under the floor|in a bottle]. It showed the way to a treasure {place}.",
        '{He} ran to {pname}. "Look! Let us find it," said {name}. {pname} was [excited|curious] too.',
        "They packed some {food} and the {thing}, and they [started to walk|went on their way].",
        "They walked to {there} and [turned left at a big rock|crossed a small stream|climbed over a wall]. There they began to dig.",
        "[They dug and dug.|It was hard work.] After [an hour|a long time], they found a [wooden|small|heavy] box. {pname} opened it.",
        'Inside was [a letter|a note]. It said: "[The real treasure is a good friend|Who finds this has a friend to share it with]."',
        "{name} looked at {pname}, and they both [laughed|smiled]. [It was true.|They sat down and ate the {food}.]"),
    "race": (
        "{time}, there was a race {place}. {name} wanted to win, and so did {pwho}.",
        '"I am the fastest," said {pname}. "You will never win."',
        '{name} said nothing. {He} [put the {toy} down|tied {his} scarf|looked at the finish line] and waited. "One, two, three, go!" [somebody|an old owl] called.',
        "{pname} ran [very fast|like the wind]. But then {phe} [fell over a root|slipped in the mud|stepped on a sharp stone] and could not get up.",
        "{name} could have won. But {he} stopped and [helped {pname} up|held out {his} hand]. They walked to the finish together.",
        '"Why did you stop?" asked {pname}. "[A friend is better than a prize|Winning is not everything]," said {name}.',
        "Everyone [clapped|cheered] for {name}, and {pname} gave {him} a basket of {food}."),
    "garden": (
        "{time}, {name} found a [tiny|small|strange] seed {place}. {He} put it into the ground at home.",
        'Every day, {name} gave it water. {He} waited [a week|many days], but nothing grew. "[Is it dead|When will it grow]?" {he} asked {his} friend {pname}.',
        '"Good things take time," said {pname}. "[Be patient|Wait a little longer]."',
        "So {name} waited. {He} played with the {thing} and [sang to the seed|looked at the ground every morning].",
        "Then there was a little green leaf! Soon it was [a big plant|taller than {name}], and it had {colour} flowers.",
        '"[How beautiful|It is wonderful]!" said {pname}. {name} gave {phim} [one of the flowers|the first flower].',
        "They sat next to the plant and ate {food}. {name} was glad that {he} had been patient."),
    "rain": (
        "{time}, {name} and {his} friend {pname} went to {there} with the {thing}. They wanted to [play|have a picnic] there.",
        'But soon the sky [turned grey|became dark], and it began to rain. "[Our day is over|Now we cannot play]," said {pname}.',
        '"[Wait|Look]," said {name}. "The rain can be fun too." {He} jumped into a puddle. Splash!',
        "{pname} laughed and jumped too. They [danced in the rain|made little boats of leaves|sang a song about the rain].",
        "When the rain stopped, there was a rainbow over {there}. It was [the most beautiful thing {place}|bright and wide].",
        "They went home [wet and happy|with muddy feet], and {pname}'s mother gave them [{food}|tea and {food}|warm milk and {food}].",
        '"That was the best rain of my life," said {name}.'),
}  # fmt: skip

MARKS = {
    "lost": "could not find the", "lonely": "had no friends", "dark": "There was one thing that",
    "share": "wanted to eat", "build": "wanted to build", "stuck": "foot was stuck",
    "party": "But nobody said anything", "broken": "was not careful", "map": "an old map", "race": "there was a race",
    "garden": "seed", "rain": "jumped into a puddle",
}  # fmt: skip
"""Words that only the stories of a plot have."""

ENDINGS = (
    ("happy", "That night, {name} went to bed [with a smile|happy]."), ("happy", "{name} was very happy."),
    ("happy", "And they lived happily ever after."), ("proud", "{name} felt very proud."),
    ("proud", "{name} was proud of what {he} had done."), ("tired but happy", "{name} went home, tired but happy."),
    ("thankful", "{name} was thankful to have a friend like {pname}."),
    ("thankful", "{name} looked at {pname} and felt thankful."),
)  # fmt: skip


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
        "{name} wanted to find a silver flower.", "silver flower"),
    "letter": Errand(
        "{time}, {name} found a letter at the door. It was for {pname}, who lived {place}. [The letter looked important|On it stood the word: Hurry].",
        'At last {name} gave the letter to {pname}. It was from {phis} brother. "He is coming home!" {phe} shouted, and they danced around the room.',
        "{name} wanted to bring a letter to {pname}.", "found a letter at the door"),
    "honey": Errand(
        "{time}, {name} wanted to bake a cake for {pname}. But there was no honey in the house. The best honey came from the bees {place}.",
        'At last {name} got a pot of honey from the bees. The cake was sweet and golden. "It is the best cake of my life," said {pname}.',
        "{name} wanted to get honey for a cake.", "there was no honey"),
    "lamb": Errand(
        '{time}, {pname} was in tears. "My little lamb has run away!" {phe} cried. Somebody had seen it {place}. "I will bring it back," said {name}.',
        "There was the lamb, [alone and cold|between two bushes]! {name} carried it home in {his} arms. {pname} kissed the lamb and thanked {name}.",
        "{name} wanted to bring back a lamb.", "little lamb"),
    "star": Errand(
        '{time}, a small star fell from the sky in front of {name}. "I am lost," said the star. "My sisters are waiting {place}." {name} told only {pname} about it.',
        "There {name} held the star up high. Its sisters came down and took it home. Every night the star winks at {name} and {pname}.",
        "{name} wanted to bring a star to its sisters.", "small star fell"),
    "song": Errand(
        "{time}, {name} heard a song in the wind. It was so beautiful that {he} could not forget it. The song came from {there}.",
        'There sat {pname} and sang. "Please teach me your song," said {name}. They sang it together until the moon came up, and they became friends.',
        "{name} wanted to find out who was singing.", "song in the wind"),
    "egg": Errand(
        '{time}, {name} found a big blue egg in the grass. "It belongs to a bird {place}," said {his} friend {pname}. "Its mother must be worried."',
        "There was a nest with a sad bird beside it. {name} laid the egg into it, and a little head came out! The bird sang with joy. {name} told {pname} everything.",
        "{name} wanted to bring an egg back to its mother.", "big blue egg"),
    "well": Errand(
        '{time}, the well was empty. Nobody had water. "There is a spring {place}, but it is closed by a stone," said old {pname}.',
        "There {name} rolled the stone away, and clear water came out. Soon the well was full again. {pname} drank the first cup and thanked {name}.",
        "{name} wanted to open a spring.", "the well was empty"),
    "bell": Errand(
        "{time}, the golden bell of the school was gone. {pname} was very sad, because {phe} rang it every morning. A bird had carried it off to {there}.",
        "The bell lay in an empty nest. {name} took it and brought it back. The next morning {pname} rang it, louder than ever before.",
        "{name} wanted to bring back the golden bell.", "golden bell"),
    "visit": Errand(
        '{time}, {name} got a card from {pname}. "It is my birthday. Please come to my party {place}," it said. {name} did not want to be late.',
        '"There you are!" said {pname}. "Now the party can begin." They ate, they played, and {pname} said that {name} was the best present of all.',
        "{name} wanted to go to the party of {pname}.", "a card from"),
    "contest": Errand(
        '{time}, there was a painting contest {place}. {name} had painted [a big tree|the sea at night], but {he} was shy. "Go there," said {his} friend {pname}. "Your picture is wonderful."',
        "There {name} showed the picture with red cheeks. Everybody was quiet, then everybody clapped. {pname} was so proud that {phe} put the picture on the wall.",
        "{name} wanted to show a picture at a contest.", "contest"),
    "flower": Errand(
        '{time}, {pname} told {name} about the moon flower. "It grows {place}, and it opens only one night in the year," said {pname}. That night was today.',
        "Just in time {name} sat down beside the flower. It opened slowly and shone like a lamp. {name} never forgot it, and drew it for {pname}.",
        "{name} wanted to see the moon flower.", "moon flower"),
    "lamp": Errand(
        '{time}, the light of the tower {place} went out. "Without it the ships cannot find their way," said {pname}. "Somebody must light it again."',
        "There {name} climbed a hundred steps and lit the tower again. Far away, {pname} saw the light and waved. All the ships came home.",
        "{name} wanted to light the tower again.", "tower"),
    "book": Errand(
        '{time}, {name} read a story to {pname}, but the last page was missing. "How does it end?" asked {pname}. The man who wrote it lived {place}.',
        'There an old man opened the door. He laughed and wrote the last page again. That evening {name} read it to {pname}, and both said: "What a good ending!"',
        "{name} wanted to get the last page of a story.", "last page was missing"),
    "missing": Errand(
        "{time}, {pname} did not come home for dinner. Everyone was worried. {name} knew that {pname} liked to play {place}.",
        'There was {pname}, with a hurt foot! "I knew that you would find me," {phe} said. {name} helped {phim} to walk, and they were home before bed time.',
        "{name} wanted to find {pname}.", "come home for dinner"),
    "wind": Errand(
        '{time}, a strong wind took the {thing} and carried it away. "It flew to {there}!" called {pname}. {name} ran after it at once.',
        "There was the {thing}, high up in a tree. {name} climbed up and got it. {pname} was waiting at home and cheered when {he} came back.",
        "{name} wanted to get the {thing} back.", "strong wind took"),
    "sorry": Errand(
        "{time}, {name} and {pname} had a fight about [a silly thing|a game]. {pname} went home to {there}. Soon {name} felt bad and wanted to say sorry.",
        '"I am sorry," said {name} at the door. "I am sorry too," said {pname}. They shook hands, and the fight was forgotten.',
        "{name} wanted to say sorry to {pname}.", "a fight about"),
    "wish": Errand(
        '{time}, {pname} told {name} about a wishing stone {place}. "Who touches it has one wish," {phe} said. {name} had a wish and did not say what it was.',
        'There {name} touched the stone with closed eyes. When {he} came home, {pname} asked: "What did you wish?" "That we are always friends," said {name}.',
        "{name} wanted to touch the wishing stone.", "wishing stone"),
    "wood": Errand(
        "{time}, it was so cold that the windows were white. Old {pname} had no wood for the fire. There was dry wood {place}.",
        "There {name} tied the wood together and pulled it all the way home. Soon a warm fire was burning, and {pname} told stories beside it.",
        "{name} wanted to get wood for the fire.", "wood for the fire"),
    "sunrise": Errand(
        '{time}, {name} woke up before everybody else. "The sun rises most beautifully {place}," {pname} had said once. Today {he} wanted to see it.',
        "There {name} sat down, and the sun came up, red and gold. It was even better than {pname} had said. {He} brought {phim} a small stone from there.",
        "{name} wanted to see the sun rise.", "The sun rises"),
}  # fmt: skip

OBSTACLES = {
    "river": Obstacle(
        "But [half way|soon] there was a wide river, and the bridge was gone.", (
            "{name} [thought for a while|looked around]. Then {he} pushed a fallen tree over the water and walked across.",
            'A turtle swam by. "Sit on my back," it said, and it carried {name} to the other side.'),
        "A wide river was in the way.", "wide river"),
    "fog": Obstacle(
        "But thick fog came up, and {name} could not see the path.", (
            "{He} stood still and listened. Far away a dog was barking, and {he} followed the sound until the fog was gone.",
            "{He} laid small white stones behind {him}, so that {he} never walked in a circle."),
        "Thick fog was in the way.", "fog"),
    "goose": Obstacle(
        'But a [fat|big] goose stood on the path. "Nobody may pass!" it said in a grumpy voice.', (
            'Then {name} gave it some {food}. "Oh," said the goose. "Nobody was ever so kind to me." And it stepped aside.',
            "Then {name} told it a funny story. The goose laughed so much that it fell over, and {name} could pass."),
        "A grumpy goose was in the way.", "goose stood"),
    "night": Obstacle(
        "But the way was long, and it became night. [Everything was black|{name} could not see {his} own hands].", (
            'Then many little lights came out of the bushes. "We are fireflies," they said. "We will show you the way."',
            "{name} was afraid, but {he} sang a song and walked on, step by step, under the stars."),
        "It was night, and everything was dark.", "became night"),
    "storm": Obstacle(
        "But a storm came. It thundered, and the rain fell like a wall.", (
            "{name} crept into a hollow tree and waited there, warm and dry, until the storm was over.",
            'A mole put its head out of the ground. "Come in," it said, and {name} drank hot soup in its little house until the storm was over.'),
        "A storm was in the way.", "storm came"),
    "gate": Obstacle(
        "But there was a high gate on the path, and it was locked.", (
            "{name} looked under every stone. Under the last one lay a rusty key, and it fitted!",
            "{name} walked along the fence until {he} found a small hole. {He} made {himself} thin and crept through."),
        "A locked gate was in the way.", "high gate"),
    "mud": Obstacle(
        "But the path was wet, and {name} got stuck in deep mud. {He} could not move.", (
            "A strong horse came by. {name} held its tail, and with one big pull {he} was free.",
            "{name} lay down flat and pulled {himself} out by a branch. {He} was brown from head to foot, and {he} had to laugh."),
        "Deep mud was in the way.", "deep mud"),
    "roads": Obstacle(
        "But soon the road split in two, and the sign had fallen down. Left or right?", (
            "{name} climbed a tall tree. From the top {he} could see the right road.",
            "{name} asked an old woman with a basket. She smiled and showed {him} the right road."),
        "The road split in two, and the sign had fallen down.", "split in two"),
    "snow": Obstacle(
        "But it began to snow. The snow was so deep that {name} could not walk any more.", (
            "Then {name} made a sled of old boards and flew down the white hill. What fun that was!",
            "A fox had made a small path. {name} walked in its tracks, one foot after the other."),
        "Deep snow was in the way.", "began to snow"),
    "bird": Obstacle(
        "But on the way {name} heard a thin cry. A little bird had fallen from its nest. {name} could not just walk on.", (
            '{He} put the bird back very gently. "Thank you," sang its mother. "I know a shorter way. Follow me!"',
            "{He} climbed up with the bird in one hand. It took a long time, but the bird was safe, and {name} ran the rest of the way."),
        "A little bird had fallen from its nest.", "fallen from its nest"),
    "rocks": Obstacle(
        "But high rocks were in the way. They were as steep as a wall.", (
            "{name} made a rope of long grass, threw it over a rock and pulled {himself} up.",
            'A goat was looking down. "Put your feet where I put mine," it said, and so they climbed to the top.'),
        "High rocks were in the way.", "high rocks"),
    "bear": Obstacle(
        "But a huge bear was sleeping in the middle of the path. It was snoring.", (
            "{name} took off {his} shoes and went past on the tips of {his} toes. The bear only scratched its nose.",
            '"Excuse me," {name} said politely. The bear opened one eye. "At last somebody who asks," it said, and it moved over.'),
        "A sleeping bear was in the way.", "huge bear"),
}  # fmt: skip

LEAVING = (
    "{name} packed some {food}, took the {thing} and set off.",
    "So {name} took the {thing} and some {food} and went on {his} way.",
    '"I am not afraid," said {name}. {He} put some {food} and the {thing} into a bag and left.',
    "{name} did not wait. With the {thing} under {his} arm {he} walked to {there}.",
)


QUESTS = 0.85  # share of stories that are an errand and an obstacle


@dataclass(frozen=True, slots=True)
class Story:
    """A story's text, its characters and things, and questions about it with their answers."""

    text: str
    hero: Being
    friend: Being
    thing: str
    place: str
    plot: str
    questions: tuple[tuple[str, str], ...]


def frames(rng: Random) -> tuple[str, list[list[str]], tuple[tuple[str, str], ...]]:
    """Return a plot's name, the frames of its two paragraphs, and questions that only this plot answers."""
    if rng.random() >= QUESTS:
        plot = rng.choice(sorted(PLOTS))
        half = rng.choice((3, 4))
        return plot, [list(PLOTS[plot][:half]), list(PLOTS[plot][half:])], ()
    errand, obstacle, way = rng.choice(sorted(ERRANDS)), rng.choice(sorted(OBSTACLES)), rng.choice((0, 1))
    aim, trouble = ERRANDS[errand], OBSTACLES[obstacle]
    questions = (
        ("[Why did {name} leave home|What did {name} want to do|Why did {name} go to {there}]?", aim.why),
        ("[What was in the way|What was the problem on the way|What happened on the way]?", trouble.what),
    )
    parts = [[aim.start, rng.choice(LEAVING)], [trouble.trouble, trouble.ways[way], aim.end]]
    return f"{errand} {obstacle} {way}", parts, questions


def plot_of(text: str) -> str:
    """Return the errand and the obstacle, or the plot, that a story's typical words show; "" if it has none."""
    names = [name for name, errand in ERRANDS.items() if errand.mark in text]
    names += [name for name, obstacle in OBSTACLES.items() if obstacle.mark in text]
    return " ".join(names or [name for name, mark in MARKS.items() if mark in text][:1])


def fitting(rng: Random) -> tuple[str, list[list[str]], tuple[tuple[str, str], ...], Being, Being]:
    """Return a plot, its hero and a friend; neither is an animal that the plot has already."""
    hero = being(rng)
    while True:
        plot, parts, questions = frames(rng)
        words = set(re.findall(r"\w+", str(parts)))
        friend = being(rng, exclude=(hero.name, hero.kind))
        if hero.kind not in words and friend.kind not in words:
            return plot, parts, questions, hero, friend


def story(rng: Random) -> Story:
    plot, parts, special, hero, friend = fitting(rng)
    words = set(re.findall(r"\w+", str(parts)))
    colour, food = rng.choice(COLOURS), rng.choice(FOODS)
    toy = rng.choice([toy for toy in TOYS if toy not in words and toy not in (hero.kind, friend.kind)])
    (home_in, home), (place_in, place) = rng.sample(PLACES, 2)
    trait = rng.choice(TRAITS)
    thing = f"{colour} {toy}"
    fields = {
        **hero.words(), **friend.words("p"), "His_p": friend.words()["His"], "a_kind": a(hero.kind),
        "a_pkind": a(friend.kind), "a_young_pkind": f"a young {friend.kind}", "trait": trait, "a_trait": a(trait),
        "thing": thing, "a_thing": a(thing), "toy": toy, "colour": colour, "home": f"{home_in} {home}",
        "place": f"{place_in} {place}", "there": place, "food": food, "time": rng.choice(TIMES),
    }  # fmt: skip
    feeling, ending = rng.choice(ENDINGS)
    first = fill(rng, f"{rng.choice(OPENINGS)} {rng.choice(BELONGINGS)}", **fields)
    middle, after = ([fill(rng, sentence, **fields).strip() for sentence in part] for part in parts)
    last = fill(rng, ending, **fields)
    text = "\n\n".join((first, " ".join(middle), " ".join([*after, last])))
    templates = (
        (
            "[Who was the story about|What is the name of the {kind} in the story|Who is the hero of the story|"
            "Who is the story about|What was the {kind} called]?",
            "The story is about {name}.",
        ),
        ("Where [did|does] {name} live?", "{name} lived {home}."),
        ("What [did|does] {name} have?", "{name} had {a_thing}."),
        ("What colour [was|is] {name}'s {toy}?", "{name}'s {toy} was {colour}."),
        (
            "[Who was {name}'s friend|What was the name of the friend|Who was the friend in the story]?",
            "{name}'s friend was {pname}.",
        ),
        ("[What was {name} like|What kind of {kind} was {name}]?", "{name} was {a_trait} {kind}."),
        ("How did {name} feel at the end?", f"At the end, {{name}} felt {feeling}."),
        *special,
    )
    questions = tuple((fill(rng, question, **fields), answer.format(**fields)) for question, answer in templates)
    return Story(" ".join(text.split(" ")), hero, friend, thing, place, plot, questions)


WANTED = (
    "about {a_kind}", "about {a_kind}", "about {a_kind}", "about {a_kind} named {name}", "about {a_kind} called {name}",
    "about {who}", "about {name}", "about {a_thing}", "about {a_kind} and {a_thing}", "about {name} and {a_thing}",
    "about {a_kind} who lives {home}", "about {name}, who lives {home}", "about {name} and {pname}",
    "with {name} and {pname}", "with {a_kind} in it", "that happens {place}", "that happens {place}, with {a_kind}",
    "where {name} goes to {there}",
)  # fmt: skip
REQUESTS = (
    "[Tell|Please tell|Write] me a [short |little |bedtime |new |]story {wanted}[|.|, please.]",
    "[Tell me|Write|Write me|Please write] a [short |little |bedtime |]story {wanted}.",
    "[Can|Could] you tell me a [|short ]story {wanted}?",
    "[I would like|I want] a story {wanted}, please.",
    "[A|Another] story {wanted}, please.",
)
PLAIN = (
    "[Tell|Write] me a [|bedtime |short ]story[, please|]. ",
    "[Tell|Write|Please tell me|Please write] a story.",
    "[Once upon a time|Begin with: Once upon a time]",
    "[Can you tell me|I would like] a story[?|, please.]",
)


def request(rng: Random, story: Story) -> str:
    """Return a user's request for this story that names some of its contents; one in eight asks for any story."""
    if rng.random() < 0.12:
        return fill(rng, rng.choice(PLAIN)).strip()
    place = next(f"{preposition} {place}" for preposition, place in PLACES if place == story.place)
    lived = next(answer for question, answer in story.questions if " live?" in question)
    fields = {
        **story.hero.words(), **story.friend.words("p"), "a_kind": a(story.hero.kind),
        "a_thing": a(story.thing) if rng.random() < 0.7 else a(story.thing.split()[-1]), "place": place,
        "there": story.place, "home": lived.split(" lived ")[1].removesuffix("."),
    }  # fmt: skip
    return fill(rng, rng.choice(REQUESTS).replace("{wanted}", rng.choice(WANTED)), **fields)


def story_on_request(rng: Random) -> tuple[str, str]:
    tale = story(rng)
    return request(rng, tale), tale.text
