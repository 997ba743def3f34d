/* rope.h - the RoPE that has rotated the keys, read from llama.cpp's graph: frequencies for
 * kvant_tensor_set_rope, and the positions of a batch.
 *
 * Some keys have no RoPE in this sense. These are keys that are not exactly the result of a ROPE
 * node (no RoPE, concatenated keys, another operation behind it). Keys with several positions per
 * token (M-RoPE, vision) have none, either. Their transforms are learned without a RoPE. */
#pragma once

#include <kvant/codec.h>
#include <kvant/tensor.h>

#include "kv_tensor.h"
#include "ops.h"

/* The ROPE node whose result is the rows of a SET_ROWS node, as whole heads in their order; NULL
 * when there is none. */
const abi_tensor *kvp_rope_of(const abi_tensor *rows, uint32_t head_dim);

/* Writes the radians per position of the node's pairs, as ggml computes them. out has room for
 * KVANT_MAX_HEAD_DIM / 2 numbers. Returns the number of pairs, or 0 where the node's frequency
 * factors cannot be read. */
uint32_t kvp_rope_frequencies(const abi_tensor *node, float *out);

/* Reads the RoPE of keys; false where there is none. frequencies: room for KVANT_MAX_HEAD_DIM / 2
 * numbers, to which the rope points. */
bool kvp_rope_read(const kvp_kv *kv, const abi_tensor *rows, kvant_rope *rope, float *frequencies);

/* Whether both rotate the same channels by the same angles. Their n_positions may differ. */
bool kvp_rope_is_same(const kvant_rope *a, const kvant_rope *b);

/* Reads the RoPE of a context shift's node (ops_rope.c), which rotates cached keys by a distance
 * and changes nothing else. False when the node does more, or rotates other channels than the first
 * ones. frequencies: as above. */
bool kvp_rope_of_shift(const kvp_kv *kv, const abi_tensor *node, kvant_rope *rope,
                       float *frequencies);

/* The positions of the rows of a SET_ROWS node, in the computer's memory; NULL when they are not
 * known. */
const int32_t *kvp_rope_read_positions(const kvp_compute *compute, const abi_tensor *rows,
                                       uint32_t head_dim);

/* The same for new keys whose tensor learns from positions, else NULL. The first call for a tensor
 * also passes the RoPE to it. */
const int32_t *kvp_rope_positions(const kvp_compute *compute, kvp_kv *kv, const abi_tensor *rows);
