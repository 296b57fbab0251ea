"""Texts in two spellings: the exact bytes of each token, tokens for given bytes, and the byte boundaries of both.

A student and a teacher with different tokenizers are compared on bytes. The student's tokens are turned into bytes, and
the teacher's tokenizer spells those bytes in its canonical way. A special token, such as an end token, has no bytes: it
is replaced by the teacher's token of the same role. A span is the smallest run of bytes, between two boundaries that
both spellings have; it holds whole tokens of both.

The teacher's tokenizer normalizes no Unicode and adds no prefix, because it must spell exactly the given bytes. Bytes
that are no UTF-8 are spelled by its tokens of single bytes.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import ModelError
from slipstream.records import OPEN, TOO_LONG, UNWRITTEN, Ints

CHANGING = ("NFC", "NFD", "NFKC", "NFKD", "Prepend")
"""Normalizers that are left out, because they change the bytes of a text."""
NO_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False}
"""Settings of pre-tokenizers that put no blank before a text."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WORD_START = "▁"
"""Character that stands for a blank in the vocabularies of SentencePiece."""


@dataclass(frozen=True)
class Respelled:
    """A text in the teacher's tokens, and the span of each token of both spellings."""

    tokens: Ints
    teacher_spans: Ints
    """Number of the span that each of the teacher's tokens belongs to; a negative number for tokens outside of all."""
    student_spans: Ints
    """The same for the student's tokens. A negative number is the reason why the token is left out."""


class Spelling:
    """Bytes of a tokenizer's tokens, and its tokens for given bytes. Objects of this class are not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Copy a tokenizer; raise ModelError if its tokens have no exact bytes."""
        self.name = tokenizer.name_or_path
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{self.name}: no tokenizer.json there, by which its tokens have exact bytes")
        self.backend = exact_copy(backend)
        self.backend.encode_special_tokens = True  # a control token that a student spells in letters stays letters
        self.bytes_of = bytes_of_tokens(tokenizer, backend)
        """Bytes of each token id; special tokens are absent."""
        self.token_of = {text: index for index, text in reversed(self.bytes_of.items())}
        """Token id for given bytes: of several, the first one in `bytes_of`."""

    def check(self, texts: Sequence[str]) -> None:
        """Raise ModelError unless the tokenizer spells all of these texts exactly, plain text without the fallback."""
        for text in texts:
            _, size = self.spell(text.encode())
            lost = text.encode()[size:][:20].decode(errors="replace")
            plain = "" if self._writes(text) else re.sub("[^A-Za-z0-9]", "", text)
            changed = next((each for each in plain if not self._writes(each)), None)
            if lost or changed:
                what = f"cannot write {lost!r} exactly" if lost else f"write {changed!r} only byte by byte"
                raise ModelError(
                    f"{self.name}: its tokens {what}, so its spelling cannot be compared with another: use a model "
                    "whose tokenizer can write every byte, and adds and changes no character"
                )

    def spell(self, text: bytes) -> tuple[list[int], int]:
        """Return tokens for these bytes, and the number of bytes that they spell: less than all if one is unknown."""
        with contextlib.suppress(UnicodeDecodeError):
            whole = self._encode(text.decode()) if text else []
            if self.joined(whole) == text:
                return whole, len(text)
        ids, size = list[int](), 0
        for piece in pieces(text):
            found = self._encode(piece) if isinstance(piece, str) else self._bytewise(piece)
            if isinstance(piece, str) and self.joined(found) != piece.encode():
                found = self._by_character(piece)
            spelled = self.joined(found)
            ids, size = ids + found, size + len(spelled)
            if spelled != (piece.encode() if isinstance(piece, str) else piece):
                break
        return ids, size

    def joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes_of.get(index, b"") for index in ids)

    def _writes(self, text: str) -> bool:
        """Return whether the tokenizer spells exactly this text."""
        return self.joined(self._encode(text)) == text.encode()

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except Exception:  # the library raises plain Exception for characters that a vocabulary lacks
            return []
        return ids

    def _bytewise(self, text: bytes) -> list[int]:
        """Return a token for each byte, up to the first byte that has none."""
        each = [text[at : at + 1] for at in range(len(text))]
        return [self.token_of[byte] for byte in takewhile(self.token_of.__contains__, each)]

    def _by_character(self, text: str) -> list[int]:
        """Spell a text in which some characters are no tokens: those by their bytes, and the text between them."""
        odd = {each for each in set(text) if not self._writes(each)}
        ids = list[int]()
        for part in filter(None, re.split(f"([{''.join(map(re.escape, odd))}])", text)) if odd else [text]:
            found = self._bytewise(part.encode()) if part in odd else self._encode(part)
            if self.joined(found) != part.encode():
                return ids + (found if part in odd else [])
            ids += found
        return ids


def exact_copy(backend: Any) -> Any:
    """Return a copy of a tokenizer that encodes every text as it is, without normalization and without a prefix.

    The copy shares its model (the vocabulary and merges) with the original, because copying them would take seconds.
    """
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    tree: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": empty}
    for name in ("normalizer", "pre_tokenizer"):
        part = getattr(backend, name)
        tree[name] = None if part is None else unchanging(json.loads(part.__getstate__()))
    found = type(backend).from_str(json.dumps(tree))
    found.model = backend.model
    added = sorted(backend.get_added_tokens_decoder().items())
    for special, tokens in groupby((token for _, token in added), lambda token: bool(token.special)):
        (found.add_special_tokens if special else found.add_tokens)(list(tokens))
    return found


def unchanging(part: Any) -> Any:
    """Return a part of a tokenizer.json without what changes a text or puts a blank before it; None for nothing."""
    if part is None or part["type"] in CHANGING:
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            kept = [each for each in map(unchanging, part[name]) if each is not None]
            return part | {name: kept} if kept else None
    return part | {name: value for name, value in NO_PREFIX.items() if name in part}


