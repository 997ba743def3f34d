"""A codec on the GPU, made from a spec string."""

import ctypes as c

from . import checks
from .library import CodecInfo, Error, ROLE_K, ROLE_V, check, library

_ROLES = {"k": ROLE_K, "v": ROLE_V}


class Codec:
    """spec as in docs/codecs.md, role "k" or "v". Raises Error with the library's message for a spec that it refuses."""

    def __init__(self, spec, head_dim, role, seed=0):
        self._library, self._handle = library(), c.c_void_p()
        if not isinstance(spec, str) or "\0" in spec:
            raise TypeError(f"spec: a string is needed, not {spec!r}")
        text = c.create_string_buffer(512)
        status = self._library.kvant_cuda_codec_create(
            spec.encode(),
            checks.count(head_dim, "head_dim", most=512),
            _ROLES[checks.choice(role, "role", tuple(_ROLES))],
            checks.count(seed, "seed", least=0, most=2**64 - 1),
            c.byref(self._handle),
            text,
            len(text),
        )
        if status:
            raise Error(f"codec {spec!r}", status, text.value.decode(errors="replace"))
        self._read_info()

    def _read_info(self):
        self.info = CodecInfo(size=c.sizeof(CodecInfo))
        check("codec info", self._library.kvant_cuda_codec_get_info(self._handle, c.byref(self.info)))

    def open(self):
        """The codec of open pages whose rows this one will quantise."""
        codec = Codec.__new__(Codec)
        codec._library, codec._handle = self._library, c.c_void_p()
        check("open codec", self._library.kvant_cuda_codec_create_open(self._handle, c.byref(codec._handle)))
        codec._read_info()
        return codec

    @property
    def spec(self):
        """The canonical spec."""
        return self.info.spec.decode()

    @property
    def handle(self):
        return self._handle.value

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library.kvant_cuda_codec_free(c.byref(self._handle))
