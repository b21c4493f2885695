"""What can be looked at: predictions beside the truth, imagined groups, episodes; and the commands that lead there."""

import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from grpo.app.arguments import given_flags
from grpo.app.builders import configs
from grpo.app.settings import flag_layer, preset_layer, resolve
from grpo.cli import main
from grpo.config import ConfigError
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.worldmodel.show import MOST_IN_STRIP, _strip, forecasts, imagined_pictures
from tests.unit.worldmodel.worlds import SMALL, generator, make

ROOT = Path(__file__).parents[3]
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_a_forecast_is_the_truth_a_prediction_and_their_difference():
    trainer = make()
    trainer.step()
    found = forecasts(trainer.source.learner, trainer.source.replay.peek(3, 0), generator())
    assert set(found) == {"vector", "reward", "continue"}
    assert found["vector"].truth.shape == found["vector"].prediction.shape == (3, 8, 4)
    assert (found["vector"].error == found["vector"].prediction - found["vector"].truth).all()
    trainer.source.close()


def test_a_run_leaves_its_pictures_and_films(tmp_path):
    trainer = make(video=True)
    trainer.train(steps=2, folder=tmp_path / "run", evaluate_every=2, progress=None)
    trainer.source.close()
    for name in ("forecast.png", "groups.png", "video.mp4", "curve.png"):
        assert (tmp_path / "run" / name).stat().st_size > 1000, name


def test_pictures_are_seen_imagined_and_filmed(tmp_path):
    """16×16 drawings of CartPole: bytes in the replay, bytes in the prediction, one film of both."""
    pixels = {"pixels": True, "image_size": 16, "video": True, "max_episode_steps": 12}
    trainer = make(**pixels)
    assert trainer.source.view.shapes == {"image": (16, 16, 3)}
    trainer.train(steps=2, folder=tmp_path / "run", evaluate_every=2, progress=None)
    batch = trainer.source.replay.peek(2, 0).batch
    assert batch["image"].dtype == np.uint8 and batch["image"].std() > 1
    trainer.source.close()
    assert (tmp_path / "run" / "forecast.mp4").stat().st_size > 500
    assert (tmp_path / "run" / "video.mp4").stat().st_size > 500
    assert frames(tmp_path / "run" / "groups.mp4") == (6, 4 * 16 * 4, 3 * 16 * 4)  # a start a row, a future a column


def frames(path):
    """How many there are, and how high and wide."""
    import imageio_ffmpeg

    stream = imageio_ffmpeg.read_frames(str(path))
    width, height = next(stream)["size"]
    return sum(1 for _ in stream), height, width


def test_a_future_is_filmed_as_the_model_would_paint_it():
    """The pictures are the decoder's own of the latents that were imagined, one a moment; numbers have none."""
    trainer = make(pixels=True, image_size=16, max_episode_steps=12)
    trainer.step()
    source = trainer.source
    latent = source._last.latent[:2]
    found = imagined_pictures(source.model, latent)
    painted = source.model.decoder(latent.deter, latent.stoch)["image"]
    assert found.shape == (2, 6, 16, 16, 3) and found.dtype == np.uint8
    np.testing.assert_allclose(found / 255, painted.detach().numpy(), atol=0.5 / 255 + 1e-6)
    plain = make()
    plain.step()
    assert imagined_pictures(plain.source.model, plain.source._last.latent) is None
    for one in (trainer, plain):
        one.source.close()


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"films": True}, [("image", "forecast")]),
        (
            {"films": True, "pixels": True, "image_size": 16, "max_episode_steps": 12},
            [("video", "dreamt"), *(("strip", n) for n in ("real", "imagined", "error"))],
        ),
        ({}, []),
    ],
    ids=["numbers", "pictures", "without"],
)
def test_samples_show_what_the_model_predicts_by_then(tmp_path, settings, kinds):
    folder = RunFolder.create(tmp_path / "run", task="worldmodel", config={}, created="", seed=5)
    trainer = make(**settings)
    run(trainer, 2, folder, sample_every=1, progress=None, curve=False)
    trainer.source.close()
    media = folder.samples(1)[0][0].get("media", [])
    assert [(item["kind"], item["name"]) for item in media] == kinds
    shown = {item["file"] for row in folder.samples(1)[0] for item in row.get("media", [])}
    assert shown == {p.name for p in (folder.path / "samples").iterdir() if p.suffix in (".png", ".mp4")}
    if ("video", "dreamt") in kinds:  # of every future of the group, the same moments
        films = [row["media"][0]["file"] for row in folder.samples(1)[0] if row["group"] == 0]
        assert len(set(films)) == 3
        assert {frames(folder.path / "samples" / film) for film in films} == {(5, 64, 64)}
    pictures = [imread(folder.path / "samples" / item["file"]) for item in media if item["kind"] == "strip"]
    assert {picture.shape[:2] for picture in pictures} <= {(16, 5 * 16)}  # a frame for each step of a future
    plain = RunFolder.create(tmp_path / "plain", task="worldmodel", config={}, created="", seed=5)
    other = make(**settings | {"films": False})
    run(other, 2, plain, sample_every=1, progress=None, curve=False)
    other.source.close()
    assert (folder.path / "metrics.jsonl").read_bytes() == (plain.path / "metrics.jsonl").read_bytes()


