"""The structures of include/kvant/*.h as ctypes sees them, header by header. Nothing else: no
function, no rule.

tests/python/layouts.py prints how C lays them out, and a test compares. Names are those of C; a
field whose C name is a word of Python ends in an underscore."""

from __future__ import annotations

import ctypes as c
from typing import Any


class Struct(c.Structure):
    """Structures of kvant that begin with their size; new() fills it in."""

    _fields_ = [("size", c.c_size_t)]

    @classmethod
    def new(cls, **fields: Any) -> Any:
        return cls(size=c.sizeof(cls), **fields)

    def plain(self) -> dict[str, Any]:
        """Fields as Python's own types: no size, text instead of bytes. Pointers stay numbers or
        None."""
        values = {name: getattr(self, name) for name, *_ in self._fields_}
        return {
            name: value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in values.items()
        }


# ---- codec.h ----


class Affine(c.Structure):
    _fields_ = [("center", c.c_void_p), ("scale", c.c_void_p)]


class CodecInfo(Struct):
    _fields_ = [
        ("spec", c.c_char_p),
        ("source", c.c_char_p),
        ("head_dim", c.c_uint32),
        ("role", c.c_int),
        ("center", c.c_int),
        ("norm", c.c_int),
        ("sink_tokens", c.c_uint32),
        ("recent_tokens", c.c_uint32),
        ("block_tokens", c.c_uint32),
        ("bits", c.c_uint32),
        ("code_bytes", c.c_size_t),
        ("metadata_offset", c.c_size_t),
        ("metadata_bytes", c.c_size_t),
        ("page_bytes", c.c_size_t),
        ("true_bits", c.c_double),
        ("nominal_bits", c.c_double),
        ("fingerprint", c.c_uint64),
        ("learns_transform", c.c_uint32),
    ]


class CodecFamily(Struct):
    _fields_ = [
        ("name", c.c_char_p),
        ("variants", c.c_char_p),
        ("options", c.c_char_p),
        ("common_options", c.c_char_p),
        ("source", c.c_char_p),
        ("summary", c.c_char_p),
    ]


# ---- index.h ----


class IndexParams(Struct):
    _fields_ = [
        ("dim", c.c_uint32),
        ("metric", c.c_int),
        ("spec", c.c_char_p),
        ("center", c.c_void_p),
        ("centroids", c.c_void_p),
        ("centroid_stride", c.c_size_t),
        ("n_centroids", c.c_size_t),
    ]


ALLOW = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64)


class IndexQuery(Struct):
    _fields_ = [
        ("rows", c.c_void_p),
        ("stride", c.c_size_t),
        ("n", c.c_size_t),
        ("k", c.c_uint32),
        ("n_threads", c.c_uint32),
        ("allowed", c.c_void_p),
        ("n_allowed", c.c_size_t),
        ("allow", ALLOW),
        ("allow_context", c.c_void_p),
        ("rerank", c.c_uint32),
        ("originals", c.c_void_p),
        ("original_stride", c.c_size_t),
        ("n_originals", c.c_uint64),
        ("original", c.c_void_p),
        ("original_context", c.c_void_p),
        ("n_probe", c.c_uint32),
    ]


class IndexInfo(Struct):
    _fields_ = [
        ("dim", c.c_uint32),
        ("metric", c.c_int),
        ("spec", c.c_char_p),
        ("bits", c.c_uint32),
        ("has_center", c.c_int),
        ("has_ids", c.c_int),
        ("is_view", c.c_int),
        ("n", c.c_uint64),
        ("bytes_per_vector", c.c_size_t),
        ("id_bytes", c.c_size_t),
        ("memory_bytes", c.c_size_t),
        ("file_bytes", c.c_size_t),
        ("n_lists", c.c_uint32),
        ("next_id", c.c_uint64),
    ]


# ---- tensor.h ----


class ExactPart(Struct):
    _fields_ = [("first", c.c_uint32), ("newest", c.c_uint32), ("total", c.c_uint32), ("step", c.c_uint32)]


class TensorParams(Struct):
    _fields_ = [
        ("codecs", c.POINTER(c.c_void_p)),
        ("n_kv_heads", c.c_uint32),
        ("n_sequences", c.c_uint32),
        ("n_blocks", c.c_uint32),
        ("blocks_per_sequence", c.c_uint32),
        ("n_open_blocks", c.c_uint32),
        ("block_stride", c.c_size_t),
        ("exact", c.POINTER(ExactPart)),
    ]


class BlockInfo(Struct):
    _fields_ = [
        ("state", c.c_int),
        ("version", c.c_uint32),
        ("written", c.c_uint64),
        ("codec", c.c_void_p),
        ("page", c.c_void_p),
        ("affine", Affine),
        ("start", c.c_void_p),
    ]


