// Colours that mean something. Blue is more or better, orange less or worse: told apart by every kind of colour vision.

const BLUE = [0, 114, 178];
const ORANGE = [213, 94, 0];
const VIOLET = [117, 80, 200];

/** Lines of a chart, after Okabe and Ito; bright enough on both grounds. */
export const SERIES = ["#1b83c9", "#dd6410", "#0b9f78", "#c76ca0", "#4aaee6", "#d99500", "#8a6fd1", "#868e96"];

const rgba = ([r, g, b], alpha) => `rgba(${r},${g},${b},${alpha.toFixed(3)})`;
const bounded = (x) => Math.min(1, Math.max(0, x));

/** A ground for text: colour by sign, strength by size against `limit`. */
export function diverging(value, limit) {
  if (!Number.isFinite(value) || !limit) return "transparent";
  return rgba(value >= 0 ? BLUE : ORANGE, 0.72 * bounded(Math.abs(value) / limit));
}

/** A ground for text: strength by size. */
export function sequential(value, limit) {
  if (!Number.isFinite(value) || !limit) return "transparent";
  return rgba(VIOLET, 0.72 * bounded(value / limit));
}

/** A solid colour between the worst (orange) and the best (blue) of a range, grey in the middle or without a range. */
export function between(value, low, high) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "transparent";
  const place = high > low ? (2 * (value - low)) / (high - low) - 1 : 0;
  const end = place >= 0 ? BLUE : ORANGE;
  const share = bounded(Math.abs(place));
  return `rgb(${end.map((x) => Math.round(190 + (x - 190) * share)).join(",")})`;
}
