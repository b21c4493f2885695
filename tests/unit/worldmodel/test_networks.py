"""Layers of the world model: shapes, blocks, initial weights."""

import math

import pytest
import torch

from grpo.config import ConfigError
from grpo.worldmodel.model.networks import BlockLinear, Decoder, Dense, Encoder, TwoHotHead, blocks_of, head, mlp


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def observations(shapes, lead):
    random = torch.Generator().manual_seed(0)
    return {
        key: torch.randint(0, 256, (*lead, *shape), dtype=torch.uint8, generator=random)
        if len(shape) == 3
        else torch.randn(*lead, *shape, generator=random)
        for key, shape in shapes.items()
    }


@pytest.mark.parametrize("bias", [True, False])
def test_block_linear_is_a_dense_layer_with_a_block_diagonal_matrix(bias):
    layer = BlockLinear(12, 8, 4, bias=bias)
    matrix = torch.block_diag(*layer.weight).T
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 12)
    expected = torch.nn.functional.linear(x, matrix, layer.bias.flatten() if bias else None)
    torch.testing.assert_close(layer(x), expected)


def test_blocks_become_fewer_where_a_memory_is_small():
    assert [blocks_of(width) for width in (4096, 64, 48, 32, 20, 7)] == [8, 8, 4, 4, 2, 1]
    with pytest.raises(ValueError, match="12 → 8 units cannot be cut into 5 blocks"):
        BlockLinear(12, 8, 5)


def test_weights_start_as_truncated_normals_of_the_inputs_width():
    weight = Dense(256, 2000).weight
    assert weight.std().item() == pytest.approx(1 / 16, rel=0.01)
    assert weight.abs().max().item() <= 2 * 1.1369 / 16
    assert Dense(256, 2000, fan_in=1024).weight.std().item() == pytest.approx(1 / 32, rel=0.01)
    assert BlockLinear(256, 2048, 4).weight.std().item() == pytest.approx(1 / 16, rel=0.01)
    assert not Dense(16, 4, scale=0.0).weight.any()
    picture = Encoder({"image": (16, 16, 3)}, units=8, depth=32).convolutions[0].weight
    assert picture.std().item() == pytest.approx(1 / math.sqrt(3 * 25), rel=0.05)


def test_a_layer_is_dense_then_rms_norm_then_silu():
    layers, x = mlp(3, 4, 1), torch.randn(5, 3)
    torch.nn.init.normal_(layers[1].weight)
    y = layers[0](x)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-4).sqrt() * layers[1].weight
    torch.testing.assert_close(layers(x), y * y.sigmoid())
    assert len(head(3, 4, 7, layers=2)) == 7 and head(3, 4, 7, scale=0.0)(x).abs().max() == 0


def test_a_fresh_two_hot_head_predicts_exactly_zero():
    model = TwoHotHead(6, 8)
    assert torch.equal(model(torch.randn(2, 3, 6)).mean, torch.zeros(2, 3))
    assert "bins_K" not in model.state_dict()


SHAPES = {"image": (64, 64, 3), "depth": (64, 64, 1), "speed": (3,), "place": (2,)}


@pytest.mark.parametrize("side", [16, 48, 64])
def test_observations_are_encoded_and_decoded_in_their_shapes(side):
    shapes = {key: (side, side, shape[2]) if len(shape) == 3 else shape for key, shape in SHAPES.items()}
    encoder = Encoder(shapes, units=16, depth=2)
    decoder = Decoder(shapes, deter=32, stoch=20, units=16, depth=2)
    seen = observations(shapes, (2, 3))
    embed = encoder(seen | {"reward": torch.zeros(2, 3)})
    assert embed.shape == (2, 3, encoder.width) and embed.dtype == torch.float32
    one = encoder({key: x[:, 1] for key, x in seen.items()})
    torch.testing.assert_close(one, embed[:, 1])
    out = decoder(torch.randn(2, 3, 32), torch.rand(2, 3, 4, 5))
    assert {key: tuple(x.shape) for key, x in out.items()} == {key: (2, 3, *shape) for key, shape in shapes.items()}
    assert all((out[key] >= 0).all() and (out[key] <= 1).all() for key in ("image", "depth"))
    again = decoder.observations(out)
    assert again["image"].dtype == torch.uint8 and again["speed"].dtype == torch.float32
    assert all(x.shape == (2, 3) for x in decoder.losses(out, seen).values())


