"""The structures of include/kvant/*.h for ctypes: one table, header by header. This module has no
rules.

tests/python/layouts.py prints how C lays the structures out, and a test compares. Names are the
names in C; a field whose name is a keyword of Python ends in an underscore."""

from __future__ import annotations

import ctypes as c
import re
from typing import TYPE_CHECKING, Any

MAX_TRANSFORMS = 12  # KVANT_MAX_TRANSFORMS
ALLOW = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64)  # of IndexQuery


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


_TYPES = {
    "ptr": c.c_void_p, "str": c.c_char_p, "bool": c.c_bool, "int": c.c_int, "size": c.c_size_t,
    "u8": c.c_uint8, "u16": c.c_uint16, "u32": c.c_uint32, "u64": c.c_uint64,
    "i32": c.c_int32, "i64": c.c_int64, "float": c.c_float, "double": c.c_double,
}  # fmt: skip


def fields(text: str) -> list[tuple[str, Any]]:
    """Fields from `type name name[count]; type* name`, as ctypes wants them. A type is a word of
    _TYPES or a structure that stands above."""
    found = []
    for line in text.split(";"):
        word, *names = line.split()
        kind = _TYPES.get(word.rstrip("*")) or globals()[word.rstrip("*")]
        kind = c.POINTER(kind) if word.endswith("*") else kind
        for name, _, count in (name.partition("[") for name in names):
            found.append((name, kind * int(count.rstrip("]")) if count else kind))
    return found


