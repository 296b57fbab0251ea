"""`slipstream report`: one HTML page about runs or a study, or a study as Markdown."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import ConfigError, RunDirError, printable
from slipstream.reporting.report import sections as of_runs
from slipstream.reporting.report import study as of_study
from slipstream.reporting.report import study_figures
from slipstream.reporting.report.page import Page, document
from slipstream.reporting.report.runs import read
from slipstream.run_dir.atomic_files import check_page, private, write_atomic, writing
from slipstream.studies.results import STUDY_FILE, Sweep


def run(args: Namespace) -> None:
    if args.markdown is not None:
        if args.output is not None:
            raise ConfigError("--output is the file of the HTML page: leave it out with --markdown")
        print(*write_markdown(args.paths, args.markdown), sep="\n")
    else:
        print(printable(str(report(args.paths, args.output))))


def report(paths: Sequence[Path], output: Path | None) -> Path:
    """Write the page to `output`, or into the first directory if None; return its path."""
    target = output or paths[0] / "report.html"
    check_page(target)
    command = ["slipstream", "report", *map(str, paths), *(["--output", str(output)] if output else [])]
    text = document(page_of(paths, shlex.join(command)))
    with private(), writing(target):
        write_atomic(target, text)
    return target


def page_of(paths: Sequence[Path], command: str) -> Page:
    if not any(map(is_study, paths)):
        return of_runs.page(read(paths), command)
    if len(paths) > 1:
        raise ConfigError("a report shows one study, or runs: name one study, or the directories of its cells")
    return of_study.page(begun_study(paths[0]), command)


def is_study(path: Path) -> bool:
    return (path / STUDY_FILE).exists()


def begun_study(path: Path) -> Sweep:
    sweep = Sweep(path)
    if not sweep.finished:
        raise RunDirError(f"{path} has no finished run yet: there is nothing to report")
    return sweep


def write_markdown(paths: Sequence[Path], directory: Path) -> list[Path]:
    """Write a study as a Markdown page with its figures as SVG; return the paths of all files."""
    if len(paths) > 1 or not is_study(paths[0]):
        raise ConfigError("--markdown writes one study: name the directory of one sweep")
    sweep = begun_study(paths[0])
    from slipstream.reporting.report.svg import draw_svg

    figures = study_figures.result_figures(sweep)
    texts = {f"{sweep.path.resolve().name}.md": "\n".join(of_study.markdown_page(sweep, directory))}
    texts |= dict(zip(figures, draw_svg(list(figures.values())), strict=True))
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(directory / name, text)
    return [directory / name for name in texts]
