"""Token files of `kintsugi prepare`, Megatron-LM or GPT-NeoX as arrays."""

from __future__ import annotations

import os
from typing import Optional, Union

import numpy as np

from . import _kintsugi


class TokenFile:
    """The tokens of all documents. `len` is the number of documents, and an index or an iteration gives the tokens of each."""

    def __init__(self, prefix: Union[str, "os.PathLike[str]"]):
        path, kind, count, starts, vocab, tokenizer = _kintsugi.tokens(os.fspath(prefix))
        self.tokens: np.ndarray = (
            np.memmap(path, dtype=kind, mode="r", shape=(count,)).view(np.ndarray) if count else np.empty(0, kind)
        )
        """All tokens: a read-only view of the file, without a copy."""
        self.starts: np.ndarray = np.frombuffer(starts, dtype=np.uint64).astype(np.int64)
        """The first token of every document."""
        self.vocab: Optional[int] = vocab
        """The size of the vocabulary, if the files say it."""
        self.tokenizer: Optional[str] = tokenizer
        """The tokenizer that made the files, if it is known."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, document: int) -> np.ndarray:
        count = len(self.starts)
        if not -count <= document < count:
            raise IndexError(f"document {document} of {count}")
        document %= count
        end = self.starts[document + 1] if document + 1 < count else len(self.tokens)
        return self.tokens[self.starts[document] : end]

    def __repr__(self) -> str:
        return f"TokenFile({len(self.tokens)} tokens, {len(self)} documents)"


def tokens(prefix: Union[str, "os.PathLike[str]"]) -> TokenFile:
    """Opens PREFIX.bin and PREFIX.idx. Files that are damaged or of another format are a ValueError."""
    return TokenFile(prefix)
