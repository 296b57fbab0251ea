"""Task directories of Harbor and Terminal-Bench: rows, a shell in their files, tests that give rewards, refusals."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.prompts import load_rows
from slipstream.environments import Call, Reply
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings
from slipstream.errors import DataError, EnvironmentFailed
from support.sandboxes import NO_BUBBLEWRAP
from support.task_directories import BENCH, FIX, HARBOR, written


def played(task: Path, *commands: str) -> tuple[list[str], Any]:
    """Return what the shell answers, and the rewards or the failure."""

    async def main() -> tuple[list[str], Any]:
        episode, seen = hosts.place(), list[str]()
        await episode.ready()
        given = {
            "id": "a",
            "prompt": "",
            "ground_truth": None,
            "meta": {"task": str(task)},
            "data_source": "",
            "seed": 1,
        }
        try:
            await episode.start(given)
            for command in commands:
                step = await episode.step(Reply("", (Call("bash", {"command": command}),)))
                seen += [message["content"] for message in step.messages]
            return seen, await episode.close()
        except EnvironmentFailed as error:
            episode.drop()
            return seen, str(error)

    hosts = EnvironmentPool(EnvironmentSettings(f"tasks:{task.parent}", "bubblewrap", 1000))
    try:
        return asyncio.run(main())
    finally:
        hosts.close()


def test_every_directory_is_a_row_with_its_instruction(tmp_path: Path) -> None:
    written(tmp_path / "b", BENCH)
    written(tmp_path / "a", HARBOR)
    (tmp_path / "notes").mkdir()
    rows = load_rows(f"tasks:{tmp_path}")
    assert [(row.id, row.meta["task"]) for row in rows] == [(name, str(tmp_path / name)) for name in "ab"]
    assert [row.prompt[0]["content"] for row in rows] == ["Make /app/mean.py right.\n", "Write hello.txt.\n"]  # type: ignore[index]


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_tests_reward_what_the_shell_has_left_in_app_and_are_not_there_before(tmp_path: Path) -> None:
    task = written(tmp_path / "a", HARBOR)
    (seen,), rewards = played(task, FIX)
    assert "1 2 6" in seen and "check.py" not in seen and rewards == {"reward": 1.0}
    assert played(task, "true") == (["status: ok"], {"reward": 0.0})
    other = written(tmp_path / "b", BENCH)
    assert played(other, "echo hello > /app/hello.txt")[1] == {"reward": 1.0}
    assert played(other, "echo bye > /app/hello.txt")[1] == {"reward": 0.0}


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_tests_and_verdicts_that_the_shell_has_written_before_are_removed(tmp_path: Path) -> None:
    task = written(tmp_path / "a", HARBOR)
    forged = "mkdir -p /tmp/logs/verifier /tmp/tests .tests; echo 1 > /tmp/logs/verifier/reward.txt"
    forged += (
        "; echo '{\"reward\": 9}' > /tmp/logs/verifier/reward.json; echo > .tests/check.py; chmod 400 .tests/check.py"
    )
    assert played(task, forged)[1] == {"reward": 0.0}


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_who_keeps_the_tests_out_of_the_directory_gets_nothing(tmp_path: Path) -> None:
    assert played(written(tmp_path / "a", HARBOR), f"{FIX}; chmod a-w /app")[1] == {"reward": 0.0}


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_rewards_may_have_names_and_a_missing_one_fails_the_episode(tmp_path: Path) -> None:
    several = 'echo \'{"right": 1, "fast": 0.5}\' > /logs/verifier/reward.json\n'
    task = written(tmp_path / "a", HARBOR, tests__test_DOT_sh=several)
    assert played(task)[1] == {"reward": 1.5, "reward/right": 1.0, "reward/fast": 0.5}
    task = written(tmp_path / "b", HARBOR, tests__test_DOT_sh="echo broken >&2; exit 3\n")
    assert played(task)[1] == "its tests wrote no reward (failed: 'broken')"
    task = written(tmp_path / "d", HARBOR, tests__test_DOT_sh="sleep 9\n", task_DOT_toml="verifier.timeout_sec = 1\n")
    assert played(task)[1] == {"reward": 0.0}
    task = written(tmp_path / "c", HARBOR, tests__test_DOT_sh="echo '\"high\"' > /logs/verifier/reward.txt\n")
    assert "which is not a number" in played(task)[1]


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_variables_of_the_dockerfile_are_those_of_the_shell_and_of_the_tests(tmp_path: Path) -> None:
    docker = "FROM a\nENV ONE=1 TWO=\"a b\" \\\n  THREE='c'\nENV FOUR d e\nENV EMPTY=\n"
    check = 'test "$ONE$TWO$THREE$FOUR$EMPTY" = "1a bcd e"; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
    task = written(tmp_path / "a", HARBOR, environment__Dockerfile=docker, tests__test_DOT_sh=check)
    (seen,), rewards = played(task, 'echo "$ONE, $TWO, $THREE, $FOUR, ${EMPTY-none}."')
    assert "1, a b, c, d e, ." in seen and rewards == {"reward": 1.0}


@pytest.mark.parametrize("line", ["PATH=/opt/x:$PATH", "A=`date`", "A", "", 'A="b', "1A=b", "A=b C"])
def test_variables_that_are_not_plain_text_are_refused_by_name(line: str, tmp_path: Path) -> None:
    written(tmp_path / "a", HARBOR, environment__Dockerfile=f"FROM a\nENV {line}\n")
    with pytest.raises(DataError) as caught:
        load_rows(f"tasks:{tmp_path}")
    said = f"Dockerfile:2: ENV {line}".strip() + " is not plain text: write NAME=VALUE, without $ and `"
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"tests__test_DOT_sh": None}, "a/tests/test.sh: is not there, or no text, which this task needs"),
        ({"instruction_DOT_md": None}, "a/instruction.md: is not there, or no text, which this task needs"),
        (
            {"environment__Dockerfile": "FROM a\nRUN make\n"},
            "Dockerfile:2: RUN make needs an image, and tasks run without",
        ),
        ({"environment__Dockerfile": "COPY a /etc/a\n"}, "Dockerfile:1: COPY a /etc/a needs an image"),
        (
            {"task_DOT_toml": '[environment]\ndocker_image = "x/y:1"\n'},
            "task.toml: needs the image x/y:1, and tasks run",
        ),
        (
            {"tests__test_DOT_sh": "# curl is not used\nuv pip install pytest\n"},
            "a/tests/test.sh: runs uv, and tasks run",
        ),
    ],
)
def test_a_task_that_is_not_complete_or_needs_an_image_is_refused_by_name(
    changed: dict[str, str | None], line: str, tmp_path: Path
) -> None:
    files = {
        name: text for name, text in HARBOR.items() if name.replace("/", "__").replace(".", "_DOT_") not in changed
    }
    written(tmp_path / "a", files, **changed)
    with pytest.raises(DataError) as caught:
        load_rows(f"tasks:{tmp_path}")
    assert line in str(caught.value) and str(caught.value).startswith(f"tasks:{tmp_path}: ")
    with pytest.raises(DataError, match="there is no directory with task.toml or task.yaml in it"):
        load_rows(f"tasks:{tmp_path / 'a'}")
