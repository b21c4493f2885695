// The LaTeX that models write in answers, as MathML elements; what is not known stays as it was written.

import { h } from "./ui.js";

const SYMBOLS = {
  alpha: "α",
  beta: "β",
  gamma: "γ",
  delta: "δ",
  epsilon: "ε",
  varepsilon: "ε",
  zeta: "ζ",
  eta: "η",
  theta: "θ",
  lambda: "λ",
  mu: "μ",
  nu: "ν",
  xi: "ξ",
  pi: "π",
  rho: "ρ",
  sigma: "σ",
  tau: "τ",
  phi: "φ",
  varphi: "φ",
  chi: "χ",
  psi: "ψ",
  omega: "ω",
  Gamma: "Γ",
  Delta: "Δ",
  Theta: "Θ",
  Lambda: "Λ",
  Xi: "Ξ",
  Pi: "Π",
  Sigma: "Σ",
  Phi: "Φ",
  Psi: "Ψ",
  Omega: "Ω",
  infty: "∞",
  partial: "∂",
  nabla: "∇",
  ell: "ℓ",
  emptyset: "∅",
  angle: "∠",
  triangle: "△",
};
const OPERATORS = {
  times: "×",
  cdot: "·",
  div: "÷",
  pm: "±",
  mp: "∓",
  le: "≤",
  leq: "≤",
  ge: "≥",
  geq: "≥",
  ne: "≠",
  neq: "≠",
  approx: "≈",
  equiv: "≡",
  sim: "∼",
  to: "→",
  rightarrow: "→",
  leftarrow: "←",
  Rightarrow: "⇒",
  implies: "⇒",
  iff: "⇔",
  in: "∈",
  notin: "∉",
  subset: "⊂",
  subseteq: "⊆",
  cup: "∪",
  cap: "∩",
  forall: "∀",
  exists: "∃",
  sum: "∑",
  prod: "∏",
  int: "∫",
  mid: "|",
  ldots: "…",
  dots: "…",
  cdots: "⋯",
  therefore: "∴",
  circ: "∘",
  perp: "⊥",
  parallel: "∥",
  cong: "≅",
  lfloor: "⌊",
  rfloor: "⌋",
  lceil: "⌈",
  rceil: "⌉",
  neg: "¬",
  land: "∧",
  lor: "∨",
  prime: "′",
};
const NAMES = ["sin", "cos", "tan", "log", "ln", "exp", "min", "max", "gcd", "lcm", "lim", "mod", "det", "arg"];
const SPACES = { ",": "0.17em", ";": "0.28em", ":": "0.22em", " ": "0.33em", "!": "0", quad: "1em", qquad: "2em" };
const WORDS = ["text", "mathrm", "textbf", "mathbf", "mathit", "operatorname", "textit", "mathbb", "mathcal"];
const SILENT = ["left", "right", "displaystyle", "limits", "big", "Big", "bigl", "bigr"];
const MOST = 4000; // characters of one formula; beyond it is text

const tokens = (source) => source.match(/\\[A-Za-z]+|\\.|[0-9]+(?:[.,][0-9]+)*|\s+|./gsu) || [];

/** MathML for the source between two dollars, or null where it cannot be read. */
export function math(source, display) {
  if (source.length > MOST) return null;
  try {
    const stream = { tokens: tokens(source), at: 0, depth: 0 };
    const body = sequence(stream, () => false);
    return h("math", { display: display ? "block" : "inline" }, h("mrow", null, body));
  } catch {
    return null;
  }
}

function sequence(stream, ends) {
  const found = [];
  if (++stream.depth > 40) throw new Error("too deep");
  while (stream.at < stream.tokens.length && !ends(stream.tokens[stream.at])) {
    const token = stream.tokens[stream.at];
    if (token === "^" || token === "_") {
      stream.at++;
      const base = found.pop() ?? h("mrow");
      const script = argument(stream);
      const other = token === "^" ? "_" : "^";
      if (stream.tokens[stream.at] === other) {
        stream.at++;
        const second = argument(stream);
        const [low, high] = token === "_" ? [script, second] : [second, script];
        found.push(h("msubsup", null, base, low, high));
      } else {
        found.push(h(token === "^" ? "msup" : "msub", null, base, script));
      }
    } else {
      const one = atom(stream);
      if (one) found.push(one);
    }
  }
  stream.depth--;
  return found;
}

/** What a command or a script applies to: a {group} or the next atom. */
function argument(stream) {
  while (/^\s+$/.test(stream.tokens[stream.at] ?? "")) stream.at++;
  if (stream.at >= stream.tokens.length) throw new Error("unfinished");
  return atom(stream) ?? h("mrow");
}

/** The raw text of a {group}. */
function words(stream) {
  if (stream.tokens[stream.at] !== "{") return stream.tokens[stream.at++] ?? "";
  let [depth, text] = [0, ""];
  do {
    const token = stream.tokens[stream.at++];
    if (token === undefined) throw new Error("unfinished");
    if (token === "{") depth++;
    if (token === "}") depth--;
    text += token;
  } while (depth);
  return text.slice(1, -1);
}

function atom(stream) {
  const token = stream.tokens[stream.at++];
  if (/^\s+$/.test(token) || token === "&") return null;
  if (token === "{") {
    const body = sequence(stream, (next) => next === "}");
    if (stream.tokens[stream.at++] !== "}") throw new Error("unfinished");
    return h("mrow", null, body);
  }
  if (token === "}") throw new Error("a brace too many");
  if (/^[0-9]/.test(token)) return h("mn", null, token);
  if (/^\p{L}$/u.test(token)) return h("mi", null, token);
  if (!token.startsWith("\\")) return h("mo", null, token === "-" ? "−" : token);
  return command(token.slice(1), stream);
}

function command(name, stream) {
  if (name in SYMBOLS) return h("mi", null, SYMBOLS[name]);
  if (name in OPERATORS) return h("mo", null, OPERATORS[name]);
  if (name in SPACES) return h("mspace", { width: SPACES[name] });
  if (NAMES.includes(name)) return h("mi", { mathvariant: "normal" }, name);
  if (SILENT.includes(name)) return null;
  if (name === "frac" || name === "dfrac" || name === "tfrac")
    return h("mfrac", null, argument(stream), argument(stream));
  if (name === "sqrt") {
    if (stream.tokens[stream.at] === "[") {
      stream.at++;
      const degree = sequence(stream, (next) => next === "]");
      stream.at++;
      return h("mroot", null, argument(stream), h("mrow", null, degree));
    }
    return h("msqrt", null, argument(stream));
  }
  if (name === "boxed") return h("mrow", { class: "boxed" }, argument(stream));
  if (WORDS.includes(name)) return h("mtext", null, words(stream));
  if (name === "\\") return h("mspace", { linebreak: "newline" });
  if (/^[^A-Za-z]$/.test(name)) return h("mo", null, name); // \{ \} \% \$
  throw new Error(`\\${name} is not known`);
}
