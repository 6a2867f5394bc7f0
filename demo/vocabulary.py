"""The words that the task families draw from, and the facts of the small invented world they talk about."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Ada", "Bruno", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luca", "Mina", "Nadia",
    "Otto", "Petra", "Quinn", "Rosa", "Sami", "Tara", "Ugo", "Vera", "Wim", "Yara", "Zeno",
)  # fmt: skip
ITEMS = (
    "apples", "books", "candles", "coins", "eggs", "feathers", "keys", "lemons", "marbles", "nuts", "pears", "pencils",
    "plums", "roses", "shells", "spoons", "stamps", "stones", "tickets", "tiles",
)  # fmt: skip
WORDS = (
    "amber", "anchor", "arrow", "basket", "bell", "bird", "bread", "bridge", "butter", "candle", "castle", "cloud",
    "copper", "cotton", "dragon", "drum", "engine", "feather", "field", "flute", "forest", "garden", "glass", "hammer",
    "harbor", "honey", "island", "jacket", "jungle", "kettle", "king", "ladder", "lantern", "lemon", "letter", "mirror",
    "mountain", "needle", "ocean", "orange", "paper", "pepper", "pillow", "planet", "queen", "rabbit", "ribbon", "river",
    "rocket", "saddle", "silver", "spider", "summer", "table", "thunder", "tower", "umbrella", "valley", "violin",
    "wagon", "whistle", "window", "winter", "zebra",
)  # fmt: skip
ANIMALS = ("fox", "owl", "bear", "cat", "heron", "mouse", "otter", "hare", "wolf", "crow", "badger", "goat")
PLACES = ("forest", "village", "harbor", "valley", "old mill", "garden", "market", "lighthouse", "mountain", "library")
TREASURES = (
    "golden key",
    "silver bell",
    "old map",
    "blue lantern",
    "broken clock",
    "red kite",
    "wooden flute",
    "small mirror",
)
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
    Town("Kestrel Bay", "Ombra", "Duke Halvard", "lemon soup", "rope making", "white", "the Silverrun", "the Kite Days"),
    Town("Brackenfold", "Ombra", "Mayor Tilda", "mushroom pie", "wood carving", "green", "the Mossy Brook", "the Leaf Dance"),
    Town("Ostrava Rock", "Pell", "King Aldous", "goat cheese", "iron work", "black", "the Ember", "the Hammer Fair"),
    Town("Lirien", "Pell", "Lady Maren", "rose jam", "silk weaving", "red", "the Ember", "the Song Week"),
    Town("Tamsin Reach", "Quill", "Doctor Fenn", "barley cakes", "paper making", "yellow", "the Inkwater", "the Book Market"),
    Town("Hollowmere", "Quill", "Prince Casper", "onion stew", "clock making", "purple", "the Inkwater", "the Hour of Bells"),
    Town("Sundrift", "Zephyr", "Admiral Joss", "orange tarts", "sail sewing", "orange", "the Windle", "the Race of Sails"),
    Town("Greyfen", "Zephyr", "Elder Bryn", "eel broth", "basket weaving", "brown", "the Windle", "the Reed Supper"),
)  # fmt: skip
