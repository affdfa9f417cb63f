"""Finds classes by what people type: a name, part of one, or a single character."""

import difflib
import fnmatch
import functools
import glob
import heapq
import re
import unicodedata
from collections.abc import Sequence

from pols_jax.errors import ConfigError

# To compare a text letter by letter takes about 25 us for each name.
_MOST_COMPARED = 20_000
_LONGEST = 256


class ClassNames:
    """The names of the classes of a network, to be looked up.

    Args:
      names: One name per class.
      place: Where the network is, for messages.
      listed: Where all names can be read, for messages.

    Examples:
      >>> names = ClassNames(["DIGIT ONE", "DIGIT TWO", "two"], place="runs/mine", listed="class_names.json")
      >>> names.find("digit two"), names.find("1"), names.like("*TWO")
      (1, 0, [1, 2])
      >>> names.find("digit tow")
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: There is no class named 'digit tow' in runs/mine; the nearest are DIGIT TWO, DIGIT ONE.
    """

    def __init__(self, names: Sequence[str], *, place: str, listed: str):
        self._names, self._place, self._listed = names, place, listed

    @functools.cached_property
    def _ids(self) -> dict[str, int | list[int]]:
        """The class, or classes, of every name, in lower case. A list for each, or a copy of each name, would double its memory."""
        ids: dict[str, int | list[int]] = {}
        for class_id, name in enumerate(self._names):
            folded = name.casefold()
            if (found := ids.get(folded)) is None:
                ids[name if name == folded else folded] = class_id
            else:
                ids[folded] = [*_listed(found), class_id]
        return ids

    def _classes(self, folded: str) -> list[int]:
        return _listed(self._ids.get(folded, []))

    def find(self, text: str) -> int:
        """Finds the class of a name, in upper or lower case, or of the character that it is the name of.

        Raises:
          ConfigError: if there is no such class, with the nearest names; or if there are several.
        """
        found = self._classes(text.casefold()) or self._of_character(text)
        exact = [class_id for class_id in found if self._names[class_id] == text]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            names = " and ".join(self._names[class_id] for class_id in found)
            raise ConfigError(f"The class {text!r} could be {names}; write it as it is.")
        nearest = [self._names[self._classes(name)[0]] for name in self._near(_in_words(text).casefold())]
        advice = f"the nearest are {', '.join(nearest)}" if nearest else f"{self._listed} lists them all"
        raise ConfigError(f"There is no class named {text!r} in {self._place}; {advice}.")

    def _near(self, text: str) -> list[str]:
        """The names that are most like a text, best first; of very many, those are compared that share most pairs of letters."""
        names, pairs = list(self._ids), {text[i : i + 2] for i in range(min(len(text), _LONGEST) - 1)}
        if len(names) > _MOST_COMPARED:
            names = heapq.nlargest(
                _MOST_COMPARED, names, key=lambda name: sum(pair in name for pair in pairs)
            )
        return difflib.get_close_matches(text[:_LONGEST], names, n=3, cutoff=0.4)

    def like(self, pattern: str) -> list[int]:
        """Lists the classes whose names hold a text, or match a pattern with ``*``, ``?`` or ``[...]``; or of a character."""
        wanted = pattern.casefold()
        matches = re.compile(fnmatch.translate(wanted if glob.has_magic(wanted) else f"*{wanted}*")).match
        found = {class_id for name, ids in self._ids.items() if matches(name) for class_id in _listed(ids)}
        return sorted(found.union(self._of_character(pattern)))

    def _of_character(self, text: str) -> list[int]:
        words = _in_words(text)
        return [] if words == text else self._classes(words.casefold())


def _listed(ids: int | list[int]) -> list[int]:
    return [ids] if isinstance(ids, int) else ids


def _in_words(text: str) -> str:
    """The name of a single character, as data of glyphs has it; anything else as it is."""
    composed = unicodedata.normalize("NFC", text)
    return unicodedata.name(composed, f"U+{ord(composed):04X}") if len(composed) == 1 else text
