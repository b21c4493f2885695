// One group: the tries side by side, every number that made the gradient, and their tokens on a heat map.

import { api, media } from "./api.js";
import { ArmsView } from "./arms.js";
import { EpisodesView } from "./episodes.js";
import { Badges } from "./groups.js";
import { available, HEATS, labelOf, limitOf } from "./heat.js";
import { go, href, setQuery } from "./route.js";
import { diverging } from "./scale.js";
import { Plain, Text } from "./text.js";
import { Explained, TokenMap } from "./tokens.js";
import { Choice, classes, html, Loaded, number, signed, Toggle, useKeys, useLoaded, useMemo, useState } from "./ui.js";

const AT_ONCE = 2048; // tokens a row that are asked for at first
const MORE = 200000; // characters of a long text that are asked for at once

/** The images that a prompt holds; all tries of a group have the same. */
function Shown({ samples }) {
  const images = (samples.find((one) => one.kind === "text")?.media ?? []).filter((one) => one.kind === "image");
  if (!images.length) return null;
  return html`<div class="shown">${images.map(
    (one) => html`<img src=${media(one.url)} alt=${`${one.name} of the prompt`} loading="lazy" />`,
  )}</div>`;
}

export function GroupView({ route, run, step, group, metrics }) {
  const path = `/api/runs/${run.run}/steps/${step}/groups/${group}`;
  const state = useLoaded(() => api(path), [path]);
  const [until, setUntil] = useState(AT_ONCE);
  const tokens = useLoaded(() => tokenRows(path, until), [path, until]);
  const to = (other) =>
    other && go(href(["run", run.run, "step", other.step, "group", other.group], keep(route.query)));
  const up = () => go(href(["run", run.run, "step", step]));
  useKeys(
    {
      ArrowLeft: () => to(state.data?.previous),
      ArrowRight: () => to(state.data?.next),
      k: () => to(state.data?.previous),
      j: () => to(state.data?.next),
      u: up,
      Escape: () => (route.query.token ? setQuery({ token: null }) : up()),
    },
    [route, state],
  );
  return html`<section class="page group"><${Loaded} state=${state}>${(data) => html`
    <div class="toolbar">
      <span class="stepper"><button type="button" title="group before (←)" disabled=${!data.previous}
        onClick=${() => to(data.previous)}>←</button>
        <strong id="group">step ${data.step}, group ${data.group}</strong>
        <button type="button" title="group after (→)" disabled=${!data.next} onClick=${() => to(data.next)}>→</button>
          </span>
      <${Badges} names=${data.badges} />
      <span class="grow"></span>
      <a href=${href(["run", run.run, "step", step])}>groups of this step</a>
      <a href=${href(["run", run.run], { at: step })}>curves</a>
      ${
        data.prompt_key &&
        html`<a
        href=${href(["run", run.run, "prompt", data.prompt_key])}>this prompt through time</a>`
      }
    </div>
    ${(data.notes ?? []).map((note) => html`<p class="note">${note}</p>`)}
    <${Body} ...${{ route, run, data, tokens, metrics, more: () => setUntil(until + AT_ONCE) }} />`}<//></section>`;
}

/** What stays when another group is opened: how it is looked at, not which token. */
const keep = ({ heat, think, latex, markdown }) => ({ heat, think, latex, markdown });

/** Token numbers of all rows up to `until`, pieced together: an answer may end before what was asked for. */
async function tokenRows(path, until) {
  let found = null;
  for (let from = 0; from < until;) {
    const part = await api(`${path}/tokens?from=${from}&to=${Math.min(from + AT_ONCE, until)}`);
    if (!found) found = { ...part, rows: part.rows.map((row) => ({ ...row })) };
    else {
      found.ended = part.ended;
      for (const row of part.rows) {
        const mine = found.rows.find((other) => other.row === row.row);
        for (const [name, values] of Object.entries(row))
          if (mine && Array.isArray(values)) mine[name] = [...(mine[name] ?? []), ...values];
      }
    }
    if (part.to <= from || part.ended || part.rows.every((row) => (row.total ?? 0) <= part.to)) break;
    from = part.to;
  }
  return found;
}

