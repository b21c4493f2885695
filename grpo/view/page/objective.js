// One decision's part of the objective, in words and with its own numbers. The values are the server's; here they are
// put into the formula that the run was trained with.

import { number, signed } from "./ui.js";

const inBrackets = (x) => (x < 0 ? `(${signed(x)})` : number(x));

/** Whether several decisions are one to the objective: then log π is that of all of them. */
const folds = ({ ratio }) => ratio === "chunk" || ratio === "trajectory";

/** The formula with r, A and log π replaced by this decision's numbers, as far as it is about this decision. */
function filled(objective, { ratio, advantage, logp }) {
  return objective.formula
    .replace(/log π(?!_)/g, (name) => (folds(objective) ? name : inBrackets(logp)))
    .replace(/(?<![\p{L}_])r(?![\p{L}_])/gu, () => number(ratio))
    .replace(/(?<![\p{L}_])A(?![\p{L}_])/gu, () => inBrackets(advantage));
}

const RATIOS = {
  token: "π / π_old",
  chunk: "product of π / π_old over the chunk",
  trajectory: "product of π / π_old over the whole try",
  sequence: "exp of the mean of log π − log π_old over the try",
  sequence_token: "exp of the mean of log π − log π_old over the try",
};

const otherOf = (objective) => (objective.kl_to === "old" ? "π_old" : "π_ref");

/** Between which policies the KL is, as far as the folder says. */
export function klName(objective) {
  const other = otherOf(objective);
  if (objective.kl_in === "reward") return "KL(π_old‖π_ref)"; // of what was sampled, before any update
  if (objective.kl_direction) return objective.kl_direction === "other_current" ? `KL(${other}‖π)` : `KL(π‖${other})`;
  return objective.kl_to === "old" ? "KL to the policy that sampled" : "KL to the reference";
}

/** Its formula, the policies by name. */
function klFormula(objective) {
  const other = otherOf(objective);
  const early = objective.kl_in === "reward";
  const turned = !early && objective.kl_direction === "other_current";
  const [first, second] = early ? ["π_old", "π_ref"] : turned ? [other, "π"] : ["π", other];
  if (objective.kl_estimator === "exact") return `Σ ${first}·(log ${first} − log ${second})`;
  if (turned && objective.kl_to !== "old") return `u·log u − (u − 1), u = ${other} / π`;
  const { kl_formula: formula, kl_estimator: estimator } = objective;
  return formula ? `${formula}, p = log ${first}, q = log ${second}` : (estimator ?? "");
}

/** A product with its numbers, factors of 1 that the run does not have left out: "2 × 0.5 = +1". */
function product(factors) {
  const given = factors.filter((factor) => factor !== null);
  return `${given.map(inBrackets).join(" × ")} = ${signed(given.reduce((a, b) => a * b, 1))}`;
}

/** What becomes of the term on its way into the sum: the gate, and the factors of this decision. */
function inTheLoss(of, objective) {
  const [term, penalty, mismatch, weight] = [of("term"), of("penalty"), of("mismatch"), of("weight")];
  if (term === null || (mismatch === null && weight === null && !penalty)) return [];
  const note = folds(objective) ? "; once for all decisions that are one here" : "";
  const open = of("gate") === 0 ? 0 : null;
  const names = [
    penalty ? "(minimised + penalty)" : "minimised",
    open === 0 && "gate",
    mismatch !== null && "mismatch",
    weight !== null && "weight",
  ];
  const formula = names.filter(Boolean).join(" × ") + note;
  return [["in the loss", formula, product([term + (penalty ?? 0), open, mismatch, weight])]];
}

/** The KL of a decision, and its part of the loss. */
function klLine(of, objective) {
  const value = of("kl");
  const { beta, kl_in: where, kl_importance: weighed } = objective;
  const factors = ["β", weighed && "r", "KL", of("weight") !== null && "weight"].filter(Boolean).join("·");
  // Where it goes may not be known: then there is no sum to show.
  const share =
    !beta || !where
      ? ""
      : where === "reward"
        ? `; ${number(beta)} × KL is taken off the reward, the loss has none`
        : ` → ${factors} = ${product([beta, weighed ? of("ratio") : null, value, of("weight")])}`;
  return [klName(objective), klFormula(objective), `${signed(value)}${share}`];
}

/** Decision t of a row as [[what, formula, with numbers], …]. */
export function explain(row, t, objective) {
  const of = (name) => row[name]?.[t] ?? null;
  if (!row.mask[t]) return [["not a decision", "prompt, tool output or padding: it has no term in the objective", ""]];
  const [ratio, advantage, logp] = [of("ratio"), of("advantage"), of("logp")];
  const lines = [];
  if (ratio !== null) {
    lines.push([
      "ratio r",
      RATIOS[objective.ratio] ?? objective.ratio ?? RATIOS.token,
      objective.ratio === "token"
        ? `exp(${signed(logp)} − ${inBrackets(of("old_logp"))}) = ${number(ratio)}`
        : number(ratio),
    ]);
  }
  if (advantage !== null) {
    lines.push(["advantage A", objective.advantage_formula ?? "as the run computed it", signed(advantage)]);
  }
  if (objective.formula && ratio !== null) {
    const value = of("term");
    lines.push([
      "minimised",
      objective.formula,
      `${filled(objective, { ratio, advantage, logp })}${value === null ? "" : ` = ${signed(value)}`}`,
    ]);
  }
  const side = of("clip");
  if (side) {
    const bound =
      side < 0 ? `r < ${number(objective.ratio_low)} and A < 0` : `r > ${number(objective.ratio_high)} and A > 0`;
    lines.push([side < 0 ? "clipped low" : "clipped high", bound, objective.when_held ?? "held there"]);
  }
  if (of("gate") === 0) lines.push(["masked", "a gate is closed: truncated, not selected or off-policy", "term × 0"]);
  lines.push(...inTheLoss(of, objective));
  if (of("kl") !== null) lines.push(klLine(of, objective));
  if (of("entropy") !== null) {
    const { entropy_coef: bonus } = objective;
    const share = bonus ? `; the loss has ${number(bonus)} × it taken off` : "";
    lines.push(["entropy", `of the choice at this place, after the update${share}`, number(of("entropy"))]);
  }
  if (of("sampler") !== null)
    lines.push(["sampler difference", "log π_old − log of the engine that sampled", signed(of("sampler"))]);
  return lines;
}