# `Name: fields` is a structure, and `Name(Base): fields` a structure that begins with another one.
_STRUCTS = """
# codec.h
Affine: ptr center scale
CodecInfo(Struct):
    str spec source; u32 head_dim; int role center norm; u32 sink_tokens recent_tokens
    block_tokens bits; size code_bytes metadata_offset metadata_bytes page_bytes;
    double true_bits nominal_bits; u64 fingerprint; u32 learns_transform
CodecFamily(Struct): str name variants options common_options source summary
# index.h
IndexParams(Struct):
    u32 dim; int metric; str spec; ptr center centroids; size centroid_stride n_centroids
IndexQuery(Struct):
    ptr rows; size stride n; u32 k n_threads; ptr allowed; size n_allowed; ALLOW allow;
    ptr allow_context; u32 rerank; ptr originals; size original_stride; u64 n_originals;
    ptr original original_context; u32 n_probe
IndexInfo(Struct):
    u32 dim; int metric; str spec; u32 bits; int has_center has_ids is_view; u64 n;
    size bytes_per_vector id_bytes memory_bytes file_bytes; u32 n_lists; u64 next_id
# tensor.h
ExactPart(Struct): u32 first newest total step
StepPages(Struct): ptr memory; size bytes; ptr owner
TensorParams(Struct):
    ptr* codecs; u32 n_kv_heads n_sequences n_blocks blocks_per_sequence n_open_blocks;
    size block_stride; ExactPart* exact; StepPages* steps
BlockInfo(Struct):
    int state; u32 transform_id; u64 written; ptr codec page; Affine affine; ptr start
Queries(Struct): ptr q; size token_stride head_stride; u32 n_tokens n_heads; ptr positions
Rope(Struct):
    u32 n_dims interleaved; ptr frequencies; u32 n_positions n_position_transforms block_centers
TensorInfo(Struct):
    int role; u32 n_kv_heads head_dim n_blocks n_open_blocks n_transforms; size bytes
    sealed_bytes open_bytes written_blocks learned_bytes learned_most working_bytes working_most
# tensor_hooks.h
BlockSlots: u64 slots; u32 block
OuterBlock:
    u64 slots written dirty; u32 transform age; i32 position shift;
    int exact has_matrix has_centers; ptr rows codes
OuterRecord: OuterBlock* blocks; u32 n_blocks n_transforms; ptr* transforms; Rope* rope
# calibration.h
CalibrationInfo(Struct):
    str model; u64 model_fingerprint; u32 n_layers n_kv_heads head_dim; u64 n_tokens seed;
    u32 n_codebooks clusters[8]; size bytes; u64 checksum
CalibrationEntry(Struct): u32 head_dim; ptr mean min max query_moment diagonal matrix centroids[8]
CalibratorConfig(Struct):
    str model; u64 model_fingerprint seed; u32* clusters; u32 n_codebooks sample_rows n_threads
CalibratorAttention(Struct):
    ptr keys; size key_stride; u32 n_keys; ptr queries; size query_stride; u32 n_queries;
    ptr mask; size mask_stride; float scale
CalibratorMoments(Struct):
    u32 n_kv_heads head_dim; u64 n_rows; ptr sum min max rows; size stride; ptr spread moment;
    u64 n_queries; ptr attended attended_sum attended_weight
# settings.h
SettingsLayer: str spec; u32 n_kv_heads head_dim; str* heads
SettingsConfig(Struct):
    str model; u64 model_fingerprint; u32 n_layers; SettingsLayer* layers; str calibration;
    u64 calibration_checksum
SettingsInfo(Struct):
    str model; u64 model_fingerprint; u32 n_layers; str calibration; u64 calibration_checksum
Preset(Struct): str name summary k v more_k
# scheme.h
SchemeParams(Struct):
    str preset k v settings calibration protect_codec; u32 protect; u64 seed; str model;
    ptr like
SchemeLocation(Struct): int role; u32 layer n_layers n_kv_heads head_dim rank n_cached
SchemeModel(Struct): u32 n_layers n_kv_heads head_dim[2]
SchemeInfo(Struct):
    str preset k v; u32 protect; ptr settings calibration; bool needs_calibration;
    str calibration_path not_used
# attention.h
AttentionProblem(Struct):
    u32 n_queries n_tokens n_heads; ptr block_table; u32 first_block n_threads; ptr q;
    size q_token_stride q_head_stride; ptr out; size out_token_stride out_head_stride; ptr lse
    mask; size mask_token_stride; ptr sinks; float scale logit_softcap max_bias; u32 window;
    bool causal exact
# cache.h
CacheParams(Struct):
    u32 n_layers n_heads n_kv_heads head_dim v_head_dim max_tokens max_sequences n_threads;
    str device; ptr scheme; str preset k v settings calibration; float scale logit_softcap;
    ptr stream; u32 asynchronous; ptr layers; u32 n_model_layers
CacheInfo(Struct):
    u32 n_blocks n_free_blocks; size bytes f16_bytes; double true_bits; bool calibrated; str k
    v; size working_bytes
StepsInfo(Struct): u32 n_steps; u64 graph; bool floats
Step(Struct): ptr q k v out; int type; u32 window; float scale logit_softcap; ptr stream sinks
# cuda.h
CudaPages: ptr base; size block_stride head_stride
CudaRows:
    ptr codec; CudaPages pages; ptr rows; size token_stride head_stride; ptr center scale
    key_transform
CudaQueryArgs(Struct):
    ptr k_codec; u32 batch n_heads n_kv_heads; int type; ptr q; size q_batch_stride
    q_head_stride; ptr inverse_key_transform out
CudaAppendArgs(Struct):
    CudaRows k v; int type; u32 n_tokens n_kv_heads; ptr slots refused exact[2];
    u32 transformed; ptr k_feedback centroids[2]
CudaAttentionArgs(Struct):
    ptr k_codec v_codec; CudaPages k v k_open v_open; ptr block_table; size table_stride;
    u32 blocks_per_row; ptr lengths; u32 batch n_heads n_kv_heads; int type; ptr q;
    size q_batch_stride q_head_stride; ptr out; size out_batch_stride out_head_stride; ptr lse;
    float scale; ptr v_center k_scale v_scale workspace; size workspace_bytes; u32 query_tokens;
    ptr query_starts; size q_token_stride out_token_stride; u32 causal window;
    float logit_softcap max_bias; ptr mask; size mask_token_stride; ptr sinks centroids[2]
    k_center
CudaTables(Struct):
    ptr center scale key_transform inverse_key_transform; size key_transform_size; ptr pivots
    columns centroids; size n_centroids
CudaSealPages: ptr codec; CudaPages open sealed
CudaSealArgs(Struct):
    CudaSealPages k v; u32 n_blocks n_kv_heads; ptr from_ to tokens refused k_feedback;
    u32 exact; ptr centroids[2]
CudaDecodeArgs(Struct):
    ptr codec; CudaPages pages; ptr blocks; u32 n_blocks n_kv_heads; int type; ptr out;
    size token_stride head_stride; ptr center scale inverse_key_transform to; u32 transformed;
    ptr centroids
# cuda_kernels.h
CudaBlockCenters: ptr pairs start phases transform_ids
CudaPlainQueries:
    ptr q; int type; size q_batch_stride q_token_stride q_head_stride;
    CudaBlockCenters block_centers; ptr offsets; u32 ready
CudaKernelQueryArgs(CudaQueryArgs): u32 n_further; ptr further[23]; u32 ready
CudaKernelAppendArgs(CudaAppendArgs):
    u32 slots_ready; CudaKernelQueryArgs queries; ptr marks mark_ids;
    CudaBlockCenters k_block_centers; ptr center_slots centered; u32 clear_refused;
    ptr k_compact k_matrix
CudaKernelAttentionArgs(CudaAttentionArgs):
    u32 table_ready; ptr new_cells; i64 new_first new_stride; u32 n_matrices; ptr matrices;
    size q_matrix_stride; u8 q_ids[24]; ptr page_offsets; CudaPlainQueries plain_queries;
    int out_type; u32 clear_counters sealed_ready
CudaExactArgs(Struct):
    ptr owners births lives places clock; u32 n_first n_newest n_blocks;
    ptr lengths query_starts block_table; u32 batch n_tokens; size table_stride;
    u32 blocks_per_row; ptr slots; u32 newest most_staged; ptr table; size to_stride;
    ptr rows from_ to n_sealed
CudaSealRowsArgs(Struct): CudaSealPages k v; u32 most_rows n_kv_heads; ptr from_ to n_rows refused
"""

for _name, _base, _fields in re.findall(r"^(\w+)(?:\((\w+)\))?:((?:.|\n )*)", _STRUCTS, re.M):
    _parent = globals()[_base] if _base else c.Structure
    globals()[_name] = type(_name, (_parent,), {"_fields_": fields(_fields)})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