def test_vectors_are_judged_in_symlog_units_and_pictures_in_whole_brightness():
    shapes = {"x": (2,), "image": (16, 16, 1)}
    decoder = Decoder(shapes, deter=16, stoch=4, units=8, depth=2)
    out = {"x": torch.zeros(1, 2), "image": torch.zeros(1, 16, 16, 1)}
    seen = {"x": torch.tensor([[math.e - 1, 1 - math.e]]), "image": torch.full((1, 16, 16, 1), 255, dtype=torch.uint8)}
    found = decoder.losses(out, seen)
    assert found["x"].item() == pytest.approx(2.0) and found["image"].item() == pytest.approx(256.0)
    given = decoder.observations({"x": torch.ones(1, 2), "image": torch.full((1, 16, 16, 1), 0.5)})
    assert given["x"][0, 0].item() == pytest.approx(math.e - 1) and given["image"].unique().tolist() == [128]


def test_large_numbers_are_squashed_before_they_are_read():
    encoder = Encoder({"x": (2,)}, units=8, depth=2)
    big = encoder({"x": torch.tensor([[math.e**5 - 1, 1 - math.e**2]])})
    torch.testing.assert_close(big, encoder.dense(torch.tensor([[5.0, -2.0]])))


def test_pictures_are_read_around_the_middle_of_their_brightness():
    encoder = Encoder({"image": (16, 16, 1)}, units=8, depth=2)
    byte = torch.randint(0, 256, (3, 16, 16, 1), dtype=torch.uint8)
    expected = encoder.convolutions(byte.permute(0, 3, 1, 2) / 255.0 - 0.5).flatten(1)
    torch.testing.assert_close(encoder({"image": byte}), expected)


def test_every_part_of_the_latent_reaches_every_observation():
    decoder = Decoder({"x": (2,), "image": (32, 32, 3)}, deter=32, stoch=20, units=8, depth=2)
    deter, stoch = torch.randn(1, 32, requires_grad=True), torch.rand(1, 4, 5, requires_grad=True)
    for x in decoder(deter, stoch).values():
        for grad in torch.autograd.grad(x.square().sum(), [deter, stoch], retain_graph=True):
            assert (grad != 0).all()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"image": (50, 50, 3)}, "image .*multiples of 16"),
        ({"a": (64, 64, 3), "b": (48, 48, 3)}, "one height and width"),
        ({"table": (3, 4)}, "'table' has shape"),
        ({}, "no observation"),
    ],
)
def test_what_cannot_be_modelled_is_named(shapes, message):
    with pytest.raises(ConfigError, match=message):
        Encoder(shapes, units=8, depth=2)


def test_painting_on_the_small_picture_is_enlarging_and_convolving():
    decoder = Decoder({"image": (48, 32, 3)}, deter=32, stoch=20, units=8, depth=3).double()
    for parameter in decoder.convolutions.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 12, 3, 2, dtype=torch.float64, requires_grad=True)
    fast, plain = decoder.painted(x), decoder.convolutions(x)
    torch.testing.assert_close(fast, plain)
    weight, inputs = torch.randn_like(plain), [x, *decoder.convolutions.parameters()]
    grads = [torch.autograd.grad((weight * out).sum(), inputs) for out in (fast, plain)]
    assert all(grad.abs().max() > 0 for grad in grads[1])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("width", [16, 15])
def test_neighbours_that_are_computed_together_are_a_plain_convolution(width):
    layer = Encoder({"image": (16, 16, 3)}, units=8, depth=3).double().convolutions[0]
    x = torch.randn(2, 3, 16, width, dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(layer.bias)
    plain = torch.nn.functional.conv2d(x, layer.weight, layer.bias, padding=2)
    weight, inputs = torch.randn_like(plain), [x, layer.weight, layer.bias]
    torch.testing.assert_close(layer(x), plain)
    for one, other in zip(*(torch.autograd.grad((weight * y).sum(), inputs) for y in (layer(x), plain)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_layer_between_convolutions_is_a_norm_over_channels_then_silu():
    _, _, layer = Encoder({"image": (16, 16, 3)}, units=8, depth=3).double().convolutions[:3]
    gain = layer[0].weight
    torch.nn.init.normal_(gain)
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64, requires_grad=True)
    y = x / (x.square().mean(1, keepdim=True) + 1e-4).sqrt() * gain[:, None, None]
    plain, weight = y * y.sigmoid(), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain)
    for one, other in zip(
        *(torch.autograd.grad((weight * z).sum(), [x, gain]) for z in (layer(x), plain)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_pictures_are_left_as_they_were_given():
    shapes = {"image": (16, 16, 3)}
    encoder, decoder = Encoder(shapes, units=8, depth=2), Decoder(shapes, deter=16, stoch=4, units=8, depth=2)
    seen = {"image": 255 * torch.rand(2, 16, 16, 3)}
    before = seen["image"].clone()
    encoder(seen)
    decoder.losses({"image": torch.zeros(2, 16, 16, 3)}, seen)
    assert torch.equal(seen["image"], before)
