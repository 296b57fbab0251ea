"""Checks of rewards on the answers of the data: each has an answer that the rewards can compare, in some form."""

import time
from collections.abc import Sequence

from slipstream.config.rewards import name_of
from slipstream.data.prompts import Row
from slipstream.errors import ConfigError, DataError
from slipstream.grades import Ungraded
from slipstream.rewards import grading
from slipstream.rewards.functions import Answer, RewardSettings, unfit

SLOW = 1.0
"""Seconds for one answer from which a reward gets a warning."""
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "The answer is {}.", "<answer>{}</answer>")
"""Usual forms in which a response contains its answer; `reward_warnings` tests rewards with them."""


def graded_rows(
    rows: Sequence[Row], rewards: Sequence[str], sandbox: str | None = None, settings: RewardSettings | None = None
) -> Sequence[Row]:
    """Return the rows unchanged; raise DataError for a row whose answer is missing or unusable for a reward."""
    needed = grading.needs(rewards, sandbox, settings)
    for row in rows if rewards else ():
        for reward in rewards:
            if reward == "reasoning_gym" and reward not in row.meta:
                raise DataError(f"{row.place}: the reward {reward!r} is for the rows of {reward}:NAME: write another")
            if row.ground_truth is None:
                if "ground_truth" in needed[reward]:
                    raise DataError(
                        f"{row.place}: has no answer, which the reward {reward!r} needs: set data.answer to its column"
                    )
            elif why := unfit(reward, row.ground_truth):
                raise DataError(f"{row.place}: the reward {reward!r} cannot compare the answer: {why}")
    return rows


def reward_warnings(rows: Sequence[Row], rewards: Sequence[str], timeout: float) -> list[str]:
    """Return a warning for each reward that gives 0 to the first right answers of the data in every form of `FORMS`.

    Rewards that grade none of these answers get a warning, too.

    Raise ConfigError if grading the first answer takes more than `timeout` seconds.
    """
    answered = [row for row in rows[:3] if isinstance(row.ground_truth, str | int | float)]
    answers = [
        Answer(text=text, messages=[{"role": "assistant", "content": text}], tokens=[0], prompt=str(row.prompt),
               ground_truth=row.ground_truth, meta=row.meta, data_source=row.data_source, finish="eos", outcome={})
        for row in answered
        for text in (form.format(row.ground_truth) for form in FORMS)
    ]  # fmt: skip
    process = grading.GradingProcess(rewards, timeout=timeout)
    try:
        process.ready()
        began = time.monotonic()
        graded = process.grades(answers[:1])
        seconds = time.monotonic() - began
        if seconds > SLOW:
            limit = f"task.timeout = {timeout:g} s"
            if all(isinstance(each, Ungraded) and each.cause == "timeout" for each in graded):
                raise ConfigError(
                    f"task.reward: {', '.join(rewards)} took more than {limit} for the first answer: make it faster, "
                    "or raise the limit"
                )
            return [f"task.reward: {', '.join(rewards)} took {seconds:.1f} s for the first answer, {limit}"]
        graded = process.grades(answers)
    finally:
        process.close()
    grades = [each for each in graded if isinstance(each, dict)]
    if why := "" if grades else next((each.text for each in graded if isinstance(each, Ungraded)), ""):
        return [
            f"task.reward: {', '.join(rewards)} does not grade the right answer of {answered[0].place}, "
            f"{answers[0].text!r}, in any form that was tried ({answers[3].text!r} …): {why}"
        ]
    return [
        f"task.reward = {reward!r} gives 0 to the right answer of {answered[0].place} and others, {answers[0].text!r}, "
        f"in every form that was tried ({answers[3].text!r} …): check that it can give more"
        for reward in rewards
        if grades and not any(each[name_of(reward)] for each in grades)
    ]
