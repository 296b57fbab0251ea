"""Plans with a teacher of another tokenizer: its prompts, the roles of special tokens, lengths, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.file import parse
from slipstream.data.prompts import Row
from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.models.resolve import model_path
from slipstream.plan.facts import Facts
from slipstream.plan.plan import changed, plan, with_known_texts
from slipstream.plan.spelling import respelled_prompts, respelling_of
from slipstream.testing.endpoint import model
from support.fake_endpoint import FakeEndpoint

FOLDER = Path(__file__).parents[2] / "build" / "tokenizers"
TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "teachers": {"main": {"model": "builtin:pair_teacher", "spelling": "own"}},
    "data": {"train": "builtin:arithmetic", "limit": 24},
    "sampler": {"max_tokens": 30},
    "loss": {"m": 1},
    "learner": {"batch_size": 8},
    "runtime": {"kind": "inline", "device": "cpu"},
}


def with_teacher(**changes: Any) -> dict[str, Any]:
    return TREE | {"teachers": {"main": TREE["teachers"]["main"] | changes}}


def test_a_teacher_reads_its_own_prompts_and_known_texts_in_its_own_tokens() -> None:
    evaluated = {"eval": {"every": 1, "prompts": 4}, "data": TREE["data"] | {"eval": "builtin:arithmetic"}}
    made = plan(parse(TREE | evaluated))
    theirs = Facts(made.config).tokenizers["main"].tokenizer
    for prompt in (*map(made.prompts.row, range(24)), *made.held_out[""]):
        assert prompt.respelled is not None
        assert theirs.decode(prompt.respelled) == made.tokenizer.decode(prompt.tokens)
        assert len(prompt.respelled) == len(prompt.tokens), "a prompt has no two digits in a row"
    scorer = made.engines.scorers["main"]
    assert scorer.respelling is not None and scorer.respelling.vocabulary == len(theirs) == 139
    assert scorer.respelling.roles == {1: theirs.eos_token_id, 0: theirs.pad_token_id}
    longest = max(len(row.respelled) for row in map(made.prompts.row, range(24)) if row.respelled is not None)
    assert scorer.respelling.limit == made.config.teachers["main"].max_length == longest + 2 * 30
    assert changed(made, made.config).engines.scorers["main"].respelling == scorer.respelling
    known = with_known_texts(made).known["main"]
    assert all(text.prompt.respelled is None for text in known.texts)
    assert max(int(text.tokens.max()) for text in known.texts) == theirs.eos_token_id


def test_a_context_is_written_in_the_teachers_tokens() -> None:
    made = plan(parse(with_teacher(context="{ground_truth}{prompt}")))
    theirs = Facts(made.config).tokenizers["main"].tokenizer
    limit = made.engines.scorers["main"].respelling
    texts = [str(row.ground_truth) + str(row.prompt) for row in made.prompts.rows]
    assert limit is not None and limit.limit == max(len(theirs(text)["input_ids"]) for text in texts) + 2 * 30


def test_a_context_that_a_function_writes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'teachers.main: spelling = "own" cuts responses to the room .* a template'):
        parse(with_teacher(context="./own.py:shown", max_length=99))


@pytest.mark.parametrize(
    ("engine", "kinds"), [("native", '"gold" or "cross_entropy"'), ("vllm", '"cross_entropy"')], ids=["native", "vllm"]
)
def test_a_supervised_loss_is_refused_with_those_that_the_engine_can_score(engine: str, kinds: str) -> None:
    with pytest.raises(ConfigError, match=f"write sft.loss.kind = {kinds}$"):
        parse(with_teacher(engine=engine) | {"sft": {"updates": 1, "loss": {"kind": "forward_kl"}}})


def test_a_context_that_is_too_short_in_the_teachers_tokens_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(model_path("builtin:pair_teacher"), short)
    file = short / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 60}))
    made = plan(parse(with_teacher(model=str(short)) | {"sampler": {"max_tokens": 16}}))
    assert made.config.teachers["main"].max_length == 60, "room for fewer than twice the tokens is left out and counted"
    with pytest.raises(
        DataError, match=r"prompt tokens \+ sampler.max_tokens = 30 exceed the context of 60 of .*short"
    ):
        plan(parse(with_teacher(model=str(short))))


def test_a_text_that_a_tokenizer_cannot_write_is_refused(tmp_path: Path) -> None:
    lacking = tmp_path / "lacking"
    shutil.copytree(model_path("builtin:pair_teacher"), lacking)
    file = lacking / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["vocab"]["#"] = tree["model"]["vocab"].pop("=")
    file.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"lacking: its tokens cannot write '=' exactly"):
        plan(parse(with_teacher(model=str(lacking))))


def test_an_endpoint_needs_the_tokenizer_here_and_the_room_for_its_tokens() -> None:
    with FakeEndpoint(model(model_path("builtin:pair_teacher")), name="pairs") as fake:
        served = {"model": "pairs", "base_url": fake.url}
        made = plan(parse(with_teacher(**served, tokenizer="builtin:pair_teacher")))
        assert made.engines.scorers["main"].respelling is not None
        with pytest.raises(ConfigError, match=r"teachers.main.tokenizer: name the HF directory .* uses"):
            plan(parse(with_teacher(**served | {"model": "a/b/c"})))
        fake.max_model_len = 70
        with pytest.raises(ConfigError, match=r"with a context of 70, but prompt"):
            plan(parse(with_teacher(**served, tokenizer="builtin:pair_teacher")))


def test_a_teacher_has_arguments_of_its_own_template() -> None:
    for family in ("qwen3", "llama3_1"):
        if not (FOLDER / family).is_dir():
            pytest.skip(f"no {FOLDER / family}: make tokenizers fetches it")
    rows = [Row(id="row:0", prompt=[{"role": "user", "content": "What is 2 + 3?"}], ground_truth="5")]

    def prompt(**args: Any) -> str:
        teacher = {"model": str(FOLDER / "qwen3"), "spelling": "own", "template_args": args}
        tree = {**TREE, "student": str(FOLDER / "llama3_1"), "teachers": {"main": teacher}}
        config = parse(tree | {"data": {"train": "rows.jsonl"}})
        facts = Facts(config)
        (tokens,) = respelled_prompts(config, facts, rows, ["main"], {})
        text: str = facts.tokenizers["main"].tokenizer.decode(tokens)
        return text

    assert prompt(enable_thinking=False) == prompt() + "<think>\n\n</think>\n\n"
    with pytest.raises(
        ConfigError, match=r"teachers.main.template_args.thinks does nothing: the chat template of .*qwen3"
    ):
        prompt(thinks=False)


def test_messages_are_rendered_by_the_teachers_template_and_ends_have_one_role() -> None:
    for family in ("qwen3", "llama3_1"):
        if not (FOLDER / family).is_dir():
            pytest.skip(f"no {FOLDER / family}: make tokenizers fetches it")
    config = parse(
        TREE
        | {
            "student": str(FOLDER / "qwen3"),
            "teachers": {"main": {"model": str(FOLDER / "llama3_1"), "spelling": "own"}},
        }
        | {"data": {"train": "rows.jsonl", "template_args": {"enable_thinking": False}}}
    )
    facts = Facts(config)
    rows = [Row(id="row:0", prompt=[{"role": "user", "content": "What is 2 + 3?"}], ground_truth="5")]
    (tokens,) = respelled_prompts(config, facts, rows, ["main"], {})
    theirs = facts.tokenizers["main"].tokenizer
    assert tokens is not None
    text = theirs.decode(tokens)
    assert text.startswith("<|begin_of_text|>") and text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    ours = facts.student.tokenizer
    stops = [ours.convert_tokens_to_ids(end) for end in ("<|im_end|>", "<|endoftext|>")]
    found = respelling_of(config, facts, "main", rows, stops=stops, limit=99, tools={})
    assert {found.roles[stop] for stop in stops} == {theirs.convert_tokens_to_ids("<|eot_id|>")}
    assert np.all(np.array(list(found.roles.values())) < found.vocabulary)
