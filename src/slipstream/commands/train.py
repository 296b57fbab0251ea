"""`slipstream train`, `resume` and `scale`: start a run, continue it, and change its number of workers."""

from argparse import Namespace
from pathlib import Path

from slipstream.console import Screen
from slipstream.errors import printable


def run(args: Namespace) -> None:
    from slipstream.runs.start import train

    print_done(train(args.settings, Screen(), name=Path(args.config).stem, checks=not args.skip_checks))


def resume_run(args: Namespace) -> None:
    from slipstream.runs.start import resume

    accepted = tuple(args.change)
    print_done(resume(args.directory, Screen(), number=args.number, updates=args.updates, accepted=accepted))


def print_done(path: Path) -> None:
    print(printable(f"done: student in {path / 'final'}, metrics in {path / 'metrics.jsonl'}"))


def scale_run(args: Namespace) -> None:
    from slipstream.runs.control_socket import scale

    print(printable("\n".join(scale(args.directory, args.changes))))
