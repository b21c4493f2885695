// A list of any length: only the rows in sight exist.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

/** `row(index)` draws one of `rowHeight` pixels; `needed(from, to)` hears which are in sight; `at` stays in sight. */
export function VirtualList({ count, rowHeight, row, needed, at, label }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  useLayoutEffect(() => {
    const measure = () => box.current && setView({ top: box.current.scrollTop, height: box.current.clientHeight });
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const from = Math.max(0, Math.floor(view.top / rowHeight) - 8);
  const to = Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + 8);
  useEffect(() => {
    if (to > from) needed?.(from, to);
  }, [from, to, needed]);
  useEffect(() => {
    if (at === null || at === undefined || !box.current) return;
    const [top, bottom] = [at * rowHeight, (at + 1) * rowHeight];
    if (top < box.current.scrollTop) box.current.scrollTop = top;
    else if (bottom > box.current.scrollTop + box.current.clientHeight)
      box.current.scrollTop = bottom - box.current.clientHeight;
  }, [at, rowHeight, count > 0]);
  const rows = [];
  for (let i = from; i < to; i++) rows.push(row(i));
  return html`<div class="list" ref=${box} style=${{ "--rows": `${count * rowHeight + 2}px` }} tabindex="0"
      role="list" aria-label=${label}
      onScroll=${(event) => setView({ top: event.target.scrollTop, height: event.target.clientHeight })}>
    <div style=${{ height: `${count * rowHeight}px`, position: "relative" }}>
      <div style=${{ position: "absolute", left: 0, right: 0, top: `${from * rowHeight}px` }}>${rows}</div></div>
        </div>`;
}
