// What a decision's ground colour can tell: one entry a choice of the selector, with the scale that fits it.

import { klName } from "./objective.js";
import { diverging, sequential } from "./scale.js";
import { number, signed } from "./ui.js";

const of = (name) => (row, t) => (row[name] ? row[name][t] : null);

/** key → {label, value(row, t), paint(value, limit), least: smallest limit, told(value), ends: what the colours mean} */
export const HEATS = {
  term: {
    label: "advantage × ratio term",
    value: (row, t) => (row.term ? negative(row.term[t]) : null),
    paint: diverging,
    least: 1e-6,
    told: signed,
    ends: ["pushed down", "pushed up"],
  },
  advantage: {
    label: "advantage",
    value: of("advantage"),
    paint: diverging,
    least: 1e-6,
    told: signed,
    ends: ["worse than the group", "better"],
  },
  ratio: {
    label: "ratio around 1",
    value: (row, t) => (row.ratio ? row.ratio[t] : null),
    paint: (value, limit) => diverging(Math.log(value), limit),
    least: 0.02,
    told: number,
    size: (value) => Math.abs(Math.log(value)),
    ends: ["less likely now", "more likely"],
  },
  logp: {
    label: "log-prob now",
    value: of("logp"),
    paint: (value, limit) => sequential(-value, limit),
    least: 0.05,
    told: number,
    ends: ["certain", "surprising"],
  },
  old_logp: {
    label: "log-prob when sampled",
    value: of("old_logp"),
    paint: (value, limit) => sequential(-value, limit),
    least: 0.05,
    told: number,
    ends: ["certain", "surprising"],
  },
  entropy: {
    label: "entropy",
    value: of("entropy"),
    paint: sequential,
    least: 0.05,
    told: number,
    ends: ["one choice", "many choices"],
  },
  kl: {
    label: "KL",
    value: of("kl"),
    paint: diverging,
    least: 1e-3,
    told: signed,
    ends: ["below 0", "far from it"],
  },
  sampler: {
    label: "sampler difference",
    value: of("sampler"),
    paint: diverging,
    least: 1e-3,
    told: signed,
    ends: ["sampler found it likelier", "trainer does"],
  },
};

/** A choice by its name; the KL also by the policies that it is between. */
export const labelOf = (key, objective) => (key === "kl" ? klName(objective) : HEATS[key].label);

const negative = (value) => (value === null ? null : -value);

/** The heats that these rows have numbers for. */
export const available = (rows) =>
  Object.keys(HEATS).filter((key) =>
    rows.some((row) => row.mask.some((made, t) => made && HEATS[key].value(row, t) !== null)),
  );

/** The size at which a colour is full: all but the largest fiftieth of the decisions are within it. */
export function limitOf(rows, key) {
  const heat = HEATS[key];
  const size = heat.size ?? Math.abs;
  const sizes = [];
  for (const row of rows)
    row.mask.forEach((made, t) => {
      if (made && heat.value(row, t) !== null) sizes.push(size(heat.value(row, t)));
    });
  sizes.sort((a, b) => a - b);
  return Math.max(heat.least, sizes[Math.floor((sizes.length - 1) * 0.98)] ?? 0);
}
