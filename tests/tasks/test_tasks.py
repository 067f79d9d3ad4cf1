"""Tasks and rewards: splits, files of every format, prompts through the chat template, answers as people write them."""

import json
import math

import pytest
from tokenizers.processors import TemplateProcessing

from posttrain import tasks
from posttrain.config.task import AnswerReward, ArithmeticConf, FileConf, TaskName
from posttrain.errors import UserError
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records import Problem, Rollout
from posttrain.rewards import text as rewards
from posttrain.tasks import Row, batch, further, make_task

TOKENIZER = tiny_tokenizer()
ROWS = [{"question": f"What is {n}+{n}?", "answer": f"{n}+{n} is {2 * n}.\n#### {2 * n}"} for n in range(10)]


def arithmetic(**options):
    return make_task(ArithmeticConf(name=TaskName.arithmetic, **options), TOKENIZER)


def gsm8k(path, **options):
    columns = dict(prompt_column="question", answer_column="answer", answer_reward=AnswerReward.numeric)
    return make_task(FileConf(name=TaskName.gsm8k, path=str(path), **columns, **options), TOKENIZER)


def score(task, text, answer, finished=True):
    """Of a completion of this text to a problem with this answer."""
    ids = tuple(TOKENIZER(text)["input_ids"]) + ((TOKENIZER.eos_token_id,) if finished else ())
    rollout = Rollout.one_turn(
        prompt_ids=(1,),
        completion_ids=ids,
        logprobs=(0.0,) * len(ids),
        finish_reason="stop" if finished else "length",
        group=0,
    )
    (name,) = task.rewards
    problem = Problem(task=name, index=0, prompt="", prompt_ids=(1,), answer=answer)
    ((scores, failed),) = task.score([(problem, rollout)])
    assert failed == {}
    return scores


def write(path, rows):
    import pyarrow as pa
    import pyarrow.parquet

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        import csv

        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_arithmetic_splits_share_nothing_and_are_fixed():
    task = arithmetic(largest=20, heldout=41)
    train, heldout = ({p.prompt_ids for p in split} for split in (task.train, task.heldout))
    assert len(train) == 441 - 41 and len(heldout) == 41 and not train & heldout
    again, other = arithmetic(largest=20, heldout=41), arithmetic(largest=20, heldout=41, seed=1)
    assert task.heldout == again.heldout != other.heldout
    text = TOKENIZER.decode(task.train[0].prompt_ids)
    question = text.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
    assert eval(question.removesuffix("=")) == int(task.train[0].answer)


def test_each_epoch_shows_every_problem_once_in_a_new_order():
    problems = arithmetic(largest=5, heldout=4).train  # 32
    steps = [[p.index for p in batch(problems, 5, step, seed=3)] for step in range(13)]
    seen = sum(steps, [])
    assert sorted(seen[:32]) == sorted(seen[32:64]) == list(range(32)) and seen[:32] != seen[32:64]
    assert [p.index for p in batch(problems, 5, 7, seed=3)] == steps[7]  # resuming needs the step's number only
    assert [p.index for p in batch(problems, 5, 7, seed=4)] != steps[7]
    assert sorted(p.index for p in batch(problems, 80, 0, seed=0))[:3] == [0, 0, 1]  # more than an epoch


def test_further_draws_are_new_and_repeat_themselves():
    problems = arithmetic(largest=5, heldout=4).train  # 32
    seen = batch(problems, 10, 3, seed=0)
    drawn = further(problems, 8, seen, 3, seed=0)
    assert len({p.index for p in drawn}) == 8 and not {p.index for p in drawn} & {p.index for p in seen}
    assert drawn == further(problems, 8, seen, 3, seed=0)
    others = [further(problems, 8, seen, 4, seed=0), further(problems, 8, seen, 3, seed=1)]
    assert all(drawn != other for other in [*others, further(problems, 8, seen + drawn, 3, seed=0)])
    assert len(further(problems, 99, seen, 3, seed=0)) == 22  # no more than there are
    assert further(problems, 0, seen, 3, seed=0) == further(problems, -2, seen, 3, seed=0) == []


