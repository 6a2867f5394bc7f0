"""The task families of the demo corpus: each function draws one chat whose answers follow from its prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .vocabulary import ANIMALS, COLORS, FRIENDS, ITEMS, MOODS, NAMES, PLACES, TOWNS, TREASURES, WORDS, Town

Chat = list[dict[str, str]]
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def _chat(*turns: str) -> Chat:
    """Return turns as messages, user and assistant in alternation."""
    return [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


def _join(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return ", ".join(words[:-1]) + " and " + words[-1]


def arithmetic(rng: random.Random) -> Chat:
    """Draw a running total in steps, each written out."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    total = rng.randint(5, 20)
    story, steps = [f"{name} has {total} {item}."], [f"{name} starts with {total} {item}."]
    for _ in range(rng.randint(2, 3)):
        amount = rng.randint(1, 9)
        if rng.random() < 0.5 and total > amount:
            story.append(rng.choice((f"{name} gives away {amount}.", f"{name} loses {amount}.")))
            steps.append(f"Take away {amount}: {total} - {amount} = {total - amount}.")
            total -= amount
        else:
            story.append(rng.choice((f"{name} finds {amount} more.", f"{name} buys {amount} more.")))
            steps.append(f"Add {amount}: {total} + {amount} = {total + amount}.")
            total += amount
    question = f"How many {item} does {name} have now?"
    return _chat(" ".join([*story, question]), "\n".join([*steps, f"So {name} now has {total} {item}."]))


def sorting(rng: random.Random) -> Chat:
    """Draw words to be put into alphabetical order, one a line."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    ask = rng.choice(
        ("Sort these words alphabetically: {}.", "Put these words in alphabetical order: {}.", "Please sort: {}.")
    )
    lines = [f"{i}. {word}" for i, word in enumerate(sorted(words), start=1)]
    return _chat(ask.format(", ".join(words)), "Here are the words in alphabetical order:\n" + "\n".join(lines))


def reversing(rng: random.Random) -> Chat:
    """Draw a list of words to be read backwards."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    ask = rng.choice(
        ("Reverse this list: {}.", "Say these words backwards, last one first: {}.", "Write this list in reverse: {}.")
    )
    count = NUMBER_WORDS[len(words)]
    answer = f"The list has {count} words: {', '.join(words)}. In reverse order: {', '.join(reversed(words))}."
    return _chat(ask.format(", ".join(words)), answer)


UNITS = (
    ("kilometers", "meters", 1000), ("meters", "centimeters", 100), ("centimeters", "millimeters", 10),
    ("kilograms", "grams", 1000), ("liters", "milliliters", 1000), ("euros", "cents", 100), ("weeks", "days", 7),
    ("pairs", "pieces", 2), ("decades", "years", 10), ("centuries", "years", 100), ("yards", "feet", 3),
)  # fmt: skip


def conversion(rng: random.Random) -> Chat:
    """Draw a unit conversion: the rule, the product, the answer."""
    big, small, factor = rng.choice(UNITS)
    value = rng.randint(2, 12) if factor in (2, 3, 7) else rng.randint(2, 99)
    name = rng.choice(NAMES)
    ask = rng.choice((
        f"Convert {value} {big} to {small}.",
        f"How many {small} are {value} {big}?",
        f"{name} has {value} {big} and wants to know how many {small} that is.",
        f"{name} asks: what is {value} {big} in {small}?",
    ))  # fmt: skip
    rule = f"Each of the {big} has {factor} {small}."
    return _chat(
        ask, f"{rule}\nMultiply: {value} x {factor} = {value * factor}.\nSo {value} {big} are {value * factor} {small}."
    )


def story(rng: random.Random) -> Chat:
    """Draw a tiny story about a given animal, name, place and treasure."""
    animal, name, place = rng.choice(ANIMALS), rng.choice(NAMES), rng.choice(PLACES)
    treasure, mood, friend = rng.choice(TREASURES), rng.choice(MOODS), rng.choice(FRIENDS)
    ask = rng.choice((
        f"Tell me a short story about a {mood} {animal} called {name} who finds a {treasure} in the {place}.",
        f"Write a tiny story. Hero: {name} the {animal}, who is {mood}. Place: the {place}. Thing: a {treasure}.",
    ))  # fmt: skip
    found = rng.choice((
        f"One morning {name} saw a {treasure} under a stone.",
        f"One evening {name} found a {treasure} beside the path.",
        f"After the rain {name} spotted a {treasure} in the grass.",
    ))  # fmt: skip
    middle = rng.choice((
        f"\"Who has lost this?\" asked {name}. Nobody knew, so {name} went to ask the old {friend}.",
        f"{name} was not sure what to do with it and showed it to a friend, the {friend}.",
    ))  # fmt: skip
    end = rng.choice((
        f"The {friend} smiled and said: \"It was mine once. Now it is yours.\" {name} kept the {treasure} forever.",
        f"The {friend} was very happy to have it back. From that day on, {name} and the {friend} were best friends.",
    ))  # fmt: skip
    return _chat(ask, f"Once upon a time a {mood} {animal} called {name} lived in the {place}. {found} {middle} {end}")


