/* index.h - the declarations that the kernels of vector search share. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

#include "../../device/index.h"

namespace kvant
{

constexpr int GROUP_PACKS = 4;     /* packs that a warpgroup takes at once; a warp takes one */
constexpr int GROUP_VECTORS = 128; /* vectors of these packs */
/* places of the three kinds of lists */
constexpr uint32_t SHORT_LIST = 4096, MIDDLE_LIST = 8192, LONG_LIST = 16384;
constexpr size_t READ_BEYOND = 65536; /* bytes behind the last pack that kernels read */

using Found = kvant_cuda_found;
constexpr uint32_t NO_VECTOR = UINT32_MAX;

/* A search of n_queries queries, in rounds. A round scans some groups of packs and adds vectors to
 * each query's list that may be among its k best. Then the list is cut to the k best so far, and
 * the key of the worst of these is the next threshold. */
struct ScanArgs {
    const uint8_t *codes;
    const float *factors, *offsets; /* offsets: NULL for none */
    const uint64_t *ids;            /* NULL: ids are slots */
    size_t pack_bytes;
    uint32_t n_slots, n_groups, n_quads;
    /* pieces of 64 dimensions, an even number; behind the last dimension queries have zeros */
    uint32_t n_pieces;
    uint32_t levels[4];
    int bias;

    /* words of 4 numbers: [query / 32][quad][query % 32]; the last 32 may have fewer queries */
    const uint32_t *x;
    const int32_t *sums;
    const float *scales, *weights;
    const uint32_t *passes; /* NULL: all slots */
    uint32_t n_queries;

    uint32_t first, end; /* groups of this round, in the order that group_at gives */
    uint32_t multiplier;
    bool keep_all; /* in the first round lists have a place for each of its vectors */

    uint32_t k, room; /* places in a list: SHORT_LIST or longest_list() */
    Found *lists;
    Found *best;          /* n_queries x k: the vectors that select left in the lists */
    uint32_t *counts;     /* entries of lists; above room: some did not fit */
    float *thresholds;    /* vectors with smaller keys are not among the k best */
    uint64_t *limits;     /* of vectors with an equal key, those with a larger id are not, either */
    uint32_t *overflowed; /* whether a count was above room */
};

cudaError_t launch_scan(const ScanArgs &args, uint32_t bits, cudaStream_t stream);

/* Cuts the lists to the k best, sorts them, and writes them to best, too. counts: the number of
 * vectors in each list. */
cudaError_t launch_select(const ScanArgs &args, cudaStream_t stream);

/* LONG_LIST, or MIDDLE_LIST if the shared memory of a thread block has less than the 128 KB that
 * LONG_LIST needs. */
uint32_t longest_list();

} // namespace kvant
