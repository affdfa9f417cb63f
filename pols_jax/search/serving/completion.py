"""Which classes a text may become while it is typed: at once, for tens of thousands of names."""

import bisect
import itertools
import unicodedata
from collections.abc import Sequence

from pols_jax.data.glyphs import character_name

# As many names are looked at to tell whether classes are characters.
_SAMPLE = 100


class NameCompletion:
    """The names of the classes in one text, a line each, in which a part of a name is found faster than in a list.

    Args:
      names: One name per class; if they are the names that Unicode has for characters, a character finds its class.

    Examples:
      >>> completion = NameCompletion(["DIGIT SEVEN", "CIRCLED DIGIT SEVEN", "SEVEN EIGHTHS"])
      >>> completion.complete("seven", limit=5), completion.complete("7", limit=5)
      ([2, 0, 1], [0])
      >>> NameCompletion(["DIGIT SEVEN", "DIGIT EIGHT"]).character(1)
      '8'
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._are_characters = all(_is_a_characters(name) for name in names[:: 1 + len(names) // _SAMPLE])
        folded = [" ".join(name.casefold().split()) for name in names]
        self._text = "\n" + "\n".join(folded) + "\n"
        self._starts = list(itertools.accumulate((len(name) + 1 for name in folded), initial=0))

    def complete(self, text: str, *, limit: int) -> list[int]:
        """The classes whose names have a text in them: equal, at the beginning, at the beginning of a word, anywhere.

        A character comes first for a text that is one. Without a text, some classes from the whole list.
        """
        wanted = " ".join(text.casefold().split())
        if not wanted:
            return list(range(0, len(self._names), -(-len(self._names) // limit)))
        patterns = [f"\n{wanted}\n", f"\n{wanted}", f" {wanted}", wanted]
        if len(text) == 1:
            patterns.insert(0, f"\n{character_name(ord(text)).casefold()}\n")
        found: dict[int, None] = {}
        for pattern in patterns:
            place = self._text.find(pattern)
            while place >= 0 and len(found) < limit:
                class_id = bisect.bisect_right(self._starts, place) - 1
                found[class_id] = None
                place = self._text.find(pattern, self._starts[class_id + 1])
        return list(found)[:limit]

    def character(self, class_id: int) -> str | None:
        """The character that a class stands for, if classes are characters."""
        if not self._are_characters:
            return None
        try:
            return unicodedata.lookup(self._names[class_id])
        except KeyError:
            return None


def _is_a_characters(name: str) -> bool:
    """Whether a name is that of a character, as Unicode writes it; "cat" is not, and "CAT" is."""
    try:
        return unicodedata.name(unicodedata.lookup(name), "") == name
    except (KeyError, TypeError):  # there are names of sequences too
        return False