class Queries(Struct):
    _fields_ = [
        ("q", c.c_void_p),
        ("token_stride", c.c_size_t),
        ("head_stride", c.c_size_t),
        ("n_tokens", c.c_uint32),
        ("n_heads", c.c_uint32),
        ("positions", c.c_void_p),
    ]


class Rope(Struct):
    _fields_ = [
        ("n_dims", c.c_uint32),
        ("interleaved", c.c_uint32),
        ("frequencies", c.c_void_p),
        ("n_positions", c.c_uint32),
        ("n_ranges", c.c_uint32),
        ("block_centers", c.c_uint32),
    ]


class TensorInfo(Struct):
    _fields_ = [
        ("role", c.c_int),
        ("n_kv_heads", c.c_uint32),
        ("head_dim", c.c_uint32),
        ("n_blocks", c.c_uint32),
        ("n_open_blocks", c.c_uint32),
        ("n_versions", c.c_uint32),
        ("bytes", c.c_size_t),
        ("sealed_bytes", c.c_size_t),
        ("open_bytes", c.c_size_t),
        ("written_blocks", c.c_size_t),
        ("learnt_bytes", c.c_size_t),
        ("learnt_most", c.c_size_t),
        ("working_bytes", c.c_size_t),
        ("working_most", c.c_size_t),
    ]


# ---- calibration.h ----

MAX_CODEBOOKS = 8


