// One run: its header, live, and the view of it that the address names.

import { api, listen } from "./api.js";
import { CurvesView, HeadlineChart } from "./curves.js";
import { GroupView } from "./group.js";
import { GroupsView } from "./groups.js";
import { known, Metric, useDocs } from "./metrics.js";
import { PromptView } from "./prompt.js";
import { href } from "./route.js";
import { kind, State, warned, WAYS } from "./runs.js";
import { EventsView, SettingsView } from "./folder.js";
import { duration, html, Loaded, number, percent, useEffect, useRef, useState } from "./ui.js";

/** What the server knows of a run and its metrics, kept up to date while it trains. */
function useRun(id) {
  const [run, setRun] = useState({});
  const [metrics, setMetrics] = useState({});
  const [newest, setNewest] = useState(null);
  const table = useRef(null);
  const update = (data) => {
    table.current = data;
    setMetrics({ data });
  };

  useEffect(() => {
    let wanted = true;
    const asked = (promise, use, failed) =>
      promise.then(
        (data) => wanted && use(data),
        (error) => wanted && failed(error),
      );
    const loadRun = () =>
      asked(
        api(`/api/runs/${id}`),
        (data) => setRun({ data }),
        (error) => setRun({ error }),
      );
    const loadMetrics = () => asked(api(`/api/runs/${id}/metrics`), update, (error) => setMetrics({ error }));
    const loadLater = () =>
      asked(
        api(`/api/runs/${id}/metrics?after=${last(table.current)}`),
        (rows) => update(appended(table.current, rows)),
        () => {},
      );
    loadRun();
    loadMetrics();
    const end = listen(id, {
      again: loadRun,
      hello: ({ generation, step }) => {
        if (!table.current) return;
        if (generation !== table.current.generation) loadMetrics();
        else if (step > last(table.current)) loadLater();
      },
      metrics: (rows) => {
        if (!table.current) return;
        const known = Object.keys(rows.columns).every((name) => name in table.current.columns);
        if (known && rows.generation === table.current.generation) return update(appended(table.current, rows));
        loadRun(); // a metric that is new has its place and its entry to be asked for
        loadMetrics();
      },
      status: (told) => setRun(({ data, ...rest }) => (data ? { data: { ...data, ...told } } : rest)),
      samples: ({ step }) => {
        setNewest(step);
        loadRun(); // the list of steps with groups is longer now
      },
      reset: () => {
        loadRun();
        loadMetrics();
      },
      gone: () => setRun({ error: Object.assign(new Error("The run's folder is no longer there."), { status: 410 }) }),
    });
    return () => {
      wanted = false;
      end();
    };
  }, [id]);
  return { run, metrics, newest };
}

const last = (table) => (table && table.step.length ? table.step[table.step.length - 1] : -1);

/** The table with new rows at its end; those it has already are left out. */
function appended(table, rows) {
  const fresh = rows.step
    .map((step, i) => [step, i])
    .filter(([step]) => step > last(table))
    .map(([, i]) => i);
  if (!fresh.length) return table;
  const columns = {};
  for (const name of new Set([...Object.keys(table.columns), ...Object.keys(rows.columns)])) {
    const before = table.columns[name] ?? table.step.map(() => null);
    columns[name] = [...before, ...fresh.map((i) => rows.columns[name]?.[i] ?? null)];
  }
  const wider = (bounds) =>
    bounds &&
    Object.fromEntries(
      Object.entries(bounds).map(([name, values]) => [
        name,
        [...values, ...fresh.map((i) => rows.columns[name]?.[i] ?? null)],
      ]),
    );
  return {
    ...table,
    step: [...table.step, ...fresh.map((i) => rows.step[i])],
    columns,
    low: wider(table.low),
    high: wider(table.high),
    clock: [...(table.clock ?? table.step.map(() => null)), ...fresh.map((i) => rows.clock?.[i] ?? null)],
    about: { ...table.about, ...rows.about },
  };
}

