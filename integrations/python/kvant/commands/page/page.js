/* page.js - draws the report from the data that is in the page.
 *
 * Every figure is an SVG with a name, and a table with the same numbers stands under it. Nothing is loaded, nothing needs a mouse.
 * Without the plotting library (a build without it) the tables are all there is.
 */
"use strict";
(() => {
    const data = JSON.parse(document.getElementById("data").textContent);
    const main = document.getElementById("content");
    const about = data.about ?? {};
    const steps = data.steps ?? [];
    const MIB = 1048576;
    const COLOURS = [1, 2, 3, 4, 5, 6, 7, 8].map((i) => `var(--c${i})`);
    const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3", "10 4", "4 2 1 2", "3 6"];
    /* The ninth line has the first one's colour and the second one's dashes. */
    const dashOf = (i) => DASHES[(i + Math.floor(i / COLOURS.length)) % DASHES.length];

    /* Elements, always from text and never from markup: names come from files. */
    function element(name, attributes = {}, ...children) {
        const made = document.createElement(name);
        for (const [key, value] of Object.entries(attributes))
            if (value !== null && value !== undefined) made.setAttribute(key, value);
        made.append(...children.filter((child) => child !== null && child !== undefined));
        return made;
    }

    const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
    const show = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits) : value ?? "–");
    /* Three significant digits where zeros would be all that is left. */
    const showSmall = (value) =>
        !isNumber(value) ? "–" : Math.abs(value) < 1e-5 ? "0" : Math.abs(value) < 0.1 ? value.toPrecision(3) : value.toFixed(3);
    const unique = (values) => [...new Set(values)];

    /* Rows of a step, or of all steps whose name begins so ("needle:512", "needle:1024"). */
    const rowsOf = (name) =>
        steps.filter((step) => step.name === name || step.name.startsWith(`${name}:`)).flatMap((step) => step.rows ?? []);

    function labelOf(row) {
        const specs = row.k === row.v ? row.k : `${row.k} / ${row.v}`;
        const name = row.preset ? `preset ${row.preset}` : row.config ? `settings ${row.config}` : specs;
        const prefix = row.cache === "llama.cpp" ? "llama.cpp " : row.cache === "accel" ? "accel " : row.cache === "kvant fp32" ? "fp32 " : "";
        const suffix = row.protect > 0 ? `, protect ${row.protect}` : "";
        return prefix + name + suffix;
    }

    const isF16 = (row) => row.cache === "llama.cpp" && row.k === "f16" && row.v === "f16";
    const kindOf = (row) =>
        row.cache === "llama.cpp" || row.cache === "accel" ? "llama.cpp" : row.preset ? "preset" : row.config ? "settings file" : "kvant codec";
    const KINDS = ["kvant codec", "preset", "settings file", "llama.cpp"];
    const SYMBOLS = ["circle", "star", "diamond", "square"];

    /* A table: columns are { key, name, text (left), show }. Sorted by the keyboard as by the mouse: headings are buttons. */
    function makeTable(caption, columns, rows, sortable = true) {
        const body = element("tbody");
        const fill = (sorted) =>
            body.replaceChildren(
                ...sorted.map((row) =>
                    element("tr", {}, ...columns.map((column, i) =>
                        element(i === 0 ? "th" : "td", { class: column.text ? "text" : null, scope: i === 0 ? "row" : null },
                            String((column.show ?? show)(row[column.key]))))),
                ),
            );
        const headings = columns.map((column) => {
            const heading = element("th", { scope: "col", class: column.text ? "text" : null });
            if (!sortable) {
                heading.append(column.name);
                return heading;
            }
            const button = element("button", { type: "button" }, column.name);
            button.addEventListener("click", () => sortBy(column, heading));
            heading.append(button);
            return heading;
        });
        function sortBy(column, heading) {
            const up = heading.getAttribute("aria-sort") !== "ascending";
            headings.forEach((other) => other.removeAttribute("aria-sort"));
            heading.setAttribute("aria-sort", up ? "ascending" : "descending");
            const order = (a, b) => {
                const [x, y] = [a[column.key], b[column.key]];
                if (x === null || x === undefined || y === null || y === undefined) return (x ?? null) === null ? ((y ?? null) === null ? 0 : 1) : -1;
                const step = isNumber(x) && isNumber(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
                return up ? step : -step;
            };
            fill([...rows].sort(order));
        }
        fill(rows);
        return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
            element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...headings)), body));
    }

    function section(id, title, ...children) {
        const made = element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), ...children);
        main.append(made);
        return made;
    }

    const notMeasured = (what) => element("p", { class: "note" }, `Not measured: ${what}`);

    /* Figures are drawn again when their width changes. draw(width) returns an SVG. */
    function figure(label, draw, legend, table) {
        const place = element("div");
        const holder = element("figure", { role: "group", "aria-label": label }, place, legend ?? null,
            element("details", {}, element("summary", {}, "The numbers of this figure"), table));
        if (!window.Plot) {
            place.append(element("p", { class: "note" }, "This build of kvant has no plotting library: the numbers are in the table."));
            holder.querySelector("details").open = true;
            return holder;
        }
        follow(place, label, draw);
        return holder;
    }

    /* Draws into an element whenever its width changes. */
    function follow(place, label, draw) {
        let drawn = 0;
        new ResizeObserver(() => {
            const width = Math.round(place.clientWidth);
            if (width === drawn || width < 40) return;
            drawn = width;
            const svg = draw(width);
            svg.setAttribute("role", "img");
            svg.setAttribute("aria-label", label);
            place.replaceChildren(svg);
        }).observe(place);
    }

    const STYLE = { fontSize: "12px", background: "none", color: "var(--ink)", fontFamily: "inherit" };
    const plot = (options) => Plot.plot({ style: STYLE, ...options });

    /* A cache looks the same in every figure. */
    const palette = unique([...rowsOf("needle"), ...rowsOf("speed"), ...rowsOf("position")].map(labelOf));
    const lookOf = (name, names) => (palette.includes(name) ? palette.indexOf(name) : names.indexOf(name));

    function lineLegend(names) {
        return element("ul", { class: "legend" }, ...names.map((name) => {
            const i = lookOf(name, names);
            const item = element("li");
            const key = document.createElementNS("http://www.w3.org/2000/svg", "svg");
            key.setAttribute("aria-hidden", "true");
            key.setAttribute("viewBox", "0 0 26 14");
            const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
            for (const [k, v] of Object.entries({ x1: 1, x2: 25, y1: 7, y2: 7, "stroke-width": 2.5 })) line.setAttribute(k, v);
            line.style.stroke = COLOURS[i % COLOURS.length];
            line.setAttribute("stroke-dasharray", dashOf(i));
            key.append(line);
            item.append(key, name);
            return item;
        }));
    }

    /* Lines that colour and dashes tell apart. rows: { x, y, name }. */
    function lineMarks(rows, names) {
        return names.flatMap((name) => {
            const i = lookOf(name, names);
            const own = rows.filter((row) => row.name === name && isNumber(row.y)).sort((a, b) => a.x - b.x);
            const look = { x: "x", y: "y", stroke: COLOURS[i % COLOURS.length] };
            return [
                Plot.line(own, { ...look, strokeWidth: 2, strokeDasharray: dashOf(i) || undefined }),
                Plot.dot(own, { ...look, fill: "var(--paper)", r: 2.5, title: (d) => `${name}: ${showSmall(d.y)}` }),
            ];
        });
    }

    function lineFigure(label, rows, axes, columns) {
        const names = unique(rows.map((row) => row.name));
        const draw = (width) =>
            plot({
                width,
                height: Math.min(380, Math.max(240, width * 0.5)),
                marginLeft: 56,
                marginBottom: 40,
                x: { grid: false, ...axes.x },
                y: { grid: true, ...axes.y },
                marks: [Plot.ruleY(axes.zero ? [0] : []), ...lineMarks(rows, names)],
            });
        return figure(label, draw, lineLegend(names), makeTable(label, columns, rows));
    }

    /* ---- sections ---- */

    function head() {
        const title = `kvant report: ${about.model ?? "model"}`;
        document.title = title;
        main.querySelector("h1").textContent = title;
        main.append(element("p", {}, "How small the key-value cache of this model can be before it gets worse, measured with ",
            about.text ? `the text ${about.text}` : "a text", " on one machine. Divergence is the Kullback-Leibler divergence of the next-token ",
            "distribution from that of an uncompressed fp16 cache, in nats; 0 is no difference."));
        if (!data.complete)
            main.append(element("p", { class: "warning", role: "note" }, "This report is partial: ",
                "measuring was interrupted or a step failed, and what is here was complete. The same command goes on."));
        const contents = [["choose", "What to set"], ["quality", "Quality against size"], ["position", "Divergence along the context"], ["memory", "Memory"],
            ["speed", "Speed"], ["needle", "Finding facts"], ["layers", "Layers"], ["table", "All configurations"], ["how", "How it was measured"]];
        main.append(element("nav", { "aria-label": "Contents" },
            element("ul", {}, ...contents.map(([id, name]) => element("li", {}, element("a", { href: `#${id}` }, name))))));
    }

    function qualityRows() {
        const rows = rowsOf("quality").filter((row) => isNumber(row.kld_mean));
        const f16 = rows.find(isF16);
        /* llama.cpp allocates whole blocks of 256 cells; kvant's memory is that of the cells in use. */
        const used = about.ctx ? about.ctx / (256 * Math.ceil(about.ctx / 256)) : 1;
        return rows.map((row) => ({
            ...row,
            name: labelOf(row),
            kind: kindOf(row),
            whole: f16 ? (16 * row.kv_bytes) / f16.kv_bytes / (kindOf(row) === "llama.cpp" ? 1 : used) : null,
            ppl_rise: f16 ? row.ppl / f16.ppl - 1 : null,
            f16: row === f16,
        }));
    }

    /* Those that nothing of their size or smaller beats. */
    function front(rows, size) {
        let best = Infinity;
        return [...rows].sort((a, b) => a[size] - b[size] || a.kld_mean - b.kld_mean).filter((row) => row.kld_mean < best && ((best = row.kld_mean), true));
    }

    const per100 = (value) => (isNumber(value) ? (100 * value).toFixed(1) : "–");
    const mib = (value) => (isNumber(value) ? (value / MIB).toFixed(2) : "–");

    function choose(rows) {
        const limits = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2];
        const candidates = rows.filter((row) => !row.f16);
        const found = limits.map((limit) => {
            const best = candidates.filter((row) => row.kld_mean <= limit).sort((a, b) => a.whole - b.whole || a.kld_mean - b.kld_mean)[0];
            return { limit, ...(best ?? { name: "none of those measured" }) };
        });
        section("choose", "What to set",
            element("p", {}, "The smallest cache, windows that stay fp16 included, whose mean divergence stays below a limit. ",
                "As a measure: the divergence of llama.cpp's q8_0 is what is usually called lossless."),
            rows.length === 0 ? notMeasured("kvant eval has not run.") :
                makeTable("Smallest cache below a limit of divergence", [
                    { key: "limit", name: "mean divergence below", show: (v) => String(v) },
                    { key: "name", name: "keys / values", text: true },
                    { key: "whole", name: "bits a number" },
                    { key: "kld_mean", name: "its divergence", show: showSmall },
                    { key: "top1", name: "same top token %", show: per100 },
                ], found, false));
    }

    function quality(rows) {
        const shown = rows.filter((row) => !row.f16 && row.kld_mean > 0);
        const label = "Mean divergence from fp16 against bits a number, for every configuration";
        if (shown.length === 0) {
            section("quality", "Quality against size", notMeasured("kvant eval has not run."));
            return;
        }
        let size = "bits";
        const draw = (width) => {
            const best = front(shown, size);
            const kinds = KINDS.filter((kind) => shown.some((row) => row.kind === kind));
            return plot({
                width,
                height: Math.min(560, Math.max(340, width * 0.62)),
                marginLeft: 56,
                marginRight: 40,
                marginBottom: 40,
                x: { label: size === "bits" ? "true bits a number →" : "bits a number, fp16 windows included →", grid: true, nice: true },
                y: { type: "log", label: "↑ mean divergence, nats (log)", grid: true, tickFormat: (d) => (/^[125]/.test(d.toExponential()) ? String(d) : "") },
                marks: [
                    Plot.line(best, { x: size, y: "kld_mean", stroke: "var(--soft)", strokeWidth: 1.5, strokeDasharray: "4 3", curve: "step-after" }),
                    ...kinds.map((kind) => {
                        const i = KINDS.indexOf(kind);
                        return Plot.dot(shown.filter((row) => row.kind === kind), {
                            x: size, y: "kld_mean", symbol: SYMBOLS[i], r: i === 1 ? 6 : 4.5, fill: COLOURS[i], fillOpacity: 0.35, stroke: COLOURS[i],
                            title: (d) => `${d.name}\n${show(d[size])} bits, divergence ${showSmall(d.kld_mean)}`,
                        });
                    }),
                    /* Below and left of the front there is nothing, so numbers have room there; names are in the list. */
                    Plot.text(best, { x: size, y: "kld_mean", text: (_, i) => String(i + 1), dx: -8, dy: 9, textAnchor: "end", fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 3, fontWeight: 600 }),
                    Plot.text(shown.filter((row) => row.kind === "llama.cpp"), { x: size, y: "kld_mean", text: (d) => d.name.replace("llama.cpp ", ""), dx: 9, textAnchor: "start", fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 3, fontSize: 11 }),
                ],
            });
        };
        const kinds = KINDS.filter((kind) => shown.some((row) => row.kind === kind));
        const legend = element("ul", { class: "legend" }, ...kinds.map((kind) => {
            const i = KINDS.indexOf(kind);
            const item = element("li");
            if (window.Plot) {
                const key = Plot.plot({ width: 26, height: 14, margin: 7, axis: null, style: STYLE,
                    marks: [Plot.dot([[0, 0]], { symbol: SYMBOLS[i], r: 4.5, fill: COLOURS[i], fillOpacity: 0.35, stroke: COLOURS[i] })] });
                key.setAttribute("aria-hidden", "true");
                item.append(key);
            }
            item.append(kind);
            return item;
        }), element("li", {}, "dashed: nothing measured is better at that size or below"));
        const build = () => {
            const ordered = front(shown, size), best = new Set(ordered);
            const list = element("ol", { class: "front", "aria-label": "Nothing measured is better at their size or below" }, ...ordered.map((row) =>
                element("li", {}, `${row.name}: ${show(row[size])} bits, divergence ${showSmall(row.kld_mean)}`)));
            const listed = shown.map((row) => ({ ...row, best: best.has(row) ? "yes" : "" })).sort((a, b) => a[size] - b[size]);
            return figure(label, draw, element("div", {}, legend.cloneNode(true), list), makeTable(label, [
                { key: "name", name: "keys / values", text: true },
                { key: "kind", name: "kind", text: true },
                { key: "bits", name: "true bits" },
                { key: "whole", name: "with windows" },
                { key: "kld_mean", name: "mean divergence", show: showSmall },
                { key: "best", name: "on the front", text: true },
            ], listed));
        };
        const select = element("select", { id: "size" }, element("option", { value: "bits" }, "true bits of the codec"),
            element("option", { value: "whole" }, "bits of the whole cache, fp16 windows included"));
        let current = build();
        select.addEventListener("change", () => {
            size = select.value;
            const next = build();
            current.replaceWith(next);
            current = next;
        });
        section("quality", "Quality against size",
            element("p", {}, "Lower and further left is better. True bits count every stored byte of the codec, scales and all; ",
                "windows of tokens that stay fp16 (sink=, recent=, the first tokens of center=first) count in the second choice, for a context of ",
                `${about.ctx ?? "the measured"} tokens.`),
            element("p", {}, element("label", { for: "size" }, "Size: "), select), current);
    }

    function position() {
        const rows = rowsOf("position").filter((row) => row.text === about.text || !about.text || row.text === "all").map((row) => ({
            name: labelOf(row), x: (row.from + row.to) / 2, y: row.kld_mean > 0 ? row.kld_mean : null, ...row }))
            .filter((row) => !isF16(row));
        if (rows.length === 0) {
            section("position", "Divergence along the context", notMeasured("kvant eval --by-position has not run."));
            return;
        }
        /* Those that the other figures compare: more lines than colours cannot be told apart. */
        const chosen = new Set([...rowsOf("needle"), ...rowsOf("speed")].map(labelOf));
        const names = unique(rows.map((row) => row.name));
        const few = names.filter((name) => chosen.has(name));
        const kept = few.length > 0 ? few : names.slice(0, COLOURS.length);
        section("position", "Divergence along the context",
            element("p", {}, "Whether error grows as the cache fills. Positions before the first point give the model something to go by and are not scored."),
            lineFigure("Mean divergence from fp16 by position in the context", rows.filter((row) => kept.includes(row.name)).slice(0, 4096),
                { x: { label: "position in the context →" }, y: { type: "log", label: "↑ mean divergence, nats (log)", tickFormat: (d) => (/^[125]/.test(d.toExponential()) ? String(d) : "") } },
                [{ key: "name", name: "keys / values", text: true }, { key: "from", name: "from", show: (v) => show(v, 0) }, { key: "to", name: "to", show: (v) => show(v, 0) },
                    { key: "kld_mean", name: "mean divergence", show: showSmall }, { key: "kld_p99", name: "99 %", show: showSmall }, { key: "top1", name: "same top token %", show: per100 }]));
    }

    function memory(needles) {
        const seen = new Set();
        const rows = needles.filter((row) => isNumber(row.kv_bytes)).map((row) => ({ name: labelOf(row), x: row.ctx, y: row.kv_bytes / MIB }))
            .filter((row) => !seen.has(`${row.name} ${row.x}`) && seen.add(`${row.name} ${row.x}`));
        section("memory", "Memory",
            rows.length === 0 ? notMeasured("kvant needle has not run.") : element("p", {}, "Bytes of the cache with a text of nearly that length in it: measured by the plug-in for kvant, the size of the tensors for llama.cpp's own types."),
            rows.length === 0 ? null : lineFigure("Memory of the cache by context length", rows,
                { zero: true, x: { label: "tokens in the context →" }, y: { label: "↑ MiB", zero: true } },
                [{ key: "name", name: "keys / values", text: true }, { key: "x", name: "context", show: (v) => show(v, 0) }, { key: "y", name: "MiB" }]));
    }

    function speed() {
        const rows = rowsOf("speed").map((row) => ({ ...row, name: labelOf(row), x: row.depth }));
        const decode = rows.map((row) => ({ ...row, y: row.decode_tps }));
        const prefill = rows.map((row) => ({ ...row, y: row.prefill_tps }));
        const columns = [{ key: "name", name: "keys / values", text: true }, { key: "x", name: "tokens in the cache", show: (v) => show(v, 0) },
            { key: "y", name: "tokens a second", show: (v) => show(v, 1) }, { key: "rounds", name: "rounds", show: (v) => show(v, 0) }];
        const axes = { zero: true, x: { label: "tokens in the cache →" }, y: { label: "↑ tokens a second", zero: true } };
        section("speed", "Speed",
            rows.length === 0 ? notMeasured("kvant bench model has not run.") :
                element("p", {}, "Of the whole model, weights and all: medians of the rounds, on ", about.machine ?? "this machine", "."),
            rows.length === 0 ? null : element("h3", {}, "Decoding, token by token"),
            rows.length === 0 ? null : lineFigure("Decoding speed by tokens in the cache", decode, axes, columns),
            rows.length === 0 ? null : element("h3", {}, "Prefill, many tokens at once"),
            rows.length === 0 ? null : lineFigure("Prefill speed by tokens in the cache", prefill, axes, columns));
    }

    /* One map a cache. A cell that f16 does not find says nothing of a codec: it is hatched and says n/a. */
    function needleMap(name, rows) {
        const label = `Share of facts found, ${name}, by context length and depth`;
        const cells = rows.map((row) => ({ ctx: row.ctx, depth: `${Math.round(100 * row.depth)} %`, order: row.depth, exact: row.exact, blind: row.of_f16 === null && !isF16(row) }));
        const depths = unique([...cells].sort((a, b) => a.order - b.order).map((cell) => cell.depth));
        const draw = (width) =>
            plot({
                width, height: 44 + 20 * depths.length, marginLeft: 44, marginBottom: 34, marginTop: 6,
                x: { type: "band", label: "context, tokens", domain: unique(cells.map((cell) => cell.ctx)).sort((a, b) => a - b), padding: 0.06 },
                y: { type: "band", label: null, domain: depths, padding: 0.08 },
                marks: [
                    Plot.cell(cells, { x: "ctx", y: "depth", fill: "var(--c1)", fillOpacity: (d) => (d.blind ? 0 : 0.08 + 0.72 * d.exact), stroke: "var(--line)",
                        title: (d) => `${d.ctx} tokens, depth ${d.depth}: ${d.blind ? "fp16 does not find it either" : `${per100(d.exact)} % found`}` }),
                    Plot.text(cells, { x: "ctx", y: "depth", text: (d) => (d.blind ? "n/a" : String(Math.round(100 * d.exact))), fill: (d) => (!d.blind && d.exact > 0.6 ? "var(--paper)" : "var(--ink)"), fontSize: 10 }),
                ],
            });
        const place = element("div");
        if (window.Plot) follow(place, label, draw);
        return element("div", {}, element("h3", {}, name), place);
    }

    function needle(rows) {
        const named = rows.map((row) => ({ ...row, name: labelOf(row) }));
        const names = unique(named.map((row) => row.name));
        const label = "Share of hidden facts found";
        section("needle", "Finding facts",
            rows.length === 0 ? notMeasured("kvant needle has not run.") :
                element("p", {}, "Numbers are hidden at several depths of a text and asked for at its end. Cells give the per cent found of ",
                    `${named[0].trials} ${named[0].trials === 1 ? "text" : "texts"}; n/a: the uncompressed cache does not find it, so no codec is to blame.`),
            rows.length === 0 ? null : element("figure", { role: "group", "aria-label": label },
                element("div", { class: "maps" }, ...names.map((name) => needleMap(name, named.filter((row) => row.name === name)))),
                element("details", {}, element("summary", {}, "The numbers of this figure"),
                    makeTable(label, [{ key: "name", name: "keys / values", text: true }, { key: "ctx", name: "context", show: (v) => show(v, 0) },
                        { key: "depth", name: "depth" }, { key: "exact", name: "found %", show: per100 }, { key: "of_f16", name: "of fp16's %", show: per100 },
                        { key: "log_probability", name: "ln p of the answer" }], named))));
    }

    /* Rows of kvant tune --json: sites (layer, role and what quantising it alone costs) and the settings that came of them. */
    function layers() {
        const all = rowsOf("sensitivity");
        const rows = all.filter((row) => isNumber(row.layer));
        const settings = all.filter((row) => row.setting);
        if (rows.length === 0) {
            section("layers", "Layers", notMeasured("no table of kvant tune was given (--sensitivity)."));
            return;
        }
        const key = ["probe_kld", "cost", "error"].find((name) => isNumber(rows[0][name])) ?? "cost";
        const unit = { probe_kld: "mean divergence, nats", cost: "share of the divergence, nats", error: "error of attention's output" }[key];
        const points = rows.map((row) => ({ ...row, name: /^k/i.test(row.role) ? "keys" : /^v/i.test(row.role) ? "values" : String(row.role), x: row.layer, y: row[key] }));
        section("layers", "Layers",
            element("p", {}, "What quantising one layer's keys or values alone costs, as kvant tune measured it: a tuned setting spends its bits where this is high."),
            lineFigure("Cost of quantising one layer's keys or values, by layer", points, { x: { label: "layer →" }, y: { label: `↑ ${unit}`, zero: true }, zero: true },
                [{ key: "x", name: "layer", show: (v) => show(v, 0) }, { key: "name", name: "role", text: true }, { key: "y", name: unit, show: showSmall },
                    { key: "spec", name: "codec chosen", text: true }, { key: "site_bits", name: "bits" }]),
            settings.length === 0 ? null : makeTable("Settings that kvant tune compared", [
                { key: "setting", name: "setting", text: true }, { key: "k", name: "keys", text: true }, { key: "v", name: "values", text: true }, { key: "bits", name: "true bits" },
                { key: "kv_bytes", name: "MiB", show: mib }, { key: "predicted", name: "predicted divergence", show: showSmall }, { key: "kld_mean", name: "measured", show: showSmall }, { key: "kld_se", name: "±", show: showSmall },
            ], settings));
    }

    function allRows(rows) {
        const label = "All configurations";
        section("table", "All configurations", element("p", {}, "Headings sort; once more, the other way round."),
            rows.length === 0 ? notMeasured("kvant eval has not run.") : makeTable(label, [
                { key: "name", name: "keys / values", text: true },
                { key: "bits", name: "true bits" },
                { key: "whole", name: "with windows" },
                { key: "kv_bytes", name: "MiB", show: mib },
                { key: "kld_mean", name: "mean divergence", show: showSmall },
                { key: "kld_se", name: "±", show: showSmall },
                { key: "kld_p50", name: "50 %", show: showSmall },
                { key: "kld_p90", name: "90 %", show: showSmall },
                { key: "kld_p99", name: "99 %", show: showSmall },
                { key: "kld_p999", name: "99.9 %", show: showSmall },
                { key: "kld_max", name: "largest", show: showSmall },
                { key: "top1", name: "same top token %", show: per100 },
                { key: "ppl", name: "perplexity", show: (v) => show(v, 3) },
                { key: "chunks", name: "chunks", show: (v) => show(v, 0) },
            ], rows));
    }

    function how() {
        const facts = [["kvant", about.kvant], ["runtime", about.runtime], ["machine", about.machine], ["threads", about.threads], ["model", about.model_file],
            ["model's fingerprint", about.model_fingerprint], ["model's context", about.n_ctx_train], ["text", about.text], ["text's fingerprint", about.text_fingerprint],
            ["calibration", about.calibration], ["date", about.date]].filter(([, value]) => value !== undefined && value !== null && value !== "");
        section("how", "How it was measured",
            element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))])),
            element("p", {}, "The commands, with the folders of files left out:"),
            ...steps.map((step) => element("div", {}, element("h3", {}, step.name, step.state === "complete" ? "" : ` (${step.state})`,
                isNumber(step.seconds) ? `, ${show(step.seconds, 0)} s` : ""), element("pre", {}, step.command ?? ""))),
            element("p", { class: "note" }, "The raw numbers are in the file that kvant report wrote beside this page, and in the page itself."),
            data.licences ? element("details", {}, element("summary", {}, "Licences of the plotting library"), element("pre", {}, data.licences)) : null);
    }

    const rows = qualityRows();
    const needles = rowsOf("needle");
    head();
    choose(rows);
    quality(rows);
    position();
    memory(needles);
    speed();
    needle(needles);
    layers();
    allRows(rows);
    how();
    /* On paper nobody opens anything. */
    window.addEventListener("beforeprint", () => document.querySelectorAll("#content details").forEach((d) => (d.open = true)));
})();