class CalibrationInfo(Struct):
    _fields_ = [
        ("model", c.c_char_p),
        ("model_fingerprint", c.c_uint64),
        ("n_layers", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("head_dim", c.c_uint32),
        ("n_tokens", c.c_uint64),
        ("seed", c.c_uint64),
        ("n_codebooks", c.c_uint32),
        ("clusters", c.c_uint32 * MAX_CODEBOOKS),
        ("bytes", c.c_size_t),
        ("checksum", c.c_uint64),
    ]


class CalibrationEntry(Struct):
    _fields_ = [
        ("head_dim", c.c_uint32),
        ("mean", c.c_void_p),
        ("min", c.c_void_p),
        ("max", c.c_void_p),
        ("query_moment", c.c_void_p),
        ("diagonal", c.c_void_p),
        ("matrix", c.c_void_p),
        ("centroids", c.c_void_p * MAX_CODEBOOKS),
    ]


class CalibratorConfig(Struct):
    _fields_ = [
        ("model", c.c_char_p),
        ("model_fingerprint", c.c_uint64),
        ("seed", c.c_uint64),
        ("clusters", c.POINTER(c.c_uint32)),
        ("n_codebooks", c.c_uint32),
        ("sample_rows", c.c_uint32),
        ("n_threads", c.c_uint32),
    ]


class CalibratorAttention(Struct):
    _fields_ = [
        ("keys", c.c_void_p),
        ("key_stride", c.c_size_t),
        ("n_keys", c.c_uint32),
        ("queries", c.c_void_p),
        ("query_stride", c.c_size_t),
        ("n_queries", c.c_uint32),
        ("mask", c.c_void_p),
        ("mask_stride", c.c_size_t),
        ("scale", c.c_float),
    ]


class CalibratorSums(Struct):
    _fields_ = [
        ("n_kv_heads", c.c_uint32),
        ("head_dim", c.c_uint32),
        ("n_rows", c.c_uint64),
        ("sum", c.c_void_p),
        ("min", c.c_void_p),
        ("max", c.c_void_p),
        ("rows", c.c_void_p),
        ("stride", c.c_size_t),
        ("spread", c.c_void_p),
        ("moment", c.c_void_p),
        ("n_queries", c.c_uint64),
        ("attended", c.c_void_p),
        ("attended_sum", c.c_void_p),
        ("attended_weight", c.c_void_p),
    ]


# ---- settings.h ----


class SettingsLayer(c.Structure):
    _fields_ = [
        ("spec", c.c_char_p),
        ("n_kv_heads", c.c_uint32),
        ("head_dim", c.c_uint32),
        ("heads", c.POINTER(c.c_char_p)),
    ]


class SettingsConfig(Struct):
    _fields_ = [
        ("model", c.c_char_p),
        ("model_fingerprint", c.c_uint64),
        ("n_layers", c.c_uint32),
        ("layers", c.POINTER(SettingsLayer)),
        ("calibration", c.c_char_p),
        ("calibration_checksum", c.c_uint64),
    ]


class SettingsInfo(Struct):
    _fields_ = [
        ("model", c.c_char_p),
        ("model_fingerprint", c.c_uint64),
        ("n_layers", c.c_uint32),
        ("calibration", c.c_char_p),
        ("calibration_checksum", c.c_uint64),
    ]


class Preset(Struct):
    _fields_ = [(name, c.c_char_p) for name in ("name", "summary", "k", "v", "more_k")]


# ---- scheme.h ----


class SchemeParams(Struct):
    _fields_ = [
        ("preset", c.c_char_p),
        ("k", c.c_char_p),
        ("v", c.c_char_p),
        ("settings", c.c_char_p),
        ("calibration", c.c_char_p),
        ("protect_codec", c.c_char_p),
        ("protect", c.c_uint32),
        ("seed", c.c_uint64),
        ("model", c.c_char_p),
        ("like", c.c_void_p),
    ]


class SchemePlace(Struct):
    _fields_ = [
        ("role", c.c_int),
        ("layer", c.c_uint32),
        ("n_layers", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("head_dim", c.c_uint32),
        ("rank", c.c_uint32),
        ("n_cached", c.c_uint32),
    ]


class SchemeModel(Struct):
    _fields_ = [("n_layers", c.c_uint32), ("n_kv_heads", c.c_uint32), ("head_dim", c.c_uint32 * 2)]


class SchemeInfo(Struct):
    _fields_ = [
        ("preset", c.c_char_p),
        ("k", c.c_char_p),
        ("v", c.c_char_p),
        ("protect", c.c_uint32),
        ("settings", c.c_void_p),
        ("calibration", c.c_void_p),
        ("needs_calibration", c.c_bool),
        ("calibration_path", c.c_char_p),
        ("not_used", c.c_char_p),
    ]


# ---- attention.h ----


class AttentionProblem(Struct):
    _fields_ = [
        ("n_queries", c.c_uint32),
        ("n_tokens", c.c_uint32),
        ("n_heads", c.c_uint32),
        ("block_table", c.c_void_p),
        ("first_block", c.c_uint32),
        ("n_threads", c.c_uint32),
        ("q", c.c_void_p),
        ("q_token_stride", c.c_size_t),
        ("q_head_stride", c.c_size_t),
        ("out", c.c_void_p),
        ("out_token_stride", c.c_size_t),
        ("out_head_stride", c.c_size_t),
        ("lse", c.c_void_p),
        ("mask", c.c_void_p),
        ("mask_token_stride", c.c_size_t),
        ("sinks", c.c_void_p),
        ("scale", c.c_float),
        ("logit_softcap", c.c_float),
        ("max_bias", c.c_float),
        ("window", c.c_uint32),
        ("causal", c.c_bool),
        ("exact", c.c_bool),
    ]


# ---- cache.h ----


class CacheParams(Struct):
    _fields_ = [
        ("n_layers", c.c_uint32),
        ("n_heads", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("head_dim", c.c_uint32),
        ("v_head_dim", c.c_uint32),
        ("max_tokens", c.c_uint32),
        ("max_sequences", c.c_uint32),
        ("n_threads", c.c_uint32),
        ("device", c.c_char_p),
        ("scheme", c.c_void_p),
        ("preset", c.c_char_p),
        ("k", c.c_char_p),
        ("v", c.c_char_p),
        ("settings", c.c_char_p),
        ("calibration", c.c_char_p),
        ("scale", c.c_float),
        ("logit_softcap", c.c_float),
        ("stream", c.c_void_p),
        ("asynchronous", c.c_uint32),
        ("layers", c.c_void_p),
        ("n_model_layers", c.c_uint32),
    ]


class CacheInfo(Struct):
    _fields_ = [
        ("n_blocks", c.c_uint32),
        ("n_free_blocks", c.c_uint32),
        ("bytes", c.c_size_t),
        ("f16_bytes", c.c_size_t),
        ("true_bits", c.c_double),
        ("calibrated", c.c_bool),
        ("k", c.c_char_p),
        ("v", c.c_char_p),
        ("working_bytes", c.c_size_t),
    ]


class StepsInfo(Struct):
    _fields_ = [("n_steps", c.c_uint32), ("graph", c.c_uint64), ("floats", c.c_bool)]


class Step(Struct):
    _fields_ = [
        ("q", c.c_void_p),
        ("k", c.c_void_p),
        ("v", c.c_void_p),
        ("out", c.c_void_p),
        ("type", c.c_int),
        ("window", c.c_uint32),
        ("scale", c.c_float),
        ("logit_softcap", c.c_float),
        ("stream", c.c_void_p),
        ("sinks", c.c_void_p),
    ]


# ---- cuda.h ----


class CudaPages(c.Structure):
    _fields_ = [("base", c.c_void_p), ("block_stride", c.c_size_t), ("head_stride", c.c_size_t)]


class CudaRows(c.Structure):
    _fields_ = [
        ("codec", c.c_void_p),
        ("pages", CudaPages),
        ("rows", c.c_void_p),
        ("token_stride", c.c_size_t),
        ("head_stride", c.c_size_t),
        ("center", c.c_void_p),
        ("scale", c.c_void_p),
        ("weights", c.c_void_p),
    ]


class CudaQueryArgs(Struct):
    _fields_ = [
        ("k_codec", c.c_void_p),
        ("batch", c.c_uint32),
        ("n_heads", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("type", c.c_int),
        ("q", c.c_void_p),
        ("q_batch_stride", c.c_size_t),
        ("q_head_stride", c.c_size_t),
        ("inverse_weights", c.c_void_p),
        ("out", c.c_void_p),
        ("n_further", c.c_uint32),
        ("further", c.c_void_p * 23),
    ]


class CudaAppendArgs(Struct):
    _fields_ = [
        ("k", CudaRows),
        ("v", CudaRows),
        ("type", c.c_int),
        ("n_tokens", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("slots", c.c_void_p),
        ("refused", c.c_void_p),
        ("exact", c.c_void_p * 2),
        ("transformed", c.c_uint32),
        ("k_feedback", c.c_void_p),
        ("centroids", c.c_void_p * 2),
        ("slots_ready", c.c_uint32),
        ("queries", CudaQueryArgs),
        ("marks", c.c_void_p),
        ("mark_numbers", c.c_void_p),
    ]


class CudaAttentionArgs(Struct):
    _fields_ = [
        ("k_codec", c.c_void_p),
        ("v_codec", c.c_void_p),
        ("k", CudaPages),
        ("v", CudaPages),
        ("k_open", CudaPages),
        ("v_open", CudaPages),
        ("block_table", c.c_void_p),
        ("table_stride", c.c_size_t),
        ("blocks_per_row", c.c_uint32),
        ("lengths", c.c_void_p),
        ("batch", c.c_uint32),
        ("n_heads", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("type", c.c_int),
        ("q", c.c_void_p),
        ("q_batch_stride", c.c_size_t),
        ("q_head_stride", c.c_size_t),
        ("out", c.c_void_p),
        ("out_batch_stride", c.c_size_t),
        ("out_head_stride", c.c_size_t),
        ("lse", c.c_void_p),
        ("scale", c.c_float),
        ("v_center", c.c_void_p),
        ("k_scale", c.c_void_p),
        ("v_scale", c.c_void_p),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_size_t),
        ("query_tokens", c.c_uint32),
        ("query_starts", c.c_void_p),
        ("q_token_stride", c.c_size_t),
        ("out_token_stride", c.c_size_t),
        ("causal", c.c_uint32),
        ("window", c.c_uint32),
        ("logit_softcap", c.c_float),
        ("max_bias", c.c_float),
        ("mask", c.c_void_p),
        ("mask_token_stride", c.c_size_t),
        ("sinks", c.c_void_p),
        ("centroids", c.c_void_p * 2),
        ("table_ready", c.c_uint32),
        ("new_cells", c.c_void_p),
        ("new_first", c.c_int64),
        ("new_stride", c.c_int64),
        ("k_center", c.c_void_p),
        ("n_matrices", c.c_uint32),
        ("matrices", c.c_void_p),
        ("q_matrix_stride", c.c_size_t),
        ("q_numbers", c.c_uint8 * 24),
        ("page_offsets", c.c_void_p),
    ]


class CudaTables(Struct):
    _fields_ = [
        ("center", c.c_void_p),
        ("scale", c.c_void_p),
        ("weights", c.c_void_p),
        ("inverse_weights", c.c_void_p),
        ("n_weights", c.c_size_t),
        ("pivots", c.c_void_p),
        ("columns", c.c_void_p),
        ("centroids", c.c_void_p),
        ("n_centroids", c.c_size_t),
    ]


class CudaSealPages(c.Structure):
    _fields_ = [("codec", c.c_void_p), ("open", CudaPages), ("sealed", CudaPages)]


class CudaSealArgs(Struct):
    _fields_ = [
        ("k", CudaSealPages),
        ("v", CudaSealPages),
        ("n_blocks", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("from_", c.c_void_p),
        ("to", c.c_void_p),
        ("tokens", c.c_void_p),
        ("refused", c.c_void_p),
        ("k_feedback", c.c_void_p),
        ("exact", c.c_uint32),
        ("centroids", c.c_void_p * 2),
    ]


class CudaDecodeArgs(Struct):
    _fields_ = [
        ("codec", c.c_void_p),
        ("pages", CudaPages),
        ("blocks", c.c_void_p),
        ("n_blocks", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("type", c.c_int),
        ("out", c.c_void_p),
        ("token_stride", c.c_size_t),
        ("head_stride", c.c_size_t),
        ("center", c.c_void_p),
        ("scale", c.c_void_p),
        ("inverse_weights", c.c_void_p),
        ("to", c.c_void_p),
        ("transformed", c.c_uint32),
        ("centroids", c.c_void_p),
    ]
