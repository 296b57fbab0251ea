"""`slipstream push`: upload the student of a finished run to the hub, with its card, config, metrics and report."""

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import ConfigError, RunDirError, first_line, printable
from slipstream.plan.placement import size

BESIDE = ("config.toml", "metrics.jsonl")
"""Files of a run that are uploaded to the directory `run`."""


def run(args: Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        files = files_of(args.directory, Path(made) / "report.html")
        for name, path in files.items():
            print(printable(f"{size(path.stat().st_size):>12}  {name}"))
        kind = "public" if args.public else "private"
        if args.dry_run:
            print(f"dry run: these {len(files)} files would be sent to the {kind} repository {args.to}")
            return
        print(f"done: {upload(args.to, files, private=not args.public)}")


def files_of(directory: Path, report: Path) -> dict[str, Path]:
    """Return the files to upload by their names in the repository; write the report of the run to `report`."""
    from slipstream.commands.report import report as write_report

    final = directory / "final"
    if not (final / "config.json").is_file():
        raise RunDirError(f"{directory} has no finished student: final is written when the run ends")
    model = {str(path.relative_to(final)): path for path in sorted(final.rglob("*")) if path.is_file()}
    write_report([directory], report)
    beside = {f"run/{name}": directory / name for name in BESIDE if (directory / name).is_file()}
    return model | beside | {"run/report.html": report}


def upload(repository: str, files: Mapping[str, Path], *, private: bool) -> str:
    """Send files in one commit to a repository, which is created if it is missing; return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    hub = HfApi()
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.create_commit(repository, operations, commit_message="Student trained by Slipstream")
    except HFValidationError as error:
        raise ConfigError(f"--to {repository}: {first_line(error)}") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"the hub did not take {repository}: {first_line(error)}") from None
    return str(address)
