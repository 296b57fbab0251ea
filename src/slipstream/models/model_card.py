"""Model card of a final student (README.md): settings and results of the training run, read from the run's files."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import slipstream
from slipstream.errors import ModelError
from slipstream.models.resolve import file_of
from slipstream.run_dir.writing import METRICS, read_lines, suite_lines, suite_scores

SHOWN = (
    "loss",
    "teacher/kl",
    "teacher/\\w+/kl",
    "student/entropy",
    "reward/\\w+",
    "length/mean",
    "truncated",
    "lag/mean",
)
"""Regular expressions for names of metrics whose first and last values the card shows."""
LOADING_HEADING = "## How to load it"
"""Heading of the section with `loading`, the last of the card."""
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
Tree = Mapping[str, Any]
Row = tuple[str, ...]


def card(config: Tree, path: Path) -> str:
    """Return the text of the model card of a finished run; `path` is its run directory."""
    lines = read_lines(path / METRICS)
    trained, evaluated = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    measured = "mean reward" if config["task"]["reward"] else "KL to the teacher"
    parts = [
        head(config),
        f"# {path.absolute().name}",
        f"{named(config['student'])}, trained {how(config)} with Slipstream {slipstream.__version__}.",
        table(["", ""], setup(config, trained)),
        *section("From the first update to the last", ["", "first", "last"], course(trained)),
        *section("Held-out prompts", ["set", "update", "answers", measured], accuracies(config, evaluated)),
        *section("Tasks of lm-evaluation-harness", ["task", "update", "score", "value"], task_scores(path)),
        LOADING_HEADING,
        loading(config, path / "final"),
    ]
    return "\n\n".join(parts) + "\n"


def head(config: Tree) -> str:
    """Return the metadata block (YAML) that model hubs read."""
    student = str(config["student"])
    inherited = metadata_of(student)
    if is_hub_name(student):
        inherited["base_model"] = student
    lines = [f"{name}: {value}" for name, value in sorted(inherited.items())]
    return "\n".join(["---", *lines, "library_name: transformers", "tags:", "- on-policy-distillation", "---"])


def metadata_of(student: str) -> dict[str, str]:
    """Return base model and license from the metadata block of the student's own model card, if it has one."""
    block = re.match(r"---\n(.*?)\n---", text_of(student, "README.md"), re.DOTALL)
    return dict(re.findall(r"^(base_model|license): *(\S+)$", block[1], re.M)) if block else {}


def is_hub_name(model: str) -> bool:
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model)) and not Path(model).exists()


def named(model: str) -> str:
    return f"[{model}](https://huggingface.co/{model})" if is_hub_name(model) else f"`{model}`"


def how(config: Tree) -> str:
    ways = [
        "by on-policy distillation" if config["loss"]["weight"] else "",
        "by policy gradients on task rewards" if config.get("policy") else "",
    ]
    return " and ".join(filter(None, ways))


def setup(config: Tree, trained: Sequence[Tree]) -> Iterator[Row]:
    data, sampler, learner = (config[name] for name in ("data", "sampler", "learner"))
    yield "student", named(config["student"])
    for name, teacher in config["teachers"].items():
        there = ", behind an endpoint" if teacher.get("base_url") else ""
        yield f"teacher {name}", (f"`{teacher['model']}`" if there else named(teacher["model"])) + there
    yield "prompts", f"`{data['train']}`" + (f", the first {data['limit']:,}" if data.get("limit") else "")
    if config["task"]["reward"]:
        yield "graded by", ", ".join(f"`{reward}`" for reward in config["task"]["reward"])
    if config["loss"]["weight"]:
        yield "loss", settings(config["loss"])
    if policy := config.get("policy"):
        yield "policy loss", f"{policy['loss']} on {policy['advantage']}, weight {policy['weight']:g}"
    if reference := config.get("reference"):
        yield "reference", f"KL in the {reference['into']}, weight {reference['weight']:g}"
    if config["correction"]["preset"] != "disabled":
        yield "correction", str(config["correction"]["preset"])
    yield "schedule", settings(config["schedule"])
    yield "learning", f"learning rate {learner['lr']:g}, {learner['batch_size']} samples per update"
    if lora := learner.get("lora"):
        yield (
            "adapters",
            f"rank {lora['rank']}, alpha {lora['alpha']:g}, merged into this model, and kept separately in `adapter`",
        )
    yield "answers", f"at most {sampler['max_tokens']:,} tokens, at temperature {sampler['temperature']:g}"
    samples, tokens = (sum(line.get(name, 0) for line in trained) for name in ("samples", "tokens"))
    yield "updates", f"{len(trained):,}, on {samples:,.0f} responses with {tokens:,.0f} tokens in total"
    yield "seed", str(config["seed"])