def test_a_prompt_begins_with_one_bos():
    """This tokenizer has it in its template and puts it before whatever it encodes, as Llama's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|system|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", bos)]
    )
    assert tokenizer("1+1=")["input_ids"][0] == bos
    (first, *_) = make_task(ArithmeticConf(name=TaskName.arithmetic, largest=3, heldout=2), tokenizer).train
    assert first.prompt_ids.count(bos) == 1 and first.prompt_ids[0] == bos
    tokenizer.chat_template = None  # then it is the tokenizer that adds it
    (first, *_) = make_task(ArithmeticConf(name=TaskName.arithmetic, largest=3, heldout=2), tokenizer).train
    assert first.prompt_ids.count(bos) == 1 and first.prompt_ids[0] == bos


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_files_of_every_format(tmp_path, suffix):
    task = gsm8k(write(tmp_path / f"rows{suffix}", ROWS), heldout=3)
    assert [p.answer for p in task.train] == [row["answer"] for row in ROWS[:7]]
    assert [p.answer for p in task.heldout] == [row["answer"] for row in ROWS[7:]]
    assert TOKENIZER.decode(task.train[1].prompt_ids) == "<|user|>What is 1+1?<|end|><|assistant|>"


def test_csv_answers_keep_their_zeros(tmp_path):
    file = tmp_path / "codes.csv"
    file.write_text("prompt,answer\nagent?,007\nagent?,006\n")
    assert make_task(FileConf(name=TaskName.jsonl, path=str(file)), TOKENIZER).train[0].answer == "007"


def test_a_held_out_file_and_a_system_prompt(tmp_path):
    file, other = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS[:2])
    task = gsm8k(file, eval_path=str(other), system_prompt="Think.")
    assert len(task.train) == 10 and len(task.heldout) == 2
    assert TOKENIZER.decode(task.train[0].prompt_ids).startswith("<|system|>Think.<|end|><|user|>What")


def test_empty_and_overlong_prompts_are_dropped_and_counted(tmp_path):
    rows = [*ROWS[:2], {"question": " ", "answer": "1"}, {"question": None, "answer": "1"}]
    rows += [{"question": "x" * 200, "answer": "1"}]
    task = gsm8k(write(tmp_path / "rows.jsonl", rows), heldout=0, max_prompt_tokens=50)
    assert [p.index for p in task.train] == [0, 1]
    assert task.dropped == {"empty prompt": 1, "no prompt": 1, "longer than task.max_prompt_tokens": 1}
    left = "no prompt left of 3 rows: 2 longer than task.max_prompt_tokens=2, 1 empty prompt"
    with pytest.raises(UserError, match=left):
        gsm8k(write(tmp_path / "rows.jsonl", rows), max_prompt_tokens=2)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "task.path=.*rows.jsonl cannot be read: .*No such file"),
        ("{broken", "cannot be read"),
        ("[1, 2]\n", "row 1 is 1: it must be a JSON object"),
        ('{"question": "?", "answer": 1}\n3\n', "line 2 is 3: it must be a JSON object"),
        ('{"q": 1}\n', "line 1 has no column 'question'; it has q. Set task.prompt_column"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        gsm8k(file)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no/such-set could not be loaded from the hub") as error:
        gsm8k("no/such-set")
    assert "\n" not in str(error.value)


def test_scores_and_their_weighted_total():
    task = arithmetic(largest=3, heldout=2)
    assert score(task, "42", "42") == {"correct": 1.0, "format": 1.0, "total": 1.0}
    assert score(task, "41", "42")["total"] == pytest.approx(0.1)
    assert score(task, "42", "42", finished=False)["total"] == 0.0
    assert score(task, "4 2", "42")["total"] == 0.0


def test_of_several_answers_the_best_one_counts(tmp_path):
    rows = [{"question": "?", "answer": "none"}] * 4
    task = gsm8k(write(tmp_path / "rows.jsonl", rows))
    assert score(task, "#### 3", ("4", "3"))["correct"] == 1.0
    assert score(task, "#### 5", ("4", "none"))["correct"] == 0.0
    assert score(task, "#### 4", ("none", "4"))["correct"] == 1.0
    assert math.isnan(score(task, "#### 3", ("none", "no"))["correct"])
    assert [p.answers for p in task.train] == [("none",)] * 2


def test_rewards_of_any_name_weigh_one(monkeypatch):
    """A task of one's own may name its rewards as it likes."""
    brought = {"correct": rewards.exact, "short": rewards.finished_format}
    own = tasks.Data([Row("?", "4")], [], brought)
    monkeypatch.setitem(tasks.TASKS, "arithmetic", lambda cfg: own)
    task = arithmetic(reward_correct=0.5)
    assert task.rewards["arithmetic"].weights == {"correct": 0.5, "short": 1.0}
    assert score(task, "4", "4") == {"correct": 1.0, "short": 1.0, "total": 1.5}


