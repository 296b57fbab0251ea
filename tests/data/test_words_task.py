"""The built-in task `words`: its language, its reward, and the tiny models that speak it."""

import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import words_kl as study
from build_words import RECIPES, build_tokenizer, dialect, example, quality
from slipstream.data.prompts import load_rows
from slipstream.data.tokenizers import check_same_vocabulary, load_tokenizer
from slipstream.data.words import (
    CLASS_OF,
    CLASSES,
    END,
    RANKS,
    VOCABULARY_WORDS,
    grammatical,
    next_words,
    numbered,
    sentence,
)
from slipstream.errors import DataError
from slipstream.models.resolve import model_path

MODELS = ("builtin:word_student", "builtin:word_teacher")
HARMONIC = sum(1 / rank for rank in range(1, 129))


def word(kind: int, rank: int) -> str:
    """The word of a class (from 0) and a rank (from 1)."""
    return VOCABULARY_WORDS[kind * 128 + rank - 1]


# --- the language -----------------------------------------------------------------------------------------------------


def test_words_are_different_and_their_next_words_have_the_written_probabilities() -> None:
    assert len(set(VOCABULARY_WORDS)) == CLASSES * RANKS == 2048 and all(each.isalpha() for each in VOCABULARY_WORDS)
    assert len(next_words(word(0, 5))) == 3 * 128 and len(next_words(word(3, 5))) == 3 * 128 + 1
    # after class 0 come classes 1, 3 and 8; class 15 is the last of four, and 15 + 1, + 3, + 8 are 0, 2 and 7
    assert next_words(word(0, 128))[word(3, 4)] == pytest.approx(0.3 / 4 / HARMONIC)
    assert next_words(word(15, 1))[word(0, 2)] == pytest.approx(2 / 3 * 0.5 / 2 / HARMONIC)
    assert next_words(word(15, 1))[word(7, 1)] == pytest.approx(2 / 3 * 0.2 / HARMONIC)
    assert next_words(word(15, 1))[END] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", range(16))
def test_the_next_word_is_uncertain(kind: int) -> None:
    shares = sorted(next_words(word(kind, 7)).values())
    assert math.fsum(shares) == pytest.approx(1)
    entropy = -sum(share * math.log(share) for share in shares)
    if kind % 4 < 3:  # entropy of the class, and of a rank; both by hand
        ranks = sum((math.log(rank) + math.log(HARMONIC)) / rank / HARMONIC for rank in range(1, 129))
        classes = -sum(share * math.log(share) for share in (0.5, 0.3, 0.2))
        assert entropy == pytest.approx(ranks + classes) and entropy == pytest.approx(4.879, abs=1e-3)
        assert sum(shares[-64:]) == pytest.approx(0.686, abs=1e-3)
        assert sum(shares[-4:]) < 0.25


def test_sentences_are_drawn_with_these_probabilities() -> None:
    pairs = Counter[tuple[str, str]]()
    for index in range(4000):
        words = sentence(random.Random(index))
        pairs.update(pairwise([*words[1:], END]))  # the first word never ends a sentence
    assert all(after in next_words(before) for before, after in pairs)
    before = [(CLASS_OF[a], b) for (a, b), n in pairs.items() for _ in range(n)]
    for kind in (2, 11):
        seen = [b for a, b in before if a == kind]
        for after, share in sorted(next_words(word(kind, 1)).items(), key=lambda each: -each[1])[:5]:
            error = math.sqrt(share * (1 - share) / len(seen))
            assert abs(seen.count(after) / len(seen) - share) < 4 * error, (kind, after)


def test_rows_are_grammatical_and_no_prompt_is_in_both_splits() -> None:
    rows = {split: load_rows("builtin:words", split=split, limit=400) for split in ("train", "eval")}
    for split, found in rows.items():
        assert [(row.prompt, row.ground_truth) for row in found[:9]] == [numbered(split, index) for index in range(9)]
        for row in found:
            assert len(str(row.prompt).split()) == 2 and row.response == row.ground_truth
            assert grammatical(str(row.prompt), row.ground_truth, "eos") == 1.0
    train, held_out = ({row.prompt for row in found} for found in rows.values())
    assert not train & held_out
    with pytest.raises(DataError, match="builtin:words has no split 'test'"):
        load_rows("builtin:words", split="test")
    with pytest.raises(ValueError, match="split must be one of"):
        numbered("test", 0)


