"""Texts and messages -> ids and what counts: by hand, and as transformers renders a chat template."""

import json

import pytest
import sentencepiece

from megarlhf.config import UserError
from megarlhf.data.conversations import encode, encode_prompt, turns
from megarlhf.data.preferences import PreferenceDataConfig, load_preferences
from megarlhf.data.prompts import PromptsConfig, load_prompts
from megarlhf.data.sft import SFTDataConfig, load_sft
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.train.resuming import check_chat_template
from tests.unit.test_data import CHATML, FORGETFUL, FORGETFUL_GENERATION, STRICT, save_hf

# The marks of a block without the token that ends the turn.
BARE_GENERATION = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}",
)
# Answers without thoughts, while the generation prompt begins one.
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def said(role, content):
    return {"role": role, "content": content}


SYSTEM, USER, FOUR = said("system", "Be brief."), said("user", "What is two plus two?"), said("assistant", "Four.")
SEA, SLOW, QUICK = said("user", "And the sea?"), said("assistant", "It is slow."), said("assistant", "It is quick.")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("chatml"), CHATML)


@pytest.fixture(scope="module")
def hf(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer with a given template."""
    return lambda template: load_tokenizer(save_hf(tmp_path_factory.mktemp("hf"), template))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shown(tokenizer, one):
    """(prompt, answer, what counts)."""
    marked = [token for token, counts in zip(one.answer, one.counts, strict=True) if counts]
    return tokenizer.decode(one.prompt), tokenizer.decode(one.answer), tokenizer.decode(marked)


def test_texts_by_hand(hf):
    (one,) = encode(hf, "The sea", {"a": " is slow"})
    assert one.prompt == [hf.bos_id, *hf.encode("The sea")] and one.answer == [*hf.encode(" is slow"), hf.eos_id]
    assert all(one.counts) and one.ids == one.prompt + one.answer and sum(one.mask) == len(one.answer)
    (bare,) = encode(hf, "The sea", {"a": " is slow"}, add_bos=False, add_eos=False)
    assert bare.ids == one.ids[1:-1]
    assert encode_prompt(hf, "The sea", add_bos=True) == one.prompt
    assert encode_prompt(hf, "The sea", add_bos=False) == bare.prompt


def test_messages_by_hand(hf):
    """The ids of the text that ChatML stands for, cut behind the last turn's EOS; neither BOS nor a line break."""
    before = hf.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two plus two?<|im_end|>\n"
                       "<|im_start|>assistant\n")  # fmt: skip
    first, last = [*hf.encode("Four."), hf.eos_id], [*hf.encode("It is slow."), hf.eos_id]
    between = hf.encode("\n<|im_start|>user\nAnd the sea?<|im_end|>\n<|im_start|>assistant\n")
    assert encode_prompt(hf, [SYSTEM, USER], add_bos=True) == before
    (one,) = encode(hf, [SYSTEM, USER], {"a": [FOUR, SEA, SLOW]})
    assert one.prompt == before and one.answer == first + between + last
    assert one.counts == [True] * len(first) + [False] * len(between) + [True] * len(last)
    (short,) = encode(hf, [SYSTEM, USER], {"a": "Four."}, add_eos=False)
    assert short.prompt == before and short.answer == first[:-1] and all(short.counts)


