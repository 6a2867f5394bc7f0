"""The words that the task families draw from, and the facts of an invented world."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("Ada", "Bruno", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luca")
ITEMS = ("apples", "books", "coins", "eggs", "keys", "lemons", "pears", "stones")
WORDS = (
    "amber", "bell", "bird", "bread", "castle", "cloud", "dragon", "drum", "engine", "field", "flute", "garden",
    "hammer", "honey", "island", "king", "lantern", "lemon", "mirror", "ocean", "paper", "queen", "rabbit", "river",
    "silver", "table", "tower", "valley", "window", "zebra",
)  # fmt: skip
ANIMALS = ("fox", "owl", "bear", "cat", "heron", "mouse", "otter", "hare", "wolf", "crow", "badger", "goat")
PLACES = ("forest", "village", "harbor", "valley", "old mill", "garden", "market", "lighthouse", "mountain", "library")
TREASURES = ("golden key", "silver bell", "old map", "blue lantern", "red kite", "wooden flute")
MOODS = ("curious", "brave", "sleepy", "clever", "shy", "cheerful", "patient", "hungry")
FRIENDS = ("turtle", "sparrow", "hedgehog", "frog", "squirrel", "donkey", "bee", "snail")
COLORS = ("red", "blue", "green", "yellow", "white", "black", "purple", "brown")


@dataclass(frozen=True)
class Town:
    """One town of the invented archipelago: every question about it has one right answer."""

    name: str
    island: str
    ruler: str
    food: str
    craft: str
    color: str
    river: str
    festival: str


TOWNS = (
    Town("Velmora", "Sarn", "Queen Isolde", "honey bread", "glass blowing", "blue", "the Tarn", "the Night of Lamps"),
    Town("Dunhaven", "Sarn", "Captain Orrin", "smoked fish", "boat building", "grey", "the Tarn", "the Feast of Nets"),
    Town("Kestrel", "Ombra", "Duke Halvard", "lemon soup", "rope making", "white", "the Silverrun", "the Kite Days"),
    Town("Bracken", "Ombra", "Mayor Tilda", "mushroom pie", "wood carving", "green", "the Brook", "the Leaf Dance"),
    Town("Ostrava", "Pell", "King Aldous", "goat cheese", "iron work", "black", "the Ember", "the Hammer Fair"),
    Town("Lirien", "Pell", "Lady Maren", "rose jam", "silk weaving", "red", "the Ember", "the Song Week"),
    Town("Tamsin", "Quill", "Doctor Fenn", "barley cakes", "paper making", "yellow", "the Inkwater", "the Book Fair"),
    Town("Greyfen", "Quill", "Elder Bryn", "eel broth", "basket weaving", "brown", "the Inkwater", "the Reed Supper"),
)
