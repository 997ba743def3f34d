"""The page of kvant report, made from stored results and opened in a browser. No model is needed.
test_report_cards.py tests the cards that recommend a codec.
"""

import copy
import itertools
import json
import sys
import unittest

from browser import PROGRAM
from report_page import OK, RESULTS, RUNTIME, USAGE, Folder, Page, presets, step
from testing import run


class Render(Folder):
    def test_one_file_that_names_no_address(self):
        done = self.make(RESULTS)
        self.assertEqual(done.returncode, OK, done.stderr)
        self.assertEqual(done.stdout.strip(), str(self.page))
        page = self.page.read_text()
        self.assertNotIn("{{", page.split('<script id="data"')[0])
        self.assertNotRegex(page.split("<script>")[0], r'(src|href)="(?!#)')
        self.assertIn("default-src 'none'", page)
        self.assertIn("Permission to use, copy, modify", page)
        self.assertEqual([p.name for p in self.folder.iterdir() if p.name.endswith(".part")], [])

    def test_results_that_are_none(self):
        wrong = copy.deepcopy(RESULTS)
        wrong["kvant_report"] = 2
        rowless = copy.deepcopy(RESULTS)
        del rowless["steps"][0]["rows"]
        rows = copy.deepcopy(RESULTS)
        rows["steps"][0]["rows"][0] = 7
        for results, words in [
            ("", "is not JSON"),
            (json.dumps(RESULTS)[:-100], "is not JSON"),
            ("[]", "is not a result of kvant report"),
            ("{}", "is not a result of kvant report"),
            (wrong, "is of another version"),
            (rowless, "has a step without a name or rows"),
            (rows, "has a row that is not an object"),
            ({"kvant_report": 1}, 'has no "about"'),
        ]:
            with self.subTest(words=words):
                self.page.write_text("the old page")
                done = self.make(results)
                self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""), done.stderr)
                self.assertIn(words, done.stderr)
                self.assertEqual(self.page.read_text(), "the old page")

    def test_mistakes_are_named(self):
        for arguments, code, words in [
            ([], USAGE, "no output given"),
            (["-o", self.page], USAGE, "no model given"),
            (["-o", self.page, "-f", "-"], USAGE, "standard input"),
            (["-o", self.page, "-f", __file__], USAGE, "no model given"),
            (
                ["-o", self.page, "-f", __file__, "-m", "/nonexistent.gguf"],
                RUNTIME,
                "/nonexistent.gguf",
            ),
            (["-o", "/nonexistent/page.html", "--from", __file__], RUNTIME, "/nonexistent"),
            (["-o", self.page, "--from", "/nonexistent.json"], RUNTIME, "/nonexistent.json"),
        ]:
            with self.subTest(arguments=arguments):
                done = run("report", *arguments)
                self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
                self.assertIn(words, done.stderr)


