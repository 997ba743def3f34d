/* rotation.h - a random rotation of any dimension in O(d log d), with equal bits on every machine
 * (src/index/format.md).
 *
 * A round applies random signs, permutes the numbers at random and applies Hadamard transforms to
 * blocks. The lengths of the blocks are powers of two: the binary digits of d, the highest first.
 * Within two rounds a number reaches every block in proportion to the block's size. */
#pragma once

#include <kvant/kvant.h>

#include "../kernels/kernels.h"

#define KVANT_ROTATION_ROUNDS 3u /* two rounds reach every block; format.md fixes three */

typedef struct kvant_rotation {
    uint32_t dim;
    float *signs;     /* rounds x dim, each 1 or -1 */
    uint16_t *places; /* rounds x dim: the index from which each number comes */
} kvant_rotation;

/* dim: 1 to 65536. KVANT_ERR_MEMORY. */
kvant_status kvant_rotation_create(kvant_rotation *rotation, uint32_t dim, uint64_t seed);
void kvant_rotation_destroy(kvant_rotation *rotation);

/* x = R x, or R^T x, in place; scratch: dim numbers. */
void kvant_rotation_apply(const kvant_rotation *rotation, const kvant_kernels *kernels, float *x,
                          float *scratch);
void kvant_rotation_undo(const kvant_rotation *rotation, const kvant_kernels *kernels, float *x,
                         float *scratch);
