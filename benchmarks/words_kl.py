"""KL of the last students of a study of the task `words`, over the whole vocabulary, and the study's claims about it.

    slipstream sweep configs/lab/finding3_wide.toml
    python benchmarks/words_kl.py runs/finding3_wide > docs/findings/finding3_wide_kl.md

Accuracy counts grammatical sentences only: a student that says few different words can have a high one. So here every
student of the study (`keep = true`) gives its distribution after each word of the same held-out sentences. The sum over
all tokens is exact, so that the only error is that of the seeds.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.data.words import END, VOCABULARY_WORDS, next_words, numbered
from slipstream.estimators.divergence import dense
from slipstream.estimators.numerics import LOG_FLOOR
from slipstream.models.resolve import model_path
from slipstream.reporting.report.study import comparison, summary_of
from slipstream.reporting.report.titles import mean_text
from slipstream.statistics import Estimate
from slipstream.studies.results import Sweep, SweepCell

SENTENCES = 200
HEAD = """# Finding 3 with a wide vocabulary, by exact KL

The students of [the study](finding3_wide.md), measured at the {count:,} places of {sentences} held-out sentences of the
language. KL is the sum over all 2,050 tokens in nats per token, without draws. *Reverse* is KL(student‖teacher), which
all arms minimise. *Forward* is KL(language‖student), from the known probabilities of the language. It is large for a
student that has lost part of the language. Before training they are {before[reverse]:.3f} and
{before[forward]:.3f}; the teacher's forward KL is {teacher:.3f}. A claim with one seed has no standard error,
so its verdict is open.

```console
slipstream sweep configs/lab/finding3_wide.toml
python benchmarks/words_kl.py runs/finding3_wide > docs/findings/finding3_wide_kl.md
```

The claims are those of the study, about the reverse KL: a student is better if its KL is lower.
"""


class Places:
    """Held-out sentences, and the distributions of language and teacher at each of their places."""

    def __init__(self, sentences: int = SENTENCES) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model_path("builtin:word_teacher"))
        texts = [f"{prompt} {answer}" for prompt, answer in (numbered("eval", index) for index in range(sentences))]
        asked = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        self.ids, self.there = asked["input_ids"], asked["attention_mask"]
        self.scored = self.there.bool()
        self.scored[:, 0] = False  # prompts have two words, so the student never says the second
        self.count = int(self.scored.sum())
        ids = tokenizer.get_vocab() | {END: tokenizer.eos_token_id}
        language = {ids[word]: following(word, ids) for word in VOCABULARY_WORDS}
        self.language_PV = torch.stack([language[token] for token in self.ids[self.scored].tolist()])
        self.teacher_PV = self.of("builtin:word_teacher")

    @torch.no_grad()
    def of(self, name: str) -> Tensor:
        """[places, V], log-probs by a model."""
        model = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32).eval()
        logits = model(input_ids=self.ids, attention_mask=self.there).logits
        found: Tensor = logits[self.scored].double().log_softmax(-1)
        return found

    def kl(self, name: str) -> dict[str, float]:
        logp_PV = self.of(name)
        return {
            "reverse": dense(logp_PV, self.teacher_PV, kind="reverse").mean().item(),
            "forward": dense(logp_PV, self.language_PV, kind="forward").mean().item(),
        }


def following(word: str, ids: Mapping[str, int]) -> Tensor:
    """[V], the log-probs of the language after a word."""
    found_V = torch.full((len(VOCABULARY_WORDS) + 2,), LOG_FLOOR, dtype=torch.float64)
    for after, share in next_words(word).items():
        found_V[ids[after]] = math.log(share)
    return found_V


class ByKL(Sweep):
    """A study whose measures are the KLs of the last students, negated: what is larger is better, as in its claims."""

    def __init__(self, path: Path, places: Places) -> None:
        super().__init__(path)
        self.places, self.found = places, dict[Path, dict[str, float]]()

    def value(self, cell: SweepCell, measure: str) -> float:
        if cell.path not in self.found:
            self.found[cell.path] = self.places.kl(str(cell.path / "final"))
        return -self.found[cell.path]["forward" if measure == "forward" else "reverse"]


def negated(found: Estimate) -> str:
    return mean_text(None if found.mean is None else -found.mean, found.se)


def tables(sweep: ByKL) -> Iterator[str]:
    yield "| claim | claimed to be below 0 | is | p (Holm) | |\n| --- | --- | --- | --- | --- |"
    for each in sweep.claims():
        what = comparison(each).partition(": ")[2]
        is_now = mean_text(each.difference.mean, each.difference.se)
        yield f"| {each.claim.says} | −KL: {what} | {is_now} | {each.p_text} | **{each.verdict}** |"
    lags = sorted({point.x for point in sweep.study.points})
    for measure in ("reverse", "forward"):
        slopes, rows = sweep.slopes(measure), dict[str, dict[int, str]]()
        for row in sweep.table(measure):
            rows.setdefault(row.series, {})[row.x] = negated(row)
        yield f"\n| {measure} KL | {' | '.join(f'k = {lag}' for lag in lags)} | slope against {sweep.doublings} |"
        yield f"|{' --- |' * (2 + len(lags))}"
        for name, cells in rows.items():
            slope = negated(slopes[name]) if name in slopes else ""
            yield f"| {name} | {' | '.join(cells.get(lag, '') for lag in lags)} | {slope} |"
    last = [f"{negated(row)} ({row.series})" for row in sweep.table() if row.x == lags[-1] and row.mean is not None]
    yield f"\nIn short: the reverse KL after training at k = {lags[-1]} is {', '.join(last)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of the study")
    args = parser.parse_args()
    torch.set_num_threads(1)
    places = Places()
    teacher = dense(places.teacher_PV, places.language_PV, kind="forward").mean().item()
    before = places.kl("builtin:word_student")
    print(HEAD.format(count=places.count, sentences=SENTENCES, before=before, teacher=teacher))
    sweep = ByKL(args.run, places)
    print("\n".join(tables(sweep)))
    print(f"\n{summary_of(sweep)}")


if __name__ == "__main__":
    main()
