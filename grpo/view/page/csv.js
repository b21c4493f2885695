// A run's curves as a table for a spreadsheet: one row a step, one column a metric.

import { api } from "./api.js";

/** A cell that no spreadsheet takes for a formula: names come out of a run's files. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const plain = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/** step, seconds and every metric whose name has `query` in it. */
export function csv(table, query = "") {
  const names = Object.keys(table.columns).filter((name) => name.toLowerCase().includes(query.toLowerCase()));
  const rows = table.step.map((step, i) => [step, table.clock?.[i], ...names.map((name) => table.columns[name][i])]);
  return [["step", "seconds", ...names], ...rows].map((row) => `${row.map(cell).join(",")}\n`).join("");
}

/** Hand the run's table to the browser as a file. */
export async function download(run, query) {
  const table = await api(`/api/runs/${run.run}/metrics?points=100000`);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(table, query)], { type: "text/csv" }));
  link.download = `${run.name.split("/").pop()}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
