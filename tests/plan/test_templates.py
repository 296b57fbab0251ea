"""A teacher that never saw the student's chat template is named in one line before the first update."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.cli import main
from slipstream.config.data import DataConfig
from slipstream.data.prompts import Row
from slipstream.plan.checks import judged_template
from slipstream.plan.templates import TemplateProbe, mean_logps, template_probe
from slipstream.records import Prompt, TextScores
from support.model_directories import TEMPLATE, build_tokenizer, save_model

OTHER = (
    "{% for message in messages %}{{ '# ' + message.role + '\\n' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}"
)
QUESTIONS = [f"{a}+{b}=" for a in range(4) for b in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that was trained on conversations in its template, and students with this and another template."""
    path, tokenizer = tmp_path_factory.mktemp("models"), build_tokenizer()
    for name, template in (("like", TEMPLATE), ("unlike", OTHER), ("teacher", TEMPLATE)):
        tokenizer.chat_template = template
        save_model(path / name, tokenizer, layers=1, seed=1)
    model = AutoModelForCausalLM.from_pretrained(path / "teacher")
    conversations = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": str(eval(question[:-1]))}]
        for question in QUESTIONS
    ]
    ids = tokenizer.apply_chat_template(conversations, tokenize=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        if step == 20:  # students are the teacher at an earlier step, so that their log-probs correlate
            for name in ("like", "unlike"):
                model.save_pretrained(path / name)
    model.save_pretrained(path / "teacher")
    rows = [{"prompt": question, "answer": str(eval(question[:-1]))} for question in QUESTIONS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CONFIG = """
student = "{path}/{student}"
updates = 1
output = "run"
[data]
train = "{path}/rows.jsonl"
chat = true
[teachers.main]
model = "{path}/teacher"
[sampler]
max_tokens = 12
[learner]
batch_size = 4
[loss]
{loss}
[runtime]
kind = "inline"
device = "cpu"
"""


@pytest.mark.parametrize("loss", ["", 'kind = "reverse_kl_topk"\nk = 8', 'kind = "reverse_kl"'])
@pytest.mark.parametrize("student, warned", [("unlike", True), ("like", False)])
def test_one_line_warns_of_a_teacher_that_does_not_know_the_template(
    student: str,
    warned: bool,
    loss: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG.format(path=models, student=student, loss=loss))
    assert main(["train", "run.toml"]) == 0
    lines = [line for line in "".join(capsys.readouterr()).splitlines() if "knows the student's template" in line]
    assert len(lines) == warned
    for line in lines:
        assert "warning: teacher main knows the student's template: log-prob per token of 8 prompts -" in line
        assert line.endswith("or its own prompt in teachers.main.context")


def test_the_forms_of_a_prompt_are_its_own_template_or_plain_text() -> None:
    """A form that is much longer than the student's is left out."""
    tokenizer, row = build_tokenizer(), Row("0", "1+1=", "", None)
    prompt = Prompt(id="0", number=0, tokens=np.arange(5, 15, dtype=np.int32), seed=0)
    data = DataConfig(chat=True, system_prompt="Add.")
    own = template_probe(tokenizer, [(row, prompt)], data, {}, more=9)
    assert own is not None and tokenizer.decode(own.prompts[0][1]) == "<bos><system>Add.<eos><user>1+1=<eos><assistant>"
    assert template_probe(tokenizer, [(row, prompt)], data, {}, more=3) is None
    tokenizer.chat_template = None
    plain = template_probe(tokenizer, [(row, prompt)], data, {}, more=9)
    assert plain is not None and plain.own == "plain text"
    assert tokenizer.decode(plain.prompts[0][1]) == "<bos>Add.\n\n1+1="


def test_means_are_over_tokens_and_skip_pairs_with_a_failed_text() -> None:
    def scores(*logps: float) -> TextScores:
        return TextScores(np.array(logps)[:, None])

    failed = TextScores(np.zeros((0, 0)), "no answer")
    assert mean_logps([scores(-1, -2, -6), scores(-1), scores(-3), scores(-2, -3), failed, scores(-9)]) == (-3, -2)
    assert mean_logps([failed, scores(-1)]) == (0, 0)


@pytest.mark.parametrize(
    "seen, own, ok", [(-2.0, -1.5, True), (-2.5, -1.5, False), (-20.0, -1.5, False), (-20.0, -5.0, True)]
)
def test_a_nat_per_token_is_too_far_unless_random_tokens_are_likelier(seen: float, own: float, ok: bool) -> None:
    """ln 100 = 4.6 nats: a teacher of 100 tokens with −5 in its own form never learned to predict prompts."""
    found = judged_template("main", TemplateProbe((), "plain text"), seen, own, vocabulary=100)
    assert (found.ok, found.fatal) == (ok, False)