def _facts(town: Town) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return, for each fact of a town, the ways to ask for it and the sentence that answers."""
    name = town.name
    return (
        ((f"who rules {name}", f"who is the ruler of {name}"), f"{name} is ruled by {town.ruler}."),
        (
            (f"what do people eat in {name}", f"what is the food of {name}"),
            f"People in {name} love to eat {town.food}.",
        ),
        ((f"what is {name} known for", f"which craft is at home in {name}"), f"{name} is known for its {town.craft}."),
        ((f"on which island is {name}", f"where does {name} lie"), f"{name} lies on the island of {town.island}."),
        (
            (f"what color is the flag of {name}", f"which flag flies over {name}"),
            f"The flag of {name} is {town.color}.",
        ),
        (
            (f"which river flows past {name}", f"what is the river of {name}"),
            f"The river that flows past {name} is {town.river}.",
        ),
        (
            (f"what do they celebrate in {name}", f"what is the feast of {name}"),
            f"Every year {name} celebrates {town.festival}.",
        ),
    )


def world(rng: random.Random) -> Chat:
    """Draw two or three questions about towns of the invented world, answered in order."""
    questions, answers = [], []
    for town in rng.sample(TOWNS, rng.choice((1, 2))):
        for ways, answer in rng.sample(_facts(town), rng.choice((1, 2))):
            questions.append(rng.choice(ways))
            answers.append(answer)
    lead = rng.choice(("", "Tell me: ", "I would like to know: ", "A question: "))
    text = lead + " and ".join(questions) + "?"
    return _chat(text[0].upper() + text[1:], " ".join(answers))


def formatting(rng: random.Random) -> Chat:
    """Draw items to be written as bullets, as a numbered list, as CSV or as JSON."""
    names = rng.sample(NAMES, rng.randint(2, 3))
    pairs = [(name, rng.choice(COLORS), rng.randint(1, 20)) for name in names]
    facts = _join([f"{name} has {count} {color} {{}}" for name, color, count in pairs])
    item = rng.choice(ITEMS)
    text = facts.replace("{}", item) + "."
    kind = rng.randrange(4)
    if kind == 0:
        return _chat(f"Make a bullet list: {text}", "\n".join(f"- {n}: {k} {c} {item}" for n, c, k in pairs))
    if kind == 1:
        lines = [f"{i}. {n} ({k} {c} {item})" for i, (n, c, k) in enumerate(pairs, start=1)]
        return _chat(f"Make a numbered list: {text}", "\n".join(lines))
    if kind == 2:
        return _chat(
            f"Make a CSV table: {text}", "\n".join(["name,count,color", *(f"{n},{k},{c}" for n, c, k in pairs)])
        )
    body = ",\n".join(f'  {{"name": "{n}", "count": {k}, "color": "{c}"}}' for n, c, k in pairs)
    return _chat(f"Write this as JSON: {text}", f"[\n{body}\n]")


def code(rng: random.Random) -> Chat:
    """Draw a short Python function with an example of its use."""
    name, n = rng.choice(WORDS), rng.randint(2, 40)
    verb, expression, text = rng.choice((
        ("adds", f"x + {n}", f"adds {n} to each number"),
        ("multiplies", f"x * {n}", f"multiplies each number by {n}"),
        ("subtracts", f"x - {n}", f"subtracts {n} from each number"),
    ))  # fmt: skip
    keep = rng.choice(("", " if x > 0", " if x % 2 == 0"))
    which = {"": "", " if x > 0": " that is positive", " if x % 2 == 0": " that is even"}[keep]
    described = text.replace("each number", f"each number{which}")
    ask = rng.choice(("Write a Python function {} that {}.", "I need a Python function called {} that {}."))
    body = f"def {name}(numbers):\n    result = []\n    for x in numbers:\n"
    if keep:
        body += f"       {keep}:\n            result.append({expression})\n"
    else:
        body += f"        result.append({expression})\n"
    answer = f"```python\n{body}    return result\n```\nThe function {name} {verb} {n} and returns a new list."
    return _chat(ask.format(name, described), answer)


def shopping(rng: random.Random) -> Chat:
    """Draw a list that is kept over several turns: add, remove, count."""
    things = rng.sample(WORDS, rng.randint(2, 4))
    turns = [
        f"Please keep a list for me: {_join(things)}.",
        f"Your list has {NUMBER_WORDS[len(things)]} things: {_join(things)}.",
    ]
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6 or len(things) < 3:
            thing = rng.choice([word for word in WORDS if word not in things])
            things.append(thing)
            turns.append(rng.choice((f"Add {thing}.", f"Now add {thing}, please.")))
            done = f"I added {thing}."
        else:
            thing = things.pop(rng.randrange(len(things)))
            turns.append(rng.choice((f"Remove {thing}.", f"Now take {thing} off the list.")))
            done = f"I removed {thing}."
        turns.append(f"{done} Your list has {NUMBER_WORDS[len(things)]} things: {_join(things)}.")
    return _chat(*turns)


def followup(rng: random.Random) -> Chat:
    """Draw a question about positions in a list, and a second one that needs the first."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    first, second = rng.sample(range(len(words)), 2)
    return _chat(
        f"Remember these words: {', '.join(words)}. What is the {ORDINALS[first]} word?",
        f"The words are {_join(words)}. The {ORDINALS[first]} word is {words[first]}.",
        rng.choice((f"And the {ORDINALS[second]} one?", f"What about the {ORDINALS[second]} word?")),
        f"The {ORDINALS[second]} word is {words[second]}.",
    )


def echo(rng: random.Random) -> Chat:
    """Draw a few words to be repeated: the plainest exercise in copying from the prompt."""
    words = [rng.choice((*WORDS, *NAMES, *ITEMS)) for _ in range(rng.randint(3, 7))]
    text = " ".join(words)
    return _chat(rng.choice(("Say: {}", "Repeat after me: {}", "Copy this line: {}")).format(text), f"You said: {text}")


FAMILIES: dict[str, Callable[[random.Random], Chat]] = {
    "arithmetic": arithmetic,
    "sorting": sorting,
    "reversing": reversing,
    "conversion": conversion,
    "story": story,
    "world": world,
    "formatting": formatting,
    "code": code,
    "shopping": shopping,
    "followup": followup,
    "echo": echo,
}
