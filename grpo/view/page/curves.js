// A run's curves. A click on a point leads to the groups of that step.

import { api, media } from "./api.js";
import { Chart, smooth } from "./chart.js";
import { commonHead, GroupLine, range } from "./groups.js";
import { Metric, useDocs } from "./metrics.js";
import { go, href, setQuery } from "./route.js";
import { SERIES } from "./scale.js";
import { Choice, Empty, html, Loaded, number, Toggle, useLoaded, useMemo, useState } from "./ui.js";

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
  const at = route.query.at === undefined ? null : Number(route.query.at);
  return html`<section class="page">
    ${steps.length > 0 && html`<${Newest} run=${run} step=${Math.max(newest ?? -1, steps[steps.length - 1])} />`}
    <div class="toolbar"><${Choice} label="smoothing" value=${String(weight)} options=${SMOOTHINGS}
      set=${(value) => setQuery({ smooth: value === "0" ? null : value })} />
      <${Toggle} on=${log} set=${(on) => setQuery({ log: on ? "1" : null })}>log scale<//>
      <input type="search" placeholder="metric …" aria-label="search metrics" value=${route.query.q ?? ""}
        onInput=${(event) => setQuery({ q: event.target.value })} />
      ${
        lead &&
        html`<span class="muted small">click a point: the groups of the nearest step that has some (<span
        class="tick"></span>) · drag: zoom · double click: all</span>`
      }
    </div>
    <${Loaded} state=${metrics}>${(data) =>
      data.step.length
        ? html`<${Panels} ...${{ run, data, docs, weight, log, at, lead, steps, query: route.query.q ?? "" }} />`
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
      html`<div>${groups.slice(0, 3).map((group) => line(group, groups))}</div>`}<//></div>`;
}

function Panels({ run, data, docs, weight, log, at, lead, steps, query }) {
  const named = new Set((run.panels ?? []).flatMap(([, names]) => names));
  const arms = Object.keys(data.columns).filter((name) => name.startsWith("arm_probability/"));
  const others = Object.keys(data.columns).filter((name) => !named.has(name) && !arms.includes(name));
  const has = (name) =>
    data.columns[name]?.some((value) => value !== null) && name.toLowerCase().includes(query.toLowerCase());
  const points = (name) => data.columns[name].reduce((count, value) => count + (value !== null), 0);
  const once = data.step.length > 1 ? Object.keys(data.columns).filter((name) => has(name) && points(name) === 1) : [];
  const shown = (names) => names.filter((name) => !arms.includes(name) && !once.includes(name) && has(name));
  const groups = [...(run.panels ?? []), ["Other", others]].flatMap(([title, names]) =>
    title === "Other" ? shown(names).map((name) => [null, [name]]) : charts(title, shown(names)),
  );
  const common = { data, docs, weight, log, at, lead, steps };
  return html`<div class="panels">
    ${arms.length > 0 && has(arms[0]) && html`<${ArmsPanel} ...${common} arms=${arms} />`}
    ${once.length > 0 && html`<${Once} ...${common} names=${once} />`}
    ${groups.map(([title, names]) => html`<${Panel} key=${names.join()} ...${common} title=${title} names=${names} />`)}
    ${!query && html`<${TimePanel} run=${run} ...${common} />`}
    ${!groups.length && !arms.length && html`<${Empty}>No metric matches.<//>`}
  </div>`;
}

/** No more curves in a chart than there are colours to tell them apart. */
function charts(title, names) {
  const found = [];
  for (let at = 0; at < names.length; at += SERIES.length) found.push([title, names.slice(at, at + SERIES.length)]);
  return found;
}

/** One chart with the names of its curves above it, each with its value at the cursor. */
function Panel({ data, docs, weight, log, at, lead, steps, title, names }) {
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
      <span class="muted small step-at">${index === null ? "" : `step ${data.step[index]}`}</span></figcaption>
    <${Chart} x=${data.step} series=${series} log=${log} pick=${lead} marks=${steps} at=${at} sync="curves"
      title=${title ?? names[0]} readout=${setIndex} />
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
      const values = columns[name].map((value, t) => (value ?? 0) + (below ? below[t] : 0));
      below = values;
      return { name, values, color: SERIES[i % SERIES.length], fill: "ff" };
    })
    .reverse();
}

/** The bandit: which arm it would pull, over time. */
export function ArmsPanel({ data, docs, at, lead, steps, arms, height = 220 }) {
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
    <span class="muted small step-at">${index === null ? "" : `step ${data.step[index]}`}</span></figcaption>
    <${Chart} x=${data.step} series=${series} pick=${lead} marks=${steps} at=${at} range=${[0, 1]} height=${height}
      sync="curves" title="arm probabilities" readout=${setIndex} /></figure>`;
}

const PHASES = ["collect", "reference", "update", "evaluate", "checkpoint"];

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

/** What the seconds of each step went to. */
function TimePanel({ run, at, lead, steps }) {
  const state = useLoaded(() => api(`/api/runs/${run.run}/timing`), [run.run, Math.floor((run.step ?? 0) / 5)]);
  const [index, setIndex] = useState(null);
  const { all, keys, series } = useMemo(() => phases(state.data?.columns ?? {}), [state.data]);
  if (!state.data || !state.data.step.length) return null;
  const { step } = state.data;
  return html`<figure class="panel"><figcaption><strong>seconds of a step</strong>
    ${keys.map(
      (name, i) => html`<span class="key"><span class="swatch" style=${{ background: SERIES[i] }}></span>
      ${name} <span class="value">${number(at_(all[name], index), 3)}</span></span>`,
    )}
    <span class="muted small step-at">${index === null ? "" : `step ${step[index]}`}</span></figcaption>
    <${Chart} x=${step} series=${series} pick=${lead} marks=${steps} at=${at} floor=${0} sync="curves"
      title="seconds of a step" readout=${setIndex} /></figure>`;
}
