/* rope.h - the RoPE that keys come from, read from llama.cpp's graph: frequencies for
 * kvant_tensor_set_rope, and the positions of a batch.
 *
 * Keys that are not RoPE's result as it is (none, concatenated, through another operation) and RoPE
 * of several positions per token (M-RoPE, vision) have none: learning then goes on as without. */
#ifndef KVP_ROPE_H
#define KVP_ROPE_H

#include <kvant/codec.h>
#include <kvant/tensor.h>

#include "kv_tensor.h"

/* The ROPE node whose result the rows of a SET_ROWS node are, whole heads in their order; NULL when
 * there is none. */
const abi_tensor *kvp_rope_of(const abi_tensor *rows, uint32_t head_dim);

/* Radians per position of the node's pairs, as ggml computes them: out has room for
 * KVANT_MAX_HEAD_DIM / 2. Returns their number; 0 where its factors cannot be read. */
uint32_t kvp_rope_frequencies(const abi_tensor *node, float *out);

/* The RoPE of keys; false where there is none. frequencies: room for KVANT_MAX_HEAD_DIM / 2, which
 * the rope points to. */
bool kvp_rope_read(const kvp_kv *kv, const abi_tensor *rows, kvant_rope *rope, float *frequencies);

/* Whether both rotate the same channels by the same angles. How many positions they are for does
 * not count. */
bool kvp_rope_is_same(const kvant_rope *a, const kvant_rope *b);

/* The RoPE of a context shift's node (ops_rope.c), which rotates cached keys by positions and
 * changes nothing else. False: it does more, or other channels turn than the first ones.
 * frequencies: as above. */
bool kvp_rope_of_shift(const kvp_kv *kv, const abi_tensor *node, kvant_rope *rope,
                       float *frequencies);

/* Tells a tensor of keys their RoPE, the other numbers as kvant_rope has them. False: nothing was
 * told, as there is none. */
bool kvp_rope_tell(const kvp_kv *kv, kvant_tensor *tensor, const abi_tensor *rows,
                   uint32_t n_positions, uint32_t n_ranges, bool block_centers);

/* The positions of new keys in the computer's memory, whose tensor is told its RoPE with the first
 * ones; NULL: not known. */
const int32_t *kvp_rope_positions(kvp_kv *kv, const abi_tensor *rows);

#endif /* KVP_ROPE_H */