def test_an_answer_without_a_number_is_unscorable_not_zero(tmp_path):
    task = gsm8k(write(tmp_path / "rows.jsonl", [{"question": "?", "answer": "none"}] * 4))
    found = score(task, "#### 3", "none")
    assert math.isnan(found["correct"]) and math.isnan(found["total"]) and found["format"] == 1.0


@pytest.mark.parametrize(
    "completion, answer, right",
    [
        ("so 6*7 = 42.\n#### 42", "x\n#### 42", 1.0),
        ("#### 1,234", "#### 1234", 1.0),
        ("#### 42.0", "#### 42", 1.0),
        ("the answer is 42.", "42", 1.0),
        ("it is -3", "#### -3", 1.0),
        ("6*7 = 42", "42", 1.0),
        ("6*7 = 42", "6", 0.0),
        ("#### $5", "#### 5", 1.0),
        ("#### 41", "#### 42", 0.0),
        ("no idea", "#### 42", 0.0),
        ("#### ", "#### 42", 0.0),
    ],
)
def test_numeric_reward(completion, answer, right):
    assert rewards.numeric(completion, answer, True) == right


def test_the_tokenizer_round_trips_any_text():
    for text in ["héllo 😀", "a\n\t b", "<|end|>", "日本語"]:
        assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id


def test_gsm8k_and_a_file_of_ones_own_have_the_rewards_that_their_options_name(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    marked = score(gsm8k(path), "so it is 4", "#### 4")
    assert (marked["correct"], marked["format"]) == (1.0, 0.0)  # right, but its last line is no `#### 4`
    columns = dict(prompt_column="question", answer_column="answer")
    kinds = {
        kind: make_task(FileConf(name=TaskName.jsonl, path=str(path), answer_reward=kind, **columns), TOKENIZER)
        for kind in AnswerReward
    }
    found = {kind: score(task, "so it is 4", "4") for kind, task in kinds.items()}
    assert {kind: scores["correct"] for kind, scores in found.items()} == {"exact": 0.0, "numeric": 1.0, "math": 1.0}
    assert all(scores["format"] == 1.0 for scores in found.values())


def test_held_out_prompts_that_are_dropped_are_counted_too(tmp_path):
    long = {"question": "x" * 300, "answer": "1"}
    train, heldout = write(tmp_path / "train.jsonl", [*ROWS, long]), write(tmp_path / "heldout.jsonl", [long, *ROWS])
    task = gsm8k(train, eval_path=str(heldout), max_prompt_tokens=200)
    assert (len(task.train), len(task.heldout)) == (10, 10)
    assert task.dropped == {"longer than task.max_prompt_tokens": 2}


def test_a_prompt_of_exactly_the_most_tokens_is_kept():
    longest = max(len(problem.prompt_ids) for problem in arithmetic().train)
    assert arithmetic(max_prompt_tokens=longest).dropped == {}
    assert arithmetic(max_prompt_tokens=longest - 1).dropped["longer than task.max_prompt_tokens"] > 0
