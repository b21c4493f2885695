"""The trainer: it learns, it leaves things alone when it must, and it says what is wrong with what it was given."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from grpo import RECIPES, GRPOConfig, GRPOTrainer
from grpo.protocols import Collected, CollectRequest
from grpo.rollouts import Rollouts, Scores
from grpo.trainer import Diverged
from tests.toys import Given, Match, Softmax, trainer

STATES = [0, 1, 2, 3]


class Dummy:
    """Random log-probs, no parameters: the smallest thing that follows the protocol."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [[f"action_{i}" for i in range(num_actions_per_state)] for _ in states]

    def get_log_probabilities(self, states, actions):
        return torch.randn(len(states))

    def get_parameters(self):
        return {}

    def train(self):
        pass

    def eval(self):
        pass

    def to(self, device):
        return self


def test_dummies_report_metrics_and_warn_once():
    policy, reward = Dummy(), Given(lambda states, actions: torch.randn(len(states)))
    config = GRPOConfig(group_size=4, batch_size=2, num_epochs_per_update=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = GRPOTrainer(config, policy, copy.deepcopy(policy), reward, None)
        report = made.step(["state_1", "state_2", "state_3", "state_4"])
        made.step(["state_1", "state_2"])
    assert [str(w.message) for w in caught] == [
        "the policy has no trainable parameters: metrics are reported, nothing is updated"
    ]
    assert {"reward", "reward_std", "frac_reward_zero_std", "kl", "loss"} <= set(report)
    assert report["updates"] == 0.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_softmax_policy_learns(seed):
    made = trainer(seed, num_iterations=2, beta=0.01)
    reports = made.train(STATES for _ in range(50))
    assert reports[0]["reward"] < 0.5
    assert sum(r["reward"] for r in reports[-5:]) / 5 > 0.9


ELSEWHERE = {
    "otb": "needs energy_NT",
    "remax": "needs a greedy try",
    "gigpo": "give tools or an environment",
    "a_star_po": "needs answers of the starting model to every start",
    **{name: "needs a teacher: give teacher=" for name, row in RECIPES.items() if row.teacher_coef},
}
"""Rows that need what a policy and a reward have not; see test_teaching and tests/unit/language/test_comparing.py."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_recipe_that_needs_more_than_rewards_says_what_it_needs(name):
    with pytest.raises(ValueError, match=ELSEWHERE[name]) as raised:
        trainer(loss_type=name).step(STATES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ELSEWHERE])
def test_every_recipe_trains(name):
    reward = Given(lambda states, actions: torch.rand(len(states)) * 0.1 + Match().compute_rewards(states, actions))
    made = trainer(loss_type=name, reward=reward, groups_per_minibatch=2, num_iterations=2)
    before = made.policy.parameters()["logits"].detach().clone()
    report = made.step(STATES)
    assert report["updates"] == 4.0
    assert not torch.equal(made.policy.parameters()["logits"], before)


def test_one_step_by_hand():
    """One pass, one minibatch, SGD: θ ← θ + lr · mean(A · ∇log π), computed apart."""
    policy = Softmax(2, torch.float64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    made = trainer(0, policy=policy, optimizer=optimizer, beta=0.0, max_grad_norm=None, group_size=4)
    report = made.step([0, 1])
    rollouts = report.experience.rollouts
    twin = Softmax(2, torch.float64)
    logp = twin.get_log_probabilities(rollouts.inputs["states"], rollouts.inputs["actions"])
    reward = rollouts.reward_N.double().view(2, 4)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    (advantage * logp).mean().backward()
    torch.testing.assert_close(policy.logits.detach(), twin.logits.grad)


@pytest.mark.parametrize("rows", [1, 3, 7, 32])
def test_micro_batches_do_not_change_the_weights(rows):
    results = []
    for limit in (None, rows):
        policy = Softmax(dtype=torch.float64)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        made = trainer(0, policy=policy, optimizer=optimizer, rows_per_microbatch=limit, num_iterations=2)
        made.step(STATES)
        results.append(policy.logits.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_out_of_memory_halves_the_micro_batch(monkeypatch):
    """Parts of at most 5 rows fit: 32 → 16 → 8 → 4; the weights are those of the whole batch."""
    whole, part = (
        trainer(0, policy=(p := Softmax(dtype=torch.float64)), optimizer=torch.optim.SGD(p.parameters(), lr=0.5))
        for _ in range(2)
    )
    score, sizes = part.policy.score, []

    def small_memory(rows, entropy=False):
        if torch.is_grad_enabled():
            sizes.append(len(rows))
            if len(rows) > 5:
                raise torch.OutOfMemoryError("no room")
        return score(rows, entropy)

    torch.manual_seed(1)
    whole.step(STATES)
    monkeypatch.setattr(part.policy, "score", small_memory)
    torch.manual_seed(1)
    part.step(STATES)
    assert sizes == [32, 16, 8] + [4] * 8
    torch.testing.assert_close(
        part.policy.parameters()["logits"], whole.policy.parameters()["logits"], rtol=1e-12, atol=1e-14
    )


def test_out_of_memory_first_takes_what_sampling_keeps(monkeypatch):
    made = trainer(0, policy=(p := Softmax()), optimizer=torch.optim.SGD(p.parameters(), lr=0.5))
    score, sizes, held = made.policy.score, [], [True]

    def small_memory(rows, entropy=False):
        if torch.is_grad_enabled():
            sizes.append(len(rows))
            if held[0] or len(rows) > 20:
                raise torch.OutOfMemoryError("no room")
        return score(rows, entropy)

    def make_room():
        had, held[0] = held[0], False
        return had

    monkeypatch.setattr(made.policy, "score", small_memory)
    monkeypatch.setattr(made.source, "make_room", make_room, raising=False)
    with pytest.warns(UserWarning, match="what sampling keeps between steps is let go"):
        made.step(STATES)
    assert sizes == [32, 32, 16, 16]


def frozen_bytes(made):
    state = made.state()
    return {name: tensor.clone() for name, tensor in state.arrays.items()}


def same(before, after):
    return all(torch.equal(before[name], after[name]) for name in before) and set(before) == set(after)


def test_extreme_ratios_skip_the_update_and_touch_nothing():
    made = trainer(0, max_ratio=1.5, num_iterations=2)
    made.step(STATES)
    before = frozen_bytes(made)
    log_probs = made.policy.log_probs
    made.policy.log_probs = lambda s, a: tuple(
        x + 1 if torch.is_grad_enabled() and x.is_floating_point() else x for x in log_probs(s, a)
    )
    report = made.step(STATES)
    assert report["updates_skipped"] == 2.0 and report["updates"] == 0.0
    assert same(before, {k: v for k, v in frozen_bytes(made).items() if k in before})
    assert report["ratio"] == pytest.approx(2.718, rel=1e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_updates_are_skipped_then_training_stops(poison):
    made = trainer(0)
    made.step(STATES)
    before = frozen_bytes(made)
    log_probs = made.policy.log_probs

    def broken(states, actions):
        logp, mask = log_probs(states, actions)
        return (logp * poison if torch.is_grad_enabled() else logp), mask

    made.policy.log_probs = broken
    report = made.step(STATES)
    assert report["updates_skipped"] == 1.0 and report["loss"] is None
    assert same(before, frozen_bytes(made))
    made.step(STATES)
    with pytest.raises(Diverged, match="lower learning_rate"):
        made.step(STATES)
    assert same(before, frozen_bytes(made))


def test_target_kl_ends_the_passes():
    free = trainer(0, num_iterations=20, learning_rate=0.3).step(STATES)
    held = trainer(0, num_iterations=20, learning_rate=0.3, target_kl=0.01).step(STATES)
    assert free["updates"] == 20.0
    assert 1 < held["updates"] < 20


def test_reference_stays_unless_asked_to_follow():
    made = trainer(0)
    start = made.reference.parameters()["logits"].clone()
    made.train(STATES for _ in range(3))
    assert torch.equal(made.reference.parameters()["logits"], start)
    assert not made.reference.parameters()["logits"].requires_grad


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_reference_sync(alpha):
    made = trainer(0, ref_sync_steps=2, ref_mixup_alpha=alpha)
    start = made.reference.parameters()["logits"].clone()
    made.step(STATES)
    assert torch.equal(made.reference.parameters()["logits"], start)
    made.step(STATES)
    want = start + alpha * (made.policy.parameters()["logits"].detach() - start)
    torch.testing.assert_close(made.reference.parameters()["logits"], want)


def test_beta_zero_builds_no_reference():
    assert trainer(0, beta=0.0).reference is None


def test_kl_pulls_back_to_the_reference():
    """The default's k1 value has k2's gradient: with no signal in the reward, the policy returns to the reference."""
    policy = Softmax(1)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        policy.logits += torch.tensor([[2.0, 0, 0, 0, 0]])
    flat = Given(lambda states, actions: torch.zeros(len(states)))
    made = trainer(
        0, policy=policy, reference_policy=reference, reward=flat, beta=1.0, group_size=64, learning_rate=0.05
    )
    first = made.step([0])["kl"]
    last = [made.step([0])["kl"] for _ in range(60)][-5:]
    assert first > 0.3 and sum(last) / 5 < 0.05


class Scripted:
    """A source whose groups have signal only at the given attempts: {slot: attempt}."""

    def __init__(self, when):
        self.when, self.requests = when, []

    def collect(self, request: CollectRequest) -> Collected:
        self.requests.append(request)
        starts = list(request.starts or range(len(self.when)))
        reward = [float(i) if self.when[start] <= request.attempt else 1.0 for start in starts for i in range(2)]
        rows = len(reward)
        rollouts = Rollouts(
            group_N=torch.arange(len(starts)).repeat_interleave(2),
            mask_NT=torch.ones(rows, 1, dtype=torch.bool),
            old_logp_NT=torch.zeros(rows, 1),
            reward_N=torch.tensor(reward),
            inputs={"states": [start for start in starts for _ in range(2)], "actions": [0] * rows},
        )
        return Collected(rollouts, starts)

    def metrics(self):
        return {}


@pytest.mark.parametrize(("attempts", "kept"), [(4, [0, 1, 2, 3]), (2, [0, 2, 3]), (1, [0, 3])])
def test_groups_without_signal_are_sampled_again(attempts, kept):
    source = Scripted({0: 0, 1: 2, 2: 1, 3: 0})
    config = GRPOConfig(group_size=2, no_signal="resample", max_attempts=attempts)
    made = GRPOTrainer(config, Softmax(), source=source)
    report = made.step()
    rollouts = report.experience.rollouts
    assert sorted(set(rollouts.group_N.tolist())) == kept
    for state, group in zip(rollouts.inputs["states"], rollouts.group_N.tolist(), strict=True):
        assert state == group  # a start keeps its slot
    assert [list(r.starts) for r in source.requests[1:]] == [[1, 2], [1]][: attempts - 1]
    assert [r.attempt for r in source.requests] == list(range(len(source.requests)))
    assert report["frac_reward_zero_std"] == 0.5  # as sampled first


def test_nothing_with_signal_is_counted_and_teaches_nothing():
    source = Scripted({0: 9, 1: 9})
    made = GRPOTrainer(
        GRPOConfig(group_size=2, no_signal="resample", max_attempts=2, beta=0.0), Softmax(), source=source
    )
    before = made.policy.parameters()["logits"].detach().clone()
    report = made.step()
    assert report["attempts"] == 2.0 and report["frac_reward_zero_std"] == 1.0
    assert torch.equal(made.policy.parameters()["logits"], before)


def test_minibatches_are_whole_groups_in_a_seeded_order():
    def order(seed, step):
        made = trainer(0, groups_per_minibatch=1, num_iterations=2, seed=seed)
        made.steps_done = step
        rollouts = made.source.collect(CollectRequest(0, 0, STATES)).rollouts
        return [tuple(rows) for rows in made._minibatches(rollouts)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(s, t)) for s, t in [(0, 0), (0, 1), (1, 0)]}) == 3
    for rows in order(0, 0):
        assert len(rows) == 8 and len({row // 8 for row in rows}) == 1
    assert sorted(order(0, 0)[:4]) == sorted(order(0, 0)[4:])


def test_old_log_probs_recomputed_replace_the_recorded():
    made = trainer(0, old_logp="recomputed", num_iterations=2)
    collect = made.source.collect

    def wrong(request):
        got = collect(request)
        return Collected(got.rollouts.but(old_logp_NT=got.rollouts.old_logp_NT - 5.0), got.starts)

    made.source.collect = wrong
    assert made.step(STATES)["ratio"] == pytest.approx(1.0, abs=0.2)
    recorded = trainer(0, old_logp="recorded", num_iterations=2)
    recorded_collect = recorded.source.collect
    recorded.source.collect = lambda request: Collected(
        (got := recorded_collect(request)).rollouts.but(old_logp_NT=got.rollouts.old_logp_NT - 5.0), got.starts
    )
    assert recorded.step(STATES)["ratio"] > 50


def test_train_with_steps_callbacks_and_its_own_states():
    seen = []
    made = trainer(0, states=[0, 1, 2], groups_per_step=2)
    reports = made.train(steps=10, callbacks=[seen.append, lambda report: report.step < 4])
    assert len(reports) == 4 == len(seen)
    assert made.source.state().values == {"cursor": 8}
    assert [r.step for r in reports] == [1, 2, 3, 4]
    assert [hasattr(r, "experience") for r in reports] == [False, False, False, True]  # memory stays flat
    with pytest.raises(ValueError, match="needs total_updates, steps, env_steps or stop_at; or states"):
        made.train()


def test_state_round_trip_is_exact():
    """Stop after 3 steps, load into a fresh trainer, go on: bit for bit the uninterrupted weights."""

    def run(made, steps):
        for step in steps:
            torch.manual_seed(step)
            made.step(STATES)

    whole = trainer(0, ref_sync_steps=2, groups_per_minibatch=2, num_iterations=2)
    run(whole, range(6))
    first = trainer(0, ref_sync_steps=2, groups_per_minibatch=2, num_iterations=2)
    run(first, range(3))
    second = trainer(5, ref_sync_steps=2, groups_per_minibatch=2, num_iterations=2)
    second.load_state(first.state())
    run(second, range(3, 6))
    assert same(frozen_bytes(whole), frozen_bytes(second))
    assert whole.state().values == second.state().values


def test_a_state_of_another_policy_is_refused():
    with pytest.raises(ValueError, match=r"saved policy parameter logits has shape \(7, 5\), not \(4, 5\)"):
        trainer(0).load_state(trainer(0, policy=Softmax(7)).state())


def test_the_report_has_the_last_pass():
    """Ratios and clips of the last pass: the first has ratio 1 everywhere."""
    report = trainer(0, num_iterations=3, learning_rate=0.5).step(STATES)
    assert isinstance(report.scores, Scores)
    assert not torch.equal(report.scores.logp_NT, report.experience.rollouts.old_logp_NT)
    assert report.scores.logp_NT.shape == report.experience.mask_NT.shape


# --- what can be wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "error", "message"),
    [
        (lambda s, a: torch.zeros(3), ValueError, r"returned shape \(3,\) for 32 \(state, action\) pairs"),
        (lambda s, a: None, ValueError, r"returned None; expected 32 numbers"),
        (
            lambda s, a: [float("nan")] + [0.0] * 31,
            ValueError,
            r"row 0 \(state 0, action \d\) is nan; rewards must be finite",
        ),
        (lambda s, a: [0.0] * 31 + [float("inf")], ValueError, r"row 31 \(state 3, action \d\) is inf"),
        (lambda s, a: [1e39] + [0.0] * 31, ValueError, r"row 0 \(state 0, action \d\) is 1e\+39; .* in float32 too"),
        (lambda s, a: ["good"] * 32, TypeError, r"must return numbers, got str"),
        (lambda s, a: [None] * 32, TypeError, r"must return numbers, got NoneType"),
        (lambda s, a: torch.zeros(32, 1), ValueError, r"returned shape \(32, 1\)"),
    ],
)
def test_bad_rewards_name_the_function_and_the_row(rewards, error, message):
    made = trainer(0, reward=Given(rewards))
    before = frozen_bytes(made)
    with pytest.raises(error, match=r"Given.compute_rewards.*" + message):
        made.step(STATES)
    assert same(before, frozen_bytes(made)) and made.steps_done == 0


@pytest.mark.parametrize("kind", [bool, int, float, torch.tensor])
def test_scalars_of_any_kind_are_rewards(kind):
    report = trainer(0, reward=Given(lambda s, a: [kind(x == y) for x, y in zip(s, a, strict=True)])).step(STATES)
    assert 0 <= report["reward"] <= 1


def test_a_reward_that_changes_its_inputs_changes_nothing():
    def greedy(states, actions):
        states.clear()
        rewards = [float(a) for a in actions]
        actions.clear()
        return rewards

    report = trainer(0, reward=Given(greedy)).step(STATES)
    assert len(report.experience.rollouts.inputs["states"]) == 32


def changed(**methods):
    policy = Softmax()
    for name, method in methods.items():
        setattr(policy, name, method)
    return policy


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (changed(get_log_probabilities=lambda s, a: torch.zeros(3)), ValueError, r"shape \(3,\) for 32"),
        (changed(get_log_probabilities=lambda s, a: [0.0] * 32), TypeError, r"must return a torch.Tensor, got list"),
        (changed(get_log_probabilities=lambda s, a: torch.zeros(32, 3)), TypeError, r"need policy.get_mask"),
        (
            changed(get_log_probabilities=lambda s, a: torch.full((32,), float("nan"))),
            ValueError,
            r"old_logp_NT: row 0",
        ),
        (changed(generate_actions=lambda s, n: [[0] * n]), ValueError, r"returned 1 groups for 4 states"),
        (
            changed(generate_actions=lambda s, n: [[0] * n] * 3 + [[0]]),
            ValueError,
            r"group 3 has 1 actions; expected group_size=8",
        ),
        (changed(get_entropy=lambda s, a: torch.zeros(5)), ValueError, r"get_entropy returned shape \(5,\)"),
    ],
)
def test_bad_policies_are_named(policy, error, message):
    with pytest.raises(error, match=message):
        trainer(0, policy=policy, entropy_coef=0.1).step(STATES)


def test_missing_methods_are_listed():
    class Half:
        def generate_actions(self, states, n):
            return []

    with pytest.raises(TypeError, match=r"policy Half has no get_log_probabilities\(\), get_parameters\(\), train\(\)"):
        GRPOTrainer(GRPOConfig(), Half(), None, Match())
    with pytest.raises(TypeError, match=r"reward model object has no compute_rewards\(\)"):
        GRPOTrainer(GRPOConfig(), Softmax(), None, object())
    with pytest.raises(TypeError, match="needs a reward_model"):
        GRPOTrainer(GRPOConfig(), Softmax())
    with pytest.raises(TypeError, match="needs a policy"):
        GRPOTrainer(GRPOConfig())


def test_no_states_is_said():
    with pytest.raises(ValueError, match="a step needs states"):
        trainer(0).step()
    with pytest.raises(ValueError, match="no states to sample from"):
        trainer(0).step([])


def test_a_policy_that_cannot_be_copied_needs_a_reference():
    policy = changed(lock=__import__("threading").Lock())
    with pytest.raises(TypeError, match="pass reference_policy, or set beta=0"):
        trainer(0, policy=policy)
    assert trainer(0, policy=policy, beta=0.0).step(STATES)["reward"] is not None


def test_entropy_from_the_policy_is_used():
    entropy = lambda s, a: -(policy.logits.softmax(-1) * policy.logits.log_softmax(-1)).sum(-1)[torch.tensor(s)]  # noqa: E731
    policy = Softmax()
    policy.get_entropy = entropy
    flat = Given(lambda states, actions: torch.zeros(len(states)))
    with torch.no_grad():
        policy.logits += torch.tensor([3.0, 0, 0, 0, 0])
    made = trainer(0, policy=policy, reward=flat, beta=0.0, entropy_coef=1.0, learning_rate=0.2)
    first = made.step(STATES)["entropy"]
    last = [made.step(STATES)["entropy"] for _ in range(40)][-1]
    assert first < 1.0 and last > 1.5  # ln 5 = 1.609


def test_two_dimensional_log_probs_with_a_mask():
    class Pairs(Softmax):
        """Two decisions a try, the second only sometimes."""

        def generate_actions(self, states, n, **kwargs):
            return [[(int(a), int(b)) for a, b in torch.randint(0, 5, (n, 2))] for _ in states]

        def get_log_probabilities(self, states, actions):
            logp = self.logits.log_softmax(-1)
            return torch.stack([logp[s, torch.tensor(a)] for s, a in zip(states, actions, strict=True)])

        def get_mask(self, states, actions):
            return torch.tensor([[1, int(b > 1)] for _, b in actions])

    reward = Given(lambda states, actions: [float(a == s) for s, (a, _) in zip(states, actions, strict=True)])
    report = trainer(0, policy=Pairs(), reward=reward).step(STATES)
    assert 1.0 < report["length"] < 2.0


def test_devices():
    with pytest.raises(ValueError, match="device='tpu' is not one of auto, cuda, mps, cpu"):
        trainer(0, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='cuda' is not available here; use device=cpu or auto"):
            trainer(0, device="cuda")
    assert trainer(0, device="cpu").step(STATES)["reward"] is not None


# --- what would go wrong in silence ---------------------------------------------------------------------------------


def test_an_optimizer_of_other_tensors_is_refused():
    other = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"holds 1 tensors that policy.get_parameters\(\) does not return"):
        trainer(0, optimizer=torch.optim.SGD([other], lr=0.1))
    copies = Softmax()
    copies.get_parameters = lambda: copies.state_dict()
    with pytest.raises(ValueError, match="not a copy or state_dict"):
        trainer(0, policy=copies, optimizer=torch.optim.SGD(copies.parameters(), lr=0.1))


def test_log_probs_without_a_gradient_are_said_once():
    policy = Softmax()
    score = policy.get_log_probabilities
    policy.get_log_probabilities = lambda states, actions: score(states, actions).detach()
    made = trainer(0, policy=policy, beta=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.step(STATES)
        made.step(STATES)
    assert [str(w.message) for w in caught] == [
        "the log-probs do not depend on the policy's parameters: nothing is updated"
    ]


def test_the_policy_is_not_its_own_reference():
    policy = Softmax()
    with pytest.raises(ValueError, match=r"pass copy.deepcopy\(policy\)"):
        trainer(0, policy=policy, reference_policy=policy)


def test_a_reference_without_a_kl_is_said():
    with pytest.warns(UserWarning, match="reference_policy is not used"):
        trainer(0, beta=0.0, reference_policy=Softmax())


@pytest.mark.parametrize("poison", [float("inf"), float("-inf")])
def test_one_infinite_log_prob_skips_the_update(poison):
    """The ratio's limit would hide it."""
    made = trainer(0, num_iterations=2)
    log_probs = made.policy.log_probs

    def broken(states, actions):
        logp, mask = log_probs(states, actions)
        if torch.is_grad_enabled():
            logp = logp + torch.zeros_like(logp).index_fill(0, torch.tensor([3]), poison)
        return logp, mask

    made.policy.log_probs = broken
    before = made.policy.parameters()["logits"].detach().clone()
    assert made.step(STATES)["updates_skipped"] == 2.0
    assert torch.equal(made.policy.parameters()["logits"], before)


def test_train_takes_only_the_batches_it_uses():
    batches = iter([STATES] * 5)
    trainer(0).train(batches, steps=2)
    assert len(list(batches)) == 3


def test_a_state_of_another_optimizer_is_refused_before_anything_is_changed():
    policy = Softmax()
    other = trainer(1, policy=policy, optimizer=torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9))
    other.step(STATES)
    made = trainer(0)
    before = frozen_bytes(made)
    with pytest.raises(ValueError, match="was saved with SGD, this trainer has AdamW"):
        made.load_state(other.state())
    assert same(before, frozen_bytes(made))


def test_settings_are_a_config():
    with pytest.raises(TypeError, match="config must be a GRPOConfig, got dict"):
        GRPOTrainer({"group_size": 4}, Softmax(), None, Match())


def test_parameters_are_named():
    with pytest.raises(TypeError, match="must return a dict of names to tensors, got list"):
        trainer(0, policy=changed(get_parameters=lambda: [torch.zeros(1)]))


def test_a_generator_of_rewards_is_a_list_of_them():
    report = trainer(0, reward=Given(lambda s, a: (float(x == y) for x, y in zip(s, a, strict=True)))).step(STATES)
    assert 0 <= report["reward"] <= 1
