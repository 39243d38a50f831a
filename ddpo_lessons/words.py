"""Lists of words that rewards, prompts and folders share with the worlds; a hint for misspelled names."""

import difflib
from collections.abc import Iterable

# The forty-five common animals of the DDPO paper (arXiv 2305.13301, section 6), as simple_animals.txt of its
# code lists them: the classes of CLIP's rewards, what data/prompts.py draws from, and what the
# world of animals shows.
_ANIMALS = """
cat dog horse monkey rabbit zebra spider bird sheep deer cow goat lion tiger bear
raccoon fox wolf lizard beetle ant butterfly fish shark whale dolphin squirrel mouse rat snake
turtle frog chicken duck goose bee pig turkey fly llama camel bat gorilla hedgehog kangaroo
"""
ANIMALS = tuple(_ANIMALS.split())

# The classes of a folder that a reward may read as digits, and the words of the digit world.
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def similar(name: str, known: Iterable[str]) -> str:
    """Return " (perhaps NAME)" with the known name that is most similar, or "" if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (perhaps {close[0]})" if close else ""
