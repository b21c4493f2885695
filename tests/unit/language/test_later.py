"""Models that a script handed over as objects: the folder of the run is enough to have them again."""

import shutil

import pytest

import grpo
from grpo.app.builders import resume
from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.tasks import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{n}>", "answer": str((n + 1) % 10)} for n in range(10)]


def make(folder, model=None, rows=ROWS) -> GRPOTrainer:
    tokenizer = tiny_tokenizer("0123456789>+=")
    how = GRPOConfig(output_dir=str(folder), max_steps=1, prompts_per_step=2, num_generations=2,
                     max_completion_length=1, rewards=("correctness",), preflight=False)  # fmt: skip
    model = model or tiny_model(len(tokenizer), seed=0, width=8, layers=1)
    return GRPOTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=how)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with rewards and data by name, so that the command can go on with it, and what its model says."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    trainer = make(path, rows="addition")
    trainer.train(progress=None)
    return path, trainer.generate(["3>", "8>"], temperature=0.0)


def test_a_run_with_a_model_of_the_script_is_loaded_and_gone_on_with(run, tmp_path, capsys):
    path, said = run
    moved = shutil.copytree(path, tmp_path / "moved")
    assert grpo.load(moved).generate(["3>", "8>"], count=1, temperature=0.0) == said
    assert resume(moved, [("run.steps", "2")]) == 0
    out = capsys.readouterr().out
    assert "step=2/2" in out and "next=grpo eval" in out
    assert {file.suffix for file in (moved / "architecture").iterdir()} <= {".json", ".jinja"}


def test_what_was_put_beside_the_sizes_is_not_looked_at(run, tmp_path):
    moved = shutil.copytree(run[0], tmp_path / "moved")
    (moved / "architecture" / "modeling.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match=r"modeling.py is not one of the files .*; remove it"):
        grpo.load(moved, trust=True)
    (moved / "architecture" / "modeling.py").unlink()
    (moved / "architecture" / "config.json").unlink()
    (moved / "architecture" / "config.json").symlink_to(run[0] / "architecture" / "config.json")
    with pytest.raises(ConfigError, match=r"config.json is not one of the files"):
        grpo.load(moved)


def test_code_that_the_sizes_name_is_not_run(run, tmp_path):
    moved = shutil.copytree(run[0], tmp_path / "moved")
    sizes = moved / "architecture" / "config.json"
    named = sizes.read_text().replace('"llama"', '"mine"').replace("{", '{"auto_map": {"AutoConfig": "a.B"},', 1)
    sizes.write_text(named)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        grpo.load(moved, trust=True)


def test_what_cannot_be_made_again_is_said_in_place_of_commands(tmp_path, capsys):
    made = tiny_model(14, seed=0, width=8, layers=1)
    made.model.embed_tokens.weight.requires_grad = False
    trainer = make(tmp_path / "frozen", model=made)
    assert trainer.looked_at_with()[0] == ("view",) and "others are not" in trainer.looked_at_with()[1]
    made = tiny_model(14, seed=0, width=8, layers=1)
    made.__class__ = type("Mine", (type(made),), {})
    trainer = make(tmp_path / "own", model=made)
    trainer.train()
    assert not (tmp_path / "own" / "architecture").exists()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next=")]
    assert len(said) == 2 and "Mine is a class of your own" in said[1]
