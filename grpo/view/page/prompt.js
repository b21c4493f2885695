// One prompt through time: what was answered at each step, here and in other runs, and what changed.

import { api } from "./api.js";
import { diff } from "./diff.js";
import { Badges, Dots } from "./groups.js";
import { href, setQuery } from "./route.js";
import { Plain, visible } from "./text.js";
import {
  Choice,
  classes,
  Empty,
  head,
  html,
  Loaded,
  number,
  Problem,
  signed,
  Toggle,
  useEffect,
  useLoaded,
  useState,
} from "./ui.js";

const RANKS = [
  ["best", "best try"],
  ["middle", "middle try"],
  ["worst", "worst try"],
];

/** Entries as they are found: the server reads many files, piece by piece. */
function useEntries(key, run, runs) {
  const [state, setState] = useState({});
  const path = `/api/prompts/${key}?${new URLSearchParams({ ...(run ? { run } : {}), ...(runs ? { runs } : {}) })}`;
  useEffect(() => {
    let wanted = true;
    const ask = () =>
      api(path).then(
        (data) => {
          if (!wanted) return;
          setState({ data });
          if (data.complete === false) setTimeout(() => wanted && ask(), 300);
        },
        (error) => wanted && setState({ error }),
      );
    ask();
    return () => {
      wanted = false;
    };
  }, [path]);
  return state;
}

const MOST_OTHERS = 3; // runs that the server looks in beside this one

export function PromptView({ route, run, promptKey }) {
  const state = useEntries(promptKey, run.run, route.query.runs ?? "");
  const others = useLoaded(() => api("/api/runs"), []);
  const chosen = new Set((route.query.runs ?? "").split(",").filter(Boolean));
  const flip = (id) => {
    if (!chosen.delete(id)) chosen.add(id);
    setQuery({ runs: [...chosen].join(","), entries: null });
  };
  const more = (others.data?.runs ?? []).filter((other) => other.run !== run.run && other.task === run.task);
  const full = chosen.size >= MOST_OTHERS;
  const lost = [...chosen].filter((id) => !more.some((other) => other.run === id)).map((id) => ({ run: id, name: id }));
  const list =
    (more.length > 0 || lost.length > 0) &&
    html`<details class="others" open=${chosen.size > 0}>
        <summary>other runs ${chosen.size ? `(${chosen.size} of at most ${MOST_OTHERS})` : ""}</summary>
    ${[...lost, ...more.slice(0, 50)].map(
      (other) => html`<label class="check"><input type="checkbox" checked=${chosen.has(other.run)}
      disabled=${full && !chosen.has(other.run)} onChange=${() => flip(other.run)} /> ${other.name}</label>`,
    )}</details>`;
  return html`<section class="page prompt-view">
    ${state.error && list}
    ${
      state.error
        ? html`<${Problem} error=${state.error} />`
        : html`<${Loaded} state=${state}>${(data) => html`
      <details class="prompt" open><summary>prompt</summary><div class="prompt-text" dir="auto"><${Plain}
        text=${data.prompt ?? ""} /></div></details>
      ${
        (data.answer ?? null) !== null &&
        html`<details class="prompt" open><summary>reference answer</summary><div class="prompt-text" dir="auto"><${Plain}
        text=${data.answer} /></div></details>`
      }
      ${list}
      ${(data.notes ?? []).map((note) => html`<p class="note">${note}</p>`)}
      ${
        data.complete === false &&
        html`<p class="muted small"
        role="status">reading ${data.scanned} of ${data.of} steps …</p>`
      }
      ${
        data.entries.length
          ? html`<${Entries} entries=${data.entries}
        route=${route} />`
          : html`<${Empty}>This prompt was not kept at any step.<//>`
      }`}<//>`
    }
  </section>`;
}

const nameOf = (entry) => `${entry.run}@${entry.step}.${entry.group}`;

/** At most three at first: the first, the middle and the last. */
function defaults(entries) {
  const picks =
    entries.length <= 3
      ? entries
      : [entries[0], entries[Math.floor((entries.length - 1) / 2)], entries[entries.length - 1]];
  return picks.map(nameOf);
}

function Entries({ entries, route }) {
  const shown = (route.query.entries ?? "").split(",").filter(Boolean);
  const chosen = shown.length ? shown : defaults(entries);
  const rank = route.query.rank ?? "best";
  const compare = route.query.diff !== "0";
  const flip = (name) => {
    const next = chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name];
    setQuery({ entries: next.join(",") });
  };
  const all = entries
    .flatMap((entry) => entry.samples.map((sample) => sample.reward))
    .filter((reward) => reward !== null);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const columns = entries.filter((entry) => chosen.includes(nameOf(entry)));
  return html`
    <div class="timeline" role="group" aria-label="steps">${entries.map(
      (entry) => html`<button type="button" key=${nameOf(entry)}
          class=${classes("moment", chosen.includes(nameOf(entry)) && "on")}
      aria-pressed=${String(chosen.includes(nameOf(entry)))} onClick=${() => flip(nameOf(entry))}>
        <strong>step ${entry.step}</strong> <span class="muted small">${entry.run_name}</span>
      <${Dots} group=${{ rewards: entry.samples.map((sample) => sample.reward) }} low=${low} high=${high} />
      <span class="small">${number(entry.mean, 3)} ± ${number(entry.std, 2)}</span></button>`,
    )}</div>
    <div class="toolbar"><${Choice} label="show" value=${rank} options=${RANKS}
      set=${(value) => setQuery({ rank: value === "best" ? null : value })} />
      <${Toggle} on=${compare} set=${(on) => setQuery({ diff: on ? null : "0" })}>differences<//>
      <span class="muted small"><ins>new</ins> and <del>gone</del> against the column before</span></div>
    <div class="samples moments">${columns.map(
      (entry, i) => html`<${Moment} key=${nameOf(entry)} entry=${entry}
      before=${i && compare ? columns[i - 1] : null} rank=${rank} />`,
    )}</div>`;
}

function picked(entry, rank) {
  const { samples } = entry;
  return samples[{ best: 0, middle: Math.floor((samples.length - 1) / 2), worst: samples.length - 1 }[rank] ?? 0];
}

function Moment({ entry, before, rank }) {
  const sample = picked(entry, rank);
  const last = before ? picked(before, rank) : null;
  const text = sample?.completion ?? null;
  return html`<article class="sample"><header class="sample-head"><strong>step ${entry.step}</strong> <span
      class="muted small">${entry.run_name}</span> <${Badges} names=${entry.badges} />
      <a class="small" href=${href(["run", entry.run, "step", entry.step, "group", entry.group])}>group ${entry.group} →</a></header>
    ${
      sample &&
      html`<table class="sums"><tbody><tr><td>reward</td><td>${number(sample.reward)}</td></tr><tr>
      <td>advantage</td><td>${signed(sample.advantage)}</td></tr><tr><td>length</td><td>${number(sample.length)}</td>
      </tr></tbody></table>`
    }
    <div class="sample-body text" dir="auto">${
      text === null
        ? html`<span class="muted">no text</span>`
        : last && last.completion !== null
          ? diff(last.completion, text).map(([kind, part]) =>
              kind === "same"
                ? html`<span>${visible(part)}</span>`
                : kind === "new"
                  ? html`<ins>${visible(part)}</ins>`
                  : html`<del>${visible(head(part, 2000))}</del>`,
            )
          : html`<${Plain} text=${text} />`
    }</div></article>`;
}
