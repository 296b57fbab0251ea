"""Chat templates in the manners of those that models come with, and a tokenizer for all of them: nothing is downloaded.

Each is a small one of our own, with the traits of its family that matter to a conversation of several turns.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "the weather in Paris is sunny today and the answer is forty two, I think so",
    '{"name": "look", "arguments": {"what": "there", "count": 3}}\n{"status": "ok", "output": "found"}',
    "user\nassistant\nsystem\ntool\n<function=look>\n<parameter=what>\nthere\n</parameter>\n</function>",
] * 4

QWEN = """{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ("user", "system") %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == "assistant" %}
{%- set late = loop.index0 >= ns.query %}
{%- set said = m.content if late else m.content.split("</think>")[-1].lstrip("\\n") %}<|im_start|>assistant
{{ said }}
{%- for call in m.tool_calls or [] %}
{%- if said or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}{{ "\n" }}<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if quiet %}<think>

</think>

{% endif %}{% endif %}"""

CODER = QWEN.replace(
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}""",
    """<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>""",
)

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{{ bos_token }}<|start|>system<|header|>

{{ strftime_now("%d %b %Y") }}<|im_end|>
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant<|header|>

{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eom|>
{%- elif m.role == "tool" %}<|start|>ipython<|header|>

{{ m.content | tojson }}<|im_end|>
{%- else %}<|start|>{{ m.role }}<|header|>

{{ m.content | trim }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|header|>

{% endif %}"""

MISTRAL = """{{ bos_token }}{% set ns = namespace(turn=0) %}
{%- for m in messages %}
{%- if m.role == "user" or (m.role == "assistant" and m.tool_calls is not defined) %}
{%- if (m.role == "user") != (ns.turn % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == "user" %}[INST] {{ m.content }}[/INST]
{%- elif m.role == "tool" %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception("an id has nine characters") }}{% endif -%}
[RESULT]{"content": {{ m.content | tojson }}, "id": "{{ m.tool_call_id }}"}[/RESULT]
{%- elif m.role == "assistant" and m.tool_calls is defined -%}
[CALLS] [{% for call in m.tool_calls %}{{ call.function | tojson }}{{ ", " if not loop.last }}{% endfor %}]<|im_end|>
{%- elif m.role == "assistant" %}{{ m.content }}<|im_end|>
{%- else %}{{ raise_exception("no role " + m.role) }}{% endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif -%}
<|start|>{{ "model" if m.role == "assistant" else m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|start|>model
{% endif %}"""

DEEP = """{{ bos_token }}{% set ns = namespace(tool=false) %}
{%- for m in messages %}
{%- if m.role != "tool" and ns.tool %}[/RESULTS]{% set ns.tool = false %}{% endif %}
{%- if m.role == "system" %}{{ m.content }}
{%- elif m.role == "user" %}<|start|>{{ m.content }}
{%- elif m.role == "tool" %}
{%- if not ns.tool %}[RESULTS]{% set ns.tool = true %}{% endif %}[RESULT]{{ m.content }}[/RESULT]
{%- elif m.tool_calls %}<|header|>{{ m.content }}[CALLS]
{%- for call in m.tool_calls %}[CALL]function[SEP]{{ call.function.name }}
```json
{{ call.function.arguments + "\n```" }}[/CALL]{{ "\n" if not loop.last }}{% endfor %}[/CALLS]<|im_end|>
{%- else %}<|header|>{{ m.content.split("</think>")[-1] }}<|im_end|>{% endif %}
{%- endfor %}{% if ns.tool %}[/RESULTS]{% endif %}
{%- if add_generation_prompt %}<|header|><think>
{% endif %}"""

TEMPLATES = {
    "qwen": QWEN,
    "coder": CODER,
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deep": DEEP,
}
SPECIAL = ["<bos>", "<|im_end|>", "<|end|>", "<|eom|>", "<|start|>", "<|header|>", "<|im_start|>"]
SPECIAL += ["[INST]", "[/INST]", "[CALLS]", "[RESULT]", "[/RESULT]", "<pad>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ADDED += ["[/CALLS]", "[CALL]", "[/CALL]", "[SEP]", "[RESULTS]", "[/RESULTS]"]


def backend(size: int = 420) -> Tokenizer:
    """Byte-level BPE of `size` tokens; what is added is not all special, and some are blanks."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(TEXT, trainer)
    inner.add_tokens([AddedToken("    ", normalized=False)])
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return inner


def tokenizer_with(template: str | None, inner: Tokenizer | None = None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner or backend(),
        eos_token="<|im_end|>",
        bos_token="<bos>",
        pad_token="<pad>",
        additional_special_tokens=[text for text in SPECIAL if text not in ("<bos>", "<|im_end|>", "<pad>")],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.name_or_path = "a/model"
    return tokenizer
