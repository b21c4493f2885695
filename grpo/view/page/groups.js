// The groups of a step, or of all steps, a row a group: filtered, sorted and searched by the server, by the address.

import { api, media } from "./api.js";
import { VirtualList } from "./list.js";
import { go, here, href, parse, setQuery } from "./route.js";
import { between } from "./scale.js";
import { visible } from "./text.js";
import { Choice, classes, Empty, html, number, Problem, useEffect, useKeys, useRef, useState } from "./ui.js";

const PAGE = 100;
const SORTS = [
  ["group", "file order"],
  ["mean", "mean reward"],
  ["std", "spread of rewards"],
  ["length", "length"],
  ["advantage", "largest advantage"],
];
const BADGES = {
  no_signal: ["no signal", "no decision has an advantage: this group taught nothing"],
  all_right: ["all right", "every try got the best reward seen in this step"],
  all_wrong: ["all wrong", "every try got the lowest reward seen in this step"],
  truncated: ["truncated", "a try was cut off by the limit"],
  reward_error: ["reward error", "a reward function failed"],
  failed: ["failed", "a try failed"],
  refilled: ["refilled", "sampled again, because the first tries had no signal"],
  duplicates: ["duplicates", "equal completions"],
  masked: ["masked", "a try that teaches nothing: a gate is closed"],
  unusable: ["unusable", "fewer than two tries were judged"],
};

export function Badges({ names }) {
  return html`<span class="badges">${names.map(
    (name) => html`<span class=${`badge ${name}`}
      title=${BADGES[name]?.[1]}>${BADGES[name]?.[0] ?? name.replaceAll("_", " ")}</span>`,
  )}</span>`;
}

/** G dots coloured by reward; a hollow one has none. */
export function Dots({ group, low, high }) {
  const shown = group.rewards.slice(0, 32);
  return html`<span class="dots" role="img"
      aria-label=${`rewards ${shown.map((reward) => number(reward)).join(", ")}`}>
    ${shown.map(
      (reward) => html`<span class=${reward === null ? "dot none" : "dot"} title=${number(reward)}
      style=${{ background: between(reward, low, high) }}></span>`,
    )}
    ${
      group.rewards.length > shown.length &&
      html`<span class="small muted">+${group.rewards.length - shown.length}
      </span>`
    }</span>`;
}

/** One group in a line; a link to it. */
export function GroupLine({ group, run, query, chosen, low, high, withStep, skip = 0 }) {
  const [shortest, , longest] = group.lengths ?? [];
  const to = href(["run", run.run, "step", group.step, "group", group.group], query);
  return html`<a class=${classes("group-row", chosen && "chosen")} role="listitem" href=${to}
      data-group=${group.group}>
    <span class="group-id">${withStep ? `${group.step} · ${group.group}` : group.group}</span>
    <span class="group-prompt" dir="auto">${(group.images ?? [])
      .map(media)
      .filter(Boolean)
      .map((url) => html`<img src=${url} alt="" loading="lazy" />`)}${
      group.prompt === null
        ? html`<span class="muted">start ${group.group}
      </span>`
        : `${skip ? "… " : ""}${visible(group.prompt.slice(skip).replace(/\s+/g, " "))}`
    }</span>
    <${Dots} group=${group} low=${low ?? group.min} high=${high ?? group.max} />
    <span class="group-mean" title="mean reward of the tries ± their standard deviation">${number(group.mean, 3)} <span class="muted">± ${number(group.std, 2)}</span></span>
    <span class="group-length muted" title="tokens or decisions of the shortest and of the longest try">
      ${shortest === longest ? number(longest) : `${number(shortest)}–${number(longest)}`}</span>
    <${Badges} names=${group.badges} /></a>`;
}

/** What the columns of those lines are; small screens have no room for it. */
export const GroupHead = ({ run, withStep }) => html`<div class="group-head" aria-hidden="true">
  <span>${withStep ? "step · group" : "group"}</span><span>${run.task === "language" ? "prompt" : "start"}</span>
  <span>rewards of its tries</span><span>mean ± std</span><span>length</span><span></span></div>`;

