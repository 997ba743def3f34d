"""The rules that a test holds messages to. Only a reader can see whether a message says what
happened, why and what to do; a script can see these faults."""

import re

SCREENFUL = 300  # characters: four lines of a terminal
FEWEST_WORDS = 3
# Words of our own, and what to write instead (the field's words).
PRIVATE = {
    "learnt": "learned",
    "anew": "again",
    "beside": "next to, with",
    "fresh": "new",
    "stand-ins?": "mock, filler row",
    "turn(s|ed|ing)?(?! (it )?o(ff|n)|s it off)": "rotate by RoPE",
    "octaves?|stretch(es)?": "position bucket",
    "unfit|suffices": "rejected, has enough samples",
    "kin|outers|noted": "lineage, second moments, pending",
    "open (pages?|blocks?|codecs?)": "exact page",
    "no place|(that|these|which|all \\S+) places?": "pointer, position, layout fact",
    "alone": "only",
    "tells?|told": "report, say",
    "touched": "resident",
    "doors?": "loader",
    "laid out otherwise": "has another layout",
    "as (it|they) (is|are|were)|so many|what came|the other ones|of its own": "the noun",
    "please|sorry|oops|illegal|bad": "what is wrong",
}
PRIVATE_WORD = {re.compile(rf"\b({word})\b", re.IGNORECASE): new for word, new in PRIVATE.items()}
# A name may begin a message with a capital; a sentence does not.
NAME = re.compile(r"[A-Z]\w*[A-Z_]\w*|[A-Z]|Python|Ctrl-C")
SAYS_NOTHING = re.compile(
    r"(?:[\w -]+: |<[^>]*>: )*(?:invalid(?: argument)?|not (?:valid|supported)|unsupported|failed"
    r"|error|wrong|.* is (?:invalid|not valid|wrong))",
    re.IGNORECASE,
)


def without_fields(text):
    """Fields and quoted texts may hold any word."""
    return re.sub(r"<[^>]*>|…|(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"", "<>", text)


def faults(message):
    """The faults of a message, as a list of texts."""
    text = message.text
    plain = without_fields(text)
    found = [
        f"'{word.search(plain)[0]}': write {new}"
        for word, new in PRIVATE_WORD.items()
        if word.search(plain)
    ]
    if len(text) > SCREENFUL:
        found.append(f"{len(text)} characters, of {SCREENFUL} at most")
    if re.search(r"[^.]\.$|[!;:,]$", text) and not message.is_part:
        found.append("ends with a sign: a message is no sentence of a page")
    first = re.match(r"[A-Za-z_-]+", text.removeprefix("hint: ").removeprefix("kvant: "))
    if first and not message.is_part and first[0][0].isupper() and not NAME.fullmatch(first[0]):
        found.append("begins with a capital")
    if SAYS_NOTHING.fullmatch(text) and not message.is_part:
        found.append("does not say what is wrong")
    if len(plain.split()) < FEWEST_WORDS and "<>" not in plain and not message.is_part:
        found.append(f"fewer than {FEWEST_WORDS} words cannot say what happened")
    return found
