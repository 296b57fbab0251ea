"""Samples as HTML: every token is coloured by the difference between student and teacher log-prob.

Generated text can contain anything, so all text is escaped, and control characters are made visible.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any
from unicodedata import category

from slipstream.reporting.report.runs import Reading
from slipstream.reporting.report.titles import shown
from slipstream.run_dir.writing import SAMPLES, heading

MOST = 1200
"""Largest number of tokens of a response, and of characters of other texts, that are shown."""
FULL = 4.0
"""Log-prob gap in nats from which a token has the strongest colour."""
SEEN = 0.1
"""Log-prob gap in nats below which a token has no colour."""


def chosen(run: Reading, count: int) -> list[dict[str, Any]]:
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


def sample(quote: dict[str, Any], name: str = "") -> str:
    heads = ", ".join(filter(None, [name, heading(quote)]))
    parts = [f'<p class="head">{visible(heads)}</p>', block("prompt", visible(cut_end(quote["prompt"])))]
    tokens = list(marked(quote))
    texts = quote.get("turns") or [("response", quote["response"])]
    if tokens and "".join(token for token, *_ in tokens) == "".join(text for who, text in texts if who != "seen"):
        parts += coloured_turns(texts, tokens)
    else:  # tokens that are parts of characters do not add up to the text
        parts += [block(who, visible(cut(text))) for who, text in texts]
        parts += [block("its tokens", coloured(tokens))] if tokens else []
    if quote.get("context") is not None:
        parts.append(block("the teacher saw", visible(cut(quote["context"]))))
    if gaps := [gap for *_, gap in tokens if gap is not None]:
        mean, teacher = fmean(gaps), visible(quote["teacher"] or "the teacher")
        likely = f"{shown(abs(mean))} nats {'less' if mean > 0 else 'more'} likely"
        parts.append(f'<p class="note">On average {teacher} finds a token {likely} than the student did.</p>')
    return f'<article class="sample">{"".join(parts)}</article>'


Marked = tuple[str, float | None, float | None, float | None]
"""Token text, student log-prob, teacher log-prob, and student minus teacher; unknown numbers are None."""


def marked(quote: dict[str, Any]) -> Iterator[Marked]:
    theirs = quote["teacher_logp"] or [None] * len(quote["tokens"])
    for token, ours, other in zip(quote["tokens"], quote["logp"], theirs, strict=True):
        yield token, ours, other, None if ours is None or other is None else ours - other


def coloured_turns(texts: Iterable[tuple[str, str]], tokens: Sequence[Marked]) -> Iterator[str]:
    """Yield the texts of the student, coloured, with the observations of an episode in between."""
    left = iter(tokens)
    for who, text in texts:
        if who == "seen":
            yield block(who, visible(cut(text)))
            continue
        own, length = list[Marked](), 0
        while length < len(text) and (token := next(left, None)) is not None:
            own.append(token)
            length += len(token[0])
        yield block(who, coloured(own))


def block(label: str, inner: str) -> str:
    kind = label if label in ("prompt", "said", "seen", "response") else "other"
    return f'<div class="turn {kind}"><span class="who">{visible(label)}</span><pre>{inner}</pre></div>'


def coloured(tokens: Sequence[Marked]) -> str:
    more = f"<i>… and {len(tokens) - MOST:,} more tokens</i>" if len(tokens) > MOST else ""
    return "".join(map(span, tokens[:MOST])) + more


def span(token: Marked) -> str:
    text, ours, theirs, gap = token
    if gap is None:
        return visible(text)
    colour = ""
    if abs(gap) >= SEEN:
        strength = 0.12 + 0.68 * min(1.0, abs(gap) / FULL)
        colour = f'class="{"less" if gap > 0 else "more"}" style="--a:{strength:.2f}" '
    return f'<span {colour}title="student {ours:.2f}, teacher {theirs:.2f}">{visible(text)}</span>'


def visible(text: str) -> str:
    """Escape text for HTML; control and direction characters become visible symbols or numbers."""
    return html.escape("".join(map(picture, text)))


def picture(char: str) -> str:
    if char in "\n\t":
        return char
    match category(char):
        case "Cc":
            return chr(0x2400 + ord(char)) if ord(char) < 32 else "␡" if char == "\x7f" else f"\\x{ord(char):02x}"
        case "Cf" | "Cs" | "Zl" | "Zp":
            return f"\\u{ord(char):04x}"
        case _:
            return char


def cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]}… and {len(text) - MOST:,} more characters"


def cut_end(text: str) -> str:
    return text if len(text) <= MOST else f"({len(text) - MOST:,} more characters) …{text[-MOST:]}"
