"""Section `[data]`: training and held-out prompts, their columns and their order."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from slipstream.config.base import Section, TemplateArgs, template_fields
from slipstream.errors import did_you_mean

Value = str | int | float | bool


def check_filter(given: dict[str, Any]) -> dict[str, Any]:
    for column, values in given.items():
        if values == ():
            raise ValueError(f"{column} = [] leaves out every row: write the values of the rows to use, or drop it")
    return given


RowFilter = Annotated[dict[str, Value | tuple[Value, ...]], AfterValidator(check_filter)]
"""Values that a row must have, by the path of a column; of several values a row has one."""


class CurriculumConfig(Section):
    """Settings of order = "curriculum"."""

    column: str | None = Field(None, min_length=1)
    """Column of numbers that a curriculum sorts by, smallest first, with dots as in `data.prompt`."""
    epochs: float = Field(1.0, gt=0, le=1000)
    """Number of epochs that the curriculum lasts. In each, every row occurs once; in a part of an epoch, a random part
    of the rows."""


class AdaptiveConfig(Section):
    """Settings of order = "adaptive"."""

    weight_by: Literal["reward", "kl"] = "reward"
    """Weight of a prompt with order = "adaptive". reward: p·(1 − p), with p the mean of the first reward in
    task.reward, between 0 and 1. kl: KL to the teacher per token."""
    half_life: float = Field(20.0, gt=0)
    """Number of updates after which an answer counts half as much for the weight of its prompt."""
    uniform_share: float = Field(0.1, gt=0, le=1)
    """Share of the prompts that are drawn evenly with order = "adaptive". Of R rows each is drawn within
    R / uniform_share draws on average."""


class DataConfig(Section):
    train: str | dict[str, str] = "builtin:arithmetic"
    """Training prompts: a .jsonl, .json, .csv (each also .gz) or .parquet file; a HF dataset, saved or on the hub, with
    its subset (openai/gsm8k:main); builtin:arithmetic, builtin:table, builtin:lookup, builtin:doors, builtin:words;
    tasks of reasoning-gym, such as reasoning_gym:chain_sum; or games and tasksets as in environment.use,
    such as textarena:GuessTheNumber-v0. Several sources have names: { math = "math.jsonl", code = "code.csv" }."""
    weights: dict[str, float] = Field({})
    """Weights of several training sources, for example { math = 3, code = 1 }. A source has its weight as share of the
    prompts, after `weights_temperature`. Empty weighs every source by its number of rows."""
    weights_temperature: float = Field(1.0, ge=0.01, le=100)
    """Temperature of the weights of several training sources: shares are weights to the power 1 / temperature. Above 1
    the shares are more equal."""
    split: str = "train"
    """Split of `train`, for a HF dataset or a built-in task (train, eval)."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts in the same formats, or several sets by name: { math = "math.jsonl", code = "code.csv" }. None
    evaluates nothing during training."""
    eval_split: str = "eval"
    """Split of the held-out prompts, like `split`."""
    where: RowFilter = Field({})
    """Training rows to use, by columns and their values, with dots as in `prompt`: { level = [4, 5], type = "algebra" }
    uses rows with one of these levels and this type. Empty uses all rows."""
    eval_where: RowFilter = Field({})
    """Held-out rows to use, like `where`."""
    limit: int | None = Field(None, ge=1)
    """Number of training rows to use, from the first row of each source. None uses all rows."""
    deduplicate: bool = False
    """Drop every training row that has the same prompt and answer as an earlier row. With [environment] the other
    columns must be the same, too."""
    too_long: Literal["refuse", "skip", "cut_left", "cut_right"] = "refuse"
    """Treatment of prompts that are too long: with sampler.max_tokens they exceed sampler.max_length or the context of
    a model. refuse: end with an error. skip: leave them out and print their number. cut_left, cut_right: remove tokens
    from this side of a text prompt."""
    prompt: str | None = None
    """Column of the prompt: text or a list of messages. Dots select fields of objects and items of lists
    (extra.question). None finds the prompt by well-known column names (docs/data.md)."""
    answer: str | None = None
    """Column of the answer, with dots as in `prompt` (reward_model.ground_truth). In a list of answers each one is
    correct. None finds the answer by well-known column names."""
    response: str | None = None
    """Column of the response that [sft] and [mix] learn from with source = "data", with dots as in `prompt`. None uses
    the last assistant turn, or the whole text in the column of the answer."""
    template: str | None = None
    """Template of the prompt with columns of the row, for example "Solve: {question}"; write {{ and }} for braces. None
    uses the prompt column."""
    chat: bool = False
    """Send a text prompt as a user message through the chat template. false sends the text without a template."""
    shuffle: bool = True
    """Shuffle the rows again in every epoch, by `seed`. false keeps the order of the file."""
    order: Literal["epochs", "curriculum", "adaptive"] = "epochs"
    """Choice of prompts. epochs: every row once in each epoch. curriculum: first from easy to hard rows, then epochs.
    adaptive: each prompt with a weight by what earlier answers to it have shown."""
    curriculum: CurriculumConfig = CurriculumConfig()
    adaptive: AdaptiveConfig = AdaptiveConfig()
    system_prompt: str | None = None
    """System message that is put before every conversation; needs a chat template. None adds no message."""
    template_args: TemplateArgs = Field({})
    """Arguments of the chat template, for example enable_thinking = false. Empty passes none."""
    teacher_key: str = "data_source"
    """Column whose value selects the teacher of a prompt, if there are several teachers (see teachers.NAME.key)."""

    @property
    def held_out(self) -> dict[str, str]:
        """Return every held-out set by its name, which is "" for a single set."""
        if self.eval is None:
            return {}
        return self.eval if isinstance(self.eval, dict) else {"": self.eval}

    @property
    def sources(self) -> dict[str, str]:
        """Return every source of training prompts by its name, which is "" for a single source."""
        return self.train if isinstance(self.train, dict) else {"": self.train}

    @field_validator("eval", "train")
    @classmethod
    def _check_set_names(cls, given: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if given == {}:
            raise ValueError('names no set of prompts: write one, as in { math = "math.jsonl" }, or drop it')
        for name in given if isinstance(given, dict) else ():
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"the name {name!r} must be a plain word, because metrics use it: eval/NAME/accuracy")
        return given

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str | None) -> str | None:
        if template is None:
            return None
        fields = template_fields(template)
        if not fields:
            raise ValueError("would be the same for every prompt: name a column, as in {question}")
        for name, spec, conversion in fields:
            if not name or spec or conversion:
                raise ValueError("write only the name of a column between braces, as in {question}")
        return template

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.prompt is not None and self.template is not None:
            raise ValueError("prompt does nothing beside template, which names the columns itself: drop one of them")
        if self.eval_where and self.eval is None:
            raise ValueError("eval_where has no held-out rows to choose from: set data.eval, or drop it")
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.order == "curriculum" and self.curriculum.column is None:
            raise ValueError(
                'order = "curriculum" sorts by a column: name it, curriculum.column = "level", for example'
            )
        if self.order != "epochs" and not self.shuffle:
            raise ValueError(f'shuffle = false is for order = "epochs", and order = "{self.order}": drop one of them')
        for name, weight in self.weights.items():
            if name not in self.sources:
                raise ValueError(f"weights: there is no source {name!r} in train; {did_you_mean(name, self.sources)}")
            if weight <= 0:
                raise ValueError(f"weights.{name} = {weight:g} must be above 0: drop the source instead")
        if self.weights and (missing := sorted(self.sources.keys() - self.weights.keys())):
            raise ValueError(f"weights: {missing[0]!r} has none: write one for every source of train")
        return self
