// Several runs, one over the other: curves with the spread over seeds, and what was set differently.

import { api } from "./api.js";
import { choices, places, told as toldAt } from "./axis.js";
import { Chart, smooth } from "./chart.js";
import { Metric, useDocs } from "./metrics.js";
import { href, setQuery } from "./route.js";
import { State } from "./runs.js";
import { SERIES } from "./scale.js";
import { Choice, Empty, html, Loaded, number, Toggle, useLoaded, useMemo, useState } from "./ui.js";

const SMOOTHINGS = [
  ["0", "none"],
  ["0.6", "a little"],
  ["0.9", "much"],
];
const FIRST = [
  "reward",
  "return",
  "eval/accuracy",
  "eval/return",
  "regret_total",
  "frac_reward_zero_std",
  "kl",
  "entropy",
  "completions/mean_length",
  "episode_length",
];

export function CompareView({ route }) {
  const ids = (route.query.runs ?? "").split(",").filter(Boolean);
  const state = useLoaded(() => api(`/api/compare?runs=${ids.join(",")}`), [ids.join()]);
  if (ids.length < 2)
    return html`<section class="page"><${Empty}>Choose two or more runs to compare. <a href="#/">All runs</a><//>
          </section>`;
  return html`<section class="page"><${Loaded} state=${state}>${(data) => html`<${Compared} data=${data}
      route=${route} />`}<//></section>`;
}

const told = (value) =>
  value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);

function Compared({ data, route }) {
  const docs = useDocs();
  const spread = route.query.spread !== "0";
  const ranked = [...data.metrics].sort((a, b) => place(a) - place(b));
  const shown = (route.query.metrics ?? "").split(",").filter((name) => data.metrics.includes(name));
  const names = shown.length ? shown : ranked.slice(0, 4);
  const weight = Number(route.query.smooth ?? 0);
  const flip = (name) =>
    setQuery({
      metrics: (names.includes(name) ? names.filter((other) => other !== name) : [...names, name]).join(","),
    });
  const tables = useLoaded(
    async () =>
      Object.fromEntries(
        await Promise.all(data.runs.map(async (run) => [run.run, await api(`/api/runs/${run.run}/metrics`)])),
      ),
    [data],
  );
  const axes = tables.data ? choices(Object.values(tables.data)) : [];
  const axis = axes.some(([key]) => key === route.query.x) ? route.query.x : "step";
  const about = Object.assign({}, ...Object.values(tables.data ?? {}).map((table) => table.about));
  const byId = new Map(data.runs.map((run) => [run.run, run]));
  const sets = (spread ? data.seeds : data.runs.map((run) => [run.run]))
    .map((members) => members.filter((id) => byId.has(id)))
    .filter((members) => members.length);
  return html`
    <div class="toolbar"><h1>${data.runs.length} runs</h1>
      <${Choice} label="smoothing" value=${String(weight)} options=${SMOOTHINGS}
        set=${(value) => setQuery({ smooth: value === "0" ? null : value })} />
      ${
        axes.length > 1 &&
        html`<${Choice} label="over" id="axis" value=${axis} options=${axes}
        set=${(value) => setQuery({ x: value === "step" ? null : value })} />`
      }
      <${Toggle} on=${spread} set=${(on) => setQuery({ spread: on ? null : "0" })}
        title="runs that differ only by seed become one line with their spread">spread over seeds<//></div>
    <ul class="compared">${sets.map(
      (members, i) => html`<li><span class="swatch" style=${{ background: SERIES[i % SERIES.length] }}></span>
      ${members.map(
        (id) => html`<a href=${href(["run", id])}>${byId.get(id).name}</a> <${State}
        run=${byId.get(id)} /> `,
      )}${
        members.length > 1 &&
        html`<span class="muted small">
        ${members.length} seeds: mean, lowest to highest</span>`
      }</li>`,
    )}</ul>
    <details class="chooser"><summary>metrics (${names.length} of ${data.metrics.length})</summary><div
      class="filters">${ranked.map(
        (name) => html`<span class="check"><input type="checkbox" aria-label=${`show ${name}`}
      checked=${names.includes(name)} onChange=${() => flip(name)} /> <${Metric} name=${name} about=${about}
        docs=${docs} /></span>`,
      )}</div></details>
    <${Loaded} state=${tables}>${(found) =>
      html`<div class="panels">${names.map(
        (name) => html`<${Overlay}
      key=${name} ...${{ name, sets, found, weight, axis, about, docs, byId }} />`,
      )}</div>`}<//>
    <h2>Settings that differ</h2>
    ${
      data.differences.length
        ? html`<div class="wide"><table class="plain"><thead><tr><th>setting</th>
              ${data.runs.map((run) => html`<th>${run.name}</th>`)}</tr></thead>
      <tbody>${data.differences.map(
        ({ key, values }) => html`<tr><td><code>${key}</code></td>
        ${values.map((value) => html`<td>${told(value)}</td>`)}</tr>`,
      )}</tbody></table></div>`
        : html`<p class="muted">None: the same settings throughout.</p>`
    }`;
}

