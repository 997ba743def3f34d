/* feeder.cuh - keeps a warp's ring full: page after page of its share of the block's piece, K then V.
 *
 * Table entries are looked up 32 pages at a time, one a lane, because a look-up just before its copy would put two
 * trips to memory behind each other. */
#ifndef KVANT_CUDA_FEEDER_CUH
#define KVANT_CUDA_FEEDER_CUH

#include "attention.h"
#include "ring.cuh"
#include "schedule.cuh"

namespace kvant {

template <int WARPS, int STAGES, int SLOT, int K_BYTES, int V_BYTES>
struct Feeder {
    using Pages = Ring<STAGES, SLOT>;
    Pages ring;
    Cursor cursor;     /* the lane's own */
    int next, end;     /* pages of the line: the next to fetch, the end of the piece */
    int entry, head;   /* the lane's: block number and kv head of page next_of_batch + WARPS * lane */
    int in_batch, slot;
    bool values;       /* the next copy is the V page */

    __device__ void look_up(const AttentionArgs &p, const Lengths &lengths)
    {
        int i = next + WARPS * ring.lane;
        in_batch = 0;
        if (i >= end)
            return;
        cursor.seek(lengths, i);
        int h = cursor.head(i);
        head = h / p.groups;
        entry = __ldg(p.table + cursor.b * p.table_stride + (i - cursor.first - h * cursor.pages));
    }

    __device__ void start(const AttentionArgs &p, const Lengths &lengths, const Piece &piece, int warp)
    {
        cursor = piece.cursor;
        next = piece.begin + warp;
        end = piece.end;
        entry = head = slot = 0;
        values = false;
        look_up(p, lengths);
#pragma unroll
        for (int i = 0; i < STAGES; i++)
            fill(p, lengths);
    }

    __device__ __forceinline__ void fill(const AttentionArgs &p, const Lengths &lengths)
    {
        if (next >= end) {
            ring.skip();
            return;
        }
        size_t block = (size_t)(uint32_t)__shfl_sync(FULL, entry, in_batch);
        uint32_t h = __shfl_sync(FULL, head, in_batch);
        const PageSource &source = values ? p.v : p.k;
        ring.fill(slot, source.base + block * source.block_stride + h * source.head_stride,
                  values ? V_BYTES : K_BYTES);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (values) {
            next += WARPS;
            if (++in_batch == 32)
                look_up(p, lengths);
        }
        values = !values;
    }
};

} // namespace kvant

#endif
