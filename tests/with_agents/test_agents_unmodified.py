"""Agents of others, unmodified, on the gateway: what they do becomes lineages, and a real run learns from them.

`make test-agents` installs them into an environment of their own; without it these are not collected.
"""

import socket
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from dictation import PYTHON, ROOT, TOKENIZER, bash, save_models
from transformers import AutoModelForCausalLM

from runs import APART, MINI, check_calls, check_laws, trained
from slipstream.records import Prompt
from support.sandboxes import NO_BUBBLEWRAP

JUDGED = """import unittest

from judge import call


class Mean(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(call("mean:mean", [1, 2, 6]), 3)
"""
BUG = "def mean(values):\n    return sum(values) / (len(values) - 1)\n"
TEST = """import unittest

from mean import mean


class Mean(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 6]), 3)
"""
ISSUE = {"prompt": [{"role": "user", "content": "mean([1, 2, 6]) is not 3."}], "answer": "3"}
SUBMITS = bash("That is all.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
FIXES = [
    bash("I look at it first.", "cat mean.py; id -u; env"),
    bash("One too few.", "sed -i 's/len(values) - 1/len(values)/' mean.py && python3 -m unittest -q 2>&1 | tail -1"),
    SUBMITS,
]
CHEATS = [bash("Tests are easier to change.", "echo > test_mean.py; ls /nowhere; exit 3"), SUBMITS]


DOCKER = """#!/bin/sh
case "$1" in
  run) echo "$@" >> {log}; echo box;;
  exec) for last; do :; done; cd {testbed} && exec bash -c "$last";;
esac
"""
JUDGE = """
import json
(issue,), (said,) = (json.load(open(name)) for name in ("issue.json", "predictions.json"))
assert issue["repo"] == "a/b" and issue["patch"] == "gold" and issue["problem_statement"].startswith("mean(")
resolved = [said["instance_id"]] if "+    return sum(values) / (len(values))" in said["model_patch"] else []
json.dump({"resolved_ids": resolved}, open("student.one.json", "w"))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a bug, and with a test that fails."""
    place = tmp_path / "repository"
    (place / "tests").mkdir(parents=True)
    (place / "mean.py").write_text(BUG)
    (place / "tests" / "test_mean.py").write_text(TEST)
    (place / "test_mean.py").symlink_to("tests/test_mean.py")
    return place


def agent(repository: Path) -> dict[str, object]:
    """mini-swe-agent on a copy of a repository; only its commands are in a sandbox."""
    return {
        "sandbox": "none",
        "gateway": {"command": APART, "workspace": str(repository), "verify": verify(repository)},
    }


def walled(repository: Path) -> dict[str, object]:
    """The same, all of it in the gateway's sandbox."""
    return {
        "sandbox": "bubblewrap",
        "gateway": {"command": MINI, "workspace": str(repository), "verify": verify(repository)},
    }


def verify(repository: Path) -> str:
    """Tests beside the repository, which the agent does not see."""
    tests = repository.with_name("judged")
    tests.mkdir()
    (tests / "test_mean.py").write_text(JUDGED)
    return f"{PYTHON} -I judge.py {tests}"


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
@pytest.mark.parametrize("where", [agent, walled])
def test_mini_swe_agent_fixes_a_bug_in_our_sandbox_and_a_real_run_learns_from_it(
    where: Callable[[Path], dict[str, object]],
    tmp_path: Path,
    models: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_SECRET", "SECRET")

    def script(prompt: Prompt) -> list[str]:
        return CHEATS if prompt.first else FIXES

    played = trained(monkeypatch, tmp_path, models, [ISSUE], where(repository), script)
    assert len(played.of(0)) == len(played.of(1)) == 2 and len(played.rollouts) == 4
    check_calls(played)
    for update, (fixed, cheated) in enumerate(zip(played.of(0), played.of(1), strict=True)):
        check_laws(fixed, FIXES)
        check_laws(cheated, CHEATS)
        assert fixed.outcome["reward"] == 1.0 and cheated.outcome["reward"] == 0.0
        assert fixed.outcome["calls"] == fixed.outcome["turns"] == 3 and fixed.finish == cheated.finish == "eos"
        assert fixed.versions.max() == cheated.versions.max() == update
        seen = str(TOKENIZER.decode(fixed.tokens[~fixed.loss_mask]))
        assert "len(values) - 1" in seen and '"output": "OK\\n"' in seen and "SECRET" not in seen
        if where is agent:  # it alone knows where the gateway is
            assert "65534" in seen and "OPENAI" not in seen and "SLIPSTREAM" not in seen
        assert '"returncode": 3' in str(TOKENIZER.decode(cheated.tokens[~cheated.loss_mask]))
    assert (repository / "mean.py").read_text() == BUG
    for line in played.lines:
        assert line["reward/environment"] == 0.5 and line["episode/turns"] == 2.5 and line["failed_samples"] == 0
        assert line["grad_norm"] > 0 and line["episode/observed"] > 0.2
        # the learner reads whole lineages, and finds what drew every call
        assert abs(line["distill/ratio_max"] - 1) < 1e-5
    before, after = (
        AutoModelForCausalLM.from_pretrained(each) for each in (models / "student", tmp_path / "run/final")
    )
    assert not before.lm_head.weight.equal(after.lm_head.weight)


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_a_student_that_babbles_ends_mini_swe_agent_and_every_call_is_learned_from_once(
    tmp_path: Path, models: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets what was no call, so each is a branch of its own; after three it gives up.

    The agent's complaint depends on whether the answer was cut, so only the first prompts of both episodes are equal.
    """
    environment = {**agent(repository), "turn_tokens": 16}
    sizes = {"sampler": {"group": 1}, "learner": {"batch_size": 1}}
    played = trained(monkeypatch, tmp_path, models, [ISSUE], environment, None, **sizes)
    assert len(played.rollouts) == 6 and {rollout.episode for rollout in played.rollouts} == {0}
    prompts = [rollout.prompt.tokens.tobytes() for rollout in played.rollouts]
    assert len(set(prompts[:3])) == len(set(prompts[3:])) == 3 and prompts[0] == prompts[3]
    for rollout in played.rollouts:
        assert rollout.loss_mask.all() and len(rollout.tokens) <= 16 and not rollout.turn.any()
        assert rollout.outcome["turns"] == rollout.outcome["branches"] == 3 and rollout.outcome["reward"] == 0.0
    for line in played.lines:
        assert line["reward/environment"] == 0 and line["grad_norm"] > 0 and line["failed_samples"] == 0
        assert abs(line["distill/ratio_max"] - 1) < 5e-5  # sampler and learner round their sums differently


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_mini_swe_agent_stops_where_the_gateway_says_so(
    tmp_path: Path, models: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and does not ask again for minutes; what was done until then is verified."""
    environment = {**agent(repository), "turns": 2}
    sizes = {"sampler": {"group": 1}, "learner": {"batch_size": 1}}
    played = trained(monkeypatch, tmp_path, models, [ISSUE], environment, lambda prompt: FIXES, **sizes)
    for rollout in played.rollouts:
        check_laws(rollout, FIXES[:2])
        assert rollout.finish == "turns" and rollout.outcome["reward"] == 1.0 and rollout.outcome["failures"] == 0


def test_issues_are_worked_on_in_containers_as_the_recipe_says(
    tmp_path: Path, models: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """configs/swe_mini.toml and its two programs, where docker is a shell, and SWE-bench looks for the patch alone."""
    docker, judge = tmp_path / "docker", tmp_path / "swebench" / "harness" / "run_evaluation.py"
    docker.write_text(DOCKER.format(log=tmp_path / "log", testbed=repository))
    docker.chmod(0o755)
    judge.parent.mkdir(parents=True)
    judge.write_text(JUDGE)
    environment = tomllib.loads((ROOT / "configs" / "swe_mini.toml").read_text())["environment"]
    told = f"env MSWEA_DOCKER_EXECUTABLE={docker} PYTHONPATH={tmp_path} "
    for name in ("command", "verify"):
        environment["gateway"][name] = told + environment["gateway"][name].replace(
            "/opt/agents/bin/python", str(PYTHON)
        )
    environment["gateway"]["verify"] = environment["gateway"]["verify"].replace("configs/", f"{ROOT}/configs/")
    environment["gateway"]["workspace"] = str(ROOT / "configs" / "swe_mini")
    said = [
        bash(
            "One too few.", "cp mean.py old; sed -i 's/ - 1//' mean.py; diff -u old mean.py > patch.txt; cat patch.txt"
        ),
        bash("That is it.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"),
    ]
    row = {**ISSUE, "answer": "gold", "instance_id": "a__b-1", "repo": "a/b"}
    sizes = {"sampler": {"group": 1, "max_tokens": 12000}, "learner": {"batch_size": 1}}
    monkeypatch.chdir(tmp_path)
    played = trained(monkeypatch, tmp_path, models, [row], environment, lambda prompt: said, **sizes)
    assert [rollout.outcome["reward"] for rollout in played.rollouts] == [
        1.0,
        0.0,
    ]  # the second time it is mended already
    for rollout in played.rollouts:
        check_laws(rollout, said)
        assert rollout.finish == "eos"
    assert "sweb.eval.x86_64.a_1776_b-1" in (tmp_path / "log").read_text()


def test_an_environment_of_verifiers_is_learned_from(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started elsewhere, takes what waits, and tells its reward."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = {0: ["seven.", "7"], 1: ["7", "eight."]}
    row = {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
    guest = subprocess.Popen(
        [PYTHON, Path(__file__).with_name("guest.py"), f"http://127.0.0.1:{port}", "4", tmp_path / "run/gateway.token"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        played = trained(
            monkeypatch,
            tmp_path,
            models,
            [row],
            {"gateway": {"listen": f"127.0.0.1:{port}"}},
            lambda prompt: said[prompt.first],
        )
        assert guest.wait(60) == 0
    finally:
        guest.kill()
        guest.wait()
    check_calls(played)
    assert len(played.rollouts) == 4
    for rollout in played.rollouts:
        check_laws(rollout, said[rollout.episode])
        assert rollout.outcome["reward"] == rollout.outcome["reward/right"] == float(rollout.episode == 0)
        assert "Are you sure?" in str(TOKENIZER.decode(rollout.tokens[~rollout.loss_mask]))
    for line in played.lines:
        assert line["reward/environment"] == 0.5 and line["grad_norm"] > 0 and line["failed_samples"] == 0
        assert abs(line["distill/ratio_max"] - 1) < 1e-5
