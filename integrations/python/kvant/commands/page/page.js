/* page.js - the sections of the page, drawn with figures.js from the data in the page. */

/* Whether presets were calibrated: two reports on one model may differ only in this. Empty when no
 * preset was measured. */
function howLearned() {
    if (about.calibration) return ", calibrated";
    return rowsOf("quality").some((row) => row.preset) ? ", not calibrated" : "";
}

function head() {
    const title = `kvant report: ${about.model ?? "model"}${howLearned()}`;
    document.title = title;
    main.querySelector("h1").textContent = title;
    main.append(element("p", {},
        "How small the key-value cache of this model can be before it gets worse, measured with ",
        about.text ? `the text ${about.text}` : "a text",
        " on one machine. Divergence is the mean Kullback-Leibler divergence of the next-token ",
        "distribution from the uncompressed f16 cache's, in nats; 0 is no difference, and q8_0's ",
        "is usually called lossless."));
    if (!data.complete)
        main.append(element("p", { class: "warning", role: "note" }, "This report is partial: ",
            "measuring was interrupted or a step failed, and what is here was complete. The ",
            "same command continues."));
    const contents = [["choose", "What to set"], ["quality", "Quality against size"],
        ["position", "Divergence along the context"], ["memory", "Memory"],
        ["speed", "Speed"], ["needle", "Finding facts"], ["layers", "Layers"],
        ["table", "All configurations"], ["how", "How it was measured"]];
    main.append(element("nav", { "aria-label": "Contents" },
        element("ul", {}, ...contents.map(([id, name]) =>
            element("li", {}, element("a", { href: `#${id}` }, name))))));
}

/* llama.cpp allocates whole blocks of 256 cells; kvant takes memory for the cells in use. */
const cells = (tokens) => 256 * Math.ceil(tokens / 256);

/* Sizes of everything in a full cache at the model's own context, up to 32768 tokens, from kvant
 * inspect. Results of an older kvant have sizes of full caches only. */
const isFull = (row) => (row.filled ?? 100) === 100;
const inspected = rowsOf("sizes").filter((row) => isNumber(row.kv_bytes) && isFull(row));
const inspectedF16 = inspected.find(isF16);
const toldSizes = () => ({
    context: inspectedF16.ctx,
    computed: false,
    f16Bytes: (tokens) => (inspectedF16.kv_bytes / inspectedF16.ctx) * tokens,
    bytes: (row) => (inspected.find((other) => labelOf(other).replace(/^(accel|fp32) /, "") ===
        labelOf(row).replace(/^(accel|fp32) /, "")) ?? { kv_bytes: null }).kv_bytes,
});

/* Results of an older kvant have no such sizes. They are computed from the measurements: a cache
 * grows by its codec bits per number and has a part that stays (fp16 windows). Layers with a
 * sliding window do not grow; the page then shows the measured context. */
function computedSizes() {
    const f16 = rowsOf("quality").find(isF16);
    const perCell = [...(f16 && about.ctx ? [f16.kv_bytes / cells(about.ctx)] : []),
        ...rowsOf("needle").filter((row) => isF16(row) && isNumber(row.kv_bytes))
            .map((row) => row.kv_bytes / cells(row.ctx))];
    const lengths = unique([about.ctx, ...rowsOf("needle").map((row) => row.ctx)]
        .map((tokens) => cells(tokens ?? 0)));
    const linear = lengths.length > 1 && perCell.length > 1
        && perCell.every((bytes) => Math.abs(bytes / perCell[0] - 1) < 1e-9);
    const context = linear && isNumber(about.n_ctx_train) ? Math.min(about.n_ctx_train, 32768)
        : about.ctx ?? 0;
    const f16Bytes = (tokens) => perCell[0] * tokens;
    return { context, computed: context !== about.ctx, f16Bytes, bytes(row) {
        if (!f16 || !about.ctx) return null;
        if (row.cache === "llama.cpp" || row.cache === "accel")
            return (row.kv_bytes / cells(about.ctx)) * context;
        return row.kv_bytes + (row.bits / 16) * (f16Bytes(context) - f16Bytes(about.ctx));
    } };
}
const sizes = inspectedF16 ? toldSizes() : computedSizes();

