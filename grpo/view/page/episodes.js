// A group of episodes under one scrubber: videos that run together, returns as bars, and what was seen, done, paid and
// imagined as lanes over the same time.

import { media } from "./api.js";
import { Arithmetic, SampleHead } from "./group.js";
import { HEATS } from "./heat.js";
import { setQuery } from "./route.js";
import { between, SERIES } from "./scale.js";
import {
  classes,
  html,
  number,
  signed,
  useEffect,
  useKeys,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
  useWidth,
} from "./ui.js";

const PER_SECOND = 30;
const FIRST = ["actions", "rewards", "observations"];

export function EpisodesView({ data, look, route }) {
  const length = Math.max(1, ...data.samples.map((sample) => sample.length ?? sample.trace?.length ?? 1));
  const [at, setAt] = useState(Math.min(Number(route.query.t ?? 0) || 0, length - 1));
  const [playing, setPlaying] = useState(false);
  const rewards = data.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(0, ...rewards)];
  const ranges = useMemo(() => domains(data.samples), [data]);
  const films = data.samples.filter((sample) => sample.media?.some((one) => one.kind === "video"));

  useEffect(() => {
    if (!playing) return undefined;
    const began = performance.now();
    const first = at >= length - 1 ? 0 : at;
    let frame = requestAnimationFrame(function tick(now) {
      const next = Math.min(length - 1, first + ((now - began) / 1000) * PER_SECOND);
      setAt(Math.floor(next));
      if (next >= length - 1) setPlaying(false);
      else frame = requestAnimationFrame(tick);
    });
    return () => cancelAnimationFrame(frame);
  }, [playing]);
  useKeys({ " ": () => setPlaying(!playing) }, [playing]);
  const settle = (event) => setQuery({ t: Number(event.target.value) || null });
  const shared = {
    data,
    look,
    at,
    length,
    ranges,
    low,
    high,
    seek: (t) => {
      setPlaying(false);
      setAt(t);
    },
  };

  return html`
    <div class="scrubber" role="group" aria-label="time">
      <button type="button" id="play" aria-label=${playing ? "pause" : "play"} onClick=${() => setPlaying(!playing)}>
        ${playing ? "❚❚" : "▶"}</button>
      <input type="range" id="scrub" min="0" max=${length - 1} value=${at} aria-label="step of the episodes"
        onInput=${(event) => shared.seek(Number(event.target.value))} onChange=${settle} />
      <span class="at" id="at">t = ${at} <span class="muted">of ${length}</span></span></div>
    ${
      films.length > 0 &&
      html`<div class="films">${films.map(
        (sample) => html`<${Film} key=${sample.row}
      sample=${sample} at=${at} length=${length} playing=${playing} low=${low} high=${high} />`,
      )}</div>`
    }
    <div class="episodes">${data.samples.map(
      (sample, i) => html`<${Episode} key=${sample.row} sample=${sample} i=${i}
      ...${shared} />`,
    )}</div>`;
}

/** A video whose time follows the scrubber; an episode that ended shows its last frame. */
function Film({ sample, at, length, low, high }) {
  const film = useRef(null);
  const { url } = sample.media.find((one) => one.kind === "video");
  const seek = () => {
    const { duration } = film.current ?? {};
    if (duration)
      film.current.currentTime = Math.min(
        duration - 0.01,
        (Math.min(at, sample.length - 1) / Math.max(1, sample.length - 1)) * duration,
      );
  };
  useEffect(seek, [at]);
  return html`<figure class=${classes("film", at >= sample.length && "over")}><video ref=${film}
      src=${media(url)} muted playsinline preload="auto" onLoadedMetadata=${seek}></video>
    <figcaption><${ReturnBar} value=${sample.reward} low=${low} high=${high} /></figcaption></figure>`;
}

