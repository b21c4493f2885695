"""Networks read every observation space, start the same from the same seed, and remember exactly."""

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import nn

from grpo.control.networks import check_fits, make_network, tensors
from grpo.envs import spaces

GRID = gs.Box(0, 255, (7, 7, 3), np.uint8)
MIXED = gs.Dict({"direction": gs.Discrete(4), "image": GRID, "inner": gs.Dict({"x": gs.Box(-1, 1, (2,), np.float64)})})
SPACES = {
    "vector": gs.Box(-1, 1, (4,)),
    "matrix": gs.Box(-1, 1, (2, 3), np.float64),
    "code": gs.Discrete(6, start=2),
    "codes": gs.MultiDiscrete([2, 3]),
    "cards": gs.Tuple((gs.Discrete(32), gs.Discrete(11), gs.Discrete(2))),
    "grid": GRID,
    "board": gs.Box(0, 1, (10, 10, 4), np.bool_),
    "frames": gs.Box(0, 255, (4, 84, 84), np.uint8),
    "colour": gs.Box(0, 255, (2, 40, 36, 3), np.uint8),
    "mixed": MIXED,
}


def batch(space, count):
    space.seed(count)
    return tensors(spaces.stack([space.sample() for _ in range(count)], space))


def each(tree, change):
    return {key: each(part, change) for key, part in tree.items()} if isinstance(tree, dict) else change(tree)


@pytest.mark.parametrize("name", SPACES)
@torch.no_grad()
def test_every_space_is_read_and_no_row_hears_of_another(name):
    space = SPACES[name]
    network, seen = make_network(space, 3, hidden=(16,)), batch(space, 5)
    out = network(seen)
    assert out.shape == (5, 3) and torch.isfinite(out).all()
    for row in range(5):
        alone = network(each(seen, lambda x, row=row: x[row : row + 1]))
        torch.testing.assert_close(alone[0], out[row], atol=1e-6, rtol=1e-5)
    assert network(each(seen, lambda x: x[:0])).shape == (0, 3)
    assert out.std(0).min() > 0  # it looks at what it is given


@torch.no_grad()
@pytest.mark.parametrize("name", ["vector", "matrix", "code", "codes", "cards"])
def test_the_flat_form_gives_the_same_numbers(name):
    space = SPACES[name]
    network, seen = make_network(space, 2), batch(space, 6)
    flat = spaces.flatten(each(seen, lambda x: x.numpy()), network.layout)
    assert torch.equal(network(torch.from_numpy(flat)), network(seen))


@torch.no_grad()
def test_channels_may_come_first_or_last_and_frames_stack():
    pixels = torch.randint(256, (2, 3, 40, 44), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    first = make_network(gs.Box(0, 255, (3, 40, 44), np.uint8), 2, seed=1)
    last = make_network(gs.Box(0, 255, (40, 44, 3), np.uint8), 2, seed=1)
    torch.testing.assert_close(first(pixels), last(pixels.permute(0, 2, 3, 1)))
    pair = torch.stack([pixels, pixels.flip(0)], 1)
    stacked = make_network(gs.Box(0, 255, (2, 3, 40, 44), np.uint8), 2, seed=1)
    stacked_last = make_network(gs.Box(0, 255, (2, 40, 44, 3), np.uint8), 2, seed=1)
    torch.testing.assert_close(stacked(pair), stacked_last(pair.permute(0, 1, 3, 4, 2)))


def test_pictures_reach_the_convolutions_around_0_with_deviation_1():
    network, seen = make_network(SPACES["frames"], 2, hidden=(8,)), []
    network.pictures[0][0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    picture = torch.full((1, 4, 84, 84), 87, dtype=torch.uint8)
    picture[..., :42] = 255
    network(picture)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0].unique(), torch.tensor([-1.0, 1.0]), rtol=1e-3, atol=1e-3)


def test_what_is_drawn_has_levelled_layers_and_a_board_none():
    for memory in (0, 8):
        drawn, board = (make_network(SPACES[name], 2, hidden=(8,), memory=memory) for name in ("frames", "board"))
        levels = [sum(isinstance(layer, nn.LayerNorm) for layer in network.layers) for network in (drawn, board)]
        assert levels == [1, 0] and (drawn.way, board.way) == (1, 0)