function qualityRows() {
    const rows = rowsOf("quality").filter((row) => isNumber(row.kld_mean));
    const f16 = rows.find(isF16);
    return rows.map((row) => {
        const bytes = sizes.bytes(row);
        return {
            ...row,
            name: labelOf(row),
            kind: kindOf(row),
            bytes,
            whole: bytes === null ? (f16 ? (16 * row.kv_bytes) / f16.kv_bytes : row.bits)
                : (16 * bytes) / sizes.f16Bytes(sizes.context),
            f16: row === f16,
        };
    });
}

/* The rows that no row of equal or smaller size beats. */
function front(rows, size) {
    let best = Infinity;
    return [...rows].sort((a, b) => a[size] - b[size] || a.kld_mean - b.kld_mean)
        .filter((row) => row.kld_mean < best && ((best = row.kld_mean), true));
}


/* ---- what to set ---- */

/* A divergence below the first limit, or below q8_0's, cannot be noticed. Above the second limit
 * answers change. */
const UNSEEN = 0.01, USABLE = 0.1;
const isStock = (row) => row.kind === "llama.cpp";
const stockOf = (rows, type) =>
    rows.find((row) => row.cache === "llama.cpp" && row.k === type && row.v === type);

/* A type of llama.cpp's that is as small and diverges no more, within the error of measurement. */
const equalled = (row, rows) => rows.find((other) => isStock(other) && !other.f16 && !isStock(row)
    && other.whole <= 1.01 * row.whole &&
    other.kld_mean <= row.kld_mean + (row.kld_se ?? 0));

/* Users set presets, settings files and llama.cpp's types. Codecs are candidates only when nothing
 * else was measured. */
function candidates(rows) {
    const all = rows.filter((row) => !row.f16 && !equalled(row, rows));
    const named = all.filter((row) => row.kind !== "kvant codec");
    return named.some((row) => !isStock(row)) ? named : all;
}

const smallest = (rows) =>
    [...rows].sort((a, b) => a.whole - b.whole || a.kld_mean - b.kld_mean)[0];

/* Whether a row diverges no more than q8_0, within the error of measurement. A row that diverges
 * more may still be below UNSEEN. */
const losesNothing = (row, q8) =>
    q8 !== undefined && row.kld_mean <= q8.kld_mean + 2 * (q8.kld_se ?? 0);

function chosen(rows) {
    const own = candidates(rows), q8 = stockOf(rows, "q8_0");
    const unseen = Math.max(UNSEEN, q8 ? q8.kld_mean + 2 * (q8.kld_se ?? 0) : 0);
    const second = rows.find((row) => row.preset === "balanced")
        ?? smallest(own.filter((row) => row.kld_mean <= (unseen + USABLE) / 2));
    const first = smallest(own.filter((row) => row.kld_mean <= unseen
        && (!second || row.kld_mean < second.kld_mean)));
    const last = smallest(own.filter((row) => row.kld_mean <= USABLE
        && (!second || row.whole < second.whole)));
    return [
        [!first || losesNothing(first, q8) ? "Loses nothing to be seen" : "Loses little", first,
            `Nothing else measured stays below a divergence of ${showSmall(unseen)}.`],
        [second && !second.preset ? "Between" : "The default", second,
            "The preset balanced was not measured."],
        ["Smallest usable", last, `Nothing smaller stays below a divergence of ${USABLE}.`],
    ];
}

const times = (ratio) => (ratio >= 9.5 ? ratio.toFixed(0) : ratio.toFixed(1));