function ReturnBar({ value, low, high }) {
  const share = (part) => `${(part / (high - low || 1)) * 100}%`;
  const [from, to] = [Math.min(0, value ?? 0), Math.max(0, value ?? 0)];
  return html`<span class="return"><span class="return-bar" aria-hidden="true"><span
      style=${{ left: share(from - low), width: share(to - from), background: between(value, low, high) }}></span></span>
    <span class="value">${number(value)}</span></span>`;
}

function Episode({ sample, i, data, look, at, length, ranges, low, high, seek }) {
  const { trace = {} } = sample;
  const row = look.rows.get(sample.row);
  const lanes = laneNames(trace);
  const stride = trace.stride ?? sample.stride ?? 1;
  const over = at >= (sample.length ?? length);
  return html`<article class="episode" data-row=${sample.row}>
    <div class="episode-side"><${SampleHead} ...${{ sample, i, data }} />
      <${ReturnBar} value=${sample.reward} low=${low} high=${high} />
      <div class="small">advantage <strong>${signed(sample.advantage)}</strong> <span
        class="muted">(mean over its decisions)</span></div>
      ${sample.parts?.length > 0 && html`<${Arithmetic} sample=${sample} data=${data} />`}
      ${sample.error && html`<div class="fault small">${sample.error}</div>`}
      <dl class="now small">${lanes.map(
        (name) => html`<div><dt>${label(name)}</dt><dd>
        ${over ? "over" : told(trace[name][Math.floor(at / stride)])}</dd></div>`,
      )}</dl></div>
    <div class="lanes">
      ${lanes.map(
        (name) => html`<${Lane} key=${name} name=${label(name)} columns=${columnsOf(trace[name])}
        range=${ranges[name]} discrete=${ranges[name].discrete} stride=${stride} length=${length} at=${at}
        seek=${seek} />`,
      )}
      ${
        row &&
        HEATS[look.heat] &&
        html`<${HeatStrip} row=${row} look=${look} length=${length} at=${at}
        seek=${seek} />`
      }
      ${(sample.media ?? [])
        .filter((one) => one.kind !== "video")
        .map(
          (one) => html`<figure class="strip"><figcaption class="small muted">${one.name}</figcaption>
        <div class="strip-frame"><img src=${media(one.url)} alt=${`${one.name} frames of row ${sample.row}`}
          loading="lazy" />${
            one.kind === "strip" &&
            html`<span class="cursor" style=${{ left: `${((at + 0.5) / length) * 100}%` }}></span>`
          }
          </div></figure>`,
        )}
    </div></article>`;
}

const label = (name) => name.replaceAll("_", " ");
const told = (value) =>
  Array.isArray(value)
    ? `[${value
        .slice(0, 6)
        .map((x) => number(x, 3))
        .join(", ")}${value.length > 6 ? ", …" : ""}]`
    : number(value ?? null, 3);
const numeric = (value) =>
  typeof value === "number" || (Array.isArray(value) && value.length > 0 && value.every((x) => typeof x === "number"));

/** Everything in a trace that is a series of numbers: what we know first, then whatever a room adds. */
function laneNames(trace) {
  const names = Object.keys(trace).filter(
    (name) => Array.isArray(trace[name]) && trace[name].length && numeric(trace[name].find((value) => value !== null)),
  );
  const order = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return names.sort((a, b) => order(a) - order(b));
}

/** (T,) or (T, D) as D columns; at most as many as there are colours. */
function columnsOf(values) {
  const wide = Array.isArray(values.find((value) => value !== null));
  if (!wide) return [values];
  const count = Math.min(SERIES.length, Math.max(...values.slice(0, 50).map((value) => value?.length ?? 0)));
  return Array.from({ length: count }, (_, d) => values.map((value) => value?.[d] ?? null));
}

/** The range of each lane over all episodes, so that they can be compared. */
function domains(samples) {
  const found = {};
  for (const { trace = {} } of samples) {
    for (const name of laneNames(trace)) {
      const own = (found[name] ??= { low: Infinity, high: -Infinity, discrete: true });
      for (const column of columnsOf(trace[name])) {
        for (const value of column) {
          if (value === null) continue;
          own.low = Math.min(own.low, value);
          own.high = Math.max(own.high, value);
          own.discrete &&= Number.isInteger(value);
        }
      }
    }
  }
  return found;
}

