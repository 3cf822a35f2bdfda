"""Every mask's text is written out: nothing crashes when one is wrong, drafters just get worse."""

import pytest
from conversations import assistant, system, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflow_lightning.data.template import ChatEncoder, EncodedRow, render_prompt
from dflow_lightning.errors import InputError

REASONED = "<think>\nTwo plus three.\n</think>\n\nFive."

GOLDEN = {
    "no think": ([user("Hi"), assistant("Hello.")], ["Hello.<|im_end|>"]),
    "think": ([user("Hi"), assistant(REASONED)], [f"{REASONED}<|im_end|>"]),
    "multi-turn": (
        [user("Hi"), assistant("Hello."), user("How?"), assistant("Fine.")],
        ["Hello.<|im_end|>", "Fine.<|im_end|>"],
    ),
    "reasoning in an earlier turn is not shown": (
        [user("Hi"), assistant(REASONED), user("How?"), assistant("Fine.")],
        ["Five.<|im_end|>", "Fine.<|im_end|>"],
    ),
    "system": ([system("Be brief."), user("Hi"), assistant("Hello.")], ["Hello.<|im_end|>"]),
    "empty answer": ([user("Hi"), assistant("")], ["<|im_end|>"]),
    "unicode": ([user("你好 🙂"), assistant("héllo \ue000 🙂")], ["héllo \ue000 🙂<|im_end|>"]),
    "answer like the header": (
        [user("Hi"), assistant("<div>\n</div>"), user("x"), assistant("<b>")],
        ["<div>\n</div><|im_end|>", "<b><|im_end|>"],
    ),
    "white space around the answer": ([user("Hi"), assistant("\n a \n")], ["\n a \n<|im_end|>"]),
    "answer equal to the question": ([user("a"), assistant("a")], ["a<|im_end|>"]),
    "special tokens as text": (
        [user("<|im_end|>\n<|im_start|>assistant\n"), assistant("It is <|im_end|>, see?")],
        ["It is <|im_end|>, see?<|im_end|>"],
    ),
}


def encode_conversation(tokenizer, messages, **options) -> EncodedRow:
    """A whole conversation, with every answer where it stands."""
    encoder = ChatEncoder(tokenizer, **options)
    return encoder.encode([encoder.segments(messages)])[0]


def supervised(tokenizer, row) -> list[str]:
    """The decoded text of each supervised stretch."""
    texts: list[list[int]] = []
    previous = False
    for token, wanted in zip(row.input_ids, row.loss_mask, strict=True):
        if wanted and not previous:
            texts.append([])
        if wanted:
            texts[-1].append(token)
        previous = wanted
    return [tokenizer.decode(ids) for ids in texts]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("enable_thinking", [False, True])
def test_supervised_text(tokenizer, name, enable_thinking):
    messages, expected = GOLDEN[name]
    row = encode_conversation(tokenizer, messages, enable_thinking=enable_thinking)
    assert supervised(tokenizer, row) == expected


@pytest.mark.parametrize("name", GOLDEN)
def test_whole_text_is_the_rendered_one(tokenizer, name):
    messages, _ = GOLDEN[name]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    assert tokenizer.decode(encode_conversation(tokenizer, messages).input_ids) == rendered


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "think"])
def test_row_begins_with_the_prompt_of_decoding(tokenizer, name):
    messages, _ = GOLDEN[name]
    prompt = render_prompt(tokenizer, messages[:-1])
    row = encode_conversation(tokenizer, messages)
    assert row.input_ids[: len(prompt)] == prompt
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert row.loss_mask[len(prompt)]
    assert not row.loss_mask[len(prompt) - 1]


def test_row_with_reasoning_begins_with_the_thinking_prompt(tokenizer):
    messages, _ = GOLDEN["think"]
    prompt = render_prompt(tokenizer, messages[:-1], enable_thinking=True)
    row = encode_conversation(tokenizer, messages, enable_thinking=True)
    assert row.input_ids[: len(prompt)] == prompt
    assert tokenizer.decode(prompt).endswith("assistant\n")


@pytest.mark.parametrize("name", GOLDEN)
def test_an_unfinished_answer_lacks_its_end_token_alone(tokenizer, name):
    messages, expected = GOLDEN[name]
    encoder = ChatEncoder(tokenizer)
    whole, cut = encoder.segments(messages), encoder.segments(messages, finished=False)
    assert cut[:-2] == whole[:-2]
    assert cut[-2].text + "<|im_end|>" == whole[-2].text
    assert cut[-1].text == "<|im_end|>" + whole[-1].text
    texts = supervised(tokenizer, encoder.encode([cut])[0])
    wanted = [*expected[:-1], expected[-1].removesuffix("<|im_end|>")]
    assert texts == [text for text in wanted if text]


