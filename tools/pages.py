"""Write the pages of the documentation that are made from the code, or partly: `python tools/pages.py`.

Tests compare the pages with what this tool makes, so they cannot say anything else than the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from slipstream import metric_names as vocabulary
from slipstream.config.base import Section
from slipstream.config.file import bounds, describe, fields, members
from slipstream.config.schema import Config
from slipstream.estimators.catalogue import INTRODUCTIONS, TITLES, Entry, catalogue
from slipstream.reporting.advice.measurements import CHANCE, FEW, WINDOW
from slipstream.reporting.advice.rules import Weight
from slipstream.reporting.advice.tree import RULES

DOCS = Path(__file__).parents[1] / "docs"


# --- docs/config.md ---------------------------------------------------------------------------------------------------

SETTINGS = """# Every setting

Made from the code by `python tools/pages.py`; `slipstream config` prints the same.

A config is a TOML file. What it leaves out has the default that stands here, and a key that does not stand here is an
error; `none` means left out. On the command line `--learner.lr 1e-5` replaces a setting of the file, and
`slipstream config CONFIG` shows what a file comes to. A section of several kinds has the settings of its own kind."""


def settings() -> str:
    """Return every setting with its default."""
    sections: dict[str, dict[str, list[tuple[str, FieldInfo]]]] = {}
    for dotted, info, kind in fields():
        section, _, name = dotted.rpartition(".")
        sections.setdefault(section, {}).setdefault(kind, []).append((name, info))
    lines = [SETTINGS]
    for section, by_kind in sections.items():
        lines += ["", *heading(section, several=len(by_kind) > 1)]
        for kind, settings in by_kind.items():
            lines += ["", *of_kind(section, kind, dict(settings))]
    return "\n".join(lines) + "\n"


def heading(section: str, *, several: bool) -> list[str]:
    if not section:
        return ["## The run", "", "At the top of the file, before any section."]
    default = default_of(section)
    if several:
        return [f"## [{section}]", "", f'The keys depend on `kind`. The default is `kind = "{default.kind}"`.']
    return [f"## [{section}]", *(["", "Left out by default."] if default is None else [])]


def default_of(section: str) -> Any:
    holder: type[Section] = Config
    for name in section.replace(".NAME", "").split("."):
        info = holder.settings()[name]
        holder = members(info.annotation)[0]
    return info.default


def of_kind(section: str, kind: str, settings: dict[str, FieldInfo]) -> list[str]:
    lines = list[str]()
    if kind:
        lines += [f"### {section}.kind = {named(kind)}", "", settings.pop("kind").description or "", ""]
    if not settings:
        return [*lines, "It has no settings."]
    lines += ["| setting | type and default | | what it is |", "| --- | --- | --- | --- |"]
    return lines + [row(name, info) for name, info in settings.items()]


def named(kind: str) -> str:
    return " or ".join(f'"{name}"' for name in kind.split(" | "))


def row(name: str, info: FieldInfo) -> str:
    cells = [f"`{name}`", f"`{describe(info)}`", bounds(info), " ".join((info.description or "").split())]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# --- docs/metrics.md --------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Return every number that a run writes and what it means."""
    shown = ", ".join(f"`{term.names.split()[0]}`" for term in vocabulary.terms() if term.label)
    lines = [
        "# Metrics",
        "",
        "Made from the code by `python tools/pages.py`. A line of `metrics.jsonl` has `kind` (`train`, "
        "`eval`), `update`, and numbers under these names and no others; each is there when what it tells of is there. "
        "Of several held-out sets each has a line, with its name as `set`. Trackers get the same, with `train/` before "
        "names that have no `/`, and `eval/` or `eval/SET/` before those of evaluations.",
        "",
        f"While a run goes on a terminal shows {shown}. *Healthy* is a rule of thumb: outside of it, look again. "
        "Words in capitals:",
        "",
        *(f"- `{word}`: {meaning}" for word, (_, meaning) in vocabulary.WORDS.items()),
    ]
    for section, terms in vocabulary.VOCABULARY.items():
        lines += ["", f"## {section}", "", "| name | meaning | healthy | from |", "| --- | --- | --- | --- |"]
        for term in terms:
            names = ", ".join(f"`{name}`" for name in term.names.split())
            source = f"[`{term.source}`](../src/slipstream/{term.source})"
            lines.append(f"| {names} | {term.meaning} | {term.healthy} | {source} |")
    return "\n".join(lines) + "\n"


# --- docs/estimators.md -----------------------------------------------------------------------------------------------


