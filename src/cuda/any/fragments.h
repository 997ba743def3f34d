/* fragments.h - a rotation as operands of products, for decode_rotated.cuh. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../base/attributes.h"
#include "../general_view.h"

KVANT_BEGIN_C

/* Of the sketch's projection, or of both tiers' rotations. 0: the codec has none, or tiles of products do not fit. */
size_t kvant_cuda_fragment_bytes(const kvant_general *g);

/* head_dim x head_dim halves: number (i, j) is what number i of the rotated row adds to channel j. 16 rows and 16
 * columns lie together, as lanes of a warp hold two operands B of mma.m16n8k16. */
void kvant_cuda_fragments(const kvant_general *g, const void *tables, uint16_t *to);

KVANT_END_C
