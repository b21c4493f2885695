// What changed between two texts, by words: Myers' shortest edit script, cut off where the texts have little in common.

const MOST_EDITS = 800;

export const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];

/** [["same" | "gone" | "new", text], …] that turns `before` into `after`. */
export function diff(before, after) {
  const [a, b] = [words(before), words(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const middle = script(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([
    ...a.slice(0, start).map((word) => ["same", word]),
    ...middle,
    ...a.slice(a.length - end).map((word) => ["same", word]),
  ]);
}

function script(a, b) {
  if (!a.length || !b.length) return [...a.map((word) => ["gone", word]), ...b.map((word) => ["new", word])];
  const most = Math.min(a.length + b.length, MOST_EDITS);
  const furthest = new Map([[1, 0]]); // diagonal → how far into `a` it reaches
  const trace = [];
  for (let edits = 0; edits <= most; edits++) {
    trace.push(new Map(furthest));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && furthest.get(k - 1) < furthest.get(k + 1));
      let x = down ? furthest.get(k + 1) : furthest.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      furthest.set(k, x);
      if (x >= a.length && x - k >= b.length) return walkBack(a, b, trace);
    }
  }
  return [...a.map((word) => ["gone", word]), ...b.map((word) => ["new", word])];
}

function walkBack(a, b, trace) {
  const found = [];
  let [x, y] = [a.length, b.length];
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const furthest = trace[edits];
    const k = x - y;
    const down = k === -edits || (k !== edits && furthest.get(k - 1) < furthest.get(k + 1));
    const fromK = down ? k + 1 : k - 1;
    const fromX = furthest.get(fromK);
    const fromY = fromX - fromK;
    while (x > Math.max(fromX, 0) && y > Math.max(fromY, 0) && a[x - 1] === b[y - 1]) {
      found.push(["same", a[x - 1]]);
      x--;
      y--;
    }
    if (edits) found.push(down ? ["new", b[--y]] : ["gone", a[--x]]);
  }
  return found.reverse();
}

/** Neighbours of one kind as one piece. */
function joined(pieces) {
  const found = [];
  for (const [kind, text] of pieces) {
    const last = found[found.length - 1];
    if (last && last[0] === kind) last[1] += text;
    else found.push([kind, text]);
  }
  return found;
}
