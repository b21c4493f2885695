// All runs of the folder: how each is doing, and a choice of some to compare.

import { api, listen } from "./api.js";
import { Spark } from "./chart.js";
import { Metric, useDocs } from "./metrics.js";
import { go, href, setQuery } from "./route.js";
import { Choice, classes, duration, Empty, html, Loaded, number, useEffect, useLoaded, useState } from "./ui.js";

const MARKS = { running: "●", finished: "✓", stopped: "■", crashed: "✕", unreadable: "?" };

export function State({ run }) {
  const why = run.ending ?? (run.reason === "done" ? null : run.reason);
  return html`<span class=${`state ${run.state}`} title=${[run.state, why].filter(Boolean).join(": ")}>
    <span aria-hidden="true">${MARKS[run.state] ?? "·"}</span> ${run.state}${run.ending ? `: ${run.ending}` : ""}${
      run.resumed
        ? html` <span
      class="muted">· resumed${run.resumed > 1 ? ` ${run.resumed}×` : ""}</span>`
        : ""
    }</span>`;
}

export const WAYS = { up: "↗", down: "↘", lost: "↘", flat: "→", early: "…" };
export const warned = (count) => `▲ ${count} warning${count > 1 ? "s" : ""}`;

/** Whether it learned, and whether something is wrong, in a line. */
function Judged({ run: { verdict, troubles } }) {
  return html`<div class="judged small">${
    verdict && html`<span class=${`way ${verdict.way}`} title=${verdict.says}>${WAYS[verdict.way]} ${verdict.title}</span>`
  }${troubles > 0 && html` <span class="troubles">${warned(troubles)}</span>`}</div>`;
}

/** What kind of run it is, in a few words. */
export const kind = (run) => [run.preset ?? run.task, shortened(run.model), run.loss_type].filter(Boolean);

/** A model by its own name, without the folders above it. */
const shortened = (model) => (model?.startsWith("/") ? model.split("/").filter(Boolean).pop() : model);

const ORDERS = {
  newest: (a, b) => (b.created ?? "").localeCompare(a.created ?? ""),
  name: (a, b) => a.name.localeCompare(b.name),
  score: (a, b) => (b.score?.best ?? -Infinity) - (a.score?.best ?? -Infinity),
  updated: (a, b) => (b.updated ?? 0) - (a.updated ?? 0),
};

export function RunsView({ route }) {
  const [count, setCount] = useState(0);
  const state = useLoaded(() => api("/api/runs"), [count]);
  useEffect(() => {
    const ask = () => setCount((n) => n + 1);
    return listen(null, { runs: ask, status: ask, again: ask });
  }, []);
  return html`<section class="page"><${Loaded} state=${state}>${(data) => html`<${Runs} data=${data}
      route=${route} />`}<//></section>`;
}

function Runs({ data, route }) {
  const docs = useDocs();
  const chosen = new Set((route.query.chosen ?? "").split(",").filter(Boolean));
  const wanted = (route.query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const told = (run) => [run.name, run.task, run.preset, run.model, run.loss_type, run.state].join(" ").toLowerCase();
  const runs = data.runs.filter((run) => wanted.every((word) => told(run).includes(word)));
  runs.sort(ORDERS[route.query.sort] ?? ORDERS.newest);
  const choose = (id) => {
    if (!chosen.delete(id)) chosen.add(id);
    setQuery({ chosen: [...chosen].join(",") });
  };
  if (!data.runs.length) {
    return html`<${Empty}><h1>No runs yet</h1><p>Nothing under <code>${data.root}
          </code>. Start one, and it appears here:</p>
      <pre>grpo train cartpole</pre><//>`;
  }
  return html`
    <div class="toolbar"><h1>Runs</h1>
      <input type="search" placeholder="name, task, state …" value=${route.query.q ?? ""} aria-label="search runs"
        onInput=${(event) => setQuery({ q: event.target.value })} />
      <${Choice} label="by" value=${route.query.sort ?? "newest"} set=${(sort) => setQuery({ sort })}
        options=${[
          ["newest", "newest"],
          ["updated", "last written"],
          ["name", "name"],
          ["score", "best score"],
        ]} />
      <span class="grow"></span>
      <button type="button" class="primary" disabled=${chosen.size < 2} id="compare"
        onClick=${() => go(href(["compare"], { runs: [...chosen].join(",") }))}>Compare ${chosen.size || ""}</button>
    </div>
    ${(data.notes ?? []).map((note) => html`<p class="note">${note}</p>`)}
    ${!runs.length && html`<${Empty}>No run matches.<//>`}
    <div class="runs" role="list">${runs.map(
      (run) => html`<div class=${classes("run-row", chosen.has(run.run) && "chosen")} role="listitem" key=${run.run}>
      <label class="check"><input type="checkbox" checked=${chosen.has(run.run)} aria-label=${`compare ${run.name}`}
        onChange=${() => choose(run.run)} /></label>
      <div class="run-name"><a href=${href(["run", run.run])}>${run.name}</a>
        <div class="muted small">
          ${[...kind(run), `seed ${run.seed ?? "–"}`].join(" · ")}</div></div>
      <div class="run-state"><${State} run=${run} />${run.error && html`<div class="small bad">${run.error}</div>`}
        <${Judged} run=${run} /></div>
      <div class="run-steps">${number(run.step)}${
        run.steps
          ? html`<span class="muted"> / ${number(run.steps)}
        </span>`
          : ""
      }
        <div class="muted small">steps</div></div>
      <div class="run-score">${
        run.score
          ? html`<strong>${number(run.score.best)}</strong>
        <div class="small"><${Metric} name=${run.score.name} docs=${docs} /> <span
          class="muted">best, step ${run.score.step}</span></div>`
          : html`<span class="muted">–</span>`
      }</div>
      <div class="run-spark">${
        run.spark &&
        html`<${Spark} values=${run.spark.values} /><div class="small"><${Metric}
        name=${run.spark.name} docs=${docs} /></div>`
      }</div>
      <div class="run-when muted small">${ago(run.updated)}</div>
    </div>`,
    )}</div>`;
}

function ago(seconds) {
  if (!seconds) return "–";
  const gone = Date.now() / 1000 - seconds;
  if (gone < 5) return "just now";
  return gone < 86400
    ? `${duration(gone).replace(/ \d+ s$/, "")} ago`
    : new Date(seconds * 1000).toISOString().slice(0, 10);
}