/* "1.9 times q8_0's, 1/4 of q4_0's" */
function inWords(row, rows) {
    const q8 = stockOf(rows, "q8_0"), q4 = stockOf(rows, "q4_0");
    if (row === q8) return "what is usually called lossless";
    const words = [];
    if (q8 && q8.kld_mean > 0) words.push(losesNothing(row, q8) ? "no more than q8_0's"
        : `${times(row.kld_mean / q8.kld_mean)} times q8_0's`);
    if (q4 && row !== q4 && row.kld_mean > 0) {
        const ratio = q4.kld_mean / row.kld_mean;
        words.push(ratio >= 1.5 ? `1/${Math.round(ratio)} of q4_0's` : ratio > 0.9 ? "about q4_0's"
            : `${times(1 / ratio)} times q4_0's`);
    }
    return words.join(", ");
}

/* The decode speed at the deepest measurement in words, or null. Ranges that overlap count as
 * equal. */
function speedInWords(row) {
    const rows = rowsOf("speed").filter((other) => isNumber(other.decode_tps));
    const depth = Math.max(...rows.map((other) => other.depth));
    const at = (name) => rows.find((other) => other.depth === depth && labelOf(other) === name);
    const accelerated = isStock(row) ? at(row.name.replace("llama.cpp", "accel")) : undefined;
    const own = accelerated ?? at(row.name),
        f16 = rows.find((other) => other.depth === depth && isF16(other));
    if (!own || !f16) return null;
    const overlap = isNumber(own.decode_low) && own.rounds > 1 && own.decode_low <= f16.decode_high
        && f16.decode_low <= own.decode_high;
    const range = isNumber(own.decode_low) && own.rounds > 1
        ? ` (${show(own.decode_low, 1)} to ${show(own.decode_high, 1)})` : "";
    const how = accelerated ? "with --accel " : isStock(row) ? "without --accel " : "";
    const ratio = `${show(own.decode_tps / f16.decode_tps, 2)} times f16's`;
    return `${how}${overlap ? "as fast as f16 within the spread" : ratio}: ` +
        `${show(own.decode_tps, 1)} tokens/s${range} after ${depth} tokens`;
}

const quoted = (word) => (/^[\w.,:=\/+@%-]+$/.test(word) ? word
    : `'${word.replaceAll("'", "'\\''")}'`);
function commandOf(row) {
    const model = quoted(about.model_file ?? "model.gguf");
    const server = `llama-server -m ${model} -c ${sizes.context}`;
    if (isStock(row))
        return `kvant exec --accel -- ${server} -ctk ${quoted(row.k)} -ctv ${quoted(row.v)}`;
    const preset = row.preset === "balanced" ? "" : ` --preset ${quoted(row.preset)}`;
    if (row.preset) return `kvant exec${preset} -- ${server}`;
    if (row.config) return `kvant exec --config ${quoted(row.config)} -- ${server}`;
    return `kvant exec -k ${quoted(row.k)} -v ${quoted(row.v)} -- ${server}`;
}

/* Always selects the text, and also copies it if the browser lets a page copy. */
function copyButton(code) {
    const button = element("button", { type: "button", class: "copy" }, "copy");
    button.addEventListener("click", () => {
        document.getSelection().selectAllChildren(code);
        button.textContent = document.execCommand("copy") ? "copied" : "selected";
    });
    return button;
}

function card(title, row, why, rows) {
    const heading = element("h3", {}, title);
    if (!row) return element("div", { class: "card" }, heading,
        element("p", { class: "note" }, why));
    const share = row.bytes === null ? null : row.bytes / sizes.f16Bytes(sizes.context);
    const code = element("code", {}, commandOf(row));
    const speed = speedInWords(row), equal = equalled(row, rows);
    const facts = [
        ["memory", row.bytes === null ? `${show(row.bits)} bits per number`
            : `${show(row.bytes / MIB, row.bytes < 100 * MIB ? 1 : 0)} MiB at ${sizes.context} ` +
                `tokens, ${show(share)} of f16's ${show(sizes.f16Bytes(sizes.context) / MIB, 0)}`],
        ["divergence", `${showSmall(row.kld_mean)}: ${inWords(row, rows)}`],
        ["same token", `${per100(row.top1)} %`],
        ["decoding", speed ?? "not measured"],
    ];
    return element("div", { class: "card" }, heading, element("p", { class: "name" }, row.name),
        element("dl", {}, ...facts.flatMap(([name, value]) =>
            [element("dt", {}, name), element("dd", {}, value)])),
        equal ? element("p", { class: "note" }, `${equal.name} is as small and as good here.`)
            : null,
        element("div", { class: "command" }, code, copyButton(code)));
}