/** The lowest and the highest reward of these groups: what the colours of their dots span. */
export function range(groups) {
  const known = groups.filter(Boolean).flatMap((group) => group.rewards.filter((reward) => reward !== null));
  return known.reduce(([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)], [Infinity, -Infinity]);
}

/** How many characters all prompts begin with, up to a space: a template that says nothing about any of them. */
export function commonHead(groups) {
  const prompts = groups
    .filter(Boolean)
    .map((group) => group.prompt)
    .filter((prompt) => prompt !== null);
  if (new Set(prompts).size < 2) return 0;
  let length = Math.min(...prompts.map((prompt) => prompt.length));
  for (const prompt of prompts) while (prompt.slice(0, length) !== prompts[0].slice(0, length)) length--;
  const end = Math.max(prompts[0].lastIndexOf(" ", length - 1), prompts[0].lastIndexOf("\n", length - 1)) + 1;
  return end >= 20 ? end : 0;
}

/** The list by pages: {total, groups (sparse), …}, asked again while the server is still reading. */
function useGroups(run, step, query, refresh) {
  const [state, setState] = useState({ groups: [], pages: new Set() });
  const path = step === null ? `/api/runs/${run.run}/groups` : `/api/runs/${run.run}/steps/${step}/groups`;
  const key = JSON.stringify([path, query, refresh]);
  const current = useRef(key);
  current.current = key;

  const load = (page) => {
    const asked = new URLSearchParams({ ...query, offset: page * PAGE, limit: PAGE });
    api(`${path}?${asked}`).then(
      (answer) => {
        if (current.current !== key) return;
        setState((last) => {
          const groups = last.key === key ? last.groups.slice() : [];
          answer.groups.forEach((group, i) => {
            groups[page * PAGE + i] = group;
          });
          const pages = new Set(last.key === key ? last.pages : []).add(page);
          return { ...answer, key, groups, pages };
        });
        if (answer.complete === false) setTimeout(() => current.current === key && load(page), 300);
      },
      (error) => current.current === key && setState({ key, error, groups: [], pages: new Set() }),
    );
  };
  useEffect(() => {
    load(0);
  }, [key]);
  const asked = useRef(new Set());
  useEffect(() => {
    asked.current = new Set([0]);
  }, [key]);
  const needed = (from, to) => {
    for (let page = Math.floor(from / PAGE); page <= Math.floor((to - 1) / PAGE); page++) {
      if (!asked.current.has(page)) {
        asked.current.add(page);
        load(page);
      }
    }
  };
  return { state, needed };
}

