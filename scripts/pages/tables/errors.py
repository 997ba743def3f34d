"""Two errors on normally distributed rows that a page names in a sentence."""


def _error(results, spec):
    return (
        f"{results.newest('codecs.csv', {'spec': spec, 'head_dim': '128'}).number('rescaled'):.4f}"
    )


def error_of_trellis(results):
    """D of trellis-4: its relative squared error at the best common scale."""
    return _error(results, "trellis-4")


def error_of_levels(results):
    """D of the best 16 fixed levels, which are turboquant-4's."""
    return _error(results, "turboquant-4")