export function RunView({ route, id }) {
  const { run, metrics, newest } = useRun(id);
  const [, , view, step, third, group] = route.parts;
  return html`<${Loaded} state=${run}>${(data) => html`
    <${Header} run=${data} route=${route} newest=${newest} metrics=${metrics.data} />
    ${!view && html`<${CurvesView} route=${route} run=${data} metrics=${metrics} newest=${newest} />`}
    ${view === "groups" && html`<${GroupsView} key="all" route=${route} run=${data} step=${null} />`}
    ${
      view === "step" &&
      third !== "group" &&
      html`<${GroupsView} key=${step} route=${route} run=${data}
      step=${Number(step)} newest=${newest} />`
    }
    ${
      view === "step" &&
      third === "group" &&
      html`<${GroupView} key=${`${step}/${group}`} route=${route} run=${data} step=${Number(step)}
      group=${Number(group)} metrics=${metrics} />`
    }
    ${view === "prompt" && html`<${PromptView} key=${step} route=${route} run=${data} promptKey=${step} />`}
    ${view === "settings" && html`<${SettingsView} run=${data} />`}
    ${view === "events" && html`<${EventsView} run=${data} />`}`}<//>`;
}

function Header({ run, route, newest, metrics }) {
  const docs = useDocs();
  const about = metrics?.about;
  const view = route.parts[2] ?? "";
  const steps = run.sample_steps;
  const latest = Math.max(newest ?? -1, steps?.last ?? -1);
  const tabs = [
    ["curves", "", href(["run", run.run])],
    ...(latest >= 0
      ? [
          ["groups", "step", href(["run", run.run, "step", latest])],
          ["all groups", "groups", href(["run", run.run, "groups"])],
        ]
      : []), // none were kept: nothing to offer
    ["settings", "settings", href(["run", run.run, "settings"])],
    ...(run.events?.count ? [[`events (${run.events.count})`, "events", href(["run", run.run, "events"])]] : []),
  ];
  const whole = view === "";
  return html`<div class="run-header">
    <div class="run-title"><h1>${run.name}</h1><${State} run=${run} />
      <span class="muted small">
        ${kind(run).join(" · ")}</span>
      ${!whole && html`<${Glance} run=${run} />`}</div>
    ${whole && html`<${First} ...${{ run, metrics, about, docs }} /><${Vitals} ...${{ run, about, docs }} />`}
    ${(run.notes ?? []).map((note) => html`<p class="note">${note}</p>`)}
    <nav class="tabs" aria-label="views">${tabs.map(
      ([name, key, to]) => html`<a href=${to}
      class=${view === key ? "on" : ""} aria-current=${view === key ? "page" : undefined}>${name}</a>`,
    )}</nav>
  </div>`;
}

const rate = (run) => {
  const seconds = run.seconds_per_step;
  return !seconds ? "–" : seconds < 1 ? `${number(1 / seconds, 3)} steps/s` : `${number(seconds, 3)} s/step`;
};

/** The same in a line, for the views that need the room. */
function Glance({ run }) {
  const count = run.troubles ?? 0;
  return html`<span class="glance">step <span id="vital-step">${number(run.step)}</span>
      ${run.steps ? ` / ${number(run.steps)}` : ""} · ${rate(run)}
      ${run.state === "running" ? ` · ${duration(run.eta_seconds)} left` : ""}
    ${count > 0 && html` · <a href=${href(["run", run.run])}>${warned(count)}</a>`}</span>`;
}

