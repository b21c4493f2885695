"""What an evaluation tells of answers."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from grpo.language import evaluate
from grpo.language.evaluate import Evaluation, right
from grpo.language.rewards import Rewards
from grpo.language.rewards.maths import Correctness
from grpo.language.samples import Prompt, Sample

ANSWERS = [
    (r"so \boxed{\frac{36}{2}}", "18"),
    (r"\boxed{3 \cdot 6 + x}", "#### 18"),
    ("The answer is 16 + 2 = 18", "18"),
    ("<answer>def f(x): return x*2</answer>", "18"),
    ("<answer>$18.00</answer>", "18"),
    ("it is 19", "18"),
    ("nothing", "18"),
    (r"\boxed{9^{9999999}}", "5"),
    ("whatever", " "),
]


def samples():
    """What they answered to one prompt each."""
    found = []
    for i, (text, answer) in enumerate(ANSWERS):
        prompt, ids = Prompt(i, [1], "", None, {"answer": answer}), torch.tensor([1])
        found.append(Sample(prompt, ids, torch.ones(1, dtype=torch.bool), None, "eos", text))
    return found


def judged(rewards):
    """The same with rewards."""
    made = samples()
    parts_NK = rewards.judge(made, step=0).parts_NK.tolist()
    named = [{name: None if x != x else x for name, x in zip(rewards.names, row, strict=True)} for row in parts_NK]
    return [replace(sample, rewards=own) for sample, own in zip(made, named, strict=True)]


def test_what_the_reward_found_is_what_an_evaluation_finds_by_itself(monkeypatch):
    with Rewards(["correctness"], workers=1, settings={"correctness_reward": 2.5}) as rewards:
        assert rewards.grader == "correctness"
        made = judged(rewards)
    alone = right(made, None, 30.0)
    assert alone.tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0]
    monkeypatch.setattr(evaluate, "Pool", None)  # nothing is compared once more
    assert right(made, None, 30.0, True, "correctness").tolist() == alone.tolist()


def test_what_the_reward_failed_at_is_compared_by_the_evaluation():
    with Rewards(["correctness"], workers=1) as rewards:
        made = judged(rewards)
    alone = right(made, None, 30.0)
    lost = [replace(sample, rewards={"correctness": None}) for sample in made[:4]]
    assert right(lost + made[4:], None, 30.0, True, "correctness").tolist() == alone.tolist()


def test_a_reward_that_pays_nothing_or_is_a_user_s_own_is_no_grader():
    def correctness(completion):
        return 1.0

    for functions in ([Correctness(0.0)], [Correctness(-1.0)], [correctness]):
        with Rewards(functions, workers=1) as rewards:
            assert rewards.grader is None


def test_the_length_of_one_token_answers_is_no_share():
    right_PS = np.array([[1.0], [0.0], [1.0]])
    told = Evaluation(right_PS=right_PS, rewards={"kind": right_PS}, length_PS=np.ones((3, 1))).table()
    intervals = {row["quantity"]: (row["interval"], row["low"], row["high"]) for row in told}
    assert intervals["length"] == ("bootstrap", 1.0, 1.0)  # all alike: nothing is estimated
    assert intervals["accuracy"][0] == intervals["rewards/kind"][0] == "wilson"
