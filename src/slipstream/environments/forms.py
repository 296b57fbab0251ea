"""Adapter from a user's environment class to replies and steps: find its tools, make their schemas, call them."""

import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import (
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    create_model,
)

from slipstream.config.integrations import integration_of
from slipstream.environments import Call, Message, Reply, Start, Step, ToolError
from slipstream.environments.tools import FIELD_PREFIX, InvalidArguments, ServedTool, Tool, schema_of
from slipstream.errors import ConfigError, EnvironmentFailed, SandboxError, first_line
from slipstream.rewards.functions import LARGEST_METRIC, LARGEST_REWARD, Unusable, awaited, number, rewards_of
from slipstream.user_code import describe_error, field_names, file_of, load_object, parameters, short_repr

SHIPPED = "slipstream.environments"
BUILT_IN_ENVIRONMENTS = {
    "table": f"{SHIPPED}.builtin:Table",
    "lookup": f"{SHIPPED}.builtin:Lookup",
    "doors": f"{SHIPPED}.builtin:Doors",
    "python": f"{SHIPPED}.builtin:Python",
}
"""Import paths of built-in environments, by their names in a config."""
OWN_METHODS = ("start", "step", "close")
"""Methods of the environment interface; every other public method is a tool."""
OF_STEP = (bool, int, float, dict, bytes, set), "a text, a list of messages, a Step, or None at the end"
OF_TOOLS = (bytes, set), "a text, or what JSON holds"
OF_START = (bool, int, float, dict, bytes, set), "a text, a list of messages, or None"
"""Return types that `step`, tools or `start` must not declare, with the text about allowed values for messages."""
Run = Callable[..., Awaitable[Any]]
"""Function that calls a method of the user with these arguments, in the thread of its environment."""


