"""A run on several ranks: one folder, one line a step, and a checkpoint that any number of them goes on from."""

import json

import pytest
import torch

from grpo.run import checkpoint
from grpo.run.folder import RunFolder
from tests.distributed import cases
from tests.distributed.test_same import expect_same

PLAIN = {"optimizer": "adamw", "double": True, "learning_rate": 0.1, "weight_decay": 0.0}


def lines(folder):
    """metrics.jsonl without what depends on the machine."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_resumed_on_two_then_three_then_one_rank(pool, tmp_path):
    whole = pool.run(cases.run, 1, folder=str(tmp_path / "whole"), steps=9, **PLAIN)[0]
    folder = str(tmp_path / "parts")
    for size, steps in ((2, 3), (3, 6), (1, 9)):
        found = pool.run(cases.run, size, folder=folder, steps=steps, **PLAIN)
        assert all(torch.equal(one[2], found[0][2]) and one[1] == steps for one in found)
    torch.testing.assert_close(found[0][2], whole[2], rtol=1e-12, atol=1e-12)
    assert [row["step"] for row in lines(tmp_path / "parts")] == list(range(1, 10))
    for one, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert one.keys() == other.keys()
        expect_same(([one], [], {}), ([other], [], {}), 1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


@pytest.mark.parametrize("room", ["language", "worldmodel"])
def test_every_room_is_gone_on_with_by_any_number_of_ranks(pool, tmp_path, room):
    given = {"room": room, **({"double": True} if room == "language" else {"video": False})}
    whole = pool.run(cases.run, 1, folder=str(tmp_path / "whole"), steps=3, **given)[0]
    for size, steps in ((2, 1), (3, 2), (1, 3)):
        found = pool.run(cases.run, size, folder=str(tmp_path / "parts"), steps=steps, **given)
    tolerance = 1e-12 if room == "language" else 1e-6
    torch.testing.assert_close(found[0][2], whole[2], rtol=10 * tolerance, atol=10 * tolerance)
    for one, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        expect_same(([one], [], {}), ([other], [], {}), tolerance)


def test_episodes_are_divided_from_the_first_step_on_whoever_goes_on(pool, tmp_path):
    given = {"room": "control", "video": False, "films": False, "eval_episodes": 2}
    whole = pool.run(cases.run, 1, folder=str(tmp_path / "whole"), steps=6, draws="episode", **given)[0]
    for size, steps in ((2, 2), (3, 4), (1, 6)):  # nothing is said of draws: what the first ranks began goes on
        found = pool.run(cases.run, size, folder=str(tmp_path / "parts"), steps=steps, **given)
    torch.testing.assert_close(found[0][2], whole[2], rtol=1e-6, atol=1e-6)
    for one, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        expect_same(([one], [], {}), ([other], [], {}), 1e-6)


def test_a_run_that_began_alone_goes_on_with_its_numbers(pool, tmp_path):
    given = {"room": "control", "video": False, "films": False, "eval_episodes": 2}
    whole = pool.run(cases.run, 1, folder=str(tmp_path / "whole"), steps=4, **given)[0]
    pool.run(cases.run, 1, folder=str(tmp_path / "parts"), steps=2, **given)
    found = pool.run(cases.run, 2, folder=str(tmp_path / "parts"), steps=4, **given)
    torch.testing.assert_close(found[1][2], whole[2], rtol=1e-6, atol=1e-6)


def test_a_run_that_began_alone_is_divided_once_it_is_told_to(pool, tmp_path):
    given = {"room": "control", "video": False, "films": False, "eval_episodes": 2}
    for name, sizes in (("one", (1, 1, 1)), ("more", (1, 2, 3))):
        for size, steps, told in zip(sizes, (1, 2, 3), ({}, {"draws": "episode"}, {}), strict=True):  # and stays so
            found = pool.run(cases.run, size, folder=str(tmp_path / name), steps=steps, **given, **told)
        state = checkpoint.load(checkpoint.steps(RunFolder.open(tmp_path / name))[-1]).state
        assert (found[0][1], state.values["source"]["draws"]) == (3, "episode")
    for one, other in zip(lines(tmp_path / "one"), lines(tmp_path / "more"), strict=True):
        expect_same(([one], [], {}), ([other], [], {}), 1e-6)


def test_cut_and_resumed_on_as_many_ranks_is_the_same_to_the_last_bit(pool, tmp_path):
    whole = pool.run(cases.run, 2, folder=str(tmp_path / "whole"), steps=6, **PLAIN)
    pool.run(cases.run, 2, folder=str(tmp_path / "parts"), steps=4, **PLAIN)
    found = pool.run(cases.run, 2, folder=str(tmp_path / "parts"), steps=6, **PLAIN)
    assert torch.equal(found[1][2], whole[0][2])
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


@pytest.mark.parametrize(("who", "step"), [({"asked": 1}, 3), ({"asked": 0}, 3), ({"stop": 1}, 4)], ids=str)
def test_whoever_is_asked_to_stop_stops_all_with_a_checkpoint(pool, tmp_path, who, step):
    found = pool.run(cases.run, 2, folder=str(tmp_path / "run"), steps=8, **who)
    assert [one[1] for one in found] == [step, step]
    folder = RunFolder.open(tmp_path / "run")
    assert (folder.checkpoints / "latest").read_text().strip() == f"step-{step:08d}"
    assert len(folder.metrics()) == step


def test_a_run_that_tries_its_reward_first_is_the_same_on_any_number_of_ranks(pool, tmp_path):
    given = {"room": "language", "steps": 2, "preflight": True}
    whole = pool.run(cases.run, 1, folder=str(tmp_path / "1"), **given)[0]
    for size in (2, 3):
        for found in pool.run(cases.run, size, folder=str(tmp_path / str(size)), **given):
            torch.testing.assert_close(found[2], whole[2], rtol=1e-11, atol=1e-11)


def test_a_reward_that_would_waste_the_run_is_refused_on_every_rank_and_leaves_no_folder(pool, tmp_path):
    said = pool.run(cases.refused, 2, folder=str(tmp_path / "run"), reward="broken", preflight=True)
    assert said[0] == said[1] and "pre-flight found what would waste the run" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_only_the_chief_leaves_a_video_and_nothing_is_drawn_differently_for_it(pool, tmp_path):
    given = {"room": "control", "steps": 2, "films": False, "eval_episodes": 2, "max_episode_steps": 20}
    plain = pool.run(cases.run, 2, folder=str(tmp_path / "plain"), video=False, **given)
    found = pool.run(cases.run, 2, folder=str(tmp_path / "shown"), video=True, **given)
    assert torch.equal(found[0][2], plain[0][2]) and torch.equal(found[1][2], plain[0][2])
    assert [path.name for path in tmp_path.rglob("*.mp4")] == ["video.mp4"]
    assert (tmp_path / "shown" / "video.mp4").stat().st_size > 0
    assert lines(tmp_path / "shown") == lines(tmp_path / "plain")
