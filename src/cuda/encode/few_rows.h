/* few_rows.h - the arguments of kernels that append few rows (few_rows.cuh). */
#pragma once

#include "append.h"

#include <algorithm>

namespace kvant
{

/* What of AppendRole and kvant_cuda_params these kernels need: little, because every line of
 * arguments is waited for. */
struct FewRole {
    const void *rows;
    uint8_t *base;
    size_t token_stride, row_head_stride, block_stride, head_stride;
    const float *center, *scale, *weights;
    float *exact;
    uint32_t codes, bits, keys, metadata_offset, affine, weighting, symmetric, unbiased;
    float levels, offset, inverse_sqrt_dim;
    kvant_cuda_rotation rotation;
};

struct OpenBook {};
struct NarrowBook {
    static constexpr uint32_t LEVELS = KVANT_CUDA_MAX_LEVELS;
    float thresholds[LEVELS], values[LEVELS], slope, gain, middle; /* of the curve: params.h */
};
struct WideBook {
    static constexpr uint32_t LEVELS = KVANT_CUDA_WIDE_LEVELS;
    float thresholds[LEVELS], values[LEVELS];
};

inline FewRole few_role(const AppendRole &from)
{
    const kvant_cuda_params &codec = from.codec;
    return FewRole{ from.rows,        from.base,       from.token_stride,     from.row_head_stride,
                    from.block_stride, from.head_stride, from.center,          from.scale,
                    from.weights,     from.exact,      (uint32_t)codec.codes, codec.bits,
                    codec.role == KVANT_ROLE_K, codec.metadata_offset,
                    from.center || from.scale || codec.weighting == KVANT_CUDA_WEIGHTING_DIAGONAL,
                    (uint32_t)codec.weighting, codec.symmetric,
                    codec.unbiased,   codec.levels,    codec.offset,          codec.inverse_sqrt_dim,
                    codec.rotation };
}

inline void fill_book(OpenBook &, const kvant_cuda_codec &) {}

inline void fill_book(NarrowBook &book, const kvant_cuda_codec &codec)
{
    std::copy_n(codec.params.thresholds, NarrowBook::LEVELS, book.thresholds);
    std::copy_n(codec.params.values, NarrowBook::LEVELS, book.values);
    book.slope = codec.params.guess_slope;
    book.gain = codec.params.guess_gain;
    book.middle = codec.params.guess_middle;
}

inline void fill_book(WideBook &book, const kvant_cuda_codec &codec)
{
    std::copy_n(codec.wide.thresholds, WideBook::LEVELS, book.thresholds);
    std::copy_n(codec.wide.values, WideBook::LEVELS, book.values);
}

/* Rows that attention appends before it reads pages: row b is of sequence b, whose token number
 * cells[b] - first - b * stride it is. */
struct NewRows {
    const int64_t *slots, *cells; /* slots NULL: none */
    int64_t first, stride;
    uint32_t *refused;
    kvant_cuda_type type;
    int open, ready; /* ready: slots_ready */
    FewRole roles[2];
    NarrowBook books[2];
};

/* Such rows, of both roles; KVANT_ERR_UNSUPPORTED where appending them needs a kernel of its own. */
kvant_status new_rows_of(const kvant_cuda_append_args &args, NewRows &rows);

} // namespace kvant
