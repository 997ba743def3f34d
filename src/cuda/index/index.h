/* index.h - what the kernels of vector search share. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

#include "../../device/index.h"

namespace kvant
{

constexpr int GROUP_PACKS = 4;        /* a warpgroup takes so many packs at once, a warp one */
constexpr int GROUP_VECTORS = 128;    /* of these packs */
constexpr int MOST_COLUMNS = 128;     /* queries of a thread block */
constexpr size_t READ_BEYOND = 65536; /* bytes that may be read behind the last pack: a pack of 8 bits ends 15 quads early */

using Found = kvant_cuda_found;
constexpr uint32_t NO_VECTOR = UINT32_MAX; /* what a place has before a vector comes: ones */

/* A search of n_queries queries in rounds. A round takes some groups of packs, and adds to each query's list what may be
 * among its k best; then the list is cut to the k best so far, and the worst of these is the next threshold. */
struct ScanArgs {
    const uint8_t *codes;
    const float *factors, *offsets; /* offsets: NULL for none */
    const uint64_t *ids;            /* NULL: slots */
    size_t pack_bytes;
    uint32_t n_slots, n_groups, n_quads, n_pieces;
    uint32_t levels[4];
    int bias;

    const uint32_t *x; /* words of 4 numbers: [query / 32][quad][query % 32], with fewer queries in the last 32 */
    const int32_t *sums;
    const float *scales, *weights;
    const uint32_t *passes; /* NULL: all slots */
    uint32_t n_queries;

    uint32_t first, end; /* groups of this round, in the order of group_at */
    uint32_t multiplier;
    bool keep_all; /* the first round: lists have a place for each of its vectors */

    uint32_t k, room; /* places in a list */
    Found *lists;
    uint32_t *counts;     /* of lists; above room: some did not fit */
    float *thresholds;    /* keys below are not among the k best */
    uint64_t *limits;     /* nor is an equal key with a larger id */
    uint32_t *overflowed; /* set when a count was above room */
};

cudaError_t launch_scan(const ScanArgs &args, uint32_t bits, cudaStream_t stream);

/* Cuts the lists to the k best, the best first; counts: what there is of these. */
cudaError_t launch_select(const ScanArgs &args, cudaStream_t stream);

} // namespace kvant
