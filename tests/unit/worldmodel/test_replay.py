"""Replay: what comes out is what went in, the newest first, everything else evenly, and again after a restart."""

import json
import threading

import numpy as np
import pytest
import torch

from grpo.protocols import State
from grpo.worldmodel.replay.buffer import LAST_ENDS, Replay, TrainRatio

LATENT = (3, 2, 4)


def step_of(lane, t, episode=7):
    """A step that says where it is from."""
    return {
        "where": np.array([lane, t], np.float32),
        "image": np.full((2, 2, 1), (lane * 50 + t) % 256, np.uint8),
        "action": np.array([t / 8], np.float32),
        "reward": float(t),
        "is_first": t % episode == 0,
        "is_last": t % episode == episode - 1,
        "is_terminal": t % (2 * episode) == episode - 1,
    }


def steps_of(lanes, t):
    return {key: np.stack([np.asarray(step_of(lane, t)[key]) for lane in lanes]) for key in step_of(0, 0)}


def filled(count, lanes=1, **options):
    replay = Replay(**({"capacity": 1000, "length": 5, "lanes": lanes, "chunk": 4} | options))
    for t in range(count):
        replay.add_batch(steps_of(range(lanes), t))
    return replay


def where(sample):
    """(lane, first step) of each sequence, once its steps are known to be what was put in."""
    lane_BT, t_BT = sample.batch["where"][..., 0].astype(int), sample.batch["where"][..., 1].astype(int)
    assert (lane_BT == lane_BT[:, :1]).all()
    assert (t_BT == t_BT[:, :1] + np.arange(t_BT.shape[1])).all()
    for b, t in np.ndindex(t_BT.shape):
        for key, x in step_of(lane_BT[b, t], t_BT[b, t]).items():
            np.testing.assert_array_equal(sample.batch[key][b, t], x)
    return list(zip(lane_BT[:, 0].tolist(), t_BT[:, 0].tolist(), strict=True))


def onehot(index, classes=LATENT[2]):
    return np.eye(classes, dtype=np.float32)[index]


def same(one, other):
    assert one.online == other.online
    np.testing.assert_array_equal(one.ids_BT, other.ids_BT)
    for key, x in one.batch.items():
        assert x.dtype == other.batch[key].dtype and x.tobytes() == other.batch[key].tobytes(), key
    if one.deter_BD is not None:
        assert one.deter_BD.tobytes() == other.deter_BD.tobytes()
        assert one.stoch_BSC.tobytes() == other.stoch_BSC.tobytes()


def test_sequences_are_consecutive_steps_of_one_lane_across_chunks_and_episodes():
    replay = filled(30, lanes=3, online=False)
    sample = replay.sample(200)
    found = where(sample)
    assert {lane for lane, _ in found} == {0, 1, 2}
    assert sample.batch["is_first"][:, 1:].any() and sample.batch["is_terminal"].any()
    assert {key: x.dtype for key, x in sample.batch.items()} == {
        "where": np.float32,
        "image": np.uint8,
        "action": np.float32,
        "reward": np.float32,
        "is_first": bool,
        "is_last": bool,
        "is_terminal": bool,
    }
    assert sample.tensors()["image"].dtype == torch.uint8 and sample.tensors()["where"].shape == (200, 5, 2)


def test_one_step_at_a_time_is_the_same_as_a_batch():
    one, other = filled(20, lanes=2), Replay(1000, 5, lanes=2, chunk=4)
    for t in range(20):
        ids = [other.add(step_of(lane, t), lane) for lane in (0, 1)]
        assert ids == [2 * t, 2 * t + 1]
    for _ in range(5):
        same(one.sample(4), other.sample(4))


def test_lanes_may_differ_in_how_far_they_are():
    replay = Replay(1000, 5, lanes=3, chunk=4, online=False)
    for t in range(40):
        replay.add_batch(steps_of([2], t), np.array([2]))
    for t in range(6):
        replay.add(step_of(0, t), 0)
    assert replay.sequences == 36 + 2
    drawn = [item for _ in range(20) for item in where(replay.sample(20))]
    assert set(drawn) == {(2, t) for t in range(36)} | {(0, 0), (0, 1)}


def test_new_sequences_come_once_and_in_order_then_the_rest_evenly():
    replay = filled(12, lanes=2)
    first = replay.sample(3)
    assert where(first) == [(0, 0), (1, 0), (0, 5)] and first.online == 3
    for t in range(12, 15):
        replay.add_batch(steps_of((0, 1), t))
    second = replay.sample(6)
    assert where(second)[:3] == [(1, 5), (0, 10), (1, 10)] and second.online == 3
    assert replay.sample(6).online == 0


