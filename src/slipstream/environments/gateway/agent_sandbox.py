"""Sandbox of an agent, which sees its workspace, its program and /usr, and can reach only the gateway.

The sandbox includes the program's installation (a virtual environment and its base Python) and files that the command
names. Tools that the agent starts run in the same sandbox. If the run is started by root, the agent gets a user of its
own, who owns the workspace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.environments.gateway import bridge
from slipstream.sandbox.base import Limits
from slipstream.sandbox.bubblewrap import NOBODY_ID, Bubblewrap, another_user
from slipstream.sandbox.limits import sealed_file, with_limits

GATEWAY_PORT = 8008
"""Port of the gateway inside the sandbox; no other port can be reached."""
SOCKET_PATH, BRIDGE_PATH = "/run/gateway", "/run/bridge.py"
AGENT_LIMITS = Limits(memory=8 << 30, disk=4 << 30, processes=512)
"""Limits of each process of an agent; `processes` is the maximum number of processes together."""
NAMESPACES = [
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"),
    *("--perms", "1777", "--size", str(64 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
]
UNPRIVILEGED = ["--unshare-user", "--uid", NOBODY_ID, "--gid", NOBODY_ID, "--cap-drop", "ALL", "--disable-userns"]


@dataclass(frozen=True)
class AgentSandbox:
    sandbox: Bubblewrap
    user: int | None
    """User id of the agent if the run is started by root, else None."""

    @classmethod
    def new(cls) -> AgentSandbox:
        """Create a sandbox; raise ConfigError if this machine does not support it."""
        return cls(Bubblewrap(), another_user())

    def give(self, place: Path) -> None:
        """Make the agent's user the owner of a directory and all its contents."""
        if self.user is not None:
            subprocess.run(["/bin/chown", "-hR", f"{self.user}:{self.user}", "--", place], check=True)

    @contextmanager
    def wrap(
        self,
        command: Sequence[str],
        named: Sequence[str],
        place: Path,
        cwd: str,
        env: Mapping[str, str],
        socket: str,
        seconds: float,
    ) -> Iterator[tuple[list[str], list[int]]]:
        """Yield the sandboxed command, and the file descriptors that it inherits.

        `named` is the command before its placeholders are replaced. The command starts in `cwd` of `place`. It can
        write only to `place` and to temporary directories, and can connect only to `socket`.
        """
        programs, shown = visible_paths(named)
        path = ":".join([*programs, self.sandbox.path])
        with ExitStack() as opened:
            filtering = opened.enter_context(sealed_file(self.sandbox.filter))
            bridging = opened.enter_context(sealed_file(Path(bridge.__file__).read_bytes()))
            variables = [word for name, value in {**env, "PATH": path}.items() for word in ("--setenv", name, value)]
            words = ["python3", "-I", "-S", BRIDGE_PATH, SOCKET_PATH, str(GATEWAY_PORT), "--", *command]
            limits = replace(AGENT_LIMITS, seconds=seconds)
            yield [
                self.sandbox.bwrap, *NAMESPACES, *(UNPRIVILEGED if self.user is None else []), *self.sandbox.system,
                *("--perms", "1777", "--size", str(AGENT_LIMITS.disk), "--tmpfs", "/tmp"),
                *parent_directories([*shown, str(place), SOCKET_PATH]),
                *(word for each in shown for word in ("--ro-bind", each, each)),
                *("--bind", str(place), str(place)),
                *("--bind", socket, SOCKET_PATH, "--perms", "0444", "--file", str(bridging), BRIDGE_PATH),
                *("--remount-ro", "/"),
                *("--chdir", str(place / cwd), "--seccomp", str(filtering), "--clearenv", *variables, "--"),
                *([] if self.user is None else become(self.user)),
                *with_limits(words, limits, processes=True),
            ], [filtering, bridging]  # fmt: skip


def parent_directories(places: Sequence[str]) -> list[str]:
    """Return bwrap options that create the parent directories of these paths, accessible to all users."""
    found = {str(each) for place in places for each in list(Path(place).parents)[:-1]} - {"/tmp", "/usr"}
    return [word for each in sorted(found) for word in ("--perms", "0755", "--dir", each)]


def become(user: int) -> list[str]:
    return [
        *("/usr/bin/setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"),
        *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"),
    ]


def visible_paths(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the directories of the programs that a command names, and the paths outside /usr that it needs."""
    programs, shown = list[str](), dict[str, None]()
    for word in command:
        found = shutil.which(word) or (word if word.startswith("/") and Path(word).exists() else None)
        if found is None or _usual(found):
            continue
        place = Path(found).absolute()
        shown[str(place)] = None
        if os.access(place, os.X_OK) and place.is_file():
            programs.append(str(place.parent))
            shown |= dict.fromkeys(map(str, installation(place)))
    return programs, [each for each in shown if not _usual(each)]


def installation(program: Path) -> list[Path]:
    """Return the installation of a program, and for a virtual environment also that of its base Python."""
    top, settings = program.parent.parent, program.parent.parent / "pyvenv.cfg"
    if settings.is_file():
        lines = (line.partition("=") for line in settings.read_text("utf-8").splitlines())
        homes = [value.strip() for key, _, value in lines if key.strip() == "home"]
        return [top, *(Path(home).parent for home in homes)]
    real = program.resolve()
    return [real.parent.parent if (real.parent.parent / "lib").is_dir() else real]


def _usual(place: str) -> bool:
    """Return true for paths that every sandbox includes, and for /, which no sandbox includes."""
    return place == "/" or place.startswith(("/usr", "/bin", "/sbin", "/lib"))
