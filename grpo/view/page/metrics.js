// What a metric means: every name on the page leads to its entry in docs/metrics.md, by hover and by link.

import { api } from "./api.js";
import { html, useEffect, useState } from "./ui.js";
import { href } from "./route.js";

let asked; // key → entry, and anchor → entry; one answer for the whole page
const loadDocs = () =>
  (asked ??= api("/api/docs").then(
    ({ metrics }) => ({ metrics, byKey: new Map(metrics.map((entry) => [entry.key, entry])) }),
    () => ({ metrics: [], byKey: new Map() }),
  ));

export function useDocs() {
  const [docs, setDocs] = useState(null);
  useEffect(() => {
    loadDocs().then(setDocs);
  }, []);
  return docs;
}

/** The entry of a metric, where it has one. */
export const known = (name, about, docs) => docs?.byKey.get(about?.[name] ?? name);

/** A metric's name, with its meaning on hover. `about`: metric → key of its entry, as the metrics route gives it. */
export function Metric({ name, about, docs, label }) {
  const entry = known(name, about, docs);
  if (!entry) return html`<span class="metric">${label ?? name}</span>`;
  const told = [
    entry.formula,
    entry.healthy && `healthy: ${entry.healthy}`,
    entry.otherwise && `otherwise: ${entry.otherwise}`,
  ];
  return html`<a class="metric" href=${href(["docs", entry.anchor])} title=${told.filter(Boolean).join("\n")}>
      ${label ?? name}</a>`;
}

/** `code` between backticks as code. */
function Coded({ text }) {
  return (text ?? "").split("`").map((part, i) => (i % 2 ? html`<code>${part}</code>` : part));
}

/** The glossary: every entry of docs/metrics.md, the one that was asked for in sight. */
export function DocsView({ route }) {
  const docs = useDocs();
  const anchor = route.parts[1];
  useEffect(() => {
    if (docs && anchor) document.getElementById(`metric-${anchor}`)?.scrollIntoView({ block: "center" });
  }, [docs, anchor]);
  if (!docs) return html`<div class="waiting" role="status">Loading …</div>`;
  return html`<section class="page">
    <h1>Metrics</h1>
    <p class="muted">One line a step in <code>metrics.jsonl</code>. The same text is in <code>docs/metrics.md</code>.</p>
    <div class="wide"><table class="plain glossary"><thead><tr><th>name</th><th>formula</th><th>healthy</th>
      <th>when it is not</th></tr></thead>
    <tbody>${docs.metrics.map(
      (entry) => html`<tr id=${`metric-${entry.anchor}`} class=${entry.anchor === anchor ? "chosen" : ""}>
      <td><code>${entry.key}</code></td><td><${Coded} text=${entry.formula} /></td>
      <td><${Coded} text=${entry.healthy ?? "–"} /></td><td><${Coded} text=${entry.otherwise ?? "–"} /></td></tr>`,
    )}
    </tbody></table></div></section>`;
}
