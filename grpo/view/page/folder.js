// The rest of a run's folder: the settings it resolved to, and what went wrong or odd.

import { api } from "./api.js";
import { Empty, html, Loaded, useLoaded, useState } from "./ui.js";
import { Plain } from "./text.js";

const told = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export function SettingsView({ run }) {
  const state = useLoaded(() => api(`/api/runs/${run.run}/config`), [run.run]);
  const [query, setQuery] = useState("");
  return html`<section class="page"><${Loaded} state=${state}>${(data) => {
    const given = new Set(Object.keys(data.given ?? {}).map((key) => key.split(".").pop()));
    const rows = Object.entries(data.settings).filter(([key, value]) =>
      `${key} ${told(value)}`.toLowerCase().includes(query.toLowerCase()),
    );
    return html`
      <div class="toolbar"><input type="search" placeholder="setting or value …" value=${query}
        aria-label="search settings" onInput=${(event) => setQuery(event.target.value)} />
        <span class="muted small">bold: set for this run</span></div>
      ${
        run.argv?.length
          ? html`<pre class="command">
        ${run.argv.map((part, i) => (i ? part : part.split("/").pop())).join(" ")}</pre>`
          : ""
      }
      <div class="wide"><table class="plain settings"><tbody>${rows.map(
        ([key, value]) => html`<tr
        class=${given.has(key.split(".").pop()) ? "given" : ""}><td><code>${key}</code></td><td>${told(value)}</td>
        </tr>`,
      )}</tbody></table></div>
      <p class="muted small">${Object.entries(run.versions ?? {})
        .map(([name, version]) => `${name} ${version}`)
        .join(" · ")}</p>`;
  }}<//></section>`;
}

export function EventsView({ run }) {
  const [limit, setLimit] = useState(100);
  const state = useLoaded(
    () => api(`/api/runs/${run.run}/events?offset=0&limit=${limit}`),
    [run.run, limit, run.events?.count],
  );
  return html`<section class="page"><${Loaded} state=${state}>${(data) =>
    data.events.length
      ? html`
    <div class="wide"><table class="plain events"><thead><tr><th>step</th><th>event</th><th>what</th></tr></thead>
      <tbody>
      ${data.events.map(
        ({ step, event, message, count, ...rest }) => html`<tr><td>${step}</td><td><code>${event}</code></td>
        <td><${Plain} text=${message ?? ""} />${
          Object.keys(rest).length > 0 &&
          html`<details><summary>more</summary>
          <pre><${Plain} text=${JSON.stringify(rest, null, 2)} /></pre></details>`
        }</td></tr>`,
      )}
    </tbody></table></div>
    ${
      data.events.length < data.total &&
      html`<button type="button" onClick=${() => setLimit(limit + 400)}>
      ${data.total - data.events.length} more</button>`
    }`
      : html`<${Empty}>Nothing was skipped, failed or odd.<//>`}<//></section>`;
}
