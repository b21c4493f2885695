// The tokens of a completion on a coloured ground. Plain text until a piece comes into sight, then a span a token: the
// layout is the same, so ten thousand tokens cost as much as those that are seen.

import { explain } from "./objective.js";
import { HEATS } from "./heat.js";
import { visible } from "./text.js";
import { html, useEffect, useLayoutEffect, useRef } from "./ui.js";

const PIECE = 200;

/** A token as it is shown: what cannot be seen by its sign, line breaks kept. */
const shown = (token) => visible(token).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");

/** `row`: numbers and texts; `point(t, element)`: the pointer is there; `choose(t)`: a click; `chosen`: t or null. */
export function TokenMap({ row, heat, limit, point, choose, chosen }) {
  const place = useRef(null);
  const paint = useRef(null);
  paint.current = { heat, limit, chosen };
  const dress = (span, t) => {
    const { heat: key, limit: most, chosen: one } = paint.current;
    const value = row.mask[t] ? HEATS[key]?.value(row, t) : null;
    const side = row.clip?.[t];
    span.className = [
      "t",
      !row.mask[t] && "other",
      row.mask[t] && row.gate && !row.gate[t] && "gated",
      side > 0 && "clip-high",
      side < 0 && "clip-low",
      t === one && "chosen",
    ]
      .filter(Boolean)
      .join(" ");
    span.style.backgroundColor = value === null || value === undefined ? "" : HEATS[key].paint(value, most);
  };

  useLayoutEffect(() => {
    const pieces = [];
    const watch = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) if (isIntersecting) spell(target);
      },
      { rootMargin: "400px" },
    );
    const spell = (piece) => {
      watch.unobserve(piece);
      const from = Number(piece.dataset.from);
      piece.textContent = "";
      for (let t = from; t < Math.min(from + PIECE, row.tokens.length); t++) {
        const span = document.createElement("span");
        span.textContent = shown(row.tokens[t]);
        span.dataset.t = t;
        dress(span, t);
        piece.append(span);
      }
    };
    for (let from = 0; from < row.tokens.length; from += PIECE) {
      const piece = document.createElement("span");
      piece.dataset.from = from;
      piece.textContent = row.tokens
        .slice(from, from + PIECE)
        .map(shown)
        .join("");
      pieces.push(piece);
      watch.observe(piece);
    }
    place.current.replaceChildren(...pieces);
    const first = pieces[Math.floor((paint.current.chosen ?? -1) / PIECE)];
    if (first) {
      spell(first);
      first.querySelector(".chosen")?.scrollIntoView({ block: "center", inline: "center" });
    }
    return () => watch.disconnect();
  }, [row]);

  useEffect(() => {
    for (const span of place.current.querySelectorAll(".t")) dress(span, Number(span.dataset.t));
  }, [row, heat, limit, chosen]);

  const on = (event) => {
    const span = event.target.closest?.("[data-t]");
    return span ? [Number(span.dataset.t), span] : null;
  };
  return html`<div class="tokens" dir="auto" ref=${place}
    onMouseOver=${(event) => {
      const found = on(event);
      point(...(found ?? [null]));
    }} onMouseLeave=${() => point(null)}
    onClick=${(event) => {
      const found = on(event);
      if (found) choose(found[0]);
    }}></div>`;
}

/** A token's numbers in the objective's formula. */
export function Explained({ row, t, objective, place, pinned, close }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    if (!place || !box.current) return;
    const { width, height } = box.current.getBoundingClientRect();
    const left = Math.max(8, Math.min(place.left, window.innerWidth - width - 8));
    const below = place.bottom + 8 + height < window.innerHeight;
    box.current.style.left = `${left}px`;
    box.current.style.top = `${Math.max(8, below ? place.bottom + 8 : place.top - height - 8)}px`;
  }, [place, t, row]);
  const token = row.tokens?.[t];
  return html`<div class=${pinned ? "explained pinned" : "explained"} ref=${box}
      role=${pinned ? "region" : "tooltip"} aria-label="this decision">
    <div class="explained-head">${
      token !== undefined && token !== null
        ? html`<code class="token">${shown(token)}
      </code>`
        : ""
    }
      <span class="muted">decision ${t}${row.total ? ` of ${row.total}` : ""}</span>
      ${pinned && html`<button type="button" class="quiet" aria-label="close" onClick=${close}>✕</button>`}</div>
    <dl>${explain(row, t, objective).map(
      ([what, formula, numbers]) => html`<div><dt>${what}</dt><dd><span
      class="formula">${formula}</span>${numbers && html`<span class="numbers">${numbers}</span>`}</dd></div>`,
    )}</dl>
      </div>`;
}
