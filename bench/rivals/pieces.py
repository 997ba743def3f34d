"""Which pieces of a tokenizer can stand in a text, for models with fewer tokens."""


def byte_characters():
    """The character for each byte in the pieces of tokenizers that merge bytes, such as Qwen's."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    places = {byte: chr(byte) for byte in shown}
    return places | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def pieces_in(text, pieces):
    """Which of the pieces stand anywhere in the text."""
    longest = max(map(len, pieces))
    found = set()
    for line in set(text.splitlines(keepends=True)):
        for begin in range(len(line)):
            for end in range(begin + 1, min(begin + longest, len(line)) + 1):
                if line[begin:end] in pieces:
                    found.add(line[begin:end])
    return found


def as_pieces(text, tokenizer):
    """The text in the characters of the tokenizer's pieces."""
    if tokenizer == "llama":
        return text.replace(" ", "\u2581")
    places = byte_characters()
    return "".join(places[byte] for byte in text.encode())


def kept_merges(merges, kept):
    """The merges of kept pieces into kept pieces, in their order."""
    pairs = (merge.split(" ") for merge in merges)
    return [f"{a} {b}" for a, b in pairs if a in kept and b in kept and a + b in kept]
