// A run's curves. A click on a point leads to the groups of that step.

import { api, media } from "./api.js";
import { choices, laid, scaleOf, told } from "./axis.js";
import { Chart, smooth } from "./chart.js";
import { download } from "./csv.js";
import { commonHead, GroupHead, GroupLine, range } from "./groups.js";
import { Metric, useDocs } from "./metrics.js";
import { framed, go, href, setQuery } from "./route.js";
import { SERIES } from "./scale.js";
import { Choice, Empty, html, Loaded, number, Toggle, useLoaded, useMemo, useRef, useSize, useState } from "./ui.js";

const SMOOTHINGS = [
  ["0", "none"],
  ["0.6", "a little"],
  ["0.9", "much"],
  ["0.97", "very much"],
];

export function CurvesView({ route, run, metrics, newest }) {
  const docs = useDocs();
  const steps = run.sample_steps?.list ?? [];
  const lead = steps.length ? (step) => go(href(["run", run.run, "step", step], { from: "curves" })) : null;
  const weight = Number(route.query.smooth ?? 0);
  const log = route.query.log === "1";
  const axes = metrics.data ? choices([metrics.data]) : [];
  const axis = axes.some(([key]) => key === route.query.x) ? route.query.x : "step";
  const data = useMemo(() => metrics.data && laid(metrics.data, axis), [metrics.data, axis]);
  const place = useMemo(() => metrics.data && scaleOf(metrics.data, axis), [metrics.data, axis]);
  const at = route.query.at === undefined ? null : Number(route.query.at);
  // What broke before its first step has nothing to be looked at but why, which the header says.
  if (metrics.data && !metrics.data.step.length && run.state !== "running") return null;
  return html`<section class="page">
    ${steps.length > 0 && html`<${Newest} run=${run} step=${Math.max(newest ?? -1, steps[steps.length - 1])} />`}
    <div class="toolbar"><${Choice} label="smoothing" value=${String(weight)} options=${SMOOTHINGS}
      set=${(value) => setQuery({ smooth: value === "0" ? null : value })} />
      ${
        axes.length > 1 &&
        html`<${Choice} label="over" id="axis" value=${axis} options=${axes}
        set=${(value) => setQuery({ x: value === "step" ? null : value })} />`
      }
      <${Toggle} on=${log} set=${(on) => setQuery({ log: on ? "1" : null })}>log scale<//>
      ${
        !framed &&
        metrics.data?.step.length > 0 &&
        html`<button type="button" id="csv" title="these curves as a table, one row a step"
        onClick=${() => download(run, route.query.q ?? "")}>CSV</button>`
      }
      <input type="search" placeholder="metric …" aria-label="search metrics" value=${route.query.q ?? ""}
        onInput=${(event) => setQuery({ q: event.target.value })} />
      ${
        lead &&
        html`<span class="muted small">click a point: the groups of the nearest step that has some (<span
        class="tick"></span>) · drag: zoom · double click: all</span>`
      }
    </div>
    <${Loaded} state=${metrics.error ? metrics : { data }}>${(data) =>
      data.step.length
        ? html`<${Panels} ...${{ run, data, docs, weight, log, at, lead, steps, place, query: route.query.q ?? "" }} />`
        : html`<${Empty}>No step is finished yet.<//>`}<//>
    <${Films} files=${run.files ?? []} />
  </section>`;
}

/** What the run drew and filmed itself: its policy at work; of a world model, truth, prediction and error. */
function Films({ files }) {
  const shown = files.filter((file) => file.name !== "curve.png" && media(file.url));
  return (
    shown.length > 0 &&
    html`<h2>Pictures</h2><div class="films-of-run">${shown.map(
      (file) =>
        html`<figure>${
          file.kind === "video"
            ? html`<video src=${media(file.url)} controls muted loop playsinline preload="metadata">
                          </video>`
            : html`<img src=${media(file.url)} alt=${file.name} loading="lazy" />`
        }<figcaption class="small muted">${file.name}</figcaption></figure>`,
    )}</div>`
  );
}

/** What the run learned from last: the newest groups, as they come. */
function Newest({ run, step }) {
  const state = useLoaded(() => api(`/api/runs/${run.run}/steps/${step}/groups?limit=3`), [run.run, step]);
  const line = (group, groups) => {
    const [low, high] = range(groups);
    return html`<${GroupLine} key=${group.group} ...${{ group, run, low, high, skip: commonHead(groups) }} />`;
  };
  return html`<div class="newest" aria-live="polite"><h2>Newest groups <a class="small"
      href=${href(["run", run.run, "step", step])}>step ${step} →</a></h2>
    <${Loaded} state=${state}>${({ groups }) =>
      html`<${GroupHead} run=${run} /><div class="lines">${groups.slice(0, 3).map((group) => line(group, groups))}</div>`}<//></div>`;
}

