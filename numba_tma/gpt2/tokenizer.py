"""Text to tokens and back, by the checkpoint's own tokenizer.json and the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: str | Path) -> None:
        """Read tokenizer.json.

        Raises:
            ImportError: the package tokenizers is not installed.
            FileNotFoundError: the folder has no tokenizer.json.
        """
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError as error:
            raise ImportError("text takes the package tokenizers: pip install numba-tma[gpt2]") from error
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"{path}: not there; without it prompts have to be given as token numbers")
        self._reader = Reader.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text."""
        return self._reader.encode(text).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token numbers."""
        return self._reader.decode([int(token) for token in tokens])
