"""What an evaluation tells of answers."""

import numpy as np
import pytest

pytest.importorskip("transformers")

from grpo.language.evaluate import Evaluation


def test_the_length_of_one_token_answers_is_no_share():
    right_PS = np.array([[1.0], [0.0], [1.0]])
    told = Evaluation(right_PS=right_PS, rewards={"kind": right_PS}, length_PS=np.ones((3, 1))).table()
    intervals = {row["quantity"]: (row["interval"], row["low"], row["high"]) for row in told}
    assert intervals["length"] == ("bootstrap", 1.0, 1.0)  # all alike: nothing is estimated
    assert intervals["accuracy"][0] == intervals["rewards/kind"][0] == "wilson"
