"""Stop strings in a stream of text."""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Finds the first stop string in text that arrives piece by piece, and holds back what may become one.

    The stop string that is complete first wins; of several that end together, the longest (it starts first).
    So the result does not depend on how the text is cut: with the stops "ENDING" and "ND", "END" gives "E".

    Unicode: a stop string matches as it was given and in its NFC form, which is how Qwen's tokenizer sees all
    text; the output itself is never normalised. Empty stop strings are ignored.

    An automaton over all stop strings (Aho and Corasick, 1975) reads each character once, however many stop
    strings there are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        wanted = {form for stop in stops for form in (stop, unicodedata.normalize("NFC", stop)) if form}
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state
        for stop in sorted(wanted):
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._stopped = False
        self._matched = ""

    @property
    def matched(self) -> str:
        """The stop string that was found, as it stands in the text."""
        return self._matched

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stopped

    def push(self, text: str) -> str:
        """Takes more text; returns what is certain to lie before any stop string. After a match: nothing."""
        if self._stopped:
            return ""
        if len(self._next) == 1:
            return text
        state = self._state
        for index, character in enumerate(text):
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            if length := self._match[state]:
                self._stopped = True
                text, self._held = self._held + text[: index + 1], ""
                self._matched = text[len(text) - length :]
                return text[: len(text) - length]
        self._state = state
        text = self._held + text
        certain = len(text) - self._depth[state]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Ends the text: returns what was held back (nothing after a match)."""
        text, self._held, self._state = self._held, "", 0
        return text

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Sets each state's fallback: the longest of its proper suffixes that begins a stop string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(character, 0)
                # The child's own stop string is longer than any that ends inside of it.
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)