def settings(section: Tree) -> str:
    """Format a config section that has a `kind`, such as `async (tau = 4)`."""
    rest = [f"{name} = {value}" for name, value in section.items() if name != "kind" and value is not None]
    return f"{section['kind']} ({', '.join(rest)})" if rest else str(section["kind"])


def course(trained: Sequence[Tree]) -> Iterator[Row]:
    """Yield name, first value and last value of each `SHOWN` metric that the first and the last update recorded."""
    for shown in SHOWN if trained else ():
        for name, last in trained[-1].items():
            if re.fullmatch(shown, name) and name in trained[0]:
                yield name, f"{trained[0][name]:.4g}", f"{last:.4g}"


def accuracies(config: Tree, evaluated: Sequence[Tree]) -> Iterator[Row]:
    """Yield table rows with the accuracy or KL of each evaluation set: at the first evaluation and at the last."""
    held_out = config["data"].get("eval")
    sources = held_out if isinstance(held_out, dict) else {"": held_out}
    for name in dict.fromkeys(line.get("set", "") for line in evaluated):
        of_set = [line for line in evaluated if line.get("set", "") == name]
        source = sources.get(name) or name or "another set"  # data.eval may have changed in a resumed run
        for line in [of_set[0], *of_set[1:][-1:]]:
            yield (
                f"`{source}`",
                str(line["update"]),
                f"{line['samples']:,.0f}",
                f"{line.get('accuracy', line.get('kl')):.4g}",
            )


def task_scores(path: Path) -> Iterator[Row]:
    """Yield table rows with the scores of each task, at the first update that has some and at the last."""
    lines = suite_lines(path)
    for task in dict.fromkeys(line["suite"] for line in lines):
        of_task = sorted((line for line in lines if line["suite"] == task), key=lambda line: line.get("update", 0))
        for line in [of_task[0], *of_task[1:][-1:]]:
            for name, score in suite_scores(line).items():
                yield f"`{task}`", str(line.get("update", "")), name, score


def loading(config: Tree, final: Path, repository: str = "") -> str:
    """Return commands that load the final student from its directory, or from the hub."""
    model = repository or str(final)
    code = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{model}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{model}")',
    ]
    lora = config["learner"].get("lora")
    loads_alone = bool(lora) and not misread(config["student"], lora["targets"])
    if loads_alone and not repository:
        code += [
            "",
            "# or only the adapter, on the base model that it was trained on",
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{final / "adapter"}")',
        ]
    elif loads_alone and is_hub_name(config["student"]):  # other bases are not on the hub
        code += [
            "",
            "# or only the adapter, on the base model that it was trained on",
            "from peft import PeftModel",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{config["student"]}")',
            f'model = PeftModel.from_pretrained(base, "{repository}", subfolder="adapter")',
        ]
    served = [
        f"vllm serve {model} --dtype bfloat16",
        f"python -m sglang.launch_server --model-path {model} --dtype bfloat16",
    ]
    converted = [
        "",
        "# or llama.cpp, whose checkout has the converter",
        f"LLAMA_CPP=llama.cpp slipstream export {final.parent} --gguf student.gguf",
        "llama-server --model student.gguf",
    ]
    shell = served if repository else served + converted  # the hub has no run to export
    return "\n".join(["```python", *code, "```", "", "```console", *shell, "```"])


def misread(student: str, targets: str | Sequence[str]) -> bool:
    """Return True if PEFT would load adapters of dense layers as adapters of experts (mixture of experts)."""
    feed_forward = targets == "all-linear" or not FEED_FORWARD.isdisjoint(targets)
    return feed_forward and "experts" in text_of(student, "config.json")


def text_of(student: str, file: str) -> str:
    """Return the text of one of the student's files; empty if it is not there, or was moved since the run began."""
    try:
        found = file_of(student, file)
        return "" if found is None else found.read_text("utf-8", errors="replace")
    except (ModelError, OSError):
        return ""


def section(title: str, names: Sequence[str], rows: Iterable[Row]) -> list[str]:
    found = list(rows)
    return [f"## {title}", table(names, found)] if found else []


def table(names: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
