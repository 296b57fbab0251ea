"""Every setting on one page, made from the schema: it cannot say anything else.

python -m slipstream.config.page > docs/config.md
"""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from slipstream.config.base import Section
from slipstream.config.file import bounds, describe, fields, members
from slipstream.config.schema import Config

INTRODUCTION = """# Every setting

Made from the code by `python -m slipstream.config.page`; `slipstream config` prints the same.

A config is a TOML file. What it leaves out has the default that stands here, and a key that does not stand here is an
error; `none` means left out. On the command line `--learner.lr 1e-5` replaces a setting of the file, and
`slipstream config CONFIG` shows what a file comes to. A section of several kinds has the settings of its own kind."""


def markdown() -> str:
    sections: dict[str, dict[str, list[tuple[str, FieldInfo]]]] = {}
    for dotted, info, kind in fields():
        section, _, name = dotted.rpartition(".")
        sections.setdefault(section, {}).setdefault(kind, []).append((name, info))
    lines = [INTRODUCTION]
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
        return [f"## [{section}]", "", f'Of several kinds; without it, `kind = "{default.kind}"`.']
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


if __name__ == "__main__":
    print(markdown(), end="")