def test_the_small_codes_of_a_board_are_not_drowned():
    boards = torch.randint(11, (64, 7, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = make_network(GRID, 2).pictures[0](boards.permute(0, 3, 1, 2).float() / 255)
    assert features.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("memory", [0, 8])
def test_the_same_seed_gives_the_same_weights_and_touches_no_other_randomness(memory):
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    one, same, other = (make_network(MIXED, 2, memory=memory, seed=seed).state_dict() for seed in (7, 7, 8))
    given = make_network(MIXED, 2, memory=memory, seed=torch.Generator().manual_seed(7)).state_dict()
    assert torch.equal(torch.get_rng_state(), untouched)
    assert all(torch.equal(one[key], same[key]) and torch.equal(one[key], given[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_weights_begin_orthogonal_with_a_quiet_last_layer_and_no_bias():
    network = make_network(gs.Box(-1, 1, (4,)), 3, hidden=(64, 64))
    first, _, second, _, last = network.layers
    torch.testing.assert_close(second.weight @ second.weight.T, 2 * torch.eye(64), atol=1e-5, rtol=0)
    torch.testing.assert_close(first.weight.T @ first.weight, 2 * torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(last.weight @ last.weight.T, 1e-4 * torch.eye(3), atol=1e-9, rtol=0)
    recurrent = make_network(MIXED, 3, hidden=(16,), memory=8)
    biases = [p for module in (network, recurrent) for name, p in module.named_parameters() if "bias" in name]
    assert len(biases) == 3 + 2 + 1 + 2 + 1 and not any(bias.any() for bias in biases)
    gate = recurrent.gru.weight_hh_l0[:8]
    torch.testing.assert_close(gate @ gate.T, torch.eye(8), atol=1e-5, rtol=0)
    assert recurrent.out.weight.norm().item() == pytest.approx(0.01 * 3**0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["vector", "code", "mixed"])
@torch.no_grad()
def test_memory_step_by_step_is_memory_over_the_whole_episode(name):
    space = SPACES[name]
    network = make_network(space, 3, hidden=(16,), memory=12)
    nn.init.orthogonal_(network.out.weight, generator=torch.Generator().manual_seed(0))  # loud enough to compare
    seen = each(batch(space, 21), lambda x: x.reshape(3, 7, *x.shape[1:]))
    whole, last = network(seen)
    hidden, parts = network.initial(3), []
    for t in range(7):
        out, hidden = network(each(seen, lambda x, t=t: x[:, t : t + 1]), hidden)
        parts.append(out)
    assert whole.shape == (3, 7, 3) and last.shape == (3, 12)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(hidden, last, atol=1e-6, rtol=0)
    alone, _ = network(each(seen, lambda x: x[:, 6:]))
    assert (alone[:, 0] - whole[:, 6]).abs().max() > 1e-3  # what came before matters


def test_a_linear_network_and_every_activation_can_be_had():
    assert len(make_network(gs.Box(-1, 1, (4,)), 2, hidden=()).layers) == 1
    for name in ("tanh", "relu", "elu", "silu", "gelu"):
        assert make_network(gs.Box(-1, 1, (4,)), 2, activation=name)(torch.ones(1, 4)).shape == (1, 2)
    with pytest.raises(ValueError, match="activation='swash' is not one of tanh, relu"):
        make_network(gs.Box(-1, 1, (4,)), 2, activation="swash")


def test_a_users_module_that_fits_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    check_fits(module, gs.Box(-1, 1, (4,), np.float64), 3)
    assert module.training and not module[1].num_batches_tracked


def test_a_users_module_gets_a_dict_of_floats():
    class Reads(nn.Module):
        def forward(self, observation):
            assert {x.dtype for x in (observation["direction"], observation["image"])} == {torch.float32}
            return torch.cat([observation["image"].flatten(1)[:, :2], observation["direction"][:, None]], 1)

    check_fits(Reads(), MIXED, 3)


def test_a_users_module_that_does_not_fit_is_refused_in_one_line():
    space = gs.Box(-1, 1, (4,))
    with pytest.raises(ValueError) as error:
        check_fits(nn.Linear(4, 5), space, 3, "actor", gs.Discrete(3))
    assert str(error.value) == "actor gives (2, 5), the action space Discrete(3) needs (2, 3)"
    with pytest.raises(ValueError, match=r"critic gives \(2, 5\), it needs \(2, 1\)"):
        check_fits(nn.Linear(4, 5), space, 1, "critic")
    with pytest.raises(ValueError, match=r"actor cannot read two observations of Box.*mat1 and mat2"):
        check_fits(nn.Linear(7, 3), space, 3)
    with pytest.raises(ValueError, match="actor gives tuple"):
        check_fits(nn.GRU(4, 3), space, 3)
