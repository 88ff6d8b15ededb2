"""PTX text to tokens, in time linear in the text.

Source: PTX ISA, "Source Format", "Comments", "Statements", "Identifiers", "Constants".
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NoReturn

from .errors import PtxSyntaxError

MAX_TEXT = 1 << 27
MAX_DIGITS = 64

# Kinds of token. WORD is an identifier or a dotted mnemonic, DOT a directive, type or loose modifier.
WORD, DOT, INT, FLOAT, HEXFLOAT, STRING, PUNCT, END = range(8)

_TOKEN = re.compile(
    r"""
      (?P<skip>   \s+ | //[^\n]* | /\*(?s:.*?)\*/ )
    | (?P<open>   /\*)
    | (?P<word>   (?:%[A-Za-z_$] | [A-Za-z_$])[\w$]* (?: (?:\.|::)[A-Za-z0-9_][\w$]* )* )
    | (?P<dot>    \.[A-Za-z_][\w$]* (?: ::[\w$]+ )* )
    | (?P<hexf>   0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b )
    | (?P<float>  [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?\b | [0-9]+\.(?![\w]) | \.[0-9]+(?:[eE][+-]?[0-9]+)?\b
                | [0-9]+[eE][+-]?[0-9]+\b )
    | (?P<int>    0[xX][0-9a-fA-F]+U?\b | 0[bB][01]+U?\b | [0-9]+U?\b )
    | (?P<string> "(?:[^"\\\n]|\\.)*" )
    | (?P<punct>  <<|>>|<=|>=|==|!=|&&|\|\||[][{}(),;:|!@+\-*/%~&^<>=?] )
    """,
    re.VERBOSE | re.ASCII,
)
_KINDS = {
    "word": WORD,
    "dot": DOT,
    "hexf": HEXFLOAT,
    "float": FLOAT,
    "int": INT,
    "string": STRING,
    "punct": PUNCT,
}


class Tokens:
    """The tokens of a text: parallel lists `kinds`, `texts`, `starts` (offsets), closed by an END token."""

    def __init__(self, text: str, filename: str) -> None:
        self.text = text
        self.filename = filename
        self._newlines: list[int] | None = None
        self.kinds: list[int] = []
        self.texts: list[str] = []
        self.starts: list[int] = []
        if len(text) > MAX_TEXT:
            raise PtxSyntaxError(f"PTX text of {len(text)} characters; the limit is {MAX_TEXT}", filename, 1, 1, "")
        self._split()

    def _split(self) -> None:
        text, match = self.text, _TOKEN.match
        kinds, texts, starts = self.kinds, self.texts, self.starts
        position, end = 0, len(text)
        while position < end:
            token = match(text, position)
            kind = token.lastgroup if token is not None else "open"
            if kind == "open":
                self._bad_character(position)
            if kind != "skip":
                kinds.append(_KINDS[kind])
                texts.append(token.group())
                starts.append(position)
            position = token.end()
        kinds.append(END)
        texts.append("end of file")
        starts.append(end)

    def _bad_character(self, position: int) -> NoReturn:
        text = self.text
        if text.startswith("/*", position):
            self.fail_at(position, "comment without its closing */")
        character = text[position]
        if character == '"':
            self.fail_at(position, "string without its closing quote on the same line")
        if character.isdigit():
            self.fail_at(position, "malformed number")
        if character == "#":
            self.fail_at(position, "preprocessor directive; run the C preprocessor first")
        self.fail_at(position, f"unexpected character {character!r}")

    def line_of(self, position: int) -> int:
        """Line number, from 1, of an offset into the text."""
        if self._newlines is None:
            self._newlines = [found.start() for found in re.finditer("\n", self.text)]
        # A newline at the very position still belongs to its own line.
        return bisect_right(self._newlines, position - 1) + 1

    def fail_at(self, position: int, message: str) -> NoReturn:
        """Raise PtxSyntaxError for an offset into the text."""
        start = self.text.rfind("\n", 0, position) + 1
        stop = self.text.find("\n", position)
        line = self.text[start : stop if stop >= 0 else len(self.text)]
        raise PtxSyntaxError(message, self.filename, self.line_of(position), position - start + 1, line[:4000])