def test_every_start_is_as_likely_as_any_other():
    replay = filled(50, lanes=2, capacity=60, online=False)
    assert len(replay) <= 60
    drawn = np.concatenate([replay.sample(200).batch["where"][:, 0] for _ in range(100)])
    starts, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(starts) == replay.sequences
    expected = len(drawn) / len(starts)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < len(starts) + 5 * np.sqrt(2 * len(starts))


def test_the_oldest_chunks_are_dropped():
    replay = filled(100, capacity=20)
    assert 16 < len(replay) <= 20
    drawn = [item for _ in range(30) for item in where(replay.sample(10))]
    assert min(t for _, t in drawn) == 100 - len(replay)
    assert max(t for _, t in drawn) == 95


def test_what_waits_in_the_queue_may_be_dropped_before_it_is_seen():
    replay = filled(100, capacity=19)  # from step 84 on
    sample = replay.sample(50)
    assert where(sample)[: sample.online] == [(0, 85), (0, 90), (0, 95)]


def test_draws_depend_on_seed_and_number_alone():
    one, again, other = filled(50), filled(50), filled(50, seed=1)
    first = [one.sample(30) for _ in range(3)]
    for sample in first:
        same(sample, again.sample(30))
    assert where(first[2]) != where(first[1])
    assert any(where(sample) != where(other.sample(30)) for sample in first)


def test_looking_changes_no_later_sample():
    one, other = filled(50), filled(50)
    look = one.peek(10, number=3)
    same(look, one.peek(10, number=3))
    assert where(look) != where(one.peek(10, number=4))
    for _ in range(3):
        same(one.sample(8), other.sample(8))


def test_an_episode_left_half_way_ends_before_the_next_begins():
    replay = Replay(1000, 4, chunk=4)
    for t in range(4):
        replay.add(step_of(0, t) | {"is_first": t in (0, 2)})
    assert replay.sample(1).batch["is_last"].tolist() == [[False, True, False, False]]


def test_double_precision_is_not_kept():
    replay = Replay(1000, 2, chunk=4)
    for t in range(4):
        replay.add(step_of(0, t) | {"where": np.array([0.1, t])})
    assert replay.sample(1).batch["where"].dtype == np.float32


def test_a_step_takes_no_more_bytes_than_its_numbers():
    replay = Replay(1000, 2, chunk=4)
    image = np.zeros((64, 64, 3), np.uint8)
    replay.add(step_of(0, 0) | {"image": image})
    assert replay.state().arrays["steps"].nbytes <= image.nbytes + 2 * 4 + 4 + 4 + 3 + 3


