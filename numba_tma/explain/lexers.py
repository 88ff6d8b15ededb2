"""Pygments lexers for PTX and SASS, and a text's tokens line by line, in the few classes that are coloured here."""

from __future__ import annotations

from pygments.lexer import Lexer, RegexLexer, bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Punctuation, String, Text, _TokenType

__all__ = ["CLASSES", "PtxLexer", "PythonLexer", "SassLexer", "lines"]


class PtxLexer(RegexLexer):
    """PTX. Mnemonics are functions, `.reg` and its like declarations."""

    name = "PTX"
    tokens = {
        "root": [
            (r"\s+", Text),
            (r"//.*?$|/\*(?s:.*?)\*/", Comment),
            (r'"(?:[^"\\\n]|\\.)*"', String),
            (r"(@!?%[\w$]+)", Name.Decorator),
            (r"%[\w$]+(?:\.[xyzw])?", Name.Variable),
            (r"(\$[\w$]+)(:)", bygroups(Name.Label, Punctuation)),
            (r"\$[\w$]+", Name.Label),
            (r"0[fFdDxX][0-9a-fA-F]+|(?<![\w.])\d+", Number),
            (r"\.[a-z][\w:]*", Keyword.Declaration),
            (r"(?:(?<=^)|(?<=\s))[a-z][a-z0-9_]*(?:(?:\.|::)[\w]+)+|\b(?:ret|exit|trap|bra|call)\b", Name.Function),
            (r"[A-Za-z_][\w$]*", Name),
            (r".", Punctuation),
        ]
    }


class SassLexer(RegexLexer):
    """SASS as nvdisasm prints it. Mnemonics are functions; uniform registers are set apart."""

    name = "SASS"
    tokens = {
        "root": [
            (r"^(@!?U?P(?:\d+|T)\b)?([ ]*)([A-Z][\w.]*)", bygroups(Name.Decorator, Text, Name.Function)),
            (r"\s+", Text),
            (r"(\.L[\w.]+)(:)", bygroups(Name.Label, Punctuation)),
            (r"\.L[\w.]+", Name.Label),
            (r"\bU(?:R|P)(?:\d+|Z|T)(?:\.[\w.]+)?", Name.Class),
            (r"\b(?:R|P)(?:\d+|Z|T)(?:\.[\w.]+)?", Name.Variable),
            (r"-?0x[0-9a-fA-F]+|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b", Number),
            (r"\bSR_[\w.]+|\bc\b|\bdesc\b|\bgdesc\b|\bgsb\d\b|\bSB\d\b", Keyword.Declaration),
            (r"[A-Za-z_][\w.]*", Name),
            (r".", Punctuation),
        ]
    }


# What is coloured, and the letter that stands for it; of several that fit, the most special one counts.
CLASSES: dict[_TokenType, str] = {
    Comment: "c",
    String: "s",
    Number: "m",
    Keyword: "k",
    Keyword.Constant: "m",
    Keyword.Declaration: "d",
    Name.Function: "f",
    Name.Builtin: "b",
    Name.Decorator: "g",
    Name.Label: "l",
    Name.Class: "u",
}


def _class_of(kind: _TokenType) -> str:
    while kind is not None:
        if kind in CLASSES:
            return CLASSES[kind]
        kind = kind.parent
    return ""


def lines(text: str, lexer: Lexer) -> list[list[tuple[str, str]]]:
    """The lines of `text` as lists of (class, characters); the class is '' where nothing is coloured."""
    result: list[list[tuple[str, str]]] = [[]]
    for kind, value in lexer.get_tokens(text):
        letter = _class_of(kind)
        for number, part in enumerate(value.split("\n")):
            if number:
                result.append([])
            if not part:
                continue
            line = result[-1]
            if line and line[-1][0] == letter:
                line[-1] = (letter, line[-1][1] + part)
            else:
                line.append((letter, part))
    count = text.count("\n") + 1
    return result[:count] + [[]] * (count - len(result))