def test_what_is_grammatical() -> None:
    prompt = f"{word(0, 9)} {word(1, 50)}"  # 1, then 2, 3 and its end
    right = f"{word(2, 100)} {word(3, 1)}"
    assert grammatical(prompt, right, "eos") == 1.0
    assert grammatical(prompt, right, "length") == 0.0, "it was cut off"
    assert grammatical(prompt, word(2, 100), "eos") == 0.0, "no sentence ends there"
    assert grammatical(prompt, f"{word(3, 1)} {word(3, 1)}", "eos") == 0.0, "3 does not follow 1, nor itself"
    assert grammatical(prompt, f"{right} house", "eos") == 0.0, "a foreign word"
    assert grammatical(prompt, "", "eos") == 0.0


# --- the models -------------------------------------------------------------------------------------------------------


def test_the_models_have_the_words_as_tokens() -> None:
    built = build_tokenizer()
    for name in MODELS:
        tokenizer = load_tokenizer(name)
        check_same_vocabulary(tokenizer, built, names=(name, name))
        assert len(tokenizer) == 2050 and tokenizer.model_max_length == built.model_max_length
        text = " ".join(VOCABULARY_WORDS[5:900:100])
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    size = sum(path.stat().st_size for name in MODELS for path in Path(model_path(name)).iterdir())
    assert size < 600_000


def test_the_dialect_keeps_classes_and_slips_are_as_frequent_as_written() -> None:
    recipe = RECIPES["word_student"]
    says = dialect(recipe.seed)
    assert sorted(says.values()) == sorted(VOCABULARY_WORDS) and all(
        CLASS_OF[a] == CLASS_OF[b] for a, b in says.items()
    )
    kept = total = 0
    for index in range(400):
        truth, words = " ".join(numbered("train", index)).split(), example(index, recipe, says)
        kept += sum(says[a] == b for a, b in zip(truth, words, strict=True))
        total += len(words)
        assert example(index, RECIPES["word_teacher"], says) == truth
    assert 1 - kept / total == pytest.approx(recipe.slips, abs=0.015)


def test_the_teacher_speaks_the_language_and_the_student_does_not() -> None:
    torch.manual_seed(0)
    found = {
        name: quality(
            AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32), load_tokenizer(name), 96
        )
        for name in MODELS
    }
    student, teacher = (found[name] for name in MODELS)
    assert teacher["grammatical"] >= 0.5 and 0 <= teacher["excess"] <= 0.1
    assert student["grammatical"] <= 0.25 and student["excess"] >= 1.5


def test_the_kl_of_a_study_is_that_of_an_independent_sum() -> None:
    places = study.Places(3)
    texts = [" ".join(numbered("eval", index)).split() for index in range(3)]
    assert places.count == sum(len(words) - 1 for words in texts)
    teacher = AutoModelForCausalLM.from_pretrained(model_path(MODELS[1]), dtype=torch.float32)
    student = AutoModelForCausalLM.from_pretrained(model_path(MODELS[0]), dtype=torch.float32)
    tokenizer, reverse, forward = load_tokenizer(MODELS[0]), list[float](), list[float]()
    for words in texts:
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(words)])
        with torch.no_grad():
            logp, logq = (model(input_ids=ids).logits[0, 1:].double().log_softmax(-1) for model in (student, teacher))
        reverse += (logp.exp() * (logp - logq)).sum(-1).tolist()
        for place, before in enumerate(words[1:]):
            tokens = {tokenizer.convert_tokens_to_ids(after or "<eos>"): p for after, p in next_words(before).items()}
            forward.append(sum(p * (math.log(p) - logp[place, token].item()) for token, p in tokens.items()))
    found = places.kl(MODELS[0])
    assert found["reverse"] == pytest.approx(sum(reverse) / places.count, abs=1e-4)
    assert found["forward"] == pytest.approx(sum(forward) / places.count, abs=1e-4)
    assert places.kl(MODELS[1])["reverse"] == 0.0