@unittest.skipUnless(PROGRAM, "no Chromium on this machine: apt-get install chromium")
class InABrowser(Page):
    def test_no_network_and_no_complaints(self):
        for scheme in ("light", "dark"):
            self.open(scheme=scheme)
        self.assertEqual(set(self.browser.requests), {f"file://{self.page}"})
        self.assertEqual(self.browser.complaints, [])

    def test_every_figure_has_a_name_and_a_table(self):
        self.open()
        figures = self.evaluate("""[...document.querySelectorAll("figure")].map((f) => ({
            name: f.getAttribute("aria-label"),
            pictures: [...f.querySelectorAll("svg[role=img]")]
                .map((s) => s.getAttribute("aria-label")),
            rows: f.querySelectorAll("details table tbody tr").length,
        }))""")
        self.assertGreaterEqual(len(figures), 6)
        for figure in figures:
            self.assertTrue(figure["name"])
            self.assertGreater(figure["rows"], 0)
            self.assertGreater(len(figure["pictures"]), 0)
            self.assertTrue(all(figure["pictures"]))
        names = [
            (node["role"]["value"], node.get("name", {}).get("value"))
            for node in self.browser.accessible_nodes()
        ]
        for figure in figures:
            for picture in figure["pictures"]:
                self.assertTrue(
                    any(
                        role in ("image", "img", "graphics-document") and name == picture
                        for role, name in names
                    ),
                    picture,
                )

    def test_every_number_is_in_the_table(self):
        self.open()
        rows = step(RESULTS, "quality")["rows"]
        self.assertEqual(
            self.evaluate('document.querySelectorAll("#table tbody tr").length'), len(rows)
        )
        text = self.evaluate('document.querySelector("#table table").textContent')
        for row in rows:
            self.assertIn(f"{row['bits']:.2f}", text)
            self.assertIn(f"{row['ppl']:.3f}", text)

    def test_bits_with_windows(self):
        """A context of 128 holds half of llama.cpp's block of 256 cells. Its reported size is for
        128, with no more bits per number.
        """
        results = copy.deepcopy(RESULTS)
        results["about"]["ctx"] = 128
        rows = step(results, "quality")["rows"]
        numbers = rows[0]["kv_bytes"] / 2
        for row in rows:
            row["kv_bytes"] = (
                row["bits"] / 8 * (numbers if row["cache"] == "llama.cpp" else numbers / 2)
            )
        self.open(results)
        self.assertEqual(self.column(1), self.column(2))

    def choose_size(self, size):
        self.evaluate(
            f"""(() => {{ const s = document.querySelector("#size");
            s.value = "{size}"; s.dispatchEvent(new Event("change")); }})()"""
        )
        self.browser.settle()

    def test_front_is_what_nothing_beats(self):
        self.open()
        self.choose_size("bits")
        rows = [row for row in step(RESULTS, "quality")["rows"] if row["kld_mean"] > 1e-4]
        wanted = [
            row
            for row in rows
            if not any(
                other["kld_mean"] <= row["kld_mean"]
                and other["bits"] <= row["bits"]
                and other is not row
                for other in rows
            )
        ]
        listed = self.evaluate(
            '[...document.querySelectorAll(".front li")].map((li) => li.textContent)'
        )
        self.assertEqual(len(listed), len(wanted))
        for row, text in zip(sorted(wanted, key=lambda row: row["bits"]), listed):
            self.assertIn(f"{row['bits']:.2f} bits", text)

    def column(self, i):
        return self.evaluate(
            '[...document.querySelectorAll("#table tbody tr")]'
            f".map((tr) => parseFloat(tr.children[{i}].textContent))"
        )

    def test_sorting_by_keyboard(self):
        self.open()
        self.evaluate('document.querySelector("#table .scroll").focus()')
        for _ in range(2):
            self.browser.press("Tab")
        self.assertIn("codec bits", self.evaluate("document.activeElement.textContent"))
        self.browser.press("Enter", text="\r")
        self.assertEqual(self.column(1), sorted(self.column(1)))
        self.assertEqual(
            self.evaluate('document.activeElement.parentElement.getAttribute("aria-sort")'),
            "ascending",
        )
        self.browser.press("Enter", text="\r")
        self.assertEqual(self.column(1), sorted(self.column(1), reverse=True))
        self.assertEqual(self.evaluate('document.querySelectorAll("#table [aria-sort]").length'), 1)

    def test_colours_follow_the_scheme_and_stand_out(self):
        contrast = """(() => {
            const light = (c) => {
                const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map((v) => v / 255)
                    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            const paper = light(getComputedStyle(document.body).backgroundColor);
            const ratio = (e) => { const ink = light(getComputedStyle(e).color);
                return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); };
            const text = "p, h1, h2, td, dt, .note, nav a, summary, caption";
            return [paper, ...[...document.querySelectorAll(text)].map(ratio)];
        })()"""
        for scheme, dark in (("light", False), ("dark", True)):
            self.open(scheme=scheme)
            paper, *ratios = self.evaluate(contrast)
            self.assertEqual(paper < 0.5, dark)
            self.assertGreaterEqual(min(ratios), 4.5)  # WCAG 2, AA

    def test_nothing_sticks_out_on_a_phone(self):
        self.open(presets(), width=360, height=740)
        self.evaluate(
            'document.querySelectorAll("#content details").forEach((d) => (d.open = true))'
        )
        self.browser.settle()
        self.assertEqual(self.evaluate("document.documentElement.scrollWidth"), 360)
        widths = self.evaluate(
            '[...document.querySelectorAll("svg[role=img], .card, td, th")]'
            ".map((s) => s.getBoundingClientRect().right)"
        )
        self.assertLessEqual(max(widths), 360)
        self.assertEqual(
            self.evaluate(
                '[...document.querySelectorAll(".scroll")]'
                ".filter((e) => e.scrollWidth > e.clientWidth).length"
            ),
            0,
        )

    def test_presets_are_named_in_the_plot(self):
        self.open(presets())
        words = self.evaluate(
            '[...document.querySelectorAll("#quality svg[role=img] text")]'
            ".map((t) => t.textContent)"
        )
        for name in ("balanced", "small", "q8_0", "q4_0"):
            self.assertIn(name, words)

    def boxes(self, selector):
        """(left, right, top, bottom, text) of the elements in the plot of quality."""
        return self.evaluate(
            """[...document.querySelector("#quality svg[role=img]")
            .querySelectorAll(%s)].map((e) => { const b = e.getBoundingClientRect();
            return [b.left, b.right, b.top, b.bottom, e.textContent]; })"""
            % json.dumps(selector)
        )

    def test_names_in_the_plot_are_in_nobodys_way(self):
        """No name covers another name, and nothing covers the title of an axis, also on a phone. A
        preset diverges most, at the upper edge, and two caches are nearly one point, as balanced
        and q5_1 were.
        """

        def apart(a, b):
            return a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]

        results = presets()
        rows = step(results, "quality")["rows"]
        (worst,) = (row for row in rows if row["preset"] == "small")
        worst.update(kld_mean=2 * max(row["kld_mean"] for row in rows), bits=2, kv_bytes=1 << 20)
        (q4,) = (row for row in rows if row["k"] == row["v"] == "q4_0")
        (near,) = (row for row in rows if row["preset"] == "balanced")
        near.update({key: 1.02 * q4[key] for key in ("kld_mean", "bits", "kv_bytes")})
        stock = [row["k"] for row in rows if row["cache"] == "llama.cpp" and row["k"] == row["v"]]
        for width in (1280, 390, 340):
            self.open(results, width=width)
            names = self.boxes("text.point")
            titles = self.boxes('[aria-label$="axis label"] text')
            self.assertEqual(
                sorted(name[4] for name in names),
                sorted(["balanced", "small", *(k for k in stock if k != "f16")]),
            )
            self.assertGreaterEqual(len(titles), 2)
            points = self.boxes('[aria-label="dot"] path')
            pairs = itertools.product(names + points, titles)
            for a, b in [*itertools.combinations(names, 2), *pairs]:
                self.assertTrue(apart(a, b), f"{a[4] or 'a point'} and {b[4]} at {width}")

    def test_titles_say_whether_a_calibration_was_used(self):
        results = presets()
        self.open(results)
        self.assertTrue(self.evaluate("document.title").endswith(", not calibrated"))
        results["about"]["calibration"] = "model.kvcal"
        self.open(results)
        self.assertTrue(self.evaluate("document.title").endswith(", calibrated"))
        heading = self.evaluate('document.querySelector("h1").textContent')
        self.assertEqual(self.evaluate("document.title"), heading)

    def test_curves_differ(self):
        results = presets()
        for i in range(12):
            step(results, "speed")["rows"].append(
                {
                    **step(results, "speed")["rows"][0],
                    "cache": "kvant",
                    "k": f"codec-{i}",
                    "v": f"codec-{i}",
                }
            )
        self.open(results)
        looks = self.evaluate("""[...document.querySelector("#speed .legend")
            .querySelectorAll("line")].map((l) =>
            `${getComputedStyle(l).stroke} ${l.getAttribute("stroke-dasharray")}`)""")
        self.assertEqual(len(looks), len(set(looks)))
        self.assertEqual(len({look.split(")")[0] for look in looks}), 10)
        ends = self.evaluate("""[...document.querySelector("#speed figure")
            .querySelectorAll("text.end")].map((t) => [t.textContent,
            t.getBoundingClientRect().top, t.getBoundingClientRect().right])""")
        self.assertEqual(len(ends), len(looks))
        tops = sorted(top for _, top, _ in ends)
        self.assertGreaterEqual(min(b - a for a, b in zip(tops, tops[1:])), 12)  # legible
        self.assertLessEqual(max(right for *_, right in ends), 1280)

    def test_totals_of_found_facts_come_first(self):
        self.open()
        rows = [
            row
            for name in ("needle:512", "needle:1024")
            for row in step(RESULTS, name)["rows"]
            if row["k"] == row["v"] == "q8_0"
        ]
        found = sum(round(row["exact"] * row["trials"]) for row in rows)
        asked = sum(row["trials"] for row in rows)
        sentence = self.evaluate('document.querySelector("#needle p").textContent')
        self.assertIn(f"Found of {asked} questions", sentence)
        self.assertIn(f"q8_0 {found},", sentence)
        self.assertFalse(self.evaluate('document.querySelector("#needle .by-place").open'))
        self.evaluate('(document.querySelector("#needle .by-place").open = true)')
        self.browser.settle()
        self.assertEqual(
            self.evaluate('document.querySelectorAll("#needle .maps svg[role=img]").length'), 5
        )

    def test_figures_follow_the_width(self):
        self.open(width=1200)
        self.browser.look(width=500)
        self.browser.settle()
        self.assertLessEqual(
            self.evaluate(
                'document.querySelector("#quality svg[role=img]").getBoundingClientRect().width'
            ),
            500,
        )

    def test_paper_shows_all_tables(self):
        self.open(scheme="dark", media="print")
        self.assertEqual(
            self.evaluate("getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)"
        )
        self.evaluate('window.dispatchEvent(new Event("beforeprint"))')
        self.assertEqual(
            self.evaluate('document.querySelectorAll("details:not([open])").length'), 0
        )

    def test_the_other_size(self):
        self.open()
        before = self.evaluate('document.querySelector("#quality svg[role=img]").textContent')
        self.choose_size("bits")
        after = self.evaluate('document.querySelector("#quality svg[role=img]").textContent')
        self.assertIn("whole cache at 8192 tokens", before)
        self.assertIn("codec bits per number", after)

    def test_layers_of_kvant_tune(self):
        results = copy.deepcopy(RESULTS)
        sites = [
            {
                "setting": None,
                "layer": layer,
                "role": role,
                "spec": "int-4",
                "site_bits": 4.5,
                "probe_kld": 0.01 * (layer + 1),
            }
            for layer in range(3)
            for role in "KV"
        ]
        rows = [
            {
                "setting": "tuned",
                "k": "several",
                "v": "several",
                "bits": 4.1,
                "kld_mean": 0.02,
                "layer": None,
            },
            *sites,
        ]
        results["steps"].append(
            {
                "name": "sensitivity",
                "command": "kvant tune",
                "state": "complete",
                "seconds": 0,
                "rows": rows,
            }
        )
        self.open(results)
        self.assertEqual(
            self.evaluate('document.querySelectorAll("#layers figure tbody tr").length'), 6
        )
        self.assertIn("tuned", self.evaluate('document.querySelector("#layers").textContent'))
        self.assertEqual(
            self.evaluate('document.querySelectorAll("#layers svg[role=img]").length'), 1
        )
        self.assertEqual(self.browser.complaints, [])

    def test_names_are_text(self):
        results = copy.deepcopy(RESULTS)
        evil = '</script><img src=x onerror="throw 1"><!--'
        results["about"]["model"] = results["about"]["text"] = evil
        for row in step(results, "quality")["rows"]:
            row["k"] = row["v"] = evil
        self.open(results)
        self.assertIn(evil, self.evaluate("document.title"))
        self.assertEqual(self.evaluate('document.querySelectorAll("img").length'), 0)
        self.assertEqual(self.browser.complaints, [])

    def test_what_is_missing_is_said(self):
        for results in (
            {"kvant_report": 1, "about": {}, "steps": []},
            {**RESULTS, "complete": False, "steps": [step(RESULTS, "quality")]},
        ):
            self.open(results)
            self.assertEqual(self.browser.complaints, [])
            self.assertIn("This report is partial", self.evaluate("document.body.textContent"))
            self.assertIn(
                "Not measured", self.evaluate('document.querySelector("#needle").textContent')
            )


if __name__ == "__main__":
    if "InABrowser" in sys.argv and PROGRAM is None:
        print("skipped: no Chromium on this machine (apt-get install chromium)")
        sys.exit(77)  # CTest shows this as skipped
    unittest.main()
