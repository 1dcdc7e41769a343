"""A word game: guess a word of five letters from the feedback on the letters of each guess."""

import random
from collections import Counter

from flotilla.services.rollout.environments.base import Info, Step, Validity, answer_of

WORDS = tuple(
    """about above actor admit adult after again agent agree ahead alarm album alert alike alive allow alone along alter
    among angle angry apart apple apply arena argue arise aside asset avoid award aware basic beach began begin being
    below bench birth black blame blind block blood board brain brand bread break brick brief bring broad brown build
    buyer cable carry catch cause chain chair chart chase cheap check chest chief child civil claim class clean clear
    climb clock close coach coast could count court cover craft crash cream crime cross crowd crown curve cycle daily
    dance death delay depth doubt draft drama dream dress drink drive early earth eight empty enemy enjoy enter equal
    error event every exact exist extra faith false fault fiber field fifth fight final first fixed flash fleet floor
    fluid focus force forth frame fresh front fruit fully funny giant given glass globe grace grade grand grant grass
    great green gross group grown guard guess guest guide happy heart heavy horse hotel house human ideal image index
    inner input issue joint judge known label large laser later laugh layer learn least leave legal level light limit
    local logic loose lower lucky lunch major maker march match maybe meant metal might minor model money month moral
    motor mount mouse mouth movie music night noise north novel nurse ocean offer often order other paint panel paper
    party peace phase phone photo piece pilot pitch place plain plane plant plate point pound power press price pride
    prime print prior prize proof proud prove queen quick quiet quite radio raise range rapid ratio reach ready refer
    right river rough round route royal rural scale scene scope score sense serve seven shall shape share sharp sheet
    shelf shell shift shock shoot short shown sight since skill sleep slide small smart smile smoke solid solve sorry
    sound south space spare speak speed spend sport staff stage stand start state steam steel stick still stock stone
    store storm story strip study stuff style sugar suite super sweet table taste teach thank theme there thick thing
    think third three throw tight title total touch tough tower track trade train treat trend trial tribe trick truck
    truly trust truth twice under union unity until upper upset urban usage usual valid value video visit vital voice
    waste watch water wheel where which while white whole whose woman world worry worth would wound write wrong young
    youth""".split()  # noqa: SIM905
)
INSTRUCTION = (
    "Guess the word of five letters. After each guess every letter is marked: G it is at this place, Y it is at "
    "another, - it is not in the word. Answer with one word."
)


class WordGame:
    """Reward 1 for the word.

    Args:
        num_words: how many of the words may be the secret; the first ones.
        max_guesses: the episode ends after so many.
        format_penalty: reward of an answer that is no word of five letters.
    """

    def __init__(self, num_words: int = len(WORDS), max_guesses: int = 6, *, format_penalty: float = 0.0) -> None:
        if not 1 <= num_words <= len(WORDS) or max_guesses < 1:
            raise ValueError(f"num_words must be 1 to {len(WORDS)} and max_guesses at least 1")
        self._num_words, self._max_guesses, self._format_penalty = num_words, max_guesses, format_penalty
        self.secret = WORDS[0]
        self._begin()

    def _begin(self) -> None:
        self._guesses: list[str] = []
        self._validity = Validity()

    def reset(self, seed: int) -> tuple[str, Info]:
        """Choose the word."""
        self.secret = random.Random(seed).choice(WORDS[: self._num_words])
        self._begin()
        return "no guess yet", {"instruction": INSTRUCTION, "metrics": self._validity.metrics(success=False)}

    def step(self, text: str) -> Step:
        """Mark a guess."""
        guess = answer_of(text).casefold()
        is_word = len(guess) == len(self.secret) and guess.isascii() and guess.isalpha()
        self._validity.count(is_word)
        self._guesses.append(guess if is_word else "")
        is_right = guess == self.secret
        is_late = not is_right and len(self._guesses) >= self._max_guesses
        shown = f"{guess}\n{marks(guess, self.secret)}" if is_word else "not a word of five letters"
        reward = float(is_right) if is_word else self._format_penalty
        info = {"metrics": self._validity.metrics(success=is_right), "state": sorted(self._guesses)}
        return shown, reward, is_right or is_late, is_late, info


def marks(guess: str, secret: str) -> str:
    """Mark each letter of a guess: G, Y or -; a letter is marked no more often than the secret has it."""
    found = ["G" if a == b else "-" for a, b in zip(guess, secret, strict=True)]
    left = Counter(b for a, b in zip(guess, secret, strict=True) if a != b)
    for place, letter in enumerate(guess):
        if found[place] == "-" and left[letter]:
            found[place] = "Y"
            left[letter] -= 1
    return "".join(found)
