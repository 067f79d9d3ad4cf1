"""The parts of a preflight by themselves: the report, the answers, the plan of a step."""

import dataclasses
import json

import pytest

from posttrain.config import FSDPConf, GRPOConf, PackingConf, PackingMode, RolloutConf
from posttrain.config.reward import RewardConf
from posttrain.config.task import AnswerReward, FileConf, TaskName
from posttrain.errors import UserError
from posttrain.flops import PassCost
from posttrain.models.tiny import tiny_tokenizer
from posttrain.preflight.plan import largest_step
from posttrain.preflight.report import Report, Verdict
from posttrain.rewards.scorer import Scorer, choose
from posttrain.rewards.workers import Workers
from posttrain.tasks import make_task
from posttrain.tasks.references import score_answers


def task_of(tmp_path, answers, reward=AnswerReward.numeric):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}?", "answer": a}) for n, a in enumerate(answers)))
    cfg = FileConf(name=TaskName.jsonl, path=str(path), heldout=0, answer_reward=reward)
    return make_task(cfg, tiny_tokenizer()), cfg


def test_right_answers_are_right_and_others_wrong(tmp_path):
    scores = score_answers(*task_of(tmp_path, ["1", "2.50", "$3", "1/4"]))
    assert scores.right == scores.tried == 4 and scores.warnings() == []


def test_answers_without_a_score_are_shown(tmp_path):
    scores = score_answers(*task_of(tmp_path, ["1", "two", "3"]))
    (warning,) = scores.warnings()
    assert "cannot be scored" in warning and "'two'" in warning and scores.right == 2


def test_not_one_answer_that_can_be_scored_is_refused(tmp_path):
    with pytest.raises(UserError, match="can score none of the first 3 answers, such as 'one'.*answer_reward=exact"):
        score_answers(*task_of(tmp_path, ["one", "two", "three"]))


def test_a_reward_that_accepts_anything_is_shown(tmp_path):
    task, cfg = task_of(tmp_path, ["1", "2"])
    accepts = choose({"correct": lambda completion: 1.0}, {}, RewardConf())
    task = dataclasses.replace(task, rewards={"jsonl": Scorer(accepts, RewardConf(), Workers(RewardConf(), 1))})
    (warning,) = score_answers(task, cfg).warnings()
    assert "right for another problem" in warning and "'2 for 1'" in warning


def test_one_of_several_answers_is_enough(tmp_path):
    scores = score_answers(*task_of(tmp_path, [["4", "four"], ["5", "five"]], AnswerReward.exact))
    assert scores.right == 2 and scores.warnings() == []


@pytest.mark.parametrize("mode, ranks", [("thd", 1), ("thd", 3), ("padded", 2)])
def test_the_plan_is_of_full_completions(tmp_path, mode, ranks):
    problems = task_of(tmp_path, list("123456"))[0].train
    cfg = GRPOConf(
        packing=PackingConf(mode=PackingMode(mode), tokens_per_row=64),
        rollout=RolloutConf(group_size=2, max_new_tokens=20),
        fsdp=FSDPConf(),
    )
    step = largest_step(list(problems), cfg, ranks, PassCost(1.0, 0.0, {}))
    assert step.completions == 12
    assert step.tokens == sum(2 * (len(problem.prompt_ids) + 20) for problem in problems)
    assert step.largest_row <= 64 and step.rows == ranks * step.micro_batches
    assert step.fill == pytest.approx(step.tokens / step.computed_tokens)
    assert f"12 completions of {step.tokens:,} tokens" in step.in_words(ranks)


def test_a_report_goes_on_after_a_refusal_and_keeps_everything(tmp_path, capsys):
    report = Report()
    with report.part("one") as part:
        part.lines.append("fine")
    with report.part("two") as part:
        part.warnings.append("odd")
        assert report.verdict is Verdict.right
    assert report.verdict is Verdict.look
    with report.part("three"):
        raise UserError("no: type yes")
    assert report.close(tmp_path / "preflight.json") == 2
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "one          fine",
        "two          LOOK     odd",
        "three        REFUSED  no: type yes",
        "refused: three; worth a look: two",
    ]
    found = json.loads((tmp_path / "preflight.json").read_text())
    assert (found["verdict"], found["exit_status"]) == ("refused", 2)
    assert [part["verdict"] for part in found["parts"]] == ["right", "look", "refused"]


def test_another_exception_is_no_finding():
    with pytest.raises(ZeroDivisionError), Report().part("broken"):
        raise ZeroDivisionError