function Body({ route, run, data, tokens, metrics, more }) {
  const kinds = new Set(data.samples.map((sample) => sample.kind));
  const rows = (tokens.data?.rows ?? []).filter((row) => row.mask); // a damaged file has none
  const heats = useMemo(() => available(rows), [tokens.data]);
  const words = rows.some((row) => row.tokens);
  const asked = route.query.heat;
  const heat = asked === "text" || heats.includes(asked) ? asked : (heats[0] ?? "text");
  const limit = useMemo(() => (HEATS[heat] ? limitOf(rows, heat) : 0), [tokens.data, heat]);
  const [hover, setHover] = useState(null);
  const [row, t] = (route.query.token ?? "").split(".").map(Number);
  const pinned = route.query.token ? rows.find((one) => one.row === row && t < one.mask.length) : null;
  const objective = data.objective ?? {};
  const look = {
    path: `/api/runs/${run.run}/steps/${data.step}/groups/${data.group}`,
    heat,
    limit,
    rows: new Map(rows.map((one) => [one.row, one])),
    route,
    chosen: pinned ? { row, t } : null,
    point: (one, place, element) =>
      setHover(place === null ? null : { row: one, t: place, place: element.getBoundingClientRect() }),
    choose: (one, place) => setQuery({ token: `${one.row}.${place}` }, false),
  };
  const episodic = kinds.has("trace");
  const options = [...heats.map((key) => [key, labelOf(key, objective)]), ...(episodic ? [] : [["text", "no colours: text"]])];
  const long = rows.some((one) => one.total > one.mask.length);
  return html`
    ${
      data.prompt !== null &&
      html`<details class="prompt" open=${data.prompt.length < 3000}><summary>prompt <span class="muted small">
          ${data.prompt.length.toLocaleString("en")} characters</span></summary>
      <${Shown} samples=${data.samples} />
      <div class="prompt-text" dir="auto"><${Plain} text=${data.prompt} /></div></details>`
    }
    <${Summary} data=${data} />
    <div class="toolbar heat">
      ${
        options.length > 1 &&
        !kinds.has("arm") &&
        html`<${Choice} label="colour" id="heat" value=${heat}
        options=${options} set=${(value) => setQuery({ heat: value })} />`
      }
      ${HEATS[heat] && !kinds.has("arm") && html`<${Legend} heat=${heat} limit=${limit} />`}
      ${
        words &&
        html`<span class="grow"></span><span class="small muted marks"><span
        class="t clip-high">clipped high</span> <span class="t clip-low">clipped low</span> <span
        class="t gated">masked</span> <span class="t other">not a decision</span></span>`
      }
      ${
        kinds.has("text") &&
        html`<span class="toggles">${["think", "latex", "markdown"].map(
          (name) => html`<${Toggle} on=${route.query[name] === "1"} title=${TOGGLES[name][1]}
        set=${(on) => setQuery({ [name]: on ? "1" : null, heat: on ? "text" : route.query.heat })}>${TOGGLES[name][0]}
          <//>`,
        )}</span>`
      }
    </div>
    ${tokens.error && html`<p class="note">${tokens.error.message}</p>`}
    ${(tokens.data?.notes ?? []).map((note) => html`<p class="note">${note}</p>`)}
    ${
      episodic
        ? html`<${EpisodesView} ...${{ data, run, look, route }} />`
        : kinds.has("arm")
          ? html`<${ArmsView} ...${{ data, run, look, metrics, step: data.step }} />`
          : html`<div class="samples" tabindex="0" aria-label="tries, best advantage first">
                ${(data.answer ?? null) !== null && !short(data.answer) && html`<${Answer} text=${data.answer} route=${route} />`}
                ${data.samples.map(
                  (sample, i) => html`<${Sample} key=${sample.row}
                ...${{ sample, i, data, look, route }} />`,
                )}</div>`
    }
    ${
      long &&
      (tokens.data.ended
        ? html`<p class="note">The exported file holds the first ${number(tokens.data.to)} tokens of each try.</p>`
        : html`<button type="button" class="more" onClick=${more}>more tokens</button>`)
    }
    ${
      pinned
        ? html`<${Explained} key="pinned" row=${pinned} t=${t} objective=${objective} pinned
              close=${() => setQuery({ token: null })} />`
        : hover &&
          html`<${Explained} key="hover" row=${hover.row} t=${hover.t} objective=${objective}
                place=${hover.place} />`
    }
    <p class="muted small keys">
      <kbd>←</kbd> <kbd>→</kbd> other groups · <kbd>u</kbd> groups of the step · hover ${episodic ? "a decision" : kinds.has("arm") ? "a pull" : "a token"} for its formula, click to keep it</p>`;
}

