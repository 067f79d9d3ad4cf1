"""Chat templates and tokenizers of every kind: a conversation is rendered whole, or one line says what to do."""

import json
import signal
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from posttrain.config.task import FileConf, SystemRole, TaskName
from posttrain.errors import UserError
from posttrain.models.chat import turn_end
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records import Problem
from posttrain.tasks import answer_ids, make_task

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
# Phi-3's way: other roles than these two are passed over.
DEAF = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|pad|>{% endif %}"
)
# Gemma's way.
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
# Mistral's way: what follows a question is the answer, and needs no header.
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|system|>{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}"
)
HEADLESS = "{% for m in messages %}" + TURN + "{% endfor %}"


def tokenizer(template=CHATML):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


@pytest.fixture
def make(tmp_path):
    def make(prompts, made, **options):
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
        vocabulary = options.pop("vocabulary", None)
        conf = FileConf(name=TaskName.jsonl, path=str(file), **{"heldout": 0} | options)
        return make_task(conf, made, vocabulary)

    return make


@pytest.fixture
def texts(make):
    """Of all prompts."""
    return lambda prompts, made, **options: [
        made.decode(list(problem.prompt_ids)) for problem in make(prompts, made, **options).train
    ]


@pytest.fixture
def refused(make):
    def refused(prompts, made, **options):
        with pytest.raises(UserError) as error:
            make(prompts, made, **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    return refused


SYSTEM = {"role": "system", "content": "Think."}
USER = {"role": "user", "content": "1+1="}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_text_and_messages(texts):
    asked = "<|user|>1+1=<|end|><|assistant|>"
    assert texts(["1+1=", [USER]], tokenizer()) == [asked, asked]
    assert texts([[SYSTEM, USER]], tokenizer()) == ["<|system|>Think.<|end|>" + asked]
    found = texts([[*EARLIER, USER]], tokenizer(), system_prompt="Think.")
    assert found == ["<|system|>Think.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>" + asked]
    assert texts(["1+1="], tokenizer(None), system_prompt="Think.") == ["Think.\n\n1+1="]


def test_the_system_prompt_moves_into_the_user_turn(make, texts):
    moved = "<|user|>Think.\n\n1+1=<|end|><|assistant|>"
    options = dict(system_prompt="Think.", system_role=SystemRole.user)
    assert texts(["1+1=", [USER]], tokenizer(DEAF), **options) == [moved, moved]
    assert texts([[SYSTEM, USER]], tokenizer(DEAF), system_role=SystemRole.user) == [moved]
    assert texts(["1+1="], tokenizer(STRICT), **options) == [moved]
    places = [
        make(["1+1="], tokenizer(), **each).template.system
        for each in ({}, {"system_prompt": "Think."}, options, {"system_role": SystemRole.user})
    ]
    assert places == ["", "a turn of its own", "the user's turn", ""]
    assert make(["?"], tokenizer(None), **options).template.system == "before the prompt"


@pytest.mark.parametrize("template, words", [(DEAF, "drops the system turn 'Think.'"), (STRICT, "System role not")])
def test_a_template_without_a_system_role_is_refused(refused, template, words):
    message = refused(["1+1="], tokenizer(template), system_prompt="Think.")
    assert words in message and "type task.system_role=user" in message


def test_each_row_is_looked_at(refused):
    """The first has nothing that the template drops."""
    message = refused(["1+1=", [SYSTEM, USER]], tokenizer(DEAF))
    assert "a.jsonl line 2: the chat template drops the system turn" in message
    deaf_to_some = CHATML.replace("{{ m.content }}", "{{ m.content if m.content != '2+2=' else '' }}")
    message = refused(["1+1=", "2+2="], tokenizer(deaf_to_some))
    assert "line 2: the chat template drops the user turn '2+2='" in message
    picky = CHATML + "{% if messages[0].content == '2+2=' %}{{ 1 + 'a' }}{% endif %}"
    assert "line 2: the chat template fails: TypeError: unsupported operand" in refused(
        ["1+1=", "2+2="], tokenizer(picky)
    )


def test_a_template_may_trim_and_fold(texts):
    folding = CHATML.replace("{{ m.content }}", "{{ m.content.split() | join(' ') }}")
    assert texts([" 1 +\n 1= \n"], tokenizer(folding)) == ["<|user|>1 + 1=<|end|><|assistant|>"]


@pytest.mark.parametrize(
    "prompts, options, words",
    [
        ([[SYSTEM, USER]], {"system_prompt": "Go."}, "line 1: the messages have a system prompt of their own"),
        ([[SYSTEM]], {"system_role": SystemRole.user}, "line 1: task.system_role=user: the messages have no user turn"),
        ([[USER, EARLIER[1]]], {}, "line 1, column prompt: the conversation ends with an assistant's turn"),
    ],
)
def test_messages_that_do_not_fit(refused, prompts, options, words):
    assert words in refused(prompts, tokenizer(), **options)


def test_messages_need_a_template(refused):
    assert "line 2: the prompt is a list of chat messages, and the tokenizer has no" in refused(
        ["?", [USER]], tokenizer(None)
    )


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError"),
        ("{{ raise_exception('No.') }}", "the chat template fails: TemplateError: No"),
        ("{{ messages[7].content.strip() }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ({"tools": CHATML, "other": CHATML}, "multiple chat templates with no default"),
        ("{{ 'hello<|assistant|>' }}", "drops the user turn '1+1='"),
        ("", "drops the user turn '1+1='"),
        (HEADLESS, "writes no generation header: before the model's turn belongs '<|assistant|>'"),
        (CHATML + "<|end|>", "prompts end with the end token <|end|>"),
        ("<|system|><|system|>" + CHATML, "prompts begin with <|system|> twice"),
    ],
)
def test_templates_that_cannot_be_used(refused, template, words):
    made = tokenizer(template)
    made.bos_token = "<|system|>"
    assert words in refused(["1+1="], made)
    if "fails" in words:
        # The system prompt is not at fault.
        assert "system_role" not in refused(["1+1="], made, system_prompt="Think.")