# --- latents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_sequence_comes_with_the_latent_before_it(dtype, spilled, tmp_path):
    options = {"folder": tmp_path, "memory": 0} if spilled else {}
    replay = filled(40, lanes=2, latent=LATENT, latent_dtype=dtype, online=False, **options)
    unknown = replay.sample(20)
    assert not unknown.deter_BD.any() and not unknown.stoch_BSC.any()
    ids = np.array([2 * t + lane for t in range(10, 40) for lane in (0, 1)])
    random = np.random.default_rng(0)
    deter, index = random.normal(size=(60, 3)).astype(np.float32), random.integers(0, 4, (60, 2))
    replay.write_latents(ids, torch.tensor(deter), torch.tensor(onehot(index)))
    kept = {
        (id % 2, id // 2): (deter[i].astype(dtype), onehot(index[i])) for i, id in enumerate(ids.tolist())
    }  # by (lane, t)
    sample, seen = replay.sample(200), set()
    for b, (lane, t) in enumerate(where(sample)):
        expected = kept.get((lane, t - 1), (np.zeros(3), np.zeros((2, 4))))
        np.testing.assert_array_equal(sample.deter_BD[b], expected[0])
        np.testing.assert_array_equal(sample.stoch_BSC[b], expected[1])
        seen.add((lane, t - 1) in kept)
    assert seen == {True, False}
    assert sample.deter_BD.dtype == sample.stoch_BSC.dtype == np.float32


@pytest.mark.parametrize("spilled", [False, True])
def test_latents_are_refreshed_and_the_last_word_counts(spilled, tmp_path):
    options = {"folder": tmp_path, "memory": 0} if spilled else {}
    replay = filled(6, latent=LATENT, length=5, online=False, **options)
    replay.write_latents(np.array([0, 0]), np.array([[1.0] * 3, [2.0] * 3]), onehot([[0, 0], [1, 1]]))
    sample = replay.sample(20)
    at = where(sample).index((0, 1))
    assert sample.deter_BD[at].tolist() == [2.0] * 3
    replay.write_latents(sample.ids_BT, np.full((20, 5, 3), 9.0), onehot(np.full((20, 5, 2), 3)))
    sample = replay.sample(20)
    at = where(sample).index((0, 1))
    assert sample.deter_BD[at].tolist() == [9.0] * 3 and sample.stoch_BSC[at].argmax(-1).tolist() == [3, 3]
    assert not sample.deter_BD[where(sample).index((0, 0))].any()  # nothing comes before the first step


def test_latents_of_dropped_steps_are_passed_and_their_places_are_clean_again():
    replay = filled(20, capacity=20, latent=LATENT, online=False)
    replay.write_latents(np.arange(20), np.ones((20, 3)), onehot(np.zeros((20, 2), int)))
    for t in range(20, 40):
        replay.add(step_of(0, t))
    replay.write_latents(np.arange(20), np.ones((20, 3)), onehot(np.zeros((20, 2), int)))
    assert not replay.sample(50).deter_BD.any()


def test_as_many_as_asked_for_lead_to_one_of_the_last_ends():
    replay = filled(600, lanes=2, capacity=10_000, online=False, ends=1.0, reach=12)
    last = [t for t in range(600) if t % 14 == 6][-LAST_ENDS // 2 :]
    drawn = where(replay.sample(500))
    assert all(any(0 <= end - t < 12 for end in last) for _, t in drawn) and {lane for lane, _ in drawn} == {0, 1}
    assert {end - t for _, t in drawn for end in last if 0 <= end - t < 12} == set(range(12))
    some = filled(600, lanes=2, capacity=10_000, online=False, ends=0.3, reach=12)
    led = [any(0 <= end - t < 12 for end in last) for _ in range(20) for _, t in where(some.sample(100))]
    even = 12 * len(last) / 600
    assert np.mean(led) == pytest.approx(0.3 + 0.7 * even, abs=0.04)


def test_where_nothing_has_ended_or_ends_are_gone_all_are_drawn_evenly():
    plain, asked = filled(6, online=False), filled(6, online=False, ends=0.9, reach=12)
    same(plain.sample(20), asked.sample(20))
    asked = filled(30, capacity=12, length=2, chunk=2, online=False, ends=0.9, reach=12)
    assert min(t for _, t in where(asked.sample(50))) >= 30 - 12  # an end that was dropped leads nowhere


# --- disk -----------------------------------------------------------------------------------------------------------


ENDS = {"ends": 0.6, "reach": 9}


def play(replay, ticks, lanes=3):
    """Act and learn in lock-step; what a tick does depends on its number and the replay alone."""
    samples = []
    for tick in ticks:
        replay.add_batch(steps_of(range(lanes), tick))
        if tick >= 10:
            sample = replay.sample(4)
            shape, random = sample.ids_BT.shape, np.random.default_rng(tick)
            deter = random.normal(size=(*shape, 3)) + sample.deter_BD[:, None]
            replay.write_latents(sample.ids_BT, np.tanh(deter), onehot(random.integers(0, 4, (*shape, 2))))
            samples.append(sample)
    return samples


TICKS = range(70)
KINDS = {"memory": {}, "folder": {}, "small": {"memory": 0}, "some": {"memory": 30}}


def made(kind, tmp_path, **more):
    folder = {} if kind == "memory" else {"folder": tmp_path / "replay"}
    options = {"capacity": 90, "length": 5, "lanes": 3, "chunk": 4, "latent": LATENT, "most_open": 4}
    return Replay(**options | folder | KINDS[kind] | more)


@pytest.fixture(scope="module")
def whole():
    """What nothing happened to."""
    return play(made("memory", None), TICKS)


@pytest.mark.parametrize("kind", ["folder", "small", "some"])
def test_where_steps_are_kept_changes_nothing(kind, whole, tmp_path):
    replay = made(kind, tmp_path)
    for one, other in zip(whole, play(replay, TICKS), strict=True):
        same(one, other)
    away = replay.metrics()["replay_on_disk"]
    assert away == 0 if kind == "folder" else away > 30


def test_files_in_memory_and_open_are_bounded(tmp_path):
    replay = made("small", tmp_path)
    play(replay, range(40))
    assert len(replay._store._block) == 3 * 4  # one chunk for each lane
    assert len(replay._store._files._open) <= 4
    replay.close()
    assert not replay._store._files._open


def through_files(state):
    """As a checkpoint keeps it."""
    arrays = {name: torch.from_numpy(np.array(x)).clone().numpy() for name, x in state.arrays.items()}
    return State(json.loads(json.dumps(state.values)), arrays)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cut", "fresh"), [(7, True), (32, True), (49, True), (49, False)])
def test_restored_is_uninterrupted(kind, cut, fresh, whole, tmp_path):
    replay = made(kind, tmp_path)
    begun = play(replay, range(cut))
    state = through_files(replay.state())
    play(replay, range(cut, cut + 15))  # lost: they happened after the save
    replay.close()
    again = made(kind, tmp_path) if fresh else replay
    again.load_state(state)
    for one, other in zip(whole, begun + play(again, TICKS[cut:]), strict=True):
        same(one, other)


@pytest.mark.parametrize("cut", [7, 32, 49])
def test_restored_leads_to_the_same_ends(cut, tmp_path):
    asked = play(made("some", tmp_path / "whole", **ENDS), TICKS)
    replay = made("some", tmp_path, **ENDS)
    begun = play(replay, range(cut))
    again = made("some", tmp_path, **ENDS)
    again.load_state(through_files(replay.state()))
    for one, other in zip(asked, begun + play(again, TICKS[cut:]), strict=True):
        same(one, other)


def test_a_state_that_names_no_ends_is_gone_on_with():
    older = through_files(play_state(made("memory", None)))
    assert "ends" not in older.arrays
    replay = made("memory", None, **ENDS)
    replay.load_state(older)
    plain = made("memory", None)
    plain.load_state(older)
    same(replay.sample(6), plain.sample(6))


def play_state(replay):
    play(replay, range(30))
    return replay.state()


def test_saved_and_restored_again_and_again(whole, tmp_path):
    replay, parts = made("some", tmp_path), []
    for cut in TICKS[::7]:
        parts += play(replay, range(cut, cut + 7))
        state = through_files(replay.state())
        play(replay, range(cut + 7, cut + 10))
        replay = made("some", tmp_path)
        replay.load_state(state)
    for one, other in zip(whole, parts, strict=True):
        same(one, other)


def test_a_state_can_be_gone_back_to_while_it_is_one_of_the_last(whole, tmp_path):
    replay = made("small", tmp_path, keep_states=3)
    states, most = [], 0
    for cut in TICKS[::5]:
        play(replay, range(cut, cut + 5))
        states.append(through_files(replay.state()))
        most = max(most, len(replay._store._files.names()))
    assert most < 6 * 90 / 4  # steps and latents of each chunk, and what only the last three states need
    other = made("small", tmp_path, keep_states=3)
    other.load_state(states[-3])
    for one, two in zip(whole[-10:], play(other, TICKS[-10:]), strict=True):
        same(one, two)


def test_a_restored_replay_sweeps_the_other_future_only_when_it_has_one_of_its_own(tmp_path):
    replay = made("small", tmp_path)
    play(replay, range(30))
    early = replay.state()
    play(replay, range(30, 60))
    late, files = replay.state(), replay._store._files.names()
    replay.load_state(early)
    replay.state()
    assert replay._store._files.names() == files
    replay.load_state(late)  # what it names is still there
    replay.load_state(early)
    play(replay, [30])
    replay.state()

    def newest(names):
        return max(int(name.split("-")[2][:8]) for name in names)

    assert newest(replay._store._files.names()) == 6 < newest(files)  # of four steps each, so those up to step 27


def test_states_own_their_arrays():
    replay = filled(3)
    state = replay.state()
    before = {name: x.copy() for name, x in state.arrays.items()}
    for t in range(3, 30):
        replay.add(step_of(0, t))
    for name, x in state.arrays.items():
        np.testing.assert_array_equal(x, before[name])


def test_one_thread_may_add_while_another_samples(tmp_path):
    replay = made("some", tmp_path)
    play(replay, range(12))
    acting = threading.Thread(target=lambda: [replay.add_batch(steps_of(range(3), t)) for t in range(12, 200)])
    acting.start()
    while acting.is_alive():
        sample = replay.sample(8)
        where(sample)
        replay.write_latents(sample.ids_BT, np.ones((8, 5, 3)), onehot(np.ones((8, 5, 2), int)))
    acting.join()
    assert set(replay.sample(50).deter_BD.ravel()) <= {0.0, 1.0}
    assert len(replay) <= 90 and replay._store.added_L.tolist() == [200] * 3


# --- when to learn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("train_ratio", "batch", "each"), [(32, 1024, 1), (512, 1024, 4), (0.1, 7, 3), (1000, 64, 16)])
def test_updates_keep_the_ratio_exactly(train_ratio, batch, each):
    ratio, made = TrainRatio(train_ratio, batch), 0
    for env_steps in range(100, 100_000, each):
        made += ratio.due(env_steps)
        wanted = (env_steps - 100) * train_ratio / batch
        assert wanted - 1e-6 <= made <= wanted + 1 + 1e-6


def test_steps_before_learning_are_no_debt_and_nothing_is_due_twice():
    ratio = TrainRatio(64, 64)
    assert [ratio.due(n) for n in (1000, 1000, 1001, 1005, 1005)] == [1, 0, 1, 4, 0]
    assert TrainRatio(0, 64).due(10**6) == 0


def test_a_restored_ratio_goes_on():
    one, other = TrainRatio(0.3, 7), TrainRatio(0.3, 7)
    for n in range(500):
        one.due(n)
    other.load_state(through_files(one.state()))
    assert [one.due(n) for n in range(500, 900)] == [other.due(n) for n in range(500, 900)]