const TOGGLES = {
  think: ["think", "fold what stands between <think> and </think>"],
  latex: ["LaTeX", "draw formulas"],
  markdown: ["markdown", "lay out headings, lists and code"],
};

function Legend({ heat, limit }) {
  const { ends, paint, told } = HEATS[heat];
  const around = heat === "ratio" ? (x) => Math.exp(x) : (x) => x;
  const both = ["term", "advantage", "ratio", "kl", "sampler"].includes(heat);
  const stops = both ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const value = (share) => around((heat === "logp" || heat === "old_logp" ? -1 : 1) * share * limit);
  return html`<span class="legend small"><span class="muted">${told(value(stops[0]))} ${ends[0]}</span>
    ${stops.map(
      (share) => html`<span class="legend-box" style=${{ backgroundColor: paint(value(share), limit) }}>
      </span>`,
    )}<span class="muted">${ends[1]} ${told(value(1))}</span></span>`;
}

/** What the loss has beside the term: the KL, a teacher's, the entropy bonus. */
export const penalty = ({ beta, kl_in: where, kl_importance: weighed, entropy_coef: entropy, teacher_coef, teacher_in }) =>
  [
    beta && where === "loss" && ` + ${number(beta)}·${weighed ? "r·" : ""}KL`,
    teacher_coef && teacher_in === "loss" && ` + ${number(teacher_coef)}·KL to the teacher`,
    entropy && ` ${entropy < 0 ? "+" : "−"} ${number(Math.abs(entropy))}·entropy`,
  ]
    .filter(Boolean)
    .join("");

/** Whether an answer fits a line; a longer one stands beside the tries. */
const short = (answer) => answer !== null && answer !== undefined && answer.length <= 60 && !answer.includes("\n");

/** The reference answer as a column of its own, before the tries. */
function Answer({ text, route }) {
  const { latex, markdown } = route.query;
  return html`<article class="sample reference"><header class="sample-head"><strong>reference answer</strong></header>
    <div class="sample-body"><${Text} text=${text} latex=${latex === "1"} markdown=${markdown === "1"} /></div></article>`;
}

/** The group's own numbers, and the formula that makes advantages of rewards. */
function Summary({ data }) {
  const objective = data.objective ?? {};
  return html`<dl class="vitals summary">
    <div><dt>tries</dt><dd>${data.samples.length}</dd></div>
    <div><dt>mean reward</dt><dd>${number(data.mean)}</dd></div>
    <div><dt>standard deviation</dt><dd>${number(data.std)}</dd></div>
    ${
      short(data.answer) &&
      html`<div><dt>reference answer</dt><dd class="answer"><${Plain} text=${data.answer} /></dd></div>`
    }
    ${
      objective.advantage_formula &&
      html`<div><dt>advantage</dt><dd class="formula">${objective.advantage_formula}
      </dd>${besides(objective).map((text) => html`<dd class="small muted besides">${text}</dd>`)}</div>`
    }
    ${
      objective.formula &&
      html`<div><dt>minimised, a decision</dt><dd class="formula">
      ${objective.formula}${penalty(objective)}</dd></div>`
    }
  </dl>`;
}