def test_what_is_found_is_kept(make):
    found = make(["1+1="], tokenizer(), system_prompt="Think.").template
    assert (found.header, found.turn_ends, found.turn_end_ids) == ("<|assistant|>", ("<|end|>",), (256,))
    assert found.rendered == "<|system|>Think.<|end|><|user|>1+1=<|end|><|assistant|>" and found.warnings == ()
    assert make(["1+1="], tokenizer(BARE)).template.header == ""
    closed = make(["1+1="], tokenizer(DEAF)).template
    assert closed.header == "<|end|><|assistant|>" and closed.turn_ends == ("<|end|>",)


def test_a_template_of_single_questions_is_named_in_a_warning(make):
    single = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}<|user|>{{ messages[0].content }}"
    first, second = make(["1+1="], tokenizer(single)).template.warnings
    assert "takes no notice of add_generation_prompt" in first and "'<|user|>1+1='" in first
    assert "no token of its own: completions end with <|end|> alone" in second


def test_turn_ends():
    other = tokenizer(CHATML.replace("<|end|>", "<|eot|>\n"))
    assert turn_end(other) == frozenset()
    other.add_tokens([AddedToken("\n"), AddedToken("<|eot|>")])
    assert turn_end(other) == {other.convert_tokens_to_ids("<|eot|>")}
    spaced = tokenizer(CHATML.replace("<|end|>", "\n<|end|>"))
    spaced.add_tokens([AddedToken("\n")])
    assert turn_end(spaced) == {spaced.eos_token_id} == turn_end(tokenizer(DEAF)) == turn_end(tokenizer(BARE))
    assert turn_end(tokenizer(None)) == turn_end(tokenizer("{{ 1 / 0 }}")) == frozenset()
    assert turn_end(tokenizer("{{ messages[0].content }}<|end|>")) == frozenset()


def with_ends(single, template=None):
    """A tokenizer that puts tokens around each text."""
    made = tokenizer(template)
    special = [(name, made.convert_tokens_to_ids(name)) for name in ("<|system|>", "<|end|>", "<|pad|>")]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return made


def test_end_tokens_that_the_tokenizer_appends_are_stripped(make, texts):
    assert tokenizer(None)("a")["input_ids"] == with_ends("$A")("a")["input_ids"]
    made = with_ends("<|system|> $A <|pad|> <|end|>")
    assert texts(["1+1=", "aaa"], made) == ["<|system|>1+1=", "<|system|>aaa"]
    (warning,) = make(["1+1="], made).template.warnings
    assert warning == "the tokenizer ends each text with <|pad|> <|end|>: it is stripped from the prompts"
    assert texts(["1+1="], with_ends("<|system|> $A <|end|>", CHATML)) == ["<|user|>1+1=<|end|><|assistant|>"]


def test_a_prompt_that_brings_the_end_token_itself(refused):
    assert "prompts end with the end token <|end|>" in refused(["1+1=<|end|>"], tokenizer(None))


def test_one_bos(make, refused):
    made = with_ends("<|system|> $A", CHATML)
    made.bos_token = "<|system|>"
    (warning,) = make(["1+1="], made).template.warnings
    assert warning.startswith("prompts begin without <|system|>, which the tokenizer puts before other text")
    made.chat_template = "{{ bos_token }}" + CHATML
    assert make(["1+1="], made).template.warnings == ()
    double = with_ends("<|system|> <|system|> $A")
    double.bos_token = "<|system|>"
    assert "prompts begin with <|system|> twice" in refused(["1+1="], double)


