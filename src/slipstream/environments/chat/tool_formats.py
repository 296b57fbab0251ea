"""Detection of a chat template's tool-call format: render example calls, and find the marks around them."""

import json
import re
from collections.abc import Callable, Sequence

from slipstream.environments import Call, Message
from slipstream.environments.chat.tool_calls import Fault, Format, value_at

Render = Callable[[list[Message], bool], str]
"""Function that renders messages to text. If its flag is True, the header of the assistant's next turn is added."""


def call_message(calls: Sequence[Call], *, content: str = "", as_text: bool = False) -> Message:
    """Return an assistant's message that contains these tool calls, in the form that chat templates expect."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"{number:09d}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments,
                },
            }
            for number, call in enumerate(calls)
        ],
    }


def format_of(render: Render, stops: re.Pattern[str], mark: str) -> Format | None:
    """Detect a template's tool-call format; return None if the template has no tool calls or an unknown format."""
    one = [Call(f"look{mark}", {"what": f"there{mark}"})]
    two = [*one, Call(f"find{mark}", {"what": f"here{mark}"})]
    for as_text in (False, True):
        text_of_one = _text_of(render, stops, mark, one, as_text)
        if text_of_one is None or (form := _format_of_one(text_of_one, one[0].name, as_text)) is None:
            continue
        texts = [(text_of_one, one)]
        if (text_of_two := _text_of(render, stops, mark, two, as_text)) is not None:
            form = _with_outer_marks(form, text_of_two, two)
            texts.append((text_of_two, two))
        read = [(form.read(text), calls) for text, calls in texts]
        if all(found.calls == calls and not found.faults for found, calls in read):
            return form
    return None


def _text_of(render: Render, stops: re.Pattern[str], mark: str, calls: Sequence[Call], as_text: bool) -> str | None:
    """Return the text that a template renders for calls, without stop token; None if the text lacks the calls."""
    question: list[Message] = [{"role": "user", "content": "?"}]
    try:
        whole = render([*question, call_message(calls, content=f"so{mark}z", as_text=as_text)], False)
        _, found, text = whole.rpartition(f"so{mark}z")
        if not found:  # some templates omit the content of a turn that has calls
            header, whole = render(question, True), render([*question, call_message(calls, as_text=as_text)], False)
            if not whole.startswith(header):
                return None
            text = whole[len(header) :]
    except Exception:  # templates are programs and may raise anything
        return None
    text = stops.split(text, maxsplit=1)[0]
    return text if all(call.name in text and call.arguments["what"] in text for call in calls) else None


def _format_of_one(text: str, name: str, as_text: bool) -> Format | None:
    if f"<function={name}>" in text and "</function>" in text:
        before, after = text.partition("<function=")[0].strip(), text.rpartition("</function>")[2].strip()
        return Format(begin=before, end=after, tags=True, as_text=as_text) if before else None
    place = text.index(name)
    for opening in re.finditer(r"[{\[]", text):
        start = opening.start()
        try:
            _, end = value_at(text, start)
        except Fault:
            continue
        after = text[end:].strip()
        if start < place < end:
            return Format(begin=text[:start].strip(), end=after, as_text=as_text)
        if start > place:
            middle = text[place + len(name) : start].strip()
            return Format(begin=text[:place].strip(), middle=middle, end=after, as_text=as_text) if middle else None
    return None


def _with_outer_marks(form: Format, text: str, calls: Sequence[Call]) -> Format:
    """Separate the marks of each call from the marks around all calls, by comparing with the text between two calls."""
    first, second = (text.index(call.arguments["what"]) for call in calls)
    between = text[first : text.index(calls[1].name) if form.middle is not None else second]
    if form.middle is None:
        between = between[: max(between.rfind("{", 0, between.find(calls[1].name)), 0)]
    between = between.rstrip()
    # every mark begins and ends with a bracket
    begins = [form.begin[found.start() :] for found in re.finditer(r"[<\[]", form.begin)]
    begin = next((each for each in begins if between.endswith(each)), "")
    if form.tags or not begin or begin == form.begin:
        return form
    ends = [form.end[: found.end()] for found in re.finditer(r"[>\]]", form.end)]
    end = next((each for each in reversed(ends) if each in between), "")
    outer = tuple(filter(None, (form.begin.removesuffix(begin).strip(), form.end.removeprefix(end).strip())))
    return Format(begin=begin, middle=form.middle, end=end, outer=outer, as_text=form.as_text)
