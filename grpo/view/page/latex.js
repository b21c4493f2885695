// The LaTeX that models write in answers, drawn by Temml as MathML elements; what it cannot read stays as it was written.

import temml from "./vendor/temml/temml.js";
import { html, useLayoutEffect, useRef } from "./ui.js";

const MOST = 4000; // characters of one formula; beyond it is text
// No macro makes a formula grow without end, no command makes a link, loads a file or sets a style.
const LIMITS = { trust: false, strict: false, maxSize: [20, 20], maxExpand: 200, throwOnError: true };

/** The formula between two dollars, or null where it cannot be read. */
export function math(source, display) {
  if (source.length > MOST) return null;
  const drawn = document.createElement("span");
  try {
    temml.render(source, drawn, { ...LIMITS, displayMode: display });
  } catch {
    return null;
  }
  return html`<${Drawn} nodes=${[...drawn.childNodes]} />`;
}

function Drawn({ nodes }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    place.current.replaceChildren(...nodes);
  }, [nodes]);
  return html`<span class="math" ref=${place}></span>`;
}
