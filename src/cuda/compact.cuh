/* compact.cuh - products with a transform in its compact form (math/compact.h), whose rotation
 * follows. encode/compact.cu makes the form. Knows the head_dims of with_head_dim. */
#pragma once

#include "../math/compact.h"
#include "rotate.cuh"

namespace kvant
{

/* kvant_key_transform_part for these head_dims */
template <int D> constexpr int COMPACT_PART = D <= 128 ? D : 64;

KVANT_INLINE float half_bits(uint16_t bits)
{
    __half_raw raw;
    raw.x = bits;
    return __half2float(raw);
}

/* Numbers of a row in four columns. */
struct Columns {
    float number[4];
};

/* The inverse of a part. */
struct InversePart {
    const float *units;
    const uint4 *groups;
    uint32_t n;

    KVANT_INLINE InversePart(const void *compact, uint32_t d, uint32_t n_kv_heads, uint32_t kv_head,
                             uint32_t part, uint32_t n_)
        : n(n_)
    {
        const uint8_t *at = static_cast<const uint8_t *>(compact) +
                            kvant_compact_inverses_at(d, n_kv_heads) +
                            (kv_head * (d / n) + part) * kvant_compact_inverse_part(n);
        units = reinterpret_cast<const float *>(at);
        groups = reinterpret_cast<const uint4 *>(at + kvant_compact_aligned(n * sizeof(float)));
    }

    KVANT_INLINE const uint4 *row(uint32_t row, uint32_t group) const
    {
        return groups + kvant_compact_rows(n, group) + row - KVANT_COMPACT_COLUMNS * group;
    }

    /* A number without its unit. */
    KVANT_INLINE float number(uint32_t r, uint32_t column) const
    {
        const uint32_t group = column / KVANT_COMPACT_COLUMNS;
        return half_bits(
            reinterpret_cast<const uint16_t *>(row(r, group))[column % KVANT_COMPACT_COLUMNS]);
    }

    /* Numbers first .. first + 3 of a row, without their unit; first is a multiple of 4. A row
     * before the group's first row has no numbers, and the result is another row's. */
    KVANT_INLINE Columns columns(uint32_t r, uint32_t first) const
    {
        const uint32_t group = first / KVANT_COMPACT_COLUMNS;
        const uint4 *from = row(max(r, KVANT_COMPACT_COLUMNS * group), group);
        const uint2 halves =
            reinterpret_cast<const uint2 *>(from)[first % KVANT_COMPACT_COLUMNS / 4];
        const float2 low = __half22float2(reinterpret_cast<const __half2 &>(halves.x)),
                     high = __half22float2(reinterpret_cast<const __half2 &>(halves.y));
        return Columns{ { low.x, low.y, high.x, high.y } };
    }
};

/* A thread's part of W^-T q: row `row` of all parts, in part order, and of each N-th group of
 * columns from `first` on. A warp's rows are of one part. */
template <int D, int STEP> struct InverseRow {
    static constexpr int N = COMPACT_PART<D>, GROUPS = N / (int)KVANT_COMPACT_COLUMNS,
                         LOADS = (GROUPS + STEP - 1) / STEP;
    uint4 numbers[LOADS];
    float unit;
    int part, row, first;

    /* kv_head's rows; `position` is below D */
    KVANT_INLINE void load(const void *compact, uint32_t n_kv_heads, uint32_t kv_head, int position,
                           int first_group)
    {
        part = position / N, row = position % N, first = first_group;
        const InversePart of(compact, D, n_kv_heads, kv_head, part, N);
        unit = of.units[row];
        unrolled_for (int k = 0; k < LOADS; k++) {
            const int group = first + k * STEP;
            numbers[k] = make_uint4(0, 0, 0, 0);
            if (group < GROUPS && (int)KVANT_COMPACT_COLUMNS * group <= row)
                numbers[k] = *of.row(row, group);
        }
    }

    KVANT_INLINE int channel() const
    {
        return (int)kvant_part_channel(D, N, part, row);
    }

    /* Calls use(number, channel of q) for all of the row's numbers of the thread, eight at a time:
     * use(numbers, first channel). */
    template <class F> KVANT_INLINE void each_group(F &&use) const
    {
        const int last = (row | 31) / (int)KVANT_COMPACT_COLUMNS; /* the same in all lanes */
        unrolled_for (int k = 0; k < LOADS; k++) {
            const int group = first + k * STEP;
            if (group > last || group >= GROUPS)
                break;
            float x[KVANT_COMPACT_COLUMNS];
            const uint32_t words[4] = { numbers[k].x, numbers[k].y, numbers[k].z, numbers[k].w };
            unrolled_for (int i = 0; i < 4; i++) {
                const float2 pair = __half22float2(reinterpret_cast<const __half2 &>(words[i]));
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            }
            use(x, (int)kvant_part_channel(D, N, part, KVANT_COMPACT_COLUMNS * group));
        }
    }
};

/* The triangle of a part (math/triangle.h). */
struct TrianglePart {
    const uint16_t *halves; /* steps, then the diagonal, then codes */
    uint32_t n;

    KVANT_INLINE TrianglePart(const void *triangles, uint32_t d, uint32_t kv_head, uint32_t part,
                              uint32_t n_)
        : halves(static_cast<const uint16_t *>(triangles) +
                 (kv_head * (d / n_) + part) * kvant_triangle_size(n_)),
          n(n_)
    {
    }

    /* The number of W^T in this row and column, which is at most the row. With the sign of its code
     * inverted, the last bits of 2^23 make 2^23 + 8 + code. */
    KVANT_INLINE float number(uint32_t row, uint32_t column) const
    {
        const uint8_t *codes = reinterpret_cast<const uint8_t *>(halves + 2 * n) + row * row / 4;
        const uint32_t code = (codes[column / 2] >> 4 * (column % 2) & 15u) ^ 8u;
        return column == row ? half_bits(halves[n + row])
                             : __fmul_rn(half_bits(halves[row]),
                                         __uint_as_float(0x4b000000u | code) - 8388616.0f);
    }
};

/* The part of a channel, and its number in the part. */
struct PartChannel {
    uint32_t part, own;

    KVANT_INLINE PartChannel(uint32_t d, uint32_t n, uint32_t channel)
        : part(channel % (d / 2) / (n / 2)),
          own(channel % (d / 2) % (n / 2) + (channel >= d / 2 ? n / 2 : 0))
    {
    }
};

/* Rotates a row in shared memory and stores it; by a warp. */
template <int D>
KVANT_INLINE void store_rotated(const float *from, const kvant_cuda_wide_rotation &rotation,
                                float *to)
{
    const int lane = threadIdx.x & 31;
    Row<D> row;
    row.each(lane, [&](float &x, int channel) { x = from[channel]; });
    rotate(row, rotation, lane);
    row.each(lane, [&](float x, int channel) { to[channel] = x; });
}

/* R x of a row in shared memory, a channel a thread; the result is the thread's. */
KVANT_INLINE float rotate_any(float x, float *row, const kvant_cuda_wide_rotation &rotation)
{
    const uint32_t channel = threadIdx.x;
    if (rotation.block == 0)
        return x;
    x = rotation.signs[channel / 32] >> channel % 32 & 1 ? -x : x;
    for (uint32_t distance = 1; distance < rotation.block; distance *= 2) {
        __syncthreads();
        row[channel] = x;
        __syncthreads();
        const float other = row[channel ^ distance];
        x = channel & distance ? other - x : x + other;
    }
    return x * rotation.scale;
}

} // namespace kvant
