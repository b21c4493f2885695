// Where the page is: everything that a view shows is in the address, so that a link or a reload shows the same.
//
//   #/                                   runs
//   #/compare?runs=a,b                   several runs, one over the other
//   #/run/NAME                           curves
//   #/run/NAME/step/10                   the groups of a step
//   #/run/NAME/step/10/group/3           one group
//   #/run/NAME/prompt/KEY                one prompt through time
//   #/run/NAME/settings · /events        the rest of the folder
//
// Behind the hash, so that the exported single file and the server share them.

import { useEffect, useState } from "./ui.js";

export function parse(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  return { parts, query: Object.fromEntries(new URLSearchParams(query || "")) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a hand-made address with a stray %
  }
}

/** The address of a view; what is null or empty in the query is left out. */
export function href(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const tail = new URLSearchParams(given).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${tail ? `?${tail}` : ""}`;
}

// A notebook's frame has no address to change: there the way is kept here, and links are followed by hand.
export const framed = location.href.startsWith("about:");
let place = "";

/** The address of the view, from its # on. */
export const here = () => (framed ? place : location.hash);

/** Go there; `replace` leaves no step in the browser's history (typing, sliding). */
export function go(address, replace = false) {
  if (!framed && !replace) {
    location.hash = address;
    return;
  }
  if (framed) place = address;
  else history.replaceState(null, "", address);
  window.dispatchEvent(new Event("hashchange"));
}

if (framed) {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (!link) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
}

export function useRoute() {
  const [route, setRoute] = useState(() => parse(here()));
  useEffect(() => {
    const follow = () => setRoute(parse(here()));
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, []);
  return route;
}

/** Change some of the query of where we are now, which a view that is about to be drawn may not know yet. */
export function setQuery(changes, replace = true) {
  const { parts, query } = parse(here());
  go(href(parts, { ...query, ...changes }), replace);
}
