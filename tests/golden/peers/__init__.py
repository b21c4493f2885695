"""One adapter a peer: from a vector's options and inputs to calls of our core."""

from tests.golden.peers import rlinf, rows, seed001, teachers, trl, tunix, verl

ADAPTERS = {
    "trl_losses": trl.losses,
    "trl_gmpo": trl.gmpo,
    "trl_advantages": trl.group_advantages,
    "trl_rloo": trl.rloo,
    "verl_losses": verl.losses,
    "verl_kl": verl.kl_penalty,
    "verl_aggregation": verl.aggregation,
    "verl_advantages": verl.estimators,
    "verl_rollout_correction": verl.rollout_correction,
    "rlinf": rlinf.run,
    "seed001": seed001.run,
    "tunix": tunix.run,
    "areal": rows.areal,
    "roll": rows.roll,
    "roll_gigpo": rows.gigpo,
    "discover": rows.discover,
    "rae": rows.rae,
    "a_star_po": rows.a_star_po,
    "trl_teacher": teachers.trl,
    "verl_teacher": teachers.verl,
    "prime_rl_teacher": teachers.prime_rl,
}

DEVIATIONS: dict[str, dict[str, str]] = {}
"""file → id without its first two letters → the peer's defect we do not reproduce; see DEVIATIONS.md."""
