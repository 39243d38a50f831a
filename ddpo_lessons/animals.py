"""The animals of DDPO's prompts; in a module of its own, for the command line has them before torch loads."""

from __future__ import annotations

# Forty-five common animals, as many as the DDPO paper uses (arXiv 2305.13301, section 6): the classes of
# CLIP's rewards, and what data/prompts.py draws from.
_ANIMALS = """
cat dog horse cow pig sheep goat donkey rabbit hamster mouse squirrel hedgehog fox wolf
bear deer moose lion tiger leopard elephant giraffe zebra hippo rhino camel kangaroo koala panda
monkey gorilla otter seal dolphin whale penguin owl eagle parrot duck chicken frog turtle crocodile
"""
ANIMALS = tuple(_ANIMALS.split())
