"""Two spellings of one text: bytes of tokens, boundaries, roles and cuts, with toy and with real tokenizers."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.data.spelling import (
    Spelling,
    bytes_of_tokens,
    common_spans,
    pieces,
    respell,
    shared_layout,
    without_begun_character,
)
from slipstream.errors import ModelError
from slipstream.records import OPEN, TOO_LONG, UNWRITTEN

FOLDER = Path(__file__).parents[2] / "build" / "tokenizers"
FAMILIES = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3")
END = "<end>"


def toy(letters: str, *merges: tuple[str, str], bytewise: bool = False, normalizer: Any = None) -> Any:
    """Return a BPE tokenizer of these letters, whose merges are tried in this order, with the special token <end>."""
    tokens = [*letters, *(a + b for a, b in merges), *(f"<0x{byte:02X}>" for byte in range(256) if bytewise)]
    bpe = models.BPE({token: index for index, token in enumerate(tokens)}, list(merges), byte_fallback=bytewise)
    backend = Tokenizer(bpe)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]) if bytewise else decoders.Fuse()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)


PAIR = toy("abc", ("a", "b"), ("ab", "c")), toy("abc", ("b", "c"), ("c", "a"))


def boundaries(texts: Sequence[bytes]) -> set[bytes]:
    """Return all beginnings of a text that end where a token ends."""
    return {b"".join(texts[: n + 1]) for n in range(len(texts))}


def spans_by_prefixes(one: Sequence[bytes], other: Sequence[bytes]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each span, by comparing beginnings of the text and not numbers of bytes."""
    common = sorted(boundaries(one) & boundaries(other), key=len)
    found = []
    for before, after in pairwise([b"", *common]):
        sides = []
        for texts in (one, other):
            starts = [b"".join(texts[:n]) for n in range(len(texts))]
            sides.append([n for n, start in enumerate(starts) if len(before) <= len(start) < len(after)])
        found.append((sides[0], sides[1]))
    return found


def as_lists(one: Any, other: Any) -> list[tuple[list[int], list[int]]]:
    return [
        (np.flatnonzero(one == n).tolist(), np.flatnonzero(other == n).tolist())
        for n in range(int(one.max(initial=-1)) + 1)
    ]


def test_spans_of_all_short_texts_are_those_between_common_beginnings() -> None:
    student, teacher = map(Spelling, PAIR)
    end = student.backend.token_to_id(END), teacher.backend.token_to_id(END)
    for length in range(1, 8):
        for letters in product("abc", repeat=length):
            text = "".join(letters).encode()
            ids, size = student.spell(text)
            assert size == length and student.joined(ids) == text
            found = respell([*ids, end[0]], student, teacher, {end[0]: end[1]})
            assert found.tokens[-1] == end[1] and teacher.joined(found.tokens[:-1]) == text
            one = [*(student.bytes_of[index] for index in ids), b"\0"]
            other = [*(teacher.bytes_of[int(index)] for index in found.tokens[:-1]), b"\0"]
            assert as_lists(found.student_spans, found.teacher_spans) == spans_by_prefixes(one, other)


def test_a_span_has_all_tokens_between_two_common_boundaries() -> None:
    one, other = common_spans([1, 2, 2, 3], [3, 1, 1, 1, 2])
    assert one.tolist() == [0, 0, 1, 2]
    assert other.tolist() == [0, 1, 1, 2, 2]
    one, other = common_spans([2, 0, 1], [2, 2])
    assert (one.tolist(), other.tolist()) == ([0, 0, OPEN], [0, OPEN]), "a token without bytes joins those before it"


def test_an_open_end_is_left_out() -> None:
    student, teacher = map(Spelling, PAIR)
    ids, _ = student.spell(b"acab")  # a c ab, where the teacher writes a ca b
    found = respell(ids, student, teacher, {})
    assert found.student_spans.tolist() == [0, OPEN, OPEN] and found.teacher_spans.tolist() == [0, OPEN, OPEN]
    end = student.backend.token_to_id(END)
    closed = respell([*ids, end], student, teacher, {end: end})
    assert closed.student_spans.tolist() == [0, 1, 1, 2]


def test_what_the_teacher_cannot_write_is_left_out_with_all_that_follows() -> None:
    student, teacher = Spelling(toy("abcd")), Spelling(toy("abc", ("a", "b")))
    ids, _ = student.spell(b"abdab")
    found = respell(ids, student, teacher, {})
    assert found.student_spans.tolist() == [0, 0, UNWRITTEN, UNWRITTEN, UNWRITTEN]
    end = student.backend.token_to_id(END)
    found = respell([0, end, 1], student, teacher, {})
    assert found.student_spans.tolist() == [0, UNWRITTEN, UNWRITTEN], "a special token without a counterpart"
    found = respell([0, 1, 0, 1, end], student, teacher, {end: 9}, limit=1)
    assert found.student_spans.tolist() == [0, 0, TOO_LONG, TOO_LONG, TOO_LONG] and len(found.tokens) == 1


