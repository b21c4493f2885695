// The one way to the data: from the server, or from the table that an exported file carries.

const carried = document.getElementById("grpo-export");
export const embedded = carried ? JSON.parse(carried.textContent) : null;

class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The answer to `path`; fails with an ApiError whose message can be shown. */
export async function api(path) {
  if (embedded) return fromTable(path);
  let response;
  try {
    response = await fetch(path.slice(1), { headers: { accept: "application/json" } });
  } catch {
    throw new ApiError(0, "offline", "The server does not answer. Is `grpo view` still running?");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new ApiError(response.status, "broken", `The server answered ${response.status} without a reason.`);
  }
  if (response.ok) return answer;
  const { code, message } = answer.error ?? {};
  if (response.status === 401)
    throw new ApiError(401, code, "Open the link that `grpo view` printed: it carries the token.");
  throw new ApiError(response.status, code, message ?? `The server answered ${response.status}.`);
}

function fromTable(path) {
  const [key, query] = path.split("?");
  if (!(key in embedded.responses)) throw new ApiError(404, "not_exported", "This is not part of the exported file.");
  const answer = embedded.responses[key];
  const asked = new URLSearchParams(query ?? "");
  if (key.endsWith("/groups")) return refined(answer, asked);
  return key.endsWith("/tokens") ? stretch(answer, asked) : answer;
}

/** The tokens that were asked for, of those that the file has; `ended`: it has no later ones. */
function stretch(answer, query) {
  const [first, last] = [answer.from ?? 0, answer.to ?? Infinity];
  const from = Math.max(first, Number(query.get("from") ?? first));
  const to = Math.max(from, Math.min(last, Number(query.get("to") ?? last)));
  const cut = (value) => (Array.isArray(value) ? value.slice(from - first, to - first) : value);
  const rows = answer.rows.map((row) =>
    Object.fromEntries(Object.entries(row).map(([name, value]) => [name, cut(value)])),
  );
  return { ...answer, from, to, rows, ended: to >= last };
}

/** Filters and order of the group list, which the server applies otherwise. */
function refined(answer, query) {
  const words = (query.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const badges = (query.get("badge") ?? "").split(",").filter(Boolean);
  const has = (group, badge) =>
    badge.startsWith("-") ? !group.badges.includes(badge.slice(1)) : group.badges.includes(badge);
  const groups = answer.groups.filter(
    (group) =>
      words.every((word) => (group.prompt ?? "").toLowerCase().includes(word)) &&
      badges.every((badge) => has(group, badge)),
  );
  const sort = query.get("sort") ?? "group";
  const value = { length: (g) => g.lengths?.[1], advantage: (g) => g.advantage_max }[sort] ?? ((g) => g[sort]);
  const sign = query.get("order") === "desc" ? -1 : 1;
  groups.sort((a, b) => sign * ((value(a) ?? -Infinity) - (value(b) ?? -Infinity)));
  const offset = Number(query.get("offset") ?? 0);
  return { ...answer, groups: groups.slice(offset), total: groups.length };
}

/** The address of a video or image. */
export const media = (url) => (embedded ? (embedded.media?.[url] ?? null) : url);

/**
 * Listen to a run (or to all of them); returns what ends it. `on` maps event names to functions of their data. A tab
 * out of sight does not listen: browsers allow six connections to a server, over all tabs. `on.again()`: it is back.
 */
export function listen(run, on) {
  if (embedded) return () => {};
  const { again, ...handlers } = on;
  let source = null;
  const close = () => {
    source?.close();
    source = null;
  };
  const open = () => {
    source = new EventSource(`api/live${run ? `?run=${run}` : ""}`);
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    source.addEventListener("gone", end);
  };
  const look = () => {
    if (document.hidden) close();
    else if (!source) {
      open();
      again?.();
    }
  };
  const end = () => {
    document.removeEventListener("visibilitychange", look);
    close();
  };
  document.addEventListener("visibilitychange", look);
  if (!document.hidden) open();
  return end;
}
