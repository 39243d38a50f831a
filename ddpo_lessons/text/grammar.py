"""The review world: a grammar that generates movie reviews and recognizes them exactly.

A review is one sentence: "honestly , the plot was not dull , but i hated the songs ." The grammar gives each
review a meaning, so that its sentiment has a true label, and fluency is measured exactly, without a model,
because a text either parses or does not.
"""

import hashlib
import random
from functools import cache
from typing import Literal

Sentiment = Literal["positive", "negative", "mixed"]
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

# A symbol in capitals has the alternatives listed here; anything else is a word. `*3` weighs an alternative.
GRAMMAR: dict[str, str] = {
    "POSITIVE": (
        "START PRAISE . *9 | START PRAISE and PRAISE . *6 | START PRAISE , but PRAISE . | "
        "although PRAISE , PRAISE ."
    ),
    "NEGATIVE": (
        "START BLAME . *9 | START BLAME and BLAME . *6 | START BLAME , but BLAME . | although BLAME , BLAME ."
    ),
    "MIXED": (
        "START PRAISE , but BLAME . *4 | START BLAME , but PRAISE . *4 | START PRAISE and BLAME . | "
        "START BLAME and PRAISE . | although PRAISE , BLAME . *2 | although BLAME , PRAISE . *2"
    ),
    "START": " *3 | OPENING ,",
    "PRAISE": (
        "the THING was GOOD *4 | the THINGS were GOOD *4 | the THING was not BAD | the THINGS were never "
        "BAD | i LIKED OBJECT *4 | i did not HATE OBJECT | the MAKER gave us GOOD THINGS *2"
    ),
    "BLAME": (
        "the THING was BAD *4 | the THINGS were BAD *4 | the THING was not GOOD | the THINGS were never "
        "GOOD | i HATED OBJECT *4 | i did not LIKE OBJECT | the MAKER gave us BAD THINGS *2"
    ),
    "OBJECT": "the THING *3 | the THINGS *3 | the THING TAIL | the THINGS TAIL",
    "GOOD": "PLUS *3 | DEGREE PLUS *2",
    "BAD": "MINUS *3 | DEGREE MINUS *2",
    "OPENING": (
        "honestly | frankly | overall | sadly | happily | surprisingly | for once | as expected | in the "
        "end | in my opinion | to be fair | after all this time | as a fan"
    ),
    "TAIL": (
        "from start to finish | in every scene | at the end | of this film | in the second half | on the "
        "big screen"
    ),
    "DEGREE": (
        "very | truly | really | so | quite | rather | deeply | utterly | remarkably | absolutely | almost "
        "| mostly | entirely | often | fairly | extremely"
    ),
    "THING": (
        "plot | story | film | movie | acting | script | dialogue | soundtrack | ending | opening | pacing "
        "| camera | lighting | setting | humor | romance | drama | mystery | tension | direction | editing "
        "| cast | lead | villain | hero | heroine | sidekick | narrator | chemistry | atmosphere | message "
        "| premise | sequel | remake | finale | climax | prologue | costume | makeup | score | song | dance"
        " | fight | chase | twist | joke | speech | monologue | title | trailer"
    ),
    "THINGS": (
        "characters | actors | songs | jokes | effects | scenes | visuals | costumes | twists | fights | "
        "chases | dances | speeches | dialogues | sets | stunts | subplots | villains | heroes | cameos | "
        "details | colors | sounds | themes | images | lines | puppets | robots | monsters | dragons | "
        "credits | lyrics | voices | faces | landscapes | interviews | flashbacks | montages | miniatures |"
        " battles"
    ),
    "MAKER": (
        "director | writer | producer | composer | editor | studio | crew | star | actress | actor | "
        "comedian | team | designer | choreographer | animator | newcomer | veteran | author | "
        "cinematographer | ensemble"
    ),
    "PLUS": (
        "good | great | wonderful | brilliant | superb | lovely | charming | excellent | amazing | "
        "fantastic | beautiful | delightful | gripping | moving | clever | fresh | funny | hilarious | "
        "touching | stunning | perfect | magical | inspired | elegant | graceful | warm | witty | memorable"
        " | powerful | impressive | outstanding | terrific | marvelous | splendid | thrilling | captivating"
        " | heartfelt | refreshing | remarkable | satisfying | smart | sincere | tender | vivid | polished "
        "| original | imaginative | enchanting | radiant | flawless"
    ),
    "MINUS": (
        "bad | awful | terrible | dull | boring | weak | poor | horrible | dreadful | lazy | stupid | silly"
        " | clumsy | stale | bland | tedious | shallow | messy | predictable | confusing | forgettable | "
        "annoying | painful | ugly | cheap | wooden | hollow | lifeless | pointless | ridiculous | "
        "embarrassing | flat | slow | sloppy | tired | crude | cold | dreary | disappointing | unbearable |"
        " mediocre | miserable | pathetic | pretentious | chaotic | noisy | grim | careless | absurd | "
        "insulting"
    ),
    "LIKED": (
        "liked | loved | enjoyed | adored | admired | praised | cherished | treasured | applauded | "
        "recommended"
    ),
    "LIKE": "like | love | enjoy | adore | admire | praise | cherish | treasure | applaud | recommend",
    "HATED": (
        "hated | disliked | despised | loathed | regretted | detested | dreaded | resented | mocked | endured"
    ),
    "HATE": "hate | dislike | despise | loathe | regret | detest | dread | resent | mock | endure",
}
SHARES: dict[Sentiment, int] = {"positive": 3, "negative": 3, "mixed": 2}


