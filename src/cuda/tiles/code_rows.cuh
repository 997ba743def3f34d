/* code_rows.cuh - shared memory of a kernel of codes.cuh, and the query rows in it. */
#pragma once

#include "code_tiles.cuh"
#include "tile_rows.cuh"

namespace kvant
{

template <class KC, class VC, int D, int N_, int GROUPS_> struct CodesShape {
    static constexpr int N = N_, GROUPS = GROUPS_;
    static constexpr int COLUMNS =
        N / 4; /* columns of a lane: its column 2 j + e is column 8 j + 2 (lane mod 4) + e */
    using V = ValueOperands<VC, D>;
    static constexpr int QUERY_BYTES = (key_tiles<KC, D>() + 3) / 4 * N * ROW_BYTES;
    static constexpr int WEIGHT_BYTES = PAGE_TOKENS * ROW_BYTES; /* a row per token, 64 columns */
    static constexpr int K_CODES = page_code_bytes<KC, D>(true),
                         V_CODES = page_code_bytes<VC, D>(false);
    static constexpr int K_BYTES = (K_CODES + metadata_bytes<KC, D>() + 15) / 16 * 16,
                         V_BYTES = (V_CODES + metadata_bytes<VC, D>() + 15) / 16 * 16,
                         SLOT = K_BYTES + V_BYTES;
    static constexpr bool ONE_TABLE =
        std::is_same<KC, VC>::value && (HAS_TRELLIS<KC> || one_table<KC, VC>());
    static constexpr int K_TABLE = code_table_bytes<KC, D>(),
                         V_TABLE = ONE_TABLE ? 0 : code_table_bytes<VC, D>();
    /* shared memory for everything except CodesRows */
    static constexpr int MOST_BYTES = 215 * 1024;
    /* offsets; results take the place of weights, tables and slots */
    static constexpr int WEIGHTS_AT = (QUERY_BYTES + 1023) / 1024 * 1024,
                         TABLES_AT = WEIGHTS_AT + GROUPS * WEIGHT_BYTES,
                         SLOTS_AT = TABLES_AT + K_TABLE + V_TABLE,
                         STAGES = SLOTS_AT + 3 * GROUPS * SLOT <= MOST_BYTES ? 3 : 2,
                         SLOTS_END = SLOTS_AT + GROUPS * STAGES * SLOT,
                         RESULTS_END = WEIGHTS_AT + GROUPS * GROUP_ROWS * D * 4,
                         ROWS_AT =
                             ((SLOTS_END > RESULTS_END ? SLOTS_END : RESULTS_END) + 15) / 16 * 16;
};

template <int GROUPS, int N> struct CodesRows : TileRows<GROUPS> {
    /* for two neighbouring columns: references of exponents, and bases of scores */
    float4 columns[GROUPS][N / 2];
    float tops[GROUPS][GROUP_WARPS][N]; /* the warps exchange these */
    float ends[GROUPS][GROUP_WARPS][2][N];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Stores transformed query rows as the second operand of keys. If a row does not fit fp16's range,
 * all rows are divided by powers of two, and the function returns false. */
template <class KC, class VC, int D, int N, int GROUPS, class Rows>
KVANT_INLINE bool load_code_queries(const TileArgs &p, const TileWork &work, uint8_t *memory,
                                    Rows &rows, int warp, int n_warps, int lane)
{
    using S = CodesShape<KC, VC, D, N, GROUPS>;
    bool plain = true;
    if constexpr (HAS_CHUNKS<KC>) { /* columns that are no channel */
        for (int i = 16 * threadIdx.x; i < S::QUERY_BYTES; i += 16 * blockDim.x)
            *reinterpret_cast<uint4 *>(memory + i) = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    rolled_for (int n = warp; n < N; n += n_warps) {
        Row<D> row = load_query_row<D>(p, work, 0, n, lane);
        transform_query_row<D>(p, work, row, lane);
        float largest = 0, sum = 0;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            largest = fmaxf(largest, fabsf(row.x[j]));
        largest = largest_of(largest);
        const float unit = largest == 0 || (largest >= 0x1p-9f && largest < 0x1p14f)
                               ? 1
                               : power_above(largest),
                    inverse = copysignf(__frcp_rn(unit), p.scale_log2);
        plain &= unit == 1;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            const __half x = __float2half_rn(row.x[j] * inverse);
            const int channel = place_of_channel<KC>(lane + 32 * j);
            *reinterpret_cast<__half *>(memory + place_of(N, n, channel)) = x;
            sum += __half2float(x);
        }
        sum = warp_sum(sum) * fabsf(p.scale_log2);
        if (lane < GROUPS) { /* references and bases */
            float *columns = reinterpret_cast<float *>(&rows.columns[lane][n / 2]) + n % 2;
            columns[0] = NEVER, columns[2] = sum;
        }
        if (lane == 0)
            note_query_row(p, work, rows, n), rows.factor[n] = unit;
    }
    GroupProducts::publish();
    return plain;
}

#endif

} // namespace kvant
