"""Samples for a page: every token is coloured by the difference between student and teacher log-prob."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from slipstream.reporting.report.page import Sample, Span, Turn
from slipstream.reporting.report.runs import Reading
from slipstream.reporting.report.titles import short
from slipstream.run_dir.trackers import heading
from slipstream.run_dir.writing import SAMPLES

MAX_SHOWN_TEXT = 1200
"""Largest number of tokens of a response, and of characters of other texts, that are shown."""
STRONGEST = 4.0
"""Log-prob gap in nats from which a token has the strongest colour."""
UNCOLOURED = 0.1
"""Log-prob gap in nats below which a token has no colour."""


def pick(run: Reading, count: int) -> list[dict[str, Any]]:
    """Return at most `count` samples at equal distances, from the first to the last update."""
    total = 0

    def count_line(number: int, line: bytes) -> bool:
        nonlocal total
        total = number + 1
        return False

    run.run.picked(SAMPLES, count_line)
    count = min(count, total)
    wanted = {round(i * (total - 1) / max(count - 1, 1)) for i in range(count)} if count > 1 else {total - 1}
    return run.run.picked(SAMPLES, lambda number, line: number in wanted)


def sample_of(quote: dict[str, Any], name: str = "") -> Sample:
    """Return a line of samples.jsonl for display, with the name of its run if a page has several runs."""
    turns = [Turn("prompt", plain(cut_start(quote["prompt"])))]
    tokens = list(tokens_of(quote))
    texts = quote.get("turns") or [("response", quote["response"])]
    if tokens and "".join(token.text for token in tokens) == "".join(text for who, text in texts if who != "seen"):
        turns += coloured_turns(texts, tokens)
    else:  # tokens that are parts of characters do not add up to the text
        turns += [Turn(who, plain(cut(text))) for who, text in texts]
        turns += [coloured_turn("its tokens", tokens)] if tokens else []
    if quote.get("context") is not None:
        turns.append(Turn("the teacher saw", plain(cut(quote["context"]))))
    note = ""
    if gaps := [token.gap for token in tokens if token.gap is not None]:
        mean, teacher = fmean(gaps), quote["teacher"] or "the teacher"
        likely = f"{short(abs(mean))} nats {'less' if mean > 0 else 'more'} likely"
        note = f"On average {teacher} finds a token {likely} than the student did."
    return Sample(", ".join(filter(None, [name, heading(quote)])), turns, note)


class Token(NamedTuple):
    text: str
    student: float | None
    teacher: float | None
    """Log-probs; None if unknown."""

    @property
    def gap(self) -> float | None:
        return None if self.student is None or self.teacher is None else self.student - self.teacher


def tokens_of(quote: dict[str, Any]) -> Iterator[Token]:
    teacher = quote["teacher_logp"] or [None] * len(quote["tokens"])
    return map(Token._make, zip(quote["tokens"], quote["logp"], teacher, strict=True))


def coloured_turns(texts: Iterable[tuple[str, str]], tokens: Sequence[Token]) -> Iterator[Turn]:
    """Yield the texts of the student, coloured, with the observations of an episode in between."""
    left = iter(tokens)
    for who, text in texts:
        if who == "seen":
            yield Turn(who, plain(cut(text)))
            continue
        own, length = list[Token](), 0
        while length < len(text) and (token := next(left, None)) is not None:
            own.append(token)
            length += len(token.text)
        yield coloured_turn(who, own)


def coloured_turn(who: str, tokens: Sequence[Token]) -> Turn:
    return Turn(who, list(map(span_of, tokens[:MAX_SHOWN_TEXT])), max(0, len(tokens) - MAX_SHOWN_TEXT))


def span_of(token: Token) -> Span:
    if token.gap is None:
        return Span(token.text)
    hint = f"student {token.student:.2f}, teacher {token.teacher:.2f}"
    if abs(token.gap) < UNCOLOURED:
        return Span(token.text, hint)
    strength = 0.12 + 0.68 * min(1.0, abs(token.gap) / STRONGEST)
    return Span(token.text, hint, "less" if token.gap > 0 else "more", strength)


def plain(text: str) -> list[Span]:
    return [Span(text)]


def cut(text: str) -> str:
    return (
        text
        if len(text) <= MAX_SHOWN_TEXT
        else f"{text[:MAX_SHOWN_TEXT]}… and {len(text) - MAX_SHOWN_TEXT:,} more characters"
    )


def cut_start(text: str) -> str:
    return (
        text
        if len(text) <= MAX_SHOWN_TEXT
        else f"({len(text) - MAX_SHOWN_TEXT:,} more characters) …{text[-MAX_SHOWN_TEXT:]}"
    )
