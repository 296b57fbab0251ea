"""Reward functions of a user's file: event loops, names of their parts, and what other processes can import."""

import multiprocessing
import pickle
from pathlib import Path
from textwrap import dedent
from typing import Any

from slipstream.errors import first_line
from slipstream.grades import Grades, Ungraded
from slipstream.rewards.functions import Answer, grade, reward_of
from slipstream.user_code import MAX_MESSAGE, describe_error, load_object

OWN = '''
import asyncio

LOOPS = []


async def client(text):
    """Like an HTTP client, it can be used in the event loop of its first call alone."""
    LOOPS.append(asyncio.get_running_loop())
    if text == "slow":
        await asyncio.sleep(60)
    return float(LOOPS[0] is LOOPS[-1] and not LOOPS[0].is_closed())


async def forgetful(text):
    """Return the number of tasks that earlier calls have left running."""
    running = len(asyncio.all_tasks()) - 1
    asyncio.create_task(asyncio.sleep(1000))
    return running


def named(text):
    return {"exact-match": 0.5, "v.1": 0.25, "précision": 0}


def doubled(number):
    return 2 * number


class Odd(Exception):
    def __str__(self):
        raise TypeError("no text")


def odd(text):
    raise Odd
'''


def answer(text: str = "", **outcome: float) -> Answer:
    return Answer(
        text=text, messages=[], tokens=[1], prompt="?", ground_truth=None, meta={}, data_source="default",
        finish="eos", outcome=outcome,
    )  # fmt: skip


def written(path: Path) -> str:
    (path / "own.rewards.py").write_text(dedent(OWN))
    return str(path / "own.rewards.py")


def test_async_functions_share_one_event_loop_until_one_is_out_of_time(tmp_path: Path) -> None:
    reward = [reward_of(f"{written(tmp_path)}:client")]
    assert [grade(reward, answer(), 30.0) for _ in range(3)] == [{"client": 1.0}] * 3
    late = grade(reward, answer("slow"), 0.2)
    assert isinstance(late, Ungraded) and late.cause == "timeout"
    assert grade(reward, answer(), 30.0) == {"client": 0.0}, "a new loop: the old one had a call that did not end"


def test_tasks_that_a_function_leaves_running_end_with_its_answer(tmp_path: Path) -> None:
    reward = [reward_of(f"{written(tmp_path)}:forgetful")]
    assert [grade(reward, answer(), 30.0) for _ in range(3)] == [{"forgetful": 0.0}] * 3


def test_parts_have_the_names_that_environments_and_agents_may_report(tmp_path: Path) -> None:
    expected = {"named": 0.75, "named/exact-match": 0.5, "named/v.1": 0.25, "named/précision": 0.0}
    assert grade([reward_of(f"{written(tmp_path)}:named")], answer(), 30.0) == expected
    outcome = {"reward": 1.0, "reward/exact-match": 0.5}
    found: Grades = grade([reward_of("environment")], answer(**outcome), 30.0)
    assert isinstance(found, dict) and found["environment/exact-match"] == 0.5


def square_of_file(function: Any, pipe: Any) -> None:
    pipe.send(function(4))


def test_functions_of_a_file_reach_other_processes(tmp_path: Path) -> None:
    function = load_object(f"{written(tmp_path)}:doubled")
    assert pickle.loads(pickle.dumps(function)) is function
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=square_of_file, args=(function, theirs))
    child.start()
    assert ours.recv() == 8
    child.join()


def test_an_exception_without_a_text_has_the_name_of_its_type(tmp_path: Path) -> None:
    found = grade([reward_of(f"{written(tmp_path)}:odd")], answer(), 30.0)
    assert isinstance(found, Ungraded) and found.cause == "error" and "Odd" in found.text
    assert first_line(load_object(f"{written(tmp_path)}:Odd", type)()) == "Odd"


def test_a_long_message_of_an_exception_is_cut() -> None:
    assert describe_error(ValueError("x" * 5000), "file.py") == f"ValueError: {'x' * MAX_MESSAGE}…"
