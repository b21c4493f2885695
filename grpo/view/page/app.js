// The page: a bar with the way back, and the view that the address names.

import { embedded } from "./api.js";
import { CompareView } from "./compare.js";
import { Help } from "./help.js";
import { DocsView } from "./metrics.js";
import { go, here, href, useRoute } from "./route.js";
import { RunView } from "./run.js";
import { RunsView } from "./runs.js";
import { html, render, useEffect, useKeys, useState } from "./ui.js";

const THEMES = ["auto", "light", "dark"];

/** A choice that outlives the visit, where the browser lets us keep it. */
function kept(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // a notebook's frame has no storage
  }
}

function keep(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    /* nothing to keep it in */
  }
}

function App() {
  const route = useRoute();
  const [theme, setTheme] = useState(kept("theme") ?? "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    keep("theme", theme);
  }, [theme]);
  const [helping, setHelping] = useState(false);
  const close = () => setHelping(false);
  useKeys({ "?": () => setHelping(!helping), ...(helping ? { Escape: close } : {}) }, [helping]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`
    <header class="bar">
      <a class="brand" href="#/">grpo<span>view</span></a>
      <${Crumbs} route=${route} />
      <span class="grow"></span>
      ${embedded && html`<span class="pill">exported</span>`}
      <a class="quiet" href="#/docs">metrics</a>
      <button type="button" class="quiet" id="help" title="help (?)" aria-label="help" onClick=${() => setHelping(!helping)}>?</button>
      <button type="button" class="quiet" id="theme" title="colours: ${theme}" onClick=${() => setTheme(next)}>
        ${{ auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[theme]}</button>
    </header>
    <main><${View} route=${route} /></main>
    ${helping && html`<${Help} close=${close} />`}`;
}

function View({ route }) {
  const [first, id] = route.parts;
  useEffect(() => {
    window.scrollTo(0, 0);
  }, [route.parts.slice(0, 4).join("/")]);
  if (first === undefined) return html`<${RunsView} route=${route} />`;
  if (first === "compare") return html`<${CompareView} route=${route} />`;
  if (first === "docs") return html`<${DocsView} route=${route} />`;
  if (first === "run" && id) return html`<${RunView} key=${id} route=${route} id=${id} />`;
  return html`<div class="problem" role="alert"><strong>No such page.</strong> <a href="#/">All runs</a></div>`;
}

/** Runs › this run › step 10 › group 3, each a link. */
function Crumbs({ route }) {
  const [first, id, second, step, third, group] = route.parts;
  const crumbs = [];
  if (first === "run") {
    crumbs.push([id, href(["run", id])]);
    if (second === "step") crumbs.push([`step ${step}`, href(["run", id, "step", step])]);
    else if (second) crumbs.push([second, href(route.parts)]);
    if (third === "group") crumbs.push([`group ${group}`, href(route.parts)]);
  } else if (first) {
    crumbs.push([first, href(route.parts.slice(0, 1), route.query)]);
  }
  return html`<nav class="crumbs" aria-label="where">${crumbs.map(
    ([text, to]) => html`<span
      aria-hidden="true">›</span><a href=${to}>${text}</a>`,
  )}</nav>`;
}

if (embedded?.start && !here()) go(embedded.start, true);
const place = document.getElementById("app");
place.replaceChildren(); // the words that stood there while the modules came
render(html`<${App} />`, place);
