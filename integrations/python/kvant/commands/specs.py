"""Codec specs of a command line, checked before anything is measured (tools/choices.c for commands of C)."""

import re

from . import cli


def check(command, option, spec, role, calibration=None):
    """Ends the command when the spec makes no codec."""
    from kvant import Error, check_spec

    try:
        check_spec(spec, role, calibration)
    except Error as error:
        cli.fail(
            f"{command}: {option} {spec}: {error.reason}",
            *_meant(spec, error.reason),
            "kvant codecs lists what there is",
            code=cli.USAGE,
        )


def _meant(spec, reason):
    """Hints on what may have been meant, where there is no such codec."""
    from kvant import codecs

    word, colon, options = spec.partition(":")
    if "there is no codec" not in reason:
        return []
    if re.match(r"i?q\d_", word):
        return [f"{word} is llama.cpp's own: --stock {word}, where a command has it"]
    names = [name for family in codecs() for name in family.specs]
    return [f"did you mean '{name}{colon}{options}'?" for name in cli.closest(word, names)]
