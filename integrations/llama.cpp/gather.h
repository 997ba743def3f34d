/* gather.h - learns from the prompts of a run: sums over keys, values and queries, of which a
 * calibration for the next run is made (learnt.h).
 *
 * Every second token of a prompt counts, a repeated one up to 64 times. 1024 tokens are enough for a
 * calibration, which a thread of low priority makes; when a context ends, 512. Tokens that are
 * decoded in small batches are not looked at. NULL gathers nothing. */
#ifndef KVP_GATHER_H
#define KVP_GATHER_H

#include "kv_tensor.h"
#include "learnt.h"

typedef struct kvp_gather kvp_gather;

/* NULL without memory. */
kvp_gather *kvp_gather_create(const kvp_learnt *learnt);

/* Whether rows of a batch of n tokens would be looked at: else kvp_gather_rows needs none. */
bool kvp_gather_wants(const kvp_gather *gather, size_t n);

/* New rows of a layer: n of its keys and, of the same tokens, n of its values. */
void kvp_gather_rows(kvp_gather *gather, const kvp_rows *keys, const kvp_rows *values, size_t n);

/* Queries of the same tokens: ggml's tensor of the attention node that reads these keys. */
void kvp_gather_queries(kvp_gather *gather, const kvp_kv *keys, const abi_tensor *q);

/* keep: makes a calibration first, if there was enough. Waits some seconds at most. */
void kvp_gather_free(kvp_gather *gather, bool keep);

#endif /* KVP_GATHER_H */
