"""The optimizer equals its formulas, clips as stated and goes on exactly where it was saved."""

import copy
import json
import math

import pytest
import torch

from grpo.worldmodel.model.optimizer import LaProp


def tensors(seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (5,), ()]
    made = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    return [torch.nn.Parameter(x) for x in (*made, torch.zeros(3, dtype=dtype))]


def descend(parameters, optimizer, steps, seed=1, size=1.0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = size * torch.randn(parameter.shape, generator=random, dtype=torch.float64).to(parameter)
        optimizer.step()


def reference(parameters, steps, lr, clip, warmup, seed=1, size=1.0, beta1=0.9, beta2=0.999, eps=1e-20):
    random = torch.Generator().manual_seed(seed)
    found = [p.detach().clone() for p in parameters]
    square, momentum = [[torch.zeros_like(p) for p in found] for _ in range(2)]
    for step in range(1, steps + 1):
        rate = lr * min(1.0, (step - 1) / warmup) if warmup else lr
        for i, parameter in enumerate(found):
            grad = size * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            if clip:
                most = clip * max(1e-3, parameter.norm().item())
                grad = grad / max(1.0, grad.norm().item() / most)
            square[i] = beta2 * square[i] + (1 - beta2) * grad**2
            scaled = grad / ((square[i] / (1 - beta2**step)).sqrt() + eps)
            momentum[i] = beta1 * momentum[i] + (1 - beta1) * scaled
            found[i] = parameter - rate * momentum[i] / (1 - beta1**step)
    return found


@pytest.mark.parametrize(("clip", "warmup", "size"), [(0.3, 4, 5.0), (0.3, 0, 0.01), (0.0, 0, 1.0)])
def test_it_equals_the_formulas_written_out(clip, warmup, size):
    parameters = tensors()
    expected = reference(parameters, 7, 0.05, clip, warmup, size=size)
    descend(parameters, LaProp(parameters, lr=0.05, clip=clip, warmup=warmup), 7, size=size)
    for found, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-7)


def test_a_gradient_is_cut_to_a_share_of_its_tensors_norm():
    parameter, zeros = torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.nn.Parameter(torch.zeros(2))
    optimizer = LaProp([parameter, zeros], clip=0.3)
    for grad, most in (([300.0, 400.0], 1.5), ([0.3, 0.4], 0.5)):
        parameter.grad = zeros.grad = torch.tensor(grad)
        cut, least = optimizer._clipped([parameter, zeros], 0.3)
        assert cut.norm().item() == pytest.approx(most) and least.norm().item() == pytest.approx(0.3e-3)
        assert cut[1].item() / cut[0].item() == pytest.approx(4 / 3)


def test_the_first_step_does_not_depend_on_the_size_of_the_gradient():
    for size in (1e-12, 1.0, 1e12):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = LaProp([parameter], lr=0.1, warmup=0)
        parameter.grad = torch.tensor([size, -size, 0.0])
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, 1.1, 1.0]), rtol=1e-4, atol=0)


def test_the_rate_rises_from_zero():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, moved = LaProp([parameter], lr=0.1, warmup=4, clip=0.0), []
    for _ in range(6):
        before = parameter.item()
        parameter.grad = torch.ones(1)
        optimizer.step()
        moved.append(before - parameter.item())
    assert moved == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1], abs=1e-5)


def test_it_goes_on_exactly_where_it_was_saved():
    one, two = tensors(dtype=torch.float32), tensors(dtype=torch.float32)
    first, second = LaProp(one, lr=0.05, warmup=9), LaProp(two, lr=0.05, warmup=9)
    descend(one, first, 5)
    saved = copy.deepcopy(first.state_dict())
    json.dumps(saved["param_groups"])  # what is not a tensor can be written down
    with torch.no_grad():
        for target, source in zip(two, one, strict=True):
            target.copy_(source)
    second.load_state_dict(saved)
    descend(one, first, 5, seed=2)
    descend(two, second, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for a, b in zip(first.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_tensor_without_gradient_stays():
    parameters = tensors()
    before = parameters[1].detach().clone()
    optimizer = LaProp(parameters, lr=0.1, warmup=0)
    for parameter in (parameters[0], parameters[2]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameters[1], before) and "square" not in optimizer.state[parameters[1]]
    assert math.isfinite(parameters[2].item())


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="clip=-1"):
        LaProp(tensors(), clip=-1)
    with pytest.raises(ValueError, match="betas"):
        LaProp(tensors(), betas=(0.9, 1.0))