@cache
def alternatives(symbol: str) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return the alternatives of a symbol, each as its parts and its weight; empty for a word."""
    out = []
    for text in GRAMMAR[symbol].split("|") if symbol in GRAMMAR else ():
        *parts, last = text.split()
        weight = int(last[1:]) if last.startswith("*") else 1
        out.append((tuple(parts) if last.startswith("*") else (*parts, last), weight))
    return tuple(out)


def vocabulary() -> list[str]:
    """Return every word of the grammar, in alphabetical order."""
    parts = {part for symbol in GRAMMAR for parts, _ in alternatives(symbol) for part in parts}
    return sorted(parts - GRAMMAR.keys())


def write(symbol: str, rng: random.Random) -> list[str]:
    """Write one random text of a symbol, word by word."""
    if not alternatives(symbol):
        return [symbol]
    choices, weights = zip(*alternatives(symbol), strict=True)
    (parts,) = rng.choices(choices, weights)
    return [word for part in parts for word in write(part, rng)]


def parse(text: str) -> Sentiment | None:
    """Return the meaning of a review (tokens between spaces), or None if it is not in the grammar."""
    words = tuple(text.split())
    for sentiment in SHARES:
        if len(words) in _ends(words, 0, (sentiment.upper(),)):
            return sentiment
    return None


def _ends(words: tuple[str, ...], start: int, parts: tuple[str, ...]) -> set[int]:
    """Return every position at which a reading of `parts` that begins at `start` can end."""
    if not parts:
        return {start}
    first, rest = parts[0], parts[1:]
    if first not in GRAMMAR:
        matches = start < len(words) and words[start] == first
        return _ends(words, start + 1, rest) if matches else set()
    middles = {end for option, _ in alternatives(first) for end in _ends(words, start, option)}
    return {end for middle in middles for end in _ends(words, middle, rest)}


def reviews(count: int, split: Literal["train", "test"], seed: int) -> list[tuple[str, Sentiment]]:
    """Write random reviews with their sentiment.

    A review belongs to one split for ever: a hash of its text decides, and one in ten is a test text, which
    no model has seen.
    """
    rng = random.Random(seed)
    out: list[tuple[str, Sentiment]] = []
    while len(out) < count:
        (sentiment,) = rng.choices(list(SHARES), list(SHARES.values()))
        text = " ".join(write(sentiment.upper(), rng))
        is_test = hashlib.blake2b(text.encode(), digest_size=4).digest()[0] < 26
        if is_test == (split == "test"):
            out.append((text, sentiment))
    return out


def queries(count: int, split: Literal["train", "test"], seed: int) -> list[str]:
    """Return the first 2 to 6 words of random reviews, for a policy to finish."""
    rng = random.Random(seed)
    return [" ".join(text.split()[: rng.randint(2, 6)]) for text, _ in reviews(count, split, seed)]