function choose(rows) {
    if (rows.length === 0) {
        section("choose", "What to set", notMeasured("kvant eval has not run."));
        return;
    }
    const name = quoted((about.model_file ?? "model.gguf").replace(/\.gguf$/, ""));
    const calibrate = element("code", {},
        `kvant calibrate -m ${quoted(about.model_file ?? "model.gguf")} -f text.txt `,
        `-o ${name}.kvcal`);
    section("choose", "What to set",
        element("div", { class: "cards" }, ...chosen(rows)
            .map(([title, row, why]) => card(title, row, why, rows))),
        about.calibration || !rows.some((row) => row.preset) ? null : element("p", {},
            "Measured without a calibration: presets learned from the text itself, as they do " +
            "from a prompt. A calibration takes minutes, once per model; answers then do not " +
            "depend on earlier requests: ",
            calibrate, copyButton(calibrate)),
        element("p", { class: "note" },
            `Run in the folder of the model; any program of llama.cpp will do. ${sizes.computed
                ? `Memory is computed for ${sizes.context} tokens from what ${about.ctx} took. `
                : ""}Where llama.cpp's own type is as small and as good, it is the one named.`));
}

function quality(rows) {
    const shown = rows.filter((row) => !row.f16 && row.kld_mean > 0);
    const label = "Mean divergence from fp16 against bits per number, for every configuration";
    if (shown.length === 0) {
        section("quality", "Quality against size", notMeasured("kvant eval has not run."));
        return;
    }
    const untied = shown.filter((row) => !equalled(row, shown));
    let size = "whole";
    const whole = `bits of the whole cache at ${sizes.context} tokens, everything included`;
    const draw = (width) => {
        const best = front(untied, size);
        const kinds = KINDS.filter((kind) => shown.some((row) => row.kind === kind));
        const svg = plot({
            width,
            height: Math.min(560, Math.max(340, width * 0.62)),
            /* Room for the title of the axis and, below it, the name of a star at the top. */
            marginTop: 40,
            marginLeft: 56,
            marginRight: 40,
            marginBottom: 40,
            x: { label: size === "bits" ? "codec bits per number →"
                : `bits per number, whole cache at ${sizes.context} tokens →`,
                grid: true, nice: true },
            y: { type: "log", label: "↑ mean divergence, nats (log)", grid: true,
                tickFormat: (d) => (/^[125]/.test(d.toExponential()) ? String(d) : "") },
            marks: [
                Plot.line(best, { x: size, y: "kld_mean", stroke: "var(--soft)", strokeWidth: 1.5,
                    strokeDasharray: "4 3", curve: "step-after" }),
                ...kinds.map((kind) => {
                    const i = KINDS.indexOf(kind);
                    return Plot.dot(shown.filter((row) => row.kind === kind), {
                        x: size, y: "kld_mean", symbol: SYMBOLS[i], r: i === 1 ? 6 : 4.5,
                        fill: COLOURS[i], fillOpacity: 0.35, stroke: COLOURS[i],
                        title: (d) => `${d.name}\n${show(d[size])} bits, ` +
                            `divergence ${showSmall(d.kld_mean)}`,
                    });
                }),
                /* Numbers are below and left of the front, where no point is. The list has
                 * names. */
                Plot.text(best, { x: size, y: "kld_mean", text: (_, i) => String(i + 1), dx: -8,
                    dy: 9, textAnchor: "end", fill: "var(--ink)", stroke: "var(--paper)",
                    strokeWidth: 3, fontWeight: 600 }),
            ],
        });
        return pointLabels(svg, shown, best, size);
    };
    const kinds = KINDS.filter((kind) => shown.some((row) => row.kind === kind));
    const legend = element("ul", { class: "legend" }, ...kinds.map((kind) => {
        const i = KINDS.indexOf(kind);
        const item = element("li");
        if (window.Plot) {
            const key = Plot.plot({ width: 26, height: 14, margin: 7, axis: null, style: STYLE,
                marks: [Plot.dot([[0, 0]], { symbol: SYMBOLS[i], r: 4.5, fill: COLOURS[i],
                    fillOpacity: 0.35, stroke: COLOURS[i] })] });
            key.setAttribute("aria-hidden", "true");
            item.append(key);
        }
        item.append(kind);
        return item;
    }), element("li", {}, "dashed: nothing measured is better at that size or below"));
    const build = () => {
        const ordered = front(untied, size), best = new Set(ordered);
        const list = element("ol", { class: "front",
            "aria-label": "Nothing measured is better at their size or below" },
            ...ordered.map((row) =>
                element("li", {}, `${row.name}: ${show(row[size])} bits, ` +
                    `divergence ${showSmall(row.kld_mean)}`)));
        const listed = shown.map((row) => ({ ...row, best: best.has(row) ? "yes" : "" }))
            .sort((a, b) => a[size] - b[size]);
        return figure(label, draw, element("div", {}, legend.cloneNode(true), list),
            makeTable(label, [
            NAMES,
            { key: "kind", name: "kind", text: true },
            { key: "bits", name: "codec bits" },
            { key: "whole", name: "whole cache" },
            { key: "kld_mean", name: "mean divergence", show: showSmall },
            { key: "best", name: "on the front", text: true },
        ], listed));
    };
    const select = element("select", { id: "size" }, element("option", { value: "whole" }, whole),
        element("option", { value: "bits" }, "codec bits, as in a very long context"));
    let current = build();
    select.addEventListener("change", () => {
        size = select.value;
        const next = build();
        current.replaceWith(next);
        current = next;
    });
    section("quality", "Quality against size",
        element("p", {}, "Lower and further left is better. Bits of the whole cache count every " +
            "byte that it keeps: codes, ",
            "scales, tokens that stay fp16, and transforms."),
        element("p", {}, element("label", { for: "size" }, "Size: "), select), current);
}

