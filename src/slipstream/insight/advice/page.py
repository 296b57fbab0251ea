"""docs/advice.md, made from the tree:

python -m slipstream.insight.advice.page > docs/advice.md
"""

from __future__ import annotations

from slipstream import vocabulary
from slipstream.insight.advice.answer import Weight
from slipstream.insight.advice.readings import CHANCE, FEW, WINDOW
from slipstream.insight.advice.tree import RULES

SAID: dict[Weight, str] = {"wrong": "", "speed": " (time)", "watch": " (an eye)", "tune": " (suggested)"}

INTRODUCTION = f"""# Advice

Made from the code by `python -m slipstream.insight.advice.page`.

```console
$ slipstream advise runs/first            # also while it goes on
$ slipstream advise runs/first --json     # for machines
```

reads what a run has written, and says what is wrong, by which number, why, the smallest change, and what to watch
then. Nothing is loaded, asked or changed, and the exit code is 0 whatever is found. A change is proposed only if
the config of this very run takes it and is another one with it; the first that does, in the order of the table. It
goes behind `slipstream train CONFIG`, or into the run's config, and `slipstream resume RUN --change KEY` goes on.

**Four weights.** What is *wrong* is to be mended. What takes *time* makes a run no worse. What is worth *an eye* is
beyond a rule of thumb and does no harm yet: drift, say, while the student learns. What is *suggested* are
thresholds that this run would choose. "Nothing is wrong" means that there is nothing of the first kind.

**Upstream first.** Systems come before staleness, staleness before variance, variance before clipping: the same KL
means another thing for each. Tokens that are learned from at the version that drew them (lag 0: those of the first
update always are) are read apart from stale ones: what differs there is a bug, and no correction removes it. An
answer hides those that follow from it, and names them.

**Beyond chance.** Updates are small samples, and ratios have long tails. A threshold counts as crossed where the
mean of the last {WINDOW} updates is beyond it by {CHANCE:g} standard errors, by how they scatter, by the errors
that came with them (`teacher/kl`), or by the number of tokens (KLs of one version, and of one lag: at least {FEW}).
*Now* is the last {WINDOW} updates, *then* the first {WINDOW} after answers of every length have come in (short ones
are done first, and their KL is less); a run that has not both is told that it is short. That the student *learns* means
that the KL to its teachers fell, or a reward or held-out accuracy rose, beyond chance; that it is *no better*
means that a KL is a tenth above its best, or a reward a tenth below.

**What it cannot know.** Thresholds are rules of thumb: those of drift, variance, clipping and length are from
published runs, those of first tokens, waits and lost work are ours. How often causes are named that were planted
into real runs, and what is said of healthy ones: `python benchmarks/advice.py` (the figures are in
[benchmarks/results](../benchmarks/results)).

## The tree

| answer | reads | found when | cause | change | then watch |
| --- | --- | --- | --- | --- | --- |
"""


def markdown() -> str:
    rows = [
        f"| {rule.name}{SAID[rule.weight]} | {names(rule.reads)} | {rule.when} | {rule.cause} | {rule.change} | "
        f"{names(rule.watch)} |"
        for rule in RULES
    ]
    hidden = [f"- **{rule.name}** hides {', '.join(rule.hides)}" for rule in RULES if rule.hides]
    return INTRODUCTION + "\n".join(rows) + "\n\n## What hides what\n\n" + "\n".join(hidden) + "\n"


def names(words: str) -> str:
    """Metrics as code."""
    return " ".join(as_code(word) for word in words.split(" "))


def as_code(word: str) -> str:
    bare = word.rstrip(",;.:")
    known = bool(vocabulary.find(bare)) or any(bare in term.names.split() for term in vocabulary.terms())
    return f"`{bare}`{word[len(bare) :]}" if known else word


if __name__ == "__main__":
    print(markdown(), end="")