/** The run's score, on the first screen. */
export function HeadlineChart({ run, data, name }) {
  const series = useMemo(
    () => [{ name, values: data.columns[name], color: SERIES[0], low: data.low?.[name], high: data.high?.[name] }],
    [data, name],
  );
  const steps = run.sample_steps?.list ?? [];
  const lead = steps.length ? (step) => go(href(["run", run.run, "step", step], { from: "curves" })) : null;
  const box = useRef(null);
  const height = useSize(box, "clientHeight", 130);
  return html`<div class="headline" ref=${box}><${Chart} x=${data.step} series=${series} pick=${lead} marks=${steps}
    height=${height} title=${name} /></div>`;
}

function Panels({ run, data, docs, weight, log, at, lead, steps, place, query }) {
  const named = new Set((run.panels ?? []).flatMap(([, names]) => names));
  const arms = Object.keys(data.columns).filter((name) => name.startsWith("arm_probability/"));
  const others = Object.keys(data.columns).filter((name) => !named.has(name) && !arms.includes(name));
  const has = (name) =>
    data.columns[name]?.some((value) => value !== null) && name.toLowerCase().includes(query.toLowerCase());
  const points = (name) => data.columns[name].reduce((count, value) => count + (value !== null), 0);
  const once = data.step.length > 1 ? Object.keys(data.columns).filter((name) => has(name) && points(name) === 1) : [];
  const shown = (names) => names.filter((name) => !arms.includes(name) && !once.includes(name) && has(name));
  const groups = [...(run.panels ?? []), ["Other", others]].flatMap(([title, names]) =>
    title === "Other" ? shown(names).map((name) => [null, [name]]) : charts(title, shown(names), data),
  );
  const common = { data, docs, weight, log, at, lead, steps, place };
  return html`<div class="panels">
    ${arms.length > 0 && has(arms[0]) && html`<${ArmsPanel} ...${common} arms=${arms} />`}
    ${groups.map(([title, names]) => html`<${Panel} key=${names.join()} ...${common} title=${title} names=${names} />`)}
    ${once.length > 0 && html`<${Once} ...${common} names=${once} />`}
    ${!query && html`<${TimePanel} run=${run} ...${common} />`}
    ${!groups.length && !arms.length && html`<${Empty}>No metric matches.<//>`}
  </div>`;
}

const ALIKE = 10; // how many times larger than another a curve may be on the same axis

/** Curves of one size in a chart, so that none lies flat on the foot of another's; no more than there are colours. */
export function charts(title, names, data) {
  const size = (name) => data.columns[name].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
  const found = [];
  for (const name of names) {
    const mine = size(name);
    const fits = (chart) =>
      chart.names.length < SERIES.length &&
      (!mine || !chart.high || (mine <= ALIKE * chart.low && ALIKE * mine >= chart.high));
    let chart = found.find(fits);
    if (!chart) found.push((chart = { names: [], low: Infinity, high: 0 }));
    chart.names.push(name);
    if (mine) [chart.low, chart.high] = [Math.min(chart.low, mine), Math.max(chart.high, mine)];
  }
  return found.map((chart) => [title, chart.names]);
}

/** Where the cursor is, in words. */
const where = (data, index) =>
  index === null || index >= data.step.length
    ? ""
    : `step ${data.step[index]}${data.key === "step" ? "" : ` · ${told(data.x[index], data.key)}`}`;

/** One chart with the names of its curves above it, each with its value at the cursor. */
function Panel({ data, docs, weight, log, at, lead, steps, place, title, names }) {
  const [index, setIndex] = useState(null);
  const series = useMemo(
    () =>
      names.flatMap((name, i) => {
        const values = data.columns[name];
        const line = {
          name,
          color: SERIES[i],
          values: smooth(values, weight),
          low: data.low?.[name],
          high: data.high?.[name],
        };
        return weight
          ? [
              { ...line, values, faint: true, low: null, high: null },
              { ...line, low: null, high: null },
            ]
          : [line];
      }),
    [data, weight, names.join()],
  );
  return html`<figure class="panel">
    <figcaption>${title && html`<strong>${title}</strong>`}
      ${names.map(
        (name, i) => html`<span class="key"><span class="swatch" style=${{ background: SERIES[i] }}></span><${Metric}
            name=${name} about=${data.about} docs=${docs} />
        <span class="value">${number(at_(data.columns[name], index))}</span></span>`,
      )}
      <span class="muted small step-at">${where(data, index)}</span></figcaption>
    <${Chart} ...${{ x: data.x, axis: data.key, rows: data.step, place, series, log, at }} pick=${lead} marks=${steps}
      sync="curves" title=${title ?? names[0]} readout=${setIndex} />
  </figure>`;
}

/** What was told a single time, as a table: a line needs two points. */
function Once({ data, docs, names }) {
  const when = (name) => data.columns[name].findIndex((value) => value !== null);
  return html`<figure class="panel"><figcaption><strong>told once</strong></figcaption><div class="once"><table
      class="plain"><tbody>
    ${names.map(
      (name) => html`<tr><td><${Metric} name=${name} about=${data.about} docs=${docs} /></td><td
      class="value">${number(data.columns[name][when(name)])}</td><td class="muted">step ${data.step[when(name)]}</td>
      </tr>`,
    )}
  </tbody></table></div></figure>`;
}

/** The value at the cursor, or the last there is. */
function at_(values, index) {
  if (index !== null) return values[index] ?? null;
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

/** Columns as areas on top of each other: [{name, values (the upper edge)}], the topmost first. */
function stacked(columns, names) {
  let below = null;
  return names
    .map((name, i) => {
      const values = columns[name].map((value, t) => (value ?? 0) + (below?.[t] ?? 0));
      below = values;
      // A step that tells none of them has no area; no point is drawn where one of them was not measured.
      const told = values.map((value, t) => (names.some((other) => columns[other][t] !== null) ? value : null));
      return { name, values: told, color: SERIES[i % SERIES.length], fill: "ff", points: false };
    })
    .reverse();
}

/** The bandit: which arm it would pull, over time. */
export function ArmsPanel({ data, docs, at, lead, steps, place, arms, height = 220 }) {
  const [index, setIndex] = useState(null);
  const series = useMemo(() => stacked(data.columns, arms), [data, arms.join()]);
  return html`<figure class="panel double"><figcaption><strong>arm probabilities</strong>
    ${arms.map(
      (
        name,
        i,
      ) => html`<span class="key"><span class="swatch" style=${{ background: SERIES[i % SERIES.length] }}></span>
      <${Metric} name=${name} about=${data.about} docs=${docs} label=${`arm ${name.split("/")[1]}`} /> <span
        class="value">${number(at_(data.columns[name], index), 3)}</span></span>`,
    )}
    <span class="muted small step-at">${where(data, index)}</span></figcaption>
    <${Chart} ...${{ x: data.x ?? data.step, axis: data.key, rows: data.step, place }} series=${series} pick=${lead}
      marks=${steps} at=${at} range=${[0, 1]} height=${height}
      sync="curves" title="arm probabilities" readout=${setIndex} /></figure>`;
}

const PHASES = ["collect", "reference", "update", "compiled", "evaluate", "checkpoint"];
/** Shares of a step in which one side waits for the other, where tries are asked for ahead. */
const WAITS = ["learner_waits", "sampler_waits"];

/** The phases of each step with what is left of it, and as areas. */
function phases(columns) {
  const names = PHASES.filter((name) => columns[name]?.some((value) => value > 0));
  const within = names.filter((name) => name !== "checkpoint");
  const rest = columns.total?.map((total, t) =>
    Math.max(0, (total ?? 0) - within.reduce((sum, name) => sum + (columns[name][t] ?? 0), 0)),
  );
  const all = { ...columns, ...(rest ? { other: rest } : {}) };
  const keys = [...names, ...(rest ? ["other"] : [])];
  return { all, keys, series: stacked(all, keys) };
}

/** A table's rows on the axis that another table tells. */
function over(table, place, key) {
  const xs = table.step.map(place);
  const rows = xs.flatMap((x, i) => (x === null || (i && x === xs[i - 1]) ? [] : [i]));
  const columns = Object.fromEntries(
    Object.entries(table.columns).map(([name, values]) => [name, rows.map((i) => values[i])]),
  );
  return { x: rows.map((i) => xs[i]), step: rows.map((i) => table.step[i]), columns, key };
}

/** What the seconds of each step went to. */
function TimePanel({ run, data, at, lead, steps, place }) {
  const state = useLoaded(() => api(`/api/runs/${run.run}/timing`), [run.run, Math.floor((run.step ?? 0) / 5)]);
  const [index, setIndex] = useState(null);
  const table = useMemo(() => state.data && over(state.data, place, data.key), [state.data, place]);
  const { all, keys, series } = useMemo(() => phases(table?.columns ?? {}), [table]);
  if (!table || !table.step.length) return null;
  return html`<figure class="panel"><figcaption><strong>seconds of a step</strong>
    ${keys.map(
      (name, i) => html`<span class="key"><span class="swatch" style=${{ background: SERIES[i] }}></span>
      ${name} <span class="value">${number(at_(all[name], index), 3)}</span></span>`,
    )}
    ${WAITS.filter((name) => table.columns[name]?.some((value) => value > 0)).map(
      (name) => html`<span class="key">${name.replace("_", " ")}
      <span class="value">${number(100 * at_(table.columns[name], index), 3)} %</span></span>`,
    )}
    <span class="muted small step-at">${where(table, index)}</span></figcaption>
    <${Chart} ...${{ x: table.x, axis: table.key, rows: table.step, place, series, at }} pick=${lead} marks=${steps}
      floor=${0} sync="curves"
      title="seconds of a step" readout=${setIndex} /></figure>`;
}
