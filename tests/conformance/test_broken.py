"""Each promise, broken on purpose, is found by its own check and by no other."""

import random
import warnings

import numpy as np
import pytest
import torch

import grpo
from grpo.checking import CheckFailed, check
from grpo.promises import PROMISES
from grpo.protocols import Collected, State
from grpo.rollouts import Scores
from tests import toys
from tests.conformance.arms import Arms, Frozen, Pulls

# --- what is broken, by the promise that must find it ----------------------------------------------------------------

BROKEN = []


def breaks(promise, words):
    """Remember a broken part of the room, a subclass of Arms, Pulls or Frozen."""
    return lambda part: BROKEN.append(pytest.param(part, promise, words, id=part.__name__)) or part


@breaks("is_whole", "has no show")
class NoShow(Pulls):
    def __getattribute__(self, name):
        if name == "show":
            raise AttributeError(name)
        return super().__getattribute__(name)


@breaks("declares_capabilities", "looks like evaluate")
class Misspelt(Pulls):
    def evalaute(self, step):
        return {}


@breaks("declares_capabilities", "takes (step)")
class EvaluatesNothing(Pulls):
    def evaluate(self):
        return {}


@breaks("declares_capabilities", "source.headline is 'reward'")
class OneWord(Pulls):
    headline = "reward"


@breaks("collects_groups", "returned Rollouts")
class Bare(Pulls):
    def collect(self, request):
        return super().collect(request).rollouts


@breaks("collects_groups", "ids [10, 11] for 2 starts")
class FromTen(Pulls):
    def collect(self, request):
        found = super().collect(request)
        return Collected(found.rollouts.but(group_N=found.rollouts.group_N + 10), found.starts)


@breaks("collects_groups", "a single try")
class Once(Pulls):
    def collect(self, request):
        found = super().collect(request)
        firsts = [row for row in range(len(found.rollouts)) if row % 4 == 0]
        return Collected(found.rollouts.select(firsts), found.starts)


@breaks("collects_groups", "ZeroDivisionError")
class Raising(Pulls):
    def collect(self, request):
        raise ZeroDivisionError("cannot pull")


@breaks("scores_every_decision", "shape (8,)")
class Flat(Arms):
    def score(self, rows, entropy=False):
        return Scores(super().score(rows).logp_NT[:, 0])


@breaks("scores_every_decision", "version is None")
class Unversioned(Arms):
    def __init__(self):
        super().__init__()
        self.version = None


@breaks("scores_what_it_sampled", "apart")
class Hot(Arms):
    def score(self, rows, entropy=False):
        return Scores((self.logits_V / 2).log_softmax(0)[rows.inputs][:, None])


@breaks("scores_rows_alone", "some rows")
class Together(Arms):
    """As if a batch were normalised."""

    def score(self, rows, entropy=False):
        logp_NT = super().score(rows).logp_NT
        return Scores(logp_NT + (0 if len(rows) == 8 else 0.1))


@breaks("learns", "do not depend on the parameters")
class Copies(Arms):
    def parameters(self):
        return {"logits": self.logits_V.detach().clone().requires_grad_()}


@breaks("learns", "no gradient reaches idle")
class Idle(Arms):
    def __init__(self):
        super().__init__()
        self.idle = torch.zeros(1, requires_grad=True)

    def parameters(self):
        return super().parameters() | {"idle": self.idle}


@breaks("splits_rows", "gives rows")
class Forgets(Arms):
    def split(self, rows, limit, halvings=0):
        return [range(len(rows) - 1)]


@breaks("reference_stays", "moved by")
class Shared(Frozen):
    def __init__(self, policy):
        self.logits_V = policy.logits_V.detach()


@breaks("reference_follows", "from the policy")
class Stubborn(Frozen):
    def __init__(self, policy):
        super().__init__(policy)
        self.logits_V += torch.tensor([1.0, 0.0, 0.0])

    def sync(self, policy, alpha): ...


@breaks("tells_numbers", "metrics()['pulled']")
class Wordy(Pulls):
    def metrics(self):
        return {"pulled": "many"}


@breaks("tells_numbers", "measures()['speed']")
class Tensors(Pulls):
    def measures(self):
        return {"speed": torch.tensor(1.0)}


@breaks("shows_rows", "1 dicts for 3 rows")
class ShowsOne(Pulls):
    def show(self, rows):
        return super().show(rows)[:1]


@breaks("shows_rows", "cannot be written as JSON")
class ShowsTensors(Pulls):
    def show(self, rows):
        return [{"arm": arm} for arm in rows.inputs]


@breaks("shows_rows", "entropies has shape (3,)")
class FlatEntropy(Pulls):
    def entropies(self, rows):
        return torch.ones(len(rows))