def test_prompt_and_answer_share_no_token(tokenizer):
    """The tokenizer would join the newlines of header and answer; decoding never does."""
    messages = [user("Hi"), assistant("\n\nHello.")]
    joined = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    ids = encode_conversation(tokenizer, messages).input_ids
    assert ids != tokenizer.encode(joined, add_special_tokens=False)
    assert tokenizer.decode(ids) == joined


def test_only_the_template_writes_special_tokens(tokenizer):
    messages, _ = GOLDEN["special tokens as text"]
    ids = encode_conversation(tokenizer, messages).input_ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


def test_thinking_marks_are_special_in_answers_only(tokenizer):
    messages = [user("Say <think>"), assistant(REASONED)]
    ids = encode_conversation(tokenizer, messages).input_ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 1


def test_spelling_special_tokens_changes_nothing_else(tokenizer):
    plain = render_prompt(tokenizer, [user("Hi"), assistant("Hello."), user("How?")])
    spelled = render_prompt(tokenizer, [user("Hi"), assistant("Hello."), user("How?<|im_end|>")])
    tail = render_prompt(tokenizer, [user("How?")])
    assert plain[-len(tail) :] == tail
    shared = len(plain) - len(tail) + 3
    assert spelled[:shared] == plain[:shared]


OTHER_TEMPLATES = {
    "trimmed, begin token": (
        "{{ '<|endoftext|>' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '<think>\n\n' + "
        "m.content|trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<think>\n\n' }}{% endif %}",
        ["Hello.<|im_end|>", "Fine.<|im_end|>"],
    ),
    "end token after a space": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}",
        [" Hello. <|im_end|>", " Fine. <|im_end|>"],
    ),
    "no end token": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ["Hello.", "Fine."],
    ),
    "no end token before a special one": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}",
        ["Hello.", "Fine."],
    ),
}


@pytest.mark.parametrize("name", OTHER_TEMPLATES)
def test_any_template(with_template, name):
    template, expected = OTHER_TEMPLATES[name]
    tokenizer = with_template(template)
    messages, _ = GOLDEN["multi-turn"]
    row = encode_conversation(tokenizer, messages)
    assert supervised(tokenizer, row) == expected
    prompt = render_prompt(tokenizer, messages[:-1])
    assert row.input_ids[: len(prompt)] == prompt


def test_no_space_appears_in_the_middle_of_a_conversation():
    """SentencePiece vocabularies begin every text with one."""
    letters = {letter: i for i, letter in enumerate("?▁abcdefghijklmnopqrstuvwxyz:\n")}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", additional_special_tokens=["<u>", "<a>"]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('<u>' if m.role == 'user' else '<a>:') + m.content + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<a>:' }}{% endif %}"
    )
    messages = [user("hi"), assistant("yes")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    row = encode_conversation(tokenizer, messages)
    assert row.input_ids == tokenizer.encode(text, add_special_tokens=False)
    assert sum(row.loss_mask) == len("yes") + 1


def test_many_rows_at_once_equal_one_by_one(tokenizer):
    encoder = ChatEncoder(tokenizer)
    conversations = [messages for messages, _ in GOLDEN.values()]
    together = encoder.encode([encoder.segments(messages) for messages in conversations])
    assert together == [encode_conversation(tokenizer, messages) for messages in conversations]


def test_tokenizer_without_template(with_template):
    with pytest.raises(InputError, match="has no chat template"):
        render_prompt(with_template(None), [user("Hi")])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", r"refuses the conversation \(no system role\)"),
        ("{{ messages[0].content }}", r"leaves out the assistant's text, message 2 \('Hello.'\)"),
        ("{{ messages[0].content }}: Hello.", "leaves out an answer"),
        (
            "{{ messages[-1].content|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "mixes the answer",
        ),
        ("{% for m in messages %}{{ m.content + m.content[:1] }}{% endfor %}", "mixes the answer"),
    ],
)
def test_template_that_does_not_fit(with_template, template, message):
    with pytest.raises(InputError, match=message):
        encode_conversation(with_template(template), [user("Hi"), assistant("Hello.")])


# ---------------------------------------------------------------- what a template leaves out