@dataclass(frozen=True)
class Kind:
    """Environment class, with the tools found in the class."""

    spec: str
    made: type[Any]
    asks: tuple[str, ...]
    """Names of the fields of `Start` that the method `start` gets."""
    tools: Mapping[str, Tool | ServedTool]
    """Tools by name; empty if the class has `step`."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        if not self.tools:
            known = getattr(self.made, "tools", ())
            try:
                if callable(known):
                    known = known()
                if inspect.isawaitable(known):
                    known = awaited(known)
                return [plain(schema) for schema in known]
            except Exception as error:  # `tools` may be code of the user
                why = f"tools is not, or does not return, a list of JSON schemas: {failure_text(self, error)}"
                raise ConfigError(f"environment.use = {self.spec!r}: {why}") from None
        return [schema_of(tool) for tool in self.tools.values()]


def kind_of(spec: str) -> Kind:
    """Load and inspect an environment class. This runs user code, so call it only in a child process."""
    try:
        if (integration := integration_of(spec)) is not None:
            found: Kind = load_object(integration.environment)(spec)
            return found
        made = load_object(BUILT_IN_ENVIRONMENTS.get(spec, spec), type)
        start = getattr(made, "start", None)
        asks = parameters(partial(start, None), field_names(Start))[0] if start is not None else ()
        steps = callable(getattr(made, "step", None))
        methods = _methods(made, tools=not steps)
        if "step" in methods:
            _check_returned("step", methods["step"], *OF_STEP)
        if "start" in methods:
            _check_returned("start", methods["start"], *OF_START)
        tools = {name: _tool(name, method) for name, method in methods.items() if name not in OWN_METHODS}
        if not steps and not tools:
            write = "write a public method for each, with types and a docstring, or step(reply)"
            raise ConfigError(f"the class has no tools: {write}")
        return Kind(spec, made, asks, tools)
    except ConfigError as error:
        raise ConfigError(f"environment.use = {spec!r}: {error}") from None


def _methods(made: type[Any], *, tools: bool) -> dict[str, Callable[..., Any]]:
    """Return the interface methods of a class and its bases in source order. `tools`: also all other public methods."""
    names = dict.fromkeys(name for each in reversed(made.__mro__[:-1]) for name in vars(each))
    used = [name for name in names if name in OWN_METHODS or (tools and not name.startswith("_"))]
    found = {name: inspect.getattr_static(made, name) for name in used}
    for name, method in found.items():
        if isinstance(method, staticmethod | classmethod):
            kind = type(method).__name__
            raise ConfigError(f"the method {name!r} is a {kind}: write one with self, or begin the name with _")
    return {name: method for name, method in found.items() if inspect.isfunction(method)}


def _check_returned(name: str, method: Callable[..., Any], never: tuple[type[Any], ...], write: str) -> None:
    """Raise ConfigError if a method is annotated to return a type in `never`; `write` describes allowed values."""
    try:
        hint = get_type_hints(method).get("return")
    except (NameError, AttributeError):  # the annotation may use a name that only type checkers import
        return
    for each in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        if (kind := get_origin(each) or each) in never:
            raise ConfigError(f"the method {name!r} is annotated to return {kind.__name__}: return {write}")


def _tool(name: str, method: Callable[..., Any]) -> Tool:
    description = inspect.getdoc(method)
    if not description:
        raise ConfigError(f"the tool {name!r} has no docstring: write one, which the student reads as its description")
    try:
        hints = get_type_hints(method, include_extras=True)
    except Exception as error:  # annotations are user code
        raise ConfigError(f"the types of the tool {name!r} cannot be read: {first_line(error)}") from None
    _check_returned(name, method, *OF_TOOLS)
    fields: dict[str, Any] = {}
    for each in list(inspect.signature(method).parameters.values())[1:]:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ConfigError(f"the tool {name!r} has a parameter {each}, which a call cannot pass by name")
        if each.name.startswith("_"):
            raise ConfigError(f"the tool {name!r} has a parameter {each.name!r}: begin the name with a letter")
        if each.name not in hints:
            raise ConfigError(f"the tool {name!r} has a parameter {each.name!r} without a type: write {each.name}: str")
        fields[FIELD_PREFIX + each.name] = (hints[each.name], ... if each.default is each.empty else each.default)
    try:
        config = ConfigDict(extra="forbid", alias_generator=lambda field: field.removeprefix(FIELD_PREFIX))
        arguments = create_model(name, __config__=config, **fields)
        arguments.model_json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError, NameError) as error:
        raise ConfigError(f"the tool {name!r} has a type that JSON cannot represent: {first_line(error)}") from None
    return Tool(name, description, arguments)


# --- one episode ------------------------------------------------------------------------------------------------------


class Acting:
    """One instance of an environment class, used by one episode."""

    def __init__(self, kind: Kind, run: Run, shown: int) -> None:
        """Prepare an instance. `shown`: maximum number of characters of an observation that the student sees."""
        self.kind, self.run, self.shown = kind, run, shown
        self.instance: Any = None
        self.counts = Counter[str]()

    async def start(self, given: Start) -> tuple[Message, ...]:
        """Start an instance, and return its first observation: messages that the student sees after the prompt."""
        self.instance = await self.run(self.kind.made)
        if not hasattr(self.instance, "start"):
            return ()
        returned = await self.run(self.instance.start, **{name: getattr(given, name) for name in self.kind.asks})
        match returned:
            case None:
                return ()
            case str():
                seen = Step(({"role": "user", "content": returned},))
            case Sequence():
                seen = self._check("start", Step(tuple(returned), done=not returned))
            case _:
                raise self._wrong("start", f"returned {short_repr(returned)}: return {OF_START[1]}")
        return self._limit(seen).messages

    async def step(self, reply: Reply) -> Step:
        """Answer a reply. If the class has tools, a reply without calls ends the episode."""
        self.counts["calls"] += len(reply.calls) + len(reply.faults)
        self.counts["invalid"] += len(reply.faults)
        faults = [observation(f"error: {fault}") for fault in reply.faults]
        if not self.kind.tools:
            if faults and not reply.calls:
                return self._limit(Step(tuple(faults)))
            step = self._step_of(await self.run(self.instance.step, reply))
            return self._limit(replace(step, messages=(*faults, *step.messages)))
        if not reply.calls and not faults:
            return self._limit(Step(done=True))
        return self._limit(Step((*[await self._call_tool(call) for call in reply.calls], *faults)))

    def _limit(self, step: Step) -> Step:
        counted = {name: float(count) for name, count in self.counts.items()}
        reported = (getattr(self.instance, "metrics", None) or {}) | dict(step.metrics)
        try:
            own = {f"own/{name}": number(value, name, largest=LARGEST_METRIC) for name, value in reported.items()}
        except Unusable as error:
            raise self._wrong("metrics", str(error)) from None
        shown = [message | {"content": shorten(message["content"], self.shown)} for message in step.messages]
        # a plain Step, which the parent can unpickle, also where the user's is of a class of theirs
        return Step(tuple(map(plain, shown)), done=bool(step.done), metrics=counted | own, reward=step.reward)

    async def _call_tool(self, call: Call) -> Message:
        tool = self.kind.tools.get(call.name)
        if tool is None:
            self.counts["invalid"] += 1
            return observation(f"error: there is no tool {call.name!r}; there are {', '.join(self.kind.tools)}", call)
        try:
            bound = tool.bind(self.instance, call.arguments)
        except InvalidArguments as error:
            self.counts["invalid"] += 1
            return observation(f"error: {tool.name}: {error}", call)
        try:
            returned = await self.run(bound)
        except (SandboxError, EnvironmentFailed):
            raise
        except Exception as error:  # the student reads the errors of tools
            self.counts["failed"] += 1
            text = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {first_line(error)}"
            return observation(f"error: {text}", call)
        try:
            text = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError):
            raise self._wrong(tool.name, f"returned {short_repr(returned)}: return {OF_TOOLS[1]}") from None
        return observation(text, call)

    async def close(self) -> dict[str, float]:
        """Close the environment, and return its rewards: `reward`, and `reward/NAME` for each part."""
        if self.instance is None or not hasattr(self.instance, "close"):
            return {}
        returned = await self.run(self.instance.close)
        try:
            return rewards_of(returned)
        except Unusable as error:
            raise self._wrong("close", str(error)) from None

    def _step_of(self, returned: Any) -> Step:
        """Convert the result of a user's `step` to a Step: text or messages for the student, or None at the end."""
        match returned:
            case Step(reward=None):
                step = returned
            case Step():
                try:
                    step = replace(returned, reward=number(returned.reward, "reward", largest=LARGEST_REWARD))
                except Unusable as error:
                    raise self._wrong("step", str(error)) from None
            case None:
                return Step(done=True)
            case str():
                return Step((observation(returned),))
            case Sequence():
                step = Step(tuple(returned))
            case _:
                raise self._wrong("step", f"returned {short_repr(returned)}: return {OF_STEP[1]}")
        return self._check("step", step)

    def _check(self, method: str, step: Step) -> Step:
        for message in step.messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
                write = "write {'role': 'tool', 'content': text}"
                raise self._wrong(method, f"returned the message {short_repr(message)}: {write}")
        if not step.messages and not step.done:
            raise self._wrong(method, "returned no message for the student: add one, or set done=True")
        return step

    def _wrong(self, method: str, fault: str) -> EnvironmentFailed:
        return EnvironmentFailed("error", f"{self.kind.made.__name__}.{method} {fault}")


def observation(text: str, call: Call | None = None) -> Message:
    return {"role": "tool", "content": text} | ({"name": call.name} if call is not None else {})


def plain(value: Any) -> Any:
    """Copy a value through JSON, because other processes cannot unpickle instances of user classes."""
    return json.loads(json.dumps(value))


def shorten(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    ends = most * 2 // 3, most - most * 2 // 3
    return f"{text[: ends[0]]}\n… ({len(text) - most} characters left out)\n{text[len(text) - ends[1] :]}"


def failure_text(kind: Kind, error: BaseException) -> str:
    return describe_error(error, inspect.getsourcefile(kind.made) or file_of(kind.made))
