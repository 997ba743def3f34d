"""The cards on the page of kvant report: the codecs that they recommend, and the commands. The page
is made from stored results and opened in a browser. No model is needed.
"""

import sys
import unittest

from browser import PROGRAM
from report_page import Page, presets, step


@unittest.skipUnless(PROGRAM, "no Chromium on this machine: apt-get install chromium")
class Cards(Page):
    def test_sizes_that_kvant_inspect_told(self):
        """The page shows sizes of full caches unchanged, also if layers have windows and do not
        grow.
        """
        results = presets()
        f16 = {**step(results, "quality")["rows"][0], "ctx": 32768, "kv_bytes": 100 << 20}
        (balanced,) = (
            row for row in step(results, "quality")["rows"] if row["preset"] == "balanced"
        )
        quarter = {**balanced, "ctx": 32768, "filled": 25, "kv_bytes": 12 << 20}
        rows = [f16, quarter, {**balanced, "ctx": 32768, "filled": 100, "kv_bytes": 31 << 20}]
        results["steps"].append(
            {
                "name": "sizes",
                "command": "kvant inspect",
                "state": "complete",
                "seconds": 0,
                "rows": rows,
            }
        )
        self.open(results)
        default = self.cards()[1]
        self.assertIn("31.0 MiB at 32768 tokens, 0.31 of f16's 100", default["text"])
        self.assertTrue(default["command"].endswith("-c 32768"))
        self.assertNotIn(
            "is computed", self.evaluate('document.querySelector("#choose").textContent')
        )
        self.assertEqual(self.browser.complaints, [])

    def cards(self):
        return self.evaluate("""[...document.querySelectorAll("#choose .card")].map((card) => ({
            title: card.querySelector("h3").textContent,
            name: card.querySelector(".name")?.textContent ?? null, text: card.textContent,
            command: card.querySelector("code")?.textContent ?? null }))""")

    def test_three_cards_with_commands(self):
        self.open(presets())
        unseen, default, small = self.cards()
        self.assertEqual(
            (unseen["title"], unseen["name"]), ("Loses nothing to be seen", "llama.cpp q8_0")
        )
        self.assertEqual(
            unseen["command"],
            "kvant exec --accel -- llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf -c 8192 "
            "-ctk q8_0 -ctv q8_0",
        )
        self.assertEqual((default["title"], default["name"]), ("The default", "preset balanced"))
        self.assertEqual(
            default["command"],
            "kvant exec -- llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf -c 8192",
        )
        self.assertIn("without --accel as fast as f16", unseen["text"])
        # The memory is 180 MiB, at 4.25 bits in place of 16. In addition, the tokens that stay fp16
        # take 1 MiB.
        self.assertIn("48.8 MiB at 8192 tokens, 0.27 of f16's 180", default["text"])
        self.assertIn("0.0202: 4.1 times q8_0's, 1/2 of q4_0's", default["text"])
        self.assertIn(
            "2.00 times f16's: 20.0 tokens/s (19.0 to 21.0) after 1024 tokens", default["text"]
        )
        self.assertEqual((small["title"], small["name"]), ("Smallest usable", "preset small"))
        self.assertEqual(
            small["command"],
            "kvant exec --preset small -- llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf -c 8192",
        )
        self.assertIn("as fast as f16 within the spread", small["text"])
        self.assertIn(
            "kvant calibrate -m SmolLM2-135M-Instruct.Q4_1.gguf -f text.txt "
            "-o SmolLM2-135M-Instruct.Q4_1.kvcal",
            self.evaluate('document.querySelector("#choose").textContent'),
        )

    def test_the_speed_of_a_stock_type_is_that_of_its_command(self):
        results = presets()
        speed = step(results, "speed")["rows"]
        for row in [row for row in speed if row["k"] == "q8_0"]:
            speed.append(
                {
                    **row,
                    "cache": "accel",
                    "decode_tps": 17.0,
                    "decode_low": 16.9,
                    "decode_high": 17.1,
                }
            )
        self.open(results)
        self.assertIn(
            "with --accel 1.70 times f16's: 17.0 tokens/s (16.9 to 17.1)", self.cards()[0]["text"]
        )

    def test_nothing_is_recommended_that_a_stock_type_equals(self):
        results = presets()
        for row in step(results, "quality")["rows"]:
            if row["preset"] == "balanced":
                row.update(bits=6, kv_bytes=11796480 * 6 / 16)
            # as large as q4_0, and better only within the standard error
            if row["preset"] == "small":
                row.update(
                    bits=4.5,
                    kv_bytes=step(results, "quality")["rows"][2]["kv_bytes"],
                    kld_mean=0.039,
                )
        self.open(results)
        self.assertEqual(self.cards()[2]["name"], "llama.cpp q4_0")
        self.assertNotIn(
            "preset small", self.evaluate('document.querySelector(".front").textContent')
        )

    def test_a_card_promises_no_more_than_its_text_says(self):
        """A cache that diverges twice as much as q8_0 loses little, even if nobody could notice the
        loss.
        """
        results = presets()
        rows = step(results, "quality")["rows"]
        q8 = next(row for row in rows if row["k"] == row["v"] == "q8_0")
        small = next(row for row in rows if row["preset"] == "balanced")
        small.update(kld_mean=2 * q8["kld_mean"], kld_se=0.01 * q8["kld_mean"])
        q8.update(kld_se=0.01 * q8["kld_mean"])
        for row in rows:
            if row["preset"] == "small":
                row.update(
                    preset="quality",
                    kld_mean=1.9 * q8["kld_mean"],
                    bits=4.5,
                    kv_bytes=11796480 * 4.5 / 16,
                )
        self.open(results)
        card = self.cards()[0]
        self.assertEqual((card["title"], card["name"]), ("Loses little", "preset quality"))
        self.assertIn("1.9 times q8_0's", card["text"])

    def test_copying_selects_the_command(self):
        self.open(presets())
        self.evaluate('document.querySelector("#choose .copy").click()')
        self.assertEqual(self.evaluate("getSelection().toString()"), self.cards()[0]["command"])


if __name__ == "__main__":
    if PROGRAM is None:
        print("skipped: no Chromium on this machine (apt-get install chromium)")
        sys.exit(77)  # CTest shows this as skipped
    unittest.main()