def test_a_tokenizer_without_an_end_token(refused):
    endless = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    assert "the tokenizer has no end token: set eos_token in the model's tokenizer_config.json, or" in refused(
        ["1+1="], endless
    )
    endless.chat_template = CHATML
    endless.add_special_tokens({"extra_special_tokens": ["<|end|>"]})
    assert "tokenizer_config.json to <|end|>, which ends a turn in the chat template" in refused(["1+1="], endless)


def test_tokens_that_the_model_has_no_embedding_of(make, refused):
    assert len(make(["1+1="], tokenizer(), vocabulary=261).train) == 1
    message = refused(["1+1="], tokenizer(), vocabulary=260)
    assert "holds the token '<|assistant|>' of id 260, and the model has embeddings of 260 tokens" in message
    assert "pad_token of the tokenizer, <|pad|>, has the id 257" in refused(["1"], tokenizer(), vocabulary=257)
    made = tokenizer()
    made.pad_token = "1"
    assert "eos_token of the tokenizer, <|end|>, has the id 256" in refused(["1"], made, vocabulary=256)


def sentencepiece(prepend="always"):
    """As Llama 2 and Gemma have it: a space is part of the word after it, and one is put before each text."""
    words = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁4", -2.0), ("▁", -3.0), ("▁the", -2.0), ("12", -1.0)]
    core = Tokenizer(Unigram([*words, *((letter, -4.0) for letter in "0123456789+=?the\n")], unk_id=2))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def problem(made, prompt, answer):
    ids = tuple(made(prompt, add_special_tokens=False)["input_ids"])
    return Problem(task="jsonl", index=0, prompt=prompt, prompt_ids=ids, answer=answer)


@pytest.mark.parametrize("prepend", ["always", "first"])
@pytest.mark.parametrize(
    "prompt, answer, tokens",
    [
        ("2+2=", "4", ["4"]),
        ("2+2=", " 4", ["▁4"]),
        ("2+2=\n", "the", ["t", "h", "e"]),
        ("2+2=</s>", "4", {"always": ["▁4"], "first": ["4"]}),
        ("1+11=1", "2", ["2"]),
        ("2+2=", ("4", "the"), ["4"]),
    ],
)
def test_fine_tuning_teaches_no_space_that_the_model_would_not_write(prepend, prompt, answer, tokens):
    """After `1` the answer `2` would become one token with it, so it is tokenized by itself."""
    made = sentencepiece(prepend)
    assert made.convert_ids_to_tokens(made("4")["input_ids"]) == ["▁4"]
    expected = tokens if isinstance(tokens, list) else tokens[prepend]
    assert made.convert_ids_to_tokens(answer_ids(problem(made, prompt, answer), made)) == expected


def test_fine_tuning_with_a_legacy_llama_tokenizer():
    """Its normalizer puts the space, which no pre-tokenizer setting shows."""
    core = Tokenizer(
        BPE(vocab={"<unk>": 0, "▁": 1, "4": 2, "=": 3, "▁4": 4, "</s>": 5}, merges=[("▁", "4")], unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    assert made.convert_ids_to_tokens(made("4")["input_ids"]) == ["▁4"]
    assert made.convert_ids_to_tokens(answer_ids(problem(made, "4=", "4"), made)) == ["4"]


def test_byte_level_answers_are_the_text_itself():
    made = tokenizer()
    for answer in ("4", " 4", "\n4", "é"):
        asked = Problem(
            task="t", index=0, prompt="", prompt_ids=(made.convert_tokens_to_ids("<|assistant|>"),), answer=answer
        )
        assert answer_ids(asked, made) == made(answer)["input_ids"]


def test_a_template_that_never_ends(refused, monkeypatch):
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    monkeypatch.setattr("posttrain.models.chat.LIMIT_S", 0.3)
    # pytest's own time-out is an alarm too, and must still come.
    others, _ = signal.setitimer(signal.ITIMER_REAL, 100)
    began = time.monotonic()
    said = refused(["1+1="], tokenizer(loop + CHATML))
    assert "the chat template fails: TimeoutError: it took longer than 0.3 s" in said
    left, _ = signal.setitimer(signal.ITIMER_REAL, others)
    assert time.monotonic() - began < 10 and 80 < left < 100


def test_a_row_of_many_megabytes_is_not_tokenized(make, monkeypatch):
    """It is dropped by its characters, and only where they cannot be few enough tokens."""
    seen = []
    real = PreTrainedTokenizerFast._encode_plus

    def watched(self, text, *arguments, **options):
        seen.append(max(map(len, text)) if isinstance(text, list) else len(text))
        return real(self, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", watched)
    task = make(["1+1=", "1" * 20_000_000, "2" * 1000], tokenizer(), max_prompt_tokens=60)
    assert len(task.train) == 1 and task.dropped == {"longer than task.max_prompt_tokens": 2}
    assert 1000 <= max(seen) < 10_000