@breaks("keeps_a_state", "cannot be written as JSON")
class KeepsTensor(Pulls):
    def state(self):
        return State({"pulled": torch.tensor(self.pulled)}, {})


@breaks("keeps_a_state", "once written as JSON")
class KeepsByNumber(Pulls):
    def state(self):
        return State({"pulled": self.pulled, "by_arm": {0: 1}}, {})


@breaks("keeps_a_state", "arrays['pulled'] is a list")
class KeepsList(Pulls):
    def state(self):
        return State({"pulled": self.pulled}, {"pulled": [1, 2]})


@breaks("collects_the_same_again", "gave other")
class Forgetful(Pulls):
    """Draws by how much it has pulled, and does not say how much that is."""

    def draw(self, request):
        return torch.Generator().manual_seed(self.pulled)

    def state(self):
        return State({}, {})

    def load_state(self, state): ...


@breaks("collects_the_same_again", "gave other")
class Clocked(Pulls):
    """Draws by nothing that anybody knows."""

    def draw(self, request):
        generator = torch.Generator()
        generator.seed()
        return generator


@breaks("collects_from_given_starts", "gave groups [0, 1]")
class Deaf(Pulls):
    def collect(self, request):
        return super().collect(type(request)(request.step, request.attempt))


@breaks("collects_from_given_starts", "cannot be asked again")
class Unwilling(Pulls):
    def collect(self, request):
        if request.starts is not None:
            raise ValueError("not again")
        return super().collect(request)


@breaks("closes_twice", "already closed")
class ClosesOnce(Pulls):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


def room_with(part):
    """The sound room with one part of it replaced."""
    policy = part() if issubclass(part, Arms) else Arms()
    source = part(policy) if issubclass(part, Pulls) else Pulls(policy)
    reference = part(policy) if issubclass(part, Frozen) else Frozen(policy)
    return policy, source, reference


def found_by(report):
    return {flaw.promise for flaw in report.flaws}


@pytest.mark.parametrize("part, promise, words", BROKEN)
def test_a_broken_promise_is_found(part, promise, words):
    report = check(*room_with(part), raises=False)
    assert any(flaw.promise == promise and words in flaw.what for flaw in report.flaws), str(report)
    assert all(flaw.remedy for flaw in report.flaws)
    consequences = {"collects_the_same_again"} if promise == "keeps_a_state" else set()  # it needs a state that is one
    consequences |= {"reference_follows"} if part is Hot else set()
    assert found_by(report) <= {promise} | consequences


def test_every_promise_is_broken_once():
    assert {case.values[1] for case in BROKEN} == {promise.__name__ for promise in PROMISES}


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_sound_room_is_sound_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = grpo.check(*room_with(Pulls))
    assert report.sound and report.flaws == () and str(report).endswith("0 flaws")


def test_everything_that_is_broken_is_listed_with_its_remedy():
    class Bad(Pulls):
        metrics = Wordy.metrics
        show = ShowsOne.show

    policy = Hot()
    with pytest.raises(CheckFailed, match=r"(?s)record the log-probs.*one float|a float") as caught:
        grpo.check(policy, Bad(policy))
    assert found_by(caught.value.report) == {"scores_what_it_sampled", "tells_numbers", "shows_rows"}


def test_what_is_only_doubtful_is_a_warning():
    with pytest.warns(UserWarning, match="evalaute looks like evaluate"):
        report = grpo.check(*room_with(Misspelt))
    assert report.sound and len(report.flaws) == 1


def test_randomness_and_weights_are_as_before():
    policy, source, reference = room_with(Pulls)
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = policy.logits_V.detach().clone()
    grpo.check(policy, source, reference)
    assert (torch.rand(1), np.random.rand(), random.random()) == drawn
    assert torch.equal(policy.logits_V, before) and policy.logits_V.grad is None


# --- a user's own models ---------------------------------------------------------------------------------------------


def test_a_policy_and_a_reward_model_are_adapted():
    report = grpo.check(toys.Softmax(), toys.Match(), toys.Softmax(), states=[0, 1])
    assert report.flaws == ()


def test_models_need_states():
    with pytest.raises(TypeError, match="states="):
        grpo.check(toys.Softmax(), toys.Match())


def test_a_model_that_is_not_whole_is_named():
    with pytest.raises(TypeError, match="has no generate_actions"):
        grpo.check(object(), toys.Match(), states=[0])


def test_a_model_with_dropout_while_sampling_is_found():
    class Noisy(toys.Softmax):
        def get_log_probabilities(self, states, actions):
            return super().get_log_probabilities(states, actions) + torch.randn(len(states))

    report = grpo.check(Noisy(), toys.Match(), states=[0, 1], raises=False)
    assert "scores_what_it_sampled" in found_by(report)
