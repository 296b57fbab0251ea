"""Write the pages of the documentation that are made from the code, or partly: `python tools/pages.py`.

Tests compare the pages with what this tool makes, so they cannot say anything else than the code.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from slipstream import metric_names as vocabulary
from slipstream.config.base import Section
from slipstream.config.file import bounds, describe, fields, members
from slipstream.config.schema import Config
from slipstream.estimators.catalogue import TITLES, Entry, catalogue
from slipstream.reporting.advice.measurements import KL_TOKENS, SURE_ERRORS, WINDOW
from slipstream.reporting.advice.tree import ADVICE_RULES, Weight

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = DOCS.parent / "src" / "slipstream"


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
    shown = ", ".join(f"`{row.names.split()[0]}`" for row in vocabulary.rows() if row.label)
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
        *(f"- `{word}`: {meaning}" for word, (_, meaning) in vocabulary.PLACEHOLDERS.items()),
    ]
    for section, rows in vocabulary.VOCABULARY.items():
        lines += ["", f"## {section}", "", "| name | meaning | healthy | from |", "| --- | --- | --- | --- |"]
        for row in rows:
            names = ", ".join(f"`{name}`" for name in row.names.split())
            source = f"[`{row.source}`](../src/slipstream/{row.source})"
            lines.append(f"| {names} | {row.meaning} | {row.healthy} | {source} |")
    return "\n".join(lines) + "\n"


# --- docs/estimators.md -----------------------------------------------------------------------------------------------

INTRODUCTIONS = {
    "distillation": "Losses from a teacher's scores. `importance treatment`: weight of draws from an older student.",
    "tokens": "Weights of tokens by their position, with mean 1 in each response: `loss.tokens`.",
    "policy": "Losses from advantages, `policy_loss(NAME, …)`.",
    "advantage": "Estimators of how much better a sample is than expected, `advantage(NAME, …)`. The column of the "
    "targeted failure holds the baseline. Scope `group`: the answers to one prompt, which stay together.",
    "correction": "Presets of importance weights (IS) and rejection (RS) for the gap between sampling and learning "
    "policy, `PRESETS[NAME]`. Their parts are the next two families.",
    "level": "Units over which token ratios are multiplied to one weight, `importance_ratio(NAME, …)`: "
    "`correction.is_level`, which replaces the preset's level.",
    "rejection": "Rules that reject tokens or rows, `correct(rs={NAME: bound, …})`: `correction.rs`, not the preset's.",
    "estimate": "Estimates of the KL to the reference from one token, `kl_estimate(kind=NAME)`: `reference.estimate`.",
    "controller": "Change of the coefficient β of this KL after an update: `reference.control`.",
    "centre": "Estimates of the part of the policy gradient that does not depend on the token: `policy.centre`.",
}


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
        lines += ["", f"## {family.capitalize()}", "", INTRODUCTIONS[family], *table_of(entries)]
    return "\n".join(lines) + "\n"


def table_of(entries: list[Entry]) -> list[str]:
    """Return the table of a family; a property that all of its entries share is a sentence above it."""
    shared = [column for column, values in enumerate(zip(*entries, strict=True)) if len(set(values)) == 1]
    titles, *rows = [
        [cell for column, cell in enumerate(cells) if column not in shared]
        for cells in (TITLES, *([f"`{entry.name}`", *entry[1:]] for entry in entries))
    ]
    same = "; ".join(f"{TITLES[column]}: {entries[0][column]}" for column in shared if entries[0][column] != "–")
    sentence = [f"The same for all: {same}."] if same else []
    return [*sentence, "", line(titles), line(["---"] * len(titles)), *map(line, rows)]


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
the last {WINDOW} updates is beyond it by {SURE_ERRORS:g} standard errors. The standard error comes from the scatter of
the updates, from the recorded error (`teacher/kl_error`), or from the number of tokens (KLs at one version or one
lag, from {KL_TOKENS} tokens on). *Now* means the last {WINDOW} updates. *Then* means the first {WINDOW} updates after
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
        for rule in ADVICE_RULES
    ]
    hidden = [f"- **{rule.name}** hides {', '.join(rule.hides)}" for rule in ADVICE_RULES if rule.hides]
    return ADVICE + "\n".join(rows) + "\n\n## What hides what\n\n" + "\n".join(hidden) + "\n"


def names(words: str) -> str:
    """Metrics as code."""
    return " ".join(as_code(word) for word in words.split(" "))


def as_code(word: str) -> str:
    bare = word.rstrip(",;.:")
    known = bool(vocabulary.find(bare)) or bare in vocabulary.names()
    return f"`{bare}`{word[len(bare) :]}" if known else word


# --- docs/rules.md ----------------------------------------------------------------------------------------------------

RULES_PAGE = """# Rules

Made from the code by `python tools/pages.py`.

A run begins only if all of these rules hold. `slipstream train`, `config --check`, `gateway` and `doctor` test them in
the same order, and print the first one that is broken. `config --check --shapes` tests those that need no more of a
model than its config.json, and `eval` those that are not about training. Words in braces stand for values of the config
or of a file. [config.md](config.md) has the values that each setting allows."""
RULE_FILES = (
    *(f"config/rules/{name}.py" for name in ("objective", "offpolicy", "workers", "evaluation", "estimators")),
    *(f"plan/rules/{name}.py" for name in ("machine", "models", "vllm", "data", "endpoints", "memory")),
)


def rules() -> str:
    """Return every rule between sections of the config, and between the config and facts."""
    lines = [RULES_PAGE]
    for name in RULE_FILES:
        tree = ast.parse((SOURCE / name).read_text("utf-8"))
        title = (ast.get_docstring(tree) or "").splitlines()[0].rstrip(".")
        lines += ["", f"## {title}", "", "| rule | what clashes, and what to write instead |", "| --- | --- |"]
        for function in tree.body:
            texts = messages(function) if isinstance(function, ast.FunctionDef) else []
            lines += [line([f"`{function.name}`", text]) for text in texts]
    return "\n".join(lines) + "\n"


def messages(function: ast.AST) -> list[str]:
    """Return the messages that a function yields or raises, in the order of the code."""
    texts = list[tuple[int, str]]()
    for node in ast.walk(function):
        match node:
            case ast.Yield(value=ast.Constant() | ast.JoinedStr() as text):
                texts.append((node.lineno, template_of(text)))
            case ast.Raise(exc=ast.Call(args=[ast.Constant() | ast.JoinedStr() as text])):
                texts.append((node.lineno, template_of(text)))
    return [text for _, text in sorted(texts)]


def template_of(text: ast.Constant | ast.JoinedStr) -> str:
    """Return a message with expressions in braces in place of values."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
        for part in parts
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


def pages() -> dict[str, str]:
    """Return the text of every generated page by its file in docs/."""
    return {
        "config.md": settings(),
        "metrics.md": metrics(),
        "estimators.md": estimators(catalogue()),
        "advice.md": advice(),
        "rules.md": rules(),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, "utf-8")