def test_bytes_that_are_no_text_are_spelled_by_tokens_of_bytes() -> None:
    teacher = Spelling(toy("ab", ("a", "b"), bytewise=True))
    ids, size = teacher.spell(b"ab\xff\xc3\xa9")
    assert size == 5 and [teacher.bytes_of[index] for index in ids] == [b"ab", b"\xff", b"\xc3", b"\xa9"]
    assert Spelling(PAIR[0]).spell(b"ab\xffa")[1] == 2


def test_unicode_normalization_is_left_out() -> None:
    composed = toy("aé", bytewise=True, normalizer=normalizers.NFC())
    text = "e\u0301é".encode()
    assert len(composed.backend_tokenizer.encode("e\u0301é").ids) == 2
    spelling = Spelling(composed)
    ids, size = spelling.spell(text)
    assert spelling.joined(ids) == text and size == len(text)
    both = toy("ab", bytewise=True, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")]))
    assert (
        json_of(Spelling(both).backend.normalizer)
        == '{"type":"Sequence","normalizers":[{"type":"Replace","pattern":{"String":"a"},"content":"b"}]}'
    )


def json_of(part: Any) -> str:
    return str(part.__getstate__().decode())


@pytest.mark.parametrize("where", ["normalizer", "first", "always", "nested", "bytes"])
def test_no_blank_is_put_before_a_text(where: str) -> None:
    made = toy("ab▁", ("▁", "a"), ("a", "b"), bytewise=True)
    backend = made.backend_tokenizer
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if where == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
    elif where == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        scheme = "first" if where == "first" else "always"
        metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace]) if where == "nested" else metaspace
    spelling = Spelling(made)
    ids, size = spelling.spell(b"abab ab")
    assert size == 7 and [spelling.bytes_of[index] for index in ids][:2] == [b"ab", b"ab"]
    spelling.check(["abab"])


def test_a_tokenizer_that_writes_plain_text_only_byte_by_byte_is_refused() -> None:
    before = toy("ab▁", ("a", "b"), bytewise=True, normalizer=normalizers.Replace(Regex("^"), "▁"))
    assert Spelling(before).spell(b"ab")[1] == 2
    with pytest.raises(ModelError, match=r"its tokens write 'a' only byte by byte, so its spelling cannot be compared"):
        Spelling(before).check(["=", "ab"])
    Spelling(toy("ab", ("a", "b"), bytewise=True, normalizer=normalizers.NFC())).check(["abc", "a▁b"])


def test_truncation_and_padding_of_a_file_are_left_out() -> None:
    made = toy("ab", ("a", "b"))
    made.backend_tokenizer.enable_truncation(2)
    made.backend_tokenizer.enable_padding(length=9)
    assert Spelling(made).spell(b"abababa") == ([2, 2, 2, 0], 7)
    assert made.backend_tokenizer.truncation is not None, "the tokenizer itself keeps its settings"


def in_order(made: Any, *, reverse: bool) -> Any:
    """Return a stand-in for a tokenizer that lists its vocabulary in this order; the library's differs by process."""
    backend = made.backend_tokenizer

    class Ordered:
        decoder = backend.decoder

        def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
            return dict(sorted(backend.get_vocab(with_added_tokens).items(), reverse=reverse))

    return Ordered()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_token_of_a_byte_counts_only_if_no_ordinary_token_has_this_byte(reverse: bool) -> None:
    made = toy("12", ("1", "2"), bytewise=True)
    spelling = Spelling(made)
    byte = made.convert_tokens_to_ids("<0x31>")
    listed = bytes_of_tokens(made, in_order(made, reverse=reverse))
    assert list(listed.items()) == list(spelling.bytes_of.items()), "in the order of ids, single bytes last"
    assert (spelling.token_of[b"1"], spelling.bytes_of[byte]) == (0, b"1")
    assert spelling.token_of[b"3"] == made.convert_tokens_to_ids("<0x33>")
    size = made.backend_tokenizer.get_vocab_size()
    for pair in ((spelling, Spelling(toy("21"))), (Spelling(toy("21")), spelling)):
        layout = shared_layout(*pair, {}, sizes=(size, size))
        assert [layout[pair[0].token_of[digit]] for digit in (b"1", b"2")] == [
            pair[1].token_of[d] for d in (b"1", b"2")
        ]
    assert shared_layout(spelling, Spelling(toy("21")), {}, sizes=(size, 3))[byte] == -1


def test_a_tokenizer_that_cannot_spell_a_text_is_refused_with_the_first_lost_bytes() -> None:
    lower = toy("ab", normalizer=normalizers.Lowercase())
    with pytest.raises(ModelError, match=r"its tokens cannot write 'Ba' exactly"):
        Spelling(lower).check(["ab", "aBa"])


