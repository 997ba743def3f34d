/* index.h - what the kernels of vector search share. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

#include "../../device/index.h"

namespace kvant
{

constexpr int GROUP_PACKS = 4;     /* a warpgroup takes so many packs at once, a warp one */
constexpr int GROUP_VECTORS = 128; /* of these packs */
constexpr uint32_t SHORT_LIST = 4096, MIDDLE_LIST = 8192, LONG_LIST = 16384; /* places */
constexpr size_t READ_BEYOND = 65536; /* bytes behind the last pack that are read */

using Found = kvant_cuda_found;
constexpr uint32_t NO_VECTOR = UINT32_MAX;

/* A search of n_queries queries in rounds. A round takes some groups of packs, and adds to each
 * query's list what may be among its k best; then the list is cut to the k best so far, and the
 * worst of these is the next threshold. */
struct ScanArgs {
    const uint8_t *codes;
    const float *factors, *offsets; /* offsets: NULL for none */
    const uint64_t *ids;            /* NULL: slots */
    size_t pack_bytes;
    uint32_t n_slots, n_groups, n_quads;
    /* of 64 dimensions, even: what is behind the last dimension meets zeros of queries */
    uint32_t n_pieces;
    uint32_t levels[4];
    int bias;

    /* words of 4 numbers: [query / 32][quad][query % 32], with fewer queries in the last 32 */
    const uint32_t *x;
    const int32_t *sums;
    const float *scales, *weights;
    const uint32_t *passes; /* NULL: all slots */
    uint32_t n_queries;

    uint32_t first, end; /* groups of this round, in the order of group_at */
    uint32_t multiplier;
    bool keep_all; /* the first round: lists have a place for each of its vectors */

    uint32_t k, room; /* places in a list: SHORT_LIST or longest_list() */
    Found *lists;
    Found *best;          /* n_queries x k: what select left of the lists */
    uint32_t *counts;     /* of lists; above room: some did not fit */
    float *thresholds;    /* keys below are not among the k best */
    uint64_t *limits;     /* nor is an equal key with a larger id */
    uint32_t *overflowed; /* whether a count was above room */
};

cudaError_t launch_scan(const ScanArgs &args, uint32_t bits, cudaStream_t stream);

/* Cuts the lists to the k best, the best first, and writes them to best, too; counts: what there is
 * of these. */
cudaError_t launch_select(const ScanArgs &args, cudaStream_t stream);

/* LONG_LIST, or MIDDLE_LIST where a thread block has no shared memory for so many places: 128
 * KB. */
uint32_t longest_list();

} // namespace kvant
