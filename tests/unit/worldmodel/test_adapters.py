"""Fine-tuning: adapters move, everything else stays, and with the adapters off the old agent is there again."""

import copy
import shutil

import pytest
import torch

from grpo.config import ConfigError
from grpo.protocols import CollectRequest
from grpo.worldmodel.model.adapters import adapt, adapters, switched_off, trained
from grpo.worldmodel.model.networks import head, mlp
from tests.unit.worldmodel.worlds import make, same, weights


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A short run of an agent, to begin with."""
    path = tmp_path_factory.mktemp("before") / "run"
    trainer = make()
    trainer.train(steps=3, folder=path, evaluate_every=3, progress=None)
    trainer.source.close()
    return path


def test_a_layer_that_was_just_adapted_is_the_layer_it_was():
    x, network = torch.randn(5, 6), head(6, 8, 3)
    before = network(x)
    adapt(network, 2, seed=0)
    assert torch.equal(network(x), before) and len(adapters(network)) == 2
    assert {name.rpartition(".")[2] for name in trained(network)} == {"down_RI", "up_OR"}
    with torch.no_grad():
        for part in adapters(network):
            part.up_OR.fill_(0.5)
    assert not torch.equal(network(x), before)
    with switched_off(network):
        assert torch.equal(network(x), before)


def test_nothing_to_adapt_is_an_error():
    with pytest.raises(ConfigError, match="no dense layer"):
        adapt(torch.nn.SiLU(), 2, seed=0)
    assert mlp(2, 2, 1) is not None


@pytest.mark.parametrize("what", ["actor", "both"])
def test_only_adapters_move_and_the_reference_is_the_agent_before(what, run_folder):
    trainer = make(init_from=str(run_folder), adapter_rank=2, adapt=what, beta=0.1, pretrain=None)
    model, actor = trainer.source.learner.model, trainer.policy.module
    before_model, before_actor = weights(model), weights(actor)
    first = trainer.step()
    assert first["kl"] == 0.0
    assert trainer.step()["kl"] > 0.0

    def moved(before, module):
        return {n for n, x in weights(module).items() if not torch.equal(x, before[n])}

    def low_rank(names):
        return bool(names) and all(n.endswith(("down_RI", "up_OR")) for n in names)

    assert low_rank(moved(before_actor, actor))
    assert low_rank(moved(before_model, model)) if what == "both" else not moved(before_model, model)
    rollouts = trainer.source.collect(CollectRequest(9)).rollouts
    old = make(init_from=str(run_folder))
    torch.testing.assert_close(trainer.reference.score(rollouts), old.policy.score(rollouts).logp_NT.detach())
    for made in (trainer, old):
        made.source.close()


def test_an_agent_begins_with_another_run_s_weights(run_folder):
    one, fresh = make(init_from=str(run_folder)), make()
    assert not same(weights(one.source.learner.model), weights(fresh.source.learner.model))
    assert not same(weights(one.policy.module), weights(fresh.policy.module))
    for made in (one, fresh):
        made.source.close()


@pytest.mark.slow
def test_an_adapted_run_is_resumed_exactly(run_folder, tmp_path):
    tuned = {"init_from": str(run_folder), "adapter_rank": 2, "pretrain": None}
    whole = make(**tuned)
    for _ in range(4):
        whole.step()
    cut = make(**tuned)
    cut.step()
    cut.step()
    state = cut.state()
    again = make(**tuned)
    again.load_state(state)
    again.step()
    again.step()
    assert same(weights(whole.policy.module), weights(again.policy.module))
    assert same(weights(whole.source.learner.model), weights(again.source.learner.model))
    for made in (whole, cut, again):
        made.source.close()


@pytest.mark.slow
def test_a_run_that_is_resumed_does_without_its_parent(run_folder, tmp_path):
    tuned = {"init_from": str(tmp_path / "parent"), "adapter_rank": 2, "pretrain": None, "beta": 0.1}
    shutil.copytree(run_folder, tmp_path / "parent")
    one = make(**tuned)
    one.step()
    state, expected = one.state(), one.step()
    shutil.rmtree(tmp_path / "parent")
    again = make(**tuned)
    again.load_state(state)
    assert dict(again.step()) == dict(expected)
    orphan = make(**tuned)
    for look in (orphan.step, lambda: orphan.evaluate(1), lambda: orphan.watch(1)):
        with pytest.raises(ConfigError, match=r"init_from: .*parent"):
            look()
    for made in (one, again, orphan):
        made.source.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actor_layers": 1}, "is another agent than these settings make"),
        ({"env": "Pendulum-v1"}, "is another agent than these settings make"),
        ({"adapter_rank": 2, "beta": 0.1, "ref_sync_steps": 2}, "cannot follow; leave ref_sync_steps out"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message, run_folder):
    with pytest.raises(ConfigError, match=message):
        make(**{"init_from": str(run_folder)} | settings)


def test_a_copy_has_its_own_adapters_while_its_original_imagines(run_folder):
    """As in acting beside learning, where a copy plays with what the agent was when it began."""
    trainer = make(init_from=str(run_folder), adapter_rank=2, pretrain=None)
    rssm, read = trainer.source.learner.model.rssm, []
    copied = copy.deepcopy(rssm)
    with torch.no_grad():
        for part in adapters(rssm):
            part.up_OR.fill_(0.5)

    def imagined():
        return trainer.source._imagination(rssm.initial(2), 2, 3, torch.Generator().manual_seed(0)).flat

    alone, own, step = imagined(), copied.from_deter.weight, rssm.imagine_step

    def beside(*given):
        """The copy is read before its original, and after."""
        read.append(copied.from_deter.weight)
        led_to = step(*given)
        read.append(copied.posterior_deter.weight)
        return led_to

    rssm.imagine_step = beside
    assert torch.equal(imagined(), alone)
    assert len(read) == 6 and all(torch.equal(x, own) for x in read[::2])
    assert all(torch.equal(x, copied.posterior_deter.weight) for x in read[1::2])
    trainer.source.close()


def test_observations_are_measured_once_and_not_by_who_begins_with_another_agent(run_folder):
    trainer, child = make(scale_observations=True), make(scale_observations=True, init_from=str(run_folder))
    for one in (trainer, child):
        one.step()
    reading = trainer.source.model.encoder.readings[0]
    measured, later = reading.std_D.clone(), child.source.model.encoder.readings[0]
    assert not torch.equal(measured, torch.ones_like(measured))
    assert torch.equal(later.std_D, torch.ones_like(measured)) and not later.mean_D.any()
    trainer.step()
    assert torch.equal(reading.std_D, measured)