def test_a_strip_is_as_long_as_a_future_and_thinned_where_that_is_long():
    film = np.zeros((6, 2, 3, 3), np.uint8)
    assert _strip(film, 4).shape == (2, 4 * 3, 3) and _strip(film, 4).max() == 0
    assert _strip(film, 8).shape == (2, 8 * 3, 3) and (_strip(film, 8)[:, 6 * 3 :] == 255).all()
    assert _strip(film, 2 * MOST_IN_STRIP).shape == (2, MOST_IN_STRIP * 3, 3)


def test_drawings_need_environments_that_draw():
    with pytest.raises(ConfigError, match="vector=serial or processes, not classic"):
        make(pixels=True, vector="classic")


# --- the command line -----------------------------------------------------------------------------------------------


def test_a_run_is_trained_judged_and_filmed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "dreamer", "--env", "CartPole-v1", *FLAGS, "--steps", "2", "--evaluate-every", "2"]
    assert main([*words, "--logdir", "run"]) == 0
    assert "eval/return" in capsys.readouterr().out
    assert main(["eval", "run", "--episodes", "3", "--video", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episodes"] == 3 and {row["quantity"] for row in found["results"]} == {"return", "length"}
    assert (tmp_path / "run" / "eval.mp4").exists()


COMMANDS = {
    "--configs defaults --script train_grpo --run.train_ratio 32 --beta 0.1 --epsilon 0.2 --num_generations 4 "
    "--scale_rewards true --loss_type grpo --logdir ./logs/dreamer/{timestamp}": {
        "train_ratio": 32, "beta": 0.1, "epsilon": 0.2, "group_size": 4, "scale": "group_std", "loss_type": "grpo",
    },
    "--configs defaults grpo_config": {
        "beta": 0.1, "epsilon": 0.2, "group_size": 4, "scale": "group_std", "loss_type": "grpo", "env": "CartPole-v1",
    },
    "--configs defaults grpo_kl": {"beta": 0.5},
    "--configs defaults grpo_bnpo": {"loss_type": "bnpo", "reduction": "token_mean"},
    "--configs defaults grpo_multi": {"num_iterations": 4},
    "--configs defaults grpo_config --jax.platform cpu --logdir ./logs/dreamer/{timestamp}": {"device": "cpu"},
    "--configs defaults --epsilon 0.2 --scale_rewards false --num_iterations 2": {"epsilon": 0.2, "scale": "none"},
    "--configs defaults --imag_length 15 --replay_size 5000 --run.envs 2 --actent 3e-4": {
        "horizon": 15, "replay_capacity": 5000, "envs": 2, "entropy_coef": 3e-4,
    },
}  # fmt: skip


LONG = pytest.mark.slow  # a run each: the first and the last are enough for every change


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=() if i in (0, len(COMMANDS) - 1) else LONG) for i, c in enumerate(COMMANDS)]
)
def test_dreamer_s_commands_work_as_printed(command, tmp_path, monkeypatch):
    """Each trains two steps; what was asked for is in force."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    small = [word for word in zip(FLAGS[::2], FLAGS[1::2], strict=True) if word[0][2:].replace("-", "_") not in
             ("group_size", "train_ratio", "envs", "horizon")]  # fmt: skip
    flags = [*(word for pair in small for word in pair), "--video", "false", "--films", "false"]
    if "--logdir" not in words:
        words += ["--logdir", "logs/dreamer/run"]
    assert main(["train", *words, *flags, "--steps", "2", "--evaluate-every", "2"]) == 0
    folder = next((tmp_path / "logs" / "dreamer").iterdir())
    names = [w for w in shlex.split(command.split("--configs ")[1]) if not w.startswith("--")][:2]
    presets = [preset_layer(name) for name in names if name in ("defaults", *PRESETS)]
    rest = [w for w in shlex.split(command) if w not in ("--configs", *names[: len(presets)])]
    config = resolve([*presets, flag_layer(given_flags([], rest))], configs()).config
    for name, value in COMMANDS[command].items():
        assert getattr(config, name) == value
    assert json.loads((folder / "config.json").read_text())["task"] == "worldmodel"


PRESETS = ("grpo_config", "grpo_kl", "grpo_bnpo", "grpo_multi")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--script", "train_eval"], "script: 'train_eval' is not one of train_grpo, train"),
        (["--jax.platform", "tpu"], "jax: 'tpu' is not one of metal"),
        (["--jax.jit", "true"], "only platform is known"),
        (["--run.trainratio", "3"], "unknown setting 'run.trainratio'"),
    ],
)
def test_dreamer_s_words_that_are_not_known_are_refused(flags, message, capsys):
    assert main(["train", "--configs", "defaults", *flags]) == 2
    assert message in capsys.readouterr().err


def test_metal_is_the_apple_gpu():
    config = resolve([preset_layer("defaults"), flag_layer([("jax.platform", "metal")])], configs()).config
    assert config.device == "mps"


def test_the_launcher_passes_everything_on(tmp_path):
    fake = tmp_path / "grpo"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    words = ["dreamerv3/main.py", "--configs", "defaults", "grpo_kl", "--logdir", "a b"]
    script = ROOT / "scripts" / "macos_run.sh"
    done = subprocess.run([script, *words], env={"GRPO": str(fake), "PATH": "/bin:/usr/bin"}, capture_output=True)
    assert done.stdout.decode() == "train|--configs|defaults|grpo_kl|--logdir|a b|"