/** What else the recipe does between rewards and advantages, in words. */
function besides({ credit, baseline, whiten, scale, kl_in: where, beta }) {
  return [
    beta && where === "reward" && "before it, β times the KL is taken off the reward",
    credit === "per_reward" && "each reward by itself in its group, then summed by their weights",
    credit === "reward_to_go" &&
      `decision by decision${baseline === "given" ? "" : ", against the group at the same time"}; a try is shown by its mean`,
    scale === "signal_share" && "scaled by the share of groups that have a signal",
    (whiten === "rows" || whiten === "decisions") &&
      `after it, whitened over all ${whiten} of the batch: mean 0, standard deviation 1`,
  ].filter(Boolean);
}

/** The sum with its numbers, where the recipe is no more than that and it gives the advantage; else null. */
export function workedSum(sample, { mean, std, objective }) {
  const { baseline, scale, credit, whiten, beta, kl_in: where } = objective ?? {};
  const simple = credit === "trajectory" && whiten === "none" && (!beta || where === "loss");
  const known = [sample.reward, sample.advantage, mean, std].every((value) => value !== null && value !== undefined);
  if (!simple || !known || baseline !== "group_mean" || !["group_std", "none"].includes(scale)) return null;
  const value = sample.reward - mean;
  const result = scale === "none" ? value : std > 0 ? value / std : 0;
  // Clipped rewards, another count of degrees of freedom or tries that are not shown make it another sum.
  if (Math.abs(result - sample.advantage) > 0.005 + 0.01 * Math.abs(sample.advantage)) return null;
  const difference = `${number(sample.reward)} − ${mean < 0 ? `(${number(mean)})` : number(mean)}`;
  return scale === "none" ? difference : `(${difference}) / ${number(std)}`;
}

/** How the reward became the advantage, in this sample's numbers. */
export function Arithmetic({ sample, data }) {
  const parts = (sample.parts ?? []).filter((part) => part.value !== null || data.samples.length);
  return html`<table class="sums"><tbody>
    ${parts.map(
      (part) => html`<tr><td>${part.name}</td><td>
          ${number(part.value)}${
            part.weight !== null && part.weight !== undefined
              ? html`<span
          class="muted"> × ${number(part.weight)}</span>`
              : ""
          }</td>
      <td>${
        part.value === null
          ? html`<span
        class="muted">no opinion</span>`
          : signed(part.value * (part.weight ?? 1))
      }</td></tr>`,
    )}
    <tr class="total"><td>reward</td><td></td><td>${number(sample.reward)}</td></tr>
    <tr><td colspan="2">advantage <span class="muted worked">${workedSum(sample, data) ?? ""}</span></td><td><strong>
      ${signed(sample.advantage)}</strong></td></tr></tbody></table>`;
}

export function SampleHead({ sample, i, data }) {
  const most = Math.max(...data.samples.map((one) => Math.abs(one.advantage ?? 0)), 1e-9);
  const unit = `${sample.kind === "text" ? "token" : "decision"}${sample.length === 1 ? "" : "s"}`;
  const length = `${number(sample.length)} ${unit}`;
  const told = [`row ${sample.row}`, length, sample.stop].filter(Boolean).join(" · ");
  return html`<header class="sample-head"
      style=${{ borderTopColor: sample.advantage ? diverging(sample.advantage, most * 0.72) : "" }}>
    <span class="rank">${i + 1}</span>
    <span class="muted small">${told}</span>
    ${
      ["truncated", "failed"].includes(sample.status) &&
      html`<span class=${`badge ${sample.status}`}>${sample.status}
      </span>`
    }
    ${
      sample.clipped &&
      sample.clipped[0] + sample.clipped[1] > 0 &&
      html`<span class="small muted"
      title="clipped low, high">clip ${sample.clipped[0]}↓ ${sample.clipped[1]}↑</span>`
    }
  </header>`;
}