function position() {
    const rows = rowsOf("position")
        .filter((row) => row.text === about.text || !about.text || row.text === "all")
        .map((row) => ({ name: labelOf(row), x: (row.from + row.to) / 2,
            y: row.kld_mean > 0 ? row.kld_mean : null, ...row }))
        .filter((row) => !isF16(row));
    if (rows.length === 0) {
        section("position", "Divergence along the context",
            notMeasured("kvant eval --by-position has not run."));
        return;
    }
    /* Only the caches of the other figures, because a reader cannot tell more lines than colours
     * apart. */
    const chosen = new Set([...rowsOf("needle"), ...rowsOf("speed")].map(labelOf));
    const names = unique(rows.map((row) => row.name));
    const few = names.filter((name) => chosen.has(name));
    const kept = few.length > 0 ? few : names.slice(0, COLOURS.length);
    section("position", "Divergence along the context",
        element("p", {}, "Whether error grows as the cache fills. Positions before the first " +
            "point give the model something to go by and are not scored."),
        lineFigure("Mean divergence from fp16 by position in the context",
            rows.filter((row) => kept.includes(row.name)).slice(0, 4096),
            { x: { label: "position in the context →" },
                y: { type: "log", label: "↑ mean divergence, nats (log)",
                    tickFormat: (d) => (/^[125]/.test(d.toExponential()) ? String(d) : "") } },
            [NAMES, { key: "from", name: "from", show: integer },
                { key: "to", name: "to", show: integer },
                { key: "kld_mean", name: "mean divergence", show: showSmall },
                { key: "kld_p99", name: "99 %", show: showSmall },
                { key: "top1", name: "same top token %", show: per100 }]));
}

