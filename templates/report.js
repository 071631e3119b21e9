"use strict";
// Sorting of tables marked "sortable", and the pictures' titles shown at once. The page is whole without either.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
      const order = (a, b) => {
        const [left, right] = [key(a), key(b)];
        const [x, y] = [Number(left), Number(right)];
        return Number.isNaN(x) || Number.isNaN(y) ? left.localeCompare(right) : x - y;
      };
      const rows = [...table.tBodies[0].rows].sort(order);
      table.tBodies[0].append(...(up ? rows : rows.reverse()));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
}
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
// Titles of shapes become our own tips, or the browser would show both.
for (const title of document.querySelectorAll("svg g > title, svg rect > title")) {
  const shape = title.parentNode;
  shape.dataset.tip = title.textContent;
  shape.setAttribute("aria-label", title.textContent);
  title.remove();
}
document.addEventListener("pointermove", (event) => {
  const shape = event.target.closest?.("[data-tip]");
  tip.hidden = !shape;
  if (!shape) return;
  tip.textContent = shape.dataset.tip;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, room))}px`;
  tip.style.top = `${event.clientY + 16}px`;
});
