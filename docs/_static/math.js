// Formulas as MathML elements, by the file that the viewer has: the pages ask no other server for anything.
import temml from "./temml.js";

for (const place of document.querySelectorAll(".math")) {
  const source = place.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
  temml.render(source, place, { displayMode: place.matches("div"), throwOnError: false });
}