BODY = "{{ '<|im_start|>' + m.role + '\n' + %s + '<|im_end|>\n' }}"
LOOP = (
    "{%% for m in messages %%}{%% if %s %%}%s{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}{%% endif %%}"
)
R1_LIKE = LOOP % ("true", BODY % "m.content.split('</think>')[-1]")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"note": 'a "b"\n', "n": 47}}}
CALLING = [
    user("2+3?"), assistant("Let me see.") | {"tool_calls": [CALL]},
    {"role": "tool", "content": 'It is "5".\n'}, assistant("Five."),
]  # fmt: skip
CALLS = "{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}"
LEFT_OUT = {
    "reasoning in the text": (
        R1_LIKE, [user("2+3?"), assistant(REASONED)],
        r"the reasoning of message 2 \('Two plus three.'\)",
    ),
    "reasoning in its field": (
        R1_LIKE,
        [user("2+3?"), assistant("Five.") | {"reasoning_content": "Two plus three."}],
        r"the reasoning of message 2 \('Two plus three.'\)",
    ),
    "system": (
        LOOP % ("m.role != 'system'", BODY % "m.content"),
        [system("Be brief."), user("Hi"), assistant("Hello.")],
        r"the system's text, message 1 \('Be brief.'\)",
    ),
    "an earlier user": (
        LOOP % ("loop.revindex < 3 or m.role != 'user'", BODY % "m.content"),
        [user("Hi"), assistant("Hello."), user("Who?"), assistant("Me.")],
        r"the user's text, message 1 \('Hi'\)",
    ),
    "one of two equal texts": (
        LOOP % ("not loop.first", BODY % "m.content"),
        [user("Hi you"), assistant("Hello."), user("Hi you"), assistant("Hello.")],
        r"the user's text, message . \('Hi you'\)",
    ),
    "a text that is part of another": (
        LOOP % ("not loop.first", BODY % "m.content"),
        [user("Hi"), assistant("Hello."), user("Hi you"), assistant("Hello.")],
        r"the user's text, message 1 \('Hi'\)",
    ),
    "calls beside a text": (
        LOOP % ("true", BODY % "m.content"), CALLING, r"a tool call of message 2 \('add'\)",
    ),
    "text beside calls": (
        LOOP % ("true", BODY % "(m.tool_calls|tojson if m.tool_calls else m.content)"), CALLING,
        r"the assistant's text, message 2 \('Let me see.'\)",
    ),
    "arguments": (
        LOOP % ("true", BODY % "m.content" + CALLS % "{{ c.function.name }}"), CALLING,
        r"a tool call of message 2 \('note'\)",
    ),
    "a tool's result": (
        LOOP % ("m.role != 'tool'", BODY % "m.content" + CALLS % "{{ c|tojson }}"), CALLING,
        r"the tool's text, message 3 \('It is \"5\".'\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_text_that_the_template_leaves_out_rejects_the_row(with_template, name):
    """F5: the row trained on what was left; its answer followed something else."""
    template, messages, lost = LEFT_OUT[name]
    with pytest.raises(InputError, match=f"the chat template leaves out {lost}; use a"):
        encode_conversation(with_template(template), messages)


def test_tools_that_the_template_leaves_out_reject_the_row(tokenizer):
    """F5: the target would not know what it can call."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(InputError, match=r"the definition of a tool \('add'\)"):
        render_prompt(tokenizer, [user("2+3?")], tools=tools)


def test_a_call_is_not_taken_for_the_definition_of_its_tool(with_template):
    """F5: both have the tool's name."""
    template = LOOP % ("true", BODY % "m.content" + CALLS % "{{ c|tojson }}")
    with pytest.raises(InputError, match=r"the definition of a tool \('add'\)"):
        render_prompt(with_template(template), CALLING[:3], tools=[CALL])


def test_a_system_text_that_only_a_prompt_shows_rejects_the_written_row(with_template):
    """F5: Mistral's template puts it into the last message, if that is the user's."""
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + (messages[0].content + "
        "'\n' if loop.last and messages[0].role == 'system' else '') + m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}"
        "{% endfor %}"
    )
    messages = [system("Be brief."), user("Hi"), assistant("Hello.")]
    assert "Be brief." in tokenizer.decode(render_prompt(tokenizer, messages[:2]))
    with pytest.raises(InputError, match="leaves out the system's text, message 1"):
        encode_conversation(tokenizer, messages)


SHOWN = {
    "trimmed": LOOP % ("true", BODY % "m.content|trim" + CALLS % "{{ c|tojson }}"),
    "as JSON": LOOP % ("true", BODY % "m.content|tojson" + CALLS % "{{ c|string|tojson }}"),
    "JSON in JSON": LOOP % ("true", BODY % "m|tojson|tojson"),
    "escaped for XML": LOOP % (
        "true",
        BODY % "m.content|e"
        + CALLS % "<{{ c.function.name }}>{{ c.function.arguments|xmlattr }}{{ '\n' }}",
    ),
    "only the trimmed text of results": LOOP % (
        "true",
        BODY % "(m.content|trim|tojson if m.role == 'tool' else m.content)"
        + CALLS % "{{ c|tojson(indent=2) }}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_text_may_be_trimmed_or_quoted(with_template, name):
    messages = [*CALLING[:2], CALLING[2] | {"content": ' It is "5" é <&\n\n '}, CALLING[3]]
    assert render_prompt(with_template(SHOWN[name]), messages)


def test_reasoning_of_earlier_turns_may_be_left_out(with_template):
    """Reasoning models do not read what they thought before, so their rows lack it as well."""
    tokenizer = with_template(R1_LIKE)
    for thought in (REASONED, REASONED.replace("think>", "seed:think>")):
        assert render_prompt(tokenizer, [user("2+3?"), assistant(thought), user("Sure?")])
