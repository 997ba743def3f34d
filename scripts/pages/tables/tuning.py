"""kvant tune: a codec per layer next to the same codec everywhere."""

from caches import MODELS
from text import divergence, table


def tuning(results):
    """Bits and KLD of tuned settings next to uniform ones within and above the budget."""
    rows = []
    for model, name in MODELS.items():
        for budget in (4, 3):
            settings = ("tuned", "uniform within the budget", "uniform, no fewer bytes")
            lines = [_line(results, model, setting, budget) for setting in settings]
            predicted = divergence(lines[0].number("predicted"))
            row = [name, budget, predicted, divergence(lines[0].number("kld_mean"))]
            for line in lines[1:]:
                row += [f"{line.number('bits'):.2f}", divergence(line.number("kld_mean"))]
            rows.append(row)
    heading = ["model", "budget, bits", "predicted KLD", "tuned, KLD", "uniform, bits", "KLD"]
    return table([*heading, "next uniform, bits", "KLD"], *rows)


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


def _line(results, model, setting, budget):
    """The newest line of a setting whose bits round to the budget."""
    lines = results.lines("tune.csv", {"model": model, "setting": setting})
    return results.take([line for line in lines if round(line.number("bits")) == budget])
