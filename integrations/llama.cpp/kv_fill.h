/* kv_fill.h - the memory of a compressed cache while only some of its cells are written.
 *
 * `kvant inspect` prints these sizes for a quarter, a half and all of a context. The size with all
 * cells written is the size of kv_size.h. */
#pragma once

#include "kv_size.h"

/* The plug-in's kvant_kv_size_at: the sum over all caches that are alive, when each sequence has
 * `tokens` tokens. The size counts the rows of these tokens. A GPU's pages are reserved at the
 * start, so they count as a whole. The number *in_place is a limit in tokens. Up to this limit, all
 * caches are llama.cpp's own f16 (KVANT_EXACT). Returns false where kvp_kv_size_fn returns
 * false. Also returns false when a context in the computer's memory has computed something, because
 * the question would make its tensors forget how RoPE rotates their keys. */
typedef bool kvp_kv_size_at_fn(bool on_gpu, double tokens, kvp_kv_size *size, double *in_place);
