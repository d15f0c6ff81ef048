"use strict";
// All of this is a convenience: without it the page says the same.
for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies].map((body) => [body, [...body.rows]]);
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" }[head.ariaSort || "none"];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (next !== "none") head.setAttribute("aria-sort", next);
      for (const [body, rows] of bodies) body.append(...sorted(rows, column, next));
    });
  });
}
function sorted(rows, column, way) {
  if (way === "none") return rows;
  const moving = rows.filter((row) => "row" in row.dataset);
  const sign = way === "ascending" ? 1 : -1;
  const key = (row) => row.cells[column].dataset.value ?? "";
  const ordered = [...moving].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const [p, q] = [Number(x), Number(y)];
    return sign * (Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q);
  });
  return rows.map((row) => ("row" in row.dataset ? ordered.shift() : row));
}
function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}
addEventListener("hashchange", unfold);
unfold();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => { item.open = true; }));
