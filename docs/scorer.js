// What search puts first: how-tos and tutorials, then other pages; what was decided, tested or changed, and single names, last.
const FIRST = /^(tutorials|howto)\//;
const LAST = /^(changelog|decisions|reliability|reference\/api\/)/;
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const said = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/\s+/).filter((word) => word.length > 2);
    const named = said.length && said.every((word) => title.toLowerCase().includes(word));
    return score + (named && !descr ? 20 : 0) + (FIRST.test(docname) ? 8 : LAST.test(docname) ? -12 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