export function GroupsView({ route, run, step, newest }) {
  const { sort, order, q, badge } = route.query;
  const narrow = useNarrow();
  const server = Object.fromEntries(Object.entries({ sort, order, q, badge }).filter(([, value]) => value));
  const { state, needed } = useGroups(
    run,
    step,
    server,
    step === null ? run.sample_steps?.count : newest === step ? 1 : 0,
  );
  const at = Math.min(Number(route.query.at ?? -1), (state.total ?? 1) - 1);
  const box = useRef(null);
  const move = (by) => {
    const now = Number(parse(here()).query.at ?? -1); // keys come faster than the page is drawn
    if (state.total) setQuery({ at: Math.max(0, Math.min(state.total - 1, now + by)) });
  };
  const toStep = (other) =>
    other !== null && other !== undefined && go(href(["run", run.run, "step", other], { sort, order, q, badge }));
  const open = () => {
    const group = state.groups[Number(parse(here()).query.at ?? -1)];
    if (group) go(href(["run", run.run, "step", group.step, "group", group.group]));
  };
  useKeys(
    {
      j: () => move(1),
      k: () => move(-1),
      ArrowDown: () => move(1),
      ArrowUp: () => move(-1),
      Enter: open,
      "/": () => box.current?.focus(),
      ArrowLeft: () => toStep(state.previous),
      ArrowRight: () => toStep(state.next),
      u: () => go(href(["run", run.run], { at: step })),
    },
    [route, state],
  );
  const badges = Object.entries(state.badges ?? {}).filter(([, count]) => count > 0);
  const on = new Set((badge ?? "").split(",").filter(Boolean));
  const flip = (name) => {
    const next = new Set(on);
    if (next.delete(name)) next.add(`-${name}`);
    else if (!next.delete(`-${name}`)) next.add(name);
    setQuery({ badge: [...next].join(","), at: null });
  };
  const [low, high] = range(state.groups);
  const skip = commonHead(state.groups);
  const options = step === null ? [...SORTS, ["step", "step"]] : SORTS;

  return html`<section class="page groups">
    <div class="toolbar">
      ${
        step !== null &&
        html`<span class="stepper"><button type="button" title="step before (←)"
            disabled=${(state.previous ?? null) === null} onClick=${() => toStep(state.previous)}>←</button>
        <strong id="step">step ${step}</strong><button type="button" title="step after (→)"
          disabled=${(state.next ?? null) === null} onClick=${() => toStep(state.next)}>→</button>
        <a class="small" href=${href(["run", run.run], { at: step })}>on the curves</a></span>`
      }
      <input type="search" ref=${box} id="search" placeholder="search prompts and completions ( / )"
        aria-label="search groups" value=${q ?? ""}
        onInput=${(event) => setQuery({ q: event.target.value, at: null })} />
      <${Choice} label="sort" id="sort" value=${sort ?? "group"} options=${options}
        set=${(value) => setQuery({ sort: value === "group" ? null : value, at: null })} />
      <button type="button" title="turn the order round" aria-label="order"
        onClick=${() => setQuery({ order: order === "desc" ? null : "desc", at: null })}>
        ${order === "desc" ? "↓" : "↑"}</button>
      <span class="grow"></span>
      <span class="muted small" id="count">
        ${state.total === undefined ? "" : `${number(state.total)} of ${number(state.all)} groups`}
        ${state.complete === false ? ` · reading ${state.scanned}/${state.of}` : ""}</span>
    </div>
    ${
      badges.length > 0 &&
      html`<div class="filters" role="group" aria-label="filter by badge">${badges.map(
        ([name, count]) => html`<button type="button" key=${name}
      class=${classes("badge", name, on.has(name) && "on", on.has(`-${name}`) && "off")}
        aria-pressed=${String(on.has(name))} data-badge=${name}
      title=${`${BADGES[name]?.[1] ?? name}; click: only these, again: without these, again: all`}
        onClick=${() => flip(name)}>
        ${on.has(`-${name}`) ? "without " : ""}${BADGES[name]?.[0] ?? name} ${number(count)}</button>`,
      )}</div>`
    }
    ${(state.notes ?? []).map((note) => html`<p class="note">${note}</p>`)}
    ${
      state.error
        ? html`<${Problem} error=${state.error} />`
        : state.total === undefined
          ? html`<div class="waiting" role="status">Loading …</div>`
          : state.total === 0
            ? html`<${Empty}>${state.all ? "No group matches." : "No groups were kept for this step."}<//>`
            : html`<${GroupHead} run=${run} withStep=${step === null} /><${VirtualList} count=${state.total} rowHeight=${narrow ? 84 : 38} at=${at < 0 ? null : at}
                  needed=${needed} label="groups"
          row=${(i) =>
            state.groups[i]
              ? html`<${GroupLine} key=${i} group=${state.groups[i]} run=${run} low=${low} high=${high}
                    skip=${skip} chosen=${i === at} withStep=${step === null} />`
              : html`<div class="group-row waiting-row" key=${i}>…</div>`} />`
    }
    <p class="muted small keys">
      <kbd>j</kbd> <kbd>k</kbd> choose · <kbd>Enter</kbd> open · <kbd>←</kbd> <kbd>→</kbd> step · <kbd>/</kbd> search · <kbd>u</kbd> curves</p>
  </section>`;
}

function useNarrow() {
  const query = matchMedia("(max-width: 760px)");
  const [narrow, setNarrow] = useState(query.matches);
  useEffect(() => {
    const follow = () => setNarrow(query.matches);
    query.addEventListener("change", follow);
    return () => query.removeEventListener("change", follow);
  }, []);
  return narrow;
}
