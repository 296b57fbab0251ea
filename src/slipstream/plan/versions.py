"""Compare installed libraries with the newest versions that this project was tested with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

NEWEST_TESTED = {"datasets": "5.2", "peft": "0.21", "torch": "2.13", "transformers": "5.24"}
"""Newest versions, as major and minor number, that pass `make test-newest`."""


def installed_versions() -> dict[str, str]:
    """Return the version of each library of NEWEST_TESTED that is installed here."""
    versions = dict[str, str]()
    for library in NEWEST_TESTED:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions


def version_warnings(installed: Mapping[str, str]) -> list[str]:
    """Return a warning for each library whose minor version is newer than the newest tested one."""
    return [
        f"{library} {installed[library]} is newer than {tested}, the newest version that was tested: if a check of "
        f"a model fails, run pip install '{library}=={tested}.*'"
        for library, tested in NEWEST_TESTED.items()
        if library in installed and _minor(installed[library]) > _minor(tested)
    ]


def _minor(release: str) -> tuple[int, int]:
    major, minor, *_ = release.split(".")
    return int(major), int(minor)
