// What the page can do, on one card: `?` opens and closes it.

import { html } from "./ui.js";

const KEYS = [
  ["?", "this card"],
  ["j k", "the group below, above"],
  ["Enter", "open it"],
  ["← →", "the step or the group before, after"],
  ["/", "search"],
  ["u", "up: from a group to its step, from a step to the curves"],
  ["space", "play or pause episodes"],
  ["Esc", "close a token, leave a search"],
];
const MOUSE = [
  ["click a curve", "the groups of the nearest step that kept some"],
  ["drag, double click", "zoom into a curve, all of it again"],
  ["point at a token", "its part of the objective, with its own numbers; a click keeps it"],
  ["click a badge", "only those groups; again: all but those"],
  ["a metric's name", "what it means, and what to do when it is not healthy"],
];
const COLOURS = [
  ["blue", "more likely, better than the group, a higher reward"],
  ["orange", "less likely, worse than the group, a lower reward"],
  ["underlined", "clipped high; wavy: clipped low; struck through: masked"],
];

const Table = ({ title, rows, keys }) => html`<h2>${title}</h2><table class="plain"><tbody>
  ${rows.map(
    ([what, does]) => html`<tr><td>${keys ? what.split(" ").map((one) => html`<kbd>${one}</kbd> `) : html`<strong>${what}</strong>`}</td>
    <td>${does}</td></tr>`,
  )}</tbody></table>`;

export function Help({ close }) {
  return html`<div class="help-ground" onClick=${(event) => event.target === event.currentTarget && close()}>
    <div class="help" role="dialog" aria-label="help" aria-modal="true">
      <button type="button" class="quiet" aria-label="close" onClick=${close}>✕</button>
      <h1>What you can do here</h1>
      <div class="help-parts"><div>${Table({ title: "Keys", rows: KEYS, keys: true })}</div>
        <div>${Table({ title: "Mouse", rows: MOUSE })}${Table({ title: "Colours", rows: COLOURS })}</div></div>
      <p class="muted small">Everything in view is in the address: copy it, reload it, go back.${" "}<a href="#/docs" onClick=${close}>What each metric means</a></p>
    </div></div>`;
}
