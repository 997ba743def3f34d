"""Settings files for the tests, written without the command."""


def seal(body):
    """The text of a settings file: the lines and their checksum, FNV-1a with 64 bits."""
    checksum = 0xCBF29CE484222325
    for byte in body.encode():
        checksum = (checksum ^ byte) * 0x100000001B3 % 2**64
    return f"{body}check {checksum:016x}\n"


def plain(n_layers, shape, keys, values):
    """Settings with one codec for all keys and one for all values, without a calibration."""
    last = n_layers - 1
    return seal(
        f"kvant-settings 1\nmodel tested\nlayers {n_layers}\n"
        f"k 0-{last} {shape} {keys}\nv 0-{last} {shape} {values}\n"
    )
