/* unpack.cuh - from a page of codes to a matrix of fp16 numbers in shared memory, by a warpgroup:
 * chooses the way for a codec, and fills its tables. */
#pragma once

#include "../papers/unpack_chunks.cuh"
#include "unpack_values.cuh"
#include "unpack_trellis.cuh"

namespace kvant
{

/* The same as unpack_page when shared memory has no room for codes: the page is in device memory,
 * and there is no table. */
template <int D, bool KEYS> KVANT_INLINE float unpack_far_page(const Unpacking &u)
{
    switch (u.codec.params.kind) {
#define KVANT_CUDA_CASE(KIND, C)                                                                   \
    case KIND: return unpack_chunks<C, D, KEYS>(u);
        KVANT_CUDA_CHUNK_KINDS(KVANT_CUDA_CASE)
#undef KVANT_CUDA_CASE
    case KVANT_CUDA_TRELLIS2:
    case KVANT_CUDA_TRELLIS3:
    case KVANT_CUDA_TRELLIS4: return unpack_any_trellis<D, KEYS>(u);
    default: return unpack_numbers<D, KEYS>(u);
    }
}

/* Unpacks a sealed page, whose codes are in shared memory; returns its unit. Called by the whole
 * warpgroup. */
template <int D, bool KEYS> KVANT_INLINE float unpack_page(const Unpacking &u)
{
    switch (u.codec.params.kind) {
    case KVANT_CUDA_UNIFORM2: return unpack_in_registers<Uniform2, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM3: return unpack_in_registers<Uniform3, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM4: return unpack_in_registers<Uniform4, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM8: return unpack_in_registers<Uniform8, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM2_CHANNELS32: return unpack_in_registers<Uniform2Channels32, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM3_CHANNELS32: return unpack_in_registers<Uniform3Channels32, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM2_TOKENS32: return unpack_in_registers<Uniform2Tokens32, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM3_TOKENS32: return unpack_in_registers<Uniform3Tokens32, D, KEYS>(u);
    case KVANT_CUDA_CODEBOOK2: return unpack_in_registers<Codebook2, D, KEYS>(u);
    case KVANT_CUDA_CODEBOOK3: return unpack_in_registers<Codebook3, D, KEYS>(u);
    case KVANT_CUDA_CODEBOOK4: return unpack_in_registers<Codebook4, D, KEYS>(u);
#define KVANT_CUDA_CASE(KIND, C)                                                                   \
    case KIND: return unpack_any_chunks<C, D, KEYS>(u);
        KVANT_CUDA_CHUNK_KINDS(KVANT_CUDA_CASE)
#undef KVANT_CUDA_CASE
    case KVANT_CUDA_TRELLIS2:
        return u.codec.looks_up ? unpack_trellis<Trellis2, D, KEYS>(u)
                                : unpack_any_trellis<D, KEYS>(u);
    case KVANT_CUDA_TRELLIS3:
        return u.codec.looks_up ? unpack_trellis<Trellis3, D, KEYS>(u)
                                : unpack_any_trellis<D, KEYS>(u);
    case KVANT_CUDA_TRELLIS4:
        return u.codec.looks_up ? unpack_trellis<Trellis4, D, KEYS>(u)
                                : unpack_any_trellis<D, KEYS>(u);
    default: return unpack_numbers<D, KEYS>(u);
    }
}

/* Fills a codec's table, by all threads of a block. Chunks: chunks.cuh has the numbers. */
KVANT_INLINE void fill_table(const TileCodec &codec, uint8_t *table)
{
    if (codec.table_bytes == 0)
        return;
    switch (codec.params.kind) {
#define KVANT_CUDA_CASE(KIND, C)                                                                   \
    case KIND: return fill_chunks<C>(table, codec);
        KVANT_CUDA_CHUNK_KINDS(KVANT_CUDA_CASE)
#undef KVANT_CUDA_CASE
    case KVANT_CUDA_TRELLIS2:
        if (codec.looks_up)
            return fill_levels<Trellis2, TRELLIS_COPIES>(table, codec.params.bytes);
        break;
    case KVANT_CUDA_TRELLIS3:
        if (codec.looks_up)
            return fill_levels<Trellis3, TRELLIS_COPIES>(table, codec.params.bytes);
        break;
    case KVANT_CUDA_TRELLIS4:
        if (codec.looks_up)
            return fill_levels<Trellis4, TRELLIS_COPIES>(table, codec.params.bytes);
        break;
    default: break;
    }
    const bool trellis = codec.params.codes == KVANT_CUDA_CODES_TRELLIS;
    const int n = trellis ? KVANT_CUDA_TRELLIS_LEVELS : codec.table_bytes / 4;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        reinterpret_cast<float *>(table)[i] = trellis ? codec.trellis.values[i] : codec.levels[i];
}

} // namespace kvant
