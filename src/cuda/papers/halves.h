/* halves.h - the rotation of tiers as fp16 operands of products. direct_tiers.cuh reads it behind a
 * codec's tables. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../base/attributes.h"
#include "../general_view.h"

KVANT_BEGIN_C

/* Bytes of these numbers; 0: the codec has none. */
size_t kvant_cuda_halves_bytes(const kvant_general *g);

/* Writes the matrix of head_dim x head_dim numbers of both tiers' rotations. Number (i, j) is the
 * part of number i of the rotated row in channel j. For keys the matrix is transposed. 16 rows and
 * 16 columns lie together. Their order is the order in which the lanes of a warp hold two operands
 * B of mma.m16n8k16. */
void kvant_cuda_halves(const kvant_general *g, const void *tables, uint16_t *to);

KVANT_END_C
