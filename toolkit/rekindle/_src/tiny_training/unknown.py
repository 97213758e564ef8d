"""Questions of many kinds outside of the model's world, and the one answer to all of them."""

from __future__ import annotations

from random import Random

from rekindle._src.tiny_training.words import fill, invented_name, split_words

ANSWER = "I don't know that, I am only a tiny model."
SLOTS: dict[str, tuple[str, ...]] = {
    "land": split_words(
        "Mongolia Brazil Canada Kenya India China Russia Greece Turkey Chile Cuba Nepal Iran Poland Finland Portugal "
        "Belgium Hungary Mexico Bolivia Ghana Nigeria Vietnam Thailand Australia Sweden Denmark Iceland Morocco Korea"
    ),
    "town": split_words(
        "Boston Chicago Munich Sydney Mumbai Milan Lyon Geneva Seattle Kyoto Hamburg Leeds Toronto Dallas"
    ),
    "person": (
        "Albert Einstein", "Napoleon", "Mozart", "Shakespeare", "Cleopatra", "Isaac Newton", "Marie Curie", "Picasso",
        "Beethoven", "Julius Caesar", "Gandhi", "Darwin", "Plato", "Columbus", "Galileo", "Bach",
    ),
    "work": (
        "Hamlet", "War and Peace", "the Odyssey", "the Mona Lisa", "Star Wars", "the Bible", "Moby Dick", "Faust",
        "Titanic", "the Magic Flute", "Don Quixote", "Alice in Wonderland", "Dracula", "Frankenstein",
    ),
    "field": (
        "quantum physics", "algebra", "chemistry", "economics", "philosophy", "genetics", "relativity", "calculus",
        "machine learning", "astronomy", "law", "politics", "democracy", "inflation", "evolution", "gravity",
        "photosynthesis", "electricity", "the blockchain", "the stock market", "a black hole", "a neural network",
        "a transformer", "a compiler", "an atom", "a virus", "a vaccine", "DNA", "the internet", "a database",
    ),
    "code": split_words("Python Java JavaScript Rust Haskell SQL Linux Docker Windows Excel Jupyter Git JAX NumPy"),
    "machine": (
        "the telephone", "the car", "the wheel", "the light bulb", "the radio", "the airplane", "paper", "the camera",
        "the computer", "the printing press", "the steam engine", "television",
    ),
    "tongue": split_words("French German Spanish Italian Chinese Japanese Russian Arabic Latin Greek Dutch Polish"),
    "dish": ("pizza", "soup", "bread", "sushi", "an omelette", "pasta", "curry", "ice cream", "tea", "lasagne"),
    "game": split_words("football chess tennis basketball poker golf hockey baseball rugby"),
    "firm": split_words("Google Apple Tesla Amazon Microsoft Toyota Nokia Sony Siemens Boeing"),
}  # fmt: skip
QUESTIONS = (
    "What is the capital of {land}?",
    "[How many people live in|What is the population of] [{land}|{town}]?",
    "Who is the [president|king|queen|prime minister|leader] of {land}?",
    "[What language do they speak|What do people eat] in {land}?",
    "[How far is it|How long does it take] from {town} to {town2}?",
    "[Where is {town}|How big is {land}|Where is {land}|In which country is {town}]?",
    "[Who was|Who is|Tell me about] {person}[?|.]",
    "[When was {person} born|When did {person} die|Where was {person} born|What did {person} do]?",
    "[Who wrote|Who made|What happens in|Do you know] {work}?",
    "What is {field}?",
    "[Explain {field} to me|Explain {field}|Tell me about {field}].",
    "[How does {field} work|Can you explain {field}]?",
    "How do I [learn|use|install|write a program in|sort a list in] {code}?",
    "[Write|Give me] a [program|function|script] in {code}.",
    "[What is {code}|What is new in {code}|Which version of {code} is the best]?",
    "[Who invented {machine}|When was {machine} invented|How does {machine} work]?",
    "[How do you say hello in|How do you say thank you in] {tongue}?",
    "Translate [this|good morning|cat|my name] into {tongue}.",
    "[Do you speak|Can you speak|Can you understand] {tongue}?",
    "How do I [make|cook] {dish}?",
    "[What is the recipe for|How many calories are in] {dish}?",
    "Who won the [last |]{game} [game|world cup|championship]?",
    "[What are the rules of|Who is the best player of] {game}?",
    "[Who founded {firm}|What does {firm} make|What is the price of {firm} shares|Who is the boss of {firm}]?",
    "[What is the weather|Will it rain|How warm is it] [today|tomorrow|in {town}|in {town} today]?",
    "[What time is it|What is the date|Which day is it today|What is in the news today|What year is it]?",
    "What happened in [17{digit}{digit2}|18{digit}{digit2}|19{digit}{digit2}]?",
    "What is the square root of {digit}{digit2}{digit3}?",
    "What is {digit3}{digit2}{digit}{digit2} [times|plus|divided by] {digit2}{digit3}{digit}?",
    "[How old is the universe|How big is the earth|How far away is the moon|How hot is the sun|How deep is the sea]?",
    "[What is the meaning of life|Is there a god|What is love|What is time|What happens after death]?",
    "[What is the tallest mountain|What is the longest river|What is the largest animal|What is the oldest city]?",
    "[Should I buy|What does it cost to buy|Where can I buy] a [house|phone|laptop|new car|bicycle|dress]?",
    "[I have a headache|My back hurts|I cannot sleep]. What should I do?",
    "[Who is|What do you know about|Have you heard of|Tell me about] {invented}[?|.]",
    "[Where is {invented}|What is {invented}|What does {invented} mean]?",
)


def question(rng: Random) -> tuple[str, str]:
    """Return a question that the model cannot answer, and its answer that it does not know."""
    words = {slot: rng.choice(options) for slot, options in SLOTS.items()}
    words |= {digit: str(rng.randint(1, 9)) for digit in ("digit", "digit2", "digit3")}
    town = rng.choice([town for town in SLOTS["town"] if town != words["town"]])
    return fill(rng, rng.choice(QUESTIONS), **words, town2=town, invented=invented_name(rng)), ANSWER
