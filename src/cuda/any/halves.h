/* halves.h - fp16 numbers of a codec in the general form, which decoders of tiles read behind its
 * tables: a rotation as operands of products (decode_rotated.cuh, direct_tiers.cuh), or codewords
 * (decode_chunks.cuh). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../base/attributes.h"
#include "../general_view.h"

KVANT_BEGIN_C

/* 0: the codec has none. */
size_t kvant_cuda_halves_bytes(const kvant_general *g);

/* Codewords, 4 numbers each. Or head_dim x head_dim numbers, of a sketch's projection or of both
 * tiers' rotations: number (i, j) is what number i of the rotated row adds to channel j, of some
 * keys (kvant_cuda_turns_tiers) the other way round. 16 rows and 16 columns lie together, as lanes
 * of a warp hold two operands B of mma.m16n8k16. */
void kvant_cuda_halves(const kvant_general *g, const void *tables, uint16_t *to);

KVANT_END_C