const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);

/** One metric of every set of runs over the union of their steps, or of their places on another axis. */
function Overlay({ name, sets, found, weight, axis, about, docs, byId }) {
  const [index, setIndex] = useState(null);
  const { steps, series } = useMemo(
    () => overlaid(name, sets, found, weight, byId, axis),
    [name, sets.map((s) => s.join()).join("|"), found, weight, axis],
  );
  return html`<figure class="panel"><figcaption><strong><${Metric} name=${name} about=${about} docs=${docs} />
      </strong>
    ${series
      .filter((one) => !one.faint)
      .map(
        (one) => html`<span class="key"><span class="swatch"
      style=${{ background: one.color }}></span><span class="value">
      ${number(index === null ? one.last : one.values[index])}</span></span>`,
      )}
    <span class="muted small step-at">${
      index === null || index >= steps.length ? "" : axis === "step" ? `step ${steps[index]}` : toldAt(steps[index], axis)
    }</span></figcaption>
    <${Chart} x=${steps} axis=${axis} series=${series} sync="compare" title=${name} readout=${setIndex} /></figure>`;
}

/** Values at `own` steps as those at `steps`, straight between two of them; null before the first and after the last. */
export function along(steps, own, values) {
  const places = [...own.keys()].filter((t) => values[t] !== null && values[t] !== undefined);
  let next = 0; // the first of the places that is not before the step
  return steps.map((step) => {
    while (next < places.length && own[places[next]] < step) next++;
    if (next === places.length) return null;
    const after = places[next];
    if (own[after] === step) return values[after];
    if (next === 0) return null;
    const before = places[next - 1];
    const share = (step - own[before]) / (own[after] - own[before]);
    return values[before] + share * (values[after] - values[before]);
  });
}

/** Places of a run's rows, without rows that the axis does not know or that stand where the one before does. */
function rowsOf(table, axis, values) {
  const xs = places(table, axis);
  const kept = [...xs.keys()].filter((t) => xs[t] !== null && (t === 0 || xs[t] !== xs[t - 1]));
  return [kept.map((t) => xs[t]), kept.map((t) => values[t])];
}

/** The lines of all sets over common steps; `measured`: the places where a run told a value, not one between two. */
export function overlaid(name, sets, found, weight, byId, axis) {
  const tables = sets
    .flat()
    .map((id) => found[id])
    .filter((table) => table?.columns[name]);
  const steps = [...new Set(tables.flatMap((table) => rowsOf(table, axis, [])[0]))].sort((a, b) => a - b);
  const series = [];
  sets.forEach((members, i) => {
    const rows = members
      .map((id) => found[id])
      .filter((table) => table?.columns[name])
      .map((table) => rowsOf(table, axis, smooth(table.columns[name], weight)));
    const lines = rows.map(([own, values]) => along(steps, own, values));
    if (!lines.length) return;
    const told = new Set(rows.flatMap(([own, values]) => own.filter((_, t) => (values[t] ?? null) !== null)));
    const at = steps.map((_, t) => lines.map((line) => line[t]).filter((value) => value !== null));
    // Seeds come to another place at other times: their mean is that of all of them, or it would jump.
    const enough = axis === "step" ? 1 : lines.length;
    const values = at.map((all) => (all.length >= enough ? all.reduce((a, b) => a + b, 0) / all.length : null));
    const many = lines.length > 1;
    const known = values.filter((value) => value !== null);
    series.push({
      name: byId.get(members[0]).name,
      color: SERIES[i % SERIES.length],
      values,
      measured: [...steps.keys()].filter((t) => told.has(steps[t]) && values[t] !== null),
      last: known[known.length - 1] ?? null,
      low: many ? at.map((all) => (all.length >= enough ? Math.min(...all) : null)) : null,
      high: many ? at.map((all) => (all.length >= enough ? Math.max(...all) : null)) : null,
    });
  });
  return { steps, series };
}