function memory(needles) {
    const seen = new Set();
    const rows = needles.filter((row) => isNumber(row.kv_bytes))
        .map((row) => ({ name: labelOf(row), x: row.ctx, y: row.kv_bytes / MIB }))
        .filter((row) => !seen.has(`${row.name} ${row.x}`) && seen.add(`${row.name} ${row.x}`));
    section("memory", "Memory",
        rows.length === 0 ? notMeasured("kvant needle has not run.") : element("p", {},
            "Bytes of the cache with a text of nearly that length in it: measured by the " +
            "plug-in for kvant, the size of the tensors for llama.cpp's own types."),
        rows.length === 0 ? null : lineFigure("Memory of the cache by context length", rows,
            { zero: true, x: { label: "tokens in the context →" },
                y: { label: "↑ MiB", zero: true } },
            [NAMES, { key: "x", name: "context", show: integer }, { key: "y", name: "MiB" }]));
}

function speed() {
    const rows = rowsOf("speed").map((row) => ({ ...row, name: labelOf(row), x: row.depth }));
    const decode = rows.map((row) => ({ ...row, y: row.decode_tps, low: row.decode_low,
        high: row.decode_high }));
    const prefill = rows.map((row) => ({ ...row, y: row.prefill_tps, low: row.prefill_low,
        high: row.prefill_high }));
    const columns = [NAMES, { key: "x", name: "tokens in the cache", show: integer },
        { key: "y", name: "tokens/s", show: (v) => show(v, 1) },
        { key: "low", name: "slowest", show: (v) => show(v, 1) },
        { key: "high", name: "fastest", show: (v) => show(v, 1) },
        { key: "rounds", name: "rounds", show: integer }];
    const axes = { zero: true, x: { label: "tokens in the cache →" },
        y: { label: "↑ tokens/s", zero: true } };
    section("speed", "Speed",
        rows.length === 0 ? notMeasured("kvant bench model has not run.") :
            element("p", {}, "Of the whole model, weights and all: medians of the rounds, on ",
                about.machine ?? "this machine", "."),
        rows.length === 0 ? null : element("h3", {}, "Decoding, token by token"),
        rows.length === 0 ? null : lineFigure("Decoding speed by tokens in the cache", decode, axes,
            columns),
        rows.length === 0 ? null : element("h3", {}, "Prefill, many tokens at once"),
        rows.length === 0 ? null : lineFigure("Prefill speed by tokens in the cache", prefill, axes,
            columns));
}

/* One map per cache. A fact that f16 does not find says nothing about a codec: its cell is empty
 * and says n/a. */
function needleMap(name, rows) {
    const label = `Share of facts found, ${name}, by context length and depth`;
    const cells = rows.map((row) => ({ ctx: row.ctx, depth: `${Math.round(100 * row.depth)} %`,
        order: row.depth, exact: row.exact, blind: row.of_f16 === null && !isF16(row) }));
    const depths = unique([...cells].sort((a, b) => a.order - b.order).map((cell) => cell.depth));
    const draw = (width) =>
        plot({
            width, height: 44 + 20 * depths.length, marginLeft: 44, marginBottom: 34, marginTop: 6,
            x: { type: "band", label: "context, tokens",
                domain: unique(cells.map((cell) => cell.ctx)).sort((a, b) => a - b),
                padding: 0.06 },
            y: { type: "band", label: null, domain: depths, padding: 0.08 },
            marks: [
                Plot.cell(cells, { x: "ctx", y: "depth", fill: "var(--c1)", stroke: "var(--line)",
                    fillOpacity: (d) => (d.blind ? 0 : 0.08 + 0.72 * d.exact),
                    title: (d) => `${d.ctx} tokens, depth ${d.depth}: ` +
                        (d.blind ? "f16 does not find it either" : `${per100(d.exact)} % found`) }),
                Plot.text(cells, { x: "ctx", y: "depth", fontSize: 10,
                    text: (d) => (d.blind ? "n/a" : String(Math.round(100 * d.exact))),
                    fill: (d) => (!d.blind && d.exact > 0.6 ? "var(--paper)" : "var(--ink)") }),
            ],
        });
    const place = element("div");
    if (window.Plot) follow(place, label, draw);
    return element("div", {}, element("h3", {}, name), place);
}