/** Where it is, how fast, how long still, and what a step is spent on. */
function Vitals({ run, about, docs }) {
  const share = run.steps ? Math.min(1, run.step / run.steps) : null;
  const memory = [
    run.memory?.gpu_gib && `GPU ${number(run.memory.gpu_gib, 3)} GiB`,
    run.memory?.host_gib && `host ${number(run.memory.host_gib, 3)} GiB`,
  ].filter(Boolean);
  const split = Object.entries(run.time_split ?? {}).filter(([, part]) => part >= 0.005);
  return html`<dl class="vitals">
    <div><dt>step</dt><dd id="vital-step">${number(run.step)}${
      run.steps
        ? html`<span
      class="muted"> / ${number(run.steps)}</span>`
        : ""
    }</dd>
      ${share !== null && html`<progress value=${share} max="1" aria-label="steps done"></progress>`}</div>
    ${run.seconds_per_step > 0 && html`<div><dt>rate</dt><dd>${rate(run)}</dd></div>`}
    <div><dt>${run.state === "running" ? "left" : "took"}</dt><dd>
      ${duration(run.state === "running" ? run.eta_seconds : run.elapsed_seconds)}</dd></div>
    ${memory.length > 0 && html`<div><dt>memory</dt><dd>${memory.join(", ")}</dd></div>`}
    ${
      run.score &&
      html`<div><dt>best <${Metric} name=${run.score.name} about=${about} docs=${docs} /></dt><dd>${number(run.score.best)} <span
      class="muted">step ${run.score.step}</span></dd></div>`
    }
    ${
      split.length > 0 &&
      html`<div class="split"><dt>a step's time</dt><dd><span class="split-bar" aria-hidden="true">
          ${split.map(
            ([name, part], i) => html`<span class=${`part part-${i % 6}`} style=${{ flexGrow: part }}
          title=${`${name} ${percent(part)}`}></span>`,
          )}</span>
      <span class="small muted">${split.map(([name, part]) => `${name} ${percent(part)}`).join(" · ")}</span></dd>
        </div>`
    }
  </dl>`;
}

const SIGNS = { bad: "✕", warn: "▲", info: "i", ok: "✓" };

/** The first screen's two questions: is it learning, is something wrong? */
function First({ run, metrics, about, docs }) {
  const { verdict, checks = [], warnings = [] } = run;
  return html`<div class="first">
    <section class="learning" aria-label="is it learning?"><h2>Is it learning?</h2>
      ${
        verdict
          ? html`<p class=${`verdict ${verdict.way}`}><span class="sign" aria-hidden="true">${WAYS[verdict.way]}</span>
        <strong>${verdict.title}</strong> <span>${verdict.says}</span></p>
        ${metrics?.columns[verdict.metric] && html`<${HeadlineChart} run=${run} data=${metrics} name=${verdict.metric} />`}`
          : html`<p class="verdict early"><strong>${run.state === "running" ? "No step is finished yet." : "It ended before its first step."}</strong></p>`
      }</section>
    <section class="wrong" aria-label="is something wrong?"><h2>Is something wrong?</h2>
      ${
        !run.troubles &&
        checks.length > 0 &&
        html`<p class="verdict up"><span class="sign" aria-hidden="true">✓</span><strong>Nothing looks wrong</strong></p>`
      }<${Warnings} list=${warnings} ...${{ about, docs }} />
      <ul class="checks">${checks.map(
        (check) => html`<li class=${check.level} key=${check.name}><span class="sign" aria-hidden="true">
        ${SIGNS[check.level] ?? "i"}</span><span class="muted"><${Metric} name=${check.metric} ...${{ about, docs }}
          label=${check.name} /></span><span>${check.text}</span></li>`,
      )}</ul></section>
  </div>`;
}

function Warnings({ list, about, docs }) {
  if (!list.length) return null;
  return html`<ul class="warnings" aria-label="warnings">${list.map(
    (warning) => html`<li class=${warning.level} key=${warning.code}>
    <span class="sign" aria-hidden="true">${SIGNS[warning.level] ?? "i"}</span><span><strong>${warning.message}</strong>
    ${warning.remedy && html`<span class="remedy">${warning.remedy}</span>`}
    ${
      known(warning.metric, about, docs) &&
      html` <span class="small"><${Metric} name=${warning.metric}
      about=${about} docs=${docs} /></span>`
    }</span></li>`,
  )}</ul>`;
}
