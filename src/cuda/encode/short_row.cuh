/* short_row.cuh - the data of append_short.cu: the arguments of its kernels, and a row on its way
 * from memory to its transformed numbers.
 *
 * Owns how arguments and rows are loaded. append_short.cu owns the kernels and the order of their
 * stages. */
#pragma once

#include "append_tokens.cuh"

#include "../block_center.cuh"
#include "../launch.h"

namespace kvant
{

/* The members of AppendRole and kvant_cuda_params that these kernels need. They are few, because
 * the kernel waits for every line of arguments. */
struct ShortRole {
    const void *rows;
    uint8_t *base;
    size_t token_stride, row_head_stride, block_stride, head_stride;
    const float *center, *scale, *key_transform;
    const void *compact; /* as in append.h */
    float *exact;
    uint32_t codes, bits, keys, metadata_offset, affine, key_transform_kind, symmetric, unbiased;
    float levels; /* open pages: the largest magnitude of a number */
    float offset, inverse_sqrt_dim;
    kvant_cuda_rotation rotation; /* or AppendRole::after */
};

struct OpenBook {
};
struct NarrowBook {
    static constexpr uint32_t LEVELS = KVANT_CUDA_MAX_LEVELS;
    float thresholds[LEVELS], values[LEVELS], slope, gain, middle; /* of the curve: params.h */
    static_assert(LEVELS == 16, "an entry for each lane");
};
struct WideBook {
    static constexpr uint32_t LEVELS = KVANT_CUDA_WIDE_LEVELS;
    float thresholds[LEVELS], values[LEVELS];
};

template <class Book> struct FewArgs {
    const int64_t *slots;
    uint32_t *refused, *marks;
    const int64_t *mark_ids;
    bool slots_ready;
    kvant_cuda_block_centers block_centers;
    const int64_t *center_slots;
    kvant_cuda_type type;
    ShortRole roles[2];
    Book books[2];
    uint32_t n_roles; /* behind them, a matrix of queries each */
    QueryArgs queries;
    uint32_t n_tokens;
    bool clear_refused; /* as in append.h */
};

/* The stage at which a warp begins. One warp works (WORKS), and all further warps rehearse. */
enum Stage { WORKS, ROTATES, QUANTIZES, PUTS, STAGES };

/* Arguments in registers; an entry of a narrow book for each lane. */
template <int D> struct Known {
    struct {
        uint32_t block;
        float scale;
        uint32_t signs[Row<D>::PER_LANE];
    } rotation;
    size_t block_stride, head_stride;
    uint32_t codes, bits, keys, metadata, symmetric, unbiased;
    float levels, offset, inverse_sqrt_dim, entry, slope, gain, middle;

    KVANT_INLINE Known(const ShortRole &role)
        : block_stride(role.block_stride), head_stride(role.head_stride), codes(role.codes),
          bits(role.bits), keys(role.keys), metadata(role.metadata_offset),
          symmetric(role.symmetric), unbiased(role.unbiased), levels(role.levels),
          offset(role.offset), inverse_sqrt_dim(role.inverse_sqrt_dim), entry(0), slope(0), gain(0),
          middle(0)
    {
        rotation.block = role.rotation.block, rotation.scale = role.rotation.scale;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            rotation.signs[j] = role.rotation.signs[j];
    }

    template <class Book> KVANT_INLINE void request(const Book &, int)
    {
    }

    KVANT_INLINE void request(const NarrowBook &book, int lane)
    {
        if (codes == KVANT_CUDA_CODES_CODEBOOK)
            entry = reinterpret_cast<const float *>(&book)[lane], slope = book.slope,
            gain = book.gain, middle = book.middle; /* values follow */
    }

    template <class... T> KVANT_INLINE static void hold_all(T &...members)
    {
        (kvant::hold(members), ...);
    }

    /* The compiler does not put off loads beyond this. */
    KVANT_INLINE void hold()
    {
        hold_all(block_stride, head_stride, bits, keys, metadata, symmetric, unbiased,
                 rotation.block);
        hold_all(levels, offset, inverse_sqrt_dim, entry, slope, gain, middle, rotation.scale);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            kvant::hold(rotation.signs[j]);
    }
};

/* The unconverted bits of a row's numbers, so that no instruction waits for the loads yet. */
template <int D> struct RawRow {
    uint32_t bits[Row<D>::PER_LANE];

    KVANT_INLINE void load(const void *from, size_t offset, kvant_cuda_type type, int lane)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            bits[j] = type == KVANT_CUDA_F32
                          ? static_cast<const uint32_t *>(from)[offset + lane + 32 * j]
                          : static_cast<const uint16_t *>(from)[offset + lane + 32 * j];
    }

    KVANT_INLINE Row<D> numbers(kvant_cuda_type type) const
    {
        Row<D> row;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            __half_raw half;
            half.x = (uint16_t)bits[j];
            row.x[j] = type == KVANT_CUDA_F16
                           ? __half2float(half)
                           : __uint_as_float(type == KVANT_CUDA_F32 ? bits[j] : bits[j] << 16);
        }
        return row;
    }
};

/* The centre, the scale and the diagonal transform of a row. They are loaded before the row,
 * because no preceding kernel writes them. Most codecs have none of these. */
template <int D> struct Affine {
    float center[Row<D>::PER_LANE], scale[Row<D>::PER_LANE], key_transform[Row<D>::PER_LANE];

    KVANT_INLINE void load(const ShortRole &role, bool any, int at)
    {
        fill(center, any ? role.center : nullptr, at, 0);
        fill(scale, any ? role.scale : nullptr, at, 1);
        fill(key_transform,
             any && role.key_transform_kind == KVANT_CUDA_TRANSFORM_DIAGONAL ? role.key_transform
                                                                             : nullptr,
             at, 1);
    }

    KVANT_INLINE static void fill(float (&to)[Row<D>::PER_LANE], const float *from, int at,
                                  float none)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            to[j] = none;
        if (from)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                to[j] = from[at + 32 * j];
    }

    /* A division takes many instructions: they are left out where there is nothing to divide by. */
    KVANT_INLINE void apply(Row<D> &row, bool divides) const
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fsub_rn(row.x[j], center[j]);
        if (divides)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                row.x[j] = __fdiv_rn(row.x[j], scale[j]);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fmul_rn(row.x[j], key_transform[j]);
    }
};

template <int D> KVANT_INLINE bool is_finite(const Row<D> &row)
{
    bool finite = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        finite &= is_finite(row.x[j]);
    return finite;
}

} // namespace kvant