/* Totals come first, because a cell of the maps stands for very few questions. */
function needle(rows) {
    if (rows.length === 0) {
        section("needle", "Finding facts", notMeasured("kvant needle has not run."));
        return;
    }
    const named = rows.map((row) => ({ ...row, name: labelOf(row) }));
    const totals = unique(named.map((row) => row.name)).map((name) => {
        const own = named.filter((row) => row.name === name),
            fair = own.filter((row) => isNumber(row.of_f16));
        const count = (list, key) =>
            list.reduce((sum, row) => sum + Math.round((row[key] ?? 0) * row.trials), 0);
        const asked = own.reduce((sum, row) => sum + row.trials, 0), found = count(own, "exact");
        const sum = fair.reduce((all, row) => all + row.of_f16, 0);
        return { name, asked, found, share: asked > 0 ? found / asked : null,
            of_f16: fair.length > 0 ? sum / fair.length : null };
    });
    const label = "Share of hidden facts found";
    const draw = (width) =>
        plot({
            width, height: 44 + 24 * totals.length, marginLeft: Math.min(220, width * 0.45),
            marginRight: 40, marginBottom: 34, marginTop: 6,
            x: { domain: [0, 100], label: "found, % →", grid: true },
            y: { label: null, domain: totals.map((row) => row.name),
                tickFormat: (name) => (name.length > 30 ? `${name.slice(0, 29)}…` : name) },
            marks: [
                Plot.barX(totals, { x: (row) => 100 * row.share, y: "name", fillOpacity: 0.6,
                    fill: (row) => lookOf(row.name, []).colour }),
                Plot.text(totals, { x: (row) => 100 * row.share, y: "name", dx: 5,
                    text: (row) => String(row.found), textAnchor: "start", fill: "var(--ink)" }),
                Plot.ruleX([0]),
            ],
        });
    const sentence = totals.map((row) =>
        `${row.name.replace("llama.cpp ", "").replace("preset ", "")} ${row.found}`).join(", ");
    section("needle", "Finding facts",
        element("p", {}, "Numbers are hidden at several depths of a text and asked for at its " +
            "end. Found of ", `${totals[0].asked} questions: ${sentence}. `,
            "Small differences are chance."),
        figure(label, draw, element("details", { class: "by-place" },
            element("summary", {}, "By context length and depth"),
            element("p", {}, "n/a: the f16 cache does not find it either, so the codec is not " +
                "to blame."),
            element("div", { class: "maps" }, ...totals.map(({ name }) =>
                needleMap(name, named.filter((row) => row.name === name)))),
            makeTable("Facts found by context length and depth",
                [NAMES, { key: "ctx", name: "context", show: integer },
                { key: "depth", name: "depth" }, { key: "exact", name: "found %", show: per100 },
                { key: "of_f16", name: "of f16's %", show: per100 },
                { key: "log_probability", name: "ln p of the answer" }], named)),
        makeTable(label, [NAMES, { key: "found", name: "found", show: integer },
            { key: "asked", name: "of", show: integer },
            { key: "share", name: "found %", show: per100 },
            { key: "of_f16", name: "of f16's %", show: per100 }], totals)));
}

/* The lines of kvant tune --json: sites (layer, role and the cost of quantising only this site) and
 * the settings that were compared. */
