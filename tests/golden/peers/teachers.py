"""Teachers: TRL's GKD, SDPO, MiniLLM and IW-OPD, verl's distillation losses, prime-rl's ref_kl."""

from __future__ import annotations

from typing import Any

from grpo.core import kl, teachers
from grpo.core.arrays import Array, log_sum_exp, masked, namespace
from grpo.core.ratios import log_ratio, token_ratio
from grpo.core.surrogates import PolicyGradient, dro, inside_total_variation, unclipped
from grpo.experience import Experience
from grpo.objective import objective
from grpo.recipes import Recipe, recipe
from grpo.rollouts import Rollouts, Scores, Taught
from tests.golden.peers.case import Case


def trl(vector, backend):
    o, x = vector.options, _inputs(vector, backend)
    if o["loss"] == "minillm":
        return Case({"advantages": teachers.advantage(x["logp"], x["teacher_logp"], x["mask"] != 0, o["gamma"])})
    temperature = o.get("temperature", 1.0)
    logp_NTV = _log_softmax(x["logits"] / temperature)
    count = o.get("topk") or logp_NTV.shape[-1]
    choice_NTK = _largest(logp_NTV, count)  # the student's, as TRL has it
    token_NT = x["ids"] if "ids" in x else choice_NTK[:, :, 0]
    if "teacher_logits" in x:
        teacher_NTV = _log_softmax(x["teacher_logits"] / temperature)
        said = Taught(_at(teacher_NTV, token_NT), choice_NTK, _take(teacher_NTV, choice_NTK))
    else:
        said = Taught(x["teacher_logp"])
    sampled_NT = _at(logp_NTV, token_NT)
    old_NT = next((x[name] for name in ("old_logp", "rollout_logp") if x.get(name) is not None), sampled_NT)
    how = _trl_recipe(o)
    batch = _taught(x["mask"] != 0, old_NT, how, said)

    def loss(logits: Any) -> Any:
        mine_NTV = _log_softmax(logits / temperature)
        scores = Scores(_at(mine_NTV, token_NT), choice_logp_NTK=_take(mine_NTV, choice_NTK))
        return objective(scores, batch, how).loss

    value, grads = backend.gradients(loss, [x["logits"]])
    return Case({"loss": value, **({"grad_logits": grads[0]} if grads else {})})


def _trl_recipe(o: dict[str, Any]) -> Recipe:
    if o["loss"] == "iw_opd":
        return recipe("iw_opd", teacher_drift=o["gamma"], surrogate=PolicyGradient())
    mix = o["beta"] if o["loss"] == "gkd" else o["alpha"]
    kind = {0.0: {"teacher_kl": "forward"}, 1.0: {"teacher_kl": "reverse"}}.get(
        mix, {"teacher_kl": "js", "teacher_mix": mix}
    )
    if o["loss"] == "gkd":
        return recipe("gkd", **kind)
    over = "sampled" if o["mode"] == "sampled" else "top_k"
    return recipe("sdpo", teacher_over=over, teacher_clip=o["is_clip"], **kind)


def verl(vector, backend):
    o, x = vector.options, _inputs(vector, backend)
    if o["loss"] == "forward_kl_topk":
        leaf, name = x["logits"], "grad_logits"

        def each(logits: Any) -> Any:
            mine_NTK = _take(_log_softmax(logits), x["teacher_ids"])
            return teachers.divergence(mine_NTK, x["teacher_logp"], "forward")  # without a tail
    else:
        leaf, name, plain = x["logp"], "grad_logp", o["loss"].removesuffix("+")

        def each(logp: Any) -> Any:
            cap = 10.0 if plain == "k3" else None  # theirs is always cut there
            return kl.estimate(logp, x["teacher_logp"], plain, "k2" if o["loss"].endswith("+") else None, cap)

    _, grads = backend.gradients(lambda leaf: each(leaf).sum(), [leaf])
    return Case({"losses": each(leaf), **({name: grads[0]} if grads else {})})


def prime_rl(vector, backend):
    x = {
        name: value if value is None or value.ndim != 1 else value[None]
        for name, value in _inputs(vector, backend).items()
    }
    mask_NT = x["mask"] != 0
    # quirk: its gain is of the current log-prob, ours of the one that was recorded
    gain_NT = teachers.advantage(x["logp"], x["teacher_logp"], mask_NT)
    # quirk: its trust region is for falling probabilities whatever the gain; ours asks by its sign
    keep_NT = inside_total_variation(x["logp"], x["old_logp"], gain_NT * 0 - 1, mask_NT, 0.2, 0.2)

    def loss(logp_NT: Any) -> Any:
        d_NT = log_ratio(logp_NT, x["old_logp"], mask_NT)
        each_NT = masked(unclipped(token_ratio(d_NT), gain_NT), keep_NT) + dro(d_NT, gain_NT * 0, logp_NT, 2e-3)
        each_NT = each_NT if x["weights"] is None else each_NT * x["weights"]
        return masked(each_NT, mask_NT).sum()

    value, grads = backend.gradients(loss, [x["logp"]])
    return Case({"loss": value, **({"grad_logp": grads[0][0]} if grads else {})})


def _taught(mask_NT: Array, old_NT: Array, how: Recipe, said: Taught) -> Experience:
    row_N = mask_NT.sum(1)
    rollouts = Rollouts(group_N=row_N * 0, mask_NT=mask_NT, old_logp_NT=old_NT, reward_N=old_NT[:, 0] * 0)
    return Experience.build(rollouts, how).taught(said, how)


def _inputs(vector, backend) -> dict[str, Any]:
    whole = ("ids", "teacher_ids")
    given = {name: value for name, value in vector.inputs.items() if value is not None}
    found = {name: backend.ints(value) if name in whole else backend.array(value) for name, value in given.items()}
    return found | {name: None for name, value in vector.inputs.items() if value is None}


def _log_softmax(logits: Array) -> Array:
    return logits - log_sum_exp(logits)


def _largest(x: Array, count: int) -> Array:
    return namespace(x).argsort(-x, axis=-1)[..., :count]


def _take(x_NTV: Array, index_NTK: Array) -> Array:
    xp = namespace(x_NTV)
    return (
        xp.take_along_dim(x_NTV, index_NTK, -1) if xp.__name__ == "torch" else xp.take_along_axis(x_NTV, index_NTK, -1)
    )


def _at(x_NTV: Array, token_NT: Array) -> Array:
    return _take(x_NTV, token_NT[:, :, None])[:, :, 0]
