"""Checks codec specs of a command line before anything is measured, as tools/choices.c does for
commands in C."""

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
            "kvant codecs lists all codecs",
            code=cli.USAGE,
        )


def _meant(spec, reason):
    """Hints on the codec that the user may have meant, if there is no such codec."""
    from kvant import codecs

    word, colon, options = spec.partition(":")
    if "there is no codec" not in reason:
        return []
    if re.match(r"i?q\d_", word):
        return [
            f"{word} is a type of llama.cpp's own cache: use --stock {word}, if the command has it"
        ]
    names = [name for family in codecs() for name in family.specs]
    return [f"did you mean '{name}{colon}{options}'?" for name in cli.closest(word, names)]
