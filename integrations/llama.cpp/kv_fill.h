/* kv_fill.h - what a compressed cache takes while only some of its cells are written.
 *
 * `kvant inspect` prints these sums for a quarter, a half and all of a context. With all cells
 * written they are those of kv_size.h, from which they follow. */
#ifndef KVP_KV_FILL_H
#define KVP_KV_FILL_H

#include "kv_size.h"

/* The plug-in's kvant_kv_size_at: the sum over all caches that are alive, when each sequence has
 * so many tokens. *size has the rows of these tokens alone; memory of a GPU is all there from the
 * beginning. *in_place: tokens up to which a GPU's cache is llama.cpp's own f16 (KVANT_EXACT).
 * False as kvp_kv_size_fn, and once a context in the computer's memory has computed something:
 * the question would disturb what it learns. */
typedef bool kvp_kv_size_at_fn(bool on_gpu, double tokens, kvp_kv_size *size, double *in_place);

#endif /* KVP_KV_FILL_H */
