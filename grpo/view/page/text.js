// A completion as text to read. Every character reaches the page as a text node: nothing in it can become an element
// that is not made here, and marks that would turn or hide the line around them are shown by name.

import { html } from "./ui.js";
import { math } from "./latex.js";

// Control characters but tab and line feed, marks of direction and of no width, halves of surrogate pairs.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufeff]/gu;
const NAMES = { "\u001b": "␛", "\u0000": "␀", "\r": "␍" };
const CHUNK = 20000; // characters that one element holds

/** The text with control characters, escape codes and direction marks made visible. */
export function visible(text) {
  return text.replace(CONTROL, (mark) => {
    const code = mark.codePointAt(0);
    return (
      NAMES[mark] ??
      (code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`)
    );
  });
}

/** A text of any length, in elements that the browser lays out only when they come into sight. */
export function Plain({ text }) {
  const parts = [];
  for (let at = 0; at < text.length; at += CHUNK) parts.push(text.slice(at, at + CHUNK));
  return parts.map((part) => html`<span class=${parts.length > 1 ? "chunk" : ""}>${visible(part)}</span>`);
}

/** The completion by the reader's toggles: thinking folded away, LaTeX drawn, markdown laid out. */
export function Text({ text, think, latex, markdown }) {
  const body = (part) =>
    markdown
      ? html`<${Markdown} text=${part} latex=${latex} />`
      : latex
        ? inline(part, { latex })
        : html`<${Plain} text=${part} />`;
  if (!think) return html`<div class="text" dir="auto">${body(text)}</div>`;
  return html`<div class="text" dir="auto">${thoughts(text).map(([kind, part]) =>
    kind === "think"
      ? html`<details class="think"><summary>thinking, ${part.length.toLocaleString("en")} characters</summary>
              ${body(part)}</details>`
      : body(part),
  )}</div>`;
}

/** [["think" | "say", text], …]; an unfinished thought lasts to the end, one that the prompt began from the start. */
function thoughts(text) {
  const found = [];
  let rest = text;
  const close = rest.indexOf("</think>");
  const open = rest.indexOf("<think>");
  if (close >= 0 && (open < 0 || close < open)) {
    found.push(["think", rest.slice(0, close)]);
    rest = rest.slice(close + 8);
  }
  while (rest) {
    const begin = rest.indexOf("<think>");
    if (begin < 0) break;
    if (begin) found.push(["say", rest.slice(0, begin)]);
    const end = rest.indexOf("</think>", begin);
    found.push(["think", rest.slice(begin + 7, end < 0 ? undefined : end)]);
    rest = end < 0 ? "" : rest.slice(end + 8);
  }
  if (rest) found.push(["say", rest]);
  return found;
}

const MATHS = new RegExp(
  [
    String.raw`\$\$([\s\S]+?)\$\$`, // $$ … $$
    String.raw`\\\[((?:(?!\\\[)[\s\S])+?)\\\]`, // \[ … \]
    String.raw`\\\(((?:(?!\\\()[\s\S])+?)\\\)`, // \( … \)
    String.raw`\$([^\s$](?:[^$\n]*[^\s$])?)\$(?!\d)`, // $ … $, no prices
    String.raw`(\\boxed\{[^{}\n]*(?:\{[^{}\n]*\}[^{}\n]*)*\})`, // bare \boxed{ … }
  ].join("|"),
  "gu",
);
// No mark is tried from the middle of a run of marks, nor past the next one: the time is that of one reading.
const MARKS = /(?<!`)(`+)([^`\n]+)\1(?!`)|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])/gu;

/** Formulas and marks inside a line. */
function inline(text, { latex, marks }) {
  const pieces = [];
  let last = 0;
  const plain = (part) => (marks ? marked(part) : html`<${Plain} text=${part} />`);
  for (const found of latex ? text.matchAll(MATHS) : []) {
    const [all, block, bracket, round, dollar, boxed] = found;
    const drawn = math(block ?? bracket ?? round ?? dollar ?? boxed, block !== undefined || bracket !== undefined);
    if (!drawn) continue;
    if (found.index > last) pieces.push(plain(text.slice(last, found.index)));
    pieces.push(drawn);
    last = found.index + all.length;
  }
  pieces.push(plain(text.slice(last)));
  return pieces;
}

function marked(text) {
  const pieces = [];
  let last = 0;
  for (const found of text.matchAll(MARKS)) {
    const [all, , code, strong, slanted] = found;
    if (found.index > last) pieces.push(visible(text.slice(last, found.index)));
    if (code !== undefined) pieces.push(html`<code>${visible(code)}</code>`);
    else if (strong !== undefined) pieces.push(html`<strong>${visible(strong)}</strong>`);
    else pieces.push(html`<em>${visible(slanted)}</em>`);
    last = found.index + all.length;
  }
  pieces.push(html`<${Plain} text=${text.slice(last)} />`);
  return pieces;
}

/** Headings, lists, fences, quotes, rules and paragraphs. No links and no images: a model chose their addresses. */
function Markdown({ text, latex }) {
  const blocks = [];
  const lines = text.split("\n");
  const line = (part) => inline(part, { latex, marks: true });
  for (let at = 0; at < lines.length;) {
    const fence = /^\s*(```+|~~~+)(.*)$/.exec(lines[at]);
    const heading = /^(#{1,6})\s+(.*)$/.exec(lines[at]);
    const item = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/.exec(lines[at]);
    if (fence) {
      const end = lines.findIndex((other, index) => index > at && other.trim().startsWith(fence[1]));
      const stop = end < 0 ? lines.length : end;
      blocks.push(html`<pre class="fence"><${Plain} text=${lines.slice(at + 1, stop).join("\n")} /></pre>`);
      at = stop + 1;
    } else if (heading) {
      blocks.push(html`<div class=${`heading level-${heading[1].length}`}>${line(heading[2])}</div>`);
      at++;
    } else if (item) {
      const mark = item[2] ? `${item[2]}.` : "•";
      blocks.push(
        html`<div class=${classesOf(item[1])}><span class="bullet">${mark}</span><div>${line(item[3])}</div>
                  </div>`,
      );
      at++;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(lines[at])) {
      blocks.push(html`<hr />`);
      at++;
    } else if (/^>\s?/.test(lines[at])) {
      blocks.push(html`<blockquote>${line(lines[at].replace(/^>\s?/, ""))}</blockquote>`);
      at++;
    } else if (!lines[at].trim()) {
      at++;
    } else {
      let stop = at + 1;
      while (
        stop < lines.length &&
        lines[stop].trim() &&
        !/^(\s*(```|~~~|[-*+]\s|\d+[.)]\s)|#{1,6}\s|>)/.test(lines[stop])
      )
        stop++;
      blocks.push(html`<p>${line(lines.slice(at, stop).join("\n"))}</p>`);
      at = stop;
    }
  }
  return html`<div class="markdown">${blocks}</div>`;
}

const classesOf = (indent) => `item depth-${Math.min(4, Math.floor(indent.length / 2))}`;