/** A canvas as wide as its place, drawn again when what it shows changes. */
function Drawn({ height, draw, keys, onMove, onLeave, onPick }) {
  const canvas = useRef(null);
  const place = useRef(null);
  const width = useWidth(place, 400);
  useLayoutEffect(() => {
    const scale = window.devicePixelRatio || 1;
    canvas.current.width = width * scale;
    canvas.current.height = height * scale;
    const context = canvas.current.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  }, [width, height, ...keys]);
  const share = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return Math.max(0, Math.min(0.9999, (event.clientX - box.left) / box.width));
  };
  return html`<div class="drawn" ref=${place}><canvas ref=${canvas} style=${{ width: "100%", height: `${height}px` }}
    onMouseMove=${(event) => onMove?.(share(event), event)} onMouseLeave=${onLeave}
      onClick=${(event) => onPick?.(share(event), event)}></canvas></div>`;
}

function Lane({ name, columns, range, discrete, stride, length, at, seek }) {
  const height = 40;
  const draw = (context, width) => {
    const span = range.high - range.low;
    const y = (value) => (span ? height - 4 - ((value - range.low) / span) * (height - 8) : height / 2);
    const x = (i) => ((i * stride + 0.5) / length) * width;
    columns.forEach((column, d) => {
      context.strokeStyle = SERIES[d % SERIES.length];
      context.lineWidth = 1.25;
      context.beginPath();
      let pen = false;
      let last = null;
      column.forEach((value, i) => {
        if (value === null) {
          pen = false;
          return;
        }
        if (!pen) context.moveTo(x(i), y(value));
        else {
          if (discrete) context.lineTo(x(i), y(last));
          context.lineTo(x(i), y(value));
        }
        [pen, last] = [true, value];
      });
      context.stroke();
    });
  };
  return html`<div class="lane"><span class="lane-name">${name}</span><span class="lane-range">
      ${number(range.high, 3)}${range.high > range.low && html`<br />${number(range.low, 3)}`}</span>
    <${Drawn} height=${height} draw=${draw} keys=${[columns, length, range]}
      onPick=${(share) => seek(Math.floor(share * length))} />
    <span class="cursor" style=${{ "--at": (at + 0.5) / length }}></span></div>`;
}

/** A column of colour a decision, by the selector; clipped ones are marked above (high) or below (low). */
function HeatStrip({ row, look, length, at, seek }) {
  const heat = HEATS[look.heat];
  const height = 26;
  const draw = (context, width) => {
    const each = width / length;
    for (let t = 0; t < row.mask.length; t++) {
      const value = row.mask[t] ? heat.value(row, t) : null;
      if (value !== null) {
        context.fillStyle = heat.paint(value, look.limit);
        context.fillRect(t * each, 4, Math.max(each, 1), height - 8);
      }
      const side = row.clip?.[t];
      if (side) {
        context.fillStyle = side > 0 ? SERIES[0] : SERIES[1];
        context.fillRect(t * each, side > 0 ? 0 : height - 3, Math.max(each, 2), 3);
      }
    }
  };
  const under = (share) => (share * length < row.mask.length ? Math.floor(share * length) : null); // null: it was over
  const box = (event) => ({
    getBoundingClientRect: () => ({ left: event.clientX, top: event.clientY - 6, bottom: event.clientY + 6 }),
  });
  return html`<div class="lane heat-lane"><span class="lane-name">${heat.label}</span><span class="lane-range"></span>
    <${Drawn} height=${height} draw=${draw} keys=${[row, look.heat, look.limit, length]}
      onMove=${(share, event) => look.point(row, under(share), box(event))} onLeave=${() => look.point(row, null)}
      onPick=${(share) => {
        const t = under(share);
        if (t === null) return;
        seek(t);
        look.choose(row, t);
      }} />
    <span class="cursor" style=${{ "--at": (at + 0.5) / length }}></span></div>`;
}
