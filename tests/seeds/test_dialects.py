"""Every system's table: each word leads somewhere, says what it means, and the page is made from it."""

import pytest

from grpo.app.coming_from import SYSTEMS, rows
from grpo.app.words import EVERY
from grpo.cli import main

PRINTED = {
    "dreamer": "script jax beta epsilon epsilon_high num_generations scale_rewards loss_type train_ratio logdir",
    "grpo": "group_size batch_size num_epochs_per_update normalize_advantages",
    "tutorial": "clip_ratio beta gamma epochs batch_size group_size",
    "rlinf": "adv_type loss_type loss_agg_func group_size kl_beta kl_penalty_type ratio_clip_eps calculate_entropy "
    "entropy_bonus normalize_advantages early_stop_imp_ratio use_valid_token_scale",
    "easydel": "model_name learning_rate max_prompt_length max_completion_length beta sync_ref_model "
    "ref_model_mixup_alpha ref_model_sync_steps dataset_num_proc skip_apply_chat_template total_batch_size "
    "num_train_epochs save_directory use_wandb repo_id attn_mechanism top_p top_k num_return_sequences xml_reward "
    "correctness_reward max_new_tokens temperature repetition_penalty",
}
"""Words of each document."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_word_of_a_document_is_in_its_table_with_what_it_means(name):
    table = {word: (ours, meaning, differs) for word, ours, meaning, differs in rows(name)}
    assert set(PRINTED[name].split()) <= set(table)
    assert {spelling.key for spelling in EVERY.get(name, ())} <= set(table)
    for word, (ours, meaning, differs) in table.items():
        assert meaning or differs, word
        assert meaning or ours in ("refused", "nothing to set"), word


def test_the_command_prints_one_systems_table(capsys):
    assert main(["config", "--dialects", "rlinf"]) == 0
    told = capsys.readouterr().out
    assert "ratio_clip_eps → epsilon, epsilon_high: Lower clip" in told and "total_batch_size" not in told
    assert main(["config", "--dialects"]) == 0
    assert "total_batch_size" in capsys.readouterr().out
    assert main(["config", "--dialects", "rlinff"]) == 2
    assert 'there is no table for "rlinff"; did you mean "rlinf"?' in capsys.readouterr().err