def estimators(families: Mapping[str, list[Entry]]) -> str:
    """Return every loss, correction and advantage with its properties."""
    lines = [
        "# Estimators",
        "",
        "Made from the code by `python tools/pages.py`; `slipstream estimators` prints a summary, "
        "and with a name all of one.",
        "Scope says what the loss of one token may depend on, and so where a batch may be cut: anywhere (`token`), "
        "between rows (`row`), or only after a pass over the whole of it (`batch`).",
    ]
    for family, entries in families.items():
        lines += ["", f"## {family.capitalize()}", "", INTRODUCTIONS[family], ""]
        lines += [line(TITLES), line(["---"] * len(fields_of(Entry)))]
        lines += [line([f"`{entry.name}`", *astuple(entry)[1:]]) for entry in entries]
    return "\n".join(lines) + "\n"


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# --- docs/advice.md ---------------------------------------------------------------------------------------------------

LABELS: dict[Weight, str] = {"wrong": "", "speed": " (lost time)", "watch": " (warning)", "tune": " (suggestion)"}

ADVICE = f"""# Advice

Made from the code by `python tools/pages.py`.

```console
$ slipstream advise runs/first            # also while it goes on
$ slipstream advise runs/first --json     # for machines
```

The command reads the files of a run. It says what is wrong, which number shows it, the cause, the smallest change
that helps, and which metrics to watch then. It loads no model and changes nothing, and its exit code is always 0. A
change is proposed only if the run's config allows it and it has an effect; the first such change in the order of
the table is shown. Append it to `slipstream train CONFIG`. Or write it into the run's config and continue with
`slipstream resume RUN --change KEY`.

**Four severities.** An *error* should be fixed. *Lost time* makes a run slower, but not worse. A *warning* is
beyond a rule of thumb and does no harm yet, such as drift while the student learns. A *suggestion* is a threshold
derived from this run. "Nothing is wrong" means that there is no error.

**Causes first.** Engines come before staleness, staleness before variance, and variance before clipping, because
the same KL has a different meaning for each. Tokens that are trained on at the version that sampled them (lag 0,
and always the first update) are examined apart from stale tokens. A difference there is a bug that no correction
removes. An answer hides the answers that are its consequences, and lists their names.

**Significance.** Updates are small samples, and ratios have long tails. A limit counts as crossed if the mean of
the last {WINDOW} updates is beyond it by {CHANCE:g} standard errors. The standard error comes from the scatter of
the updates, from the recorded error (`teacher/kl_error`), or from the number of tokens (KLs at one version or one
lag, from {FEW} tokens on). *Now* means the last {WINDOW} updates. *Then* means the first {WINDOW} updates after
responses of every length have finished: short responses finish first, and their KL is lower. For a run that is too
short for both, the command says so. A student *improves* if the KL to its teachers fell, or if a reward or held-out
accuracy rose significantly. It *gets worse* if a KL is 10 % above its best, or a reward 10 % below.

**Limits.** Thresholds are rules of thumb. Those of drift, variance, clipping and length are from published runs;
those of first tokens, waits and lost work are our own. `python benchmarks/advice.py` measures how often causes that
were planted into real runs are named, and what is said about healthy runs ([results](../benchmarks/results)).

## The tree

| answer | reads | found when | cause | change | then watch |
| --- | --- | --- | --- | --- | --- |
"""


def advice() -> str:
    """Return every rule of `slipstream advise`."""
    rows = [
        f"| {rule.name}{LABELS[rule.weight]} | {names(rule.reads)} | {rule.when} | {rule.cause} | {rule.change} | "
        f"{names(rule.watch)} |"
        for rule in RULES
    ]
    hidden = [f"- **{rule.name}** hides {', '.join(rule.hides)}" for rule in RULES if rule.hides]
    return ADVICE + "\n".join(rows) + "\n\n## What hides what\n\n" + "\n".join(hidden) + "\n"


# --- the symptoms in docs/choosing.md ---------------------------------------------------------------------------------

BEGIN, END = "<!-- symptoms: made by tools/pages.py -->\n", "<!-- end of symptoms -->\n"


def choosing() -> str:
    """Return docs/choosing.md with its table of symptoms made from the rules of `slipstream advise`."""
    before, _, rest = (DOCS / "choosing.md").read_text("utf-8").partition(BEGIN)
    rows = [
        f"| {rule.name}{LABELS[rule.weight]} | {names(rule.reads)}: {rule.when} | {rule.change} |"
        for rule in RULES
        if rule.weight != "tune"
    ]
    table = "| cause | you see | write |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    return before + BEGIN + table + END + rest.partition(END)[2]


def names(words: str) -> str:
    """Metrics as code."""
    return " ".join(as_code(word) for word in words.split(" "))


def as_code(word: str) -> str:
    bare = word.rstrip(",;.:")
    known = bool(vocabulary.find(bare)) or any(bare in term.names.split() for term in vocabulary.terms())
    return f"`{bare}`{word[len(bare) :]}" if known else word


def pages() -> dict[str, str]:
    """Return the text of every generated page by its file in docs/."""
    return {
        "config.md": settings(),
        "metrics.md": metrics(),
        "estimators.md": estimators(catalogue()),
        "advice.md": advice(),
        "choosing.md": choosing(),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, "utf-8")
