"""Generate a small, varied chat corpus from a seed, to train the demo's target.

There are several families of tasks (see `FAMILIES`). A chat is made from random words and
phrasings. Each answer follows from the messages before it, so that a model can learn to answer.
Held-out chats come from the same families as training chats. The first user message is different in
each of the training and held-out chats. Every row is
`{"messages": [{"role", "content"}, ...], "category": family}`.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import OptionInvalid
from ..files import write_atomic

Chat = list[dict[str, str]]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly and correctly.",
    "You are a patient teacher.",
)
SYSTEM_SHARE = 0.1
MAX_REDRAWS = 200
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
NAMES = (
    "Ada",
    "Bruno",
    "Carla",
    "Dario",
    "Elif",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Luca",
)
WORDS = (
    "amber", "bell", "bird", "bread", "castle", "cloud", "dragon", "drum", "engine", "field",
    "flute", "garden", "hammer", "honey", "island", "king", "lantern", "lemon", "mirror", "ocean",
    "paper", "queen", "rabbit", "river", "silver", "table", "tower", "valley", "window", "zebra",
)  # fmt: skip
ANIMALS = (
    "fox",
    "owl",
    "bear",
    "cat",
    "heron",
    "mouse",
    "otter",
    "hare",
    "wolf",
    "crow",
    "badger",
    "goat",
)
LOCATIONS = (
    "forest",
    "village",
    "harbor",
    "valley",
    "old mill",
    "garden",
    "market",
    "lighthouse",
    "mountain",
    "library",
)
TREASURES = ("golden key", "silver bell", "old map", "blue lantern", "red kite", "wooden flute")
MOODS = ("curious", "brave", "sleepy", "clever", "shy", "cheerful", "patient", "hungry")
FRIENDS = ("turtle", "sparrow", "hedgehog", "frog", "squirrel", "donkey", "bee", "snail")


def _chat(*turns: str) -> Chat:
    """Turn texts into messages that alternate between user and assistant."""
    messages: Chat = []
    for i, turn in enumerate(turns):
        role = "assistant" if i % 2 else "user"
        messages.append({"role": role, "content": turn})
    return messages


def _join(words: Sequence[str]) -> str:
    """Join words in the form `a, b and c`."""
    return ", ".join(words[:-1]) + " and " + words[-1]


def sorting(rng: random.Random) -> Chat:
    """Draw a chat in which words are put into alphabetical order, one per line."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    ask = rng.choice(
        (
            "Sort these words alphabetically: {}.",
            "Put these words in alphabetical order: {}.",
            "Please sort: {}.",
        )
    )
    lines = [f"{i}. {word}" for i, word in enumerate(sorted(words), start=1)]
    return _chat(
        ask.format(", ".join(words)),
        "Here are the words in alphabetical order:\n" + "\n".join(lines),
    )


STORY_QUESTIONS = (
    "Tell me a short story about a {mood} {animal} called {name} who finds a {treasure} in the "
    "{setting}.",
    "Write a tiny story. Hero: {name} the {animal}, who is {mood}. Place: the {setting}. Thing: a "
    "{treasure}.",
)
STORY_BEGINNING = "Once upon a time a {mood} {animal} called {name} lived in the {setting}."
STORY_DISCOVERIES = (
    "One morning {name} saw a {treasure} under a stone.",
    "One evening {name} found a {treasure} beside the path.",
    "After the rain {name} spotted a {treasure} in the grass.",
)
STORY_MIDDLES = (
    '"Who has lost this?" asked {name}. Nobody knew, so {name} went to ask the old {friend}.',
    "{name} was not sure what to do with it and showed it to a friend, the {friend}.",
)
STORY_ENDS = (
    'The {friend} smiled and said: "It was mine once. Now it is yours." {name} kept the '
    "{treasure} forever.",
    "The {friend} was very happy to have it back. From that day on, {name} and the {friend} were "
    "best friends.",
)


def story(rng: random.Random) -> Chat:
    """Draw a chat with a tiny story about an animal, a name, a place and a treasure."""
    words = {
        "animal": rng.choice(ANIMALS),
        "name": rng.choice(NAMES),
        "setting": rng.choice(LOCATIONS),
        "treasure": rng.choice(TREASURES),
        "mood": rng.choice(MOODS),
        "friend": rng.choice(FRIENDS),
    }
    ask = rng.choice(STORY_QUESTIONS)
    sentences = [STORY_BEGINNING]
    for choices in (STORY_DISCOVERIES, STORY_MIDDLES, STORY_ENDS):
        sentences.append(rng.choice(choices))
    return _chat(ask.format(**words), " ".join(sentences).format(**words))


def shopping(rng: random.Random) -> Chat:
    """Draw a chat of several turns about a shopping list: add, remove and count things."""
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


FAMILIES: dict[str, Callable[[random.Random], Chat]] = {
    "sorting": sorting,
    "story": story,
    "shopping": shopping,
}


class Corpus(NamedTuple):
    """The training chats and held-out chats, in the order in which they are written to files.

    The last message of a held-out chat is the reference answer.
    """

    train: list[dict[str, object]]
    held_out: list[dict[str, object]]


def opening(messages: Chat) -> str:
    """Return the first user message of a chat. It must be different in each chat of the corpus."""
    return next(message["content"] for message in messages if message["role"] == "user")


def generate_corpus(n_train: int, n_held_out: int, seed: int) -> Corpus:
    """Generate the corpus, with the same number of chats from each family.

    Equal arguments produce equal rows on every machine.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    # Draw the held-out chats first, so that they do not depend on the number of training chats.
    held_out = list(_rows(rng, n_held_out, seen))
    train = list(_rows(rng, n_train, seen))
    rng.shuffle(train)
    return Corpus(train, held_out)


def _rows(rng: random.Random, count: int, seen: set[str]) -> Iterator[dict[str, object]]:
    """Yield `count` rows from all families in turn.

    The first user message of each row differs from all messages in `seen`, and is added to `seen`.
    """
    names = list(FAMILIES)
    for index in range(count):
        name = names[index % len(names)]
        messages = _new_chat(rng, name, seen)
        if rng.random() < SYSTEM_SHARE:
            messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages]
        yield {"messages": messages, "category": name}


def _new_chat(rng: random.Random, name: str, seen: set[str]) -> Chat:
    for _ in range(MAX_REDRAWS):
        messages = FAMILIES[name](rng)
        key = opening(messages)
        if key not in seen:
            seen.add(key)
            return messages
    raise OptionInvalid(
        f"The demo cannot generate enough different chats of the family {name!r}: it found no new "
        f"prompt in {MAX_REDRAWS} tries, after {len(seen)} prompts of all families. Lower "
        "`n_chats` or `n_held_out`."
    )


def write_jsonl(rows: list[dict[str, object]], path: Path) -> None:
    """Write rows as JSON lines atomically."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