def bytes_of_tokens(tokenizer: Tokenizer, backend: Any) -> dict[int, bytes]:
    """Return the exact bytes of each token, by what the tokenizer's decoder says; without special tokens.

    Tokens are in the order of their ids, those that stand for single bytes last: they may repeat ordinary tokens.
    """
    added, ends = tokenizer.added_tokens_decoder, {*tokenizer.all_special_ids}
    decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
    found, single = dict[int, bytes](), dict[int, bytes]()
    for token, index in sorted(backend.get_vocab(with_added_tokens=True).items(), key=itemgetter(1)):
        if index in ends or (index in added and added[index].special):
            continue
        if '"ByteLevel"' in decoder and index not in added:
            found[index] = b"".join(BYTES_OF_LETTERS.get(letter) or letter.encode() for letter in token)
        elif '"ByteFallback"' in decoder and (byte := BYTE_TOKEN.fullmatch(token)):
            single[index] = bytes([int(byte[1], 16)])
        else:
            found[index] = (token.replace(WORD_START, " ") if WORD_START in decoder else token).encode()
    return found | single


def _letters_of_bytes() -> Iterator[tuple[str, bytes]]:
    """Yield the letter with which byte-level vocabularies write each byte, as GPT-2 defined it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    yield from ((chr(byte), bytes([byte])) for byte in printable)
    others = (byte for byte in range(256) if byte not in printable)
    yield from ((chr(256 + place), bytes([byte])) for place, byte in enumerate(others))


BYTES_OF_LETTERS = dict(_letters_of_bytes())


def pieces(text: bytes) -> Iterator[str | bytes]:
    """Yield the runs of valid UTF-8 as str, and the runs between them as bytes."""
    for part in re.split("([\udc80-\udcff]+)", text.decode("utf-8", "surrogateescape")):
        if part:
            yield part.encode("utf-8", "surrogateescape") if "\udc80" <= part[0] <= "\udcff" else part


def without_begun_character(text: bytes) -> bytes:
    """Return the text without the bytes at its end that begin a character of UTF-8 and do not complete it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    decoder.decode(text)
    begun, _ = decoder.getstate()
    return text[: len(text) - len(begun)]


def common_spans(one: Sequence[int], other: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the span of each token of two spellings, given the bytes of each token; −1 behind the last boundary.

    A token without bytes belongs to the span of the bytes before it.
    """
    ends = [*accumulate(one)], [*accumulate(other)]
    common = sorted({*ends[0]} & {*ends[1]})
    return spans_by_end(ends[0], common), spans_by_end(ends[1], common)


def spans_by_end(ends: Sequence[int], common: Sequence[int]) -> Ints:
    spans = np.searchsorted(common, ends)
    return np.where(spans < len(common), spans, OPEN)


def shared_layout(
    student: Spelling, teacher: Spelling, roles: Mapping[int, int], *, sizes: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the teacher's token for each token of the student, −1 for none, and behind them its other tokens.

    Two tokens are the same if they have the same bytes or the same role. Each token has at most one counterpart; of
    several tokens with the same bytes only that of `token_of` has one.
    `sizes` are the numbers of embeddings of both.
    """
    same = ((index, teacher.token_of[text]) for text, index in student.token_of.items() if text in teacher.token_of)
    pairs = [*roles.items(), *same]
    layout_V, used = np.full(sizes[0], -1, np.int64), set[int]()
    for ours, theirs in pairs:
        if ours < sizes[0] and theirs < sizes[1] and theirs not in used and layout_V[ours] < 0:
            layout_V[ours] = theirs
            used.add(theirs)
    return np.concatenate([layout_V, np.array([index for index in range(sizes[1]) if index not in used], np.int64)])


def respell(
    ids: Sequence[int], student: Spelling, teacher: Spelling, roles: Mapping[int, int], *, limit: int | None = None
) -> Respelled:
    """Spell a response of the student in the teacher's tokens, as far as the teacher can, and align both spellings.

    `roles` maps special tokens of the student to those of the teacher. `limit` is the largest number of the teacher's
    tokens. If the response does not end with a special token, its last span is left out: its bytes would be spelled in
    another way if more text followed.
    """
    ours = [1 if index in roles else len(student.bytes_of.get(index, b"\0")) for index in ids]  # 1: no bytes are shared
    tokens, sizes = list[int](), list[int]()
    ended, start, reason = bool(len(ids)) and int(ids[-1]) in roles, 0, OPEN
    for stop in [*(at for at, index in enumerate(ids) if index in roles or index not in student.bytes_of), len(ids)]:
        text = student.joined(ids[start:stop])
        if stop == len(ids) and not ended:
            text = without_begun_character(text)
        found, size = teacher.spell(text)
        tokens, sizes = tokens + found, sizes + [len(teacher.bytes_of[index]) for index in found]
        if size < len(text) or (stop < len(ids) and ids[stop] not in roles):
            reason = UNWRITTEN
            break
        if stop < len(ids):
            tokens, sizes = [*tokens, roles[int(ids[stop])]], [*sizes, 1]
        start = stop + 1
    if limit is not None and len(tokens) > limit:
        tokens, sizes, reason = tokens[:limit], sizes[:limit], TOO_LONG
    student_spans, teacher_spans = common_spans(ours, sizes)
    if reason == OPEN and not ended and len(student_spans):
        last = student_spans.max()
        student_spans[student_spans == last] = teacher_spans[teacher_spans == last] = OPEN
    if reason != OPEN:
        student_spans[student_spans < 0] = reason
    return Respelled(np.array(tokens, np.int32), teacher_spans, student_spans)