function layers() {
    const all = rowsOf("sensitivity");
    const rows = all.filter((row) => isNumber(row.layer));
    const settings = all.filter((row) => row.setting);
    if (rows.length === 0) {
        section("layers", "Layers",
            notMeasured("no table of kvant tune was given (--sensitivity)."));
        return;
    }
    const key = ["probe_kld", "cost", "error"].find((name) => isNumber(rows[0][name])) ?? "cost";
    const unit = { probe_kld: "mean divergence, nats", cost: "share of the divergence, nats",
        error: "error of attention's output" }[key];
    const roleOf = (role) => /^k/i.test(role) ? "keys" : /^v/i.test(role) ? "values" : String(role);
    const points = rows.map((row) =>
        ({ ...row, name: roleOf(row.role), x: row.layer, y: row[key] }));
    section("layers", "Layers",
        element("p", {}, "The cost of quantising only one layer's keys or values, as kvant tune " +
            "measured it: a tuned setting spends its bits where this is high."),
        lineFigure("Cost of quantising one layer's keys or values, by layer", points,
            { x: { label: "layer →" }, y: { label: `↑ ${unit}`, zero: true }, zero: true },
            [{ key: "x", name: "layer", show: integer }, { key: "name", name: "role", text: true },
                { key: "y", name: unit, show: showSmall },
                { key: "spec", name: "codec chosen", text: true },
                { key: "site_bits", name: "bits" }]),
        settings.length === 0 ? null : makeTable("Settings that kvant tune compared", [
            { key: "setting", name: "setting", text: true }, { key: "k", name: "keys", text: true },
            { key: "v", name: "values", text: true }, { key: "bits", name: "codec bits" },
            { key: "kv_bytes", name: "MiB", show: mib },
            { key: "predicted", name: "predicted divergence", show: showSmall },
            { key: "kld_mean", name: "measured", show: showSmall },
            { key: "kld_se", name: "±", show: showSmall },
        ], settings));
}

function allRows(rows) {
    const label = "All configurations";
    section("table", "All configurations", element("p", {},
        "Press a heading to sort by it; press it again to reverse the order."),
        rows.length === 0 ? notMeasured("kvant eval has not run.") : makeTable(label, [
            NAMES,
            { key: "bits", name: "codec bits" },
            { key: "whole", name: "whole cache" },
            { key: "kv_bytes", name: `MiB at ${about.ctx ?? "?"} tokens`, show: mib },
            { key: "kld_mean", name: "mean divergence", show: showSmall },
            { key: "kld_se", name: "±", show: showSmall },
            { key: "kld_p50", name: "50 %", show: showSmall },
            { key: "kld_p90", name: "90 %", show: showSmall },
            { key: "kld_p99", name: "99 %", show: showSmall },
            { key: "kld_p999", name: "99.9 %", show: showSmall },
            { key: "kld_max", name: "largest", show: showSmall },
            { key: "top1", name: "same top token %", show: per100 },
            { key: "ppl", name: "perplexity", show: (v) => show(v, 3) },
            { key: "chunks", name: "chunks", show: integer },
        ], rows));
}

function how() {
    const facts = [["kvant", about.kvant], ["runtime", about.runtime], ["machine", about.machine],
        ["threads", about.threads], ["model", about.model_file],
        ["model's fingerprint", about.model_fingerprint], ["model's context", about.n_ctx_train],
        ["text", about.text], ["text's fingerprint", about.text_fingerprint],
        ["calibration", about.calibration], ["date", about.date]]
            .filter(([, value]) => value !== undefined && value !== null && value !== "");
    section("how", "How it was measured",
        element("dl", {}, ...facts.flatMap(([name, value]) =>
            [element("dt", {}, name), element("dd", {}, String(value))])),
        element("p", {}, "The commands, with the folders of files left out:"),
        ...steps.map((step) => element("div", {},
            element("h3", {}, step.name, step.state === "complete" ? "" : ` (${step.state})`,
            isNumber(step.seconds) ? `, ${show(step.seconds, 0)} s` : ""),
                element("pre", {}, step.command ?? ""))),
        element("p", { class: "note" },
            "The raw numbers are in the file that kvant report wrote next to this page, and in " +
            "the page itself."),
        data.licences ? element("details", {}, element("summary", {},
            "Licences of the plotting library"), element("pre", {}, data.licences)) : null);
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
/* Paper cannot be unfolded, so everything is open in print. */
window.addEventListener("beforeprint", () => document.querySelectorAll("#content details")
    .forEach((d) => (d.open = true)));
