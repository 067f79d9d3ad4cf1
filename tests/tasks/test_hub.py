"""task=hub: what save_to_disk wrote, folders that load_dataset knows, splits, labels, and words for what fails."""

import json

import datasets
import pytest

from posttrain.config.task import AnswerReward, FileConf, HubConf, TaskName
from posttrain.errors import UserError
from posttrain.models.tiny import tiny_tokenizer
from posttrain.tasks import make_task
from posttrain.tasks.gsm8k import gsm8k
from posttrain.tasks.hub import hub
from posttrain.tasks.jsonl import jsonl

ROWS = [{"prompt": f"{n}+{n}=", "reward_model": {"ground_truth": 2 * n, "style": "rule"}} for n in range(10)]
TRUTH = "reward_model.ground_truth"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Nothing is asked of the hub, and what load_dataset prepares goes with the test."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def conf(path, **options):
    return HubConf(name=TaskName.hub, path=str(path), **{"answer_column": TRUTH, "heldout": 3} | options)


def pairs(rows):
    return [(row.prompt, row.answer) for row in rows]


EXPECTED = [(f"{n}+{n}=", str(2 * n)) for n in range(10)]


@pytest.fixture
def saved(tmp_path):
    """With the splits train and test."""
    every = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict({"train": every.select(range(8)), "test": every.select([8, 9])})
    both.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_splits_of_a_saved_directory(saved):
    found = hub(conf(saved))
    assert (pairs(found.train), pairs(found.heldout)) == (EXPECTED[:5], EXPECTED[5:8])
    found = hub(conf(saved, eval_split="test"))
    assert (pairs(found.train), pairs(found.heldout)) == (EXPECTED[:8], EXPECTED[8:])
    assert found.train[3].place == f"task.path={saved} split train row 4"


def test_a_saved_split_alone_is_train_and_keeps_its_order(tmp_path):
    datasets.Dataset.from_list(ROWS).select([3, 1, 2]).save_to_disk(str(tmp_path / "one"))
    found = hub(conf(tmp_path / "one", heldout=0))
    assert pairs(found.train) == [EXPECTED[3], EXPECTED[1], EXPECTED[2]] and found.heldout == []


def test_a_folder_of_files_and_a_part_of_a_split(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, rows in (("train", ROWS[:8]), ("test", ROWS[8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = hub(conf(folder, split="train[:4]", eval_split="test"))
    assert (pairs(found.train), pairs(found.heldout)) == (EXPECTED[:4], EXPECTED[8:])


def test_messages_and_labels_from_a_dataset_become_problems(tmp_path):
    asked = [{"role": "user", "content": "good?"}]
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "picture": datasets.Value("binary"),
        }
    )
    rows = {"messages": [asked] * 3, "label": [1, 0, -1], "picture": [b"\x00"] * 3}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "one"))
    cfg = conf(tmp_path / "one", prompt_column="messages", answer_column="label", heldout=0)
    task = make_task(cfg, tiny_tokenizer())
    assert [problem.answer for problem in task.train] == ["good", "bad"] and task.dropped == {"no answer": 1}
    assert task.train[0].prompt == tuple(asked)
    assert set(task.rewards["hub"].weights) == {"correct", "format"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"split": "valid"}, "it has no split 'valid', but train, test. Look at task.config=None and task.split=valid"),
        ({"eval_split": "valid"}, "task.eval_split=valid"),
        ({"eval_split": "train"}, "task.eval_split=train is task.split too"),
        ({"answer_column": "answer"}, "has no column 'answer'; it has prompt, reward_model. Set task.answer_column."),
        ({"prompt_column": "reward_model"}, "row 1, column reward_model: a prompt is text"),
    ],
)
def test_what_does_not_fit_is_one_line(saved, options, words):
    with pytest.raises(UserError) as error:
        hub(conf(saved, **options))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_set_without_rows(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(UserError, match="could not be loaded: .*no data.* task.split=train"):
        hub(conf(tmp_path / "rows", split="train[:0]"))
    one = datasets.Dataset.from_dict({"prompt": ["?"], "answer": ["1"]})
    one.filter(lambda row: row["answer"] == "2").save_to_disk(str(tmp_path / "filtered"))
    with pytest.raises(UserError, match="split train holds no row"):
        hub(conf(tmp_path / "filtered", answer_column="answer"))
    datasets.Dataset.from_dict({"prompt": [], "answer": []}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(UserError, match="none could not be loaded: IndexError: "):
        hub(conf(tmp_path / "none"))


def test_names_that_the_hub_does_not_give_and_empty_folders(tmp_path):
    with pytest.raises(UserError, match="task.path=no/such-set could not be loaded from the hub: .*task=jsonl"):
        hub(conf("no/such-set"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty could not be loaded: ") as error:
        hub(conf(tmp_path / "empty"))
    assert "\n" not in str(error.value)


def test_files_say_where_saved_directories_belong(saved):
    with pytest.raises(UserError, match=f"was written by save_to_disk: type task=hub task.path={saved}"):
        jsonl(FileConf(name=TaskName.jsonl, path=str(saved)))


def test_gsm8k_reads_a_clone_of_the_hub_repository(tmp_path):
    """The configuration `main` with its two splits, as openai/gsm8k has it."""
    import pandas

    clone = tmp_path / "gsm8k"
    (clone / "main").mkdir(parents=True)
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(5)]
    pandas.DataFrame(rows[:4]).to_parquet(clone / "main" / "train-00000-of-00001.parquet")
    pandas.DataFrame(rows[4:]).to_parquet(clone / "main" / "test-00000-of-00001.parquet")
    (clone / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    columns = dict(prompt_column="question", answer_reward=AnswerReward.numeric)
    found = gsm8k(FileConf(name=TaskName.gsm8k, path=str(clone), **columns))
    assert pairs(found.train) == [(f"{n}?", f"#### {n}") for n in range(4)] and pairs(found.heldout) == [
        ("4?", "#### 4")
    ]
    with pytest.raises(UserError, match="brings its own test split"):
        gsm8k(FileConf(name=TaskName.gsm8k, path=str(clone), eval_path="a.jsonl", **columns))
