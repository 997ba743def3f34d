"""What kvant tune gains: KLD of a codec per layer next to the best uniform setting."""

from text import divergence, table

MODELS = {"SmolLM2-135M": "SmolLM2-135M", "Qwen2.5-Coder-0.5B": "Qwen2.5-0.5B",
          "Gemma-3-270M": "Gemma-3-270M"}  # fmt: skip


def _line(results, model, setting, budget):
    """The newest line of a setting whose bits round to the budget."""
    found = results.lines("tune.csv", {"model": model, "setting": setting})
    return results.take([line for line in found if round(line.number("bits")) == budget])


def tuning_gain(results):
    """KLD of tuned settings and of the best uniform one within 4 and 3 bits, on three models."""
    rows = []
    for budget in (4, 3):
        for model, name in MODELS.items():
            settings = ("tuned", "uniform within the budget")
            tuned, best = (_line(results, model, s, budget).number("kld_mean") for s in settings)
            cells = [divergence(tuned), divergence(best), f"{100 * (1 - tuned / best):.0f} %"]
            rows.append([f"{budget} bits", name, *cells])
    heading = ["budget", "model", "tuned, KLD", "best uniform setting, KLD", "less by"]
    return table(heading, *rows)
