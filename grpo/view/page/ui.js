// What every view draws with: templates, hooks, numbers as people read them, and the three states of waiting.

import { h, render } from "./vendor/preact/index.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact/hooks.js";
import htm from "./vendor/htm/index.js";

export const html = htm.bind(h);
export { h, render, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** A number with as many digits as help: 0.1234, 12.35, 1,234, 1.2e-5; "–" where there is none. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0) return `−${number(-value, digits)}`;
  if (value === 0) return "0";
  if (value >= 1e6 || value < 1e-4) return value.toExponential(2).replace("e+", "e").replace("e-", "e−");
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(value >= 100 ? digits : Math.max(3, digits - 1))));
}

/** The same with its sign, a real minus: +0.94, −1.2. */
export function signed(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value > 0 ? `+${number(value)}` : number(value);
}

/** 45 s, 3 min 20 s, 2 h 05 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${number(seconds, 3)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${whole % 60} s`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);

/** The head of a text that may be a megabyte long. */
export const head = (text, length = 160) => (text.length > length ? `${text.slice(0, length)}…` : text);

export const classes = (...names) => names.filter(Boolean).join(" ");

/** A promise as {data, error, loading}; what it gave last stays while the next one is on its way. */
export function useLoaded(load, keys) {
  const [state, setState] = useState({ loading: true });
  useEffect(() => {
    let wanted = true;
    setState((last) => ({ ...last, loading: true }));
    load().then(
      (data) => wanted && setState({ data, loading: false }),
      (error) => wanted && setState({ error, loading: false }),
    );
    return () => {
      wanted = false;
    };
  }, keys);
  return state;
}

/** What `useLoaded` found: the content, or one line that says why there is none. */
export function Loaded({ state, children }) {
  if (state.error) return html`<${Problem} error=${state.error} />`;
  if (state.data === undefined) return html`<div class="waiting" role="status">Loading …</div>`;
  return children(state.data);
}

export function Problem({ error }) {
  const lost = error.status === 404;
  return html`<div class="problem" role="alert">
    <strong>${lost ? "Not there." : "This did not work."}</strong>
    <span>${" "}${error.message}</span>
    <p><a href="#/">All runs</a></p>
  </div>`;
}

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export function Toggle({ on, set, children, title }) {
  return html`<button type="button" class=${classes("toggle", on && "on")} aria-pressed=${String(Boolean(on))}
    title=${title} onClick=${() => set(!on)}>${children}</button>`;
}

export function Choice({ value, options, set, label, id }) {
  return html`<label class="choice">${label && html`<span>${label}</span>`}
    <select id=${id} value=${value} onChange=${(event) => set(event.target.value)}>
      ${options.map(([key, name]) => html`<option value=${key} selected=${key === value}>${name}</option>`)}
    </select></label>`;
}

/** What an element measures (clientWidth, clientHeight), now and after every change. */
export function useSize(ref, measure, initial) {
  const [size, setSize] = useState(initial);
  useLayoutEffect(() => {
    const look = () => ref.current && setSize(Math.max(120, Math.floor(ref.current[measure])));
    look();
    const watch = new ResizeObserver(look);
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return size;
}

export const useWidth = (ref, initial = 600) => useSize(ref, "clientWidth", initial);

/** Keys of the whole page, except while someone types or presses what has the focus. */
export function useKeys(handlers, keys) {
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest("input, textarea, select, [contenteditable]")) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      if ((event.key === "Enter" || event.key === " ") && event.target.closest("a, button, summary, video")) return;
      const handler = handlers[event.key];
      if (handler) {
        event.preventDefault();
        handler(event);
      }
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, keys);
}
