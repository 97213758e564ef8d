"""Plots: sentence frames of stories, to be filled by `words.fill`.

Fields: `name kind he him his He His` are the hero's, and with a leading `p` the friend's; `thing` is a coloured toy, `toy` the same
without its colour; `home` and `place` are places with their preposition, `there` is `place` without it; `food` is a food.
"""

from __future__ import annotations

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
        "From then on, {name} [always put the {toy} back in its place|took better care of the {toy}].",
    ),
    "lonely": (
        "But {name} had no friends {home}, and {he} often felt lonely.",
        "{time}, {name} [took the {toy} and went|walked] to {there}. There {he} saw {a_pkind} [sitting alone|who looked sad|with a kind face].",
        '"[Hello|Hi], my name is {name}. What is your name?" asked {name}.',
        '"I am {pname}," said the {pkind}. "I [just moved here|am new here]. I [do not know anyone|have no friends yet]."',
        '"[I can be your friend|Then let us be friends|Would you like to play with me]," said {name}, and {he} [showed|gave] {pname} the {thing}.',
        "They played {place} until [the sun went down|it was dark|dinner time]. They [laughed a lot|told each other stories|shared some {food}].",
        "After that day, {name} was never lonely again.",
    ),
    "dark": (
        "There was one thing that {name} did not like. {He} was afraid of [the dark|loud storms|deep water|high places].",
        "{time}, {name} and {his} friend {pname} went to {there}. On the way, {name} dropped the {toy} into [a deep hole|a dark cave|a hollow tree].",
        '"I am too afraid to get it," said {name}. {His} [legs|hands] were shaking.',
        '"[You can do it|Be brave|I will hold your hand]," said {pname}. "I am right here with you."',
        "{name} took a deep breath. {He} counted to [three|five|ten] and [reached in|went in]. {He} felt something [smooth|soft|cold]. It was the {toy}!",
        '"I did it!" shouted {name}. {pname} [clapped|cheered|smiled]. "I knew that you could," {phe} said.',
        "That night, {name} was not afraid [at all|any more].",
    ),
    "share": (
        "{time}, {name} had a basket of {food}. {He} wanted to eat [all of it|everything] alone.",
        'Then {pwho} came by. "I am so hungry," said {pname}. "[May I have some {food}|Can you share the {food} with me], please?"',
        '{name} [thought for a moment|looked at the basket|did not know what to say]. "[No|Sorry], this is all mine," {he} said, and {pname} walked away with a sad face.',
        "But the {food} did not taste good any more. {name} felt [sorry|bad|ashamed].",
        '{He} took the basket and ran to {there}. There sat {pname}, all alone. "I am sorry. Let us share," said {name}.',
        "So they sat down {place} and ate the {food} together. [It was a wonderful meal.|Nothing had ever tasted so good.]",
        "Then {name} let {pname} play with the {thing} too. {name} learned that [sharing is fun|good things are better when you share them].",
    ),
    "build": (
        "{time}, {name} wanted to build a [little house|raft|tree house|tower] {place}. {His} friend {pname} came to help.",
        "They [collected|carried] [wood|stones|sticks] and worked all [morning|day]. But then the wind blew, and everything fell down.",
        '"[It is no use|I give up|We will never do it]," said {name}. {He} sat down [and sighed|with tears in {his} eyes].',
        '"[Let us try again|We should not give up|We only need a better plan]," said {pname}. "This time we will go slowly."',
        "So they tried again. {name} put the {thing} on top [for good luck|so that everyone could see it].",
        "When they were done, they [looked at their work|sat inside|stood back]. It was [strong and beautiful|the best one {place}|not perfect, but it was theirs].",
        '"We did it [together|because we did not give up]," said {name}, and {pname} [nodded|smiled|agreed].',
    ),
    "stuck": (
        "{time}, {name} was walking {place} with the {toy}. Suddenly {he} heard a [small voice|cry|strange sound].",
        '"Help! Help!" somebody called. It was {pname}, {a_young_pkind}. {His_p} foot was stuck [between two stones|in a fence|under a branch].',
        '"[Stay calm|Do not move|Hold on]," said {name}. "I will help you."',
        "{name} pulled and pulled, but [nothing happened|{he} was not strong enough]. Then {he} had an idea. {He} used the {thing} to push [the heavy thing|it] away.",
        '{pname} was free! "You are [so clever|my hero|very kind]," {phe} said. "How can I thank you?"',
        '"You don\'t have to," said {name}. "[Friends help each other|I am just happy that you are safe]."',
        "The next day, {pname} came with a basket of {food} for {name}. They [became|were] best friends [from that day on|for ever].",
    ),
    "party": (
        "{time}, {name} woke up and remembered that it was {his} birthday. But nobody said anything.",
        '{name} went to see {pname}. "[Sorry, I have no time|I am very busy today]," said {pname}, and {phe} [closed the door|hurried away].',
        '{name} took the {thing} and walked to {there}. "[Everyone has forgotten me|Nobody remembers my birthday]," {he} said [sadly|in a small voice].',
        "In the evening, {name} came home. The house was dark and quiet. {He} opened the door slowly.",
        '"Surprise!" shouted {pname} and all the others. There was [a big cake|a table full of {food}|music], and there were [balloons|flowers|lights] everywhere.',
        '"We did not forget you," said {pname}. "We [only wanted to surprise you|needed time to get everything ready]."',
        "{name} [was so happy that {he} cried|laughed and danced all night]. It was the best birthday ever.",
    ),
    "broken": (
        "{time}, {name} was playing [in the house|near the table]. {He} was not careful, and [a vase|a cup|a window] broke. It belonged to {his} friend {pname}.",
        '"[Oh no|Oh dear]! What shall I do?" thought {name}. {He} wanted to [hide the pieces|run away|say nothing].',
        "{name} went to {there} and thought about it for a long time. {He} held the {thing} and felt [bad|worse and worse].",
        'In the end, {he} went to {pname}. "I broke it," said {name}. "I am very sorry."',
        '{pname} was quiet for a moment. Then {phe} smiled. "[Thank you for telling me the truth|It was brave of you to tell me]," {phe} said.',
        "{name} helped {pname} to clean up, and {he} brought {phim} some {food}.",
        "{name} felt much better. {He} knew that [it is always best to tell the truth|the truth makes a heart light].",
    ),
    "map": (
        "{time}, {name} found an old map [in a book|under the floor|in a bottle]. It showed the way to a treasure {place}.",
        '{He} ran to {pname}. "Look! Let us find it," said {name}. {pname} was [excited|curious] too.',
        "They packed some {food} and the {thing}, and they [started to walk|went on their way].",
        "They walked to {there} and [turned left at a big rock|crossed a small stream|climbed over a wall]. There they began to dig.",
        "[They dug and dug.|It was hard work.] After [an hour|a long time], they found a [wooden|small|heavy] box. {pname} opened it.",
        'Inside was [a letter|a note]. It said: "[The real treasure is a good friend|Who finds this has a friend to share it with]."',
        "{name} looked at {pname}, and they both [laughed|smiled]. [It was true.|They sat down and ate the {food}.]",
    ),
    "race": (
        "{time}, there was a race {place}. {name} wanted to win, and so did {pwho}.",
        '"I am the fastest," said {pname}. "You will never win."',
        '{name} said nothing. {He} [put the {toy} down|tied {his} scarf|looked at the finish line] and waited. "One, two, three, go!" [somebody|an old owl] called.',
        "{pname} ran [very fast|like the wind]. But then {phe} [fell over a root|slipped in the mud|stepped on a sharp stone] and could not get up.",
        "{name} could have won. But {he} stopped and [helped {pname} up|held out {his} hand]. They walked to the finish together.",
        '"Why did you stop?" asked {pname}. "[A friend is better than a prize|Winning is not everything]," said {name}.',
        "Everyone [clapped|cheered] for {name}, and {pname} gave {him} a basket of {food}.",
    ),
    "garden": (
        "{time}, {name} found a [tiny|small|strange] seed {place}. {He} put it into the ground at home.",
        'Every day, {name} gave it water. {He} waited [a week|many days], but nothing grew. "[Is it dead|When will it grow]?" {he} asked {his} friend {pname}.',
        '"Good things take time," said {pname}. "[Be patient|Wait a little longer]."',
        "So {name} waited. {He} played with the {thing} and [sang to the seed|looked at the ground every morning].",
        "Then there was a little green leaf! Soon it was [a big plant|taller than {name}], and it had {colour} flowers.",
        '"[How beautiful|It is wonderful]!" said {pname}. {name} gave {phim} [one of the flowers|the first flower].',
        "They sat next to the plant and ate {food}. {name} was glad that {he} had been patient.",
    ),
    "rain": (
        "{time}, {name} and {his} friend {pname} went to {there} with the {thing}. They wanted to [play|have a picnic] there.",
        'But soon the sky [turned grey|became dark], and it began to rain. "[Our day is over|Now we cannot play]," said {pname}.',
        '"[Wait|Look]," said {name}. "The rain can be fun too." {He} jumped into a puddle. Splash!',
        "{pname} laughed and jumped too. They [danced in the rain|made little boats of leaves|sang a song about the rain].",
        "When the rain stopped, there was a rainbow over {there}. It was [the most beautiful thing {place}|bright and wide].",
        "They went home [wet and happy|with muddy feet], and {pname}'s mother gave them [{food}|tea and {food}|warm milk and {food}].",
        '"That was the best rain of my life," said {name}.',
    ),
}

MARKS = {
    "lost": "could not find the",
    "lonely": "had no friends",
    "dark": "There was one thing that",
    "share": "wanted to eat",
    "build": "wanted to build",
    "stuck": "foot was stuck",
    "party": "But nobody said anything",
    "broken": "was not careful",
    "map": "an old map",
    "race": "there was a race",
    "garden": "seed",
    "rain": "jumped into a puddle",
}
"""Words that only the stories of a plot have."""

ENDINGS = (
    ("happy", "That night, {name} went to bed [with a smile|happy]."),
    ("happy", "{name} was very happy."),
    ("happy", "And they lived happily ever after."),
    ("proud", "{name} felt very proud."),
    ("proud", "{name} was proud of what {he} had done."),
    ("tired but happy", "{name} went home, tired but happy."),
    ("thankful", "{name} was thankful to have a friend like {pname}."),
    ("thankful", "{name} looked at {pname} and felt thankful."),
)