@pytest.mark.parametrize("template", [CHATML, FORGETFUL_GENERATION, BARE_GENERATION, STRICT])
def test_as_transformers_renders(made, template, tmp_path):
    """The prompt is apply_chat_template with the generation prompt, the row the beginning of the whole conversation."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(save_hf(tmp_path, template))
    ours = made(template)
    prompt, answer = [USER, FOUR, SEA], [SLOW]
    (one,) = encode(ours, prompt, {"a": answer})
    rendered = theirs.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=True)
    whole = theirs.apply_chat_template(prompt + answer, tokenize=True, return_dict=True)["input_ids"]
    assert one.prompt == rendered["input_ids"] == encode_prompt(ours, prompt, add_bos=True)
    assert one.ids == whole[: len(one.ids)] and ours.decode(whole[len(one.ids) :]).strip() == ""
    assert one.ids[-1] == ours.eos_id
    counted = shown(ours, one)[2]
    assert counted == ("It is slow." if template == BARE_GENERATION else "It is slow.<|im_end|>")


LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_tokenizers_of_other_projects_with_a_given_template(shared, name, tmp_path):
    """A template without a generation prompt, special tokens within the text, spaces before words."""
    from transformers import AutoTokenizer

    ours = load_tokenizer(shared / "fixtures/hf" / name, LLAMA)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for prompt, answer in [([USER], [FOUR]), ([USER, FOUR, SEA], [SLOW]), ([USER], [FOUR, SEA, SLOW])]:
        (one,) = encode(ours, prompt, {"a": answer})
        rendered = theirs.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True, return_dict=True)
        assert one.prompt == rendered["input_ids"]
        whole = theirs.apply_chat_template(prompt + answer, tokenize=True, return_dict=True)["input_ids"]
        assert one.ids == whole and one.ids[-1] == ours.eos_id
        assert [m["content"] for m in answer if m["role"] == "assistant"] == shown(ours, one)[2].replace(
            theirs.eos_token, "\n"
        ).strip().replace(" \n ", "\n").splitlines()


def test_forms_of_one_pair_are_alike(hf):
    """Whatever of it is a text, a list that goes on, or the whole conversation."""
    want = encode(hf, [USER], {"a": [FOUR], "b": [said("assistant", "Five.")]})
    five = said("assistant", "Five.")
    for prompt, first, second in [
        ([USER], "Four.", "Five."),
        ([USER], [USER, FOUR], [USER, five]),
        ([USER], [USER, FOUR], "Five."),
        (USER["content"], [FOUR], [five]),
        (USER["content"], [USER, FOUR], [USER, five]),
        (f" {USER['content']}\n", [USER, FOUR], [USER, five]),
        (USER["content"], [FOUR], "Five."),
        (None, [USER, FOUR], [USER, five]),
    ]:
        assert encode(hf, prompt, {"a": first, "b": second}) == want, (prompt, first, second)
    (system,) = encode(hf, USER["content"], {"a": [SYSTEM, USER, FOUR]})
    assert system == encode(hf, [SYSTEM, USER], {"a": "Four."})[0]


def test_what_all_answers_share_is_the_prompt(hf):
    slow, quick = encode(hf, None, {"a": [USER, FOUR, SEA, SLOW], "b": [USER, FOUR, SEA, QUICK]})
    assert slow.prompt == quick.prompt == encode_prompt(hf, [USER, FOUR, SEA], add_bos=True)
    assert shown(hf, slow)[2] == "It is slow.<|im_end|>" and shown(hf, quick)[2] == "It is quick.<|im_end|>"
    again = encode(hf, [USER], {"a": [FOUR, SEA, SLOW], "b": [USER, FOUR, SEA, QUICK]})
    assert again == [slow, quick]
    # where they part at the user's turn, the assistant's turn before it is the answer's
    fox = said("user", "And the fox?")
    one, other = encode(hf, None, {"a": [USER, FOUR, SEA, SLOW], "b": [USER, FOUR, fox, QUICK]})
    assert one.prompt == encode_prompt(hf, [USER], add_bos=True) == other.prompt
    assert shown(hf, one)[2] == "Four.<|im_end|>It is slow.<|im_end|>"
    # a given prompt with one answer is not extended
    (single,) = encode(hf, [USER], {"a": [USER, FOUR, SEA, SLOW]})
    assert single == one
    # without a prompt, one conversation's answer is its last turn
    assert encode(hf, None, {"a": [USER, FOUR, SEA, SLOW]})[0] == slow
    same = encode(hf, None, {"a": [USER, FOUR], "b": [USER, FOUR]})
    assert same[0] == same[1] and shown(hf, same[0])[2] == "Four.<|im_end|>"


def test_only_the_turns_after_the_prompt_must_be_told_apart(made):
    """A template that writes earlier answers differently serves where they are the prompt."""
    tokenizer = made(FORGETFUL)
    with pytest.raises(ValueError, match="message 3: its tokens cannot be told apart"):
        tokenizer.chat([SYSTEM, USER, FOUR, SEA, SLOW])
    (one,) = encode(tokenizer, [USER, FOUR, SEA], {"a": "It is slow."})
    assert shown(tokenizer, one)[2] == "<think>It is slow.<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "answers", "message"),
    [
        ([USER, FOUR], {"a": "Slow."}, "'prompt' ends with the assistant's message"),
        ([said("user", " ")], {"a": "Slow."}, "'prompt': message 1: the content is empty"),
        ([USER], {"a": [FOUR, SEA]}, "'a' ends with a message of the role user, not the assistant's"),
        ([USER], {"a": [SEA, FOUR]}, "'a' neither begins with the messages of 'prompt' nor goes on with an assistant"),
        ("The sea?", {"a": [USER, FOUR]}, "'a' neither begins with the messages of 'prompt' nor"),
        (None, {"a": [USER, FOUR], "b": [SEA, FOUR]}, "'a' and 'b' are of different conversations"),
        (None, {"a": [FOUR], "b": [SLOW]}, "the assistant speaks first; begin the conversation"),
        (None, {"a": [SYSTEM, USER, FOUR], "b": [SYSTEM, SEA, FOUR]}, "'a' and 'b': the assistant does not speak"),
        ([USER], {"a": " "}, "'a' is empty"),
    ],
)
def test_what_does_not_fit_together(hf, prompt, answers, message):
    with pytest.raises(ValueError, match=message) as caught:
        encode(hf, prompt, answers)
    assert not isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_templates_that_change_the_prompt_are_refused(made):
    thinking = made(THINKING)
    assert thinking.decode(encode_prompt(thinking, [USER], add_bos=True)).endswith("assistant\n<think>\n")
    with pytest.raises(ValueError, match=r"writes the prompt differently when an answer follows \('.*think.*is then"):
        encode(thinking, [USER], {"a": "Four."})
    with pytest.raises(ValueError, match="template refuses the conversation: the user speaks first"):
        encode(made(STRICT), [SYSTEM, USER], {"a": "Four."})
    for given in ([USER], None):
        with pytest.raises(UserError, match="no chat template; use one"):
            encode(made(None), given, {"a": [USER, FOUR]})


INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("own", [None, CHATML])
def test_a_given_template_is_saved_with_the_tokenizer(tmp_path, own):
    from transformers import AutoTokenizer

    directory = save_hf(tmp_path / "hf", own)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "inst.jinja").write_text(INST)
    for number, given in enumerate([INST, str(tmp_path / "inst.jinja")]):
        tokenizer = load_tokenizer(directory, given)
        (one,) = encode(tokenizer, [USER], {"a": "Four."})
        assert (
            one.prompt == tokenizer.encode("[What is two plus two?]") and shown(tokenizer, one)[1] == " Four.<|im_end|>"
        )
        target = tmp_path / f"saved{number}"
        tokenizer.save(target)
        again = load_tokenizer(target)
        assert again.chat_template == tokenizer.chat_template == INST and tokenizer.came_with(target)
        assert encode(again, [USER], {"a": "Four."}) == [one]
        theirs = AutoTokenizer.from_pretrained(target)
        assert theirs.chat_template == INST and theirs.encode("The sea") == tokenizer.encode("The sea")
        check_chat_template(tokenizer, tmp_path)  # nothing was saved there
        (tmp_path / str(number)).mkdir()
        target.rename(tmp_path / str(number) / "tokenizer")
        check_chat_template(again, tmp_path / str(number))
        with pytest.raises(
            UserError, match="chat_template: is another one than that of the checkpoint, .*tokenizer; g"
        ):
            check_chat_template(load_tokenizer(directory), tmp_path / str(number))
    assert load_tokenizer(directory).chat_template != INST


def test_templates_that_cannot_be_used(directory, tmp_path):
    (tmp_path / "latin.jinja").write_bytes(b"{{ caf\xe9 }}")
    (tmp_path / "empty.jinja").write_text(" \n")
    (tmp_path / "long.jinja").write_text("x" * (2**20 + 1))
    (tmp_path / "open.jinja").write_text("{# a line #}\n{% for m in messages %}{{ m }}")
    for given, message in {
        "{% for m in messages %}": "chat_template: the given text, line 1: not a Jinja template (Unexpected end of",
        "{{ messages | no_such }}": "chat_template: the given text, line 1: not a Jinja template (No filter named",
        str(tmp_path / "open.jinja"): f"chat_template: {tmp_path}/open.jinja, line 2: not a Jinja template",
        str(tmp_path / "none.jinja"): f"{tmp_path}/none.jinja: cannot read the chat template (No such file",
        str(
            tmp_path
        ): f"{tmp_path}: cannot read the chat template (a directory); give a Jinja file or, as chat_template",
        str(tmp_path / "latin.jinja"): f"chat_template: {tmp_path}/latin.jinja: not UTF-8 (byte 7)",
        str(tmp_path / "empty.jinja"): f"chat_template: {tmp_path}/empty.jinja is empty",
        str(tmp_path / "long.jinja"): f"chat_template: {tmp_path}/long.jinja has more than 1048576 bytes",
    }.items():
        with pytest.raises(UserError) as caught:
            load_tokenizer(directory, given)
        assert str(caught.value).startswith(message), str(caught.value)
    sentences = iter(["the sea is slow", "two plus two is four"] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_prefix=str(tmp_path / "sp"), vocab_size=18, minloglevel=2, num_threads=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="chat_template: .*sp.model is a SentencePiece model, which reads"):
        load_tokenizer(tmp_path / "sp.model", CHATML)
    strict = load_tokenizer(directory, STRICT.replace("the user", "nobody"))  # it refuses conversations, not itself
    with pytest.raises(ValueError, match="refuses the conversation: nobody speaks first"):
        encode(strict, [SYSTEM, USER], {"a": "Four."})


def test_messages_are_checked():
    for given, message in [
        ([said("human", "a")], "'m': message 1: unknown role 'human'; known: assistant, developer"),
        ([USER, said("asistant", "a")], "'m': message 2: unknown role 'asistant'; did you mean 'assistant'?"),
        ([USER, said("assistant", " ")], "'m': message 2: the assistant's content is empty"),
        ([USER, {"role": "user"}], r"'m': message 2: no key 'content' \(found: role\)"),
        ([USER, {"from": "human", "value": "a"}], r"'m': message 2: no key 'role' \(found: from, value\)"),
        ([], "'m' must be a list of messages"),
        (["hi"], "'m': message 1 must have a role and a content"),
        (3, "'m' must be a string, not int"),
    ]:
        with pytest.raises(ValueError, match=message):
            turns({"m": given}, "m")
    assert turns({"m": "text"}, "m") == "text" and turns({"m": [USER]}, "m") == [USER]


# -------------------------------------------------------------------------------------------------- data sets

ULTRAFEEDBACK = {
    "prompt": "What is two plus two?", "prompt_id": "a1", "chosen": [USER, FOUR],
    "rejected": [USER, said("assistant", "Five.")], "messages": [USER, FOUR],
    "score_chosen": 8.5, "score_rejected": 2.0,
}  # fmt: skip
HH = {
    "chosen": "\n\nHuman: What is two plus two?\n\nAssistant: Four.\n\nHuman: And the sea?\n\nAssistant: It is slow.",
    "rejected": "\n\nHuman: What is two plus two?\n\nAssistant: Four.\n\nHuman: And the sea?\n\nAssistant: It sings.",
}


def load_pairs(path, tokenizer, counted="response", **options):
    return load_preferences(path, tokenizer, PreferenceDataConfig(train=path, **options), counted=counted)


def counted_texts(data, tokenizer):
    """(what does not count, what does) of every row."""
    found = []
    for k in range(len(data)):
        tokens, mask, _ = data.row(k)
        found.append((tokenizer.decode(tokens[~mask]), tokenizer.decode(tokens[mask])))
    return found


def test_pairs_of_public_shapes(hf, tmp_path):
    path = write(tmp_path / "x.jsonl", [ULTRAFEEDBACK, HH])
    data, report = load_pairs(path, hf)
    asked = "<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\n"
    talk = "<s>" + HH["chosen"].removesuffix(" It is slow.")
    assert counted_texts(data, hf) == [
        (asked, "Four.<|im_end|>"), (asked, "Five.<|im_end|>"), (talk, " It is slow.<|im_end|>"),
        (talk, " It sings.<|im_end|>"),
    ]  # fmt: skip
    assert not report.bad.count and report.num_prompts == 2 and not data.margins.any()
    last, _ = load_pairs(path, hf, counted="last")  # a reward model reads the score at EOS, where the policy stops
    assert [last.row(k)[0][-1] for k in range(4)] == [hf.eos_id] * 4
    assert [last.row(k)[1].nonzero()[0].tolist() for k in range(4)] == [[size - 1] for size in last.lengths]


def test_texts_as_messages(hf, tmp_path):
    """With `chat` texts are what the same messages are: pairs, HH, examples, prompts."""
    text = {"prompt": USER["content"], "chosen": "Four.", "rejected": "Five.", "response": "Four."}
    paths = [write(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate([[text, HH], [ULTRAFEEDBACK, HH]])]
    plain, _ = load_pairs(paths[0], hf)
    data, report = load_pairs(paths[0], hf, chat=True)
    assert not report.bad.count and counted_texts(data, hf)[:2] == counted_texts(load_pairs(paths[1], hf)[0], hf)[:2]
    four, five = said("assistant", "Four."), said("assistant", "It sings.")
    want = encode(hf, None, {"chosen": [USER, four, SEA, SLOW], "rejected": [USER, four, SEA, five]})
    assert [data.row(k)[0].tolist() for k in (2, 3)] == [one.ids for one in want] != plain.row(2)[0].tolist()
    examples, _ = load_sft(paths[0], hf, SFTDataConfig(train=paths[0], chat=True, max_bad_fraction=1.0))
    assert examples.row(0)[0].tolist() == encode(hf, [USER], {"a": "Four."})[0].ids
    config = PromptsConfig(paths[0], chat=True, length=128, max_bad_fraction=1.0)
    prompts, _ = load_prompts(hf, config)
    assert prompts.tokens[0].tolist() == encode_prompt(hf, [USER], add_bos=True) and prompts.records([0]) == [text]
    for row, message in {
        "empty": ({"prompt": " "}, "'prompt' is empty"), "none": ({"text": "a"}, "no key 'prompt'"),
    }.values():  # fmt: skip
        with pytest.raises(UserError, match=f"bad.jsonl:1: {message}"):
            load_prompts(hf, PromptsConfig(write(tmp_path / "bad.jsonl", [row]), chat=True))
    path = write(tmp_path / "bad.jsonl", [{**HH, "rejected": HH["rejected"].removesuffix(" It sings.")}])
    with pytest.raises(UserError, match="bad.jsonl:1: 'rejected': message 4 is empty"):
        load_pairs(path, hf, chat=True)


def test_later_turns_of_the_human_do_not_count(hf, tmp_path):
    """Where the two of HH part early; the ids are those of the texts."""
    other = "\n\nHuman: What is two plus two?\n\nAssistant: Five.\n\nHuman: No.\n\nAssistant: It is four."
    path = write(tmp_path / "x.jsonl", [{"chosen": HH["chosen"], "rejected": other}])
    data, _ = load_pairs(path, hf)
    assert hf.decode(data.row(1)[0]) == f"<s>{other}<|im_end|>"
    assert [marked for _, marked in counted_texts(data, hf)] == [
        " Four. It is slow.<|im_end|>", " Five. It is four.<|im_end|>",
    ]  # fmt: skip


def test_best_of_messages(hf, tmp_path):
    row = {
        "prompt": [SYSTEM, USER],
        "responses": ["Five.", [FOUR], [SYSTEM, USER, said("assistant", "Six.")]],
        "label": 1,
    }
    data, _ = load_pairs(write(tmp_path / "x.jsonl", [row]), hf, num_responses=3)
    assert [marked for _, marked in counted_texts(data, hf)] == ["Four.<|im_end|>", "Five.<|im_end|>", "Six.<|im_end|>"]


def test_equal_answers_are_dropped_and_bad_lines_named(hf, made, tmp_path):
    equal = {"prompt": [USER], "chosen": [FOUR], "rejected": [USER, FOUR]}
    path = write(tmp_path / "x.jsonl", [ULTRAFEEDBACK, equal])
    assert load_pairs(path, hf)[1].dropped.first == (f"{path}:2",)
    for row, message in {
        "assistant": ({**ULTRAFEEDBACK, "prompt": [USER, FOUR]}, "'prompt' ends with the assistant's message"),
        "role": ({**ULTRAFEEDBACK, "chosen": [said("gpt", "a")]}, "'chosen': message 1: unknown role 'gpt'"),
        "empty": ({**ULTRAFEEDBACK, "rejected": [USER, said("assistant", "")]}, "'rejected': message 2: the assistant"),
        "no prompt": ({"chosen": "a", "rejected": HH["chosen"]}, "no key 'prompt' (found: chosen, rejected)"),
        "no turn": (
            {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"},
            "'chosen' and 'rejected' share no beginning",
        ),
        "no answer": ({**HH, "rejected": HH["rejected"].removesuffix(" It sings.")}, "'rejected': an answer of the as"),
    }.values():
        path = write(tmp_path / "y.jsonl", [ULTRAFEEDBACK, row])
        with pytest.raises(UserError) as caught:
            load_pairs(path, hf)
        assert str(caught.value).startswith(f"{path}:2: {message}"), str(caught.value)
    path = write(tmp_path / "z.jsonl", [ULTRAFEEDBACK])
    with pytest.raises(UserError) as caught:
        load_pairs(path, made(THINKING))
    assert str(caught.value).startswith(f"{path}:1: the chat template writes the prompt differently")


def test_supervised_prompts_and_responses_may_be_messages(hf, tmp_path):
    rows = [
        {"prompt": [SYSTEM, USER], "response": "Four."},
        {"prompt": [SYSTEM, USER], "response": [FOUR, SEA, SLOW]},
        {"messages": [SYSTEM, USER, FOUR, SEA, SLOW]},
    ]
    path = write(tmp_path / "x.jsonl", rows)
    examples, _ = load_sft(path, hf, SFTDataConfig(train=path))
    found = [said for _, said in counted_texts(examples, hf)]
    assert found == ["Four.<|im_end|>", *["Four.<|im_end|>It is slow.<|im_end|>"] * 2]
    one, whole = examples.row(1)[0].tolist(), examples.row(2)[0].tolist()
    assert one == whole[: len(one)] and hf.decode(whole[len(one) :]) == "\n"
    everything, _ = load_sft(path, hf, SFTDataConfig(train=path, loss_on="all"))
    assert everything.mask.sum() == len(everything.tokens) - 3