/** A state and what was done there, of a policy that is no language model and plays no episodes. */
function Pair({ sample, look }) {
  const row = look.rows.get(sample.row);
  const single = row?.mask.length === 1; // else its numbers are of several decisions
  const value = single ? HEATS[look.heat]?.value(row, 0) : null;
  const ground = (value ?? null) === null ? "" : HEATS[look.heat].paint(value, look.limit);
  const chosen = look.chosen?.row === sample.row && "chosen";
  return html`<dl class="pair"><dt>state</dt><dd><${Plain} text=${sample.state} /></dd><dt>action</dt><dd>
    ${
      single
        ? html`<span class=${classes("t", chosen)} style=${{ backgroundColor: ground }} data-t="0"
      onMouseEnter=${(event) => look.point(row, 0, event.target)} onMouseLeave=${() => look.point(null, null)}
        onClick=${() => look.choose(row, 0)}><${Plain} text=${sample.action} /></span>`
        : html`<${Plain} text=${sample.action} />`
    }</dd></dl>`;
}

function Sample({ sample, i, data, look, route }) {
  const row = look.rows.get(sample.row);
  const coloured = look.heat !== "text" && row?.tokens;
  return html`<article class="sample" data-row=${sample.row}>
    <${SampleHead} ...${{ sample, i, data }} />
    <${Arithmetic} sample=${sample} data=${data} />
    ${
      sample.error &&
      html`<details class="fault" open><summary>${sample.error}</summary>
      ${sample.traceback && html`<pre><${Plain} text=${sample.traceback} /></pre>`}</details>`
    }
    <div class="sample-body">
      ${
        coloured
          ? html`<${TokenMap} row=${row} heat=${look.heat} limit=${look.limit}
                chosen=${look.chosen?.row === row.row ? look.chosen.t : null}
          point=${(t, element) => look.point(row, t, element)} choose=${(t) => look.choose(row, t)} />`
          : sample.kind === "pair"
            ? html`<${Pair} sample=${sample} look=${look} />`
            : html`<${Said} sample=${sample} route=${route} path=${look.path} />`
      }
    </div>
        <${Extras} sample=${sample} />
  </article>`;
}

/** What was said, by the reader's toggles; a text that the server cut goes on by a button. */
function Said({ sample, route, path }) {
  const [rest, setRest] = useState("");
  const [failed, setFailed] = useState(null);
  const { think, latex, markdown } = route.query;
  const as = { think: think === "1", latex: latex === "1", markdown: markdown === "1" };
  if (sample.messages?.length) {
    return sample.messages.map(
      (message) => html`<div class=${classes("message", message.role)}><div class="small muted">${message.role}</div>
      <${Text} text=${typeof message.content === "string" ? message.content : JSON.stringify(message, null, 1)}
        ...${as} /></div>`,
    );
  }
  const text = (sample.completion ?? "") + rest;
  const more = () =>
    api(`${path}/text?row=${sample.row}&from=${text.length}&to=${text.length + MORE}`).then(
      (part) => setRest(rest + part.text),
      setFailed,
    );
  return html`<${Text} text=${text} ...${as} />
    ${
      sample.completion_cut > text.length &&
      html`<p class="note">
          ${text.length.toLocaleString("en")} of ${sample.completion_cut.toLocaleString("en")} characters.
      <button type="button" onClick=${more}>more</button>${failed && ` ${failed.message}`}</p>`
    }`;
}

function Extras({ sample }) {
  const more = { ...(sample.extras ?? {}), ...(sample.fields ?? {}) };
  if (!Object.keys(more).length) return null;
  return html`<details class="small"><summary class="muted">more</summary><pre><${Plain}
      text=${JSON.stringify(more, null, 1)} /></pre></details>`;
}
