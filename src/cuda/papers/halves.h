/* halves.h - the fp16 numbers of a codec in the general form that decoders of tiles read behind its
 * tables. They are a rotation as operands of products (decode_rotated.cuh, direct_tiers.cuh), or
 * codewords (decode_chunks.cuh). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../base/attributes.h"
#include "../general_view.h"

KVANT_BEGIN_C

/* Bytes of these numbers; 0: the codec has none. */
size_t kvant_cuda_halves_bytes(const kvant_general *g);

/* Writes the codewords, 4 numbers each, or a matrix of head_dim x head_dim numbers: a sketch's
 * projection, or both tiers' rotations. Number (i, j) is the part of number i of the rotated row in
 * channel j. For keys of tiers the matrix is transposed. 16 rows and 16
 * columns lie together. Their order is the order in which the lanes of a warp hold two operands B
 * of mma.m16n8k16. */
void kvant_cuda_halves(const kvant_general *g, const void *tables, uint16_t *to);

KVANT_END_C
