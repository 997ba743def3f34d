/* matrix_rows.cuh - multiplies rows with the matrix of transform=file, before the warps of an
 * append block quantise them.
 *
 * A thread computes one channel of several rows. So reads of the matrix are coalesced, many reads
 * overlap, and each read serves several rows. Products and sums are rounded as in combine_rows of
 * rotate.cuh. */
#pragma once

#include "append_tokens.cuh"

namespace kvant
{

/* The rows that WARPS warps process at a time, in shared memory in the layout of Lanes<D>. */
template <int D, int WARPS> struct MatrixRows {
    using L = Lanes<D>;
    static constexpr int ROWS = WARPS * L::ROWS, TEAMS = WARPS * 32 / D, A_THREAD = ROWS / TEAMS,
                         AT_ONCE = 4;
    using Space = float[WARPS][L::ROWS * L::ROW_STRIDE];
    static_assert(A_THREAD % AT_ONCE == 0, "a thread has whole groups of rows");

    KVANT_INLINE static float &number(Space &space, int row, int channel)
    {
        return space[row / L::ROWS]
                    [row % L::ROWS * L::ROW_STRIDE + channel / 16 * L::TILE_STRIDE + channel % 16];
    }

    /* Called by the warp that will quantise the rows. Zeros where there is no token. */
    KVANT_INLINE static void load(Space &space, const AppendArgs &args, const AppendRole &role,
                                  const BlockTokens &tokens, int first, uint32_t chunk_at,
                                  int kv_head, int warp, int lane)
    {
        const int row = warp * L::ROWS + lane / L::LANES, tile = lane % L::LANES;
        float x[16] = {};
        if (tile >= L::TILES)
            return;
        if (tokens.slot[first + row] >= 0)
            load_centered<D>(x, args, role, row_place(args, role, chunk_at, first + row, kv_head),
                             kv_head, tile);
        unrolled_for (int i = 0; i < 16; i++)
            number(space, row, 16 * tile + i) = x[i];
    }

    /* Computes one channel of the rows whose ids are team, team + TEAMS, ... below n_rows. All
     * lanes of a warp read the same four numbers of a row at once. */
    KVANT_INLINE static void multiply(float (&y)[A_THREAD], Space &space, const float *column,
                                      int team, int n_rows)
    {
        unrolled_for (int k = 0; k < A_THREAD; k += AT_ONCE) {
            if (k * TEAMS >= n_rows)
                break;
#pragma unroll 4
            for (int i = 0; i < D; i += 4) {
                float weight[4];
                unrolled_for (int j = 0; j < 4; j++)
                    weight[j] = column[(size_t)(i + j) * D];
                unrolled_for (int q = k; q < k + AT_ONCE; q++) {
                    const float4 x =
                        *reinterpret_cast<const float4 *>(&number(space, team + TEAMS * q, i));
                    y[q] = __fadd_rn(y[q], __fmul_rn(x.x, weight[0]));
                    y[q] = __fadd_rn(y[q], __fmul_rn(x.y, weight[1]));
                    y[q] = __fadd_rn(y[q], __fmul_rn(x.z, weight[2]));
                    y[q] = __fadd_rn(y[q], __fmul_rn(x.w, weight[3]));
                }
            }
        }
    }

    /* Transforms tokens first .. first + n_rows - 1 of the block, at most ROWS. All threads of the
     * block call it. */
    __device__ __noinline__ static void transform(Space &space, const AppendArgs &args,
                                                  const AppendRole &role, const BlockTokens &tokens,
                                                  int first, int n_rows, uint32_t chunk_at,
                                                  int kv_head)
    {
        const int team = threadIdx.x / D, channel = threadIdx.x % D;
        float y[A_THREAD] = {};
        __syncthreads(); /* the preceding rows have been read */
        load(space, args, role, tokens, first, chunk_at, kv_head, threadIdx.x >> 5,
             threadIdx.x & 31);
        __syncthreads();
        if (team < TEAMS)
            multiply(y, space, key_transform_of(role.codec, role.key_transform, kv_head) + channel,
                     team, n_rows);
        __syncthreads();
        unrolled_for (int q = 0; q < A_THREAD; q++)
            if (team < TEAMS)
                number(space, team + TEAMS * q, channel) = y[q];
        __syncthreads();
    }
};

} // namespace kvant
