"""Control characters made visible: what a spec holds must not steer the terminal that shows it."""

from __future__ import annotations

import unicodedata

CONTROL = "�"
"""Stands for each control character."""


def visible(text: str) -> str:
    """Return a text whose control characters are replaced by ``�``; line ends and tabs stay.

    Control characters are those of C0 and C1 (escape sequences begin with one), those that turn or hide text (the
    bidirectional ones among them), separators of lines and paragraphs, and halves of surrogate pairs: the categories
    Cc, Cf, Cs, Zl and Zp of https://www.unicode.org/reports/tr44/#General_Category_Values.
    """
    if text.isprintable():
        return text
    return "".join(CONTROL if steers(character) else character for character in text)


def steers(character: str) -> bool:
    """Return True for a character that is not shown but obeyed."""
    if character.isprintable() or character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