def test_pieces_and_begun_characters() -> None:
    assert list(pieces(b"a\xffb\xe4\xb8")) == ["a", b"\xff", "b", b"\xe4\xb8"]
    assert without_begun_character("a中".encode()[:-1]) == b"a"
    assert without_begun_character("a中".encode()) == "a中".encode()
    assert without_begun_character(b"a\xff") == b"a\xff", "no character begins with this byte"


# --- real tokenizers --------------------------------------------------------------------------------------------------

WORDS = [
    "the", " The", "  indented", "\n\n\t", "def f(x):\n    return x**2", "for(;;){", "12345", " 3.14159", "1,000,000",
    "0x7fff", "🙂", "👩‍👩‍👧‍👦", "🇩🇪", "中文字符", "日本語の", "한국어", "é", "e\u0301", "ạ\u0308\u0323",
    "नमस्ते", "مرحبا", "שלום", "ﬁ", "Å", " ", "   ", "<|im_end|>", "<end_of_turn>", "<think>", "▁", "Ġ",
    "\u00a0", "\u200b", "don't", "naïve", "https://x.y/?q=1&r=%20", "\\frac{a}{b}", "\r\n", "A\u030a", "Ω", "𝔘",
    "_x_", "CamelCase", "…", "—", "'", '"""', "<0x0A>", "end.",
]  # fmt: skip


@cache
def spelling_of(family: str) -> Spelling:
    if not (FOLDER / family).is_dir():
        pytest.skip(f"no {FOLDER / family}: make tokenizers fetches it")
    return Spelling(PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / family / "tokenizer.json")))


def texts(count: int, seed: str) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_texts_keep_their_bytes(family: str) -> None:
    spelling = spelling_of(family)
    for text in texts(10_000, family):
        cut = text.encode()[: -1 if len(text) % 3 == 0 else None]
        ids, size = spelling.spell(cut)
        assert size == len(cut) and spelling.joined(ids) == cut, text


@pytest.mark.parametrize(("one", "other"), list(combinations(FAMILIES, 2)))
def test_spans_of_real_spellings_are_those_between_common_beginnings(one: str, other: str) -> None:
    student, teacher = spelling_of(one), spelling_of(other)
    for text in texts(300, one + other):
        ids, _ = student.spell(text.encode())
        found = respell([*ids, -7], student, teacher, {-7: -8})
        ours = [*(student.bytes_of[index] for index in ids), b"\0"]
        theirs = [*(teacher.bytes_of[int(index)] for index in found.tokens[:-1]), b"\0"]
        assert as_lists(found.student_spans, found.teacher_spans) == spans_by_prefixes(ours, theirs)
        assert b"".join(ours) == b"".join(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_tokens_of_a_student_can_be_spelled_by_others(family: str) -> None:
    student, rng = spelling_of(family), random.Random(family)
    known = [index for index in student.bytes_of if student.bytes_of[index]]
    for other in FAMILIES:
        teacher = spelling_of(other)
        for _ in range(100):
            ids = rng.choices(known, k=rng.randint(1, 20))
            found = respell(ids, student, teacher, {})
            whole = without_begun_character(student.joined(ids))
            assert teacher.joined(found.tokens.tolist()) == whole
            assert set(found.student_spans[found.student_spans < 0].tolist()) <= {OPEN}


@pytest.mark.parametrize(("one", "other"), [("gemma3", "qwen3"), ("qwen3", "gemma3")])
def test_digits_are_shared_by_vocabularies_with_tokens_of_bytes(one: str, other: str) -> None:
    student, teacher = spelling_of(one), spelling_of(other)
    sizes = len(student.bytes_of) + 2000, len(teacher.bytes_of) + 2000
    layout = shared_layout(student, teacher, {}, sizes=sizes)
    for digit in "0123456789":
        ours, theirs = student.backend.token_to_id(digit), teacher.backend.token_to_id(digit)
        assert ours is not None and theirs is not None and layout[ours] == theirs


def test_digits_and_blanks_are_spelled_as_each_family_spells_them() -> None:
    def written(family: str, text: str) -> list[bytes]:
        spelling = spelling_of(family)
        return [spelling.bytes_of[index] for index in spelling.spell(text.encode())[0]]

    assert written("qwen3", "12345") == [b"1", b"2", b"3", b"4", b"5"] == written("gemma3", "12345")
    assert written("llama3_1", "12345") == [b"123", b"45"] == written("gptoss", "12345")
    found = [
        as_lists(*common_spans([len(t) for t in written("llama3_1", text)], [len(t) for t in written("qwen3", text)]))
        for text in ("12345", " 12345")
    ]
    assert found == [[([0], [0, 1, 2]), ([1], [3, 4])], [([0], [0]), ([1], [1, 2, 3]), ([2], [4, 5])]]
