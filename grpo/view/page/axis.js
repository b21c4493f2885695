// What curves are drawn over: steps, steps of the environment, tokens, or the time that training took.

import { duration, number } from "./ui.js";

const AXES = { step: "step", env_steps: "environment steps", num_tokens: "tokens", time: "time" };

/** The values of a table's rows on an axis; null where one is not known. */
export const places = (table, key) =>
  key === "step" ? table.step : key === "time" ? (table.clock ?? []) : (table.columns[key] ?? []);

/** [[key, name], …] of the axes that every one of these tables knows. */
export const choices = (tables) =>
  Object.entries(AXES).filter(([key]) =>
    tables.every((table) => places(table, key).filter((x) => x !== null && x !== undefined).length > 1),
  );

/** Where steps are on an axis: straight between the rows that say so; null before the first and after the last. */
export function scaleOf(table, key) {
  if (key === "step") return (step) => step;
  const known = [];
  places(table, key).forEach((x, i) => {
    // Each later than the one before: a line never turns back.
    if (x !== null && (!known.length || x > known[known.length - 1][1])) known.push([table.step[i], x]);
  });
  return (step) => {
    let [low, high] = [0, known.length - 1];
    if (high < 0 || step < known[0][0] || step > known[high][0]) return null;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (known[middle][0] < step) low = middle + 1;
      else high = middle;
    }
    const [after, x] = known[low];
    if (after === step || low === 0) return x;
    const [before, from] = known[low - 1];
    return from + ((step - before) / (after - before)) * (x - from);
  };
}

/** A table whose rows are those that the axis knows, with their places on it as `x`. */
export function laid(table, key) {
  if (key === "step") return { ...table, x: table.step, key };
  const place = scaleOf(table, key);
  const xs = table.step.map(place);
  const rows = xs.flatMap((x, i) => (x === null || (i && x === xs[i - 1]) ? [] : [i]));
  const cut = (columns) =>
    columns &&
    Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, rows.map((i) => values[i] ?? null)]));
  const { step, columns, low, high } = table;
  return { ...table, x: rows.map((i) => xs[i]), step: rows.map((i) => step[i]), columns: cut(columns), low: cut(low), high: cut(high), key };
}

/** A place on an axis in words: 12 min 5 s, 2,990. */
export const told = (x, key) => (key === "time" ? duration(x) : number(x));

/** The same for a tick, in few characters. */
export function tick(x, key) {
  if (key === "step") return number(x);
  if (key !== "time") return x >= 1e9 ? `${x / 1e9}G` : x >= 1e6 ? `${x / 1e6}M` : x >= 1e4 ? `${x / 1e3}k` : number(x);
  if (x < 120) return `${number(x, 3)} s`;
  return x < 7200 ? `${number(x / 60, 3)} min` : `${number(x / 3600, 3)} h`;
}

const WHOLE = [1, 2, 5]
  .flatMap((one) => Array.from({ length: 12 }, (_, power) => one * 10 ** power))
  .sort((a, b) => a - b); // steps are whole
const SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800];
const HOURS = [1, 2, 3, 6, 12, 24, 48, 96, 168, 336].map((hours) => 3600 * hours);

/** Distances that ticks may have. */
export const distances = (key) => (key === "time" ? [...SECONDS, ...HOURS] : WHOLE);
