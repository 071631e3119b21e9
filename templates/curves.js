// Curves: drag over a part to see it in all pictures over the same axis, double-click to see all, point to read values.
{
  const SVG = document.querySelector("svg")?.namespaceURI;
  const numbers = (words) => (words ? words.split(" ").map(Number) : []);
  const shown = (value) => Number(value.toPrecision(5)).toLocaleString("en");
  const ticks = (low, high, most) => {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * (1 - 1e-9));
    const values = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index++) values.push(index * step);
    return values;
  };
  const element = (name, attributes, words = "") => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = words;
    return made;
  };
  class Curves {
    constructor(svg) {
      const data = svg.dataset;
      this.svg = svg;
      [this.left, this.right, this.top, this.bottom] = numbers(data.plot);
      this.full = { low: Number(data.low), high: Number(data.high), bottom: Number(data.bottom), top: Number(data.top) };
      this.now = { ...this.full };
      this.log = data.log === "1";
      this.unit = data.unit;
      this.lines = [...svg.querySelectorAll(".curve")].map((node) => ({
        node, words: node.dataset.words, x: numbers(node.dataset.x), y: numbers(node.dataset.y),
      }));
      this.first = [".columns", ".rows"].map((name) => [...svg.querySelector(name).childNodes]);
      this.marks = [...svg.querySelectorAll(".mark")];
      // The browser would show the picture's title beside our tip.
      const title = svg.querySelector(":scope > title");
      svg.setAttribute("aria-label", title.textContent);
      svg.removeAttribute("aria-labelledby");
      title.remove();
      this.hit = svg.querySelector(".hit");
      this.brush = svg.querySelector(".brush");
      this.cursor = svg.querySelector(".cursor");
      this.from = null;
      this.hit.addEventListener("pointerdown", (event) => this.begin(event));
      this.hit.addEventListener("pointermove", (event) => this.move(event));
      this.hit.addEventListener("pointerup", (event) => this.end(event));
      this.hit.addEventListener("pointercancel", () => this.drop());
      this.hit.addEventListener("pointerleave", () => this.cursor.setAttribute("visibility", "hidden"));
      this.hit.addEventListener("dblclick", () => peers(this).forEach((one) => one.show(one.full.low, one.full.high)));
    }
    at(event) {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
      return Math.min(Math.max(x, this.left), this.right);
    }
    value(x) { return this.now.low + ((x - this.left) / (this.right - this.left)) * (this.now.high - this.now.low); }
    x(value) { return this.left + ((value - this.now.low) / (this.now.high - this.now.low)) * (this.right - this.left); }
    y(value) {
      const scale = this.log ? (v) => Math.log(Math.max(v, 1e-300)) : (v) => v;
      const [low, high] = [scale(this.now.bottom), scale(this.now.top)];
      return this.bottom + ((scale(value) - low) / (high - low)) * (this.top - this.bottom);
    }
    begin(event) {
      if (event.button !== 0) return;
      this.from = this.at(event);
      this.hit.setPointerCapture(event.pointerId);
      event.preventDefault();
    }
    move(event) {
      const x = this.at(event);
      if (this.from !== null) {
        this.brush.setAttribute("x", Math.min(x, this.from));
        this.brush.setAttribute("width", Math.abs(x - this.from));
      }
      this.read(x);
    }
    end(event) {
      const [from, to] = [this.from, this.at(event)].sort((a, b) => a - b);
      const dragged = this.from !== null && to - from > 5;
      this.drop();
      if (dragged) {
        const [low, high] = [this.value(from), this.value(to)];
        peers(this).forEach((one) => one.show(low, high));
      }
    }
    drop() {
      this.from = null;
      this.brush.setAttribute("width", 0);
    }
    read(x) {
      const place = this.value(x), rows = [];
      let nearest = null;
      for (const line of this.lines) {
        if (!line.x.length || place < line.x[0] - this.slack() || place > line.x.at(-1) + this.slack()) continue;
        const index = line.x.reduce((best, value, i) => (Math.abs(value - place) < Math.abs(line.x[best] - place) ? i : best), 0);
        const marked = Math.abs(line.x[index] - place);
        if (nearest === null || marked < nearest.marked) nearest = { marked, x: line.x[index] };
        rows.push(`${line.words}: ${shown(line.y[index])}`);
      }
      const near = this.marks.filter((mark) => Math.abs(this.x(Number(mark.dataset.at)) - x) < 4);
      rows.push(...near.slice(0, 3).map((mark) => mark.dataset.tip));
      if (nearest === null) { delete this.hit.dataset.tip; return; }
      this.hit.dataset.tip = [`${this.unit} ${shown(nearest.x)}`, ...rows].join("\n");
      for (const side of ["x1", "x2"]) this.cursor.setAttribute(side, this.x(nearest.x));
      this.cursor.setAttribute("visibility", "visible");
    }
    slack() { return 0.02 * (this.now.high - this.now.low); }
    show(low, high) {
      const whole = low <= this.full.low && high >= this.full.high;
      this.now = whole ? { ...this.full } : { low, high, ...this.heights(low, high) };
      for (const { node, x, y } of this.lines) {
        const points = x.map((value, index) => `${this.x(value).toFixed(2)} ${this.y(y[index]).toFixed(2)}`);
        node.querySelector(".trace")?.setAttribute("d", points.length ? `M${points.join("L")}` : "");
        node.querySelector(".dots")?.setAttribute("d", points.map((point) => `M${point}h0`).join(""));
      }
      for (const mark of this.marks) mark.setAttribute("transform", `translate(${this.x(Number(mark.dataset.at)).toFixed(2)} 0)`);
      this.svg.querySelector(".columns").replaceChildren(...(whole ? this.first[0] : this.columns()));
      this.svg.querySelector(".rows").replaceChildren(...(whole ? this.first[1] : this.rows()));
      this.svg.classList.toggle("zoomed", !whole);
    }
    heights(low, high) {
      const values = this.lines.flatMap(({ x, y }) => y.filter((_, index) => x[index] >= low && x[index] <= high));
      if (!values.length) return { bottom: this.full.bottom, top: this.full.top };
      const [least, most] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
      if (this.log) return { bottom: least / 1.1, top: most * 1.1 };
      const room = 0.05 * (most - least) || 0.1 * Math.abs(most) || 1;
      return { bottom: least - room, top: most + room };
    }
    columns() {
      return ticks(this.now.low, this.now.high, 6).flatMap((value) => {
        const x = this.x(value);
        return [
          element("line", { class: "grid", x1: x, x2: x, y1: this.top, y2: this.bottom }),
          element("text", { class: "label", x, y: this.bottom + 15, "text-anchor": "middle" }, shown(value)),
        ];
      });
    }
    rows() {
      return ticks(this.now.bottom, this.now.top, 6).flatMap((value) => {
        const y = this.y(value);
        return [
          element("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y }),
          element("text", { class: "label", x: this.left - 6, y: y + 4, "text-anchor": "end" }, shown(value)),
        ];
      });
    }
  }
  const every = [...document.querySelectorAll("svg.curves")].map((svg) => new Curves(svg));
  const axis = (one) => one.svg.closest("[data-axis]")?.dataset.axis;
  const peers = (one) => every.filter((other) => axis(other) === axis(one));
}
